"""What became of calls, starts and claims, in one word each: the closed sets that metrics are labelled with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from gateway.core.episode import FaultReply, StepResult
from gateway.core.errors import (
    AuthorFault,
    BackendError,
    GatewayError,
    InvalidRequest,
    SessionClosed,
    SessionError,
    SessionFailed,
    UpstreamGone,
    UpstreamTimeout,
)
from gateway.core.faults import Fault, FaultKind
from gateway.core.session import CloseReason

CALLS: Final = (
    "ok",
    "refused",  #: by the worker, or for a call id with another body: nothing ran
    "worker_lost",
    "out_of_memory",
    "timeout",  #: longer than the environment allows
    "author_fault",  #: the environment author's code raised an exception, or gave a reward that is no number
    "session_failed",  #: what its session needs in the worker broke
    "ended",  #: its session was ended meanwhile: deleted, cancelled, by an operator
    "left",  #: the trainer hung up; the worker goes on
    "failed",
)
STARTS: Final = ("ready", "failed", "timeout", "out_of_memory")
CLAIMS: Final = ("hit", "wait", "refused")
DEATHS: Final = (CloseReason.WORKER_LOST.value, CloseReason.OUT_OF_MEMORY.value)

_CALLS_BY_ERROR: Final[dict[type[BaseException], str]] = {
    asyncio.CancelledError: "left",
    TimeoutError: "timeout",
    InvalidRequest: "refused",
    UpstreamTimeout: "timeout",
    UpstreamGone: "worker_lost",
    AuthorFault: "author_fault",
    SessionFailed: "session_failed",
    SessionError: "ended",
    BaseException: "failed",
}


def call_outcome(error: BaseException) -> str:
    """The outcome of a call that ended with *error*; one of `CALLS`."""
    if isinstance(error, SessionClosed):
        return error.reason if error.reason in CALLS else "ended"
    return next(_CALLS_BY_ERROR[kind] for kind in type(error).__mro__ if kind in _CALLS_BY_ERROR)


def answer_outcome(answer: object) -> str:
    """The outcome of a call that was answered with *answer*; one of `CALLS`."""
    if not isinstance(answer, StepResult | FaultReply):
        return "ok"
    is_fault = isinstance(answer, StepResult) and answer.is_fault
    return faults_outcome(answer.faults, other="author_fault" if is_fault else "ok")


def faults_outcome(faults: Sequence[Fault], *, other: str) -> str:
    """The outcome of a call whose answer tells of *faults*; *other* if it tells of none. One of `CALLS`."""
    if not faults:
        return other
    return "author_fault" if any(fault.kind is FaultKind.AUTHOR for fault in faults) else "session_failed"


def start_outcome(error: BaseException) -> str:
    """The outcome of a start that ended with *error*; one of `STARTS`."""
    if isinstance(error, (TimeoutError, UpstreamTimeout)):
        return "timeout"
    reason = getattr(error, "reason", "") if isinstance(error, (BackendError, GatewayError)) else ""
    return str(reason) if reason in STARTS else "failed"


def bounded(word: str, known: tuple[str, ...], other: str) -> str:
    """*word*, or *other* if it is none of the *known* ones: labels must stay few."""
    return word if word in known else other
