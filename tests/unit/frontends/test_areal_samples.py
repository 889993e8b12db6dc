"""Mapping of a ``sample_id`` to a task and a seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.catalog.catalog import Catalog
from gateway.core.environment import Areal, Environment, Split, TaskSpec
from gateway.core.errors import UnknownTask
from gateway.core.ids import EnvironmentName
from gateway.core.worker import WorkerTasks
from gateway.frontends.areal.requests import sample_request
from gateway.tasks.registry import TaskRegistry
from gateway.tasks.resolver import TaskResolver
from gateway.tasks.task_ref import TaskRef, seed_of
from tests.service.stack import lookup_of

SPLITS = {
    "train": [{"id": "t-0"}, {"id": "1"}, {"n": 2}],
    "dev": [{"id": "dev-001-dev-00000", "aliases": ["dev-001-00000"]}, {"id": "t-0", "in": "dev"}],
}
TASKS = TaskRegistry(
    {EnvironmentName("os"): {name: [json.dumps(task).encode() for task in some] for name, some in SPLITS.items()}}
)


class Workers:
    """Workers of the gateway's own images: they know only the tasks in the files."""

    async def registered(self, environment: Environment) -> WorkerTasks:
        return WorkerTasks()

    async def splits(self, environment: Environment) -> list[Split]:
        raise AssertionError

    async def count(self, environment: Environment, split: str) -> int:
        raise AssertionError

    async def tasks(self, environment: Environment, split: str, start: int, stop: int) -> list[TaskSpec]:
        raise AssertionError


async def find_sample(where: Environment, sample: str) -> TaskRef:
    """Return the task of a sample, found as the AReaL frontend finds it."""
    workers = Workers()
    lookup = lookup_of(TASKS, workers)
    resolver = TaskResolver(lookup=lookup, queries=workers, catalog=Catalog([where]))
    return await resolver.resolve(where, sample_request(where, sample))


def environment(split: str) -> Environment:
    return Environment(
        name=EnvironmentName("os"),
        image="os",
        directory=Path("/"),
        command=("x",),
        tasks=Path("/tasks"),
        areal=Areal(split=split),
    )


@pytest.mark.parametrize(
    ("split", "sample", "place"),
    [
        pytest.param("train", "t-0", "train/0", id="an id"),
        pytest.param("dev", "t-0", "dev/1", id="an id in two splits: the served split"),
        pytest.param("train", "dev-001-dev-00000", "dev/0", id="an id of another split"),
        pytest.param("train", "dev-001-00000", "dev/0", id="an alias"),
        pytest.param("train", "1", "train/1", id="an id that looks like an index"),
        pytest.param("dev", "1", "train/1", id="an id of another split wins over an index"),
        pytest.param("train", "2", "train/2", id="an index"),
        pytest.param("dev", "0", "dev/0", id="an index in the served split"),
        pytest.param("train", "00002", "train/2", id="an index with leading zeros"),
    ],
)
async def test_a_sample_is_an_id_or_an_alias_or_else_an_index(split: str, sample: str, place: str) -> None:
    name, index = place.split("/")

    found = await find_sample(environment(split), sample)

    assert (found.place, found.spec) == (place, SPLITS[name][int(index)])


@pytest.mark.parametrize("sample", ["3", "-1", "", " 1", "1.0", "²", "nosuch", "9" * 18, "9" * 5000])
async def test_a_sample_that_matches_no_task_is_unknown(sample: str) -> None:
    with pytest.raises(UnknownTask):
        await find_sample(environment("train"), sample)


async def test_an_index_into_a_missing_split_is_unknown_and_the_error_names_the_split() -> None:
    with pytest.raises(UnknownTask, match="no split 'test'"):
        await find_sample(environment("test"), "0")


async def test_the_error_for_a_too_high_index_states_the_valid_range() -> None:
    with pytest.raises(UnknownTask, match="0 to 2"):
        await find_sample(environment("train"), "3")


@pytest.mark.parametrize(("sample", "seed"), [("0", 0x5FECEB66 >> 1), ("train-002-logs-00017", 0xE9D40966 >> 1)])
def test_the_seed_of_a_sample_never_changes(sample: str, seed: int) -> None:
    assert seed_of(sample) == seed


def test_seeds_fit_into_31_bits_and_differ_between_samples() -> None:
    seeds = {seed_of(str(number)) for number in range(1000)}

    assert len(seeds) == 1000
    assert all(0 <= seed < 2**31 for seed in seeds)
