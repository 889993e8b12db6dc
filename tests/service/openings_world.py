"""The request path between a store and workers that can be stopped at any call, for tests of who hangs up there.

Nobody else acts here: there is no control loop, so what is left behind stays.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, cast

from gateway.catalog.catalog import Catalog
from gateway.core.environment import Environment, UpstreamKind
from gateway.core.episode import Summary
from gateway.core.errors import GatewayError, StoreUnavailable
from gateway.core.ids import EnvironmentName, SessionId, WorkerId
from gateway.core.ports.store import Store
from gateway.core.ports.upstream import FrameUpstream, Upstream
from gateway.core.retry import STORE_PATIENCE_S
from gateway.core.session import CloseReason, GroupMembership, Session, SessionSetup, SessionState
from gateway.core.worker import Worker
from gateway.metrics import Metrics
from gateway.sessions.cache import SessionCache
from gateway.sessions.closing import SessionCloser
from gateway.sessions.interruption import AdmissionGate
from gateway.sessions.opening import EpisodeRequest, SessionOpener
from gateway.sessions.service import CallParts, Sessions
from gateway.sessions.worker_queries import WorkerQueries
from gateway.stores.memory.sessions import MemoryStore
from tests.deadlines import scaled
from tests.fakes.eventually import WITHIN_S, eventually
from tests.service.stack import OWNER, environment

MATH, SUMS, SOLO = EnvironmentName("math"), EnvironmentName("sums"), EnvironmentName("solo")
STORE_CALLS: Final = frozenset(
    ("claim", "opened", "find", "begin_close", "release", "hand_over", "limit_worker", "drain_worker", "worker", "load")
)
LONG_S: Final = 600.0
"""No deadline of a session comes while a test runs."""


class Way(Enum):
    """What became of a call whose caller was cancelled."""

    NEVER = "it did not come to run"
    DONE = "it had run, and its answer was on its way"
    LATER = "it was on its way, and ran when its caller was gone"


class Rooms:
    """The workers: which sessions each has, and how the next openings fail."""

    def __init__(self) -> None:
        self.held: defaultdict[WorkerId, set[SessionId]] = defaultdict(set)
        self.failures: list[GatewayError] = []
        """One for each of the openings to come."""
        self.before_open: Callable[[Session], Any] | None = None
        """What happens while the next session is opened."""

    async def open(self, session: Session, environment: Environment, setup: SessionSetup) -> str:
        """See ``Upstream.open``."""
        if (hook := self.before_open) is not None:
            self.before_open = None
            await hook(session)
        if self.failures:
            raise self.failures.pop(0)
        assert session.id not in self.held[session.worker], "it was opened beside itself"
        self.held[session.worker].add(session.id)
        return "a handle"

    async def close(self, session: Session, environment: Environment, *, keeps: bool = False) -> Summary | None:
        """See ``Upstream.close``."""
        self.held[session.worker].discard(session.id)
        return None

    async def tools(self, worker: Worker, environment: Environment) -> bytes:
        """See ``Upstream.tools``."""
        return b"[]"

    def all(self) -> list[SessionId]:
        """Sessions that any worker has."""
        return [id for ids in self.held.values() for id in ids]


class _NoTickets:
    """There are no curricula."""

    def unused(self, ticket: GroupMembership | None) -> None:
        """See ``DrawnTickets.unused``."""


@dataclass
class Calls:
    """All calls to the store and the workers, in their order; the one of number `stop_at` is stopped."""

    stop_at: int = 0
    way: Way = Way.NEVER
    names: list[str] = field(default_factory=list)
    is_stopped: asyncio.Event = field(default_factory=asyncio.Event)
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    late: list[asyncio.Task[Any]] = field(default_factory=list)
    lose_at: int = 0
    """The call of this number is not stopped, but fails as the store does that does not answer; *way* as above."""
    stop_on: str = ""
    lose_on: str = ""
    """As `stop_at` and `lose_at`: the next call of this name."""
    is_away: bool = False
    """No call to the store is answered, nor done."""
    before: dict[str, Callable[[], Awaitable[None]]] = field(default_factory=dict)
    """What happens before the next call of a name."""

    async def made(self, name: str, inner: Callable[[], Any], undo: Callable[[Any], Any] | None) -> Any:
        """Make a call; *undo* is what the seam says of a cancelled one."""
        self.names.append(name)
        number = len(self.names)
        if (hook := self.before.pop(name, None)) is not None:
            await hook()
        if self.is_away and name in STORE_CALLS:
            raise StoreUnavailable("the store does not answer")
        if number == self.lose_at or name == self.lose_on:
            self.lose_on = ""
            if self.way is Way.DONE:
                await inner()
            raise StoreUnavailable("the store does not answer")
        if number != self.stop_at and name != self.stop_on:
            return await inner()
        self.stop_on = ""
        answer, error = None, None
        if self.way is Way.DONE:
            try:
                answer = await inner()
            except GatewayError as failed:
                error = failed
        self.is_stopped.set()
        try:
            await self.goes_on.wait()
        except asyncio.CancelledError:
            if undo is not None and answer is not None:
                await undo(answer)
            elif undo is None and self.way is Way.LATER:
                self.late.append(asyncio.ensure_future(self._later(inner)))
            raise
        if error is not None:
            raise error
        return answer if self.way is Way.DONE else await inner()

    async def _later(self, inner: Callable[[], Any]) -> None:
        await self.goes_on.wait()
        try:
            await inner()
        except GatewayError:
            return  # nobody hears it


class _Watched:
    """Passes calls on to *inner*, through *calls*."""

    def __init__(self, inner: Any, calls: Calls, undo: Callable[[str], Callable[[Any], Any] | None]) -> None:
        self._inner = inner
        self._calls = calls
        self._undo = undo

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._inner, name)
        if not inspect.iscoroutinefunction(inner):
            return inner

        async def called(*arguments: Any, **named: Any) -> Any:
            return await self._calls.made(name, lambda: inner(*arguments, **named), self._undo(name))

        return called


class World:
    """One replica's request path, and what it speaks to."""

    def __init__(
        self,
        calls: Calls,
        *,
        store: Store | None = None,
        patience_s: float = 5.0,
        closing_patience_s: float = STORE_PATIENCE_S,
    ) -> None:
        self.calls = calls
        self.store: Store = MemoryStore() if store is None else store
        self.rooms = Rooms()
        times: dict[str, Any] = {"setup_s": LONG_S, "open_s": LONG_S, "close_s": LONG_S}
        self.environments = [
            environment(MATH, slots=2, **times),
            environment(SUMS, slots=2, **times),
            environment(SOLO, slots=1, max_uses=1, **times),
        ]
        watched = cast(Store, _Watched(self.store, calls, lambda name: self._undone if name == "claim" else None))
        # A worker drops a request whose connection is gone: none is done later.
        upstream = cast(Upstream, _Watched(self.rooms, calls, lambda _: _nothing))
        upstreams = {UpstreamKind.OWN: upstream}
        metrics = Metrics()
        self.catalog = Catalog(self.environments)
        self.closer = SessionCloser(store=watched, upstreams=upstreams, metrics=metrics, patience_s=closing_patience_s)
        waiting = AdmissionGate()
        self.cache = cache = SessionCache(watched, self.catalog, patience_s=patience_s)
        self.queries = WorkerQueries(store=watched, upstreams=upstreams, closer=self.closer, waiting=waiting)
        opener = SessionOpener(
            store=watched,
            upstreams=upstreams,
            closer=self.closer,
            cache=cache,
            metrics=metrics,
            patience_s=patience_s,
            waiting=waiting,
            tickets=_NoTickets(),
        )
        calls_in_sessions = CallParts(
            store=watched,
            upstreams=upstreams,
            frames=cast(FrameUpstream, upstream),
            catalog=self.catalog,
            cache=cache,
            closer=self.closer,
            metrics=metrics,
        )
        self.sessions = Sessions(
            opener=opener, closer=self.closer, cache=cache, calls=calls_in_sessions, patience_s=patience_s
        )

    async def start(self, *, idle: bool = True) -> None:
        """Have three workers of each environment; with *idle* False only once a slot is wanted."""
        if not idle:
            self.calls.before["claim"] = self.start
            return
        for one in self.environments:
            for number in range(3):
                id = WorkerId(f"{one.name}-{number}")
                slots, uses = one.pool.slots, one.pool.max_uses
                worker = Worker(
                    id=id, environment=one.name, digest=one.digest(), slots=slots, address="", max_uses=uses
                )
                await self.store.add_worker(worker)
                await self.store.worker_ready(id, f"unix:/{id}")

    async def open(self, kind: str = MATH, **more: Any) -> Session:
        """Open the session ``one``."""
        return (await self.sessions.open(EpisodeRequest(**self._wish(kind), **more))).session

    async def reset(self, kind: str = MATH, **more: Any) -> Session:
        """Reset the session ``one``."""
        return (await self.sessions.reset(EpisodeRequest(**self._wish(kind), **more))).session

    def _wish(self, kind: str) -> dict[str, Any]:
        wanted = self.catalog.named(kind)
        return {
            "owner": OWNER,
            "name": "one",
            "environment": wanted,
            "setup": SessionSetup(spec={}),
            "fingerprint": kind,
        }

    async def _undone(self, claimed: Session) -> None:
        """What ``Store.claim`` says of itself: it gives back what was granted to a caller that was cancelled."""
        await self.store.begin_close(claimed.id, CloseReason.OPEN_FAILED, lease=claimed.lease)
        await self.store.release(claimed.id, claimed.lease)

    async def waiting(self) -> int:
        """Openings that wait."""
        return sum(load.waiting for load in (await self.store.load()).values())

    async def used(self) -> int:
        """Slots that are held."""
        return sum(one.used for load in (await self.store.load()).values() for one in load.workers)

    async def holds_nothing(self) -> None:
        """Return once no slot, ticket or session is left, here or in a worker."""

        async def check() -> None:
            assert await self.store.sessions() == []
            assert (await self.used(), await self.waiting()) == (0, 0)
            assert self.rooms.all() == []
            assert self.cache.sessions() == []

        await eventually(check)
        await self._at_rest()

    async def holds_one(self) -> None:
        """Return once there is one session, open, and in one worker: the one that the store says."""

        async def check() -> None:
            (session,) = await self.store.sessions()
            assert session.state is SessionState.OPEN
            assert (await self.used(), await self.waiting()) == (1, 0)
            assert {id: ids for id, ids in self.rooms.held.items() if ids} == {session.worker: {session.id}}

        await eventually(check)
        await self._at_rest()

    async def _at_rest(self) -> None:
        await asyncio.gather(*self.calls.late)
        await self.closer.settle(scaled(WITHIN_S))


async def _nothing(_: Any) -> None:
    """A worker's call needs no undoing by the seam."""
