"""The same step is sent twice, to the same or another replica: it runs once. A different body is a conflict."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.fakes.eventually import until
from tests.faults.invariants import at_rest
from tests.faults.players import counted, delete_all, opened, step
from tests.faults.world import World, environment_toml, running
from tests.wire.raw import RawEpisode, create, new_sid

FOREIGN = Path(__file__).resolve().parents[1] / "foreign" / "catalog"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Two replicas that the tests of this file share."""
    unruly = environment_toml("unruly", pool={"idle_worker_s": 60})
    with running(unruly, (FOREIGN / "openenv-counter" / "environment.toml").read_text(), replicas=2) as world:
        yield world


@pytest.fixture
async def here(world: World) -> AsyncIterator[RawEpisode]:
    """An open session, through the first replica."""
    async with world.http(0) as http:
        episode = await opened(http, "unruly")
        yield episode
        await delete_all([episode])
    await at_rest(world)


@pytest.fixture
async def there(world: World, here: RawEpisode) -> AsyncIterator[RawEpisode]:
    """The same session, through the second replica."""
    async with world.http(1) as http:
        yield replace(here, http=http)


async def test_a_step_repeated_after_its_end_runs_once(here: RawEpisode, there: RawEpisode) -> None:
    first = await step(here, "count", key="a")
    again = await step(here, "count", key="a")
    elsewhere = await step(there, "count", key="a")
    following = await counted(there)

    assert [each.outcome.text for each in (first, again, elsewhere)] == ["1", "1", "1"]
    assert following == 2


async def test_a_step_sent_concurrently_to_two_replicas_runs_once(
    world: World, here: RawEpisode, there: RawEpisode
) -> None:
    gate = "at-once"
    both = [
        asyncio.create_task(step(episode, "wait", {"gate": gate}, key="b"))
        for episode in (here, there)
        for _ in range(4)
    ]
    await until(lambda: world.waiting_steps(gate) == 1)
    world.open_gate(gate)
    ended = await asyncio.gather(*both)
    following = await counted(here)

    assert [each.outcome.text for each in ended] == ["1"] * 8
    assert world.waiting_steps(gate) == 1
    assert following == 2


async def test_a_step_with_a_used_key_and_another_body_is_a_conflict(
    world: World, here: RawEpisode, there: RawEpisode
) -> None:
    gate = "another-body"
    running_step = asyncio.create_task(step(here, "wait", {"gate": gate}, key="c"))
    await until(lambda: world.waiting_steps(gate) == 1)
    meanwhile = await step(there, "count", key="c")
    world.open_gate(gate)
    first = await running_step
    afterwards = await step(there, "wait", {"gate": "no-such-gate"}, key="c")
    following = await counted(here)

    assert (meanwhile.status, afterwards.status) == (409, 409)
    assert "reward" not in meanwhile.body + afterwards.body
    assert first.outcome.text == "1"
    assert world.waiting_steps("no-such-gate") == 0
    assert following == 2


async def test_a_step_repeated_after_its_replica_was_killed_runs_once(
    world: World, here: RawEpisode, there: RawEpisode
) -> None:
    gate = "killed"
    cut_off = asyncio.create_task(step(here, "wait", {"gate": gate}, key="d"))
    await until(lambda: world.waiting_steps(gate) == 1)
    world.gateways[0].kill()
    await asyncio.wait([cut_off])
    again = asyncio.create_task(step(there, "wait", {"gate": gate}, key="d"))
    # A step without a key waits for the running one: the calls of a session are in order.
    queued = asyncio.create_task(step(there, "count"))
    world.gateways[0].restart()
    world.open_gate(gate)
    told, following = await again, await queued

    assert isinstance(cut_off.exception(), httpx.TransportError)
    assert told.outcome.text == "1"
    assert following.outcome.text == "2"
    assert world.waiting_steps(gate) == 1


async def test_a_step_whose_client_hung_up_is_found_by_its_key(
    world: World, here: RawEpisode, there: RawEpisode
) -> None:
    gate = "hung-up"
    left = asyncio.create_task(step(here, "wait", {"gate": gate}, key="e"))
    await until(lambda: world.waiting_steps(gate) == 1)
    left.cancel()
    await asyncio.wait([left])
    again = asyncio.create_task(step(there, "wait", {"gate": gate}, key="e"))
    world.open_gate(gate)

    assert (await again).outcome.text == "1"
    assert await counted(here) == 2
    assert world.waiting_steps(gate) == 1


@pytest.mark.needs("third-party-images")
async def test_a_repeated_step_runs_once_in_a_third_party_image_without_keys(world: World) -> None:
    """The gateway keeps the outcomes of the steps, because the server knows no keys."""
    environment = world.environments[1]
    async with world.http(0) as one, world.http(1) as other:
        here = RawEpisode(one, new_sid(), environment)
        created = await create(one, here.sid, env_name=environment, split="train", index=0)
        assert created.status_code == 200, created.text
        there = replace(here, http=other)
        inc = {"op": "inc", "by": 7}
        together = await asyncio.gather(*(step(each, "step", inc, key="f") for each in (here, there) for _ in range(3)))
        later = [await step(each, "step", inc, key="f") for each in (there, here)]
        conflict = await step(there, "step", {"op": "inc", "by": 8}, key="f")
        # Only one replica has seen the first of these. The other one reads its outcome from the store.
        other_key = await step(here, "step", {"op": "inc", "by": 10}, key="g")
        conflict_elsewhere = await step(there, "step", {"op": "inc", "by": 20}, key="g")
        again_elsewhere = await step(there, "step", {"op": "inc", "by": 10}, key="g")
        value = await step(here, "step", {"op": "noop"})
        await delete_all([here])

    results = [each.outcome.result for each in (*together, *later)]
    assert all(result == results[0] for result in results), results
    assert other_key.outcome.result == again_elsewhere.outcome.result
    assert (conflict.status, conflict_elsewhere.status) == (409, 409)
    assert '"value": 17' in value.body.replace('\\"', '"').replace('":17', '": 17'), value.body
    await at_rest(world)
