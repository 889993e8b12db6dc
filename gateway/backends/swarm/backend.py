"""Workers as containers on the machine that has most room for them: one inner backend a node, through its engine gate.

A node that does not answer for a moment keeps its workers: they run, as far as anybody knows. One that is lost has
none any more, and each of them is told of as dead; what is left of them when it comes back is found, as orphans.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from gateway.backends.broadcast import DeathBroadcast
from gateway.backends.docker.container import FORWARDER_IMAGE
from gateway.backends.external import StoredLoads, as_running, stored_workers
from gateway.backends.folders import SOCKET_NAME
from gateway.backends.swarm.gate_sockets import GateSockets
from gateway.backends.swarm.image_sync import ImageSync
from gateway.backends.swarm.nodes import Nodes, NodeState, NodeView
from gateway.backends.swarm.placement import Placement
from gateway.core.addresses import Kind, node_address, parse_address
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
"""Between two looks at the store whether the workers of a lost node were ended."""

Engine = Callable[[str, NodeId], Backend]
"""Makes the backend of one node, given its gate's URL and its id."""


class SwarmBackend:
    """Starts and stops containers on many machines."""

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
        """Make no connection yet.

        Args:
            nodes: The machines; closed with this backend.
            engine: Makes the backend of one.
            gates_dir: Where the sockets that lead to their gates are made.
            environments: On offer, for what their workers take of a machine.
            forwarder_image: What runs beside somebody else's images.
            store: Has the workers that other processes started: of a node that was not heard of yet nobody else tells.
                None: there are no other processes.
            lease: Says whether this process runs the control loop. That a node is lost is an opinion, and another
                process may have another one: only a leader's ends sessions. None: it always does.
        """
        self._nodes = nodes
        self._engine = engine
        self._placing = Placement(nodes, environments=environments, forwarder_image=forwarder_image)
        self._store = store
        self._lease = lease
        self._gates = GateSockets(gates_dir, nodes)
        self._spreading = ImageSync(nodes)
        self._deaths = DeathBroadcast()
        self._engines: dict[NodeId, Backend] = {}
        self._opening = asyncio.Lock()
        self._where: dict[WorkerId, NodeId] = {}
        """Of each worker that was started or found its node; reports say more, a moment later."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_found = False
        self._follows = False
        self._untold: dict[NodeId, list[Death]] = {}
        """Of nodes that were lost while another process led."""
        self._followed: set[NodeId] = set()
        """Nodes whose engines' deaths are passed on."""
        self._closed = False
        nodes.changed(self._changed)

    # -- the seam -------------------------------------------------------------------------------------------------

    async def start(self, worker: Worker, environment: Environment, lease: LeaderLease | None = None) -> str:
        """Start *worker* on the node that has most room for it; see ``Backend.start``."""
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
        """Stop a worker where it is; one of a node that is lost is left for when that is found again."""
        for backend in await self._backends_of(id):
            await backend.stop(id)
        self._where.pop(id, None)
        self._placing.forget(id)

    async def logs(self, id: WorkerId, *, lines: int = 20) -> str:
        """See ``Backend.logs``; empty of a node that is lost."""
        return "".join([await backend.logs(id, lines=lines) for backend in await self._backends_of(id)])

    async def found(self) -> list[BackendWorker]:
        """List the workers of all nodes but lost ones; of a node that does not answer those that it had.

        The first time nodes that have workers are waited for until they answer or are lost: who asks then, as a gateway
        that begins does, takes workers that do not answer at once for lost.
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
        """See ``Backend.pause``."""
        await (await self._backend_of(id)).pause(id, lease)

    async def resume(self, id: WorkerId) -> None:
        """See ``Backend.resume``."""
        await (await self._backend_of(id)).resume(id)

    async def prepare(self, environment: Environment) -> str:
        """Name the image of the newest build on any node, and bring it to the others; see ``Backend.prepare``."""
        await self._nodes.settled()
        pinned = {
            reference: await self._spreading.pinned(reference) for reference in self._placing.references(environment)
        }
        self._placing.pin(environment, pinned)
        for reference, image in pinned.items():
            if self._is_leading:  # else each replica would send every node a copy
                self._spreading.spread(reference, image)
        return pinned.get(environment.image, "")

    def deaths(self) -> AsyncIterator[Death]:
        """Follow what the nodes' engines tell, and nodes that are lost."""
        self._nodes.begin()
        if not self._follows and not self._closed:
            self._follows = True
            for view in self._nodes.views():
                self._follow_soon(view.id)
        return self._deaths.follow()

    def engines(self) -> int:
        """One on each node that answers; nobody waits longer for a cluster that is silent."""
        return max(1, len(self._nodes.live()))

    def leaving(self) -> frozenset[WorkerId]:
        """Those on nodes that drain."""
        draining = {
            view.id: view for view in self._nodes.views() if view.report is not None and view.report.is_draining
        }
        reported = [id for view in draining.values() if view.report is not None for id in view.report.workers]
        return frozenset([*reported, *(id for id, node in self._where.items() if node in draining)])

    async def check(self) -> None:
        """Check every node that answers; one that has all that is needed is enough, and the others are told of.

        A gateway and its nodes may have been started together: the first node is waited for.
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
        """Let go of nodes; containers go on."""
        if self._closed:
            return
        self._closed = True
        await self._spreading.aclose()
        await asyncio.gather(*(backend.aclose() for backend in self._engines.values()))
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=5.0)  # the inner backends have ended their deaths
        for task in list(self._tasks):
            task.cancel()
        self._deaths.close()
        await self._gates.aclose()
        await self._nodes.aclose()

    def leads(self) -> None:
        """Tell of the nodes that were lost while another process led: it may have been on one of them."""
        for deaths in self._untold.values() if self._is_leading else ():
            for death in deaths:
                self._deaths.add(death)
            deaths.clear()

    @property
    def _is_leading(self) -> bool:
        return self._lease is None or bool(self._lease.fence)

    async def _stored_workers(self) -> list[Worker]:
        return await stored_workers(self._store) if self._store is not None else []

    # -- for operators --------------------------------------------------------------------------------------------

    def nodes(self) -> list[NodeView]:
        """All nodes, by name."""
        self._nodes.begin()
        return self._nodes.views()

    async def drain(self, id: NodeId, is_draining: bool) -> None:
        """Let node *id* take no more workers, or take them again; it keeps that in mind.

        Raises:
            BackendError: it is not there, or does not answer.
        """
        path = "/env-gateway/node/draining"
        body = b"true" if is_draining else b"false"
        async with self._nodes.request(id, "PUT", path, content=body) as response:
            await response.aread()
        self._nodes.corrected(id, is_draining=is_draining)

    # -- where ----------------------------------------------------------------------------------------------------

    def _node_of(self, id: WorkerId) -> NodeId | None:
        if (node := self._placing.begun().get(id) or self._where.get(id)) is not None:
            return node
        reports = (view.report for view in self._nodes.views() if view.report is not None)
        return next((report.id for report in reports if id in report.workers), None)

    async def _backends_of(self, id: WorkerId) -> list[Backend]:
        """Where worker *id* is; of one that nobody knows all nodes that answer; none if its node is lost."""
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
        if node is None:  # another replica started it a moment ago
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
                continue  # it starts, and has none yet
            if address.kind is Kind.NODE:
                found.append((NodeId(address.node), worker))
        return found

    def _changed(self, view: NodeView) -> None:
        """A node came, moved, or is lost."""
        if view.state is not NodeState.LOST:
            self._untold.pop(view.id, None)
            if self._follows:
                self._follow_soon(view.id)
            return
        self._gates.cut(view.id)  # what still waits there for an answer waits for nobody
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
        """Tell of each worker of a lost node once the store has none: who leads ended it, and calls here hang in it."""
        while deaths := self._untold.get(id):
            await asyncio.sleep(LOOK_S)
            try:
                known = {worker.id for worker in await self._stored_workers()}
            except GatewayError as error:
                logger.debug("workers_not_asked error=%s", error)
                continue
            for death in [one for one in deaths if one.id not in known]:
                deaths.remove(death)
                self._deaths.add(death)

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
            self._deaths.add(death)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
