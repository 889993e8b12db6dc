"""Trainers vanish: without a delete, with half-open sockets, during a create. The gateway releases what they held."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually
from tests.faults.invariants import at_rest
from tests.faults.players import counted, delete_all, open_many, opened
from tests.faults.world import World, environment_toml, running
from tests.wire.gateways import TRAINER_KEYS
from tests.wire.raw import RawEpisode, create, new_sid

IDLE_S = 5.0
SLOTS = 20
TRAINER = Path(__file__).parent / "trainer.py"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A world where sessions of ``brief`` expire soon, and ``patient`` has one slot, for which trainers wait."""
    brief = environment_toml(
        "brief",
        timeouts={"idle_s": IDLE_S},
        pool={"slots": SLOTS, "max_workers": 1},
        limits={"memory_mib": 512},  # the worker holds several copies of a response that no client reads
    )
    patient = environment_toml("patient", timeouts={"idle_s": IDLE_S}, pool={"slots": 1, "max_workers": 1})
    with running(brief, patient) as world:
        yield world


@pytest.fixture(autouse=True)
async def _rests(world: World) -> AsyncIterator[None]:
    yield
    await eventually(lambda: _no_session(world))
    await at_rest(world)


async def test_a_session_whose_trainer_vanishes_without_a_delete_expires(
    world: World, measured: Callable[[str, float, str], None]
) -> None:
    expired = await world.metric("gateway_sessions_closed_total", environment="brief", reason="expired")
    async with world.http() as http:
        episodes = await open_many(http, "brief", SLOTS)
        kept = episodes.pop()
        last_at = time.monotonic()
        await eventually(lambda: _only(world, kept))
        measured(f"expired after (idle time {IDLE_S:g} s)", time.monotonic() - last_at, "s")
        late = await episodes[0].ask("count")
        count = await counted(kept)
        await delete_all([kept])

    assert (late.status_code, "expired" in late.text, "reward" in late.text) == (410, True, False)
    assert count > 19_000  # the session was kept alive all the time, and never restarted
    closed = expired + SLOTS - 1
    await world.counts(closed, "gateway_sessions_closed_total", environment="brief", reason="expired")


async def _only(world: World, kept: RawEpisode) -> None:
    """Keep one session alive, and assert that it is the only one."""
    await counted(kept)
    assert [session["name"] for session in await world.sessions()] == [kept.sid]


@pytest.mark.parametrize("does", ["idle", "reads-nothing", "socket"])
async def test_the_sessions_of_a_suspended_trainer_expire(world: World, does: str) -> None:
    """The trainer is suspended, not ended: the kernel keeps its connections open, and no process reads them."""
    expired = await world.metric("gateway_sessions_closed_total", environment="brief", reason="expired")
    async with trainer(world, "brief", does, number=4) as pid:
        os.kill(pid, signal.SIGSTOP)
        assert len(await world.sessions()) == 4
        await eventually(lambda: _no_session(world))
        # Nothing else ended them, such as the end of their worker.
        await world.counts(expired + 4, "gateway_sessions_closed_total", environment="brief", reason="expired")
        async with world.http() as http:  # the worker's slots are free
            episodes = await open_many(http, "brief", SLOTS)
            await delete_all(episodes)


async def test_trainers_that_hang_up_during_a_create_release_their_places(world: World) -> None:
    async with world.http() as http:
        holder = await opened(http, "patient")
        waiting = [
            asyncio.create_task(create(http, new_sid(), env_name="patient", task_spec={"start": n})) for n in range(20)
        ]
        await eventually(lambda: _waiting(world, 20))
        stays = waiting.pop()
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        await eventually(lambda: _waiting(world, 1))
        await delete_all([holder])
        answer = await stays
        (session,) = await world.sessions()
        await delete_all([RawEpisode(http, session["name"], "patient")])

    assert answer.status_code == 200, answer.text
    assert answer.json()["sid"] == session["name"]


async def test_a_trainer_suspended_while_its_create_waits_keeps_its_turn_only_for_a_while(world: World) -> None:
    async with world.http() as http:
        holder = await opened(http, "patient")
        async with trainer(world, "patient", "waits", number=1) as pid:
            await eventually(lambda: _waiting(world, 1))
            os.kill(pid, signal.SIGSTOP)
            behind = asyncio.create_task(opened(http, "patient"))
            await eventually(lambda: _waiting(world, 2))
            await delete_all([holder])
            # The gateway opens its session. No client reads the answer, and the session expires like any other.
            after = await behind
            await delete_all([after])

    assert "environment=patient" in world.log


async def test_a_hang_up_during_a_step_ends_no_session_early(world: World) -> None:
    async with world.http() as http:
        episode = await opened(http, "brief")
        left = asyncio.create_task(episode.ask("wait", {"gate": "left"}))
        await eventually(lambda: _steps(world, "left", 1))
        left.cancel()
        await asyncio.wait([left])
        began_at = time.monotonic()
        while time.monotonic() - began_at < IDLE_S + 2:  # longer than its idle time: the step still runs
            assert len(await world.sessions()) == 1
            await asyncio.sleep(0.2)
        world.open_gate("left")
        count = await counted(episode)
        await eventually(lambda: _no_session(world))

    assert count == 2


@asynccontextmanager
async def trainer(world: World, environment: str, does: str, *, number: int) -> AsyncIterator[int]:
    """Run a trainer in a process of its own until it did *does*. Yield its process id; it is killed at the end."""
    command = [str(TRAINER), world.gateway.url, TRAINER_KEYS["alice"], environment, does, str(number)]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(HANG_S):
            said = await process.stdout.readline()
        assert said == b"done\n", said
        yield process.pid
    finally:
        process.kill()
        await process.wait()


async def _no_session(world: World) -> None:
    assert await world.sessions() == []


async def _waiting(world: World, number: int) -> None:
    assert await world.waiting("patient") == number


async def _steps(world: World, gate: str, number: int) -> None:
    assert world.waiting_steps(gate) == number
