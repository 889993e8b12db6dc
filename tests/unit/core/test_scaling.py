"""The control loop's decisions, as tables of numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.core.environment import PoolPolicy
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.scaling import WINDOW_S, Demand, backoff_s, plan, rest_s
from gateway.core.worker import EnvironmentLoad, Worker, WorkerLoad, WorkerState

NOW, OLD = "wanted", "outdated"
READY, STARTING, DRAINING = WorkerState.READY, WorkerState.STARTING, WorkerState.DRAINING
PAUSED = WorkerState.PAUSED


def worker(
    state: WorkerState = READY, used: int = 0, *, idle_s: float = 0.0, slots: int = 4, make: str = NOW, id: str = ""
) -> WorkerLoad:
    made = Worker(
        id=WorkerId(id or f"{state}-{used}-{idle_s}"),
        environment=EnvironmentName("math"),
        digest=make,
        slots=slots,
        state=state,
    )
    return WorkerLoad(worker=made, used=used, idle_s=idle_s, age_s=1000.0)


def load(*workers: WorkerLoad, waiting: int = 0) -> EnvironmentLoad:
    return EnvironmentLoad(workers=workers, waiting=waiting)


def policy(
    least: int = 0, most: int = 4, *, slots: int = 4, uses: int = 0, idle_s: float = 60.0, learns: bool = False
) -> PoolPolicy:
    return PoolPolicy(
        slots=slots, min_workers=least, max_workers=most, max_uses=uses, idle_worker_s=idle_s, learns_slots=learns
    )


@pytest.mark.parametrize(
    ("wanted", "has", "starts"),
    [
        pytest.param(policy(), load(), 0, id="no worker starts without an opening"),
        pytest.param(policy(least=2), load(), 2, id="the minimum is kept"),
        pytest.param(policy(least=2), load(worker(STARTING)), 1, id="starting workers count toward the minimum"),
        pytest.param(policy(least=2), load(worker(used=4), worker()), 0, id="full workers count toward the minimum"),
        pytest.param(policy(), load(waiting=1), 1, id="one waiting opening starts one worker"),
        pytest.param(policy(), load(waiting=4), 1, id="one worker for as many openings as it has slots"),
        pytest.param(policy(), load(waiting=5), 2, id="a further opening starts a second worker"),
        pytest.param(policy(most=3), load(waiting=1000), 3, id="never more than allowed"),
        pytest.param(policy(), load(worker(used=4), waiting=1), 1, id="a full worker has no free slot"),
        pytest.param(policy(), load(worker(used=3), waiting=1), 0, id="free slots are used first"),
        pytest.param(policy(), load(worker(used=3), waiting=2), 1, id="openings beyond the free slots start one"),
        pytest.param(policy(), load(worker(STARTING), waiting=4), 0, id="starting workers count as room"),
        pytest.param(policy(), load(worker(STARTING), waiting=5), 1, id="openings beyond those slots start another"),
        pytest.param(policy(), load(worker(DRAINING, 1), waiting=1), 1, id="a draining worker is not room"),
        pytest.param(policy(most=1), load(worker(DRAINING, 1), waiting=9), 0, id="draining workers count in the limit"),
        pytest.param(policy(most=2), load(worker(make=OLD), waiting=1), 1, id="an old revision is not room"),
        pytest.param(
            policy(most=1), load(worker(make=OLD, used=1), waiting=1), 1, id="an old revision delays no new one"
        ),
        pytest.param(
            policy(most=1), load(*[worker(DRAINING, 1, make=OLD)] * 2, waiting=1), 0, id="at most twice the limit live"
        ),
        pytest.param(policy(least=1), load(worker(make=OLD)), 1, id="an old revision is not in the minimum"),
        pytest.param(policy(slots=4, uses=1), load(waiting=3), 3, id="workers for one use serve one opening each"),
        pytest.param(policy(slots=4, uses=2), load(waiting=3), 2, id="fewer uses than slots limit a worker"),
        pytest.param(policy(slots=4, uses=9), load(waiting=5), 2, id="more uses than slots change nothing"),
        pytest.param(
            policy(slots=1, most=8, least=3), load(waiting=2), 3, id="the larger of minimum and demand counts"
        ),
        pytest.param(policy(most=2), load(*[worker(used=4)] * 3, waiting=1), 0, id="no worker starts above the limit"),
        pytest.param(
            policy(), load(worker(used=3, slots=1), worker(used=3), waiting=1), 0, id="an overfull worker is no demand"
        ),
    ],
)
def test_as_many_workers_start_as_demand_and_minimum_need(
    wanted: PoolPolicy, has: EnvironmentLoad, starts: int
) -> None:
    assert plan(wanted, has, digest=NOW).start == starts


@pytest.mark.parametrize(
    ("wanted", "has", "starts"),
    [
        pytest.param(policy(learns=True), load(waiting=5), 2, id="the policy's number without a report"),
        pytest.param(
            policy(most=9, learns=True), load(worker(used=1, slots=1), waiting=5), 5, id="future workers hold as many"
        ),
        pytest.param(
            policy(most=9, learns=True),
            load(worker(used=8, slots=8), waiting=9),
            2,
            id="also above the policy's number",
        ),
        pytest.param(
            policy(most=9, learns=True),
            load(worker(used=1, slots=1), worker(used=2, slots=2), waiting=5),
            3,
            id="the largest report counts",
        ),
        pytest.param(
            policy(most=9, learns=True),
            load(worker(used=1, slots=1), worker(STARTING), waiting=5),
            4,
            id="a starting worker will hold as many",
        ),
        pytest.param(
            policy(most=9, learns=True),
            load(worker(used=1, slots=1, make=OLD), waiting=5),
            2,
            id="old revisions are ignored",
        ),
        pytest.param(
            policy(most=9, uses=1, learns=True),
            load(worker(used=8, slots=8), waiting=3),
            3,
            id="the limit of uses still applies",
        ),
        pytest.param(
            policy(most=9), load(worker(used=1, slots=1), waiting=5), 2, id="without learning the number stays"
        ),
    ],
)
def test_future_workers_are_expected_to_hold_as_many_slots_as_current_workers_reported(
    wanted: PoolPolicy, has: EnvironmentLoad, starts: int
) -> None:
    assert plan(wanted, has, digest=NOW).start == starts


@pytest.mark.parametrize(
    ("wanted", "has", "retired"),
    [
        pytest.param(policy(), load(worker(idle_s=60, id="a")), ["a"], id="idle for the allowed time"),
        pytest.param(policy(), load(worker(idle_s=59.9, id="a")), [], id="idle for less"),
        pytest.param(policy(), load(worker(used=1, id="a")), [], id="a worker with a session stays"),
        pytest.param(policy(least=1), load(worker(idle_s=99, id="a")), [], id="the minimum stays"),
        pytest.param(
            policy(least=1),
            load(worker(idle_s=70, id="a"), worker(idle_s=90, id="b"), worker(idle_s=80, id="c")),
            ["b", "c"],
            id="the longest idle go first",
        ),
        pytest.param(
            policy(least=1), load(worker(idle_s=99, id="a"), worker(used=2, id="b")), ["a"], id="busy workers count"
        ),
        pytest.param(
            policy(least=1), load(worker(idle_s=99, id="a"), worker(STARTING)), ["a"], id="starting workers count too"
        ),
        pytest.param(policy(), load(worker(idle_s=99, id="a"), waiting=1), [], id="none while an opening waits"),
        pytest.param(policy(), load(worker(DRAINING, idle_s=99)), [], id="a draining worker is not retired again"),
        pytest.param(policy(least=2), load(worker(idle_s=99, id="a")), [], id="none while others must start"),
        pytest.param(policy(idle_s=0), load(worker(idle_s=0, id="a")), ["a"], id="an idle time of zero"),
    ],
)
def test_workers_that_were_idle_too_long_are_retired(
    wanted: PoolPolicy, has: EnvironmentLoad, retired: list[str]
) -> None:
    assert list(plan(wanted, has, digest=NOW).retire) == retired


def test_workers_of_an_old_revision_are_drained_but_starting_workers_are_not() -> None:
    has = load(worker(make=OLD, id="a"), worker(make=OLD, used=3, id="b"), worker(STARTING, make=OLD), worker(id="c"))

    assert plan(policy(), has, digest=NOW).drain == ("a", "b")


def test_draining_workers_are_stopped_once_they_hold_no_session() -> None:
    has = load(worker(DRAINING, 1, id="a"), worker(DRAINING, 0, id="b"), worker(id="c"))

    assert plan(policy(), has, digest=NOW).stop == ("b",)


workers = st.builds(
    worker,
    st.sampled_from(WorkerState),
    st.integers(0, 4),
    idle_s=st.floats(0, 200),
    make=st.sampled_from([NOW, OLD]),
    id=st.uuids().map(str),
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # generation is slow on a loaded machine
@given(
    has=st.builds(
        lambda some, waiting: load(*some, waiting=waiting), st.lists(workers, max_size=8), st.integers(0, 50)
    ),
    least=st.integers(0, 4),
    extra=st.integers(1, 6),
    uses=st.integers(0, 6),
    warm=st.integers(0, 8),
    pause_s=st.sampled_from([0.0, 20.0]),
    demand=st.builds(Demand, rate=st.floats(0, 10), start_s=st.floats(0, 3)),
)
def test_no_plan_breaks_the_policy(
    has: EnvironmentLoad, least: int, extra: int, uses: int, warm: int, pause_s: float, demand: Demand
) -> None:
    wanted = replace(policy(least=least, most=least + extra, uses=uses), warm=warm, pause_idle_s=pause_s)

    decided = plan(wanted, has, digest=NOW, demand=demand)

    assert decided.start >= 0
    current = [entry for entry in has.workers if entry.worker.digest == NOW]
    assert decided.start == 0 or decided.start + len(current) <= wanted.max_workers
    assert decided.start == 0 or decided.start + len(has.workers) <= 2 * wanted.max_workers
    assert not (decided.start and (decided.retire or decided.pause))
    named = [*decided.wake, *decided.pause, *decided.retire, *decided.drain, *decided.stop]
    assert len(named) == len(set(named))
    kept = [entry for entry in current if entry.worker.state is not DRAINING and entry.worker.id not in decided.retire]
    assert not decided.retire or len(kept) >= least
    used = {entry.worker.id for entry in has.workers if entry.used}
    assert not used & {*decided.retire, *decided.stop, *decided.pause}
    if decided.retire or decided.pause:
        left = [entry for entry in kept if entry.worker.state is READY and entry.worker.id not in decided.pause]
        free = sum(entry.worker.slots - entry.used for entry in left)
        before = sum(entry.worker.slots - entry.used for entry in current if entry.worker.state is READY)
        assert free >= min(before, max(warm, demand.ahead))


@pytest.mark.parametrize(
    ("failures", "pause_s"),
    [(0, 0.0), (1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (5, 8.0), (6, 16.0), (7, 30.0), (8, 30.0), (1000, 30.0)],
)
def test_the_pause_doubles_with_each_failure_up_to_half_a_minute(failures: int, pause_s: float) -> None:
    assert backoff_s(failures) == pause_s


def test_the_pause_is_defined_after_any_number_of_failures() -> None:
    assert backoff_s(100_000) == 30.0


def warm_policy(warm: int, *, least: int = 0, most: int = 9, slots: int = 2, pause_s: float = 0.0) -> PoolPolicy:
    return replace(policy(least=least, most=most, slots=slots), warm=warm, pause_idle_s=pause_s)


@pytest.mark.parametrize(
    ("wanted", "has", "starts"),
    [
        pytest.param(warm_policy(1), load(), 1, id="a worker before the first opening"),
        pytest.param(warm_policy(3), load(), 2, id="workers for the number of warm slots"),
        pytest.param(warm_policy(3), load(worker(slots=2)), 1, id="free slots count"),
        pytest.param(warm_policy(3), load(worker(STARTING, slots=2)), 1, id="slots of starting workers count"),
        pytest.param(warm_policy(2), load(worker(used=1, slots=2)), 1, id="used slots do not count"),
        pytest.param(warm_policy(2), load(waiting=3), 3, id="waiting openings are added"),
        pytest.param(warm_policy(9, most=2), load(), 2, id="never more than allowed"),
        pytest.param(warm_policy(2), load(worker(PAUSED, slots=2)), 0, id="a paused worker is woken instead"),
    ],
)
def test_warm_slots_are_kept_free_for_future_openings(wanted: PoolPolicy, has: EnvironmentLoad, starts: int) -> None:
    assert plan(wanted, has, digest=NOW).start == starts


def test_as_many_slots_are_kept_free_as_arrive_while_a_worker_starts() -> None:
    demand = Demand(rate=2.0, start_s=1.5)

    assert demand.ahead == 3
    assert plan(policy(slots=1, most=9), load(), digest=NOW, demand=demand).start == 3
    assert plan(policy(slots=1, most=9), load(), digest=NOW, demand=Demand(rate=0.3, start_s=1.5)).start == 0


def test_a_steady_arrival_rate_is_measured_and_decays_again() -> None:
    demand = Demand().looked(replace(load(), arrivals=100), 0.0)
    arrivals = 100
    for _ in range(400):
        arrivals += 2
        demand = demand.looked(replace(load(), arrivals=arrivals), 0.5)
    assert demand.rate == pytest.approx(4.0, rel=0.05)

    emptied = demand.looked(replace(load(), arrivals=0), 0.5)
    assert emptied.rate < demand.rate
    quiet = emptied.looked(replace(load(), arrivals=0), 10 * WINDOW_S)
    assert quiet.rate < 0.001


def test_a_burst_before_the_first_measurement_is_not_an_arrival_rate() -> None:
    assert Demand().looked(replace(load(), arrivals=5000), 0.5).rate == 0


def test_the_expected_start_time_follows_the_measured_start_times() -> None:
    demand = Demand().started(4.0)
    assert demand.start_s == 4.0
    for _ in range(20):
        demand = demand.started(1.0)
    assert demand.start_s == pytest.approx(1.0, abs=0.01)
    assert math.isclose(Demand(rate=3.0, seen=7).started(1.0).rate, 3.0)


@pytest.mark.parametrize(
    ("has", "woken"),
    [
        pytest.param(load(worker(PAUSED, id="a"), waiting=1), ["a"], id="woken for a waiting opening"),
        pytest.param(load(worker(PAUSED, id="a")), [], id="not woken without an opening"),
        pytest.param(
            load(worker(PAUSED, idle_s=9, id="a"), worker(PAUSED, idle_s=5, id="b"), waiting=4),
            ["b"],
            id="the last used first",
        ),
        pytest.param(load(worker(PAUSED, make=OLD, id="a"), waiting=1), [], id="not woken if of an old revision"),
    ],
)
def test_paused_workers_are_woken_before_others_start(has: EnvironmentLoad, woken: list[str]) -> None:
    decided = plan(policy(), has, digest=NOW)

    assert list(decided.wake) == woken
    assert decided.start == (1 if has.waiting and not woken else 0)


@pytest.mark.parametrize(
    ("wanted", "has", "paused"),
    [
        pytest.param(warm_policy(0, pause_s=5), load(worker(idle_s=5, slots=2, id="a")), ["a"], id="idle for long"),
        pytest.param(warm_policy(0, pause_s=5), load(worker(idle_s=4.9, slots=2)), [], id="idle for less"),
        pytest.param(warm_policy(0, pause_s=5), load(worker(used=1, slots=2)), [], id="a used worker stays awake"),
        pytest.param(warm_policy(0), load(worker(idle_s=50, slots=2)), [], id="no pause without a setting"),
        pytest.param(warm_policy(1, pause_s=5), load(worker(idle_s=9, slots=2)), [], id="warm slots stay awake"),
        pytest.param(
            warm_policy(0, least=1, pause_s=5),
            load(worker(idle_s=9, slots=2, id="a"), worker(idle_s=8, slots=2, id="b")),
            ["a"],
            id="the minimum stays awake",
        ),
        pytest.param(
            warm_policy(0, pause_s=5), load(worker(idle_s=9, slots=2), waiting=5), [], id="not while an opening waits"
        ),
    ],
)
def test_idle_workers_are_paused(wanted: PoolPolicy, has: EnvironmentLoad, paused: list[str]) -> None:
    assert list(plan(wanted, has, digest=NOW).pause) == paused


def test_paused_workers_of_an_old_revision_are_drained_and_paused_idle_workers_are_retired_first() -> None:
    has = load(worker(PAUSED, make=OLD, id="a"), worker(PAUSED, idle_s=70, id="b"), worker(idle_s=90, id="c"))

    decided = plan(policy(least=1), has, digest=NOW)

    assert decided.drain == ("a",)
    assert decided.wake == ()
    assert decided.retire == ("b",)


def test_after_a_failed_start_only_one_worker_starts_at_a_time() -> None:
    assert plan(policy(), load(waiting=99), digest=NOW, is_trial=True).start == 1
    assert plan(policy(), load(worker(STARTING), waiting=99), digest=NOW, is_trial=True).start == 0


@pytest.mark.parametrize(("workers", "pause_s"), [(0, 0), (20, 0.001), (2_000, 0.1), (10_000, 0.5), (1_000_000, 0.5)])
def test_the_pause_of_the_control_loop_grows_with_the_number_of_workers(workers: int, pause_s: float) -> None:
    assert rest_s(workers) == pytest.approx(pause_s)
