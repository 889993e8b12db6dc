"""The store seam after a loss of data: its answers until it is rebuilt, and the rebuilding.

One suite for memory and Redis, on stores that start as if they had lost everything. test_store_restarts kills a real
Redis.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import pytest

from gateway.core.errors import (
    PoolExhausted,
    SessionClosed,
    SessionNotFound,
    StoreUnavailable,
)
from gateway.core.ids import SessionId, WorkerId
from gateway.core.ports.store import Store
from gateway.core.session import Activity, CapacityWanted, CloseReason, SessionState
from gateway.core.worker import WorkerState
from tests.contract.store_worlds import (
    MATH,
    World,
    add_ready,
    end,
    ended_late,
    held,
    opened,
    opening,
    queued,
    running,
    served,
    waiting,
    worker,
)

pytest_plugins = ["tests.contract.store_fixtures"]

T = TypeVar("T")

W1, W2 = WorkerId("w1"), WorkerId("w2")
REBUILDING = "the store is being rebuilt"


@pytest.fixture
async def lost(store_world: World) -> Store:
    """A store that lost everything, and that its leader has not rebuilt."""
    return await store_world.open(is_whole=False)


# -- while it is not whole --------------------------------------------------------------------------------------


async def test_a_store_that_lost_its_data_is_not_whole_until_its_leader_has_rebuilt_it(lost: Store) -> None:
    lead = await lost.lead("a", ttl_s=10)
    other = await lost.lead("b", ttl_s=10)
    assert (lead.is_whole, other.is_whole, other.fence) == (False, False, 0)

    await lost.rebuilt(fence=lead.fence)

    assert (await lost.lead("a", ttl_s=10)) == replace(lead, is_whole=True)
    assert (await lost.lead("b", ttl_s=10)).is_whole


async def test_no_session_is_reported_as_gone_before_the_store_is_rebuilt(lost: Store) -> None:
    id = SessionId("s1")
    for ask in (
        lost.find(id),
        lost.opened(id, "lease"),
        lost.count_turn(id, "lease"),
        lost.touch([Activity(id, 0.0)]),
        lost.begin_close(id, CloseReason.DELETED),
        lost.rebind(id, "lease", was="", handle="here"),
    ):
        with pytest.raises(StoreUnavailable, match=REBUILDING):
            await ask

    await lost.rebuilt(fence=0)

    with pytest.raises(SessionNotFound):
        await lost.find(id)
    assert await lost.touch([Activity(id, 0.0)]) == [id]
    assert await lost.begin_close(id, CloseReason.DELETED) is None


async def test_openings_wait_until_the_store_is_rebuilt_and_are_then_served_in_order(lost: Store) -> None:
    await add_ready(lost, slots=2)
    with pytest.raises(PoolExhausted):
        await lost.claim(opening("s0"), wait_s=0)

    notices = lost.notices()
    tasks = [await queued(lost, opening(f"s{n}")) for n in range(3)]
    assert [await anext(notices) for _ in tasks] == [CapacityWanted(MATH)] * 3
    assert await held(lost) == {"w1": 0}
    await lost.rebuilt(fence=0)

    assert [(await task).id for task in tasks[:2]] == ["s0", "s1"]
    assert (await waiting(lost), await held(lost)) == (1, {"w1": 2})
    assert await anext(notices) == CapacityWanted(MATH)
    tasks[2].cancel()


async def test_a_known_session_works_before_the_store_is_rebuilt_and_its_slot_stays_reserved(lost: Store) -> None:
    session = replace(served(opening("s1"), handle="here"), scorer="5" * 64)
    await lost.adopt(running(), [session], fence=0)
    task = await queued(lost, opening("s2"))

    assert await lost.find(session.id) == session
    assert await lost.touch([Activity(session.id, 0.0)]) == []
    assert await lost.count_turn(session.id, session.lease) == 1
    assert await lost.rebind(session.id, session.lease, was="here", handle="there")
    await end(lost, session)

    assert await waiting(lost) == 1
    await lost.rebuilt(fence=0)
    assert (await task).id == "s2"


async def test_a_last_reply_may_be_lost_until_the_store_is_rebuilt(lost: Store) -> None:
    await lost.keep_reply(SessionId("s1"), b"reply")

    assert await lost.kept_reply(SessionId("s1")) == b"reply"
    with pytest.raises(StoreUnavailable, match=REBUILDING):
        await lost.kept_reply(SessionId("s2"))

    await lost.rebuilt(fence=0)
    assert await lost.kept_reply(SessionId("s2")) is None


async def test_notes_of_known_sessions_are_taken_even_if_other_sessions_are_missing(
    store_world: World,
) -> None:
    store = await store_world.open(is_whole=False)
    session = served(opening("s1", idle_s=100))
    await store.adopt(running(), [session], fence=0)
    store_world.pass_time(90)

    with pytest.raises(StoreUnavailable):
        await store.touch([Activity(SessionId("lost"), 0.0), Activity(session.id, 0.0)])

    await store.rebuilt(fence=0)
    store_world.pass_time(90)
    assert await store.late(10) == []


async def test_no_session_expires_before_the_store_is_rebuilt_or_before_notes_had_time_to_arrive(
    store_world: World,
) -> None:
    store = await store_world.open(is_whole=False)
    session = served(opening("s1", idle_s=100))
    await store.adopt(running(), [session], fence=0)
    store_world.pass_time(500)
    assert await store.late(10) == await store.expire([session.id]) == await store.due(10) == []

    await store.rebuilt(fence=0)

    assert await ended_late(store, 10) == []
    store_world.pass_time(11)
    assert [late.id for late in await ended_late(store, 10)] == [session.id]


async def test_no_worker_counts_as_idle_before_the_store_is_rebuilt(lost: Store) -> None:
    await add_ready(lost)

    assert not await lost.pause_worker(W1)
    assert not await lost.drain_worker(W1, only_if_idle=True)

    await lost.rebuilt(fence=0)
    assert await lost.pause_worker(W1)


# -- adopted workers and sessions -------------------------------------------------------------------------------


async def test_a_worker_is_adopted_with_its_sessions_which_hold_its_slots(store_world: World) -> None:
    store = await store_world.open(is_whole=False)
    sessions = [served(opening("s1"), handle="here"), served(opening("s2", idle_s=50, task="test/3"))]

    adopted = await store.adopt(running(slots=3), sessions, fence=0)
    await store.rebuilt(fence=0)

    assert sorted(adopted) == ["s1", "s2"]
    assert [await store.find(session.id) for session in sessions] == sessions
    assert await store.worker(W1) == running(slots=3)
    assert await held(store) == {"w1": 2}
    assert (await store.claim(opening("s3"), wait_s=0)).worker == W1
    with pytest.raises(PoolExhausted):
        await store.claim(opening("s4"), wait_s=0)
    store_world.pass_time(49)
    assert await store.late(10) == []
    store_world.pass_time(2)
    assert [late.id for late in await store.late(10)] == ["s2"]


async def test_an_adopted_worker_may_hold_more_sessions_than_slots_and_takes_no_more_until_they_end(
    lost: Store,
) -> None:
    sessions = [served(opening(f"s{n}")) for n in range(3)]
    await lost.adopt(running(slots=2), sessions, fence=0)
    await lost.rebuilt(fence=0)
    task = await queued(lost, opening("next"))

    for session in sessions[:2]:
        assert await waiting(lost) == 1
        await end(lost, session)

    assert (await task).worker == W1
    assert await held(lost) == {"w1": 2}


@pytest.mark.parametrize(("max_uses", "state"), [(1, WorkerState.DRAINING), (2, WorkerState.READY)])
async def test_adopted_sessions_count_as_uses_of_their_worker(lost: Store, max_uses: int, state: WorkerState) -> None:
    await lost.adopt(running(slots=2, max_uses=max_uses), [served(opening("s1"))], fence=0)

    found = await lost.worker(W1)

    assert found is not None
    assert found.state is state


async def test_a_draining_worker_is_adopted_as_draining(lost: Store) -> None:
    await lost.adopt(replace(running(slots=2), state=WorkerState.DRAINING), [served(opening("s1"))], fence=0)
    await lost.rebuilt(fence=0)

    with pytest.raises(PoolExhausted):
        await lost.claim(opening("s2"), wait_s=0)
    assert (await lost.find(SessionId("s1"))).worker == W1


async def test_a_known_worker_keeps_its_state_and_its_sessions_and_gets_the_missing_ones(store: Store) -> None:
    await add_ready(store, slots=3)
    known, closing = await opened(store, opening("s1")), await opened(store, opening("s2"))
    await store.begin_close(closing.id, CloseReason.EXPIRED)
    await store.drain_worker(W1)

    adopted = await store.adopt(running(slots=9), [replace(closing), served(opening("s3"))], fence=0)

    assert sorted(adopted) == ["s1", "s2", "s3"]
    assert await store.find(known.id) == known
    assert (await store.find(closing.id)).state is SessionState.CLOSING
    found = await store.worker(W1)
    assert found is not None
    assert (found.state, found.slots) == (WorkerState.DRAINING, 3)


@pytest.mark.parametrize("state", [WorkerState.READY, WorkerState.DRAINING])
async def test_a_worker_that_an_older_state_knows_as_starting_is_adopted_as_it_is_now(
    lost: Store, state: WorkerState
) -> None:
    await lost.add_worker(worker(slots=1), fence=0)
    now = replace(running(slots=2), state=state)

    assert await lost.adopt(now, [served(opening("s1"))], fence=0) == ["s1"]
    await lost.rebuilt(fence=0)

    found = await lost.worker(W1)
    assert found is not None
    assert (found.state, found.slots, found.address) == (state, 2, now.address)
    assert not await lost.worker_ready(W1, now.address), "its start ends without another change"
    if state is WorkerState.READY:
        assert (await lost.claim(opening("s2"), wait_s=0)).worker == W1
    with pytest.raises(PoolExhausted):
        await lost.claim(opening("s3"), wait_s=0)


async def test_a_session_that_another_worker_holds_under_another_lease_is_not_adopted(store: Store) -> None:
    await add_ready(store, "w1")
    known = await opened(store, opening("s1"))

    assert await store.adopt(running("w2"), [served(opening("s1"), "w2")], fence=0) == []

    assert await store.find(known.id) == known
    assert await held(store) == {"w1": 1, "w2": 0}


async def test_a_closed_session_is_not_restored_and_a_later_one_of_its_id_is(store: Store) -> None:
    await add_ready(store)
    session = await opened(store, opening("s1"))
    await end(store, session, CloseReason.EXPIRED)

    assert await store.adopt(running(), [session], fence=0) == []
    assert await store.restore([session]) == []
    with pytest.raises(SessionClosed):
        await store.find(session.id)

    later = served(opening("s1"))
    assert await store.adopt(running(), [later], fence=0) == ["s1"]
    assert await store.find(session.id) == later


async def test_a_paused_worker_that_serves_a_session_is_adopted_as_woken(store: Store) -> None:
    await add_ready(store, slots=2)
    await store.pause_worker(W1)

    await store.adopt(running(), [served(opening("s1"))], fence=0)

    assert (await store.claim(opening("s2"), wait_s=0)).worker == W1


async def test_an_adopted_session_is_opened_and_closed_like_any_other(store: Store) -> None:
    session = served(opening("s1"))
    await store.adopt(running(), [session], fence=0)

    assert await store.opened(session.id, session.lease, handle="here") == replace(session, handle="here")
    assert (await store.opened(session.id, session.lease, handle="there")).handle == "here"

    await end(store, session)
    assert await held(store) == {"w1": 0}


async def test_adopting_a_worker_grants_its_free_slots_to_waiting_claims(store: Store) -> None:
    tasks = [await queued(store, opening(f"s{n}")) for n in range(2)]

    await store.adopt(running(slots=2), [served(opening("served"))], fence=0)

    assert (await tasks[0]).worker == W1
    assert await waiting(store) == 1
    tasks[1].cancel()


# -- sessions that replicas restore -----------------------------------------------------------------------------


async def test_a_replica_restores_its_sessions_of_known_workers(lost: Store) -> None:
    await lost.adopt(running("w1", slots=2), [], fence=0)
    mine = [served(opening("s1"), handle="here"), served(opening("s2")), served(opening("s3"), "unknown")]

    assert await lost.restore(mine) == ["s1", "s2"]

    await lost.rebuilt(fence=0)
    assert await lost.find(SessionId("s1")) == mine[0]
    assert await held(lost) == {"w1": 2}
    with pytest.raises(SessionNotFound):
        await lost.find(SessionId("s3"))
    with pytest.raises(PoolExhausted):
        await lost.claim(opening("s4"), wait_s=0)


async def test_a_worker_may_hold_more_sessions_than_slots_after_a_restore(lost: Store) -> None:
    await lost.adopt(running(slots=1), [served(opening("s1"))], fence=0)

    assert await lost.restore([served(opening("s2")), served(opening("s3"))]) == ["s2", "s3"]

    assert await held(lost) == {"w1": 3}


async def test_restoring_a_known_session_changes_nothing_and_another_lease_of_its_id_is_refused(store: Store) -> None:
    await add_ready(store, slots=3)
    session = await opened(store, opening("s1"))
    await store.begin_close(session.id, CloseReason.EXPIRED)

    assert await store.restore([session, served(opening("s1"))]) == ["s1"]

    assert await store.find(session.id) == replace(session, state=SessionState.CLOSING, reason=CloseReason.EXPIRED)
    assert await held(store) == {"w1": 1}
    await store.release(session.id, session.lease)
    assert await held(store) == {"w1": 0}


async def test_many_sessions_are_restored_in_one_call(lost: Store) -> None:
    await lost.adopt(running(slots=2000), [], fence=0)
    sessions = [served(opening(f"s{n}")) for n in range(1200)]

    assert len(await lost.restore(sessions)) == 1200
    assert await held(lost) == {"w1": 1200}
    assert len(await lost.adopt(running(), sessions, fence=0)) == 1200
