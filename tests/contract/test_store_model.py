"""Random walks of both stores, compared with a naive model that a reader can check.

Moments are multiples of 100 s in the model and in its requests to the store. The milliseconds that pass on Redis' own
clock therefore decide nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from gateway.core.errors import (
    EnvironmentUnavailable,
    GatewayError,
    PoolExhausted,
    SessionClosed,
    SessionExists,
    SessionNotFound,
)
from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.ports.store import Store
from gateway.core.session import BY_TRAINER, Activity, CloseReason, Session, SessionRequest, SessionState
from gateway.core.worker import WorkerState
from gateway.stores.memory.sessions import MemoryStore
from tests.contract.store_worlds import (
    CODING,
    MATH,
    TURNS,
    MemoryWorld,
    RedisServer,
    RedisWorld,
    World,
    ended_late,
    opening,
)
from tests.contract.store_worlds import worker as a_worker
from tests.deadlines import HANG_S

pytest_plugins = ["tests.contract.store_fixtures"]

T = TypeVar("T")

WAIT_S = 150.0
CLOSED_KEPT_S = 250.0
CLOSING_S = 100.0
QUEUE_MAX = 3

ids = st.sampled_from([f"s{n}" for n in range(7)])
worker_ids = st.sampled_from([f"w{n}" for n in range(4)])
environments = st.sampled_from([MATH, MATH, CODING])
hundreds = st.sampled_from([100.0, 200.0, 300.0])
reasons = st.sampled_from(list(CloseReason))
owners = st.sampled_from([Owner("lab"), Owner("b"), Owner("c:d 0")])
#: The most sessions of each owner: in all, and in one environment; 0: no limit.
LIMITS = {Owner("lab"): (0, 0), Owner("b"): (3, 2), Owner("c:d 0"): (1, 0)}
handles = st.sampled_from(["", "http://a one", "http://b two"])
groups = st.sampled_from([("", 1), ("", 1), ("g", 2), ("h", 3)])
TOGETHER_S = 100.0
GROUP_KEPT_S = 600.0
UNFILLED_S = 60.0


@dataclass
class ModelWorker:
    id: str
    environment: EnvironmentName
    slots: int
    max_uses: int
    state: WorkerState = WorkerState.STARTING
    uses: int = 0
    is_limited: bool = False


@dataclass
class ModelSession:
    wish: SessionRequest
    worker: ModelWorker
    deadline: float
    state: SessionState = SessionState.OPENING
    reason: CloseReason | None = None
    handle: str = ""


@dataclass
class ModelGroup:
    """The state of openings that start together."""

    granted: int = 0
    came: int = 0
    kept_since: float | None = None
    is_parted: bool = False
    until: float = 0.0


@dataclass
class Model:
    """The expected content of the store. Lists are in order of age."""

    now: float = 0.0
    workers: list[ModelWorker] = field(default_factory=list)
    sessions: dict[str, ModelSession] = field(default_factory=dict)
    queue: list[tuple[SessionRequest, float]] = field(default_factory=list)
    closed: dict[str, tuple[CloseReason, float]] = field(default_factory=dict)
    #: The present round, and the round of the next service of each waiting owner.
    current: dict[EnvironmentName, int] = field(default_factory=dict)
    rounds: dict[tuple[EnvironmentName, Owner], int] = field(default_factory=dict)
    #: The round of the next service of owners that left the queue.
    later: dict[tuple[EnvironmentName, Owner], int] = field(default_factory=dict)
    #: The time until which an owner's openings start individually.
    unfilled: dict[Owner, float] = field(default_factory=dict)
    breakers: dict[EnvironmentName, float] = field(default_factory=dict)
    arrivals: Counter[EnvironmentName] = field(default_factory=Counter)
    hits: Counter[EnvironmentName] = field(default_factory=Counter)
    groups: dict[str, ModelGroup] = field(default_factory=dict)
    #: Slots reserved for absent members of a group, and the end of the reservation.
    reserved: dict[str, tuple[EnvironmentName, int, float]] = field(default_factory=dict)
    #: The worker that has all of these slots, if there is one.
    homes: dict[str, ModelWorker] = field(default_factory=dict)

    def used(self, worker: ModelWorker) -> int:
        return sum(session.worker is worker for session in self.sessions.values())

    def held(self, owner: Owner, environment: EnvironmentName | None = None) -> int:
        """Return the number of sessions of *owner*, in *environment* or in all."""
        wishes = [session.wish for session in self.sessions.values() if session.wish.owner == owner]
        return sum(environment in (None, wish.environment) for wish in wishes)

    def allowed(self, wish: SessionRequest) -> int:
        """Return the number of further sessions that the limits of *wish* allow."""
        left = wish.max_sessions - self.held(wish.owner) if wish.max_sessions else 99
        left_here = wish.max_here - self.held(wish.owner, wish.environment) if wish.max_here else 99
        return max(0, min(left, left_here))

    def is_over_limit(self, wish: SessionRequest) -> bool:
        return self.allowed(wish) < self.need(wish)

    def over_limit(self, environment: EnvironmentName) -> int:
        """Return the number of waiting and missing openings that exceed the limits of their owners."""
        waiting = self.waiting(environment)
        count = 0
        for owner in {wish.owner for wish in waiting}:
            of_it = [wish for wish in waiting if wish.owner == owner]
            count += max(0, len(of_it) + self.missing(of_it) - self.allowed(of_it[0]))
        return count

    def waiting(self, environment: EnvironmentName) -> list[SessionRequest]:
        return [wish for wish, _ in self.queue if wish.environment == environment]

    def is_full(self, wish: SessionRequest) -> bool:
        waiting = self.waiting(wish.environment)
        is_first = wish.owner not in {other.owner for other in waiting}
        return len(waiting) >= (2 * QUEUE_MAX if is_first else QUEUE_MAX)

    def enter(self, wish: SessionRequest) -> None:
        self.queue.append((wish, self.now + WAIT_S))
        whose = (wish.environment, wish.owner)
        if whose not in self.rounds:
            self.rounds[whose] = max(self.current.get(wish.environment, 0) + 1, self.later.pop(whose, 0))
        if wish.group in self.groups and self.groups[wish.group].kept_since is not None:
            self.groups[wish.group].came = max(self.groups[wish.group].came, self.come(wish))

    def come(self, wish: SessionRequest) -> int:
        """Return the number of members of the group of *wish* that have come."""
        of_it = [other for other, _ in self.queue if other.group == wish.group]
        return len(of_it) + self.groups.get(wish.group, ModelGroup()).granted

    def individually(self, wish: SessionRequest) -> SessionRequest:
        """Return *wish* without its group, if its owner may start no group now."""
        is_known = wish.group in self.groups or any(other.group == wish.group for other, _ in self.queue)
        is_free = is_known or self.unfilled.get(wish.owner, self.now) <= self.now
        return wish if is_free else replace(wish, group="")

    def abandon(self, places: list[tuple[SessionRequest, float]]) -> None:
        """Remove *places*, which got no slot."""
        self.leave(places)
        for wish, _ in places:
            group = self.groups.get(wish.group)
            if not wish.group or group is None or group.until <= self.now or group.is_parted:
                continue
            is_last = not any(other.group == wish.group for other, _ in self.queue)
            if is_last and group.kept_since is not None and 2 * group.came < wish.group_size:
                self.unfilled[wish.owner] = self.now + UNFILLED_S

    def leave(self, places: list[tuple[SessionRequest, float]]) -> None:
        self.queue = [place for place in self.queue if place not in places]
        waiting = {(wish.environment, wish.owner) for wish, _ in self.queue}
        self.later |= {whose: number for whose, number in self.rounds.items() if whose not in waiting}
        queues = {environment for environment, _ in waiting}
        self.later = {whose: number for whose, number in self.later.items() if whose[0] in queues}
        self.rounds = {whose: number for whose, number in self.rounds.items() if whose in waiting}
        self.current = {environment: number for environment, number in self.current.items() if environment in queues}

    def turns(self, environment: EnvironmentName) -> list[tuple[SessionRequest, float]]:
        """Return the first waiting claim of each owner: by round, then by arrival."""
        firsts: dict[Owner, tuple[SessionRequest, float]] = {}
        for place in self.queue:
            if place[0].environment == environment:
                firsts.setdefault(place[0].owner, place)
        return sorted(firsts.values(), key=lambda place: self.rounds[environment, place[0].owner])

    def free(self, environment: EnvironmentName) -> ModelWorker | None:
        free = [worker for worker in self.workers if worker.environment == environment and self.room(worker)]
        return min(free, key=self.used, default=None)

    def room(self, worker: ModelWorker) -> int:
        """Return the number of further sessions that the worker takes."""
        if worker.state is not WorkerState.READY:
            return 0
        room = max(0, worker.slots - self.used(worker))
        return min(room, worker.max_uses - worker.uses) if worker.max_uses else room

    def roomy(self, environment: EnvironmentName, need: int) -> ModelWorker | None:
        """Return the least used worker with room for *need* besides the slots reserved on it for groups."""
        kept = Counter[str]()
        for group, home in self.homes.items():
            kept[home.id] += self.reserved[group][1]
        workers = [worker for worker in self.workers if worker.environment == environment]
        free = [worker for worker in workers if self.room(worker) - kept[worker.id] >= need]
        return min(free, key=self.used, default=None)

    def place(self, environment: EnvironmentName, home: ModelWorker | None) -> ModelWorker:
        """Return the worker of the next session."""
        if home is not None and home in self.workers and self.room(home):
            return home
        found = self.roomy(environment, 1) or self.free(environment)
        assert found is not None
        return found

    def available(self, environment: EnvironmentName) -> int:
        """Return the number of free slots that are not reserved for groups."""
        free = sum(self.room(worker) for worker in self.workers if worker.environment == environment)
        return max(0, free - sum(count for other, count, _ in self.reserved.values() if other == environment))

    def known(self, wish: SessionRequest) -> ModelGroup:
        """Return the group of *wish*, and extend its lifetime."""
        group = self.groups.setdefault(wish.group, ModelGroup())
        group.until = self.now + GROUP_KEPT_S
        return group

    def need(self, wish: SessionRequest) -> int:
        """Return the number of slots that its group still needs, besides reserved ones."""
        group = self.groups.get(wish.group, ModelGroup())
        return (
            1
            if not wish.group or group.is_parted or wish.group in self.reserved
            else max(1, wish.group_size - group.granted)
        )

    def reserve(self, wish: SessionRequest, count: int, home: ModelWorker | None = None) -> None:
        _, _, until = self.reserved.pop(wish.group, (wish.environment, 0, self.now + TOGETHER_S))
        home = self.homes.pop(wish.group, home)
        if count > 0:
            self.reserved[wish.group] = (wish.environment, count, until)
            if home is not None:
                self.homes[wish.group] = home

    def to_come(self, environment: EnvironmentName) -> int:
        count = sum(count for other, count, _ in self.reserved.values() if other == environment)
        return count + self.missing(self.waiting(environment))

    def missing(self, waiting: list[SessionRequest]) -> int:
        """Return the number of members of waiting groups that have not come."""
        count = 0
        for group in {wish.group for wish in waiting if wish.group}:
            of_it = [wish for wish in waiting if wish.group == group]
            count += max(0, self.need(of_it[0]) - len(of_it))
        return count

    def claim(self, wish: SessionRequest) -> bool:
        """Claim a slot for *wish*. Return True if it gets one immediately."""
        if self.free(wish.environment) is None:
            return False
        kept = self.reserved[wish.group][1] if wish.group in self.reserved else 0
        need = self.need(wish)
        if self.is_over_limit(wish):
            return False
        if kept:
            worker = self.place(wish.environment, self.homes.get(wish.group))
            self.reserve(wish, kept - 1)
            self.grant(wish, worker)
            return True
        firsts = [first for first, _ in self.turns(wish.environment)]
        if any(first.owner == wish.owner or not self.is_over_limit(first) for first in firsts):
            return False
        if self.available(wish.environment) < need:
            return False
        home = self.roomy(wish.environment, need) if need > 1 else None
        self.grant(wish, self.place(wish.environment, home))
        if need > 1:
            self.reserve(wish, need - 1, home)
        return True

    def next(self, environment: EnvironmentName) -> tuple[list[tuple[SessionRequest, float]], int, int]:
        """Return the claims that get slots now, and for their group the slots to reserve and the absent members."""
        if available := self.available(environment):
            for place in self.turns(environment):
                wish = place[0]
                found = self.turn_of(place, min(available, self.allowed(wish)))
                if found[0]:
                    return found
                is_parted = wish.group in self.groups and self.groups[wish.group].is_parted
                is_gathering = wish.group and not is_parted and 2 * self.come(wish) < wish.group_size
                if not is_gathering and not self.is_over_limit(wish):
                    return found
        return [], 0, 0

    def turn_of(
        self, place: tuple[SessionRequest, float], available: int
    ) -> tuple[list[tuple[SessionRequest, float]], int, int]:
        """Return what `next` returns, if it is the turn of *place*."""
        wish, need = place[0], self.need(place[0])
        if not available:
            return [], 0, 0
        if not wish.group:
            return [place], 0, 0
        of_it = [other for other in self.queue if other[0].group == wish.group][:need]
        absent = need - len(of_it)
        if available >= need:
            return of_it, absent, absent
        group = self.known(wish)
        if group.kept_since is None:
            group.kept_since, group.came = self.now, self.come(wish)
        if self.now - group.kept_since < TOGETHER_S:
            return [], 0, 0
        group.is_parted = True
        if absent > self.come(wish):
            self.unfilled[wish.owner] = self.now + UNFILLED_S
        return of_it[:available], 0, absent

    def grant(self, wish: SessionRequest, worker: ModelWorker) -> None:
        if wish.group:
            self.known(wish).granted += 1
            left = max(0, wish.group_size - self.known(wish).granted)
            if wish.group in self.reserved and self.reserved[wish.group][1] > left:
                self.reserve(wish, left)
        self.closed.pop(wish.id, None)
        self.sessions[wish.id] = ModelSession(wish, worker, self.now + wish.setup_s)
        worker.uses += 1
        if worker.uses == worker.max_uses:
            worker.state = WorkerState.DRAINING

    def heads(self, owners: set[Owner]) -> list[EnvironmentName]:
        """Return the environments in which *owners* wait, in order of arrival."""
        return list(dict.fromkeys(wish.environment for wish, _ in self.queue if wish.owner in owners))

    def load(self) -> None:
        """Serve all environments until nothing changes."""
        waiting = len(self.queue) + 1
        while len(self.queue) < waiting:
            waiting = len(self.queue)
            self.serve(CODING, MATH)

    def serve(self, *environments: EnvironmentName) -> None:
        """Serve *environments* in this order."""
        for environment in environments:
            while True:
                places, kept, absent = self.next(environment)
                if not places:
                    break
                whose = (environment, places[0][0].owner)
                self.current[environment] = max(self.current.get(environment, 0), self.rounds[whose])
                self.rounds[whose] = self.current[environment] + len(places) + absent
                self.leave(places)
                together = len(places) + kept
                home = self.roomy(environment, together) if together > 1 else None
                for wish, _ in places:
                    self.grant(wish, self.place(environment, home))
                if kept:
                    self.reserve(places[0][0], kept, home)

    def end(self, id: str, reason: CloseReason) -> None:
        del self.sessions[id]
        if reason not in BY_TRAINER:
            self.closed[id] = (reason, self.now + CLOSED_KEPT_S)

    def tidy(self) -> None:
        self.abandon([(wish, until) for wish, until in self.queue if until <= self.now])
        for group, (_, count, until) in list(self.reserved.items()):
            if until <= self.now:
                del self.reserved[group]
                self.homes.pop(group, None)
                self.groups.setdefault(group, ModelGroup()).is_parted = True
                self.groups[group].until = self.now + GROUP_KEPT_S
                waiting = sum(wish.group == group for wish, _ in self.queue)
                if count > self.groups[group].granted + waiting:
                    self.unfilled[Owner(group.split(" ", 2)[2])] = self.now + UNFILLED_S
        self.groups = {id: group for id, group in self.groups.items() if group.until > self.now}
        self.breakers = {environment: until for environment, until in self.breakers.items() if until > self.now}
        self.closed = {id: (reason, until) for id, (reason, until) in self.closed.items() if until > self.now}

    def of(self, id: str) -> ModelWorker | None:
        return next((worker for worker in self.workers if worker.id == id), None)


class StoreMachine(RuleBasedStateMachine):
    """Applies each operation to a store and to the model, and compares their content after each."""

    server: ClassVar[RedisServer | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.model = Model()
        #: Claims without an answer, or with an answer that the test has not read, by lease.
        self.claims: dict[str, tuple[SessionRequest, asyncio.Task[Session]]] = {}

    @initialize()
    def start(self) -> None:
        self.world: World = MemoryWorld() if self.server is None else RedisWorld(self.server)
        self.store = self.run(self._opened_store())

    async def _opened_store(self) -> Store:
        return await self.world.open(queue_max=QUEUE_MAX, closed_kept_s=CLOSED_KEPT_S, closing_s=CLOSING_S)

    def teardown(self) -> None:
        for _, task in self.claims.values():
            task.cancel()
        if self.claims:
            self.run(asyncio.wait([task for _, task in self.claims.values()]))
        self.run(self.world.aclose())
        self.runner.close()

    async def _is_queued(self, id: str) -> bool:
        if isinstance(self.store, MemoryStore):
            return id in self.store._slots.tickets
        assert isinstance(self.world, RedisWorld)
        with self.world.server.client() as client:
            return bool(client.exists(f"{{{self.world.prefix}}}:ticket:{id}"))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        # Not `Runner.run`: it installs and removes a signal handler, which takes longer than the work.
        return self.runner.get_loop().run_until_complete(work)

    # -- the request path ---------------------------------------------------------------------------------------

    @rule(
        id=ids,
        owner=owners,
        environment=environments,
        idle_s=hundreds,
        setup_s=hundreds,
        waits=st.booleans(),
        group=groups,
    )
    def claim(
        self,
        id: str,
        owner: Owner,
        environment: EnvironmentName,
        idle_s: float,
        setup_s: float,
        waits: bool,
        group: tuple[str, int],
    ) -> None:
        wish = of_owner(opening(id, environment=environment, idle_s=idle_s, setup_s=setup_s), owner)
        wish = of_group(wish, *group)
        model = self.model
        error: type[GatewayError] | None = None
        queued = False
        if id in model.sessions or id in {other.id for other, _ in model.queue}:
            error = SessionExists
        else:
            wish = model.individually(wish)
            model.arrivals[environment] += not model.is_over_limit(wish)
            if model.claim(wish):
                model.hits[environment] += 1
            elif environment in model.breakers:
                error = EnvironmentUnavailable
            elif waits and not model.is_full(wish):
                model.reserve(wish, 0)
                model.enter(wish)
                model.serve(environment)
                queued = wish in [other for other, _ in model.queue]
            else:
                error = PoolExhausted

        task = self.run(self._claim(wish, WAIT_S if waits else 0.0, queued))
        if error is not None:
            assert type(task.exception()) is error
        else:
            self.claims[wish.lease] = (wish, task)

    async def _claim(self, wish: SessionRequest, wait_s: float, queued: bool) -> asyncio.Task[Session]:
        task = asyncio.create_task(self.store.claim(wish, wait_s=wait_s))
        if not queued:
            await asyncio.wait({task})
            return task
        for _ in range(TURNS):
            if await self._is_queued(wish.id):
                return task
            await asyncio.sleep(0)
        raise AssertionError("the claim did not join the queue")

    @rule(data=st.data())
    def hang_up(self, data: st.DataObject) -> None:
        waits = [lease for lease, (_, task) in self.claims.items() if not task.done()]
        if not waits:
            return
        wish, task = self.claims.pop(data.draw(st.sampled_from(waits)))
        self.model.abandon([place for place in self.model.queue if place[0] is wish])
        self.model.serve(wish.environment)
        task.cancel()
        self.run(asyncio.wait({task}))
        assert task.cancelled()

    @rule(id=ids, stale=st.booleans(), handle=handles)
    def opened(self, id: str, stale: bool, handle: str) -> None:
        session = self.model.sessions.get(id)
        lease = session.wish.lease if session is not None and not stale else "stale"
        work = self.store.opened(SessionId(id), lease, handle=handle)
        if session is None or stale:
            with pytest.raises(SessionNotFound):
                self.run(work)
        elif session.state is SessionState.CLOSING:
            with pytest.raises(SessionClosed):
                self.run(work)
        else:
            if session.state is SessionState.OPENING:
                session.state, session.handle = SessionState.OPEN, handle
            session.deadline = self.model.now + session.wish.idle_s
            found = self.run(work)
            assert (found.state, found.handle) == (SessionState.OPEN, session.handle)

    @rule(id=ids, stale=st.booleans(), was=handles, handle=handles)
    def rebind(self, id: str, stale: bool, was: str, handle: str) -> None:
        session = self.model.sessions.get(id)
        lease = session.wish.lease if session is not None and not stale else "stale"
        rebound = self.run(self.store.rebind(SessionId(id), lease, was=was, handle=handle))
        is_open = session is not None and not stale and session.state is SessionState.OPEN
        assert rebound is (is_open and session is not None and session.handle == was)
        if rebound and session is not None:
            session.handle = handle

    @rule(noted=st.lists(st.tuples(ids, st.sampled_from([0.0, 100.0, 200.0])), max_size=4, unique_by=lambda n: n[0]))
    def touch(self, noted: list[tuple[str, float]]) -> None:
        gone = []
        for id, quiet_s in noted:
            session = self.model.sessions.get(id)
            if session is None or session.state is not SessionState.OPEN:
                gone.append(id)
            else:
                session.deadline = max(session.deadline, self.model.now - quiet_s + session.wish.idle_s)
        assert self.run(self.store.touch([Activity(SessionId(id), quiet_s) for id, quiet_s in noted])) == gone

    @rule(id=ids, reason=reasons)
    def begin_close(self, id: str, reason: CloseReason) -> None:
        closing = self.run(self.store.begin_close(SessionId(id), reason))
        session = self.model.sessions.get(id)
        if session is None or session.state is SessionState.CLOSING:
            assert closing is None
            return
        session.state, session.reason, session.deadline = SessionState.CLOSING, reason, self.model.now + CLOSING_S
        assert closing is not None
        assert (closing.id, closing.lease, closing.reason) == (id, session.wish.lease, reason)
        assert closing.handle == session.handle

    @rule(id=ids, stale=st.booleans())
    def release(self, id: str, stale: bool) -> None:
        session = self.model.sessions.get(id)
        lease = session.wish.lease if session is not None and not stale else "stale"
        released = self.run(self.store.release(SessionId(id), lease))
        assert released is (session is not None and not stale and session.state is SessionState.CLOSING)
        if released and session is not None and session.reason is not None:
            self.model.end(id, session.reason)
            owner = session.wish.owner
            self.model.serve(*self.model.heads({owner}), session.worker.environment)

    @rule(
        id=ids,
        successor=ids,
        owner=owners,
        keeps_owner=st.booleans(),
        environment=environments,
        stale=st.booleans(),
        group=groups,
    )
    def hand_over(
        self,
        id: str,
        successor: str,
        owner: Owner,
        keeps_owner: bool,
        environment: EnvironmentName,
        stale: bool,
        group: tuple[str, int],
    ) -> None:
        session = self.model.sessions.get(id)
        lease = session.wish.lease if session is not None and not stale else "stale"
        before = session.wish.owner if session is not None else owner
        wish = of_owner(opening(successor, environment=environment), before if keeps_owner else owner)
        wish = of_group(wish, *group)
        work = self.store.hand_over(SessionId(id), lease, wish)
        if (
            session is None
            or stale
            or session.state is not SessionState.CLOSING
            or session.worker.environment != environment
            or session.worker.state is not WorkerState.READY
            or self.model.used(session.worker) > session.worker.slots
            or (wish.owner != before and not self.model.allowed(wish))
        ):
            assert self.run(work) is None
            return
        known = {*self.model.sessions, *(other.id for other, _ in self.model.queue)}
        if successor != id and successor in known:
            with pytest.raises(SessionExists):
                self.run(work)
            return
        begun = self.run(work)
        assert begun is not None
        assert (begun.id, begun.lease, begun.state, begun.handle) == (wish.id, wish.lease, SessionState.OPENING, "")
        assert session.reason is not None
        self.model.end(id, session.reason)
        self.model.grant(wish, session.worker)
        self.model.serve(*(self.model.heads({before}) if wish.owner != before else []))
        self.model.serve(*([environment] if wish.group else []))

    # -- the control loop ---------------------------------------------------------------------------------------

    @rule(seconds=hundreds)
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)
        self.model.now += seconds
        self.model.tidy()
        self.model.load()
        # Expired places leave a queue when the store reads it, as the control loop does each second.
        self.run(self.store.load())

    @rule()
    def due(self) -> None:
        late = {id: s for id, s in self.model.sessions.items() if s.deadline <= self.model.now}
        open_ones = {id for id, session in late.items() if session.state is SessionState.OPEN}
        assert {session.id for session in self.run(self.store.late(100))} == open_ones
        for session in late.values():
            expired = CloseReason.EXPIRED if session.state is SessionState.OPEN else CloseReason.OPEN_FAILED
            session.reason = session.reason or expired
            session.state, session.deadline = SessionState.CLOSING, self.model.now + CLOSING_S
        found = {session.id: (session.reason, session.handle) for session in self.run(ended_late(self.store, 100))}
        assert found == {id: (session.reason, session.handle) for id, session in late.items()}

    @rule(id=worker_ids, environment=environments, slots=st.integers(1, 3), max_uses=st.integers(0, 4))
    def add_worker(self, id: str, environment: EnvironmentName, slots: int, max_uses: int) -> None:
        self.run(self.store.add_worker(a_worker(id, environment=environment, slots=slots, max_uses=max_uses)))
        if self.model.of(id) is None:
            self.model.workers.append(ModelWorker(id, environment, slots, max_uses))

    @rule(id=worker_ids, slots=st.sampled_from([0, 0, 1, 4]))
    def worker_ready(self, id: str, slots: int) -> None:
        worker = self.model.of(id)
        became = self.run(self.store.worker_ready(WorkerId(id), f"unix:/run/{id}.sock", slots=slots))
        assert became is (worker is not None and worker.state is WorkerState.STARTING)
        if became and worker is not None:
            worker.state = WorkerState.READY
            worker.slots = slots or worker.slots
            self.model.breakers.pop(worker.environment, None)
            self.model.serve(worker.environment)

    @rule(id=worker_ids)
    def pause_worker(self, id: str) -> None:
        worker = self.model.of(id)
        if worker is not None and worker.state is WorkerState.READY and not self.model.used(worker):
            worker.state = WorkerState.PAUSED
        paused = self.run(self.store.pause_worker(WorkerId(id)))
        assert paused is (worker is not None and worker.state is WorkerState.PAUSED)

    @rule(id=worker_ids)
    def suspect_worker(self, id: str) -> None:
        worker = self.model.of(id)
        if worker is not None and worker.state is WorkerState.READY:
            worker.state = WorkerState.SUSPECT
        suspected = self.run(self.store.suspect_worker(WorkerId(id)))
        assert suspected is (worker is not None and worker.state is WorkerState.SUSPECT)

    @rule(id=worker_ids)
    def wake_worker(self, id: str) -> None:
        worker = self.model.of(id)
        woken = self.run(self.store.wake_worker(WorkerId(id)))
        assert woken is (worker is not None and worker.state in (WorkerState.PAUSED, WorkerState.SUSPECT))
        if woken and worker is not None:
            worker.state = WorkerState.READY
            self.model.breakers.pop(worker.environment, None)
            self.model.serve(worker.environment)

    @rule(id=worker_ids, slots=st.integers(0, 3))
    def limit_worker(self, id: str, slots: int) -> None:
        self.run(self.store.limit_worker(WorkerId(id), slots))
        worker = self.model.of(id)
        if worker is not None and max(1, slots) < worker.slots:
            worker.slots, worker.is_limited = max(1, slots), True

    @rule(id=worker_ids, only_if_idle=st.booleans())
    def drain_worker(self, id: str, only_if_idle: bool) -> None:
        worker = self.model.of(id)
        if worker is not None and not (only_if_idle and self.model.used(worker)):
            worker.state = WorkerState.DRAINING
        drains = self.run(self.store.drain_worker(WorkerId(id), only_if_idle=only_if_idle))
        assert drains is (worker is not None and worker.state is WorkerState.DRAINING)

    @rule(id=worker_ids)
    def remove_worker(self, id: str) -> None:
        worker = self.model.of(id)
        lost = {key: s for key, s in self.model.sessions.items() if s.worker is worker}
        for key, session in lost.items():
            session.reason = session.reason or CloseReason.WORKER_LOST
            self.model.end(key, session.reason)
        if worker is not None:
            self.model.workers.remove(worker)
        self.model.serve(*self.model.heads({session.wish.owner for session in lost.values()}))
        ended = self.run(self.store.remove_worker(WorkerId(id), CloseReason.WORKER_LOST))
        assert (ended is None) == (worker is None)
        assert {session.id: (session.reason, session.handle) for session in ended or ()} == {
            key: (session.reason, session.handle) for key, session in lost.items()
        }

    @rule(environment=environments)
    def fail_waiting(self, environment: EnvironmentName) -> None:
        wishes = self._emptied(environment)
        assert self.run(self.store.fail_waiting(environment, "broken")) == len(wishes)
        self._failed(wishes)

    @rule(environment=environments, for_s=hundreds)
    def open_breaker(self, environment: EnvironmentName, for_s: float) -> None:
        wishes = self._emptied(environment)
        self.model.breakers[environment] = self.model.now + for_s
        self.run(self.store.fail_waiting(environment, "broken", for_s=for_s))
        self._failed(wishes)

    def _emptied(self, environment: EnvironmentName) -> list[SessionRequest]:
        places = [place for place in self.model.queue if place[0].environment == environment]
        self.model.leave(places)
        return [wish for wish, _ in places]

    def _failed(self, wishes: list[SessionRequest]) -> None:
        for wish in wishes:
            _, task = self.claims.pop(wish.lease)
            self.run(asyncio.wait({task}))
            assert isinstance(task.exception(), EnvironmentUnavailable)

    # -- several operations in one step, which random steps rarely reach one by one ------------------------------------

    @rule(wishes=st.lists(st.tuples(ids, owners, environments, groups), min_size=2, max_size=5))
    def claim_several(self, wishes: list[tuple[str, Owner, EnvironmentName, tuple[str, int]]]) -> None:
        for id, owner, environment, group in wishes:
            self.claim(id, owner, environment, 200.0, 200.0, True, group)

    @rule(id=worker_ids, environment=environments, slots=st.integers(2, 4))
    def begin_worker(self, id: str, environment: EnvironmentName, slots: int) -> None:
        self.add_worker(id, environment, slots, 0)
        self.worker_ready(id, 0)

    @rule(data=st.data())
    def end_session(self, data: st.DataObject) -> None:
        if self.model.sessions:
            id = data.draw(st.sampled_from(sorted(self.model.sessions)))
            self.begin_close(id, CloseReason.DELETED)
            self.release(id, False)

    # -- comparison ---------------------------------------------------------------------------------------------

    @invariant()
    def workers_and_queues_are_the_same(self) -> None:
        load = self.run(self.store.load())
        self.model.load()
        entries = [entry for environment in load.values() for entry in environment.workers]
        assert sorted((e.worker.id, e.worker.state, e.worker.slots, e.used) for e in entries) == sorted(
            (worker.id, worker.state, worker.slots, self.model.used(worker)) for worker in self.model.workers
        )
        limited = {worker.id for worker in self.model.workers if worker.is_limited}
        assert all(entry.used <= entry.worker.slots for entry in entries if entry.worker.id not in limited)
        for name in (MATH, CODING):
            waits = load[name].waiting if name in load else 0
            assert waits == len(self.model.waiting(name))
            assert not self.model.next(name)[0], "a slot is free and somebody waits for it"
            assert (load[name].to_come if name in load else 0) == self.model.to_come(name)
            assert (load[name].over_limit if name in load else 0) == self.model.over_limit(name)
            asked = (load[name].arrivals, load[name].hits) if name in load else (0, 0)
            assert asked == (self.model.arrivals[name], self.model.hits[name])
            broken_s = load[name].broken_s if name in load else 0.0
            left_s = self.model.breakers.get(name, self.model.now) - self.model.now
            assert left_s - 60 < broken_s <= left_s
        self.those_that_wait_are_the_ones_that_should()  # the load may have granted some slots

    @invariant()
    def no_owner_holds_more_than_its_limits_and_no_slot_is_free_for_a_waiting_one(self) -> None:
        found = self.run(self.store.sessions())
        for owner, limits in LIMITS.items():
            in_all = [session.environment for session in found if session.owner == owner]
            for limit, held in (
                (limits[0], len(in_all)),
                *((limits[1], in_all.count(name)) for name in (MATH, CODING)),
            ):
                assert not limit or held <= limit
        for name in (MATH, CODING):
            firsts = [wish for wish, _ in self.model.turns(name) if not wish.group and self.model.allowed(wish)]
            groups = [wish for wish, _ in self.model.turns(name) if wish.group and not self.model.is_over_limit(wish)]
            assert groups or not firsts or not self.model.available(name)

    @invariant()
    def sessions_are_the_same(self) -> None:
        found = {s.id: (s.state, s.worker, s.handle) for s in self.run(self.store.sessions())}
        assert found == {id: (s.state, s.worker.id, s.handle) for id, s in self.model.sessions.items()}
        for n in range(7):
            self._look_up(f"s{n}")

    def _look_up(self, id: str) -> None:
        session = self.model.sessions.get(id)
        work = self.store.find(SessionId(id))
        if session is not None:
            found = self.run(work)
            assert (found.lease, found.state, found.reason) == (session.wish.lease, session.state, session.reason)
            assert found.handle == session.handle
        elif id in self.model.closed:
            with pytest.raises(SessionClosed) as caught:
                self.run(work)
            assert caught.value.reason == self.model.closed[id][0]
        else:
            with pytest.raises(SessionNotFound):
                self.run(work)

    @invariant()
    def those_that_wait_are_the_ones_that_should(self) -> None:
        waits = {wish.lease for wish, _ in self.model.queue}
        for lease, (wish, task) in list(self.claims.items()):
            if lease in waits:
                assert not task.done()
                continue
            # Served or expired: the model knows which, and the claim must know it soon.
            del self.claims[lease]
            self.run(asyncio.wait({task}, timeout=HANG_S))
            assert task.done(), "a claim was settled and not woken"
            outcome = task.exception() or task.result()
            if isinstance(outcome, Session):
                assert (outcome.id, outcome.lease) == (wish.id, lease)
            else:
                assert isinstance(outcome, GatewayError)
                assert outcome.retryable


def of_owner(wish: SessionRequest, owner: Owner) -> SessionRequest:
    """Return *wish* as a request of *owner*, with its limits."""
    most, most_here = LIMITS[owner]
    return replace(wish, owner=owner, max_sessions=most, max_here=most_here)


def of_group(wish: SessionRequest, group: str, size: int) -> SessionRequest:
    """Return *wish* as a member of a group. All members have the same owner and environment."""
    if not group:
        return wish
    return replace(wish, group=f"{group} {wish.environment} {wish.owner}", group_size=size, together_s=TOGETHER_S)


def walk(machine: type[StoreMachine], *, examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=os.environ.get("CI") == "true",
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_memory_store_agrees_with_the_model() -> None:
    walk(StoreMachine, examples=120, steps=50)


@pytest.fixture
def redis_machine(redis_server: RedisServer) -> type[StoreMachine]:
    class RedisMachine(StoreMachine):
        server = redis_server

    return RedisMachine


@pytest.mark.redis
def test_the_redis_store_agrees_with_the_model(redis_machine: type[StoreMachine]) -> None:
    walk(redis_machine, examples=25, steps=50)
