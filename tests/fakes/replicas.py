"""Replicas that call each other over real HTTP, and replicas that share a record of calls in memory."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

import uvicorn
from starlette.types import ASGIApp

from gateway.core.errors import StoreUnavailable
from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.ports.calls import CallChange, CallRecord, CallState, Tally
from gateway.core.session import Session, SessionState
from gateway.frontends.replicas import ReplicaFrontend
from gateway.server import BoundedHttp, HttpServer, listen
from gateway.stores.memory.calls import MemoryCallStore
from gateway.upstreams.replica_client import ReplicaClient
from tests.deadlines import scaled

SECRET = b"the gateway's own"
WITHIN_S = scaled(30.0)
"""Longer than any answer here takes."""
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
    """A replica that holds sessions: what it was asked, and what it answers."""

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
    """The URL of a server of *app*, as the gateway's is."""
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
    """*holder* behind the front."""
    front = ReplicaFrontend(secret, holder.serve, max_body_bytes=max_body_bytes, clock=clock)
    async with served(front) as holder.url:
        yield holder


async def ask(peers: ReplicaClient, url: str, message: bytes = b"hello", *, within_s: float = WITHIN_S) -> bytes:
    return await peers.ask(url, "act", SESSION, message, within_s=within_s)


class Shared:
    """One store that replicas share, and who of them runs what."""

    def __init__(self) -> None:
        self.store = MemoryCallStore()
        self.run = 1
        self.runner: dict[str, str] = {}
        self.gone: set[str] = set()

    def lose(self) -> None:
        """Lose all data, as a restart may."""
        self.store = MemoryCallStore()
        self.run += 1


class View:
    """A replica's way to the store: it may be cut, and it counts what goes over it."""

    is_shared = True

    def __init__(self, shared: Shared, replica: str) -> None:
        self.replica = replica
        self.is_away = False
        self.loses_answers = False
        self.trips: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self._shared = shared

    async def begin(
        self, session: SessionId, lease: str, *, key: str, digest: str, task_id: str, within_s: float
    ) -> CallRecord | None:
        await self._trip("begin")
        found = await self._shared.store.begin(
            session, lease, key=key, digest=digest, task_id=task_id, within_s=within_s
        )
        if found is None:
            self._shared.runner[task_id] = self.replica
        self._answer()
        return self._seen(found)

    async def write(self, changes: Sequence[CallChange]) -> str:
        await self._trip("write")
        for change in changes:
            self._shared.runner.setdefault(change.task_id, self.replica)
        self._shared.store.replica = self.replica  # to which a count belongs
        await self._shared.store.write(changes)
        self._answer()
        return str(self._shared.run)

    async def look(self, session: SessionId, lease: str, task_id: str) -> CallRecord | None:
        await self._trip("look")
        return self._seen(await self._shared.store.look(session, lease, task_id))

    async def settled(self, session: SessionId, lease: str, task_id: str, *, within_s: float) -> CallRecord | None:
        await self._trip("settled")
        if self._shared.runner.get(task_id) in self._shared.gone:
            within_s = 0
        return self._seen(await self._shared.store.settled(session, lease, task_id, within_s=within_s))

    async def tallies(self, session: SessionId, lease: str) -> Mapping[str, Tally]:
        await self._trip("tallies")
        return await self._shared.store.tallies(session, lease)

    async def aclose(self) -> None: ...

    async def _trip(self, name: str) -> None:
        self.trips.append(name)
        await self.gate.wait()
        if self.is_away:
            raise StoreUnavailable("the store does not answer")

    def _answer(self) -> None:
        if self.loses_answers:
            raise StoreUnavailable("the answer was lost")

    def _seen(self, record: CallRecord | None) -> CallRecord | None:
        if record is None:
            return None
        runner = self._shared.runner[record.task_id]
        is_lost = record.state is CallState.RUNNING and runner in self._shared.gone
        return replace(record, replica=runner, state=CallState.LOST if is_lost else record.state)
