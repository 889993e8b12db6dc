"""The control loop's decisions, as tables of numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.model import (
    EnvironmentLoad,
    EnvironmentName,
    PoolPolicy,
    Worker,
    WorkerId,
    WorkerLoad,
    WorkerState,
)
from gateway.core.plan import backoff_s, plan

NOW, OLD = "wanted", "outdated"
READY, STARTING, DRAINING = WorkerState.READY, WorkerState.STARTING, WorkerState.DRAINING


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
            policy(most=1), load(worker(make=OLD), waiting=1), 0, id="a worker of an old make counts as living"
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


@given(
    has=st.builds(
        lambda some, waiting: load(*some, waiting=waiting), st.lists(workers, max_size=8), st.integers(0, 50)
    ),
    least=st.integers(0, 4),
    extra=st.integers(1, 6),
    uses=st.integers(0, 6),
)
def test_no_plan_breaks_the_policy(has: EnvironmentLoad, least: int, extra: int, uses: int) -> None:
    wanted = policy(least=least, most=least + extra, uses=uses)

    decided = plan(wanted, has, digest=NOW)

    assert decided.start >= 0
    assert decided.start == 0 or decided.start + len(has.workers) <= wanted.max_workers
    assert not (decided.start and decided.retire)
    named = [*decided.retire, *decided.drain, *decided.stop]
    assert len(named) == len(set(named))
    kept = sum(entry.worker.state is not DRAINING and entry.worker.digest == NOW for entry in has.workers)
    if decided.retire and all(entry.worker.digest == NOW for entry in has.workers):
        assert kept - len(decided.retire) >= least


@pytest.mark.parametrize(
    ("failures", "pause_s"),
    [(0, 0.0), (1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (5, 8.0), (6, 16.0), (7, 30.0), (8, 30.0), (1000, 30.0)],
)
def test_the_pause_doubles_with_each_failure_up_to_half_a_minute(failures: int, pause_s: float) -> None:
    assert backoff_s(failures) == pause_s


def test_a_pause_can_be_told_after_any_number_of_failures() -> None:
    assert backoff_s(100_000) == 30.0
