"""Connect to OpenEnv servers by WebSocket, with one connection per session that sends requests in order.

A reply belongs to a request only by its position. So a cancelled caller does not end the exchange: the reply is read
and dropped, and the next request gets its own reply.

`LiveSession` is a session whose socket this replica holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.protocol import State

from gateway.core.addresses import parse_address
from gateway.core.environment import Environment
from gateway.core.episode import Summary
from gateway.core.errors import PoolExhausted, SessionNotFound, UpstreamError, UpstreamGone, UpstreamTimeout
from gateway.core.ports.transport import TRACE, DialSocket
from gateway.core.session import Session
from gateway.upstreams.openenv.frames import CLOSE, FAILED, acts, fault_of, kind_of, outcome_of
from gateway.upstreams.openenv.http import Place

logger = logging.getLogger(__name__)
CONNECT_S: Final = 20.0
"""Seconds for the upgrade. A server that imports its environment for its first session blocks during the import."""
PING_S: Final = 30.0
PONG_S: Final = 3660.0
"""Seconds to wait for a pong, longer than the longest call: an environment that blocks its server's loop sends none."""
GOODBYE_S: Final = 5.0
MAX_REPLY_BYTES: Final = 160 * 2**20
"""Maximum size of a reply; OpenEnv's clients accept observations of 100 MiB."""
QUEUE_MAX: Final = 32
"""Maximum number of requests that wait in one session."""
BACKLOG_PAUSE_S: Final = 0.005


class NotListening(UpstreamGone):
    """No process listens at the address: the server and its sessions are gone."""

    def __init__(self, message: str) -> None:
        super().__init__(message, sent=False)


class WebSocketPool:
    """Opens WebSockets to servers."""

    def __init__(self, dial_socket: DialSocket | None = None) -> None:
        """Create the pool; *dial_socket* connects to workers on other machines."""
        self._dial_socket = dial_socket
        self._tls: ssl.SSLContext | None = None

    async def open(self, address: str, target: str, *, answer_s: float, within_s: float = CONNECT_S) -> FrameConnection:
        """Open a WebSocket at *target* (path and query).

        Args:
            answer_s: Seconds that a reply may take.
            within_s: Seconds that the opening may take.

        Raises:
            NotListening: No process listens at *address*.
            UpstreamGone: The connection failed, or the server answered the upgrade with a 5xx status.
            UpstreamError: The server refuses the upgrade.
        """
        try:
            async with asyncio.timeout(within_s):
                while True:
                    try:
                        return FrameConnection(await self._connect(address, target), answer_s=answer_s)
                    except BlockingIOError:
                        await asyncio.sleep(BACKLOG_PAUSE_S)  # the Unix socket's backlog is full
        except InvalidStatus as error:
            status = error.response.status_code
            message = f"the server refuses a WebSocket at {target.partition('?')[0]}: HTTP {status}"
            if status >= 500:
                raise UpstreamGone(message, sent=False) from error
            raise UpstreamError(message) from error
        except (ConnectionRefusedError, FileNotFoundError) as error:
            raise NotListening(f"no connection to the worker: {error}") from error
        except (OSError, TimeoutError, InvalidHandshake, InvalidURI, ConnectionClosed, EOFError) as error:
            raise UpstreamGone(f"no connection to the worker: {error or 'timed out'}", sent=False) from error

    async def _connect(self, address: str, target: str) -> ClientConnection:
        place = parse_address(address)
        more: dict[str, Any] = {}
        if place.is_unix:
            more = {"unix": True, "path": place.path}
        elif place.is_on_node:
            if self._dial_socket is None:
                raise OSError("this gateway has no nodes")
            more = {"unix": True, "sock": await self._dial_socket(place)}
        elif place.tls:
            if self._tls is None:
                self._tls = ssl.create_default_context()  # created once, because it takes 20 ms
            more = {"ssl": self._tls}
        return await connect(
            place.url(target, scheme="ws"),
            compression=None,
            proxy=None,
            max_size=MAX_REPLY_BYTES,
            ping_interval=PING_S,
            ping_timeout=PONG_S,
            open_timeout=None,
            close_timeout=GOODBYE_S,
            additional_headers=[(name.decode(), value.decode("latin-1")) for name, value in TRACE.get()],
            **more,
        )


class _Asked:
    """A request, and the future of its reply."""

    __slots__ = ("frame", "reply")

    def __init__(self, frame: bytes) -> None:
        self.frame = frame
        self.reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()


class FrameConnection:
    """One connection, owned by a task that sends one request after the other."""

    def __init__(self, socket: ClientConnection, *, answer_s: float) -> None:
        self._socket = socket
        self._answer_s = answer_s
        self._waiting: deque[_Asked] = deque()
        self._wanted = asyncio.Event()
        self._current: _Asked | None = None
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._is_done = False
        self.heard: Callable[[bytes, bytes], None] | None = None
        """Called with each request and its reply, even if the caller was cancelled."""
        self.overran = False
        """Whether the connection ended while the server still processed a request."""
        self._task = asyncio.ensure_future(self._run())

    @property
    def is_open(self) -> bool:
        """Whether a request may be sent."""
        return not self._is_done and self._socket.state is State.OPEN

    @property
    def is_busy(self) -> bool:
        """Whether the server processes a request."""
        return self._current is not None and self._socket.state is State.OPEN

    @property
    def close_code(self) -> int | None:
        """The code of the socket's close; None while it is open."""
        return self._socket.close_code

    async def ask(self, frame: bytes) -> bytes:
        """Send *frame* in its turn and return its reply. If the caller is cancelled, a started exchange continues.

        Raises:
            UpstreamGone: The connection broke; ``sent`` states whether *frame* may have reached the server.
            UpstreamTimeout: The reply took too long, and the connection was dropped.
            PoolExhausted: Too many requests wait, and nothing was sent.
        """
        if self._is_done:
            raise UpstreamGone(self._broken(), sent=False)
        if len(self._waiting) >= QUEUE_MAX:
            raise PoolExhausted("too many requests wait in this session")
        asked = _Asked(frame)
        self._waiting.append(asked)
        self._wanted.set()
        try:
            return await asked.reply
        except asyncio.CancelledError:
            with contextlib.suppress(ValueError):
                self._waiting.remove(asked)  # an unsent request is cancelled
            raise

    async def settle(self, within_s: float) -> bool:
        """Wait at most *within_s* seconds until no request runs; return True if none runs."""
        # The request's future does not serve: a cancelled caller cancels it while the reply is still to come.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._is_idle.wait()
        return not self.is_busy

    async def close(self, within_s: float) -> bool:
        """Send the close frame and wait until the server has closed: a session without an id has ended by then.

        Return False if the server did not close in time; the connection is dropped then.
        """
        self._stop(UpstreamGone("the session ends", sent=False))
        try:
            async with asyncio.timeout(within_s):
                if self._socket.state is State.OPEN:
                    with contextlib.suppress(ConnectionClosed):
                        await self._socket.send(CLOSE, text=True)
                await self._socket.wait_closed()
        except TimeoutError:
            self._socket.transport.abort()
            return False
        except BaseException:
            self._socket.transport.abort()
            raise
        return True

    async def leave(self) -> None:
        """Close the socket without a close frame of OpenEnv: the server keeps a session that has an id."""
        self._stop(UpstreamGone("this replica releases the session", sent=True))
        await self._socket.close(1001)

    def abort(self) -> None:
        """Drop the connection immediately."""
        self.overran = self.overran or self.is_busy
        self._stop(UpstreamGone("the connection was given up", sent=True))
        self._socket.transport.abort()

    async def _run(self) -> None:
        while True:
            while not self._waiting:
                self._wanted.clear()
                await self._wanted.wait()
            asked = self._waiting.popleft()
            if asked.reply.done():  # its caller was cancelled
                continue
            self._current = asked
            self._is_idle.clear()
            try:
                reply = await self._exchange(asked.frame)
                if self.heard is not None:
                    self.heard(asked.frame, reply)
            except UpstreamError as error:
                self._fail(error)
                return
            except Exception as error:  # every waiting caller must get an answer
                logger.exception("openenv_socket_broken")
                self._fail(UpstreamGone(f"the connection to the worker broke: {error}", sent=True))
                self._socket.transport.abort()
                return
            self._current = None
            self._is_idle.set()
            if not asked.reply.done():
                asked.reply.set_result(reply)

    async def _exchange(self, frame: bytes) -> bytes:
        is_sent = self._socket.state is State.OPEN
        try:
            async with asyncio.timeout(self._answer_s):
                if is_sent:
                    with contextlib.suppress(ConnectionClosed):
                        await self._socket.send(frame, text=True)
                # Read even from a closed socket: a server that refuses a session sends the refusal and then closes.
                return await self._socket.recv(decode=False)
        except ConnectionClosed as error:
            self.overran = is_sent
            raise UpstreamGone(self._broken(), sent=is_sent) from error
        except TimeoutError as error:
            self.overran = True
            self._socket.transport.abort()
            raise UpstreamTimeout(f"the worker did not reply within {self._answer_s:g} s") from error

    def _fail(self, error: UpstreamError) -> None:
        """Fail the running request with *error*, and each waiting request with an error that states it was not sent."""
        self._is_done = True
        current, self._current = self._current, None
        self._is_idle.set()
        if current is not None and not current.reply.done():
            current.reply.set_exception(error)
        while self._waiting:
            asked = self._waiting.popleft()
            if not asked.reply.done():
                asked.reply.set_exception(UpstreamGone(str(error), sent=False))

    def _stop(self, error: UpstreamGone) -> None:
        self._task.cancel()
        self._fail(error)

    def _broken(self) -> str:
        code, reason = self._socket.close_code, self._socket.close_reason
        return f"the worker closed the connection (code {code}{f', {reason}' if reason else ''})"


class LiveSession:
    """A session whose socket this replica holds, with the outcomes of its steps."""

    def __init__(
        self, session: Session, environment: Environment, sid: str, line: FrameConnection, first: bytes
    ) -> None:
        self.session = session
        self.environment = environment
        self.digest = environment.digest()
        self.sid = sid
        self.take(line)
        self.first = first
        """The reply to the session's reset; empty if this replica does not have it, or has dropped it."""
        self.steps = 0
        self.is_whole = True
        """False if another replica held the session before: this replica lacks the outcomes of its earlier steps."""
        self.is_ended = False
        self.was_broken = False
        """Whether the socket was broken at the last sweep."""
        self.attaching = asyncio.Lock()
        self._reward = 0.0
        self._is_rewarded = False
        self.finished = False
        """True if the environment has ended the episode."""
        self._began_at = time.monotonic()

    @property
    def at(self) -> Place:
        """The session's worker and its address."""
        return Place(self.session.worker, self.session.address)

    @property
    def summary(self) -> Summary:
        """The episode's summary, from the steps that this replica has relayed."""
        seconds = time.monotonic() - self._began_at
        return Summary(
            reward=self._reward,
            finished=self.finished,
            steps=self.steps,
            seconds=seconds,
            is_rewarded=self._is_rewarded,
            is_whole=self.is_whole,
        )

    def take(self, line: FrameConnection) -> None:
        """Continue the session on *line*."""
        self.line = line
        line.heard = self.note

    def check(self) -> None:
        """Raise ``SessionNotFound`` if the session is being ended."""
        if self.is_ended:
            raise SessionNotFound(self.session.name)

    def note(self, frame: bytes, reply: bytes) -> None:
        """Record the outcome of an action; a malformed action does not count.

        A JSON-RPC tool call does not count as a step, as in the servers: its reply has no field for a reward.
        """
        if not acts(frame):
            return
        if kind_of(reply) == "observation":
            reward, finished = outcome_of(reply)
            self.steps += 1
            self._reward += reward or 0.0
            self._is_rewarded = self._is_rewarded or reward is not None
            self.finished = self.finished or finished
        elif (fault := fault_of(reply)) is not None and fault.code == FAILED:
            self.steps += 1
