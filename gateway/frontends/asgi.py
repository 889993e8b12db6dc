"""What all frontends need of ASGI: bounded bodies, JSON answers, and an end when the trainer hangs up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

from starlette.types import Message, Receive, Scope, Send

from gateway.core.errors import BodyTooLarge, InvalidRequest
from gateway.core.json_text import dump
from gateway.core.session import Group

DROP_BYTES = 256 * 2**20
DROP_S = 10.0
"""How much of a body that is too large is read, and for how long, before its sender is told."""
JSON_TYPE = (b"content-type", b"application/json")
POLICY_MAX_CHARS = 200
GROUP_MAX_CHARS = 200
MAX_GROUP_SIZE = 4096


class HungUp(Exception):
    """The trainer closed the connection before its request was complete."""


def header(scope: Scope, name: bytes) -> str | None:
    """The value of a request header, decoded as HTTP does; None if absent."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return None


def headers(scope: Scope, name: bytes) -> list[str]:
    """All values of a request header that may stand more than once."""
    return [bytes(value).decode("latin-1") for key, value in scope["headers"] if key == name]


def policy_tag(scope: Scope) -> str:
    """The trainer's tag of the policy that is to play, ``X-Policy-Tag``; empty where none is sent.

    Raises:
        InvalidRequest: it is too long, or has control characters.
    """
    tag = (header(scope, b"x-policy-tag") or "").strip()
    if len(tag) > POLICY_MAX_CHARS or not tag.isprintable():
        raise InvalidRequest(f"X-Policy-Tag: at most {POLICY_MAX_CHARS} printable characters are wanted")
    return tag


def group_of(scope: Scope) -> Group | None:
    """The group of openings that an opening is one of, ``X-Group-ID`` and ``X-Group-Size``; None where none is told.

    Raises:
        InvalidRequest: one of the two is missing, or is none.
    """
    name, size = (header(scope, b"x-group-id") or "").strip(), (header(scope, b"x-group-size") or "").strip()
    if not name and not size:
        return None
    if not name or len(name) > GROUP_MAX_CHARS or not name.isprintable():
        raise InvalidRequest(f"X-Group-ID: 1 to {GROUP_MAX_CHARS} printable characters are wanted with X-Group-Size")
    if not (
        size.isascii() and size.isdigit() and len(size) <= len(str(MAX_GROUP_SIZE)) and 0 < int(size) <= MAX_GROUP_SIZE
    ):
        raise InvalidRequest(f"X-Group-Size: a number from 1 to {MAX_GROUP_SIZE} is wanted with X-Group-ID")
    return Group(name, int(size))


async def read_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    """Read the request's body.

    Raises:
        BodyTooLarge: It exceeds, or announces more than, *limit_bytes*. The rest of it was read and dropped.
        HungUp: The trainer left.
    """
    announced = header(scope, b"content-length")
    is_too_large = announced is not None and announced.isdigit() and int(announced) > limit_bytes
    parts: list[bytes] = []
    size, more = 0, True
    while more and not is_too_large:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HungUp
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
        size += len(parts[-1])
        is_too_large = size > limit_bytes
    if is_too_large:
        if more:
            await _drop_body(receive)
        raise BodyTooLarge(f"the body exceeds {limit_bytes} bytes")
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def _drop_body(receive: Receive) -> None:
    """Read on, within bounds: a client whose connection is closed while it sends never gets to read the answer."""
    dropped, more = 0, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DROP_S):
            while more and dropped < DROP_BYTES:
                message = await receive()
                dropped += len(message.get("body", b""))
                more = message.get("more_body", False)


async def respond(send: Send, status: int, body: bytes, extra: Sequence[tuple[bytes, bytes]] = (JSON_TYPE,)) -> None:
    """Send a complete answer; *extra* are its headers besides the length."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [length, *extra]})
    await send({"type": "http.response.body", "body": body})


def denial(send: Send) -> Send:
    """Turn an HTTP answer into the refusal of a WebSocket's upgrade, which the server must know to send as one."""

    async def deny(message: Message) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    return deny


async def respond_json(send: Send, status: int, value: object, extra: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """Send *value* as compact JSON."""
    await respond(send, status, dump(value), (JSON_TYPE, *extra))


class Connection(Protocol):
    """A client's connection, as the server shows it in ``scope["gateway.upstreams.http1"]``."""

    is_lost: bool
    on_lost: Callable[[], None] | None
    """Set by whoever works for the client now; called once when it goes."""


class Attended:
    """Ends the work inside when the trainer hangs up.

    ``left`` then is True, and the cancellation stays inside. Look at ``left`` after acquiring something: a client
    library may have swallowed the cancellation.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        """Watch the connection of *scope*; where the server does not show it, by *receive* in a task."""
        self._connection: Connection | None = scope.get("gateway.upstreams.http1")
        self._receive = receive
        self._watcher: asyncio.Future[Any] | None = None
        self._task: asyncio.Task[Any] | None = None
        self.left = False

    async def __aenter__(self) -> Attended:
        self._task = asyncio.current_task()
        if self._connection is None:
            self._watcher = asyncio.ensure_future(self._watch())
            self._watcher.add_done_callback(self._on_watched)
        elif self._connection.is_lost:
            self._on_lost()
        else:
            self._connection.on_lost = self._on_lost
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        assert self._task is not None
        if self._connection is not None:
            self._connection.on_lost = None
        if self._watcher is not None:
            self._watcher.remove_done_callback(self._on_watched)
            self._watcher.cancel()
        task, self._task = self._task, None  # a callback that is on its way already must not cancel what comes next
        if self.left and task.uncancel() <= 0:
            return kind is not None and issubclass(kind, asyncio.CancelledError)
        return False

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _on_watched(self, watcher: asyncio.Future[Any]) -> None:
        if not watcher.cancelled():
            self._on_lost()

    def _on_lost(self) -> None:
        if self._task is not None:
            self.left = True
            self._task.cancel()
