"""Control groups for the sandboxes of a test: one CPU or little memory, which all share as in a worker's container."""

import fcntl
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.sandbox.outside import descendants

_BUSY = """
import hashlib, os, threading
begin, here = threading.Event(), os.pipe()
if os.fork():
    os.close(here[1])
    os.read(here[0], 1)
    os._exit(0)
def run():
    begin.wait()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
threading.stack_size(2**16)
for _ in range(COUNT): threading.Thread(target=run).start()
begin.set()
os.close(here[1])
"""


def loops(count: int) -> str:
    """Return a shell script that starts *count* busy loops. When the script has ended, all of them run.

    They are threads that need no lock of Python's. Between as many processes some virtual machines spend most of the
    time for the change of the address space, and a test takes minutes.
    """
    return f"python3 -c '{_BUSY.replace('COUNT', str(count))}'"


LOOPS = loops(100)
PEERS = loops(8)
"""Loops for the priority of a judged program, which then gets a ninth of the CPU."""
_V1, _V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
_MEMORY_V1 = Path("/sys/fs/cgroup/memory")
_TURN = Path(tempfile.gettempdir()) / "env-gateway-cpu-group.lock"
"""A lock: two such groups at the same time would compete for the CPU."""


@contextmanager
def cpu_group() -> Iterator[Path]:
    """Yield a control group with eight times the weight of other groups; `join` moves spawners into it.

    Outside of such a group the kernel may share CPUs by sessions (``sched_autogroup_enabled``). Priorities would then
    count within each session only, and a hundred loops of one shell would weigh as much as one loop.
    """
    is_first = (_V1 / "cpu.shares").exists()
    group = (_V1 if is_first else _V2) / f"env-gateway-test-{secrets.token_hex(4)}"
    with _TURN.open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        try:
            if not is_first:
                (_V2 / "cgroup.subtree_control").write_text("+cpu")
            group.mkdir()
        except OSError as error:
            pytest.skip(f"no control group can be made on this machine: {error}")
        try:
            if is_first:
                (group / "cpu.shares").write_text("8192")
            else:
                (group / "cpu.weight").write_text("800")
            yield group
        finally:
            group.rmdir()  # fails if a process was left


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """Yield a control group with *limit_bytes* of memory."""
    is_first = (_MEMORY_V1 / "memory.limit_in_bytes").exists()
    group = (_MEMORY_V1 if is_first else _V2) / f"env-gateway-test-{secrets.token_hex(4)}"
    try:
        if not is_first:
            (_V2 / "cgroup.subtree_control").write_text("+memory")
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made on this machine: {error}")
    try:
        (group / ("memory.limit_in_bytes" if is_first else "memory.max")).write_text(str(limit_bytes))
        with suppress(OSError):  # the kernel counts no swap
            (group / ("memory.memsw.limit_in_bytes" if is_first else "memory.swap.max")).write_text(
                str(limit_bytes if is_first else 0)
            )
        yield group
    finally:
        group.rmdir()  # fails if a process was left


def enclose(group: Path, pid: int) -> None:
    """Move the process *pid* and all its descendants into *group*, also descendants that start meanwhile."""
    moved: set[int] = set()
    while left := {pid, *descendants(pid)} - moved:
        for one in left:
            with suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
                (group / "cgroup.procs").write_text(str(one))
        moved |= left


def join(group: Path) -> None:
    """Move this process's spawners into *group* and onto one CPU, and with them all sandboxes that they open later."""
    cpu = secrets.choice(sorted(os.sched_getaffinity(0)))
    for pid in descendants():
        with suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
            if Path(f"/proc/{pid}/comm").read_text() == "spawner\n":
                (group / "cgroup.procs").write_text(str(pid))
                os.sched_setaffinity(pid, {cpu})
