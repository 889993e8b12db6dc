"""The OpenEnv frontend of a whole gateway in this process: a real server, and a client that sends raw frames."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect

from gateway.core.environment import Environment
from gateway.server import HttpServer, configured
from tests.deadlines import HANG_S
from tests.service.stack import Replica, Stack, environment, stack

Json = dict[str, Any]


class Client:
    """A client's socket that sends and receives frames."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    async def ask(self, kind: str, data: Any = None, **more: Any) -> Json:
        """Send a request and read its only reply. The frame has no ``data`` if *data* is None."""
        frame = {"type": kind, **({} if data is None else {"data": data}), **more}
        return await self.say(json.dumps(frame))

    async def say(self, frame: str | bytes) -> Json:
        """Send a raw frame and read its only reply."""
        await self.connection.send(frame)
        return await self.hear()

    async def hear(self) -> Json:
        """Read one frame."""
        async with asyncio.timeout(HANG_S):
            reply: Json = json.loads(await self.connection.recv())
        return reply

    async def reset(self, **data: Any) -> Json:
        """Reset the episode and return ``data`` of the reply, which must be an observation."""
        reply = await self.ask("reset", data)
        assert reply["type"] == "observation", reply
        observed: Json = reply["data"]
        return observed

    async def step(self, tool: str = "go_on", **fields: Any) -> Json:
        """Step with a plain action. The fake workers run the tool that the action names."""
        return await self.ask("step", {"tool": tool, **fields})

    async def closed(self) -> int:
        """Wait until the server closes the socket, and return the close code."""
        async with asyncio.timeout(HANG_S):
            await self.connection.wait_closed()
        assert self.connection.close_code is not None
        return self.connection.close_code

    def vanish(self) -> None:
        """Abort the connection without a close frame."""
        self.connection.transport.abort()


@dataclass(slots=True)
class World:
    """One gateway, and the client, address and server through which tests use it."""

    stack: Stack
    gateway: Replica
    http: httpx.AsyncClient
    base: str
    server: HttpServer

    @contextlib.asynccontextmanager
    async def client(
        self, name: str = "math", path: str = "ws", *, under: str = "", **options: Any
    ) -> AsyncIterator[Client]:
        """Connect to an environment, and close the socket at the end if it is still open."""
        url = f"{self.base.replace('http', 'ws')}{under}/openenv/{name}/{path}"
        async with connect(url, proxy=None, max_size=None, **options) as connection:
            yield Client(connection)

    def stop(self) -> None:
        """Stop the server as SIGTERM does."""
        self.server.should_exit = True

    async def rpc(self, method: str, name: str = "math", /, **params: Any) -> Json:
        """Call ``POST /mcp``."""
        body = {"jsonrpc": "2.0", "method": method, "params": params, "id": 7}
        answer = await self.http.post(f"/openenv/{name}/mcp", json=body)
        assert answer.status_code == 200, answer.text
        reply: Json = answer.json()
        return reply


def code(reply: Json) -> str:
    """Return the code of an error frame."""
    assert reply["type"] == "error", reply
    found: str = reply["data"]["code"]
    return found


def message(reply: Json) -> str:
    """Return the message of an error frame."""
    assert reply["type"] == "error", reply
    found: str = reply["data"]["message"]
    return found


@contextlib.asynccontextmanager
async def serving(replica: Replica) -> AsyncIterator[tuple[httpx.AsyncClient, str, HttpServer]]:
    """Serve *replica* over loopback, and yield a client, the address and the server."""
    config = configured(replica.app, end_s=2)
    server = HttpServer(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        base = f"http://127.0.0.1:{listener.getsockname()[1]}"
        running = asyncio.ensure_future(server.serve(sockets=[listener]))
        async with httpx.AsyncClient(base_url=base, timeout=HANG_S, trust_env=False, verify=False) as client:
            try:
                yield client, base, server
            finally:
                server.should_exit = True
                await running


@contextlib.asynccontextmanager
async def world(
    *environments: Environment, tasks: Json | None = None, clock: Callable[[], float] | None = None, **front: Any
) -> AsyncIterator[World]:
    """Run a gateway that serves and runs its loops. *tasks* are the splits of every environment."""
    some = environments or (environment(),)
    timed = {"clock": clock} if clock is not None else {}
    own: dict[str, Any] = {f"tasks_{one.name}": tasks for one in some if tasks is not None}
    async with (
        stack(*some, **own, **timed, **front) as built,
        built.first.looping(),
        serving(built.first) as (client, base, server),
    ):
        yield World(built, built.first, client, base, server)
