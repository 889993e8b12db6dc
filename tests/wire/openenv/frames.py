"""A raw socket for frames that no client can send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from tests.deadlines import HANG_S


class Socket:
    """One open socket. Every wait on it has a timeout."""

    def __init__(self, inner: ClientConnection) -> None:
        self.inner = inner

    async def send(self, frame: str | bytes | Mapping[str, Any]) -> None:
        await self.inner.send(frame if isinstance(frame, (str, bytes)) else json.dumps(frame))

    async def reply(self) -> dict[str, Any]:
        """Return the next frame."""
        async with asyncio.timeout(HANG_S):
            frame = await self.inner.recv()
        assert isinstance(frame, str), "frames are text"
        reply: dict[str, Any] = json.loads(frame)
        return reply

    async def ask(self, frame: str | bytes | Mapping[str, Any]) -> dict[str, Any]:
        await self.send(frame)
        return await self.reply()

    async def reset(self, **data: Any) -> dict[str, Any]:
        return await self.ask({"type": "reset", "data": data})

    async def step(self, **data: Any) -> dict[str, Any]:
        return await self.ask({"type": "step", "data": data})

    async def state(self) -> dict[str, Any]:
        return await self.ask({"type": "state"})

    async def closed(self) -> int:
        """Return the code with which the server closes the socket, and assert that no frame comes before."""
        async with asyncio.timeout(HANG_S):
            try:
                frame = await self.inner.recv()
            except ConnectionClosed as closed:
                return closed.rcvd.code if closed.rcvd else 1006
        raise AssertionError(f"the socket is open and says {frame!r}")


@asynccontextmanager
async def socket(url: str, **options: Any) -> AsyncIterator[Socket]:
    """Open ``{url}/ws``. *url* is a base URL with ``http``."""
    base, question, query = url.partition("?")
    address = base.replace("http", "ws", 1) + "/ws" + question + query
    async with connect(address, proxy=None, max_size=128 * 2**20, **options) as inner:
        yield Socket(inner)


def said(reply: Mapping[str, Any]) -> tuple[str, str]:
    """Return the code and the message of an error frame."""
    assert reply["type"] == "error", reply
    return reply["data"]["code"], reply["data"]["message"]
