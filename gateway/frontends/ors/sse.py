"""Server-sent events as the ORS SDKs read them: CRLF, one ``data:`` line per line of text, never compressed."""

from __future__ import annotations

# No "connection: keep-alive", which HTTP/1.1 means anyway: a server that leaves says "close" there.
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def event(name: str, data: str) -> bytes:
    """One event; every line of *data* becomes a ``data:`` line of its own."""
    lines = "".join(f"data: {line}\r\n" for line in data.splitlines() or [""])
    return f"event: {name}\r\n{lines}\r\n".encode(errors="replace")
