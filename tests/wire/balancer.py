"""A small load balancer: it sends each new connection to a gateway that reports that it is ready."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Final

import httpx

from tests.deadlines import HANG_S
from tests.fakes.eventually import until
from tests.fakes.splicing import serving, splice
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
        self.url = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Balancer]:
        asking = asyncio.ensure_future(self._ask_all())
        try:
            async with serving(self._pass_on) as port:
                self.url = f"http://127.0.0.1:{port}"
                yield self
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _ask_all(self) -> None:
        async with httpx.AsyncClient(verify=False, trust_env=False, timeout=HANG_S) as http:
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

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await until(lambda: self.ready)
        gateway = self.ready[next(self._turn) % len(self.ready)]
        url = httpx.URL(gateway.url)
        try:
            there = await asyncio.open_connection(url.host, url.port)
        except OSError:
            self.refused += 1
            return
        self.taken[gateway.pid] = self.taken.get(gateway.pid, 0) + 1
        await splice((reader, writer), there)
