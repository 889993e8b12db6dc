"""The request path: open an episode, act in it, end it.

Touches the store and the worker, never the backend: starting and stopping is the pool's business. In the steady state
a call needs no store at all: this replica remembers the sessions that it serves, notes what it saw of them, and writes
the notes once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import anyio

from gateway.catalog import Catalog
from gateway.closing import Closer
from gateway.core.errors import (
    EnvironmentUnavailable,
    GatewayError,
    PoolExhausted,
    SessionClosed,
    SessionExists,
    SessionNotFound,
    StoreUnavailable,
    UpstreamGone,
    UpstreamTimeout,
    WorkerFull,
)
from gateway.core.model import (
    Action,
    Block,
    CloseReason,
    Environment,
    Note,
    Opening,
    Owner,
    Registered,
    Session,
    SessionId,
    SessionState,
    Setup,
    Split,
    StepResult,
    Summary,
    TaskSpec,
    Wire,
    session_id,
)
from gateway.core.ports import Exchange, Headers, Store, Upstream
from gateway.ends import BrokenOff, Ended, Until
from gateway.exchanges import BusyExchange, ReadExchange
from gateway.inquiries import Inquiries
from gateway.observe.metrics import Metrics
from gateway.observe.outcomes import call_outcome
from gateway.remembered import TICK_S, Entry, Remembered

logger = logging.getLogger(__name__)

T = TypeVar("T")

HIT_S = 0.05
"""An opening that has its slot within this long counts as one that did not wait; a start takes longer."""
EDGE_S = 3 * TICK_S
"""A call that begins this close to its session's deadline writes its note at once."""
STORE_PATIENCE_S = 10.0
"""A Redis that is started again, or failed over, is there and rebuilt within this; a trainer would lose an episode."""
STORE_PAUSE_S = 0.25
OWING_S = 2.0
"""How long a store that did not count a turn is spared, and its session's steps with it."""
CLEANUP_S = 30.0
DRAIN_PAUSE_S = 0.02
RETRY_PAUSE_S = 0.05
OPEN_ATTEMPTS = 2
"""Workers in which an opening is tried that had begun in them; a task that kills workers must not go on to all."""
FULL_PAUSE_S = 0.5
"""Before a worker is tried again that had no room and did not say how much it has."""
VERDICT_S = 0.5
"""How long a call whose connection broke waits for word of why: an engine tells of a death within some 100 ms."""
MAX_REFUSAL_BYTES = 64 * 1024
GONE = b"Active environment not found"
"""How an ORS worker says that it does not know a session."""


class Sessions:
    """Opens, serves and ends sessions for all fronts."""

    def __init__(
        self,
        *,
        store: Store,
        upstreams: Mapping[Wire, Upstream],
        catalog: Catalog,
        closer: Closer,
        metrics: Metrics,
        patience_s: float = STORE_PATIENCE_S,
    ) -> None:
        """*patience_s* is how long a store that does not answer, or is being rebuilt, is waited for."""
        self._store = store
        self._patience_s = patience_s
        self._upstreams = upstreams
        self._catalog = catalog
        self._closer = closer
        self._metrics = metrics
        self._inquiries = Inquiries(store=store, upstreams=upstreams, closer=closer)
        # The state of this replica: what it serves.
        self._remembered = Remembered(store)
        self._cleanups: set[asyncio.Future[Any]] = set()

    # -- open and close -------------------------------------------------------------------------------------------

    async def open(
        self,
        *,
        owner: Owner,
        name: str,
        environment: Environment,
        setup: Setup,
        fingerprint: str,
        task: str = "",
        within_s: float | None = None,
    ) -> Session:
        """Start an episode; *setup*'s secrets go to the worker and are neither stored nor logged.

        An identical retry (same *fingerprint*) of a session that is open, or being opened, gets that session.

        Args:
            owner: The key's name.
            name: The session's id as the trainer knows it.
            fingerprint: Of all that makes this request what it is.
            task: ``split/index`` or a task's id, for people.
            within_s: The longest wait, where it is less than the environment's own limits.

        Raises:
            SessionExists: *name* is taken by a session that was opened otherwise.
            PoolExhausted, EnvironmentUnavailable: no slot in time; workers do not start.
            InvalidRequest: the worker refuses the task.
            UpstreamError: the worker failed; the slot is given back. One that dies over it is replaced by another
                first: nobody has seen anything of the episode yet.
        """
        began_at = time.monotonic()
        environment = environment.for_split(setup.of_split)
        open_s = environment.timeouts.open_s if within_s is None else min(within_s, environment.timeouts.open_s)
        opening = _opening(owner, name, environment, fingerprint, task=task)
        try:
            session = await self._claim_or_join(opening, environment, open_s)
            if session.state is SessionState.OPENING:
                session = await self._begun(session, opening, environment, setup, began_at, within_s)
        except GatewayError as error:
            self._metrics.session_refused(environment.name, error.code)
            raise
        self._remembered.add(session, environment, noted=True)
        return session

    async def reset(
        self,
        *,
        owner: Owner,
        name: str,
        environment: Environment,
        setup: Setup,
        fingerprint: str,
        task: str = "",
        episode: str = "",
        within_s: float | None = None,
    ) -> Session:
        """End the episode of this name, if there is one, and start another one in its place, in the same slot.

        Another environment, or an exclusive one, takes another slot, in its turn. What fails here leaves no episode.

        Args:
            episode: The trainer's own name for the new episode.

        The others, and what is raised: as `open`.
        """
        began_at = time.monotonic()
        environment = environment.for_split(setup.of_split)
        opening = _opening(owner, name, environment, fingerprint, task=task, episode=episode)
        try:
            session = await self._succeed(opening, environment, within_s)
            if session is None:
                open_s = environment.timeouts.open_s
                if within_s is not None:
                    open_s = min(open_s, max(0.0, began_at + within_s - time.monotonic()))
                session = await self._claim_or_join(opening, environment, open_s)
            if session.state is SessionState.OPENING:
                session = await self._begun(session, opening, environment, setup, began_at, within_s)
        except GatewayError as error:
            self._metrics.session_refused(environment.name, error.code)
            raise
        self._remembered.add(session, environment, noted=True)
        return session

    async def _succeed(self, opening: Opening, environment: Environment, within_s: float | None) -> Session | None:
        """End what has the id of *opening* and take over its slot; None if there was none, or none to be had.

        Raises:
            UpstreamTimeout: its teardown took longer than *within_s*; it goes on.
        """
        entry = self._remembered.get(opening.id)
        ended = await self._begin_close(opening.id, CloseReason.DELETED)
        if entry is not None:  # only now: what this breaks off asks the store why
            self._remembered.forget(opening.id, entry.session.lease)
            entry.end()
        if ended is None:
            return None
        if ended.environment != environment.name:
            finishing = asyncio.ensure_future(self._closer.finish(ended, self._catalog.named(ended.environment)))
            self._go_on(finishing)
            await asyncio.wait({finishing}, timeout=within_s)
            return None
        handing = asyncio.ensure_future(self._closer.hand_over(ended, environment, opening))
        self._go_on(handing)
        try:
            await asyncio.wait({handing}, timeout=within_s)
            if not handing.done():
                raise UpstreamTimeout(f"the episode before this one did not end within {within_s:g} s")
        except BaseException:  # also where the trainer hung up: what it is handed meanwhile is given back
            self._go_on(asyncio.ensure_future(self._hand_back(handing, environment)))
            raise
        return handing.result()

    async def _hand_back(self, handing: asyncio.Future[Session | None], environment: Environment) -> None:
        session = await handing
        if session is not None:
            # As if deleted: where an opening failed, the worker may hold something of it, and nothing was opened here.
            await self._give_back(session, environment, CloseReason.DELETED)

    async def _begun(
        self,
        session: Session,
        opening: Opening,
        environment: Environment,
        setup: Setup,
        began_at: float,
        within_s: float | None,
    ) -> Session:
        """Set a session up that was granted a slot, and tell that it is open."""
        open_s = environment.timeouts.open_s if within_s is None else min(within_s, environment.timeouts.open_s)
        deaths = 0
        while True:
            left_s = environment.timeouts.setup_s
            if within_s is not None:
                left_s = min(left_s, began_at + within_s - time.monotonic())
            try:
                session = await self._set_up(session, environment, setup, left_s)
                break
            except (UpstreamGone, WorkerFull) as error:
                deaths += isinstance(error, UpstreamGone) and error.sent
                left_s = began_at + open_s - time.monotonic()
                if left_s <= 0 and isinstance(error, WorkerFull):
                    raise PoolExhausted(f"no worker of {environment.name!r} has room: {error.detail}") from error
                if left_s <= 0 or deaths == OPEN_ATTEMPTS:
                    raise
                logger.info("session_opened_elsewhere session=%s worker=%s error=%s", session.id, session.worker, error)
                if environment.server.url or (isinstance(error, WorkerFull) and not error.capacity):
                    await asyncio.sleep(
                        min(FULL_PAUSE_S, left_s)
                    )  # there is no other one to go to, or it may be it again
            opening = replace(opening, lease=uuid.uuid4().hex)
            session = await self._claim_or_join(opening, environment, max(0.0, left_s))
            if session.state is not SessionState.OPENING:
                return session  # an identical request has opened it meanwhile
        open_s = time.monotonic() - began_at
        self._metrics.session_opened(environment.name, open_s)
        logger.info(
            "session_opened session=%s name=%r owner=%s environment=%s worker=%s task=%r open_s=%.3f",
            session.id,
            session.name,
            session.owner,
            environment.name,
            session.worker,
            session.task,
            open_s,
        )
        return session

    async def close(self, owner: Owner, name: str) -> Summary | None:
        """End an episode, waiting for its teardown. None if there is none (any more), or its worker is gone.

        Once begun it goes through, also when the trainer hangs up.
        """
        finishing = await self._begin_end(session_id(owner, name), CloseReason.DELETED)
        return None if finishing is None else await asyncio.shield(finishing)

    async def end(self, owner: Owner, name: str, reason: CloseReason, *, wait_s: float) -> bool:
        """End an episode and wait for its teardown, but not longer than *wait_s*; it goes on behind the answer.

        What runs in it here or in another replica is broken off. False: there was none to end (any more).
        """
        finishing = await self._begin_end(session_id(owner, name), reason)
        if finishing is None:
            return False
        await asyncio.wait({finishing}, timeout=wait_s)
        return True

    async def _begin_end(self, id: SessionId, reason: CloseReason) -> asyncio.Future[Summary | None] | None:
        entry = self._remembered.get(id)
        session = await self._begin_close(id, reason)
        if entry is not None:
            self._remembered.forget(id, entry.session.lease)  # only now: what this breaks off asks the store why
            entry.end()
        if session is None:
            return None
        environment = entry.environment if entry else self._catalog.named(session.environment)
        finishing = asyncio.ensure_future(self._closer.finish(session, environment))
        self._go_on(finishing)
        return finishing

    async def _begin_close(self, id: SessionId, reason: CloseReason) -> Session | None:
        """Let the store begin the end of a session, patiently; None if there is none whose end is to be begun.

        A try of ours whose answer was lost may have begun it. Nobody else goes on with it then, until it is due.
        """
        tries = 0

        async def begun() -> Session | None:
            nonlocal tries
            tries += 1
            session = await self._store.begin_close(id, reason)
            if session is None and tries > 1:
                with contextlib.suppress(SessionNotFound, SessionClosed):
                    found = await self._store.find(id)
                    return found if found.state is SessionState.CLOSING and found.reason is reason else None
            return session

        return await self._patiently(begun)

    def _go_on(self, cleanup: asyncio.Future[Any]) -> None:
        """Let a cleanup run to its end, whatever becomes of who waits for it."""
        self._cleanups.add(cleanup)  # a bare task may be garbage-collected
        cleanup.add_done_callback(self._cleaned)

    def _cleaned(self, cleanup: asyncio.Future[Any]) -> None:
        self._cleanups.discard(cleanup)
        if not cleanup.cancelled() and (error := cleanup.exception()) is not None:
            logger.warning("session_not_given_back error=%s", error)  # due after its closing time

    async def _claim_or_join(self, opening: Opening, environment: Environment, open_s: float) -> Session:
        """Claim a slot, or return the session that an identical request has opened meanwhile."""
        began_at = time.monotonic()
        deadline = began_at + open_s + environment.timeouts.setup_s
        patient_until = began_at + self._patience_s
        given_up: set[str] = set()
        while True:
            pause_s = RETRY_PAUSE_S
            try:
                left_s = max(0.0, began_at + open_s - time.monotonic()) if given_up else open_s
                session = await self._store.claim(opening, wait_s=left_s)
                waited_s = time.monotonic() - began_at
                self._metrics.claimed(environment.name, "hit" if waited_s < HIT_S else "wait", waited_s)
                return session
            except (PoolExhausted, EnvironmentUnavailable):
                self._metrics.claimed(environment.name, "refused", time.monotonic() - began_at)
                raise
            except StoreUnavailable:
                # What it did all the same is undone under the old lease, however late that comes.
                if time.monotonic() + STORE_PAUSE_S > patient_until:
                    raise
                given_up.add(opening.lease)
                opening = replace(opening, lease=uuid.uuid4().hex)
                pause_s = STORE_PAUSE_S
            except SessionExists:
                other = await self._patiently(partial(self._holder, opening.id))
                if other is not None and other.lease in given_up:
                    await self._give_back(other, environment, CloseReason.OPEN_FAILED, counted=False)
                elif other is not None and other.fingerprint != opening.fingerprint:
                    raise
                elif other is not None and other.state is SessionState.OPEN:
                    return other
            # It waits in the queue, is being set up by another request, or is just being closed.
            if time.monotonic() > deadline:
                raise SessionExists(opening.name)
            await asyncio.sleep(pause_s)

    async def _holder(self, id: SessionId) -> Session | None:
        try:
            session = await self._store.find(id)
        except (SessionNotFound, SessionClosed):
            return None
        return None if session.state is SessionState.CLOSING else session

    async def _set_up(self, session: Session, environment: Environment, setup: Setup, limit_s: float) -> Session:
        try:
            # No Redis in here: the timeout's cancellation reaches the worker's connection only.
            async with asyncio.timeout(limit_s):
                handle = await self._upstreams[environment.wire].open(session, environment, setup)
            session = replace(session, handle=handle)
            return await self._store.opened(session.id, session.lease, handle=handle)
        except BaseException as error:  # a cancellation too: the trainer hung up
            if isinstance(error, WorkerFull) and error.capacity:
                with contextlib.suppress(StoreUnavailable):  # the slot is given back all the same, if it can be
                    await self._store.limit_worker(session.worker, error.capacity)  # first: it is no slot
            is_tried_again = isinstance(error, UpstreamGone | WorkerFull)
            await self._give_back(session, environment, CloseReason.OPEN_FAILED, counted=not is_tried_again)
            if isinstance(error, SessionNotFound | SessionClosed):
                await self._end_unheld(session, environment)
            if isinstance(error, TimeoutError):
                raise UpstreamTimeout(f"the worker did not open the session within {limit_s:g} s") from error
            raise

    async def _give_back(
        self, session: Session, environment: Environment, reason: CloseReason, *, counted: bool = True
    ) -> None:
        # Unshielded, an anyio scope that was cancelled would cancel each await of the cleanup again.
        with anyio.CancelScope(shield=True), anyio.move_on_after(CLEANUP_S):
            try:
                closing = await self._store.begin_close(session.id, reason, lease=session.lease)
                if closing is not None:
                    # The store has no handle yet of a session that was just being opened.
                    closing = replace(closing, handle=closing.handle or session.handle)
                    await self._closer.finish(closing, environment, counted=counted)
            except StoreUnavailable:
                logger.warning("session_not_given_back session=%s", session.id)  # due after its setup time

    async def _end_unheld(self, session: Session, environment: Environment) -> None:
        """End a session in its worker that somebody ended while it was opened: the worker may know it only since."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(CLEANUP_S), contextlib.suppress(StoreUnavailable):
            holder = await self._holder(session.id)
            if holder is None or holder.worker != session.worker:  # else the worker has its successor
                await self._closer.finish(session, environment, counted=False)

    # -- act ------------------------------------------------------------------------------------------------------

    async def find(self, owner: Owner, name: str) -> tuple[Session, Environment]:
        """Look a session up: in this replica's memory, else in the store; with the environment that it was asked of.

        Raises:
            SessionNotFound: never known, deleted, or of another key.
            SessionClosed: ended by us.
        """
        entry = await self._entry(session_id(owner, name))
        environment = entry.environment
        return entry.session, self._catalog.named(environment.base) if environment.base else environment

    async def touch(self, owner: Owner, name: str) -> None:
        """Restart a session's idle time. Raises as `find`."""
        entry = await self._mind_the_edge(await self._entry(session_id(owner, name)))
        entry.quiet_since = time.monotonic()

    async def forward(self, owner: Owner, name: str, operation: str, *, body: bytes, headers: Headers) -> BusyExchange:
        """Pass an ORS operation to the session's worker; the session is busy until the exchange is closed.

        Raises:
            SessionNotFound, SessionClosed: as `find`; also if the worker itself does not know the session any more.
            UpstreamGone, UpstreamTimeout: the worker failed. Only ``UpstreamGone`` with ``sent`` False is sure not to
                have run.
        """
        entry = await self._mind_the_edge(await self._entry(session_id(owner, name)))
        try:
            return await self._forward(entry, operation, body, headers)
        except _Moved as moved:  # the worker said that it has not run: asking the new one is no second run
            return await self._forward(moved.entry, operation, body, headers)

    async def _forward(self, entry: Entry, operation: str, body: bytes, headers: Headers) -> BusyExchange:
        entry.busy += 1
        began_at = time.monotonic()
        try:
            upstream = self._upstreams[entry.environment.wire]
            exchange = await upstream.forward(entry.session, entry.environment, operation, body=body, headers=headers)
            if exchange.status == 404:
                exchange = await self._examined(entry, exchange)
            busy = BusyExchange(
                exchange,
                explain=partial(self._explain, entry),
                ended=lambda outcome: self._ended(entry, operation, outcome, began_at),
            )
        except SessionNotFound as error:  # it is the worker's word
            self._ended(entry, operation, "ended", began_at)
            raise await self._loss(entry) from error
        except BaseException as error:
            await self._broken(entry, operation, error, began_at)
            raise
        return busy

    async def act(
        self, owner: Owner, name: str, action: Action, *, within_s: float, key: str | None = None
    ) -> StepResult:
        """Run *action* in the session's worker; the session is busy meanwhile.

        Raises:
            SessionNotFound, SessionClosed: as `find`; also if the session is ended while the action runs.
            UpstreamTimeout: it took longer than *within_s*; it may go on in the worker.
            CallConflict, InvalidRequest, UpstreamError: as ``Upstream.act``.
        """

        def ask(upstream: Upstream, entry: Entry) -> Awaitable[StepResult]:
            return upstream.act(entry.session, entry.environment, action, key=key)

        return await self._ask(owner, name, "call", ask, within_s)

    async def prompt(self, owner: Owner, name: str, *, within_s: float) -> list[Block]:
        """What the agent is told first, when the task's setup is done. Raises as `act`."""

        def ask(upstream: Upstream, entry: Entry) -> Awaitable[list[Block]]:
            return upstream.prompt(entry.session, entry.environment)

        return await self._ask(owner, name, "prompt", ask, within_s)

    async def relay(self, owner: Owner, name: str, message: bytes, *, within_s: float) -> bytes:
        """Pass a message of the worker's own protocol on; see ``Upstream.relay``. Raises as `act`."""

        def ask(upstream: Upstream, entry: Entry) -> Awaitable[bytes]:
            return upstream.relay(entry.session, entry.environment, message)

        return await self._ask(owner, name, "call" if message else "prompt", ask, within_s)

    async def count_turn(self, owner: Owner, name: str, *, key: str = "") -> int:
        """Count one more turn; the store keeps the number, for all replicas. See ``Store.count_turn``.

        While the store is away this replica counts on from what it last heard, and tells the store later: the turn was
        taken, and its trainer must not lose what came of it.
        """
        entry = await self._entry(session_id(owner, name))
        session = entry.session
        if time.monotonic() < entry.owes_until:
            return _owing(entry, key)
        try:
            while entry.owed:
                entry.turns = await self._store.count_turn(session.id, session.lease, key=entry.owed[0])
                del entry.owed[:1]  # not pop: two steps of a session may owe at once
            entry.turns = await self._store.count_turn(session.id, session.lease, key=key)
        except StoreUnavailable as error:
            logger.warning("turn_owed session=%s error=%s", session.id, error)
            entry.owes_until = time.monotonic() + OWING_S
            return _owing(entry, key)
        return entry.turns

    async def _ask(
        self,
        owner: Owner,
        name: str,
        operation: str,
        ask: Callable[[Upstream, Entry], Awaitable[T]],
        within_s: float,
    ) -> T:
        entry = await self._mind_the_edge(await self._entry(session_id(owner, name)))
        try:
            return await self._asked(entry, operation, ask, within_s)
        except _Moved as moved:  # the worker said that it has not run: asking the new one is no second run
            return await self._asked(moved.entry, operation, ask, within_s)

    async def _asked(
        self, entry: Entry, operation: str, ask: Callable[[Upstream, Entry], Awaitable[T]], within_s: float
    ) -> T:
        entry.busy += 1
        began_at = time.monotonic()
        try:
            answer = await self._unless_ended(entry, ask, within_s)
        except BaseException as error:
            await self._broken(entry, operation, error, began_at)
            raise
        self._ended(entry, operation, "ok", began_at)
        return answer

    async def _unless_ended(self, entry: Entry, ask: Callable[[Upstream, Entry], Awaitable[T]], within_s: float) -> T:
        """Ask a worker, but not longer than *within_s*, nor beyond the end of the session."""
        try:
            with Until(entry.watchers, within_s):
                return await ask(self._upstreams[entry.environment.wire], entry)
        except BrokenOff as broken:
            if broken.cause == "ended":
                raise await self._end_of(entry) from None
            raise UpstreamTimeout(f"the worker did not answer within {within_s:g} s") from None
        except SessionNotFound as error:  # it is the worker's word
            raise await self._loss(entry) from error

    async def steps(self, owner: Owner, name: str, *, within_s: float) -> int:
        """How many steps its worker has seen of a session. Raises as `act`."""

        async def ask(upstream: Upstream, entry: Entry) -> int:
            steps = await upstream.steps(entry.session, entry.environment)
            if steps is None:
                raise SessionNotFound(name)
            return steps

        return await self._ask(owner, name, "steps", ask, within_s)

    async def tools(self, environment: Environment) -> bytes:
        """The tools of *environment* as ORS' ``ListToolsOutput``; see `Inquiries`."""
        return await self._inquiries.tools(environment)

    async def registered(self, environment: Environment) -> Registered:
        """The tasks that the workers of *environment* know by themselves; see `Inquiries`."""
        return await self._inquiries.registered(environment)

    async def splits(self, environment: Environment) -> list[Split]:
        """The splits of tasks that the workers of a foreign *environment* have; see `Inquiries`."""
        return await self._inquiries.splits(environment)

    async def count(self, environment: Environment, split: str) -> int:
        """How many tasks a split of its workers has. Raises ``UnknownSplit``; see `Inquiries`."""
        return await self._inquiries.count(environment, split)

    async def tasks_of(self, environment: Environment, split: str, start: int, stop: int) -> list[TaskSpec]:
        """Tasks of a split of its workers. Raises ``UnknownSplit``; see `Inquiries`."""
        return await self._inquiries.tasks(environment, split, start, stop)

    async def about(self, environment: Environment) -> Mapping[str, Any]:
        """What its workers tell of themselves in their own protocol's words; see `Inquiries`."""
        return await self._inquiries.about(environment)

    async def _entry(self, id: SessionId) -> Entry:
        entry = self._remembered.get(id)
        if entry is not None:
            return entry
        session = await self._patiently(lambda: self._store.find(id))
        if session.state is SessionState.CLOSING:
            reason = session.reason or CloseReason.DELETED
            raise SessionNotFound(session.name) if reason is CloseReason.DELETED else SessionClosed(reason.value)
        if session.state is SessionState.OPENING:
            raise SessionNotFound(session.name)
        return self._remembered.add(session, self._catalog.named(session.environment))

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask the store, again while it does not answer, for as long as it is worth waiting.

        Only what may be asked twice: a claim has its lease, and the rest changes nothing the second time.
        """
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return await ask()
            except StoreUnavailable:
                if time.monotonic() + STORE_PAUSE_S > deadline:
                    raise
            await asyncio.sleep(STORE_PAUSE_S)

    async def _mind_the_edge(self, entry: Entry) -> Entry:
        """Tell the store at once if the deadline that it knows may be near: a call must not race its expiry.

        Returns the entry that holds now: the session may have ended, and another one of its name have begun.
        """
        now = time.monotonic()
        if now - entry.noted_at < entry.session.idle_s - EDGE_S:
            return entry
        try:
            ended = await self._store.touch([Note(entry.session.id, 0.0)])
        except StoreUnavailable:
            return entry  # nobody can end it either; and once the store is back, its worker is asked first
        if ended:
            self._remembered.forget(entry.session.id, entry.session.lease)
            entry = await self._entry(entry.session.id)  # raises with the reason
        entry.noted_at = entry.quiet_since = now
        return entry

    async def _examined(self, entry: Entry, exchange: Exchange) -> Exchange:
        """Look into a worker's 404: it may mean the operation (then it is passed on), or that the session is gone."""
        try:
            body = await exchange.read(MAX_REFUSAL_BYTES)
        finally:
            await exchange.aclose()
        if GONE not in body:
            return ReadExchange(exchange.status, exchange.headers, body)
        raise await self._loss(entry)

    async def _loss(self, entry: Entry) -> Exception:
        """Say what became of a session that its worker does not know.

        Raises:
            SessionNotFound, SessionClosed: with the reason that the store knows.
        """
        session = entry.session
        self._remembered.forget(session.id, session.lease)
        found = await self._store.find(session.id)
        if found.lease == session.lease and found.state is SessionState.OPEN:
            # The store has it and its worker has not: what the trainer did in it is lost, and it has to hear so.
            logger.warning("session_lost_by_worker session=%s worker=%s", session.id, session.worker)
            await self._give_back(session, entry.environment, CloseReason.WORKER_LOST)
            return SessionClosed(CloseReason.WORKER_LOST.value)
        if found.state is SessionState.OPEN:
            return _Moved(self._remembered.add(found, entry.environment))
        return SessionNotFound(session.name)

    async def _end_of(self, entry: Entry) -> Exception:
        """Say why a session was ended while something ran in it. Raises as `_loss`."""
        found = await self._store.find(entry.session.id)
        if found.state is SessionState.CLOSING and found.reason not in (None, CloseReason.DELETED):
            return SessionClosed(str(found.reason))
        return SessionNotFound(entry.session.name)

    async def _explain(self, entry: Entry, error: UpstreamGone) -> None:
        """A connection broke: if the session was ended, that is the better answer.

        A worker that dies closes its connections a moment before the engine tells of its death and why, and the control
        loop ends its sessions: that is waited for.
        """
        ended = Ended()
        entry.watchers.add(ended)
        try:
            await self._say_why(entry, error)
            if self._remembered.get(entry.session.id) is entry and await ended.within(VERDICT_S):
                await self._say_why(entry, error)
        finally:
            entry.watchers.discard(ended)

    async def _say_why(self, entry: Entry, error: UpstreamGone) -> None:
        with contextlib.suppress(StoreUnavailable):
            session = await self._store.find(entry.session.id)
            if session.state is SessionState.CLOSING and session.reason is not None:
                raise SessionClosed(session.reason.value) from error

    async def _broken(self, entry: Entry, operation: str, error: BaseException, began_at: float) -> None:
        """Note the end of a call that failed; raises instead of *error* where the session's end explains it."""
        outcome = call_outcome(error)
        try:
            if isinstance(error, UpstreamGone):
                await self._explain(entry, error)
        except SessionClosed as better:
            outcome = call_outcome(better)
            raise
        finally:
            self._ended(entry, operation, outcome, began_at)

    def _ended(self, entry: Entry, operation: str, outcome: str, began_at: float) -> None:
        entry.busy -= 1
        entry.quiet_since = time.monotonic()
        if operation == "call":
            self._metrics.call_ended(entry.environment.name, outcome, entry.quiet_since - began_at)

    # -- in the background ----------------------------------------------------------------------------------------

    def remembered(self) -> list[Session]:
        """The sessions that this replica serves: what a store that lost its data is rebuilt from, too."""
        return self._remembered.sessions()

    async def run(self) -> None:
        """Write notes each second and follow notices, until cancelled."""
        await self._remembered.run()

    def is_busy(self) -> bool:
        """Whether a call is under way in this replica."""
        return self._remembered.is_busy()

    async def write_notes(self) -> None:
        """Tell the store what was active since the last time."""
        await self._remembered.write_notes()

    async def drain(self, timeout_s: float) -> None:
        """Wait until no call is under way here, at most *timeout_s*; then write the last notes."""
        deadline = time.monotonic() + timeout_s
        # A poll: it runs once, at the end, and an event would cost every call of every session its upkeep.
        while time.monotonic() < deadline and self.is_busy():  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_PAUSE_S)
        if self._cleanups:
            await asyncio.wait(self._cleanups, timeout=max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(StoreUnavailable):
            await self.write_notes()


def _owing(entry: Entry, key: str) -> int:
    """Note a turn that the store is to count later; returns which one it is."""
    if not key or key not in entry.owed:
        entry.owed.append(key)
    return entry.turns + len(entry.owed)


def _opening(
    owner: Owner, name: str, environment: Environment, fingerprint: str, *, task: str, episode: str = ""
) -> Opening:
    return Opening(
        id=session_id(owner, name),
        name=name,
        owner=owner,
        environment=environment.name,
        lease=uuid.uuid4().hex,
        fingerprint=fingerprint,
        idle_s=environment.timeouts.idle_s,
        setup_s=environment.timeouts.setup_s + environment.timeouts.close_s,
        task=task,
        episode=episode,
    )


class _Moved(Exception):
    """The session that was remembered has ended, and another one of its name is open elsewhere."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(entry.session.id)
        self.entry = entry
