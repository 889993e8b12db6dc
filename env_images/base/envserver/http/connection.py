"""HTTP/1.1 on an ``asyncio.Protocol``: connects the bytes of a connection to the application.

The connection answers its requests one at a time, in order. Pipelined requests wait in a short backlog. A disconnect
cancels the answer in progress, so work that must outlive it runs in its own task.

Differences from RFC 9110: ``Upgrade`` is refused, and an HTTP/1.0 connection serves one request.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

from envserver.errors import Refused, describe
from envserver.http.messages import Receiver, Request, Response, head_of, refused

logger = logging.getLogger("envserver")
BACKLOG = 16
"""Number of pipelined requests at which the connection stops reading."""
RECEIVE_S = 60.0
"""Seconds from the first byte within which a request must be complete. A body that keeps growing gets more time."""
DRAIN_S = 60.0
"""Seconds without a byte taken after which the server aborts the connection."""
LINGER_S = 2.0
"""Seconds after a refusal in which the client's bytes are read and dropped, so that the client can read the answer."""

Work: TypeAlias = Coroutine[Any, Any, Response | None]
"""Produces a response, or None if it has written a stream itself."""


class Pending(NamedTuple):
    """An answer that takes time."""

    work: Work
    release: Callable[[], None]
    """Called once, even if a disconnect cancels *work* before its first line."""


Answer: TypeAlias = Response | Pending | Work
Application: TypeAlias = Callable[[Request, "Connection"], Answer]


class Connection(asyncio.Protocol):
    """The connection of one client."""

    def __init__(
        self,
        *,
        application: Application,
        connections: "set[Connection]",
        body_max_bytes: int,
        keep_alive_s: float,
    ) -> None:
        """
        Args:
            connections: The set that contains the connection while it is open.
            keep_alive_s: Seconds after which an idle connection is closed. 0 means never.
        """
        self._application = application
        self._connections = connections
        self._keep_alive_s = keep_alive_s
        self._loop = asyncio.get_running_loop()
        self._receiver = Receiver(body_max_bytes=body_max_bytes, on_received=self._received, on_expect=self._expected)
        self._transport: asyncio.Transport
        self._backlog: deque[Request | Refused] = deque()
        self._answering: Request | None = None
        """The request whose answer is being produced or sent."""
        self._task: asyncio.Task[None] | None = None
        """The task that produces that answer, if it takes time."""
        self._is_last = False
        """Whether the connection ends after that answer."""
        self._is_paused = False
        """Whether reading is paused because of the backlog."""
        self._on_sent: Callable[[bool], None] | None = None
        """Callback of a response that has not completely left this process."""
        self._drained: asyncio.Future[None] | None = None
        """Set while bytes wait to be sent. Done when they are sent or never will be."""
        self._deadline: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._used_at = self._loop.time()

    # -- callbacks of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast instead of a check: uvloop's transports are not subclasses, but behave the same.
        self._transport = cast("asyncio.Transport", transport)
        # With 0 a write is tried immediately, and "paused" means exactly that there are unsent bytes.
        self._transport.set_write_buffer_limits(high=0)
        self._connections.add(self)
        if self._keep_alive_s:
            self._idle = self._loop.call_later(self._keep_alive_s, self._close_if_idle)

    def data_received(self, data: bytes) -> None:
        self._receiver.feed(data)
        self._answer_next()
        if self._receiver.is_receiving and self._deadline is None:
            self._deadline = self._loop.call_later(RECEIVE_S, self._check_progress, self._receiver.total_bytes)

    def eof_received(self) -> None:
        """Treat the end of the client's bytes as a disconnect: the transport closes itself."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._backlog.clear()
        self._receiver.close()
        for timer in (self._deadline, self._stalled, self._idle):
            if timer is not None:
                timer.cancel()
        if self._task is not None:
            self._task.cancel()
        self._settle(sent=False)

    def pause_writing(self) -> None:
        self._drained = self._loop.create_future()
        self._stalled = self._loop.call_later(DRAIN_S, self._check_drain, self._transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        self._settle(sent=True)
        self._answer_next()

    # -- receiving

    def _received(self, request: Request | Refused) -> None:
        self._backlog.append(request)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expected(self) -> None:
        # During another answer the line would be noise. The client sends its body after a while even without it.
        if self._answering is None and not self._backlog:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _check_progress(self, total_bytes: int) -> None:
        self._deadline = None
        if not self._receiver.is_receiving:
            return
        # A slow body may continue as long as it grows, but headers have a fixed time.
        has_grown = self._receiver.total_bytes > total_bytes and self._receiver.in_body
        if has_grown or self._is_paused:
            self._deadline = self._loop.call_later(RECEIVE_S, self._check_progress, self._receiver.total_bytes)
            return
        self._receiver.is_deaf = True
        self._received(Refused(408, "Request took too long"))
        self._answer_next()

    # -- answering

    def _answer_next(self) -> None:
        while self._backlog and self._answering is None and self._drained is None and not self._is_last:
            request = self._backlog.popleft()
            if isinstance(request, Refused):
                self._refuse(request)
                return
            self._answering = request
            self._used_at = self._loop.time()
            answer = self._ask(request)
            if isinstance(answer, Response):
                self._finish(answer)
            else:
                work, release = answer if isinstance(answer, Pending) else (answer, None)
                self._task = self._loop.create_task(self._answer(work))
                self._task.add_done_callback(partial(_release, work, release))
        # Bodies wait in the kernel, because a backlog of them could be large.
        has_body = any(isinstance(request, Request) and request.body for request in self._backlog)
        self._pause_reading(has_body or len(self._backlog) >= BACKLOG)

    def _ask(self, request: Request) -> Answer:
        try:
            return self._application(request, self)
        except Exception as error:  # noqa: BLE001  # a request's failure is its own: the server continues
            return failure(error)

    async def _answer(self, work: Work) -> None:
        try:
            response = await work
        except Exception as error:  # noqa: BLE001  # as above
            response = failure(error)
        self._task = None
        self._finish(response)
        self._answer_next()

    def _finish(self, response: Response | None) -> None:
        request = self._answering
        assert request is not None
        self._answering = None
        self._used_at = self._loop.time()
        keep_alive = request.keep_alive and not self._is_last
        if response is not None and not self._transport.is_closing():
            self._on_sent = response.on_sent
            has_body = request.method != b"HEAD"
            self._transport.write(
                response.wire(has_body=has_body, keep_alive=keep_alive, is_http_11=request.is_http_11)
            )
            if self._drained is None:
                self._settle(sent=not self._transport.is_closing())
        elif response is not None and response.on_sent is not None:
            response.on_sent(False)
        if not keep_alive:
            self._is_last = True
            self._transport.close()  # buffered bytes are still sent

    def _refuse(self, refusal: Refused) -> None:
        self._is_last = True
        self._transport.write(refused(refusal).wire(has_body=True, keep_alive=False, is_http_11=True))
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._loop.call_later(LINGER_S, self._transport.close)

    def _pause_reading(self, pause: bool) -> None:
        if pause != self._is_paused and not self._transport.is_closing():
            self._is_paused = pause
            (self._transport.pause_reading if pause else self._transport.resume_reading)()

    # -- sending

    def stream(self, headers: bytes) -> "Stream":
        """Start a streamed answer to the current request."""
        request = self._answering
        assert request is not None
        return Stream(self, headers, is_chunked=request.is_http_11, keep_alive=request.keep_alive and not self._is_last)

    def write(self, data: bytes) -> None:
        """Send *data*, or drop it if the connection is lost."""
        if not self._transport.is_closing():
            self._transport.write(data)

    @property
    def is_stalled(self) -> bool:
        """Whether bytes wait for the client to read them."""
        return self._drained is not None

    async def drain(self) -> bool:
        """Wait until everything is sent. Return False if it never will be. A client that stalls is disconnected."""
        if self._drained is not None:
            await asyncio.wait((self._drained,))
        return not self._transport.is_closing()

    def _settle(self, *, sent: bool) -> None:
        drained, self._drained = self._drained, None
        on_sent, self._on_sent = self._on_sent, None
        if drained is not None and not drained.done():
            drained.set_result(None)
        if on_sent is not None:
            on_sent(sent)

    def _check_drain(self, size: int) -> None:
        left = self._transport.get_write_buffer_size()
        if left < size:
            self._stalled = self._loop.call_later(DRAIN_S, self._check_drain, left)
        else:
            self._transport.abort()

    # -- ending

    def shutdown(self) -> None:
        """Close the connection after the answer in progress, if any."""
        self._is_last = True
        if self._answering is None:
            self._transport.close()

    def _close_if_idle(self) -> None:
        if self._transport.is_closing():
            return
        is_idle = self._answering is None and not self._receiver.is_receiving and self._drained is None
        left_s = self._used_at + self._keep_alive_s - self._loop.time()
        if is_idle and left_s <= 0:
            self._transport.close()
        else:
            self._idle = self._loop.call_later(max(left_s, 1.0), self._close_if_idle)


def _release(work: Work, release: Callable[[], None] | None, _: asyncio.Task[None]) -> None:
    work.close()  # a coroutine that never started would warn
    if release is not None:
        release()


class Stream:
    """A response that is written in pieces."""

    __slots__ = ("_connection", "_is_chunked")

    def __init__(self, connection: Connection, headers: bytes, *, is_chunked: bool, keep_alive: bool) -> None:
        self._connection = connection
        self._is_chunked = is_chunked
        framing = b"Transfer-Encoding: chunked\r\n" if is_chunked else b""
        ending = b"Connection: keep-alive\r\n" if keep_alive else b"Connection: close\r\n"
        connection.write(b"%b%b%b%b\r\n" % (head_of(200), headers, framing, ending))

    def write(self, data: bytes) -> None:
        """Send *data* as one chunk."""
        self._connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    def keep_alive(self, data: bytes) -> None:
        """Send *data* unless earlier bytes still wait for the client."""
        if not self._connection.is_stalled:
            self.write(data)

    async def end(self, data: bytes, trailers: bytes = b"") -> bool:
        """Send *data* and the end. Add the header lines *trailers* if the client supports chunks.

        Return False if the client never gets the end.
        """
        whole = b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(data), data, trailers) if self._is_chunked else data
        self._connection.write(whole)
        return await self._connection.drain()


def failure(error: Exception) -> Response:
    """Return *error* as a response in the protocol's form."""
    if isinstance(error, Refused):
        return refused(error)
    # The reference reports an author's hook, such as tasks(), and a server fault in this same form.
    logger.warning("request_failed error=%s", type(error).__name__, exc_info=error)
    return refused(Refused(500, describe(error)))
