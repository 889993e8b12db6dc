"""Replicas that ask each other over real HTTP: the one that holds a session, and its server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import uvicorn
from starlette.types import ASGIApp

from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.session import Session, SessionState
from gateway.frontends.replicas import ReplicaFrontend
from gateway.server import BoundedHttp, HttpServer, listen
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
