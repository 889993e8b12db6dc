"""One CPU for the sandboxes of a test, which its programs share as in a worker's container."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.sandbox.outside import descendants

LOOPS = "for i in $(seq 100); do (while :; do :; done) & done"
"""For a shell. When it has ended all hundred are there."""
_V1, _V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


@contextmanager
def one_cpu() -> Iterator[Path]:
    """Give a control group of one CPU, of which other tests take a small part; `join` puts spawners into it.

    Outside of such a group the kernel may share CPUs by sessions (``sched_autogroup_enabled``): priorities would count
    within each, and a hundred loops of one shell no more than one.
    """
    is_first = (_V1 / "cpu.shares").exists()
    group = (_V1 if is_first else _V2) / f"env-gateway-test-{secrets.token_hex(4)}"
    try:
        if not is_first:
            (_V2 / "cgroup.subtree_control").write_text("+cpu")
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made on this machine: {error}")
    try:
        if is_first:
            (group / "cpu.shares").write_text("262144")
            (group / "cpu.cfs_quota_us").write_text((group / "cpu.cfs_period_us").read_text())
        else:
            (group / "cpu.weight").write_text("10000")
            (group / "cpu.max").write_text("100000 100000")
        yield group
    finally:
        group.rmdir()  # fails if a process were left


def join(group: Path) -> None:
    """Put the spawners that this process has started into *group*, and so every sandbox that they open from now on."""
    for pid in descendants():
        if Path(f"/proc/{pid}/comm").read_text() == "spawner\n":
            (group / "cgroup.procs").write_text(str(pid))
