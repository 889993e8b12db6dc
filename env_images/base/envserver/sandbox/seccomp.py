"""The agent's system call filter as a classic BPF program, built without libseccomp.

It refuses calls that could widen a sandbox or escape its accounting: mounts, namespaces, keyrings, BPF, ptrace,
io_uring, file leases, and memory that belongs to no process (``memfd_create``, shared anonymous mappings). A refused
call fails with an errno, as an agent's tools expect from an old kernel. Nothing is killed. The container's own profile
applies in addition.
"""

import errno
import platform
import struct

_LD, _JEQ, _JSET, _JGE, _RET = 0x20, 0x15, 0x45, 0x35, 0x06  # BPF_LD|W|ABS, BPF_JMP|.., BPF_RET|K
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16  # struct seccomp_data

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_* of linux/audit.h."""
_X32_BIT = 0x40000000

_NAMESPACES = 0x7E020000 | 0x80
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET and NEWTIME."""
_PARENT = 0x8000
"""CLONE_PARENT. A program's sibling would be a child of the supervisor, which does not know it and never reaps it."""
_MAP_SHARED, _MAP_ANONYMOUS = 0x01, 0x20
"""Bits of the flags of mmap; MAP_SHARED_VALIDATE includes the first. A page of such a mapping stays in memory while any
page of the mapping is mapped, so a program can hide it from all numbers that /proc shows."""
_SET_LEASE = 1024
"""F_SETLEASE. An exec of a leased file waits for up to 45 s, also the exec of the supervisor's fork."""
_TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which insert text into a terminal's input."""
FAMILIES = (1, 2, 10)
"""Unix, IPv4 and IPv6. Network namespaces do not contain other families, such as vsock. Netlink has a verdict of its
own."""
_NETLINK, _ROUTE = 16, 0
"""AF_NETLINK and NETLINK_ROUTE, its only protocol inside. It lists addresses and routes."""

# (x86_64, aarch64) of asm/unistd_64.h and asm-generic/unistd.h. None: the call does not exist.
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "mbind": (237, 235),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "lookup_dcookie": (212, 18),
    "vhangup": (153, 58),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
}
# These calls fail with "no such call", so that programs use older calls: clone, files, read and write.
ABSENT: dict[str, tuple[int | None, int | None]] = {
    "clone3": (435, 435),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
}
_CLONE, _SOCKET, _SOCKETPAIR, _IOCTL = (56, 220), (41, 198), (53, 199), (16, 29)
_MMAP, _FCNTL = (9, 222), (72, 25)


def _argument(number: int) -> bytes:
    """Load the lower half of the call's argument *number*. Both architectures are little-endian."""
    return _op(_LD, _ARGUMENTS_AT + 8 * number)


def _op(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, k)


def _refuse(number: int) -> bytes:
    return _op(_RET, _ERRNO | number)


def _numbers(table: dict[str, tuple[int | None, int | None]], column: int) -> list[int]:
    return sorted(number for row in table.values() if (number := row[column]) is not None)


def _answer(numbers: list[int], error: int) -> list[bytes]:
    return [part for number in numbers for part in (_op(_JEQ, number, 0, 1), _refuse(error))]


def _on_call(number: int, block: list[bytes]) -> list[bytes]:
    """Run *block*, which ends in a verdict on every path, if the call is *number*."""
    return [_op(_JEQ, number, 0, len(block)), *block]


def _judged_by_arguments(column: int) -> list[bytes]:
    """Return the verdicts on calls whose arguments decide."""
    families = [part for family in FAMILIES for part in (_op(_JEQ, family, 0, 1), _op(_RET, _ALLOW))]
    route = [_argument(2), _op(_JEQ, _ROUTE, 0, 1), _op(_RET, _ALLOW), _refuse(errno.EPROTONOSUPPORT)]
    sockets = [
        _argument(0),
        _op(_JEQ, _NETLINK, 0, len(route)),
        *route,
        *families,
        _refuse(errno.EAFNOSUPPORT),
    ]
    shared = [_op(_JSET, _MAP_ANONYMOUS, 1, 0), _op(_RET, _ALLOW), _op(_JSET, _MAP_SHARED, 0, 1)]
    return [
        *_on_call(
            _CLONE[column],
            [_argument(0), _op(_JSET, _NAMESPACES | _PARENT, 0, 1), _refuse(errno.EPERM), _op(_RET, _ALLOW)],
        ),
        *_on_call(_SOCKET[column], sockets),
        *_on_call(_SOCKETPAIR[column], sockets),
        *_on_call(_IOCTL[column], [_argument(1), *_answer(list(_TERMINAL_INPUT), errno.EPERM), _op(_RET, _ALLOW)]),
        *_on_call(_FCNTL[column], [_argument(1), *_answer([_SET_LEASE], errno.EINVAL), _op(_RET, _ALLOW)]),
        *_on_call(_MMAP[column], [_argument(3), *shared, _refuse(errno.EPERM), _op(_RET, _ALLOW)]),
    ]


def program(machine: str | None = None) -> bytes:
    """Return the filter for *machine* (``platform.machine()``) as an array of ``struct sock_filter``, 8 bytes each.

    Raises:
        ValueError: There is no table for that machine.
    """
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise ValueError(f"no system call table for {machine}: sandboxes need one of {', '.join(ARCHITECTURES)}")
    column = list(ARCHITECTURES).index(machine)
    parts = [
        _op(_LD, _ARCH_AT),
        # A 32-bit call has other numbers, which do not match the tables below.
        _op(_JEQ, ARCHITECTURES[machine], 1, 0),
        _refuse(errno.ENOSYS),
        _op(_LD, _NUMBER_AT),
        _op(_JGE, _X32_BIT, 0, 1),
        _refuse(errno.ENOSYS),
        *_answer(_numbers(REFUSED, column), errno.EPERM),
        *_answer(_numbers(ABSENT, column), errno.ENOSYS),
        *_judged_by_arguments(column),
        _op(_RET, _ALLOW),
    ]
    return b"".join(parts)
