"""A third-party server whose every answer the test decides, by default AReaL's, and an upstream that uses it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.core.environment import Environment, Server, ServerProtocol
from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.session import Session, SessionSetup, SessionState
from gateway.core.worker import Worker
from gateway.upstreams.areal.upstream import ArealUpstream
from gateway.upstreams.idempotency.recorder import Recorder
from gateway.upstreams.transport import HttpTransport
from tests.fakes.raw_http import Connection, RawServer, Request

GUESS = Environment(
    name=EnvironmentName("guess"),
    image="one",
    directory=Path("/"),
    command=(),
    protocol=ServerProtocol.AREAL,
    server=Server(port=5000),
)
INFO = {"name": "guess", "num_samples": 3, "action_type": "text", "description": "Find it"}
HELLO = {"type": "text", "content": "hello"}
BEGUN = {"episode_id": "e-1", "observation": HELLO, "info": {"max_turns": 8}, "reward": 0.0, "done": False}
GONE = {"error": "episode not found", "detail": "expired"}
START, STEP, CANCEL = "/api/episode/start", "/api/episode/step", "/api/episode/cancel"


def stepped(reward: Any = 0.0, *, done: bool = False, observation: Any = HELLO, **more: Any) -> dict[str, Any]:
    return {"episode_id": "e-1", "observation": observation, "reward": reward, "done": done, "info": {}, **more}


WON = stepped(1.0, done=True, observation=None, info={"success": True})


class Held:
    """An answer that the server sends once the test sets `free`."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.free = asyncio.Event()


class Scripted:
    """A server that returns the given answers of a path in order, and then repeats the last answer.

    An answer is JSON, or a status with JSON or bytes, and perhaps header lines. ``None`` drops the connection.
    """

    def __init__(self, answers: Mapping[str, Sequence[Any]] | None = None, *, info: Any = INFO) -> None:
        given = {"/api/task/info": [info], CANCEL: [{"status": "cancelled"}], **(answers or {})}
        self.answers = {path: list(of_path) for path, of_path in given.items()}
        self.requests: list[Request] = []

    def bodies(self, path: str) -> list[Any]:
        return [json.loads(request.body) for request in self.requests if request.target == path]

    async def __call__(self, connection: Connection) -> None:
        while True:
            request = await connection.request()
            self.requests.append(request)
            answers = self.answers.get(request.target, [(404, {"error": "no such route", "detail": "none"})])
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
            if isinstance(answer, Held):
                await answer.free.wait()
                answer = answer.answer
            if answer is None:
                connection.abort()
                return
            status, body, *more = answer if isinstance(answer, tuple) else (200, answer)
            sent = body if isinstance(body, bytes) else json.dumps(body).encode()
            await connection.answer(sent, status=status, more="".join(more))


class World:
    """An upstream, and a session in one of its workers."""

    def __init__(self, upstream: Any, address: str) -> None:
        self.upstream = upstream
        self.worker = Worker(id=WorkerId("w"), environment=GUESS.name, digest="", slots=1, address=address)
        self.session = Session(
            id=SessionId("5e5510"),
            name="episode",
            owner=Owner(""),
            environment=GUESS.name,
            lease="l",
            fingerprint="f",
            idle_s=300.0,
            worker=self.worker.id,
            address=address,
            state=SessionState.OPEN,
        )

    async def open(self, environment: Environment = GUESS, **fields: Any) -> Session:
        setup = SessionSetup(**{"spec": {"sample_id": 2}, **fields})
        opened: Session = await self.upstream.open(self.session, environment, setup)
        return opened


@contextlib.asynccontextmanager
async def asked(
    server: Scripted, recorder: Recorder | None = None, *, kind: Callable[..., Any] = ArealUpstream
) -> AsyncIterator[World]:
    async with RawServer(server) as raw:
        relay = HttpTransport()
        upstream = kind(relay, recorder=recorder)
        try:
            yield World(upstream, raw.address)
        finally:
            await upstream.aclose()
            await relay.aclose()
