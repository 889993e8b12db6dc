"""The store seam, admission: turns of owners, times to retry, counts, and the circuit breaker, on both stores."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.errors import EnvironmentUnavailable, NotLeading, PoolExhausted, SessionExists
from gateway.core.ids import Owner, WorkerId
from gateway.core.ports.store import Store
from gateway.core.session import CloseReason, Session, SessionRequest
from gateway.core.worker import EnvironmentLoad
from gateway.stores.retry_after import MESSAGE_BYTES
from tests.contract.store_worlds import (
    CODING,
    MATH,
    RedisWorld,
    World,
    add_ready,
    end,
    opened,
    opening,
    queued,
    waiting,
)
from tests.contract.store_worlds import worker as starting
from tests.deadlines import HANG_S

pytest_plugins = ["tests.contract.store_fixtures"]

LONG_S = 3600.0
"""Seconds of a wait that is longer than any time that a test lets pass."""
SHORT_S = 0.02
"""Seconds of a wait that must run out."""
MEANWHILE_S = 20.0
"""Seconds by which an estimate may be too late: Redis' clock runs during a test."""


def of(owner: str, id: str) -> SessionRequest:
    """Return a request of *owner*."""
    return replace(opening(id), owner=Owner(owner))


async def line(store: Store, owner: str, count: int, *, wait_s: float = LONG_S) -> list[asyncio.Task[Session]]:
    """Return waiting claims of one owner, ``<owner>0`` first."""
    return [await queued(store, of(owner, f"{owner}{n}"), wait_s=wait_s) for n in range(count)]


async def held_by_one(store: Store) -> Session:
    """Hold the only slot, and return its session."""
    await add_ready(store, "w1")
    return await opened(store, of("holder", "holder"))


async def served(store: Store, holder: Session, tasks: Sequence[asyncio.Task[Session]]) -> list[str]:
    """Free the only slot repeatedly until none of *tasks* waits. Return the ids in the order of service."""
    order: list[str] = []
    left = set(tasks)
    while left:
        await end(store, holder)
        done, left = await asyncio.wait(left, timeout=HANG_S, return_when=asyncio.FIRST_COMPLETED)
        (task,) = done
        holder = task.result()
        order.append(holder.id)
    await end(store, holder)
    return order


async def told(claim: asyncio.Task[Session]) -> Session:
    """Return the result of a claim that must be notified, without its replica's own polling."""
    await asyncio.wait({claim}, timeout=HANG_S)
    if not claim.done():
        await hung_up([claim])
        raise AssertionError("nobody told it")
    return claim.result()


async def hung_up(tasks: Sequence[asyncio.Task[Session]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


async def load_of(store: Store) -> EnvironmentLoad:
    return (await store.load()).get(MATH, EnvironmentLoad())


async def error_of(claim: Coroutine[Any, Any, Session]) -> BaseException | None:
    """Return the error of a claim, or None. The claim must not wait."""
    task = asyncio.ensure_future(claim)
    await asyncio.wait({task}, timeout=HANG_S)
    if not task.done():
        await hung_up([task])
        raise AssertionError("the claim waits")
    return task.exception()


async def refused(store: Store, wish: SessionRequest, *, wait_s: float = 0.0) -> float:
    """Return the seconds to retry of a claim that finds no slot."""
    error = await error_of(store.claim(wish, wait_s=wait_s))
    assert isinstance(error, PoolExhausted)
    return error.retry_after_s


async def broken(store: Store, wish: SessionRequest) -> EnvironmentUnavailable:
    """Return the error of a claim that may wait, but finds the breaker open."""
    error = await error_of(store.claim(wish, wait_s=LONG_S))
    assert isinstance(error, EnvironmentUnavailable)
    return error


# -- turns ------------------------------------------------------------------------------------------------------


async def test_owners_with_a_hundred_ten_and_one_waiting_claims_take_turns(store: Store) -> None:
    holder = await held_by_one(store)
    tasks = await line(store, "a", 100) + await line(store, "b", 10) + await line(store, "c", 1)

    order = await served(store, holder, tasks)

    turns = ["a0", "b0", "c0"] + [id for n in range(1, 10) for id in (f"a{n}", f"b{n}")]
    assert order == turns + [f"a{n}" for n in range(10, 100)]


async def test_a_claim_behind_another_owners_many_is_served_next_but_one(store: Store) -> None:
    holder = await held_by_one(store)
    tasks = await line(store, "a", 20)
    for task in tasks[:5]:
        await end(store, holder)
        holder = await task

    late = await queued(store, of("b", "late"))

    order = await served(store, holder, [*tasks[5:], late])
    assert order[:3] == ["a5", "late", "a6"]


async def test_owners_that_claim_again_after_each_service_do_not_starve_another(store: Store) -> None:
    holder = await held_by_one(store)
    patient = await line(store, "a", 4)
    tasks = {owner: await queued(store, of(owner, f"{owner}-0")) for owner in ("d", "e")}
    order = []

    for n in range(1, 10):
        await end(store, holder)
        done, _ = await asyncio.wait([*patient, *tasks.values()], timeout=HANG_S, return_when=asyncio.FIRST_COMPLETED)
        (task,) = done
        holder = task.result()
        order.append(holder.owner)
        if task in patient:
            patient.remove(task)
        else:
            tasks[holder.owner] = await queued(store, of(holder.owner, f"{holder.owner}-{n}"))

    assert order == ["a", "d", "e"] * 3
    await hung_up([*patient, *tasks.values()])


async def test_an_owner_whose_first_claim_hangs_up_keeps_its_turn(store: Store) -> None:
    holder = await held_by_one(store)
    a, b = await line(store, "a", 3), await line(store, "b", 1)

    await hung_up(a[:1])

    assert await served(store, holder, [*a[1:], *b]) == ["a1", "b0", "a2"]


async def test_claims_that_hung_up_count_as_no_turns_of_their_owner(store: Store) -> None:
    holder = await held_by_one(store)
    a, b = await line(store, "a", 20), await line(store, "b", 3)

    await hung_up(a[:17])

    assert await served(store, holder, [*a[17:], *b]) in (
        # Within a round, the owner with the earliest claim is first.
        ["b0", "a17", "b1", "a18", "b2", "a19"],
        ["a17", "b0", "a18", "b1", "a19", "b2"],
    )


async def test_an_owner_whose_first_claim_waited_too_long_keeps_its_turn(store_world: World) -> None:
    store = await store_world.open()
    holder = await held_by_one(store)
    late = await line(store, "a", 2, wait_s=30)
    last = await queued(store, of("a", "a2"), wait_s=LONG_S)
    b = await line(store, "b", 2)

    store_world.pass_time(40)

    # The store checks none of them before the slot is free.
    assert await served(store, holder, [last, *b]) == ["a2", "b0", "b1"]
    outcomes = await asyncio.gather(*late, return_exceptions=True)
    assert all(isinstance(outcome, PoolExhausted) for outcome in outcomes)


async def test_turns_start_again_when_the_queue_is_empty(store: Store) -> None:
    holder = await held_by_one(store)
    a = await line(store, "a", 3)
    for task in a:
        await end(store, holder)
        holder = await task

    first, second = await queued(store, of("a", "again")), await queued(store, of("b", "other"))

    assert await served(store, holder, [first, second]) == ["again", "other"]


async def test_turns_in_one_environment_do_not_count_in_another(store: Store) -> None:
    await add_ready(store, "w1", environment=MATH)
    await add_ready(store, "w2", environment=CODING)
    math = await opened(store, of("holder", "h1"))
    coding = await opened(store, replace(of("holder", "h2"), environment=CODING))
    a = await line(store, "a", 3)
    for task in a[:2]:
        await end(store, math)
        math = await task
    elsewhere = [await queued(store, replace(of(owner, f"{owner}-coding"), environment=CODING)) for owner in ("a", "b")]

    assert await served(store, coding, elsewhere) == ["a-coding", "b-coding"]
    assert await served(store, math, a[2:]) == ["a2"]


async def test_an_owner_with_any_name_has_a_separate_line(store: Store) -> None:
    holder = await held_by_one(store)
    names = ["", ":", "math:", "0000000000000001", "a b\n", "é\udc80"]
    tasks = [
        await queued(store, replace(opening(f"s{n}-{turn}"), owner=Owner(name)))
        for n, name in enumerate(names)
        for turn in range(2)
    ]

    order = await served(store, holder, tasks)

    assert order == [f"s{n}-{turn}" for turn in range(2) for n in range(len(names))]


@pytest.mark.redis
async def test_owners_take_turns_over_all_replicas(redis_world: RedisWorld) -> None:
    here, there = await redis_world.open(replica="a"), await redis_world.open(replica="b")
    holder = await held_by_one(here)
    tasks = await line(here, "a", 4) + await line(there, "b", 2) + await line(there, "a-too", 1)

    assert await served(there, holder, tasks) == ["a0", "b0", "a-too0", "a1", "b1", "a2", "a3"]


# -- a bounded queue --------------------------------------------------------------------------------------------


async def test_a_claim_is_notified_of_a_slot_or_a_refusal_without_polling(
    redis_world: RedisWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.stores.redis.claims.POLL_S", LONG_S)  # polling would find a missed notification
    a, b = await redis_world.open(replica="a"), await redis_world.open(replica="b")
    holder = await held_by_one(a)
    here, there, fails = [await queued(store, of("x", id)) for store, id in ((a, "1"), (b, "2"), (b, "3"))]

    await end(a, holder)
    first = await told(here)
    await end(b, first)
    second = await told(there)
    await a.fail_waiting(MATH, "no more")

    with pytest.raises(EnvironmentUnavailable):
        await told(fails)
    await end(a, second)


async def two_that_lead(world: RedisWorld) -> tuple[Store, Store]:
    """Return replicas that the store knows as alive."""
    a, b = await world.open(replica="a"), await world.open(replica="b")
    for name, store in (("a", a), ("b", b)):
        await store.lead(name, ttl_s=60)
    return a, b


async def test_no_slot_goes_to_a_waiting_claim_of_a_dead_replica(
    redis_world: RedisWorld,
) -> None:
    a, b = await two_that_lead(redis_world)
    holder = await held_by_one(a)
    gone, here = await queued(b, of("x", "gone")), await queued(a, of("x", "here"))
    redis_world.fall_silent("b")

    await end(a, holder)

    assert (await told(here)).id == "here"
    await hung_up([gone])


async def test_a_session_that_a_replica_was_opening_is_due_once_the_replica_is_dead(redis_world: RedisWorld) -> None:
    a, b = await two_that_lead(redis_world)
    await add_ready(a, "w1")
    await b.claim(of("x", "doomed"), wait_s=0)
    await a.lead("a", ttl_s=60)
    before = await a.due(10)
    redis_world.fall_silent("b")

    await a.lead("a", ttl_s=60)

    (due,) = await a.due(10)
    assert before == []
    assert (due.id, due.reason) == ("doomed", CloseReason.OPEN_FAILED)


async def test_an_owner_without_waiting_claims_finds_one_place_in_a_full_queue(store_world: World) -> None:
    store = await store_world.open(queue_max=3)
    await held_by_one(store)
    tasks = await line(store, "a", 3)

    await refused(store, of("a", "a3"), wait_s=LONG_S)
    for owner in ("b", "c", "d"):
        tasks += await line(store, owner, 1)
        await refused(store, of(owner, f"{owner}1"), wait_s=LONG_S)

    assert await waiting(store) == 6
    await refused(store, of("e", "e0"), wait_s=LONG_S)
    await hung_up(tasks)
    assert await waiting(store) == 0


# -- the time to retry ------------------------------------------------------------------------------------------


async def test_the_time_to_retry_is_unknown_before_any_claim_waited_for_a_slot(store_world: World) -> None:
    store = await store_world.open()
    await add_ready(store, "w1", slots=3)
    for n in range(3):
        await opened(store, opening(f"s{n}"))
        store_world.pass_time(100)

    # The time between claims that find free slots is no measure.
    assert await refused(store, opening("s3")) == 0
    assert await refused(store, opening("s3"), wait_s=SHORT_S) == 0


async def paced(world: World, store: Store, *, every_s: float) -> list[asyncio.Task[Session]]:
    """Serve claims of owner a with the only slot every *every_s* seconds. Return the two that still wait."""
    holder = await held_by_one(store)
    tasks = await line(store, "a", 2)
    for n in range(2, 5):
        world.pass_time(every_s)
        await end(store, holder)
        holder = await tasks.pop(0)
        tasks.append(await queued(store, of("a", f"a{n}"), wait_s=LONG_S))
    return tasks


async def test_the_time_to_retry_is_the_place_times_the_time_between_slots(store_world: World) -> None:
    store = await store_world.open(queue_max=2)
    tasks = await paced(store_world, store, every_s=50)

    for wait_s in (0, LONG_S):
        told = await refused(store, of("a", "a9"), wait_s=wait_s)
        assert 3 * 50 - 1 <= told < 3 * 50 + MEANWHILE_S
    # Another owner is served next but one.
    assert 2 * 50 - 1 <= await refused(store, of("b", "b0")) < 2 * 50 + MEANWHILE_S
    # The place is at most one behind the waiting claims.
    tasks += await line(store, "b", 1)
    assert 4 * 50 - 1 <= await refused(store, of("a", "a9")) < 4 * 50 + MEANWHILE_S
    await hung_up(tasks)
    assert 50 - 1 <= await refused(store, of("a", "a9")) < 50 + MEANWHILE_S


async def test_the_time_to_retry_after_a_wait_counts_from_the_claims_place(store_world: World) -> None:
    store = await store_world.open(queue_max=2)
    tasks = await paced(store_world, store, every_s=50)

    assert 2 * 50 - 1 <= await refused(store, of("b", "b0"), wait_s=SHORT_S) < 2 * 50 + MEANWHILE_S
    await hung_up(tasks)
    assert 50 - 1 <= await refused(store, of("a", "a9"), wait_s=SHORT_S) < 50 + MEANWHILE_S


async def test_slots_that_become_free_together_share_the_time_since_the_one_before(store_world: World) -> None:
    store = await store_world.open()
    await store.add_worker(starting("w1", slots=4))
    tasks = await line(store, "a", 4)

    store_world.pass_time(200)
    await store.worker_ready(WorkerId("w1"), "unix:/run/w1.sock")

    await asyncio.gather(*tasks)
    assert 50 - 1 <= await refused(store, opening("next")) < 50 + MEANWHILE_S


async def test_the_time_to_retry_is_between_a_second_and_five_minutes(store_world: World) -> None:
    store = await store_world.open()
    await add_ready(store, "w9", environment=CODING)
    quick = await opened(store, opening("s1", environment=CODING))
    task = await queued(store, opening("s2", environment=CODING))
    await end(store, quick)
    await task
    assert 1 <= await refused(store, opening("s3", environment=CODING)) < MEANWHILE_S

    slow = await paced(store_world, store, every_s=200)
    assert await refused(store, of("a", "a9")) == 300
    await hung_up(slow)


async def test_a_pace_is_forgotten_after_ten_minutes_without_a_slot(store_world: World) -> None:
    store = await store_world.open()
    tasks = await paced(store_world, store, every_s=50)
    await hung_up(tasks)

    store_world.pass_time(500)
    assert await refused(store, of("a", "a9")) > 0
    store_world.pass_time(101)
    assert await refused(store, of("a", "a9")) == 0


# -- counts -----------------------------------------------------------------------------------------------------


async def test_claims_and_immediately_served_claims_are_counted(store_world: World) -> None:
    store = await store_world.open(queue_max=1)
    await add_ready(store, "w1")

    async def counted() -> tuple[int, int]:
        load = await load_of(store)
        return load.arrivals, load.hits

    assert await counted() == (0, 0)
    holder = await opened(store, opening("s1"))
    assert await counted() == (1, 1)
    task = await queued(store, opening("s2"))
    assert await counted() == (2, 1)
    for wait_s in (0, LONG_S):
        await refused(store, opening("s3"), wait_s=wait_s)
    assert await counted() == (4, 1)
    for id in ("s1", "s2"):
        with pytest.raises(SessionExists):
            await store.claim(opening(id), wait_s=0)
    assert await counted() == (4, 1)
    await end(store, holder)
    waited = await task
    assert await counted() == (4, 1)
    await end(store, waited)
    await opened(store, opening("s1"))
    assert await counted() == (5, 2)
    assert (await store.load()).get(CODING, EnvironmentLoad()).arrivals == 0


async def test_a_transferred_slot_does_not_count_as_an_arrival(store: Store) -> None:
    session = await held_by_one(store)
    await store.begin_close(session.id, CloseReason.DELETED)

    assert await store.hand_over(session.id, session.lease, of("holder", "holder")) is not None

    load = await load_of(store)
    assert (load.arrivals, load.hits) == (1, 1)


async def test_claims_are_counted_while_there_is_no_worker(store: Store) -> None:
    await refused(store, opening("s1"))

    load = await load_of(store)

    assert (load.workers, load.waiting, load.arrivals, load.hits) == ((), 0, 1, 0)


# -- the breaker ------------------------------------------------------------------------------------------------


async def test_an_open_breaker_fails_waiting_and_new_claims(store_world: World) -> None:
    store = await store_world.open()
    tasks = await line(store, "a", 2) + await line(store, "b", 1)
    other = await queued(store, opening("other", environment=CODING))

    await store.fail_waiting(MATH, "never ready: {} é\n  line 2\n", for_s=100)

    for task in tasks:
        with pytest.raises(EnvironmentUnavailable) as caught:
            await task
        assert caught.value.detail == "never ready: {} é\n  line 2\n"
        assert caught.value.retry_after_s == 100
    assert not other.done()
    store_world.pass_time(40)
    error = await broken(store, opening("s1"))
    assert error.detail == "never ready: {} é\n  line 2\n"
    assert 60 - MEANWHILE_S < error.retry_after_s <= 60
    assert 60 - MEANWHILE_S < (await load_of(store)).broken_s <= 60
    assert (await load_of(store)).broken_why == "never ready: {} é\n  line 2\n"
    assert await waiting(store) == 0
    assert (await load_of(store)).arrivals == 4
    await hung_up([other])


async def test_a_free_slot_is_leased_even_if_the_breaker_is_open(store: Store) -> None:
    await add_ready(store, "w1", slots=2)
    await opened(store, opening("s1"))

    await store.fail_waiting(MATH, "the second one does not start", for_s=100)

    second = await store.claim(opening("s2"), wait_s=0)
    await broken(store, opening("s3"))
    await end(store, second)
    assert (await store.claim(opening("s3"), wait_s=0)).id == "s3"


async def test_claims_may_wait_again_once_the_breakers_time_is_over(store_world: World) -> None:
    store = await store_world.open()
    await store.fail_waiting(MATH, "broken", for_s=100)

    store_world.pass_time(100)

    task = await queued(store, opening("s1"))
    assert ((await load_of(store)).broken_s, (await load_of(store)).broken_why) == (0, "")
    await add_ready(store)
    assert (await task).id == "s1"


async def test_a_ready_worker_closes_the_breaker_of_its_environment(store: Store) -> None:
    for environment in (MATH, CODING):
        await store.fail_waiting(environment, "broken", for_s=100)

    await add_ready(store)

    assert (await load_of(store)).broken_s == 0
    await opened(store, opening("s1"))
    task = await queued(store, opening("s2"))
    await broken(store, opening("s3", environment=CODING))
    await hung_up([task])


async def test_a_woken_worker_closes_the_breaker(store: Store) -> None:
    await add_ready(store)
    assert await store.pause_worker(WorkerId("w1"))
    await store.fail_waiting(MATH, "broken", for_s=100)
    await broken(store, opening("s1"))

    assert await store.wake_worker(WorkerId("w1"))

    assert (await load_of(store)).broken_s == 0
    assert (await store.claim(opening("s1"), wait_s=0)).id == "s1"


async def test_an_added_worker_does_not_close_the_breaker(store: Store) -> None:
    await store.fail_waiting(MATH, "broken", for_s=100)

    await store.add_worker(starting("w1"))

    assert (await load_of(store)).broken_s > 0
    await broken(store, opening("s1"))


async def test_a_breaker_that_is_opened_again_has_the_later_message_and_time(store: Store) -> None:
    await store.fail_waiting(MATH, "first", for_s=1000)
    await store.fail_waiting(MATH, "second", for_s=100)

    error = await broken(store, opening("s1"))

    assert error.detail == "second"
    assert 100 - MEANWHILE_S < error.retry_after_s <= 100


async def test_a_long_message_keeps_its_beginning_and_its_end(store: Store) -> None:
    message = "math does not start: " + "é" * 100_000 + " no such file"
    task = await queued(store, opening("s1"))

    await store.fail_waiting(MATH, message, for_s=100)

    with pytest.raises(EnvironmentUnavailable) as caught:
        await task
    for error in (caught.value, await broken(store, opening("s2"))):
        assert error.detail.startswith("math does not start: é")
        assert error.detail.endswith("é no such file")
        assert MESSAGE_BYTES - 8 <= len(error.detail.encode()) <= MESSAGE_BYTES


async def test_failing_waiting_claims_does_not_open_the_breaker(store: Store) -> None:
    task = await queued(store, opening("s1"))

    await store.fail_waiting(MATH, "no image")

    with pytest.raises(EnvironmentUnavailable) as caught:
        await task
    assert caught.value.retry_after_s == 0
    again = await queued(store, opening("s1"))
    assert (await load_of(store)).broken_s == 0
    await hung_up([again])


async def test_a_former_leader_fails_no_claims(store_world: World) -> None:
    store = await store_world.open()
    old = (await store.lead("a", ttl_s=10)).fence
    store_world.pass_time(20)
    new = (await store.lead("b", ttl_s=10)).fence
    assert new > old > 0
    task = await queued(store, opening("s1"))

    with pytest.raises(NotLeading):
        await store.fail_waiting(MATH, "broken", fence=old)
    with pytest.raises(NotLeading):
        await store.fail_waiting(MATH, "broken", for_s=100, fence=old)

    assert await waiting(store) == 1
    assert (await load_of(store)).broken_s == 0
    await store.fail_waiting(MATH, "broken", for_s=100, fence=new)
    with pytest.raises(EnvironmentUnavailable):
        await task


# -- keys -------------------------------------------------------------------------------------------------------


@pytest.mark.redis
async def test_former_queues_and_breakers_leave_no_keys(redis_world: RedisWorld) -> None:
    store = await redis_world.open()

    def kinds() -> set[str]:
        with redis_world.server.client() as client:
            return {key.split(":")[1] for key in redis_world.keys(client)}

    holder = await held_by_one(store)
    a, b, c = await line(store, "a", 6), await line(store, "b", 2, wait_s=30), await line(store, "c", 3)
    await hung_up(a[1:4])
    assert kinds() >= {"ticket", "waits", "queue", "line", "round", "queues"}
    redis_world.pass_time(40)
    assert await served(store, holder, [a[0], *a[4:], *c]) == ["a0", "c0", "a4", "c1", "a5", "c2"]
    await asyncio.wait(b)
    assert not kinds() & {"ticket", "waits", "queue", "line", "round", "queues"}

    holder = await opened(store, of("holder", "holder"))
    failing = await line(store, "a", 2) + await line(store, "b", 2)
    await store.fail_waiting(MATH, "broken", for_s=100)
    await asyncio.wait(failing)
    assert not kinds() & {"ticket", "waits", "queue", "line", "round", "queues", "failed"}
    assert kinds() >= {"breakers", "pace", "counts"}
    redis_world.pass_time(601)
    await store.load()
    await end(store, holder)
    await store.remove_worker(WorkerId("w1"), CloseReason.DELETED)
    assert not kinds() & {"breakers", "pace", "cause", "worker", "workers", "free", "held"}
