"""Outcomes on their way to the store, and the keys of task records."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.curriculum import Outcome, book_of
from gateway.core.episode import Summary
from gateway.core.errors import InvalidRequest, StoreUnavailable
from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.ports.curricula import MAX_OUTCOMES
from gateway.core.session import CloseReason, Session, SessionState
from gateway.stores.memory.curricula import MemoryCurriculumStore
from gateway.stores.memory.tasks import MemoryTaskStore
from gateway.tasks.curricula.stats import MAX_WAITING, SCORERS_KEPT, TaskStats
from gateway.tasks.task_ref import name_of
from tests.fakes.eventually import eventually, until
from tests.service.stack import environment
from tests.unit.tasks.curricula.curriculum_parts import MATH, Store, add, registry_of, remove

USUAL: tuple[dict[str, Any], ...] = ({"id": "first", "aliases": ["one"], "instruction": "1+1"}, {"instruction": "2+2"})
FIRST, SECOND = (name_of(task).key for task in USUAL)
WON = Summary(reward=1.0, finished=True, steps=3, seconds=1.5)


def outcome(task: str = "t", *, lease: str = "", reward: float = 1.0) -> Outcome:
    return Outcome(environment=MATH, task=task, reward=reward, finished=True, steps=1, seconds=0.1, lease=lease)


def session(**more: Any) -> Session:
    return Session(
        **{
            "id": SessionId("s"),
            "name": "one",
            "owner": Owner(""),
            "environment": MATH,
            "lease": "lease",
            "fingerprint": "f",
            "idle_s": 300.0,
            "worker": WorkerId("w"),
            "address": "unix:/w",
            "state": SessionState.CLOSING,
            "task": FIRST,
            "reason": CloseReason.DELETED,
            **more,
        }
    )


def records(store: MemoryCurriculumStore, *tasks: dict[str, Any]) -> TaskStats:
    return TaskStats(store, registry=registry_of(math=tasks or USUAL))


async def attempts(store: MemoryCurriculumStore) -> dict[str, int]:
    page = await store.records(MATH)
    return {record.task: record.attempts for record in page.records}


class Taking(MemoryCurriculumStore):
    """A store that keeps outcomes in order. During a write, more outcomes can arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Outcome] = []
        self.meanwhile: list[Outcome] = []
        self.teller: TaskStats | None = None
        """The statistics that receive `meanwhile` during a write."""

    async def note(self, outcomes: Sequence[Outcome]) -> int:
        self.told.extend(outcomes)
        while self.meanwhile:
            assert self.teller is not None
            self.teller.add(self.meanwhile.pop(0))
        return len(outcomes)


# -- writes to the store ----------------------------------------------------------------------------------------------


async def test_outcomes_wait_while_the_store_is_away_and_are_written_once() -> None:
    store = Store()
    known = records(store)
    store.is_away = True
    for _ in range(3):
        known.add(outcome())
        with pytest.raises(StoreUnavailable):
            await known.write()
    store.is_away = False

    await known.write()
    await known.write()

    assert await attempts(store) == {"t": 3}
    assert store.calls["note"] == 4


async def test_an_outcome_whose_answer_was_lost_is_sent_again_and_counts_once() -> None:
    store = Store()
    known = records(store)
    store.forgets_to_answer = True
    for number in range(3):
        known.add(outcome(lease=f"lease-{number}"))
    with pytest.raises(StoreUnavailable):
        await known.write()
    store.forgets_to_answer = False

    await known.write()

    assert store.calls["note"] == 2
    assert await attempts(store) == {"t": 3}


async def test_concurrent_writes_send_each_outcome_once() -> None:
    store = Store()
    known = records(store)
    for _ in range(MAX_OUTCOMES + 5):
        known.add(outcome())

    await asyncio.gather(*(known.write() for _ in range(4)))

    assert await attempts(store) == {"t": MAX_OUTCOMES + 5}


async def test_the_oldest_outcomes_are_dropped_when_too_many_wait() -> None:
    store = Taking()
    known = records(store)
    old, new = outcome("old"), outcome("new")
    for _ in range(5):
        known.add(old)
    for _ in range(MAX_WAITING - 2):
        known.add(new)

    await known.write()

    assert len(store.told) == MAX_WAITING
    assert [one.task for one in store.told[:3]] == ["old", "old", "new"]


async def test_outcomes_dropped_from_the_queue_during_their_write_drop_no_others() -> None:
    store = Taking()
    known = store.teller = records(store)
    for number in range(MAX_WAITING):
        known.add(outcome(str(number)))
    late = [outcome(f"late-{number}") for number in range(10)]
    store.meanwhile = list(late)

    await known.write()

    assert [one.task for one in store.told] == [*map(str, range(MAX_WAITING)), *(one.task for one in late)]


async def test_an_outcome_that_the_store_refuses_does_not_delay_later_outcomes() -> None:
    store = Store()
    known = records(store)
    known.add(outcome(reward=math.inf))
    await known.write()
    known.add(outcome("later"))

    await known.write()

    assert await attempts(store) == {"later": 1}
    with pytest.raises(InvalidRequest):  # The store itself refuses the outcome.
        await store.note([outcome(reward=math.inf)])


async def test_the_loop_continues_while_the_store_is_away_and_writes_waiting_outcomes() -> None:
    store = Store()
    known = records(store)
    store.is_away = True
    known.add(outcome())
    loop = asyncio.ensure_future(known.run())
    try:
        await until(lambda: store.calls["note"] >= 1)
        store.is_away = False

        async def are_told() -> None:
            assert await attempts(store) == {"t": 1}

        await eventually(are_told)
    finally:
        loop.cancel()
        await asyncio.wait({loop})


async def test_a_flush_writes_the_last_outcomes_and_ignores_an_unavailable_store() -> None:
    store = Store()
    known = records(store)
    known.add(outcome())
    store.is_away = True
    await known.flush()
    store.is_away = False

    await known.flush()

    assert await attempts(store) == {"t": 1}


# -- attempts ---------------------------------------------------------------------------------------------------------


async def test_an_episode_whose_reward_the_agent_earned_is_noted() -> None:
    store = Store()
    known = records(store)

    known.note(session(), environment(), WON, 1.0)
    await known.write()

    assert await attempts(store) == {FIRST: 1}


@pytest.mark.parametrize(
    ("session", "summary", "reward"),
    [
        pytest.param(session(task=""), WON, 1.0, id="the session has no task"),
        pytest.param(session(), WON, 1e300, id="the square of its reward overflows"),
        pytest.param(session(), replace(WON, seconds=math.inf), 1.0, id="its time is infinite"),
    ],
)
async def test_an_outcome_that_cannot_be_recorded_is_not_an_attempt(
    session: Session, summary: Summary, reward: float
) -> None:
    store = Store()
    known = records(store)

    known.note(session, environment(), summary, reward)
    await known.write()

    assert await attempts(store) == {}


async def test_an_environment_of_a_split_keeps_its_records_with_its_base() -> None:
    store = Store()
    known = records(store)
    split = replace(environment("math.hard"), base=MATH)

    known.note(session(environment=EnvironmentName("math.hard")), split, WON, 1.0)
    await known.write()

    assert await attempts(store) == {FIRST: 1}


async def test_an_end_that_is_noted_twice_is_one_attempt() -> None:
    store = Store()
    known = records(store)

    for _ in range(2):
        known.note(session(policy="step-1"), environment(), WON, 1.0)
    await known.write()

    assert await attempts(store) == {FIRST: 1}
    assert (await known.of(MATH))[FIRST].policy == "step-1"


# -- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "key"),
    [
        pytest.param("train/0", FIRST, id="a place"),
        pytest.param("first", FIRST, id="an id"),
        pytest.param("one", FIRST, id="an alias"),
        pytest.param("train/1", SECOND, id="the place of a task without an id"),
        pytest.param("train/9", "train/9", id="a place that does not exist"),
        pytest.param("nosuch/0", "nosuch/0", id="a split that does not exist"),
        pytest.param("train/x", "train/x", id="not a place"),
        pytest.param("train/²", "train/²", id="a digit that is not a number"),
        pytest.param("sha256:12", "sha256:12", id="an inline task without an id"),
        pytest.param("somebody's own", "somebody's own", id="an inline task's id"),
    ],
)
def test_a_record_has_the_tasks_name_as_its_key_however_the_task_was_requested(task: str, key: str) -> None:
    assert records(Store()).key(MATH, task) == key


def test_an_id_that_looks_like_a_place_is_found_by_its_name() -> None:
    task = {"id": "custom/7", "aliases": ["custom/8"]}
    known = records(Store(), task)

    assert known.key(MATH, "custom/7") == known.key(MATH, "custom/8") == name_of(task).key


async def test_the_records_of_a_task_are_removed_with_those_of_its_former_lines() -> None:
    store = Store()
    known = records(store)
    former = name_of({"id": "first", "instruction": "1+2"}).key
    for key in (FIRST, former, SECOND):
        known.add(outcome(key))

    removed = await known.forget(MATH, "train/0")

    assert removed == 2
    assert await attempts(store) == {SECOND: 1}


async def test_a_removed_task_keeps_the_name_in_its_request_as_its_key() -> None:
    registry, tasks = registry_of(math=[{"id": "first"}]), MemoryTaskStore()
    known = TaskStats(Store(), registry=registry)
    await add(registry, tasks, {"id": "short-lived"}, {"id": "stays"})
    before = known.key(MATH, "custom/0")

    await remove(registry, tasks, "short-lived")

    assert before == "short-lived"
    assert known.key(MATH, "custom/0") == "custom/0"
    assert known.key(MATH, "short-lived") == "short-lived"
    assert known.key(MATH, "custom/1") == "stays"


# -- reading ----------------------------------------------------------------------------------------------------------


async def test_records_are_updated_and_earlier_results_do_not_change() -> None:
    store = Store(page_records=2)
    known = records(store)
    for number in range(5):
        known.add(outcome(f"t{number}"))
    await known.write()
    first = await known.of(MATH)
    same = await known.of(MATH)
    await store.note([outcome("t0"), outcome("new")])
    await store.forget(MATH, "t4")
    second = await known.of(MATH)

    assert {task: record.attempts for task, record in first.items()} == {f"t{n}": 1 for n in range(5)}
    assert same is first, "nothing is new"
    assert {task: record.attempts for task, record in second.items()} == {"t0": 2, "t1": 1, "t2": 1, "t3": 1, "new": 1}


async def test_records_that_the_store_lost_are_forgotten() -> None:
    store = Store()
    known = records(store)
    known.add(outcome())
    await known.write()
    assert await known.of(MATH)

    await store.forget(MATH)

    assert await known.of(MATH) == {}


async def test_records_without_any_outcome_are_not_new() -> None:
    known = records(Store())

    assert await known.of(MATH) is await known.of(MATH), "else all tasks are weighed anew each second"


async def test_records_cannot_be_read_while_the_store_is_away() -> None:
    store = Store()
    known = records(store)
    await known.of(MATH)
    store.is_away = True

    with pytest.raises(StoreUnavailable):
        await known.of(MATH)


# -- versions of the scorer -------------------------------------------------------------------------------------------

ONE, TWO = "1" * 64, "2" * 64


async def play(stats: TaskStats, scorer: str, *rewards: float) -> None:
    """Play an episode for each of *rewards* with a scorer of this version, and write the outcomes."""
    for reward in rewards:
        played = session(scorer=scorer, lease=f"{scorer} {reward}")
        stats.current[MATH] = scorer
        stats.note(played, environment("math"), WON, reward)
    await stats.write()


async def test_rewards_of_two_scorers_are_never_in_one_record() -> None:
    store = MemoryCurriculumStore()
    stats = records(store)

    await play(stats, "", 0.25)  # as an older gateway did
    await play(stats, ONE, 0.0, 0.5)
    first = await stats.of(MATH)
    await play(stats, TWO, 1.0)

    assert {task: (one.scorer, one.attempts, one.mean) for task, one in first.items()} == {FIRST: (ONE, 2, 0.25)}
    assert [(one.environment, one.scorer, one.recent) for one in (await stats.of(MATH)).values()] == [
        (MATH, TWO, (1.0,))
    ]
    former = {scorer: (await stats.of(MATH, scorer))[FIRST].recent for scorer in await stats.scorers(MATH)}
    assert former == {"": (0.25,), ONE: (0.0, 0.5), TWO: (1.0,)}


async def test_the_outcome_of_a_former_scorer_that_ends_late_does_not_count_for_the_current_one() -> None:
    stats = records(MemoryCurriculumStore())
    late = session(scorer=ONE, lease="late")
    stats.current[MATH] = ONE
    await play(stats, TWO, 1.0)

    stats.note(late, environment("math"), WON, 0.0)
    await stats.write()

    assert (await stats.of(MATH))[FIRST].recent == (1.0,)
    assert (await stats.scorers(MATH))[-1] == TWO


async def test_a_scorer_that_comes_back_goes_on_with_its_records_in_every_replica() -> None:
    store = MemoryCurriculumStore()
    here, there = records(store), records(store)
    await play(here, ONE, 0.5)
    await play(there, TWO, 1.0)

    await play(here, ONE)  # nothing is opened
    assert (await here.of(MATH))[FIRST].recent == (1.0,)
    await play(here, ONE, 0.75)

    for replica in (here, there):
        assert (await replica.of(MATH))[FIRST].recent == (0.5, 0.75)
        assert await replica.scorers(MATH) == ["", TWO, ONE]


async def test_the_records_of_the_oldest_of_many_scorers_are_removed() -> None:
    store = MemoryCurriculumStore()
    stats = records(store)
    versions = [f"{number:064x}" for number in range(SCORERS_KEPT + 2)]
    for scorer in versions:
        await play(stats, scorer, 1.0)

    assert await stats.scorers(MATH) == ["", *versions[2:]]
    assert not (await store.records(book_of(MATH, versions[0]))).records
    assert await stats.forget(MATH) == SCORERS_KEPT


async def test_the_current_scorer_is_known_while_the_store_is_away_and_written_later() -> None:
    store = Store()
    stats = records(store)
    stats.current[MATH] = ONE
    store.is_away = True
    with pytest.raises(StoreUnavailable):
        await stats.write()
    store.is_away = False

    assert (await stats.scorers(MATH))[-1] == ONE
    await stats.write()
    assert await records(store).scorers(MATH) == ["", ONE]
