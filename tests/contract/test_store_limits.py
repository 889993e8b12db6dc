"""The store seam, limits of keys: concurrent sessions, shares of a pool, and the pace of openings, on both stores."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from gateway.core.errors import EnvironmentUnavailable, PoolExhausted, SessionNotFound
from gateway.core.ids import EnvironmentName, Owner, WorkerId
from gateway.core.ports.store import Store
from gateway.core.session import CloseReason, Session, SessionRequest
from gateway.core.worker import EnvironmentLoad
from tests.contract.store_worlds import (
    CODING,
    MATH,
    RedisWorld,
    World,
    add_ready,
    end,
    held,
    opened,
    opening,
    queued,
    running,
    served,
)
from tests.deadlines import HANG_S

pytest_plugins = ["tests.contract.store_fixtures"]

LONG_S = 3600.0
SHORT_S = 0.02
TOGETHER_S = 100.0
ALICE = Owner("alice")


def of(owner: str, id: str, *, most: int = 0, here: int = 0, environment: EnvironmentName = MATH) -> SessionRequest:
    """Return a request of *owner* with the limits *most* and *here*."""
    return replace(opening(id, environment=environment), owner=Owner(owner), max_sessions=most, max_here=here)


def grouped(wish: SessionRequest, size: int, group: str = "g") -> SessionRequest:
    return replace(wish, group=group, group_size=size, together_s=TOGETHER_S)


async def granted(tasks: Sequence[asyncio.Task[Session]]) -> list[str]:
    """Return the sorted ids of the granted claims. All *tasks* must end; a grant may still be on its way."""
    await asyncio.wait(tasks, timeout=HANG_S)
    assert all(task.done() for task in tasks), "some still wait"
    return sorted(task.result().id for task in tasks)


async def hung_up(*tasks: asyncio.Task[Session]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def refused(store: Store, wish: SessionRequest, *, wait_s: float = 0.0) -> str:
    """Return the message of a claim that gets no slot within *wait_s*."""
    with pytest.raises(PoolExhausted) as caught:
        await store.claim(wish, wait_s=wait_s)
    return str(caught.value)


async def load_of(store: Store, environment: EnvironmentName = MATH) -> EnvironmentLoad:
    return (await store.load()).get(environment, EnvironmentLoad())


async def owned(store: Store, owner: str = "alice") -> int:
    return sum(session.owner == owner for session in await store.sessions())


# -- the limits -------------------------------------------------------------------------------------------------------


async def test_of_many_concurrent_openings_in_two_environments_no_more_than_the_limit_hold_a_slot(store: Store) -> None:
    for environment in (MATH, CODING):
        await add_ready(store, f"w-{environment}", environment=environment, slots=20)
    wishes = [of("alice", f"a{n}", most=5, here=3, environment=(MATH, CODING)[n % 2]) for n in range(60)]
    left = {asyncio.create_task(store.claim(wish, wait_s=LONG_S)) for wish in wishes}
    most = Counter[str]()
    while left:
        done, left = await asyncio.wait(left, timeout=HANG_S, return_when=asyncio.FIRST_COMPLETED)
        assert done, "some still wait"
        for task in done:
            found = [session.environment for session in await store.sessions()]
            most["in all"] = max(most["in all"], len(found))
            for environment in found:
                most[environment] = max(most[environment], found.count(environment))
            await end(store, task.result())

    assert most["in all"] == 5
    assert max(most[MATH], most[CODING]) == 3
    assert await store.sessions() == []


async def test_a_share_bounds_the_sessions_of_one_environment_only(store: Store) -> None:
    await add_ready(store, "w1", slots=4)
    await add_ready(store, "w2", environment=CODING, slots=4)
    for n in range(2):
        await store.claim(of("alice", f"m{n}", here=2), wait_s=0)
        await store.claim(of("alice", f"c{n}", here=2, environment=CODING), wait_s=0)
    await refused(store, of("alice", "m2", here=2))
    await refused(store, of("alice", "c2", here=2, environment=CODING))
    await store.claim(of("alice", "m3", here=3), wait_s=0)
    assert await held(store) == {"w1": 3, "w2": 2}


async def test_openings_and_closing_sessions_count_until_they_are_released(store: Store) -> None:
    await add_ready(store, "w1", slots=4)
    session = await store.claim(of("alice", "a0", most=1), wait_s=0)
    await refused(store, of("alice", "a1", most=1))
    session = await store.opened(session.id, session.lease)
    await refused(store, of("alice", "a1", most=1))
    await store.begin_close(session.id, CloseReason.DELETED)
    await refused(store, of("alice", "a1", most=1))
    await store.release(session.id, session.lease)
    await store.claim(of("alice", "a1", most=1), wait_s=0)


async def test_openings_of_an_owner_at_its_limit_are_served_in_order_of_arrival(store: Store) -> None:
    await add_ready(store, "w1", slots=8)
    session = await opened(store, of("alice", "a0", most=1))
    tasks = [await queued(store, of("alice", f"a{n}", most=1), wait_s=LONG_S) for n in range(1, 5)]
    for n, task in enumerate(tasks):
        await end(store, session)
        assert await granted([task]) == [f"a{n + 1}"]
        assert not any(later.done() for later in tasks[n + 1 :])
        session = task.result()


async def test_an_opening_does_not_overtake_an_earlier_one_of_its_owner_that_waits_for_the_limit(store: Store) -> None:
    await add_ready(store, "w1", slots=8)
    session = await opened(store, of("alice", "a0", most=1))
    first = await queued(store, of("alice", "a1", most=1), wait_s=LONG_S)
    second = await queued(store, of("alice", "a2", most=2), wait_s=LONG_S)
    await end(store, session)
    assert await granted([first, second]) == ["a1", "a2"]


@pytest.mark.parametrize("how", ["release", "hang up", "remove its worker"])
async def test_a_session_that_ends_lets_an_opening_of_its_owner_begin_in_another_environment(
    store: Store, how: str
) -> None:
    await add_ready(store, "w1")
    await add_ready(store, "w2", environment=CODING, slots=2)
    session = await store.claim(of("alice", "a0", most=1), wait_s=0)
    b = await queued(store, of("alice", "a1", most=1, environment=CODING), wait_s=LONG_S)
    assert not b.done()
    if how == "release":
        await end(store, session)
    elif how == "hang up":
        holder = await opened(store, of("bob", "b0", environment=CODING))
        await end(store, session)
        await granted([b])
        waits = await queued(store, of("alice", "a2", most=1), wait_s=LONG_S)
        await end(store, holder)
        assert not waits.done()
        await end(store, b.result())
        b = waits
    else:
        await store.remove_worker(WorkerId("w1"), CloseReason.WORKER_LOST)
    assert len(await granted([b])) == 1


async def test_openings_of_one_owner_in_several_environments_are_served_in_order_of_arrival(store: Store) -> None:
    await add_ready(store, "w1", slots=2)
    await add_ready(store, "w2", environment=CODING, slots=2)
    session = await opened(store, of("alice", "a0", most=1))
    older = await queued(store, of("alice", "a1", most=1, environment=CODING), wait_s=LONG_S)
    newer = await queued(store, of("alice", "a2", most=1), wait_s=LONG_S)
    await end(store, session)
    assert await granted([older]) == ["a1"]
    assert not newer.done()
    await end(store, older.result())
    assert await granted([newer]) == ["a2"]


async def test_a_session_that_ends_in_a_draining_worker_makes_room_in_the_others(store: Store) -> None:
    await add_ready(store, "w1")
    session = await opened(store, of("alice", "a0", most=1))
    await add_ready(store, "w2")
    await store.drain_worker(WorkerId("w1"))
    waits = await queued(store, of("alice", "a1", most=1), wait_s=LONG_S)
    await end(store, session)
    assert await granted([waits]) == ["a1"]


# -- other owners -----------------------------------------------------------------------------------------------------


async def at_limit(store: Store, wish: SessionRequest) -> tuple[Session, asyncio.Task[Session]]:
    """Let alice hold one of four slots, and *wish* wait for her limit."""
    await add_ready(store, "w1", slots=4)
    session = await opened(store, of("alice", "a0", most=1))
    return session, await queued(store, wish, wait_s=LONG_S)


LIMITED = [
    pytest.param(of("alice", "a1", most=1), id="a single opening"),
    pytest.param(grouped(of("alice", "a1", most=1), 1), id="a group of one"),
    pytest.param(grouped(of("alice", "a1", most=3), 3), id="a group of which a third has come"),
    pytest.param(grouped(of("alice", "a1", most=2), 2), id="a group of which half has come"),
    pytest.param(grouped(of("alice", "a1", here=2), 2), id="a group beyond the share"),
]


@pytest.mark.parametrize("wish", LIMITED[:2] + LIMITED[3:])
async def test_another_owner_takes_a_free_slot_immediately_while_only_owners_at_their_limits_wait(
    store: Store, wish: SessionRequest
) -> None:
    _, waits = await at_limit(store, wish)
    before = await load_of(store)
    await store.claim(of("bob", "b0"), wait_s=0)
    await store.claim(of("carl", "c0", most=1), wait_s=0)
    load = await load_of(store)
    assert (load.arrivals - before.arrivals, load.hits - before.hits) == (2, 2)
    await hung_up(waits)


@pytest.mark.parametrize("wish", LIMITED)
async def test_an_owner_at_its_limit_is_passed_over_when_slots_become_free(store: Store, wish: SessionRequest) -> None:
    _, waits = await at_limit(store, wish)
    async with asyncio.timeout(HANG_S):
        bobs = [await store.claim(of("bob", f"b{n}"), wait_s=LONG_S) for n in range(3)]
    others = [await queued(store, of("bob", "b3"), wait_s=LONG_S), await queued(store, of("carl", "c0"), wait_s=LONG_S)]
    await end(store, bobs[0])
    assert await granted(others[:1]) == ["b3"]
    await end(store, bobs[1])
    assert await granted(others[1:]) == ["c0"]
    assert not waits.done()
    await hung_up(waits)


async def test_a_group_of_another_owner_starts_while_owners_at_their_limits_wait(store: Store) -> None:
    _, waits = await at_limit(store, of("alice", "a1", most=1))
    for n in range(3):
        await store.claim(grouped(of("bob", f"b{n}"), 3, "bobs"), wait_s=0)
    assert await held(store) == {"w1": 4}
    await hung_up(waits)


async def test_another_owner_takes_a_free_slot_while_the_breaker_is_open_or_the_queue_is_full(
    store_world: World,
) -> None:
    store = await store_world.open(queue_max=1)
    _, waits = await at_limit(store, of("alice", "a1", most=1))
    await refused(store, of("alice", "a2", most=1), wait_s=LONG_S)
    await store.claim(of("bob", "b0"), wait_s=LONG_S)
    await store.fail_waiting(MATH, "broken", for_s=60)
    with pytest.raises(EnvironmentUnavailable):
        await waits
    await store.claim(of("bob", "b1"), wait_s=LONG_S)


async def test_an_owner_does_not_make_up_for_the_turns_that_it_missed_at_its_limit(store: Store) -> None:
    await add_ready(store, "w1", slots=2)
    session = await opened(store, of("alice", "a0", most=1))
    holder = await opened(store, of("holder", "h0"))
    alices = [await queued(store, of("alice", f"a{n}", most=n), wait_s=LONG_S) for n in (1, 2, 3)]
    for n in range(4):  # four turns of bob and carl
        tasks = [await queued(store, of(owner, f"{owner}{n}"), wait_s=LONG_S) for owner in ("bob", "carl")]
        for task in tasks:
            await end(store, holder)
            await granted([task])
            holder = task.result()
    bobs = [await queued(store, of("bob", f"bob{n}"), wait_s=LONG_S) for n in (4, 5)]
    await end(store, session)
    assert await granted(alices[:1]) == ["a1"]
    await end(store, holder)
    assert await granted(alices[1:2]) == ["a2"], "it arrived first in this round"
    await end(store, alices[0].result())
    assert await granted(bobs[:1]) == ["bob4"]
    await end(store, alices[1].result())
    assert await granted(alices[2:]) == ["a3"]
    await hung_up(*bobs[1:])


# -- groups -----------------------------------------------------------------------------------------------------------


async def test_a_group_starts_when_the_limit_allows_all_of_it(store: Store) -> None:
    await add_ready(store, "w1", slots=8)
    sessions = [await opened(store, of("alice", f"a{n}", most=3)) for n in range(2)]
    tasks = [await queued(store, grouped(of("alice", f"g{n}", most=3), 3), wait_s=LONG_S) for n in range(3)]
    await end(store, sessions[0])
    assert not any(task.done() for task in tasks)
    await store.load()
    assert not any(task.done() for task in tasks)
    await end(store, sessions[1])
    assert await granted(tasks) == ["g0", "g1", "g2"]


async def test_a_group_beyond_the_limit_parts_after_its_time_and_takes_what_the_limit_allows(
    store_world: World,
) -> None:
    store = await store_world.open()
    await add_ready(store, "w1", slots=8)
    await opened(store, of("alice", "a0", most=3))
    tasks = [await queued(store, grouped(of("alice", f"g{n}", most=3), 4), wait_s=LONG_S) for n in range(4)]
    assert await owned(store) == 1
    store_world.pass_time(TOGETHER_S + 1)
    await store.load()
    assert await granted(tasks[:2]) == ["g0", "g1"]
    assert await owned(store) == 3
    await end(store, tasks[0].result())
    assert await granted(tasks[2:3]) == ["g2"]
    await store.load()
    assert await owned(store) == 3
    await hung_up(tasks[3])


async def test_a_reserved_slot_is_not_granted_beyond_the_limit(store: Store) -> None:
    await add_ready(store, "w1", slots=8)
    await add_ready(store, "w2", environment=CODING)
    await store.claim(grouped(of("alice", "g0", most=3), 3), wait_s=0)
    await store.claim(grouped(of("alice", "g1", most=3), 3), wait_s=0)
    session = await opened(store, of("alice", "c0", most=3, environment=CODING))
    assert (await load_of(store)).to_come == 1
    await refused(store, grouped(of("alice", "g2", most=3), 3))
    waits = await queued(store, grouped(of("alice", "g2", most=3), 3), wait_s=LONG_S)
    assert await owned(store) == 3
    await end(store, session)
    assert await granted([waits]) == ["g2"]


# -- hand-over --------------------------------------------------------------------------------------------------------


async def test_a_successor_gets_the_slot_of_its_session_at_the_limit(store: Store) -> None:
    await add_ready(store, "w1", slots=4)
    sessions = [await opened(store, of("alice", f"a{n}", most=2, here=2)) for n in range(2)]
    waits = await queued(store, of("alice", "a2", most=2, here=2), wait_s=LONG_S)
    await store.begin_close(sessions[0].id, CloseReason.DELETED)
    successor = of("alice", "a3", most=1, here=1)
    assert await store.hand_over(sessions[0].id, sessions[0].lease, successor) is not None
    assert await owned(store) == 2
    assert not waits.done()
    await end(store, await store.find(successor.id))
    assert await granted([waits]) == ["a2"]


async def test_a_slot_is_not_transferred_to_another_owner_that_is_at_its_limit(store: Store) -> None:
    await add_ready(store, "w1", slots=4)
    session = await opened(store, of("alice", "a0", most=1))
    await opened(store, of("bob", "b0", most=1))
    waits = await queued(store, of("alice", "a1", most=1), wait_s=LONG_S)
    await store.begin_close(session.id, CloseReason.DELETED)
    assert await store.hand_over(session.id, session.lease, of("bob", "b1", most=1)) is None
    assert not waits.done()
    assert await store.hand_over(session.id, session.lease, of("bob", "b1", most=2)) is not None
    assert await granted([waits]) == ["a1"]


# -- recovery ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["adopt", "restore"])
async def test_recovered_sessions_count_once(store_world: World, how: str) -> None:
    store = await store_world.open(is_whole=False)
    wishes = [of("alice", f"a{n}", most=2) for n in range(3)]
    sessions = [served(wish) for wish in wishes]
    for _ in range(2):
        if how == "adopt":
            await store.adopt(running(slots=8), sessions, fence=0)
        else:
            await store.adopt(running(slots=8), [], fence=0)
            await store.restore(sessions)
    await store.rebuilt(fence=0)

    assert "has 3 sessions, and its limit is 2" in await refused(store, of("alice", "a3", most=2))
    waits = await queued(store, of("alice", "a3", most=2), wait_s=LONG_S)
    await end(store, sessions[0])
    assert not waits.done()
    await end(store, sessions[1])
    assert await granted([waits]) == ["a3"]
    await end(store, sessions[2])
    await end(store, waits.result())
    for n in (4, 5):
        await store.claim(of("alice", f"a{n}", most=2, here=2), wait_s=0)
    await refused(store, of("alice", "a6", most=2, here=2))


async def test_the_sessions_of_a_removed_worker_do_not_count(store: Store) -> None:
    await add_ready(store, "w1", slots=2)
    for n in range(2):
        await opened(store, of("alice", f"a{n}", most=2, here=2))
    await add_ready(store, "w2", slots=4)
    waits = [await queued(store, of("alice", f"a{n}", most=2, here=2), wait_s=LONG_S) for n in range(2, 5)]
    await store.remove_worker(WorkerId("w1"), CloseReason.WORKER_LOST)
    assert await granted(waits[:2]) == ["a2", "a3"]
    assert await owned(store) == 2
    await hung_up(waits[2])


@pytest.mark.redis
async def test_a_session_whose_key_another_client_deleted_stops_to_count(redis_world: RedisWorld) -> None:
    store = await redis_world.open()
    await add_ready(store, "w1", slots=8)
    sessions = [await opened(store, of("alice", f"a{n}", most=2)) for n in range(2)]
    waits = [await queued(store, of("alice", f"a{n}", most=2), wait_s=LONG_S) for n in range(2, 5)]
    with redis_world.server.client() as client:
        for session in sessions:
            client.delete(f"{{{redis_world.prefix}}}:session:{session.id}")
    redis_world.pass_time(sessions[0].idle_s + 1)
    assert await store.late(10) == []
    await store.load()
    assert await granted(waits[:2]) == ["a2", "a3"]
    assert not waits[2].done()
    with pytest.raises(SessionNotFound):
        await store.find(sessions[0].id)
    await hung_up(waits[2])


@pytest.mark.redis
async def test_an_id_that_is_claimed_again_after_its_key_was_deleted_counts_once(redis_world: RedisWorld) -> None:
    store = await redis_world.open()
    await add_ready(store, "w1", slots=8)
    session = await opened(store, of("alice", "a0", most=2))
    with redis_world.server.client() as client:
        client.delete(f"{{{redis_world.prefix}}}:session:{session.id}")
    again = await opened(store, of("alice", "a0", most=2))
    await store.claim(of("alice", "a1", most=2), wait_s=0)
    await refused(store, of("alice", "a2", most=2))
    await end(store, again)
    await store.claim(of("alice", "a2", most=2), wait_s=0)


@pytest.mark.redis
async def test_the_limits_hold_over_several_replicas(redis_world: RedisWorld) -> None:
    stores = [await redis_world.open(replica=replica) for replica in "ab"]
    await add_ready(stores[0], "w1", slots=30)
    most = 0

    async def play(n: int) -> None:
        nonlocal most
        session = await stores[n % 2].claim(of("alice", f"a{n}", most=4), wait_s=LONG_S)
        most = max(most, await owned(stores[1]))
        await end(stores[(n // 2) % 2], session)

    async with asyncio.timeout(HANG_S):
        await asyncio.gather(*(play(n) for n in range(40)))
    assert most == 4


# -- demand -----------------------------------------------------------------------------------------------------------


async def test_openings_beyond_the_limits_of_their_owners_are_no_demand(store: Store) -> None:
    await add_ready(store, "w1", slots=1)
    await opened(store, of("alice", "a0", most=3))
    tasks = [await queued(store, of("alice", f"a{n}", most=3), wait_s=LONG_S) for n in range(1, 5)]
    tasks += [await queued(store, of("bob", f"b{n}"), wait_s=LONG_S) for n in range(2)]
    load = await load_of(store)
    assert (load.waiting, load.over_limit, load.wanted) == (6, 2, 4)
    assert load.arrivals == 7, "the limit allows each of them alone"
    await hung_up(*tasks)


async def test_members_to_come_beyond_the_limit_of_their_owner_are_no_demand(store: Store) -> None:
    task = await queued(store, grouped(of("alice", "g0", here=3), 8), wait_s=LONG_S)
    other = await queued(store, grouped(of("bob", "b0", here=8), 4, "bobs"), wait_s=LONG_S)
    load = await load_of(store)
    assert (load.waiting, load.to_come, load.over_limit, load.wanted) == (2, 10, 5, 7)
    await hung_up(task, other)
    assert (await load_of(store)).over_limit == 0


async def test_an_opening_at_the_limit_of_its_owner_is_no_arrival(store: Store) -> None:
    await add_ready(store, "w1", slots=4)
    await opened(store, of("alice", "a0", most=1))
    for n in range(3):
        await refused(store, of("alice", f"a{n + 1}", most=1))
    load = await load_of(store)
    assert (load.arrivals, load.hits) == (1, 1)


# -- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait_s", [0.0, SHORT_S])
@pytest.mark.parametrize(
    ("most", "here", "message"),
    [
        (
            2,
            0,
            "the key 'alice' has 2 sessions, and its limit is 2: close sessions, or raise the limit (max_sessions)",
        ),
        (
            0,
            2,
            "the key 'alice' has 2 of its share of 2 slots of 'math': close sessions there, or raise the share "
            "(pool_share)",
        ),
        (3, 3, "no slot of math"),
    ],
)
async def test_the_error_names_the_limit_that_an_opening_waited_for(
    store: Store, most: int, here: int, message: str, wait_s: float
) -> None:
    await add_ready(store, "w1", slots=4)
    for n in range(2):
        await opened(store, of("alice", f"a{n}", most=most, here=here))
        await opened(store, of("bob", f"b{n}", most=2))
    assert (await refused(store, of("alice", "a2", most=most, here=here), wait_s=wait_s)).startswith(message)


async def test_the_error_of_a_group_names_the_limit_that_does_not_allow_all_of_it(store: Store) -> None:
    await add_ready(store, "w1", slots=4)
    await opened(store, of("alice", "a0", most=3))
    message = await refused(store, grouped(of("alice", "g0", most=3), 3))
    assert "the key 'alice' has 1 sessions, and its limit is 3, and this group needs 3:" in message


# -- pace -------------------------------------------------------------------------------------------------------------

ROUNDING_S = 0.01


async def booked(stores: Sequence[Store], count: int, *, per_s: float) -> tuple[list[float], float]:
    """Book *count* openings concurrently. Return their sorted waits, and the seconds by which Redis' clock may differ.

    Redis' clock runs meanwhile, so that a later caller waits a little less.
    """
    loop = asyncio.get_running_loop()
    start = loop.time()
    calls = [stores[n % len(stores)].pace(ALICE, per_s=per_s, within_s=LONG_S) for n in range(count)]
    waits = sorted(await asyncio.gather(*calls))
    return waits, loop.time() - start + ROUNDING_S


async def test_of_many_callers_no_more_start_in_any_window_than_the_pace_allows(store_world: World) -> None:
    store = await store_world.open()
    waits, elapsed_s = await booked([store], 400, per_s=5)
    assert waits[:5] == [0.0] * 5
    for n, wait_s in enumerate(waits):
        assert (n + 1 - 5) / 5 - elapsed_s <= wait_s <= max(0, n + 1 - 5) / 5
    store_world.pass_time(40)
    assert await store.pace(ALICE, per_s=5, within_s=LONG_S) <= 396 / 5 - 40 + ROUNDING_S
    store_world.pass_time(LONG_S)
    waits, _ = await booked([store], 6, per_s=5)
    assert waits[:5] == [0.0] * 5
    assert waits[5] <= 1 / 5


def stopwatch() -> Callable[[], float]:
    """Return a function that returns the seconds since this call, by which the store's clock may have gone on."""
    start = time.monotonic()
    return lambda: time.monotonic() - start + ROUNDING_S


async def test_a_slow_pace_lets_one_opening_start_at_a_time(store_world: World) -> None:
    store = await store_world.open()
    passed_s = stopwatch()
    waits = [await store.pace(ALICE, per_s=0.01, within_s=LONG_S) for _ in range(3)]
    assert waits[0] == 0.0
    assert 100 - passed_s() <= waits[1] <= 100
    assert 200 - passed_s() <= waits[2] <= 200
    assert await store.pace(Owner("bob"), per_s=0.01, within_s=0) == 0.0
    store_world.pass_time(300)
    assert await store.pace(ALICE, per_s=0.01, within_s=0) == 0.0


async def test_a_refused_opening_books_no_start_and_names_the_key_and_the_pace(store_world: World) -> None:
    store = await store_world.open()
    passed_s = stopwatch()
    for n in range(3):
        assert await store.pace(ALICE, per_s=0.01, within_s=250) <= 100 * n
    for _ in range(5):
        with pytest.raises(PoolExhausted) as caught:
            await store.pace(ALICE, per_s=0.01, within_s=250)
        assert 300 - passed_s() <= caught.value.retry_after_s <= 300
        assert "the key 'alice' may open 0.01 sessions a second" in str(caught.value)
    store_world.pass_time(100)
    wait_s = await store.pace(ALICE, per_s=0.01, within_s=250)
    assert 200 - passed_s() <= wait_s <= 200


@pytest.mark.redis
async def test_all_replicas_book_at_one_pace_and_the_key_lives_until_all_bookings_have_started(
    redis_world: RedisWorld,
) -> None:
    stores = [await redis_world.open(replica=replica) for replica in "ab"]
    passed_s = stopwatch()
    waits, elapsed_s = await booked(stores, 20, per_s=0.1)
    for n, wait_s in enumerate(waits):
        assert 10 * n - elapsed_s <= wait_s <= 10 * n
    with redis_world.server.client() as client:
        left_ms = client.pttl(f"{{{redis_world.prefix}}}:starts:alice")
    assert 200_000 - 1000 * passed_s() <= left_ms <= 200_000
    redis_world.pass_time(200)
    with redis_world.server.client() as client:
        assert not client.exists(f"{{{redis_world.prefix}}}:starts:alice")


@pytest.mark.redis
@pytest.mark.parametrize("jump_s", [-3600, 3600])
async def test_a_jump_of_redis_clock_delays_no_opening(redis_world: RedisWorld, jump_s: float) -> None:
    store = await redis_world.open()
    await store.lead("a", ttl_s=10)
    await store.pace(ALICE, per_s=0.1, within_s=LONG_S)
    redis_world.shift(jump_s)
    assert await store.pace(ALICE, per_s=0.1, within_s=LONG_S) <= 10
    await store.lead("a", ttl_s=10)
    assert await store.pace(ALICE, per_s=0.1, within_s=LONG_S) <= 20
