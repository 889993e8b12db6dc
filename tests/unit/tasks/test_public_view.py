"""The view of tasks that listings show to trainers, and its use in a create."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from gateway.catalog.catalog import Catalog
from gateway.core.environment import TaskView
from gateway.core.errors import InvalidRequest
from gateway.core.ports.tasks import TaskQueries
from gateway.tasks.lookup import TaskLookup
from gateway.tasks.public_view import is_public_view, public_view
from gateway.tasks.registry import TaskRegistry
from gateway.tasks.resolver import TaskRequest, TaskResolver
from gateway.tasks.split_view import indexed
from gateway.tasks.task_ref import without_nulls
from tests.service.stack import environment, lookup_of, tasks
from tests.unit.tasks.test_lookup import SPLITS, Image

SECRET = "the answer is 40"
FULL: Mapping[str, Any] = {
    "id": "a",
    "instruction": "Add.",
    "tags": ["sums"],
    "config": {"max_attempts": 1, "init": SECRET},
    "evaluation": {"reward_function": f"exact_match({SECRET!r})"},
    "reference": SECRET,
    "question": SECRET,
}
PUBLIC = {"id": "a", "instruction": "Add.", "tags": ["sums"], "difficulty": None}
ENVIRONMENT = replace(environment(), task_view=TaskView.PUBLIC, public_fields=())
WITH_CONFIG = replace(ENVIRONMENT, public_fields=("config.max_attempts",))


def resolver_of(lookup: TaskLookup, queries: TaskQueries) -> TaskResolver:
    return TaskResolver(lookup=lookup, queries=queries, catalog=Catalog([ENVIRONMENT]))


def lookup(*some: Mapping[str, Any]) -> TaskLookup:
    return lookup_of(TaskRegistry({ENVIRONMENT.name: tasks(train=list(some))}), Image(SPLITS))


async def played(spec: Mapping[str, Any], *known: Mapping[str, Any], **changes: Any) -> Mapping[str, Any]:
    """Return the task that a create with *spec* plays."""
    found, images = lookup(*(known or (FULL,))), Image(SPLITS)
    task = await resolver_of(found, images).resolve(replace(ENVIRONMENT, **changes), TaskRequest(spec=spec))
    assert not images.asked
    return task.spec


def test_the_view_has_the_same_fields_for_every_task() -> None:
    assert public_view(FULL, ENVIRONMENT, "train/0") == PUBLIC
    assert public_view({"answer": SECRET}, ENVIRONMENT, "train/7") == {
        "id": "train/7",
        "instruction": "",
        "tags": (),
        "difficulty": None,
    }


def test_an_environment_adds_public_fields_by_their_paths() -> None:
    assert public_view(FULL, WITH_CONFIG, "train/0") == {**PUBLIC, "config": {"max_attempts": 1}}
    assert "config" not in public_view({"id": "b"}, WITH_CONFIG, "train/0")


async def test_listings_show_the_public_view_and_the_setting_full_the_complete_task() -> None:
    found = lookup(FULL)
    complete = replace(ENVIRONMENT, task_view=TaskView.FULL)

    for listed in (await found.raw(ENVIRONMENT, "train", -1), *await found.range(ENVIRONMENT, "train", None, None)):
        assert json.loads(listed) == PUBLIC
    for listed in (await found.raw(complete, "train", 0), *await found.range(complete, "train", 0, 1)):
        assert json.loads(listed) == FULL


async def test_a_listing_follows_a_change_of_the_tasks_and_of_the_public_fields() -> None:
    found = lookup(FULL)
    await found.range(ENVIRONMENT, "train", None, None)

    (with_config,) = await found.range(WITH_CONFIG, "train", None, None)
    found.registry.replace_files(ENVIRONMENT.name, {"train": indexed([b'{"id":"b"}'])})
    (changed,) = await found.range(WITH_CONFIG, "train", None, None)

    assert json.loads(with_config)["config"] == {"max_attempts": 1}
    assert json.loads(changed)["id"] == "b"


@pytest.mark.parametrize(
    "spec",
    [
        PUBLIC,
        {"id": "a"},
        {"id": "a", "tags": ["sums"]},
        {**PUBLIC, "evaluation": None, "split": None},  # columns of other tasks in a data set
        {**PUBLIC, "config": {}},
        {"id": "a", "difficulty": None, "name": None},
    ],
)
async def test_a_create_with_the_view_plays_the_full_task(spec: Mapping[str, Any]) -> None:
    assert await played(spec) == FULL


async def test_a_create_with_additional_public_fields_plays_the_full_task() -> None:
    spec = {**PUBLIC, "config": {"max_attempts": 1.0, "other": None}}

    assert await played(spec, public_fields=("config.max_attempts",)) == FULL


async def test_a_task_without_an_id_is_played_by_the_place_in_its_view() -> None:
    nameless = {"question": SECRET, "tags": ["x"]}
    view = public_view(nameless, ENVIRONMENT, "train/1")

    assert await played(view, {"id": "other"}, nameless) == nameless


@pytest.mark.parametrize(
    ("change", "named"),
    [({"instruction": "Multiply."}, "instruction"), ({"tags": ["other"]}, "tags"), ({"difficulty": 3}, "difficulty")],
)
async def test_a_changed_view_is_refused_with_the_changed_field(change: Mapping[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=f"task_spec.{named}: differs from the listed task 'a'"):
        await played({**PUBLIC, **change})


@pytest.mark.parametrize(
    "spec",
    [
        {**PUBLIC, "evaluation": {"match": "x"}},
        {**PUBLIC, "id": "unknown"},
        {"instruction": "Add."},
        {**PUBLIC, "id": "train/0"},  # the task there has an id of its own
        {**PUBLIC, "split": ["train"]},
        {**PUBLIC, "config": {"init": "true"}},
    ],
)
async def test_any_other_task_is_the_task_itself(spec: Mapping[str, Any]) -> None:
    assert await played(spec) == spec


def test_null_members_and_empty_objects_do_not_count() -> None:
    assert without_nulls({"a": None, "b": {"c": None}, "d": [{"e": None, "f": 1}], "g": []}) == {
        "d": [{"f": 1}],
        "g": [],
    }


def test_a_deeply_nested_task_is_no_view() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]

    assert not is_public_view({"id": "a", "tags": deep}, ENVIRONMENT)
