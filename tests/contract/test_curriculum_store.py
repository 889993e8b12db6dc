"""The seam of curricula without its handles: one suite, run on memory and on Redis."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace

import pytest

from gateway.core.curriculum import RECENT, Outcome, TaskRecord
from gateway.core.errors import InvalidRequest
from gateway.core.ports.curricula import (
    MAX_DEFINITION_BYTES,
    MAX_OUTCOMES,
    MAX_STATE_BYTES,
    TOLD_S,
    CurriculumStore,
    RecordPage,
)
from gateway.stores.memory.curricula import MemoryCurriculumStore
from tests.contract.curriculum_worlds import Make, Reader, drawn, joined, known, open_store, outcome
from tests.contract.store_worlds import CODING, MATH, MemoryWorld, World

pytest_plugins = ["tests.contract.store_fixtures", "tests.contract.curriculum_fixtures"]


# -- records ------------------------------------------------------------------------------------------------------


async def test_an_unknown_environment_has_no_records(curricula: CurriculumStore) -> None:
    assert await curricula.note([]) == 0

    page = await curricula.records(MATH)

    assert page == RecordPage(version=page.version, is_whole=True, is_last=True, records=[], removed=[])


async def test_the_first_outcome_creates_the_record_of_a_task(curricula: CurriculumStore) -> None:
    given = outcome("train/7", 0.1, finished=False, steps=4, seconds=2.25, policy="v1\nx é \ud800")

    assert await curricula.note([given]) == 1

    (record,) = (await known(curricula)).values()
    assert record == TaskRecord(environment=MATH, task="train/7").after(given, record.seen_at)
    assert (record.attempts, record.finished, record.recent, record.policy) == (1, 0, (0.1,), given.policy)


async def test_records_keep_the_newest_rewards(curricula: CurriculumStore) -> None:
    rewards = [index / 7 for index in range(RECENT + 9)]
    await curricula.note([outcome(reward=reward) for reward in rewards[:20]])
    await curricula.note([outcome(reward=reward) for reward in rewards[20:]])

    (record,) = (await known(curricula)).values()

    assert record.recent == tuple(rewards[-RECENT:])
    assert record.attempts == len(rewards)


async def test_environments_have_separate_records(curricula: CurriculumStore) -> None:
    await curricula.note([outcome("a", 1.0), outcome("a", 0.0, environment=CODING), outcome("a", 0.5)])

    assert (await known(curricula))["a"].recent == (1.0, 0.5)
    assert (await known(curricula, CODING))["a"].recent == (0.0,)


async def test_rewards_that_differ_in_size_keep_every_digit(curricula: CurriculumStore) -> None:
    outcomes = [outcome(reward=reward) for reward in (1e300, -1e-300, 0.1 + 0.2, -0.0, 5e-324, 1 / 3, 123456789.123456)]
    expected = TaskRecord(environment=MATH, task="train/1")
    for given in outcomes:
        await curricula.note([given])
        expected = expected.after(given, 0.0)

    (record,) = (await known(curricula)).values()

    assert repr(replace(record, seen_at=0.0)) == repr(expected)


async def test_rewards_too_large_to_add_up_spoil_only_their_own_record(curricula: CurriculumStore) -> None:
    outcomes = [outcome("a", reward) for reward in (1.7e308, -1.7e308, 1.0, 2.0)]
    expected = TaskRecord(environment=MATH, task="a")
    for given in outcomes:
        await curricula.note([given, outcome("b", 1.0)])
        expected = expected.after(given, 0.0)

    records = await known(curricula)

    # Compared as texts, because NaN is not equal to itself.
    assert repr(replace(records["a"], seen_at=0.0)) == repr(expected)
    assert (records["b"].mean, records["b"].spread) == (1.0, 0.0)


async def test_an_outcome_that_is_noted_twice_counts_once(curricula: CurriculumStore, store_world: World) -> None:
    told = outcome("a", lease="lease 1")

    counted = [await curricula.note([told, told]), await curricula.note([told, outcome("a", lease="lease 2")])]
    store_world.pass_time(TOLD_S - 100)
    counted.append(await curricula.note([told]))
    store_world.pass_time(101)
    counted.append(await curricula.note([told]))

    assert counted == [1, 1, 0, 1]
    assert (await known(curricula))["a"].attempts == 3


async def test_outcomes_without_a_lease_all_count(curricula: CurriculumStore) -> None:
    assert await curricula.note([outcome("a")] * 3) == 3


async def test_one_outcome_noted_concurrently_by_many_replicas_counts_once(curricula: CurriculumStore) -> None:
    told = [outcome("a", lease="lease 1"), outcome("b", lease="lease 2")]

    counted = await asyncio.gather(*(curricula.note(told) for _ in range(20)))

    assert sorted(counted) == [0] * 19 + [2]


async def test_many_concurrent_outcomes_are_all_in_the_records(curricula: CurriculumStore) -> None:
    await asyncio.gather(*(curricula.note([outcome(f"t{n % 3}", float(n))]) for n in range(60)))

    records = await known(curricula)

    assert {task: record.attempts for task, record in records.items()} == {"t0": 20, "t1": 20, "t2": 20}
    assert records["t1"].mean == pytest.approx(sum(range(1, 60, 3)) / 20)


async def test_one_call_takes_as_many_outcomes_as_the_seam_allows(curricula: CurriculumStore) -> None:
    assert await curricula.note([outcome(f"t{n}") for n in range(MAX_OUTCOMES)]) == MAX_OUTCOMES

    assert len(await known(curricula)) == MAX_OUTCOMES


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        pytest.param([outcome()] * (MAX_OUTCOMES + 1), "1001 outcomes in one request", id="too many"),
        pytest.param(
            [outcome("b"), outcome(reward=math.inf)],
            "'train/1': reward is not a finite",
            id="a reward that is not finite",
        ),
        pytest.param(
            [outcome(seconds=math.nan)],
            "'train/1': seconds is not a finite number",
            id="a duration that is not a number",
        ),
        pytest.param(
            [outcome(reward=10**400)], "'train/1': reward is not a finite number", id="a reward too large for a float"
        ),
        pytest.param([outcome("", lease="lease 5")], "lease 'lease 5' names no environment, or no task", id="no task"),
    ],
)
async def test_a_refused_batch_of_outcomes_leaves_nothing_behind(
    curricula: CurriculumStore, batch: list[Outcome], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        await curricula.note(batch)

    assert await known(curricula) == {}


# -- what changed -------------------------------------------------------------------------------------------------


async def test_only_the_changes_since_a_version_are_returned(curricula: CurriculumStore) -> None:
    await curricula.note([outcome("a"), outcome("b"), outcome("c")])
    reader = Reader(curricula)
    await reader.read()

    await curricula.note([outcome("b", 0.0), outcome("d")])
    await curricula.forget(MATH, "a")

    page = await curricula.records(MATH, reader.version)
    assert sorted(record.task for record in page.records) == ["b", "d"]
    assert (page.removed, page.is_whole, page.is_last) == (["a"], False, True)
    last = await curricula.records(MATH, page.version)
    assert last == RecordPage(version=page.version, is_whole=False, is_last=True, records=[], removed=[])


@pytest.mark.parametrize("since", ["x", "x:1:1", "::", "-:9:9", "e-r:1", "\ud800 é"])
async def test_an_unknown_version_restarts_the_read(curricula: CurriculumStore, since: str) -> None:
    await curricula.note([outcome("a"), outcome("b")])

    page = await curricula.records(MATH, since)

    assert (len(page.records), page.is_whole, page.is_last) == (2, True, True)


async def test_a_version_is_valid_for_its_environment_only(curricula: CurriculumStore) -> None:
    await curricula.note([outcome("a"), outcome("a", environment=CODING)])
    version = (await curricula.records(MATH)).version

    page = await curricula.records(CODING, version)

    assert page.is_whole
    assert len(page.records) == 1


async def test_many_records_come_in_pages(make: Make) -> None:
    store = make(page_records=4)
    await store.note([outcome(f"t{n}") for n in range(10)])
    reader = Reader(store)

    assert await reader.read() == [4, 4, 2]

    assert set(reader.known) == {f"t{n}" for n in range(10)}
    assert reader.began == 1
    await store.note([outcome(f"t{n}") for n in range(9)])
    assert await reader.read() == [4, 4, 1]
    assert reader.began == 1


async def test_a_change_between_two_pages_is_returned_in_its_present_state(make: Make) -> None:
    store = make(page_records=2)
    await store.note([outcome(f"t{n}", 0.0) for n in range(6)])
    first = await store.records(MATH)

    await store.note([outcome("t0", 1.0), outcome("new")])
    await store.forget(MATH, "t1")
    await store.forget(MATH, "t5")

    reader = Reader(store, version=first.version, known={record.task: record for record in first.records})
    await reader.read()
    assert reader.began == 0
    assert set(reader.known) == {"t0", "t2", "t3", "t4", "new"}
    assert reader.known["t0"].recent == (0.0, 1.0)


async def test_a_reader_that_missed_too_many_removals_restarts(make: Make) -> None:
    store = make(gone_kept=3)
    await store.note([outcome(f"t{n}") for n in range(10)])
    early, late = Reader(store), Reader(store)
    await early.read()
    await store.forget(MATH, "t0")
    await late.read()

    for n in range(1, 4):
        await store.forget(MATH, f"t{n}")
    await early.read()
    await late.read()

    assert (early.began, late.began) == (2, 1)
    assert set(early.known) == set(late.known) == {f"t{n}" for n in range(4, 10)}


async def test_pages_end_even_if_more_removals_happened_than_are_remembered(make: Make) -> None:
    store = make(gone_kept=1, page_records=2)
    await store.note([outcome(f"t{n}") for n in range(9)])
    for n in range(4):
        await store.forget(MATH, f"t{n}")
    reader = Reader(store)

    assert await reader.read() == [2, 2, 1]

    assert reader.began == 1
    assert set(reader.known) == {f"t{n}" for n in range(4, 9)}


async def test_a_forgotten_task_starts_with_an_empty_record(curricula: CurriculumStore) -> None:
    await curricula.note([outcome("a"), outcome("b")])
    reader = Reader(curricula)
    await reader.read()

    assert await curricula.forget(MATH, "a") == 1
    assert await curricula.forget(MATH, "a") == 0
    assert await curricula.forget(CODING, "b") == 0
    await curricula.note([outcome("a", 0.0)])

    assert await reader.read() == [1], "its removal is no news any more"
    assert reader.known["a"].recent == (0.0,)
    assert reader.began == 1


async def test_all_records_of_an_environment_are_forgotten_together(curricula: CurriculumStore) -> None:
    await curricula.note([outcome("a"), outcome("b"), outcome("a", environment=CODING)])
    reader = Reader(curricula)
    await reader.read()

    assert await curricula.forget(MATH) == 2

    await reader.read()
    assert reader.known == {}
    assert set(await known(curricula, CODING)) == {"a"}
    await curricula.note([outcome("c")])
    await reader.read()
    assert set(reader.known) == {"c"}
    assert await curricula.forget(MATH) == 1
    assert await curricula.forget(MATH) == 0


async def test_above_the_maximum_the_records_unseen_for_longest_are_removed(make: Make) -> None:
    store = make(max_records=3)
    await store.note([outcome("a"), outcome("b"), outcome("c")])
    await store.note([outcome("a", environment=CODING)])
    reader = Reader(store)
    await reader.read()

    await store.note([outcome("a"), outcome("d")])
    await store.note([outcome("e"), outcome("e")])

    await reader.read()
    assert set(reader.known) == {"a", "d", "e"}
    assert reader.began == 1
    assert set(await known(store)) == {"a", "d", "e"}
    assert set(await known(store, CODING)) == {"a"}


async def test_a_batch_of_more_tasks_than_the_maximum_keeps_the_last_ones(make: Make) -> None:
    store = make(max_records=2, gone_kept=2)

    assert await store.note([outcome(f"t{n}") for n in (0, 1, 2, 3, 4, 1)]) == 6

    records = await known(store)
    assert set(records) == {"t4", "t1"}
    assert records["t1"].attempts == 2


# -- state --------------------------------------------------------------------------------------------------------


async def test_a_state_is_replaced_only_with_its_present_version(curricula: CurriculumStore) -> None:
    body = bytes(range(256))
    assert await curricula.state("easy") == (0, b"")

    assert await curricula.set_state("easy", 0, body)

    version, state = await curricula.state("easy")
    assert state == body
    assert not await curricula.set_state("easy", 0, b"late")
    assert await curricula.state("easy") == (version, body)
    assert await curricula.set_state("easy", version, b"")
    assert (await curricula.state("easy"))[1] == b""
    assert await curricula.state("hard") == (0, b"")


async def test_of_many_concurrent_replacements_of_a_state_one_succeeds(curricula: CurriculumStore) -> None:
    replaced = await asyncio.gather(*(curricula.set_state("easy", 0, b"%d" % n) for n in range(20)))

    assert replaced.count(True) == 1
    assert (await curricula.state("easy"))[1] == b"%d" % replaced.index(True)


async def test_replacing_a_state_does_not_change_the_draws(curricula: CurriculumStore) -> None:
    await drawn(curricula, "a")
    await joined(curricula, "b", handle=1)

    await curricula.set_state("easy", 0, b"x")

    assert await drawn(curricula, "b", handle=1) == 1
    assert await drawn(curricula, "c") == 0
    assert await curricula.numbers("easy", 1) == 2


async def test_a_state_has_a_maximum_size(curricula: CurriculumStore) -> None:
    assert await curricula.set_state("easy", 0, b"x" * MAX_STATE_BYTES)
    version, _ = await curricula.state("easy")

    with pytest.raises(InvalidRequest, match="a sampler's state of 65537 bytes"):
        await curricula.set_state("easy", version, b"x" * (MAX_STATE_BYTES + 1))

    assert (await curricula.state("easy"))[0] == version


async def test_a_reset_forgets_draws_and_state_and_no_record(curricula: CurriculumStore) -> None:
    await curricula.note([outcome("a")])
    for curriculum in ("easy", "hard"):
        await curricula.set_state(curriculum, 0, b"x")
        await curricula.numbers(curriculum, 5)
    assert await drawn(curricula, "a") == 5
    await joined(curricula, "b", handle=1)

    await curricula.reset("easy")

    assert await curricula.state("easy") == (0, b"")
    assert (await curricula.state("hard"))[1] == b"x"
    assert await curricula.numbers("hard", 1) == 5
    assert await drawn(curricula, "a", handle=1) == 0
    assert await drawn(curricula, "a") == 1
    assert set(await known(curricula)) == {"a"}
    await curricula.reset("unknown")


# -- definitions --------------------------------------------------------------------------------------------------


async def test_a_definition_is_returned_byte_for_byte(curricula: CurriculumStore) -> None:
    assert await curricula.definitions() == (await curricula.definitions_version(), {})

    await curricula.define("easy", bytes(range(256)))
    await curricula.define("hard", b"")
    await curricula.define("hard", b"2")

    assert (await curricula.definitions())[1] == {"easy": bytes(range(256)), "hard": b"2"}


async def test_each_change_of_definitions_has_its_own_version(curricula: CurriculumStore) -> None:
    versions = [await curricula.definitions_version()]
    for change in (
        curricula.define("easy", b"1"),
        curricula.define("easy", b"2"),
        curricula.define("hard", b"1"),
        curricula.undefine("easy"),
        curricula.undefine("hard"),
        curricula.define("hard", b"1"),
    ):
        await change
        versions.append(await curricula.definitions_version())
        assert (await curricula.definitions())[0] == versions[-1]

    assert len(set(versions)) == len(versions)


async def test_undefining_an_unknown_curriculum_fails_and_keeps_its_draws(curricula: CurriculumStore) -> None:
    await curricula.numbers("easy", 3)
    version = await curricula.definitions_version()

    assert not await curricula.undefine("easy")

    assert await curricula.definitions_version() == version
    assert await curricula.numbers("easy", 1) == 3


async def test_undefining_a_curriculum_removes_its_draws_and_its_state(curricula: CurriculumStore) -> None:
    await curricula.define("easy", b"1")
    await curricula.set_state("easy", 0, b"x")
    assert await drawn(curricula, "a") == 0
    await joined(curricula, "b", handle=1)

    assert await curricula.undefine("easy")

    assert await curricula.state("easy") == (0, b"")
    assert await drawn(curricula, "a", handle=1) == 0


async def test_redefining_a_curriculum_keeps_its_draws_and_its_state(curricula: CurriculumStore) -> None:
    await curricula.define("easy", b"1")
    await curricula.set_state("easy", 0, b"x")
    await curricula.numbers("easy", 3)

    await curricula.define("easy", b"2")

    assert (await curricula.state("easy"))[1] == b"x"
    assert await curricula.numbers("easy", 1) == 3


async def test_the_number_of_definitions_has_a_maximum(make: Make) -> None:
    store = make(max_definitions=2)
    await store.define("a", b"1")
    await store.define("b", b"1")
    version = await store.definitions_version()

    with pytest.raises(InvalidRequest, match="more than 2 curricula"):
        await store.define("c", b"1")

    assert await store.definitions_version() == version
    await store.define("b", b"2")
    await store.undefine("a")
    await store.define("c", b"1")
    assert (await store.definitions())[1] == {"b": b"2", "c": b"1"}


async def test_a_definition_has_a_maximum_size(curricula: CurriculumStore) -> None:
    await curricula.define("easy", b"x" * MAX_DEFINITION_BYTES)

    with pytest.raises(InvalidRequest, match="the definition of 'hard' has 65537 bytes; the maximum is 65536"):
        await curricula.define("hard", b"x" * (MAX_DEFINITION_BYTES + 1))

    assert set((await curricula.definitions())[1]) == {"easy"}


# -- memory only --------------------------------------------------------------------------------------------------


async def test_in_one_process_records_have_the_time_of_its_clock() -> None:
    world = MemoryWorld()
    store = open_store(world)

    await store.note([outcome("a")])
    world.pass_time(7)
    await store.note([outcome("b")])

    assert {task: record.seen_at for task, record in (await known(store)).items()} == {"a": 1000.0, "b": 1007.0}


async def test_without_a_given_clock_a_process_uses_unix_time() -> None:
    store = MemoryCurriculumStore()

    await store.note([outcome("a")])

    assert abs((await known(store))["a"].seen_at - time.time()) < 3600
