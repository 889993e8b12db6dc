"""Workers that answer nothing although they run: paused, starved or stuck. They are *suspect* until they answer again.

Noticed where a session is opened in one, and asked from then on by the control loop. The server of our own images
answers beside whatever its environments do, and ends a session that it opens late by its lease: there the opening goes
to another worker. A server of somebody else's may answer nothing while it works, and may have begun to open: there the
opening goes on, and no others are begun.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from gateway.core.environment import Environment
from gateway.core.errors import GatewayError, UpstreamGone, UpstreamTimeout
from gateway.core.ports.upstream import WorkerUpstream
from gateway.core.session import Session
from gateway.core.worker import Worker

PAUSE_S: Final = 0.5
"""Before a server that does not answer is asked again."""
ANSWER_S: Final = 2.0
"""How long a worker has to answer at all; it takes a millisecond."""


class WorkerSilent(UpstreamTimeout):
    """A worker answers nothing. What it was asked may run once it goes on."""


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
                    return await upstream.alive(worker_of(session), environment)


def worker_of(session: Session) -> Worker:
    """Return the worker of *session*, as far as its upstream has to know it."""
    return Worker(id=session.worker, environment=session.environment, digest="", slots=1, address=session.address)
