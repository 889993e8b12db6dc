"""The store seam, handles that an upstream keeps with sessions, and capacities that workers report: both stores."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from gateway.core.errors import PoolExhausted
from gateway.core.ids import SessionId, WorkerId
from gateway.core.ports.store import Store
from gateway.core.session import CapacityWanted, CloseReason, Session, SessionState
from gateway.core.worker import WorkerState
from tests.contract.store_worlds import (
    MATH,
    World,
    add_ready,
    end,
    ended_late,
    opened,
    opening,
    queued,
    waiting,
    worker,
)

pytest_plugins = ["tests.contract.store_fixtures"]

W1 = WorkerId("w1")
HANDLE = 'http://10.0.0.7:8080 "0c2f" é \ud800 {}'


async def with_handle(store: Store, id: str = "s1", handle: str = HANDLE, *, idle_s: float = 300.0) -> Session:
    """Return an open session with a handle."""
    wish = opening(id, idle_s=idle_s)
    await store.claim(wish, wait_s=0)
    return await store.opened(wish.id, wish.lease, handle=handle, scorer="5" * 64)


async def slots_of(store: Store, id: WorkerId = W1) -> tuple[int, int]:
    """Return the slots of a worker as `load` states them, and the number of held ones."""
    [entry] = [e for load in (await store.load()).values() for e in load.workers if e.worker.id == id]
    found = await store.worker(id)
    assert found is not None
    assert found.slots == entry.worker.slots
    return entry.worker.slots, entry.used


# -- handles ----------------------------------------------------------------------------------------------------


async def test_a_handle_is_returned_unchanged_with_every_form_of_its_session(store: Store) -> None:
    await add_ready(store)

    session = await with_handle(store)

    assert session.handle == HANDLE
    assert await store.find(session.id) == session
    assert await store.sessions() == [session]
    closing = await store.begin_close(session.id, CloseReason.OPERATOR)
    assert closing == replace(session, state=SessionState.CLOSING, reason=CloseReason.OPERATOR)
    [lost] = await store.remove_worker(session.worker, CloseReason.WORKER_LOST) or []
    assert lost.handle == HANDLE


async def test_late_expired_and_due_sessions_include_their_handles(store_world: World) -> None:
    store = await store_world.open(closing_s=60)
    await add_ready(store)
    session = await with_handle(store, idle_s=10)
    store_world.pass_time(20)

    [late] = await store.late(10)
    [expired] = await ended_late(store, 10)
    store_world.pass_time(70)
    [again] = await store.due(10)

    assert [late.handle, expired.handle, again.handle] == [session.handle] * 3


async def test_a_session_that_was_opened_without_a_handle_has_none(store: Store) -> None:
    await add_ready(store)

    assert (await store.claim(opening("s1"), wait_s=0)).handle == ""
    assert (await opened(await another(store), opening("s2"))).handle == ""


async def another(store: Store) -> Store:
    """Return the same store with one more free slot."""
    await add_ready(store, "w2")
    return store


async def test_a_session_that_is_already_open_keeps_its_handle(store: Store) -> None:
    await add_ready(store)
    session = await with_handle(store)

    again = await store.opened(session.id, session.lease, handle="another")

    assert again == session
    assert await store.find(session.id) == session


async def test_a_successor_has_neither_handle_nor_scorer_of_its_predecessor(store: Store) -> None:
    await add_ready(store, slots=2)
    first, second = await with_handle(store, "s1"), await with_handle(store, "s2")
    await store.begin_close(first.id, CloseReason.DELETED)
    await store.begin_close(second.id, CloseReason.EXPIRED)

    of_same_id = await store.hand_over(first.id, first.lease, opening("s1"))
    of_other_id = await store.hand_over(second.id, second.lease, opening("s3"))

    assert of_same_id is not None
    assert of_other_id is not None
    for begun in (of_same_id, of_other_id):
        assert (begun.handle, begun.scorer) == ("", "")
        assert await store.find(begun.id) == begun


async def test_an_id_that_is_claimed_again_does_not_have_the_handle_of_its_first_session(store: Store) -> None:
    await add_ready(store)
    await end(store, await with_handle(store), CloseReason.EXPIRED)

    assert (await store.claim(opening("s1"), wait_s=0)).handle == ""


async def test_a_handle_is_replaced_only_if_the_caller_knows_the_present_one(store: Store) -> None:
    await add_ready(store)
    session = await with_handle(store)

    assert await store.rebind(session.id, session.lease, was=HANDLE, handle="b")
    assert not await store.rebind(session.id, session.lease, was=HANDLE, handle="c")

    assert await store.find(session.id) == replace(session, handle="b")


async def test_a_handle_is_set_if_the_caller_knows_that_the_session_has_none(store: Store) -> None:
    await add_ready(store)
    session = await with_handle(store, handle="")

    assert await store.rebind(session.id, session.lease, was="", handle="b")

    assert (await store.find(session.id)).handle == "b"


async def test_of_many_concurrent_rebinds_one_succeeds(store: Store) -> None:
    await add_ready(store)
    session = await with_handle(store)

    tried = [store.rebind(session.id, session.lease, was=HANDLE, handle=f"h{n}") for n in range(20)]
    succeeded = [n for n, has in enumerate(await asyncio.gather(*tried)) if has]

    [winner] = succeeded
    assert (await store.find(session.id)).handle == f"h{winner}"


async def test_only_an_open_session_of_the_lease_is_rebound(store: Store) -> None:
    await add_ready(store, slots=2)
    session = await with_handle(store)
    begun = await store.claim(opening("s2"), wait_s=0)

    assert not await store.rebind(SessionId("nobody"), session.lease, was=HANDLE, handle="b")
    assert not await store.rebind(session.id, "stale", was=HANDLE, handle="b")
    assert not await store.rebind(begun.id, begun.lease, was="", handle="b")
    await store.begin_close(session.id, CloseReason.EXPIRED)
    assert not await store.rebind(session.id, session.lease, was=HANDLE, handle="b")
    assert (await store.find(session.id)).handle == HANDLE
    await store.release(session.id, session.lease)
    assert not await store.rebind(session.id, session.lease, was=HANDLE, handle="b")


async def test_rebinding_does_not_count_as_activity(store_world: World) -> None:
    store = await store_world.open()
    await add_ready(store)
    session = await with_handle(store, idle_s=10)
    store_world.pass_time(9)

    assert await store.rebind(session.id, session.lease, was=HANDLE, handle="b")
    store_world.pass_time(2)

    assert [late.id for late in await store.late(10)] == [session.id]


# -- reported capacities --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [1, 3])
async def test_a_worker_gets_as_many_sessions_as_it_reports_slots(store: Store, told: int) -> None:
    await store.add_worker(worker("w1", slots=2))

    assert await store.worker_ready(W1, "unix:/run/w1.sock", slots=told)

    for n in range(told):
        await store.claim(opening(f"s{n}"), wait_s=0)
    with pytest.raises(PoolExhausted):
        await store.claim(opening("one-more"), wait_s=0)
    assert await slots_of(store) == (told, told)


async def test_waiting_claims_get_the_reported_slots_and_no_more(store: Store) -> None:
    await store.add_worker(worker("w1", slots=3))
    tasks = [await queued(store, opening(f"s{n}")) for n in range(3)]

    await store.worker_ready(W1, "unix:/run/w1.sock", slots=1)

    assert (await tasks[0]).worker == W1
    assert await waiting(store) == 2
    await add_ready(store, "w2", slots=2)
    assert [(await task).worker for task in tasks[1:]] == ["w2", "w2"]


async def test_a_worker_that_reports_no_slots_has_its_initial_number(store: Store) -> None:
    await store.add_worker(worker("w1", slots=3))

    await store.worker_ready(W1, "unix:/run/w1.sock", slots=0)

    assert await slots_of(store) == (3, 0)


async def test_a_reported_capacity_does_not_add_uses(store: Store) -> None:
    await store.add_worker(worker("w1", slots=1, max_uses=2))
    tasks = [await queued(store, opening(f"s{n}")) for n in range(3)]

    await store.worker_ready(W1, "unix:/run/w1.sock", slots=5)

    await asyncio.gather(*tasks[:2])
    assert await waiting(store) == 1
    found = await store.worker(W1)
    assert found is not None
    assert (found.slots, found.state) == (5, WorkerState.DRAINING)
    tasks[2].cancel()
    await asyncio.wait({tasks[2]})


async def test_the_report_of_a_ready_worker_changes_nothing(store: Store) -> None:
    await add_ready(store, slots=2)

    assert not await store.worker_ready(W1, "unix:/run/w1.sock", slots=9)

    assert await slots_of(store) == (2, 0)


# -- limits ---------------------------------------------------------------------------------------------------------


async def test_a_limited_worker_keeps_its_sessions_and_gets_a_new_one_only_below_its_limit(
    store: Store,
) -> None:
    await add_ready(store, slots=4)
    held = [await opened(store, opening(f"s{n}")) for n in range(4)]

    await store.limit_worker(W1, 2)

    assert await slots_of(store) == (2, 4)
    waits = await queued(store, opening("waits"))
    for session in held[:2]:
        await end(store, session)
        assert not waits.done()
        assert await waiting(store) == 1
    assert await slots_of(store) == (2, 2)
    await end(store, held[2])
    assert (await waits).worker == W1
    assert await slots_of(store) == (2, 2)
    with pytest.raises(PoolExhausted):
        await store.claim(opening("one-more"), wait_s=0)


async def test_a_limit_removes_free_slots_immediately(store: Store) -> None:
    await add_ready(store, slots=4)
    await opened(store, opening("s1"))

    await store.limit_worker(W1, 1)

    with pytest.raises(PoolExhausted):
        await store.claim(opening("s2"), wait_s=0)
    assert await slots_of(store) == (1, 1)


async def test_a_worker_below_its_limit_still_gets_sessions(store: Store) -> None:
    await add_ready(store, slots=4)
    await opened(store, opening("s1"))

    await store.limit_worker(W1, 2)

    assert (await store.claim(opening("s2"), wait_s=0)).worker == W1


@pytest.mark.parametrize("slots", [0, -3])
async def test_no_worker_is_limited_to_less_than_one_session(store: Store, slots: int) -> None:
    await add_ready(store, slots=4)

    await store.limit_worker(W1, slots)

    assert await slots_of(store) == (1, 0)
    assert (await store.claim(opening("s1"), wait_s=0)).worker == W1


@pytest.mark.parametrize("slots", [2, 3])
async def test_a_limit_never_adds_slots(store: Store, slots: int) -> None:
    await add_ready(store, slots=2)

    await store.limit_worker(W1, slots)

    assert await slots_of(store) == (2, 0)


async def test_limiting_an_unknown_worker_does_nothing(store: Store) -> None:
    await store.limit_worker(W1, 1)

    assert await store.worker(W1) is None
    assert await store.load() == {}


async def test_a_limited_worker_transfers_a_slot_only_up_to_its_limit(store: Store) -> None:
    await add_ready(store, slots=2)
    first, second = await opened(store, opening("s1")), await opened(store, opening("s2"))
    await store.limit_worker(W1, 1)
    await store.begin_close(first.id, CloseReason.DELETED)

    assert await store.hand_over(first.id, first.lease, opening("s1")) is None

    assert (await store.find(first.id)).state is SessionState.CLOSING
    assert await store.release(first.id, first.lease)
    await store.begin_close(second.id, CloseReason.DELETED)
    assert await store.hand_over(second.id, second.lease, opening("s2")) is not None
    assert await slots_of(store) == (1, 1)


async def test_a_released_slot_above_the_limit_is_not_granted(store: Store) -> None:
    """A worker refused a session: the gateway limits the worker first, then releases the slot."""
    await add_ready(store, slots=2)
    held = await opened(store, opening("s1"))
    refused = await store.claim(opening("s2"), wait_s=0)
    waits = await queued(store, opening("s3"))

    await store.limit_worker(W1, 1)
    await store.begin_close(refused.id, CloseReason.OPEN_FAILED, lease=refused.lease)
    await store.release(refused.id, refused.lease)

    assert not waits.done()
    assert await waiting(store) == 1
    await end(store, held)
    assert (await waits).worker == W1


async def test_a_starting_worker_can_be_limited_and_its_later_report_replaces_the_limit(store: Store) -> None:
    await store.add_worker(worker("w1", slots=4))
    await store.add_worker(worker("w2", slots=4))
    for id in ("w1", "w2"):
        await store.limit_worker(WorkerId(id), 2)

    await store.worker_ready(WorkerId("w1"), "unix:/run/w1.sock")
    await store.worker_ready(WorkerId("w2"), "unix:/run/w2.sock", slots=3)

    assert await slots_of(store, WorkerId("w1")) == (2, 0)
    assert await slots_of(store, WorkerId("w2")) == (3, 0)


async def test_a_draining_worker_that_is_limited_stays_draining(store: Store) -> None:
    await add_ready(store, slots=4)
    await opened(store, opening("s1"))
    await store.drain_worker(W1)

    await store.limit_worker(W1, 2)

    assert await slots_of(store) == (2, 1)
    with pytest.raises(PoolExhausted):
        await store.claim(opening("s2"), wait_s=0)


async def test_a_session_keeps_the_scorer_that_it_was_opened_with(store: Store) -> None:
    await add_ready(store)
    wish = opening("s1")
    await store.claim(wish, wait_s=0)

    session = await store.opened(wish.id, wish.lease, scorer="5" * 64)
    again = await store.opened(wish.id, wish.lease, scorer="6" * 64)
    closing = await store.begin_close(wish.id, CloseReason.DELETED)

    assert session.scorer == again.scorer == "5" * 64
    assert closing is not None
    assert closing.scorer == "5" * 64


async def test_a_limit_notifies_that_capacity_is_wanted_if_claims_wait(store: Store) -> None:
    await add_ready(store, slots=2)
    await opened(store, opening("s1"))
    await opened(store, opening("s2"))
    notices = store.notices()
    waits = await queued(store, opening("s3"))
    assert await anext(notices) == CapacityWanted(MATH)

    await store.limit_worker(W1, 1)

    assert await anext(notices) == CapacityWanted(MATH)
    waits.cancel()
    await asyncio.wait({waits})
