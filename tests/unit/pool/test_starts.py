"""Consequences of a failed start that tests/service/test_reasons.py does not cover with a whole gateway."""

from __future__ import annotations

import pytest

from gateway.core.environment import UpstreamKind
from gateway.core.errors import EnvironmentUnavailable, PoolExhausted
from gateway.core.ids import WorkerId
from gateway.core.leader_lease import Lead, LeaderLease
from gateway.core.scaling import Demands
from gateway.core.worker import EnvironmentLoad, Worker
from gateway.metrics import Metrics
from gateway.pool.starts import TRIALS_ALONE, WorkerStarts
from gateway.stores.memory.sessions import MemoryStore
from gateway.upstreams.ors.own import OrsUpstream
from gateway.upstreams.transport import HttpTransport
from tests.contract.store_worlds import MATH, opening, queued
from tests.fakes.workers import FakeBackend, Start
from tests.service.stack import environment, stack


def starts(store: MemoryStore, backend: FakeBackend, fence: int) -> WorkerStarts:
    relay = HttpTransport()
    return WorkerStarts(
        store=store,
        backend=backend,
        upstreams={UpstreamKind.OWN: OrsUpstream(relay, secret=b"a secret")},
        transport=relay,
        metrics=Metrics(),
        lease=LeaderLease(Lead(fence)),
        demands=Demands(),
    )


def worker(number: int = 0) -> Worker:
    return Worker(id=WorkerId(f"w{number}"), environment=MATH, digest="d", slots=1)


@pytest.mark.parametrize("leads", [True, False])
async def test_openings_fail_only_with_a_failed_start_of_the_leader(leads: bool) -> None:
    async with stack() as built:
        built.backend.starts[MATH] = Start.REFUSED
        store = built.store
        mine = starts(store, built.backend, fence=(await store.lead("me", ttl_s=60)).fence if leads else 0)
        waiting = await queued(store, opening(), wait_s=0.5)

        await mine.begin(worker())
        await mine.run(worker(), environment())

        with pytest.raises(EnvironmentUnavailable if leads else PoolExhausted):
            await waiting


async def test_the_ids_of_starting_workers_are_known_before_the_store_knows_them() -> None:
    async with stack() as built:
        mine = starts(built.store, built.backend, fence=0)
        assert mine.ids() == frozenset()

        await mine.begin(worker())

        assert mine.ids() == {"w0"}
        assert "w0" in mine


@pytest.mark.parametrize("is_told", [True, False])
async def test_a_start_whose_worker_was_drained_leaves_nothing_behind_and_is_not_a_failure(
    is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with stack() as built:
        built.backend.starts[MATH] = Start.NEVER_READY if is_told else Start.READY
        mine = starts(built.store, built.backend, fence=1)
        await mine.begin(worker())
        await built.store.drain_worker(worker().id)
        if is_told:
            mine.give_up(worker().id)

        await mine.run(worker(), environment())

        assert await built.store.worker(worker().id) is None
        assert built.backend.stopped == ["w0"]
        assert not mine.is_put_off(MATH)
        assert not mine.is_trial(MATH)
    assert "worker_start_failed" not in caplog.text


async def test_a_trial_is_wanted_only_after_an_opening_since_the_last_failure() -> None:
    async with stack() as built:
        built.backend.starts[MATH] = Start.REFUSED
        mine = starts(built.store, built.backend, fence=1)
        for number in range(TRIALS_ALONE):
            assert not mine.wants_trial(MATH, EnvironmentLoad(arrivals=number))
            await mine.begin(worker(number))
            await mine.run(worker(number), environment())

        assert not mine.wants_trial(MATH, EnvironmentLoad(arrivals=7))  # earlier openings have been answered
        assert not mine.wants_trial(MATH, EnvironmentLoad(arrivals=7))
        assert mine.wants_trial(MATH, EnvironmentLoad(arrivals=8))
        assert not mine.wants_trial(MATH, EnvironmentLoad(arrivals=2)), "a store that lost its data counts anew"
        assert mine.wants_trial(MATH, EnvironmentLoad(arrivals=3))
