"""Random walks of both curriculum stores, compared with `TaskRecord.after` for records and a naive model for handles.

Moments are multiples of 100 s in the model and in its requests to the store. The milliseconds that pass on Redis' own
clock therefore decide nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from gateway.core.curriculum import Outcome, TaskRecord
from gateway.core.ids import EnvironmentName
from gateway.core.ports.curricula import CurriculumStore, Drawn, Turn
from tests.contract.curriculum_worlds import Reader, open_store, outcome
from tests.contract.store_worlds import CODING, MATH, MemoryWorld, RedisServer, RedisWorld, World

pytest_plugins = ["tests.contract.store_fixtures"]

T = TypeVar("T")

CHANCE = settings(derandomize=os.environ.get("CI") == "true", suppress_health_check=list(HealthCheck), database=None)
MAX_RECORDS = 5
TASKS = [f"t{n}" for n in range(7)]

# The squares of these rewards are finite numbers, too.
numbers = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e150, max_value=1e150)
outcomes = st.builds(
    outcome,
    st.sampled_from(["a", "b", "split/17 é"]),
    st.one_of(numbers, st.sampled_from([0.0, 1.0, 1 / 3])),
    environment=st.sampled_from([MATH, CODING]),
    finished=st.booleans(),
    steps=st.integers(0, 10**9),
    seconds=st.floats(0.0, 1e9),
    policy=st.text(max_size=5),
    lease=st.sampled_from(["", "", "", "one", "two"]),
)


# -- the arithmetic -----------------------------------------------------------------------------------------------


async def records_are_those_of_the_core(world: World, batches: list[list[Outcome]]) -> None:
    store = open_store(world)
    expected: dict[tuple[EnvironmentName, str], TaskRecord] = {}
    told: set[str] = set()
    readers = [Reader(store, environment) for environment in (MATH, CODING)]
    for batch in batches:
        counted = 0
        for one in batch:
            if one.lease in told:
                continue
            told |= {one.lease} - {""}
            before = expected.get((one.environment, one.task))
            before = before or TaskRecord(environment=one.environment, task=one.task)
            expected[one.environment, one.task] = before.after(one, 0.0)
            counted += 1

        assert await store.note(batch) == counted

        for reader in readers:
            await reader.read()
    found = {(record.environment, record.task): record for reader in readers for record in reader.known.values()}
    # Compared as texts, which distinguish -0.0 from 0.0 and show each digit.
    assert {name: repr(replace(record, seen_at=0.0)) for name, record in found.items()} == {
        name: repr(record) for name, record in expected.items()
    }
    await store.aclose()


@settings(CHANCE, max_examples=100)
@given(st.lists(st.lists(outcomes, max_size=40), max_size=4))
def test_the_memory_store_calculates_like_the_core(batches: list[list[Outcome]]) -> None:
    asyncio.run(records_are_those_of_the_core(MemoryWorld(), batches))


@pytest.mark.redis
def test_the_redis_store_calculates_like_the_core(redis_server: RedisServer) -> None:
    @settings(CHANCE, max_examples=60)
    @given(st.lists(st.lists(outcomes, max_size=40), max_size=4))
    def counts(batches: list[list[Outcome]]) -> None:
        asyncio.run(records_are_those_of_the_core(RedisWorld(redis_server), batches))

    counts()


# -- handles and changes ------------------------------------------------------------------------------------------

curricula = st.sampled_from(["easy", "easy", "hard"])
handles = st.integers(0, 2)
members = st.sampled_from(list("abcdefg"))
sizes = st.sampled_from([1, 2, 2, 3])
hundreds = st.sampled_from([100.0, 200.0, 300.0])


@dataclass
class ModelGroup:
    drawn: Drawn
    size: int
    until: float
    members: set[str] = field(default_factory=set)


@dataclass
class ModelHandle:
    groups: list[ModelGroup] = field(default_factory=list)
    due: tuple[int, int, float] | None = None


@dataclass
class ModelCurriculum:
    number: int = 0
    handles: dict[int, ModelHandle] = field(default_factory=dict)
    given: list[tuple[int, int]] = field(default_factory=list)
    """Handle and number of every turn that an opening got."""


@dataclass
class Model:
    """The expected content of the store."""

    now: float = 0.0
    curricula: dict[str, ModelCurriculum] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    """Tasks that have a record, seen longest ago first."""

    def at(self, curriculum: str, handle: int) -> tuple[ModelCurriculum, ModelHandle]:
        whole = self.curricula.setdefault(curriculum, ModelCurriculum())
        found = whole.handles.setdefault(handle, ModelHandle())
        found.groups = [group for group in found.groups if self.now < group.until]
        return whole, found

    def joined(self, curriculum: str, handle: int, member: str, size: int, group_s: float) -> Drawn | Turn:
        whole, found = self.at(curriculum, handle)
        for group in found.groups:
            if member in group.members:
                return group.drawn
        if found.groups and len(found.groups[-1].members) < size:
            found.groups[-1].members.add(member)
            return found.groups[-1].drawn
        if found.due is None:
            number = whole.number
            whole.number += 1
        else:
            number = found.due[0]
        found.due = (number, size, group_s)
        whole.given.append((handle, number))
        return Turn(number)

    def proposed(self, curriculum: str, handle: int, number: int, place: bytes, member: str) -> Drawn | None:
        _, found = self.at(curriculum, handle)
        for group in found.groups:
            if member in group.members:
                return group.drawn
        if found.due is not None and found.due[0] == number:
            found.groups.append(ModelGroup(Drawn(number, place), found.due[1], self.now + found.due[2]))
            found.due = None
        if not found.groups or found.groups[-1].drawn.number != number:
            return None
        group = found.groups[-1]
        if len(group.members) >= group.size:
            return None
        group.members.add(member)
        return group.drawn


class CurriculumMachine(RuleBasedStateMachine):
    """Applies each operation to the store and to the model, and compares their answers."""

    server: ClassVar[RedisServer | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.model = Model()
        self.places = 0

    @initialize()
    def start(self) -> None:
        self.world: World = MemoryWorld() if self.server is None else RedisWorld(self.server)
        limits = {"max_records": MAX_RECORDS, "page_records": 2, "gone_kept": 3}
        self.store: CurriculumStore = open_store(self.world, **limits)
        self.reader = Reader(self.store)

    def teardown(self) -> None:
        self.run(self.store.aclose())
        self.runner.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        # Not `Runner.run`: it installs and removes a signal handler, which takes longer than the work.
        return self.runner.get_loop().run_until_complete(work)

    @rule(curriculum=curricula, handle=handles, member=members, size=sizes, group_s=hundreds, proposes=st.booleans())
    def join(self, curriculum: str, handle: int, member: str, size: int, group_s: float, proposes: bool) -> None:
        expected = self.model.joined(curriculum, handle, member, size, group_s - 50)

        found = self.run(self.store.join(curriculum, handle, member=member, group_size=size, group_s=group_s - 50))

        assert found == expected
        if proposes and isinstance(expected, Turn):
            self._propose(curriculum, handle, expected.number, member)

    @rule(curriculum=curricula, member=members, data=st.data())
    def propose(self, curriculum: str, member: str, data: st.DataObject) -> None:
        whole = self.model.curricula.get(curriculum)
        if whole is not None and whole.given:
            self._propose(curriculum, *data.draw(st.sampled_from(whole.given)), member)

    def _propose(self, curriculum: str, handle: int, number: int, member: str) -> None:
        self.places += 1
        place = b"place %d" % self.places
        expected = self.model.proposed(curriculum, handle, number, place, member)

        assert self.run(self.store.propose(curriculum, handle, Turn(number), place, member=member)) == expected

    @rule(curriculum=curricula, handle=handles, member=members)
    def leave_whoever_is_there(self, curriculum: str, handle: int, member: str) -> None:
        self.leave(curriculum, handle, member)

    def leave(self, curriculum: str, handle: int, member: str) -> None:
        for group in self.model.at(curriculum, handle)[1].groups:
            group.members.discard(member)

        self.run(self.store.leave(curriculum, handle, member=member))

    @rule(curriculum=curricula, handle=handles, data=st.data())
    def leave_one_that_is_there(self, curriculum: str, handle: int, data: st.DataObject) -> None:
        there = [member for group in self.model.at(curriculum, handle)[1].groups for member in sorted(group.members)]
        if there:
            self.leave(curriculum, handle, data.draw(st.sampled_from(there)))

    @rule(curriculum=curricula, count=st.integers(0, 3))
    def numbers(self, curriculum: str, count: int) -> None:
        whole = self.model.curricula.setdefault(curriculum, ModelCurriculum())

        assert self.run(self.store.numbers(curriculum, count)) == whole.number
        whole.number += count

    @rule(curriculum=curricula)
    def reset(self, curriculum: str) -> None:
        self.model.curricula.pop(curriculum, None)

        self.run(self.store.reset(curriculum))

    @rule(seconds=hundreds)
    def pass_time(self, seconds: float) -> None:
        self.model.now += seconds

        self.world.pass_time(seconds)

    @rule(tasks=st.lists(st.sampled_from(TASKS), min_size=1, max_size=4))
    def note(self, tasks: list[str]) -> None:
        for task in tasks:
            self.model.seen = [*(other for other in self.model.seen if other != task), task]
        self.model.seen = self.model.seen[-MAX_RECORDS:]

        assert self.run(self.store.note([outcome(task) for task in tasks])) == len(tasks)

    @rule(task=st.sampled_from(["", *TASKS]))
    def forget(self, task: str) -> None:
        gone = [other for other in self.model.seen if task in ("", other)]
        self.model.seen = [other for other in self.model.seen if other not in gone]

        assert self.run(self.store.forget(MATH, task)) == len(gone)

    @rule()
    def read_on(self) -> None:
        self.run(self.reader.read())

        assert set(self.reader.known) == set(self.model.seen)

    @invariant()
    def who_begins_to_read_sees_what_there_is(self) -> None:
        reader = Reader(self.store)
        self.run(reader.read())

        assert list(reader.known) == self.model.seen
        assert reader.began == 1


def walk(machine: type[CurriculumMachine], *, examples: int) -> None:
    run_state_machine_as_test(machine, settings=settings(CHANCE, max_examples=examples, stateful_step_count=50))


def test_the_memory_store_agrees_with_the_model() -> None:
    walk(CurriculumMachine, examples=100)


@pytest.fixture
def redis_machine(redis_server: RedisServer) -> type[CurriculumMachine]:
    class RedisMachine(CurriculumMachine):
        server = redis_server

    return RedisMachine


@pytest.mark.redis
def test_the_redis_store_agrees_with_the_model(redis_machine: type[CurriculumMachine]) -> None:
    walk(redis_machine, examples=25)
