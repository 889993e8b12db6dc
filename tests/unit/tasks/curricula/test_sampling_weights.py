"""Weights of tasks, computed from their records."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import pytest

from gateway.core.curriculum import TaskRecord
from gateway.core.ids import EnvironmentName
from gateway.tasks.curricula.model import Sampler, SamplerKind
from gateway.tasks.curricula.sampling import GRAINS, learning_progress, sums_of, target_success
from gateway.tasks.curricula.tables import TaskRow

TARGET, PROGRESS = SamplerKind.TARGET_SUCCESS, SamplerKind.LEARNING_PROGRESS
HUGE = sys.float_info.max


def record(*newest: float) -> TaskRecord | None:
    """Return the record of a task with these rewards, or None if there are no rewards."""
    made = TaskRecord(environment=EnvironmentName("math"), task="one", attempts=len(newest), recent=newest)
    return made if newest else None


def plain(count: int) -> list[TaskRow]:
    """Return tasks without tags or difficulties, which do not resemble each other."""
    return [TaskRow(at, f"t{at}") for at in range(count)]


def targeted(known: Sequence[TaskRecord | None], sampler: Sampler, success_at: float = 1.0) -> list[float]:
    return target_success(plain(len(known)), known, sampler, success_at)


def shares(known: Sequence[TaskRecord | None], sampler: Sampler) -> list[float]:
    sums = sums_of(plain(len(known)), known, sampler, 1.0)
    if sums is None:
        return [1 / len(known)] * len(known)
    return [(after - before) / sums[-1] for before, after in zip([0, *sums[:-1]], sums, strict=True)]


def gauss(distance: float, width: float) -> float:
    return math.exp(-((distance / width) ** 2) / 2)


# -- target_success -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("newest", "rate"),
    [
        pytest.param([], 0.5, id="a task that was never tried counts as at the target"),
        pytest.param([1.0], 2 / 3, id="one success and two imagined attempts of the prior"),
        pytest.param([0.0], 1 / 3, id="one failure does not make a task hopeless"),
        pytest.param([1.0] * 8, 0.9, id="mastered"),
        pytest.param([0.0] * 8, 0.1, id="out of reach"),
        pytest.param([0.0, 1.0] * 4, 0.5, id="half of the attempts succeed"),
        pytest.param([0.0] * 8 + [1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0], 0.5, id="only the newest 8 count"),
        pytest.param([-3.0, 0.99, 1.0, 7.5], 0.5, id="a success is a reward of 1 or more"),
    ],
)
def test_a_task_weighs_less_the_farther_its_success_rate_is_from_the_target(newest: list[float], rate: float) -> None:
    sampler = Sampler(kind=TARGET, target=0.5, width=0.15, prior=2, window=8)
    at_target = record(0.0, 1.0)

    weights = targeted([record(*newest), at_target], sampler)

    assert weights == pytest.approx([gauss(rate - 0.5, 0.15), 1.0])


@pytest.mark.parametrize("target", [0.2, 0.5, 0.8])
def test_the_rate_nearest_to_the_target_weighs_most(target: float) -> None:
    rates = [[1.0] * wins + [0.0] * (10 - wins) for wins in range(11)]
    sampler = Sampler(kind=TARGET, target=target, prior=0)

    weights = targeted([record(*newest) for newest in rates], sampler)

    assert weights.index(max(weights)) == round(target * 10)
    assert weights[: round(target * 10) + 1] == sorted(weights[: round(target * 10) + 1])


def test_the_curriculum_sets_the_reward_that_counts_as_a_success() -> None:
    sampler = Sampler(kind=TARGET, prior=0)

    strict, lenient = (targeted([record(0.4, 0.6), None], sampler, at) for at in (1.0, 0.5))

    assert strict == pytest.approx([gauss(0.5, 0.15), 1])
    assert lenient == [1, 1]


def test_the_nearest_task_weighs_1_at_any_distance_and_width() -> None:
    sampler = Sampler(kind=TARGET, target=0.5, width=0, prior=0, explore=0)

    weights = targeted([record(0.0), record(0.0, 0.0, 0.0, 1.0)], sampler)

    assert weights == [0.0, 1.0]
    assert shares([record(0.0), record(0.0, 0.0, 0.0, 1.0)], sampler) == [0.0, 1.0]


def test_without_a_prior_a_task_that_was_never_tried_still_counts_as_at_the_target() -> None:
    assert targeted([None, record(0.0)], Sampler(kind=TARGET, prior=0, target=0.7))[0] == 1.0


# -- learning_progress ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("some", "weights"),
    [
        pytest.param([[0, 0, 1, 1], [0, 0, 0, 1]], [1, 0.5], id="a faster rise weighs more"),
        pytest.param([[1, 1, 0, 0], [0, 0, 1, 1]], [1, 1], id="forgetting weighs as much as learning"),
        pytest.param([[1, 1, 1, 1], [0, 0, 1, 1]], [0, 1], id="a mastered task weighs nothing"),
        pytest.param([[0, 0, 0, 0], [0, 0, 1, 1]], [0, 1], id="a task out of reach weighs nothing"),
        pytest.param(
            [[], [1], [0, 0, 0, 1]], [1, 1, 1], id="a task with fewer than two rewards weighs as much as the best"
        ),
        pytest.param([[], [1, 1], [0, 0]], [1, 0, 0], id="an untried task weighs 1 if no other task changes"),
        pytest.param([[1, 1], [0, 0]], [1, 1], id="all weights are equal if all tasks were tried and none changes"),
        pytest.param([[9, 9, 0, 0, 1, 1], [0, 0, 1, 1]], [1, 1], id="only the newest 4 count"),
        pytest.param([[0, 1, 1], [0, 1]], [1, 1], id="the middle reward belongs to the newer half"),
        pytest.param([[0, 10], [-5, 0]], [1, 0.5], id="rewards may be of any size and sign"),
        pytest.param([[-HUGE, HUGE], [0, HUGE], [0, 1]], [1, 0.5, 0], id="rewards may be the largest floats"),
        pytest.param([[HUGE] * 4, [HUGE, HUGE, -HUGE, -HUGE]], [0, 1], id="the sum of rewards may overflow a float"),
        pytest.param([[0.1, 0.1, 0.1], [0.7, 0.1, 0.2, 0.6]], [1, 1], id="a rounding error is not a change"),
        pytest.param([[0, 5e-324], [0, 0]], [1, 1], id="a change too small for a float is not a change"),
    ],
)
def test_a_task_weighs_as_much_as_its_rewards_change(some: list[list[float]], weights: list[float]) -> None:
    sampler = Sampler(kind=PROGRESS, window=4, prior=0)

    assert learning_progress(plain(len(some)), [record(*newest) for newest in some], sampler) == pytest.approx(weights)


# -- tasks that are alike -------------------------------------------------------------------------------------------


def seen(at: float, *newest: float, task: str = "one") -> TaskRecord:
    return TaskRecord(environment=EnvironmentName("math"), task=task, attempts=len(newest), recent=newest, seen_at=at)


def rates_of(rows: Sequence[TaskRow], known: Sequence[TaskRecord | None], **settings: float) -> list[float]:
    """Return the estimated success rate of each task, computed from weights that fall below the target."""
    sampler = Sampler(kind=TARGET, target=0.9999, width=0.5, window=8, **settings)  # type: ignore[arg-type]
    weights = target_success([*rows, TaskRow(len(rows), "at-target")], [*known, None], sampler, 1.0)
    return [0.9999 - 0.5 * math.sqrt(-2 * math.log(weight)) if weight < 1 else 0.9999 for weight in weights[:-1]]


def test_an_untried_task_takes_its_rate_from_tasks_like_it_and_these_from_tasks_of_their_difficulty() -> None:
    rows = [
        TaskRow(0, "a", ("x",), 1.0),
        TaskRow(1, "b", ("x",), 1.0),
        TaskRow(2, "c", ("y",), 1.0),
        TaskRow(3, "d", ("y",), 1.0),
        TaskRow(4, "e", ("x",), 2.0),
        TaskRow(5, "f", (), None),
    ]

    found = rates_of(rows, [seen(1.0, 0.0, 0.0, 0.0, 1.0), None, None, None, None, None], prior=2.0)

    level = (1 + 2 * 0.9999) / 6  # The rate of difficulty 1, whose prior is the target.
    kind = (1 + 2 * level) / 6  # The rate of the tasks of difficulty 1 with the tag x.
    assert found == pytest.approx([(1 + 2 * kind) / 6, kind, level, level, 0.9999, 0.9999], abs=1e-4)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([TaskRow(0, "a"), TaskRow(1, "b")], id="neither tags nor difficulty"),
        pytest.param([TaskRow(0, "a", ("x",), 1.0), TaskRow(1, "b", ("x",), 2.0)], id="another difficulty"),
        pytest.param([TaskRow(0, "a", ("x",)), TaskRow(1, "b", ("x", "y"))], id="other tags"),
    ],
)
def test_tasks_that_are_not_alike_do_not_affect_each_others_rates(rows: list[TaskRow]) -> None:
    assert rates_of(rows, [seen(1.0, 0.0, 0.0), None]) == pytest.approx([0.9999 / 2, 0.9999], abs=1e-4)


def test_the_rate_of_a_kind_of_tasks_follows_from_its_newest_rewards() -> None:
    rows = [TaskRow(at, f"t{at}", ("x",)) for at in range(4)]
    known = [seen(3.0, *[1.0] * 4), seen(1.0, *[0.0] * 8), seen(2.0, *[0.0] * 2, *[1.0] * 4), None]

    assert rates_of(rows, known, prior=0.0)[3] == pytest.approx(0.9999, abs=1e-3)


def test_the_estimate_of_a_kind_that_is_no_longer_tried_returns_to_the_prior() -> None:
    rows = [TaskRow(0, "a", ("x",)), TaskRow(1, "b", ("x",)), *(TaskRow(at, f"c{at}", ("y",)) for at in range(2, 40))]

    def rate_after(later: int) -> float:
        known = [seen(1.0, *[0.0] * 8), None, *(seen(2.0, *[1.0] * 8) if at < later else None for at in range(38))]
        return rates_of(rows, known)[1]

    rates = [rate_after(later) for later in (0, 4, 16, 38)]
    assert rates == sorted(rates)
    assert rates[0] < 0.25
    assert rates[-1] > 0.9


def test_an_untried_kind_of_tasks_weighs_as_much_as_the_kind_that_changes_most() -> None:
    rows = [TaskRow(at, f"t{at}", (tag,)) for at, tag in enumerate("aabbcc")]
    known = [seen(1.0, 0.0, 0.0), seen(2.0, 1.0, 1.0), seen(3.0, 0.0, 0.0), None, None, None]

    weights = learning_progress(rows, known, Sampler(kind=PROGRESS, window=4, prior=0))

    assert weights == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0], "what was tried twice by itself says that it does not change"
    leaning = learning_progress(rows, known, Sampler(kind=PROGRESS, window=4, prior=4))
    assert leaning[4] == leaning[5] == max(leaning)
    assert leaning[0] > leaning[2]
    assert leaning[3] > leaning[2]


# -- explore --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("explore", "told"),
    [
        pytest.param(0.0, [0, 0.25, 0.75], id="nothing"),
        pytest.param(0.3, [0.1, 0.275, 0.625], id="some"),
        pytest.param(1.0, [1 / 3, 1 / 3, 1 / 3], id="all"),
    ],
)
def test_the_explore_share_of_draws_ignores_the_records(explore: float, told: list[float]) -> None:
    known = [record(0, 0), record(0, 1), record(0, 3)]

    found = shares(known, Sampler(kind=PROGRESS, explore=explore, prior=0))

    assert found == pytest.approx(told)


def test_equal_weights_need_no_sums() -> None:
    assert sums_of(plain(5), [None] * 5, Sampler(kind=TARGET), 1.0) is None


def test_a_hundred_thousand_tasks_keep_their_proportions() -> None:
    known = [record(0, 0), *[record(0, 1)] * 99_999]

    sums = sums_of(plain(100_000), known, Sampler(kind=PROGRESS, explore=0.1, prior=0), 1.0)

    assert sums is not None
    assert sums[0] / sums[-1] == pytest.approx(0.1 / 100_000)
    assert sums[-1] == pytest.approx(GRAINS)
