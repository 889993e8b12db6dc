"""Counts of audits and marks of flaky tasks in the store, and what the counts show."""

from __future__ import annotations

import asyncio
from math import comb

import pytest

from gateway.core.errors import InvalidRequest, UnknownTask
from gateway.core.ids import EnvironmentName
from gateway.core.ports.curricula import MAX_STATE_BYTES
from gateway.stores.memory.curricula import MemoryCurriculumStore
from gateway.tasks.curricula.flaky import (
    MIN_REPLAYS,
    AuditedTask,
    DifferingEpisode,
    FlakyTasks,
    Verdict,
    interval,
    verdict,
)
from tests.unit.tasks.curricula.curriculum_parts import MATH


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


@pytest.mark.parametrize(
    ("differing", "replays", "found"),
    [
        (0, 1, Verdict.STEADY),
        (0, 1000, Verdict.STEADY),
        (1, 1, Verdict.UNDECIDED),
        (19, 19, Verdict.UNDECIDED),
        (1, 20, Verdict.UNDECIDED),
        (2, 20, Verdict.FLAKY),
        (2, 55, Verdict.FLAKY),
        (2, 56, Verdict.UNDECIDED),
        (3, 150, Verdict.UNDECIDED),
        (4, 150, Verdict.FLAKY),
        (1, 1000, Verdict.STEADY),
    ],
)
def test_a_task_is_flaky_if_the_interval_of_enough_replays_is_above_one_percent(
    differing: int, replays: int, found: Verdict
) -> None:
    assert verdict(differing, replays, 0.01) is found


def test_62_replays_find_a_task_that_differs_with_p_0_1_with_99_percent() -> None:
    """`docs/operations.md` says so. An audit replays an undecided task `MIN_REPLAYS` more times."""
    missed = 0.0
    for differing in range(63):
        chance = comb(62, differing) * 0.1**differing * 0.9 ** (62 - differing)
        match verdict(differing, 62, 0.01):
            case Verdict.STEADY:
                missed += chance
            case Verdict.UNDECIDED:
                missed += chance * sum(
                    comb(MIN_REPLAYS, more) * 0.1**more * 0.9 ** (MIN_REPLAYS - more)
                    for more in range(MIN_REPLAYS + 1)
                    if verdict(differing + more, 62 + MIN_REPLAYS, 0.01) is not Verdict.FLAKY
                )
    assert 0.009 < missed < 0.01


class Scorer:
    """The current version of the scorer."""

    version = "s1"

    async def __call__(self, environment: EnvironmentName) -> str:
        return self.version


def episode(number: int) -> DifferingEpisode:
    return DifferingEpisode(f"e{number}", 1.0, 0.0)


async def test_counts_of_audits_add_up_and_keep_the_newest_episodes() -> None:
    store = MemoryCurriculumStore()
    flaky = FlakyTasks(store, Scorer())
    steady = await flaky.add(MATH, "t1", replays=10, differing=0)
    kept = await store.state("flaky:math")
    for number in range(4):
        sums = await flaky.add(MATH, "t1", replays=5, differing=1, episodes=[episode(number), episode(number % 2)])
    last = await flaky.add(MATH, "t1", replays=5, differing=0)

    assert (steady.replays, steady.differing, kept) == (10, 0, (0, b"")), "tasks that never differed are not kept"
    assert (sums.replays, sums.differing) == (20, 4)
    assert [one.episode for one in sums.episodes] == ["e3", "e1", "e2"]
    assert (last.replays, last.differing, last.scorer, last.marked_at) == (25, 4, "s1", None)


async def test_marks_are_in_force_for_their_scorer_until_they_are_removed() -> None:
    scorer = Scorer()
    flaky = FlakyTasks(MemoryCurriculumStore(), scorer)
    assert await flaky.of(MATH) == {}
    with pytest.raises(UnknownTask, match="no audit by the current scorer found that task 't1' of math differs"):
        await flaky.mark(MATH, "t1", by="boss")
    for task in ("t1", "t2", "t3"):
        await flaky.add(MATH, task, replays=50, differing=2, episodes=[episode(1)])
    marks = {task: await flaky.mark(MATH, task, by="boss") for task in ("t1", "t2")}

    assert await flaky.of(MATH) == marks
    assert (marks["t1"].marked_by, marks["t1"].episodes) == ("boss", (episode(1),))
    assert (await flaky.add(MATH, "t1", replays=1, differing=0)).marked_at == marks["t1"].marked_at
    scorer.version = "s2"
    assert await flaky.of(MATH) == {}
    assert (await flaky.add(MATH, "t1", replays=1, differing=1)).replays == 1
    scorer.version = "s1"
    assert set(await flaky.of(MATH)) == {"t1", "t2"}
    assert await flaky.forget(MATH, "t1") is True
    assert await flaky.forget(MATH, "t1") is False
    assert set(await flaky.of(MATH)) == {"t2"}
    scorer.version = "s2"
    assert (await flaky.add(MATH, "t1", replays=1, differing=1)).replays == 1, "of every scorer"


async def test_concurrent_audits_of_two_replicas_are_all_counted() -> None:
    store = MemoryCurriculumStore()
    audits = [FlakyTasks(store, Scorer()).add(MATH, f"t{number % 2}", replays=2, differing=1) for number in range(10)]
    await asyncio.gather(*audits)

    assert (await FlakyTasks(store, Scorer()).add(MATH, "t0", replays=1, differing=0)).replays == 11


async def test_marks_of_an_earlier_version_are_not_in_force() -> None:
    store = MemoryCurriculumStore()
    await store.set_state("flaky:math", 0, b'{"t1":[1,1,1754000000.0]}')
    flaky = FlakyTasks(store, Scorer())

    assert await flaky.of(MATH) == {}
    assert (await flaky.add(MATH, "t1", replays=2, differing=1)).replays == 2


async def test_former_scorers_and_old_counts_make_room_and_marks_do_not() -> None:
    scorer = Scorer()
    flaky = FlakyTasks(MemoryCurriculumStore(), scorer)
    names = {name: name * 15_000 for name in "abcdefg"}

    async def add(name: str) -> AuditedTask:
        return await flaky.add(MATH, names[name], replays=20, differing=5)

    async def kept() -> set[str]:
        """Return the tasks whose counts are kept."""
        sums = {name: await flaky.add(MATH, names[name], replays=1, differing=0) for name in names}
        return {name for name, one in sums.items() if one.differing}

    await add("a")
    await flaky.mark(MATH, names["a"], by="")
    scorer.version = "s2"
    for name in "bcd":
        await add(name)
    await flaky.mark(MATH, names["b"], by="")
    await add("e")
    assert await kept() == {"b", "c", "d", "e"}, "the lapsed mark made room"
    await add("f")
    assert await kept() == {"b", "d", "e", "f"}, "the oldest counts made room, and not the mark"
    for name in "def":
        await flaky.mark(MATH, names[name], by="")
    sums = await add("g")
    assert (sums.replays, await kept()) == (20, {"b", "d", "e", "f"}), "an audit does not fail"


async def test_more_marks_than_the_store_holds_are_refused() -> None:
    flaky = FlakyTasks(MemoryCurriculumStore(), Scorer())
    room = MAX_STATE_BYTES - 150
    await flaky.add(MATH, "a" * (room // 2), replays=20, differing=5)
    await flaky.mark(MATH, "a" * (room // 2), by="")
    await flaky.add(MATH, "b" * (room // 2), replays=20, differing=5)

    with pytest.raises(InvalidRequest, match="the marked tasks of 'math' take more than 65536 bytes"):
        await flaky.mark(MATH, "b" * (room // 2), by="x" * 200)
    assert list(await flaky.of(MATH)) == ["a" * (room // 2)]
