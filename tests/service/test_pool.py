"""The life of workers: start, replacement, retirement, and adoption by another leader."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest

from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.leader_lease import LEASE_S
from gateway.core.session import CloseReason
from gateway.core.worker import EnvironmentLoad, Worker, WorkerState
from gateway.sessions.cache import session_id
from gateway.stores.memory.sessions import MemoryStore
from tests.fakes.clock import Clock
from tests.fakes.eventually import eventually, until
from tests.fakes.workers import FakeBackend, Start
from tests.service.stack import OWNER, Replica, environment, running, stack
from tests.service.wire import call, create, delete, under_way


async def test_the_least_number_of_workers_is_kept_without_any_session() -> None:
    async with running(environment(min_workers=2, max_workers=3)) as (stack, gateway, _):
        await gateway.eventually_workers(2, state=WorkerState.READY)

        assert stack.backend.asked == 2


async def test_idle_workers_are_retired_down_to_the_least_number() -> None:
    async with running(environment(slots=1, min_workers=1, max_workers=3, idle_worker_s=0)) as (stack, gateway, client):
        await asyncio.gather(*(create(client, sid=f"s{number}") for number in range(3)))
        for number in range(3):
            await delete(client, sid=f"s{number}")

        await gateway.eventually_workers(1)

        assert len(stack.backend.workers) == 1
        assert len(stack.backend.stopped) == 2
        assert (await create(client, sid="more")).status_code == 200


async def test_a_worker_that_is_used_is_not_retired() -> None:
    async with running(environment(slots=1, max_workers=2, idle_worker_s=0)) as (stack, gateway, client):
        await asyncio.gather(create(client, sid="a"), create(client, sid="b"))
        await delete(client, sid="a")

        await gateway.eventually_workers(1)

        assert list(stack.backend.only.sessions) == [session_id(OWNER, "b")]
        assert (await call(client, sid="b")).status_code == 200


async def test_each_session_gets_a_fresh_worker_where_a_worker_is_used_once() -> None:
    async with running(environment(slots=1, max_uses=1, max_workers=2)) as (stack, gateway, client):
        for number in range(3):
            assert (await create(client, sid=f"s{number}")).status_code == 200
            await delete(client, sid=f"s{number}")

        await gateway.eventually_workers(0)

        assert stack.backend.asked == 3
        assert len(set(stack.backend.stopped)) == 3


async def test_a_worker_is_replaced_after_its_last_use_and_still_serves_its_open_sessions() -> None:
    async with running(environment(slots=2, max_uses=3, max_workers=2)) as (stack, _, client):
        await create(client, sid="a")
        old = stack.backend.only
        await delete(client, sid="a")
        await create(client, sid="b")
        await create(client, sid="c")

        await create(client, sid="d")

        assert {session_id(OWNER, "b"), session_id(OWNER, "c")} == set(old.sessions)
        assert len(stack.backend.workers) == 2
        assert (await call(client, sid="b")).status_code == 200
        await delete(client, sid="b")
        await delete(client, sid="c")
        await until(lambda: old.worker.id in stack.backend.stopped)


async def test_workers_of_an_old_revision_serve_their_sessions_and_take_no_new_sessions() -> None:
    clock = Clock()
    async with stack(environment(max_workers=2), clock=clock) as built:
        async with built.first.looping(), built.first.serving() as client:
            await create(client, sid="old")
        clock.advance(LEASE_S)
        old = built.backend.only
        newer = built.another(environments=[environment(image="two", max_workers=2)])
        async with newer.looping(), newer.serving() as client:
            await newer.eventually_workers(1, state=WorkerState.DRAINING)

            assert (await create(client, sid="new")).status_code == 200
            assert (await call(client, sid="old")).status_code == 200
            assert list(old.sessions) == [session_id(OWNER, "old")]
            await delete(client, sid="old")
            await until(lambda: old.worker.id in built.backend.stopped)
            assert (await call(client, sid="new")).status_code == 200


async def test_workers_of_an_environment_that_is_no_longer_on_offer_are_stopped() -> None:
    clock = Clock()
    async with stack(environment(), environment("coding"), clock=clock) as built:
        async with built.first.looping(), built.first.serving() as client:
            await create(client, env_name="coding")
        clock.advance(LEASE_S)
        later = built.another(environments=[environment()])
        async with later.looping():
            await later.eventually_workers(0, "coding")

        assert built.backend.workers == {}


async def test_one_of_two_replicas_leads_and_no_worker_is_started_twice() -> None:
    async with stack(environment(slots=1, max_workers=4)) as built:
        second = built.another()
        async with built.first.looping(), second.looping(), second.serving() as client:
            await asyncio.gather(*(create(client, sid=f"s{number}") for number in range(4)))

            assert built.backend.asked == 4
            leads = [await replica.pool.tick() for replica in (built.first, second)]
            assert sorted(leads) == [False, True]


async def test_a_leader_replaces_a_worker_that_a_dead_leader_was_starting() -> None:
    async with stack(environment(slots=1, max_workers=1)) as built:
        kind = built.environments[0]
        left = Worker(id=WorkerId("left"), environment=kind.name, digest=kind.digest(), slots=1)
        await built.store.add_worker(left)
        await built.backend.start(left, kind)

        async with built.first.looping(), built.first.serving() as client:
            answer = await create(client)

        assert answer.status_code == 200
        assert "left" in built.backend.stopped
        assert built.backend.only.worker.id != "left"


async def test_a_container_that_starts_after_its_leader_is_gone_is_removed_before_its_place_is_reused() -> None:
    async with stack(environment(slots=1, max_workers=1)) as built:
        kind = built.environments[0]
        left = Worker(id=WorkerId("left"), environment=kind.name, digest=kind.digest(), slots=1)
        await built.store.add_worker(left)

        async with built.first.looping(), built.first.serving() as client, under_way(create(client)) as [opening]:
            await until(lambda: built.backend.stopped == ["left"])
            await built.backend.start(left, kind)  # the engine was busy, and runs the requested start only now
            asked = built.backend.asked
            await until(lambda: built.backend.asked > asked)
            stopped_before = list(built.backend.stopped)
            answer = await opening

        assert stopped_before == ["left", "left"], "its place was given away"
        assert answer.status_code == 200
        assert "left" not in built.backend.workers


async def test_a_loop_that_ends_leaves_no_half_started_worker() -> None:
    async with stack(environment(min_workers=1)) as built:
        built.backend.may_start.clear()
        async with built.first.looping():
            await until(lambda: built.backend.asked == 1)

        assert built.backend.workers == {}
        assert await built.first.workers() == []


async def test_starts_that_failed_are_tried_again_only_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[int] = []

    def long_pause(count: int) -> float:
        failures.append(count)
        return 1000.0

    monkeypatch.setattr("gateway.pool.starts.backoff_s", long_pause)
    async with running(environment(max_workers=1)) as (stack, gateway, client):
        stack.backend.starts[gateway.catalog.default.name] = Start.REFUSED
        refused = await create(client)
        async with under_way(create(client, sid="two")):
            await gateway.eventually_waiting(1)
            for _ in range(20):
                await gateway.pool.tick()

            assert refused.status_code == 503
            assert stack.backend.asked == 1
            assert failures == [1]


async def test_failures_in_a_row_are_counted_until_a_start_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[int] = []

    def no_pause(count: int) -> float:
        failures.append(count)
        return 0.0

    monkeypatch.setattr("gateway.pool.starts.backoff_s", no_pause)
    async with running(environment(slots=1, max_workers=1, max_uses=1)) as (stack, gateway, client):
        name = gateway.catalog.default.name
        for how in (Start.REFUSED, Start.DIES, Start.READY, Start.REFUSED):
            stack.backend.starts[name] = how
            await create(client, sid=how.value)
            await delete(client, sid=how.value)
            await gateway.eventually_workers(0)

    assert failures == [1, 2, 1]


async def test_an_engine_that_does_not_answer_is_queried_again_until_the_worker_is_gone() -> None:
    async with running(environment(slots=1, max_workers=1, idle_worker_s=0)) as (stack, gateway, client):
        await create(client)
        stack.backend.is_down = True
        await delete(client)
        await gateway.eventually_workers(1, state=WorkerState.DRAINING)

        stack.backend.is_down = False

        await gateway.eventually_workers(0)
        assert stack.backend.workers == {}


class _SlowToMark(MemoryStore):
    """Lets a worker die after it answered and before the store marks it as ready."""

    def __init__(self, backend: FakeBackend) -> None:
        super().__init__()
        self._backend = backend
        self.deaths = 0

    async def worker_ready(self, id: WorkerId, address: str, *, slots: int = 0) -> bool:
        if self.deaths == 0:
            self.deaths += 1
            await self._backend.workers[id].die()
            for _ in range(10):  # the loop is notified of the death; a remote store takes as long
                await asyncio.sleep(0)
        return await super().worker_ready(id, address, slots=slots)


async def test_a_worker_that_dies_just_as_it_becomes_ready_is_not_kept() -> None:
    async with stack(environment(slots=1, max_workers=1)) as built:
        store = _SlowToMark(built.backend)
        replica = Replica(store=store, backend=built.backend, environments=built.environments, name="slow")
        async with replica.looping(), replica.serving() as client:
            first = await create(client)
            second = first if first.status_code == 200 else await create(client)

            assert store.deaths == 1
            assert second.status_code == 200, second.text
        await replica.aclose()
        await store.aclose()


class _RebuiltMeanwhile(MemoryStore):
    """Loses a worker that just became ready, and gets it back from another leader, which found it running."""

    async def worker_ready(self, id: WorkerId, address: str, *, slots: int = 0) -> bool:
        worker = await self.worker(id)
        assert worker is not None
        await self.remove_worker(id, CloseReason.WORKER_LOST)
        await self.adopt(replace(worker, address=address, state=WorkerState.READY), [], fence=0)
        return await super().worker_ready(id, address, slots=slots)


async def test_a_worker_that_another_leader_adopted_while_it_started_is_kept() -> None:
    async with stack(environment(slots=1, max_workers=1)) as built:
        store = _RebuiltMeanwhile()
        replica = Replica(store=store, backend=built.backend, environments=built.environments, name="late")
        async with replica.looping(), replica.serving() as client:
            assert (await create(client)).status_code == 200
            assert (await call(client)).status_code == 200

            assert (built.backend.asked, built.backend.stopped) == (1, [])
        await replica.aclose()
        await store.aclose()


class _ReadySince(MemoryStore):
    """Marks workers as ready right after `load` read them, as a replica does that led until now."""

    def __init__(self, addresses: dict[WorkerId, str]) -> None:
        super().__init__()
        self._addresses = addresses

    async def load(self) -> Mapping[EnvironmentName, EnvironmentLoad]:
        loads = await super().load()
        for id, address in self._addresses.items():
            await self.worker_ready(id, address)
        return loads


async def test_a_start_of_the_previous_leader_that_has_just_ended_is_not_treated_as_abandoned() -> None:
    async with stack(environment(slots=1, max_workers=1)) as built:
        kind = built.environments[0]
        id = WorkerId("w1")
        worker = Worker(id=id, environment=kind.name, digest=kind.digest(), slots=1, max_uses=0)
        store = _ReadySince({id: await built.backend.start(worker, kind)})
        await store.add_worker(worker)
        replica = Replica(store=store, backend=built.backend, environments=built.environments, name="next")

        async with replica.looping(), replica.serving() as client:
            assert (await create(client)).status_code == 200

            assert (built.backend.asked, built.backend.stopped) == (1, [])
        await replica.aclose()
        await store.aclose()


async def test_an_abandoned_start_keeps_its_place_until_its_worker_is_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with stack(environment(slots=1, max_workers=1)) as built:
        kind = built.environments[0]
        left = Worker(id=WorkerId("left"), environment=kind.name, digest=kind.digest(), slots=1, max_uses=0)
        await built.backend.start(left, kind)
        store = MemoryStore()
        await store.add_worker(left)
        built.backend.unstoppable.add(left.id)
        replica = Replica(store=store, backend=built.backend, environments=built.environments, name="next")

        async with replica.looping(), replica.serving() as client, under_way(create(client)) as [creating]:
            await eventually(partial(_drains, store, left.id))
            await until(lambda: "worker_not_stopped" in caplog.text)
            for _ in range(3):
                await replica.pool.tick()
            assert list(built.backend.workers) == [left.id]
            assert not await store.worker_ready(left.id, "unix:/from/who/led/before")

            built.backend.unstoppable.clear()

            assert (await creating).status_code == 200
            assert built.backend.stopped == [left.id]
            assert built.backend.asked == 2
        await replica.aclose()
        await store.aclose()


async def _drains(store: MemoryStore, id: WorkerId) -> None:
    worker = await store.worker(id)
    assert worker is not None
    assert worker.state is WorkerState.DRAINING


async def test_stopping_everything_ends_sessions_and_workers() -> None:
    async with running(environment(slots=1, max_workers=2)) as (stack, gateway, client):
        await asyncio.gather(create(client, sid="a"), create(client, sid="b"))

        await gateway.pool.stop_all()

        assert stack.backend.workers == {}
        answer = await call(client, sid="a")
        assert answer.status_code == 410
        assert CloseReason.SHUTDOWN.value in answer.text


async def test_a_change_of_pool_sizes_alone_replaces_no_worker() -> None:
    async with stack(environment(max_workers=1)) as built:
        async with built.first.looping(), built.first.serving() as client:
            await create(client)
        kind = built.environments[0]
        bigger = replace(kind, pool=replace(kind.pool, max_workers=7, idle_worker_s=1000.0))
        later = built.another(environments=[bigger])
        async with later.looping(), later.serving() as client:
            assert (await create(client, sid="two")).status_code == 200

        assert built.backend.asked == 1
        assert len(built.backend.only.sessions) == 2


async def test_workers_of_a_machine_that_drains_serve_their_sessions_and_take_no_new_sessions() -> None:
    async with running(environment(slots=4, max_workers=2)) as (stack, gateway, client):
        await create(client, sid="old")
        old = stack.backend.only

        stack.backend.draining.add(old.worker.id)

        await gateway.eventually_workers(1, state=WorkerState.DRAINING)
        assert (await create(client, sid="new")).status_code == 200
        assert (await call(client, sid="old")).status_code == 200
        assert list(old.sessions) == [session_id(OWNER, "old")]
        await delete(client, sid="old")
        await until(lambda: old.worker.id in stack.backend.stopped)
        assert (await call(client, sid="new")).status_code == 200


async def test_an_idle_worker_of_a_machine_that_drains_is_stopped_and_replaced_elsewhere() -> None:
    async with running(environment(min_workers=1, max_workers=2)) as (stack, gateway, _):
        await gateway.eventually_workers(1, state=WorkerState.READY)
        old = stack.backend.only

        stack.backend.draining.add(old.worker.id)

        await until(lambda: old.worker.id in stack.backend.stopped)
        await gateway.eventually_workers(1, state=WorkerState.READY)
        assert stack.backend.only.worker.id != old.worker.id
