"""Composition root: the one module that knows every adapter.

`Gateway` builds the whole from settings, starts it in order, and takes it down in the reverse one.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import anyio
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.audit import Audit
from gateway.backends.routed import RoutedBackend
from gateway.backends.static import StaticBackend, none_known
from gateway.backends.swarm.dialing import NodeDialer
from gateway.backends.swarm.nodes import NodeState
from gateway.catalog import Catalog
from gateway.closing import Closer
from gateway.core.errors import ConfigError, StoreUnavailable
from gateway.core.leader_lease import LEASE_S
from gateway.core.model import CloseReason, Environment, EnvironmentName, Owner, Session, Setup, Wire, Worker
from gateway.core.nodes import NodeId
from gateway.core.ports import Upstream
from gateway.curricula import Curricula
from gateway.custom_tasks import CustomTaskFolders, offering
from gateway.fronts.areal import ArealFront
from gateway.fronts.door import Door
from gateway.fronts.openenv import OpenEnvFront
from gateway.fronts.ops import OpsFront
from gateway.fronts.ops_curricula import CurriculumRoutes
from gateway.fronts.ops_nodes import NodeRoutes
from gateway.fronts.ops_tasks import TaskRoutes
from gateway.fronts.ors import OrsFront
from gateway.fronts.peers import PeersFront
from gateway.observe.metrics import Metrics
from gateway.parts import (
    hold_containers,
    make_backend,
    make_call_store,
    make_curriculum_store,
    make_nodes,
    make_store,
    make_swarm,
    make_task_store,
)
from gateway.peers import HttpPeers, default_peer_url
from gateway.pool import Pool
from gateway.reading import read_all, read_curricula
from gateway.relay import Relay
from gateway.rollover import Rollover
from gateway.serving import Server, configured, listen
from gateway.sessions import Sessions
from gateway.settings import Settings, parse_keys
from gateway.task_records import TaskRecords
from gateway.task_tables import TaskTables
from gateway.tasks.registry import TaskRegistry, read_splits
from gateway.tasks.run_time import RunTimeTasks
from gateway.tasks.signing import read_trusted
from gateway.tasks.watch import TaskFileWatch
from gateway.upstreams.areal.upstream import ArealUpstream
from gateway.upstreams.calling.recorder import Recorder
from gateway.upstreams.openenv.upstream import OpenEnvUpstream
from gateway.upstreams.ors.own import OrsUpstream
from gateway.upstreams.ors.stock import StockOrsUpstream

logger = logging.getLogger(__name__)

STORE_WAIT_S = 30.0
"""How long a start waits for a store that is still coming up."""
GC_THRESHOLD = 20_000
"""Containers that came and did not go yet, between two collections of the youngest; Python's own is 700, some ten
calls. With 100,000 a call costs a fourteenth less at a thousand callers, and an idle episode 9 KiB instead of 3."""
LEAVE_S = 1.0
"""By so much earlier than calls under way are broken off they are answered."""
OWNER_WAIT_S = 6.0
"""How long a start waits for a sign of life of the gateway whose store it is; the store counts one that was silent for
5 s as gone."""
IMAGES_WAIT_S = 5.0
"""How long a start waits for the engine to say what images' names stand for; pulls go on behind."""
LAG_EVERY_S = 0.1
"""How often the event loop's lateness is measured."""
PROBE_END_S = 30.0
"""The longest teardown that the trial of a task waits for."""
_PROBER = Owner("(probe)")
"""Whose the episodes are in which tasks are tried."""
_OPS_SEGMENTS = ("healthz", "readyz", "metrics", "admin")
_AREAL_SEGMENTS = ("areal", "api")


class Gateway:
    """One gateway process: its parts, wired."""

    def __init__(self, settings: Settings, *, catalog: Catalog, tasks: TaskRegistry, port: int | None = None) -> None:
        """Wire everything; connect to nothing yet.

        *port* is the one that is listened on, where the settings leave it open.
        """
        self.settings = settings
        self.catalog = catalog
        self.tasks = tasks
        self.is_draining = False
        """Other replicas are to be asked; this one still serves what comes."""
        self.is_closing = False
        """The server has ended. Until then a socket may be closed, but none is refused a reset."""
        self.replica = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.metrics = Metrics()
        nodes = make_nodes(settings)
        dialer = NodeDialer(nodes) if nodes is not None else None
        self.relay = Relay(dial=dialer.dial if dialer is not None else None)
        self.store = make_store(settings, self.replica)
        self.task_store = make_task_store(settings)
        self.curriculum_store = make_curriculum_store(settings)
        self.records = TaskRecords(self.curriculum_store, registry=tasks)
        self.run_time = RunTimeTasks(registry=tasks, store=self.task_store, offered=catalog.offered)
        self.task_files = TaskFileWatch(tasks, lambda: catalog)
        known = self._known_workers if settings.store != "memory" else none_known
        self.swarm = (
            make_swarm(settings, catalog, nodes, known=known, is_leading=lambda: self.pool.is_leading)
            if nodes is not None
            else None
        )
        self.backend = RoutedBackend(self.swarm or make_backend(settings, catalog), StaticBackend(known), list(catalog))
        secret = settings.read_secret()
        shared = settings.store != "memory"  # else there are no other replicas
        me = settings.peer_url or default_peer_url(settings.host, port or settings.port)
        self.peers = HttpPeers(me if shared else "", secret)
        self.call_store = make_call_store(settings, self.replica)
        self.recorder = Recorder(self.call_store)
        self._stock = StockOrsUpstream(self.relay, recorder=self.recorder)
        self._areal = ArealUpstream(self.relay, recorder=self.recorder)
        self._openenv = OpenEnvUpstream(
            self.relay,
            self.peers,
            rebind=self._rebind,
            find=self.store.find,
            recorder=self.recorder,
            dial_socket=dialer.dial_socket if dialer is not None else None,
        )
        upstreams: dict[Wire, Upstream] = {
            Wire.OWN: OrsUpstream(self.relay, secret=secret),
            Wire.ORS: self._stock,
            Wire.OPENENV: self._openenv,
            Wire.AREAL: self._areal,
        }
        self.custom_tasks = CustomTaskFolders(settings.custom_tasks_dir, catalog)
        self.custom_tasks.changed(offering(catalog))
        self.rollover = Rollover(
            catalog,
            image_of=self.backend.prepare,
            directory=None if settings.static_servers() and not settings.environments else settings.catalog_dir,
            names=settings.environments,
            containers=settings.uses_containers,
            image_tag=settings.image_tag,
            complete=self._completed,
        )
        self.rollover.changed(lambda: self.custom_tasks.follow(catalog))
        if nodes is not None:  # a machine that comes may have an image that the others lack, or lack one that they have
            nodes.changed(lambda view: self.rollover.ask_again() if view.state is NodeState.LIVE else None)
        closer = Closer(store=self.store, upstreams=upstreams, metrics=self.metrics, played=self.records.note)
        self.sessions = Sessions(
            store=self.store,
            upstreams=upstreams,
            catalog=catalog,
            closer=closer,
            metrics=self.metrics,
            unused=lambda ticket: self.curricula.unused(ticket),
        )
        self.curricula = Curricula(
            store=self.curriculum_store,
            records=self.records,
            tables=TaskTables(tasks, catalog=catalog, asked=self.sessions),
            files=read_curricula(settings, catalog, tasks),
            runs_in=partial(_runs_in, catalog),
        )
        self.pool = Pool(
            store=self.store,
            backend=self.backend,
            upstreams=upstreams,
            transport=self.relay,
            catalog=catalog,
            closer=closer,
            metrics=self.metrics,
            replica=self.replica,
            remembered=self.sessions.remembered,
            is_settled=self.rollover.is_settled,
            may_start=self.rollover.may_start,
            leads=self._leads,
            expected=self.curricula.expected,
            max_workers=settings.max_workers,
        )
        self.audit = Audit(
            store=self.store,
            backend=self.backend,
            upstreams=upstreams,
            catalog=catalog,
            lost=self.pool.lost,
            metrics=self.metrics,
            replica=self.replica,
            lead_s=LEASE_S,
        )
        self.app = self._door()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start in order; on leaving, end calls under way, then workers that nobody could find again.

        Raises:
            ConfigError, StoreUnavailable, BackendError: at start.
        """
        try:
            await self._start_store()
            await self._own_store()
            await self.backend.check()
            await self.custom_tasks.look()  # before the audit: workers that the last gateway left are of that make
            await self.rollover.look_images(timeout_s=IMAGES_WAIT_S)  # likewise
            await self.pool.made_whole()
            await self.audit.begin()
            async with anyio.create_task_group() as group:
                loops = (
                    self.sessions.run,
                    self.pool.run,
                    self.audit.run,
                    self.custom_tasks.run,
                    self.rollover.run,
                    self.run_time.run,
                    self.task_files.run,
                    self.records.run,
                    self.curricula.run,
                    self._watch_the_loop,
                )
                for loop in loops:
                    group.start_soon(loop)
                yield
                self.is_draining = self.is_closing = True
                await self.sessions.drain(self.settings.drain_s)
                group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await self.pool.aclose()  # before its store and backend, also where it was not begun
                await self.rollover.aclose()
                if not self._workers_are_found_again:
                    # Servers that somebody else runs go on, and so do the sessions in them, if the store does.
                    is_kept = self.settings.store != "memory"
                    static = [one.name for one in self.catalog if one.server.url] if is_kept else []
                    with contextlib.suppress(StoreUnavailable):
                        await self.pool.stop_all(spare=static)
                for upstream in (self._openenv, self._stock, self._areal):
                    await upstream.aclose()
                await self.records.flush()
                await self.curricula.aclose()
                await self.recorder.aclose()
                await self.call_store.aclose()
                await self.peers.aclose()
                await self.relay.aclose()
                await self.backend.aclose()
                await self.task_store.aclose()
                await self.curriculum_store.aclose()
                await self.store.aclose()

    def leave(self) -> None:
        """Answer what is still under way: openings that wait may come again, and calls may run on in their workers."""
        self.sessions.leave()
        self.relay.leave()

    @property
    def _workers_are_found_again(self) -> bool:
        return self.settings.store != "memory" and self.settings.uses_containers

    async def _start_store(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + STORE_WAIT_S
        while True:
            try:
                await self.store.start()
                await self.store.ping()
            except StoreUnavailable as error:
                if loop.time() > deadline:
                    raise
                logger.warning("store_unavailable during=start error=%s", error)
                await asyncio.sleep(1)
            else:
                return

    async def _own_store(self) -> None:
        """See to it that all replicas of the store have one secret, where workers are found by what is made of it.

        Others would see none of each other's workers, and end the sessions in them.

        Raises:
            ConfigError: a gateway with another secret uses the store.
        """
        if not self.settings.uses_containers:
            return
        owner = self.settings.read_owner()
        if await self.store.own(owner) == owner:
            return
        await asyncio.sleep(OWNER_WAIT_S)
        theirs = await self.store.own(owner, takes_over=True)
        if theirs != owner:
            raise ConfigError(
                f"GATEWAY_STORE with GATEWAY_STORE_PREFIX={self.settings.store_prefix} is in use by a gateway with "
                f"another secret (owner {theirs}, this one is {owner}), and they would end each other's sessions: set "
                "the same GATEWAY_SECRET in both, or another GATEWAY_STORE_PREFIX here"
            )

    async def _completed(self, environment: Environment) -> Environment:
        """Add to what an environment's file says what stands elsewhere, before it is offered.

        Raises:
            ConfigError: its tasks are wrong.
        """
        if self.catalog.offered(environment.name) is None:  # of one that is known `TaskFileWatch` sees changes
            found = await asyncio.to_thread(read_splits, environment.tasks) if environment.tasks is not None else {}
            self.tasks.offer(environment.name, found, environment.env_types)
        return await self.custom_tasks.fill(environment)

    async def _watch_the_loop(self) -> None:
        """Measure how late the event loop is, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            began_at = loop.time()
            await asyncio.sleep(LAG_EVERY_S)
            self.metrics.lag(max(0.0, loop.time() - began_at - LAG_EVERY_S))

    def _leads(self) -> None:
        self.rollover.ask_again()
        if self.swarm is not None:
            self.swarm.leads()

    async def _known_workers(self) -> list[Worker]:
        loads = await self.store.load()
        return [entry.worker for load in loads.values() for entry in load.workers]

    async def _rebind(self, session: Session, handle: str) -> bool:
        return await self.store.rebind(session.id, session.lease, was=session.handle, handle=handle)

    async def _probe(self, environment: Environment, task: dict[str, Any]) -> None:
        """Open an episode of *task* in a worker, wait for what its agent would be told first, and end it."""
        environment = self.catalog.named(environment.name)  # as it is now
        name = f"probe-{secrets.token_hex(8)}"
        try:
            await self.sessions.open(
                owner=_PROBER,
                name=name,
                environment=environment,
                setup=Setup(spec=task),
                fingerprint=name,
                task="(probe)",
            )
            await self.sessions.prompt(_PROBER, name, within_s=environment.timeouts.setup_s)
        finally:
            with anyio.move_on_after(PROBE_END_S, shield=True):
                await self.sessions.end(_PROBER, name, CloseReason.DELETED, wait_s=PROBE_END_S)

    def _node_rows(self) -> list[dict[str, Any]]:
        """The machines, for operators; none where there is but this one."""
        rows = []
        for view in self.swarm.nodes() if self.swarm is not None else []:
            report = view.report
            row: dict[str, Any] = {
                "id": view.id,
                "name": view.name,
                "state": view.state.value,
                "silent_s": view.silent_s,
            }
            row["address"] = "{}:{}".format(*view.endpoint) if view.endpoint is not None else ""
            if report is not None:
                row |= {
                    "draining": report.is_draining,
                    "workers": len(report.workers),
                    "containers": report.containers,
                    "max_containers": report.max_containers,
                    "cpus": report.cpus,
                    "memory_bytes": report.memory_bytes,
                    "available_bytes": report.available_bytes,
                    "images": dict(report.images),
                }
            rows.append(row)
        return rows

    async def _drain_node(self, id: str, is_draining: bool) -> None:
        if self.swarm is not None:
            await self.swarm.drain(NodeId(id), is_draining)

    def _door(self) -> ASGIApp:
        settings = self.settings
        task_routes = TaskRoutes(
            tasks=self.run_time,
            max_body_bytes=settings.max_body_bytes,
            trusted=read_trusted(settings.task_keys),
            signatures=settings.task_signatures,
            probe=self._probe,
        )
        ops = OpsFront(
            store=self.store,
            catalog=self.catalog,
            metrics=self.metrics,
            is_draining=lambda: self.is_draining,
            routes=[
                *task_routes.routes(),
                *NodeRoutes(rows=self._node_rows, drain=self._drain_node).routes(),
                *CurriculumRoutes(curricula=self.curricula, records=self.records, tasks=self.run_time).routes(),
            ],
        ).app()
        ors = OrsFront(
            sessions=self.sessions,
            catalog=self.catalog,
            tasks=self.run_time,
            curricula=self.curricula,
            max_body_bytes=settings.max_body_bytes,
            lazy_binding=settings.lazy_binding,
            strict_paths=settings.strict_paths,
            strip_platform_keys=settings.strip_platform_keys,
        )
        areal = ArealFront(
            sessions=self.sessions,
            store=self.store,
            catalog=self.catalog,
            tasks=self.run_time,
            curricula=self.curricula,
            max_body_bytes=settings.max_body_bytes,
            tally=self.metrics.tally,
            is_draining=lambda: self.is_draining,
        )
        openenv = OpenEnvFront(
            sessions=self.sessions,
            store=self.store,
            catalog=self.catalog,
            tasks=self.tasks,
            curricula=self.curricula,
            secret=settings.read_secret(),
            max_body_bytes=settings.max_body_bytes,
            admit=lambda environment, task: self.run_time.admit(task, environment.name),
            refresh=self.run_time.refresh,
            is_draining=lambda: self.is_closing,
        )
        peers = PeersFront(settings.read_secret(), self._openenv.serve)
        inside = by_first_segment(ors=ors, ops=ops, areal=areal, openenv=openenv, peers=peers)
        return Door(inside, trainers=parse_keys(settings.trainer_keys), operators=parse_keys(settings.operator_keys))


def by_first_segment(
    *, ors: ASGIApp, ops: ASGIApp, areal: ASGIApp, openenv: ASGIApp, peers: ASGIApp | None = None
) -> ASGIApp:
    """Send a request to the front that its first path segment belongs to; the root is ORS'."""
    fronts = dict.fromkeys(_OPS_SEGMENTS, ops) | dict.fromkeys(_AREAL_SEGMENTS, areal) | {"openenv": openenv}
    if peers is not None:
        fronts["peers"] = peers

    async def rooms(scope: Scope, receive: Receive, send: Send) -> None:
        segment = scope["path"].lstrip("/").partition("/")[0]
        front = fronts.get(segment, ors)
        if scope["type"] == "websocket" and front is not openenv:
            await send({"type": "websocket.close", "code": 1008})  # before it is accepted: 403
            return
        await front(scope, receive, send)

    return rooms


def _runs_in(catalog: Catalog, name: EnvironmentName, split: str) -> EnvironmentName | None:
    """The environment that sessions of a split run in; None where it is not on offer."""
    environment = catalog.offered(name)
    return environment.for_split(split).name if environment is not None else None


async def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; a second one ends calls under way too.

    Raises:
        ConfigError, StoreUnavailable, BackendError: at start.
    """
    catalog, tasks = await read_all(settings.checked())
    held = hold_containers(settings)
    listener = listen(settings.host, settings.port)
    gateway = Gateway(settings, catalog=catalog, tasks=tasks, port=listener.getsockname()[1])
    server = Server(configured(gateway.app, end_s=settings.drain_s))
    loop = asyncio.get_running_loop()

    def end() -> None:
        if gateway.is_draining:  # told twice
            server.force_exit = True
            gateway.leave()
            close()
            return
        gateway.is_draining = True  # readiness turns first; then no new connection, then the calls end
        logger.info("gateway_draining replica=%s notice_s=%g", gateway.replica, settings.drain_notice_s)
        server.leave()
        loop.call_later(settings.drain_notice_s, close)

    def close() -> None:
        server.should_exit = True
        # In time: what uvicorn breaks off itself is a 500, which SDKs repeat, and a step would run twice.
        loop.call_later(max(settings.drain_s / 2, settings.drain_s - LEAVE_S), gateway.leave)

    try:
        async with gateway.running():
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, end)
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            _tame_the_collector()
            logger.info("gateway_ready url=http://%s:%s replica=%s", shown, port, gateway.replica)
            await server.serve(sockets=[listener])
    finally:
        listener.close()
        held.close()
    logger.info("gateway_stopped replica=%s", gateway.replica)


def _tame_the_collector() -> None:
    """Keep the garbage collector from walking what lives as long as the process, and from running every few calls.

    A full collection walks every session that is remembered; reference counting frees nearly all of what calls make.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 50)
