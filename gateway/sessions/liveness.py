"""Workers that answer nothing although they run: paused, starved or stuck. They are *suspect* until they answer again.

Noticed where a session is opened in one, and asked from then on by the control loop. The server of our own images
answers beside whatever its environments do, and ends a session that it opens late by its lease: there the opening goes
to another worker. A server of somebody else's may answer nothing while it works, and may have begun to open: there the
opening goes on, and no others are begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Final

from gateway.core.environment import Environment, UpstreamKind
from gateway.core.errors import GatewayError, UpstreamGone, UpstreamTimeout
from gateway.core.ports.upstream import WorkerUpstream
from gateway.core.session import Session
from gateway.core.worker import Worker

logger = logging.getLogger(__name__)


PAUSE_S: Final = 0.5
"""Before a server that does not answer is asked again."""


SUSPECT_S: Final = 3.0
"""How long a worker may take to open a session before it is asked whether it answers, and again after each answer."""


ANSWER_S: Final = 2.0
"""How long it has for that answer; it takes a millisecond."""


class WorkerSilent(UpstreamTimeout):
    """A worker answers nothing. What it was asked may run once it goes on."""


class OpeningWatch:
    """A context in which a session is opened in its worker, which is asked for a sign of life where that takes long.

    Args:
        limit: Ended early where a worker of our own images answers nothing.
        suspected: Called once where a worker of somebody else's image answers nothing; the opening goes on.
    """

    def __init__(
        self,
        limit: asyncio.Timeout,
        session: Session,
        environment: Environment,
        upstream: WorkerUpstream,
        *,
        suspected: Callable[[], object],
    ) -> None:
        self.is_silent = False
        self._limit = limit
        self._suspected = suspected
        self._session = session
        self._environment = environment
        self._upstream = upstream
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> OpeningWatch:
        # A timer: a task would cost each opening.
        self._timer = asyncio.get_running_loop().call_later(SUSPECT_S, self._begin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        if await answers(_worker_of(self._session), self._environment, self._upstream):
            self._timer = asyncio.get_running_loop().call_later(SUSPECT_S, self._begin)
        elif self._environment.wire is not UpstreamKind.OWN:
            self._suspected()
        elif not self._limit.expired():
            self.is_silent = True
            self._limit.reschedule(asyncio.get_running_loop().time())


async def answers(worker: Worker, environment: Environment, upstream: WorkerUpstream) -> bool:
    """Whether *worker* answers anything within `ANSWER_S`."""
    try:
        async with asyncio.timeout(ANSWER_S):
            # Also of one that is busy: what is meant is whether it would take a session now.
            await upstream.alive(worker, environment, busy_counts=False)
    except (UpstreamGone, UpstreamTimeout, TimeoutError):
        return False
    except GatewayError:
        return True
    return True


async def wait_for_answer(
    session: Session, environment: Environment, upstream: WorkerUpstream, within_s: float
) -> None:
    """Return when the server of *session* answers again, or after *within_s* seconds."""
    with contextlib.suppress(TimeoutError):
        # No Redis in here: the timeout's cancellation reaches the server's connection only.
        async with asyncio.timeout(within_s):
            while True:
                await asyncio.sleep(min(PAUSE_S, within_s))
                with contextlib.suppress(GatewayError):
                    return await upstream.alive(_worker_of(session), environment)


def _worker_of(session: Session) -> Worker:
    return Worker(id=session.worker, environment=session.environment, digest="", slots=1, address=session.address)
