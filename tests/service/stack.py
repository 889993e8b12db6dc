"""A whole gateway in this process: the real objects on the memory store, fake workers behind, real HTTP in front."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from gateway.app import by_first_segment
from gateway.audit import Audit
from gateway.catalog import Catalog
from gateway.closing import Closer
from gateway.core.leader_lease import LEASE_S
from gateway.core.model import (
    Areal,
    Environment,
    EnvironmentName,
    Limits,
    Owner,
    PoolPolicy,
    Session,
    SessionState,
    Timeouts,
    Wire,
    WorkerLoad,
    WorkerState,
)
from gateway.core.ports import Store, Upstream
from gateway.curricula import Curricula
from gateway.fronts.areal import ArealFront
from gateway.fronts.door import Door
from gateway.fronts.openenv import OpenEnvFront
from gateway.fronts.ops import OpsFront
from gateway.fronts.ops_curricula import CurriculumRoutes
from gateway.fronts.ors import OrsFront
from gateway.observe.metrics import Metrics
from gateway.pool import Pool
from gateway.relay import Relay
from gateway.serving import BoundedSocket
from gateway.sessions import Sessions
from gateway.stores.memory import MemoryStore
from gateway.stores.memory_curricula import MemoryCurriculumStore
from gateway.stores.memory_tasks import MemoryTaskStore
from gateway.task_records import TaskRecords
from gateway.task_tables import TaskTables
from gateway.tasks.registry import TaskRegistry
from gateway.tasks.run_time import RunTimeTasks
from gateway.upstreams.ors.own import OrsUpstream
from tests.deadlines import scaled
from tests.fakes.eventually import eventually
from tests.fakes.workers import FakeBackend

SECRET = b"the gateway's own secret"
IDLE_S = 300.0
OWNER = Owner("")


def environment(name: str = "math", *, image: str = "one", idle_s: float = IDLE_S, **policy: Any) -> Environment:
    """An environment with short patience; *policy* goes to `PoolPolicy` and `Timeouts`, by field name, or is
    ``areal``. Its tasks are the registry's."""
    areal = policy.pop("areal", Areal())
    timeouts = {key: policy.pop(key) for key in list(policy) if key in Timeouts.__dataclass_fields__}
    return Environment(
        name=EnvironmentName(name),
        image=image,
        directory=Path("/"),
        command=("python3", "server.py"),
        tasks=Path("/tasks"),
        pool=PoolPolicy(**{"slots": 4, "max_workers": 2, **policy}),
        limits=Limits(),
        areal=areal,
        timeouts=Timeouts(
            **{"idle_s": idle_s, "start_s": 5.0, "open_s": 10.0, "setup_s": 5.0, "close_s": 2.0, **timeouts}
        ),
    )


def tasks(**splits: Sequence[Mapping[str, Any]]) -> dict[str, Sequence[bytes]]:
    """Splits as the registry keeps them."""
    return {name: [json.dumps(task).encode() for task in some] for name, some in splits.items()}


TASKS = tasks(train=[{"question": "1+1"}, {"question": "2+2"}], test=[{"question": "3+3"}])


class Replica:
    """One gateway process: its parts, wired as the composition root does."""

    def __init__(
        self, *, store: Store, backend: FakeBackend, environments: Sequence[Environment], name: str, **front: Any
    ) -> None:
        self.store = store
        self.backend = backend
        self.catalog = Catalog(environments)
        self.metrics = Metrics()
        self.relay = Relay()
        upstreams: dict[Wire, Upstream] = {Wire.OWN: OrsUpstream(self.relay, secret=SECRET)}
        upstreams |= front.pop("upstreams", {})
        registry = TaskRegistry({one.name: front.pop(f"tasks_{one.name}", TASKS) for one in environments})
        self.curriculum_store = front.pop("curriculum_store", None) or MemoryCurriculumStore()
        self.records = TaskRecords(self.curriculum_store, registry=registry)
        closer = Closer(store=store, upstreams=upstreams, metrics=self.metrics, played=self.records.note)
        self.sessions = Sessions(
            store=store,
            upstreams=upstreams,
            catalog=self.catalog,
            closer=closer,
            metrics=self.metrics,
            patience_s=front.pop("store_patience_s", 0.0),
            unused=lambda ticket: self.curricula.unused(ticket),
        )
        self.curricula = Curricula(
            store=self.curriculum_store,
            records=self.records,
            tables=TaskTables(registry, catalog=self.catalog, asked=self.sessions),
            files=front.pop("curricula", {}),
            runs_in=lambda name, split: name if self.catalog.offered(name) is not None else None,
        )
        self.pool = Pool(
            store=store,
            backend=backend,
            upstreams=upstreams,
            transport=self.relay,
            catalog=self.catalog,
            closer=closer,
            metrics=self.metrics,
            replica=name,
            remembered=self.sessions.remembered,
            expected=self.curricula.expected,
            max_workers=front.pop("max_workers", 0),
        )
        self.audit = Audit(
            store=store,
            backend=backend,
            upstreams=upstreams,
            catalog=self.catalog,
            lost=self.pool.lost,
            metrics=self.metrics,
            replica=name,
            lead_s=LEASE_S,
        )
        trainers, operators = front.pop("trainers", {}), front.pop("operators", {})
        self.task_store = MemoryTaskStore()
        self.run_time = RunTimeTasks(registry=registry, store=self.task_store, offered=self.catalog.offered)
        max_body_bytes = front.get("max_body_bytes", 2**20)
        ors = OrsFront(
            sessions=self.sessions,
            catalog=self.catalog,
            tasks=self.run_time,
            curricula=self.curricula,
            **{"max_body_bytes": max_body_bytes, **front},
        )
        self.areal = ArealFront(
            sessions=self.sessions,
            store=store,
            catalog=self.catalog,
            tasks=self.run_time,
            curricula=self.curricula,
            max_body_bytes=max_body_bytes,
            tally=self.metrics.tally,
        )
        ops = OpsFront(
            store=store,
            catalog=self.catalog,
            metrics=self.metrics,
            is_draining=lambda: False,
            routes=CurriculumRoutes(curricula=self.curricula, records=self.records, tasks=self.run_time).routes(),
        ).app()
        openenv = OpenEnvFront(
            sessions=self.sessions,
            store=store,
            catalog=self.catalog,
            tasks=registry,
            curricula=self.curricula,
            secret=SECRET,
            max_body_bytes=max_body_bytes,
            admit=lambda environment, task: self.run_time.admit(task, environment.name),
            refresh=self.run_time.refresh,
        )
        inside = by_first_segment(ors=ors, ops=ops, areal=self.areal, openenv=openenv)
        self.app = Door(inside, trainers=trainers, operators=operators)

    @contextlib.asynccontextmanager
    async def looping(self) -> AsyncIterator[None]:
        """Run the loops in the background; when they end, what they began has ended too."""
        runs = (self.sessions.run, self.pool.run, self.records.run, self.curricula.run)
        loops = [asyncio.ensure_future(run()) for run in runs]
        try:
            yield
        finally:
            for loop in loops:
                loop.cancel()
            ends = await asyncio.gather(*loops, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[httpx.AsyncClient]:
        """Serve over loopback; yields a client whose every request has a session id, ``one`` unless it says more."""
        config = uvicorn.Config(
            self.app, http="httptools", ws=BoundedSocket, lifespan="off", access_log=False, log_config=None
        )
        config.timeout_graceful_shutdown = 1
        server = _Server(config)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1024)
            serving = asyncio.ensure_future(server.serve(sockets=[listener]))
            port = listener.getsockname()[1]
            limits = httpx.Limits(max_connections=1000, max_keepalive_connections=0)
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}",
                headers={"X-Session-ID": "one"},
                timeout=scaled(30),
                trust_env=False,
                verify=False,  # to read the CAs' certificates takes longer than most tests
                limits=limits,
            ) as client:
                try:
                    yield client
                finally:
                    server.should_exit = True
                    await serving

    async def found(self, name: str = "one", owner: Owner = OWNER) -> Session:
        """What this replica knows of a session."""
        return (await self.sessions.find(owner, name))[0]

    async def workers(self, name: str = "math", state: WorkerState | None = None) -> list[WorkerLoad]:
        """An environment's workers, as the store knows them."""
        load = (await self.store.load()).get(EnvironmentName(name))
        return [entry for entry in (load.workers if load else ()) if state in (None, entry.worker.state)]

    async def used(self, name: str = "math") -> int:
        """Slots of an environment that are held."""
        return sum(entry.used for entry in await self.workers(name))

    async def eventually_used(self, slots: int, name: str = "math") -> None:
        """Return when *slots* slots of an environment are held."""

        async def check() -> None:
            assert await self.used(name) == slots

        await eventually(check)

    async def eventually_waiting(self, openings: int, name: str = "math") -> None:
        """Return when *openings* openings wait for a slot of an environment."""

        async def check() -> None:
            assert await self.waiting(name) == openings

        await eventually(check)

    async def eventually_workers(self, count: int, name: str = "math", state: WorkerState | None = None) -> None:
        """Return when an environment has *count* workers (in *state*)."""

        async def check() -> None:
            assert len(await self.workers(name, state)) == count

        await eventually(check)

    async def waiting(self, name: str = "math") -> int:
        """Openings that wait for a slot of an environment."""
        load = (await self.store.load()).get(EnvironmentName(name))
        return load.waiting if load else 0

    async def open_sessions(self) -> int:
        """Sessions that the store has as open."""
        return sum(session.state is SessionState.OPEN for session in await self.store.sessions())


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to pytest."""
        yield


class Stack:
    """A replica on a store and a backend of its own; `another` adds one on the same."""

    def __init__(
        self,
        folder: Path,
        *,
        clock: Callable[[], float],
        environments: Sequence[Environment],
        queue_max: int = 10_000,
        **front: Any,
    ) -> None:
        self.backend = FakeBackend(folder)
        self.store = MemoryStore(clock=clock, closed_kept_s=600.0, queue_max=queue_max)
        self.environments = environments
        self.front = front
        self.replicas: list[Replica] = []
        self.first = self.another()

    def another(self, *, environments: Sequence[Environment] | None = None) -> Replica:
        """A further gateway process, or the same one after a restart."""
        replica = Replica(
            store=self.store,
            backend=self.backend,
            environments=environments or self.environments,
            name=f"replica-{len(self.replicas)}",
            **dict(self.front),
        )
        self.replicas.append(replica)
        return replica

    async def aclose(self) -> None:
        for replica in self.replicas:
            await replica.relay.aclose()
        await self.backend.aclose()
        await self.store.aclose()


@contextlib.asynccontextmanager
async def stack(
    *environments: Environment, clock: Callable[[], float] = time.monotonic, **front: Any
) -> AsyncIterator[Stack]:
    """A store, a backend and one replica; nothing runs yet."""
    folder = Path(tempfile.mkdtemp(prefix="gw-"))  # short, as the path of a Unix socket holds 107 bytes
    built = Stack(folder, clock=clock, environments=environments or (environment(),), **front)
    try:
        yield built
    finally:
        await built.aclose()
        shutil.rmtree(folder)


@contextlib.asynccontextmanager
async def running(
    *environments: Environment, clock: Callable[[], float] = time.monotonic, **front: Any
) -> AsyncIterator[tuple[Stack, Replica, httpx.AsyncClient]]:
    """A stack whose one replica runs its loops and serves."""
    async with (
        stack(*environments, clock=clock, **front) as built,
        built.first.looping(),
        built.first.serving() as client,
    ):
        yield built, built.first, client
