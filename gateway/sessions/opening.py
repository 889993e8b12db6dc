"""How an episode begins: claim a slot, or take over that of the episode before, and set the session up in its worker.

A trainer may hang up at any moment of it. What it held by then is given back, also what is only known to be held later:
a command to the store that was on its way, a slot that is just being handed over.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

from gateway.core.environment import Environment, UpstreamKind
from gateway.core.errors import (
    AuthorFault,
    EnvironmentUnavailable,
    GatewayError,
    PoolExhausted,
    SessionClosed,
    SessionExists,
    SessionNotFound,
    StoreUnavailable,
    UpstreamError,
    UpstreamGone,
    UpstreamTimeout,
    WorkerFull,
)
from gateway.core.ids import Owner, SessionId
from gateway.core.ports.store import Store
from gateway.core.ports.upstream import Upstream
from gateway.core.retry import STORE_PATIENCE_S, STORE_PAUSE_S, patiently
from gateway.core.session import CloseReason, GroupMembership, Session, SessionRequest, SessionSetup, SessionState
from gateway.metrics import Metrics
from gateway.sessions.cache import CachedSession, SessionCache, session_id
from gateway.sessions.closing import Missed, SessionCloser, log_faults
from gateway.sessions.interruption import AdmissionGate, OpeningWatch
from gateway.sessions.liveness import WorkerSilent, wait_for_answer

logger = logging.getLogger(__name__)

HIT_S: Final = 0.05
"""An opening that has its slot within this long counts as one that did not wait; a start takes longer."""
RETRY_PAUSE_S: Final = 0.05
OPEN_ATTEMPTS: Final = 2
"""Workers in which an opening is tried that had begun in them; a task that kills workers must not go on to all."""
FULL_PAUSE_S: Final = 0.5
"""Before a worker is tried again that had no room and did not say how much it has."""


class DrawnTickets(Protocol):
    """Takes back the places in groups of drawn tasks: `gateway.tasks.curricula.service.Curricula`."""

    def unused(self, ticket: GroupMembership | None) -> None:
        """Give back the place of *ticket*: nothing was opened with it. Returns at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRequest:
    """What a frontend asks for."""

    owner: Owner
    """The name of the trainer's key."""
    name: str
    """The session's id as the trainer knows it."""
    environment: Environment
    setup: SessionSetup
    """Its secrets go to the worker, and are neither stored nor logged."""
    fingerprint: str
    """Of all that makes this request what it is: a retry with the same one gets the same session."""
    task: str = ""
    """``split/index`` or a task's id, for people."""
    episode: str = ""
    """The trainer's own name for the episode; only a reset has one."""
    within_s: float | None = None
    """The longest wait in seconds, where it is less than the environment's own limits."""


class _Opening:
    """One opening under way: what was asked for, and until when."""

    def __init__(self, request: EpisodeRequest) -> None:
        self.environment = request.environment.splits.get(request.setup.of_split, request.environment)
        self.setup = request.setup
        self.within_s = request.within_s
        self.began_at = time.monotonic()
        self.claim = _claim_of(request, self.environment)
        """What the store is asked for; each try has a lease of its own."""

    @property
    def open_until(self) -> float:
        """When a slot is no longer waited for that is claimed again, by this process's clock."""
        open_s = self.environment.timeouts.open_s
        return self.began_at + (open_s if self.within_s is None else min(self.within_s, open_s))

    def at_most(self, limit_s: float) -> float:
        """What is left of the whole time, but no more than *limit_s*; not less than 0."""
        left_s = limit_s if self.within_s is None else self.began_at + self.within_s - time.monotonic()
        return max(0.0, min(limit_s, left_s))

    def renew(self) -> None:
        """Give the claim a new lease: the next try is another one."""
        self.claim = replace(self.claim, lease=uuid.uuid4().hex)


class SessionOpener:
    """Opens sessions for `gateway.sessions.service.Sessions`."""

    def __init__(
        self,
        *,
        store: Store,
        upstreams: Mapping[UpstreamKind, Upstream],
        closer: SessionCloser,
        cache: SessionCache,
        metrics: Metrics,
        patience_s: float = STORE_PATIENCE_S,
        waiting: AdmissionGate,
        tickets: DrawnTickets,
    ) -> None:
        """
        Args:
            patience_s: How long a store that does not answer, or is being rebuilt, is waited for.
            waiting: Who waits for a slot here.
            tickets: Takes back those with which nothing was opened.
        """
        self._store = store
        self._upstreams = upstreams
        self._closer = closer
        self._cache = cache
        self._metrics = metrics
        self._patience_s = patience_s
        self._waiting = waiting
        self._tickets = tickets

    async def open(self, request: EpisodeRequest) -> CachedSession:
        """Start an episode in a slot of its own.

        An identical retry (same fingerprint) of a session that is open, or being opened, gets that session.

        Raises:
            SessionExists: *name* is taken by a session that was opened otherwise.
            PoolExhausted, EnvironmentUnavailable: no slot in time, or this replica ends; workers do not start.
            InvalidRequest: the worker refuses the task.
            UpstreamError: the worker failed; the slot is given back. One that dies over it is replaced by another
                first: nobody has seen anything of the episode yet.
        """
        opening = _Opening(request)
        with self._counted(opening):
            session = await self._claim(opening, opening.at_most(opening.environment.timeouts.open_s))
            return await self._set_up(session, opening)

    async def reset(self, request: EpisodeRequest) -> CachedSession:
        """End the episode of this name, if there is one, and start another one in its place, in the same slot.

        Another environment, or an exclusive one, takes another slot, in its turn. What fails here leaves no episode.
        Raises as `open`.
        """
        opening = _Opening(request)
        with self._counted(opening):
            session = await self._take_over(opening)
            if session is None:
                session = await self._claim(opening, opening.at_most(opening.environment.timeouts.open_s))
            return await self._set_up(session, opening)

    @contextlib.contextmanager
    def _counted(self, opening: _Opening) -> Iterator[None]:
        """Count what is refused inside, and let a drawn task's place in its group go if nothing is opened."""
        try:
            yield
        except BaseException as error:  # a cancellation too: the trainer hung up
            self._unused(opening)
            if isinstance(error, GatewayError):
                self._metrics.session_refused(opening.environment.name, error.code)
            raise

    def _unused(self, opening: _Opening) -> None:
        if opening.setup.ticket is not None:
            self._tickets.unused(opening.setup.ticket)

    # -- the slot of the episode before ---------------------------------------------------------------------------

    async def _take_over(self, opening: _Opening) -> Session | None:
        """End the session of the same id and take over its slot; None if there was none, or none to be had.

        Raises:
            UpstreamTimeout: that took longer than the trainer waits; it goes on.
        """
        gone = asyncio.Event()
        id, environment, within_s = opening.claim.id, opening.environment, opening.within_s
        handing = self._closer.go_on(id, self._transfer(opening.claim, environment, gone))
        try:
            await asyncio.wait({handing}, timeout=within_s)
            if not handing.done():
                raise UpstreamTimeout(f"the episode before this one did not end within {within_s:g} s")
        except BaseException:  # also where the trainer hung up: what it is handed all the same is given back
            gone.set()
            self._closer.go_on(id, self._hand_back(handing, environment))
            raise
        return handing.result()

    async def _transfer(self, claim: SessionRequest, environment: Environment, gone: asyncio.Event) -> Session | None:
        """As `_take_over`, to its end; once *gone* is set nobody wants the slot any more."""
        entry = self._cache.get(claim.id)
        ended = await self._closer.begin(claim.id, CloseReason.DELETED, patience_s=self._patience_s)
        if entry is not None:  # only now: what this breaks off asks the store why
            self._cache.forget(claim.id, entry.session.lease)
            entry.end()
        if ended is None:
            return None
        if ended.environment != environment.name:
            await self._closer.finish(ended, self._cache.environment_of(ended))
            return None
        return await self._closer.hand_over(ended, environment, claim, is_wanted=lambda: not gone.is_set())

    async def _hand_back(self, handing: asyncio.Task[Session | None], environment: Environment) -> None:
        await asyncio.wait({handing})
        if handing.cancelled() or handing.exception() is not None:
            return
        if (session := handing.result()) is not None:
            # As if deleted: where an opening failed, the worker may hold something of it, and nothing was opened here.
            await self._closer.give_back(session, environment, CloseReason.DELETED)

    # -- a slot of its own ----------------------------------------------------------------------------------------

    async def _claim(self, opening: _Opening, wait_s: float) -> Session:
        """Claim a slot, or return the session that an identical request has opened meanwhile."""
        given_up: set[str] = set()
        try:
            with self._waiting.here():
                return await self._claimed(opening, wait_s, given_up)
        except BaseException:  # a cancellation too: the trainer hung up
            if given_up:
                self._closer.go_on(opening.claim.id, self._end_given_up(opening, given_up))
            raise

    async def _claimed(self, opening: _Opening, wait_s: float, given_up: set[str]) -> Session:
        """See `_claim`; leases of claims whose answer was lost are added to *given_up*."""
        environment = opening.environment
        began_at = time.monotonic()
        deadline = began_at + wait_s + environment.timeouts.setup_s
        patient_until = began_at + self._patience_s
        while True:
            pause_s = RETRY_PAUSE_S
            try:
                left_s = max(0.0, began_at + wait_s - time.monotonic()) if given_up else wait_s
                session = await self._store.claim(opening.claim, wait_s=left_s)
                waited_s = time.monotonic() - began_at
                self._metrics.claimed(environment.name, "hit" if waited_s < HIT_S else "wait", waited_s)
                return session
            except (PoolExhausted, EnvironmentUnavailable):
                self._metrics.claimed(environment.name, "refused", time.monotonic() - began_at)
                raise
            except StoreUnavailable:
                # What it did all the same is undone under the old lease, however late that comes.
                given_up.add(opening.claim.lease)
                if time.monotonic() + STORE_PAUSE_S > patient_until:
                    raise
                opening.renew()
                pause_s = STORE_PAUSE_S
            except SessionExists:
                other = await patiently(partial(self._holder, opening.claim.id), for_s=self._patience_s)
                if other is not None and other.lease in given_up:
                    await self._closer.give_back(other, environment, CloseReason.OPEN_FAILED, counted=False)
                elif other is not None and other.fingerprint != opening.claim.fingerprint:
                    raise
                elif other is not None and other.state is SessionState.OPEN:
                    return other
            # It waits in the queue, is being set up by another request, or is just being closed.
            if time.monotonic() > deadline:
                raise SessionExists(opening.claim.name)
            await asyncio.sleep(pause_s)

    async def _end_given_up(self, opening: _Opening, leases: set[str]) -> None:
        other = await patiently(partial(self._holder, opening.claim.id), for_s=self._patience_s)
        if other is not None and other.lease in leases:
            await self._closer.give_back(other, opening.environment, CloseReason.OPEN_FAILED, counted=False)

    async def _holder(self, id: SessionId) -> Session | None:
        try:
            session = await self._store.find(id)
        except (SessionNotFound, SessionClosed):
            return None
        return None if session.state is SessionState.CLOSING else session

    # -- in the worker --------------------------------------------------------------------------------------------

    async def _set_up(self, session: Session, opening: _Opening) -> CachedSession:
        """Set a session up that was granted a slot, note that it is open, and cache it.

        Another worker is tried if the first one dies of it, has no room or answers nothing.
        """
        environment = opening.environment
        deaths = 0
        while session.state is SessionState.OPENING:
            try:
                session = await self._open_in_worker(session, opening)
            except (UpstreamGone, WorkerFull, WorkerSilent) as error:
                deaths += isinstance(error, UpstreamGone) and error.sent
                left_s = opening.open_until - time.monotonic()
                if left_s <= 0 and isinstance(error, WorkerFull):
                    raise PoolExhausted(f"no worker of {environment.name!r} has room: {error.detail}") from error
                if left_s <= 0 or deaths == OPEN_ATTEMPTS:
                    raise
                logger.info("session_opened_elsewhere session=%s worker=%s error=%s", session.id, session.worker, error)
                await self._pause(session, environment, error, left_s)
                # By itself: others of its group may have begun, and are not to be waited for again.
                opening.renew()
                opening.claim = replace(opening.claim, group="")
                session = await self._claim(opening, max(0.0, opening.open_until - time.monotonic()))
            else:
                self._note_open(session, time.monotonic() - opening.began_at)
                break
        else:  # an identical request has opened it, with a place of its own
            self._unused(opening)
        return self._cache.add(session, environment, noted=True)

    async def _pause(self, session: Session, environment: Environment, error: UpstreamError, left_s: float) -> None:
        """Wait before the next worker is tried, which may be the same one again; at most *left_s* seconds."""
        if environment.server.url and isinstance(error, UpstreamGone):
            # There is no other worker to go to.
            await wait_for_answer(session, environment, self._upstreams[environment.wire], left_s)
        elif environment.server.url or (isinstance(error, WorkerFull) and not error.capacity):
            await asyncio.sleep(min(FULL_PAUSE_S, left_s))

    async def _open_in_worker(self, session: Session, opening: _Opening) -> Session:
        """Open a session in its worker and mark it open in the store; on failure give back its slot."""
        environment = opening.environment
        upstream = self._upstreams[environment.wire]
        limit_s = opening.at_most(environment.timeouts.setup_s)
        try:
            if limit_s <= 0:  # the slot came at the end of the wait, and the worker has no part in that
                raise PoolExhausted(f"no slot of {environment.name} became free in time")
            # No Redis in here: the timeout's cancellation reaches the worker's connection only.
            async with asyncio.timeout(limit_s) as limit:
                with OpeningWatch(limit, session, environment, upstream, reports=self) as watch:
                    handle = await upstream.open(session, environment, opening.setup)
            session = replace(session, handle=handle)
            opened = partial(self._store.opened, session.id, session.lease, handle=handle)
            return await patiently(opened, for_s=self._patience_s)
        except BaseException as error:  # a cancellation too: the trainer hung up
            if isinstance(error, TimeoutError) and watch.is_silent:
                await self._closer.through(session.id, partial(self._leave, session, environment))
                raise WorkerSilent(f"worker {session.worker} answers nothing") from error
            if isinstance(error, UpstreamError):
                log_faults(session, error.faults)
            await self._closer.through(session.id, partial(self._undo, session, environment, error))
            if isinstance(error, TimeoutError):
                raise UpstreamTimeout(f"the worker did not open the session within {limit_s:.3g} s") from error
            raise

    async def _leave(self, session: Session, environment: Environment, missed: Missed) -> None:
        """Give back the slot of an opening whose worker answers nothing, once nobody gets another one there."""
        await self._suspect(session, environment, missed)
        await self._closer.abandon(session, environment, missed=missed)

    def suspected(self, session: Session, environment: Environment) -> None:
        """See ``SuspectReports.suspected``."""
        self._closer.go_on(session.id, self._suspect(session, environment))

    async def _suspect(self, session: Session, environment: Environment, missed: Missed | None = None) -> None:
        logger.warning("worker_suspect environment=%s worker=%s", environment.name, session.worker)
        suspect = partial(self._store.suspect_worker, session.worker)
        await patiently(suspect, for_s=self._patience_s, missed=missed)

    async def _undo(self, session: Session, environment: Environment, error: BaseException, missed: Missed) -> None:
        """Give back what an opening held that failed with *error*, or that nobody waits for any more."""
        if isinstance(error, WorkerFull) and error.capacity:
            with contextlib.suppress(StoreUnavailable):  # the slot is given back all the same, if it can be
                await self._store.limit_worker(session.worker, error.capacity)  # first: it is no slot
        is_tried_again = isinstance(error, UpstreamGone | WorkerFull)
        reason = CloseReason.AUTHOR_FAULT if isinstance(error, AuthorFault) else CloseReason.OPEN_FAILED
        was_held = await self._closer.taken_back(
            session, environment, reason, counted=not is_tried_again, missed=missed
        )
        if not was_held and _may_be_there(error):
            await self._end_unheld(session, environment, missed)

    async def _end_unheld(self, session: Session, environment: Environment, missed: Missed) -> None:
        """End a session in its worker that somebody ended while it was opened: the worker may know it only since."""
        holder = await patiently(partial(self._holder, session.id), for_s=self._patience_s, missed=missed)
        if holder is None or holder.worker != session.worker:  # else the worker has its successor
            await self._closer.finish(session, environment, counted=False, missed=missed)

    def _note_open(self, session: Session, open_s: float) -> None:
        self._metrics.session_opened(session.environment, open_s)
        logger.info(
            "session_opened session=%s name=%r owner=%s environment=%s worker=%s task=%r open_s=%.3f",
            session.id,
            session.name,
            session.owner,
            session.environment,
            session.worker,
            session.task,
            open_s,
        )


def _may_be_there(error: BaseException) -> bool:
    """Whether a worker may hold a session whose opening failed so, once the store does not know it any more."""
    # The store was asked last, when the worker had opened it; or the worker's silence says nothing.
    if isinstance(error, SessionNotFound | SessionClosed | StoreUnavailable | UpstreamTimeout):
        return True
    return not isinstance(error, GatewayError)  # its time was over, or its trainer hung up


def _claim_of(request: EpisodeRequest, environment: Environment) -> SessionRequest:
    """Return what the store is asked for."""
    setup, owner = request.setup, request.owner
    claim = SessionRequest(
        id=session_id(owner, request.name),
        name=request.name,
        owner=owner,
        environment=environment.name,
        lease=uuid.uuid4().hex,
        fingerprint=request.fingerprint,
        idle_s=environment.timeouts.idle_s,
        setup_s=environment.timeouts.setup_s + environment.timeouts.close_s,
        task=request.task or _digest(setup),
        episode=request.episode,
        policy=setup.policy,
    )
    pool, together_s = environment.pool, environment.timeouts.together_s
    group, kind = (setup.ticket.group, "curriculum") if setup.ticket is not None else (setup.group, "trainer")
    if group is None or together_s <= 0:
        return claim
    # No more than can ever be held at once, where that is known.
    size = group.size if pool.learns_slots else min(group.size, pool.max_workers * pool.slots)
    if size <= 1:
        return claim
    whole = "\0".join((owner, environment.name, kind, group.name)).encode("utf-8", "surrogatepass")
    return replace(claim, group=hashlib.sha256(whole).hexdigest()[:32], group_size=size, together_s=together_s)


def _digest(setup: SessionSetup) -> str:
    """Name a task that was given whole and without an id; empty where there is none."""
    if not setup.spec:
        return ""
    text = json.dumps(setup.spec, sort_keys=True, separators=(",", ":"), default=str)
    return "sha256:" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
