"""A load balancer as operators put before machines: new connections go to gateways that report themselves ready.

Connections to a leaving gateway stay until it closes them. Connections to a silent gateway are cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import httpx

from tests.deadlines import HANG_S
from tests.fakes.eventually import until
from tests.fakes.splicing import serving, splice

ASK_EVERY_S = 0.2
ANSWER_S = 5.0
SILENT_S = 50.0
"""Seconds of silence after which a gateway counts as gone. A machine busy with three engines needs this much."""


@dataclass(eq=False)
class Target:
    """An address at which a gateway may be."""

    host: str
    port: int
    is_ready: bool = False
    heard_at: float = 0.0
    connections: set[asyncio.Task[None]] = field(default_factory=set)


class Balancer:
    """Listens on a port of loopback."""

    def __init__(self, addresses: Sequence[tuple[str, int]]) -> None:
        self.targets = [Target(host, port) for host, port in addresses]
        self.url = ""
        self._turn = itertools.count()

    @property
    def ready(self) -> list[Target]:
        """The gateways that get new connections."""
        return [target for target in self.targets if target.is_ready]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Balancer]:
        """Serve until the block is left."""
        asking = [asyncio.ensure_future(self._ask(target)) for target in self.targets]
        try:
            async with serving(self._pass_on) as port:
                self.url = f"http://127.0.0.1:{port}"
                yield self
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def _ask(self, target: Target) -> None:
        loop = asyncio.get_running_loop()
        url = f"http://{target.host}:{target.port}/readyz"
        async with httpx.AsyncClient(verify=False, trust_env=False, timeout=ANSWER_S) as http:
            while True:
                try:
                    answer = await http.get(url, headers={"connection": "close"})
                    target.is_ready, target.heard_at = answer.status_code == 200, loop.time()
                except httpx.HTTPError:
                    target.is_ready = False
                if loop.time() - target.heard_at > SILENT_S:
                    for connection in target.connections:
                        connection.cancel()
                await asyncio.sleep(ASK_EVERY_S)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target, there_reader, there_writer = await self._connected()
        task = asyncio.current_task()
        assert task is not None
        target.connections.add(task)
        task.add_done_callback(target.connections.discard)
        await splice((reader, writer), (there_reader, there_writer))

    async def _connected(self) -> tuple[Target, asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the next ready gateway that accepts the connection. Nothing was sent yet, so it may try several."""
        deadline = asyncio.get_running_loop().time() + HANG_S
        while True:
            await until(lambda: self.ready)
            target = self.ready[next(self._turn) % len(self.ready)]
            try:
                async with asyncio.timeout(ANSWER_S):
                    return target, *await asyncio.open_connection(target.host, target.port)
            except OSError:
                target.is_ready = False
                if asyncio.get_running_loop().time() > deadline:
                    raise
