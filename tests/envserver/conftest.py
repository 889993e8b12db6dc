"""Starts a server for each test that requests one, on the test's own loop and a real socket."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from envserver.environment import Environment
from envserver.schema.environment_types import kinds_of
from envserver.server import Server
from envserver.settings import Settings

from tests.envserver.raw import Answer, Wire


class Running:
    """A running server and connections to it."""

    def __init__(self, server: Server, address: str) -> None:
        self.server = server
        self.address = address
        self._wires: list[Wire] = []

    async def wire(self) -> Wire:
        wire = await Wire.open(self.address)
        self._wires.append(wire)
        return wire

    async def ask(self, method: str, path: str, **given: Any) -> Answer:
        """Send a request on its own connection and return the answer."""
        wire = await self.wire()
        answer = await wire.ask(method, path, **given)
        await wire.close()
        return answer

    async def open(self, sid: str = "s1", task: dict[str, Any] | None = None, **body: Any) -> None:
        """Create a session and wait until it is ready."""
        body.setdefault("task_spec", task or {})
        created = await self.ask("POST", "/create", sid=sid, body=body)
        assert created.status == 200, created.body
        assert (await self.ask("GET", "/prompt", sid=sid)).status == 200

    async def call(self, name: str, input: dict[str, Any] | None = None, *, sid: str = "s1", **given: Any) -> Answer:
        return await self.ask("POST", "/call", sid=sid, body={"name": name, "input": input or {}}, **given)

    async def row(self, sid: str) -> dict[str, Any] | None:
        rows = (await self.ask("GET", "/sessions")).json["sessions"]
        return next((row for row in rows if row["sid"] == sid), None)

    async def close(self) -> None:
        for wire in self._wires:
            await wire.close()
        await self.server.stop()


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Return a function that starts a server: ``start(Class, …, slots=2, …)``, with ``unix=True`` on a Unix socket."""
    started: list[Running] = []

    async def begin(*classes: type[Environment], unix: bool = False, **settings: Any) -> Running:
        given: dict[str, Any] = {"socket": str(tmp_path / "worker.sock")} if unix else {"host": "127.0.0.1", "port": 0}
        chosen = Settings(**given, **settings)
        server = Server(chosen, kinds_of(classes, tasks=chosen.tasks))
        running = Running(server, await server.start())
        started.append(running)
        return running

    yield begin
    for running in started:
        await running.close()
