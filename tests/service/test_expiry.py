"""Expiry: the control loop ends idle sessions, but no session for which its worker still works."""

from __future__ import annotations

import asyncio

from gateway.sessions.cache import session_id
from tests.deadlines import HANG_S
from tests.fakes.clock import Clock
from tests.fakes.eventually import eventually, until
from tests.service.stack import IDLE_S, OWNER, environment, running, stack
from tests.service.wire import call, create, detail, under_way

ID = session_id(OWNER, "one")


async def test_an_idle_session_is_closed_at_its_worker_and_its_slot_is_free() -> None:
    clock = Clock()
    async with running(clock=clock) as (stack, gateway, client):
        await create(client)
        worker = stack.backend.only
        worker.sessions[ID].idle_s = IDLE_S + 1

        clock.advance(IDLE_S + 1)
        await gateway.eventually_used(0)

        assert worker.deleted == [ID]
        late = await call(client)
        assert (late.status_code, "expired" in detail(late)) == (410, True)
        assert worker.ran == []


async def test_an_expired_session_is_a_404_to_a_ping_as_the_sdks_expect() -> None:
    clock = Clock()
    async with running(clock=clock) as (stack, gateway, client):
        await create(client)
        stack.backend.only.sessions[ID].idle_s = IDLE_S + 1

        clock.advance(IDLE_S + 1)
        await gateway.eventually_used(0)

        answer = await client.post("/ping")
        assert (answer.status_code, answer.json()["reason"]) == (410, "expired")


async def test_the_reason_of_a_sessions_end_is_forgotten_after_a_while() -> None:
    clock = Clock()
    async with running(clock=clock) as (stack, gateway, client):
        await create(client)
        stack.backend.only.sessions[ID].idle_s = IDLE_S + 1
        clock.advance(IDLE_S + 1)
        await gateway.eventually_used(0)

        clock.advance(601)

        assert (await call(client)).status_code == 404


async def test_a_session_is_not_expired_before_its_time() -> None:
    clock = Clock()
    async with stack(clock=clock) as built, built.first.serving() as client:
        async with built.first.looping():
            await create(client)

        clock.advance(IDLE_S - 1)
        await built.first.pool.tick()

        assert await built.first.open_sessions() == 1


async def test_the_worker_is_queried_first_and_a_busy_session_is_renewed() -> None:
    clock = Clock()
    async with running(clock=clock) as (stack, gateway, client):
        await create(client)
        worker = stack.backend.only
        async with client.stream("POST", "/math/call", json={"name": "gate", "input": {}}):
            await until(lambda: worker.waiting == 1)
        await gateway.session_cache.write_notes()  # the trainer is gone, and the worker still runs the call

        clock.advance(IDLE_S + 1)
        await until(lambda: worker.lists_asked >= 1)
        await gateway.pool.tick()

        assert await gateway.open_sessions() == 1
        assert worker.sessions[ID].busy == 1
        worker.gate.set()
        assert (await call(client)).status_code == 200


async def test_the_idle_time_of_a_session_counts_from_the_end_of_its_last_call() -> None:
    clock = Clock()
    async with running(clock=clock) as (stack, gateway, client):
        await create(client)
        worker = stack.backend.only
        worker.sessions[ID].idle_s = 100.0

        clock.advance(IDLE_S + 1)
        await until(lambda: worker.lists_asked == 1)

        async def renewed() -> None:
            assert not await gateway.store.late(1)

        await eventually(renewed)
        still_open = await gateway.open_sessions()
        worker.sessions[ID].idle_s = IDLE_S + 1
        clock.advance(IDLE_S - 100 + 1)
        await gateway.eventually_used(0)

        assert still_open == 1


async def test_a_running_call_at_this_replica_keeps_its_session_open() -> None:
    clock = Clock()
    async with running(clock=clock) as (stack, gateway, client):
        await create(client)
        worker = stack.backend.only
        async with under_way(call(client, "gate")) as [calling]:
            await until(lambda: worker.waiting == 1)
            for _ in range(5):
                clock.advance(IDLE_S - 1)
                await gateway.session_cache.write_notes()

            assert await gateway.open_sessions() == 1
            worker.gate.set()
            assert (await calling).status_code == 200
        assert worker.lists_asked == 0


async def test_a_ping_restarts_the_idle_time() -> None:
    clock = Clock()
    async with running(clock=clock) as (_, gateway, client):
        await create(client)
        for _ in range(3):
            clock.advance(IDLE_S - 1)
            await client.post("/ping")
            await gateway.session_cache.write_notes()

        await gateway.pool.tick()

        assert await gateway.open_sessions() == 1


async def test_a_session_whose_worker_does_not_answer_is_ended_and_the_worker_drained() -> None:
    clock = Clock()
    async with running(environment(close_s=0.2), clock=clock) as (stack, gateway, client):
        await create(client, on_delete="hang")
        worker = stack.backend.only
        worker.listing.clear()

        clock.advance(IDLE_S + 1)

        await until(lambda: worker.worker.id in stack.backend.stopped)
        await gateway.eventually_used(0)


async def test_a_worker_that_does_not_answer_does_not_delay_other_sessions() -> None:
    clock = Clock()
    async with running(environment(close_s=300.0), environment("coding"), clock=clock) as (stack, _, client):
        await create(client)
        worker = stack.backend.only
        worker.listing.clear()
        try:
            clock.advance(IDLE_S + 1)
            await until(lambda: worker.lists_asked == 1)

            async with asyncio.timeout(HANG_S):  # far below the timeout of the silent worker
                served = await create(client, sid="two", env_name="coding")
        finally:
            worker.listing.set()

        assert served.status_code == 200


async def test_a_create_that_no_replica_finishes_releases_its_slot() -> None:
    clock = Clock()
    async with running(environment(slots=1, max_workers=1), clock=clock) as (stack, gateway, client):
        async with under_way(create(client, on_create="gate")):
            await until(lambda: stack.backend.workers and stack.backend.only.waiting == 1)

            clock.advance(2 * HANG_S)  # beyond setup and close time: the opening replica counts as dead
            await gateway.eventually_used(0)

        assert (await create(client, sid="two")).status_code == 200
