"""Pools that size themselves: free slots, paused workers, failed starts, the circuit breaker, and leadership."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.environment import Environment, Limits, PoolPolicy
from gateway.core.errors import NotLeading
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.leader_lease import LEASE_S
from gateway.core.worker import EnvironmentLoad, Worker, WorkerState
from gateway.pool.starts import BREAKS, STARTS_AT_ONCE
from gateway.sessions.cache import session_id
from gateway.stores.memory.sessions import MemoryStore
from tests.fakes.clock import Clock
from tests.fakes.eventually import eventually, until
from tests.fakes.workers import FakeBackend, Start
from tests.service.stack import OWNER, Replica, environment, running, stack
from tests.service.wire import call, create, delete, under_way

MATH = EnvironmentName("math")


async def test_the_configured_number_of_slots_stays_free() -> None:
    async with running(environment(slots=1, warm=2, max_workers=4)) as (_, gateway, client):
        await gateway.eventually_workers(2, state=WorkerState.READY)

        await create(client, sid="a")
        await gateway.eventually_workers(3, state=WorkerState.READY)
        await create(client, sid="b")

        await gateway.eventually_workers(4, state=WorkerState.READY)  # the maximum; two are free
        assert await gateway.used() == 2


async def test_a_prepared_exclusive_worker_is_assigned_once() -> None:
    async with running(environment(slots=1, max_uses=1, warm=1, max_workers=3)) as (stack, gateway, client):
        await gateway.eventually_workers(1, state=WorkerState.READY)
        (prepared,) = stack.backend.workers

        await create(client, sid="a")
        await gateway.eventually_workers(1, state=WorkerState.READY)  # the next prepared worker
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


async def test_a_changed_image_rolls_over_immediately_although_old_workers_fill_the_pool() -> None:
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


async def test_openings_fail_immediately_while_the_breaker_is_open_and_succeed_once_workers_start_again() -> None:
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


async def test_after_failed_starts_a_create_is_refused_immediately_and_triggers_the_next_trial() -> None:
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
        refused = await create(client, sid="b")  # refused immediately, but its request starts the next trial

        assert refused.status_code == 503
        await until(lambda: stack.backend.asked == asked + 1)

        async def opens() -> None:
            assert (await create(client, sid="c")).status_code == 200

        await eventually(opens)


class _TellsOfItsStops(FakeBackend):
    """Reports the end of a worker to all replicas before its `stop` returns, as engines do."""

    async def stop(self, id: WorkerId) -> None:
        if id in self.workers:
            self.announce(id)
            for _ in range(100):  # the other replica acts on the report first
                await asyncio.sleep(0)
        await super().stop(id)


async def test_failed_starts_count_once_and_open_the_breaker_although_another_replica_sees_the_workers_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kind = environment(slots=1, max_workers=2, start_s=0.2)
    async with stack(kind) as built:
        backend = _TellsOfItsStops(built.backend._folder)
        backend.starts[MATH] = Start.NEVER_READY
        one, two = (
            Replica(store=built.store, backend=backend, environments=[kind], name=name) for name in ("one", "two")
        )
        async with one.looping(), two.looping(), one.serving() as client:
            answers = [await create(client, sid=f"s{number}") for number in range(2 * BREAKS)]

            failures = [int(count) for count in re.findall(r"worker_start_failed .*? failures=(\d+)", caplog.text)]
            assert {answer.status_code for answer in answers} == {503}
            assert all("was not ready within 0.2 s" in answer.text for answer in answers)
            assert failures == [*range(1, len(failures) + 1)]
            assert len(failures) >= BREAKS
            assert "worker_lost" not in caplog.text
            assert not any(b"gateway_workers_lost_total{" in each.metrics.exposition() for each in (one, two))
        for replica in (one, two):
            await replica.aclose()


async def test_an_unreachable_engine_fails_no_opening_that_can_wait() -> None:
    async with running(environment(slots=1)) as (stack, gateway, client):
        stack.backend.is_down = True
        opening = asyncio.ensure_future(create(client, sid="a"))
        await gateway.eventually_waiting(1)
        await until(lambda: stack.backend.asked >= 2)

        assert not opening.done()
        stack.backend.is_down = False
        assert (await opening).status_code == 200


async def test_an_engine_starts_a_limited_number_of_workers_concurrently_and_the_rest_afterwards() -> None:
    number = STARTS_AT_ONCE + 5
    async with running(environment(slots=1, max_workers=number)) as (stack, gateway, client):
        stack.backend.may_start.clear()
        async with under_way(*(create(client, sid=f"s{n}") for n in range(number))) as creating:
            await gateway.eventually_workers(number, state=WorkerState.STARTING)
            await until(lambda: stack.backend.asked >= STARTS_AT_ONCE)
            asked = stack.backend.asked
            stack.backend.may_start.set()
            answers = await asyncio.gather(*creating)

        assert asked == STARTS_AT_ONCE
        assert {answer.status_code for answer in answers} == {200}
        assert stack.backend.asked == number


async def test_each_of_several_engines_has_its_own_limit_of_concurrent_starts() -> None:
    number = 2 * STARTS_AT_ONCE + 3
    async with stack(environment(slots=1, max_workers=number)) as built:
        built.backend.machines = 2
        built.backend.may_start.clear()
        gateway = built.first
        async with (
            gateway.looping(),
            gateway.serving() as client,
            under_way(*(create(client, sid=f"s{n}") for n in range(number))) as creating,
        ):
            await gateway.eventually_workers(number, state=WorkerState.STARTING)
            await until(lambda: built.backend.asked >= 2 * STARTS_AT_ONCE)
            asked = built.backend.asked
            built.backend.may_start.set()
            answers = await asyncio.gather(*creating)

        assert asked == 2 * STARTS_AT_ONCE
        assert {answer.status_code for answer in answers} == {200}


async def test_no_trial_starts_without_a_new_create(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.pool.starts.backoff_s", lambda failures: 0.0)  # only a request for a trial is missing
    async with running(environment(slots=1, start_s=0.2, max_workers=1)) as (stack, gateway, client):
        stack.backend.starts[MATH] = Start.REFUSED
        while stack.backend.asked < 3:
            assert (await create(client, sid="a")).status_code == 503
        await until(lambda: not gateway.pool._starts.ids())
        asked = stack.backend.asked

        for _ in range(5):
            await gateway.pool.tick()
            await until(lambda: not gateway.pool._starts.ids())
        unasked = stack.backend.asked
        assert (await create(client, sid="b")).status_code == 503

        assert unasked == asked
        await until(lambda: stack.backend.asked == asked + 1)


async def test_an_opening_starts_a_worker_immediately_and_not_at_the_next_tick_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.pool.loop.TICK_S", 3600.0)  # the loop scans once, and then only on request
    async with running(environment(slots=1, max_workers=2)) as (stack, gateway, client):
        await until(lambda: gateway.planner._looked_at is not None)

        assert (await create(client, sid="a")).status_code == 200
        assert (await create(client, sid="b")).status_code == 200

        assert stack.backend.asked == 2


# -- leadership -------------------------------------------------------------------------------------------------


async def test_a_loop_that_ends_releases_its_leadership() -> None:
    async with stack(clock=Clock()) as built:  # no leadership ever expires
        second = built.another()
        async with built.first.looping():
            await until(lambda: built.first.lease.fence)

        assert await second.pool.tick()


class _Usurped(MemoryStore):
    """While `is_usurped` is True, another replica takes the leadership at each scan of the control loop."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock=clock)
        self._moved = clock
        self.is_usurped = False

    async def load(self) -> Mapping[EnvironmentName, EnvironmentLoad]:
        loads = await super().load()
        if self.is_usurped:
            self._moved.advance(LEASE_S + 1)
            assert (await self.lead("usurper", ttl_s=3600)).fence
        return loads


DECISIONS: Mapping[str, PoolPolicy] = {
    "start": PoolPolicy(slots=1, min_workers=2, max_workers=2),
    "retire": PoolPolicy(slots=1, max_workers=2, idle_worker_s=10),
    "pause": PoolPolicy(slots=1, max_workers=2, idle_worker_s=3600, pause_idle_s=10),
    "drain": PoolPolicy(slots=1, max_workers=2, idle_worker_s=3600),
    "end a start": PoolPolicy(slots=1, max_workers=2, idle_worker_s=3600),
}


@pytest.mark.parametrize("decision", DECISIONS)
async def test_a_decision_made_before_another_replica_led_is_not_carried_out(decision: str) -> None:
    clock = Clock()
    kind = replace(environment(), pool=DECISIONS[decision])
    async with stack(kind) as built:
        store = _Usurped(clock)
        gateway = Replica(store=store, backend=built.backend, environments=[kind], name="frozen")
        await _a_worker(store, kind, decision)
        assert (await store.lead("frozen", ttl_s=3600)).fence
        clock.advance(20)
        before = (await store.load())[MATH].workers
        store.is_usurped = True

        with pytest.raises(NotLeading):
            await gateway.pool.tick()

        store.is_usurped = False
        after = (await store.load())[MATH].workers
        assert [entry.worker for entry in after] == [entry.worker for entry in before]
        assert (built.backend.asked, built.backend.stopped) == (0, [])
        await gateway.aclose()
        await store.aclose()


async def _a_worker(store: MemoryStore, kind: Environment, decision: str) -> None:
    """Add the worker that *decision* is about."""
    await store.start()
    digest = "an older make" if decision == "drain" else kind.digest()
    await store.add_worker(Worker(id=WorkerId("w1"), environment=MATH, digest=digest, slots=1))
    if decision != "end a start":
        await store.worker_ready(WorkerId("w1"), "unix:/nowhere")
