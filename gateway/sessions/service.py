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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from gateway.catalog.catalog import Catalog
from gateway.core.environment import Environment, UpstreamKind
from gateway.core.episode import EPISODE_FINISHED, Action, Block, FaultReply, StepResult, Summary
from gateway.core.errors import (
    SessionClosed,
    SessionNotFound,
    StoreUnavailable,
    UpstreamError,
    UpstreamGone,
    UpstreamTimeout,
)
from gateway.core.faults import Fault
from gateway.core.ids import Owner, SessionId, session_id
from gateway.core.ports.store import Store
from gateway.core.ports.transport import Exchange, Headers
from gateway.core.ports.upstream import Upstream
from gateway.core.retry import STORE_PATIENCE_S, patiently
from gateway.core.session import Activity, CloseReason, Session, SessionState
from gateway.metrics import Metrics, answer_outcome, call_outcome
from gateway.sessions.cache import TICK_S, ActiveSession, SessionCache
from gateway.sessions.calls import BufferedResponse, CallScope, Interrupted, TrackedResponse
from gateway.sessions.closing import SessionCloser
from gateway.sessions.fault_log import log_faults
from gateway.sessions.opening import SessionOpener
from gateway.sessions.turns import TurnCounter
from gateway.sessions.verdicts import Moved, Verdicts

logger = logging.getLogger(__name__)

T = TypeVar("T")

EDGE_S = 3 * TICK_S
"""A call that begins this close to its session's deadline writes its note at once."""
DRAIN_PAUSE_S = 0.02
MAX_REFUSAL_BYTES = 64 * 1024
GONE = b"Active environment not found"
"""How an ORS worker says that it does not know a session."""


class Sessions:
    """Opens, serves and ends sessions for all frontends."""

    def __init__(
        self,
        *,
        store: Store,
        upstreams: Mapping[UpstreamKind, Upstream],
        catalog: Catalog,
        closer: SessionCloser,
        openings: SessionOpener,
        remembered: SessionCache,
        metrics: Metrics,
        patience_s: float = STORE_PATIENCE_S,
    ) -> None:
        """*patience_s*: how long a store that does not answer, or is being rebuilt, is waited for."""
        self._store = store
        self._patience_s = patience_s
        self._upstreams = upstreams
        self._catalog = catalog
        self._closer = closer
        self._metrics = metrics
        self._remembered = remembered
        self._turns = TurnCounter(store)
        self._verdicts = Verdicts(store=store, remembered=remembered, closer=closer)
        self._playing: set[asyncio.Task[tuple[StepResult, int]]] = set()
        self.open = openings.open
        self.reset = openings.reset

    # -- close --------------------------------------------------------------------------------------------------

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

    async def _begin_end(self, id: SessionId, reason: CloseReason) -> asyncio.Task[Summary | None] | None:
        # Shielded: an end that was begun as its trainer hung up would stand still until it is due.
        return await asyncio.shield(self._closer.go_on(id, self._begun_end(id, reason)))

    async def _begun_end(self, id: SessionId, reason: CloseReason) -> asyncio.Task[Summary | None] | None:
        entry = self._remembered.get(id)
        session = await self._closer.begin(id, reason, patience_s=self._patience_s)
        if entry is not None:
            self._remembered.forget(id, entry.session.lease)  # only now: what this breaks off asks the store why
            entry.end()
        if session is None:
            return None
        environment = entry.environment if entry else self._catalog.named(session.environment)
        return self._closer.go_on(id, self._closer.finish(session, environment))

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
        entry.stir()

    async def forward(self, id: SessionId, operation: str, *, body: bytes, headers: Headers) -> TrackedResponse:
        """Pass an ORS operation to the worker of a session that was found; it is busy until the exchange is closed.

        Raises:
            SessionNotFound, SessionClosed: as `find`; also if the worker itself does not know the session any more.
            UpstreamGone, UpstreamTimeout: the worker failed. Only ``UpstreamGone`` with ``sent`` False is sure not to
                have run.
        """
        entry = await self._mind_the_edge(await self._entry(id))
        try:
            return await self._forward(entry, operation, body, headers)
        except Moved as moved:  # the worker said that it has not run: asking the new one is no second run
            return await self._forward(moved.entry, operation, body, headers)

    async def _forward(self, entry: ActiveSession, operation: str, body: bytes, headers: Headers) -> TrackedResponse:
        entry.begin()
        began_at = time.monotonic()
        try:
            upstream = self._upstreams[entry.environment.wire]
            exchange = await upstream.forward(entry.session, entry.environment, operation, body=body, headers=headers)
            if exchange.status == 404:
                exchange = await self._examined(entry, exchange)
            busy = TrackedResponse(
                exchange,
                explain=partial(self._verdicts.explain, entry),
                told=partial(self._log, entry),
                ended=lambda outcome: self._ended(entry, operation, outcome, began_at),
            )
        except SessionNotFound as error:  # it is the worker's word
            self._ended(entry, operation, "ended", began_at)
            raise await self._verdicts.loss(entry) from error
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

        def ask(upstream: Upstream, entry: ActiveSession) -> Awaitable[StepResult]:
            return upstream.act(entry.session, entry.environment, action, key=key)

        return await self._ask(owner, name, "call", ask, within_s)

    async def prompt(self, owner: Owner, name: str, *, within_s: float) -> list[Block]:
        """What the agent is told first, when the task's setup is done. Raises as `act`."""

        def ask(upstream: Upstream, entry: ActiveSession) -> Awaitable[list[Block]]:
            return upstream.prompt(entry.session, entry.environment)

        return await self._ask(owner, name, "prompt", ask, within_s)

    async def relay(self, owner: Owner, name: str, message: bytes, *, within_s: float) -> bytes:
        """Pass a message of the worker's own protocol on; see ``Upstream.relay``. Raises as `act`."""

        def ask(upstream: Upstream, entry: ActiveSession) -> Awaitable[bytes]:
            return upstream.relay(entry.session, entry.environment, message)

        return await self._ask(owner, name, "call" if message else "prompt", ask, within_s)

    async def play(
        self, owner: Owner, name: str, action: Action, *, within_s: float, key: str = ""
    ) -> tuple[StepResult, int]:
        """As `act`, and which turn of its session it was; 0 where the episode was over.

        A step that ran is a turn although its trainer hung up meanwhile. Our own workers see to that; others do not
        count, so their steps go on behind the request.
        """
        entry = await self._entry(session_id(owner, name))
        playing = self._played(owner, name, action, within_s, key)
        if entry.environment.wire is UpstreamKind.OWN:
            return await playing
        task = asyncio.ensure_future(playing)
        self._playing.add(task)
        task.add_done_callback(self._has_played)
        return await asyncio.shield(task)

    async def _played(
        self, owner: Owner, name: str, action: Action, within_s: float, key: str
    ) -> tuple[StepResult, int]:
        result = await self.act(owner, name, action, within_s=within_s, key=key or None)
        if result.reason == EPISODE_FINISHED:
            return result, result.turn or 0
        entry = await self._entry(session_id(owner, name))
        if result.turn is not None:
            return result, self._turns.told(entry, result)
        return result, await self._turns.taken(entry, result, key=key)

    def _has_played(self, task: asyncio.Task[tuple[StepResult, int]]) -> None:
        self._playing.discard(task)
        if not task.cancelled():
            task.exception()  # who waited may have left

    async def _ask(
        self,
        owner: Owner,
        name: str,
        operation: str,
        ask: Callable[[Upstream, ActiveSession], Awaitable[T]],
        within_s: float,
    ) -> T:
        entry = await self._mind_the_edge(await self._entry(session_id(owner, name)))
        try:
            return await self._asked(entry, operation, ask, within_s)
        except Moved as moved:  # the worker said that it has not run: asking the new one is no second run
            return await self._asked(moved.entry, operation, ask, within_s)

    async def _asked(
        self,
        entry: ActiveSession,
        operation: str,
        ask: Callable[[Upstream, ActiveSession], Awaitable[T]],
        within_s: float,
    ) -> T:
        entry.begin()
        began_at = time.monotonic()
        try:
            answer = await self._unless_ended(entry, ask, within_s)
        except BaseException as error:
            await self._broken(entry, operation, error, began_at)
            raise
        if isinstance(answer, StepResult | FaultReply):
            self._log(entry, answer.faults)
        self._ended(entry, operation, answer_outcome(answer), began_at)
        return answer

    async def _unless_ended(
        self, entry: ActiveSession, ask: Callable[[Upstream, ActiveSession], Awaitable[T]], within_s: float
    ) -> T:
        """Ask a worker, but not longer than *within_s*, nor beyond the end of the session."""
        try:
            with CallScope(entry.watchers, within_s):
                return await ask(self._upstreams[entry.environment.wire], entry)
        except Interrupted as broken:
            if broken.cause == "ended":
                raise await self._verdicts.end_of(entry) from None
            raise UpstreamTimeout(f"the worker did not answer within {within_s:g} s") from None
        except SessionNotFound as error:  # it is the worker's word
            raise await self._verdicts.loss(entry) from error

    async def steps(self, owner: Owner, name: str, *, within_s: float) -> int:
        """How many steps its worker has seen of a session. Raises as `act`."""

        async def ask(upstream: Upstream, entry: ActiveSession) -> int:
            steps = await upstream.steps(entry.session, entry.environment)
            if steps is None:
                raise SessionNotFound(name)
            return steps

        return await self._ask(owner, name, "steps", ask, within_s)

    async def client_state(self, owner: Owner, name: str, *, within_s: float) -> Mapping[str, Any]:
        """What its environment shows of a session's state. Raises as `act`."""

        async def ask(upstream: Upstream, entry: ActiveSession) -> Mapping[str, Any]:
            return await upstream.client_state(entry.session, entry.environment)

        return await self._ask(owner, name, "state", ask, within_s)

    async def _entry(self, id: SessionId) -> ActiveSession:
        entry = self._remembered.get(id)
        if entry is not None:
            return entry
        session = await patiently(lambda: self._store.find(id), for_s=self._patience_s)
        if session.state is SessionState.CLOSING:
            reason = session.reason or CloseReason.DELETED
            raise SessionNotFound(session.name) if reason.is_trainers else SessionClosed(reason.value)
        if session.state is SessionState.OPENING:
            raise SessionNotFound(session.name)
        return self._remembered.add(session, self._catalog.named(session.environment))

    async def _mind_the_edge(self, entry: ActiveSession) -> ActiveSession:
        """Tell the store at once if the deadline that it knows may be near: a call must not race its expiry.

        Returns the entry that holds now: the session may have ended, and another one of its name have begun.
        """
        now = time.monotonic()
        if now - entry.noted_at < entry.session.idle_s - EDGE_S:
            return entry
        try:
            ended = await self._store.touch([Activity(entry.session.id, 0.0)])
        except StoreUnavailable:
            return entry  # nobody can end it either; and once the store is back, its worker is asked first
        if ended:
            self._remembered.forget(entry.session.id, entry.session.lease)
            entry = await self._entry(entry.session.id)  # raises with the reason
        entry.noted_at = entry.quiet_since = now
        return entry

    async def _examined(self, entry: ActiveSession, exchange: Exchange) -> Exchange:
        """Look into a worker's 404: it may mean the operation (then it is passed on), or that the session is gone."""
        try:
            body = await exchange.read(MAX_REFUSAL_BYTES)
        finally:
            await exchange.aclose()
        if GONE not in body:
            return BufferedResponse(exchange.status, exchange.headers, body)
        raise await self._verdicts.loss(entry)

    async def _broken(self, entry: ActiveSession, operation: str, error: BaseException, began_at: float) -> None:
        """Note the end of a call that failed; raises instead of *error* where the session's end explains it."""
        outcome = call_outcome(error)
        if isinstance(error, UpstreamError):
            self._log(entry, error.faults)
        try:
            if isinstance(error, UpstreamGone):
                await self._verdicts.explain(entry, error)
        except SessionClosed as better:
            outcome = call_outcome(better)
            raise
        finally:
            self._ended(entry, operation, outcome, began_at)

    @staticmethod
    def _log(entry: ActiveSession, faults: Sequence[Fault]) -> None:
        """Tell operators of *faults*, once: a call that is asked for again has the same one."""
        if faults and faults[-1] is not entry.told:
            entry.told = faults[-1]
            log_faults(entry.session, faults)

    def _ended(self, entry: ActiveSession, operation: str, outcome: str, began_at: float) -> None:
        entry.finish()
        if operation == "call":
            self._metrics.call_ended(entry.environment.name, outcome, entry.quiet_since - began_at)

    # -- in the background ----------------------------------------------------------------------------------------

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
        await self._closer.settle(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(StoreUnavailable):
            await self.write_notes()
