"""The tree of errors; without HTTP, which only the frontends speak.

A class exists only where somebody handles it differently. ``code`` is stable and documented; ``retryable`` says that
the same request, unchanged, may succeed later. The one table of statuses is in ``frontends/errors.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from gateway.core.faults import Fault, author_faults


class GatewayError(Exception):
    """Whatever this gateway can say went wrong."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    @property
    def detail(self) -> str:
        """The sentence that is shown to the trainer; never a secret, never a trace."""
        return str(self) or self.code


class ConfigError(GatewayError):
    """The configuration is wrong; only raised at start and by ``gateway check``."""

    code = "config"


class BackendError(GatewayError):
    """The engine refused or failed; the pool logs and counts it, no trainer sees it."""

    code = "backend"


class StartFailed(BackendError):
    """A worker did not start or never became ready; the message ends with the last lines of its log.

    ``reason`` says it in one word: ``failed``, ``timeout`` (not ready in time) or ``out_of_memory``.
    """

    code = "worker_start_failed"

    def __init__(self, message: str, *, reason: str = "failed") -> None:
        super().__init__(message)
        self.reason = reason


class InvalidRequest(GatewayError):
    """The request is malformed; the message says what is wrong and where."""

    code = "invalid_request"


class BodyTooLarge(InvalidRequest):
    """The request's body, or one of the tasks in it, exceeds its limit."""

    code = "too_large"


class UnknownEnvironment(InvalidRequest):
    """No environment of that name is on offer."""

    code = "unknown_environment"


class UnknownTask(InvalidRequest):
    """No such split, or no such index or id in it."""

    code = "unknown_task"


class UnknownSplit(UnknownTask):
    """The environment has no split of that name."""

    code = "unknown_split"


def unknown_split(split: str, known: Iterable[str]) -> UnknownSplit:
    """The error for a *split* that is not among *known*; it begins with the words of the standard ORS servers."""
    names = ", ".join(list(known)[:20]) or "none"
    return UnknownSplit(f"Invalid split: there is no {split[:200]!r}; there are {names}")


def unknown_index(split: str, index: int, count: int) -> UnknownTask:
    """The error for an *index* beyond the *count* tasks of *split*; it begins as that of the standard ORS servers."""
    return UnknownTask(f"Invalid index: {index}; split {split[:200]!r} has {count} task{'' if count == 1 else 's'}")


class WrongEnvironment(UnknownTask):
    """The task is one of another environment; the message names both."""

    code = "wrong_environment"


class TaskInvalid(InvalidRequest):
    """A task fails its schema; ``problems`` are all that is wrong with it, each with the path where it is."""

    code = "task_invalid"

    def __init__(self, problems: Sequence[tuple[str, str]], *, where: str = "") -> None:
        told = "; ".join(f"{path}: {message}" if path else message for path, message in problems)
        super().__init__(f"{where}: {told}" if where else told)
        self.problems = tuple(problems)


class TaskExists(InvalidRequest):
    """The environment has a task of this id already."""

    code = "task_exists"


class CallConflict(InvalidRequest):
    """The same call id came with another body."""

    code = "call_conflict"


class NotAllowed(GatewayError):
    """The key is missing, unknown, or not one for this door."""

    code = "not_allowed"


class SessionError(GatewayError):
    """Something about one session."""

    code = "session"


class SessionExists(SessionError):
    """The id is taken by a live session that was opened with another request."""

    code = "session_exists"


class SessionNotFound(SessionError):
    """Never known, deleted by its trainer, or of another key."""

    code = "session_not_found"


class SessionClosed(SessionError):
    """Ended by us; ``reason`` says why."""

    code = "session_closed"

    def __init__(self, reason: str) -> None:
        super().__init__(f"the session was closed: {reason}")
        self.reason = reason


class PoolExhausted(GatewayError):
    """No slot became free in time, or the queue for one is full.

    ``retry_after_s`` is the store's estimate of when one might be had; 0: it has none.
    """

    code = "pool_exhausted"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TaskRateLimited(GatewayError):
    """The task has been begun as often as its rate limit allows; again in ``retry_after_s`` seconds."""

    code = "rate_limited"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EnvironmentUnavailable(GatewayError):
    """Workers of this environment do not start; the message names the cause and ends with the last lines of a log.

    ``retry_after_s`` says when a start is tried again; 0: unsaid.
    """

    code = "start_failed"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StoreUnavailable(GatewayError):
    """The store does not answer; never to be read as "not found"."""

    code = "store_unavailable"
    retryable = True


class NotLeading(GatewayError):
    """Another replica leads the control loop by now: what this one still wanted to change was refused."""

    code = "not_leading"


class UpstreamError(GatewayError):
    """A worker answered what its protocol does not allow, or failed to set a task up."""

    code = "upstream"
    faults: tuple[Fault, ...] = ()
    """What the worker tells of the author's code besides: for operators, never for trainers."""

    def __init__(self, message: str = "", *, faults: tuple[Fault, ...] = ()) -> None:
        super().__init__(message)
        if faults:
            self.faults = faults


class AuthorFault(UpstreamError):
    """The environment author's code failed: a reset, a judge, a tool at the end of an episode. There is no reward."""

    code = "author_fault"


def author_fault(message: str, place: str) -> AuthorFault:
    """Return the error for a failure of a third-party server's own code in *place*."""
    return AuthorFault(message, faults=author_faults(message, place))


class SessionFailed(UpstreamError):
    """What a session needs in its worker broke, such as its sandbox. It is over, and has no reward."""

    code = "session_failed"


class WorkerFull(UpstreamError):
    """A worker refused a session for lack of room, and nothing was opened: it holds ``capacity`` of them; 0: unsaid."""

    code = "worker_full"

    def __init__(self, message: str, *, capacity: int = 0) -> None:
        super().__init__(message)
        self.capacity = capacity


class UpstreamTimeout(UpstreamError):
    """A worker did not answer in time; the call may have run."""

    code = "timeout"


class UpstreamGone(UpstreamError):
    """The connection to a worker broke.

    ``sent`` tells whether a byte of the request had gone out: only if not is it certain that nothing ran.
    """

    code = "upstream_gone"

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class ReplicaLeft(UpstreamGone):
    """This gateway process ended before the worker answered; the worker goes on, and so may the request."""

    code = "shutdown"

    def __init__(self, message: str = "this replica of the gateway ended before the worker answered") -> None:
        super().__init__(message, sent=True)
