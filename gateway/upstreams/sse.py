"""Server-sent events, written as the ORS SDKs read them and read as the format says.

The SDKs strip all white space from the head of a data line instead of the one space that the format allows, so none is
written that starts with any; and what a server has cut badly is joined strictly here, and cut again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from gateway.core.errors import UpstreamError

# No "connection: keep-alive", which HTTP/1.1 means anyway: a server that leaves says "close" there.
HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
PING: Final = b": ping\r\n\r\n"
PING_S: Final = 10.0
"""The SDKs give up after 30 s without a byte."""
SLICE_CHARS: Final = 4096
"""As the reference servers cut."""
LONGEST_CHARS: Final = 16_384
"""A line must stay below 64 KiB: a run of white space takes at most 3 bytes a character, other text is cut sooner."""


class Event(NamedTuple):
    """One event of a stream."""

    name: str
    data: str


def event(name: str, data: str) -> bytes:
    """Write an event; lines of *data* beyond the longest are folded."""
    lines = data.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    folded = [line[at : at + LONGEST_CHARS] for line in lines for at in range(0, len(line) or 1, LONGEST_CHARS)]
    # An environment's text may hold lone surrogates, which UTF-8 can't carry.
    written = b"".join(b"data: %b\r\n" % line.encode(errors="replace") for line in folded)
    return b"event: %b\r\n%b\r\n" % (name.encode(), written)


def result(payload: bytes) -> bytes:
    """Write compact JSON as ``chunk`` events and one ``end``."""
    if len(payload) <= SLICE_CHARS:  # the usual case: no line break outside of strings, and a bracket in front
        return b"event: end\r\ndata: %b\r\n\r\n" % payload
    slices = safe_slices(payload.decode())
    names = ["chunk"] * (len(slices) - 1) + ["end"]
    return b"".join(
        b"event: %b\r\ndata: %b\r\n\r\n" % (name.encode(), part.encode())
        for name, part in zip(names, slices, strict=True)
    )


def safe_slices(text: str, *, size: int = SLICE_CHARS, longest: int = LONGEST_CHARS) -> list[str]:
    """Cut compact JSON *text* into slices of *size* characters, none of which starts with white space.

    A cut moves behind the white space that it would fall on; within a run beyond *longest* characters a slice starts
    with an escape, which is the same JSON because compact JSON has white space inside strings only.
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


class Reader:
    """Reads a stream as it comes in, piece by piece."""

    def __init__(self, *, max_bytes: int) -> None:
        """Refuse an event, or a line, of more than *max_bytes*."""
        self._max_bytes = max_bytes
        self._rest: list[bytes] = []
        self._rest_bytes = 0
        self._name = ""
        self._data: list[str] = []
        self._data_bytes = 0

    def feed(self, piece: bytes) -> Iterator[Event]:
        """Yield the events that *piece* completes. Those without a name are dropped, as are comments.

        Raises:
            UpstreamError: an event is too large, or not UTF-8.
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
            event = Event(self._name, "\n".join(self._data)) if self._name else None
            self._name, self._data, self._data_bytes = "", [], 0
            return event
        field, _, value = line.partition(b":")
        if field == b"event":
            self._name = _text(value.removeprefix(b" "))
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
