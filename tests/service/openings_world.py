"""A gateway whose requests a test can stop at any call to the store or a worker, in order to hang up there.

Its control loop does not run, so no other actor removes a slot or session that the request leaves behind.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final, cast

from gateway.core.environment import Environment, UpstreamKind
from gateway.core.episode import Summary
from gateway.core.errors import GatewayError, StoreUnavailable
from gateway.core.ids import EnvironmentName, SessionId, WorkerId
from gateway.core.ports.store import Store
from gateway.core.ports.upstream import Upstream
from gateway.core.session import CloseReason, EpisodeRequest, Session, SessionSetup, SessionState
from gateway.core.worker import Worker
from gateway.stores.memory.sessions import MemoryStore
from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually
from tests.fakes.workers import FakeBackend
from tests.service.stack import OWNER, Replica, environment

MATH, SUMS, SOLO = EnvironmentName("math"), EnvironmentName("sums"), EnvironmentName("solo")
STORE_CALLS: Final = frozenset(
    ("claim", "opened", "find", "begin_close", "release", "hand_over", "limit_worker", "drain_worker", "worker", "load")
)
LONG_S: Final = 600.0
"""Seconds of each session deadline: none passes while a test runs."""


class Way(Enum):
    """The fate of a call whose caller was cancelled."""

    NEVER = "it did not come to run"
    DONE = "it had run, and its answer was on its way"
    LATER = "it was on its way, and ran when its caller was gone"


class Rooms:
    """The workers: the sessions in each, and the failures of the next openings."""

    def __init__(self) -> None:
        self.held: defaultdict[WorkerId, set[SessionId]] = defaultdict(set)
        self.failures: list[GatewayError] = []
        """One failure for each of the next openings."""
        self.before_open: Callable[[Session], Any] | None = None
        """Hook that runs while a worker opens the next session."""

    async def open(self, session: Session, environment: Environment, setup: SessionSetup) -> Session:
        """See ``Upstream.open``."""
        if (hook := self.before_open) is not None:
            self.before_open = None
            await hook(session)
        if self.failures:
            raise self.failures.pop(0)
        assert session.id not in self.held[session.worker], "it was opened beside itself"
        self.held[session.worker].add(session.id)
        return replace(session, handle="a handle")

    async def close(self, session: Session, environment: Environment, *, keeps: bool = False) -> Summary | None:
        """See ``Upstream.close``."""
        self.held[session.worker].discard(session.id)
        return None

    async def tools(self, worker: Worker, environment: Environment) -> bytes:
        """See ``Upstream.tools``."""
        return b"[]"

    def all(self) -> list[SessionId]:
        """Return the sessions of all workers."""
        return [id for ids in self.held.values() for id in ids]


@dataclass
class Calls:
    """All calls to the store and the workers, in order. The call with number `stop_at` is stopped."""

    stop_at: int = 0
    way: Way = Way.NEVER
    names: list[str] = field(default_factory=list)
    is_stopped: asyncio.Event = field(default_factory=asyncio.Event)
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    late: list[asyncio.Task[Any]] = field(default_factory=list)
    lose_at: int = 0
    """Number of the call that fails as if the store did not answer. It runs first if `way` is `Way.DONE`."""
    stop_on: str = ""
    lose_on: str = ""
    """`stop_on` and `lose_on` select the next call of a name, as `stop_at` and `lose_at` select a number."""
    is_away: bool = False
    """True while the store neither runs nor answers a call."""
    before: dict[str, Callable[[], Awaitable[None]]] = field(default_factory=dict)
    """Hooks by name of a call. Each runs once, before the next call of its name."""

    async def made(self, name: str, inner: Callable[[], Any], undo: Callable[[Any], Any] | None) -> Any:
        """Make a call. *undo* reverts the call if its caller is cancelled, where the port's contract requires this."""
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
            return  # the caller is gone


class _Watched:
    """Passes calls to *inner* through *calls*."""

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
    """A gateway whose store and workers a test watches. It does not run: requests call it directly."""

    def __init__(self, calls: Calls, *, store: Store | None = None, patience_s: float = 5.0) -> None:
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
        # A worker drops a request whose connection is gone, so no call to a worker runs later.
        upstream = cast(Upstream, _Watched(self.rooms, calls, lambda _: _nothing))
        self.gateway = Replica(
            store=watched,
            backend=FakeBackend(Path("/nowhere")),
            environments=self.environments,
            name="one",
            upstreams={UpstreamKind.OWN: upstream},
            store_patience_s=patience_s,
        )
        self.catalog, self.sessions, self.queries = self.gateway.catalog, self.gateway.sessions, self.gateway.queries

    async def start(self, *, idle: bool = True) -> None:
        """Add three workers of each environment. With *idle* False, add them at the first claim of a slot."""
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
        """Release the slot that a cancelled caller was granted, as the contract of ``Store.claim`` requires."""
        await self.store.begin_close(claimed.id, CloseReason.OPEN_FAILED, lease=claimed.lease)
        await self.store.release(claimed.id, claimed.lease)

    async def waiting(self) -> int:
        """Return the number of openings that wait."""
        return sum(load.waiting for load in (await self.store.load()).values())

    async def used(self) -> int:
        """Return the number of slots that sessions hold."""
        return sum(one.used for load in (await self.store.load()).values() for one in load.workers)

    async def holds_nothing(self) -> None:
        """Wait until no slot, ticket or session is left in the replica, the store or a worker."""

        async def check() -> None:
            assert await self.store.sessions() == []
            assert (await self.used(), await self.waiting()) == (0, 0)
            assert self.rooms.all() == []
            assert self.gateway.session_cache.sessions() == []

        await eventually(check)
        await self._at_rest()

    async def holds_one(self) -> None:
        """Wait until there is exactly one session, open, and only in the worker that the store records."""

        async def check() -> None:
            (session,) = await self.store.sessions()
            assert session.state is SessionState.OPEN
            assert (await self.used(), await self.waiting()) == (1, 0)
            assert {id: ids for id, ids in self.rooms.held.items() if ids} == {session.worker: {session.id}}

        await eventually(check)
        await self._at_rest()

    async def _at_rest(self) -> None:
        await asyncio.gather(*self.calls.late)
        await self.gateway.closer.settle(HANG_S)


async def _nothing(_: Any) -> None:
    """Do nothing: a worker's call needs no undo."""
