"""What a sandbox uses, and whether that is too much.

Control groups cannot be written in a worker's container, so this looks at the sandbox's own /proc. A quick sum that
counts shared pages once per process is enough while it is below the limit; only above it are proportional shares read.
"""

import contextlib
import os
from dataclasses import dataclass

LOOK_S = 0.1
"""Between two looks while the agent's processes run: at 1 GB/s a tree grows 100 MB in between."""
QUIET_LOOK_S = 1.0
"""While only the init runs."""
FULL_LOOKS = 10
"""Looks in a row at the limit of processes before the sandbox is killed: a fork bomb stays there, a build does not."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_READ_BYTES = 4096


@dataclass(frozen=True)
class Usage:
    """One look at a sandbox."""

    pids: int
    """Threads of all processes without its init."""
    memory_bytes: int


def verdict(usage: Usage, *, memory_bytes: int, pids: int, looks_full: int) -> str | None:
    """Say why the sandbox has to end (``memory``, ``pids``) or give None; *looks_full*: looks at the limit in a row."""
    if usage.memory_bytes > memory_bytes:
        return "memory"
    if is_full(usage, pids=pids) and looks_full >= FULL_LOOKS:
        return "pids"
    return None


def is_full(usage: Usage, *, pids: int) -> bool:
    """Whether *usage* is at the limit of processes, but for a sixteenth: a bomb's children also die now and then."""
    return usage.pids >= pids - pids // 16


class Gauge:
    """Reads a sandbox's /proc through a directory that was opened before the agent's first process."""

    def __init__(self) -> None:
        self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._shared = os.open("/dev/shm", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def look(self, *, memory_bytes: int) -> Usage:
        """Measure; exact only where the quick sum is above *memory_bytes*."""
        pids = [name for name in os.listdir(self._proc) if name.isdigit()]
        files = self._shared_bytes()
        threads = resident = 0
        for pid in pids:
            with contextlib.suppress(OSError, IndexError, ValueError):
                threads += int(self._read(f"{pid}/stat").rpartition(b")")[2].split()[17])
                resident += int(self._read(f"{pid}/statm").split()[1]) * _PAGE_BYTES
        if resident + files > memory_bytes:
            resident = sum(self._share_bytes(pid) for pid in pids)
        return Usage(max(0, threads - 1), resident + files)

    def _read(self, name: str) -> bytes:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        try:
            return os.read(fd, _READ_BYTES)
        finally:
            os.close(fd)

    def _share_bytes(self, pid: str) -> int:
        """The process's proportional share of anonymous and shared memory; files can be dropped by the kernel."""
        try:
            rows = self._read(f"{pid}/smaps_rollup").splitlines()
        except OSError:
            return 0  # it has ended, or is a zombie
        return sum(int(row.split()[1]) * 1024 for row in rows if row.startswith((b"Pss_Anon:", b"Pss_Shmem:")))

    def _shared_bytes(self) -> int:
        """Bytes in /dev/shm and in System V segments, mapped or not."""
        shm = os.fstatvfs(self._shared)
        segments = 0
        with contextlib.suppress(OSError, IndexError, ValueError):
            for row in self._read("sysvipc/shm").splitlines()[1:]:
                segments += int(row.split()[14])
        return (shm.f_blocks - shm.f_bfree) * shm.f_frsize + segments
