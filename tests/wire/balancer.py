"""A small load balancer: it sends each new connection to a gateway that reports that it is ready."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Final

import httpx

from tests.deadlines import scaled
from tests.fakes.eventually import until
from tests.fakes.splicing import splice
from tests.wire.gateways import Gateway

ASK_EVERY_S: Final = 0.1


class Balancer:
    """Passes connections on to gateways that report that they are ready."""

    def __init__(self) -> None:
        self.gateways: list[Gateway] = []
        self.ready: list[Gateway] = []
        self.refused = 0
        """Connections that a ready gateway did not accept."""
        self.taken: dict[int, int] = {}
        """The number of connections for each gateway's process id."""
        self._turn = itertools.count()
        self._piping: set[asyncio.Task[None]] = set()
        self.url = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Balancer]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        asking = asyncio.ensure_future(self._ask_all())
        try:
            yield self
        finally:
            asking.cancel()
            server.close()
            for task in list(self._piping):
                task.cancel()
            await asyncio.gather(asking, *self._piping, return_exceptions=True)

    async def _ask_all(self) -> None:
        async with httpx.AsyncClient(verify=False, trust_env=False, timeout=scaled(2)) as http:
            while True:
                asked = list(self.gateways)
                answers = await asyncio.gather(*(self._is_ready(http, one) for one in asked))
                self.ready = [one for one, is_ready in zip(asked, answers, strict=True) if is_ready]
                await asyncio.sleep(ASK_EVERY_S)

    async def _is_ready(self, http: httpx.AsyncClient, gateway: Gateway) -> bool:
        try:
            return (await http.get(f"{gateway.url}/readyz", headers={"connection": "close"})).status_code == 200
        except httpx.HTTPError:
            return False

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._pass_on(reader, writer))
        self._piping.add(task)
        task.add_done_callback(self._piping.discard)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await until(lambda: self.ready)
            gateway = self.ready[next(self._turn) % len(self.ready)]
            url = httpx.URL(gateway.url)
            try:
                there_reader, there_writer = await asyncio.open_connection(url.host, url.port)
            except OSError:
                self.refused += 1
                return
            self.taken[gateway.pid] = self.taken.get(gateway.pid, 0) + 1
            await splice((reader, writer), (there_reader, there_writer))
        finally:
            writer.close()
