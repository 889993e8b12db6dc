"""The store seam, waiting for a slot: order, bounds, hang-ups and released slots, on memory and on Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gateway.core.errors import (
    EnvironmentUnavailable,
    GatewayError,
    PoolExhausted,
    SessionExists,
    SessionNotFound,
    StoreUnavailable,
)
from gateway.core.ids import SessionId, WorkerId
from gateway.core.ports.store import Store
from gateway.core.session import CapacityWanted, CloseReason, Session, SessionRequest, SessionState
from tests.contract.store_worlds import (
    CODING,
    MATH,
    TURNS,
    World,
    add_ready,
    end,
    ended_late,
    opened,
    opening,
    queued,
    waiting,
)
from tests.contract.store_worlds import worker as starting

pytest_plugins = ["tests.contract.store_fixtures"]

SHORT_S = 0.02
"""Seconds of a wait that must run out."""
MANY_TURNS = 400
"""More turns of the event loop than a claim takes. Each test stops at the first turn at which the claim was done."""


async def held_by_one(store: Store) -> Session:
    """Hold the only slot, and return its session."""
    await add_ready(store, "w1")
    return await opened(store, opening("holder"))


async def nothing_is_held(store: Store) -> None:
    """Assert that every slot is free, that no claim waits, and that the slot can be leased."""
    load = (await store.load())[MATH]
    assert load.waiting == 0
    assert [entry.used for entry in load.workers] == [0]
    session = await store.claim(opening("probe"), wait_s=0)
    await end(store, session)


# -- order ------------------------------------------------------------------------------------------------------


async def test_a_released_slot_goes_to_the_first_waiting_claim(store: Store) -> None:
    holder = await held_by_one(store)
    tasks = [await queued(store, opening(f"s{n}")) for n in range(5)]

    served = []
    current = holder
    for task in tasks:
        await end(store, current)
        current = await task
        served.append(current.id)
        assert await waiting(store) == len(tasks) - len(served)

    assert served == [f"s{n}" for n in range(5)]


async def test_a_granted_session_is_opening_on_the_worker_of_its_slot(store: Store) -> None:
    holder = await held_by_one(store)
    wish = opening("s1", idle_s=7.5)
    task = await queued(store, wish)

    await end(store, holder)

    session = await task
    assert (session.id, session.lease, session.idle_s) == (wish.id, wish.lease, 7.5)
    assert (session.worker, session.address) == ("w1", "unix:/run/w1.sock")
    assert session.state is SessionState.OPENING
    assert (await store.opened(wish.id, wish.lease)).state is SessionState.OPEN


async def test_no_claim_overtakes_the_waiting_ones_even_before_they_wake(store: Store) -> None:
    holder = await held_by_one(store)
    first = await queued(store, opening("first"))

    await end(store, holder)

    with pytest.raises(PoolExhausted):
        await store.claim(opening("late"), wait_s=0)
    assert (await first).id == "first"


async def test_each_environment_has_a_separate_queue(store: Store) -> None:
    await add_ready(store, "w1", environment=MATH)
    await add_ready(store, "w2", environment=CODING)
    math, coding = [await opened(store, opening(f"h-{e}", environment=e)) for e in (MATH, CODING)]
    waits_first = await queued(store, opening("s1", environment=MATH))
    waits_second = await queued(store, opening("s2", environment=CODING))

    await end(store, coding)
    assert (await waits_second).worker == "w2"
    assert not waits_first.done()

    await end(store, math)
    assert (await waits_first).worker == "w1"


async def test_a_worker_that_becomes_ready_serves_as_many_claims_as_it_has_slots(store: Store) -> None:
    await store.add_worker(starting("w1", slots=2))
    tasks = [await queued(store, opening(f"s{n}")) for n in range(3)]

    assert await store.worker_ready(WorkerId("w1"), "unix:/run/w1.sock")

    assert [(await task).id for task in tasks[:2]] == ["s0", "s1"]
    assert await waiting(store) == 1
    assert not tasks[2].done()
    tasks[2].cancel()
    await asyncio.wait({tasks[2]})


async def test_a_worker_serves_no_more_waiting_claims_than_it_has_uses(store: Store) -> None:
    await store.add_worker(starting("w1", slots=5, max_uses=2))
    tasks = [await queued(store, opening(f"s{n}")) for n in range(3)]

    await store.worker_ready(WorkerId("w1"), "unix:/run/w1.sock")

    assert [(await task).id for task in tasks[:2]] == ["s0", "s1"]
    assert await waiting(store) == 1
    await add_ready(store, "w2")
    assert (await tasks[2]).worker == "w2"


async def test_a_slot_of_a_draining_worker_goes_to_no_waiting_claim(store: Store) -> None:
    holder = await held_by_one(store)
    task = await queued(store, opening("s1"))
    await store.drain_worker(holder.worker)

    await end(store, holder)

    assert await waiting(store) == 1
    await add_ready(store, "w2")
    assert (await task).worker == "w2"


async def test_a_removed_worker_serves_no_waiting_claim(store: Store) -> None:
    holder = await held_by_one(store)
    task = await queued(store, opening("s1"))

    await store.remove_worker(holder.worker, CloseReason.WORKER_LOST)

    assert await waiting(store) == 1
    await add_ready(store, "w2")
    assert (await task).worker == "w2"


async def test_a_waiting_opening_notifies_that_capacity_is_wanted(store: Store) -> None:
    notices = store.notices()

    task = await queued(store, opening("s1"))

    assert await anext(notices) == CapacityWanted(MATH)
    task.cancel()
    await asyncio.wait({task})


async def test_of_five_hundred_claims_on_ten_slots_each_gets_one_in_order(store: Store) -> None:
    for n in range(2):
        await add_ready(store, f"w{n}", slots=5)
    tasks = [asyncio.create_task(store.claim(opening(f"s{n}"), wait_s=0)) for n in range(10)]
    held = list(await asyncio.gather(*tasks))
    line = [await queued(store, opening(f"s{n}")) for n in range(10, 500)]
    served = []

    for task in line:
        await end(store, held.pop(0))
        session = await task
        served.append(session.id)
        held.append(session)
        assert sum(entry.used for entry in (await store.load())[MATH].workers) == 10

    assert served == [f"s{n}" for n in range(10, 500)]
    assert len({session.lease for session in held}) == 10


async def test_of_many_concurrent_claims_and_releases_each_gets_its_slot_exactly_once(store: Store) -> None:
    await add_ready(store, "w1", slots=10)
    served: list[SessionId] = []
    most = 0

    async def episode(n: int) -> None:
        nonlocal most
        session = await store.claim(opening(f"s{n}"), wait_s=60)
        served.append(session.id)
        most = max(most, len(await store.sessions()))
        await end(store, await store.opened(session.id, session.lease))

    await asyncio.gather(*(episode(n) for n in range(500)))

    assert sorted(served) == sorted(f"s{n}" for n in range(500))
    assert most <= 10
    await nothing_is_held(store)


# -- bounds -----------------------------------------------------------------------------------------------------


async def test_a_wait_that_runs_out_raises_exhausted_and_leaves_the_queue(store: Store) -> None:
    holder = await held_by_one(store)

    with pytest.raises(PoolExhausted, match="math"):
        await store.claim(opening("s1"), wait_s=SHORT_S)

    assert await waiting(store) == 0
    await end(store, holder)
    await nothing_is_held(store)


async def test_a_claim_that_does_not_wait_joins_no_queue(store: Store) -> None:
    await held_by_one(store)

    with pytest.raises(PoolExhausted):
        await store.claim(opening("s1"), wait_s=0)

    assert await waiting(store) == 0


async def test_a_full_queue_refuses_the_next_claim_and_takes_one_more_when_a_claim_leaves(store_world: World) -> None:
    store = await store_world.open(queue_max=3)
    await held_by_one(store)
    tasks = [await queued(store, opening(f"s{n}")) for n in range(3)]

    with pytest.raises(PoolExhausted, match="3"):
        await store.claim(opening("s3"), wait_s=60)

    tasks[1].cancel()
    await asyncio.wait({tasks[1]})
    tasks[1] = await queued(store, opening("s3"))
    with pytest.raises(PoolExhausted):
        await store.claim(opening("s4"), wait_s=60)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_an_id_that_waits_cannot_be_claimed_again_even_for_another_environment(store: Store) -> None:
    holder = await held_by_one(store)
    task = await queued(store, opening("s1"))

    for environment in (MATH, CODING):
        with pytest.raises(SessionExists):
            await store.claim(opening("s1", environment=environment), wait_s=60)

    await end(store, holder)
    assert (await task).id == "s1"


async def test_a_claim_that_left_the_queue_may_join_it_again_at_its_end(store: Store) -> None:
    holder = await held_by_one(store)
    gone = await queued(store, opening("s1"))
    second = await queued(store, opening("s2"))
    gone.cancel()
    await asyncio.wait({gone})
    again = await queued(store, opening("s1"))

    await end(store, holder)

    session = await second
    assert not again.done()
    await end(store, session)
    assert (await again).id == "s1"


async def test_a_ticket_whose_wait_is_over_is_skipped_and_removed(store_world: World) -> None:
    store = await store_world.open()
    holder = await held_by_one(store)
    dead = await queued(store, opening("dead"), wait_s=30)
    store_world.pass_time(20)
    alive = await queued(store, opening("alive"), wait_s=60)
    store_world.pass_time(20)

    await end(store, holder)

    assert (await alive).id == "alive"
    with pytest.raises(GatewayError) as caught:
        await dead
    assert caught.value.retryable
    assert await waiting(store) == 0


async def test_tickets_whose_wait_is_over_do_not_count_as_waiting(store_world: World) -> None:
    store = await store_world.open(queue_max=1)
    await held_by_one(store)
    dead = await queued(store, opening("dead"), wait_s=30)

    store_world.pass_time(35)

    assert await waiting(store) == 0
    alive = await queued(store, opening("dead"), wait_s=30)
    for task in (dead, alive):
        task.cancel()
    await asyncio.wait({dead, alive})


async def test_a_granted_session_whose_caller_never_wakes_is_due_after_its_setup_time(store_world: World) -> None:
    store = await store_world.open()
    holder = await held_by_one(store)
    task = await queued(store, opening("s1", setup_s=30))

    await end(store, holder)

    granted = await store.find(SessionId("s1"))
    store_world.pass_time(31)
    (late,) = await ended_late(store, 10)
    assert (late.id, late.lease, late.reason) == (granted.id, granted.lease, CloseReason.OPEN_FAILED)
    assert await store.release(late.id, late.lease)
    await asyncio.wait({task})
    await nothing_is_held(store)


async def test_a_slot_that_is_lost_before_its_claim_wakes_is_not_a_success(store: Store) -> None:
    holder = await held_by_one(store)
    task = await queued(store, opening("s1"))
    release = asyncio.create_task(end(store, holder))
    # Only turns of this loop pass between the grant and the waking claim.
    for _ in range(TURNS):
        if await waiting(store) == 0:
            break
        await asyncio.sleep(0)

    lost = await store.remove_worker(WorkerId("w1"), CloseReason.WORKER_LOST) or []

    await release
    assert "s1" in {session.id for session in lost}
    outcome = (await asyncio.gather(task, return_exceptions=True))[0]
    # Redis' answer may have been on its way already. In this case `opened` raises the error.
    if isinstance(outcome, Session):
        with pytest.raises(GatewayError):
            await store.opened(outcome.id, outcome.lease)
    else:
        assert isinstance(outcome, PoolExhausted)


# -- failing ----------------------------------------------------------------------------------------------------


async def test_all_claims_that_wait_for_an_environment_fail_with_the_message_and_no_others(store: Store) -> None:
    tasks = [await queued(store, opening(f"s{n}")) for n in range(3)]
    other = await queued(store, opening("s9", environment=CODING))

    assert await store.fail_waiting(MATH, 'no image "math:1" {} é') == 3

    for task in tasks:
        with pytest.raises(EnvironmentUnavailable) as caught:
            await task
        assert caught.value.detail == 'no image "math:1" {} é'
    assert await waiting(store) == 0
    assert await waiting(store, CODING) == 1
    assert await store.fail_waiting(MATH, "again") == 0
    other.cancel()
    await asyncio.wait({other})


async def test_a_failed_opening_may_be_tried_again(store: Store) -> None:
    task = await queued(store, opening("s1"))
    await store.fail_waiting(MATH, "broken")
    await asyncio.wait({task})
    assert isinstance(task.exception(), EnvironmentUnavailable)

    await add_ready(store)

    assert (await store.claim(opening("s1"), wait_s=0)).id == "s1"


async def test_waiting_claims_fail_when_the_store_is_closed(store: Store) -> None:
    await held_by_one(store)
    tasks = [await queued(store, opening(f"s{n}")) for n in range(5)]

    await store.aclose()

    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [StoreUnavailable] * 5
    assert asyncio.all_tasks() == {asyncio.current_task()}


# -- hanging up -------------------------------------------------------------------------------------------------


async def cancelled_at(turns: int, claim: asyncio.Task[Session], meanwhile: Callable[[], Awaitable[object]]) -> bool:
    """Start *meanwhile*, and cancel *claim* after *turns* turns of the loop. Return True if it got its session."""
    other = asyncio.ensure_future(meanwhile())
    for _ in range(turns):
        await asyncio.sleep(0)
    claim.cancel()
    await asyncio.wait({claim, other})
    other.result()
    return not claim.cancelled()


async def test_a_claim_that_is_cancelled_at_any_turn_releases_the_slot(store: Store) -> None:
    await add_ready(store)

    for turns in range(MANY_TURNS):
        wish = opening(f"s{turns}")
        if await cancelled_at(turns, asyncio.create_task(store.claim(wish, wait_s=60)), lambda: asyncio.sleep(0)):
            await end(store, await store.find(wish.id))
            break
        await nothing_is_held(store)
    else:
        raise AssertionError("the claim was never done")

    await nothing_is_held(store)


async def test_a_waiting_claim_that_is_cancelled_at_any_turn_of_its_grant_releases_the_slot(store: Store) -> None:
    await add_ready(store)

    for turns in range(MANY_TURNS):
        holder = await opened(store, opening("holder"))
        wish = opening(f"s{turns}")
        claim = await queued(store, wish)
        if await cancelled_at(turns, claim, lambda holder=holder: end(store, holder)):  # type: ignore[misc]
            await end(store, await store.find(wish.id))
            break
        await nothing_is_held(store)
        with pytest.raises(SessionNotFound):
            await store.find(wish.id)
    else:
        raise AssertionError("the claim was never done")

    await nothing_is_held(store)


async def test_a_slot_released_by_a_cancelled_claim_goes_to_the_next_waiting_claim(store: Store) -> None:
    await add_ready(store)

    for turns in range(0, MANY_TURNS, 3):
        holder = await opened(store, opening("holder"))
        first = opening(f"a{turns}")
        claim = await queued(store, first)
        second = await queued(store, opening(f"b{turns}"))
        done = await cancelled_at(turns, claim, lambda holder=holder: end(store, holder))  # type: ignore[misc]
        if done:
            await end(store, await store.find(first.id))
        await end(store, await second)
        await nothing_is_held(store)
        if done:
            break
    else:
        raise AssertionError("the claim was never done")


async def test_a_claim_that_is_cancelled_again_while_it_releases_still_releases(store: Store) -> None:
    await add_ready(store)

    for turns in range(60):
        holder = await opened(store, opening("holder"))
        wish = opening(f"s{turns}")
        claim = await queued(store, wish)
        release = asyncio.create_task(end(store, holder))
        for _ in range(turns):
            await asyncio.sleep(0)
        for _ in range(TURNS):
            if claim.done():
                break
            claim.cancel()
            await asyncio.sleep(0)
        await release
        if not claim.cancelled():
            await end(store, claim.result())
        # The detached release may still be on its way. A waiting claim gets the slot.
        await end(store, await store.claim(opening("next"), wait_s=60))


async def test_cancelled_waits_leave_the_order_of_the_others(store: Store) -> None:
    holder = await held_by_one(store)
    wishes: list[SessionRequest] = [opening(f"s{n}") for n in range(20)]
    tasks = [await queued(store, wish) for wish in wishes]
    for task in tasks[::2]:
        task.cancel()
    await asyncio.wait(tasks[::2])
    served = []

    for task in tasks[1::2]:
        await end(store, holder)
        holder = await task
        served.append(holder.id)

    assert served == [f"s{n}" for n in range(1, 20, 2)]


async def test_a_wait_that_runs_out_while_slots_become_free_never_loses_one(store: Store) -> None:
    await add_ready(store)

    for n in range(25):
        holder = await opened(store, opening("holder"))
        wish = opening(f"s{n}")
        claim = asyncio.create_task(store.claim(wish, wait_s=SHORT_S / 10))
        await asyncio.sleep(SHORT_S / 10 * n / 25)
        await end(store, holder)
        outcome = (await asyncio.gather(claim, return_exceptions=True))[0]
        if isinstance(outcome, Session):
            await end(store, outcome)
        else:
            assert isinstance(outcome, PoolExhausted)
        await nothing_is_held(store)
