"""Run workers as containers on the node with the most room, through one inner backend per node's engine gate.

The workers of a silent node count as running. The workers of a lost node are announced as dead. If the node comes
back, `SwarmBackend.found` lists their remaining containers, which are orphans then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from gateway.backends.docker.container import FORWARDER_IMAGE
from gateway.backends.external import StoredLoads, as_running, stored_workers
from gateway.backends.folders import SOCKET_NAME
from gateway.backends.swarm.gate_sockets import GateSockets
from gateway.backends.swarm.image_sync import ImageSync
from gateway.backends.swarm.nodes import Nodes, NodeState, NodeView
from gateway.backends.swarm.placement import Placement
from gateway.core.addresses import Kind, node_address, parse_address
from gateway.core.broadcast import Broadcast
from gateway.core.environment import Environment
from gateway.core.errors import BackendError, GatewayError, StartFailed
from gateway.core.ids import WorkerId
from gateway.core.leader_lease import LeaderLease
from gateway.core.placement import NodeId
from gateway.core.ports.backend import Backend
from gateway.core.session import CloseReason
from gateway.core.worker import BackendWorker, Death, Worker

logger = logging.getLogger(__name__)

CHECKS_AT_ONCE: Final = 8
LOOK_S: Final = 1.0
"""Seconds between two checks of the store for the workers of a lost node."""

Engine = Callable[[str, NodeId], Backend]
"""Factory of a node's inner backend, called with the URL of the node's engine gate and the node's id."""


class SwarmBackend:
    """Starts and stops workers as containers on many nodes."""

    def __init__(
        self,
        *,
        nodes: Nodes,
        engine: Engine,
        gates_dir: Path,
        environments: Collection[Environment] = (),
        forwarder_image: str = FORWARDER_IMAGE,
        store: StoredLoads | None = None,
        lease: LeaderLease | None = None,
    ) -> None:
        """Create the backend without connecting to the nodes.

        Args:
            nodes: The directory of nodes; closed with this backend.
            engine: Factory of a node's inner backend.
            gates_dir: Folder of the local sockets that lead to the engine gates.
            environments: All environments, with the resources that their workers need.
            forwarder_image: Image of the forwarder of third-party images.
            store: The store with the workers that other replicas started. Only the store lists the workers of a node
                that has not answered yet. None without other replicas.
            lease: The lease of this replica's control loop. Replicas may disagree whether a node is lost, so only the
                leader's view ends sessions. None if this replica always leads.
        """
        self._nodes = nodes
        self._engine = engine
        self._placing = Placement(nodes, environments=environments, forwarder_image=forwarder_image)
        self._store = store
        self._lease = lease
        self._gates = GateSockets(gates_dir, nodes)
        self._spreading = ImageSync(nodes)
        self._deaths: Broadcast[Death] = Broadcast()
        self._engines: dict[NodeId, Backend] = {}
        self._opening = asyncio.Lock()
        self._where: dict[WorkerId, NodeId] = {}
        """The node of each worker that was started or found; nodes' reports add further workers a moment later."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_found = False
        self._follows = False
        self._untold: dict[NodeId, list[Death]] = {}
        """Unannounced deaths on each node that was lost while another replica led."""
        self._followed: set[NodeId] = set()
        """Nodes whose engines' deaths this backend forwards."""
        self._closed = False
        nodes.changed(self._changed)

    # -- the Backend protocol -------------------------------------------------------------------------------------

    async def start(self, worker: Worker, environment: Environment, lease: LeaderLease | None = None) -> str:
        """Start *worker* on the node with the most room for it; see ``Backend.start``."""
        if self._closed:
            raise StartFailed("the backend is closed")
        await self._nodes.settled()
        need = self._placing.need(environment)
        node = self._placing.begin(worker.id, need)
        try:
            for reference, image in need.images.items():
                await self._spreading.ensure(node, reference, image)
            address = await (await self._engine_of(node)).start(worker, environment, lease)
        except BaseException:
            self._placing.forget(worker.id)
            raise
        self._where[worker.id] = node
        self._placing.ended(worker.id)
        return address

    async def stop(self, id: WorkerId) -> None:
        """Stop a worker on its node; skip a lost node, whose workers are found as orphans when it returns."""
        for backend in await self._backends_of(id):
            await backend.stop(id)
        self._where.pop(id, None)
        self._placing.forget(id)

    async def logs(self, id: WorkerId, *, lines: int = 20) -> str:
        """Return the worker's output; an empty string if its node is lost. See ``Backend.logs``."""
        return "".join([await backend.logs(id, lines=lines) for backend in await self._backends_of(id)])

    async def found(self) -> list[BackendWorker]:
        """Return the workers of all nodes that are not lost; for a silent node, its last known workers.

        The first call waits until each known node answers or is lost. A starting gateway sends that call, and treats
        missing workers as lost.
        """
        await self._nodes.settled()
        known = self._on_nodes(await self._stored_workers())
        for node in {node for node, _ in known}:
            self._nodes.expect(node)
        if not self._has_found:
            await self._nodes.decided()
            self._has_found = True
        views = [view for view in self._nodes.views() if view.state is not NodeState.LOST]
        lists = await asyncio.gather(*(self._found_on(view, known) for view in views))
        where = {entry.id: view.id for view, entries in zip(views, lists, strict=True) for entry in entries}
        self._where = where | self._placing.begun()
        return [entry for entries in lists for entry in entries]

    async def pause(self, id: WorkerId, lease: LeaderLease | None = None) -> None:
        """Pause the worker on its node; see ``Backend.pause``."""
        await (await self._backend_of(id)).pause(id, lease)

    async def resume(self, id: WorkerId) -> None:
        """Resume the worker on its node; see ``Backend.resume``."""
        await (await self._backend_of(id)).resume(id)

    async def prepare(self, environment: Environment) -> str:
        """Return the id of the newest build on any node, and copy it to the other nodes; see ``Backend.prepare``."""
        await self._nodes.settled()
        pinned = {
            reference: await self._spreading.pinned(reference) for reference in self._placing.references(environment)
        }
        self._placing.pin(environment, pinned)
        for reference, image in pinned.items():
            if self._is_leading:  # otherwise each replica would send a copy to every node
                self._spreading.spread(reference, image)
        return pinned.get(environment.image, "")

    def deaths(self) -> AsyncIterator[Death]:
        """Yield the deaths that nodes' engines report, and the deaths of lost nodes' workers."""
        self._nodes.begin()
        if not self._follows and not self._closed:
            self._follows = True
            for view in self._nodes.views():
                self._follow_soon(view.id)
        return self._deaths.follow()

    def engines(self) -> int:
        """Return the number of nodes that answer, at least 1: callers need not wait longer for a silent cluster."""
        return max(1, len(self._nodes.live()))

    def leaving(self) -> frozenset[WorkerId]:
        """Return the workers on draining nodes; see ``Backend.leaving``."""
        draining = {
            view.id: view for view in self._nodes.views() if view.report is not None and view.report.is_draining
        }
        reported = [id for view in draining.values() if view.report is not None for id in view.report.workers]
        return frozenset([*reported, *(id for id, node in self._where.items() if node in draining)])

    async def check(self) -> None:
        """Check every node that answers, and log each failure; raise ``BackendError`` if no node passes.

        The check waits for the first node, because a gateway and its nodes may start together.
        """
        await self._nodes.first()
        views = [view for view in self._nodes.views() if view.state is NodeState.LIVE]
        if not views:
            raise BackendError(f"no node answers: {self._nodes.problems()}")
        room = asyncio.Semaphore(CHECKS_AT_ONCE)

        async def checked(view: NodeView) -> str:
            async with room:
                try:
                    await (await self._engine_of(view.id)).check()
                except BackendError as error:
                    logger.warning("node_unfit node=%s name=%s error=%s", view.id, view.name, error)
                    return f"node {view.name}: {error}"
            return ""

        lacks = await asyncio.gather(*map(checked, views))
        if all(lacks):
            raise BackendError("; ".join(lacks))

    async def aclose(self) -> None:
        """Close the connections to nodes; containers keep running."""
        if self._closed:
            return
        self._closed = True
        await self._spreading.aclose()
        await asyncio.gather(*(backend.aclose() for backend in self._engines.values()))
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=5.0)  # the inner backends have ended their streams of deaths
        for task in list(self._tasks):
            task.cancel()
        self._deaths.close()
        await self._gates.aclose()
        await self._nodes.aclose()

    def leads(self) -> None:
        """Announce the deaths on nodes that were lost while another replica led: that replica may have been on one."""
        for deaths in self._untold.values() if self._is_leading else ():
            for death in deaths:
                self._deaths.publish(death)
            deaths.clear()

    @property
    def _is_leading(self) -> bool:
        return self._lease is None or bool(self._lease.fence)

    async def _stored_workers(self) -> list[Worker]:
        return await stored_workers(self._store) if self._store is not None else []

    # -- for operators --------------------------------------------------------------------------------------------

    def nodes(self) -> list[NodeView]:
        """Return all nodes, sorted by name."""
        self._nodes.begin()
        return self._nodes.views()

    async def drain(self, id: NodeId, is_draining: bool) -> None:
        """Make node *id* refuse or accept new workers; the node stores this setting.

        Raises:
            BackendError: The node is unknown or lost, or does not answer.
        """
        path = "/env-gateway/node/draining"
        body = b"true" if is_draining else b"false"
        async with self._nodes.request(id, "PUT", path, content=body) as response:
            await response.aread()
        self._nodes.corrected(id, is_draining=is_draining)

    # -- workers' nodes --------------------------------------------------------------------------------------------

    def _node_of(self, id: WorkerId) -> NodeId | None:
        if (node := self._placing.begun().get(id) or self._where.get(id)) is not None:
            return node
        reports = (view.report for view in self._nodes.views() if view.report is not None)
        return next((report.id for report in reports if id in report.workers), None)

    async def _backends_of(self, id: WorkerId) -> list[Backend]:
        """Return the backend of worker *id*'s node: all live nodes' for an unknown worker, none for a lost node."""
        await self._nodes.settled()
        node = self._node_of(id)
        if node is None:
            views = [view for view in self._nodes.views() if view.state is NodeState.LIVE]
            return [await self._engine_of(view.id) for view in views]
        view = self._nodes.view(node)
        if view is None or view.state is NodeState.LOST:
            return []
        return [await self._engine_of(node)]

    async def _backend_of(self, id: WorkerId) -> Backend:
        node = self._node_of(id)
        if node is None:  # another replica may just have started it
            await self.found()
            node = self._node_of(id)
        view = None if node is None else self._nodes.view(node)
        if node is None or view is None or view.state is NodeState.LOST:
            raise BackendError(f"there is no worker {id}")
        return await self._engine_of(node)

    # -- nodes ----------------------------------------------------------------------------------------------------

    async def _engine_of(self, id: NodeId) -> Backend:
        async with self._opening:
            if id not in self._engines:
                url = await self._gates.open(id)
                self._engines[id] = self._engine(url, id)
                if self._closed:
                    await self._engines[id].aclose()
        return self._engines[id]

    async def _found_on(self, view: NodeView, known: Sequence[tuple[NodeId, Worker]]) -> list[BackendWorker]:
        if view.state is NodeState.LIVE:
            try:
                return await (await self._engine_of(view.id)).found()
            except BackendError as error:
                logger.warning("node_silent node=%s name=%s error=%s", view.id, view.name, error)
        there = {worker.id: as_running(worker) for node, worker in known if node == view.id}
        reported = view.report.workers if view.report is not None else {}
        for id, environment in reported.items():
            if id not in there:
                address = node_address(view.id, id, SOCKET_NAME)
                there[id] = BackendWorker(id=id, environment=environment, digest="", address=address, running=True)
        return list(there.values())

    def _on_nodes(self, workers: Iterable[Worker]) -> list[tuple[NodeId, Worker]]:
        found = []
        for worker in workers:
            try:
                address = parse_address(worker.address)
            except ValueError:
                continue  # a starting worker has no address yet
            if address.kind is Kind.NODE:
                found.append((NodeId(address.node), worker))
        return found

    def _changed(self, view: NodeView) -> None:
        """Handle a node that was found, moved or lost."""
        if view.state is not NodeState.LOST:
            self._untold.pop(view.id, None)
            if self._follows:
                self._follow_soon(view.id)
            return
        self._gates.cut(view.id)  # requests that wait for the lost node would get no answer
        reported = view.report.workers if view.report is not None else {}
        noted = [id for id, node in self._where.items() if node == view.id]
        begun = [id for id, node in self._placing.begun().items() if node == view.id]
        there = dict.fromkeys([*reported, *noted, *begun])
        for id in there:
            self._where.pop(id, None)
        self._untold[view.id] = [Death(id, CloseReason.WORKER_LOST, f"node {view.name} lost") for id in there]
        self.leads()
        if self._untold[view.id]:
            self._spawn(self._tell_when_ended(view.id))
        if view.report is not None:
            self._nodes.corrected(view.id, workers={})

    async def _tell_when_ended(self, id: NodeId) -> None:
        """Announce each lost worker after the leader has removed it from the store, because calls here wait for it."""
        while deaths := self._untold.get(id):
            await asyncio.sleep(LOOK_S)
            try:
                known = {worker.id for worker in await self._stored_workers()}
            except GatewayError as error:
                logger.debug("workers_not_asked error=%s", error)
                continue
            for death in [one for one in deaths if one.id not in known]:
                deaths.remove(death)
                self._deaths.publish(death)

    def _follow_soon(self, id: NodeId) -> None:
        if id not in self._followed:
            self._followed.add(id)
            self._spawn(self._follow(id))

    async def _follow(self, id: NodeId) -> None:
        try:
            backend = await self._engine_of(id)
        except BackendError as error:
            logger.warning("deaths_not_followed node=%s error=%s", id, error)
            self._followed.discard(id)
            return
        async for death in backend.deaths():
            self._deaths.publish(death)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
