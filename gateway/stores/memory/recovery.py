"""Of the memory store: who leads, workers that rest, and what is registered anew because somebody serves it.

A process that ends takes this store with it, so no leader outlives its fences, and there is no older state that comes
back. A store that is not whole exists for tests of those who rebuild one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gateway.core.ids import SessionId, WorkerId
from gateway.core.leader_lease import Lead
from gateway.core.session import CapacityWanted, Session, SessionState
from gateway.core.worker import Worker, WorkerState
from gateway.stores.memory.records import Held
from gateway.stores.memory.slots import Slots

NOTES_S = 10.0
"""How long sessions live at least after a loss of data: replicas write their notes again in the meantime."""


class MemoryRecovery(Slots):
    """The methods of ``MemoryStore`` for its leader: lead, pause, suspect, wake, adopt, and say that this was all."""

    async def own(self, owner: str, *, takes_over: bool = False) -> str:
        return self._leadership.own(owner, self._tidied(), takes_over=takes_over)

    async def lead(self, replica: str, *, ttl_s: float) -> Lead:
        return self._leadership.lead(replica, self._tidied(), ttl_s=ttl_s)

    async def resign(self, replica: str) -> None:
        self._leadership.resign(replica)

    async def pause_worker(self, id: WorkerId, *, fence: int = 0) -> bool:
        self._tidied()
        self._leadership.check(fence)
        held = self._workers.get(id)
        if held is None:
            return False
        if held.worker.state is WorkerState.READY and not held.sessions and self._leadership.is_whole:
            held.worker = replace(held.worker, state=WorkerState.PAUSED)
        return held.worker.state is WorkerState.PAUSED

    async def suspect_worker(self, id: WorkerId) -> bool:
        self._tidied()
        held = self._workers.get(id)
        if held is None:
            return False
        if held.worker.state is WorkerState.READY:
            held.worker = replace(held.worker, state=WorkerState.SUSPECT)
            self._notices.publish(CapacityWanted(held.worker.environment))
        return held.worker.state is WorkerState.SUSPECT

    async def wake_worker(self, id: WorkerId) -> bool:
        now = self._tidied()
        held = self._workers.get(id)
        if held is None or held.worker.state not in (WorkerState.PAUSED, WorkerState.SUSPECT):
            return False
        held.worker = replace(held.worker, state=WorkerState.READY)
        held.idle_since = now
        self._admission.close_breaker(held.worker.environment)
        self._serve(held.worker.environment, now)
        return True

    async def adopt(self, worker: Worker, sessions: Sequence[Session], *, fence: int) -> list[SessionId]:
        now = self._tidied()
        self._leadership.check(fence)
        held = self._workers.get(worker.id) or self._enlist(worker, now)
        for session in sessions:
            self._take_in(session, held, now)
        self._settle_in(held, now)
        return list(held.sessions)

    async def restore(self, sessions: Sequence[Session]) -> list[SessionId]:
        now = self._tidied()
        workers = {
            session.worker: self._workers[session.worker] for session in sessions if session.worker in self._workers
        }
        for session in sessions:
            if (held := workers.get(session.worker)) is not None:
                self._take_in(session, held, now)
        for held in workers.values():
            self._settle_in(held, now)
        return [session.id for session in sessions if self._holds(session)]

    async def rebuilt(self, *, fence: int) -> None:
        now = self._tidied()
        self._leadership.check(fence)
        self._leadership.is_whole = True
        # Deadlines ran on while nobody could renew them.
        for session in self._sessions.values():
            if session.state is SessionState.OPEN and self._deadlines.at(session.id) < now + NOTES_S:
                self._deadlines.set(session.id, now + NOTES_S)
        for environment in {ticket.opening.environment for ticket in self._admission.all()}:
            self._serve(environment, now)
            if self._admission.waiting(environment):
                self._notices.publish(CapacityWanted(environment))

    def _holds(self, session: Session) -> bool:
        known = self._sessions.get(session.id)
        return known is not None and (known.lease, known.worker) == (session.lease, session.worker)

    def _take_in(self, session: Session, held: Held, now: float) -> None:
        """Make a session that somebody serves an open one, unless its id is known or it was closed."""
        closed = self._closed.get(session.id)
        if session.id in self._sessions or (closed is not None and closed.lease == session.lease):
            return
        self._drop_ticket(session.id, now)
        self._closed.pop(session.id, None)
        self._closed_deadlines.discard(session.id)
        worker = held.worker
        self._sessions[session.id] = replace(
            session,
            environment=worker.environment,
            worker=worker.id,
            address=worker.address or session.address,
            state=SessionState.OPEN,
            reason=None,
        )
        self._deadlines.set(session.id, now + session.idle_s)
        held.sessions.add(session.id)
        held.uses += 1

    def _settle_in(self, held: Held, now: float) -> None:
        """Let a worker be what its sessions make of it, once some were taken in."""
        if held.worker.state is WorkerState.PAUSED and held.sessions:
            held.worker = replace(held.worker, state=WorkerState.READY)
        if held.worker.state is WorkerState.READY and held.is_spent:
            self._drain(held)
        self._serve(held.worker.environment, now)
