"""The backend of many machines, with fake nodes that use TLS and engines that keep their workers in memory."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from gateway.backends.swarm.backend import SwarmBackend
from gateway.backends.swarm.nodes import NodeState
from gateway.core.addresses import node_address
from gateway.core.broadcast import Broadcast
from gateway.core.environment import Environment, Limits
from gateway.core.errors import BackendError, StartFailed
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.leader_lease import Lead, LeaderLease
from gateway.core.placement import NodeId
from gateway.core.session import CloseReason
from gateway.core.worker import BackendWorker, Death, EnvironmentLoad, Worker, WorkerLoad
from tests.deadlines import HANG_S
from tests.fakes.certificates import Files, cluster
from tests.fakes.eventually import until
from tests.fakes.nodes import FakeNode, image_id, knowing

IMAGE = "env-gateway/math:latest"
ENVIRONMENT = Environment(
    name=EnvironmentName("math"),
    image=IMAGE,
    directory=Path("/nowhere"),
    command=("python3", "server.py"),
    limits=Limits(memory_bytes=2**29, cpus=0.5, pids=64, tmp_bytes=2**20),
)
N1, N2 = NodeId("n1"), NodeId("n2")


class Engine:
    """The fake engine of one node; its workers are in the node's report."""

    def __init__(self, node: FakeNode, id: NodeId) -> None:
        self.node = node
        self.id = id
        self.workers: dict[WorkerId, Worker] = {}
        self.deaths_told: Broadcast[Death] = Broadcast()
        self.is_down = False
        self.asked = 0
        self.may_start = asyncio.Event()
        self.may_start.set()

    async def start(self, worker: Worker, environment: Environment, lease: LeaderLease | None = None) -> str:
        self._answer()
        self.asked += 1
        await self.may_start.wait()
        address = node_address(self.id, worker.id, "worker.sock")
        self.workers[worker.id] = replace(worker, address=address)
        self.node.report["workers"] = {id: one.environment for id, one in self.workers.items()}
        return address

    async def stop(self, id: WorkerId) -> None:
        self._answer()
        self.workers.pop(id, None)
        self.node.report["workers"].pop(id, None)

    async def logs(self, id: WorkerId, *, lines: int = 20) -> str:
        self._answer()
        return f"words of {id}" if id in self.workers else ""

    async def found(self) -> list[BackendWorker]:
        self._answer()
        return [found(worker) for worker in self.workers.values()]

    async def pause(self, id: WorkerId, lease: LeaderLease | None = None) -> None:
        self._answer()

    async def resume(self, id: WorkerId) -> None:
        self._answer()

    async def prepare(self, environment: Environment) -> str:
        return ""

    def deaths(self) -> AsyncIterator[Death]:
        return self.deaths_told.follow()

    def engines(self) -> int:
        """Return 1."""
        return 1

    def leaving(self) -> frozenset[WorkerId]:
        return frozenset()

    async def check(self) -> None:
        self._answer()

    async def aclose(self) -> None:
        self.deaths_told.close()

    def _answer(self) -> None:
        if self.is_down:
            raise BackendError(f"the engine of {self.node.id} does not answer")


def found(worker: Worker) -> BackendWorker:
    return BackendWorker(
        id=worker.id, environment=worker.environment, digest=worker.digest, address=worker.address, running=True
    )


def worker(id: str) -> Worker:
    return Worker(id=WorkerId(id), environment=ENVIRONMENT.name, digest="d1", slots=4)


class Stored:
    """The part of a store that the backend reads: workers of this process and of other replicas."""

    def __init__(self) -> None:
        self.known: list[Worker] = []

    async def load(self) -> Mapping[EnvironmentName, EnvironmentLoad]:
        workers = tuple(WorkerLoad(worker=one, used=0, idle_s=0.0, age_s=0.0) for one in self.known)
        return {ENVIRONMENT.name: EnvironmentLoad(workers=workers)}


@dataclass
class Cluster:
    """A backend, its nodes, and the engines that it has connected to so far."""

    backend: SwarmBackend
    nodes: dict[str, FakeNode]
    store: Stored
    lease: LeaderLease
    engines: dict[str, Engine] = field(default_factory=dict)

    def state(self, id: str) -> NodeState | None:
        return next((view.state for view in self.backend.nodes() if view.id == id), None)

    async def start(self, *ids: str) -> list[str]:
        """Start workers, and return the nodes that they were placed on."""
        addresses = [await self.backend.start(worker(id), ENVIRONMENT) for id in ids]
        return [address.removeprefix("node:").partition("/")[0] for address in addresses]


@pytest.fixture(scope="module")
def files() -> Iterator[tuple[Files, Files]]:
    with tempfile.TemporaryDirectory() as name:
        yield cluster(Path(name) / "tls")


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sb-") as name:
        yield Path(name)


@asynccontextmanager
async def running(
    files: tuple[Files, Files],
    folder: Path,
    *names: str,
    lost_s: float = HANG_S,
    content: bytes = b"image",
    away: Sequence[str] = (),
) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        nodes = {name: await stack.enter_async_context(FakeNode(files[1], id=name)) for name in names}
        for node in nodes.values():
            if content:
                node.content[IMAGE], node.built_at[IMAGE] = content, 100.0
        for name in away:
            await nodes[name].aclose()
        directory = await stack.enter_async_context(knowing(files[0], *nodes.values(), lost_s=lost_s))
        store, lease = Stored(), LeaderLease(Lead(1))
        made: Cluster

        def engine(url: str, node: NodeId) -> Engine:
            made.engines[node] = Engine(nodes[node], node)
            return made.engines[node]

        backend = SwarmBackend(
            nodes=directory,
            engine=engine,
            gates_dir=folder / "gates",
            environments=[ENVIRONMENT],
            store=store,
            lease=lease,
        )
        made = Cluster(backend, nodes, store, lease)
        stack.push_async_callback(backend.aclose)
        yield made


SOON_LOST = pytest.mark.parametrize("two", [1.0], indirect=True, ids=["soon lost"])


@pytest.fixture
async def two(request: pytest.FixtureRequest, files: tuple[Files, Files], folder: Path) -> AsyncIterator[Cluster]:
    """Yield two nodes, which are lost after the parameter in seconds."""
    async with running(files, folder, "n1", "n2", lost_s=getattr(request, "param", HANG_S)) as made:
        yield made


# -- starting and stopping


async def test_workers_are_spread_over_the_nodes_and_their_addresses_name_the_nodes(two: Cluster) -> None:
    assert sorted(await two.start("w1", "w2", "w3", "w4")) == ["n1", "n1", "n2", "n2"]

    (first,) = [one for one in await two.backend.found() if one.id == "w1"]
    assert first.address == node_address("n1", "w1", "worker.sock")


async def test_concurrent_starts_take_each_other_into_account(two: Cluster) -> None:
    addresses = await asyncio.gather(*(two.backend.start(worker(f"w{n}"), ENVIRONMENT) for n in range(10)))

    assert sum(address.startswith("node:n1/") for address in addresses) == 5


async def test_a_failed_start_occupies_no_room(two: Cluster) -> None:
    await two.backend.check()
    for engine in two.engines.values():
        engine.is_down = True
    for n in range(4):
        with pytest.raises(BackendError):
            await two.backend.start(worker(f"w{n}"), ENVIRONMENT)
    for engine in two.engines.values():
        engine.is_down = False

    assert sorted(await two.start("w5", "w6")) == ["n1", "n2"]


async def test_a_cancelled_start_occupies_no_room(two: Cluster) -> None:
    await two.backend.check()
    two.engines["n1"].may_start.clear()
    begun = asyncio.ensure_future(two.backend.start(worker("w1"), ENVIRONMENT))
    await until(lambda: two.engines["n1"].asked)
    assert await two.start("w2") == ["n2"]  # a worker is starting on the other node

    begun.cancel()

    with pytest.raises(asyncio.CancelledError):
        await begun
    two.engines["n1"].may_start.set()
    assert await two.start("w3") == ["n1"]


async def test_without_room_on_any_node_the_error_has_each_nodes_reason_and_is_not_a_failed_start(two: Cluster) -> None:
    two.nodes["n1"].report["is_draining"] = True
    two.nodes["n2"].report["max_containers"] = 0
    await until(
        lambda: all(v.report and (v.report.is_draining or not v.report.max_containers) for v in two.backend.nodes())
    )

    with pytest.raises(BackendError, match=r"machine-n1: it drains; machine-n2: 0 of 0 containers") as caught:
        await two.backend.start(worker("w1"), ENVIRONMENT)

    assert not isinstance(caught.value, StartFailed)


async def test_a_worker_is_stopped_on_its_node_and_the_stop_of_an_unknown_worker_is_no_error(two: Cluster) -> None:
    await two.start("w1", "w2")

    await two.backend.stop(WorkerId("w2"))
    await two.backend.stop(WorkerId("strange"))

    assert [one.id for one in await two.backend.found()] == ["w1"]


async def test_another_replicas_worker_is_found_by_its_nodes_report(two: Cluster) -> None:
    await two.backend.check()
    await two.engines["n2"].start(worker("theirs"), ENVIRONMENT)

    await until(lambda: any(view.report and "theirs" in view.report.workers for view in two.backend.nodes()))
    assert await two.backend.logs(WorkerId("theirs")) == "words of theirs"
    await two.backend.pause(WorkerId("theirs"))
    await two.backend.stop(WorkerId("theirs"))
    assert two.engines["n2"].workers == {}


async def test_the_pause_of_an_unknown_worker_is_an_error(two: Cluster) -> None:
    with pytest.raises(BackendError, match="there is no worker w9"):
        await two.backend.pause(WorkerId("w9"))


async def test_check_needs_one_node_that_can_start_workers(two: Cluster) -> None:
    await two.backend.check()
    two.engines["n1"].is_down = True
    await two.backend.check()

    two.engines["n2"].is_down = True

    with pytest.raises(BackendError, match=r"machine-n1: the engine of n1 .*machine-n2"):
        await two.backend.check()


async def test_the_error_of_a_check_without_live_nodes_names_the_nodes(
    files: tuple[Files, Files], folder: Path
) -> None:
    async with running(files, folder, "n1") as one:
        await one.nodes["n1"].aclose()
        await until(lambda: one.state("n1") is not NodeState.LIVE)

        with pytest.raises(BackendError, match=f"no node answers: .*{one.nodes['n1'].port}"):
            await one.backend.check()


# -- lost nodes


@SOON_LOST
async def test_each_worker_of_a_lost_node_is_reported_dead_once(two: Cluster) -> None:
    heard: list[Death] = []

    async def follow() -> None:
        async for death in two.backend.deaths():
            heard.append(death)

    following = asyncio.ensure_future(follow())
    assert sorted(await two.start("w1", "w2", "w3", "w4")) == ["n1", "n1", "n2", "n2"]
    gone = set(two.engines["n2"].workers)

    await two.nodes["n2"].aclose()

    await until(lambda: len(heard) == 2)
    assert {death.id for death in heard} == gone
    assert {(death.reason, death.detail) for death in heard} == {(CloseReason.WORKER_LOST, "node machine-n2 lost")}
    assert {one.id for one in await two.backend.found()} == set(two.engines["n1"].workers)
    for id in gone:
        assert await two.backend.logs(id) == ""
        await two.backend.stop(id)
    assert await two.start("w5") == ["n1"]
    assert len(heard) == 2
    await two.backend.aclose()
    await following


async def test_a_node_that_is_silent_for_a_moment_keeps_its_workers(files: tuple[Files, Files], folder: Path) -> None:
    async with running(files, folder, "n1", "n2") as two:
        await two.start("w1", "w2")
        await two.backend.found()
        lost = two.nodes["n2"]
        await until(lambda: all(view.report and view.report.workers for view in two.backend.nodes()))
        await lost.aclose()
        two.engines["n2"].is_down = True
        await until(lambda: two.state("n2") is NodeState.SILENT)

        assert {one.id: one.running for one in await two.backend.found()} == {"w1": True, "w2": True}
        assert await two.start("w3", "w4") == ["n1", "n1"]
        with pytest.raises(BackendError):
            await two.backend.stop(next(iter(two.engines["n2"].workers)))


@SOON_LOST
async def test_workers_on_a_node_that_comes_back_are_found(two: Cluster) -> None:
    await two.start("w1", "w2")
    node = two.nodes["n2"]
    await node.aclose()
    await until(lambda: two.state("n2") is NodeState.LOST)
    assert [one.id for one in await two.backend.found()] == ["w1"]

    await node.start()

    await until(lambda: two.state("n2") is NodeState.LIVE)
    assert {one.id for one in await two.backend.found()} == {"w1", "w2"}
    await two.backend.stop(WorkerId("w2"))
    assert two.engines["n2"].workers == {}


async def test_a_gateway_that_starts_while_a_node_is_unreachable_waits_for_its_workers(
    files: tuple[Files, Files], folder: Path
) -> None:
    async with running(files, folder, "n1", "n2", away=("n2",)) as two:
        theirs = replace(worker("w7"), address=node_address("n2", "w7", "worker.sock"))
        two.store.known.append(theirs)
        finding = asyncio.ensure_future(two.backend.found())
        await until(lambda: two.state("n2") is NodeState.SILENT)
        assert not finding.done()
        node = two.nodes["n2"]

        await node.start()

        await until(lambda: "n2" in two.engines)
        assert await finding == []  # the engine reports no such worker
        assert two.state("n2") is NodeState.LIVE


@SOON_LOST
async def test_a_node_that_never_appears_is_lost_with_the_workers_that_the_store_places_there(two: Cluster) -> None:
    two.store.known.append(replace(worker("w7"), address=node_address("n7", "w7", "worker.sock")))

    assert await two.backend.found() == []

    assert two.state("n7") is NodeState.LOST


async def test_deaths_are_reported_from_the_engines_of_all_nodes(files: tuple[Files, Files], folder: Path) -> None:
    async with running(files, folder, "n1", "n2") as two:
        deaths = two.backend.deaths()
        await until(lambda: len(two.engines) == 2)
        told = [Death(WorkerId(id), CloseReason.OUT_OF_MEMORY) for id in ("w1", "w2")]
        await asyncio.sleep(0)  # both engines are followed from the next turn on

        async def first_two() -> list[Death]:
            return [await anext(deaths), await anext(deaths)]

        heard = asyncio.ensure_future(first_two())
        for engine, death in zip(two.engines.values(), told, strict=True):
            engine.deaths_told.publish(death)

        assert sorted(await heard, key=lambda death: death.id) == told


async def test_workers_of_a_draining_node_are_leaving_and_it_gets_no_further_workers(two: Cluster) -> None:
    await two.start("w1", "w2")
    assert two.backend.leaving() == frozenset()

    await two.backend.drain(N2, True)

    assert two.backend.leaving() == set(two.engines["n2"].workers)
    assert two.nodes["n2"].report["is_draining"] is True
    assert await two.start("w3", "w4") == ["n1", "n1"]
    await two.backend.drain(N2, False)
    assert two.backend.leaving() == frozenset()
    assert await two.start("w5") == ["n2"]


async def test_draining_an_unknown_node_is_an_error(two: Cluster) -> None:
    with pytest.raises(BackendError, match="n9"):
        await two.backend.drain(NodeId("n9"), True)


@SOON_LOST
async def test_a_replica_that_finds_a_node_lost_reports_no_deaths_until_it_leads(two: Cluster) -> None:
    deaths = two.backend.deaths()
    await two.start("w1", "w2")
    gone = set(two.engines["n2"].workers)
    two.store.known += [found for engine in two.engines.values() for found in engine.workers.values()]
    two.lease.renew(Lead(0), asked_at=time.monotonic())
    await two.nodes["n2"].aclose()
    await until(lambda: two.state("n2") is NodeState.LOST)
    first = asyncio.ensure_future(anext(deaths))
    two.backend.leads()
    await asyncio.sleep(0)
    assert not first.done()

    two.lease.renew(Lead(2), asked_at=time.monotonic())
    two.backend.leads()

    assert {(await first).id} == gone


@SOON_LOST
async def test_a_replica_that_does_not_lead_reports_a_lost_worker_once_the_leader_removed_it(two: Cluster) -> None:
    deaths = two.backend.deaths()
    await two.start("w1", "w2")
    gone = two.engines["n2"].workers
    two.store.known += gone.values()
    two.lease.renew(Lead(0), asked_at=time.monotonic())
    first = asyncio.ensure_future(anext(deaths))
    await two.nodes["n2"].aclose()
    await until(lambda: two.state("n2") is NodeState.LOST)
    assert not first.done()

    two.store.known.clear()

    assert (await first).id in gone


@SOON_LOST
async def test_a_node_that_comes_back_before_its_loss_was_reported_is_not_reported(two: Cluster) -> None:
    deaths = two.backend.deaths()
    await two.start("w1", "w2")
    two.store.known += two.engines["n2"].workers.values()
    two.lease.renew(Lead(0), asked_at=time.monotonic())
    node = two.nodes["n2"]
    await node.aclose()
    await until(lambda: two.state("n2") is NodeState.LOST)
    await node.start()
    await until(lambda: two.state("n2") is NodeState.LIVE)

    two.lease.renew(Lead(2), asked_at=time.monotonic())
    two.backend.leads()
    await two.nodes["n1"].aclose()

    assert (await anext(deaths)).detail == "node machine-n1 lost"


# -- images


async def test_an_image_name_means_its_newest_build_and_all_nodes_get_that_build(two: Cluster) -> None:
    newer = two.nodes["n2"]
    newer.content[IMAGE], newer.built_at[IMAGE] = b"a newer image", 200.0
    await until(lambda: any(v.report and v.report.built_at[IMAGE] == 200.0 for v in two.backend.nodes()))

    assert await two.backend.prepare(ENVIRONMENT) == image_id(b"a newer image")

    await until(lambda: two.nodes["n1"].content[IMAGE] == b"a newer image")


async def test_only_the_leader_sends_images_to_all_nodes(two: Cluster) -> None:
    newer = two.nodes["n2"]
    newer.content[IMAGE], newer.built_at[IMAGE] = b"a newer image", 200.0
    await until(lambda: any(v.report and v.report.built_at[IMAGE] == 200.0 for v in two.backend.nodes()))
    two.lease.renew(Lead(0), asked_at=time.monotonic())

    assert await two.backend.prepare(ENVIRONMENT) == image_id(b"a newer image")
    assert two.backend._spreading._copies == {}

    two.lease.renew(Lead(2), asked_at=time.monotonic())
    await two.backend.prepare(ENVIRONMENT)
    await until(lambda: two.nodes["n1"].content[IMAGE] == b"a newer image")


async def test_an_image_that_the_chosen_node_lacks_is_copied_there_before_the_start(
    files: tuple[Files, Files], folder: Path
) -> None:
    async with running(files, folder, "n1", "n2", content=b"") as two:
        big = bytes(range(256)) * 2**13
        two.nodes["n2"].content[IMAGE], two.nodes["n2"].built_at[IMAGE] = big, 1.0
        two.nodes["n2"].report["max_containers"] = 0
        await until(
            lambda: any(v.report and v.report.images and not v.report.max_containers for v in two.backend.nodes())
        )
        two.nodes["n1"].may_load.clear()

        starts = [asyncio.ensure_future(two.backend.start(worker(f"w{n}"), ENVIRONMENT)) for n in range(5)]
        await until(lambda: any(one.method == "PUT" for one in two.nodes["n1"].requests))
        starts[0].cancel()  # the other starts share the copy
        two.nodes["n1"].may_load.set()

        await asyncio.gather(*starts[1:])
        assert two.nodes["n1"].content[IMAGE] == big
        assert sum(one.method == "PUT" for one in two.nodes["n1"].requests) == 1
        assert len(two.engines["n1"].workers) == 4


async def test_an_image_that_no_node_has_is_pulled_only_by_its_digest(files: tuple[Files, Files], folder: Path) -> None:
    exact = f"registry.example/math@sha256:{'a' * 64}"
    async with running(files, folder, "n1", "n2", content=b"") as two:
        for node in two.nodes.values():
            node.registry[exact] = b"far"

        with pytest.raises(StartFailed, match="no node has an image env-gateway/math"):
            await two.backend.prepare(ENVIRONMENT)
        with pytest.raises(StartFailed, match="by its digest"):
            await two.backend.prepare(replace(ENVIRONMENT, image="registry.example/math:1"))

        assert await two.backend.prepare(replace(ENVIRONMENT, image=exact)) == image_id(b"far")
        await until(lambda: all(node.content.get(exact) == b"far" for node in two.nodes.values()))


async def test_an_image_that_the_registry_lacks_is_a_temporary_error(files: tuple[Files, Files], folder: Path) -> None:
    exact = f"registry.example/math@sha256:{'a' * 64}"
    async with running(files, folder, "n1", content=b"") as one:
        with pytest.raises(BackendError, match="the registry has none"):
            await one.backend.prepare(replace(ENVIRONMENT, image=exact))


async def test_a_static_server_needs_no_image(two: Cluster) -> None:
    remote = replace(ENVIRONMENT, server=replace(ENVIRONMENT.server, url="http://127.0.0.1:9"))

    assert await two.backend.prepare(remote) == ""


async def test_a_closed_backend_starts_no_workers(two: Cluster) -> None:
    await two.backend.aclose()
    await two.backend.aclose()

    with pytest.raises(BackendError, match="closed"):
        await two.backend.start(worker("w1"), ENVIRONMENT)
