"""A whole gateway of one or two replicas in this process, every part of which a random walk can break; and what must
hold in it.

Real are the sessions, pools, audits and stores; played are the workers (`tests.fakes.workers`, real HTTP) and the end of
a process: all that a replica says to its store and its engine goes through a `Passage`, which is shut while the process
is frozen, and fails all once it is dead. Time is the store's: it stands still until it is told to pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast

from gateway.core.errors import BackendError, GatewayError, StoreUnavailable
from gateway.core.model import (
    Action,
    CloseReason,
    Environment,
    EnvironmentName,
    Owner,
    Session,
    SessionId,
    SessionState,
    Setup,
    StepResult,
    Worker,
    WorkerId,
    WorkerLoad,
    WorkerState,
    session_id,
)
from gateway.core.ports import Store
from gateway.pool import LEAD_S
from tests.contract.store_worlds import MemoryWorld, RedisWorld
from tests.fakes.eventually import PAUSE_S, eventually
from tests.fakes.workers import FakeBackend, FakeWorker
from tests.service.stack import Replica, environment

IDLE_S: Final = 290.0
"""Never a sum of the times that pass here, so that the milliseconds which Redis' clock goes on by itself decide nothing."""
SETTLED_S: Final = 6.0
"""What must come to rest does so in some hundredths of a second; this is for a loaded machine."""
STEP_S: Final = 10.0
PAUSING_S: Final = 0.01
"""How long the engine takes to pause a worker: long enough for somebody to want it meanwhile."""
MATH, BIG, SOLO = EnvironmentName("math"), EnvironmentName("math.big"), EnvironmentName("solo")


def environments() -> list[Environment]:
    """Shared workers that are paused when idle, a split with workers of its own, and exclusive ones with one prepared."""
    short = {"idle_s": IDLE_S, "open_s": 15.0, "setup_s": 10.0, "close_s": 5.0}
    math = environment("math", slots=2, max_workers=2, pause_idle_s=30.0, idle_worker_s=150.0, **short)
    big = environment("big", slots=1, max_workers=1, idle_worker_s=90.0, **short)
    solo = environment("solo", slots=1, max_uses=1, max_workers=3, warm=1, idle_worker_s=90.0, **short)
    return [replace(math, splits={"big": big}), solo]


class Passage:
    """What one process says to the outside goes through here."""

    def __init__(self) -> None:
        self._is_open = asyncio.Event()
        self._is_open.set()
        self.is_dead = False
        self.under_way = 0
        """Calls that were let out and are not answered, without openings that wait."""

    @property
    def is_frozen(self) -> bool:
        """Whether it is shut."""
        return not self._is_open.is_set()

    def shut(self) -> None:
        """Hold whatever comes from here on, answers too: the process is frozen."""
        self._is_open.clear()

    def open(self) -> None:
        """Let all of it go on."""
        self._is_open.set()

    def die(self) -> None:
        """Fail all from here on: the process is gone, and its clean-up does nothing any more."""
        self.is_dead = True
        self._is_open.set()

    def of(self, inner: object, error: type[GatewayError]) -> Any:
        """*inner*, as the process sees it."""
        return _Beyond(inner, self, error)

    async def passed(self, error: type[GatewayError]) -> None:
        """Return when it is open; raises *error* once the process is dead."""
        await self._is_open.wait()
        if self.is_dead:
            raise error("this process is dead")


class _Beyond:
    def __init__(self, inner: object, passage: Passage, error: type[GatewayError]) -> None:
        self._inner = inner
        self._passage = passage
        self._error = error

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._inner, name)
        if not inspect.iscoroutinefunction(inner):
            return inner

        async def called(*arguments: Any, **named: Any) -> Any:
            await self._passage.passed(self._error)
            counts = name != "claim"
            self._passage.under_way += counts
            try:
                answer = await inner(*arguments, **named)
            finally:
                self._passage.under_way -= counts
            await self._passage.passed(self._error)
            return answer

        return called


class Engine(FakeBackend):
    """A backend that remembers all workers there ever were, and takes its time to pause one."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.ever: dict[WorkerId, FakeWorker] = {}

    async def start(self, worker: Worker, environment: Environment) -> str:
        """See ``Backend.start``."""
        address = await super().start(worker, environment)
        if worker.id in self.workers:
            self.ever[worker.id] = self.workers[worker.id]
        return address

    async def pause(self, id: WorkerId) -> None:
        """See ``Backend.pause``."""
        self._answer()
        await asyncio.sleep(PAUSING_S)
        if id in self.workers:
            self.paused.add(id)

    def calls(self) -> Counter[str]:
        """How often each step came to any worker, by its key."""
        return Counter(
            request.headers.get("idempotency-key", "")
            for worker in self.ever.values()
            for request in worker.requests
            if request.target.endswith("/call")
        )


@dataclass(eq=False)
class Process:
    """One gateway process."""

    name: str
    passage: Passage
    store: Store
    """As it really is: not through the passage."""
    gateway: Replica
    loops: list[asyncio.Task[None]] = field(default_factory=list)


@dataclass(eq=False)
class Episode:
    """A session as its trainer knows it."""

    owner: Owner
    name: str
    kind: EnvironmentName
    process: Process
    creating: asyncio.Task[Session]
    active_at: float
    """When something was done in it last, by the store's clock."""
    session: Session | None = None
    stepping: asyncio.Task[StepResult] | None = None
    doom: str = ""
    """Why it may be gone, or must be."""

    @property
    def id(self) -> SessionId:
        return session_id(self.owner, self.name)

    @property
    def is_open(self) -> bool:
        """Whether its trainer may count on it."""
        return self.session is not None and not self.doom


class PoolWorld:
    """The replicas, the engine, the trainers, and what must hold of them."""

    def __init__(self, stores: MemoryWorld | RedisWorld) -> None:
        self.stores = stores
        self.folder = Path(tempfile.mkdtemp(prefix="gw-"))  # short, as the path of a Unix socket holds 107 bytes
        self.engine = Engine(self.folder)
        self.environments = {one.name: one for one in environments()}
        self.processes: list[Process] = []
        self.dead: list[Process] = []
        self.episodes: dict[tuple[Owner, str], Episode] = {}
        self.past: list[Episode] = []
        """Whose trainers have nothing to do with them any more, or were told an error."""
        self.cut: set[SessionId] = set()
        """Sessions that a process was opening or closing when it died: they go at their deadline."""
        self.silent: set[WorkerId] = set()
        """Workers that died and nobody was told: an audit finds them."""
        self.has_lost_data = False
        self._memory: Store | None = None
        self._numbers = 0

    # -- processes ------------------------------------------------------------------------------------------------

    async def begin(self, replicas: int) -> None:
        """Start so many processes."""
        for _ in range(replicas):
            await self.start()

    async def start(self) -> Process:
        """Start a process as the composition root does: the store is made whole, an audit, then the loops."""
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
        if not self.engine.is_down:  # else it would not start; it does so once the engine is back
            await gateway.pool.made_whole()
            await gateway.audit.once(ask=True)
            self.silent.clear()
        process.loops = [asyncio.ensure_future(gateway.sessions.run()), asyncio.ensure_future(gateway.pool.run())]
        self.processes.append(process)
        return process

    async def _store(self, name: str) -> Store:
        if isinstance(self.stores, RedisWorld):
            return await self.stores.open(replica=name, is_whole=False)
        if self._memory is None:
            self._memory = await self.stores.open()
        return self._memory

    async def kill(self, process: Process) -> None:
        """End a process as SIGKILL does: it gives nothing back, and its trainers lose their connections."""
        self.processes.remove(process)
        self.dead.append(process)
        process.passage.die()
        for episode in self._episodes():
            if episode.process is not process:
                continue
            for task in (episode.creating, episode.stepping):
                if task is not None and not task.done():
                    task.cancel()
                    await self._over(task)
            episode.stepping = None
            if episode.session is None and self.episodes.get((episode.owner, episode.name)) is episode:
                self._leave(episode, "its process died")
        for loop in process.loops:
            loop.cancel()
            await self._over(loop)
        await process.gateway.relay.aclose()
        self.cut |= {session.id for session in await self.sessions() if session.state is not SessionState.OPEN}

    def alive(self) -> list[Process]:
        """The processes that do something."""
        return [process for process in self.processes if not process.passage.is_frozen]

    def freeze(self, process: Process) -> None:
        """Let a process hang; what it sees and says meanwhile comes later."""
        process.passage.shut()

    def thaw(self) -> None:
        """Let all go on."""
        for process in self.processes:
            process.passage.open()

    async def audit(self, process: Process) -> None:
        """Compare and mend, as the leader does now and then."""
        await process.gateway.audit.once()
        self.silent.clear()

    def change(self, name: EnvironmentName) -> None:
        """Offer another make of an environment, at all replicas."""
        self._numbers += 1
        made = replace(self.environments[name], image=f"image-{self._numbers}")
        self.environments[name] = made
        for process in self.processes:
            process.gateway.catalog.replace(made)

    async def pass_time(self, seconds: float) -> None:
        """Let the store's time go on, and the workers'; replicas that live have told before what they saw."""
        self._look()
        for process in self.alive():
            with contextlib.suppress(GatewayError):
                await process.gateway.sessions.write_notes()
        frozen = [process for process in self.processes if process.passage.is_frozen]
        for process in self.processes:  # nothing is under way while Redis' past is moved
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
        for episode in self._episodes():
            if episode.stepping is not None and not episode.stepping.done():
                episode.active_at = now
            elif episode.is_open and now - episode.active_at > IDLE_S:
                episode.doom = "expired"
        if seconds > 60:  # the longest that a session stays in opening or closing with nobody at it
            self.cut.clear()

    @property
    def now(self) -> float:
        """The store's time."""
        return self.stores.clock()

    def lose_data(self) -> None:
        """Empty the store, which must be a Redis."""
        assert isinstance(self.stores, RedisWorld)
        self.has_lost_data = True
        with self.stores.server.client() as client:
            for key in self.stores.keys(client):
                client.delete(key)

    # -- workers --------------------------------------------------------------------------------------------------

    def running(self) -> list[FakeWorker]:
        """The workers that live, oldest first."""
        return [worker for worker in self.engine.ever.values() if worker.is_running]

    async def kill_worker(self, worker: FakeWorker, *, announced: bool, reason: CloseReason) -> None:
        """Let a worker die."""
        id = worker.worker.id
        if not announced:
            self.silent.add(id)
        for episode in self._episodes():
            if episode.session is None or episode.session.worker == id:
                episode.doom = episode.doom or "its worker died"
        await worker.die(announced=announced, reason=reason)

    def open_gates(self) -> None:
        """Let go what waits in workers."""
        for worker in self.engine.ever.values():
            worker.gate.set()
            worker.gate = asyncio.Event()

    # -- trainers -------------------------------------------------------------------------------------------------

    def create(self, owner: Owner, name: str, kind: EnvironmentName, process: Process, **spec: Any) -> Episode:
        """Ask for a session; the task goes on behind."""
        asked = process.gateway.catalog.named("math" if kind == BIG else kind)
        opening = process.gateway.sessions.open(
            owner=owner,
            name=name,
            environment=asked,
            setup=Setup(spec=spec, of_split="big" if kind == BIG else ""),
            fingerprint=kind,
        )
        episode = Episode(owner, name, kind, process, asyncio.ensure_future(opening), self.now)
        before = self.episodes.get((owner, name))
        if before is None:
            self.episodes[owner, name] = episode
        else:
            self.past.append(episode)  # one more request for what is there, or was: it must be answered, too
        return episode

    async def hang_up(self, episode: Episode) -> None:
        """Leave while the create is under way; what it held is given back before this returns."""
        episode.creating.cancel()
        await self._over(episode.creating)
        self._leave(episode, "its trainer hung up")

    def step(self, episode: Episode, process: Process, *, tool: str = "go_on") -> asyncio.Task[StepResult]:
        """Act in a session by way of *process*; the task goes on behind."""
        self._numbers += 1
        acting = process.gateway.sessions.act(
            episode.owner, episode.name, Action(name=tool), within_s=STEP_S, key=f"k{self._numbers}"
        )
        return asyncio.ensure_future(self._stepped(episode, acting, f"k{self._numbers}"))

    async def _stepped(self, episode: Episode, acting: Coroutine[Any, Any, StepResult], key: str) -> StepResult:
        try:
            result = await acting
        except GatewayError as error:
            unsettled = isinstance(error, StoreUnavailable) and self.has_lost_data
            assert episode.doom or unsettled, f"{episode.name} was lost: {error!r}"
            raise
        assert self.engine.calls()[key] == 1, "a step was answered that did not run once"
        episode.active_at = self.now
        return result

    async def delete(self, episode: Episode, process: Process) -> None:
        """End a session as its trainer does, by way of *process*."""
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
        """See which requests were answered, and how."""
        for episode in list(self.episodes.values()):
            if episode.session is not None or not episode.creating.done():
                continue
            if (error := _error(episode.creating)) is not None:
                self._leave(episode, f"not created: {error!r}")
            else:
                episode.session = episode.creating.result()
                # Whatever died while it was created, it may be in another worker.
                is_alive = self.engine.ever[episode.session.worker].is_running
                episode.doom = "" if is_alive else "its worker died"
                if self.now > episode.active_at + LEAD_S + 1:
                    episode.doom = "time passed while it was created"  # before or after it was open: who knows
                episode.active_at = self.now
        for episode in self._episodes():
            for task in (episode.creating, episode.stepping):
                if task is not None and task.done():
                    _error(task)
            if episode.stepping is not None and episode.stepping.done():
                episode.stepping = None
        self.past = [one for one in self.past if not one.creating.done() or one.stepping is not None]

    # -- what must hold -------------------------------------------------------------------------------------------

    async def sessions(self) -> list[Session]:
        """All that the store has."""
        return await self.processes[0].store.sessions() if self.processes else []

    async def loads(self) -> list[WorkerLoad]:
        """All workers of the store."""
        loads = await self.processes[0].store.load()
        return [entry for load in loads.values() for entry in load.workers]

    async def check_always(self) -> None:
        """What holds at any moment, whatever is broken."""
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
        """Wait until all is as it should be, at most `SETTLED_S`.

        Raises:
            AssertionError: it is not.
        """

        async def check() -> None:
            await self.check_always()
            if self.alive():
                await self._check_settled()

        await eventually(check, within_s=SETTLED_S)

    async def _check_settled(self) -> None:
        try:
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
        """A create that is not answered waits for a slot, or at the gate of its worker; or its process is frozen."""
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
            assert count <= waiting.get(name, 0), f"{count} creates of {name} linger"

    def _check_episodes(self, sessions: dict[SessionId, Session]) -> None:
        for episode in self._episodes():
            found = sessions.get(episode.id)
            is_there = found is not None and episode.session is not None and found.lease == episode.session.lease
            if episode.is_open:
                assert is_there, f"{episode.name} of {episode.owner} was lost"
            elif episode.doom == "expired":
                assert not is_there, f"{episode.name} of {episode.owner} should have expired"

    def _kind(self, name: EnvironmentName) -> Environment | None:
        return self.processes[0].gateway.catalog.get(name)

    # -- the end --------------------------------------------------------------------------------------------------

    async def end(self) -> None:
        """End everything that trainers hold, and see that nothing is left.

        Raises:
            AssertionError: something is.
        """
        self.thaw()
        self.engine.is_down = False
        self.open_gates()
        if not self.processes:
            await self.start()
        process = self.processes[0]
        await self.pass_time(2 * LEAD_S)
        for episode in self._episodes():
            for task in (episode.creating, episode.stepping):
                if task is not None:
                    self.open_gates()
                    if not task.done() and task is episode.creating:
                        task.cancel()
                    await self._over(task)
        await self.settle()
        for episode in list(self.episodes.values()):
            await self.delete(episode, process)
        await self.audit(process)
        for _ in range(4):
            await self.settle()
            await self.pass_time(400.0)
        await eventually(self._check_nothing_is_left, within_s=SETTLED_S)

    async def _check_nothing_is_left(self) -> None:
        await self.check_always()
        assert await self.sessions() == []
        loads = await self.processes[0].store.load()
        assert [load.waiting for load in loads.values() if load.waiting] == []
        workers = [entry.worker for load in loads.values() for entry in load.workers]
        assert [one.environment for one in workers] == [SOLO], f"{loads} {self.engine.paused} {[p.gateway.pool._demands for p in self.processes]} {[p.gateway.pool._lead for p in self.processes]}: one is to be kept ready, and no other"
        assert set(self.engine.workers) == {one.id for one in workers}
        if isinstance(self.stores, RedisWorld):
            with self.stores.server.client() as client:
                kinds = {key.split(":")[1] for key in self.stores.keys(client)}
            kept = {"worker", "workers", "free", "counts", "leader", "fence", "whole", "number", "jumped", "paced"}
            assert kinds <= kept, f"{kinds - kept} are left in Redis"

    async def aclose(self) -> None:
        """Let go of everything, however the walk ended."""
        for episode in self._episodes():
            for task in (episode.creating, episode.stepping):
                if task is not None and not task.done():
                    task.cancel()
        self.open_gates()
        for process in list(self.processes):
            await self.kill(process)
        await self.stores.aclose()
        await self.engine.aclose()
        shutil.rmtree(self.folder)

    # -- small ones -----------------------------------------------------------------------------------------------

    @staticmethod
    async def _over(task: asyncio.Task[Any]) -> None:
        await asyncio.wait({task}, timeout=SETTLED_S)
        assert task.done(), f"{task} does not end"
        _error(task)

    @staticmethod
    async def _until(claim: Callable[[], bool], what: str) -> None:
        deadline = asyncio.get_running_loop().time() + SETTLED_S
        while not claim():
            assert asyncio.get_running_loop().time() < deadline, f"waited in vain: {what}"
            await asyncio.sleep(PAUSE_S / 10)


def _error(task: asyncio.Task[Any]) -> GatewayError | None:
    """What a task of a trainer's failed with; an error that is none of ours is a failure of the test."""
    if task.cancelled():
        return StoreUnavailable("it was cancelled")
    error = task.exception()
    if error is not None and not isinstance(error, GatewayError):
        raise error
    return cast("GatewayError | None", error)


def picked(pick: int, some: list[Any]) -> Iterator[Any]:
    """One of *some*, or none where there is none: for a rule that does nothing then."""
    if some:
        yield some[pick % len(some)]
