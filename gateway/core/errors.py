"""The tree of errors, without HTTP statuses, which only the frontends know.

A class exists only if some code handles it differently. ``code`` is stable and documented. ``retryable`` means that the
same request, unchanged, may succeed later. The only table of statuses is in ``frontends/errors.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from gateway.core.faults import Fault, author_faults
from gateway.core.validation import did_you_mean


class GatewayError(Exception):
    """Base class of all errors that the gateway reports."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    @property
    def detail(self) -> str:
        """The message for the trainer, without secrets and tracebacks."""
        return str(self) or self.code


class ConfigError(GatewayError):
    """The configuration is wrong; raised only at start and by ``gateway check``."""

    code = "config"


class BackendError(GatewayError):
    """The engine refused or failed. The pool logs and counts it; trainers do not see it."""

    code = "backend"


class StartFailed(BackendError):
    """A worker did not start or never became ready. The message ends with the last lines of its log.

    ``reason`` is one word: ``failed``, ``timeout`` (not ready in time) or ``out_of_memory``.
    """

    code = "worker_start_failed"

    def __init__(self, message: str, *, reason: str = "failed") -> None:
        super().__init__(message)
        self.reason = reason


class InvalidRequest(GatewayError):
    """The request is malformed; the message says which part is wrong and why."""

    code = "invalid_request"


class BodyTooLarge(InvalidRequest):
    """The request's body, or one of the tasks in it, exceeds its limit."""

    code = "too_large"


class TooManyBytes(GatewayError):
    """The requests of a key, or of all keys, already hold too many bytes in this replica. Nothing was started."""

    code = "too_many_bytes"
    retryable = True


class UnknownEnvironment(InvalidRequest):
    """The gateway offers no environment of that name."""

    code = "unknown_environment"


class UnknownTask(InvalidRequest):
    """There is no such split, or no such index or id in it."""

    code = "unknown_task"


class UnknownEpisode(GatewayError):
    """The step log has no such episode, or no such blob any more, or the session is not open."""

    code = "unknown_episode"


class UnknownWorker(GatewayError):
    """There is no such worker, or it has ended."""

    code = "unknown_worker"


class UnknownSplit(UnknownTask):
    """The environment has no split of that name."""

    code = "unknown_split"


def unknown_split(split: str, known: Iterable[str]) -> UnknownSplit:
    """Return the error for a *split* that is not among *known*.

    It begins with the words of the standard ORS servers.
    """
    names = list(known)
    shown = ", ".join(names[:20]) or "none"
    return UnknownSplit(f"Invalid split: there is no {split[:200]!r}; there are {shown}{did_you_mean(split, names)}")


def unknown_index(split: str, index: int, count: int) -> UnknownTask:
    """Return the error for an *index* beyond the *count* tasks of *split*, in the words of the standard ORS servers."""
    return UnknownTask(f"Invalid index: {index}; split {split[:200]!r} has {count} task{'' if count == 1 else 's'}")


class WrongEnvironment(UnknownTask):
    """The task belongs to another environment; the message names both environments."""

    code = "wrong_environment"


class TaskInvalid(InvalidRequest):
    """A task violates its schema; ``problems`` lists every problem as a pair of path and message."""

    code = "task_invalid"

    def __init__(self, problems: Sequence[tuple[str, str]], *, where: str = "") -> None:
        told = "; ".join(f"{path}: {message}" if path else message for path, message in problems)
        super().__init__(f"{where}: {told}" if where else told)
        self.problems = tuple(problems)


class TaskExists(InvalidRequest):
    """The environment already has a task of this id."""

    code = "task_exists"


class CallConflict(InvalidRequest):
    """The same call id arrived with another body."""

    code = "call_conflict"


class NotAllowed(GatewayError):
    """The key is missing, unknown, or not valid for this frontend."""

    code = "not_allowed"


class NotPermitted(NotAllowed):
    """The key may not use this environment, or was revoked after its WebSocket was opened."""

    code = "not_permitted"


class SessionError(GatewayError):
    """Base class of errors about one session."""

    code = "session"


class SessionExists(SessionError):
    """A live session that was opened by another request has this id."""

    code = "session_exists"


class SessionNotFound(SessionError):
    """The session was never known, its trainer deleted it, or it belongs to another key."""

    code = "session_not_found"


class SessionClosed(SessionError):
    """The gateway ended the session; ``reason`` says why. ``result`` is ``Session.result``."""

    code = "session_closed"
    result: str = ""

    def __init__(self, reason: str, *, result: str = "") -> None:
        super().__init__(f"the session was closed: {reason}")
        self.reason = reason
        if result:
            self.result = result


class PoolExhausted(GatewayError):
    """No slot became free in time, or the queue for slots is full.

    ``retry_after_s`` is the store's estimate of the seconds until a slot is free; 0: no estimate.
    """

    code = "pool_exhausted"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(GatewayError):
    """The rate limit of a task's starts, or of a key's calls, is reached; retry after ``retry_after_s`` seconds."""

    code = "rate_limited"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EnvironmentUnavailable(GatewayError):
    """Workers of this environment do not start, or a secret of the operator cannot be read. The message has the cause.

    For a worker it ends with the last lines of its log.

    ``retry_after_s`` is the number of seconds until the next attempt to start a worker; 0: not known.
    """

    code = "start_failed"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StoreUnavailable(GatewayError):
    """The store does not answer. Callers must never treat this as "not found".

    With ``is_refusal`` it answers and refuses this gateway: an operator has to correct its password or its rights.
    """

    code = "store_unavailable"
    retryable = True
    is_refusal: bool = False


class NotLeading(GatewayError):
    """Another replica leads the control loop now: the store refused the changes of this replica."""

    code = "not_leading"


class UpstreamError(GatewayError):
    """A worker's answer violates its protocol, or the worker failed to set a task up."""

    code = "upstream"
    faults: tuple[Fault, ...] = ()
    """Faults of the author's code that the worker also reports: for operators, never for trainers."""

    def __init__(self, message: str = "", *, faults: tuple[Fault, ...] = ()) -> None:
        super().__init__(message)
        if faults:
            self.faults = faults


class AuthorFault(UpstreamError):
    """The environment author's code failed: a reset, a judge, or a tool at the end of an episode.

    There is no reward.
    """

    code = "author_fault"


def author_fault(message: str, place: str) -> AuthorFault:
    """Return the error for a failure of a third-party server's own code in *place*."""
    return AuthorFault(message, faults=author_faults(message, place))


class SessionFailed(UpstreamError):
    """A resource of the session in its worker broke, such as its sandbox. The session is over and has no reward."""

    code = "session_failed"


class WorkerFull(UpstreamError):
    """A worker has no room for the session and opened nothing. It holds ``capacity`` sessions; 0: not reported."""

    code = "worker_full"

    def __init__(self, message: str, *, capacity: int = 0) -> None:
        super().__init__(message)
        self.capacity = capacity


class UpstreamTimeout(UpstreamError):
    """A worker did not answer in time; the call may have run."""

    code = "timeout"


class UpstreamGone(UpstreamError):
    """The connection to a worker broke.

    ``sent`` is True if a byte of the request was sent. Only if it is False is it certain that nothing ran.
    """

    code = "upstream_gone"

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class ReplicaLeft(UpstreamGone):
    """This gateway process ended before the worker answered.

    The worker continues, and the request may still run there.
    """

    code = "shutdown"

    def __init__(self, message: str = "this replica of the gateway ended before the worker answered") -> None:
        super().__init__(message, sent=True)
