"""The end of a session, once it was marked ``CLOSING``: tell the worker, then free the slot.

Both the request path (a trainer's delete) and the control loop (expiry) end sessions this way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from gateway.core.errors import GatewayError, SessionExists
from gateway.core.model import Environment, Opening, Session, Summary, Wire
from gateway.core.ports import Store, Upstream
from gateway.observe.metrics import Metrics

logger = logging.getLogger(__name__)


class Closer:
    """Ends sessions at their workers and in the store."""

    def __init__(self, *, store: Store, upstreams: Mapping[Wire, Upstream], metrics: Metrics) -> None:
        self._store = store
        self._upstreams = upstreams
        self._metrics = metrics

    async def finish(self, session: Session, environment: Environment, *, counted: bool = True) -> Summary | None:
        """End a session that is ``CLOSING``, and give its slot back. Returns how the episode went, if known.

        *counted* False leaves logs and metrics alone: the session was never one of a trainer.

        A worker that does not take the end of a session is drained: its slot can't be trusted, and giving it to
        somebody else would put a session beside one that still runs.
        """
        summary = await self._end_in_worker(session, environment)
        if await self._store.release(session.id, session.lease) and counted:
            self._count(session, environment, summary)
        return summary

    async def hand_over(self, session: Session, environment: Environment, successor: Opening) -> Session | None:
        """End a session that is ``CLOSING``, and give its slot to *successor*, which gets no other one.

        Returns the successor's session, or None where the slot can't be used again: then it was given back.

        Raises:
            SessionExists: another session has the successor's id; the slot was given back.
        """
        summary = await self._end_in_worker(session, environment, keeps=True)
        try:
            begun = await self._store.hand_over(session.id, session.lease, successor)
        except SessionExists:
            await self._end_in_worker(session, environment)
            await self._store.release(session.id, session.lease)
            raise
        if begun is None:
            await self._end_in_worker(session, environment)  # what was kept for the successor takes the slot still
        if begun is not None or await self._store.release(session.id, session.lease):
            self._count(session, environment, summary)
        return begun

    async def _end_in_worker(
        self, session: Session, environment: Environment, *, keeps: bool = False
    ) -> Summary | None:
        try:
            # No Redis in here: the timeout's cancellation reaches the worker's connection only.
            async with asyncio.timeout(environment.timeouts.close_s):
                return await self._upstreams[environment.wire].close(session, environment, keeps=keeps)
        except (GatewayError, TimeoutError) as error:
            logger.warning("session_close_failed session=%s worker=%s error=%s", session.id, session.worker, error)
            if not environment.server.url:  # that server would not be replaced, and says itself when it is full
                await self._store.drain_worker(session.worker)
            return None

    def _count(self, session: Session, environment: Environment, summary: Summary | None) -> None:
        reason = session.reason.value if session.reason else ""
        self._metrics.session_closed(environment.name, reason, summary)
        logger.info(
            "session_closed session=%s name=%r environment=%s worker=%s reason=%s reward=%s steps=%s",
            session.id,
            session.name,
            session.environment,
            session.worker,
            reason,
            summary.reward if summary else None,
            summary.steps if summary else None,
        )
