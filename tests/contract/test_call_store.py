"""The store of calls to servers that keep no outcomes."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import gateway.stores.redis.calls as module
from gateway.core.errors import CallConflict, StoreUnavailable
from gateway.core.faults import FaultKind
from gateway.core.ids import SessionId
from gateway.core.ports.calls import KEYED_S, MARGIN_S, CallChange, CallRecord, CallState, CallStore, Change, Tally
from gateway.stores.redis.calls import RedisCallStore
from tests.contract.store_worlds import RedisServer, RedisWorld, needs_redis_server
from tests.fakes.eventually import eventually, until

pytest_plugins = ["tests.contract.store_fixtures"]
pytestmark = pytest.mark.redis

LUA = Path(module.__file__).parent / "lua" / "calls"
OPERATIONS = sorted(path.stem for path in LUA.glob("*.lua") if path.stem != "prelude")
S, LEASE = SessionId("5e55"), "lease-1"
Make = Callable[..., CallStore]
AWKWARD = bytes(range(256))


def open_store(world: RedisWorld, **options: Any) -> CallStore:
    make_whole(world)
    return RedisCallStore(url=world.server.url, prefix=world.prefix, **options)


def make_whole(world: RedisWorld) -> None:
    """Mark the store as whole, as the leader of the control loop does after it rebuilt the store."""
    with world.server.client() as client:
        client.set(f"{{{world.prefix}}}:whole", client.info("server")["run_id"])


def pass_time(world: RedisWorld, seconds: float) -> None:
    """Let time pass: each expiry of a call comes that much sooner."""
    world.pass_time(seconds)
    with world.server.client() as client:
        for key in world.keys(client):
            if key.split(":")[1] in {"call_ends", "call_places"}:
                for member in client.zrange(key, 0, -1):
                    client.zincrby(key, -round(seconds * 1000), member)


def kinds(world: RedisWorld) -> list[str]:
    """Return the kind of each key of calls."""
    with world.server.client() as client:
        return [key.split(":")[1] for key in world.keys(client) if ":call" in key]


@pytest.fixture
async def replicas(redis_world: RedisWorld) -> AsyncIterator[Make]:
    """Opens replicas on one Redis."""
    opened: list[CallStore] = []

    def replica(name: str, **options: Any) -> CallStore:
        opened.append(open_store(redis_world, replica=name, **options))
        return opened[-1]

    yield replica
    for store in opened:
        await store.aclose()


@pytest.fixture
def calls(replicas: Make) -> CallStore:
    return replicas("a")


async def begin(
    store: CallStore, task_id: str, *, key: str = "k", digest: str = "d", session: SessionId = S, within_s: float = 60.0
) -> CallRecord | None:
    keep_s = max(KEYED_S, within_s + MARGIN_S)
    return await store.begin(change(Change.RUNNING, task_id, session=session, key=key, digest=digest, keep_s=keep_s))


def change(
    kind: Change, task_id: str = "", *, session: SessionId = S, keep_s: float = 600.0, **more: Any
) -> CallChange:
    return CallChange(kind=kind, session=session, lease=LEASE, task_id=task_id, keep_s=keep_s, **more)


def done(task_id: str, outcome: bytes = b"out", *, key: str = "k", digest: str = "d", **more: Any) -> CallChange:
    return change(Change.DONE, task_id, key=key, digest=digest, outcome=outcome, **more)


def seen(*, lease: str = LEASE, **fields: Any) -> CallChange:
    tally = Tally(**{"number": 1, "version": 1, "is_opener": True} | fields)
    return CallChange(kind=Change.TALLIED, session=S, lease=lease, keep_s=600.0, tally=tally)


async def state(store: CallStore, task_id: str) -> CallState | None:
    record = await store.look(S, LEASE, task_id)
    return None if record is None else record.state


async def answers(store: CallStore) -> None:
    """Assert, for `eventually`, that the store answers."""
    try:
        await store.look(S, LEASE, "nothing")
    except StoreUnavailable as error:
        raise AssertionError("the store does not answer yet") from error


# -- keys -----------------------------------------------------------------------------------------------------------


async def test_a_key_is_recorded_once_and_reported_as_running_from_then_on(calls: CallStore) -> None:
    assert await begin(calls, "t1") is None

    running = CallRecord(task_id="t1", state=CallState.RUNNING, replica="a")
    assert await begin(calls, "t2") == running
    assert await calls.look(S, LEASE, "t1") == running
    assert await calls.look(S, LEASE, "t2") is None


async def test_an_outcome_is_returned_unchanged_with_any_content(calls: CallStore) -> None:
    await begin(calls, "t1")
    await calls.write([done("t1", AWKWARD)])

    for _ in range(2):
        known = await begin(calls, "t2")
        assert known == CallRecord(task_id="t1", state=CallState.DONE, replica="a", outcome=AWKWARD)
    assert await calls.look(S, LEASE, "t1") == known


async def test_of_many_concurrent_beginnings_one_is_recorded(calls: CallStore) -> None:
    found = await asyncio.gather(*(begin(calls, f"t{n}") for n in range(50)))

    assert found.count(None) == 1
    first = f"t{found.index(None)}"
    assert {record.task_id for record in found if record is not None} == {first}


async def test_another_digest_is_a_conflict_whether_the_call_runs_or_has_ended(calls: CallStore) -> None:
    await begin(calls, "t1")
    with pytest.raises(CallConflict, match="another body"):
        await begin(calls, "t2", digest="other")

    await calls.write([done("t1")])
    with pytest.raises(CallConflict, match="another body"):
        await begin(calls, "t2", digest="other")


async def test_keys_of_different_sessions_and_leases_are_independent(calls: CallStore) -> None:
    await begin(calls, "t1")

    assert await begin(calls, "t2", session=SessionId("other"), digest="x") is None
    assert await calls.begin(replace(change(Change.RUNNING, "t3", key="k", digest="y"), lease="lease-2")) is None
    assert await begin(calls, "t4", key="K" * 5000) is None
    assert await begin(calls, "t5", key="\ud800 odd\n:*") is None
    assert await calls.look(SessionId("other"), LEASE, "t1") is None


async def test_a_call_that_never_ran_leaves_its_key_free(calls: CallStore) -> None:
    await begin(calls, "t1")
    await calls.write([change(Change.UNDONE, "t1", key="k", digest="d")])

    assert await state(calls, "t1") is None
    assert await begin(calls, "t2", digest="another") is None
    await calls.write([change(Change.UNDONE, "t1", key="k", digest="d")])  # a late repetition for the first call
    assert await state(calls, "t2") is CallState.RUNNING


async def test_the_key_of_an_outcome_that_is_not_kept_stays(calls: CallStore) -> None:
    await begin(calls, "t1")
    await calls.write([change(Change.DROPPED, "t1", key="k", digest="d")])

    assert await begin(calls, "t2") == CallRecord(task_id="t1", state=CallState.DROPPED, replica="a")


async def test_an_end_is_recorded_even_if_the_beginning_was_lost(calls: CallStore) -> None:
    await calls.write([done("t1"), done("t1")])

    known = await begin(calls, "t2")
    assert known is not None
    assert (known.task_id, known.state, known.outcome) == ("t1", CallState.DONE, b"out")


# -- calls without a key --------------------------------------------------------------------------------------------


async def test_a_call_without_a_key_is_found_by_its_id(calls: CallStore) -> None:
    await calls.write([change(Change.RUNNING, "t1"), change(Change.RUNNING, "t2"), change(Change.RUNNING, "t3")])
    assert await state(calls, "t1") is CallState.RUNNING
    await calls.write([done("t1", key="", digest=""), change(Change.DROPPED, "t2"), change(Change.RUNNING, "t1")])

    assert await calls.look(S, LEASE, "t1") == CallRecord(
        task_id="t1", state=CallState.DONE, replica="a", outcome=b"out"
    )
    assert await state(calls, "t2") is None
    assert await state(calls, "t3") is CallState.RUNNING


# -- waiting --------------------------------------------------------------------------------------------------------


async def test_waiting_callers_get_the_outcome(calls: CallStore) -> None:
    await begin(calls, "t1")
    waits = [asyncio.ensure_future(calls.settled(S, LEASE, "t1", within_s=60)) for _ in range(3)]
    still = await calls.settled(S, LEASE, "t1", within_s=0.01)
    assert still is not None
    assert still.state is CallState.RUNNING

    await calls.write([done("t1", b"there")])

    assert [record.outcome for record in await asyncio.gather(*waits) if record is not None] == [b"there"] * 3
    assert await calls.settled(S, LEASE, "t1", within_s=0) == await calls.look(S, LEASE, "t1")
    assert await calls.settled(S, LEASE, "unknown", within_s=60) is None


async def test_waiting_callers_get_no_record_if_the_call_never_ran_or_its_session_ended(calls: CallStore) -> None:
    await begin(calls, "t1")
    await begin(calls, "t2", key="two")
    first = asyncio.ensure_future(calls.settled(S, LEASE, "t1", within_s=60))
    second = asyncio.ensure_future(calls.settled(S, LEASE, "t2", within_s=60))
    await asyncio.sleep(0)

    await calls.write([change(Change.UNDONE, "t1", key="k", digest="d")])
    assert await first is None
    await calls.write([change(Change.FORGOTTEN)])
    assert await second is None


async def test_waiting_can_be_cancelled(calls: CallStore) -> None:
    await begin(calls, "t1")
    waits = asyncio.ensure_future(calls.settled(S, LEASE, "t1", within_s=60))
    await asyncio.sleep(0)

    waits.cancel()

    with pytest.raises(asyncio.CancelledError):
        await waits
    await calls.write([done("t1")])
    assert await state(calls, "t1") is CallState.DONE


# -- bounds ---------------------------------------------------------------------------------------------------------


async def test_calls_are_forgotten_when_their_time_is_over(calls: CallStore, redis_world: RedisWorld) -> None:
    await begin(calls, "t1")
    await calls.write([done("t1", keep_s=600), done("t2", key="", digest="", keep_s=75)])

    pass_time(redis_world, 76)
    assert [await state(calls, "t1"), await state(calls, "t2")] == [CallState.DONE, None]
    pass_time(redis_world, 600)
    assert await state(calls, "t1") is None
    assert await begin(calls, "t3", digest="x") is None


async def test_a_call_is_known_as_running_beyond_its_longest_run(calls: CallStore, redis_world: RedisWorld) -> None:
    await begin(calls, "t1", within_s=2000)

    pass_time(redis_world, 1990)

    assert await begin(calls, "t2") is not None


async def test_the_calls_of_an_ended_session_are_forgotten(calls: CallStore) -> None:
    other = SessionId("other")
    await begin(calls, "t1")
    await begin(calls, "t9", session=other)
    await calls.write([done("t1"), change(Change.FORGOTTEN), done("t9", session=other)])

    assert await state(calls, "t1") is None
    assert await begin(calls, "t2", digest="x") is None
    assert await calls.look(other, LEASE, "t9") is not None


async def test_too_many_bytes_in_a_session_drop_the_oldest_outcomes_and_keep_their_keys(replicas: Make) -> None:
    calls = replicas("a", session_bytes=250)
    for number in range(4):
        await begin(calls, f"t{number}", key=f"k{number}")
        await calls.write([done(f"t{number}", b"x" * 100, key=f"k{number}", keep_s=600 + number)])

    states = [await state(calls, f"t{number}") for number in range(4)]

    assert states == [CallState.DROPPED, CallState.DROPPED, CallState.DONE, CallState.DONE]


async def test_the_bytes_of_all_outcomes_are_bounded_and_ended_sessions_free_room(replicas: Make) -> None:
    calls = replicas("a", total_bytes=250)
    for number in range(4):
        session = SessionId(f"s{number}")
        await calls.write([done("t", b"x" * 100, session=session)])

    async def states() -> list[CallState | None]:
        found = [await calls.look(SessionId(f"s{number}"), LEASE, "t") for number in range(4)]
        return [None if record is None else record.state for record in found]

    assert await states() == [CallState.DONE, CallState.DONE, CallState.DROPPED, CallState.DROPPED]
    await calls.write(
        [change(Change.FORGOTTEN, session=SessionId("s0")), done("t", b"x" * 100, session=SessionId("s3"))]
    )
    assert await states() == [None, CallState.DONE, CallState.DROPPED, CallState.DONE]


async def test_too_many_calls_in_a_session_drop_the_oldest_that_do_not_run(replicas: Make) -> None:
    calls = replicas("a", session_max=3)
    await begin(calls, "running", key="r", within_s=0)
    for number in range(4):
        await calls.write([done(f"t{number}", key=f"k{number}", keep_s=1000 + number)])

    found = [await state(calls, f"t{number}") is not None for number in range(4)]

    assert found == [False, False, True, True]
    assert await state(calls, "running") is CallState.RUNNING


# -- replicas and losses ----------------------------------------------------------------------------------


async def test_another_replica_gets_the_outcome(replicas: Make) -> None:
    a, b = replicas("a"), replicas("b")
    await begin(a, "t1")
    known = await begin(b, "t2")
    assert known is not None
    assert (known.task_id, known.replica) == ("t1", "a")
    waits = asyncio.ensure_future(b.settled(S, LEASE, "t1", within_s=60))
    await asyncio.sleep(0)

    await a.write([done("t1", b"there")])

    record = await waits
    assert record is not None
    assert record.outcome == b"there"


async def test_a_call_of_a_replica_that_is_silent_for_too_long_is_lost(replicas: Make) -> None:
    a, b = replicas("a", sign_s=0.1), replicas("b", lost_s=0.1)
    await begin(a, "t1")

    record = await b.settled(S, LEASE, "t1", within_s=60)

    assert record is not None
    assert record.state is CallState.LOST
    known = await begin(b, "t2")
    assert known is not None
    assert known.state is CallState.LOST


async def test_a_call_of_a_replica_that_is_silent_for_a_moment_is_not_lost(
    replicas: Make, redis_world: RedisWorld
) -> None:
    a, b = replicas("a"), replicas("b", lost_s=30.0)
    await begin(a, "t1")
    with redis_world.server.client() as client:
        client.delete(f"{{{redis_world.prefix}}}:call_replica:a")  # as if Redis had been away

    def scripts() -> int:
        with redis_world.server.client() as client:
            return int(client.info("commandstats")["cmdstat_evalsha"]["calls"])

    before = scripts()
    waits = asyncio.ensure_future(b.settled(S, LEASE, "t1", within_s=60))

    await until(lambda: scripts() > before + 1)
    assert not waits.done()
    await a.write([])
    await a.write([done("t1", b"there")])

    record = await waits
    assert record is not None
    assert record.outcome == b"there"


async def test_forgotten_calls_leave_nothing_in_redis(replicas: Make, redis_world: RedisWorld) -> None:
    a = replicas("a")
    for number in range(5):
        await begin(a, f"t{number}", key=f"k{number}")
    await a.write([done("t0", key="k0"), done("u0", key="", digest=""), done("t1", b"", key="k1")])

    await a.write([change(Change.FORGOTTEN)])

    assert kinds(redis_world) == ["call_replica"]


async def test_sessions_that_no_replica_ended_are_swept(replicas: Make, redis_world: RedisWorld) -> None:
    a = replicas("a")
    for number in range(50):
        await a.write([done("t", b"x" * 10, session=SessionId(f"s{number}"))])

    pass_time(redis_world, 601)
    for _ in range(5):  # each write sweeps some sessions
        await a.write([])

    assert kinds(redis_world) == ["call_replica"]


async def test_the_keys_of_a_session_expire_even_if_no_replica_is_left(replicas: Make, redis_world: RedisWorld) -> None:
    a = replicas("a")
    await begin(a, "t1", within_s=0)
    await a.write([done("t2", b"x", key="k2")])

    with redis_world.server.client() as client:
        kept = {key.split(":")[1]: client.ttl(key) for key in redis_world.keys(client) if ":call" in key}

    assert {kind for kind, ttl_s in kept.items() if ttl_s < 0} == {"call_places", "call_sizes", "call_bytes"}
    assert all(600 <= kept[kind] <= 661 for kind in ("calls", "call_ends"))


async def test_a_store_that_hangs_delays_a_wait_and_a_store_that_is_down_is_an_error(tmp_path: Path) -> None:
    needs_redis_server()
    server = RedisServer(tmp_path)
    server.start()
    world = RedisWorld(server)
    make_whole(world)
    a, b = (RedisCallStore(url=server.url, prefix=world.prefix, replica=name) for name in ("a", "b"))
    try:
        await begin(a, "t1")
        server.signal(signal.SIGSTOP)
        waits = asyncio.ensure_future(b.settled(S, LEASE, "t1", within_s=60))
        with pytest.raises(StoreUnavailable):
            await begin(a, "t2", key="two")
        server.signal(signal.SIGCONT)
        await a.write([done("t1", b"there")])
        record = await waits
        assert record is not None
        assert record.outcome == b"there"

        server.stop()
        for failing in (begin(a, "t3", key="three"), a.write([]), a.settled(S, LEASE, "t1", within_s=0.1)):
            with pytest.raises(StoreUnavailable):
                await failing
    finally:
        server.stop()
        await a.aclose()
        await b.aclose()


async def test_a_store_that_lost_its_data_begins_no_call_until_it_is_whole_again(tmp_path: Path) -> None:
    needs_redis_server()
    server = RedisServer(tmp_path)
    server.start()
    world = RedisWorld(server)
    make_whole(world)
    a, b = (RedisCallStore(url=server.url, prefix=world.prefix, replica=name) for name in ("a", "b"))
    try:
        await begin(a, "t1")
        before = [await a.write([]), await b.write([done("t1")])]
        server.stop()
        server.start()
        for store in (a, b):  # each connection breaks once
            await eventually(partial(answers, store))

        with pytest.raises(StoreUnavailable, match="rebuilt"):
            await begin(b, "t2")
        after = await a.write([done("t1", b"again")])
        known = await begin(b, "t2")
        with pytest.raises(StoreUnavailable, match="rebuilt"):
            await begin(b, "t3", key="another")
        make_whole(world)

        assert len({*before, after}) == 2
        assert known is not None
        assert known.outcome == b"again"
        assert await begin(b, "t3", key="another") is None
    finally:
        server.stop()
        await a.aclose()
        await b.aclose()


# -- counts of sessions ---------------------------------------------------------------------------------------------

SEEN: dict[str, Any] = {
    "steps": 3,
    "reward": 0.1 + 0.2,
    "is_rewarded": True,
    "finished": True,
    "seconds": 1.5,
    "fault": FaultKind.AUTHOR,
    "notes": ('[1, "a b"]', "é\n - "),
}


async def test_a_replicas_counts_of_a_session_are_kept_until_the_session_ends(calls: CallStore) -> None:
    ended_at = time.monotonic() - 5
    await calls.write([seen(**SEEN, ended_at=ended_at), seen(lease="another", steps=9)])

    found = (await calls.tallies(S, LEASE))["a"]

    assert found.ended_at == pytest.approx(ended_at, abs=4)  # converted to another clock in between
    assert replace(found, ended_at=None) == Tally(number=1, version=1, is_opener=True, **SEEN)
    await calls.write([change(Change.FORGOTTEN)])
    assert await calls.tallies(S, LEASE) == {}
    assert (await calls.tallies(S, "another"))["a"].steps == 9


async def test_a_count_replaces_an_earlier_one_and_never_a_later_one(calls: CallStore) -> None:
    await calls.write([seen(version=1, steps=1)])
    await calls.write([seen(version=3, steps=3)])
    await calls.write([seen(version=2, steps=2)])

    assert (await calls.tallies(S, LEASE))["a"] == Tally(number=1, version=3, is_opener=True, steps=3)


async def test_a_lost_count_is_not_written_again_as_an_update(calls: CallStore) -> None:
    run = await calls.write([seen(steps=1)])
    await calls.write([change(Change.FORGOTTEN)])

    await calls.write([seen(version=2, steps=2, told_in=run or "r")])

    assert await calls.tallies(S, LEASE) == {}


async def test_a_restarted_count_is_not_whole(calls: CallStore) -> None:
    await calls.write([seen(steps=7)])

    await calls.write([seen(number=2, steps=1)])
    await calls.write([seen(number=2, version=2, steps=2)])

    assert not (await calls.tallies(S, LEASE))["a"].is_whole


async def test_counts_outlive_the_calls_of_their_session(calls: CallStore, redis_world: RedisWorld) -> None:
    await calls.write([done("t1", keep_s=10), seen(steps=1)])

    pass_time(redis_world, 60)
    await calls.write([])

    assert await state(calls, "t1") is None
    assert (await calls.tallies(S, LEASE))["a"].steps == 1


async def test_each_replica_has_a_count_of_its_own(replicas: Make) -> None:
    a, b = replicas("a"), replicas("b")

    await a.write([seen(steps=1)])
    await b.write([seen(steps=2, is_opener=False)])

    for store in (a, b):
        assert {name: tally.steps for name, tally in (await store.tallies(S, LEASE)).items()} == {"a": 1, "b": 2}


async def test_after_a_restart_of_redis_no_count_is_whole(tmp_path: Path) -> None:
    """Its loaded data may be older than the counts that it had received."""
    needs_redis_server()
    server = RedisServer(tmp_path, keeps_all=True)
    server.start()
    calls = RedisCallStore(url=server.url, prefix=RedisWorld(server).prefix, replica="a")
    try:
        run = await calls.write([seen(steps=1)])
        server.stop()
        server.start()
        await eventually(partial(answers, calls))

        for more in ([], [seen(version=2, steps=2, told_in=run)], [seen(version=2, steps=2)]):
            await calls.write(more)
            assert not (await calls.tallies(S, LEASE))["a"].is_whole
    finally:
        server.stop()
        await calls.aclose()


# -- the operations as texts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_head_of_an_operation_documents_its_input_and_output(name: str) -> None:
    text = (LUA / f"{name}.lua").read_text()

    head = text.split("\n\n")[0]
    assert all(line.startswith("-- ") for line in head.splitlines())
    assert "-- Returns " in head
    assert "-- ARGV: " in head


@pytest.mark.parametrize("name", ["prelude", *OPERATIONS])
def test_no_operation_searches_for_keys_or_has_global_functions(name: str) -> None:
    text = (LUA / f"{name}.lua").read_text()

    assert not re.search(r"""call\(\s*['"](KEYS|SCAN|RANDOMKEY|FLUSH)""", text, re.IGNORECASE)
    assert not re.search(r"^\s*function ", text, re.MULTILINE)


def test_every_operation_is_used_and_every_used_one_exists() -> None:
    used = re.findall(r'_link\.run\(\s*"([a-z_]+)"', Path(module.__file__).read_text())

    assert sorted(set(used)) == OPERATIONS
