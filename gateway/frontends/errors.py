"""Maps errors to HTTP statuses, reasons and retry hints for all frontends.

The status of an error is that of its nearest ancestor class in `STATUS`. Each frontend writes the body in its own
protocol's format. `ORS_STATUS`, `AREAL_STATUS` and `NEMO_STATUS` override statuses for their protocols.

A *reason* is one word that names the part that failed, the same in every protocol. Programs that count lost episodes
use it instead of the sentence. A bad request, or a tool after whose failure the episode continues, has no reason.
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
    errors.TooManyBytes: 429,
    errors.UnknownEnvironment: 404,
    errors.UnknownTask: 404,
    errors.UnknownSplit: 404,
    errors.UnknownEpisode: 404,
    errors.UnknownWorker: 404,
    errors.WrongEnvironment: 400,
    errors.TaskInvalid: 400,
    errors.TaskExists: 409,
    errors.RateLimited: 429,
    errors.CallConflict: 409,
    errors.NotAllowed: 401,
    errors.NotPermitted: 403,
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
    errors.UpstreamError: 500,  # one SDK retries 502 to 504, but a failed setup would fail again
    errors.SessionFailed: 500,
}

AREAL_STATUS: dict[type[errors.GatewayError], int] = {
    errors.GatewayError: 500,
    errors.CallConflict: 400,
    errors.SessionExists: 500,
    errors.SessionClosed: 404,  # AReaL has no 410; ``detail`` states the reason
    errors.RateLimited: 503,
    errors.TooManyBytes: 503,
    errors.EnvironmentUnavailable: 500,  # in AReaL 503 means "no capacity"
    errors.UpstreamError: 500,
    errors.SessionFailed: 500,
    errors.UpstreamTimeout: 500,
    errors.UpstreamGone: 500,
    errors.ReplicaLeft: 500,
}
"""Overrides for AReaL, whose clients know 200, 400, 404, 500, and 503 (nothing ran)."""

NEMO_STATUS: dict[type[errors.GatewayError], int] = {
    errors.SessionExists: 409,
    errors.SessionClosed: 500,  # an environment server plays the episode again only after 408, 425, 429 and >= 500
}

RETRY_AFTER_S: Final = (1, 5)
"""Range in seconds of the random retry delay if there is no estimate. SDKs read integers only. The jitter spreads out
the retries of clients that were refused together."""
RETRY_AFTER_JITTER: Final = 0.25
"""Largest share by which jitter lengthens an estimate. It never shortens one: an early client would queue again."""
RETRY_AFTER_MAX_S: Final = 600
"""Upper limit in seconds of a retry delay. Longer estimates are not reliable."""

REASONS: Final[dict[type[errors.GatewayError], str]] = {
    errors.EnvironmentUnavailable: errors.EnvironmentUnavailable.code,
    errors.UpstreamTimeout: CloseReason.TIMEOUT.value,
    errors.UpstreamGone: CloseReason.WORKER_LOST.value,
    errors.ReplicaLeft: CloseReason.SHUTDOWN.value,
    errors.AuthorFault: CloseReason.AUTHOR_FAULT.value,
    errors.SessionFailed: CloseReason.SESSION_FAILED.value,
}
"""Reasons of error classes without a ``reason`` attribute of their own, such as ``SessionClosed`` has."""
LOSSES: Final = frozenset((CloseReason.WORKER_LOST.value, CloseReason.OUT_OF_MEMORY.value))
"""Reasons that mean that the worker ended."""


class WorkerDied(errors.UpstreamGone):
    """The worker ended while a request ran in it. ``reason`` is the cause that the store recorded, one of `LOSSES`."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message, sent=True)
        self.reason = reason


def name_limit(error: errors.GatewayError, setting: str, limit_s: float) -> None:
    """Add the *setting* of environment.toml that limits the time to the message of an ``UpstreamTimeout``."""
    if isinstance(error, errors.UpstreamTimeout) and setting not in error.detail:  # a repeated call raises it again
        error.args = (f"{error.detail} (its environment.toml limits the time: {setting} = {limit_s:g})",)


def status_of(error: errors.GatewayError, *tables: dict[type[errors.GatewayError], int]) -> int:
    """Return the status of *error*'s nearest ancestor class. For one class, *tables* take precedence over `STATUS`."""
    for kind in type(error).__mro__:
        for table in (*tables, STATUS):
            if kind in table:
                return table[kind]
    return 500


def reason_of(error: errors.GatewayError) -> str:
    """Return the word that names the part that failed. Empty: no part of the gateway or the worker failed."""
    if isinstance(error, (errors.SessionClosed, WorkerDied)):
        return error.reason
    return next((REASONS[kind] for kind in type(error).__mro__ if kind in REASONS), "")


def why_ended(error: errors.UpstreamError) -> CloseReason:
    """Return why the episode ends after a request failed with *error*. The effect of that request is unknown."""
    reason = reason_of(error)
    return CloseReason(reason) if reason else CloseReason.WORKER_LOST


def why_not_opened(error: BaseException) -> CloseReason:
    """Return why the episode ends after its opening failed with *error*."""
    return CloseReason.AUTHOR_FAULT if isinstance(error, errors.AuthorFault) else CloseReason.OPEN_FAILED


def told(error: errors.GatewayError) -> str:
    """Return the trainer's message, prefixed with the reason if there is one. For protocols with a single text."""
    reason = reason_of(error)
    if isinstance(error, errors.SessionClosed):
        return f"{reason}: the session was closed"  # the detail already ends with the reason
    return f"{reason}: {error.detail}" if reason else error.detail


def marks(error: errors.GatewayError) -> dict[str, str]:
    """Return the machine-readable fields of a JSON body: ``code``, and ``reason`` if there is one."""
    reason = reason_of(error)
    return {"code": error.code, **({"reason": reason} if reason else {})}


def retry_after_s(error: errors.GatewayError) -> int | None:
    """Return the seconds after which the trainer should retry. None: a retry does not help."""
    if isinstance(error, errors.RateLimited):  # an exact delay, not an estimate
        return math.ceil(error.retry_after_s) + random.randint(0, 1)
    estimate_s = error.retry_after_s if isinstance(error, (errors.PoolExhausted, errors.EnvironmentUnavailable)) else 0
    if estimate_s > 0:
        jittered_s = min(estimate_s, RETRY_AFTER_MAX_S) * random.uniform(1, 1 + RETRY_AFTER_JITTER)
        return min(RETRY_AFTER_MAX_S, math.ceil(jittered_s))
    return random.randint(*RETRY_AFTER_S) if error.retryable else None


def headers_of(error: errors.GatewayError) -> list[tuple[bytes, bytes]]:
    """Return the headers of an error response: ``retry-after`` if a retry helps, ``connection: close`` if needed."""
    found = []
    if isinstance(error, (errors.BodyTooLarge, errors.TooManyBytes)):
        found.append((b"connection", b"close"))  # the client may still be sending the rest of the body
    seconds = retry_after_s(error)
    if seconds is not None:
        found.append((b"retry-after", str(seconds).encode()))
    return found
