"""The curriculum store on Redis: several replicas, the lifetime of its keys, and a Redis that fails."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import gateway.stores.redis.curricula as module
from gateway.core.curriculum import RECENT
from gateway.core.errors import StoreUnavailable
from gateway.core.ports.curricula import CurriculumStore, Drawn, Turn
from gateway.stores.redis.client import scripts
from gateway.stores.redis.curricula import RedisCurriculumStore
from tests.contract.curriculum_worlds import GROUP_S, Reader, drawn, joined, known, open_store, outcome
from tests.contract.store_worlds import CODING, MATH, RedisServer, RedisWorld, needs_redis_server
from tests.fakes.eventually import eventually

pytest_plugins = ["tests.contract.store_fixtures", "tests.contract.curriculum_fixtures"]
pytestmark = pytest.mark.redis

LUA = Path(module.__file__).parent / "lua" / "curricula"
OPERATIONS = sorted(path.stem for path in LUA.glob("*.lua") if path.stem != "prelude")

Replicas = tuple[CurriculumStore, CurriculumStore]


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis that only one test uses, and may break."""
    needs_redis_server()
    server = RedisServer(tmp_path, keeps_all=True)
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def own_store(own_server: RedisServer) -> AsyncIterator[CurriculumStore]:
    store = RedisCurriculumStore(own_server.url)
    yield store
    await store.aclose()


def empty(world: RedisWorld) -> None:
    """Delete all data of *world*."""
    with world.server.client() as client:
        client.delete(*world.keys(client))


def kinds(world: RedisWorld) -> dict[str, int]:
    """Return the kinds of keys, each with the longest time left of its keys in ms. -1 means no expiry."""
    with world.server.client() as client:
        found: dict[str, int] = {}
        for key in world.keys(client):
            kind = key.split(":")[1]
            found[kind] = max(found.get(kind, -1), client.pttl(key))
        return found


async def answers(store: CurriculumStore) -> None:
    """Assert that the store answers again, after its broken connections have failed once."""
    try:
        await store.definitions_version()
    except StoreUnavailable as exc:
        raise AssertionError("the store does not answer yet") from exc


# -- replicas -----------------------------------------------------------------------------------------------------


async def test_a_replica_sees_the_writes_of_another(replicas: Replicas) -> None:
    one, other = replicas

    await one.note([outcome("a", lease="lease 1")])
    await one.define("easy", b"1")
    await one.set_state("easy", 0, b"x")

    assert set(await known(other)) == {"a"}
    assert await other.note([outcome("a", lease="lease 1")]) == 0
    assert await other.definitions() == await one.definitions()
    assert await other.definitions_version() == await one.definitions_version()
    assert await other.state("easy") == await one.state("easy")
    assert (await one.records(MATH)).version == (await other.records(MATH)).version


async def test_replicas_that_open_a_new_handle_concurrently_get_one_turn_and_one_draw(replicas: Replicas) -> None:
    for name in (f"c{n}" for n in range(20)):
        asked = [joined(replicas[n % 2], f"m{n}", curriculum=name, group_size=8) for n in range(8)]
        assert await asyncio.gather(*asked) == [Turn(0)] * 8

        proposed = [replicas[n % 2].propose(name, 0, Turn(0), b"%d" % n, member=f"m{n}") for n in range(8)]
        draws = await asyncio.gather(*proposed)

        assert len(set(draws)) == 1
        assert await joined(replicas[0], "next", curriculum=name, group_size=8) == Turn(1), "the group is full"
        assert await replicas[1].propose(name, 0, Turn(1), b"", member="next") == Drawn(1, b"")


async def test_groups_are_full_however_their_openings_are_spread_over_replicas(replicas: Replicas) -> None:
    numbers = await asyncio.gather(*(drawn(replicas[n % 2], f"m{n}", handle=n % 3, group_size=4) for n in range(96)))

    for handle in range(3):
        mine = numbers[handle::3]
        assert sorted(mine.count(number) for number in set(mine)) == [4] * 8
    assert set(numbers) == set(range(24))


async def test_outcomes_noted_concurrently_by_two_replicas_count_once(replicas: Replicas) -> None:
    batches = [[outcome("a", float(n), lease=f"lease {n}") for n in range(start, start + 10)] for start in range(30)]

    counted = await asyncio.gather(*(replicas[n % 2].note(batch) for n, batch in enumerate(batches)))

    assert sum(counted) == 39
    assert (await known(replicas[0]))["a"].attempts == 39


async def test_records_have_the_time_of_redis(redis_world: RedisWorld) -> None:
    store = open_store(redis_world)
    with redis_world.server.client() as client:
        before_s, before_us = client.time()
        await store.note([outcome("a")])
        after_s, after_us = client.time()

    seen_at = (await known(store))["a"].seen_at

    assert before_s + before_us / 1e6 - 0.001 <= seen_at <= after_s + after_us / 1e6
    await store.aclose()


# -- pages --------------------------------------------------------------------------------------------------------


async def test_a_page_ends_when_it_is_large(redis_world: RedisWorld) -> None:
    store = open_store(redis_world, page_bytes=3_000)
    await store.note([outcome(f"t{n}", policy="x" * 1000) for n in range(8)])
    reader = Reader(store)

    assert await reader.read() == [3, 3, 2]

    assert len(reader.known) == 8
    await store.aclose()


# -- loss ---------------------------------------------------------------------------------------------------------


async def test_readers_restart_when_the_store_lost_its_data(redis_world: RedisWorld) -> None:
    store = open_store(redis_world)
    await store.note([outcome("a"), outcome("b")])
    await store.define("easy", b"1")
    version = await store.definitions_version()
    reader = Reader(store)
    await reader.read()

    empty(redis_world)
    await reader.read()
    assert reader.known == {}
    await store.note([outcome("c"), outcome("d"), outcome("e")])
    await reader.read()

    assert set(reader.known) == {"c", "d", "e"}
    assert reader.began == 3
    assert await store.definitions() == ("", {})
    await store.define("easy", b"1")
    assert await store.definitions_version() not in ("", version)
    await store.aclose()


async def test_handles_are_drawn_again_when_the_store_lost_its_data(redis_world: RedisWorld) -> None:
    store = open_store(redis_world)
    await drawn(store, "a")
    await joined(store, "b", handle=1)

    empty(redis_world)

    assert await store.propose("easy", 1, Turn(1), b"x", member="b") is None
    assert await joined(store, "a") == Turn(0)
    await store.leave("hard", 0, member="a")
    await store.aclose()


async def test_readers_restart_when_the_server_was_restarted(
    own_server: RedisServer, own_store: CurriculumStore
) -> None:
    await own_store.note([outcome("a"), outcome("b")])
    await drawn(own_store, "a")
    reader = Reader(own_store)
    await reader.read()
    own_server.stop()
    own_server.start()
    await eventually(lambda: answers(own_store))

    await reader.read()

    assert reader.began == 2, "what it loaded may be older than what was read"
    assert set(reader.known) == {"a", "b"}
    assert await joined(own_store, "b") == Drawn(0, b"place 0")


# -- keys ---------------------------------------------------------------------------------------------------------


async def test_each_key_expires_or_has_a_maximum(redis_world: RedisWorld) -> None:
    store = open_store(redis_world)
    await store.note([outcome("a", lease="lease 1"), outcome("b")])
    await store.forget(MATH, "b")
    await store.define("easy", b"1")
    await store.set_state("easy", 0, b"x")
    await drawn(store, "a")
    await joined(store, "b", handle=1)

    left_ms = kinds(redis_world)

    stays = {"records", "changed", "gone", "changes", "turns", "definitions", "version"}
    assert {kind for kind, left in left_ms.items() if left == -1} == {f"curriculum_{n}" for n in stays} | {"curriculum"}
    goes = {kind: left for kind, left in left_ms.items() if left != -1}
    assert set(goes) == {"curriculum_told", "curriculum_group", "curriculum_member"}
    assert all(0 < left <= GROUP_S * 1000 for left in goes.values())
    page = (Path(__file__).parents[2] / "docs" / "design" / "store.md").read_text()
    assert all(re.search(rf"^\| `{kind}\b", page, re.MULTILINE) for kind in left_ms)
    await store.aclose()


async def test_a_member_is_remembered_as_long_as_its_group(redis_world: RedisWorld) -> None:
    store = open_store(redis_world)
    await drawn(store, "a")
    redis_world.pass_time(GROUP_S - 100)
    await drawn(store, "b")
    await joined(store, "a")

    left_ms = kinds(redis_world)

    assert 0 < left_ms["curriculum_member"] <= 100_000
    redis_world.pass_time(100)
    assert set(kinds(redis_world)) == {"curriculum"}
    await store.aclose()


async def test_a_reset_leaves_only_keys_that_expire(redis_world: RedisWorld) -> None:
    store = open_store(redis_world)
    await store.set_state("easy", 0, b"x")
    await drawn(store, "a")
    await joined(store, "b", handle=1)

    await store.reset("easy")

    assert all(left > 0 for left in kinds(redis_world).values())
    await store.aclose()


async def test_removing_all_records_removes_their_keys(redis_world: RedisWorld) -> None:
    store = open_store(redis_world)
    await store.note([outcome("a"), outcome("b"), outcome("a", environment=CODING)])
    await store.forget(MATH, "a")

    await store.forget(MATH)
    await store.forget(CODING)

    assert kinds(redis_world) == {}
    await store.aclose()


async def test_names_of_removed_records_are_pruned(redis_world: RedisWorld) -> None:
    store = open_store(redis_world, gone_kept=3, max_records=4)

    for n in range(20):
        await store.note([outcome(f"t{n}")])

    with redis_world.server.client() as client:
        (gone,) = (key for key in redis_world.keys(client) if ":curriculum_gone:" in key)
        assert client.zrange(gone, 0, -1) == ["t13", "t14", "t15"]
        (changed,) = (key for key in redis_world.keys(client) if ":curriculum_changed:" in key)
        assert client.zrange(changed, 0, -1) == ["t16", "t17", "t18", "t19"]
    await store.aclose()


async def test_no_more_rewards_are_kept_than_are_read(redis_world: RedisWorld) -> None:
    store = open_store(redis_world)

    await store.note([outcome("a", 1.0)] * (RECENT + 9))
    await store.note([outcome("a", 0.5)])

    with redis_world.server.client() as client:
        (records,) = (key for key in redis_world.keys(client) if ":curriculum_records:" in key)
        kept = client.hget(records, "a")
    assert kept is not None
    assert kept.split("\n")[1].split(" ") == ["1.0"] * (RECENT - 1) + ["0.5"]
    await store.aclose()


# -- a Redis that fails -------------------------------------------------------------------------------------------


async def test_every_operation_raises_store_unavailable_if_redis_is_down(
    own_server: RedisServer, own_store: CurriculumStore
) -> None:
    await own_store.definitions_version()
    own_server.stop()

    for asked in (
        own_store.note([outcome()]),
        own_store.records(MATH),
        own_store.forget(MATH),
        joined(own_store, "a"),
        own_store.propose("easy", 0, Turn(0), b"x", member="a"),
        own_store.leave("easy", 0, member="a"),
        own_store.numbers("easy", 1),
        own_store.state("easy"),
        own_store.set_state("easy", 0, b"x"),
        own_store.reset("easy"),
        own_store.define("easy", b"1"),
        own_store.undefine("easy"),
        own_store.definitions(),
        own_store.definitions_version(),
    ):
        with pytest.raises(StoreUnavailable):
            await asked


async def test_a_join_that_is_cancelled_while_redis_is_away_ends_as_cancelled(
    own_server: RedisServer, own_store: CurriculumStore
) -> None:
    await drawn(own_store, "a")
    own_server.stop()
    task = asyncio.create_task(joined(own_store, "b"))
    await asyncio.sleep(0)

    task.cancel()

    await asyncio.wait({task})
    assert task.cancelled()


async def test_a_cancelled_command_ends_as_cancelled_and_costs_no_connection(
    own_server: RedisServer, own_store: CurriculumStore
) -> None:
    await own_store.note([outcome("a")])
    with own_server.client() as client:
        before = int(client.info("stats")["total_connections_received"])

        for turns in range(120):
            task: asyncio.Task[object] = asyncio.create_task(
                own_store.records(MATH) if turns % 2 else own_store.state("easy")
            )
            for _ in range(turns % 16):
                await asyncio.sleep(0)
            was_done = task.done()
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled() is not was_done
            await own_store.definitions_version()

        # A cancelled command may still run during the next one, which then uses a second connection.
        assert int(client.info("stats")["total_connections_received"]) - before <= 3


# -- the operations as texts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_head_of_an_operation_documents_its_input_and_output(name: str) -> None:
    text = (LUA / f"{name}.lua").read_text()

    head, body = text.split("\n\n", 1)
    assert all(line.startswith("-- ") for line in head.splitlines())
    assert ("-- ARGV: " in head) == ("ARGV" in body)
    assert "-- Returns " in head


@pytest.mark.parametrize("name", ["prelude", *OPERATIONS])
def test_no_operation_searches_for_keys_or_has_global_functions(name: str) -> None:
    text = (LUA / f"{name}.lua").read_text()

    assert not re.search(r"""call\(\s*['"](KEYS|SCAN|RANDOMKEY|FLUSH)""", text, re.IGNORECASE)
    assert not re.search(r"^\s*function ", text, re.MULTILINE)


def test_every_operation_is_used_and_every_used_one_exists() -> None:
    used = re.findall(r'_link\.(?:run|begin)\("([a-z_]+)"', Path(module.__file__).read_text())

    assert sorted(set(used)) == OPERATIONS == sorted(scripts("curricula"))
