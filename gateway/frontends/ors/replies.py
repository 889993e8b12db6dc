"""Error responses of the ORS frontend. After a worker failure, they keep the SDKs from running a step twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gateway.core.errors import AuthorFault, UpstreamError, UpstreamGone
from gateway.frontends.errors import marks, told

ONCE: Final = frozenset(("call", "score_group"))
"""Operations that must not run twice. SDKs retry a status >= 500, so a failure that may have run gets 410."""


class OrsError(Exception):
    """Ends a request with an error response."""

    def __init__(
        self,
        status: int,
        detail: Any,
        extra: Sequence[tuple[bytes, bytes]] = (),
        *,
        beside: Mapping[str, str] | None = None,
    ) -> None:
        """*extra* are headers. *beside* adds fields to the body next to ``detail``."""
        super().__init__(detail)
        self.status = status
        self.body = {"detail": detail, **(beside or {})}
        self.extra = extra


def as_order(error: UpstreamError, name: str) -> Exception:
    """Return the error to raise for a worker's failure in operation *name*, so that no SDK runs a step twice.

    Steps get 410. The exception is 503 if no byte of the request was sent: nothing ran, and the SDKs may retry.
    """
    if name not in ONCE:
        return error
    if isinstance(error, AuthorFault):
        return OrsError(410, told(error), beside=marks(error))
    if isinstance(error, UpstreamGone) and not error.sent:
        return OrsError(503, told(error), [(b"retry-after", b"1")], beside=marks(error))
    return OrsError(410, f"{told(error)}; the call may have run", beside=marks(error))
