"""Opens sessions: claims a slot, or takes over the previous episode's slot, then sets the session up in its worker.

A trainer may disconnect at any moment. The opener then releases everything that the opening held. This includes a slot
granted by a store command still under way, and a slot that is just being transferred.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from gateway.core.environment import Environment, UpstreamKind
from gateway.core.errors import (
    AuthorFault,
    EnvironmentUnavailable,
    GatewayError,
    NotPermitted,
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
from gateway.core.ids import EnvironmentName, SessionId
from gateway.core.ports.curricula import DrawnTickets
from gateway.core.ports.step_log import StepLog
from gateway.core.ports.store import Store
from gateway.core.ports.upstream import Upstream
from gateway.core.retry import STORE_PATIENCE_S, STORE_PAUSE_S, patiently
from gateway.core.session import BY_TRAINER, CloseReason, EpisodeRequest, Session, SessionRequest, SessionState
from gateway.metrics import Metrics
from gateway.sessions.cache import CachedSession, SessionCache, new_lease, session_id
from gateway.sessions.closing import Missed, SessionCloser, log_faults
from gateway.sessions.interruption import AdmissionGate, OpeningWatch
from gateway.sessions.liveness import WorkerSilent, wait_for_answer
from gateway.settings.keys import NO_LIMITS, KeyLimits, Keyring
from gateway.settings.session_secrets import SessionSecrets

logger = logging.getLogger(__name__)

HIT_S: Final = 0.05
"""Maximum seconds to a slot for an opening that counts as one without a wait. A worker's start takes longer."""
RETRY_PAUSE_S: Final = 0.05
OPEN_ATTEMPTS: Final = 2
"""Number of workers that may die of one opening: a task that kills workers must not reach all of them."""
FULL_PAUSE_S: Final = 0.5
"""Seconds before the retry of a worker that was full and did not state its capacity."""


class _Opening:
    """One opening under way: its request and its time limits."""

    def __init__(self, request: EpisodeRequest, limits: KeyLimits) -> None:
        environment = request.environment.splits.get(request.setup.of_split, request.environment)
        self.environment = environment.tenants.get(request.owner, environment)
        self.request, self.setup = request, request.setup
        self.within_s = request.within_s
        self.began_at = time.monotonic()
        self.limits = limits
        self.claim = _claim_of(request, self.environment, limits)
        """The request to the store. Each try has its own lease."""

    @property
    def open_until(self) -> float:
        """Monotonic time at which the wait for another slot ends."""
        open_s = self.environment.timeouts.open_s
        return self.began_at + (open_s if self.within_s is None else min(self.within_s, open_s))

    def at_most(self, limit_s: float) -> float:
        """Return the seconds left of the whole opening's time, between 0 and *limit_s*."""
        left_s = limit_s if self.within_s is None else self.began_at + self.within_s - time.monotonic()
        return max(0.0, min(limit_s, left_s))

    def renew(self) -> None:
        """Give the claim a new lease for the next try."""
        self.claim = replace(self.claim, lease=new_lease(self.request.setup))


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
        log: StepLog,
        patience_s: float = STORE_PATIENCE_S,
        waiting: AdmissionGate,
        tickets: DrawnTickets,
        keys: Keyring,
        secrets: SessionSecrets,
        scorers: dict[EnvironmentName, str],
    ) -> None:
        """
        Args:
            keys: The limits of each key.
            secrets: The secrets that the operator gives to sessions.
            patience_s: Seconds for which a store that does not answer, or is being rebuilt, is retried.
            waiting: Refuses openings that wait for a slot when this process ends.
            tickets: Releases the tickets with which nothing was opened.
            scorers: Gets the version of the scorer of the session that opened last, by environment.
        """
        self._store = store
        self._upstreams = upstreams
        self._closer = closer
        self._cache = cache
        self._metrics, self._log = metrics, log
        self._patience_s = patience_s
        self._waiting = waiting
        self._tickets = tickets
        self._keys, self._secrets = keys, secrets
        self._scorers = scorers

    async def open(self, request: EpisodeRequest) -> CachedSession:
        """Start an episode in a newly claimed slot.

        An identical retry (same fingerprint) of a session that is open, or being opened, gets that session.

        Raises:
            SessionExists: Another request opened a session of this name.
            PoolExhausted: No slot became free in time, the queue is full, or this replica shuts down.
            EnvironmentUnavailable: The environment's workers do not start, or a secret of it cannot be read.
            InvalidRequest: The worker refuses the task.
            UpstreamError: The worker failed, and its slot is released. If it died, another worker is tried first: the
                trainer has seen nothing of the episode yet.
        """
        opening = self._begun(request)
        with self._counted(opening):
            self._add_secrets(opening)
            session = await self._claimed_in_time(opening)
            return await self._set_up(session, opening)

    async def reset(self, request: EpisodeRequest) -> CachedSession:
        """End the episode of this name, if there is one, and start another episode in the same slot.

        If the environment differs or is exclusive, the opening queues for another slot. A failed reset leaves no
        episode. Raises the errors of `open`.
        """
        opening = self._begun(request)
        with self._counted(opening):
            self._add_secrets(opening)
            session = await self._take_over(opening)
            if session is None:
                session = await self._claimed_in_time(opening)
            return await self._set_up(session, opening)

    def _begun(self, request: EpisodeRequest) -> _Opening:
        limits, environment = self._keys.by_owner.get(request.owner, NO_LIMITS), request.environment
        if request.owner in self._keys.revoked:
            raise NotPermitted(f"the key {request.owner!r} was revoked")
        if limits.environments and environment.name not in limits.environments:
            raise NotPermitted(
                f"the key {request.owner!r} may use only {', '.join(limits.environments)}, not {environment.name}"
            )
        return _Opening(request, limits)

    def _add_secrets(self, opening: _Opening) -> None:
        """Add the operator's secrets to the trainer's own, which take precedence. Raises ``EnvironmentUnavailable``."""
        if opening.environment.secrets:
            secrets = self._secrets.of(opening.environment)
            opening.setup = replace(opening.setup, secrets={**secrets, **opening.setup.secrets})

    async def _claimed_in_time(self, opening: _Opening) -> Session:
        """Claim a slot within the time that the environment and the request allow, at the pace of the key."""
        per_s, open_s = opening.limits.opens_per_s, opening.environment.timeouts.open_s
        if per_s > 0:
            paced = partial(self._store.pace, opening.claim.owner, per_s=per_s, within_s=opening.at_most(open_s))
            await asyncio.sleep(await patiently(paced, for_s=self._patience_s))
        left_s = opening.began_at + open_s - time.monotonic()
        return await self._claim(opening, opening.at_most(max(0.0, left_s)))

    @contextlib.contextmanager
    def _counted(self, opening: _Opening) -> Iterator[None]:
        """Count refused openings, and release a drawn task's place in its group if nothing is opened."""
        try:
            yield
        except BaseException as error:  # includes a cancellation, when the trainer disconnects
            self._unused(opening)
            if isinstance(error, GatewayError):
                self._metrics.session_refused(opening.environment.name, error.code)
            raise

    def _unused(self, opening: _Opening) -> None:
        if opening.setup.ticket is not None:
            self._tickets.unused(opening.setup.ticket)

    # -- the previous episode's slot ------------------------------------------------------------------------------

    async def _take_over(self, opening: _Opening) -> Session | None:
        """End the session of the same id and take over its slot; None if there is no session, or no reusable slot.

        Raises:
            UpstreamTimeout: The end took longer than the trainer waits. It continues in the background.
        """
        gone = asyncio.Event()
        id, environment, within_s = opening.claim.id, opening.environment, opening.within_s
        handing = self._closer.go_on(id, self._transfer(opening.claim, environment, gone))
        try:
            await asyncio.wait({handing}, timeout=within_s)
            if not handing.done():
                raise UpstreamTimeout(f"the episode before this one did not end within {within_s:g} s")
        except BaseException:  # includes the trainer's disconnect: a slot that is still transferred is released
            gone.set()
            self._closer.go_on(id, self._hand_back(handing, environment))
            raise
        return handing.result()

    async def _transfer(self, claim: SessionRequest, environment: Environment, gone: asyncio.Event) -> Session | None:
        """Do the work of `_take_over` to its end. Once *gone* is set, the opening does not need the slot any more."""
        entry = self._cache.get(claim.id)
        ended = await self._closer.begin(claim.id, CloseReason.DELETED, patience_s=self._patience_s)
        if entry is not None:  # after `begin`: the calls cancelled here ask the store why
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
            # After OPEN_FAILED, an upstream expects remains of the opening in the worker. This one never reached it.
            await self._closer.give_back(session, environment, CloseReason.DELETED)

    # -- a new slot -----------------------------------------------------------------------------------------------

    async def _claim(self, opening: _Opening, wait_s: float) -> Session:
        """Claim a slot, or return the session that an identical request has opened meanwhile."""
        given_up: set[str] = set()
        try:
            with self._waiting.here():
                return await self._claimed(opening, wait_s, given_up)
        except BaseException:  # includes a cancellation, when the trainer disconnects
            if given_up:
                self._closer.go_on(opening.claim.id, self._end_given_up(opening, given_up))
            raise

    async def _claimed(self, opening: _Opening, wait_s: float, given_up: set[str]) -> Session:
        """Do the work of `_claim`; add the lease of each claim whose answer was lost to *given_up*."""
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
                # The store may have granted the claim, or grant it later. The old lease identifies it for undoing.
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
            # Another opening of this id is queued or being set up, or the session is just being closed.
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
        """Set up a session that has a slot, note that it is open, and cache it.

        If the worker dies, is full or does not answer, the opening tries another worker. It begins again, too, if the
        store gave it up: a replica that was silent for some seconds is taken for gone.
        """
        environment = opening.environment
        deaths = 0
        while session.state is SessionState.OPENING:
            try:
                session = await self._open_in_worker(session, opening)
            except (UpstreamGone, WorkerFull, WorkerSilent, _GivenUp) as error:
                await self._check_wanted(session, error)
                deaths += isinstance(error, UpstreamGone) and error.sent
                left_s = opening.open_until - time.monotonic()
                if left_s <= 0 and isinstance(error, WorkerFull | WorkerSilent):
                    raise PoolExhausted(f"no worker of {environment.name!r} has room: {error.detail}") from error
                if left_s <= 0 or deaths == OPEN_ATTEMPTS:
                    raise
                logger.info("session_opened_elsewhere session=%s worker=%s error=%s", session.id, session.worker, error)
                if isinstance(error, UpstreamError):
                    await self._pause(session, environment, error, left_s)
                # Without its group: other members may have started, so the new claim must not wait for the group again.
                opening.renew()
                opening.claim = replace(opening.claim, group="")
                session = await self._claim(opening, max(0.0, opening.open_until - time.monotonic()))
            else:
                self._note_open(session, opening)
                break
        else:  # an identical request has opened it, with its own place in the group
            self._unused(opening)
        return self._cache.add(session, environment, noted=True)

    async def _pause(self, session: Session, environment: Environment, error: UpstreamError, left_s: float) -> None:
        """Wait at most *left_s* seconds before the next try, which may use the same worker again."""
        if environment.server.url and isinstance(error, UpstreamGone):
            # An external server has no other worker to try.
            await wait_for_answer(session, environment, self._upstreams[environment.wire], left_s)
        elif environment.server.url or (isinstance(error, WorkerFull) and not error.capacity):
            await asyncio.sleep(min(FULL_PAUSE_S, left_s))

    async def _open_in_worker(self, session: Session, opening: _Opening) -> Session:
        """Open a session in its worker and mark it open in the store; on failure release its slot."""
        environment = opening.environment
        upstream = self._upstreams[environment.wire]
        limit_s = opening.at_most(environment.timeouts.setup_s)
        try:
            if limit_s <= 0:  # the slot came at the end of the wait, which is not the worker's fault
                raise PoolExhausted(f"no slot of {environment.name} became free in time")
            # No Redis in here: the timeout's cancellation reaches the worker's connection only.
            async with asyncio.timeout(limit_s) as limit:
                with OpeningWatch(limit, session, environment, upstream, reports=self) as watch:
                    session = await upstream.open(session, environment, opening.setup)
            if not session.scorer:
                session = replace(session, scorer=environment.image_id)
            return await self._note_opened(session)
        except BaseException as error:  # includes a cancellation, when the trainer disconnects
            if isinstance(error, TimeoutError) and watch.is_silent:
                await self._closer.through(session.id, partial(self._leave, session, environment))
                raise WorkerSilent(f"worker {session.worker} does not answer") from error
            if isinstance(error, UpstreamError):
                log_faults(session, error.faults)
            await self._closer.through(session.id, partial(self._undo, session, environment, error))
            if isinstance(error, TimeoutError):
                raise UpstreamTimeout(f"the worker did not open the session within {limit_s:.3g} s") from error
            raise

    async def _note_opened(self, session: Session) -> Session:
        """Mark a session open in the store. Raises ``_GivenUp``, and ``SessionClosed`` if it was ended on purpose."""
        opened = partial(self._store.opened, session.id, session.lease, handle=session.handle, scorer=session.scorer)
        try:
            return await patiently(opened, for_s=self._patience_s)
        except (SessionClosed, SessionNotFound) as error:
            if await self._ended_as(session) is CloseReason.OPEN_FAILED:
                raise _GivenUp(CloseReason.OPEN_FAILED) from error
            raise

    async def _check_wanted(self, session: Session, error: Exception) -> None:
        """Check that an opening may begin again after *error*: a worker also refuses a session that was ended.

        Raises:
            SessionNotFound: The session's trainer ended it.
            SessionClosed: An operator ended it, or it expired.
        """
        reason = await self._ended_as(session)
        if reason in BY_TRAINER:
            raise SessionNotFound(f"the session {session.name!r} was ended while it was opened") from error
        if reason is not None and reason not in _BEGUN_AGAIN:
            raise SessionClosed(reason) from error

    async def _ended_as(self, session: Session) -> CloseReason | None:
        """Return why an opening's session ended; None if another opening holds its name."""
        try:
            found = await patiently(partial(self._store.find, session.id), for_s=self._patience_s)
        except SessionClosed as closed:
            return CloseReason(closed.reason)
        except SessionNotFound:
            return CloseReason.DELETED
        if found.lease != session.lease:
            return None
        return found.reason or CloseReason.OPEN_FAILED  # its slot is still being released

    async def _leave(self, session: Session, environment: Environment, missed: Missed) -> None:
        """Mark a silent worker as suspect, so that it gets no more sessions; then release the opening's slot."""
        await self._suspect(session, environment, missed)
        await self._closer.abandon(session, environment, missed=missed)

    def suspected(self, session: Session, environment: Environment) -> None:
        """Mark the session's worker as suspect in the background; see ``SuspectReports.suspected``."""
        self._closer.go_on(session.id, self._suspect(session, environment))

    async def _suspect(self, session: Session, environment: Environment, missed: Missed | None = None) -> None:
        logger.warning("worker_suspect environment=%s worker=%s", environment.name, session.worker)
        suspect = partial(self._store.suspect_worker, session.worker)
        await patiently(suspect, for_s=self._patience_s, missed=missed)

    async def _undo(self, session: Session, environment: Environment, error: BaseException, missed: Missed) -> None:
        """Release everything that an opening holds after *error*: its failure, or the trainer's disconnect."""
        if isinstance(error, WorkerFull) and error.capacity:
            with contextlib.suppress(StoreUnavailable):  # the slot is still released below, if possible
                await self._store.limit_worker(session.worker, error.capacity)  # first: the worker lacks this slot
        is_tried_again = isinstance(error, UpstreamGone | WorkerFull)
        reason = CloseReason.AUTHOR_FAULT if isinstance(error, AuthorFault) else CloseReason.OPEN_FAILED
        was_held = await self._closer.taken_back(
            session, environment, reason, counted=not is_tried_again, missed=missed
        )
        if not was_held and _may_be_there(error):
            await self._end_unheld(session, environment, missed)

    async def _end_unheld(self, session: Session, environment: Environment, missed: Missed) -> None:
        """End a session in its worker that another caller ended during the opening: the worker may hold it since."""
        holder = await patiently(partial(self._holder, session.id), for_s=self._patience_s, missed=missed)
        if holder is None or holder.worker != session.worker:  # otherwise the worker holds the session's successor
            await self._closer.finish(session, environment, counted=False, missed=missed)

    def _note_open(self, session: Session, opening: _Opening) -> None:
        open_s = time.monotonic() - opening.began_at
        self._metrics.session_opened(session.environment, open_s)
        self._log.opened(session, opening.environment, opening.request, open_s=open_s)
        if session.scorer:
            self._scorers[opening.environment.base or opening.environment.name] = session.scorer
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


_BEGUN_AGAIN: Final = frozenset((CloseReason.OPEN_FAILED, CloseReason.WORKER_LOST, CloseReason.OUT_OF_MEMORY))
"""Ends of an opening's session after which the opening begins again with another worker."""


class _GivenUp(SessionClosed):
    """The store ended a session during its opening, because this replica was silent, as if it were gone."""


def _may_be_there(error: BaseException) -> bool:
    """Return True if, after *error* in an opening, the worker may hold a session that the store no longer knows."""
    # `opened` in the store failed after the worker had opened the session, or the worker's silence proves nothing.
    if isinstance(error, SessionNotFound | SessionClosed | StoreUnavailable | UpstreamTimeout):
        return True
    return not isinstance(error, GatewayError)  # a timeout, or the trainer disconnected


def _claim_of(request: EpisodeRequest, environment: Environment, limits: KeyLimits) -> SessionRequest:
    """Return the request to the store for an episode's slot."""
    setup, owner, pool = request.setup, request.owner, environment.pool
    slots = pool.max_workers * pool.slots
    max_here = 0 if limits.pool_share == 1 else math.ceil(limits.pool_share * slots)
    claim = SessionRequest(
        id=session_id(owner, request.name),
        name=request.name,
        owner=owner,
        environment=environment.name,
        lease=new_lease(setup),
        fingerprint=request.fingerprint,
        idle_s=environment.timeouts.idle_s,
        setup_s=environment.timeouts.setup_s + environment.timeouts.close_s,
        task=setup.task,
        episode=request.episode,
        policy=setup.policy,
        max_sessions=limits.max_sessions,
        max_here=max_here,
    )
    together_s = environment.timeouts.together_s
    group, kind = (setup.ticket.group, "curriculum") if setup.ticket is not None else (setup.group, "trainer")
    if group is None or together_s <= 0:
        return claim
    # At most the number of sessions that the environment can hold, where that is known, and that the key may have.
    size = group.size if pool.learns_slots else min(group.size, slots)
    size = min([size, *filter(None, (limits.max_sessions, max_here))])
    if size <= 1:
        return claim
    whole = "\0".join((owner, environment.name, kind, group.name)).encode("utf-8", "surrogatepass")
    return replace(claim, group=hashlib.sha256(whole).hexdigest()[:32], group_size=size, together_s=together_s)
