"""A client's end of a WebSocket: its frames one by one, and an end to what runs for it when it leaves.

Frames are read when they are wanted, so that a client that sends ahead is held back by its own connection. Only while
something takes long is there a reader beside it, which notices that the client leaves. An idle socket has one task.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from typing import Final, TypeVar

from starlette.types import Message, Receive, Send

T = TypeVar("T")

WATCHED_AFTER_S: Final = 0.2
"""What is answered sooner needs no reader beside it; most steps are."""
AHEAD_MAX: Final = 8
AHEAD_CHARS: Final = 2**20
"""Frames that are kept for a client that sends ahead while something runs. Beyond them nobody reads, so that it is not
noticed before the end of what runs that the client left."""


class Left(Exception):
    """The client is gone: there is nobody to answer."""


class Peer:
    """One WebSocket."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._ahead: deque[str | None] = deque()
        self._ahead_chars = 0
        self._watcher: asyncio.Task[None] | None = None
        self._has_left = False

    async def next(self) -> str | None:
        """The next frame; None stands for a binary one.

        Raises:
            Left: there is none any more.
        """
        if self._ahead:
            text = self._ahead.popleft()
            self._ahead_chars -= len(text or "")
            return text
        if self._has_left:
            raise Left
        return self._read(await self._receive())

    async def accept(self) -> None:
        """Complete the handshake. Raises ``Left``."""
        await self._put({"type": "websocket.accept"})

    async def say(self, text: str) -> None:
        """Send a frame. Raises ``Left``."""
        await self._put({"type": "websocket.send", "text": text})

    async def close(self, code: int = 1000) -> None:
        """Close the socket. Raises ``Left``."""
        await self._put({"type": "websocket.close", "code": code})

    async def attended(self, work: Awaitable[T]) -> T:
        """Wait for *work*, which is cancelled when the client leaves.

        Raises:
            Left: it left; *work* has ended.
        """
        task = asyncio.current_task()
        assert task is not None
        timer = asyncio.get_running_loop().call_later(WATCHED_AFTER_S, self._watch, task)
        try:
            done = await work
        except asyncio.CancelledError:
            if self._has_left and task.uncancel() <= 0:
                raise Left from None
            raise
        finally:
            timer.cancel()
            if self._watcher is not None:
                await self._stop_watching(self._watcher)
        if self._has_left:  # it ended all the same: a client library may have swallowed the cancellation
            task.uncancel()
            raise Left
        return done

    def _watch(self, task: asyncio.Task[object]) -> None:
        self._watcher = asyncio.ensure_future(self._read_ahead(task))

    async def _read_ahead(self, task: asyncio.Task[object]) -> None:
        while len(self._ahead) < AHEAD_MAX and self._ahead_chars < AHEAD_CHARS:
            try:
                text = self._read(await self._receive())
            except Left:
                task.cancel()
                return
            self._ahead.append(text)
            self._ahead_chars += len(text or "")

    async def _stop_watching(self, watcher: asyncio.Task[None]) -> None:
        # A read that is broken off loses nothing: a message leaves the server's queue in the turn that hands it out.
        self._watcher = None
        watcher.cancel()
        await asyncio.wait({watcher})

    def _read(self, message: Message) -> str | None:
        if message["type"] == "websocket.disconnect":
            self._has_left = True
            raise Left
        text: str | None = message.get("text")
        return text

    async def _put(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError:  # as ASGI servers say that the client is gone
            self._has_left = True
            raise Left from None
