"""Marks of flaky tasks in the store, and the tasks that curricula draw beside them."""

from __future__ import annotations

import asyncio

import pytest

from gateway.core.errors import InvalidRequest
from gateway.stores.memory.curricula import MemoryCurriculumStore
from gateway.tasks.curricula.flaky import FlakyTask, FlakyTasks, interval
from tests.unit.tasks.curricula.curriculum_parts import MATH

FOUND = FlakyTask(replays=50, differing=2, marked_at=1.5)


@pytest.mark.parametrize(
    ("differing", "replays", "low", "high"),
    [
        # Published values of Wilson's interval at 95 %.
        (0, 10, 0.0, 0.278),
        (1, 10, 0.018, 0.404),
        (5, 10, 0.237, 0.763),
        (10, 10, 0.722, 1.0),
        (2, 100, 0.006, 0.070),
    ],
)
def test_the_interval_is_wilson_s(differing: int, replays: int, low: float, high: float) -> None:
    assert interval(differing, replays) == pytest.approx((low, high), abs=6e-4)


def test_a_higher_confidence_has_a_wider_interval() -> None:
    assert interval(3, 20, 0.99)[0] < interval(3, 20)[0] < 0.15 < interval(3, 20)[1] < interval(3, 20, 0.99)[1]


async def test_marks_are_kept_for_each_environment_until_they_are_removed() -> None:
    flaky = FlakyTasks(MemoryCurriculumStore())

    assert await flaky.of(MATH) == {}
    assert await flaky.mark(MATH, "t1", FOUND) is False
    assert await flaky.mark(MATH, "t2", FOUND) is False
    assert await flaky.mark(MATH, "t1", FlakyTask(10, 1, 2.0)) is True
    assert await flaky.of(MATH) == {"t1": FlakyTask(10, 1, 2.0), "t2": FOUND}
    assert await flaky.mark(MATH, "t1", None) is True
    assert await flaky.mark(MATH, "t1", None) is False
    assert await flaky.of(MATH) == {"t2": FOUND}
    assert FOUND.rate == 0.04


async def test_concurrent_marks_of_two_replicas_are_all_kept() -> None:
    store = MemoryCurriculumStore()
    await asyncio.gather(*(FlakyTasks(store).mark(MATH, f"t{number}", FOUND) for number in range(10)))

    assert len(await FlakyTasks(store).of(MATH)) == 10


async def test_more_marks_than_the_store_holds_are_refused() -> None:
    flaky = FlakyTasks(MemoryCurriculumStore())
    await flaky.mark(MATH, "a" * 40_000, FOUND)

    with pytest.raises(InvalidRequest, match="2 marked tasks of 'math' take more than 65536 bytes"):
        await flaky.mark(MATH, "b" * 40_000, FOUND)
    assert list(await flaky.of(MATH)) == ["a" * 40_000]
