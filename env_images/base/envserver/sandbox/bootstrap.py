"""Creates a sandbox: its room, its own user namespace, bubblewrap in it, and a supervisor that enters.

All except the rooms of layers runs in a fork of the spawner. The order matters: each step drops rights that the next
step does not need.
"""

import contextlib
import json
import os
import resource
import select
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from envserver.sandbox import kernel

OWN_PROCESSES = 3
"""The supervisor, bubblewrap's monitor and the init, which also count against RLIMIT_NPROC."""
READY_S = 20.0
"""Seconds for the opening. A machine under full load needs well below a second."""
NAMESPACES = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
WATCH_LIMITS = {"user/max_inotify_instances": b"16", "user/max_inotify_watches": b"8192"}
"""Limits below /proc/sys of a user namespace. The machine's limits count all sandboxes together."""
KERNEL_LIMITS = {
    "kernel/msgmni": b"64",
    "kernel/shmmni": b"64",
    "kernel/sem": b"250 16000 100 64",
    "net/ipv4/tcp_rmem": b"4096 131072 262144",
    "net/ipv4/tcp_wmem": b"4096 16384 262144",
    **WATCH_LIMITS,
    "user/max_user_namespaces": b"0",
}
"""Limits below /proc/sys of the sandbox's own namespaces. Message queues and semaphores are kernel memory that no
watchdog counts: 1 MiB each by these limits. The kernel's defaults allow 500 MiB and 64 GiB. The buffers of a TCP socket
have the size of other sockets' buffers; the default is 10 MiB. Only in a new user namespace could a process inside have
the capability that all other new namespaces need."""
UNREADABLE = "/proc/tty/driver"
"""The only folder of a fresh /proc that only the machine's own root may list. It would make `find /` end with status
1."""
INIT = ("/usr/bin/env", "--ignore-signal=CHLD", "/bin/cat")
"""The init. It blocks on a pipe that the supervisor holds. It is ready once it has echoed one byte, and ends with the
supervisor. It ignores SIGCHLD, so that the kernel reaps orphans. No signal from inside reaches a PID 1. Ignoring
SIGCHLD before bubblewrap starts is not enough: 0.8 passes it on, 0.12 does not."""
_BYTES_PER_INODE = 4_096
_SECOND_NS = 1_000_000_000
_TICK_NS = 20_000_000
"""Tolerance in nanoseconds. The kernel's clock for file times stands still between two ticks, so a time may be late by
one tick."""


@dataclass(frozen=True)
class Dates:
    """Rules for a layer's file times, so that a build in another worker creates the same times.

    A time during the build becomes *moment*. An earlier time that the build set stays. A time in whole seconds counts
    as that whole second, because some programs, such as useradd, cut the fraction off. All values are nanoseconds.
    """

    moment: int
    began: int
    """Start of the build."""
    keeps_seconds: bool = False
    """Whether to add the whole seconds since *began*, for a build that sleeps to distinguish files by their times."""

    def of(self, time: int) -> int:
        """Return the new value of *time*."""
        since = time - self.began
        if since < -(_TICK_NS if time % _SECOND_NS else _SECOND_NS):
            return time
        return self.moment + (max(0, since // _SECOND_NS) * _SECOND_NS if self.keeps_seconds else 0)


@dataclass(frozen=True)
class Room:
    """The folder of a sandbox or a layer, with its mounts: a tmpfs of its size, and the root in it.

    Paths are relative to the work folder, and short because the agent can read them in /proc/mounts.
    """

    name: str
    lower: str
    """The folders below the root, the uppermost first, as overlay expects."""
    disk_bytes: int

    @property
    def root(self) -> str:
        return f"{self.name}/r"

    @property
    def upper(self) -> str:
        """The folder with the changes to the root."""
        return f"{self.name}/u"

    def mount(self) -> None:
        """Mount the tmpfs and the root in the caller's mount namespace. The folder must exist."""
        inodes = max(1_024, self.disk_bytes // _BYTES_PER_INODE)
        size = f"size={self.disk_bytes},nr_inodes={inodes},mode=0755"
        kernel.mount("box", self.name, "tmpfs", kernel.MS_NODEV, size)
        for part in (self.upper, f"{self.name}/w", self.root):
            os.mkdir(part, 0o755)
        parts = f"lowerdir={self.lower},upperdir={self.upper},workdir={self.name}/w,userxattr"
        kernel.mount("box", self.root, "overlay", kernel.MS_NODEV, parts)

    def freeze(self, dates: Dates | None) -> None:
        """Make the room read-only: its content becomes a layer, with times from *dates*."""
        kernel.unmount(self.root)
        if dates is not None:
            self._date(dates)
        kernel.mount("box", self.name, "tmpfs", kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NODEV)

    def used_bytes(self) -> int:
        """Return the bytes of memory that the room's files take."""
        used = os.statvfs(self.name)
        return (used.f_blocks - used.f_bfree) * used.f_frsize

    def _date(self, dates: Dates) -> None:
        for folder, folders, files in os.walk(self.upper):
            for name in (".", *folders, *files):
                path = f"{folder}/{name}"
                with contextlib.suppress(OSError):  # the path is too long
                    found = os.lstat(path)
                    times = dates.of(found.st_atime_ns), dates.of(found.st_mtime_ns)
                    os.utime(path, ns=times, follow_symlinks=False)

    def unmount(self) -> None:
        for target in (self.root, self.name):
            with contextlib.suppress(OSError):  # it may never have been mounted
                kernel.unmount(target)


class BirthError(Exception):
    """The sandbox could not be created. The text comes from bubblewrap or the kernel."""


@dataclass(frozen=True)
class Born:
    monitor: int
    """Pid of bubblewrap, which waits for the init."""
    init: int
    """Pidfd of the sandbox's PID 1."""
    lifeline: int
    """Pipe whose closing ends the init."""


def enter_user_namespace(owner: int | None, *, pids: int, sync: int) -> None:
    """Create and enter a user namespace owned by uid *owner*, have it mapped over *sync*, and become root in it.

    RLIMIT_NPROC counts per user and user namespace. All users of a namespace also count together for its owner, against
    the limit at the namespace's creation. A separate owner per sandbox therefore makes it a limit of the whole sandbox,
    whichever users the agent becomes.
    """
    most = pids + OWN_PROCESSES
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    if owner is not None:
        os.setresgid(owner, owner, owner)
        os.setresuid(owner, owner, owner)
    kernel.unshare(kernel.CLONE_NEWUSER)
    # Otherwise /proc/PID/uid_map belongs to the machine's root and the spawner may not write it.
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    # All processes inside inherit this: the kernel kills them before the server.
    kernel.write("/proc/self/oom_score_adj", b"1000")
    os.write(sync, b"u")
    if os.read(sync, 1) != b"m":
        raise BirthError("the user namespace could not be mapped")
    if owner is not None:
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)


def arguments(root: str, *, memory_bytes: int, calls: int, info: int) -> list[str]:
    """Return bubblewrap's arguments. They go through a file, so that its command line shows nothing."""
    return [
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *("--hostname", "box", "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"),
        *("--cap-drop", "ALL", "--seccomp", str(calls), "--info-fd", str(info)),
        *("--bind", root, "/", "--proc", "/proc", "--dev", "/dev"),
        # Root inside may change the limits of its own IPC namespace, as long as it can write here.
        *("--ro-bind", "/proc/sys", "/proc/sys"),
        # The machine's command line.
        *("--dev-bind", "/dev/null", "/proc/cmdline"),
        # bubblewrap's /dev is a tmpfs without a size limit, which root could fill. Its parts are separate mounts.
        *("--perms", "1777", "--size", str(memory_bytes), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *(("--tmpfs", UNREADABLE, "--remount-ro", UNREADABLE) if os.path.isdir(UNREADABLE) else ()),
        *("--chdir", "/"),
    ]


def start_init(root: str, *, program: str, memory_bytes: int, calls: bytes) -> Born:
    """Start the sandbox's init in the new root *root* under the bubblewrap at *program*.

    Raises:
        BirthError: Bubblewrap's own error message.
    """
    life_read, lifeline = os.pipe2(os.O_CLOEXEC)
    echo, echo_write = os.pipe2(os.O_CLOEXEC)
    said, said_write = os.pipe2(os.O_CLOEXEC)
    info, info_write = os.pipe2(os.O_CLOEXEC)
    calls_fd = _held(calls)
    words = arguments(root, memory_bytes=memory_bytes, calls=calls_fd, info=info_write)
    words_fd = _held(b"".join(word.encode() + b"\0" for word in words))
    os.write(lifeline, b".")
    for fd in (calls_fd, words_fd, info_write):
        os.set_inheritable(fd, True)
    # No fork, because it would copy the interpreter's pages, which costs as much as all other steps.
    monitor = os.posix_spawn(
        program,
        ["init", "--args", str(words_fd), "--", *INIT],
        {},
        file_actions=[(os.POSIX_SPAWN_DUP2, fd, to) for to, fd in enumerate((life_read, echo_write, said_write))],
        setsigdef=[signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ],
    )
    for fd in (life_read, echo_write, said_write, info_write, calls_fd, words_fd):
        os.close(fd)
    try:
        if not _echoed(echo):
            raise BirthError(_words(said) or f"{program} or the box's {INIT[0]} or {INIT[-1]} did not start")
        pid = int(json.loads(os.read(info, 65_536))["child-pid"])
        return Born(monitor, os.pidfd_open(pid), lifeline)
    finally:
        for fd in (echo, said, info):
            os.close(fd)


def set_limits(limits: Mapping[str, bytes]) -> None:
    """Write *limits* below /proc/sys, which shows the values of the caller's namespaces."""
    for name, value in limits.items():
        with contextlib.suppress(FileNotFoundError):  # the kernel was built without it
            kernel.write(f"/proc/sys/{name}", value)


def enter(born: Born) -> None:
    """Enter the sandbox's namespaces and set their limits.

    Its PID namespace applies to children only, which hides the caller inside.
    """
    with contextlib.suppress(OSError):  # the machine's own: bubblewrap could not create another
        kernel.setns(born.init, kernel.CLONE_NEWCGROUP)
    kernel.setns(born.init, kernel.CLONE_NEWIPC | kernel.CLONE_NEWNET)
    set_limits(KERNEL_LIMITS)
    kernel.setns(born.init, NAMESPACES & ~(kernel.CLONE_NEWIPC | kernel.CLONE_NEWNET))
    os.chdir("/")


def _held(content: bytes) -> int:
    fd = os.memfd_create("options", os.MFD_CLOEXEC)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _echoed(echo: int) -> bool:
    ready, _, _ = select.select([echo], [], [], READY_S)
    return bool(ready) and os.read(echo, 1) == b"."


def _words(said: int) -> str:
    ready, _, _ = select.select([said], [], [], 1.0)
    return os.read(said, 2048).decode(errors="replace").strip() if ready else ""
