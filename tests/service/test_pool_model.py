"""Random walks over a whole gateway: trainers create, step, idle, hang up and delete, while workers die, the engine goes
away, replicas are killed or frozen, and Redis loses its data.

There is no model beside it that would have to be right as well: after each rule the parts are compared with each other
(store, workers, trainers), and at the end nothing may be left. ``FAULTS_SCALE`` makes the walks more.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as walk

from gateway.core.model import CloseReason, EnvironmentName, Owner
from gateway.pool import LEAD_S
from tests.contract.store_worlds import MemoryWorld, RedisServer, RedisWorld
from tests.service.pool_world import BIG, MATH, SOLO, Episode, PoolWorld, picked

pytest_plugins = ["tests.contract.store_fixtures"]

T = TypeVar("T")
SCALE = float(os.environ.get("FAULTS_SCALE", "1"))
picks = st.integers(0, 7)
owners = st.sampled_from([Owner("lab"), Owner("b")])
names = st.sampled_from(["one", "two", "three"])
kinds = st.sampled_from([MATH, MATH, BIG, SOLO])
seconds = st.sampled_from([4.0, 40.0, 40.0, 100.0, 400.0])
reasons = st.sampled_from([CloseReason.WORKER_LOST, CloseReason.OUT_OF_MEMORY])


class GatewayMachine(RuleBasedStateMachine):
    """Breaks a gateway on one store; after each rule all must come to rest, and be as it should."""

    server: ClassVar[RedisServer | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.is_well = True

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do a thing in the gateway's event loop; what fails is the end of the walk."""
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

    # -- trainers -------------------------------------------------------------------------------------------------

    @rule(owner=owners, name=names, kind=kinds, pick=picks)
    def create(self, owner: Owner, name: str, kind: EnvironmentName, pick: int) -> None:
        for process in picked(pick, self.world.alive()):
            self.run(self._create(owner, name, kind, process))

    @rule(owner=owners, name=names, kind=kinds, pick=picks, how=st.sampled_from(["gate", "fail", "die"]))
    def create_badly(self, owner: Owner, name: str, kind: EnvironmentName, pick: int, how: str) -> None:
        for process in picked(pick, self.world.alive()):
            if how == "die":
                self._doom(kind)
            self.run(self._create(owner, name, kind, process, on_create=how))

    async def _create(self, owner: Owner, name: str, kind: EnvironmentName, process: Any, **spec: Any) -> None:
        self.world.create(owner, name, kind, process, **spec)
        await asyncio.sleep(0)

    def _doom(self, kind: EnvironmentName) -> None:
        """A task that kills its worker takes those beside it along."""
        for episode in self.world.episodes.values():
            if episode.kind == kind:
                episode.doom = episode.doom or "its neighbour killed its worker"

    @rule(pick=picks)
    def hang_up(self, pick: int) -> None:
        episodes = [one for one in self.world.episodes.values() if not one.creating.done() and self._is_up(one)]
        for episode in picked(pick, episodes):
            self.run(self.world.hang_up(episode))

    @rule(pick=picks, by=picks)
    def step(self, pick: int, by: int) -> None:
        for episode in picked(pick, self._open()):
            for process in picked(by, self.world.alive()):
                self.run(self._stepped(episode, process))

    async def _stepped(self, episode: Episode, process: Any) -> None:
        stepping = self.world.step(episode, process)
        await asyncio.wait({stepping}, timeout=20)
        assert stepping.done(), "a step that nothing holds up does not end"

    @rule(pick=picks, by=picks)
    def step_slowly(self, pick: int, by: int) -> None:
        for episode in picked(pick, [one for one in self._open() if one.stepping is None]):
            for process in picked(by, self.world.alive()):
                self.run(self._step_slowly(episode, process))

    async def _step_slowly(self, episode: Episode, process: Any) -> None:
        episode.stepping = self.world.step(episode, process, tool="quiet")
        await asyncio.sleep(0)

    @rule(pick=picks)
    def hang_up_in_a_step(self, pick: int) -> None:
        """Its trainer leaves: the step goes on in the worker, and the session stays."""
        for episode in picked(pick, [one for one in self._open() if one.stepping is not None and self._is_up(one)]):
            assert episode.stepping is not None
            episode.stepping.cancel()
            self.run(self._ended(episode.stepping))

    @staticmethod
    async def _ended(task: asyncio.Task[Any]) -> None:
        await asyncio.wait({task}, timeout=20)
        assert task.done()

    @rule()
    def open_gates(self) -> None:
        self.run(self._open_gates())

    async def _open_gates(self) -> None:
        self.world.open_gates()

    @rule(pick=picks, by=picks)
    def delete(self, pick: int, by: int) -> None:
        for episode in picked(pick, [one for one in self.world.episodes.values() if one.session is not None]):
            for process in picked(by, self.world.alive()):
                self.run(self.world.delete(episode, process))

    def _open(self) -> list[Episode]:
        return [one for one in self.world.episodes.values() if one.session is not None]

    @staticmethod
    def _is_up(episode: Episode) -> bool:
        return not episode.process.passage.is_frozen

    # -- time, and what breaks ------------------------------------------------------------------------------------

    @rule(seconds=seconds)
    def pass_time(self, seconds: float) -> None:
        self.run(self.world.pass_time(seconds))

    @rule(pick=picks, announced=st.booleans(), reason=reasons)
    def kill_a_worker(self, pick: int, announced: bool, reason: CloseReason) -> None:
        for worker in picked(pick, self.world.running()):
            self.run(self.world.kill_worker(worker, announced=announced, reason=reason))

    @rule(is_down=st.booleans())
    def engine(self, is_down: bool) -> None:
        self.world.engine.is_down = is_down

    @rule(pick=picks)
    def restart(self, pick: int) -> None:
        """A replica is killed, and another one comes: the lead has to run out first."""
        for process in picked(pick, self.world.processes):
            self.run(self._restarted(process))

    async def _restarted(self, process: Any) -> None:
        await self.world.kill(process)
        await self.world.pass_time(LEAD_S + 1)
        await self.world.start()

    @precondition(lambda self: len(self.world.alive()) == 2)
    @rule(pick=picks)
    def freeze(self, pick: int) -> None:
        """One of two hangs, for longer than it may lead."""
        for process in picked(pick, self.world.alive()):
            self.world.freeze(process)
            self.run(self.world.pass_time(LEAD_S + 1))

    @rule()
    def thaw(self) -> None:
        self.world.thaw()

    @rule(pick=picks)
    def audit(self, pick: int) -> None:
        if not self.world.engine.is_down:
            for process in picked(pick, self.world.alive()):
                self.run(self.world.audit(process))

    @rule(name=st.sampled_from([MATH, SOLO]))
    def change_the_make(self, name: EnvironmentName) -> None:
        self.world.change(name)

    @precondition(lambda self: self.server is not None and not self.world.engine.is_down)
    @rule()
    def lose_data(self) -> None:
        self.world.lose_data()

    # -- what must hold -------------------------------------------------------------------------------------------

    @invariant()
    def all_comes_to_rest(self) -> None:
        if hasattr(self, "world"):
            self.run(self.world.settle())


@pytest.fixture(autouse=True)
def quick_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops that look fifty times a second: what is decided is the same, and a walk of 30 rules takes a second."""
    monkeypatch.setattr("gateway.pool.TICK_S", 0.02)
    monkeypatch.setattr("gateway.remembered.TICK_S", 0.1)
    monkeypatch.setattr("gateway.rebuilding.GRACE_S", 0.3)
    monkeypatch.setattr("gateway.starts.backoff_s", lambda failures: 0.02)


def walks(examples: int, steps: int = 30) -> settings:
    return settings(
        max_examples=max(1, round(examples * SCALE)),
        stateful_step_count=steps,
        deadline=None,
        derandomize=os.environ.get("CI") == "true",
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],  # each shorter walk that fails would wait for its deadline, too
        print_blob=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_gateway_on_the_memory_store_keeps_its_word() -> None:
    walk(GatewayMachine, settings=walks(12))


@pytest.fixture
def redis_machine(redis_server: RedisServer) -> type[GatewayMachine]:
    class RedisMachine(GatewayMachine):
        server = redis_server

    return RedisMachine


@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_gateway_on_redis_keeps_its_word(redis_machine: type[GatewayMachine]) -> None:
    walk(redis_machine, settings=walks(6))
