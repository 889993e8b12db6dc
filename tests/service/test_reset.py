"""Successive episodes under one name: the next episode takes over its predecessor's slot."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

from gateway.core.environment import Isolation
from gateway.core.episode import Action
from gateway.core.errors import InvalidRequest, PoolExhausted, SessionClosed, SessionNotFound
from gateway.core.session import CloseReason, EpisodeRequest, Session, SessionEnded, SessionSetup
from tests.fakes.eventually import eventually
from tests.service.stack import OWNER, Replica, environment, running, stack


async def reset(replica: Replica, name: str = "one", *, to: str = "math", within_s: float = 10, **spec: Any) -> Session:
    episode = uuid.uuid4().hex
    request = EpisodeRequest(
        owner=OWNER,
        name=name,
        environment=replica.catalog.named(to),
        setup=SessionSetup(spec=spec),
        fingerprint=episode,
        episode=episode,
        within_s=within_s,
    )
    return (await replica.sessions.reset(request)).session


async def test_the_next_episode_takes_the_slot_of_its_predecessor() -> None:
    async with running(environment(slots=1, max_workers=1)) as (built, first, _):
        before = await reset(first)
        after = await reset(first)

        assert after.worker == before.worker
        assert after.lease != before.lease
        assert after.episode != before.episode
        assert (await first.found()).episode == after.episode
        assert built.backend.only.deleted == [before.id]
        assert await first.used() == 1


async def test_concurrent_resets_on_a_full_pool_keep_their_slots_although_an_opening_waits() -> None:
    async with running(environment(slots=8, max_workers=1)) as (_, first, _client):
        names = [f"s{number}" for number in range(8)]
        await asyncio.gather(*(reset(first, name) for name in names))
        waiting = asyncio.ensure_future(reset(first, "late", within_s=60))
        await first.eventually_waiting(1)

        for _ in range(3):
            await asyncio.gather(*(reset(first, name) for name in names))

        assert not waiting.done()
        await first.sessions.close(OWNER, names[0])
        assert (await waiting).name == "late"


async def test_another_environment_takes_another_slot() -> None:
    environments = environment("math", slots=1, max_workers=1), environment("sums", slots=1, max_workers=1)
    async with running(*environments) as (_, first, _client):
        await reset(first)

        after = await reset(first, to="sums")

        assert after.environment == "sums"
        assert (await first.used("math"), await first.used("sums")) == (0, 1)


async def test_a_reset_of_a_single_use_worker_gets_a_new_worker() -> None:
    made = environment(slots=1, max_uses=1, max_workers=2)
    assert made.isolation is Isolation.SHARED  # the fake has no other isolation; max_uses=1 is enough here
    async with running(made) as (_, first, _client):
        before = await reset(first)

        after = await reset(first)

        assert after.worker != before.worker
        await first.eventually_used(1)


async def test_a_reset_aborts_the_running_step_of_the_previous_episode() -> None:
    async with running() as (built, first, _):
        await reset(first)
        acting = asyncio.ensure_future(first.act("one", Action(name="quiet")))

        async def waits() -> None:
            assert built.backend.only.waiting == 1

        await eventually(waits)
        await reset(first)

        with pytest.raises(SessionNotFound):
            await acting
        assert (await first.act("one", Action(name="go_on"))).error is None


async def test_a_refused_task_leaves_no_episode_and_no_slot() -> None:
    async with running(environment(slots=1, max_workers=1)) as (_, first, _client):
        await reset(first)

        with pytest.raises(InvalidRequest):
            await reset(first, on_create="refuse")

        await first.eventually_used(0)
        with pytest.raises(SessionClosed, match="open_failed"):
            await first.found()
        assert (await reset(first)).name == "one"


async def test_a_reset_that_finds_no_slot_in_time_is_refused_and_leaves_nothing() -> None:
    async with running(environment(slots=1, max_workers=1)) as (_, first, _client):
        await reset(first, "one")

        with pytest.raises(PoolExhausted):
            await reset(first, "two", within_s=0.05)

        assert await first.waiting() == 0
        assert (await reset(first, "one")).name == "one"


async def test_a_reset_that_is_cancelled_at_any_moment_leaves_one_slot_at_most() -> None:
    async with running(environment(slots=1, max_workers=1)) as (_, first, _client):
        for after in range(60):
            await reset(first)
            resetting = asyncio.ensure_future(reset(first))
            for _ in range(after):
                await asyncio.sleep(0)

            resetting.cancel()
            await asyncio.wait({resetting})

            if resetting.cancelled():
                await first.sessions.end(OWNER, "one", CloseReason.DELETED, wait_s=5)
                await first.eventually_used(0)


async def test_a_late_notice_of_the_previous_episodes_end_does_not_affect_the_next_episode() -> None:
    async with running() as (built, first, _):
        before = await reset(first)
        await reset(first)
        acting = asyncio.ensure_future(first.act("one", Action(name="quiet")))

        async def waits() -> None:
            assert built.backend.only.waiting == 1

        await eventually(waits)
        built.store._notices.publish(SessionEnded(before.id, before.lease))
        await asyncio.sleep(0)
        built.backend.only.gate.set()

        assert (await acting).error is None


async def test_a_replica_resets_an_episode_that_another_replica_serves() -> None:
    async with stack() as built:
        first, second = built.first, built.another()
        async with first.looping(), second.looping():
            await reset(first)
            after = await reset(second)

            async def follows() -> None:
                assert (await first.found()).lease == after.lease

            await eventually(follows)
            assert (await first.act("one", Action(name="go_on"))).error is None


async def test_the_step_count_is_that_of_the_current_episode() -> None:
    async with running() as (_, first, _client):
        await reset(first)
        for _ in range(3):
            await first.act("one", Action(name="go_on"))
        assert await first.steps("one") == 3

        await reset(first)

        assert await first.steps("one") == 0
        with pytest.raises(SessionNotFound):
            await first.steps("two")
