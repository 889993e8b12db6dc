"""A whole gateway in this process: the real objects on the memory store, fake workers, and real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from gateway.adapters import Stores
from gateway.app import Gateway
from gateway.catalog.catalog import Catalog
from gateway.content import Content
from gateway.core.environment import Areal, Environment, Limits, PoolPolicy, TaskView, Timeouts, UpstreamKind
from gateway.core.episode import Action, StepResult
from gateway.core.ids import EnvironmentName, Owner
from gateway.core.ports.curricula import CurriculumStore
from gateway.core.ports.store import Store
from gateway.core.ports.tasks import TaskQueries, TaskStore
from gateway.core.ports.upstream import Upstream
from gateway.core.session import Session, SessionState
from gateway.core.worker import WorkerLoad, WorkerState
from gateway.server.websocket import BoundedSocket
from gateway.settings import Settings
from gateway.stores.memory.curricula import MemoryCurriculumStore
from gateway.stores.memory.sessions import MemoryStore
from gateway.stores.memory.tasks import MemoryTaskStore
from gateway.tasks.curricula.model import Curriculum
from gateway.tasks.curricula.service import Curricula
from gateway.tasks.curricula.stats import TaskStats
from gateway.tasks.curricula.tables import TaskTables
from gateway.tasks.lookup import TaskLookup
from gateway.tasks.registry import TaskRegistry
from gateway.tasks.runtime import RuntimeTasks
from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually
from tests.fakes.workers import FakeBackend

SECRET = b"the gateway's own secret"
IDLE_S = 300.0
OWNER = Owner("")


def environment(name: str = "math", *, image: str = "one", idle_s: float = IDLE_S, **policy: Any) -> Environment:
    """Return an environment with short timeouts, whose tasks are in the registry. *policy* holds fields of
    `PoolPolicy` and `Timeouts`, and ``areal``."""
    areal = policy.pop("areal", Areal())
    timeouts = {key: policy.pop(key) for key in list(policy) if key in Timeouts.__dataclass_fields__}
    return Environment(
        name=EnvironmentName(name),
        image=image,
        directory=Path("/"),
        command=("python3", "server.py"),
        tasks=Path("/tasks"),
        task_view=TaskView.FULL,
        pool=PoolPolicy(**{"slots": 4, "max_workers": 2, **policy}),
        limits=Limits(),
        areal=areal,
        timeouts=Timeouts(
            # A worker's start and a setup must succeed on any machine. A wait for a slot may have to end.
            **{"idle_s": idle_s, "start_s": HANG_S, "open_s": 10.0, "setup_s": HANG_S, "close_s": 2.0, **timeouts}
        ),
    )


def tasks(**splits: Sequence[Mapping[str, Any]]) -> dict[str, Sequence[bytes]]:
    """Return splits as the registry keeps them."""
    return {name: [json.dumps(task).encode() for task in some] for name, some in splits.items()}


TASKS = tasks(train=[{"question": "1+1"}, {"question": "2+2"}], test=[{"question": "3+3"}])


def run_time(registry: TaskRegistry, *environments: Environment) -> RuntimeTasks:
    """Return the tasks of *registry*, with a store for tasks that are added at run time."""
    catalog = Catalog(environments or [environment()])
    return RuntimeTasks(registry=registry, store=MemoryTaskStore(), catalog=catalog)


def lookup_of(registry: TaskRegistry, queries: TaskQueries) -> TaskLookup:
    """Return a lookup of the tasks of *registry* and of workers, without curricula."""
    store, catalog = MemoryCurriculumStore(), Catalog([environment()])
    curricula = Curricula(
        store=store,
        records=TaskStats(store, registry=registry),
        tables=TaskTables(registry, catalog=catalog, queries=queries),
        files={},
        catalog=catalog,
    )
    return TaskLookup(run_time(registry), queries=queries, curricula=curricula)


class Replica(Gateway):
    """One gateway process that the composition root builds on the test's store and backend."""

    def __init__(
        self,
        *,
        store: Store,
        backend: FakeBackend,
        environments: Sequence[Environment],
        name: str,
        upstreams: Mapping[UpstreamKind, Upstream] | None = None,
        curricula: Mapping[str, Curriculum] | None = None,
        curriculum_store: CurriculumStore | None = None,
        task_store: TaskStore | None = None,
        trainers: Mapping[str, str] | None = None,
        operators: Mapping[str, str] | None = None,
        store_patience_s: float = 0.0,
        **more: Any,
    ) -> None:
        """
        Args:
            trainers: Trainer keys by name.
            operators: Operator keys by name.
            more: Settings, and the tasks of an environment as ``tasks_<name>``.
        """
        registry = TaskRegistry({one.name: more.pop(f"tasks_{one.name}", TASKS) for one in environments})
        settings = Settings(
            **{
                "secret": SECRET.decode(),
                "catalog_dir": Path("/nowhere"),
                "max_body_bytes": 2**20,
                "step_log_bytes": 0,
                "trainer_keys": _keys(trainers),
                "operator_keys": _keys(operators),
                **more,
            }
        )
        stores = Stores(
            sessions=store,
            tasks=task_store or MemoryTaskStore(),
            curricula=curriculum_store or MemoryCurriculumStore(),
        )
        super().__init__(
            settings,
            Content(Catalog(environments), registry, curricula or {}),
            replica=name,
            stores=stores,
            backend=backend,
            upstreams=upstreams,
            store_patience_s=store_patience_s,
        )

    @contextlib.asynccontextmanager
    async def looping(self) -> AsyncIterator[None]:
        """Run the loops in a separate task: pytest exits a fixture in another task than it entered it."""
        begun, over = asyncio.Event(), asyncio.Event()

        async def loop() -> None:
            async with Gateway.looping(self):
                begun.set()
                await over.wait()

        looping = asyncio.ensure_future(loop())
        await asyncio.wait({looping, asyncio.ensure_future(begun.wait())}, return_when=asyncio.FIRST_COMPLETED)
        try:
            yield
        finally:
            over.set()
            await looping

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[httpx.AsyncClient]:
        """Serve over loopback, and yield a client whose requests have the session id ``one`` by default."""
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
                timeout=HANG_S,
                trust_env=False,
                verify=False,  # reading the CA certificates takes longer than most tests
                limits=limits,
            ) as client:
                try:
                    yield client
                finally:
                    server.should_exit = True
                    await serving

    async def found(self, name: str = "one", owner: Owner = OWNER) -> Session:
        """Return the session as this replica knows it."""
        return (await self.sessions.find(owner, name)).session

    async def act(
        self, name: str, action: Action, *, owner: Owner = OWNER, within_s: float = 30.0, key: str | None = None
    ) -> StepResult:
        """Run *action* in a session."""
        return await (await self.sessions.find(owner, name)).act(action, within_s=within_s, key=key)

    async def steps(self, name: str) -> int:
        """Return the number of steps of a session that its worker has counted."""
        return await (await self.sessions.find(OWNER, name)).steps(within_s=5)

    async def workers(self, name: str = "math", state: WorkerState | None = None) -> list[WorkerLoad]:
        """Return an environment's workers as the store knows them, filtered by *state* if it is given."""
        load = (await self.store.load()).get(EnvironmentName(name))
        return [entry for entry in (load.workers if load else ()) if state in (None, entry.worker.state)]

    async def used(self, name: str = "math") -> int:
        """Return the number of slots of an environment that sessions hold."""
        return sum(entry.used for entry in await self.workers(name))

    async def eventually_used(self, slots: int, name: str = "math") -> None:
        """Wait until sessions hold *slots* slots of an environment."""

        async def check() -> None:
            assert await self.used(name) == slots

        await eventually(check)

    async def eventually_waiting(self, openings: int, name: str = "math") -> None:
        """Wait until *openings* openings wait for a slot of an environment."""

        async def check() -> None:
            assert await self.waiting(name) == openings

        await eventually(check)

    async def eventually_workers(self, count: int, name: str = "math", state: WorkerState | None = None) -> None:
        """Wait until an environment has *count* workers, in *state* if it is given."""

        async def check() -> None:
            assert len(await self.workers(name, state)) == count

        await eventually(check)

    async def waiting(self, name: str = "math") -> int:
        """Return the number of openings that wait for a slot of an environment."""
        load = (await self.store.load()).get(EnvironmentName(name))
        return load.waiting if load else 0

    async def open_sessions(self) -> int:
        """Return the number of sessions that the store has as open."""
        return sum(session.state is SessionState.OPEN for session in await self.store.sessions())


def _keys(named: Mapping[str, str] | None) -> str:
    return ",".join(f"{name}:{key}" for name, key in (named or {}).items())


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to pytest."""
        yield


class Stack:
    """A replica with its own store and backend. `another` adds a replica on the same store and backend."""

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
        """Return a further gateway process, or the same process after a restart."""
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
            await replica.aclose()
        await self.backend.aclose()
        await self.store.aclose()


@contextlib.asynccontextmanager
async def stack(
    *environments: Environment, clock: Callable[[], float] = time.monotonic, **front: Any
) -> AsyncIterator[Stack]:
    """Build a store, a backend and one replica. No loop runs yet."""
    folder = Path(tempfile.mkdtemp(prefix="gw-"))  # short, as the path of a Unix socket holds 107 bytes
    built = Stack(folder, clock=clock, environments=environments or (environment(),), **front)
    try:
        yield built
    finally:
        await built.aclose()
        shutil.rmtree(folder)


@contextlib.contextmanager
def impatience(gateway: Gateway, **deadlines: Any) -> Iterator[None]:
    """Give the default environment *deadlines* (``timeouts``, ``areal``, ``openenv``) while the block runs.

    Each is a mapping of fields. Calls outside of the block keep the usual deadlines, which no slow machine exceeds.
    """
    catalog = gateway.catalog
    patient = catalog.default
    tables = {name: replace(getattr(patient, name), **fields) for name, fields in deadlines.items()}
    catalog.replace(replace(patient, **tables))
    try:
        yield
    finally:
        catalog.replace(patient)


@contextlib.asynccontextmanager
async def running(
    *environments: Environment, clock: Callable[[], float] = time.monotonic, **front: Any
) -> AsyncIterator[tuple[Stack, Replica, httpx.AsyncClient]]:
    """Run a stack whose only replica runs its loops and serves."""
    async with (
        stack(*environments, clock=clock, **front) as built,
        built.first.looping(),
        built.first.serving() as client,
    ):
        yield built, built.first, client
