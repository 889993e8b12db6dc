"""Counts the programs that the kernel killed because the control group of the sandboxes was out of memory.

The kernel chooses the victim among all sandboxes of the worker. A judgement during such a kill proves nothing about the
judged program.
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple


class _Mount(NamedTuple):
    root: str
    """The group at the mount point. In a container it may be the container's own group."""
    point: str
    file: str
    """Name of the file with the counter."""


def oom_kills(pid: int, *, proc: str = "/proc") -> int:
    """Return the number of kills so far in the control group of the process *pid*; 0 without such a group.

    *proc* is where the kernel's files about processes are.
    """
    try:
        groups = Path(f"{proc}/{pid}/cgroup").read_text().splitlines()
    except OSError:  # the process has ended
        return 0
    for controllers, group in (line.split(":", 2)[1:] for line in groups):
        if (mount := _mounts(proc).get("memory" if "memory" in controllers.split(",") else controllers)) is not None:
            inner = group.removeprefix(mount.root) if mount.root != "/" else group
            for folder in (f"{mount.point}/{inner}", mount.point):
                if (count := _count(f"{folder}/{mount.file}")) is not None:
                    return count
    return 0


def _count(path: str) -> int | None:
    try:
        rows = [line.split() for line in Path(path).read_text().splitlines()]
    except OSError:
        return None
    return next((int(row[1]) for row in rows if row[0] == "oom_kill"), None)


@cache
def _mounts(proc: str) -> dict[str, _Mount]:
    """Return the mounts by controller: "memory" of version 1, and "" for version 2."""
    found = {}
    for line in Path(f"{proc}/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, point = before.split()[3:5]
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2":
            found[""] = _Mount(root, point, "memory.events")
        elif kind == "cgroup" and "memory" in options.split(","):
            found["memory"] = _Mount(root, point, "memory.oom_control")
    return found
