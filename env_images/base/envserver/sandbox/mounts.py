"""The folder of a sandbox or of a layer, and what is mounted on it: a tmpfs of its size, and in it the root."""

import contextlib
import os
from dataclasses import dataclass

from envserver.sandbox import kernel

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
    """Paths are relative to the work folder and short on purpose: the agent can read them in /proc/mounts."""

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
