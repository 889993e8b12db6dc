"""Replicas that call each other over real HTTP, and replicas that share call records in memory."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

import uvicorn
from starlette.types import ASGIApp

from gateway.core.errors import CallConflict, StoreUnavailable
from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.ports.calls import CallChange, CallRecord, CallState, Change, Tally
from gateway.core.session import Session, SessionState
from gateway.frontends.replicas import ReplicaFrontend
from gateway.server import HttpServer, listen
from gateway.server.http import BoundedHttp
from gateway.upstreams.replica_client import ReplicaClient
from tests.deadlines import HANG_S

SECRET = b"the gateway's own"
SESSION = Session(
    id=SessionId("0123456789abcdef0123456789abcdef"),
    name="episode",
    owner=Owner("lab"),
    environment=EnvironmentName("counter"),
    lease="lease-1",
    fingerprint="f00d",
    idle_s=300,
    worker=WorkerId("w1"),
    address="unix:/run/w1.sock",
    state=SessionState.OPEN,
)


class Holder:
    """A replica that holds sessions. It records requests, and *answer* decides its answers."""

    def __init__(self, answer: Callable[[bytes], Awaitable[bytes]] | None = None) -> None:
        self._answer = answer
        self.asked: list[tuple[str, str, str, bytes, float]] = []
        self.answered = 0
        self.url = ""

    async def serve(self, operation: str, session_id: str, lease: str, message: bytes, within_s: float) -> bytes:
        self.asked.append((operation, session_id, lease, message, within_s))
        answer = b"answer to " + message if self._answer is None else await self._answer(message)
        self.answered += 1
        return answer


def failing(error: Exception) -> Holder:
    async def fail(message: bytes) -> bytes:
        raise error

    return Holder(fail)


@contextlib.asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[str]:
    """Serve *app* as the gateway is served, and yield the URL."""
    listener = listen("127.0.0.1", 0)
    server = HttpServer(uvicorn.Config(app, http=BoundedHttp, ws="none", lifespan="off", log_config=None))
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await running
        listener.close()


@contextlib.asynccontextmanager
async def replica(
    holder: Holder, *, secret: bytes = SECRET, max_body_bytes: int = 2**26, clock: Callable[[], float] = time.time
) -> AsyncIterator[Holder]:
    """Serve *holder* behind the frontend for replicas."""
    front = ReplicaFrontend(secret, holder.serve, max_body_bytes=max_body_bytes, clock=clock)
    async with served(front) as holder.url:
        yield holder


async def ask(peers: ReplicaClient, url: str, message: bytes = b"hello", *, within_s: float = HANG_S) -> bytes:
    return await peers.ask(url, "act", SESSION, message, within_s=within_s)


_Place = tuple[SessionId, str]


class Shared:
    """The calls and counts that replicas share, without the bounds of the real store."""

    def __init__(self) -> None:
        self.run = 1
        self.runner: dict[str, str] = {}
        """The replica that runs a call, by task id. It survives a loss of the store's data."""
        self.gone: set[str] = set()
        self._calls: dict[_Place, dict[str, CallChange]] = {}
        self._tallies: dict[_Place, dict[str, Tally]] = {}
        self._news = asyncio.Event()

    def lose(self) -> None:
        """Lose all data, as a restart of the store may."""
        self._calls, self._tallies = {}, {}
        self.run += 1

    def begin(self, replica: str, call: CallChange) -> CallRecord | None:
        """Record *call*, or return the record of the earlier call with its key."""
        calls = self._calls.setdefault(call.place, {})
        known = next((one for one in calls.values() if one.key == call.key), None)
        if known is None:
            calls[call.task_id] = call
            self.runner[call.task_id] = replica
            return None
        if known.digest != call.digest:
            raise CallConflict("Idempotency-Key was used with another body")
        return self.look(call.session, call.lease, known.task_id)

    def write(self, replica: str, change: CallChange) -> None:
        """Apply *change*."""
        place = change.place
        calls = self._calls.setdefault(place, {})
        if change.kind is Change.TALLIED:
            self._count(place, replica, change.tally)
        elif change.kind is Change.FORGOTTEN:
            self._calls.pop(place, None)
            self._tallies.pop(place, None)
        elif change.kind is Change.UNDONE or (change.kind is Change.DROPPED and not change.key):
            calls.pop(change.task_id, None)
        elif change.kind is not Change.RUNNING or change.task_id not in calls:
            calls[change.task_id] = change
            self.runner.setdefault(change.task_id, replica)
        self._news.set()
        self._news = asyncio.Event()

    def look(self, session: SessionId, lease: str, task_id: str) -> CallRecord | None:
        """Return the record of a call."""
        call = self._calls.get((session, lease), {}).get(task_id)
        if call is None:
            return None
        runner, state = self.runner[task_id], CallState(call.kind.value)
        if state is CallState.RUNNING and runner in self.gone:
            state = CallState.LOST
        return CallRecord(task_id=task_id, state=state, replica=runner, outcome=call.outcome)

    async def settled(self, session: SessionId, lease: str, task_id: str, within_s: float) -> CallRecord | None:
        """Wait up to *within_s* seconds until a call no longer runs, and return its record."""
        deadline = asyncio.get_running_loop().time() + within_s
        while True:
            record = self.look(session, lease, task_id)
            left_s = deadline - asyncio.get_running_loop().time()
            if record is None or record.state is not CallState.RUNNING or left_s <= 0:
                return record
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._news.wait()

    def tallies(self, session: SessionId, lease: str) -> Mapping[str, Tally]:
        """Return each replica's count."""
        return dict(self._tallies.get((session, lease), {}))

    def _count(self, place: _Place, replica: str, tally: Tally) -> None:
        told = self._tallies.setdefault(place, {})
        known = told.get(replica)
        if known is None:
            if not tally.told_in:
                told[replica] = tally
        elif known.number != tally.number or known.version <= tally.version:
            told[replica] = replace(tally, is_whole=known.is_whole and known.number == tally.number)


class View:
    """A replica's connection to the store. A test can cut it, and it records its operations."""

    def __init__(self, shared: Shared, replica: str) -> None:
        self.replica = replica
        self.is_away = False
        self.loses_answers = False
        self.trips: list[str] = []
        self.begun: list[CallChange] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self._shared = shared

    async def begin(self, call: CallChange) -> CallRecord | None:
        self.begun.append(call)
        await self._trip("begin")
        found = self._shared.begin(self.replica, call)
        self._answer()
        return found

    async def write(self, changes: Sequence[CallChange]) -> str:
        await self._trip("write")
        for change in changes:
            self._shared.write(self.replica, change)
        self._answer()
        return str(self._shared.run)

    async def look(self, session: SessionId, lease: str, task_id: str) -> CallRecord | None:
        await self._trip("look")
        return self._shared.look(session, lease, task_id)

    async def settled(self, session: SessionId, lease: str, task_id: str, *, within_s: float) -> CallRecord | None:
        await self._trip("settled")
        return await self._shared.settled(session, lease, task_id, within_s)

    async def tallies(self, session: SessionId, lease: str) -> Mapping[str, Tally]:
        await self._trip("tallies")
        return self._shared.tallies(session, lease)

    async def aclose(self) -> None: ...

    async def _trip(self, name: str) -> None:
        self.trips.append(name)
        await self.gate.wait()
        if self.is_away:
            raise StoreUnavailable("the store does not answer")

    def _answer(self) -> None:
        if self.loses_answers:
            raise StoreUnavailable("the answer was lost")
