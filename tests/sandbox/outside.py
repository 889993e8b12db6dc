"""The view of sandboxes from outside, on the machine."""

import os
from pathlib import Path


def descendants(pid: int | None = None) -> list[int]:
    """List the live processes below *pid* (by default this process), without zombies."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents.setdefault(int(fields[1]), []).append(int(folder.name))
    found: list[int] = []
    new = [pid or os.getpid()]
    while new:
        children = [child for parent in new for child in parents.get(parent, [])]
        found += children
        new = children
    return found


def open_files() -> list[str]:
    """List the kinds of this process's open files."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}").partition(":")[0])
        except OSError:  # the descriptor of the listing itself
            continue
    return sorted(links)


def mounts(pid: int | None = None) -> int:
    """Count the sandboxes' mounts that *pid* (by default this process) sees; the machine's other mounts vary."""
    lines = Path(f"/proc/{pid or os.getpid()}/mountinfo").read_text().splitlines()
    return sum(line.partition(" - ")[2].split()[1] == "box" for line in lines)


async def are_dead(pids: list[int]) -> bool:
    """Return True if none of *pids* is alive; a claim for ``eventually``."""
    return not any(_is_alive(pid) for pid in pids)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
