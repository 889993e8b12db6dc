"""The parts of HTTP/1.1 and event streams that a load generator needs: prepared requests, one response at a time.

A general client would cost more than the measured servers: an SDK's client takes 0.6 to 0.9 ms of CPU a call.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*\r\n", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked[ \t]*\r\n", re.IGNORECASE)
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3})[ \r]")
CONNECT_S = 10.0
"""Seconds to connect. A server on this machine that needs longer is broken, not slow."""


class ProtocolError(Exception):
    """The server's bytes are not an answer to one request."""


@dataclass(frozen=True, slots=True)
class Response:
    """A whole response, its body without the chunks' frames."""

    status: int
    body: bytes


class ResponseReader:
    """Takes received bytes, and returns a response once it is complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._status = 0
        """The status, or 0 until the head is complete."""
        self._length: int | None = None
        """Length of the body, or None if it is chunked."""
        self._position = 0
        """Start of the next chunk's frame."""
        self._chunks: list[bytes] = []

    def feed(self, data: bytes) -> Response | None:
        """Take *data*. Return the response once it is complete, and be ready for the next response.

        Raises:
            ProtocolError: This is not HTTP/1.1 with a length or chunks, or it is more than one response.
        """
        self._buffer += data
        if not self._status and not self._read_head():
            return None
        if self._length is not None:
            return self._whole(self._length) if len(self._buffer) >= self._length else None
        return self._read_chunks()

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self._buffer[: end + 2])
        del self._buffer[: end + 4]
        found = _STATUS.match(head)
        if found is None:
            raise ProtocolError(f"no status line: {head[:80]!r}")
        if _CHUNKED.search(head):
            self._length = None
        elif length := _LENGTH.search(head):
            self._length = int(length[1])
        else:
            raise ProtocolError(f"neither a length nor chunks: {head[:200]!r}")
        self._status = int(found[1])
        return True

    def _read_chunks(self) -> Response | None:
        buffer = self._buffer
        while (line_end := buffer.find(b"\r\n", self._position)) >= 0:
            try:
                size = int(buffer[self._position : line_end].split(b";")[0], 16)
            except ValueError:
                raise ProtocolError(f"no chunk size: {bytes(buffer[self._position : line_end])!r}") from None
            start, end = line_end + 2, line_end + 2 + size
            if len(buffer) < end + 2:
                return None
            if buffer[end : end + 2] != b"\r\n":
                raise ProtocolError("a chunk is longer than its size, or there are trailers")
            if size == 0:
                return self._whole(end + 2)
            self._chunks.append(bytes(buffer[start:end]))
            self._position = end + 2
        return None

    def _whole(self, length: int) -> Response:
        if len(self._buffer) != length:
            raise ProtocolError("more bytes than one response")
        body = bytes(self._buffer) if self._length is not None else b"".join(self._chunks)
        response = Response(self._status, body)
        self._buffer.clear()
        self._chunks.clear()
        self._status = self._position = 0
        return response


Answer = TypeVar("Answer")


class OneAtATime(asyncio.Protocol, Generic[Answer]):
    """One connection with one request at a time.

    Waits have no timeout of their own; the caller sets a deadline. One timeout scope around a round of load costs less
    than one around each call.
    """

    def __init__(self) -> None:
        self._waiter: asyncio.Future[Answer] | None = None
        self._transport: asyncio.Transport
        self._loop = asyncio.get_running_loop()
        self._failure: Exception | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's classes do not derive from asyncio's

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the waiting request."""
        self._fail(exc or ConnectionResetError("the server closed the connection"))

    async def request(self, data: bytes) -> Answer:
        """Send *data*, one whole request, and wait for its answer.

        Raises:
            OSError: The connection is lost.
            ProtocolError: The answer is not valid.
        """
        if self._failure is not None:
            raise self._failure
        self._waiter = self._loop.create_future()
        self._transport.write(data)
        return await self._waiter

    def close(self) -> None:
        """Close immediately. A second call does nothing."""
        self._transport.abort()

    def _answer(self, answer: Answer) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is None:
            self._fail(ProtocolError("an answer without a request"))
        elif not waiter.done():
            waiter.set_result(answer)

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(self._failure)
        self._transport.abort()


class Connection(OneAtATime[Response]):
    """One keep-alive connection. `connect` makes it."""

    def __init__(self) -> None:
        super().__init__()
        self._reader = ResponseReader()

    def data_received(self, data: bytes) -> None:
        """Complete the waiting request once the response is complete."""
        try:
            response = self._reader.feed(data)
        except ProtocolError as error:
            self._fail(error)
            return
        if response is not None:
            self._answer(response)


@dataclass(frozen=True, slots=True)
class Address:
    """A server's loopback port or Unix socket. Load goes nowhere else."""

    port: int = 0
    socket: str = ""


async def connect(address: Address) -> Connection:
    """Open a connection.

    Raises:
        OSError: No server listens, or it times out after ``CONNECT_S`` (a TimeoutError).
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(CONNECT_S):
        if address.socket:
            _, connection = await loop.create_unix_connection(Connection, address.socket)
        else:
            _, connection = await loop.create_connection(Connection, "127.0.0.1", address.port)
    return connection


async def ask_once(address: Address, data: bytes) -> Response:
    """Send one request on its own connection. Raises the errors of `connect` and `Connection.request`."""
    connection = await connect(address)
    try:
        return await connection.request(data)
    finally:
        connection.close()


def request_bytes(method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
    """Return one whole request. A POST has a length even if it is 0, as in the SDKs."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *(f"{name}: {value}" for name, value in headers.items())]
    if method == "POST":
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("ascii") + body


# -- ORS's event streams, read strictly: one space after the colon belongs to the format, other spaces to the data ----


class StreamError(Exception):
    """The stream did not end with a result."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event, without comments."""

    name: str
    data: str


def events(body: bytes) -> Iterator[Event]:
    """Yield the events of a whole stream.

    Raises:
        StreamError: The stream ends within an event.
    """
    name = ""
    data: list[str] = []
    *lines, rest = body.decode().replace("\r\n", "\n").split("\n")
    for line in lines:
        if not line:
            if name:
                yield Event(name, "\n".join(data))
            name, data = "", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)
    if name or data or rest:
        raise StreamError("the stream ends within an event")


def result_of(body: bytes) -> Any:
    """Return the JSON value of a call's chunks and its end together.

    Raises:
        StreamError: The stream has an ``error`` event, no end event, or no JSON.
    """
    parts: list[str] = []
    for event in events(body):
        if event.name == "error":
            raise StreamError(event.data)
        if event.name in ("chunk", "end"):
            parts.append(event.data)
        if event.name == "end":
            try:
                return json.loads("".join(parts))
            except ValueError as error:
                raise StreamError(f"not JSON: {error}") from error
    raise StreamError("the stream has no end event")
