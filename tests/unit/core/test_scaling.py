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
        pytest.param(policy(), load(), 0, id="nothing is started for nobody"),
        pytest.param(policy(least=2), load(), 2, id="the least number is kept"),
        pytest.param(policy(least=2), load(worker(STARTING)), 1, id="a worker that starts counts for the least number"),
        pytest.param(
            policy(least=2), load(worker(used=4), worker()), 0, id="a full worker counts for the least number"
        ),
        pytest.param(policy(), load(waiting=1), 1, id="one that waits starts one"),
        pytest.param(policy(), load(waiting=4), 1, id="as many as a worker holds start one"),
        pytest.param(policy(), load(waiting=5), 2, id="one more than a worker holds starts two"),
        pytest.param(policy(most=3), load(waiting=1000), 3, id="never more than allowed"),
        pytest.param(policy(), load(worker(used=4), waiting=1), 1, id="a full worker has no room"),
        pytest.param(policy(), load(worker(used=3), waiting=1), 0, id="free slots come first"),
        pytest.param(policy(), load(worker(used=3), waiting=2), 1, id="what free slots do not hold starts one"),
        pytest.param(policy(), load(worker(STARTING), waiting=4), 0, id="workers that start are room already"),
        pytest.param(policy(), load(worker(STARTING), waiting=5), 1, id="what they will not hold starts another"),
        pytest.param(policy(), load(worker(DRAINING, 1), waiting=1), 1, id="a draining worker is no room"),
        pytest.param(policy(most=1), load(worker(DRAINING, 1), waiting=9), 0, id="a draining worker counts as living"),
        pytest.param(policy(most=2), load(worker(make=OLD), waiting=1), 1, id="a worker of an old make is no room"),
        pytest.param(
            policy(most=1), load(worker(make=OLD, used=1), waiting=1), 1, id="an old make does not hold up the new one"
        ),
        pytest.param(
            policy(most=1),
            load(*[worker(DRAINING, 1, make=OLD)] * 2, waiting=1),
            0,
            id="but no more than twice as many live at once",
        ),
        pytest.param(policy(least=1), load(worker(make=OLD)), 1, id="an old make does not count for the least number"),
        pytest.param(policy(slots=4, uses=1), load(waiting=3), 3, id="workers for one use serve one each"),
        pytest.param(policy(slots=4, uses=2), load(waiting=3), 2, id="fewer uses than slots bound what one serves"),
        pytest.param(policy(slots=4, uses=9), load(waiting=5), 2, id="more uses than slots change nothing"),
        pytest.param(policy(slots=1, most=8, least=3), load(waiting=2), 3, id="the larger of two needs counts"),
        pytest.param(policy(most=2), load(*[worker(used=4)] * 3, waiting=1), 0, id="more than allowed start no more"),
        pytest.param(
            policy(), load(worker(used=3, slots=1), worker(used=3), waiting=1), 0, id="who holds too many wants nothing"
        ),
    ],
)
def test_as_many_workers_start_as_are_missing(wanted: PoolPolicy, has: EnvironmentLoad, starts: int) -> None:
    assert plan(wanted, has, digest=NOW).start == starts


@pytest.mark.parametrize(
    ("wanted", "has", "starts"),
    [
        pytest.param(policy(learns=True), load(waiting=5), 2, id="until one told, the policy's number counts"),
        pytest.param(
            policy(most=9, learns=True), load(worker(used=1, slots=1), waiting=5), 5, id="those to come hold as many"
        ),
        pytest.param(
            policy(most=9, learns=True), load(worker(used=8, slots=8), waiting=9), 2, id="also if that is more"
        ),
        pytest.param(
            policy(most=9, learns=True),
            load(worker(used=1, slots=1), worker(used=2, slots=2), waiting=5),
            3,
            id="of several the one that holds most",
        ),
        pytest.param(
            policy(most=9, learns=True),
            load(worker(used=1, slots=1), worker(STARTING), waiting=5),
            4,
            id="one that starts has told nothing and will hold as many",
        ),
        pytest.param(
            policy(most=9, learns=True),
            load(worker(used=1, slots=1, make=OLD), waiting=5),
            2,
            id="what an old make told is forgotten",
        ),
        pytest.param(
            policy(most=9, uses=1, learns=True), load(worker(used=8, slots=8), waiting=3), 3, id="uses bound it still"
        ),
        pytest.param(policy(most=9), load(worker(used=1, slots=1), waiting=5), 2, id="who does not learn believes it"),
    ],
)
def test_workers_to_come_are_thought_to_hold_what_others_told(
    wanted: PoolPolicy, has: EnvironmentLoad, starts: int
) -> None:
    assert plan(wanted, has, digest=NOW).start == starts


@pytest.mark.parametrize(
    ("wanted", "has", "retired"),
    [
        pytest.param(policy(), load(worker(idle_s=60, id="a")), ["a"], id="idle as long as allowed"),
        pytest.param(policy(), load(worker(idle_s=59.9, id="a")), [], id="idle for less"),
        pytest.param(policy(), load(worker(used=1, id="a")), [], id="one that holds a session stays"),
        pytest.param(policy(least=1), load(worker(idle_s=99, id="a")), [], id="the least number stays"),
        pytest.param(
            policy(least=1),
            load(worker(idle_s=70, id="a"), worker(idle_s=90, id="b"), worker(idle_s=80, id="c")),
            ["b", "c"],
            id="the longest idle ones go first",
        ),
        pytest.param(
            policy(least=1),
            load(worker(idle_s=99, id="a"), worker(used=2, id="b")),
            ["a"],
            id="busy ones count for the least number",
        ),
        pytest.param(
            policy(least=1), load(worker(idle_s=99, id="a"), worker(STARTING)), ["a"], id="those that start count too"
        ),
        pytest.param(policy(), load(worker(idle_s=99, id="a"), waiting=1), [], id="nobody goes while somebody waits"),
        pytest.param(policy(), load(worker(DRAINING, idle_s=99)), [], id="a draining one is not retired again"),
        pytest.param(policy(least=2), load(worker(idle_s=99, id="a")), [], id="nobody goes while others must start"),
        pytest.param(policy(idle_s=0), load(worker(idle_s=0, id="a")), ["a"], id="no patience at all"),
    ],
)
def test_workers_that_were_idle_too_long_are_retired(
    wanted: PoolPolicy, has: EnvironmentLoad, retired: list[str]
) -> None:
    assert list(plan(wanted, has, digest=NOW).retire) == retired


def test_workers_of_an_old_make_are_drained_and_those_that_start_are_not() -> None:
    has = load(worker(make=OLD, id="a"), worker(make=OLD, used=3, id="b"), worker(STARTING, make=OLD), worker(id="c"))

    assert plan(policy(), has, digest=NOW).drain == ("a", "b")


def test_draining_workers_are_stopped_once_they_hold_nothing() -> None:
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


@settings(suppress_health_check=[HealthCheck.too_slow])  # a loaded machine is
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


def test_a_pause_can_be_told_after_any_number_of_failures() -> None:
    assert backoff_s(100_000) == 30.0


def warm_policy(warm: int, *, least: int = 0, most: int = 9, slots: int = 2, pause_s: float = 0.0) -> PoolPolicy:
    return replace(policy(least=least, most=most, slots=slots), warm=warm, pause_idle_s=pause_s)


@pytest.mark.parametrize(
    ("wanted", "has", "starts"),
    [
        pytest.param(warm_policy(1), load(), 1, id="a worker before anybody asked"),
        pytest.param(warm_policy(3), load(), 2, id="workers for as many slots"),
        pytest.param(warm_policy(3), load(worker(slots=2)), 1, id="what is free counts"),
        pytest.param(warm_policy(3), load(worker(STARTING, slots=2)), 1, id="what starts counts"),
        pytest.param(warm_policy(2), load(worker(used=1, slots=2)), 1, id="what is held does not"),
        pytest.param(warm_policy(2), load(waiting=3), 3, id="those that wait come on top"),
        pytest.param(warm_policy(9, most=2), load(), 2, id="never more than allowed"),
        pytest.param(warm_policy(2), load(worker(PAUSED, slots=2)), 0, id="a paused worker is woken instead"),
    ],
)
def test_slots_are_kept_free_ahead_of_those_who_come(wanted: PoolPolicy, has: EnvironmentLoad, starts: int) -> None:
    assert plan(wanted, has, digest=NOW).start == starts


def test_as_many_slots_are_kept_free_as_arrive_while_a_worker_starts() -> None:
    demand = Demand(rate=2.0, start_s=1.5)

    assert demand.ahead == 3
    assert plan(policy(slots=1, most=9), load(), digest=NOW, demand=demand).start == 3
    assert plan(policy(slots=1, most=9), load(), digest=NOW, demand=Demand(rate=0.3, start_s=1.5)).start == 0


def test_a_steady_stream_is_seen_and_forgotten_again() -> None:
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


def test_a_burst_before_the_first_look_is_no_stream() -> None:
    assert Demand().looked(replace(load(), arrivals=5000), 0.5).rate == 0


def test_the_expected_start_follows_what_starts_take() -> None:
    demand = Demand().started(4.0)
    assert demand.start_s == 4.0
    for _ in range(20):
        demand = demand.started(1.0)
    assert demand.start_s == pytest.approx(1.0, abs=0.01)
    assert math.isclose(Demand(rate=3.0, seen=7).started(1.0).rate, 3.0)


@pytest.mark.parametrize(
    ("has", "woken"),
    [
        pytest.param(load(worker(PAUSED, id="a"), waiting=1), ["a"], id="for one that waits"),
        pytest.param(load(worker(PAUSED, id="a")), [], id="not for nobody"),
        pytest.param(
            load(worker(PAUSED, idle_s=9, id="a"), worker(PAUSED, idle_s=5, id="b"), waiting=4),
            ["b"],
            id="the last used first, and no more than needed",
        ),
        pytest.param(load(worker(PAUSED, make=OLD, id="a"), waiting=1), [], id="none of an old make"),
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
        pytest.param(warm_policy(0, pause_s=5), load(worker(used=1, slots=2)), [], id="not one that is used"),
        pytest.param(warm_policy(0), load(worker(idle_s=50, slots=2)), [], id="not unless it is asked for"),
        pytest.param(warm_policy(1, pause_s=5), load(worker(idle_s=9, slots=2)), [], id="not the slots kept free"),
        pytest.param(
            warm_policy(0, least=1, pause_s=5),
            load(worker(idle_s=9, slots=2, id="a"), worker(idle_s=8, slots=2, id="b")),
            ["a"],
            id="the least number stays awake",
        ),
        pytest.param(
            warm_policy(0, pause_s=5), load(worker(idle_s=9, slots=2), waiting=5), [], id="not while one waits"
        ),
    ],
)
def test_idle_workers_are_paused(wanted: PoolPolicy, has: EnvironmentLoad, paused: list[str]) -> None:
    assert list(plan(wanted, has, digest=NOW).pause) == paused


def test_paused_workers_of_an_old_make_are_drained_and_idle_ones_retired_first() -> None:
    has = load(worker(PAUSED, make=OLD, id="a"), worker(PAUSED, idle_s=70, id="b"), worker(idle_s=90, id="c"))

    decided = plan(policy(least=1), has, digest=NOW)

    assert decided.drain == ("a",)
    assert decided.wake == ()
    assert decided.retire == ("b",)


def test_after_a_failed_start_one_is_tried_at_a_time() -> None:
    assert plan(policy(), load(waiting=99), digest=NOW, is_trial=True).start == 1
    assert plan(policy(), load(worker(STARTING), waiting=99), digest=NOW, is_trial=True).start == 0


@pytest.mark.parametrize(("workers", "pause_s"), [(0, 0), (20, 0.001), (2_000, 0.1), (10_000, 0.5), (1_000_000, 0.5)])
def test_the_control_loop_rests_the_longer_the_more_workers_it_looked_at(workers: int, pause_s: float) -> None:
    assert rest_s(workers) == pytest.approx(pause_s)
