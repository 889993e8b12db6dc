"""The one table from errors to HTTP statuses, looked up along the class's ancestry.

Each front writes its protocol's own body. What the ORS front says otherwise stands in `ORS_STATUS`.
"""

from __future__ import annotations

import math
import random

from gateway.core import errors

STATUS: dict[type[errors.GatewayError], int] = {
    errors.GatewayError: 500,
    errors.ConfigError: 500,
    errors.BackendError: 500,
    errors.StartFailed: 500,
    errors.InvalidRequest: 400,
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
    errors.UpstreamError: 502,
    errors.SessionFailed: 502,
    errors.WorkerFull: 503,
    errors.UpstreamTimeout: 504,
    errors.UpstreamGone: 502,
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
}
"""AReaL's clients know 200, 400, 404, 500, and 503 where nothing was begun for lack of room."""

RETRY_AFTER_S = (1, 5)
"""Integers, because the SDKs read nothing else; jittered, so that those refused together do not return together."""


def status_of(error: errors.GatewayError, *tables: dict[type[errors.GatewayError], int]) -> int:
    """Find the status of *error*: in each table the nearest ancestor; the general table comes last."""
    for kind in type(error).__mro__:
        for table in (*tables, STATUS):
            if kind in table:
                return table[kind]
    return 500


def retry_after(error: errors.GatewayError) -> list[tuple[bytes, bytes]]:
    """The header that tells a trainer when to come again, where that helps."""
    if isinstance(error, errors.TaskRateLimited):
        return [(b"retry-after", str(math.ceil(error.retry_after_s) + random.randint(0, 1)).encode())]
    return [(b"retry-after", str(random.randint(*RETRY_AFTER_S)).encode())] if error.retryable else []
