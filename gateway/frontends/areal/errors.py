"""Errors as AReaL's clients read them: they only log the body, so the diagnosis has to stand in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.core.errors import (
    AuthorFault,
    EnvironmentUnavailable,
    GatewayError,
    InvalidRequest,
    PoolExhausted,
    SessionClosed,
    SessionFailed,
    SessionNotFound,
    UnknownTask,
    UpstreamError,
    UpstreamGone,
    UpstreamTimeout,
)
from gateway.core.session import CloseReason
from gateway.frontends.errors import AREAL_STATUS, reason_of, status_of

_GONE: Final = "never known here, cancelled, expired or already done"
_REASONS: Final = {
    CloseReason.EXPIRED.value: "expired: idle for longer than the environment allows",
    CloseReason.WORKER_LOST.value: "its environment was lost: the worker died",
    CloseReason.OUT_OF_MEMORY.value: "its environment was lost: the worker ran out of memory",
    CloseReason.TIMEOUT.value: "its environment was lost: the worker did not answer a step in time",
    CloseReason.AUTHOR_FAULT.value: "its environment failed: the environment author's code raised an exception",
    CloseReason.SESSION_FAILED.value: "its environment failed: what the episode needs in its worker broke",
}
_ENDS: Final = {
    CloseReason.WORKER_LOST.value: "environment_lost",
    CloseReason.OUT_OF_MEMORY.value: "environment_lost",
    CloseReason.TIMEOUT.value: "environment_lost",
    CloseReason.AUTHOR_FAULT.value: "environment_failed",
    CloseReason.SESSION_FAILED.value: "environment_failed",
}
_TITLES: Final[dict[type[GatewayError], str]] = {
    UnknownTask: "sample not found",
    InvalidRequest: "bad request",
    SessionNotFound: "episode not found",
    SessionClosed: "episode not found",
    PoolExhausted: "no capacity",
    EnvironmentUnavailable: "environment unavailable",
    UpstreamTimeout: "environment lost",
    UpstreamGone: "environment lost",
    UpstreamError: "environment failed",
    GatewayError: "internal error",
}
_WORDS: Final[dict[type[GatewayError], str]] = {
    PoolExhausted: "capacity",
    AuthorFault: "environment_failed",
    SessionFailed: "environment_failed",
    UpstreamTimeout: "environment_lost",
    UpstreamGone: "environment_lost",
}


def error_reply(error: GatewayError, named: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
    """The status and the body that *error* is answered with; *named* is the episode that the request named."""
    status = status_of(error, AREAL_STATUS)
    word = _nearest(_WORDS, error) or ("internal" if status >= 500 else "")
    detail = error.detail
    if isinstance(error, SessionNotFound):
        detail = _GONE
    elif isinstance(error, SessionClosed):
        detail = _REASONS.get(error.reason, error.detail)
        word = _ENDS.get(error.reason, word)
    body = {"error": _nearest(_TITLES, error), **named, "detail": detail}
    marks = {"status": word, "reason": reason_of(error)}
    return status, body | {name: mark for name, mark in marks.items() if mark}


def _nearest(table: Mapping[type[GatewayError], str], error: GatewayError) -> str:
    """What *table* has for the nearest ancestor of *error*; empty if for none."""
    return next((table[kind] for kind in type(error).__mro__ if kind in table), "")
