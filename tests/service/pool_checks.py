"""Invariants of a gateway under any failure: the store, the workers and the trainers agree."""

from __future__ import annotations

import contextlib
from collections import Counter

from gateway.core.environment import Environment
from gateway.core.errors import SessionNotFound, StoreUnavailable
from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.session import Session, SessionState
from gateway.core.worker import WorkerLoad, WorkerState
from tests.fakes.eventually import eventually
from tests.fakes.workers import FakeWorker
from tests.service.pool_parts import Engine, Episode, Process


class Checked:
    """The comparisons that a `PoolWorld` makes after each step."""

    engine: Engine
    processes: list[Process]
    episodes: dict[tuple[Owner, str], Episode]
    past: list[Episode]
    cut: set[SessionId]
    silent: set[WorkerId]

    def alive(self) -> list[Process]:
        """Return the processes that are not frozen."""
        return [process for process in self.processes if not process.passage.is_frozen]

    def running(self) -> list[FakeWorker]:
        """Return the running workers, oldest first."""
        return [worker for worker in self.engine.ever.values() if worker.is_running]

    async def sessions(self) -> list[Session]:
        """Return all sessions of the store."""
        return await self.processes[0].store.sessions() if self.processes else []

    async def loads(self) -> list[WorkerLoad]:
        """Return all workers of the store."""
        loads = await self.processes[0].store.load()
        return [entry for load in loads.values() for entry in load.workers]

    async def check_always(self) -> None:
        """Check the invariants that hold at any moment, under any failure."""
        makes: Counter[tuple[EnvironmentName, str]] = Counter()
        for entry in await self.loads():
            assert entry.used <= entry.worker.slots, f"{entry.used} sessions in {entry.worker}"
            makes[entry.worker.environment, entry.worker.digest] += 1
        for (name, digest), count in makes.items():
            kind = self._kind(name)
            assert kind is not None
            assert count <= kind.pool.max_workers, f"{count} workers of {name} {digest}"
        for worker in self.engine.ever.values():
            assert len(worker.sessions) <= worker.worker.slots, f"{worker.worker.id} serves {list(worker.sessions)}"
        twice = [key for key, count in self.engine.calls().items() if count > 1]
        assert not twice, f"steps {twice} ran more than once"
        self._look()

    async def settle(self) -> None:
        """Wait until the parts agree.

        Raises:
            AssertionError: The parts do not agree in time.
        """

        async def check() -> None:
            await self.check_always()
            if self.alive():
                await self._check_settled()

        await eventually(check)

    async def _check_settled(self) -> None:
        try:
            with contextlib.suppress(SessionNotFound):
                await self.processes[0].store.find(SessionId("nobody"))
            sessions = {session.id: session for session in await self.sessions()}
            loads = {entry.worker.id: entry for entry in await self.loads()}
            waiting = {name: load.waiting for name, load in (await self.processes[0].store.load()).items()}
        except StoreUnavailable as error:
            raise AssertionError("the store is not whole") from error
        held = Counter(session.worker for session in sessions.values())
        assert held == {id: entry.used for id, entry in loads.items() if entry.used}
        self._check_workers(sessions, loads)
        self._check_sessions(sessions, loads)
        self._check_waiting(waiting, loads)
        self._check_nothing_lingers(waiting, sessions)
        self._check_episodes(sessions)

    def _check_workers(self, sessions: dict[SessionId, Session], loads: dict[WorkerId, WorkerLoad]) -> None:
        for id, entry in loads.items():
            worker = self.engine.workers.get(id)
            if worker is None or not worker.is_running or entry.worker.state is not WorkerState.READY:
                continue
            assert id not in self.engine.paused, f"{id} is to take sessions and is paused"
            strangers = [sid for sid in worker.sessions if sid not in sessions or sessions[SessionId(sid)].worker != id]
            assert not strangers, f"{id} serves {strangers}, of which the store does not know"

        if self.engine.is_down or len(self.alive()) < len(self.processes):
            return
        for entry in loads.values():
            state = entry.worker.state
            assert state is not WorkerState.STARTING, f"{entry} still starts"
            assert state is not WorkerState.DRAINING or entry.used, f"{entry} is still there"
            # A worker that the store has as paused may run: the engine was away at its pause. The loop resumes it, too.

    def _check_sessions(self, sessions: dict[SessionId, Session], loads: dict[WorkerId, WorkerLoad]) -> None:
        pending = {episode.id for episode in self._episodes() if not episode.creating.done()}
        is_slow = any(process.passage.is_frozen for process in self.processes)
        for session in sessions.values():
            if session.state is not SessionState.OPEN:
                assert is_slow or session.id in pending | self.cut, f"{session} is stuck"
                continue
            worker = self.engine.ever[session.worker]
            if session.worker in self.silent:
                continue
            assert worker.is_running, f"{session} is open in a dead worker"
            assert session.worker in loads
            assert session.id in worker.sessions, f"{session} is open, and its worker does not know it"

    def _check_waiting(self, waiting: dict[EnvironmentName, int], loads: dict[WorkerId, WorkerLoad]) -> None:
        pending = Counter(episode.kind for episode in self._episodes() if not episode.creating.done())
        for name, count in waiting.items():
            assert count <= pending[name], f"{count} wait for {name}, and {pending[name]} were asked for"
            if not count or self.engine.is_down:
                continue
            kind = self._kind(name)
            assert kind is not None
            current = [one for one in loads.values() if one.worker.digest == kind.digest()]
            free = [one for one in current if one.worker.state is WorkerState.READY and one.used < one.worker.slots]
            assert not free, f"{count} wait for {name}, and {free} have room"
            assert len(current) == kind.pool.max_workers, f"{count} wait for {name}, which has {len(current)} workers"
            assert all(one.used for one in current), f"{count} wait for {name}, and one of {current} is idle"

    def _check_nothing_lingers(self, waiting: dict[EnvironmentName, int], sessions: dict[SessionId, Session]) -> None:
        """Check that each unanswered create waits for a slot, waits at its worker's gate, or is in a frozen process."""
        queued: Counter[EnvironmentName] = Counter()
        for episode in self.episodes.values():
            if episode.creating.done() or episode.process.passage.is_frozen:
                continue
            session = sessions.get(episode.id)
            if session is None:
                queued[episode.kind] += 1
            elif session.state is SessionState.OPENING and session.id not in self.cut:
                assert self.engine.ever[session.worker].waiting, f"nobody opens {session}"
        for name, count in queued.items():
            # If time passed meanwhile, the store has dropped the opening while it still waits at its gate.
            at_gates = sum(one.waiting for one in self.running() if one.worker.environment == name)
            assert count <= waiting.get(name, 0) + at_gates, f"{count} creates of {name} linger"

    def _check_episodes(self, sessions: dict[SessionId, Session]) -> None:
        for episode in self._episodes():
            found = sessions.get(episode.id)
            is_there = found is not None and episode.session is not None and found.lease == episode.session.lease
            if episode.is_open:
                assert is_there, f"{episode.name} of {episode.owner} was lost"
            elif episode.doom == "expired":
                assert not is_there, f"{episode.name} of {episode.owner} should have expired"

    def _kind(self, name: EnvironmentName) -> Environment | None:
        return self.processes[0].gateway.catalog.known.get(name)

    # -- of the world -----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        raise NotImplementedError

    def _episodes(self) -> list[Episode]:
        raise NotImplementedError
