"""Tables of the tasks of a split, as draws use them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from gateway.catalog.catalog import Catalog
from gateway.core.environment import Environment, Server, ServerProtocol
from gateway.core.errors import PoolExhausted, UnknownSplit
from gateway.core.ids import EnvironmentName
from gateway.core.ports.tasks import TaskQueries
from gateway.stores.memory.tasks import MemoryTaskStore
from gateway.tasks.curricula.tables import AT_ONCE, TaskRow, TaskTables
from gateway.tasks.registry import TaskRegistry
from gateway.tasks.task_ref import name_of
from tests.service.stack import environment
from tests.unit.tasks.curricula.curriculum_parts import MATH, add, registry_of, remove

IMAGE = EnvironmentName("image")


class Image:
    """Task queries that return the number of tasks of an image."""

    def __init__(self, **splits: int) -> None:
        self.splits = splits
        self.asked = 0
        self.is_full = False

    async def count(self, environment: Environment, split: str) -> int:
        self.asked += 1
        if self.is_full:
            raise PoolExhausted("no slot became free in time")
        if split not in self.splits:
            raise UnknownSplit("Invalid split")
        return self.splits[split]


def tables(registry: TaskRegistry, image: Image | None = None) -> TaskTables:
    foreign = replace(environment("image"), protocol=ServerProtocol.ORS, tasks=None, server=Server(port=8000))
    return TaskTables(
        registry, catalog=Catalog([environment("math"), foreign]), queries=cast(TaskQueries, image or Image())
    )


@pytest.mark.parametrize(
    ("task", "fields"),
    [
        pytest.param({"id": "a"}, {}, id="an id"),
        pytest.param({"n": 1}, {}, id="without an id"),
        pytest.param(
            {"id": "a", "tags": ["x", "y"], "difficulty": 3},
            {"tags": ("x", "y"), "difficulty": 3.0},
            id="tags and difficulty",
        ),
        pytest.param({"id": "a", "difficulty": 0}, {"difficulty": 0.0}, id="a difficulty of 0"),
        pytest.param({"id": "a", "difficulty": -1.5}, {"difficulty": -1.5}, id="a negative difficulty"),
        pytest.param({"id": "a", "difficulty": "hard"}, {}, id="a difficulty in words"),
        pytest.param({"id": "a", "difficulty": True}, {}, id="a difficulty that is not a number"),
        pytest.param({"id": "a", "difficulty": None}, {}, id="a difficulty of null"),
        pytest.param({"id": "a", "difficulty": float("inf")}, {}, id="an infinite difficulty"),
        pytest.param({"id": "a", "difficulty": float("nan")}, {}, id="a difficulty of NaN"),
        pytest.param({"id": "a", "tags": "x"}, {}, id="tags that are a text"),
        pytest.param({"id": "a", "tags": ["x", 7, None]}, {"tags": ("x",)}, id="tags of which some are not texts"),
    ],
)
async def test_a_row_has_the_fields_by_which_a_task_is_chosen(task: dict[str, Any], fields: dict[str, Any]) -> None:
    table = await tables(registry_of(math=[task])).of(MATH, "train")

    assert table == (TaskRow(0, name_of(task).key, **fields),)


async def test_a_table_is_built_once_for_each_state_of_its_split() -> None:
    registry, tasks = registry_of(math=[{"id": "a"}]), MemoryTaskStore()
    known = tables(registry)
    first = await known.of(MATH, "train")
    await add(registry, tasks, {"id": "b"}, split="custom")
    same = await known.of(MATH, "train")
    await add(registry, tasks, {"id": "c"}, split="train")
    second = await known.of(MATH, "train")

    assert same is first, "another split changed"
    assert [row.task for row in first] == ["a"]
    assert [row.task for row in second] == ["a", "c"]


async def test_a_task_that_was_removed_leaves_the_places_of_the_others() -> None:
    registry, tasks = registry_of(math=[]), MemoryTaskStore()
    known = tables(registry)
    await add(registry, tasks, *({"id": name} for name in "abc"))

    await remove(registry, tasks, "b")

    assert [(row.index, row.task) for row in (await known.of(MATH, "custom"))] == [(0, "a"), (2, "c")]


@pytest.mark.parametrize("name", ["math", "nosuch"])
async def test_a_missing_split_has_no_tasks_and_no_worker_is_queried(name: str) -> None:
    image = Image()

    table = await tables(registry_of(math=[{"id": "a"}]), image).of(EnvironmentName(name), "nosuch")

    assert table == ()
    assert image.asked == 0


async def test_only_the_number_of_an_images_own_tasks_is_queried_and_only_once() -> None:
    image = Image(train=3)
    known = tables(registry_of(math=[]), image)

    first, second = await known.of(IMAGE, "train"), await known.of(IMAGE, "train")

    assert first is second
    assert [(row.index, row.task) for row in first] == [(0, "train/0"), (1, "train/1"), (2, "train/2")]
    assert image.asked == 1


async def test_a_failed_count_of_an_images_tasks_is_queried_again() -> None:
    image = Image()
    known = tables(registry_of(math=[]), image)
    missing = await known.of(IMAGE, "train")
    image.is_full = True
    with pytest.raises(PoolExhausted):
        await known.of(IMAGE, "train")
    image.is_full, image.splits = False, {"train": 1}

    assert missing == ()
    assert len(await known.of(IMAGE, "train")) == 1


async def test_the_event_loop_keeps_running_while_a_large_split_is_read() -> None:
    known = tables(registry_of(math=[{"id": f"t{number}"} for number in range(3 * AT_ONCE)]))
    turns = 0
    reading = asyncio.ensure_future(known.of(MATH, "train"))
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1

    assert len(reading.result()) == 3 * AT_ONCE
    assert turns >= 3


async def test_concurrent_requests_share_one_table() -> None:
    known = tables(registry_of(math=[{"id": f"t{number}"} for number in range(2 * AT_ONCE)]))

    found = await asyncio.gather(*(known.of(MATH, "train") for _ in range(4)))

    assert len({id(table) for table in found}) == 1, "a weighing holds as long as its table is the same object"
