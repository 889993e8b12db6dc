"""Answers of the ORS front that end a request, and how a worker's failure is said so that no SDK runs a step again.

Server-sent events as the ORS SDKs read them: CRLF, one ``data:`` line per line of text, never compressed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gateway.core.errors import AuthorFault, UpstreamError, UpstreamGone
from gateway.frontends.errors import marks, told

ONCE: Final = frozenset(("call", "score_group"))
"""Operations that must not be repeated, and so never answer with a status >= 500."""


class OrsError(Exception):
    """Ends a request with this answer."""

    def __init__(
        self,
        status: int,
        detail: Any,
        extra: Sequence[tuple[bytes, bytes]] = (),
        *,
        beside: Mapping[str, str] | None = None,
    ) -> None:
        """*extra* are headers; *beside* stands in the body with ``detail``."""
        super().__init__(detail)
        self.status = status
        self.body = {"detail": detail, **(beside or {})}
        self.extra = extra


def as_order(error: UpstreamError, name: str) -> Exception:
    """Say a worker's failure so that no SDK runs the step again.

    Only where no byte had gone out it is 503: nothing ran, and the SDKs may come again.
    """
    if name not in ONCE:
        return error
    if isinstance(error, AuthorFault):
        return OrsError(410, told(error), beside=marks(error))
    if isinstance(error, UpstreamGone) and not error.sent:
        return OrsError(503, told(error), [(b"retry-after", b"1")], beside=marks(error))
    return OrsError(410, f"{told(error)}; the call may have run", beside=marks(error))


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
