"""Expected capacity, and capacity that environments share, as tables of numbers."""

from __future__ import annotations

import pytest

from gateway.core.capacity import CapacityRequest, Expected, shared
from gateway.core.environment import PoolPolicy
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.scaling import Plan, plan
from gateway.core.worker import EnvironmentLoad, Worker, WorkerLoad, WorkerState

A, B, C = EnvironmentName("a"), EnvironmentName("b"), EnvironmentName("c")


def worker(
    id: str, *, used: int = 0, idle_s: float = 0.0, state: WorkerState = WorkerState.READY, slots: int = 4
) -> WorkerLoad:
    made = Worker(id=WorkerId(id), environment=A, digest="d", slots=slots, state=state)
    return WorkerLoad(worker=made, used=used, idle_s=idle_s, age_s=100.0)


def wish(
    *workers: WorkerLoad, start: int = 0, waiting: int = 0, retire: tuple[str, ...] = (), min_workers: int = 0
) -> CapacityRequest:
    return CapacityRequest(
        plan=Plan(start=start, retire=tuple(map(WorkerId, retire))),
        policy=PoolPolicy(max_workers=10, min_workers=min_workers),
        load=EnvironmentLoad(workers=workers, waiting=waiting),
    )


@pytest.mark.parametrize(
    ("expected", "start_s", "slots"),
    [
        (Expected(), 3.0, 0),
        (Expected(0.0, 8), 3.0, 0),
        (Expected(2.0), 3.0, 6),
        (Expected(2.0), 0.0, 2),
        (Expected(0.1, 8), 3.0, 8),
        (Expected(10.0, 8), 3.0, 30),
        (Expected(1.0, 4) + Expected(2.0, 8), 4.0, 12),
    ],
)
def test_slots_are_kept_for_arrivals_during_a_worker_start_and_for_a_whole_group(
    expected: Expected, start_s: float, slots: int
) -> None:
    assert expected.slots(start_s) == slots


@pytest.mark.parametrize(
    ("expected", "started"),
    [(0, 0), (1, 1), (4, 1), (5, 2), (12, 3), (400, 3)],
)
def test_workers_start_for_expected_openings_before_any_opening_waits_within_the_limit(
    expected: int, started: int
) -> None:
    policy = PoolPolicy(slots=4, max_workers=3)

    assert plan(policy, EnvironmentLoad(), digest="d", expected=expected).start == started


def test_idle_workers_that_expected_openings_will_need_are_not_retired() -> None:
    policy = PoolPolicy(slots=4, max_workers=3, idle_worker_s=60)
    load = EnvironmentLoad(workers=(worker("w1", idle_s=100), worker("w2", idle_s=200)))

    assert plan(policy, load, digest="d").retire == ("w2", "w1")
    assert plan(policy, load, digest="d", expected=3).retire == ("w2",)
    assert plan(policy, load, digest="d", expected=5).retire == ()


def test_without_a_limit_or_below_it_every_plan_stays_unchanged() -> None:
    wishes = {A: wish(worker("a1"), start=2), B: wish(start=1)}

    for most in (0, 4, 100):
        assert shared(wishes, most=most) == {A: wishes[A].plan, B: wishes[B].plan}


@pytest.mark.parametrize(
    ("room", "granted"),
    [
        (0, (0, 0, 0)),
        (1, (0, 1, 0)),
        (2, (0, 2, 0)),
        (3, (0, 2, 1)),
        (4, (0, 2, 2)),
        (5, (0, 2, 3)),
        (6, (1, 2, 3)),
    ],
)
def test_room_goes_first_to_environments_with_waiting_openings_and_then_to_those_with_the_fewest_workers(
    room: int, granted: tuple[int, ...]
) -> None:
    busy = [worker(f"a{n}", used=4) for n in range(3)]
    wishes = {A: wish(*busy, start=3), B: wish(start=2, waiting=7), C: wish(start=3)}

    plans = shared(wishes, most=3 + room)

    assert tuple(plans[name].start for name in (A, B, C)) == granted
    assert all(not one.retire for one in plans.values())


def test_other_environments_retire_their_longest_idle_workers_to_make_room_but_keep_the_minimum() -> None:
    wishes = {
        A: wish(worker("a1", used=1), worker("a2", idle_s=5), worker("a3", idle_s=50), min_workers=1),
        B: wish(worker("b1", idle_s=20), worker("b2", idle_s=30, state=WorkerState.PAUSED)),
        C: wish(start=3, waiting=9),
    }

    plans = shared(wishes, most=5)

    assert plans[C].start == 0
    assert (plans[A].retire, plans[B].retire) == (("a3",), ("b2", "b1"))


def test_workers_that_already_leave_count_as_room_and_environments_that_start_workers_retire_none() -> None:
    wishes = {
        A: wish(worker("a1", state=WorkerState.DRAINING), worker("a2", idle_s=9), retire=("a2",)),
        B: wish(worker("b1", idle_s=99), start=1),
        C: wish(worker("c1", idle_s=1), start=1, waiting=1),
    }

    plans = shared(wishes, most=4)

    assert [plans[name].retire for name in (A, B, C)] == [("a2",), (), ()]
    assert [plans[name].start for name in (A, B, C)] == [0, 0, 0]


def test_a_worker_that_is_retired_to_make_room_is_not_paused() -> None:
    idle = CapacityRequest(
        plan=Plan(pause=(WorkerId("a1"),)),
        policy=PoolPolicy(),
        load=EnvironmentLoad(workers=(worker("a1", idle_s=9),)),
    )

    plans = shared({A: idle, B: wish(start=1, waiting=1)}, most=1)

    assert (plans[A].retire, plans[A].pause) == (("a1",), ())
