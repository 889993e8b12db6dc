"""How a sandbox comes to be: its room, its own user namespace, bubblewrap in it, and a supervisor that enters.

All but the rooms of layers runs in a fork of the spawner. The order matters: each step gives up what the next one no
longer needs.
"""

import contextlib
import json
import os
import resource
import select
import signal
from dataclasses import dataclass

from envserver.sandbox import kernel

OWN_PROCESSES = 3
"""The supervisor, bubblewrap's monitor and the init count against RLIMIT_NPROC too."""
READY_S = 20.0
"""A machine under full load opens a sandbox in well below a second."""
NAMESPACES = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
UNREADABLE = "/proc/tty/driver"
"""Of a fresh /proc, the one folder that only the machine's own root may list: `find /` would end with 1 for it."""
INIT = ("/usr/bin/env", "--ignore-signal=CHLD", "/bin/cat")
"""The init: it blocks on a pipe that the supervisor holds, so it is ready when it has echoed one byte, and ends with
the supervisor. SIGCHLD is ignored in it, which makes the kernel reap orphans; no signal from inside reaches a PID 1.
Ignoring it before bubblewrap starts would not do: 0.8 hands that on, 0.12 does not."""
_BYTES_PER_INODE = 4_096
_SECOND_NS = 1_000_000_000
_TICK_NS = 20_000_000
"""The kernel dates files by a clock that stands still between two ticks, so it may be late by one."""


@dataclass(frozen=True)
class Dates:
    """How a layer's files are dated, so that a build in another worker makes the same ones.

    A time that lies in the build becomes *moment*. One that the build set to something earlier stays. Nanoseconds.
    """

    moment: int
    began: int
    """When the build began."""
    keeps_seconds: bool = False
    """Add the whole seconds since *began*: a build that sleeps tells its files apart by their times."""

    def of(self, time: int) -> int:
        """Give what becomes of *time*."""
        since = time - self.began
        if since < -_TICK_NS:
            return time
        return self.moment + (max(0, since // _SECOND_NS) * _SECOND_NS if self.keeps_seconds else 0)


@dataclass(frozen=True)
class Room:
    """The folder of a sandbox or of a layer, and what is mounted on it: a tmpfs of its size, and in it the root.

    Paths are relative to the work folder and short on purpose: the agent can read them in /proc/mounts.
    """

    name: str
    lower: str
    """The folders below the root, the uppermost first, as overlay takes them."""
    disk_bytes: int

    @property
    def root(self) -> str:
        return f"{self.name}/r"

    @property
    def upper(self) -> str:
        """What was written in the root."""
        return f"{self.name}/u"

    def mount(self) -> None:
        """Mount the tmpfs and the root, in the caller's mount namespace; the folder is there."""
        inodes = max(1_024, self.disk_bytes // _BYTES_PER_INODE)
        size = f"size={self.disk_bytes},nr_inodes={inodes},mode=0755"
        kernel.mount("box", self.name, "tmpfs", kernel.MS_NODEV, size)
        for part in (self.upper, f"{self.name}/w", self.root):
            os.mkdir(part, 0o755)
        parts = f"lowerdir={self.lower},upperdir={self.upper},workdir={self.name}/w,userxattr"
        kernel.mount("box", self.root, "overlay", kernel.MS_NODEV, parts)

    def freeze(self, dates: Dates | None) -> None:
        """Let no more be written: what there is becomes a layer, dated as *dates* say."""
        kernel.unmount(self.root)
        if dates is not None:
            self._date(dates)
        kernel.mount("box", self.name, "tmpfs", kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NODEV)

    def _date(self, dates: Dates) -> None:
        for folder, folders, files in os.walk(self.upper):
            for name in (".", *folders, *files):
                path = f"{folder}/{name}"
                with contextlib.suppress(OSError):  # a path that is too long
                    found = os.lstat(path)
                    times = dates.of(found.st_atime_ns), dates.of(found.st_mtime_ns)
                    os.utime(path, ns=times, follow_symlinks=False)

    def unmount(self) -> None:
        for target in (self.root, self.name):
            with contextlib.suppress(OSError):  # it may never have been mounted
                kernel.unmount(target)


class BirthError(Exception):
    """The sandbox could not be made; the text is bubblewrap's or the kernel's."""


@dataclass(frozen=True)
class Born:
    monitor: int
    """bubblewrap's pid; waits for the init."""
    init: int
    """A pidfd of the sandbox's PID 1."""
    lifeline: int
    """The init ends when this is closed."""


def enter_user_namespace(owner: int | None, *, pids: int, sync: int) -> None:
    """Make and enter a user namespace owned by uid *owner*, have it mapped over *sync*, and become root in it.

    RLIMIT_NPROC counts per user and user namespace, and what a namespace's users have together counts again for its
    owner, against the limit that held when the namespace was made. An owner of its own per sandbox therefore makes
    the limit one of the sandbox as a whole, whatever users the agent becomes.
    """
    most = pids + OWN_PROCESSES
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    if owner is not None:
        os.setresgid(owner, owner, owner)
        os.setresuid(owner, owner, owner)
    kernel.unshare(kernel.CLONE_NEWUSER)
    # Else /proc/PID/uid_map belongs to the machine's root and the spawner may not write it.
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    # Inherited by all that run inside: the kernel takes them before the server.
    kernel.write("/proc/self/oom_score_adj", b"1000")
    os.write(sync, b"u")
    if os.read(sync, 1) != b"m":
        raise BirthError("the user namespace could not be mapped")
    if owner is not None:
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)


def arguments(root: str, *, memory_bytes: int, calls: int, info: int) -> list[str]:
    """Give bubblewrap's arguments; they go through a file, so that nothing shows on its command line."""
    return [
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *("--hostname", "box", "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"),
        *("--cap-drop", "ALL", "--seccomp", str(calls), "--info-fd", str(info)),
        *("--bind", root, "/", "--proc", "/proc", "--dev", "/dev"),
        # bubblewrap's /dev is a tmpfs without a size, which root could fill; its parts are mounts of their own.
        *("--perms", "1777", "--size", str(memory_bytes), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *(("--tmpfs", UNREADABLE, "--remount-ro", UNREADABLE) if os.path.isdir(UNREADABLE) else ()),
        *("--chdir", "/"),
    ]


def start_init(root: str, *, program: str, memory_bytes: int, calls: bytes) -> Born:
    """Start the sandbox's init in the new root *root* under the bubblewrap at *program*.

    Raises:
        BirthError: with bubblewrap's own words.
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
    # Not a fork: that would copy the interpreter's pages, which costs as much as all the rest.
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


def enter(born: Born) -> None:
    """Enter the sandbox's namespaces; its PID namespace holds for children only, so nobody inside sees the caller."""
    kernel.setns(born.init, NAMESPACES)
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
