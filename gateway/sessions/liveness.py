"""Checks whether workers answer. A running worker that does not (paused, starved, stuck) is *suspect* until it does.

An opening detects such a worker, and the control loop queries it from then on. The server of the gateway's own images
answers while its environments work, and closes a session that it opens too late by its lease. So an opening there moves
to another worker. A third-party server may not answer while it works, and may have started to open the session. So the
opening there continues, and no further openings start in it.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from gateway.core.environment import Environment
from gateway.core.errors import GatewayError, UpstreamGone, UpstreamTimeout
from gateway.core.ports.upstream import WorkerUpstream
from gateway.core.session import Session
from gateway.core.worker import Worker, worker_of

PAUSE_S: Final = 0.5
"""Seconds between two queries to a server that does not answer."""
ANSWER_S: Final = 2.0
"""Seconds that a worker has to answer. A healthy worker takes about 1 ms."""


class WorkerSilent(UpstreamTimeout):
    """A worker does not answer. It may still run the request later."""


async def answers(worker: Worker, environment: Environment, upstream: WorkerUpstream) -> bool:
    """Return True if *worker* answers within `ANSWER_S`, even with an error."""
    try:
        async with asyncio.timeout(ANSWER_S):
            # A busy worker must answer too: the question is whether it would open a session now.
            await upstream.alive(worker, environment, busy_counts=False)
    except (UpstreamGone, UpstreamTimeout, TimeoutError):
        return False
    except GatewayError:
        return True
    return True


async def wait_for_answer(
    session: Session, environment: Environment, upstream: WorkerUpstream, within_s: float
) -> None:
    """Return when the server of *session* answers, or after *within_s* seconds."""
    with contextlib.suppress(TimeoutError):
        # No Redis in here: the timeout's cancellation reaches the server's connection only.
        async with asyncio.timeout(within_s):
            while True:
                await asyncio.sleep(min(PAUSE_S, within_s))
                with contextlib.suppress(GatewayError):
                    return await upstream.alive(worker_of(session), environment)
