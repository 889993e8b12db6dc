"""Answers of the ORS frontend that end a request, and worker failures in words after which no SDK runs a step again."""

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
