"""Curricula between the store and the frontends: weighing, group membership, and the release of places."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from gateway.catalog.catalog import Catalog
from gateway.core.curriculum import Outcome
from gateway.core.environment import Environment, Split, TaskSpec
from gateway.core.errors import InvalidRequest, StoreUnavailable, UnknownTask
from gateway.core.ids import EnvironmentName
from gateway.core.ports.curricula import Drawn, Turn
from gateway.core.worker import WorkerTasks
from gateway.stores.memory.tasks import MemoryTaskStore
from gateway.tasks.curricula.model import Component, Curriculum, Sampler, SamplerKind, scope_of, scopes
from gateway.tasks.curricula.sampling import TaskPlace
from gateway.tasks.curricula.service import JOINS, Curricula, Handed
from gateway.tasks.curricula.stats import TaskStats
from gateway.tasks.curricula.tables import TaskTables
from gateway.tasks.lookup import TaskLookup
from gateway.tasks.registry import TaskRegistry
from gateway.tasks.runtime import RuntimeTasks
from gateway.tasks.task_ref import TaskRef
from tests.fakes.eventually import eventually, until
from tests.service.stack import environment
from tests.unit.tasks.curricula.curriculum_parts import GAME, MATH, Store, add, registry_of, remove, weight_of

TASKS = [{"id": f"t{number}"} for number in range(20)]
GAMES = [{"id": f"g{number}"} for number in range(3)]
IN_TURN = Sampler(kind=SamplerKind.SEQUENTIAL)
"""A sampler that draws tasks in order, so that a test knows the next task."""
MINE = Curriculum(name="mine", components=(Component(environment=MATH),), sampler=IN_TURN, group_size=2)
BOTH = replace(MINE, components=(Component(environment=MATH), Component(environment=GAME)))
DOCUMENT: dict[str, Any] = {"environment": "math", "group_size": 2, "sampler": {"kind": "sequential"}}


class Nobody:
    """Task queries that must not be called, because there is no worker."""

    async def registered(self, environment: Environment) -> WorkerTasks:
        raise AssertionError("nobody is to be asked")

    async def splits(self, environment: Environment) -> list[Split]:
        raise AssertionError("nobody is to be asked")

    async def count(self, environment: Environment, split: str) -> int:
        raise AssertionError("nobody is to be asked")

    async def tasks(self, environment: Environment, split: str, start: int, stop: int) -> list[TaskSpec]:
        raise AssertionError("nobody is to be asked")


class Replica:
    """The parts of one gateway that draw tasks."""

    def __init__(
        self,
        store: Store,
        *files: Curriculum,
        registry: TaskRegistry | None = None,
        tasks: MemoryTaskStore | None = None,
    ) -> None:
        self.registry = registry or registry_of(math=TASKS, game=GAMES)
        catalog = Catalog([environment("math"), environment("game")])
        self.records = TaskStats(store, registry=self.registry)
        self.curricula = Curricula(
            store=store,
            records=self.records,
            tables=TaskTables(self.registry, catalog=catalog, queries=Nobody()),
            files={one.name: one for one in files},
            catalog=catalog,
        )
        run_time = RuntimeTasks(registry=self.registry, store=tasks or MemoryTaskStore(), catalog=catalog)
        self.lookup = TaskLookup(run_time, queries=Nobody(), curricula=self.curricula)

    async def opened(self, name: str, split: str, index: int) -> TaskRef:
        """Return the task that an opening by a handle receives."""
        there = environment(name)
        task = await self.lookup.at(there, split, index)
        return await self.lookup.indices.draw(task.handle, partial(self.lookup.at, there)) if task.handle else task


async def indices(curricula: Curricula, handle: int, count: int, scope: Curriculum = MINE) -> list[int]:
    """Return the indices of the tasks that *count* openings of a handle receive."""
    return [(await curricula.hand(scope, handle)).place.index for _ in range(count)]


def outcome(index: int, reward: float) -> Outcome:
    return Outcome(environment=MATH, task=f"t{index}", reward=reward, finished=True, steps=1, seconds=0.1)


# -- groups -----------------------------------------------------------------------------------------------------------


async def test_a_released_place_is_taken_by_another_opening() -> None:
    curricula = Replica(Store(), MINE).curricula
    first = await curricula.hand(MINE, 0)

    curricula.unused(first.ticket)
    await curricula.aclose()

    assert await indices(curricula, 0, 3) == [0, 0, 1]


async def test_a_draw_without_a_handle_has_no_place_to_release() -> None:
    curricula = Replica(Store(), MINE).curricula

    handed = [await curricula.hand(MINE, None) for _ in range(3)]
    curricula.unused(handed[0].ticket)

    assert handed == [Handed(TaskPlace(MATH, "train", index, f"t{index}"), None, "") for index in range(3)]


@pytest.mark.parametrize("is_first", [True, False], ids=["it draws", "it joins"])
async def test_an_opening_that_is_cancelled_at_any_turn_releases_its_place(is_first: bool) -> None:
    ended = False
    turns = 0
    while not ended:
        replica = Replica(Store(), MINE)
        curricula = replica.curricula
        await curricula.weights.of(MINE)  # Weighing runs in a thread, which takes any number of turns.
        if not is_first:
            await curricula.hand(MINE, 0)
        opening = asyncio.ensure_future(curricula.hand(MINE, 0))
        for _ in range(turns):
            await asyncio.sleep(0)
        ended = opening.done()
        opening.cancel()
        await asyncio.wait({opening})
        await curricula.aclose()

        if not ended:
            expected = [0, 0, 1] if is_first else [0, 1, 1]
            assert await indices(curricula, 0, 3) == expected, f"cancelled after {turns} turns"
        turns += 1

    assert turns > 3, "the store takes some turns for each step"


async def test_a_turn_that_other_members_always_win_ends_in_an_error_and_holds_no_place() -> None:
    class Contested(Store):
        """A store in which other members are always faster and have filled their group."""

        async def propose(self, curriculum: str, handle: int, turn: Turn, place: bytes, *, member: str) -> Drawn | None:
            await super().propose(curriculum, handle, turn, place, member=f"{member}-another")
            found = await super().propose(curriculum, handle, turn, place, member=f"{member}-one-more")
            assert found is not None
            return None

    store = Contested()
    curricula = Replica(store, MINE).curricula

    with pytest.raises(StoreUnavailable, match="handle 7 of curriculum 'mine'"):
        await curricula.hand(MINE, 7)
    await curricula.aclose()

    assert store.calls["join"] == JOINS
    assert store.calls["leave"] == 1


async def test_concurrent_openings_of_one_handle_get_one_task_for_each_group() -> None:
    store = Store()
    replicas = [Replica(store, MINE).curricula for _ in range(2)]

    handed = await asyncio.gather(*(replicas[member % 2].hand(MINE, 0) for member in range(8)))

    assert sorted(one.place.index for one in handed) == [0, 0, 1, 1, 2, 2, 3, 3]


async def test_an_unavailable_store_is_reported_and_its_places_are_released_later() -> None:
    store = Store()
    curricula = Replica(store, MINE).curricula
    store.is_away = True

    with pytest.raises(StoreUnavailable):
        await curricula.hand(MINE, 0)
    await curricula.aclose()
    store.is_away = False

    assert store.calls["leave"] == 1
    assert await indices(curricula, 0, 3) == [0, 0, 1]


# -- weighing ---------------------------------------------------------------------------------------------------------


async def test_a_weighing_is_reused_until_there_are_new_records() -> None:
    scope = replace(MINE, sampler=Sampler(kind=SamplerKind.TARGET_SUCCESS, explore=0.0, prior=1.0))
    store = Store()
    curricula = Replica(store, scope).curricula
    await store.note([outcome(0, 1.0)])
    first = (await curricula.weights.of(scope)).prepared
    asked = store.calls["state"]

    async def is_looked_at_again() -> None:
        kept = (await curricula.weights.of(scope)).prepared
        assert kept is first
        assert store.calls["state"] > asked

    await eventually(is_looked_at_again)
    await store.note([outcome(3, 0.0)] * 8)

    async def is_weighed_anew() -> None:
        assert weight_of((await curricula.weights.of(scope)).prepared, MATH, "train", 3) < 1e-3

    await eventually(is_weighed_anew)
    assert weight_of(first, MATH, "train", 3) > 1 / len(TASKS)


async def test_a_sampler_that_does_not_use_records_requests_none() -> None:
    store = Store()

    await Replica(store, MINE).curricula.weights.of(MINE)

    assert store.calls["records"] == 0


async def test_a_policy_tag_applies_to_all_openings_after_it() -> None:
    curricula = Replica(Store(), BOTH).curricula
    within = scope_of(BOTH, GAME)
    before = (await curricula.hand(within, 0)).policy

    await curricula.tag("mine", "step-7")

    assert before == ""
    assert (await curricula.hand(within, 0)).policy == "step-7"
    assert (await curricula.hand(BOTH, None)).policy == "step-7"
    assert await curricula.weights.policy("mine") == "step-7"


# -- several environments ---------------------------------------------------------------------------------------------


async def test_within_an_environment_only_its_own_tasks_are_drawn() -> None:
    curricula = Replica(Store(), BOTH).curricula

    places = [(await curricula.hand(scope_of(BOTH, GAME), None)).place for _ in range(4)]
    sampled = await curricula.sample(BOTH, 4)

    assert [place.task for place in places] == ["g0", "g1", "g2", "g0"]
    assert [place.task for _, place in sampled] == ["t0", "g0", "t1", "g1"]
    assert [scope.name for scope in scopes(BOTH)] == ["mine", "mine@math", "mine@game"]
    assert scopes(MINE) == [MINE]
    assert (curricula.splits(MATH), curricula.splits(EnvironmentName("os"))) == (["train:mine"], [])


async def test_a_reset_starts_a_curriculum_anew_but_keeps_the_records() -> None:
    store = Store()
    curricula = Replica(store, BOTH).curricula
    await store.note([outcome(0, 1.0)])
    within = scope_of(BOTH, MATH)
    await curricula.tag("mine", "step-7")
    before = await indices(curricula, 0, 3, within)

    await curricula.reset("mine")

    assert await indices(curricula, 0, 3, within) == before == [0, 0, 1]
    assert await curricula.weights.policy("mine") == ""
    assert len((await store.records(MATH)).records) == 1


# -- definitions ------------------------------------------------------------------------------------------------------


async def test_a_definition_from_another_replica_is_found_on_request() -> None:
    store = Store()
    one, other = Replica(store).curricula, Replica(store).curricula
    await one.define("later", DOCUMENT)

    found = await other.scope(MATH, "train:later")
    await one.undefine("later")
    await other.refresh()

    assert found is not None
    assert found.group_size == 2
    assert await other.scope(MATH, "train:later") is None
    with pytest.raises(UnknownTask):
        other.named("later")


async def test_a_definition_from_another_replica_is_listed() -> None:
    store = Store()
    one, other = Replica(store), Replica(store)
    await one.curricula.define("later", DOCUMENT)

    await other.lookup.refresh()  # Frontends do the same before a listing.

    assert [split.name for split in await other.lookup.splits(environment("math"))] == ["train", "train:later"]


async def test_definitions_are_followed_in_the_background_through_an_outage() -> None:
    store = Store()
    one, other = Replica(store).curricula, Replica(store).curricula
    await one.define("later", DOCUMENT)
    store.is_away = True
    asked = store.calls["definitions_version"]
    following = asyncio.ensure_future(other.run())
    try:
        await until(lambda: store.calls["definitions_version"] > asked)
        store.is_away = False
        await until(lambda: other.splits(MATH) == ["train:later"])
    finally:
        following.cancel()
        await asyncio.wait({following})


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"environment": "math", "sampler": {"kind": "of-tomorrow"}}', b"\xff"])
async def test_an_unreadable_definition_does_not_affect_other_definitions(body: bytes) -> None:
    store = Store()
    curricula = Replica(store, MINE).curricula
    await store.define("odd", body)
    await store.define("later", json.dumps(DOCUMENT).encode())

    await curricula.refresh()

    assert [known.name for known in curricula.all()] == ["later", "mine"]


async def test_a_name_that_a_file_uses_cannot_be_redefined() -> None:
    store = Store()
    await store.define("mine", json.dumps({**DOCUMENT, "group_size": 9}).encode())
    curricula = Replica(store, MINE).curricula
    await curricula.refresh()

    for change in (curricula.define("mine", DOCUMENT), curricula.undefine("mine")):
        with pytest.raises(InvalidRequest, match="is defined in a file"):
            await change

    assert curricula.named("mine") == MINE


@pytest.mark.parametrize(
    ("document", "word"),
    [
        ({"environment": "chess"}, "chess"),
        ({"environment": "math", "split": "nosuch"}, "nosuch"),
        ({"environment": "math", "tags": ["nosuch"]}, "nosuch"),
        ({"environment": "math", "group_size": 0}, "group_size"),
    ],
)
async def test_a_definition_that_is_refused_changes_nothing(document: Mapping[str, Any], word: str) -> None:
    store = Store()
    curricula = Replica(store).curricula
    await curricula.define("later", DOCUMENT)

    with pytest.raises(InvalidRequest, match=word):
        await curricula.define("later", document)

    await curricula.refresh()
    assert curricula.named("later").group_size == 2
    assert await indices(curricula, 0, 3, curricula.named("later")) == [0, 0, 1]


async def test_a_redefined_curriculum_with_another_environment_joins_no_group_of_the_old_one() -> None:
    store = Store()
    replica = Replica(store)
    await replica.curricula.define("later", {**DOCUMENT, "group_size": 8})
    for index in (0, 1, 2, 3):
        await replica.opened("math", "train:later", index)

    await replica.curricula.define("later", {**DOCUMENT, "environment": "game", "handles": 4})
    found = [(await replica.opened("game", "train:later", index)) for index in (0, 1, 2, 3)]

    drawn = [one.spec["id"] for one in found]
    assert len(set(drawn)) == len(GAMES), "each handle is drawn for, in the turn of the sampler"


async def test_a_handle_whose_task_was_removed_is_drawn_again_once_its_group_has_asked() -> None:
    store, tasks = Store(), MemoryTaskStore()
    replica = Replica(store, replace(MINE, components=(Component(environment=MATH, split="custom"),)), tasks=tasks)
    await add(replica.registry, tasks, {"id": "short-lived"}, {"id": "stays"})
    assert (await replica.opened("math", "train:mine", 0)).spec["id"] == "short-lived"
    await remove(replica.registry, tasks, "short-lived")

    async def is_drawn_for() -> None:
        try:
            offer = await replica.opened("math", "train:mine", 0)
        except UnknownTask as error:
            raise AssertionError("the handle still stands for what is gone") from error
        assert offer.spec["id"] == "stays"

    await eventually(is_drawn_for)  # A weighing is reused for one second.
