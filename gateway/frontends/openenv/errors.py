"""Errors as OpenEnv's clients read them: a code, a sentence, and whether the socket stays open.

A client never tries again by itself, and every error raises in its trainer. So what can be gone on from keeps the
socket, and only what a stock server closes for closes here.
"""

from __future__ import annotations

from typing import Final

from gateway.core.environment import Environment
from gateway.core.errors import (
    EnvironmentUnavailable,
    GatewayError,
    PoolExhausted,
    SessionClosed,
    SessionError,
    SessionFailed,
    SessionNotFound,
    StoreUnavailable,
    TaskInvalid,
    TaskRateLimited,
    UpstreamGone,
)
from gateway.core.ports.store import Store
from gateway.core.session import CloseReason
from gateway.frontends.errors import reason_of, retry_after_s, status_of
from gateway.frontends.openenv.frames import Code, Json, Refused, invalid

NO_EPISODE: Final = "no episode is open on this connection: send reset first"
_ENDED: Final = {
    CloseReason.EXPIRED.value: "it was idle for longer than the environment allows",
    CloseReason.WORKER_LOST.value: "its environment was lost: the worker died",
    CloseReason.OUT_OF_MEMORY.value: "its environment was lost: the worker ran out of memory",
    CloseReason.TIMEOUT.value: "its environment was lost: the worker did not answer a step in time",
    CloseReason.AUTHOR_FAULT.value: "its environment failed: the environment author's code raised an exception",
    CloseReason.SESSION_FAILED.value: "its environment failed: what the episode needs in its worker broke",
    CloseReason.OPEN_FAILED.value: "its reset failed",
    CloseReason.SHUTDOWN.value: "the gateway went away together with its workers",
    CloseReason.OPERATOR.value: "an operator ended it",
}
_CODES: Final[dict[type[GatewayError], Code]] = {
    SessionError: Code.SESSION_ERROR,
    SessionFailed: Code.SESSION_ERROR,
    UpstreamGone: Code.SESSION_ERROR,
    StoreUnavailable: Code.SESSION_ERROR,
    GatewayError: Code.EXECUTION_ERROR,
}
"""Of the nearest ancestor; what is wrong with one request, or one step, is EXECUTION_ERROR."""


async def refusal(error: GatewayError, environment: Environment, store: Store) -> Refused:
    """Say *error* in the protocol's words; *store* tells how full the environment is, where that is the reason."""
    status = status_of(error)
    if isinstance(error, PoolExhausted):
        return await full(error, environment, store)
    if isinstance(error, EnvironmentUnavailable):
        message = f"Environment factory {environment.name!r} failed to create instance. {error.detail}"
        return Refused(
            Code.FACTORY_ERROR, message, status=status, closes=True, factory_name=environment.name, **marks(error)
        )
    if isinstance(error, TaskRateLimited):
        again = marks(error)
        message = f"{error.detail}; again in {again['retry_after_s']} s"
        return Refused(Code.EXECUTION_ERROR, message, status=status, **again)
    if isinstance(error, TaskInvalid):
        entries = [
            {"type": "value_error", "loc": ["data", "task", *_place(path)], "msg": message, "input": None}
            for path, message in error.problems
        ]
        return invalid(entries, f"Invalid task: {error.detail}")
    code = next(_CODES[kind] for kind in type(error).__mro__ if kind in _CODES)
    message = error.detail
    if isinstance(error, SessionNotFound):
        message = NO_EPISODE
    elif isinstance(error, SessionClosed):
        message = f"the episode has ended: {_ENDED.get(error.reason, error.reason)}; send reset to begin another one"
    return Refused(code, message, status=status, **marks(error))


def marks(error: GatewayError) -> Json:
    """What stands in an error frame for programs: ``reason`` and ``retry_after_s``, where there are such."""
    found = {"reason": reason_of(error) or None, "retry_after_s": retry_after_s(error)}
    return {name: mark for name, mark in found.items() if mark is not None}


async def full(error: PoolExhausted, environment: Environment, store: Store) -> Refused:
    """No slot in time: how many are held, of how many there can be."""
    most = environment.pool.slots * environment.pool.max_workers
    try:
        load = (await store.load()).get(environment.name)
        held = sum(entry.used for entry in load.workers) if load is not None else 0
    except StoreUnavailable:
        held = most
    message = (
        f"Server at capacity: {held}/{most} sessions active. Cannot accept new connections. "
        f"({error.detail}; come again later, or raise max_workers)"
    )
    return Refused(
        Code.CAPACITY_REACHED,
        message,
        status=status_of(error),
        closes=True,
        active_sessions=held,
        max_sessions=most,
        **marks(error),
    )


def _place(path: str) -> list[str]:
    return [part for part in path.split(".") if part]
