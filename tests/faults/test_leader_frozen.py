"""The leading replica is frozen for longer than its lead while creates wait. When it resumes, it changes nothing.

A leader frozen at a random moment rarely has a pending write. One test therefore freezes it between a decision and its
write.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable

import httpx

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually, until
from tests.faults.held_back import running_held
from tests.faults.invariants import nothing_left
from tests.faults.players import counted, delete_all, opened
from tests.faults.steady import PAUSE_S, no_slot_is_leased_twice
from tests.faults.world import SCALE, World, environment_toml, running
from tests.wire.gateways import OPERATOR_KEY

FROZEN_S = min(30.0, 6.0 * SCALE)
"""Seconds, longer than a lead."""
WORKERS = 6
UNRULY = environment_toml("unruly", pool={"slots": 1, "max_workers": WORKERS, "idle_worker_s": 2})


async def test_a_frozen_leaders_successor_serves_the_creates_and_the_old_leader_changes_nothing_when_it_resumes(
    measured: Callable[[str, float, str], None],
) -> None:
    with running(UNRULY, replicas=2) as world:
        leader = await _leader(world)
        other = 1 - leader
        async with world.http(other) as http:
            held = [await opened(http, "unruly")]
            creates = [asyncio.create_task(opened(http, "unruly")) for _ in range(2 * WORKERS - 1)]
            # At this point the leader has noted some creates and started some of their containers.
            await until(lambda: len(world.events.of("create")) >= 3)
            began_at = time.monotonic()
            os.kill(world.gateways[leader].pid, signal.SIGSTOP)
            try:
                await eventually(lambda: _leads(world, other))
                measured("the other replica leads after", time.monotonic() - began_at, "s")
                for _ in range(WORKERS - 1):
                    done, _pending = await asyncio.wait(creates, timeout=HANG_S, return_when=asyncio.FIRST_COMPLETED)
                    assert done, "nobody is served while the leader is frozen"
                    creates = [task for task in creates if task not in done]
                    held += [task.result() for task in done]
                    if len(held) == WORKERS:
                        break
                counts = await asyncio.gather(*(counted(episode) for episode in held))
                while time.monotonic() < began_at + FROZEN_S:
                    counts = await asyncio.gather(*(counted(episode) for episode in held))
                    await asyncio.sleep(PAUSE_S)
                fence = _last_fence(world, other)
                serving = {str(session["worker"]) for session in await world.sessions(other)}
                stopped_before = {event.worker for event in world.events.of("destroy")}
            finally:
                os.kill(world.gateways[leader].pid, signal.SIGCONT)

            # It resumes with pending starts, and still believes that it leads. Give it the time to act on both.
            await eventually(lambda: _leads_no_more(world, leader))
            again = await asyncio.gather(*(counted(episode) for episode in held))
            assert again == [count + 1 for count in counts]
            assert len(held) == WORKERS
            stopped = {event.worker for event in world.events.of("destroy")} - stopped_before
            assert not stopped & serving
            while held or creates:
                await delete_all(held)
                held = [await task for task in creates[:WORKERS]]
                creates = creates[WORKERS:]
                await eventually(lambda: no_slot_is_leased_twice(world))
                assert [await counted(episode) for episode in held] == [1] * len(held)
            assert _last_fence(world, other) == fence, "the lead changed once more"

        measured("workers at most", world.events.most_alive("unruly"), "")
        assert world.events.most_alive("unruly") <= WORKERS
        await nothing_left(world)
        assert "worker_lost environment" not in world.log  # a worker stopped by the other replica is not lost
        assert await world.metric("gateway_workers_lost_total") == 0


async def test_a_start_that_a_frozen_leader_decided_is_refused_when_its_write_arrives_after_its_lead() -> None:
    pool = {"slots": 1, "max_workers": 1, "idle_worker_s": 2}
    with running_held("unruly", environment_toml("unruly", pool=pool)) as world:
        await eventually(lambda: _leads(world, 0))
        async with world.http(1) as http:
            world.held.hold_from(b"starting")  # the state of a worker that is noted before it starts
            opening = asyncio.create_task(opened(http, "unruly"))
            await until(world.held.is_holding.is_set)
            os.kill(world.gateways[0].pid, signal.SIGSTOP)
            try:
                await eventually(lambda: _leads(world, 1))
                episode = await opening
                (worker,) = await world.workers(1)
                world.held.release()
                await until(lambda: world.held.answer)
                left = await world.workers(1)
            finally:
                os.kill(world.gateways[0].pid, signal.SIGCONT)
            await eventually(lambda: _leads_no_more(world, 0))
            count = await counted(episode)
            await delete_all([episode])
        await nothing_left(world)

    assert world.held.answer.startswith(b"-NOTLEADING "), world.held.answer
    assert [one["id"] for one in left] == [worker["id"]]
    assert count == 1
    assert len(world.events.of("create")) == 1


async def _leader(world: World) -> int:
    async def found() -> int:
        leading = [n for n in range(len(world.gateways)) if await _is_leading(world, n)]
        assert len(leading) == 1, leading
        return leading[0]

    return await eventually(found)


async def _is_leading(world: World, replica: int) -> bool:
    async with httpx.AsyncClient(timeout=HANG_S, verify=False, trust_env=False) as http:
        headers = {"Authorization": f"Bearer {OPERATOR_KEY}"}
        text = (await http.get(f"{world.gateways[replica].url}/metrics", headers=headers)).text
    (value,) = [line.split()[1] for line in text.splitlines() if line.startswith("gateway_leader ")]
    return float(value) == 1


async def _leads(world: World, replica: int) -> None:
    assert await _is_leading(world, replica)


async def _leads_no_more(world: World, replica: int) -> None:
    assert not await _is_leading(world, replica)


def _last_fence(world: World, replica: int) -> str:
    fences: list[str] = re.findall(r"lead_taken .* fence=(\d+)", world.gateways[replica].log)
    return fences[-1]
