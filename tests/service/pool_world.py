"""A whole gateway of one or two replicas in this process. A random walk can break every part of it.

The sessions, pools, audits and stores are real. Fakes play the workers (`tests.fakes.workers`, with real HTTP) and the
end of a process (`pool_parts`). The store's clock stands still until a test moves it.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gateway.core.episode import Action, StepResult
from gateway.core.errors import BackendError, GatewayError, StoreUnavailable
from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.leader_lease import LEASE_S
from gateway.core.ports.store import Store
from gateway.core.session import CloseReason, EpisodeRequest, SessionSetup, SessionState
from tests.contract.store_worlds import MemoryWorld, RedisWorld
from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually
from tests.fakes.workers import FakeWorker
from tests.service.pool_checks import Checked
from tests.service.pool_parts import (
    BIG,
    IDLE_S,
    SOLO,
    STEP_S,
    Engine,
    Episode,
    Passage,
    Process,
    environments,
    error_of,
)
from tests.service.stack import Replica

UNDOING_S = 0.05
"""Seconds that an audit waits for workers that already stop. This engine takes no time to stop a worker."""


class PoolWorld(Checked):
    """The replicas, the engine and the trainers."""

    def __init__(self, stores: MemoryWorld | RedisWorld) -> None:
        self.stores = stores
        self.folder = Path(tempfile.mkdtemp(prefix="gw-"))  # short, as the path of a Unix socket holds 107 bytes
        self.engine = Engine(self.folder)
        self.environments = {one.name: one for one in environments()}
        self.processes: list[Process] = []
        self.dead: list[Process] = []
        self.episodes: dict[tuple[Owner, str], Episode] = {}
        self.past: list[Episode] = []
        """Episodes that their trainers have left, or whose create returned an error."""
        self.cut: set[SessionId] = set()
        """Sessions that a process was opening or closing when it died. They end at their deadline."""
        self.silent: set[WorkerId] = set()
        """Workers whose death the engine did not report. An audit finds them."""
        self.has_lost_data = False
        self._memory: Store | None = None
        self._numbers = 0

    # -- processes ------------------------------------------------------------------------------------------------

    async def begin(self, replicas: int) -> None:
        """Start as many processes as *replicas* says."""
        for _ in range(replicas):
            await self.start()

    async def start(self) -> Process:
        """Start a process as the composition root does: complete the store, audit, then run the loops."""
        self._numbers += 1
        name = f"replica-{self._numbers}"
        passage = Passage()
        store = await self._store(name)
        gateway = Replica(
            store=passage.of(store, StoreUnavailable),
            backend=passage.of(self.engine, BackendError),
            environments=list(self.environments.values()),
            name=name,
            store_patience_s=5.0 if isinstance(self.stores, RedisWorld) else 0.0,
        )
        process = Process(name, passage, store, gateway)
        if not self.engine.is_down:  # a real process would not start until the engine is back
            await gateway.leadership.until_complete()
            await gateway.audit.begin()
            await gateway.audit.once(undoing_s=UNDOING_S)
            self.silent.clear()
        process.loops = [asyncio.ensure_future(gateway.session_cache.run()), asyncio.ensure_future(gateway.pool.run())]
        self.processes.append(process)
        return process

    async def _store(self, name: str) -> Store:
        if isinstance(self.stores, RedisWorld):
            return await self.stores.open(replica=name, is_whole=False)
        if self._memory is None:
            self._memory = await self.stores.open()
        return self._memory

    async def kill(self, process: Process) -> None:
        """End a process as SIGKILL does: it releases nothing, and its trainers lose their connections."""
        self.processes.remove(process)
        self.dead.append(process)
        process.passage.die()
        for episode in self._episodes():
            for task, through in ((episode.creating, episode.process), (episode.stepping, episode.by)):
                if task is not None and through is process and not task.done():
                    task.cancel()
                    await self.over(task)
            if (
                episode.process is process
                and episode.session is None
                and self.episodes.get((episode.owner, episode.name)) is episode
            ):
                self._leave(episode, "its process died")
        for loop in process.loops:
            loop.cancel()
            await self.over(loop)
        await process.gateway.aclose()
        with contextlib.suppress(StoreUnavailable):
            found = await process.store.sessions()
            self.cut |= {session.id for session in found if session.state is not SessionState.OPEN}

    def freeze(self, process: Process) -> None:
        """Freeze a process: its calls and their answers are delayed until it thaws."""
        process.passage.shut()

    def thaw(self) -> None:
        """Resume all processes."""
        for process in self.processes:
            process.passage.open()

    async def audit(self, process: Process) -> None:
        """Run the audit that the leader runs periodically."""
        await process.gateway.audit.once(undoing_s=UNDOING_S)
        self.silent.clear()

    def change(self, name: EnvironmentName) -> None:
        """Offer another revision of an environment at all replicas."""
        self._numbers += 1
        made = replace(self.environments[name], image=f"image-{self._numbers}")
        self.environments[name] = made
        for process in self.processes:
            process.gateway.catalog.replace(made)

    async def pass_time(self, seconds: float) -> None:
        """Advance the clocks of the store and the workers, after replicas that live have written their notes."""
        self._look()
        for process in self.alive():
            with contextlib.suppress(GatewayError):
                await process.gateway.session_cache.write_notes()
        frozen = [process for process in self.processes if process.passage.is_frozen]
        for process in self.processes:  # no call may run while the times in Redis are moved
            process.passage.shut()
        await self._until(lambda: not any(process.passage.under_way for process in self.processes), "calls end")
        self.stores.pass_time(seconds)
        for worker in self.engine.workers.values():
            for one in worker.sessions.values():
                one.idle_s = 0.0 if one.busy else one.idle_s + seconds
        for process in self.processes:
            if process not in frozen:
                process.passage.open()
        now = self.now
        busy = {sid for worker in self.running() for sid, one in worker.sessions.items() if one.busy}
        for episode in self._episodes():
            if episode.id in busy:  # even if its trainer or its replica is gone
                episode.active_at = now
            elif episode.is_open and now - episode.active_at > IDLE_S:
                episode.doom = "expired"
        if seconds > 60:  # the longest time that an abandoned session stays opening or closing
            self.cut.clear()

    @property
    def now(self) -> float:
        """The store's time in seconds."""
        return self.stores.clock()

    def lose_data(self) -> None:
        """Empty the store, which must be a Redis."""
        assert isinstance(self.stores, RedisWorld)
        self.has_lost_data = True
        with self.stores.server.client() as client:
            for key in self.stores.keys(client):
                client.delete(key)

    # -- workers --------------------------------------------------------------------------------------------------

    async def kill_worker(self, worker: FakeWorker, *, announced: bool, reason: CloseReason) -> None:
        """Let a worker die. The engine reports the death if *announced*."""
        id = worker.worker.id
        if not announced:
            self.silent.add(id)
        for episode in self._episodes():
            if episode.session is None or episode.session.worker == id:
                episode.doom = episode.doom or "its worker died"
        await worker.die(announced=announced, reason=reason)

    def open_gates(self) -> None:
        """Release all calls that wait at the gates of workers."""
        for worker in self.engine.ever.values():
            worker.gate.set()
            worker.gate = asyncio.Event()

    # -- trainers -------------------------------------------------------------------------------------------------

    def create(self, owner: Owner, name: str, kind: EnvironmentName, process: Process, **spec: Any) -> Episode:
        """Request a session in a task that continues in the background."""
        asked = process.gateway.catalog.named("math" if kind == BIG else kind)
        request = EpisodeRequest(
            owner=owner,
            name=name,
            environment=asked,
            setup=SessionSetup(spec=spec, of_split="big" if kind == BIG else ""),
            fingerprint=kind,
        )
        opening = asyncio.ensure_future(process.gateway.sessions.open(request))
        episode = Episode(owner, name, kind, process, opening, self.now)
        before = self.episodes.get((owner, name))
        if before is not None and before.doom and before.creating.done():
            self._leave(before, before.doom)
            before = None
        if before is None:
            self.episodes[owner, name] = episode
        else:
            self.past.append(episode)  # a repeated create must be answered, too
        return episode

    async def hang_up(self, episode: Episode) -> None:
        """Hang up during the create, and return once the create has released everything that it held."""
        episode.creating.cancel()
        await self.over(episode.creating)
        self._leave(episode, "its trainer hung up")

    def step(self, episode: Episode, process: Process, *, tool: str = "go_on") -> asyncio.Task[StepResult]:
        """Act in a session through *process*, in a task that continues in the background."""
        self._numbers += 1
        episode.by = process
        acting = process.gateway.act(
            episode.name, Action(name=tool), owner=episode.owner, within_s=STEP_S, key=f"k{self._numbers}"
        )
        return asyncio.ensure_future(self._stepped(episode, acting, f"k{self._numbers}"))

    async def _stepped(self, episode: Episode, acting: Coroutine[Any, Any, StepResult], key: str) -> StepResult:
        try:
            result = await acting
        except GatewayError as error:
            unsettled = isinstance(error, StoreUnavailable) and self.has_lost_data
            if not (episode.doom or unsettled):
                raise AssertionError(f"{episode.name} was lost") from error
            raise
        assert self.engine.calls()[key] == 1, "a step was answered that did not run once"
        episode.active_at = self.now
        return result

    async def delete(self, episode: Episode, process: Process) -> None:
        """End a session through *process*, as its trainer does."""
        self._leave(episode, "deleted")
        await process.gateway.sessions.close(episode.owner, episode.name)

    def _leave(self, episode: Episode, why: str) -> None:
        episode.doom = episode.doom or why
        if self.episodes.get((episode.owner, episode.name)) is episode:
            del self.episodes[episode.owner, episode.name]
        self.past.append(episode)

    def _episodes(self) -> list[Episode]:
        return [*self.episodes.values(), *self.past]

    def _look(self) -> None:
        """Record which requests were answered, and with what result."""
        for episode in list(self.episodes.values()):
            if episode.session is not None or not episode.creating.done():
                continue
            if (error := error_of(episode.creating)) is not None:
                self._leave(episode, f"not created: {error!r}")
            else:
                episode.session = episode.creating.result().session
                # If a worker died during the create, the session may be open in another worker.
                is_alive = self.engine.ever[episode.session.worker].is_running
                episode.doom = "" if is_alive else "its worker died"
                if self.now > episode.active_at + LEASE_S + 1:
                    episode.doom = "time passed while it was created"  # before or after it opened: both are possible
                episode.active_at = self.now
        for episode in self._episodes():
            for task in (episode.creating, episode.stepping):
                if task is not None and task.done():
                    error_of(task)
            if episode.stepping is not None and episode.stepping.done():
                episode.stepping = None
        self.past = [one for one in self.past if not one.creating.done() or one.stepping is not None]

    # -- the end --------------------------------------------------------------------------------------------------

    async def end(self) -> None:
        """End everything that trainers hold, and check that nothing is left.

        Raises:
            AssertionError: A session, a worker, a waiting opening or a key is left.
        """
        self.thaw()
        self.engine.is_down = False
        self.open_gates()
        if not self.processes:
            await self.start()
        process = self.processes[0]
        await eventually(self._check_none_opens)  # other moves test a hang-up during an opening
        await self.pass_time(2 * LEASE_S)
        for episode in self._episodes():
            for task in (episode.creating, episode.stepping):
                if task is not None:
                    if not task.done() and task is episode.creating:
                        task.cancel()
                    await self._let_go(task)
        await self.settle()
        for episode in list(self.episodes.values()):
            await self.delete(episode, process)
        await self.audit(process)
        await self.settle()
        await self.pass_time(400.0)
        # A session that no trainer deletes expires, and only then is its worker idle.
        await eventually(self._check_no_session_is_left)
        for _ in range(3):
            await self.settle()
            await self.pass_time(400.0)
        await eventually(self._check_nothing_is_left)

    async def _let_go(self, task: asyncio.Task[Any]) -> None:
        """Wait for the end of a task that may still reach a gate."""

        def is_over() -> bool:
            self.open_gates()
            return task.done()

        await self._until(is_over, f"{task} ends")
        error_of(task)

    async def _check_none_opens(self) -> None:
        self.open_gates()
        opening = {one.id for one in await self.sessions() if one.state is SessionState.OPENING}
        assert opening <= self.cut

    async def _check_no_session_is_left(self) -> None:
        assert await self.sessions() == []

    async def _check_nothing_is_left(self) -> None:
        await self.check_always()
        await self._check_no_session_is_left()
        loads = await self.processes[0].store.load()
        assert [load.waiting for load in loads.values() if load.waiting] == []
        workers = [entry.worker for load in loads.values() for entry in load.workers]
        assert [one.environment for one in workers] == [SOLO], f"{loads}: one is to be kept ready, and no other"
        assert set(self.engine.workers) == {one.id for one in workers}
        if isinstance(self.stores, RedisWorld):
            with self.stores.server.client() as client:
                kinds = {key.split(":")[1] for key in self.stores.keys(client)}
            kept = {
                "worker",
                "workers",
                "free",
                "counts",
                "leader",
                "fence",
                "whole",
                "number",
                "jumped",
                "paced",
                "replicas",
                "heard",
                "heard_run",
            }
            assert kinds <= kept, f"{kinds - kept} are left in Redis"

    async def aclose(self) -> None:
        """Release everything after any outcome of the walk."""
        requests = [task for one in self._episodes() for task in (one.creating, one.stepping) if task is not None]
        for task in requests:
            task.cancel()
        self.open_gates()
        for process in list(self.processes):
            await self.kill(process)
        await asyncio.gather(*requests, return_exceptions=True)
        await self.stores.aclose()
        await self.engine.aclose()
        shutil.rmtree(self.folder)

    # -- small ones -----------------------------------------------------------------------------------------------

    @staticmethod
    async def over(task: asyncio.Task[Any]) -> None:
        """Wait for the end of a task that does not wait at a gate."""
        await asyncio.wait({task}, timeout=HANG_S)
        assert task.done(), f"{task} does not end"
        error_of(task)

    @staticmethod
    async def _until(claim: Callable[[], bool], what: str) -> None:
        deadline = asyncio.get_running_loop().time() + HANG_S
        while not claim():
            assert asyncio.get_running_loop().time() < deadline, f"waited in vain: {what}"
            await asyncio.sleep(0.002)


def picked(pick: int, some: list[Any]) -> Iterator[Any]:
    """Yield one of *some*, or nothing if *some* is empty, so that a rule then does nothing."""
    if some:
        yield some[pick % len(some)]
