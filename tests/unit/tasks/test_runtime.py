"""The registry of one replica with tasks that are registered at run time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.catalog.catalog import Catalog
from gateway.core.environment import Environment, Isolation, Split, SplitType
from gateway.core.errors import (
    InvalidRequest,
    RateLimited,
    StoreUnavailable,
    TaskExists,
    TaskInvalid,
    UnknownSplit,
    UnknownTask,
    WrongEnvironment,
)
from gateway.core.ids import EnvironmentName
from gateway.core.ports.tasks import BundleStamp, StoredTask, TaskChanges
from gateway.stores.memory.tasks import MemoryTaskStore
from gateway.tasks.registry import TaskRegistry, load_tasks
from gateway.tasks.runtime import RegisteredTask, RuntimeTasks
from tests.fakes.clock import Clock
from tests.fakes.eventually import until

MATH, CODING, BROWSER = EnvironmentName("math"), EnvironmentName("coding"), EnvironmentName("browser")
FILES: Mapping[EnvironmentName, Mapping[str, Sequence[bytes]]] = {
    MATH: {
        "train": [
            b'{"id":"t0","tags":["sum"]}',
            b'{"id":"t1","aliases":["one"],"tags":["sum","hard"]}',
            b'{"n":2}',
        ],
        "test": [b'{"id":"e0","tags":["sum"]}'],
    },
    CODING: {"train": [b'{"id":"c0"}']},
}


def environment(name: EnvironmentName, isolation: Isolation = Isolation.SHARED) -> Environment:
    return Environment(name=name, image="x", directory=Path("/"), command=("x",), isolation=isolation)


ENVIRONMENTS = (environment(MATH), environment(CODING, Isolation.SANDBOX), environment(BROWSER, Isolation.EXCLUSIVE))


class Store(MemoryTaskStore):
    """A memory store that can be unavailable and counts its reads."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(clock=clock or Clock())
        self.is_away = False
        self.versions = 0
        self.pages = 0

    async def version(self) -> str:
        self._ask()
        self.versions += 1
        await asyncio.sleep(0)
        return await super().version()

    async def since(self, version: str) -> TaskChanges:
        self._ask()
        self.pages += 1
        return await super().since(version)

    async def put(
        self, tasks: Sequence[StoredTask], *, replace: bool, bundle: BundleStamp | None = None
    ) -> Sequence[StoredTask]:
        self._ask()
        return await super().put(tasks, replace=replace, bundle=bundle)

    def _ask(self) -> None:
        if self.is_away:
            raise StoreUnavailable("the store does not answer")


def replica(store: Store) -> RuntimeTasks:
    registry = TaskRegistry(FILES, env_types={BROWSER: ("page", "browsergym", "browsergym_env"), MATH: (), CODING: ()})
    return RuntimeTasks(registry=registry, store=store, catalog=Catalog(ENVIRONMENTS))


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def tasks(store: Store) -> RuntimeTasks:
    return replica(store)


def task(id: str = "custom/a", env_type: str = "math", **more: Any) -> dict[str, Any]:
    return {"id": id, "env_type": env_type, "instruction": "go", **more}


async def add(tasks: RuntimeTasks, *documents: dict[str, Any], **how: Any) -> list[RegisteredTask]:
    checked = tasks.check([(f"tasks[{number}]", document) for number, document in enumerate(documents)])
    return await tasks.register(checked, **how)


async def get(tasks: RuntimeTasks, id: str) -> tuple[dict[str, Any], str, int]:
    return await tasks.sure(lambda: tasks.registry.get(MATH, id))


def ids(tasks: RuntimeTasks, **narrowed: Any) -> list[str]:
    entries, _ = tasks.registry.listing(**narrowed)
    return [str(entry.task.get("id")) for entry in entries]


# -- registering --------------------------------------------------------------------------------------------------


async def test_a_registered_task_is_visible_everywhere_immediately(tasks: RuntimeTasks) -> None:
    registered = await add(tasks, task("custom/a", aliases=["also"]))
    registry = tasks.registry

    assert registered == [RegisteredTask(MATH, "custom/a", "custom", 0, True)]
    assert Split("custom", SplitType.VALIDATION) in registry.splits(MATH)
    assert registry.count(MATH, "custom") == 1
    assert registry.task(MATH, "custom", -1) == task("custom/a", aliases=["also"])
    assert [json.loads(raw)["id"] for raw in registry.range(MATH, "custom", None, None)] == ["custom/a"]
    assert registry.find(MATH, "also", prefer="train") == ("custom", 0)
    assert registry.get(MATH, "custom/a") == (task("custom/a", aliases=["also"]), "custom", 0)


async def test_splits_stay_in_the_order_of_their_types(tasks: RuntimeTasks) -> None:
    await add(tasks, task("a"), task("b", split="validation"), task("c", split="another"))

    assert [split.name for split in tasks.registry.splits(MATH)] == [
        "train",
        "validation",
        "test",
        "another",
        "custom",
    ]


async def test_tasks_of_a_file_keep_their_indices_and_registered_tasks_follow_them(tasks: RuntimeTasks) -> None:
    registered = await add(tasks, task("a"), task("b"), split="train")

    assert [one.index for one in registered] == [3, 4]
    assert tasks.registry.task(MATH, "train", 0)["id"] == "t0"
    assert tasks.registry.task(MATH, "train", 3)["id"] == "a"
    assert tasks.registry.task(MATH, "train", -1)["id"] == "b"
    assert tasks.registry.count(MATH, "train") == 5


async def test_the_split_is_the_requested_split_or_else_the_tasks_own_or_else_custom(tasks: RuntimeTasks) -> None:
    assert (await add(tasks, task("a", split="hard")))[0].split == "hard"
    assert (await add(tasks, task("b", split="hard"), split="easy"))[0].split == "easy"
    assert (await add(tasks, task("c")))[0].split == "custom"
    assert (await add(tasks, task("b"), replace=True))[0].split == "easy", "where the one is that it replaces"


async def test_an_environment_without_files_accepts_tasks(tasks: RuntimeTasks) -> None:
    await add(tasks, task("custom/login", "browsergym"), task("custom/other", "page"))

    assert tasks.registry.count(BROWSER, "custom") == 2


# -- replacing and removing ---------------------------------------------------------------------------------------


async def test_a_registration_with_seeds_adds_as_many_tasks(tasks: RuntimeTasks) -> None:
    added = await tasks.register(tasks.check([("", {"id": "a", "env_type": "math", "seeds": 3, "instruction": "x"})]))

    assert [(one.id, one.split, one.index) for one in added] == [(f"a~{n}", "custom", n - 1) for n in (1, 2, 3)]
    assert tasks.registry.get(MATH, "a~2")[0] == {"id": "a~2", "env_type": "math", "instruction": "x"}
    with pytest.raises(UnknownTask):
        tasks.registry.get(MATH, "a")


def test_seeds_count_towards_the_limit_of_a_registration(tasks: RuntimeTasks) -> None:
    with pytest.raises(InvalidRequest, match="more than 2000 tasks at once"):
        tasks.check([("", {"id": "a", "env_type": "math", "seeds": 2_001})])


async def test_a_task_that_replaces_another_keeps_its_index(tasks: RuntimeTasks) -> None:
    await add(tasks, task("a"), task("b"))

    registered = await add(tasks, task("a", tags=["new"]), replace=True)

    assert registered == [RegisteredTask(MATH, "a", "custom", 0, False)]
    assert tasks.registry.task(MATH, "custom", 0)["tags"] == ["new"]
    assert ids(tasks, tag="new") == ["a"]


async def test_a_removed_task_is_gone_everywhere_and_no_index_shifts(tasks: RuntimeTasks) -> None:
    await add(tasks, task("a", tags=["x"]), task("b"), task("c"), split="train")

    await tasks.unregister(MATH, "a")
    registry = tasks.registry

    assert registry.count(MATH, "train") == 6
    for index in (3, -3):
        with pytest.raises(UnknownTask, match=r"^Invalid index: the task train/-?3 was removed$"):
            registry.raw(MATH, "train", index)
    assert registry.task(MATH, "train", 4)["id"] == "b"
    assert [json.loads(raw).get("id") for raw in registry.range(MATH, "train", 2, None)] == [None, "b", "c"]
    assert ids(tasks, tag="x") == []
    with pytest.raises(UnknownTask, match=r"^Unknown task: a$"):
        registry.get(MATH, "a")
    assert (await add(tasks, task("a"), split="train"))[0].index == 6


async def test_a_split_without_remaining_tasks_disappears(tasks: RuntimeTasks) -> None:
    await add(tasks, task("a"))

    await tasks.unregister(MATH, "a")

    assert [split.name for split in tasks.registry.splits(MATH)] == ["train", "test"]
    with pytest.raises(UnknownSplit):
        tasks.registry.count(MATH, "custom")


@pytest.mark.parametrize(
    ("id", "reason"), [("nobody", "Unknown task: nobody"), ("t0", "in the task file of split 'train'")]
)
async def test_only_a_registered_task_can_be_removed(tasks: RuntimeTasks, id: str, reason: str) -> None:
    with pytest.raises(UnknownTask, match=reason.replace("'", ".")):
        await tasks.unregister(MATH, id)


@pytest.mark.parametrize(
    ("document", "how"),
    [
        pytest.param(task("custom/a"), {}, id="the same id"),
        pytest.param(task("t0"), {}, id="a file's id"),
        pytest.param(task("t0"), {"replace": True}, id="a file's id with replace"),
        pytest.param(task("one"), {"replace": True}, id="a file's alias"),
        pytest.param(task("b", aliases=["e0"]), {"replace": True}, id="an alias that is a file's id"),
        pytest.param(task("b", aliases=["custom/a"]), {"replace": True}, id="an alias that is an id"),
        pytest.param(task("also"), {"replace": True}, id="an id that is an alias"),
    ],
)
async def test_a_name_that_is_taken_is_refused(
    tasks: RuntimeTasks, document: dict[str, Any], how: dict[str, Any]
) -> None:
    await add(tasks, task("custom/a", aliases=["also"]))
    before = ids(tasks)

    with pytest.raises(TaskExists, match="'math' has a task"):
        await add(tasks, task("z"), document, **how)

    assert ids(tasks) == before


async def test_the_same_id_in_two_environments_is_two_tasks(tasks: RuntimeTasks) -> None:
    await add(tasks, task("a", config={"n": 1}), task("a", "coding", config={"n": 2}))

    assert tasks.registry.get(MATH, "a")[0]["config"] == {"n": 1}
    assert tasks.registry.get(CODING, "a")[0]["config"] == {"n": 2}


# -- environments -------------------------------------------------------------------------------------------------


async def test_the_error_for_a_task_of_another_environment_has_both_names(tasks: RuntimeTasks) -> None:
    await add(tasks, task("custom/a"))

    with pytest.raises(WrongEnvironment, match=r"'custom/a' belongs to 'math', not to 'coding'"):
        tasks.registry.get(CODING, "custom/a")
    with pytest.raises(WrongEnvironment, match=r"'x' belongs to 'coding', not to 'math'"):
        tasks.registry.check_env_type(MATH, {"id": "x", "env_type": "coding"})


@pytest.mark.parametrize("env_type", ["browser", "browsergym", "browsergym_env", "page", "", None])
def test_an_environment_s_other_names_are_accepted(tasks: RuntimeTasks, env_type: str | None) -> None:
    tasks.registry.check_env_type(BROWSER, {"env_type": env_type})


def test_all_problems_of_a_batch_are_reported_together(tasks: RuntimeTasks) -> None:
    batch: list[object] = [
        task("a"),
        task("b", "nosuch"),
        {"id": "c"},
        3,
        task("a"),
        task("d", evaluation={"script": "x"}),
    ]

    with pytest.raises(TaskInvalid) as refusal:
        tasks.check([(f"tasks[{number}]", document) for number, document in enumerate(batch)])

    assert list(refusal.value.problems) == [
        ("tasks[1].env_type", "no environment 'nosuch' is available"),
        ("tasks[2].env_type", "a task that is registered needs one"),
        ("tasks[3]", "a task is an object, not the number 3"),
        ("tasks[4].id", "'a' stands at tasks[0] already"),
        ("tasks[5].evaluation.script", "scripts are only for environments that run code in sandboxes"),
    ]


def test_the_environment_may_be_given_next_to_the_tasks(tasks: RuntimeTasks) -> None:
    (one,) = tasks.check([("", {"id": "a"})], environment="math")

    assert one.task == {"id": "a", "env_type": "math"}
    with pytest.raises(TaskInvalid, match="belongs to 'coding', not to 'math'"):
        tasks.check([("", task("a", "coding"))], environment="math")


def test_an_environment_s_other_names_come_from_its_file(tmp_path: Path) -> None:
    registry = load_tasks([replace(environment(MATH), env_types=("sums",))])

    assert registry.environment_of("sums") == MATH
    assert registry.environment_of("other") is None


# -- listing ------------------------------------------------------------------------------------------------------


async def test_a_listing_has_tasks_of_files_and_registered_tasks_in_order_and_can_be_filtered(
    tasks: RuntimeTasks,
) -> None:
    await add(tasks, task("a", tags=["hard"]), split="train")

    assert ids(tasks) == ["c0", "t0", "t1", "None", "a", "e0"]
    assert ids(tasks, environment=MATH, split="test") == ["e0"]
    assert ids(tasks, tag="hard") == ["t1", "a"]
    assert ids(tasks, environment=CODING, tag="hard") == []
    entries, _ = tasks.registry.listing(tag="hard")
    assert [(entry.split, entry.index, entry.is_stored) for entry in entries] == [
        ("train", 1, False),
        ("train", 3, True),
    ]


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
@pytest.mark.parametrize("tag", [None, "sum"])
async def test_pages_together_are_the_whole_listing(tasks: RuntimeTasks, limit: int, tag: str | None) -> None:
    await add(tasks, task("a", tags=["sum"]), task("b", "browser", tags=["sum"]))
    found: list[tuple[str, str, int]] = []
    after = "begin"

    while after:
        page, after = tasks.registry.listing(tag=tag, limit=limit, after="" if after == "begin" else after)
        assert len(page) <= limit
        found += [(entry.environment, entry.split, entry.index) for entry in page]

    whole, _ = tasks.registry.listing(tag=tag)
    assert found == [(entry.environment, entry.split, entry.index) for entry in whole]


@pytest.mark.parametrize("after", ["x", "a/b", "a/b/c", "a/b/-1", "a/b/" + "9" * 30])
def test_an_invalid_cursor_is_refused(tasks: RuntimeTasks, after: str) -> None:
    with pytest.raises(InvalidRequest, match="after"):
        tasks.registry.listing(after=after)


# -- several replicas ---------------------------------------------------------------------------------------------


async def test_a_task_that_another_replica_registered_is_found_on_request(store: Store) -> None:
    one, other = replica(store), replica(store)

    await add(one, task("custom/a"))

    assert (await get(other, "custom/a"))[1:] == ("custom", 0)
    assert await other.sure(lambda: other.registry.count(MATH, "custom")) == 1


async def test_the_background_task_follows_the_changes_of_another_replica(store: Store) -> None:
    one, other = replica(store), replica(store)
    following = asyncio.create_task(other.run())
    try:
        await add(one, task("custom/a"))

        await until(lambda: "custom" in [split.name for split in other.registry.splits(MATH)])
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_a_refresh_with_an_unchanged_version_reads_no_changes(store: Store, tasks: RuntimeTasks) -> None:
    await add(tasks, task("a"))
    pages = store.pages

    for _ in range(5):
        await tasks.registry.refresh(store)

    assert store.pages == pages


async def test_concurrent_lookups_of_unknown_tasks_share_their_reads_of_the_store(
    store: Store, tasks: RuntimeTasks
) -> None:
    ends = await asyncio.gather(*(get(tasks, f"no{n}") for n in range(50)), return_exceptions=True)

    assert all(isinstance(end, UnknownTask) for end in ends)
    assert store.versions <= 2


async def test_a_replica_without_its_store_serves_known_tasks_and_reports_no_task_as_unknown(
    store: Store, tasks: RuntimeTasks
) -> None:
    await add(tasks, task("a"))
    store.is_away = True

    assert (await get(tasks, "a"))[1:] == ("custom", 0)
    assert (await get(tasks, "t0"))[1:] == ("train", 0)
    await tasks.refresh()
    with pytest.raises(StoreUnavailable):
        await get(tasks, "b")
    store.is_away = False
    with pytest.raises(UnknownTask, match=r"^Unknown task: b$"):
        await get(tasks, "b")


async def test_a_store_that_lost_its_data_is_followed(tasks: RuntimeTasks) -> None:
    await add(tasks, task("a"), task("b", "browser"))
    anew = Store()
    await add(replica(anew), task("c"))

    await tasks.registry.refresh(anew)

    assert [one for one in ids(tasks) if len(one) == 1] == ["c"]
    assert tasks.registry.splits(BROWSER) == []


async def test_after_a_cancelled_refresh_the_next_refresh_does_the_work(store: Store) -> None:
    one, other = replica(store), replica(store)
    await add(one, task("a"))

    for turns in range(4):
        asking = asyncio.create_task(other.registry.refresh(store))
        for _ in range(turns):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    assert (await get(other, "a"))[1:] == ("custom", 0)


# -- rate limits --------------------------------------------------------------------------------------------------


async def test_a_task_starts_only_as_often_as_its_limit_allows(tasks: RuntimeTasks) -> None:
    limited = task("a", rate_limit={"starts": 2, "per_s": 60})

    await tasks.admit(limited, MATH)
    await tasks.admit(limited, MATH)
    with pytest.raises(RateLimited, match="'a' may begin 2 times in 60 s") as refusal:
        await tasks.admit(limited, MATH)

    assert 0 < refusal.value.retry_after_s <= 60
    await tasks.admit(limited, CODING)
    await tasks.admit({**limited, "id": "b"}, MATH)


async def test_the_limit_applies_across_replicas_and_ends_after_its_time() -> None:
    clock = Clock()
    store = Store(clock)
    limited = task("a", rate_limit={"starts": 1, "per_s": 0.5})
    await replica(store).admit(limited, MATH)

    with pytest.raises(RateLimited):
        await replica(store).admit(limited, MATH)
    clock.advance(0.51)

    await replica(store).admit(limited, MATH)


async def test_a_task_without_a_limit_needs_no_store(store: Store, tasks: RuntimeTasks) -> None:
    store.is_away = True

    for _ in range(100):
        await tasks.admit(task("a"), MATH)


async def test_an_invalid_limit_is_refused_with_its_path(tasks: RuntimeTasks) -> None:
    with pytest.raises(TaskInvalid, match=r"rate_limit\.starts"):
        await tasks.admit({"rate_limit": {"starts": 0, "per_s": 1}}, MATH)


async def test_an_inline_task_with_the_same_id_does_not_relax_the_limit(tasks: RuntimeTasks) -> None:
    await tasks.admit(task("a", rate_limit={"starts": 1, "per_s": 3600}), MATH)
    await tasks.admit(task("a", rate_limit={"starts": 9, "per_s": 1}), MATH)

    with pytest.raises(RateLimited):
        await tasks.admit(task("a", rate_limit={"starts": 1, "per_s": 3600}), MATH)
