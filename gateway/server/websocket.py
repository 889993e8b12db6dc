"""Extends uvicorn's WebSockets: they close between two frames, detect vanished clients, and count the held bytes."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from typing import Any, Final

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState

from gateway.core.errors import TooManyBytes
from gateway.server.http import Stall

FRAME_MAX_BYTES: Final = 16 * 2**20
"""Maximum size of a message from a WebSocket client, as in stock OpenEnv servers; a larger message closes with 1009."""
PARTS: Final = "gateway.parts"
"""Key of a ``websocket.send`` message with the parts of a text, which are sent as one message."""
PART_CHARS: Final = 2**20
"""Characters of a message to a client that are sent in one frame: copying so many takes about 5 ms."""
PING_S: Final = 20.0
"""Seconds between pings of a WebSocket client, which has no deadline for the pong: a long generation may block its
loop. The kernel detects a client's lost machine."""
LOST_AFTER_S: Final = 60
"""Seconds that a client's kernel may leave sent data unacknowledged before the connection counts as lost."""
TRY_AGAIN_LATER: Final = 1013
"""Close code of a WebSocket whose messages would exceed the budget of bytes; see `frontends.asgi.ByteBudget`."""
GOING_AWAY: Final = 1001
"""Close code of a WebSocket that this process ends, not the client."""
REASON_MAX_CHARS: Final = 120
"""Maximum length of the reason in a close frame, which holds at most 123 bytes."""
CLOSE_S: Final = 2.0
"""Seconds that a client has to answer the close; a client with a blocked loop does not answer."""

_log = logging.getLogger(__name__)
_log.setLevel(logging.WARNING)  # lower levels log paths and headers, which may contain a key


class BoundedSocket(WebSocketsSansIOProtocol):
    """One WebSocket connection of a client."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = self.conn.logger = _log
        self.conn.debug = False
        self._unanswered = 0
        self._is_ending = False
        self._is_refused = False
        self._stall = Stall()

    def pause_writing(self) -> None:
        """Start the stall timer: the client reads more slowly than the gateway writes."""
        self._stall.begin(self.transport)
        super().pause_writing()

    def resume_writing(self) -> None:
        """Stop the stall timer: the client has caught up."""
        self._stall.end()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the stall timer."""
        self._stall.end()
        super().connection_lost(exc)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Configure the kernel to detect the loss of the client's machine."""
        connected = transport.get_extra_info("socket")
        if connected is not None and connected.family in (socket.AF_INET, socket.AF_INET6):
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_AFTER_S * 1000)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Parse *data*, which counts in the budget of the client's key until all messages are answered.

        If the budget is exceeded, close the socket and drop what still arrives.
        """
        if self._is_refused:
            return
        if (held := self._held()) is not None:
            try:
                held.add(len(data))
            except TooManyBytes as error:
                self._is_refused = self._is_ending = True
                if not self.close_sent:
                    self._say_goodbye(TRY_AGAIN_LATER, error.detail)
                return
        super().data_received(data)
        self._release()

    def _held(self) -> Any:
        scope = getattr(self, "scope", None)  # uvicorn sets it when it has read the handshake
        return None if scope is None else scope.get("gateway.held")

    def _release(self) -> None:
        """Give the budget's bytes back if no message is incomplete or unanswered."""
        is_idle = self._unanswered <= 0 and not self.frames and not self.conn.reader.buffer
        if is_idle and (held := self._held()) is not None:
            held.release()

    def send_receive_event_to_app(self) -> None:
        """Count the messages that wait for their answer."""
        self._unanswered += 1
        super().send_receive_event_to_app()

    async def send(self, message: ASGISendEvent) -> None:
        """Send *message*, and close the socket if the end waited for this answer."""
        if self._is_ending and self.close_sent:
            raise ClientDisconnected
        text = message.get("text") if message["type"] == "websocket.send" else None
        if (parts := message.get(PARTS)) is not None and self.handshake_complete:
            await self._send_in_parts(parts)  # type: ignore[arg-type]  # an extension of ASGI
        elif isinstance(text, str) and len(text) > PART_CHARS and self.handshake_complete:
            await self._send_in_parts([text[at : at + PART_CHARS] for at in range(0, len(text), PART_CHARS)])
        else:
            await super().send(message)
        if message["type"] == "websocket.http.response.body" and self.close_sent:
            self.handshake_complete = True  # else uvicorn logs each denied upgrade as an error of the application
        if message["type"] == "websocket.send":
            self._unanswered -= 1
            self._release()
            if self._is_ending and self._unanswered <= 0 and not self.transport.is_closing():
                self._say_goodbye()

    async def _send_in_parts(self, parts: Sequence[str]) -> None:
        """Send a large message as several frames: copying it at once would block the other clients of the process."""
        for number, part in enumerate(parts, 1):
            await self.writable.wait()
            if self.transport.is_closing():
                raise ClientDisconnected
            send = self.conn.send_text if number == 1 else self.conn.send_continuation
            try:
                send(part.encode(), fin=number == len(parts))
            except InvalidState:
                raise ClientDisconnected from None
            self.transport.write(b"".join(self.conn.data_to_send()))
            await asyncio.sleep(0)

    def shutdown(self) -> None:
        """Close with 1001, once the message that is being processed is answered.

        If a client gets the close without an answer, its message was never processed, and it may send the message
        elsewhere.
        """
        self._is_ending = True
        if self.close_sent or not self.handshake_complete:
            super().shutdown()
        elif self._unanswered <= 0:
            self._say_goodbye()

    def _say_goodbye(self, code: int = GOING_AWAY, reason: str = "") -> None:
        # uvicorn closes immediately. If data is unread, the kernel would then reset the connection without the code.
        self.stop_keepalive()
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code})
        self.conn.send_close(code, reason[:REASON_MAX_CHARS])
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True  # incoming data is dropped from now on
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self.close_timer = self.loop.call_later(CLOSE_S, self.transport.close)
