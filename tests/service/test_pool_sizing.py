"""Pools that size themselves: slots kept ready, workers paused and woken, starts that fail and the breaker."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from gateway.core.model import EnvironmentName, Limits, WorkerState, session_id
from tests.fakes.eventually import eventually, until
from tests.fakes.workers import Start
from tests.service.stack import OWNER, environment, running
from tests.service.wire import call, create, delete

MATH = EnvironmentName("math")


async def test_as_many_slots_as_are_wanted_stay_free() -> None:
    async with running(environment(slots=1, warm=2, max_workers=4)) as (_, gateway, client):
        await gateway.eventually_workers(2, state=WorkerState.READY)

        await create(client, sid="a")
        await gateway.eventually_workers(3, state=WorkerState.READY)
        await create(client, sid="b")

        await gateway.eventually_workers(4, state=WorkerState.READY)  # the most; one of them is free
        assert await gateway.used() == 2


async def test_a_prepared_exclusive_worker_is_handed_out_once() -> None:
    async with running(environment(slots=1, max_uses=1, warm=1, max_workers=3)) as (stack, gateway, client):
        await gateway.eventually_workers(1, state=WorkerState.READY)
        (prepared,) = stack.backend.workers

        await create(client, sid="a")
        await gateway.eventually_workers(1, state=WorkerState.READY)  # the next one
        await create(client, sid="b")

        load = (await stack.store.load())[MATH]
        assert (load.arrivals, load.hits) == (2, 2)
        holders = {session.worker for session in await stack.store.sessions()}
        assert prepared in holders
        assert len(holders) == 2
        await delete(client, sid="a")
        await until(lambda: prepared in stack.backend.stopped)


async def test_an_idle_worker_is_paused_and_woken_for_the_next_session() -> None:
    policy: dict[str, Any] = {"slots": 2, "max_workers": 2, "pause_idle_s": 0.01, "idle_worker_s": 60.0}
    async with running(environment(**policy)) as (stack, gateway, client):
        await create(client, sid="a")
        await delete(client, sid="a")
        await gateway.eventually_workers(1, state=WorkerState.PAUSED)
        await until(lambda: len(stack.backend.paused) == 1)

        assert (await create(client, sid="b")).status_code == 200

        assert stack.backend.asked == 1
        assert not stack.backend.paused
        assert list(stack.backend.only.sessions) == [session_id(OWNER, "b")]


async def test_a_paused_worker_is_woken_when_the_engine_answers_again() -> None:
    policy: dict[str, Any] = {"slots": 2, "max_workers": 2, "pause_idle_s": 0.01, "idle_worker_s": 60.0}
    async with running(environment(**policy)) as (stack, gateway, client):
        await create(client, sid="a")
        await delete(client, sid="a")
        await gateway.eventually_workers(1, state=WorkerState.PAUSED)
        await until(lambda: len(stack.backend.paused) == 1)

        stack.backend.is_down = True
        opening = asyncio.ensure_future(create(client, sid="b"))
        await gateway.eventually_waiting(1)
        stack.backend.is_down = False

        assert (await opening).status_code == 200
        assert stack.backend.asked == 1


async def test_a_paused_worker_is_stopped_when_it_was_idle_for_too_long() -> None:
    policy: dict[str, Any] = {"slots": 2, "max_workers": 2, "pause_idle_s": 0.01, "idle_worker_s": 0.8}
    async with running(environment(**policy)) as (stack, gateway, client):
        await create(client, sid="a")
        await delete(client, sid="a")

        await gateway.eventually_workers(1, state=WorkerState.PAUSED)
        await gateway.eventually_workers(0)

        assert stack.backend.workers == {}


async def test_a_changed_image_rolls_over_at_once_although_old_workers_fill_the_pool() -> None:
    async with running(environment(slots=1, max_workers=1)) as (stack, gateway, client):
        await create(client, sid="old")
        (old,) = stack.backend.workers

        gateway.catalog.replace(replace(gateway.catalog.named("math"), image_id="sha256:two"))
        assert (await create(client, sid="new")).status_code == 200

        assert (await call(client, sid="old")).status_code == 200
        assert len(stack.backend.workers) == 2
        await delete(client, sid="old")
        await until(lambda: old in stack.backend.stopped)
        assert (await call(client, sid="new")).status_code == 200


async def test_a_split_with_resources_of_its_own_has_workers_of_its_own() -> None:
    math = environment(max_workers=2)
    hard = replace(math, name=EnvironmentName("math.test"), base=math.name, limits=Limits(memory_bytes=2**30))
    async with running(replace(math, splits={"test": hard})) as (stack, gateway, client):
        easy = {"env_name": "math", "split": "train", "index": 0}
        for sid, wish in (("easy", easy), ("hard", easy | {"split": "test"})):
            assert (await client.post("/create", json=wish, headers={"X-Session-ID": sid})).status_code == 200

        assert len(await gateway.workers("math")) == 1
        assert len(await gateway.workers("math.test")) == 1
        limits = {worker.environment.limits.memory_bytes for worker in stack.backend.workers.values()}
        assert limits == {math.limits.memory_bytes, 2**30}
        assert (await call(client, sid="hard")).status_code == 200
        listed = (await client.get("/list_environments")).json()
        assert listed == ["math"]
        refused = await create(client, sid="by name", env_name="math.test")
        assert refused.status_code in (400, 404)


async def test_openings_fail_at_once_while_the_breaker_is_open_and_not_any_more_when_workers_start_again() -> None:
    async with running(environment(slots=1)) as (stack, _, client):
        stack.backend.starts[MATH] = Start.DIES
        first = await create(client, sid="a")
        assert first.status_code == 503
        assert "the last words of math" in first.text

        assert (await create(client, sid="a")).status_code == 503
        asked = stack.backend.asked
        second = await create(client, sid="b")

        assert second.status_code == 503
        assert "does not start" in second.text
        assert int(second.headers["retry-after"]) >= 1
        assert stack.backend.asked - asked <= 1

        stack.backend.starts[MATH] = Start.READY

        async def opens() -> None:
            assert (await create(client, sid="c")).status_code == 200

        await eventually(opens)
        assert (await create(client, sid="c")).status_code == 200


async def test_after_some_failures_nobody_waits_for_a_trial_and_somebody_who_asked_begins_one() -> None:
    async with running(environment(slots=1, start_s=0.2)) as (stack, _, client):
        stack.backend.starts[MATH] = Start.NEVER_READY

        async def failed_thrice() -> None:
            assert stack.backend.asked >= 3
            assert (await stack.store.load())[MATH].broken_s > 2.0

        while stack.backend.asked < 3:
            assert (await create(client, sid="a")).status_code == 503
        await eventually(failed_thrice)
        assert "was not ready within 0.2 s" in (await create(client, sid="a")).text
        stack.backend.starts[MATH] = Start.READY

        asked = stack.backend.asked
        refused = await create(client, sid="b")  # asks, and is refused at once; so the next trial begins

        assert refused.status_code == 503
        await until(lambda: stack.backend.asked == asked + 1)

        async def opens() -> None:
            assert (await create(client, sid="c")).status_code == 200

        await eventually(opens)


async def test_an_engine_that_is_away_fails_nobody_who_can_wait() -> None:
    async with running(environment(slots=1)) as (stack, gateway, client):
        stack.backend.is_down = True
        opening = asyncio.ensure_future(create(client, sid="a"))
        await gateway.eventually_waiting(1)
        await until(lambda: stack.backend.asked >= 2)

        assert not opening.done()
        stack.backend.is_down = False
        assert (await opening).status_code == 200
