"""Registers the workers and sessions that workers and replicas report to a memory store that lacks them.

The memory store ends with its process, so only tests of the code that rebuilds a store have one that lost its data.
Each function is one atomic step on the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gateway.core.broadcast import Broadcast
from gateway.core.errors import SessionExists
from gateway.core.ids import SessionId
from gateway.core.session import CapacityWanted, Notice, Session, SessionState
from gateway.core.worker import Worker, WorkerState
from gateway.stores.memory.slots import Held, Slots

NOTES_S = 10.0
"""Minimum seconds that sessions live after a data loss, in which replicas write their notes again."""


def adopt(slots: Slots, worker: Worker, sessions: Sequence[Session], now: float) -> list[SessionId]:
    """Register *worker* and its *sessions*, as ``LeaderStore.adopt``."""
    held = slots.workers.get(worker.id) or slots.enlist(worker, now)
    if held.worker.state is WorkerState.STARTING:
        held.worker = worker  # its start completed, which an older state of the store does not know
    for session in sessions:
        _take_in(slots, session, held, now)
    _settle_in(slots, held, now)
    return list(held.sessions)


def restore(slots: Slots, sessions: Sequence[Session], now: float) -> list[SessionId]:
    """Register *sessions* of known workers, as ``LeaderStore.restore``."""
    workers = {session.worker: slots.workers.get(session.worker) for session in sessions}
    for session in sessions:
        if (held := workers[session.worker]) is not None:
            _take_in(slots, session, held, now)
    for held in workers.values():
        if held is not None:
            _settle_in(slots, held, now)
    return [session.id for session in sessions if _holds(slots, session)]


def finish(slots: Slots, notices: Broadcast[Notice], now: float) -> None:
    """Mark the store as whole again, and grant its free slots."""
    slots.is_whole = True
    # Deadlines passed while replicas could not renew them.
    for session in slots.sessions.values():
        if session.state is SessionState.OPEN and slots.deadlines.at(session.id) < now + NOTES_S:
            slots.deadlines.set(session.id, now + NOTES_S)
    for environment in sorted({ticket.opening.environment for ticket in slots.tickets.values()}):
        slots.serve(environment, now)
        if slots.queues[environment]:
            notices.publish(CapacityWanted(environment))


def _holds(slots: Slots, session: Session) -> bool:
    known = slots.sessions.get(session.id)
    return known is not None and (known.lease, known.worker) == (session.lease, session.worker)


def _take_in(slots: Slots, session: Session, held: Held, now: float) -> None:
    """Register a session that a replica or worker serves as open, unless its id is known or it was closed."""
    closed = slots.closed.get(session.id)
    if session.id in slots.sessions or (closed is not None and closed.lease == session.lease):
        return
    if (ticket := slots.tickets.get(session.id)) is not None:
        slots.settle(ticket, SessionExists(f"session {session.id} exists"))
    worker = held.worker
    taken = replace(
        session,
        environment=worker.environment,
        worker=worker.id,
        address=worker.address or session.address,
        state=SessionState.OPEN,
        reason=None,
    )
    slots.hold(taken, held, now + session.idle_s)
    held.uses += 1


def _settle_in(slots: Slots, held: Held, now: float) -> None:
    """Update the state of a worker after `_take_in` added sessions, and grant its free slots."""
    if held.worker.state is WorkerState.PAUSED and held.sessions:
        held.become(WorkerState.READY)
    if held.worker.state is WorkerState.READY and held.is_spent:
        slots.drain(held)
    slots.serve(held.worker.environment, now)
