"""The store seam, sessions and workers: one suite, run on memory and on Redis. Waiting is in test_store_waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from gateway.core.errors import (
    InvalidRequest,
    PoolExhausted,
    SessionClosed,
    SessionExists,
    SessionNotFound,
    StoreUnavailable,
)
from gateway.core.ids import SessionId, WorkerId
from gateway.core.ports.store import Store
from gateway.core.session import (
    BY_TRAINER,
    Activity,
    CapacityWanted,
    CloseReason,
    Notice,
    Session,
    SessionEnded,
    SessionState,
)
from gateway.core.worker import WorkerState
from gateway.stores.memory.sessions import MemoryStore
from tests.contract.store_worlds import (
    CODING,
    MATH,
    World,
    add_ready,
    end,
    ended_late,
    opened,
    opening,
    queued,
    worker,
)

pytest_plugins = ["tests.contract.store_fixtures"]

UNKNOWN = SessionId("nobody")


async def is_known(store: Store, session: Session) -> bool:
    try:
        await store.find(session.id)
    except (SessionNotFound, SessionClosed):
        return False
    return True


async def used(store: Store, id: WorkerId) -> int:
    return next(e.used for load in (await store.load()).values() for e in load.workers if e.worker.id == id)


async def state_of(store: Store, id: WorkerId) -> WorkerState:
    found = await store.worker(id)
    assert found is not None
    return found.state


def ended(session: Session) -> SessionEnded:
    return SessionEnded(session.id, session.lease)


# -- claims and slots -------------------------------------------------------------------------------------------


async def test_a_claim_returns_the_requested_session_and_its_worker(store: Store) -> None:
    await add_ready(store, "w1")
    wish = opening("s1", idle_s=12.25)

    session = await store.claim(wish, wait_s=0)

    assert session == Session(
        id=wish.id,
        name="episode",
        owner=wish.owner,
        environment=MATH,
        lease=wish.lease,
        fingerprint="f00d",
        idle_s=12.25,
        worker=WorkerId("w1"),
        address="unix:/run/w1.sock",
        state=SessionState.OPENING,
        task="train/7",
        policy="step-7",
    )
    assert await store.find(wish.id) == session


async def test_names_and_tasks_of_trainers_are_returned_unchanged_with_any_content(store: Store) -> None:
    await add_ready(store)
    name, task = 'a "b"\n\0 é 😀 \ud800 {} [] 12345678901234567', "train/007"

    await store.claim(opening("s1", name=name, task=task, policy=name), wait_s=0)

    session = await store.find(SessionId("s1"))
    assert (session.name, session.task, session.policy) == (name, task, name)


async def test_the_least_used_worker_gets_the_session_and_of_two_equal_ones_the_older(store: Store) -> None:
    for id in ("w2", "w1", "w3"):
        await add_ready(store, id, slots=3)

    places = [(await store.claim(opening(f"s{n}"), wait_s=0)).worker for n in range(7)]

    assert places == ["w2", "w1", "w3", "w2", "w1", "w3", "w2"]


async def test_a_worker_that_lost_a_session_is_the_least_used_again(store: Store) -> None:
    for id in ("w1", "w2"):
        await add_ready(store, id, slots=2)
    held = [await opened(store, opening(f"s{n}")) for n in range(3)]

    await end(store, held[0])
    await end(store, held[2])

    assert (await store.claim(opening("s9"), wait_s=0)).worker == "w1"


async def test_workers_are_ordered_by_age_beyond_ten_workers_too(store: Store) -> None:
    for n in range(12):
        await add_ready(store, f"w{n}")

    places = [(await store.claim(opening(f"s{n}"), wait_s=0)).worker for n in range(12)]

    assert places == [f"w{n}" for n in range(12)]


async def test_no_worker_gets_more_sessions_than_it_has_slots(store: Store) -> None:
    await add_ready(store, "w1", slots=2)
    await add_ready(store, "w2", slots=1)
    for n in range(3):
        await store.claim(opening(f"s{n}"), wait_s=0)

    with pytest.raises(PoolExhausted, match="math"):
        await store.claim(opening("s9"), wait_s=0)

    assert (await used(store, WorkerId("w1")), await used(store, WorkerId("w2"))) == (2, 1)


async def test_a_session_never_goes_to_a_worker_of_another_environment(store: Store) -> None:
    await add_ready(store, "w1", environment=CODING)

    with pytest.raises(PoolExhausted):
        await store.claim(opening(environment=MATH), wait_s=0)


async def test_a_starting_worker_gets_no_session(store: Store) -> None:
    await store.add_worker(worker("w1"))

    with pytest.raises(PoolExhausted):
        await store.claim(opening(), wait_s=0)


@pytest.mark.parametrize("reason", [None, CloseReason.EXPIRED], ids=["opening", "closing"])
async def test_an_id_that_holds_a_slot_cannot_be_claimed_again(store: Store, reason: CloseReason | None) -> None:
    await add_ready(store, slots=2)
    session = await store.claim(opening("s1"), wait_s=0)
    if reason is not None:
        await store.begin_close(session.id, reason)

    with pytest.raises(SessionExists):
        await store.claim(opening("s1"), wait_s=0)

    assert (await store.find(session.id)).lease == session.lease
    assert await used(store, WorkerId("w1")) == 1


async def test_an_id_claimed_again_after_its_close_is_not_forgotten_with_the_old_session(
    store_world: World,
) -> None:
    store = await store_world.open(closed_kept_s=100)
    await add_ready(store)
    await end(store, await opened(store, opening("s1")), CloseReason.EXPIRED)

    again = await opened(store, opening("s1"))

    store_world.pass_time(200)
    assert await store.find(SessionId("s1")) == again


# -- uses and draining ------------------------------------------------------------------------------------------


async def test_the_claim_that_takes_the_last_use_drains_the_worker(store: Store) -> None:
    id = await add_ready(store, slots=5, max_uses=2)
    await store.claim(opening("s1"), wait_s=0)
    assert await state_of(store, id) is WorkerState.READY

    await store.claim(opening("s2"), wait_s=0)

    assert await state_of(store, id) is WorkerState.DRAINING
    with pytest.raises(PoolExhausted):
        await store.claim(opening("s3"), wait_s=0)


async def test_a_claim_that_is_not_a_use_does_not_count_as_one(store: Store) -> None:
    id = await add_ready(store, max_uses=1)

    question = await store.claim(replace(opening("question"), is_use=False), wait_s=0)
    waiting = await queued(store, replace(opening("s1"), is_use=False))
    with pytest.raises(PoolExhausted):
        await store.claim(opening("s2"), wait_s=0)
    await end(store, question)
    await end(store, await waiting)

    assert await state_of(store, id) is WorkerState.READY
    await store.claim(opening("s3"), wait_s=0)
    assert await state_of(store, id) is WorkerState.DRAINING


async def test_a_released_slot_of_a_spent_worker_is_not_used_again(store: Store) -> None:
    id = await add_ready(store, max_uses=1)
    session = await opened(store, opening("s1"))

    await end(store, session)

    assert await used(store, id) == 0
    with pytest.raises(PoolExhausted):
        await store.claim(opening("s2"), wait_s=0)


async def test_a_worker_without_a_limit_of_uses_is_never_spent(store: Store) -> None:
    await add_ready(store, max_uses=0)

    for n in range(20):
        await end(store, await opened(store, opening(f"s{n}")))

    assert await state_of(store, WorkerId("w1")) is WorkerState.READY


async def test_a_draining_worker_keeps_its_sessions_and_gets_no_more(store: Store) -> None:
    id = await add_ready(store, slots=2)
    session = await opened(store, opening("s1"))

    assert await store.drain_worker(id)

    assert await store.find(session.id) == session
    assert await store.touch([Activity(session.id, 0.0)]) == []
    with pytest.raises(PoolExhausted):
        await store.claim(opening("s2"), wait_s=0)


async def test_draining_only_idle_workers_skips_a_worker_that_holds_a_session(store: Store) -> None:
    id = await add_ready(store, slots=2)
    session = await opened(store, opening("s1"))

    assert not await store.drain_worker(id, only_if_idle=True)
    assert await state_of(store, id) is WorkerState.READY

    await end(store, session)
    assert await store.drain_worker(id, only_if_idle=True)
    assert await state_of(store, id) is WorkerState.DRAINING


async def test_draining_a_draining_worker_succeeds_even_if_it_holds_sessions(store: Store) -> None:
    id = await add_ready(store, slots=2)
    await opened(store, opening("s1"))
    await store.drain_worker(id)

    assert await store.drain_worker(id)
    assert await store.drain_worker(id, only_if_idle=True)


async def test_an_unknown_worker_does_not_drain(store: Store) -> None:
    assert not await store.drain_worker(WorkerId("w1"))


async def test_a_starting_worker_that_is_drained_never_becomes_ready_and_keeps_its_place(store: Store) -> None:
    await store.add_worker(worker("w1"))

    assert await store.drain_worker(WorkerId("w1"), only_if_idle=True)
    assert not await store.worker_ready(WorkerId("w1"), "unix:/run/w1.sock")

    assert await store.worker(WorkerId("w1")) == replace(worker("w1"), state=WorkerState.DRAINING)
    with pytest.raises(PoolExhausted):
        await store.claim(opening("s1"), wait_s=0)


# -- workers ----------------------------------------------------------------------------------------------------


async def test_a_worker_is_found_as_it_was_added_and_then_made_ready(store: Store) -> None:
    made = worker("w1", slots=3, max_uses=7, digest="d7")
    await store.add_worker(made)
    assert await store.worker(made.id) == made

    assert await store.worker_ready(made.id, "tcp:10.0.0.7:80")

    assert await store.worker(made.id) == replace(made, state=WorkerState.READY, address="tcp:10.0.0.7:80")
    assert await store.worker(WorkerId("w2")) is None


async def test_only_a_starting_worker_becomes_ready(store: Store) -> None:
    id = await add_ready(store)
    assert not await store.worker_ready(id, "unix:/elsewhere")
    await store.drain_worker(id)
    assert not await store.worker_ready(id, "unix:/elsewhere")
    assert not await store.worker_ready(WorkerId("w2"), "unix:/elsewhere")

    found = await store.worker(id)

    assert found is not None
    assert (found.state, found.address) == (WorkerState.DRAINING, "unix:/run/w1.sock")


async def test_an_adopted_worker_takes_sessions_immediately(store: Store) -> None:
    await store.add_worker(replace(worker("w1"), state=WorkerState.READY, address="unix:/run/w1.sock"))

    assert (await store.claim(opening(), wait_s=0)).address == "unix:/run/w1.sock"


async def test_adding_a_known_worker_changes_nothing(store: Store) -> None:
    id = await add_ready(store, slots=2)
    await store.claim(opening("s1"), wait_s=0)

    await store.add_worker(worker("w1", slots=9))

    found = await store.worker(id)
    assert found is not None
    assert (found.slots, found.state, await used(store, id)) == (2, WorkerState.READY, 1)


async def test_removing_a_worker_closes_its_sessions_with_the_reason_and_frees_nothing(store: Store) -> None:
    id = await add_ready(store, "w1", slots=3)
    await add_ready(store, "w2", slots=1)
    held = [await opened(store, opening(f"s{n}")) for n in range(3)]
    mine = {session.id for session in held if session.worker == id}

    ended = await store.remove_worker(id, CloseReason.WORKER_LOST) or []

    assert {session.id for session in ended} == mine
    assert {(session.state, session.reason) for session in ended} == {(SessionState.CLOSED, CloseReason.WORKER_LOST)}
    for session_id in mine:
        with pytest.raises(SessionClosed) as caught:
            await store.find(session_id)
        assert caught.value.reason == CloseReason.WORKER_LOST
    assert await store.worker(id) is None
    with pytest.raises(PoolExhausted):
        await store.claim(opening("s9"), wait_s=0)


async def test_a_session_of_a_removed_worker_cannot_be_opened_closed_or_released(store: Store) -> None:
    id = await add_ready(store)
    session = await store.claim(opening("s1"), wait_s=0)
    await store.remove_worker(id, CloseReason.WORKER_LOST)

    with pytest.raises(SessionClosed) as caught:
        await store.opened(session.id, session.lease)
    assert caught.value.reason == CloseReason.WORKER_LOST
    assert await store.begin_close(session.id, CloseReason.DELETED) is None
    assert not await store.release(session.id, session.lease)


async def test_a_session_that_its_trainer_was_deleting_is_not_found_after_its_worker_is_lost(store: Store) -> None:
    id = await add_ready(store)
    session = await opened(store, opening("s1"))
    await store.begin_close(session.id, CloseReason.DELETED)

    ended = await store.remove_worker(id, CloseReason.WORKER_LOST) or []

    assert [(s.id, s.state, s.reason) for s in ended] == [(session.id, SessionState.CLOSED, CloseReason.DELETED)]
    with pytest.raises(SessionNotFound):
        await store.find(session.id)


async def test_removing_an_unknown_worker_ends_nothing(store: Store) -> None:
    assert await store.remove_worker(WorkerId("w1"), CloseReason.WORKER_LOST) is None


async def test_load_states_each_workers_sessions_idle_time_and_age(store_world: World) -> None:
    store = await store_world.open()
    await store.add_worker(worker("w1", slots=2))
    store_world.pass_time(30)
    await store.worker_ready(WorkerId("w1"), "unix:/run/w1.sock")
    await add_ready(store, "w2", environment=CODING)
    session = await opened(store, opening("s1"))
    store_world.pass_time(20)
    await end(store, session)
    await opened(store, opening("s2", environment=CODING))
    store_world.pass_time(10)

    load = await store.load()

    (math,), (coding,) = load[MATH].workers, load[CODING].workers
    assert (math.worker.id, math.worker.slots, math.used) == ("w1", 2, 0)
    # Redis' own clock runs in addition to the moved one.
    assert math.idle_s == pytest.approx(10, abs=2)
    assert math.age_s == pytest.approx(60, abs=2)
    assert (coding.worker.id, coding.used, coding.idle_s) == ("w2", 1, 0.0)
    assert load[MATH].waiting == load[CODING].waiting == 0


async def test_a_workers_idle_time_starts_when_it_becomes_ready(store_world: World) -> None:
    store = await store_world.open()
    await store.add_worker(worker("w1"))
    store_world.pass_time(50)

    await store.worker_ready(WorkerId("w1"), "unix:/run/w1.sock")

    (entry,) = (await store.load())[MATH].workers
    assert entry.idle_s == pytest.approx(0, abs=2)


async def test_load_lists_the_workers_of_an_environment_by_age_and_no_removed_ones(store: Store) -> None:
    for id in ("w3", "w1", "w2"):
        await store.add_worker(worker(id))
    await store.remove_worker(WorkerId("w1"), CloseReason.WORKER_LOST)

    load = await store.load()

    assert [entry.worker.id for entry in load[MATH].workers] == ["w3", "w2"]


# -- sessions ---------------------------------------------------------------------------------------------------


async def test_an_opened_session_is_open_and_may_be_opened_again_by_its_lease(store: Store) -> None:
    await add_ready(store)
    session = await store.claim(opening("s1"), wait_s=0)

    first = await store.opened(session.id, session.lease)

    assert first == replace(session, state=SessionState.OPEN)
    assert await store.opened(session.id, session.lease) == first


async def test_a_session_that_is_unknown_or_of_another_lease_cannot_be_opened(store: Store) -> None:
    await add_ready(store)
    session = await store.claim(opening("s1"), wait_s=0)

    with pytest.raises(SessionNotFound):
        await store.opened(session.id, "stale")
    with pytest.raises(SessionNotFound):
        await store.opened(UNKNOWN, session.lease)

    assert (await store.find(session.id)).state is SessionState.OPENING


async def test_opening_a_session_that_is_being_closed_raises_the_reason(store: Store) -> None:
    await add_ready(store)
    session = await store.claim(opening("s1"), wait_s=0)
    await store.begin_close(session.id, CloseReason.OPERATOR)

    with pytest.raises(SessionClosed) as while_closing:
        await store.opened(session.id, session.lease)
    await store.release(session.id, session.lease)
    with pytest.raises(SessionClosed) as once_closed:
        await store.opened(session.id, session.lease)

    assert while_closing.value.reason == once_closed.value.reason == CloseReason.OPERATOR


async def test_an_unknown_session_is_not_found(store: Store) -> None:
    with pytest.raises(SessionNotFound):
        await store.find(UNKNOWN)


async def test_closing_keeps_the_slot_until_the_release(store: Store) -> None:
    await add_ready(store)
    session = await opened(store, opening("s1"))

    closing = await store.begin_close(session.id, CloseReason.DELETED)

    assert closing == replace(session, state=SessionState.CLOSING, reason=CloseReason.DELETED)
    assert await store.find(session.id) == closing
    with pytest.raises(PoolExhausted):
        await store.claim(opening("s2"), wait_s=0)
    assert await store.release(session.id, session.lease)
    assert (await store.claim(opening("s2"), wait_s=0)).worker == session.worker


async def test_of_two_closes_of_a_session_one_succeeds(store: Store) -> None:
    await add_ready(store)
    session = await opened(store, opening("s1"))

    assert await store.begin_close(session.id, CloseReason.OPERATOR) is not None
    assert await store.begin_close(session.id, CloseReason.DELETED) is None

    assert (await store.find(session.id)).reason is CloseReason.OPERATOR
    assert await store.begin_close(UNKNOWN, CloseReason.DELETED) is None


@pytest.mark.parametrize(
    "reason", [reason for reason in CloseReason if reason not in BY_TRAINER], ids=lambda reason: str(reason)
)
async def test_the_reason_of_a_close_by_the_gateway_is_remembered_for_a_while(
    store_world: World, reason: CloseReason
) -> None:
    store = await store_world.open(closed_kept_s=600)
    await add_ready(store)
    await end(store, await opened(store, opening("s1")), reason)

    store_world.pass_time(590)
    with pytest.raises(SessionClosed) as caught:
        await store.find(SessionId("s1"))
    assert caught.value.reason == reason

    store_world.pass_time(20)
    with pytest.raises(SessionNotFound):
        await store.find(SessionId("s1"))


async def test_a_session_that_its_trainer_deleted_is_not_found(store: Store) -> None:
    await add_ready(store)

    await end(store, await opened(store, opening("s1")), CloseReason.DELETED)

    with pytest.raises(SessionNotFound):
        await store.find(SessionId("s1"))


async def test_the_last_reply_of_an_episode_is_kept_for_a_while(store_world: World) -> None:
    store = await store_world.open(closed_kept_s=600)
    await add_ready(store)
    session = await opened(store, opening("s1"))
    assert await store.kept_reply(session.id) is None

    await store.keep_reply(session.id, b"early")
    await store.keep_reply(session.id, b"\x00\xff last")
    await end(store, session, CloseReason.DELETED)

    store_world.pass_time(590)
    assert await store.kept_reply(session.id) == b"\x00\xff last"
    assert await store.kept_reply(UNKNOWN) is None
    store_world.pass_time(20)
    assert await store.kept_reply(session.id) is None


async def test_a_process_keeps_last_replies_of_a_limited_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.stores.memory.slots.TOTAL_BYTES", 10)
    store = MemoryStore()

    for id in ("s1", "s2", "s3", "s3"):
        await store.keep_reply(SessionId(id), b"12345")

    assert [await store.kept_reply(SessionId(id)) for id in ("s1", "s2", "s3")] == [None, b"12345", b"12345"]


async def test_the_last_reply_of_an_episode_ends_with_the_next_session_of_its_id(store: Store) -> None:
    await add_ready(store, slots=2)
    for id in ("s1", "s2"):
        session = await opened(store, opening(id))
        await store.keep_reply(session.id, id.encode())
        await end(store, session, CloseReason.DELETED)

    await opened(store, opening("s1"))

    assert await store.kept_reply(SessionId("s1")) is None
    assert await store.kept_reply(SessionId("s2")) == b"s2"


async def test_the_steps_before_a_late_call_are_noted_for_an_open_session(store: Store) -> None:
    await add_ready(store, slots=2)
    session, ending = [await opened(store, opening(id)) for id in ("s1", "s2")]
    await store.begin_close(ending.id, CloseReason.DELETED)

    await store.note_late(session.id, session.lease, 3)
    await store.note_late(session.id, "another lease", 4)
    await store.note_late(ending.id, ending.lease, 5)
    await store.note_late(UNKNOWN, session.lease, 6)

    assert (await store.find(session.id)).steps_before_late == 3
    assert (await store.find(ending.id)).steps_before_late is None
    closing = await store.begin_close(session.id, CloseReason.DELETED)
    assert closing is not None
    assert closing.steps_before_late == 3


async def test_the_result_of_an_ended_episode_is_noted_and_survives_its_worker(store: Store) -> None:
    worker = await add_ready(store, slots=2)
    session, ending = [await opened(store, opening(id)) for id in ("s1", "s2")]
    await store.begin_close(ending.id, CloseReason.DELETED)

    await store.note_result(session.id, session.lease, '{"reward":1}')
    await store.note_result(session.id, "another lease", "another")
    await store.note_result(ending.id, ending.lease, "too late")
    await store.note_result(UNKNOWN, session.lease, "unknown")

    assert (await store.find(session.id)).result == '{"reward":1}'
    lost = await store.remove_worker(worker, CloseReason.WORKER_LOST)
    assert {one.id: one.result for one in lost or ()} == {session.id: '{"reward":1}', ending.id: ""}


async def test_a_close_by_a_stale_lease_changes_nothing(store: Store) -> None:
    await add_ready(store)
    old = await opened(store, opening("s1"))
    await end(store, old)
    new = await opened(store, opening("s1"))

    assert await store.begin_close(new.id, CloseReason.OPEN_FAILED, lease=old.lease) is None

    assert await store.find(new.id) == new
    assert await store.begin_close(new.id, CloseReason.OPEN_FAILED, lease=new.lease) is not None


async def test_a_release_by_a_stale_lease_changes_nothing(store: Store) -> None:
    id = await add_ready(store)
    old = await opened(store, opening("s1"))
    await end(store, old)
    new = await opened(store, opening("s1"))
    await store.begin_close(new.id, CloseReason.DELETED)

    assert not await store.release(new.id, old.lease)

    assert (await store.find(new.id)).state is SessionState.CLOSING
    assert await used(store, id) == 1


async def test_only_a_closing_session_is_released_and_only_once(store: Store) -> None:
    id = await add_ready(store, slots=2)
    session = await opened(store, opening("s1"))
    assert not await store.release(session.id, session.lease)
    assert await used(store, id) == 1
    await store.begin_close(session.id, CloseReason.EXPIRED)
    assert await store.release(session.id, session.lease)

    assert not await store.release(session.id, session.lease)
    assert not await store.release(UNKNOWN, session.lease)

    assert await used(store, id) == 0


async def test_pages_list_every_session_that_holds_a_slot(store: Store) -> None:
    await add_ready(store, slots=300)
    ids = {(await opened(store, opening(f"s{number:03}"))).id for number in range(300)}

    pages: list[list[SessionId]] = []
    cursor = ""
    while not pages or cursor:
        page, cursor = await store.session_page(limit=20, cursor=cursor)
        pages.append([session.id for session in page])
        if len(pages) == 2:  # sessions that stay are not skipped, whatever else happens to the store meanwhile
            await store.touch([Activity(id, 0.0) for id in ids])
            for id in ids - {id for page in pages for id in page}:
                if id.endswith("7"):
                    await end(store, await store.find(id), CloseReason.DELETED)

    assert {id for page in pages for id in page} >= {id for id in ids if not id.endswith("7")}
    assert {id for page in pages for id in page} <= ids
    assert len(pages) >= 5


@pytest.mark.parametrize("cursor", ["1 2", "*", "9" * 21])
async def test_a_page_of_an_odd_cursor_harms_nothing(store: Store, cursor: str) -> None:
    await add_ready(store)
    session = await opened(store, opening("s1"))

    try:
        page, _ = await store.session_page(limit=10, cursor=cursor)
    except InvalidRequest:
        page = []

    assert {one.id for one in page} <= {session.id}


async def test_sessions_lists_every_session_that_holds_a_slot(store: Store) -> None:
    await add_ready(store, slots=4)
    held = [await opened(store, opening(f"s{n}")) for n in range(4)]
    await end(store, held.pop(), CloseReason.EXPIRED)
    closing = await store.begin_close(held[0].id, CloseReason.EXPIRED)
    assert closing is not None

    listed = await store.sessions()

    assert {session.id: session for session in listed} == {s.id: s for s in [closing, *held[1:]]}
    assert len(await store.sessions(limit=2)) == 2


# -- transferring a slot ----------------------------------------------------------------------------------------


async def test_a_closing_session_transfers_its_slot_to_its_successor_ahead_of_the_queue(store: Store) -> None:
    await add_ready(store)
    session = await opened(store, opening("s1"))
    waits = await queued(store, opening("s2"))
    await store.begin_close(session.id, CloseReason.DELETED)
    wish = opening("s1", task="test/3", episode="e-7", policy="step-8")

    begun = await store.hand_over(session.id, session.lease, wish)

    assert begun is not None
    assert (begun.lease, begun.worker, begun.state) == (wish.lease, session.worker, SessionState.OPENING)
    assert (begun.task, begun.episode, begun.policy) == ("test/3", "e-7", "step-8")
    assert await store.find(session.id) == begun
    assert not waits.done()
    assert (await store.opened(begun.id, begun.lease)).episode == "e-7"
    await end(store, begun)
    assert (await waits).worker == session.worker


async def test_a_successor_with_another_id_leaves_the_close_reason_of_its_predecessor(store: Store) -> None:
    await add_ready(store)
    session = await opened(store, opening("s1"))
    await store.begin_close(session.id, CloseReason.EXPIRED)

    begun = await store.hand_over(session.id, session.lease, opening("s2"))

    assert begun is not None
    assert begun.id == "s2"
    with pytest.raises(SessionClosed, match="expired"):
        await store.find(session.id)


async def test_only_a_closing_session_of_the_lease_and_environment_transfers_its_slot(store: Store) -> None:
    await add_ready(store)
    session = await opened(store, opening("s1"))

    assert await store.hand_over(session.id, session.lease, opening("s1")) is None
    await store.begin_close(session.id, CloseReason.DELETED)
    assert await store.hand_over(session.id, "stale", opening("s1")) is None
    assert await store.hand_over(session.id, session.lease, opening("s1", environment=CODING)) is None
    assert await store.hand_over(UNKNOWN, session.lease, opening("s1")) is None

    assert (await store.find(session.id)).state is SessionState.CLOSING
    assert await store.release(session.id, session.lease)


async def test_a_draining_worker_takes_no_successor(store: Store) -> None:
    await add_ready(store, max_uses=1)
    session = await opened(store, opening("s1"))
    await store.begin_close(session.id, CloseReason.DELETED)

    assert await store.hand_over(session.id, session.lease, opening("s1")) is None

    assert await used(store, session.worker) == 1
    assert await store.release(session.id, session.lease)


async def test_a_successor_counts_as_a_use_of_its_worker(store: Store) -> None:
    await add_ready(store, slots=2, max_uses=2)
    session = await opened(store, opening("s1"))
    await store.begin_close(session.id, CloseReason.DELETED)

    begun = await store.hand_over(session.id, session.lease, opening("s1"))

    assert begun is not None
    assert await state_of(store, session.worker) is WorkerState.DRAINING
    assert await used(store, session.worker) == 1


async def test_a_successor_cannot_take_the_id_of_another_session(store: Store) -> None:
    await add_ready(store, slots=2)
    session, other = await opened(store, opening("s1")), await opened(store, opening("s2"))
    await store.begin_close(session.id, CloseReason.DELETED)

    with pytest.raises(SessionExists):
        await store.hand_over(session.id, session.lease, opening("s2"))

    assert await store.find(other.id) == other
    assert (await store.find(session.id)).state is SessionState.CLOSING


# -- deadlines --------------------------------------------------------------------------------------------------


async def test_late_lists_open_sessions_past_their_time_and_changes_nothing(store_world: World) -> None:
    store = await store_world.open()
    await add_ready(store, slots=7)
    for n, idle_s in enumerate([30, 10, 20, 90]):
        await opened(store, opening(f"s{n}", idle_s=idle_s))
    await store.claim(opening("still-opening", setup_s=1), wait_s=0)
    closing = await opened(store, opening("closing", idle_s=1))
    await store.begin_close(closing.id, CloseReason.DELETED)
    store_world.pass_time(70)

    for _ in range(2):
        assert [(late.id, late.state) for late in await store.late(10)] == [
            (name, SessionState.OPEN) for name in ("s1", "s2", "s0")
        ]
        assert [late.id for late in await store.late(2)] == ["s1", "s2"]
        assert await store.late(0) == []

    assert {late.id for late in await ended_late(store, 10)} == {"s0", "s1", "s2", "still-opening", "closing"}
    assert await store.late(10) == []


async def test_an_idle_session_is_due_after_its_time_and_not_before(store_world: World) -> None:
    store = await store_world.open()
    await add_ready(store)
    session = await opened(store, opening("s1", idle_s=300))
    store_world.pass_time(290)
    assert await ended_late(store, 10) == []

    store_world.pass_time(11)

    late = replace(session, state=SessionState.CLOSING, reason=CloseReason.EXPIRED)
    assert await ended_late(store, 10) == [late]
    assert await store.find(session.id) == late


async def test_idle_time_starts_when_the_session_is_open(store_world: World) -> None:
    store = await store_world.open()
    await add_ready(store)
    session = await store.claim(opening("s1", setup_s=60, idle_s=100), wait_s=0)
    store_world.pass_time(50)

    await store.opened(session.id, session.lease)

    store_world.pass_time(90)
    assert await ended_late(store, 10) == []
    store_world.pass_time(20)
    assert [late.id for late in await ended_late(store, 10)] == [session.id]


async def test_a_short_idle_time_ends_before_a_long_setup_would_have(store_world: World) -> None:
    store = await store_world.open()
    await add_ready(store)
    session = await opened(store, opening("s1", setup_s=600, idle_s=10))

    store_world.pass_time(11)

    assert [late.id for late in await ended_late(store, 10)] == [session.id]


async def test_a_session_that_no_replica_opens_is_due_after_its_setup_time(store_world: World) -> None:
    store = await store_world.open()
    await add_ready(store)
    session = await store.claim(opening("s1", setup_s=60, idle_s=9000), wait_s=0)
    store_world.pass_time(50)
    assert await ended_late(store, 10) == []

    store_world.pass_time(11)

    assert await ended_late(store, 10) == [replace(session, state=SessionState.CLOSING, reason=CloseReason.OPEN_FAILED)]


async def test_a_closing_session_that_no_replica_releases_is_due_repeatedly_with_its_reason(
    store_world: World,
) -> None:
    store = await store_world.open(closing_s=60)
    await add_ready(store)
    session = await opened(store, opening("s1", idle_s=9000))
    closing = await store.begin_close(session.id, CloseReason.OPERATOR)
    assert closing is not None
    store_world.pass_time(50)
    assert await ended_late(store, 10) == []

    for _ in range(3):
        store_world.pass_time(61)
        assert await ended_late(store, 10) == [closing]
        assert await ended_late(store, 10) == []

    assert await store.release(session.id, session.lease)


async def test_due_returns_each_session_once_earliest_first_and_at_most_the_limit(store_world: World) -> None:
    store = await store_world.open()
    await add_ready(store, slots=5)
    for n, idle_s in enumerate([30, 10, 50, 20, 40]):
        await opened(store, opening(f"s{n}", idle_s=idle_s))
    store_world.pass_time(45)

    rounds = [[late.id for late in await ended_late(store, 3)] for _ in range(3)]

    assert rounds == [["s1", "s3", "s0"], ["s4"], []]


async def test_a_session_that_is_touched_before_due_runs_is_not_due(store_world: World) -> None:
    store = await store_world.open()
    await add_ready(store)
    session = await opened(store, opening("s1", idle_s=300))
    store_world.pass_time(310)

    assert await store.touch([Activity(session.id, 0.0)]) == []

    assert await ended_late(store, 10) == []
    assert (await store.find(session.id)).state is SessionState.OPEN


async def test_of_concurrent_due_and_touch_one_wins_and_the_other_sees_it(store_world: World) -> None:
    store = await store_world.open()
    await add_ready(store)
    session = await opened(store, opening("s1", idle_s=300))
    store_world.pass_time(310)

    gone, late = await asyncio.gather(store.touch([Activity(session.id, 0.0)]), ended_late(store, 10))

    assert [s.id for s in late] == gone


async def test_the_quiet_time_of_a_note_counts_from_the_end_of_the_last_call(store_world: World) -> None:
    store = await store_world.open()
    await add_ready(store)
    session = await opened(store, opening("s1", idle_s=300))
    store_world.pass_time(200)

    await store.touch([Activity(session.id, 50.0)])

    store_world.pass_time(240)
    assert await ended_late(store, 10) == []
    store_world.pass_time(20)
    assert [late.id for late in await ended_late(store, 10)] == [session.id]


async def test_a_late_note_never_moves_a_deadline_backwards(store_world: World) -> None:
    store = await store_world.open()
    await add_ready(store)
    session = await opened(store, opening("s1", idle_s=300))
    store_world.pass_time(100)
    await store.touch([Activity(session.id, 0.0)])

    assert await store.touch([Activity(session.id, 250.0)]) == []

    store_world.pass_time(290)
    assert await ended_late(store, 10) == []


async def test_a_busy_session_that_is_noted_each_tick_is_never_due(store_world: World) -> None:
    store = await store_world.open()
    await add_ready(store)
    session = await opened(store, opening("s1", idle_s=10))

    for _ in range(20):
        store_world.pass_time(8)
        assert await store.touch([Activity(session.id, 0.0)]) == []
        assert await ended_late(store, 10) == []

    store_world.pass_time(11)
    assert [late.id for late in await ended_late(store, 10)] == [session.id]


async def test_touch_names_every_session_that_is_not_open(store: Store) -> None:
    await add_ready(store, slots=4)
    alive = await opened(store, opening("alive"))
    await store.claim(opening("still-opening"), wait_s=0)
    closing = await opened(store, opening("closing"))
    await store.begin_close(closing.id, CloseReason.EXPIRED)
    await end(store, await opened(store, opening("closed")), CloseReason.EXPIRED)

    names = ["closing", "alive", "closed", "still-opening", "nobody"]
    gone = await store.touch([Activity(SessionId(name), 1.5) for name in names])

    assert gone == ["closing", "closed", "still-opening", "nobody"]
    assert await is_known(store, alive)


async def test_touching_a_closing_session_does_not_delay_its_release(store_world: World) -> None:
    store = await store_world.open(closing_s=60)
    await add_ready(store)
    session = await opened(store, opening("s1"))
    await store.begin_close(session.id, CloseReason.EXPIRED)

    assert await store.touch([Activity(session.id, 0.0)]) == [session.id]

    store_world.pass_time(61)
    assert [late.id for late in await ended_late(store, 10)] == [session.id]


async def test_more_notes_than_fit_in_one_script_are_all_written(store_world: World) -> None:
    store = await store_world.open()
    await add_ready(store, slots=1100)
    ids = [(await opened(store, opening(f"s{n}", idle_s=100))).id for n in range(1100)]
    store_world.pass_time(90)

    gone = await store.touch([Activity(id, 0.0) for id in [*ids[:600], UNKNOWN, *ids[600:]]])

    assert gone == [UNKNOWN]
    store_world.pass_time(90)
    assert await ended_late(store, 2000) == []
    store_world.pass_time(20)
    assert {late.id for late in await ended_late(store, 2000)} == set(ids)


# -- notices ----------------------------------------------------------------------------------------------------


async def heard(store: Store, notices: AsyncIterator[Notice], count: int) -> list[Notice]:
    """Return the next *count* notices, then close the store and return the rest."""
    found = [await anext(notices) for _ in range(count)]
    await store.aclose()
    return found + [notice async for notice in notices]


async def test_every_follower_is_notified_of_ended_sessions_and_wanted_capacity(store: Store) -> None:
    first, second = store.notices(), store.notices()
    id = await add_ready(store, slots=2)
    held = [await opened(store, opening(f"s{n}")) for n in range(2)]

    await end(store, held[0], CloseReason.EXPIRED)
    await store.drain_worker(id)
    await end(store, held[1])

    told = [ended(held[0]), CapacityWanted(MATH), ended(held[1]), CapacityWanted(MATH)]
    assert await heard(store, first, 4) == told
    assert [notice async for notice in second] == told


async def test_followers_are_notified_of_expired_sessions_and_those_of_a_lost_worker(store_world: World) -> None:
    store = await store_world.open()
    notices = store.notices()
    id = await add_ready(store, slots=2)
    late = await opened(store, opening("late", idle_s=10))
    lost = await store.claim(opening("lost"), wait_s=0)
    store_world.pass_time(11)

    await ended_late(store, 10)
    await store.release(late.id, late.lease)
    await store.remove_worker(id, CloseReason.WORKER_LOST)

    assert await heard(store, notices, 2) == [ended(late), ended(lost)]


async def test_the_claim_that_spends_a_worker_notifies_that_capacity_is_wanted(store: Store) -> None:
    notices = store.notices()
    await add_ready(store, max_uses=1)

    await store.claim(opening("s1"), wait_s=0)

    assert await heard(store, notices, 1) == [CapacityWanted(MATH)]


async def test_following_starts_with_the_call_and_not_with_the_first_read(store: Store) -> None:
    await add_ready(store)
    session = await opened(store, opening("s1"))
    before = store.notices()
    await store.begin_close(session.id, CloseReason.EXPIRED)
    await anext(before)  # Redis delivers the notice of the end a little after the call has returned
    early = store.notices()

    await store.release(session.id, session.lease)
    again = await opened(store, opening("s2"))
    await store.begin_close(again.id, CloseReason.EXPIRED)

    assert (await heard(store, early, 1))[-1] == ended(again)


async def test_a_cancelled_follower_does_not_affect_the_others(store: Store) -> None:
    async def follow(notices: AsyncIterator[Notice]) -> None:
        async for _ in notices:
            pass

    gone = asyncio.create_task(follow(store.notices()))
    stays = store.notices()
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait({gone})
    await add_ready(store)
    session = await opened(store, opening("s1"))

    await store.begin_close(session.id, CloseReason.EXPIRED)

    assert await heard(store, stays, 1) == [ended(session)]


async def test_following_a_closed_store_ends_immediately(store: Store) -> None:
    await store.aclose()

    assert [notice async for notice in store.notices()] == []


# -- the end ----------------------------------------------------------------------------------------------------


async def test_a_running_store_answers_a_ping(store: Store) -> None:
    await store.ping()


async def test_a_closed_store_is_unavailable_and_never_raises_not_found(store: Store) -> None:
    await store.aclose()

    for ask in (
        store.find(UNKNOWN),
        store.claim(opening(), wait_s=1),
        store.touch([Activity(UNKNOWN, 0.0)]),
        store.load(),
        store.ping(),
        store.keep_reply(UNKNOWN, b"reply"),
        store.kept_reply(UNKNOWN),
        store.worker(WorkerId("w1")),
    ):
        with pytest.raises(StoreUnavailable):
            await ask


async def test_closing_twice_is_no_error_and_leaves_no_task_running(store: Store) -> None:
    before = asyncio.all_tasks()
    await store.ping()

    await store.aclose()
    await store.aclose()

    assert asyncio.all_tasks() <= before
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


# -- turns ------------------------------------------------------------------------------------------------------


async def test_turns_count_up_from_one_separately_for_each_session(store: Store) -> None:
    await add_ready(store, slots=2)
    one, other = [await opened(store, opening(f"s{n}")) for n in range(2)]

    counted = [await store.count_turn(session.id, session.lease) for session in (one, one, other, one)]

    assert counted == [1, 2, 1, 3]
    assert await store.find(one.id) == one


async def test_a_turn_repeated_under_its_key_is_not_counted_twice(store: Store) -> None:
    await add_ready(store)
    session = await opened(store, opening("s1"))

    counted = [
        await store.count_turn(session.id, session.lease, key=key) for key in ("a", "a", "é \ud800", "a", "", "")
    ]

    assert counted == [1, 1, 2, 3, 4, 5]


async def test_turns_that_are_counted_concurrently_are_all_counted(store: Store) -> None:
    await add_ready(store)
    session = await opened(store, opening("s1"))

    counted = await asyncio.gather(*(store.count_turn(session.id, session.lease) for _ in range(50)))

    assert sorted(counted) == list(range(1, 51))


async def test_the_turns_of_an_ended_session_are_forgotten(store: Store) -> None:
    await add_ready(store)
    first = await opened(store, opening("s1"))
    await store.count_turn(first.id, first.lease, key="a")
    await end(store, first)
    second = await opened(store, opening("s1"))

    counted = await store.count_turn(second.id, second.lease, key="a")

    assert counted == 1
    with pytest.raises(SessionNotFound):
        await store.count_turn(first.id, first.lease)


async def test_only_an_open_session_has_turns_and_one_ended_by_the_gateway_raises_the_reason(store: Store) -> None:
    await add_ready(store, slots=5)
    wished = await store.claim(opening("opening"), wait_s=0)
    deleted, deleting = [await opened(store, opening(name)) for name in ("deleted", "deleting")]
    expired, closing = [await opened(store, opening(name)) for name in ("expired", "closing")]
    await end(store, deleted)
    await store.begin_close(deleting.id, CloseReason.DELETED)
    await end(store, expired, CloseReason.EXPIRED)
    await store.begin_close(closing.id, CloseReason.WORKER_LOST)

    for session in (wished, deleted, deleting):
        with pytest.raises(SessionNotFound):
            await store.count_turn(session.id, session.lease)
    for session, reason in ((expired, "expired"), (closing, "worker_lost")):
        with pytest.raises(SessionClosed) as ended:
            await store.count_turn(session.id, session.lease)
        assert ended.value.reason == reason
    with pytest.raises(SessionNotFound):
        await store.count_turn(UNKNOWN, "no lease")
