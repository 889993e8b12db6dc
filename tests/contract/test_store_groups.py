"""The store seam, groups: openings that start together or wait together, on memory and on Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest

from gateway.core.errors import EnvironmentUnavailable, PoolExhausted
from gateway.core.ids import Owner
from gateway.core.ports.store import Store
from gateway.core.session import CloseReason, Session, SessionRequest
from gateway.core.worker import EnvironmentLoad
from gateway.stores.retry_after import LAST_CALL_S, UNFILLED_S
from tests.contract.store_worlds import (
    CODING,
    MATH,
    RedisServer,
    RedisWorld,
    World,
    add_ready,
    end,
    held,
    opened,
    opening,
    queued,
    waiting,
)
from tests.deadlines import HANG_S

pytest_plugins = ["tests.contract.store_fixtures"]

LONG_S = 3600.0
TOGETHER_S = 100.0


def member(
    id: str, group: str = "g", *, size: int = 3, owner: str = "lab", together_s: float = TOGETHER_S
) -> SessionRequest:
    """Return a request of a member of a group."""
    wish = opening(f"{group}-{id}")
    return replace(wish, owner=Owner(owner), group=group, group_size=size, together_s=together_s)


def of(owner: str, id: str) -> SessionRequest:
    """Return a request of *owner* without a group."""
    return replace(opening(id), owner=Owner(owner))


async def load_of(store: Store) -> EnvironmentLoad:
    return (await store.load()).get(MATH, EnvironmentLoad())


async def at_once(store: Store, wish: SessionRequest) -> Session:
    """Return the session of *wish*, which may wait but finds a slot."""
    async with asyncio.timeout(HANG_S):
        return await store.claim(wish, wait_s=LONG_S)


async def is_refused(store: Store, wish: SessionRequest) -> bool:
    """Return True if there is no slot for *wish* without waiting."""
    try:
        await store.claim(wish, wait_s=0)
    except PoolExhausted:
        return True
    return False


async def granted(tasks: Sequence[asyncio.Task[Session]]) -> list[str]:
    """Return the sorted ids of the granted claims. All *tasks* must end; a grant may still be on its way."""
    await asyncio.wait(tasks, timeout=HANG_S)
    assert all(task.done() for task in tasks), "some still wait"
    return sorted(task.result().id for task in tasks)


async def hung_up(tasks: Sequence[asyncio.Task[Session]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# -- slots for all ----------------------------------------------------------------------------------------------------


async def test_the_first_member_of_a_group_reserves_slots_for_all_members(store: Store) -> None:
    await add_ready(store, "w1", slots=4)
    await store.claim(member("a"), wait_s=0)
    assert (await load_of(store)).to_come == 2
    await store.claim(opening("other"), wait_s=0)
    assert await is_refused(store, opening("another")), "two slots are kept"
    await store.claim(member("b"), wait_s=0)
    assert (await load_of(store)).to_come == 1
    await store.claim(member("c"), wait_s=0)
    load = await load_of(store)
    assert (load.to_come, load.workers[0].used) == (0, 4)
    assert (load.arrivals, load.hits) == (5, 4)


async def test_slots_of_several_workers_are_reserved_for_one_group(store: Store) -> None:
    for n in range(3):
        await add_ready(store, f"w{n}", slots=1)
    await store.claim(member("a"), wait_s=0)
    assert await is_refused(store, opening("other"))
    await store.claim(member("b"), wait_s=0)
    await store.claim(member("c"), wait_s=0)
    assert await held(store) == {"w0": 1, "w1": 1, "w2": 1}


async def test_a_group_that_fits_one_worker_stays_on_it_despite_claims_in_between(store: Store) -> None:
    await add_ready(store, "w1", slots=4)
    await add_ready(store, "w2", slots=4)
    await store.claim(opening("before"), wait_s=0)
    group = [await store.claim(member("a"), wait_s=0)]
    for n in range(3):
        await store.claim(opening(f"between-{n}"), wait_s=0)
    group += [await store.claim(member(id), wait_s=0) for id in "bc"]
    await store.claim(opening("after"), wait_s=0)

    assert [session.worker for session in group] == ["w2"] * 3
    assert await held(store) == {"w1": 4, "w2": 4}


async def test_a_group_that_finds_too_few_slots_waits_and_later_claims_do_not_take_them(store: Store) -> None:
    await add_ready(store, "w1", slots=3)
    holder = await opened(store, opening("holder"))
    a = await queued(store, member("a"), wait_s=LONG_S)
    assert (await load_of(store)).to_come == 2
    b = await queued(store, member("b"), wait_s=LONG_S)
    assert (await load_of(store)).to_come == 1
    other = await queued(store, of("b", "other"), wait_s=LONG_S)
    await end(store, holder)
    assert await granted([a, b]) == ["g-a", "g-b"]
    assert not other.done()
    await store.claim(member("c"), wait_s=0)
    assert await held(store) == {"w1": 3}
    await end(store, await store.find(a.result().id))
    assert await granted([other]) == ["other"]


async def test_a_waiting_group_counts_with_all_its_members(store: Store) -> None:
    a = await queued(store, member("a", size=8), wait_s=LONG_S)
    load = await load_of(store)
    assert (load.waiting, load.to_come, load.wanted) == (1, 7, 8)
    await add_ready(store, "w1", slots=4)
    assert not a.done()
    await add_ready(store, "w2", slots=4)
    assert await granted([a]) == ["g-a"]
    load = await load_of(store)
    assert (load.waiting, load.to_come) == (0, 7)


async def test_a_member_that_does_not_wait_is_refused_if_there_are_too_few_slots_for_its_group(store: Store) -> None:
    await add_ready(store, "w1", slots=2)
    assert await is_refused(store, member("a"))
    load = await load_of(store)
    assert (load.to_come, load.workers[0].used) == (0, 0)


async def test_a_worker_has_room_for_a_group_only_up_to_its_remaining_uses(store: Store) -> None:
    await add_ready(store, "w1", slots=4, max_uses=2)
    a = await queued(store, member("a"), wait_s=LONG_S)
    await add_ready(store, "w2", slots=1)
    assert await granted([a]) == ["g-a"]
    await store.claim(member("b"), wait_s=0)
    await store.claim(member("c"), wait_s=0)
    assert await held(store) == {"w1": 2, "w2": 1}


async def test_concurrent_groups_start_one_after_the_other(store: Store) -> None:
    await add_ready(store, "w1", slots=4)
    first = [await store.claim(member("a", "g0"), wait_s=0)]
    tasks = [
        await queued(store, member("a", "g1"), wait_s=LONG_S),
        await queued(store, member("a", "g2"), wait_s=LONG_S),
    ]
    first += [await store.claim(member(id, "g0"), wait_s=0) for id in "bc"]
    tasks += [await queued(store, member(id, group), wait_s=LONG_S) for id in "bc" for group in ("g1", "g2")]
    assert not any(task.done() for task in tasks)
    for session in first:
        await end(store, session)
    then, last = tasks[::2], tasks[1::2]
    assert await granted(then) == ["g1-a", "g1-b", "g1-c"]
    assert not any(task.done() for task in last)
    for task in then:
        await end(store, task.result())
    assert await granted(last) == ["g2-a", "g2-b", "g2-c"]


async def test_claims_beyond_a_groups_size_are_served_separately(store: Store) -> None:
    await add_ready(store, "w1", slots=4)
    for id in "abcd":
        await store.claim(member(id), wait_s=0)
    assert (await load_of(store)).to_come == 0
    e = await queued(store, member("e"), wait_s=LONG_S)
    assert (await load_of(store)).to_come == 0
    await end(store, await store.find(member("a").id))
    assert await granted([e]) == ["g-e"]


# -- turns ------------------------------------------------------------------------------------------------------------


async def test_each_slot_of_a_group_is_a_turn_of_its_owner(store: Store) -> None:
    await add_ready(store, "w1", slots=3)
    holders = [await opened(store, opening(f"holder{n}")) for n in range(3)]
    of_a = [await queued(store, member(id, owner="a"), wait_s=LONG_S) for id in "abc"]
    more = await queued(store, replace(opening("more"), owner=Owner("a")), wait_s=LONG_S)
    of_b = [await queued(store, replace(opening(f"b{n}"), owner=Owner("b")), wait_s=LONG_S) for n in range(3)]
    for holder in holders:
        await end(store, holder)
    assert await granted(of_a) == ["g-a", "g-b", "g-c"]
    for task, served in zip(of_a, of_b, strict=True):
        assert not served.done()
        await end(store, task.result())
        await granted([served])
    assert not more.done(), "its owner has had three turns"
    await end(store, of_b[0].result())
    assert await granted([more]) == ["more"]


async def test_claims_behind_a_group_are_served_once_the_group_stops_waiting(store: Store) -> None:
    await add_ready(store, "w1", slots=2)
    group = [await queued(store, member("a"), wait_s=LONG_S)]
    other = await queued(store, opening("other"), wait_s=LONG_S)
    another = await queued(store, opening("another"), wait_s=LONG_S)
    assert not other.done()
    await hung_up(group)
    assert await granted([other, another]) == ["another", "other"]
    assert (await load_of(store)).to_come == 0


async def test_others_take_free_slots_until_half_of_a_group_has_come(store: Store) -> None:
    await add_ready(store, "w1", slots=5)
    await opened(store, of("alice", "alices"))
    group = [await queued(store, member("0", size=5, owner="alice"), wait_s=LONG_S)]
    assert (await at_once(store, of("bob", "b0"))).id == "b0", "one of five has come"
    group.append(await queued(store, member("1", size=5, owner="alice"), wait_s=LONG_S))
    assert (await at_once(store, of("bob", "b1"))).id == "b1", "two of five have come"
    group.append(await queued(store, member("2", size=5, owner="alice"), wait_s=LONG_S))
    b2 = await queued(store, of("bob", "b2"), wait_s=LONG_S)
    assert await held(store) == {"w1": 3}, "two slots are kept for the three that wait"
    assert not b2.done()
    await hung_up([*group, b2])


async def test_groups_that_never_come_hold_up_no_other_key(store: Store) -> None:
    await add_ready(store, "w1", slots=4)
    await opened(store, of("alice", "alices"))
    groups = []
    for number in range(8):
        groups.append(await queued(store, member("a", f"g{number}", size=4, owner="alice"), wait_s=LONG_S))
        for bobs in range(3):
            session = await at_once(store, of("bob", f"b{number}-{bobs}"))
            await store.opened(session.id, session.lease, handle="")
        assert await held(store) == {"w1": 4}
        for bobs in range(3):
            await end(store, await store.find(of("bob", f"b{number}-{bobs}").id))
    assert not any(task.done() for task in groups)
    await hung_up(groups)


async def test_members_of_a_group_that_parts_and_did_not_come_use_turns_of_its_owner(
    store_world: World, store: Store
) -> None:
    await add_ready(store, "w1", slots=1)
    holder = await opened(store, opening("holder", idle_s=2 * LONG_S))
    tasks = {"g-a": await queued(store, member("a", size=4, owner="alice"), wait_s=LONG_S)}
    for id in ("b0", "b1", "b2", "b3", "b4"):
        tasks[id] = await queued(store, of("bob", id), wait_s=LONG_S)
    served = [holder, *await _served(store, tasks, holder, 1)]
    store_world.pass_time(TOGETHER_S)
    served += await _served(store, tasks, served[-1], 1)
    tasks["more"] = await queued(store, of("alice", "more"), wait_s=LONG_S)
    served += await _served(store, tasks, served[-1], 5)
    order = [session.id for session in served[1:]]

    assert order == ["b0", "g-a", "b1", "b2", "b3", "b4", "more"], "four turns for a group of four"


async def test_slots_reserved_for_members_use_turns_of_their_owner(store: Store) -> None:
    await add_ready(store, "w1", slots=3)
    holders = [await opened(store, opening(f"holder{n}")) for n in range(3)]
    group = [await queued(store, member(id, owner="alice"), wait_s=LONG_S) for id in "ab"]
    tasks = {"more": await queued(store, of("alice", "more"), wait_s=LONG_S)}
    for id in ("b0", "b1", "b2"):
        tasks[id] = await queued(store, of("bob", id), wait_s=LONG_S)
    for holder in holders:
        await end(store, holder)
    assert await granted(group) == ["g-a", "g-b"]
    await store.claim(member("c", owner="alice"), wait_s=0)

    order = [session.id for session in await _served(store, tasks, group[0].result(), 4)]
    assert order == ["b0", "b1", "b2", "more"]


async def _served(store: Store, tasks: dict[str, asyncio.Task[Session]], before: Session, count: int) -> list[Session]:
    """End *before*, and return the next *count* sessions that get its slot one after the other."""
    order = [before]
    while len(order) <= count:
        await end(store, order[-1])
        done, _ = await asyncio.wait(tasks.values(), timeout=HANG_S, return_when=asyncio.FIRST_COMPLETED)
        [session] = [task.result() for task in done]
        del tasks[session.id]
        order.append(session)
    return order[1:]


async def test_a_member_with_a_short_wait_takes_the_available_slots(store: Store) -> None:
    await add_ready(store, "w1", slots=2)
    assert (await store.claim(member("a"), wait_s=LAST_CALL_S / 2)).id == "g-a"
    assert (await load_of(store)).to_come == 0


# -- time -------------------------------------------------------------------------------------------------------------


async def test_slots_reserved_for_absent_members_are_released_after_a_time(store_world: World, store: Store) -> None:
    await add_ready(store, "w1", slots=3)
    await store.claim(member("a"), wait_s=0)
    other = await queued(store, opening("other"), wait_s=LONG_S)
    store_world.pass_time(TOGETHER_S - 50)
    assert (await load_of(store)).to_come == 2
    assert not other.done()
    store_world.pass_time(50)
    assert (await load_of(store)).to_come == 0
    assert await granted([other]) == ["other"]
    assert (await store.claim(member("b"), wait_s=0)).id == "g-b", "who comes late is by itself"
    assert (await load_of(store)).to_come == 0


async def test_a_group_that_waited_long_enough_starts_with_the_available_slots(
    store_world: World, store: Store
) -> None:
    await add_ready(store, "w1", slots=2)
    tasks = [await queued(store, member(id), wait_s=LONG_S) for id in "abc"]
    store_world.pass_time(TOGETHER_S - 50)
    assert (await load_of(store)).waiting == 3
    store_world.pass_time(50)
    assert (await load_of(store)).waiting == 1
    assert await granted(tasks[:2]) == ["g-a", "g-b"]
    await end(store, tasks[0].result())
    assert await granted(tasks[2:]) == ["g-c"], "the others do not wait for each other again"


async def test_time_without_a_free_slot_does_not_count_as_waiting_for_more_slots(
    store_world: World, store: Store
) -> None:
    await add_ready(store, "w1", slots=2)
    holders = [await opened(store, opening(f"holder{n}", idle_s=2 * LONG_S)) for n in range(2)]
    tasks = [await queued(store, member(id, size=2), wait_s=LONG_S) for id in "ab"]
    store_world.pass_time(2 * TOGETHER_S)
    assert (await load_of(store)).waiting == 2
    await end(store, holders[0])
    assert (await load_of(store)).waiting == 2, "it has just begun to wait for the other slot"
    await end(store, holders[1])
    assert await granted(tasks) == ["g-a", "g-b"]


async def test_a_group_takes_the_available_slots_before_its_wait_ends(store_world: World, store: Store) -> None:
    await add_ready(store, "w1", slots=2)
    tasks = [await queued(store, member(id, together_s=LONG_S), wait_s=300.0) for id in "abc"]
    store_world.pass_time(300.0 - LAST_CALL_S - 50)
    assert (await load_of(store)).waiting == 3
    store_world.pass_time(52)  # Redis adds a second to a claim's wait
    assert (await load_of(store)).waiting == 1
    assert await granted(tasks[:2]) == ["g-a", "g-b"]
    await hung_up(tasks[2:])


# -- groups of which less than half came ------------------------------------------------------------------------------


async def parted(world: World, store: Store) -> None:
    """Let a group of alice, of which one member came, wait for more slots than there are until its time is over."""
    task = await queued(store, member("a", "u", size=4, owner="alice"), wait_s=LONG_S)
    world.pass_time(TOGETHER_S)
    await store.load()
    await end(store, await task)


async def lapsed(world: World, store: Store) -> None:
    """Reserve slots for a group of alice, of which one member comes, until the time is over."""
    session = await store.claim(member("a", "u", size=3, owner="alice"), wait_s=0)
    world.pass_time(TOGETHER_S)
    await store.load()
    await end(store, session)


async def abandoned(world: World, store: Store) -> None:
    """Let a group of alice keep slots from others, and hang up before its time is over."""
    await hung_up([await queued(store, member("a", "u", size=4, owner="alice"), wait_s=LONG_S)])
    await store.load()


async def expired(world: World, store: Store) -> None:
    """Let the wait of a group of alice end while no slot is free, after it kept slots from others."""
    wish = member("a", "u", size=4, owner="alice", together_s=LONG_S)
    task = await queued(store, wish, wait_s=100.0)
    wishes = [opening(f"holder{n}", idle_s=LONG_S) for n in range(3)]
    holders = [await at_once(store, replace(wish, setup_s=LONG_S)) for wish in wishes]
    world.pass_time(102)
    await store.load()
    await asyncio.gather(task, return_exceptions=True)
    assert isinstance(task.exception(), PoolExhausted)
    for holder in holders:
        await end(store, holder)


@pytest.mark.parametrize("unfilled", [parted, lapsed, abandoned, expired])
async def test_a_key_whose_group_kept_slots_and_hardly_came_starts_no_groups_for_a_while(
    store_world: World, store: Store, unfilled: Callable[[World, Store], Awaitable[None]]
) -> None:
    await add_ready(store, "w1", slots=3)
    await unfilled(store_world, store)

    single = await store.claim(member("a", "v", owner="alice"), wait_s=0)
    assert (await load_of(store)).to_come == 0, "nothing is kept"
    await end(store, single)
    other = await store.claim(member("a", "w", owner="bob"), wait_s=0)
    assert (await load_of(store)).to_come == 2, "another key's group is one"
    await end(store, other)
    for id in "bc":
        await end(store, await store.claim(member(id, "w", owner="bob"), wait_s=0))
    store_world.pass_time(UNFILLED_S)
    await store.claim(member("a", "x", owner="alice"), wait_s=0)
    assert (await load_of(store)).to_come == 2, "it may start groups again"


@pytest.mark.parametrize("came", ["ab", "abcd"])
async def test_a_key_keeps_its_privilege_if_half_of_its_group_came(store_world: World, store: Store, came: str) -> None:
    await add_ready(store, "w1", slots=3)
    tasks = [await queued(store, member(id, "u", size=4, owner="alice"), wait_s=LONG_S) for id in came]
    await hung_up(tasks)
    tasks = [await queued(store, member(id, "v", size=4, owner="alice"), wait_s=LONG_S) for id in "abcd"]
    store_world.pass_time(TOGETHER_S)
    await store.load()
    assert await granted(tasks[:3]) == ["v-a", "v-b", "v-c"]
    for task in tasks:
        await end(store, await task)

    await store.claim(member("a", "w", owner="alice"), wait_s=0)
    assert (await load_of(store)).to_come == 2


async def test_a_member_that_never_waits_and_openings_that_fail_cost_no_privilege(store: Store) -> None:
    await add_ready(store, "w1", slots=3)
    short = await store.claim(member("a", "u", size=4, owner="alice"), wait_s=LAST_CALL_S / 2)
    await end(store, short)
    task = await queued(store, member("a", "v", size=4, owner="alice"), wait_s=LONG_S)
    await store.fail_waiting(MATH, "no image")
    await asyncio.gather(task, return_exceptions=True)

    await store.claim(member("a", "w", owner="alice"), wait_s=0)
    assert (await load_of(store)).to_come == 2


# -- changes ----------------------------------------------------------------------------------------------------------


async def test_a_released_place_of_a_group_goes_to_another_member(store: Store) -> None:
    await add_ready(store, "w1", slots=3)
    a = await store.claim(member("a"), wait_s=0)
    await store.begin_close(a.id, CloseReason.OPEN_FAILED)
    await store.release(a.id, a.lease)
    for id in "bcd":
        await store.claim(member(id), wait_s=0)
    assert await held(store) == {"w1": 3}
    assert (await load_of(store)).to_come == 0


async def test_a_transferred_slot_counts_for_its_group(store: Store) -> None:
    await add_ready(store, "w1", slots=3)
    former = await opened(store, opening("former"))
    a = await queued(store, member("a"), wait_s=LONG_S)
    assert await store.begin_close(former.id, CloseReason.DELETED) is not None
    b = await store.hand_over(former.id, former.lease, member("b"))
    assert b is not None
    assert await granted([a]) == ["g-a"], "two slots are enough for those that have none"
    assert (await load_of(store)).to_come == 1
    await store.claim(member("c"), wait_s=0)
    assert (await load_of(store)).to_come == 0


async def test_the_reserved_slot_of_a_member_that_gets_a_transferred_one_is_released(store: Store) -> None:
    await add_ready(store, "w1", slots=4)
    former = await opened(store, opening("former"))
    await store.claim(member("a"), wait_s=0)
    other = await queued(store, opening("other"), wait_s=LONG_S)
    assert await store.begin_close(former.id, CloseReason.DELETED) is not None
    assert await store.hand_over(former.id, former.lease, member("b")) is not None
    assert await granted([other]) == ["other"]
    await store.claim(member("c"), wait_s=0)


async def test_a_group_whose_reserved_slots_went_with_their_worker_waits_again(store: Store) -> None:
    await add_ready(store, "w1", slots=3)
    await store.claim(member("a"), wait_s=0)
    await store.remove_worker((await store.find(member("a").id)).worker, CloseReason.WORKER_LOST)
    b = await queued(store, member("b"), wait_s=LONG_S)
    load = await load_of(store)
    assert (load.waiting, load.to_come) == (1, 1)
    await add_ready(store, "w2", slots=1)
    assert not b.done()
    await add_ready(store, "w3", slots=1)
    assert await granted([b]) == ["g-b"]
    assert (await load_of(store)).to_come == 1


async def test_a_draining_worker_loses_the_slots_reserved_on_it(store: Store) -> None:
    await add_ready(store, "w1", slots=3)
    a = await store.claim(member("a"), wait_s=0)
    await store.drain_worker(a.worker)
    other = await queued(store, opening("other"), wait_s=LONG_S)
    await add_ready(store, "w2", slots=2)
    assert not other.done(), "both are kept"
    await store.claim(member("b"), wait_s=0)
    await store.claim(member("c"), wait_s=0)
    assert await held(store) == {"w1": 1, "w2": 2}
    await hung_up([other])


async def test_all_waiting_members_of_a_group_fail_with_their_environment(store: Store) -> None:
    tasks = [await queued(store, member(id), wait_s=LONG_S) for id in "ab"]
    assert await store.fail_waiting(MATH, "no image") == 2
    for task in tasks:
        with pytest.raises(EnvironmentUnavailable):
            await task
    load = await load_of(store)
    assert (load.waiting, load.to_come) == (0, 0)


async def test_groups_of_another_environment_take_no_slots(store: Store) -> None:
    await add_ready(store, "w1", slots=1)
    task = await queued(store, replace(member("a"), environment=CODING), wait_s=LONG_S)
    await store.claim(opening("other"), wait_s=0)
    assert await waiting(store, CODING) == 1
    await hung_up([task])


# -- replicas ---------------------------------------------------------------------------------------------------------


@pytest.mark.redis
async def test_a_group_spans_all_replicas(redis_world: RedisWorld) -> None:
    one, two = await redis_world.open(replica="one"), await redis_world.open(replica="two")
    await add_ready(one, "w1", slots=3)
    await one.claim(member("a"), wait_s=0)
    assert await is_refused(two, opening("other"))
    await two.claim(member("b"), wait_s=0)
    await one.claim(member("c"), wait_s=0)
    waits = [await queued(one, member("a", "h"), wait_s=LONG_S), await queued(two, member("b", "h"), wait_s=LONG_S)]
    for id in "abc":
        await end(one, await one.find(member(id).id))
    assert await granted(waits) == ["h-a", "h-b"]


@pytest.mark.redis
async def test_a_member_of_a_dead_replica_gets_no_slot_and_its_place_stays_reserved(redis_world: RedisWorld) -> None:
    one, two = await redis_world.open(replica="one"), await redis_world.open(replica="two")
    await one.lead("one", ttl_s=10)
    await two.lead("two", ttl_s=10)
    await add_ready(one, "w1", slots=3)
    holder = await opened(one, opening("holder"))
    here = await queued(one, member("a"), wait_s=LONG_S)
    gone = await queued(two, member("b"), wait_s=LONG_S)
    redis_world.fall_silent("two")

    await end(one, holder)

    assert await granted([here]) == ["g-a"]
    load = await load_of(one)
    assert (load.waiting, load.to_come, load.workers[0].used) == (0, 2, 1)
    await one.claim(member("c"), wait_s=0)
    await hung_up([gone])
    redis_world.pass_time(TOGETHER_S)
    assert (await load_of(one)).to_come == 0


@pytest.mark.redis
async def test_an_ended_group_leaves_only_keys_that_expire(redis_world: RedisWorld, redis_server: RedisServer) -> None:
    store = await redis_world.open()
    await add_ready(store, "w1", slots=3)
    with redis_server.client() as client:
        before = redis_world.keys(client)
        tasks = [await queued(store, member(id, "h", size=5), wait_s=LONG_S) for id in "ab"]
        await hung_up(tasks)
        sessions = [await store.claim(member(id), wait_s=0) for id in "ab"]
        redis_world.pass_time(TOGETHER_S)
        await store.load()
        for session in sessions:
            await end(store, session)
        left = [key for key in redis_world.keys(client) if key not in before]
        kinds = {key.split(":")[1] for key in left}
        assert kinds <= {"group", "unfilled", "counts", "number"}, left
        assert all(client.ttl(key) > 0 for key in left if ":group:" in key or ":unfilled:" in key)
