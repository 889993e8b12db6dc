"""The activity notes that a replica writes to the store: only sessions with activity are in each write."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from gateway.catalog.catalog import Catalog
from gateway.core.environment import Environment
from gateway.core.errors import StoreUnavailable
from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.ports.store import Store
from gateway.core.session import Activity, Session, SessionState
from gateway.sessions.cache import CachedSession, SessionCache
from tests.fakes.eventually import until
from tests.fakes.step_log import FakeStepLog

KIND = Environment(name=EnvironmentName("math"), image="one", directory=Path("/"), command=("python3",))


class Told:
    """A store that records notes, and can be unavailable or slow."""

    def __init__(self) -> None:
        self.notes: list[dict[str, float]] = []
        self.is_away = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.ended: list[SessionId] = []

    async def touch(self, notes: Sequence[Activity]) -> list[SessionId]:
        if self.is_away:
            raise StoreUnavailable("away")
        self.notes.append({note.id: note.quiet_s for note in notes})
        await self.may_answer.wait()
        return self.ended


@pytest.fixture
def store() -> Told:
    return Told()


@pytest.fixture
def cache(store: Told) -> SessionCache:
    return SessionCache(cast(Store, store), Catalog([KIND]), log=FakeStepLog())


def add(cache: SessionCache, name: str) -> CachedSession:
    session = Session(
        id=SessionId(name),
        name=name,
        owner=Owner(""),
        environment=KIND.name,
        lease=f"lease of {name}",
        fingerprint="",
        idle_s=300.0,
        worker=WorkerId("w"),
        address="unix:/w",
        state=SessionState.OPEN,
    )
    return cache.add(session, KIND, noted=True)


async def test_only_active_sessions_are_written(cache: SessionCache, store: Told) -> None:
    idle, active, touched = (add(cache, name) for name in ("idle", "active", "touched"))
    active.begin()
    active.finish()
    touched.stir()

    await cache.write_notes()
    await cache.write_notes()

    assert [set(notes) for notes in store.notes] == [{"active", "touched"}]
    assert idle.noted_at < active.noted_at


async def test_a_session_whose_deadline_may_be_near_is_written_immediately(cache: SessionCache, store: Told) -> None:
    found = add(cache, "one").session
    cache.forget(found.id)

    cache.add(found, KIND)
    await cache.write_notes()

    assert [set(notes) for notes in store.notes] == [{"one"}]


async def test_a_busy_session_is_written_each_time_and_once_more_after_it_becomes_idle(
    cache: SessionCache, store: Told
) -> None:
    one = add(cache, "one")
    one.begin()

    await cache.write_notes()
    await cache.write_notes()
    one.finish()
    await cache.write_notes()
    await cache.write_notes()

    assert [notes["one"] for notes in store.notes[:2]] == [0.0, 0.0]
    assert [set(notes) for notes in store.notes] == [{"one"}] * 3


async def test_a_note_that_the_store_did_not_receive_is_written_again(cache: SessionCache, store: Told) -> None:
    add(cache, "one").stir()
    store.is_away = True
    with pytest.raises(StoreUnavailable):
        await cache.write_notes()
    store.is_away = False

    await cache.write_notes()

    assert [set(notes) for notes in store.notes] == [{"one"}]


async def test_activity_during_a_write_is_in_the_next_write(cache: SessionCache, store: Told) -> None:
    one, two = add(cache, "one"), add(cache, "two")
    one.stir()
    store.may_answer.clear()
    writing = asyncio.ensure_future(cache.write_notes())
    await until(lambda: bool(store.notes))
    one.begin()
    one.finish()
    two.stir()
    again = asyncio.ensure_future(cache.write_notes())
    store.may_answer.set()

    await writing
    await again

    assert [set(notes) for notes in store.notes] == [{"one"}, {"one", "two"}]


async def test_a_forgotten_session_is_not_written_and_does_not_keep_the_cache_busy(
    cache: SessionCache, store: Told
) -> None:
    gone, successor = add(cache, "one"), "one"
    gone.begin()
    assert cache.is_busy()

    cache.forget(SessionId("one"))
    add(cache, successor)
    await cache.write_notes()

    assert not cache.is_busy()
    assert store.notes == []


async def test_a_session_that_the_store_reports_as_ended_is_forgotten(cache: SessionCache, store: Told) -> None:
    add(cache, "one").stir()
    store.ended = [SessionId("one")]

    await cache.write_notes()

    assert cache.get(SessionId("one")) is None
