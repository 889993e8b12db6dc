"""Kills by the kernel for lack of memory: they are counted, and never decide a judgement."""

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from envserver.sandbox import Box, Sandbox, SandboxError, Sandboxes

from tests.envs.coding_world import faults
from tests.sandbox.conftest import LIMITS, MIB
from tests.sandbox.cpus import join
from tests.sandbox.inside import bash, python

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
HUNGRY = "b = bytearray(b'x') * (200 << 20)"


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """Yield a control group with *limit_bytes* of memory."""
    is_first = (_V1 / "memory.limit_in_bytes").exists()
    group = (_V1 if is_first else _V2) / f"env-gateway-test-{secrets.token_hex(4)}"
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


@pytest.fixture
async def cramped(box: Box, work: Path) -> AsyncIterator[Sandboxes]:
    """Yield sandboxes that together have less memory than one of them may use."""
    with memory_group(96 * MIB) as group:
        async with Sandboxes(box, work, LIMITS) as sandboxes:
            await sandboxes.check()
            join(group)
            yield sandboxes


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
