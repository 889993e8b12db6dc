"""Server-sent events as the ORS SDKs read them: CRLF, one ``data:`` line per line of text, never compressed."""

from __future__ import annotations

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"connection", b"keep-alive"),
    (b"x-accel-buffering", b"no"),
)


def event(name: str, data: str) -> bytes:
    """One event; every line of *data* becomes a ``data:`` line of its own."""
    lines = "".join(f"data: {line}\r\n" for line in data.splitlines() or [""])
    return f"event: {name}\r\n{lines}\r\n".encode(errors="replace")
