"""Writes server-sent events for the ORS SDKs, and reads them as the format defines.

The SDKs strip all leading white space from a data line, where the format strips one space. The gateway therefore writes
no part of a result that starts with white space. It joins the chunks of a server strictly and cuts the result again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from gateway.core.errors import UpstreamError

# Without "connection: keep-alive", the default of HTTP/1.1: a server that shuts down sends "close" in this header.
HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
PING: Final = b": ping\r\n\r\n"
PING_S: Final = 10.0
"""Seconds of silence after which a comment is written. The SDKs give up after 30 s without a byte."""
SLICE_CHARS: Final = 4096
"""Characters in one chunk of a result, as in the reference servers."""
LONGEST_CHARS: Final = 16_384
"""Largest number of characters in a data line, which must stay below 64 KiB.

White space takes at most 3 bytes a character. Other text of a result is cut earlier.
"""
_LINE_ENDS: Final = re.compile("\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
"""What clients may take for the end of a line: the format has the first three, ``str.splitlines`` has them all."""
_RAW_LINE_ENDS: Final = re.compile(b"\xc2\x85|\xe2\x80[\xa8\xa9]")
"""Those that JSON may contain unescaped, in UTF-8."""

TURN: Final = re.compile("[1-9][0-9]{0,8}", re.ASCII)
"""A worker's number of a call, as the ``id`` of its last event or in a header."""


class Event(NamedTuple):
    """An event of a stream."""

    name: str
    data: str
    id: str = ""


class StreamedResult(NamedTuple):
    """What the stream of a call says, as far as it came."""

    call_id: str
    """The server's id of the call; empty: it gave none."""
    kind: str
    """Name of the last event: ``end``, ``error``, or ``chunk`` if the stream is not complete; empty: there is none."""
    text: str
    """The result as JSON, or the error."""
    turn: int
    """The worker's number of the call in its session, from 1 on; 0: the worker does not count."""


def event(name: str, data: str) -> bytes:
    """Write an event. Lines of *data* with more than `LONGEST_CHARS` characters are split into several lines."""
    lines = _LINE_ENDS.split(data)
    folded = [line[at : at + LONGEST_CHARS] for line in lines for at in range(0, len(line) or 1, LONGEST_CHARS)]
    # An environment's text may contain lone surrogates, which UTF-8 can't encode.
    written = b"".join(b"data: %b\r\n" % line.encode(errors="replace") for line in folded)
    return b"event: %b\r\n%b\r\n" % (name.encode(), written)


def result(payload: bytes) -> bytes:
    """Write compact JSON as ``chunk`` events and one ``end`` event, with line ends of Unicode as escapes."""
    if not payload.isascii():
        payload = _RAW_LINE_ENDS.sub(lambda found: b"\\u%04x" % ord(found[0].decode()), payload)
    if len(payload) <= SLICE_CHARS:  # the usual case: compact JSON has no raw line break and starts with a bracket
        return b"event: end\r\ndata: %b\r\n\r\n" % payload
    slices = safe_slices(payload.decode())
    names = ["chunk"] * (len(slices) - 1) + ["end"]
    return b"".join(
        b"event: %b\r\ndata: %b\r\n\r\n" % (name.encode(), part.encode())
        for name, part in zip(names, slices, strict=True)
    )


def safe_slices(text: str, *, size: int = SLICE_CHARS, longest: int = LONGEST_CHARS) -> list[str]:
    """Cut compact JSON *text* into slices of *size* characters that do not start with white space.

    A cut within white space moves to the end of the white space, but a slice takes at most *longest* characters of
    *text*. If white space remains, the next slice starts with an escape. The escape does not change the JSON value,
    because compact JSON has white space only inside strings.
    """
    slices = []
    position, end = 0, len(text)
    while position < end:
        cut = min(position + size, end)
        while cut < end and cut - position < longest and text[cut].isspace():
            cut += 1
        part = text[position:cut]
        slices.append(f"\\u{ord(part[0]):04x}{part[1:]}" if part[0].isspace() else part)
        position = cut
    return slices


def read_result(stream: bytes) -> StreamedResult:
    """Return what the stream of a call says. A stream that breaks the format is an error."""
    call_id, kind, parts, turn = "", "", list[str](), 0
    try:
        for event in Reader(max_bytes=len(stream)).feed(stream):
            if event.name == "task_id":
                call_id = event.data
            elif event.name in ("chunk", "end", "error"):
                kind, turn = event.name, int(event.id) if TURN.fullmatch(event.id) else turn
                if kind == "error":
                    parts = [event.data]
                    break
                parts.append(event.data)
    except UpstreamError as error:
        kind, parts = "error", [error.detail]
    return StreamedResult(call_id, kind, "".join(parts), turn)


class Reader:
    """Parses a stream of events piece by piece, as it arrives."""

    def __init__(self, *, max_bytes: int) -> None:
        """Accept events and lines of at most *max_bytes*."""
        self._max_bytes = max_bytes
        self._rest: list[bytes] = []
        self._rest_bytes = 0
        self._name = self._id = ""
        self._data: list[str] = []
        self._data_bytes = 0

    def feed(self, piece: bytes) -> Iterator[Event]:
        """Yield the events that *piece* completes, without comments and without events that have no name.

        Raises:
            UpstreamError: An event or a line is too large, or is not UTF-8.
        """
        if b"\n" not in piece:
            self._keep(piece)
            return
        *lines, rest = b"".join((*self._rest, piece)).split(b"\n")
        self._rest, self._rest_bytes = [], 0
        self._keep(rest)
        for line in lines:
            event = self._line(line.removesuffix(b"\r"))
            if event is not None:
                yield event

    def _keep(self, rest: bytes) -> None:
        self._rest.append(rest)
        self._rest_bytes += len(rest)
        if self._rest_bytes > self._max_bytes:
            raise UpstreamError(f"the worker's stream has a line of more than {self._max_bytes} bytes")

    def _line(self, line: bytes) -> Event | None:
        if not line:
            event = Event(self._name, "\n".join(self._data), self._id) if self._name else None
            self._name, self._id, self._data, self._data_bytes = "", "", [], 0
            return event
        field, _, value = line.partition(b":")
        if field == b"event":
            self._name = _text(value.removeprefix(b" "))
        elif field == b"id":
            self._id = _text(value.removeprefix(b" "))
        elif field == b"data":
            self._data_bytes += len(value)
            if self._data_bytes > self._max_bytes:
                raise UpstreamError(f"the worker's stream has an event of more than {self._max_bytes} bytes")
            self._data.append(_text(value.removeprefix(b" ")))
        return None


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise UpstreamError("the worker's stream is not UTF-8") from error
