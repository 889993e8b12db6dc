"""System calls without a function in Python 3.11.

The spawner imports this module, so it imports only small modules of the standard library. Every function raises
``OSError`` with the kernel's error number.
"""

import ctypes
import os
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NODEV, MS_REMOUNT = 0x1, 0x4, 0x20
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 15, 22, 24
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
SECCOMP_MODE_FILTER = 2

_CAPABILITY_VERSION = 0x20080522
"""Version of the header of capset: two sets of three 32-bit numbers follow."""
_SYS_OPENAT2 = 437
"""Number of the call on every architecture, as for all calls since 2019."""
RESOLVE_NO_MAGICLINKS, RESOLVE_IN_ROOT = 0x02, 0x10

_SYS_RT_SIGACTION, _SYS_PIVOT_ROOT = {"x86_64": (13, 155)}.get(os.uname().machine, (134, 41))
"""Numbers of the calls: 134 and 41 in the kernel's generic table, which every younger architecture uses."""
_SIGACTION = struct.Struct("QQQQ")
"""Handler, flags, restorer and mask. The younger architectures have no restorer, and the mask is the third field."""
_SIG_DFL, _SIG_IGN = 0, 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
_libc.prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)
_libc.syscall.restype = ctypes.c_long


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), "unshare")


def setns(fd: int, flags: int) -> None:
    """Enter the namespaces *flags* of the process behind the pidfd *fd*."""
    _checked(_libc.setns(fd, flags), "setns")


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    done = _libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode())
    _checked(done, f"mount {kind or 'flags'}")


def unmount(target: str) -> None:
    """Detach *target* immediately. The file system disappears with its last user."""
    _checked(_libc.umount2(target.encode(), MNT_DETACH), "umount")


def replace_root() -> None:
    """Make the working directory, which has to be a mount of its own, the caller's root. Detach the old root."""
    done = _libc.syscall(ctypes.c_long(_SYS_PIVOT_ROOT), ctypes.c_char_p(b"."), ctypes.c_char_p(b"."))
    _checked(done, "pivot_root")
    unmount(".")  # the old root now lies over the new one
    os.chdir("/")


def prctl(option: int, first: int = 0, second: int = 0) -> None:
    _checked(_libc.prctl(option, first, second, 0, 0), f"prctl {option}")


def drop_capabilities() -> None:
    """Drop the calling thread's ambient, effective, permitted and inheritable capabilities."""
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    _checked(_libc.capset(struct.pack("Ii", _CAPABILITY_VERSION, 0), bytes(24)), "capset")


def set_name(name: str) -> None:
    """Set the name in ``/proc/PID/comm``, at most 15 characters."""
    text = ctypes.create_string_buffer(name.encode())
    prctl(PR_SET_NAME, ctypes.addressof(text))


def filter_system_calls(program: bytes) -> None:
    """Install *program*, an array of ``struct sock_filter``, for this process and its descendants."""
    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code)))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(header))


def write(path: str, data: bytes) -> None:
    """Write *data* to the file *path* in one call, as files in /proc require."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def open_inside(path: str, flags: int, mode: int = 0) -> int:
    """Open *path* below the caller's root without following ``/proc/PID/fd`` and similar links.

    Those links lead to objects instead of paths. They are the only links that could leave a mount namespace.
    """
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, mode, RESOLVE_NO_MAGICLINKS | RESOLVE_IN_ROOT)
    buffer = ctypes.create_string_buffer(how, len(how))
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    try:
        done = _libc.syscall(
            ctypes.c_long(_SYS_OPENAT2), ctypes.c_int(root), ctypes.c_char_p(path.encode()), buffer, ctypes.c_size_t(24)
        )
        return _checked(done, "open")
    finally:
        os.close(root)


def stop_ignoring(number: int) -> None:
    """Reset an ignored signal to its default action, also for the two signals that the C library reserves.

    The C library's ``sigaction`` refuses those two, so this calls the kernel directly. A signal with a handler keeps
    it.
    """
    if _action(number)[0] == _SIG_IGN:
        _action(number, _SIGACTION.pack(_SIG_DFL, 0, 0, 0))


def _action(number: int, wanted: bytes | None = None) -> tuple[int, ...]:
    was = ctypes.create_string_buffer(_SIGACTION.size)
    new = None if wanted is None else ctypes.create_string_buffer(wanted, len(wanted))
    done = _libc.syscall(ctypes.c_long(_SYS_RT_SIGACTION), ctypes.c_int(number), new, was, ctypes.c_size_t(8))
    _checked(done, f"sigaction {number}")
    return _SIGACTION.unpack(was.raw)


def hide_command_line() -> None:
    """Overwrite this process's arguments, which ``/proc/PID/cmdline`` shows to every process that sees this one.

    Children inherit the blank. ``prctl(PR_SET_MM)`` would need a capability over the machine.
    """
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end: fields 48, 49 of proc(5), counted from field 3
    ctypes.memset(start, 0, end - start)
