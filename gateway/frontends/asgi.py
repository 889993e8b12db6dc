"""ASGI helpers of all frontends: bounded bodies, JSON responses, and cancellation when the trainer disconnects.

`ByteBudget` bounds the bytes that requests hold in this replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Protocol

from starlette.types import Message, Receive, Scope, Send

from gateway.catalog.catalog import Catalog
from gateway.core.errors import BodyTooLarge, InvalidRequest, TooManyBytes
from gateway.core.ids import Owner
from gateway.core.json_text import dump
from gateway.core.ports.store import WorkerStore
from gateway.core.session import Group
from gateway.metrics import Metrics
from gateway.server import Lifecycle
from gateway.sessions.service import Sessions
from gateway.sessions.worker_queries import WorkerQueries
from gateway.tasks.resolver import TaskResolver

DROP_BYTES = 256 * 2**20
DROP_S = 10.0
"""Limits for draining an oversized body before the 413 response: `DROP_BYTES` bytes and `DROP_S` seconds."""
JSON_TYPE = (b"content-type", b"application/json")
POLICY_MAX_CHARS = 200
GROUP_MAX_CHARS = 200
MAX_GROUP_SIZE = 4096
PARENT: Final = b"traceparent"
STATE: Final = b"tracestate"
STATE_MAX_BYTES: Final = 512
"""Longest ``tracestate`` that is passed on. Every participant must keep at least so much, says the standard."""
_PARENT: Final = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_NO_MORE: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendParts:
    """What the frontends of all protocols use."""

    sessions: Sessions
    queries: WorkerQueries
    resolver: TaskResolver
    store: WorkerStore
    catalog: Catalog
    metrics: Metrics
    lifecycle: Lifecycle
    max_body_bytes: int


class Refusal(Exception):
    """Ends a request with a status, a JSON body and further headers."""

    def __init__(
        self, status: int, detail: Any, extra: Sequence[tuple[bytes, bytes]] = (), *, more: Mapping[str, str] = _NO_MORE
    ) -> None:
        """Create the refusal. Its body has *detail* and the fields *more*."""
        super().__init__(detail)
        self.status = status
        self.body = {"detail": detail, **more}
        self.extra = extra


class HungUp(Exception):
    """The trainer closed the connection before its request was complete."""


class ByteBudget:
    """Bounds the bytes of requests that this replica holds, for all keys together and for each key.

    A request holds its body and headers from the first byte until its response is complete, so also while its opening
    waits in the queue. A WebSocket holds the frames that it receives until they are answered.
    """

    def __init__(self, total_bytes: int, per_key_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._per_key_bytes = per_key_bytes
        self._held: dict[Owner, int] = {}
        self._all = 0

    def hold(self, owner: Owner, limit_bytes: int = 0) -> HeldBytes:
        """Return the empty share of a new request of *owner*. *limit_bytes*: the key's own limit; 0: that of all."""
        return HeldBytes(self, owner, limit_bytes or self._per_key_bytes)

    def take(self, owner: Owner, count: int, own: int, limit_bytes: int) -> None:
        """Add *count* bytes to a request that holds *own* bytes already. All of the key may hold *limit_bytes*.

        A request that is the only one may exceed the budget, so that each request below ``max_body_bytes`` can succeed.

        Raises:
            TooManyBytes: The budget of *owner*, or of all keys, is used up by other requests too.
        """
        mine = self._held.get(owner, 0)
        if mine + count > limit_bytes and mine > own:
            raise _too_many("this key", mine, limit_bytes)
        if self._all + count > self._total_bytes and self._all > own:
            raise _too_many("all keys", self._all, self._total_bytes)
        self._held[owner] = mine + count
        self._all += count

    def give_back(self, owner: Owner, count: int) -> None:
        """Remove *count* bytes of a request of *owner*."""
        self._all -= count
        left = self._held.pop(owner) - count
        if left:
            self._held[owner] = left


def _too_many(whose: str, held_bytes: int, limit_bytes: int) -> TooManyBytes:
    return TooManyBytes(
        f"the requests of {whose} hold {held_bytes} bytes in this replica, and the limit is {limit_bytes}: send fewer "
        "requests at once, or smaller ones"
    )


class HeldBytes:
    """The bytes that one request holds. The authenticator puts it into ``scope["gateway.held"]``."""

    __slots__ = ("_budget", "_count", "_is_closed", "_limit_bytes", "_owner")

    def __init__(self, budget: ByteBudget, owner: Owner, limit_bytes: int) -> None:
        self._budget = budget
        self._limit_bytes = limit_bytes
        self._owner = owner
        self._count = 0
        self._is_closed = False

    def add(self, count: int) -> None:
        """Count *count* more bytes. Raises ``TooManyBytes``: nothing was counted."""
        if count and not self._is_closed:
            self._budget.take(self._owner, count, self._count, self._limit_bytes)
            self._count += count

    def release(self) -> None:
        """Give all bytes back. Later bytes count again."""
        if self._count:
            self._budget.give_back(self._owner, self._count)
            self._count = 0

    def close(self) -> None:
        """Give all bytes back, and count no more."""
        self.release()
        self._is_closed = True

    def another(self) -> HeldBytes:
        """Return an empty share of the same owner, which outlives the request."""
        return self._budget.hold(self._owner, self._limit_bytes)


def header(scope: Scope, name: bytes) -> str | None:
    """Return the value of a request header, decoded as Latin-1. None: the header is absent."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return None


def headers(scope: Scope, name: bytes) -> list[str]:
    """Return all values of a request header that may occur more than once."""
    return [bytes(value).decode("latin-1") for key, value in scope["headers"] if key == name]


def trace_of(scope: Scope) -> tuple[tuple[bytes, bytes], ...]:
    """Return a request's headers of the trace context. Empty: it has none, or its ``traceparent`` is not valid."""
    parents, states = [], []
    for name, value in scope["headers"]:
        if name == PARENT:
            parents.append(value)
        elif name == STATE:
            states.append(value)
    if len(parents) != 1 or not _PARENT.fullmatch(parents[0]):
        return ()
    state = b",".join(states)
    if not state or len(state) > STATE_MAX_BYTES:
        return ((PARENT, parents[0]),)
    return ((PARENT, parents[0]), (STATE, state))


def catalog_of(scope: Scope, catalog: Catalog) -> Catalog:
    """Return the part of *catalog* that the request's key may use. Raises ``NotPermitted``: nothing of it is left."""
    names: tuple[str, ...] = scope.get("gateway.environments", ())
    return catalog.part(names) if names else catalog


def policy_tag(scope: Scope) -> str:
    """Return the trainer's tag of the policy that plays the episode (``X-Policy-Tag``). Empty: no tag was sent.

    Raises:
        InvalidRequest: The tag is too long or contains unprintable characters.
    """
    tag = (header(scope, b"x-policy-tag") or "").strip()
    if len(tag) > POLICY_MAX_CHARS or not tag.isprintable():
        raise InvalidRequest(f"X-Policy-Tag: must be at most {POLICY_MAX_CHARS} printable characters")
    return tag


def group_of(scope: Scope) -> Group | None:
    """Return the group that an opening belongs to (``X-Group-ID`` and ``X-Group-Size``). None: neither header is set.

    Raises:
        InvalidRequest: One of the two headers is missing or invalid.
    """
    name, size = (header(scope, b"x-group-id") or "").strip(), (header(scope, b"x-group-size") or "").strip()
    if not name and not size:
        return None
    if not name or len(name) > GROUP_MAX_CHARS or not name.isprintable():
        raise InvalidRequest(f"X-Group-ID: must be 1 to {GROUP_MAX_CHARS} printable characters if X-Group-Size is sent")
    if not (
        size.isascii() and size.isdigit() and len(size) <= len(str(MAX_GROUP_SIZE)) and 0 < int(size) <= MAX_GROUP_SIZE
    ):
        raise InvalidRequest(f"X-Group-Size: must be a number from 1 to {MAX_GROUP_SIZE} if X-Group-ID is sent")
    return Group(name, int(size))


async def read_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    """Read the request's body.

    Raises:
        BodyTooLarge: The body, or its announced length, exceeds *limit_bytes*. The rest was read and dropped.
        TooManyBytes: The requests of this key, or of all keys, hold too many bytes. The rest was read and dropped.
        HungUp: The trainer closed the connection.
    """
    held: HeldBytes | None = scope.get("gateway.held")
    head_bytes, announced = 0, None
    for name, value in scope["headers"]:  # a header may hold secrets
        head_bytes += len(value)
        if name == b"content-length":
            announced = value
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
        if held is not None and not is_too_large:
            try:
                held.add(len(parts[-1]) + head_bytes)
                head_bytes = 0
            except TooManyBytes:
                parts.clear()
                if more:
                    await _drop_body(receive)
                raise
    if is_too_large:
        if more:
            await _drop_body(receive)
        raise BodyTooLarge(f"the body exceeds {limit_bytes} bytes")
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def _drop_body(receive: Receive) -> None:
    """Drain the body, within limits: a client whose connection closes while it sends never reads the response."""
    dropped, more = 0, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DROP_S):
            while more and dropped < DROP_BYTES:
                message = await receive()
                dropped += len(message.get("body", b""))
                more = message.get("more_body", False)


async def respond(send: Send, status: int, body: bytes, extra: Sequence[tuple[bytes, bytes]] = (JSON_TYPE,)) -> None:
    """Send a complete response. *extra* holds its headers except ``content-length``."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [length, *extra]})
    await send({"type": "http.response.body", "body": body})


def denial(send: Send) -> Send:
    """Return a *send* that turns an HTTP response into the denial of a WebSocket upgrade."""

    async def deny(message: Message) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    return deny


async def respond_json(send: Send, status: int, value: object, extra: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """Send *value* as a compact JSON response."""
    await respond(send, status, dump(value), (JSON_TYPE, *extra))


class Connection(Protocol):
    """A client's connection, which the server passes in ``scope["gateway.connection"]``."""

    is_lost: bool
    on_lost: Callable[[], None] | None
    """Callback of the request that is currently served. The server calls it once when the client disconnects."""


class Attended:
    """A context manager that cancels the work inside when the trainer disconnects.

    ``left`` is then True, and the cancellation does not leave the block. Check ``left`` after acquiring a resource:
    a client library may have swallowed the cancellation.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        """Watch the connection in *scope*. If the server passes none, a task watches *receive* instead."""
        self._connection: Connection | None = scope.get("gateway.connection")
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
        task, self._task = self._task, None  # a callback already scheduled must not cancel later work
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
