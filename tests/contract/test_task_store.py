"""The seam of tasks that are registered at run time: one suite, run on memory and on Redis."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import gateway.stores.redis.tasks as module
from gateway.catalog.catalog import Catalog
from gateway.core.environment import Environment
from gateway.core.errors import InvalidRequest, StoreUnavailable, TaskExists
from gateway.core.ids import EnvironmentName
from gateway.core.ports.tasks import (
    MAX_AT_ONCE,
    MAX_TASK_BYTES,
    BundleRefused,
    BundleStamp,
    StoredTask,
    TaskChanges,
    TaskStore,
)
from gateway.stores.memory.tasks import MemoryTaskStore
from gateway.stores.redis.client import scripts
from gateway.stores.redis.tasks import RedisTaskStore
from gateway.tasks.registry import TaskRegistry
from gateway.tasks.runtime import RuntimeTasks
from tests.contract.store_worlds import CODING, MATH, MemoryWorld, RedisServer, RedisWorld, World, needs_redis_server
from tests.deadlines import HANG_S
from tests.fakes.clock import Clock

pytest_plugins = ["tests.contract.store_fixtures"]

LUA = Path(module.__file__).parent / "lua" / "tasks"
OPERATIONS = sorted(path.stem for path in LUA.glob("*.lua") if path.stem != "prelude")
Make = Callable[..., TaskStore]


def open_store(world: World, **limits: Any) -> TaskStore:
    if isinstance(world, MemoryWorld):
        return MemoryTaskStore(clock=world.clock, **limits)
    assert isinstance(world, RedisWorld)
    return RedisTaskStore(url=world.server.url, prefix=world.prefix, **limits)


def pass_time(world: World, seconds: float) -> None:
    """Let time pass: Redis' records of starts become older."""
    if isinstance(world, RedisWorld):
        with world.server.client() as client:
            for key in world.keys(client):
                if ":task_starts:" in key:
                    moments = client.lrange(key, 0, -1)
                    left_ms = client.pttl(key)
                    client.delete(key)
                    if left_ms > seconds * 1000:
                        client.rpush(key, *(int(at) - round(seconds * 1000) for at in moments))
                        client.pexpire(key, left_ms - round(seconds * 1000))
    else:
        world.pass_time(seconds)


@pytest.fixture
async def make(store_world: World) -> AsyncIterator[Make]:
    """Opens task stores of this world."""
    opened: list[TaskStore] = []

    def make(**limits: Any) -> TaskStore:
        opened.append(open_store(store_world, **limits))
        return opened[-1]

    yield make
    for store in opened:
        await store.aclose()


@pytest.fixture
def tasks(make: Make) -> TaskStore:
    return make()


def task(
    id: str = "custom/a",
    *,
    environment: EnvironmentName = MATH,
    split: str = "custom",
    body: bytes = b"{}",
    signed_by: str = "",
) -> StoredTask:
    return StoredTask(environment=environment, id=id, split=split, body=body, signed_by=signed_by)


async def everything(store: TaskStore, version: str = "") -> TaskChanges:
    """Return all pages of changes as one."""
    kept: dict[tuple[str, str], StoredTask] = {}
    removed: list[tuple[EnvironmentName, str]] = []
    is_whole = False
    while True:
        page = await store.since(version)
        version, is_whole = page.version, is_whole or page.is_whole
        kept |= {(one.environment, one.id): one for one in page.tasks}
        removed += page.removed
        if page.is_last:
            return TaskChanges(version, is_whole, True, list(kept.values()), removed)


async def places(store: TaskStore) -> dict[str, tuple[str, int]]:
    return {one.id: (one.split, one.place) for one in (await everything(store)).tasks}


# -- keeping ------------------------------------------------------------------------------------------------------


async def test_a_store_without_a_task_has_no_version_and_no_changes(tasks: TaskStore) -> None:
    assert await tasks.version() == ""
    assert await everything(tasks) == TaskChanges("", True, True, [], [])


async def test_a_task_is_returned_unchanged_with_any_body(tasks: TaskStore) -> None:
    body = '{"a":"\\n é 😀 \\u0000", "n":12345678901234567, "e":[], "o":{}}\n'.encode()
    given = task("custom/Ω-1", body=body, signed_by="key 1")

    (kept,) = await tasks.put([given], replace=False)

    assert (await everything(tasks)).tasks == [kept]
    assert (kept.body, kept.signed_by, kept.split, kept.place) == (body, "key 1", "custom", 0)


async def test_places_are_counted_separately_for_each_split_of_each_environment(tasks: TaskStore) -> None:
    kept = await tasks.put(
        [task("a"), task("b", split="train"), task("c"), task("a", environment=CODING)], replace=False
    )

    assert [(one.environment, one.split, one.place) for one in kept] == [
        (MATH, "custom", 0),
        (MATH, "train", 0),
        (MATH, "custom", 1),
        (CODING, "custom", 0),
    ]


async def test_a_second_task_of_one_id_is_refused_with_its_whole_batch(tasks: TaskStore) -> None:
    await tasks.put([task("a", body=b'{"n":1}')], replace=False)
    before = await tasks.version()

    with pytest.raises(TaskExists, match="'a'"):
        await tasks.put([task("b"), task("a", body=b'{"n":2}')], replace=False)

    assert await tasks.version() == before
    assert [one.body for one in (await everything(tasks)).tasks] == [b'{"n":1}']
    (next_one,) = await tasks.put([task("c")], replace=False)
    assert next_one.place == 1, "a refused batch takes no place"


async def test_a_task_that_replaces_another_keeps_its_place(tasks: TaskStore) -> None:
    await tasks.put([task("a"), task("b")], replace=False)

    (kept,) = await tasks.put([task("a", body=b'{"n":2}')], replace=True)

    assert kept.place == 0
    assert {one.id: one.body for one in (await everything(tasks)).tasks} == {"a": b'{"n":2}', "b": b"{}"}


async def test_a_task_that_moves_to_another_split_goes_to_its_end(tasks: TaskStore) -> None:
    await tasks.put([task("a"), task("b", split="train")], replace=False)

    await tasks.put([task("a", split="train")], replace=True)

    assert await places(tasks) == {"a": ("train", 1), "b": ("train", 0)}


async def test_a_place_is_never_used_again(tasks: TaskStore) -> None:
    await tasks.put([task("a"), task("b")], replace=False)

    assert await tasks.remove(MATH, "b")
    assert await tasks.remove(MATH, "a")
    await tasks.put([task("a")], replace=False)

    assert await places(tasks) == {"a": ("custom", 2)}


async def test_removing_an_unknown_task_changes_nothing(tasks: TaskStore) -> None:
    await tasks.put([task("a")], replace=False)
    before = await tasks.version()

    assert not await tasks.remove(CODING, "a")
    assert not await tasks.remove(MATH, "b")
    assert await tasks.version() == before


async def test_of_many_concurrent_puts_of_one_id_one_succeeds(tasks: TaskStore) -> None:
    ends = await asyncio.gather(
        *(tasks.put([task("a"), task(f"b{n}")], replace=False) for n in range(20)), return_exceptions=True
    )

    assert sum(isinstance(end, TaskExists) for end in ends) == 19
    assert len((await everything(tasks)).tasks) == 2


# -- changes ------------------------------------------------------------------------------------------------------


async def test_only_the_changes_since_a_version_are_returned(tasks: TaskStore) -> None:
    await tasks.put([task("a"), task("b"), task("c")], replace=False)
    known = await tasks.version()

    await tasks.put([task("b", body=b'{"n":2}'), task("d")], replace=True)
    await tasks.remove(MATH, "a")
    changes = await everything(tasks, known)

    assert not changes.is_whole
    assert {one.id: one.body for one in changes.tasks} == {"b": b'{"n":2}', "d": b"{}"}
    assert changes.removed == [(MATH, "a")]
    assert changes.version == await tasks.version() != known
    assert await everything(tasks, changes.version) == TaskChanges(changes.version, False, True, [], [])


async def test_a_task_that_was_removed_and_added_again_is_returned_in_its_present_state(tasks: TaskStore) -> None:
    await tasks.put([task("a")], replace=False)
    known = await tasks.version()

    await tasks.remove(MATH, "a")
    await tasks.put([task("a", body=b'{"n":2}')], replace=False)
    changes = await everything(tasks, known)

    assert ([one.body for one in changes.tasks], changes.removed) == ([b'{"n":2}'], [])


@pytest.mark.parametrize("version", ["", "another:1", "nonsense"])
async def test_an_unknown_version_returns_all_tasks(tasks: TaskStore, version: str) -> None:
    await tasks.put([task("a"), task("b")], replace=False)
    await tasks.remove(MATH, "a")

    changes = await everything(tasks, version)

    assert changes.is_whole
    assert ([one.id for one in changes.tasks], changes.removed) == (["b"], [])


async def test_many_changes_come_in_pages_that_omit_none(tasks: TaskStore) -> None:
    many = [task(f"t{number}") for number in range(module.CHANGES * 2 + 1)]
    await tasks.put(many, replace=False)

    assert {one.id for one in (await everything(tasks)).tasks} == {one.id for one in many}


async def test_pages_end_even_if_removals_were_forgotten(make: Make) -> None:
    store = make(gone_kept=3)
    many = [f"t{number}" for number in range(module.CHANGES * 2 + 10)]
    await store.put([task(name) for name in many], replace=False)
    for name in many[:9]:
        await store.remove(MATH, name)

    async with asyncio.timeout(HANG_S):
        changes = await everything(store)

    assert changes.is_whole
    assert {one.id for one in changes.tasks} == set(many[9:])
    assert changes.version == await store.version()


async def test_large_tasks_come_in_pages_that_omit_none(tasks: TaskStore) -> None:
    body = b'"' + b"x" * (MAX_TASK_BYTES - 2) + b'"'
    await tasks.put([task(f"t{number}", body=body) for number in range(10)], replace=False)

    assert sorted(one.id for one in (await everything(tasks)).tasks) == [f"t{number}" for number in range(10)]


async def test_names_of_removed_tasks_are_forgotten_and_a_reader_that_missed_them_restarts(make: Make) -> None:
    store = make(gone_kept=3)
    await store.put([task(f"t{number}") for number in range(10)], replace=False)
    known = await store.version()

    for number in range(3):
        await store.remove(MATH, f"t{number}")
    assert len((await everything(store, known)).removed) == 3
    await store.remove(MATH, "t3")
    changes = await everything(store, known)

    assert changes.is_whole
    assert len(changes.tasks) == 6
    now = await store.version()
    await store.remove(MATH, "t9")
    assert (await everything(store, now)).removed == [(MATH, "t9")]


# -- limits -------------------------------------------------------------------------------------------------------


async def test_an_environment_has_a_maximum_number_of_tasks(make: Make) -> None:
    store = make(max_tasks=2)
    await store.put([task("a"), task("b")], replace=False)

    with pytest.raises(InvalidRequest, match="'math' would have more than 2 tasks"):
        await store.put([task("c")], replace=False)
    await store.put([task("b", body=b'{"n":2}')], replace=True)
    await store.put([task("c", environment=CODING)], replace=False)
    await store.remove(MATH, "a")
    await store.put([task("c")], replace=False)

    assert len((await everything(store)).tasks) == 3


async def test_all_tasks_together_have_a_maximum_size(make: Make) -> None:
    store = make(max_total_bytes=10)
    await store.put([task("a", body=b"123456")], replace=False)

    with pytest.raises(InvalidRequest, match="more than 10 bytes"):
        await store.put([task("b", environment=CODING, body=b"12345")], replace=False)
    await store.put([task("a", body=b"1234567890")], replace=True)
    await store.remove(MATH, "a")
    await store.put([task("b", body=b"1234567890")], replace=False)

    assert [one.id for one in (await everything(store)).tasks] == ["b"]


async def test_an_environment_has_a_maximum_number_of_splits(make: Make) -> None:
    store = make(max_splits=2)
    await store.put([task("a", split="one"), task("b", split="two")], replace=False)

    with pytest.raises(InvalidRequest, match="more than 2 splits"):
        await store.put([task("c", split="three")], replace=False)
    await store.put([task("c", split="two"), task("c", split="three", environment=CODING)], replace=False)

    assert len((await everything(store)).tasks) == 4


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        pytest.param([task("a", body=b"x" * (MAX_TASK_BYTES + 1))], "'a' has 1048577 bytes", id="a large task"),
        pytest.param([task("a"), task("b"), task("a")], "'a' of 'math' comes 2 times", id="one id twice"),
        pytest.param(
            [task(f"{number}") for number in range(MAX_AT_ONCE + 1)], "2001 tasks in one request", id="too many at once"
        ),
    ],
)
async def test_an_invalid_batch_is_refused(tasks: TaskStore, batch: list[StoredTask], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        await tasks.put(batch, replace=True)

    assert await tasks.version() == ""


# -- signed bundles -----------------------------------------------------------------------------------------------


def stamp(day: int, *, key: str = "k1", environment: str = "", split: str = "", digest: str = "") -> BundleStamp:
    """Return the stamp of a bundle that was signed on this day."""
    return BundleStamp(
        key=key,
        made_at=f"2026-11-{day:02}T10:00:00.000000Z",
        digest=digest or f"{day}-{environment}-{split}",
        environment=environment,
        split=split,
    )


async def bring(store: TaskStore, bundle: BundleStamp, id: str = "a", **place: Any) -> str:
    """Put a task of *bundle* that says its day. Return the body that the store then has, or the refusal."""
    body = f'"{bundle.made_at} {bundle.digest}"'.encode()
    given = task(id, body=body, signed_by=bundle.key, **place)
    before = await everything(store)
    try:
        await store.put([given], replace=True, bundle=bundle)
    except BundleRefused as error:
        assert await everything(store) == before, "a refused bundle changes nothing"
        return str(error)
    assert body in [one.body for one in (await everything(store)).tasks]
    return ""


async def test_an_older_bundle_is_refused_after_a_newer_one_of_its_key(tasks: TaskStore) -> None:
    assert await bring(tasks, stamp(2)) == ""
    assert await bring(tasks, stamp(20)) == ""

    said = await bring(tasks, stamp(2))

    for part in ("signed at 2026-11-02T10", "signed at 2026-11-20T10", "from key k1", "sign the tasks again"):
        assert part in said
    assert await bring(tasks, stamp(19), "other") != ""
    assert await bring(tasks, stamp(19, key="k2")) == "", "another key has its own times"
    assert await bring(tasks, stamp(21)) == ""


async def test_the_same_bundle_is_accepted_again_and_another_one_of_its_time_is_not(tasks: TaskStore) -> None:
    for _ in range(3):
        assert await bring(tasks, stamp(3, digest="same")) == ""

    assert "sign the tasks again" in await bring(tasks, stamp(3, digest="other"))
    assert await bring(tasks, stamp(3, digest="same")) == ""


async def test_a_removed_task_does_not_return_with_an_older_bundle(tasks: TaskStore) -> None:
    await bring(tasks, stamp(1), "a")
    await bring(tasks, stamp(2), "b")
    await tasks.remove(MATH, "a")

    assert await bring(tasks, stamp(1), "a") != ""


@pytest.mark.parametrize(
    ("first", "second", "is_barred"),
    [
        pytest.param({"environment": "math"}, {"environment": "coding"}, False, id="two environments"),
        pytest.param({"split": "a"}, {"split": "b"}, False, id="two splits"),
        pytest.param(
            {"environment": "math", "split": "a"}, {"environment": "math", "split": "b"}, False, id="two places"
        ),
        pytest.param(
            {"environment": "math", "split": "a"}, {"environment": "coding"}, False, id="two places, one whole"
        ),
        pytest.param({}, {"environment": "math"}, True, id="after one for all"),
        pytest.param({"environment": "math"}, {}, True, id="one for all"),
        pytest.param({"environment": "math"}, {"split": "a"}, True, id="across"),
        pytest.param(
            {"environment": "math"}, {"environment": "math", "split": "a"}, True, id="after one for all splits"
        ),
        pytest.param({"environment": "math", "split": "a"}, {"environment": "math"}, True, id="one for all splits"),
    ],
)
async def test_only_a_bundle_that_may_hold_the_same_tasks_bars_an_older_one(
    tasks: TaskStore, first: dict[str, str], second: dict[str, str], is_barred: bool
) -> None:
    def place(names: dict[str, str]) -> dict[str, Any]:
        environment = EnvironmentName(names.get("environment", "math"))
        return {"environment": environment, "split": names.get("split", "custom")}

    assert await bring(tasks, stamp(9, **first), "a", **place(first)) == ""

    assert (await bring(tasks, stamp(8, **second), "b", **place(second)) != "") == is_barred
    assert await bring(tasks, stamp(10, **second), "b", **place(second)) == ""


async def test_the_refusal_names_the_newest_of_several_bundles(tasks: TaskStore) -> None:
    for day, split in ((5, "a"), (7, "b"), (6, "c")):
        await bring(tasks, stamp(day, split=split), split, split=split)

    assert "2026-11-07" in await bring(tasks, stamp(4))
    assert "2026-11-06" in await bring(tasks, stamp(4, split="c"), split="c")


async def test_a_bundle_for_a_split_does_not_take_a_task_from_another_split(tasks: TaskStore) -> None:
    """Otherwise an old bundle of one split could replace a task that moved to another one."""
    await bring(tasks, stamp(1, split="a"), "x", split="a")
    await bring(tasks, stamp(2, split="b"), "y", split="b")

    said = await bring(tasks, stamp(3, split="a"), "y", split="a")

    for part in ("'a'", "'y'", "'b'", "without --split"):
        assert part in said
    assert await bring(tasks, stamp(4, split="a", environment="math"), "x", split="a") == ""
    assert await bring(tasks, stamp(5), "y", split="a") == "", "it names no split, so it may move tasks"


async def test_a_bundle_that_is_refused_for_another_reason_is_not_remembered(make: Make) -> None:
    store = make(max_tasks=1)
    await bring(store, stamp(1))

    with pytest.raises(TaskExists):
        await store.put([task("a")], replace=False, bundle=stamp(9))
    with pytest.raises(InvalidRequest):
        await store.put([task("b")], replace=True, bundle=stamp(9))

    assert await bring(store, stamp(2)) == ""


async def test_unsigned_tasks_neither_bar_nor_are_barred(tasks: TaskStore) -> None:
    await tasks.put([task("a")], replace=True)
    assert await bring(tasks, stamp(2)) == ""

    await tasks.put([task("a", split="b")], replace=True)

    assert await bring(tasks, stamp(2)) == ""


async def test_of_concurrent_bundles_none_replaces_a_newer_one(tasks: TaskStore) -> None:
    days = [3, 9, 1, 7, 5, 8, 2, 6, 4]
    batches = [tasks.put([task("a", body=str(day).encode())], replace=True, bundle=stamp(day)) for day in days]

    await asyncio.gather(*batches, return_exceptions=True)

    assert [one.body for one in (await everything(tasks)).tasks] == [b"9"]


# -- rate limits --------------------------------------------------------------------------------------------------


async def test_any_window_has_at_most_the_given_number_of_starts(tasks: TaskStore, store_world: World) -> None:
    assert [await tasks.take("a", starts=2, per_s=60) for _ in range(2)] == [0.0, 0.0]

    left_s = await tasks.take("a", starts=2, per_s=60)

    assert 0 < left_s <= 60
    pass_time(store_world, 61)
    assert [await tasks.take("a", starts=2, per_s=60) for _ in range(2)] == [0.0, 0.0]
    assert await tasks.take("a", starts=2, per_s=60) > 0


async def test_the_window_slides(tasks: TaskStore, store_world: World) -> None:
    await tasks.take("a", starts=2, per_s=60)
    pass_time(store_world, 40)
    await tasks.take("a", starts=2, per_s=60)

    pass_time(store_world, 21)

    assert await tasks.take("a", starts=2, per_s=60) == 0.0
    assert 0 < await tasks.take("a", starts=2, per_s=60) <= 39


async def test_each_key_has_separate_starts(tasks: TaskStore) -> None:
    assert await tasks.take("a", starts=1, per_s=60) == 0.0
    assert await tasks.take("b \ud800", starts=1, per_s=60) == 0.0
    assert await tasks.take("a", starts=1, per_s=60) > 0


async def test_concurrent_starts_do_not_exceed_the_given_number(tasks: TaskStore) -> None:
    waits = await asyncio.gather(*(tasks.take("a", starts=5, per_s=3600) for _ in range(30)))

    assert waits.count(0.0) == 5


async def test_in_one_process_only_a_limited_number_of_tasks_is_counted() -> None:
    store = MemoryTaskStore(clock=Clock(), max_limited=2)

    for key, per_s in (("a", 60), ("b", 30), ("c", 90)):
        assert await store.take(key, starts=1, per_s=per_s) == 0.0

    assert await store.take("a", starts=1, per_s=60) > 0
    assert await store.take("c", starts=1, per_s=90) > 0
    assert await store.take("b", starts=1, per_s=30) == 0.0, "its window would have ended first"


# -- Redis only ---------------------------------------------------------------------------------------------------


@pytest.mark.redis
async def test_a_bundle_that_one_replica_accepted_bars_older_ones_at_another_and_after_a_restart(
    redis_world: RedisWorld,
) -> None:
    one, other = open_store(redis_world), open_store(redis_world)

    assert await bring(one, stamp(2, environment="math", split="custom")) == ""
    await one.aclose()

    assert await bring(other, stamp(1)) != ""
    await other.aclose()


@pytest.mark.redis
async def test_a_replica_sees_the_writes_of_another(redis_world: RedisWorld) -> None:
    one, other = open_store(redis_world), open_store(redis_world)

    await one.put([task("a")], replace=False)

    assert [found.id for found in (await everything(other)).tasks] == ["a"]
    assert await one.version() == await other.version()
    await one.aclose()
    await other.aclose()


@pytest.mark.redis
async def test_names_of_removed_tasks_are_removed_from_redis_too(redis_world: RedisWorld) -> None:
    store = open_store(redis_world, gone_kept=3)
    await store.put([task(f"t{number}") for number in range(10)], replace=False)

    for number in range(4):
        await store.remove(MATH, f"t{number}")

    with redis_world.server.client() as client:
        assert client.zcard(f"{{{redis_world.prefix}}}:task_changes") == 6
    await store.aclose()


@pytest.mark.redis
async def test_registries_of_several_replicas_agree_on_every_index(redis_world: RedisWorld) -> None:
    stores = [open_store(redis_world) for _ in range(2)]
    here = Environment(name=MATH, image="x", directory=Path("/"), command=("x",))
    one, other = (
        RuntimeTasks(registry=TaskRegistry({MATH: {"train": [b"{}"]}}), store=store, catalog=Catalog([here]))
        for store in stores
    )

    for number in range(6):
        via = (one, other)[number % 2]
        checked = via.check([("", {"id": f"t{number}", "env_type": "math", "split": "train"})])
        (registered,) = await via.register(checked)
        assert registered.index == number + 1
    await one.unregister(MATH, "t2")

    found = [await one.sure(partial(one.registry.get, MATH, f"t{n}")) for n in (0, 5)]
    assert [place for _, *place in found] == [["train", 1], ["train", 6]]
    await other.refresh()
    assert list(one.registry.range(MATH, "train", None, None)) == list(other.registry.range(MATH, "train", None, None))
    for store in stores:
        await store.aclose()


@pytest.mark.redis
async def test_a_redis_that_lost_its_data_starts_a_new_epoch(redis_world: RedisWorld) -> None:
    store = open_store(redis_world)
    await store.put([task("a")], replace=False)
    known = await store.version()
    with redis_world.server.client() as client:
        client.delete(*redis_world.keys(client))

    await store.put([task("b")], replace=False)
    changes = await everything(store, known)

    assert changes.is_whole
    assert [one.id for one in changes.tasks] == ["b"]
    await store.aclose()


@pytest.mark.redis
async def test_all_keys_have_the_hash_tag_and_starts_expire(redis_world: RedisWorld) -> None:
    store = open_store(redis_world)
    await store.put([task("a")], replace=False, bundle=stamp(1))
    await store.take("a", starts=3, per_s=60)

    with redis_world.server.client() as client:
        kinds = {key.split(":")[1] for key in redis_world.keys(client)}
        (starts,) = (key for key in redis_world.keys(client) if ":task_starts:" in key)
        assert 0 < client.pttl(starts) <= 60_000
    assert kinds == {"tasks", "task_changes", "task_version", "task_sums", "task_starts", "task_bundles"}
    await store.aclose()


@pytest.mark.redis
async def test_every_operation_raises_store_unavailable_if_redis_is_down(tmp_path: Path) -> None:
    needs_redis_server()
    server = RedisServer(tmp_path)
    server.start()
    store = RedisTaskStore(url=server.url)
    await store.version()
    server.stop()

    for asked in (
        store.put([task("a")], replace=False),
        store.remove(MATH, "a"),
        store.version(),
        store.since(""),
        store.take("a", starts=1, per_s=1),
    ):
        with pytest.raises(StoreUnavailable):
            await asked
    await store.aclose()


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_head_of_an_operation_documents_its_input_and_output(name: str) -> None:
    text = (LUA / f"{name}.lua").read_text()

    head = text.split("\n\n")[0]
    assert all(line.startswith("-- ") for line in head.splitlines())
    assert "-- ARGV: " in head
    assert "-- Returns " in head
    assert not re.search(r"""call\(\s*['"](KEYS|SCAN|RANDOMKEY|FLUSH)""", text, re.IGNORECASE)


def test_every_operation_is_used_and_every_used_one_exists() -> None:
    used = re.findall(r'_link\.run\("([a-z_]+)"', Path(module.__file__).read_text())

    assert sorted(set(used)) == OPERATIONS == sorted(scripts("tasks"))
