"""What all frontends say of errors: their statuses, their reasons, and when to come again.

The one table of HTTP statuses is looked up along the class's ancestry. Each front writes its protocol's own body; what
the ORS front says otherwise stands in `ORS_STATUS`.

A *reason* is one word that says which part failed, the same in every protocol: a program that counts lost episodes
needs no sentence. What failed for its own sake (a bad request, a tool after which the episode goes on) has none.
"""

from __future__ import annotations

import math
import random
from typing import Final

from gateway.core import errors
from gateway.core.session import CloseReason

STATUS: dict[type[errors.GatewayError], int] = {
    errors.GatewayError: 500,
    errors.ConfigError: 500,
    errors.BackendError: 500,
    errors.StartFailed: 500,
    errors.InvalidRequest: 400,
    errors.BodyTooLarge: 413,
    errors.UnknownEnvironment: 404,
    errors.UnknownTask: 404,
    errors.UnknownSplit: 404,
    errors.WrongEnvironment: 400,
    errors.TaskInvalid: 400,
    errors.TaskExists: 409,
    errors.TaskRateLimited: 429,
    errors.CallConflict: 409,
    errors.NotAllowed: 401,
    errors.SessionError: 400,
    errors.SessionExists: 400,
    errors.SessionNotFound: 404,
    errors.SessionClosed: 410,
    errors.PoolExhausted: 503,
    errors.EnvironmentUnavailable: 503,
    errors.StoreUnavailable: 503,
    errors.NotLeading: 500,
    errors.UpstreamError: 502,
    errors.AuthorFault: 500,
    errors.SessionFailed: 502,
    errors.WorkerFull: 503,
    errors.UpstreamTimeout: 504,
    errors.UpstreamGone: 502,
    errors.ReplicaLeft: 502,
}

ORS_STATUS: dict[type[errors.GatewayError], int] = {
    errors.UnknownTask: 400,  # "Invalid split", "Invalid index"
    errors.UnknownSplit: 400,
    errors.PoolExhausted: 429,
    errors.WorkerFull: 429,
    errors.UpstreamError: 500,  # one SDK repeats 502 to 504, and a failed setup fails again
    errors.SessionFailed: 500,
}

AREAL_STATUS: dict[type[errors.GatewayError], int] = {
    errors.GatewayError: 500,
    errors.CallConflict: 400,
    errors.SessionExists: 500,
    errors.SessionClosed: 404,  # the protocol has no 410; the reason stands in ``detail``
    errors.TaskRateLimited: 503,
    errors.EnvironmentUnavailable: 500,  # 503 says "no capacity" there
    errors.StoreUnavailable: 500,
    errors.UpstreamError: 500,
    errors.SessionFailed: 500,
    errors.UpstreamTimeout: 500,
    errors.UpstreamGone: 500,
    errors.ReplicaLeft: 500,
}
"""AReaL's clients know 200, 400, 404, 500, and 503 where nothing was begun for lack of room."""

RETRY_AFTER_S: Final = (1, 5)
"""Where nothing is known. Integers, because the SDKs read nothing else; jittered, so that those refused together do not
return together."""
RETRY_AFTER_JITTER: Final = 0.25
"""An estimate is made longer by up to this share of it; never shorter: who comes too early waits in line again."""
RETRY_AFTER_MAX_S: Final = 600
"""An estimate of more is worth nothing."""

REASONS: Final[dict[type[errors.GatewayError], str]] = {
    errors.EnvironmentUnavailable: errors.EnvironmentUnavailable.code,
    errors.UpstreamTimeout: CloseReason.TIMEOUT.value,
    errors.UpstreamGone: CloseReason.WORKER_LOST.value,
    errors.ReplicaLeft: CloseReason.SHUTDOWN.value,
    errors.AuthorFault: CloseReason.AUTHOR_FAULT.value,
    errors.SessionFailed: CloseReason.SESSION_FAILED.value,
}
"""Of errors that do not bring their own, as ``SessionClosed`` does."""
LOSSES: Final = frozenset((CloseReason.WORKER_LOST.value, CloseReason.OUT_OF_MEMORY.value))
"""Reasons for which a worker ended."""


class WorkerDied(errors.UpstreamGone):
    """The worker ended while a request ran in it; ``reason``, one of `LOSSES`, is what the store says of it."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message, sent=True)
        self.reason = reason


def status_of(error: errors.GatewayError, *tables: dict[type[errors.GatewayError], int]) -> int:
    """Find the status of *error*: in each table the nearest ancestor; the general table comes last."""
    for kind in type(error).__mro__:
        for table in (*tables, STATUS):
            if kind in table:
                return table[kind]
    return 500


def reason_of(error: errors.GatewayError) -> str:
    """Which part failed, in one word; empty where none of ours did."""
    if isinstance(error, (errors.SessionClosed, WorkerDied)):
        return error.reason
    return next((REASONS[kind] for kind in type(error).__mro__ if kind in REASONS), "")


def why_ended(error: errors.UpstreamError) -> CloseReason:
    """Why an episode ends in which a request ended with *error*; nobody knows any more what was done in it."""
    reason = reason_of(error)
    return CloseReason(reason) if reason else CloseReason.WORKER_LOST


def why_not_opened(error: BaseException) -> CloseReason:
    """Why an episode ends whose opening failed with *error*."""
    return CloseReason.AUTHOR_FAULT if isinstance(error, errors.AuthorFault) else CloseReason.OPEN_FAILED


def told(error: errors.GatewayError) -> str:
    """The sentence for the trainer, headed by its reason if there is one: for protocols that show one text."""
    reason = reason_of(error)
    if isinstance(error, errors.SessionClosed):
        return f"{reason}: the session was closed"  # its own sentence ends with the reason
    return f"{reason}: {error.detail}" if reason else error.detail


def marks(error: errors.GatewayError) -> dict[str, str]:
    """What stands in a JSON body for programs beside the sentence: ``code``, and ``reason`` if there is one."""
    reason = reason_of(error)
    return {"code": error.code, **({"reason": reason} if reason else {})}


def retry_after_s(error: errors.GatewayError) -> int | None:
    """In how many seconds a trainer should come again; None where that does not help."""
    if isinstance(error, errors.TaskRateLimited):  # known, and no estimate
        return math.ceil(error.retry_after_s) + random.randint(0, 1)
    estimate_s = error.retry_after_s if isinstance(error, (errors.PoolExhausted, errors.EnvironmentUnavailable)) else 0
    if estimate_s > 0:
        jittered_s = min(estimate_s, RETRY_AFTER_MAX_S) * random.uniform(1, 1 + RETRY_AFTER_JITTER)
        return min(RETRY_AFTER_MAX_S, math.ceil(jittered_s))
    return random.randint(*RETRY_AFTER_S) if error.retryable else None


def headers_of(error: errors.GatewayError) -> list[tuple[bytes, bytes]]:
    """Return the headers of an error's answer: when to come again, where that helps, and the connection's end."""
    if isinstance(error, errors.BodyTooLarge):
        return [(b"connection", b"close")]  # the rest of the body may still be on its way
    seconds = retry_after_s(error)
    return [] if seconds is None else [(b"retry-after", str(seconds).encode())]
