"""Event streams of a standard ORS server: read strictly, and resumed by their task id when they break.

A request is sent once without a task id. After that only the outcome of what was begun is asked for, which the server
keeps for a minute: a second run is not possible.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

from gateway.core.environment import Environment
from gateway.core.errors import SessionNotFound, UpstreamError, UpstreamGone, UpstreamTimeout
from gateway.core.json_text import compact
from gateway.core.ports.transport import Exchange
from gateway.core.session import Session
from gateway.upstreams import sse
from gateway.upstreams.ors.client import JSON, MAX_ANSWER_BYTES, STARTING_PAUSE_S, OrsClient, Refused, of, read

SILENCE_S: Final = 45.0
"""Servers write a comment every 10 s into an open stream, unless a blocking tool holds their only thread."""
RESUME_PAUSE_S: Final = 0.5
RESUME_S: Final = 60.0
"""As long as a server keeps an outcome."""
REFUSED_S: Final = 2.0
"""A server that takes no connection for so long is not there."""
UNKNOWN_TASK_ID: Final = "unknown task_id"


class _Broken(Exception):
    """A stream ended before its end; *cause* says how."""

    def __init__(self, cause: UpstreamError) -> None:
        super().__init__(cause)
        self.cause = cause


class _Patience:
    """How long a stream is tried to be resumed that can't be."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._answered_at = self._connected_at = self._loop.time()

    def answered(self) -> None:
        self._answered_at = self._connected_at = self._loop.time()

    async def pause(self, error: UpstreamError | None) -> None:
        """Wait before the next try.

        Raises:
            UpstreamGone: it is no use.
        """
        now = self._loop.time()
        if not (isinstance(error, UpstreamGone) and not error.sent):
            self._connected_at = now
        if isinstance(error, UpstreamTimeout):
            self._answered_at = now  # it takes connections: a tool that blocks it will end
        if now - self._connected_at > REFUSED_S or now - self._answered_at > RESUME_S:
            raise UpstreamGone(f"the worker was lost while the call ran: {error}", sent=True) from error
        await asyncio.sleep(RESUME_PAUSE_S)


async def outcome(
    link: OrsClient, session: Session, environment: Environment, target: bytes, body: Mapping[str, Any]
) -> sse.Event:
    """POST *body* and return the stream's last event, ``end`` or ``error``, with the whole of its data.

    Waits for the session's setup, and for the outcome, until the caller's deadline cancels it.

    Raises:
        SessionNotFound: the server does not know the session; nothing ran.
        Refused: it refused the request; nothing ran.
        UpstreamGone: it was lost; with ``sent`` True it may have run.
    """
    attempt = _Attempt(link, session, target, body, environment.timeouts.call_s)
    try:
        while True:
            if (event := await attempt.once()) is not None:
                return event
            await asyncio.sleep(STARTING_PAUSE_S)  # its setup runs
    except _Broken as broken:
        if not attempt.task_id:
            raise UpstreamGone("the stream broke before the call had an id", sent=True) from broken.cause
    patience = _Patience()
    error: UpstreamError | None = None
    while True:
        await patience.pause(error)
        try:
            return await attempt.again(patience)
        except _Broken as broken:
            error = broken.cause


class _Attempt:
    """One request, sent once, and as often as it takes to hear of its outcome."""

    def __init__(
        self, link: OrsClient, session: Session, target: bytes, body: Mapping[str, Any], within_s: float
    ) -> None:
        self._link = link
        self._session = session
        self._target = target
        self._body = body
        self._within_s = within_s
        self.task_id = ""

    async def once(self) -> sse.Event | None:
        """Send it; None if the server says that the session's setup runs, so that nothing else did.

        Raises:
            _Broken: the stream broke.
        """
        # One of the servers sends no head before the setup is done, and would run a request that was left meanwhile.
        exchange = await self._send(self._body, self._within_s)
        if exchange.status != 200:
            answer = await read(exchange)
            if answer.is_starting:
                return None
            if answer.is_unknown_session:
                raise SessionNotFound(self._session.name)
            raise Refused(answer)
        kind = dict(exchange.headers).get(b"content-type", b"")
        if not kind.startswith(b"text/event-stream"):
            return sse.Event("end", (await read(exchange)).body.decode("utf-8", "replace"))
        return await self._last(exchange)

    async def again(self, patience: _Patience) -> sse.Event:
        """Ask for the outcome of what runs already.

        Raises:
            _Broken: the stream broke.
            UpstreamGone: the outcome is lost.
        """
        try:
            exchange = await self._send({**self._body, "task_id": self.task_id}, SILENCE_S)
        except (UpstreamGone, UpstreamTimeout) as error:
            raise _Broken(error) from error
        if exchange.status in (502, 503, 504):  # of something between it and us
            raise _Broken(UpstreamError((await read(exchange)).detail))
        if exchange.status != 200:
            detail = (await read(exchange)).detail
            raise UpstreamGone(f"the outcome of the call is lost: {detail}", sent=True)  # not "not found": it has run
        patience.answered()
        event = await self._last(exchange)
        if event == sse.Event("error", UNKNOWN_TASK_ID):
            raise UpstreamGone("the outcome of the call is lost: the worker does not know it any more", sent=True)
        return event

    async def _send(self, body: Mapping[str, Any], silence_s: float) -> Exchange:
        headers = (*of(self._session), *JSON, (b"accept", b"text/event-stream"))
        session = self._session
        return await self._link.send(
            session.worker, session.address, b"POST", self._target, headers, compact(body), silence_s=silence_s
        )

    async def _last(self, exchange: Exchange) -> sse.Event:
        reader = sse.Reader(max_bytes=MAX_ANSWER_BYTES)
        parts: list[str] = []
        size = 0
        try:
            async for piece in self._pieces(exchange):
                for event in reader.feed(piece):
                    if event.name == "task_id":
                        self.task_id = event.data.strip()
                    elif event.name in ("chunk", "end"):
                        parts.append(event.data)
                        size += len(event.data)
                        if size > MAX_ANSWER_BYTES:
                            raise UpstreamError(f"the worker's answer exceeds {MAX_ANSWER_BYTES} characters")
                    if event.name == "end":
                        return sse.Event("end", "".join(parts))
                    if event.name == "error":
                        return event
        except (UpstreamGone, UpstreamTimeout) as error:
            raise _Broken(error) from error
        finally:
            await exchange.aclose()
        raise _Broken(UpstreamGone("the stream ended before its end", sent=True))

    async def _pieces(self, exchange: Exchange) -> AsyncIterator[bytes]:
        pieces = exchange.chunks()
        while True:
            try:
                # Until it has an id it can't be asked for again: then the transport's patience is all there is.
                async with asyncio.timeout(SILENCE_S if self.task_id else None):
                    piece = await anext(pieces)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                raise UpstreamTimeout(f"the worker was silent for {SILENCE_S:g} s") from error
            yield piece
