"""A Redis that is killed: it comes back with all of its data, with an older part, or with none, and is rebuilt.

test_store_rebuilding checks the store's answers meanwhile, adoption and restoring, for memory too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from gateway.core.errors import (
    NotLeading,
    PoolExhausted,
    SessionExists,
    SessionNotFound,
    StoreUnavailable,
)
from gateway.core.ids import SessionId, WorkerId
from gateway.core.ports.store import Store
from gateway.core.session import Activity, CloseReason, Session, SessionRequest, SessionState
from gateway.stores.redis.sessions import RedisStore
from tests.contract.store_worlds import (
    CODING,
    RedisServer,
    RedisWorld,
    add_ready,
    end,
    ended_late,
    held,
    needs_redis_server,
    opened,
    opening,
    queued,
    running,
    served,
    waiting,
)
from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually, until

pytest_plugins = ["tests.contract.store_fixtures"]
pytestmark = pytest.mark.redis

T = TypeVar("T")

W1, W2 = WorkerId("w1"), WorkerId("w2")
REBUILDING = "the store is being rebuilt"


@pytest.fixture
def mortal(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A Redis that the test kills. It loses unsaved data, unless its parameter is ``all``."""
    needs_redis_server()
    server = RedisServer(tmp_path, keeps_all=getattr(request, "param", "") == "all")
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def mortal_world(mortal: RedisServer) -> AsyncIterator[RedisWorld]:
    world = RedisWorld(mortal)
    yield world
    await world.aclose()


async def restart(server: RedisServer, *stores: RedisStore) -> None:
    """Kill the server, start it again, and wait until *stores* are connected again."""
    for store in stores:
        # An opening that has not yet read that it is queued would get the error that its answer was lost.
        await until(lambda store=store: all(wait.queued for wait in store._claims._waits.values()))  # type: ignore[misc]
    server.stop()
    server.start()
    for store in stores:
        await eventually(lambda store=store: answers(store))  # type: ignore[misc]  # mypy sees no default here


async def answers(store: RedisStore) -> None:
    try:
        await store.ping()
    except StoreUnavailable as exc:
        raise AssertionError("the store does not answer") from exc


async def waits(store: Store, count: int) -> None:
    assert await waiting(store) == count


LOSSES = ["all", "some", "none"]
"""The data with which a Redis comes back: all, those of an earlier save, or none."""


@pytest.mark.parametrize(("mortal", "keeps"), [(keeps, keeps) for keeps in LOSSES], indirect=["mortal"])
async def test_sessions_and_openings_outlive_a_killed_redis_and_no_slot_is_leased_twice(
    mortal: RedisServer, mortal_world: RedisWorld, keeps: str
) -> None:
    a, b = await mortal_world.open(replica="a"), await mortal_world.open(replica="b")
    lead = await a.lead("a", ttl_s=60)
    await add_ready(a, slots=3)
    early = [await opened(a, opening("early-1")), await opened(b, opening("early-2"))]
    if keeps == "some":
        mortal.save()
    await end(b, early.pop(0), CloseReason.DELETED)
    late = [await opened(b, opening("late-1")), await opened(a, opening("late-2"))]
    assert await a.rebind(late[0].id, late[0].lease, was="", handle="here")
    late[0] = replace(late[0], handle="here")
    live = early + late
    # One of these holds a slot that is free in the saved state.
    tasks = [await queued((a, b)[n % 2], opening(f"waits-{n}")) for n in range(3)]

    await restart(mortal, a, b)

    for session in live:
        if keeps == "all" or (keeps == "some" and session in early):
            assert await b.find(session.id) == session
        else:
            with pytest.raises(StoreUnavailable, match=REBUILDING):
                await b.find(session.id)
    with pytest.raises(StoreUnavailable, match=REBUILDING):
        await a.find(SessionId("never-known"))
    assert await ended_late(a, 10) == []
    again = await a.lead("a", ttl_s=60)
    assert again.fence > lead.fence
    assert (again.is_whole, (await b.lead("b", ttl_s=60)).is_whole) == (False, False)
    await eventually(lambda: waits(a, 3))

    assert set(await a.adopt(running(slots=3), live, fence=again.fence)) >= {session.id for session in live}
    assert await b.restore(live) == [session.id for session in live]
    # A session of the saved state that the worker does not list has ended. The control loop ends it in the store too.
    for session in await a.sessions():
        if session not in live:
            await end(a, session)
    assert (await held(a), await waiting(a)) == ({"w1": 3}, 3)
    await a.rebuilt(fence=again.fence)

    assert [await a.find(session.id) for session in live] == live
    with pytest.raises(SessionNotFound):
        await b.find(SessionId("never-known"))
    assert (await held(a), await waiting(a)) == ({"w1": 3}, 3)
    for session in live:
        await end(b, session)
    granted = await asyncio.gather(*tasks)
    assert {session.worker for session in granted} == {W1}
    assert (await held(a), await waiting(a)) == ({"w1": 3}, 0)
    for session in granted:
        assert (await b.opened(session.id, session.lease)).state is SessionState.OPEN


async def test_older_signs_of_life_do_not_give_a_replica_up(mortal: RedisServer, mortal_world: RedisWorld) -> None:
    a, b = await mortal_world.open(replica="a"), await mortal_world.open(replica="b")
    for store, name in ((a, "a"), (b, "b")):
        await store.lead(name, ttl_s=60)
    await add_ready(a, slots=2)
    session, wish = await opened(a, opening("s1")), opening("s2")
    await b.claim(wish, wait_s=0)

    def grow_older(key: str, pattern: str) -> None:
        """Make signs of life as old as those of a Redis that was away for longer than a replica may be silent."""
        with mortal.client() as client:
            for name, value in client.hgetall(f"{{{mortal_world.prefix}}}:{key}").items() if key == "replicas" else ():
                client.hset(f"{{{mortal_world.prefix}}}:{key}", name, int(value) - 11_000)
            if pattern:
                run, since = client.get(f"{{{mortal_world.prefix}}}:{key}").split()
                client.set(f"{{{mortal_world.prefix}}}:{key}", f"{run} {int(since) - 11_000}")

    grow_older("replicas", "")
    mortal.save()
    task = await queued(b, opening("s3"))
    await restart(mortal, a, b)
    await eventually(lambda: waits(a, 1))

    lead = await a.lead("a", ttl_s=60)  # the other replica is late, as on a busy machine
    await a.adopt(running(slots=2), [session], fence=lead.fence)
    await a.rebuilt(fence=lead.fence)

    assert await a.due(10) == [], "the other replica still opens its session"
    await b.opened(wish.id, wish.lease)
    await end(a, session)
    assert (await task).worker == W1, "its opening still waits"

    another = await queued(b, opening("s4"))
    grow_older("heard_run", "run")
    with mortal.client() as client:
        client.hincrby(f"{{{mortal_world.prefix}}}:replicas", "b", -11_000)
    await a.lead("a", ttl_s=60)
    await end(a, await a.find(wish.id))

    with pytest.raises(PoolExhausted):  # now it is gone
        await another


async def test_a_slot_that_is_free_in_an_older_state_is_not_granted_while_a_session_holds_it(
    mortal: RedisServer, mortal_world: RedisWorld
) -> None:
    store = await mortal_world.open()
    await add_ready(store)
    mortal.save()
    session = await opened(store, opening("s1"))
    await restart(mortal, store)
    assert await held(store) == {"w1": 0}

    with pytest.raises(PoolExhausted):
        await store.claim(opening("s2"), wait_s=0)
    task = await queued(store, opening("s3"))
    # Other operations that serve the queue grant nothing meanwhile either.
    assert not await store.worker_ready(W1, "unix:/run/w1.sock")
    await store.adopt(running("w2"), [served(opening("s4"), "w2")], fence=0)
    await end(store, await store.find(SessionId("s4")))
    await add_ready(store, "w3")
    assert await waiting(store) == 1

    await store.adopt(running(), [session], fence=0)
    await store.remove_worker(W2, CloseReason.SHUTDOWN)
    await store.remove_worker(WorkerId("w3"), CloseReason.SHUTDOWN)
    await store.rebuilt(fence=0)

    assert (await waiting(store), await held(store)) == (1, {"w1": 1})
    await end(store, session)
    assert (await task).worker == W1


async def test_a_workers_report_replaces_an_older_state(mortal: RedisServer, mortal_world: RedisWorld) -> None:
    store = await mortal_world.open()
    await add_ready(store, slots=3)
    first = await opened(store, opening("reset"))
    wish = opening("opening")
    await store.claim(wish, wait_s=0)
    task = await queued(store, opening("granted", environment=CODING))
    mortal.save()
    await store.begin_close(first.id, CloseReason.DELETED)
    second = opening("reset")
    assert await store.hand_over(first.id, first.lease, second) is not None
    live = [await store.opened(second.id, second.lease), await store.opened(wish.id, wish.lease, handle="here")]
    await add_ready(store, "w2", environment=CODING)
    granted = await task
    live.append(await store.opened(granted.id, granted.lease))
    await restart(mortal, store)
    assert (await store.find(first.id)).lease == first.lease
    assert await waiting(store, CODING) == 1

    assert sorted(await store.adopt(running(slots=3), live[:2], fence=0)) == ["opening", "reset"]
    coding = replace(running("w2"), environment=CODING)
    assert await store.adopt(coding, live[2:], fence=0) == ["granted"]
    await store.rebuilt(fence=0)

    assert [await store.find(session.id) for session in live] == live
    assert await waiting(store, CODING) == 0
    assert await store.touch([Activity(session.id, 0.0) for session in live]) == []
    assert await store.count_turn(second.id, second.lease) == 1


async def test_changes_after_a_restart_are_newer_than_a_workers_earlier_list(
    mortal: RedisServer, mortal_world: RedisWorld
) -> None:
    store = await mortal_world.open()
    await add_ready(store)
    first = await opened(store, opening("reset"))
    mortal.save()
    await restart(mortal, store)
    # The worker made its list before this. The list arrives afterwards.
    await store.begin_close(first.id, CloseReason.DELETED)
    second = opening("reset")
    await store.hand_over(first.id, first.lease, second)

    await store.adopt(running(), [first], fence=0)

    assert (await store.opened(second.id, second.lease)).lease == second.lease


async def test_the_close_of_an_earlier_session_of_an_id_is_not_reported_for_a_later_one(
    mortal: RedisServer, mortal_world: RedisWorld
) -> None:
    store = await mortal_world.open()
    await add_ready(store)
    await end(store, await opened(store, opening("s1")), CloseReason.EXPIRED)
    mortal.save()
    session = await opened(store, opening("s1"))
    await restart(mortal, store)

    with pytest.raises(StoreUnavailable, match=REBUILDING):
        await store.find(session.id)

    assert await store.restore([session]) == ["s1"]
    assert await store.find(session.id) == session


async def test_a_leader_in_an_older_state_gets_a_fence_above_all_earlier_ones(
    mortal: RedisServer, mortal_world: RedisWorld
) -> None:
    a, b = await mortal_world.open(replica="a"), await mortal_world.open(replica="b")
    first = await a.lead("a", ttl_s=60)
    mortal.save()
    with mortal.client() as client:
        client.delete(f"{{{mortal_world.prefix}}}:leader")
    second = await b.lead("b", ttl_s=60)
    await restart(mortal, a, b)

    third = await a.lead("a", ttl_s=60)

    assert 0 < first.fence < second.fence < third.fence
    assert (await b.lead("b", ttl_s=60)).fence == 0
    with pytest.raises(NotLeading):
        await b.remove_worker(W1, CloseReason.SHUTDOWN, fence=second.fence)


async def test_fences_grow_even_if_the_data_was_lost_and_the_clock_was_set_back(
    mortal: RedisServer, mortal_world: RedisWorld
) -> None:
    store = await mortal_world.open()
    await store.lead("a", ttl_s=60)
    with mortal.client() as client:
        # As if the clock had been a day ahead when this lead started.
        client.delete(f"{{{mortal_world.prefix}}}:leader")
        client.incrby(f"{{{mortal_world.prefix}}}:fence", 24 * 3_600_000)
    ahead = await store.lead("a", ttl_s=60)
    await restart(mortal, store)

    assert (await store.lead("a", ttl_s=60)).fence > ahead.fence


async def test_a_rebuilding_before_another_loss_does_not_count_after_it(
    mortal: RedisServer, mortal_world: RedisWorld
) -> None:
    store = await mortal_world.open()
    lead = await store.lead("a", ttl_s=60)
    await store.adopt(running(), [served(opening("s1"))], fence=lead.fence)
    await restart(mortal, store)

    with pytest.raises(NotLeading):
        await store.rebuilt(fence=lead.fence)

    assert not (await store.lead("a", ttl_s=60)).is_whole


async def test_an_emptied_redis_is_not_whole(redis_world: RedisWorld) -> None:
    store = await redis_world.open()
    await add_ready(store)
    session = await opened(store, opening("s1"))
    task = await queued(store, opening("s2"))
    with redis_world.server.client() as client:
        client.delete(*redis_world.keys(client))

    with pytest.raises(StoreUnavailable, match=REBUILDING):
        await store.find(session.id)
    await eventually(lambda: waits(store, 1))
    lead = await store.lead("a", ttl_s=60)
    await store.adopt(running(), [session], fence=lead.fence)
    await store.rebuilt(fence=lead.fence)

    await end(store, session)
    assert (await task).id == "s2"


async def test_an_opening_that_queued_again_leaves_nothing_when_its_trainer_hangs_up(
    mortal: RedisServer, mortal_world: RedisWorld
) -> None:
    store = await mortal_world.open()
    tasks = [await queued(store, opening(f"s{n}")) for n in range(20)]
    await restart(mortal, store)
    await eventually(lambda: waits(store, 20))

    for task in tasks[:-1]:
        task.cancel()
    await asyncio.wait(tasks[:-1])

    await eventually(lambda: waits(store, 1))
    await store.rebuilt(fence=0)
    await add_ready(store, slots=20)
    assert (await tasks[-1]).id == "s19"
    assert await held(store) == {"w1": 1}


async def test_an_opening_that_is_woken_while_redis_is_away_continues_to_wait(
    mortal: RedisServer, mortal_world: RedisWorld
) -> None:
    store = await mortal_world.open()
    wish = opening("s1")
    task = await queued(store, wish)
    await until(lambda: store._claims._waits[wish.lease].queued)
    mortal.stop()

    store._claims.wake(wish.lease)  # as if this had been the last message of the server that died
    await until(lambda: not store._claims._waits[wish.lease].news.is_set())
    with pytest.raises(StoreUnavailable):
        await store.ping()

    mortal.start()
    await eventually(lambda: answers(store))
    await store.rebuilt(fence=0)
    await add_ready(store)
    assert (await task).worker == W1


async def test_an_opening_that_waits_through_a_restart_ends_at_its_own_deadline(
    mortal: RedisServer, mortal_world: RedisWorld
) -> None:
    store = await mortal_world.open()
    task = await queued(store, opening("s1"), wait_s=4.0)
    await restart(mortal, store)
    await eventually(lambda: waits(store, 1))

    with pytest.raises(PoolExhausted):
        await task

    assert await waiting(store) == 0


@pytest.mark.parametrize("mortal", ["all"], indirect=True)
async def test_slots_are_leased_once_even_if_redis_is_killed_repeatedly_under_load(
    mortal: RedisServer, mortal_world: RedisWorld
) -> None:
    slots, most, done = 4, 0, 0
    inside: set[SessionId] = set()
    stores = [await mortal_world.open(replica=f"r{n}") for n in range(2)]
    await add_ready(stores[0], slots=slots)

    async def episode(n: int) -> None:
        nonlocal most, done
        store, wish = stores[n % 2], opening(f"s{n}")
        session = await insisted(lambda: claimed(store, wish))
        inside.add(session.id)
        most = max(most, len(inside))
        await insisted(lambda: store.opened(wish.id, wish.lease))
        inside.remove(session.id)
        await insisted(lambda: closed(store, session))
        done += 1

    episodes = [asyncio.create_task(episode(n)) for n in range(150)]
    for few in (20, 60, 100):
        await until(lambda few=few: done >= few)  # type: ignore[misc]  # mypy sees no default here
        await restart(mortal)
        await insisted(lambda: stores[0].rebuilt(fence=0))
    await asyncio.wait(episodes, timeout=HANG_S)

    assert [task.exception() for task in episodes] == [None] * 150
    assert most <= slots
    assert (await held(stores[0]), await waiting(stores[0])) == ({"w1": 0}, 0)


async def insisted(ask: Callable[[], Awaitable[T]]) -> T:
    """Return the result of *ask* once the store answers."""

    async def asked() -> T:
        try:
            return await ask()
        except StoreUnavailable as exc:
            raise AssertionError("the store does not answer") from exc

    return await eventually(asked)


async def claimed(store: Store, wish: SessionRequest) -> Session:
    """Return the session of *wish*, even if an earlier claim got it and its answer was lost."""
    try:
        return await store.claim(wish, wait_s=60)
    except SessionExists:
        try:
            return await store.find(wish.id)
        except SessionNotFound as exc:
            raise StoreUnavailable("its earlier claim still waits") from exc


async def closed(store: Store, session: Session) -> None:
    await store.begin_close(session.id, CloseReason.DELETED, lease=session.lease)
    await store.release(session.id, session.lease)
