"""Unmodified ORS servers behind the gateway's upstream, without a gateway around it."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from gateway.core.environment import Environment, Server, ServerProtocol
from gateway.core.episode import Action, StepResult, TextBlock
from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.session import Session, SessionSetup, SessionState
from gateway.core.worker import Worker
from gateway.upstreams.ors.third_party import ThirdPartyOrsUpstream
from tests.wire.raw import Outcome, parse


def environment(name: str = "probe", **more: Any) -> Environment:
    return Environment(
        name=EnvironmentName(name),
        image="i",
        directory=Path("/"),
        command=(),
        protocol=ServerProtocol.ORS,
        server=Server(port=8080),
        **more,
    )


class Driver:
    """One server behind the upstream."""

    def __init__(self, upstream: ThirdPartyOrsUpstream, url: str) -> None:
        self.upstream = upstream
        there = httpx.URL(url)
        self.worker = Worker(
            id=WorkerId(f"w-{there.port}"),
            environment=EnvironmentName("probe"),
            digest="d",
            slots=16,
            address=f"tcp:{there.host}:{there.port}",
        )

    def session(self) -> Session:
        return Session(
            id=SessionId(uuid.uuid4().hex),
            name="episode",
            owner=Owner(""),
            environment=EnvironmentName("probe"),
            lease=uuid.uuid4().hex,
            fingerprint="f",
            idle_s=300.0,
            worker=self.worker.id,
            address=self.worker.address,
            state=SessionState.OPEN,
        )

    @asynccontextmanager
    async def episode(self, there: Environment, setup: SessionSetup) -> AsyncIterator[Episode]:
        session = self.session()
        opened = await self.upstream.open(session, there, setup)
        try:
            yield Episode(self.upstream, opened, there)
        finally:
            await self.upstream.close(session, there)

    def on(self, name: str = "probe", task: dict[str, Any] | None = None, **more: Any) -> Any:
        return self.episode(environment(name, **more), SessionSetup(spec=task or {}))


class Episode:
    """One open session."""

    def __init__(self, upstream: ThirdPartyOrsUpstream, session: Session, there: Environment) -> None:
        self.upstream = upstream
        self.session = session
        self.there = there

    async def act(self, tool: str, key: str | None = None, **arguments: Any) -> StepResult:
        return await self.upstream.act(self.session, self.there, Action(name=tool, arguments=arguments), key=key)

    async def ask(self, operation: str, body: Any = None) -> tuple[int, bytes]:
        headers = [(b"content-type", b"application/json"), (b"accept", b"text/event-stream")]
        exchange = await self.upstream.forward(
            self.session, self.there, operation, body=json.dumps(body).encode(), headers=headers
        )
        try:
            return exchange.status, await exchange.read(2**27)
        finally:
            await exchange.aclose()

    async def call(self, tool: str, input: Any, **more: Any) -> Outcome:
        status, body = await self.ask("call", {"name": tool, "input": input} | more)
        assert status == 200, body
        return parse(body.decode())


def text(result: StepResult) -> str:
    [block] = result.blocks
    assert isinstance(block, TextBlock)
    return block.text
