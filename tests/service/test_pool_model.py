"""Random walks over a whole gateway: trainers create, step, idle, hang up and delete, while workers die, the engine
goes away, replicas are killed or frozen, and Redis loses its data.

There is no separate model that would have to be right as well. After each rule the test compares the store, the workers
and the trainers with each other. At the end nothing may be left. ``FAULTS_SCALE`` multiplies the number of walks.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.stateful import run_state_machine_as_test as walk

from gateway.core.ids import EnvironmentName, Owner
from gateway.core.leader_lease import LEASE_S
from gateway.core.session import CloseReason
from tests.contract.store_worlds import MemoryWorld, RedisServer, RedisWorld
from tests.service.pool_parts import BIG, MATH, SOLO, Episode
from tests.service.pool_world import PoolWorld, picked

pytest_plugins = ["tests.contract.store_fixtures"]

T = TypeVar("T")
SCALE = float(os.environ.get("FAULTS_SCALE", "1"))


@dataclass(frozen=True)
class Wish:
    """The arguments of a move. Each move uses the fields that it needs."""

    owner: Owner
    name: str
    kind: EnvironmentName
    pick: int
    """Number that selects one of the candidates, such as a session or a worker."""
    by: int
    """Number that selects the replica that serves the move."""
    how: str


MOVES = (
    *("create",) * 6,
    *("step",) * 5,
    *("step_slowly",) * 3,
    *("create_badly",) * 2,
    *("hang_up",) * 2,
    *("hang_up_in_a_step",) * 2,
    *("delete",) * 3,
    *("open_gates",) * 2,
    *("pass_little_time", "pass_time", "pass_time", "pass_much_time"),
    *("kill_a_worker",) * 2,
    *("lose_a_worker", "engine_goes", "engine_comes_back", "engine_comes_back", "audit", "change_the_make"),
    *("restart", "freeze_or_thaw", "freeze_or_thaw", "lose_data", "lose_data"),
)
wishes = st.builds(
    Wish,
    owner=st.sampled_from([Owner("lab"), Owner("b")]),
    name=st.sampled_from(["one", "two", "three"]),
    kind=st.sampled_from([MATH, MATH, BIG, SOLO]),
    pick=st.integers(0, 7),
    by=st.integers(0, 1),
    how=st.sampled_from(["gate", "fail", "die"]),
)


class GatewayMachine(RuleBasedStateMachine):
    """Breaks a gateway on one store. After each rule all parts must settle and satisfy the invariants."""

    server: ClassVar[RedisServer | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.is_well = True

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run *work* in the gateway's event loop. A failure ends the walk."""
        self.is_well = False
        outcome = self.runner.run(work)
        self.is_well = True
        return outcome

    @initialize(replicas=st.integers(1, 2))
    def begin(self, replicas: int) -> None:
        self.world = PoolWorld(MemoryWorld() if self.server is None else RedisWorld(self.server))
        self.run(self.world.begin(replicas))

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            self.runner.close()
            return
        try:
            if self.is_well:
                self.run(self.world.end())
        finally:
            self.runner.run(self.world.aclose())
            self.runner.close()

    @rule(move=st.sampled_from(MOVES), wish=wishes)
    def do(self, move: str, wish: Wish) -> None:
        """Run one move. All moves share a rule, because Hypothesis picks rules equally often and leaves some out."""
        self.run(getattr(self, move)(wish))

    # -- trainers -------------------------------------------------------------------------------------------------

    async def create(self, wish: Wish) -> None:
        for process in picked(wish.by, self.world.alive()):
            self.world.create(wish.owner, wish.name, wish.kind, process)

    async def create_badly(self, wish: Wish) -> None:
        """Create a session whose task waits in its worker, fails there, or kills the worker with all its sessions."""
        for process in picked(wish.by, self.world.alive()):
            if wish.how == "die":
                for episode in self.world.episodes.values():
                    if episode.kind == wish.kind:
                        episode.doom = episode.doom or "its neighbour killed its worker"
            self.world.create(wish.owner, wish.name, wish.kind, process, on_create=wish.how)

    async def hang_up(self, wish: Wish) -> None:
        alive = self.world.alive()
        pending = [one for one in self.world.episodes.values() if not one.creating.done() and one.process in alive]
        for episode in picked(wish.pick, pending):
            await self.world.hang_up(episode)

    async def step(self, wish: Wish) -> None:
        for episode in picked(wish.pick, self._open()):
            for process in picked(wish.by, self.world.alive()):
                await self.world.over(self.world.step(episode, process))

    async def step_slowly(self, wish: Wish) -> None:
        for episode in picked(wish.pick, [one for one in self._open() if one.stepping is None]):
            for process in picked(wish.by, self.world.alive()):
                episode.stepping = self.world.step(episode, process, tool="quiet")

    async def hang_up_in_a_step(self, wish: Wish) -> None:
        """Let a trainer hang up during a step: the step continues in the worker, and the session stays."""
        alive = self.world.alive()
        slow = [one for one in self._open() if one.stepping is not None and one.by in alive]
        for episode in picked(wish.pick, slow):
            assert episode.stepping is not None
            episode.stepping.cancel()
            await self.world.over(episode.stepping)

    async def open_gates(self, _: Wish) -> None:
        self.world.open_gates()

    async def delete(self, wish: Wish) -> None:
        for episode in picked(wish.pick, self._open()):
            for process in picked(wish.by, self.world.alive()):
                await self.world.delete(episode, process)

    def _open(self) -> list[Episode]:
        return [one for one in self.world.episodes.values() if one.session is not None]

    # -- time, and what breaks ------------------------------------------------------------------------------------

    async def pass_little_time(self, _: Wish) -> None:
        await self.world.pass_time(4.0)

    async def pass_time(self, _: Wish) -> None:
        await self.world.pass_time(40.0)

    async def pass_much_time(self, _: Wish) -> None:
        await self.world.pass_time(400.0)

    async def kill_a_worker(self, wish: Wish) -> None:
        """Let a worker die, alone or for lack of memory. The engine reports the death."""
        reason = CloseReason.OUT_OF_MEMORY if wish.how == "fail" else CloseReason.WORKER_LOST
        for worker in picked(wish.pick, self.world.running()):
            await self.world.kill_worker(worker, announced=True, reason=reason)

    async def lose_a_worker(self, wish: Wish) -> None:
        """Let a worker die without a report by the engine."""
        for worker in picked(wish.pick, self.world.running()):
            await self.world.kill_worker(worker, announced=False, reason=CloseReason.WORKER_LOST)

    async def engine_goes(self, _: Wish) -> None:
        self.world.engine.is_down = True

    async def engine_comes_back(self, _: Wish) -> None:
        self.world.engine.is_down = False

    async def restart(self, wish: Wish) -> None:
        """Kill a replica and start another replica once the leadership of the first has expired."""
        for process in picked(wish.by, self.world.processes):
            await self.world.kill(process)
            await self.world.pass_time(LEASE_S + 1)
            await self.world.start()

    async def freeze_or_thaw(self, wish: Wish) -> None:
        """Freeze one of two replicas for longer than its leadership lasts, or thaw it."""
        if len(self.world.alive()) < len(self.world.processes):
            self.world.thaw()
        elif len(self.world.processes) == 2:
            self.world.freeze(self.world.processes[wish.by])
            await self.world.pass_time(LEASE_S + 1)

    async def audit(self, wish: Wish) -> None:
        if not self.world.engine.is_down:
            for process in picked(wish.by, self.world.alive()):
                await self.world.audit(process)

    async def change_the_make(self, wish: Wish) -> None:
        self.world.change(SOLO if wish.kind == SOLO else MATH)

    async def lose_data(self, _: Wish) -> None:
        if self.server is not None and not self.world.engine.is_down:
            self.world.lose_data()

    # -- what must hold -------------------------------------------------------------------------------------------

    @invariant()
    def all_comes_to_rest(self) -> None:
        if hasattr(self, "world"):
            self.run(self.world.settle())


@pytest.fixture(autouse=True)
def quick_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the loops fifty times a second. Their decisions stay the same, and a walk of 30 rules takes a second."""
    monkeypatch.setattr("gateway.pool.loop.TICK_S", 0.02)
    monkeypatch.setattr("gateway.sessions.cache.TICK_S", 0.1)
    monkeypatch.setattr("gateway.pool.recovery.GRACE_S", 0.3)
    monkeypatch.setattr("gateway.pool.starts.backoff_s", lambda failures: 0.02)


def walks(examples: int, steps: int = 30) -> settings:
    return settings(
        max_examples=max(1, round(examples * SCALE)),
        stateful_step_count=steps,
        derandomize=os.environ.get("CI") == "true",
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],  # no shrinking: each shorter walk that fails waits for its deadline
        print_blob=True,
    )


def test_a_gateway_on_the_memory_store_keeps_its_invariants() -> None:
    walk(GatewayMachine, settings=walks(24))


@pytest.fixture
def redis_machine(redis_server: RedisServer) -> type[GatewayMachine]:
    class RedisMachine(GatewayMachine):
        server = redis_server

    return RedisMachine


@pytest.mark.redis
def test_a_gateway_on_redis_keeps_its_invariants(redis_machine: type[GatewayMachine]) -> None:
    walk(redis_machine, settings=walks(6))
