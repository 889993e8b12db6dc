"""The errors of the client: one class for each kind of failure that a trainer handles differently.

The gateway's page "reference" lists its codes and reasons. `error_of` maps them to these classes. No failure has a
reward, and no class here means "reward 0".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class GatewayError(Exception):
    """Base class of all errors that this package raises on purpose. The message states the fault and the fix."""

    fix: str = "read the gateway's log"
    """What to do, unless the gateway's own text says it. Part of the message."""

    def __init__(
        self,
        detail: str,
        *,
        status: int = 0,
        code: str = "",
        reason: str = "",
        retry_after_s: float | None = None,
        may_have_run: bool = False,
    ) -> None:
        self.detail = detail
        """The gateway's own text."""
        self.status = status
        """HTTP status of the answer. 0: there was no answer."""
        self.code = code
        """Error code of the gateway's page "reference". Empty: the answer had no code."""
        self.reason = reason
        """One word that names the part that failed, such as ``worker_lost``. Empty: the request itself was wrong."""
        self.retry_after_s = retry_after_s
        """Seconds after which the same request may succeed. None: a retry does not help, or the time is not known."""
        self.may_have_run = may_have_run
        """True if the request may have had an effect, so that a second request could be a second step."""
        super().__init__(detail)  # the arguments and the fields make pickles, which trainers send between processes

    def __str__(self) -> str:
        return f"{self.detail} (fix: {self.fix})"


# -- the request was wrong: nothing ran, and the same request fails again ---------------------------------------------


class InvalidRequest(GatewayError):
    """The request is malformed, too large, or not offered. Nothing ran."""

    fix = "correct the argument that the message names"


class UnknownEnvironment(InvalidRequest):
    """The server offers no environment of that name."""

    fix = "use a name of environments(), or add the environment to the gateway"


class UnknownTask(InvalidRequest):
    """The split, the index or the id does not exist."""

    fix = "use splits(), task_count() and tasks() to see what exists"


class SessionExists(InvalidRequest):
    """A session with this id was opened by another request."""

    fix = "open another episode: ids are random unless two clients share one"


class CallConflict(InvalidRequest):
    """The server refused an idempotency key: it belongs to another call, or its outcome is no longer kept."""

    fix = "drop the episode, because the effect of its last step is unknown"


class NotAllowed(GatewayError):
    """The key is missing or unknown."""

    fix = "pass key=, one of the gateway's trainer keys"


class NotPermitted(NotAllowed):
    """The key may not use this environment."""

    fix = "use another key, or have an operator add the environment to this key (gateway keys add --environments)"


# -- nothing ran, and the same request may succeed later --------------------------------------------------------------


class Unavailable(GatewayError):
    """Base class: nothing ran, and the same request may succeed after ``retry_after_s`` seconds."""

    fix = "try again after retry_after_s seconds"


class NoCapacity(Unavailable):
    """No slot became free in time, or the queue for slots is full."""

    fix = "open fewer episodes at once, wait longer (open_s), or raise max_workers of the environment"


class TooManyBytes(Unavailable):
    """The requests of this key, or of all keys, hold too many bytes in the gateway."""

    fix = "send fewer requests at once, or smaller ones"


class RateLimited(Unavailable):
    """Trainers started the task, or the key called tools, as often as the limit allows. Nothing ran."""

    fix = "play another task, call more slowly, or try again after retry_after_s seconds"


class StartFailed(Unavailable):
    """Workers of the environment do not start. The message ends with the last lines of a log."""

    fix = "repair what the last lines of the log name; waiting rarely helps"


class StoreUnavailable(Unavailable):
    """The gateway's store does not answer. This does not mean that a session or task does not exist."""

    fix = "try again after retry_after_s seconds; if it lasts, look at the gateway's Redis"


class Unreachable(Unavailable):
    """No connection to the server, and nothing was sent."""

    fix = "check the URL, and that the gateway runs"


# -- the episode is over, without a reward ----------------------------------------------------------------------------


class EpisodeFailed(GatewayError):
    """Base class: the episode is over or was never opened, and has no reward. Drop it, or play its task again."""

    fix = "drop the episode, or play its task again in a new one"


class SessionLost(EpisodeFailed):
    """The gateway ended the session, or its worker died. ``reason`` says why: ``worker_lost``, ``out_of_memory``,
    ``timeout``, ``shutdown``, ``expired``, ``operator`` or ``open_failed``."""

    def __init__(self, detail: str, **fields: Any) -> None:
        self.fix = _LOSS_FIXES.get(fields.get("reason", ""), EpisodeFailed.fix)
        super().__init__(detail, **fields)


_LOSS_FIXES = {
    "expired": "step at least every idle_s (300 s), or open the episode with keep_alive=True",
    "timeout": "drop the episode; if calls are that long, raise call_s of the environment",
    "out_of_memory": "drop the episode, or raise the memory of the environment",
}


class SessionNotFound(EpisodeFailed):
    """The server does not know the session: it was closed, belongs to another key, or the server restarted."""


class AuthorFault(EpisodeFailed):
    """The environment author's code failed. The gateway's log has the traceback."""

    fix = "repair the environment; the gateway's log has the traceback (author_fault)"


class SessionFailed(EpisodeFailed):
    """A part that the session needs in its worker broke, such as its sandbox."""


class ServerFailed(EpisodeFailed):
    """The gateway or a worker failed in another way."""


class ConnectionLost(EpisodeFailed):
    """The answer to a request did not arrive, so its effect is unknown, and it could not be repeated safely."""


class DeadlinePassed(EpisodeFailed):
    """The answer did not arrive within the client's own time limit."""

    fix = "raise the limit in Timeouts; after a step, drop the episode"


class ProtocolError(EpisodeFailed):
    """The answer is not of the protocol."""

    fix = "check that the URL is the root of a gateway (or of an ORS server), not of a page or a proxy"


# -- mapping ----------------------------------------------------------------------------------------------------------

LOSSES = frozenset(
    (
        "worker_lost",
        "out_of_memory",
        "timeout",
        "shutdown",
        "expired",
        "operator",
        "open_failed",
        "deleted",
        "cancelled",
    )
)
_CODES: dict[str, type[GatewayError]] = {
    "too_many_bytes": TooManyBytes,
    "rate_limited": RateLimited,
    "not_allowed": NotAllowed,
    "not_permitted": NotPermitted,
    "session_exists": SessionExists,
    "session_not_found": SessionNotFound,
    "session_closed": SessionLost,
    "pool_exhausted": NoCapacity,
    "worker_full": NoCapacity,
    "start_failed": StartFailed,
    "store_unavailable": StoreUnavailable,
    "author_fault": AuthorFault,
    "session_failed": SessionFailed,
    "timeout": SessionLost,
    "upstream_gone": SessionLost,
    "shutdown": SessionLost,
    "upstream": ServerFailed,
    "call_conflict": CallConflict,
    "unknown_environment": UnknownEnvironment,
    "unknown_task": UnknownTask,
    "unknown_split": UnknownTask,
    "wrong_environment": UnknownTask,
}
_TEXTS: tuple[tuple[int, str, type[GatewayError]], ...] = (
    (400, "Session already exists", SessionExists),
    (400, "Invalid split", UnknownTask),
    (400, "Invalid index", UnknownTask),
    (400, "Unknown task", UnknownTask),
    (404, "Active environment not found", SessionNotFound),
    (404, "unknown environment", UnknownEnvironment),
    (404, "environment ", UnknownEnvironment),
    (404, "Not Found: unknown environment", UnknownEnvironment),
    (404, "Not Found: environment ", UnknownEnvironment),
    (410, "Session deleted", SessionNotFound),
    (409, "Idempotency-Key", CallConflict),
    (409, "the outcome of this Idempotency-Key", CallConflict),
)
"""Errors that are the same on standard ORS servers. There, and so here, their bodies have a text and no code."""
_STATUSES: dict[int, type[GatewayError]] = {
    401: NotAllowed,
    403: NotPermitted,
    410: SessionLost,
    429: NoCapacity,
    503: NoCapacity,
}


def error_of(status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
    """Return the error for an answer with *status* 300 or above."""
    fields = _object(body)
    raw = fields.get("detail")
    detail = (
        raw if isinstance(raw, str) else _problems(raw) or body[:500].decode("utf-8", "replace") or f"HTTP {status}"
    )
    code, reason = str(fields.get("code") or ""), str(fields.get("reason") or "")
    kind = _kind(status, code, reason, detail)
    return kind(
        detail,
        status=status,
        code=code,
        reason=reason,
        retry_after_s=_seconds(headers.get("retry-after")),
        may_have_run=issubclass(kind, EpisodeFailed) and status != 404,
    )


def _kind(status: int, code: str, reason: str, detail: str) -> type[GatewayError]:
    if reason in ("author_fault", "session_failed"):
        return _CODES[reason]
    if reason in LOSSES:
        return SessionLost
    if code in _CODES:
        return _CODES[code]
    for known, start, kind in _TEXTS:
        if status == known and detail.startswith(start):
            return kind
    if status in _STATUSES:
        return _STATUSES[status]
    if 300 <= status < 400:
        return ProtocolError
    return InvalidRequest if status < 500 else ServerFailed


def lost_in_stream(text: str) -> EpisodeFailed | None:
    """Return the error for the text of an ``error`` event, whose first word is a reason. None: a tool failed."""
    word, colon, _ = text.partition(":")
    if not colon:
        return None
    if word in LOSSES:
        return SessionLost(text, status=200, reason=word, may_have_run=True)
    if word == "author_fault":
        return AuthorFault(text, status=200, reason=word, may_have_run=True)
    if word == "session_failed":
        return SessionFailed(text, status=200, reason=word, may_have_run=True)
    return None


def _object(body: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _problems(raw: object) -> str:
    """Return the entries of a 422 as one line: the place and the message of each."""
    if not isinstance(raw, list):
        return ""
    entries = [entry for entry in raw if isinstance(entry, dict)]
    return "; ".join(f"{'.'.join(map(str, entry.get('loc', ())))}: {entry.get('msg', '')}" for entry in entries)


def _seconds(value: str | None) -> float | None:
    return float(value) if value is not None and value.strip().isdigit() else None
