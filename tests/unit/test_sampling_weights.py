"""Weights of tasks from their records, as tables of numbers."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import pytest

from gateway.core.curricula import Sampler, SamplerKind, TaskRecord
from gateway.core.model import EnvironmentName
from gateway.core.sampling_weights import GRAINS, learning_progress, sums_of, target_success

TARGET, PROGRESS = SamplerKind.TARGET_SUCCESS, SamplerKind.LEARNING_PROGRESS
HUGE = sys.float_info.max


def record(*newest: float) -> TaskRecord | None:
    """Of a task with these rewards; None of one that was never tried."""
    made = TaskRecord(environment=EnvironmentName("math"), task="one", attempts=len(newest), recent=newest)
    return made if newest else None


def shares(known: Sequence[TaskRecord | None], sampler: Sampler) -> list[float]:
    sums = sums_of(known, sampler, 1.0)
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
        pytest.param([1.0], 2 / 3, id="one success in three, two of which are imagined"),
        pytest.param([0.0], 1 / 3, id="one failure does not make a task hopeless"),
        pytest.param([1.0] * 8, 0.9, id="mastered"),
        pytest.param([0.0] * 8, 0.1, id="out of reach"),
        pytest.param([0.0, 1.0] * 4, 0.5, id="half of its attempts succeed"),
        pytest.param([0.0] * 8 + [1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0], 0.5, id="only the newest 8 count"),
        pytest.param([-3.0, 0.99, 1.0, 7.5], 0.5, id="a success is a reward of 1 or more"),
    ],
)
def test_a_task_weighs_less_the_farther_its_success_rate_is_from_the_target(newest: list[float], rate: float) -> None:
    sampler = Sampler(kind=TARGET, target=0.5, width=0.15, prior=2, window=8)
    at_target = record(0.0, 1.0)

    weights = target_success([record(*newest), at_target], sampler, 1.0)

    assert weights == pytest.approx([gauss(rate - 0.5, 0.15), 1.0])


@pytest.mark.parametrize("target", [0.2, 0.5, 0.8])
def test_of_many_rates_the_target_weighs_most(target: float) -> None:
    rates = [[1.0] * wins + [0.0] * (10 - wins) for wins in range(11)]
    sampler = Sampler(kind=TARGET, target=target, prior=0)

    weights = target_success([record(*newest) for newest in rates], sampler, 1.0)

    assert weights.index(max(weights)) == round(target * 10)
    assert weights[: round(target * 10) + 1] == sorted(weights[: round(target * 10) + 1])


def test_what_counts_as_a_success_is_the_curriculums_word() -> None:
    sampler = Sampler(kind=TARGET, prior=0)

    strict, lenient = (target_success([record(0.4, 0.6), None], sampler, at) for at in (1.0, 0.5))

    assert strict == pytest.approx([gauss(0.5, 0.15), 1])
    assert lenient == [1, 1]


def test_the_nearest_task_weighs_1_however_far_and_however_narrow() -> None:
    sampler = Sampler(kind=TARGET, target=0.5, width=0, prior=0, explore=0)

    weights = target_success([record(0.0), record(0.0, 0.0, 0.0, 1.0)], sampler, 1.0)

    assert weights == [0.0, 1.0]
    assert shares([record(0.0), record(0.0, 0.0, 0.0, 1.0)], sampler) == [0.0, 1.0]


def test_without_a_prior_a_task_that_was_never_tried_still_counts_as_at_the_target() -> None:
    assert target_success([None, record(0.0)], Sampler(kind=TARGET, prior=0, target=0.7), 1.0)[0] == 1.0


# -- learning_progress ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("some", "weights"),
    [
        pytest.param([[0, 0, 1, 1], [0, 0, 0, 1]], [1, 0.5], id="what rises faster weighs more"),
        pytest.param([[1, 1, 0, 0], [0, 0, 1, 1]], [1, 1], id="forgetting weighs as much as learning"),
        pytest.param([[1, 1, 1, 1], [0, 0, 1, 1]], [0, 1], id="what is mastered weighs nothing"),
        pytest.param([[0, 0, 0, 0], [0, 0, 1, 1]], [0, 1], id="nor does what is out of reach"),
        pytest.param([[], [1], [0, 0, 0, 1]], [1, 1, 1], id="what has no two rewards weighs as much as the best"),
        pytest.param([[], [1, 1], [0, 0]], [1, 0, 0], id="also where nothing else changes"),
        pytest.param([[1, 1], [0, 0]], [1, 1], id="where all was tried and nothing changes, all weigh the same"),
        pytest.param([[9, 9, 0, 0, 1, 1], [0, 0, 1, 1]], [1, 1], id="only the newest 4 count"),
        pytest.param([[0, 1, 1], [0, 1]], [1, 1], id="the odd one belongs to the newer half"),
        pytest.param([[0, 10], [-5, 0]], [1, 0.5], id="rewards may be of any size and sign"),
        pytest.param([[-HUGE, HUGE], [0, HUGE], [0, 1]], [1, 0.5, 0], id="even of the largest size"),
        pytest.param([[HUGE] * 4, [HUGE, HUGE, -HUGE, -HUGE]], [0, 1], id="whose sum no float can hold"),
        pytest.param([[0.1, 0.1, 0.1], [0.7, 0.1, 0.2, 0.6]], [1, 1], id="the dust of rounding is no change"),
        pytest.param([[0, 5e-324], [0, 0]], [1, 1], id="what is too small to be told from nothing is nothing"),
    ],
)
def test_a_task_weighs_as_much_as_its_rewards_change(some: list[list[float]], weights: list[float]) -> None:
    sampler = Sampler(kind=PROGRESS, window=4)

    assert learning_progress([record(*newest) for newest in some], sampler) == pytest.approx(weights)


# -- explore --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("explore", "told"),
    [
        pytest.param(0.0, [0, 0.25, 0.75], id="nothing"),
        pytest.param(0.3, [0.1, 0.275, 0.625], id="some"),
        pytest.param(1.0, [1 / 3, 1 / 3, 1 / 3], id="all"),
    ],
)
def test_a_share_of_draws_looks_at_nothing(explore: float, told: list[float]) -> None:
    known = [record(0, 0), record(0, 1), record(0, 3)]

    found = shares(known, Sampler(kind=PROGRESS, explore=explore))

    assert found == pytest.approx(told)


def test_weights_that_are_equal_need_no_sums() -> None:
    assert sums_of([None] * 5, Sampler(kind=TARGET), 1.0) is None


def test_a_hundred_thousand_tasks_keep_their_proportions() -> None:
    known = [record(0, 0), *[record(0, 1)] * 99_999]

    sums = sums_of(known, Sampler(kind=PROGRESS, explore=0.1), 1.0)

    assert sums is not None
    assert sums[0] / sums[-1] == pytest.approx(0.1 / 100_000)
    assert sums[-1] == pytest.approx(GRAINS)
