#!/usr/bin/env -S python3 -IS
"""Starts Chromium as a user other than the server's, with minimal rights; Playwright's "executable".

Playwright's driver runs it as the server's user, which has the capabilities SETUID and SETGID only for this purpose.
Chromium starts without capabilities and without a way to get them. It has no variable of the server and no descriptor
except Playwright's pipes. It has no system call that opens a socket, so it reaches neither a loopback port nor the
server's Unix socket, even if it is taken over. Playwright drives it through a pipe; it has no debugging port. Where the
kernel has Landlock (since 5.13), Chromium sees only the system's files and its profile, not the server's socket folder.

Differences: Chromium's own sandbox is off. It needs user namespaces, which the engine's profile refuses, or a set-id
program, which no-new-privileges refuses. The barriers are this user, this filter, the container and its single use.
"""

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import sys
import tempfile

CHROMIUM = "/usr/lib/chromium/chromium-headless-shell"
"""The browser itself, not Debian's wrapper, which is a shell script that reads /etc and the user's home."""
USER = 10002
OOM_SCORE = 700
"""The OOM score: when memory ends, the kernel kills the browser before the server (0) or the driver."""
FIRST_OTHER_FD = 5
"""The first descriptor to close. Playwright's are standard input, output, error, and two pipes to Chromium."""
MAX_FILE_BYTES = 64 * 2**20
"""The maximum size of a file that the browser writes."""

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, _SECCOMP_MODE_FILTER = 47, 4, 2
_CAPABILITY_VERSION_3 = 0x20080522

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # on all architectures
_LANDLOCK_VERSION, _LANDLOCK_BENEATH = 1, 1
# LANDLOCK_ACCESS_FS_* of linux/landlock.h: the first 13 are of version 1, REFER of 2, TRUNCATE of 3, IOCTL_DEV of 5.
_READ_FILE, _READ_DIR, _EXECUTE, _WRITE_FILE, _IOCTL_DEV = 1 << 2, 1 << 3, 1 << 0, 1 << 1, 1 << 15
_RIGHTS_OF_VERSION = ((5, 1 << 16), (3, 1 << 15), (2, 1 << 14), (1, 1 << 13))
READ = _READ_FILE | _READ_DIR | _EXECUTE
READABLE = ("/usr", "/lib", "/lib64", "/bin", "/etc", "/proc", "/sys")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

# AUDIT_ARCH_* of linux/audit.h; numbers of asm/unistd_64.h and asm-generic/unistd.h.
FILTERS = {
    "x86_64": (0xC000003E, {"socket": 41, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311}),
    "aarch64": (0xC00000B7, {"socket": 198, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271}),
}


def socket_filter(machine: str) -> bytes:
    """Return a BPF program that refuses sockets (except socket pairs) and access to other processes."""
    architecture, numbers = FILTERS[machine]
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ, BPF_JMP|JGE, BPF_RET|K
    refused, allowed = 0x00050000, 0x7FFF0000
    parts = [
        struct.pack("HBBI", load, 0, 0, 4),
        struct.pack("HBBI", equal, 1, 0, architecture),  # a 32-bit call has other numbers
        struct.pack("HBBI", answer, 0, 0, refused | errno.ENOSYS),
        struct.pack("HBBI", load, 0, 0, 0),
        struct.pack("HBBI", at_least, 0, 1, 0x40000000),  # x32
        struct.pack("HBBI", answer, 0, 0, refused | errno.ENOSYS),
    ]
    for name, number in numbers.items():
        error = errno.EAFNOSUPPORT if name == "socket" else errno.EPERM
        parts.append(struct.pack("HBBI", equal, 0, 1, number))
        parts.append(struct.pack("HBBI", answer, 0, 0, refused | error))
    parts.append(struct.pack("HBBI", answer, 0, 0, allowed))
    return b"".join(parts)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def drop(user: int) -> None:
    """Become *user* permanently, in a process that ends with its parent.

    Raises:
        OSError: This is not possible; the caller must not continue.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    _check(libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "clearing ambient capabilities")
    header, nothing = struct.pack("Ii", _CAPABILITY_VERSION_3, 0), bytes(24)
    _check(libc.capset(header, nothing), "giving up capabilities")
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "forbidding new privileges")
    _check(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "asking to end with the driver")
    code = socket_filter(platform.machine())
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    _check(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0), "filtering system calls")


def confine(profile: str) -> bool:
    """Allow reads of the system's files and writes to *profile* only; return False if the kernel has no Landlock.

    Raises:
        OSError: The kernel has Landlock and refuses; the caller must not continue.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), _LANDLOCK_VERSION)
    if version < 1:
        return False
    handled = next(limit for least, limit in _RIGHTS_OF_VERSION if version >= least) - 1
    rules = bytes(struct.pack("Q", handled))
    ruleset = libc.syscall(_LANDLOCK_CREATE, rules, ctypes.c_size_t(len(rules)), 0)
    _check(min(ruleset, 0), "making a Landlock ruleset")
    allowed = [(path, READ) for path in READABLE]
    allowed += [(path, _READ_FILE | _WRITE_FILE | _IOCTL_DEV) for path in DEVICES]
    for path, rights in (*allowed, (profile, handled)):
        if not os.path.exists(path):
            continue
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", rights & handled, folder)
        _check(libc.syscall(_LANDLOCK_ADD, ruleset, _LANDLOCK_BENEATH, rule, 0), f"allowing {path}")
        os.close(folder)
    _check(libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0), "confining to files")
    os.close(ruleset)
    return True


def arguments(given: list[str], profile: str) -> list[str]:
    """Return Chromium's command line: Playwright's *given* arguments, with a *profile* that its user can write."""
    kept = [argument for argument in given if not argument.startswith(("--user-data-dir", "--remote-debugging-port"))]
    return [CHROMIUM, f"--user-data-dir={profile}", *kept]


def main() -> None:
    os.closerange(FIRST_OTHER_FD, 4096)
    # Before the change of user: after it, this folder of /proc belongs to root until Chromium starts.
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write(str(OOM_SCORE))
    try:
        drop(USER)
    except OSError as error:
        sys.exit(f"browser_launch: cannot become user {USER} (capabilities SETUID and SETGID): {error}")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    os.umask(0o077)
    profile = tempfile.mkdtemp(prefix="browser-", dir="/tmp")
    os.chdir(profile)
    if not confine(profile):
        print("browser_launch: this kernel has no Landlock: files are kept by their modes alone", file=sys.stderr)
    environment = {"HOME": profile, "TMPDIR": profile, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "TZ": "UTC"}
    os.execve(CHROMIUM, arguments(sys.argv[1:], profile), environment)


if __name__ == "__main__":
    main()
