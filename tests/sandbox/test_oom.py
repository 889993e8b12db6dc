"""Kills by the kernel for lack of memory: they are counted, and never decide a judgement."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from envserver.sandbox import Box, Sandbox, SandboxError, Sandboxes
from envserver.sandbox.oom import oom_kills

from tests.envs.coding_world import faults
from tests.sandbox.conftest import LIMITS, MIB
from tests.sandbox.control_groups import join, memory_group
from tests.sandbox.inside import bash, python

HUNGRY = "b = bytearray(b'x') * (200 << 20)"


@pytest.fixture
async def cramped(box: Box, work: Path) -> AsyncIterator[Sandboxes]:
    """Yield sandboxes that together have less memory than one of them may use."""
    with memory_group(96 * MIB) as group:
        async with Sandboxes(box, work, LIMITS) as sandboxes:
            await sandboxes.check()
            join(group)
            yield sandboxes


@pytest.mark.parametrize(
    ("root", "group", "folder"),
    [
        pytest.param("/", "/docker/1a2b", "docker/1a2b", id="the machine's own mount"),
        pytest.param("/docker/1a2b", "/docker/1a2b", "", id="a container that sees its group by its full name"),
        pytest.param("/docker/1a2b", "/docker/1a2b/inner", "inner", id="a group below it"),
        pytest.param("/", "/", "", id="a container with a namespace of its own"),
        pytest.param("/", "/../outside", "", id="a group that is not mounted here"),
    ],
)
def test_kills_are_read_from_control_groups_of_version_2(tmp_path: Path, root: str, group: str, folder: str) -> None:
    mounted, proc = tmp_path / "cgroup", tmp_path / "proc"
    for one in (mounted / folder, proc / "self", proc / "7"):
        one.mkdir(parents=True)
    (mounted / folder / "memory.events").write_text("low 0\nhigh 4\nmax 9\noom 3\noom_kill 2\noom_group_kill 1\n")
    (proc / "7" / "cgroup").write_text(f"0::{group}\n")
    options = "rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"
    (proc / "self" / "mountinfo").write_text(
        f"22 1 0:20 / /proc rw - proc proc rw\n29 22 0:26 {root} {mounted} {options}\n"
    )

    assert oom_kills(7, proc=str(proc)) == 2
    assert oom_kills(8, proc=str(proc)) == 0, "the process has ended"


async def test_a_kill_is_counted_in_every_sandbox_of_the_worker(cramped: Sandboxes) -> None:
    hungry, other = await cramped.open(), await cramped.open()
    before = hungry.oom_kills, other.oom_kills

    done = await python(hungry, HUNGRY)

    assert (done.status, hungry.killed) == (-9, None)
    assert (hungry.oom_kills, other.oom_kills) == (before[0] + 1, before[1] + 1)
    await python(other, "print('fine')")
    assert other.oom_kills == before[1] + 1


async def test_a_judgement_that_meets_a_kill_is_a_fault_and_no_verdict(cramped: Sandboxes) -> None:
    with pytest.raises(faults.SandboxFault, match="out of memory"):
        async with faults.to_judge_in(cramped, SandboxError) as sandbox:
            done = await python(sandbox, HUNGRY)

    assert done.status == -9


async def end_its_init(sandbox: Sandbox) -> None:
    while True:
        await bash(sandbox, "echo x > /proc/1/fd/0; sleep 60")


async def test_an_init_that_ended_after_a_kill_is_not_the_agents_doing(cramped: Sandboxes) -> None:
    async def ended(sandbox: Sandbox) -> str | None:
        with pytest.raises(SandboxError):
            await end_its_init(sandbox)
        return sandbox.killed

    sandbox, calm = await cramped.open(), await cramped.open()
    own = await ended(calm)
    await python(sandbox, HUNGRY)

    assert (own, await ended(sandbox)) == ("init", "oom")
