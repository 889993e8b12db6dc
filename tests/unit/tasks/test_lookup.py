"""Lookup of tasks in the registry and in images, and the caching of the images' answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from gateway.catalog.catalog import Catalog
from gateway.core.environment import (
    Environment,
    ResetMapping,
    Server,
    ServerProtocol,
    Split,
    SplitType,
    TaskSpec,
    UpstreamKind,
)
from gateway.core.errors import InvalidRequest, RateLimited, TaskInvalid, UnknownSplit, UnknownTask
from gateway.core.ids import WorkerId
from gateway.core.session import SessionSetup
from gateway.core.worker import Worker, WorkerTasks
from gateway.metrics import Metrics
from gateway.sessions.closing import SessionCloser
from gateway.sessions.interruption import AdmissionGate
from gateway.sessions.worker_queries import FRESH_S, PAGE, TaskPages, WorkerQueries
from gateway.stores.memory.sessions import MemoryStore
from gateway.tasks.curricula.indices import LISTED_MAX
from gateway.tasks.lookup import SEARCHED_S, TaskLookup, TaskPlaces
from gateway.tasks.registry import TaskRegistry
from gateway.tasks.resolver import TaskResolver, session_setup
from gateway.tasks.task_ref import TaskRef
from tests.fakes.clock import Clock
from tests.fakes.step_log import FakeStepLog
from tests.fakes.upstreams import CounterImage
from tests.service.stack import environment, lookup_of, tasks

OURS = environment()
ONCE = {"rate_limit": {"starts": 1, "per_s": 60}}
SPLITS = {"train": [{"n": 0}, {"n": 1}], "dev": [{"n": 2}]}


def image(protocol: ServerProtocol = ServerProtocol.ORS, **more: Any) -> Environment:
    return replace(environment("image"), protocol=protocol, tasks=None, **{"server": Server(port=8000), **more})


class Image:
    """The answers of an image, without a gateway."""

    def __init__(self, splits: Mapping[str, Sequence[TaskSpec]]) -> None:
        self.splits_kept = splits
        self.asked: list[str] = []

    async def registered(self, environment: Environment) -> WorkerTasks:
        raise AssertionError("images know no tasks by id")

    async def splits(self, environment: Environment) -> list[Split]:
        self.asked.append("splits")
        return [Split(name, SplitType.TRAIN) for name in self.splits_kept]

    async def count(self, environment: Environment, split: str) -> int:
        self.asked.append("count")
        return len(self.splits_kept[split])

    async def tasks(self, environment: Environment, split: str, start: int, stop: int) -> list[TaskSpec]:
        self.asked.append("tasks")
        return list(self.splits_kept[split][start:stop])


def lookup(image: Image, **registered: Any) -> TaskLookup:
    registry = TaskRegistry({OURS.name: tasks(train=[{"id": "a"}]), environment("image").name: tasks(**registered)})
    return lookup_of(registry, image)


# -- lookup ---------------------------------------------------------------------------------------------------------


async def test_tasks_of_own_environments_with_files_need_no_query() -> None:
    nobody = Image(SPLITS)
    found = lookup(nobody)

    assert [split.name for split in await found.splits(OURS)] == ["train"]
    assert (await found.at(OURS, "train", -1)).place == "train/0"
    assert await found.raw(OURS, "train", 0) == json.dumps({"id": "a"}).encode()
    with pytest.raises(UnknownSplit):
        await found.count(OURS, "dev")
    with pytest.raises(UnknownTask):
        await found.find(OURS, "dev/0", prefer="train")
    assert not nobody.asked


def told(task: TaskRef) -> tuple[Mapping[str, Any], str, int | None]:
    """Return the spec, the split and the index that the task's worker receives."""
    setup = session_setup(OURS, task)
    return setup.spec, setup.split, setup.index


async def admit(found: TaskLookup, where: Environment, setup: SessionSetup) -> None:
    async with TaskResolver(lookup=found, queries=Image(SPLITS), catalog=Catalog([where])).admitted(where, setup):
        pass


async def test_workers_are_queried_for_tasks_of_an_own_environment_without_task_files() -> None:
    ours = replace(OURS, tasks=None)
    found = lookup_of(TaskRegistry({}), Image(SPLITS))

    assert [split.name for split in await found.splits(ours)] == ["train", "dev"]
    own = await found.at(ours, "train", -1)
    assert told(own) == ({"n": 1}, "train", 1)
    with pytest.raises(UnknownSplit, match="there is no 'test'; there are train, dev"):
        await found.count(ours, "test")


async def test_a_split_of_the_registry_hides_the_images_split_of_the_same_name() -> None:
    found = lookup(Image(SPLITS), dev=[{"id": "mine"}])

    assert [split.name for split in await found.splits(image())] == ["dev", "train"]
    mine, own = await found.at(image(), "dev", 0), await found.at(image(), "train", -1)
    assert told(mine) == ({"id": "mine"}, "", None)
    assert told(own) == ({"n": 1}, "train", 1)


@pytest.mark.parametrize(
    ("start", "stop", "numbers"),
    [(None, None, [0, 1]), (-1, None, [1]), (0, -1, [0]), (1, 0, []), (5, 9, []), (-9, 99, [0, 1])],
)
async def test_ranges_behave_like_slices(start: int | None, stop: int | None, numbers: list[int]) -> None:
    found = await lookup(Image(SPLITS)).range(image(), "train", start, stop)

    assert [json.loads(task)["n"] for task in found] == numbers


async def test_too_many_tasks_for_one_answer_are_refused() -> None:
    many = Image({"train": [{}] * (LISTED_MAX + 1)})

    with pytest.raises(InvalidRequest, match="too many tasks"):
        await lookup(many).range(image(), "train", None, None)
    assert len(await lookup(many).range(image(), "train", 1, None)) == LISTED_MAX


@pytest.mark.parametrize(
    ("protocol", "id", "place"),
    [
        pytest.param(ServerProtocol.ORS, "train/1", ("train", 1), id="ORS, a place"),
        pytest.param(ServerProtocol.ORS, "1", None, id="ORS, a number without a split"),
        pytest.param(ServerProtocol.ORS, "nosuch/1", None, id="ORS, an unknown split"),
        pytest.param(ServerProtocol.AREAL, "1", ("train", 1), id="AReaL, a number"),
        pytest.param(ServerProtocol.AREAL, "dev/0", ("dev", 0), id="AReaL, a place"),
        pytest.param(ServerProtocol.AREAL, "dev-001", ("", None), id="AReaL, an id that only the server knows"),
        pytest.param(ServerProtocol.OPENENV, "dev-001", None, id="OpenEnv, an id"),
    ],
)
async def test_an_id_of_an_image_is_resolved_by_the_rules_of_its_protocol(
    protocol: ServerProtocol, id: str, place: tuple[str, int | None] | None
) -> None:
    found = await lookup(Image(SPLITS)).images_own(image(protocol), id)

    assert (None if found is None else (found.split, found.index)) == place


async def test_a_missing_task_is_certain_only_after_the_image_was_queried() -> None:
    found, static = lookup(Image(SPLITS)), image(server=Server(url="http://127.0.0.1:1"))
    assert found.why_not(image(), "train", 7) is None

    await found.count(image(), "train")

    assert type(found.why_not(image(), "train", 7)) is UnknownTask
    assert found.why_not(image(), "train", -2) is None
    assert found.why_not(static, "train", 7) is None, "it may have grown"
    assert isinstance(found.why_not(OURS, "train", 7), UnknownTask)


@pytest.mark.parametrize(
    ("protocol", "spec", "place"),
    [
        pytest.param(ServerProtocol.OPENENV, {"n": 2}, ("dev", 0), id="an equal task"),
        pytest.param(ServerProtocol.OPENENV, {"n": 3}, ("", None), id="another task"),
        pytest.param(ServerProtocol.OPENENV, {"seed": 1}, ("", None), id="arguments of the reset"),
        pytest.param(ServerProtocol.OPENENV, {"n": 2, "env_type": "image"}, ("", None), id="a generic task of RFC 005"),
        pytest.param(ServerProtocol.ORS, {"n": 2}, ("", None), id="ORS"),
    ],
)
async def test_an_inline_task_that_equals_a_task_of_the_image_gets_its_place(
    protocol: ServerProtocol, spec: TaskSpec, place: tuple[str, Any]
) -> None:
    found = await lookup(Image(SPLITS)).recognised(image(protocol, resets=ResetMapping(keys=("seed",))), spec)

    assert (found.split, found.index) == place
    assert found.spec == spec


async def test_a_task_that_moved_is_found_at_its_new_place() -> None:
    kept = {"train": [{"n": 0}, {"n": 1}]}
    found = lookup(Image(kept))
    assert (await found.recognised(image(ServerProtocol.OPENENV), {"n": 1})).index == 1

    kept["train"].reverse()

    assert (await found.recognised(image(ServerProtocol.OPENENV), {"n": 1})).index == 0


@pytest.mark.parametrize(
    ("where", "setup", "is_limited"),
    [
        (OURS, SessionSetup(spec=ONCE), True),
        (image(), SessionSetup(spec=ONCE), True),
        (image(), SessionSetup(spec={"rate_limit": "odd"}), False),
        (image(), SessionSetup(spec=ONCE, split="train", index=0), False),
    ],
)
async def test_rate_limits_apply_to_all_tasks_except_an_images_own(
    where: Environment, setup: SessionSetup, is_limited: bool
) -> None:
    found = lookup(Image(SPLITS))
    await admit(found, where, setup)

    if is_limited:
        with pytest.raises(RateLimited):
            await admit(found, where, setup)
    else:
        await admit(found, where, setup)


async def test_an_invalid_rate_limit_in_an_own_environment_is_refused() -> None:
    with pytest.raises(TaskInvalid):
        await admit(lookup(Image(SPLITS)), OURS, SessionSetup(spec={"rate_limit": "odd"}))


# -- caches ---------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_pages_are_dropped_first_and_the_limits_hold() -> None:
    pages = TaskPages(pages_max=2, bytes_max=10_000)
    for number in range(3):
        pages.keep("train", number, [{"n": number}] * PAGE)
    assert pages.look_up("train", 0, 3 * PAGE)[1] == [0]

    pages.look_up("train", PAGE, PAGE + 1)  # now the most recently used page
    pages.keep("train", 3, [{"n": 3}])
    assert pages.look_up("train", 0, 4 * PAGE)[1] == [0, 2]

    pages.keep("train", 4, [{"text": "x" * 9_985}])
    assert (len(pages._pages), pages._bytes) == (1, 9_996)
    pages.keep("train", 5, [{"text": "x" * 10_000}])
    assert pages.look_up("train", 4 * PAGE, 5 * PAGE)[1] == [], "what does not fit leaves the others"


def test_a_page_that_is_not_full_is_the_last_page() -> None:
    pages = TaskPages()
    pages.keep("train", 0, [{"n": 0}])

    found, missing = pages.look_up("train", 0, 10 * PAGE)

    assert (missing, pages.cut(found, 0, 10 * PAGE)) == ([], [{"n": 0}])


async def test_a_search_without_a_result_is_not_repeated_for_a_while() -> None:
    clock, searches = Clock(), 0
    places = TaskPlaces(clock)

    async def all_tasks() -> AsyncIterator[tuple[tuple[str, int], TaskSpec]]:
        nonlocal searches
        searches += 1
        yield ("train", 0), {"n": 0}

    assert await places.search({"n": 1}, all_tasks()) is None
    assert await places.search({"n": 1}, all_tasks()) is None
    assert (searches, places.get({"n": 0})) == (1, ("train", 0))
    clock.advance(SEARCHED_S + 1)
    await places.search({"n": 1}, all_tasks())
    assert searches == 2


@pytest.mark.parametrize(
    ("server", "asked"), [(Server(port=8000), 1), (Server(url="http://127.0.0.1:1"), 2)], ids=["image", "static"]
)
async def test_only_a_static_server_is_queried_again_after_a_while(server: Server, asked: int) -> None:
    clock, upstream = Clock(), CounterImage({"train": [{"n": 0}]})
    one, store = image(server=server), MemoryStore()
    upstreams = {UpstreamKind.ORS: upstream}
    closer = SessionCloser(store=store, upstreams=upstreams, metrics=Metrics(), log=FakeStepLog())
    inquiries = WorkerQueries(store=store, upstreams=upstreams, closer=closer, waiting=AdmissionGate(), clock=clock)
    await store.add_worker(
        Worker(id=WorkerId("w"), environment=one.name, digest=one.digest(), slots=1, address="tcp:127.0.0.1:1")
    )
    await store.worker_ready(WorkerId("w"), "tcp:127.0.0.1:1")

    for _ in range(2):
        assert await inquiries.count(one, "train") == len(await inquiries.tasks(one, "train", 0, 9)) == 1
        await inquiries.about(one)
        await inquiries.tools(one)
        clock.advance(FRESH_S + 1)

    assert set(upstream.asked.values()) == {asked}
    await store.aclose()
