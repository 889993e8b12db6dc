"""Measures a sandbox's resource use and compares it with the limits.

Control groups are not writable in a worker's container, so the watchdog reads the sandbox's own /proc. A quick sum
counts shared pages once per process and suffices below the limit. Only above the limit does the watchdog read
proportional shares. Page tables count too: a program can fill gigabytes of them by reading memory that it never wrote.
"""

import contextlib
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

LOOK_S = 0.1
"""Seconds between two checks while the agent's processes run. At 1 GB/s a tree grows 100 MB in between."""
QUIET_LOOK_S = 1.0
"""Seconds between two checks while only the init runs."""
FULL_LOOKS = 10
"""Consecutive checks at the limit of processes before the sandbox is killed. A fork bomb stays there, a build does
not."""
_FREE_SOCKETS, _SOCKET_BYTES = 32, 640 * 1024
"""Each socket above the first number counts as the memory that its full buffers may take, because a queue outlives the
process and even the socket that filled it. A Unix socket may have 416 KiB and one message."""
_FREE_FILES, _FILE_BYTES = 256, 4096
"""Each open file of a process above the first number counts as half a pipe. When all sandboxes together have filled 64
MiB of pipes (fs.pipe-user-pages-soft), a further pipe has 8 KiB."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_READ_BYTES = 16_384


@dataclass(frozen=True)
class Usage:
    """The result of one check of a sandbox."""

    pids: int
    """Threads of all processes except the init."""
    memory_bytes: int


def verdict(usage: Usage, *, memory_bytes: int, pids: int, looks_full: int) -> str | None:
    """Return the reason to end the sandbox (``memory``, ``pids``) or None.

    *looks_full* counts consecutive checks at the limit of processes.
    """
    if usage.memory_bytes > memory_bytes:
        return "memory"
    if is_full(usage, pids=pids) and looks_full >= FULL_LOOKS:
        return "pids"
    return None


def is_full(usage: Usage, *, pids: int) -> bool:
    """Return True within a sixteenth of the limit of processes: a bomb's children also die now and then."""
    return usage.pids >= pids - pids // 16


@dataclass(frozen=True)
class CpuTimes:
    """CPU times of a sandbox's processes at one check, each since the process's start."""

    began_s: float
    ended_s: float
    """End of the check, which takes a while when CPUs are busy."""
    used_s: float
    """CPU time of all processes, and of their ended children that they waited for."""
    waited_s: Mapping[int, float]
    """Seconds that each thread has waited on a run queue."""
    lowered: Collection[int] = ()
    """The threads with a lower priority than the judged program's."""


class Stopwatch:
    """Sums the checks from *first* on. The attributes match those of ``values.Judged``.

    The waits of threads that live at the same time overlap, so they are not added. A thread's wait follows the waits
    that were counted before the thread started. The longest such chain counts, and its parts follow each other in time.
    Hence a program's own threads lengthen the chain by at most the CPU time that they use.
    """

    def __init__(self, first: CpuTimes, *, claim_s: float) -> None:
        self.used_s = self.waited_s = self.unseen_s = 0.0
        self._claim_s = claim_s
        self._last = first
        self._origins = {thread: -waited_s for thread, waited_s in first.waited_s.items()}

    def add(self, now: CpuTimes) -> None:
        """Add the times since the last check."""
        last, self._last = self._last, now
        used_s = max(0.0, now.used_s - last.used_s)
        self.used_s += used_s
        if now.waited_s.keys() != last.waited_s.keys():
            self.unseen_s += max(0.0, now.began_s - last.began_s - used_s)
        newborn_s = max(0.0, self.waited_s - (last.ended_s - last.began_s))  # it may have started during the last check
        origins = {thread: self._origins.get(thread, newborn_s) for thread in now.waited_s}
        if not self.is_used_up:
            for thread in now.lowered:  # lowered by itself, so it waits voluntarily
                origins[thread] -= now.waited_s[thread] - last.waited_s.get(thread, 0.0)
        self._origins = origins
        self.waited_s = max([self.waited_s, *(origin + now.waited_s[thread] for thread, origin in origins.items())])

    @property
    def is_used_up(self) -> bool:
        """Whether the program has used its guaranteed CPU time (``claim_s``). Unseen time counts in full."""
        return self.used_s + self.unseen_s >= self._claim_s

    def as_message(self) -> dict[str, float]:
        return {"used_s": self.used_s, "waited_s": self.waited_s, "unseen_s": self.unseen_s}


class Gauge:
    """Reads a sandbox's /proc through a directory that was opened before the agent's first process."""

    def __init__(self) -> None:
        self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._shared = os.open("/dev/shm", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._nice = os.getpriority(os.PRIO_PROCESS, 0)

    def look(self, *, memory_bytes: int) -> Usage:
        """Measure the usage. It is exact only if the quick sum is above *memory_bytes*.

        Root inside may lower a process's ``oom_score_adj``. Each check raises it again.
        """
        pids = [name for name in os.listdir(self._proc) if name.isdigit()]
        others = self._shared_bytes() + max(0, self._sockets() - _FREE_SOCKETS) * _SOCKET_BYTES
        threads = resident = 0
        for pid in pids:
            with contextlib.suppress(OSError):
                status = self._read(f"{pid}/status")
                threads += _number(status, b"Threads")
                resident += _number(status, b"VmRSS") * 1024
                others += _number(status, b"VmPTE") * 1024
                files = os.stat(f"{pid}/fd", dir_fd=self._proc).st_size
                others += max(0, files - _FREE_FILES) * _FILE_BYTES
                self._write(f"{pid}/oom_score_adj", b"1000")
        if resident + others > memory_bytes:
            resident = sum(self._share_bytes(pid) for pid in pids)
        return Usage(max(0, threads - 1), resident + others)

    def cpu_times(self) -> CpuTimes:
        """Return the CPU times of all processes and the waits of their threads, including zombies.

        Without CONFIG_SCHED_INFO the kernel reports no waits.
        """
        began_s, ticks, waits, lowered = time.monotonic(), 0, dict[int, float](), list[int]()
        for pid in filter(str.isdigit, os.listdir(self._proc)):
            with contextlib.suppress(OSError, IndexError, ValueError):
                ticks += sum(map(int, self._stat(pid)[11:15]))
                for thread in self._list(f"{pid}/task"):
                    fields = self._stat(f"{pid}/task/{thread}")
                    waits[int(thread)] = int(self._read(f"{pid}/task/{thread}/schedstat").split()[1]) / 1e9
                    if int(fields[16]) > self._nice or int(fields[38]) == os.SCHED_IDLE:
                        lowered.append(int(thread))
        return CpuTimes(began_s, time.monotonic(), ticks / _TICKS_PER_S, waits, lowered)

    def _stat(self, name: str) -> list[bytes]:
        """Return the fields of proc(5) from the third on."""
        return self._read(f"{name}/stat").rpartition(b")")[2].split()

    def _list(self, name: str) -> list[str]:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._proc)
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def state(self, pid: int) -> str:
        """Return the state of the process *pid* inside, as in proc(5), or an empty text if there is none."""
        try:
            return self._stat(str(pid))[0].decode()
        except (OSError, IndexError):
            return ""

    def _read(self, name: str) -> bytes:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        data = b""
        try:
            while part := os.read(fd, _READ_BYTES):
                data += part
            return data
        finally:
            os.close(fd)

    def _write(self, name: str, data: bytes) -> None:
        fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=self._proc)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)

    def _share_bytes(self, pid: str) -> int:
        """Return the process's proportional share of anonymous and shared memory. The kernel can drop file pages."""
        try:
            rows = self._read(f"{pid}/smaps_rollup").splitlines()
        except OSError:
            return 0  # it has ended, or is a zombie
        return sum(int(row.split()[1]) * 1024 for row in rows if row.startswith((b"Pss_Anon:", b"Pss_Shmem:")))

    def _sockets(self) -> int:
        """Return the number of sockets in the network namespace, and of closed sockets whose data is queued."""
        with contextlib.suppress(OSError, IndexError, ValueError):
            return int(self._read("1/net/sockstat").split()[2])  # "sockets: used N"
        return 0

    def _shared_bytes(self) -> int:
        """Return the bytes in /dev/shm and in System V segments, mapped or not."""
        shm = os.fstatvfs(self._shared)
        segments = 0
        with contextlib.suppress(OSError, IndexError, ValueError):
            for row in self._read("sysvipc/shm").splitlines()[1:]:
                segments += int(row.split()[14])
        return (shm.f_blocks - shm.f_bfree) * shm.f_frsize + segments


def _number(status: bytes, name: bytes) -> int:
    """Return the number of line *name* in /proc/PID/status, or 0. A process's name, the first line, cannot fake it."""
    fields = status.partition(b"\n" + name + b":")[2].split(None, 1)
    return int(fields[0]) if fields else 0
