"""The stacks of a process and of all its descendants, for tests that hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PY_SPY = Path(__file__).resolve().parents[2] / ".venv" / "bin" / "py-spy"
DUMP_S = 20
FRAMES = 15
"""Number of innermost frames that are shown of a thread. The outer frames are pytest's own."""
MOST_CHARACTERS = 200_000
"""Maximum length of one report: a hang with hundreds of processes must not fill the log."""


def descendants(pid: int) -> list[int]:
    """List the live processes below *pid*, parents before children."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(folder.name))
    found: list[int] = []
    level = [pid]
    while level:
        level = [child for parent in level for child in children.get(parent, [])]
        found += level
    return found


def report(pids: Iterable[int]) -> str:
    """Return the command line and the stack of each of *pids*, as text."""
    return "\n\n".join(map(_stack, pids))[:MOST_CHARACTERS]


def own_threads() -> str:
    """Return the innermost frames of this process's threads except the calling thread, the main thread first."""
    frames = sys._current_frames()
    threads = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    return "\n".join(
        f"thread {thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident])[-FRAMES:])}"
        for thread in threads
        if thread.ident in frames
    )


def started_since(pids: Iterable[int], since_s: float) -> list[int]:
    """Return the *pids* that started after *since_s*, a time of ``CLOCK_BOOTTIME``, or in the same clock tick."""
    tick_s = 1 / os.sysconf("SC_CLK_TCK")  # the kernel reports a start in whole ticks, rounded down
    found = []
    for pid in pids:
        with suppress(OSError):  # it ended
            began_s = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]) * tick_s
            if began_s > since_s - tick_s:
                found.append(pid)
    return found


def with_variable(name: str, value: str) -> list[int]:
    """List the live processes whose environment has *name*=*value*, also orphans, except this process."""
    wanted = f"{name}={value}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended, or belongs to another user
            if wanted in (folder / "environ").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return found


def kill(pids: Iterable[int]) -> None:
    """Kill processes without a chance to clean up."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _stack(pid: int) -> str:
    folder = Path(f"/proc/{pid}")
    try:
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        waits_in = (folder / "wchan").read_text()
    except OSError:
        return f"process {pid} has ended"
    head = f"process {pid}: {command[:300]} (kernel: {waits_in})"
    try:
        done = subprocess.run(
            [PY_SPY, "dump", "--nonblocking", "--pid", str(pid)], capture_output=True, text=True, timeout=DUMP_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{head}\nno stack: {error}"
    return f"{head}\n{done.stdout if done.returncode == 0 else 'not a Python process'}"
