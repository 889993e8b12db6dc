"""Reads event streams of a standard ORS server, and resumes a broken stream by its task id.

The gateway sends a request without a task id once. After that it requests only the outcome of the started call, so the
call can't run twice. The server keeps the outcome for a minute.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

from gateway.core import sse
from gateway.core.environment import Environment
from gateway.core.errors import SessionNotFound, UpstreamError, UpstreamGone, UpstreamTimeout
from gateway.core.json_text import compact
from gateway.core.ports.transport import Exchange, Request
from gateway.core.session import Session
from gateway.upstreams.ors.client import JSON, MAX_ANSWER_BYTES, STARTING_PAUSE_S, OrsClient, Refused, read

SILENCE_S: Final = 45.0
"""Seconds without a byte after which a stream counts as broken.

Servers write a comment every 10 s into an open stream, unless a blocking tool holds their only thread.
"""
RESUME_PAUSE_S: Final = 0.5
"""Seconds before each attempt to resume a stream."""
RESUME_S: Final = 60.0
"""Seconds of failed attempts after which the call counts as lost: a server keeps an outcome for so long."""
REFUSED_S: Final = 2.0
"""Seconds without a connection after which a server counts as gone."""
UNKNOWN_TASK_ID: Final = "unknown task_id"


class _Broken(Exception):
    """A stream broke before its last event. *cause* is the reason."""

    def __init__(self, cause: UpstreamError) -> None:
        super().__init__(cause)
        self.cause = cause


class _Patience:
    """Limits the time for attempts to resume a stream."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._answered_at = self._connected_at = self._loop.time()

    def answered(self) -> None:
        self._answered_at = self._connected_at = self._loop.time()

    async def pause(self, error: UpstreamError | None) -> None:
        """Wait before the next attempt, after *error* in the last attempt.

        Raises:
            UpstreamGone: The time for attempts is over.
        """
        now = self._loop.time()
        if not (isinstance(error, UpstreamGone) and not error.sent):
            self._connected_at = now
        if isinstance(error, UpstreamTimeout):
            self._answered_at = now  # the server accepts connections, and a tool that blocks it will end
        if now - self._connected_at > REFUSED_S or now - self._answered_at > RESUME_S:
            raise UpstreamGone(f"the worker was lost while the call ran: {error}", sent=True) from error
        await asyncio.sleep(RESUME_PAUSE_S)


async def outcome(
    link: OrsClient, session: Session, environment: Environment, target: bytes, body: Mapping[str, Any]
) -> sse.Event:
    """POST *body* and return the stream's last event, ``end`` or ``error``, with its complete data.

    Wait for the session's setup and for the outcome. The caller has to set a deadline.

    Raises:
        SessionNotFound: The server does not know the session. Nothing ran.
        Refused: The server refused the request. Nothing ran.
        UpstreamGone: The call was lost. If ``sent`` is True, it may have run.
    """
    attempt = _Attempt(link, session, target, body, environment.timeouts.call_s)
    try:
        while True:
            if (event := await attempt.once()) is not None:
                return event
            await asyncio.sleep(STARTING_PAUSE_S)  # the session's setup still runs
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
    """A call that is sent once, and whose outcome is requested until it arrives."""

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
        """Send the request and return the last event, or None if the session's setup still runs and the call did not.

        Raises:
            _Broken: The stream broke.
        """
        # One server sends no head until the setup is done. If the gateway left earlier, the server would run the call.
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
        """Request the outcome of the call that was sent.

        Raises:
            _Broken: The stream broke.
            UpstreamGone: The outcome is lost.
        """
        try:
            exchange = await self._send({**self._body, "task_id": self.task_id}, SILENCE_S)
        except (UpstreamGone, UpstreamTimeout) as error:
            raise _Broken(error) from error
        if exchange.status in (502, 503, 504):  # from a proxy between the server and the gateway
            raise _Broken(UpstreamError((await read(exchange)).detail))
        if exchange.status != 200:
            detail = (await read(exchange)).detail
            raise UpstreamGone(f"the outcome of the call is lost: {detail}", sent=True)  # "not found" means: never ran
        patience.answered()
        event = await self._last(exchange)
        if event == sse.Event("error", UNKNOWN_TASK_ID):
            raise UpstreamGone("the outcome of the call is lost: the worker does not know it any more", sent=True)
        return event

    async def _send(self, body: Mapping[str, Any], silence_s: float) -> Exchange:
        headers = (*self._link.of(self._session), *JSON, (b"accept", b"text/event-stream"))
        session = self._session
        request = Request(b"POST", self._target, headers, compact(body))
        return await self._link.send(session.worker, session.address, request, silence_s=silence_s)

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
                # Without a task id the stream can't be resumed, so only the transport's timeout applies.
                async with asyncio.timeout(SILENCE_S if self.task_id else None):
                    piece = await anext(pieces)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                raise UpstreamTimeout(f"the worker was silent for {SILENCE_S:g} s") from error
            yield piece
