"""The folder of a sandbox or of a layer, and what is mounted on it: a tmpfs of its size, and in it the root."""

import contextlib
import os
from dataclasses import dataclass

from . import kernel

_BYTES_PER_INODE = 4_096


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

    def freeze(self) -> None:
        """Let no more be written: what there is becomes a layer."""
        kernel.unmount(self.root)
        kernel.mount("box", self.name, "tmpfs", kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NODEV)

    def unmount(self) -> None:
        for target in (self.root, self.name):
            with contextlib.suppress(OSError):  # it may never have been mounted
                kernel.unmount(target)
