"""Events between two steps of the control loop or of an opening. Each case once lost a session or a worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import httpx
import pytest

from gateway.core.errors import BackendError
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.leader_lease import LeaderLease
from gateway.core.session import CloseReason
from gateway.core.worker import BackendWorker, EnvironmentLoad, WorkerState
from gateway.sessions.cache import session_id
from gateway.stores.memory.sessions import MemoryStore
from tests.deadlines import HANG_S
from tests.fakes.clock import Clock
from tests.fakes.eventually import eventually, until
from tests.fakes.workers import FakeBackend
from tests.service.stack import OWNER, Replica, environment, running, stack
from tests.service.wire import call, create, delete, under_way


class _SlowToLoad(MemoryStore):
    """Returns stale loads: `load` returns only once no worker that it read as starting still starts."""

    def __init__(self) -> None:
        super().__init__()
        self.is_slow = asyncio.Event()

    async def load(self) -> Mapping[EnvironmentName, EnvironmentLoad]:
        loads = await super().load()
        starting = [
            entry.worker.id
            for load in loads.values()
            for entry in load.workers
            if entry.worker.state is WorkerState.STARTING
        ]
        for id in starting:
            self.is_slow.set()
            await eventually(partial(self._has_ended, id))
        return loads

    async def _has_ended(self, id: WorkerId) -> None:
        worker = await self.worker(id)
        assert worker is None or worker.state is not WorkerState.STARTING


async def test_a_worker_that_becomes_ready_while_the_loop_scans_is_not_treated_as_an_abandoned_start() -> None:
    async with stack(environment(slots=1, max_workers=1)) as built:
        store = _SlowToLoad()
        gateway = Replica(store=store, backend=built.backend, environments=built.environments, name="one")
        built.replicas.append(gateway)
        built.backend.may_start.clear()
        async with gateway.looping(), gateway.serving() as client, under_way(create(client)) as [creating]:
            await until(lambda: built.backend.asked == 1)
            await until(store.is_slow.is_set)
            built.backend.may_start.set()

            answer = await creating

            for _ in range(3):
                await gateway.pool.tick()
            assert answer.status_code == 200
            assert (await call(client)).status_code == 200
            assert built.backend.stopped == []
        await store.aclose()


class _SlowToPause(FakeBackend):
    """A backend whose pause of a worker waits for the test, and may fail after it worked."""

    def __init__(self, folder: Any) -> None:
        super().__init__(folder)
        self.is_pausing = asyncio.Event()
        self.may_pause = asyncio.Event()
        self.fails = False

    async def pause(self, id: WorkerId, lease: LeaderLease | None = None) -> None:
        self.is_pausing.set()
        await self.may_pause.wait()
        await super().pause(id)
        if self.fails:
            raise BackendError("the engine's answer was lost")


def napping(folder: Any, clock: Clock) -> tuple[_SlowToPause, Replica]:
    """Return a replica that pauses a worker after 10 s of idle time, and its backend."""
    backend = _SlowToPause(folder)
    kind = environment(slots=1, max_workers=1, pause_idle_s=10.0, idle_worker_s=1000.0)
    store = MemoryStore(clock=clock)
    return backend, Replica(store=store, backend=backend, environments=[kind], name="one")


async def _idle(gateway: Replica, client: httpx.AsyncClient, clock: Clock) -> None:
    await create(client, sid="before")
    await delete(client, sid="before")
    await gateway.eventually_workers(1, state=WorkerState.READY)
    clock.advance(20)


async def test_a_worker_that_a_create_needs_during_its_pause_runs_when_it_serves() -> None:
    clock = Clock()
    async with stack() as built:
        backend, gateway = napping(built.backend._folder, clock)
        async with gateway.looping(), gateway.serving() as client:
            await _idle(gateway, client, clock)
            await until(backend.is_pausing.is_set)
            async with under_way(create(client, sid="now")) as [creating]:
                await gateway.eventually_waiting(1)
                await gateway.pool.tick()  # requests a resume in the middle of the pause
                backend.may_pause.set()
                answer = await creating

            assert answer.status_code == 200
            assert backend.paused == set()
        await gateway.aclose()
        await backend.aclose()


async def test_a_worker_whose_pause_may_have_worked_is_resumed_before_it_takes_sessions() -> None:
    clock = Clock()
    async with stack() as built:
        backend, gateway = napping(built.backend._folder, clock)
        backend.fails = True
        async with gateway.looping(), gateway.serving() as client:
            await _idle(gateway, client, clock)
            await until(backend.is_pausing.is_set)
            backend.may_pause.set()
            answer = await create(client, sid="now")

            assert answer.status_code == 200
            assert backend.paused == set()
        await gateway.aclose()
        await backend.aclose()


class _Away(FakeBackend):
    """An engine that refuses immediately, and counts its requests."""

    def __init__(self, folder: Any) -> None:
        super().__init__(folder)
        self.looked = 0

    async def found(self) -> list[BackendWorker]:
        self.looked += 1
        raise BackendError("the engine does not answer")


async def test_an_unreachable_engine_is_queried_with_pauses_while_the_store_is_rebuilt() -> None:
    async with stack() as built:
        backend = _Away(built.backend._folder)
        store = MemoryStore(is_whole=False)
        gateway = Replica(store=store, backend=backend, environments=built.environments, name="one")
        async with gateway.looping():
            await until(lambda: backend.looked >= 3)
            began_at, looked = asyncio.get_running_loop().time(), backend.looked
            await until(lambda: backend.looked >= looked + 2)
            # Without a pause two more queries come within a millisecond. A loaded machine can only be slower.
            assert asyncio.get_running_loop().time() - began_at > 0.2
        await gateway.aclose()
        await store.aclose()


async def test_a_death_reported_to_another_replica_first_cancels_calls_at_this_replica_too() -> None:
    async with stack() as built:
        second = built.another()
        async with built.first.looping(), built.first.serving() as one, second.serving() as other:
            await create(one)
            worker = built.backend.only
            async with under_way(call(other, tool="gate")) as [calling]:
                await until(lambda: worker.waiting == 1)
                # A machine that disappears closes no connection: only the gateway can cancel the call.
                built.backend.unstoppable.add(worker.worker.id)
                for replica in (built.first, second):
                    with contextlib.suppress(BackendError):
                        await replica.worker_stops.lost(worker.worker.id)

                done, _ = await asyncio.wait({calling}, timeout=HANG_S)
                built.backend.unstoppable.clear()

                assert done, "the call hangs"
                assert "worker" in calling.result().text, calling.result().text


@pytest.mark.parametrize("reason", [CloseReason.DELETED, CloseReason.CANCELLED, CloseReason.OPERATOR])
@pytest.mark.parametrize("knows_leases", [True, False], ids=["refused", "created"])
async def test_a_session_that_is_ended_while_its_worker_opens_it_stays_ended(
    knows_leases: bool, reason: CloseReason
) -> None:
    async with running(environment(slots=2, max_workers=1)) as (stack, gateway, client):
        async with under_way(create(client, on_create="gate")) as [creating]:
            await until(lambda: any(one.waiting for one in stack.backend.workers.values()))
            worker = stack.backend.only
            worker.knows_leases = knows_leases
            await gateway.sessions.end(OWNER, "one", reason, wait_s=HANG_S)
            worker.gate.set()

            answer = await creating

        assert answer.status_code in (404, 410), answer.text
        await until(lambda: worker.sessions == {})
        assert worker.created == (0 if knows_leases else 1)
        assert worker.deleted.count(session_id(OWNER, "one")) == (1 if knows_leases else 2)
        assert (await create(client)).status_code == 200
