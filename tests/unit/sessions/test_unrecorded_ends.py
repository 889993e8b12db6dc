"""Episodes without an end get one if no session is left of them, and no other episode does."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.core.environment import Environment
from gateway.core.episode import Summary
from gateway.core.errors import StoreUnavailable
from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.outcomes import EpisodeOutcome
from gateway.core.ports.step_log import UNRECORDED, EpisodeEnd
from gateway.core.session import CloseReason, EpisodeRequest, Session, SessionSetup, SessionState
from gateway.sessions import unrecorded_ends
from gateway.sessions.unrecorded_ends import UnrecordedEnds
from gateway.stores.memory.sessions import MemoryStore
from gateway.stores.step_log.reader import StepLogReader
from gateway.stores.step_log.writer import StepLogWriter

MATH = Environment(name=EnvironmentName("math"), image="one", directory=Path("/"), command=())
OWN = "own"
FINISHED = EpisodeEnd(
    reason=CloseReason.DELETED,
    outcome=EpisodeOutcome.FINISHED,
    reward=1.0,
    summary=Summary(steps=2, reward=1.0, finished=True, seconds=1.0),
)


class ListingStore(MemoryStore):
    """A store that lists the given sessions, in pages of one."""

    def __init__(self) -> None:
        super().__init__()
        self.live: list[Session] = []
        self.is_away = False

    async def session_page(self, *, limit: int, cursor: str = "") -> tuple[list[Session], str]:
        if self.is_away:
            raise StoreUnavailable("the store does not answer")
        number = int(cursor or 0)
        return self.live[number : number + 1], str(number + 1) if number + 1 < len(self.live) else ""


def a_session(number: int) -> Session:
    return Session(
        id=SessionId(str(number)),
        name=str(number),
        owner=Owner("alice"),
        environment=MATH.name,
        lease=f"{number:032x}",
        fingerprint="",
        idle_s=300.0,
        worker=WorkerId("w"),
        address="",
        state=SessionState.OPEN,
    )


def a_log(folder: Path, gateway: str = OWN) -> StepLogWriter:
    log = StepLogWriter(folder, "r1", max_bytes=2**30, max_days=14)
    log.gateway = gateway
    return log


def begin(log: StepLogWriter, session: Session) -> None:
    setup = SessionSetup(spec={"question": "1+1"})
    request = EpisodeRequest(
        owner=session.owner, name=session.name, environment=MATH, setup=setup, fingerprint="", protocol="ors"
    )
    log.opened(session, MATH, request, open_s=0.0)


@pytest.fixture(autouse=True)
def every_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unrecorded_ends, "YOUNG_S", -60.0)


@pytest.fixture
async def store() -> AsyncIterator[ListingStore]:
    store = ListingStore()
    yield store
    await store.aclose()


async def reasons(reader: StepLogReader) -> dict[str, str | None]:
    found = [await reader.episode(f"{number:032x}") for number in range(4)]
    return {row["name"]: row["reason"] for row in found if row is not None}


async def test_an_episode_without_a_session_gets_an_end_at_the_second_look(tmp_path: Path, store: ListingStore) -> None:
    killed, reader = a_log(tmp_path), StepLogReader(tmp_path)
    ends = UnrecordedEnds(store=store, log=a_log(tmp_path), episodes=reader)
    lost, ended, live, older = (a_session(number) for number in range(4))
    for session in (lost, ended, live):
        begin(killed, session)
    killed.closed(ended, MATH, FINISHED)
    killed.gateway = ""  # as an older version
    begin(killed, older)
    await killed.aclose()
    store.live = [live, replace(live, id=SessionId("other"), lease="f" * 32)]

    assert await ends.look() == 0
    assert await reasons(reader) == {"0": None, "1": "deleted", "2": None, "3": None}
    assert await ends.look() == 2
    assert await reasons(reader) == {"0": UNRECORDED, "1": "deleted", "2": None, "3": UNRECORDED}
    row = await reader.episode(lost.lease)
    assert row is not None
    assert (row["outcome"], row["reward"], row["steps"]) == ("infrastructure", None, None)
    assert row["closed_at"] is not None
    assert row["closed_at"] <= time.time()
    assert await ends.look() == 0, "each episode ends once"


async def test_an_episode_whose_end_comes_between_two_looks_keeps_it(tmp_path: Path, store: ListingStore) -> None:
    log, reader = a_log(tmp_path), StepLogReader(tmp_path)
    ends = UnrecordedEnds(store=store, log=log, episodes=reader)
    session = a_session(0)
    begin(log, session)
    await log.flush()
    await ends.look()
    log.closed(session, MATH, FINISHED)
    await log.flush()
    assert await ends.look() == 0
    row = await reader.episode(session.lease)
    assert row is not None
    assert (row["reason"], row["reward"]) == ("deleted", 1.0)
    await log.aclose()


async def test_an_end_that_is_recorded_later_replaces_the_unrecorded_one(tmp_path: Path, store: ListingStore) -> None:
    log, reader = a_log(tmp_path), StepLogReader(tmp_path)
    ends = UnrecordedEnds(store=store, log=log, episodes=reader)
    session = a_session(0)
    begin(log, session)
    await log.flush()
    assert [await ends.look(), await ends.look()] == [0, 1]
    log.closed(session, MATH, FINISHED)
    await log.aclose()
    row = await reader.episode(session.lease)
    assert row is not None
    assert (row["reason"], row["outcome"], row["reward"]) == ("deleted", "finished", 1.0)


async def test_episodes_of_another_gateway_and_looks_without_a_store_end_nothing(
    tmp_path: Path, store: ListingStore
) -> None:
    log, other, reader = a_log(tmp_path), a_log(tmp_path, "other"), StepLogReader(tmp_path)
    ends = UnrecordedEnds(store=store, log=log, episodes=reader)
    begin(other, a_session(1))
    await other.aclose()
    assert [await ends.look(), await ends.look()] == [0, 0]

    begin(log, a_session(0))
    await log.aclose()
    store.is_away = True
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await ends.look()
    assert await reasons(reader) == {"0": None, "1": None}
    store.is_away = False
    assert [await ends.look(), await ends.look()] == [0, 1], "a look without the store counts for nothing"
