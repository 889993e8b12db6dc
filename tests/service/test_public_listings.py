"""Listings of the project's own tasks with a trainer's key: no answer, hidden test or solution is in them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.catalog.catalog import load_catalog
from gateway.tasks.public_view import PUBLIC
from tests.service.stack import running

PROJECT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = tuple(load_catalog(PROJECT / "env_images"))
SPLITS = [(one.name, path.stem) for one in ENVIRONMENTS if one.tasks for path in sorted(one.tasks.glob("*.jsonl"))]
KEY = "a-trainers-key-for-tests"
SECRET_CHARS = 8
"""Shorter values, such as an answer of two digits, occur by chance in other fields."""
Json = dict[str, Any]


def tasks_of(environment: str, split: str) -> list[Json]:
    lines = (PROJECT / "tasks" / environment / f"{split}.jsonl").read_text("utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def texts(value: Any) -> Iterator[str]:
    """Yield the texts in a JSON value that are long enough to be recognized."""
    if isinstance(value, Mapping):
        for one in value.values():
            yield from texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from texts(one)
    elif len(str(value)) >= SECRET_CHARS:
        yield str(value)


def kind(value: object) -> object:
    """Return the type of a column's value. Integers fit a column of floats."""
    if isinstance(value, list):
        return ("list", *sorted({str(kind(one)) for one in value}))
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


@asynccontextmanager
async def trainer(environment: str) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client with a trainer's key, of a gateway with the environment and its tasks."""
    splits = [split for name, split in SPLITS if name == environment]
    tasks = {split: [json.dumps(task).encode() for task in tasks_of(environment, split)] for split in splits}
    (offered,) = [one for one in ENVIRONMENTS if one.name == environment]
    more: Json = {f"tasks_{environment}": tasks}
    async with running(offered, trainers={"alice": KEY}, **more) as (_, _, client):
        client.headers["X-API-Key"] = KEY
        yield client


async def listings(client: httpx.AsyncClient, environment: str, split: str) -> Sequence[tuple[str, list[Json]]]:
    """Return the tasks of a split from each listing of each protocol, with the route."""
    found = []
    for base in (f"/{environment}", f"/openenv/{environment}/{environment}"):
        for route, body, key in (
            ("tasks", {}, "tasks"),
            ("task_range", {"start": 0, "stop": 10**6}, "tasks"),
            ("task", {"index": 0}, "task"),
            ("task", {"index": -1}, "task"),
        ):
            response = await client.post(f"{base}/{route}", json={"split": split, **body})
            assert response.status_code == 200, response.text
            listed = response.json()[key]
            found.append((f"{base}/{route} {body}", listed if isinstance(listed, list) else [listed]))
    return found


def test_the_search_covers_every_environment_with_tasks() -> None:
    assert {name for name, _ in SPLITS} == {
        "browser",
        "chat",
        "coding",
        "game",
        "math",
        "os",
        "reasoning_gym",
        "textarena",
    }


@pytest.mark.parametrize(("environment", "split"), SPLITS)
async def test_no_listing_shows_more_of_a_task_than_its_public_fields(environment: str, split: str) -> None:
    tasks = {task["id"]: task for task in tasks_of(environment, split)}
    async with trainer(environment) as client:
        found = await listings(client, environment, split)

    for route, listed in found:
        assert len(listed) in (1, len(tasks)), route
        for view in listed:
            task = tasks[view["id"]]
            assert view.keys() <= set(PUBLIC), route
            assert {key: task[key] for key in view if key in task} == {key: view[key] for key in view if key in task}
            hidden = {text for key in task.keys() - set(PUBLIC) for text in texts(task[key])}
            open_to_all = json.dumps([task.get(key) for key in ("id", "instruction", "tags")], ensure_ascii=False)
            shown = json.dumps(view, ensure_ascii=False)
            assert not [text for text in hidden if text in shown and text not in open_to_all], (route, view["id"])


@pytest.mark.parametrize(("environment", "split"), SPLITS)
async def test_a_listing_fits_a_columnar_data_set(environment: str, split: str) -> None:
    async with trainer(environment) as client:
        (_, listed), *_ = await listings(client, environment, split)

    for key in {key for view in listed for key in view}:
        kinds = {kind(view[key]) for view in listed if view.get(key) is not None}
        assert len(kinds) <= 1, (key, kinds)


@pytest.mark.parametrize("environment", sorted({name for name, _ in SPLITS}))
async def test_the_description_for_areal_shows_no_task(environment: str) -> None:
    async with trainer(environment) as client:
        response = await client.get(f"/areal/{environment}/api/task/info")

    assert response.status_code == 200, response.text
    answers = {text for split in ("train", "test") for task in tasks_of(environment, split) for text in texts(task)}
    assert not [text for text in answers if text in response.text]
