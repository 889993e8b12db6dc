"""The composition root, which imports every adapter.

`Gateway` wires all parts from the settings, starts them in order, and stops them in reverse order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Mapping
from typing import cast

import anyio
from starlette.types import ASGIApp

from gateway.adapters import (
    Stores,
    identify,
    make_backend,
    make_nodes,
    make_stores,
    make_swarm,
    new_identity,
    own_store,
    start_store,
)
from gateway.backends.external import RoutedBackend
from gateway.catalog.reload import CatalogReload
from gateway.catalog.task_modules import CustomTaskFolders
from gateway.content import Completion, Content
from gateway.core.environment import UpstreamKind
from gateway.core.errors import StoreUnavailable
from gateway.core.leader_lease import LeaderLease
from gateway.core.periodic import pause
from gateway.core.ports.backend import Backend
from gateway.core.ports.step_log import StepLogQueries
from gateway.core.ports.upstream import FrameUpstream, Upstream
from gateway.core.retry import STORE_PATIENCE_S
from gateway.core.scaling import Demands
from gateway.core.session import CloseReason
from gateway.frontends.admin.app import AdminFrontend
from gateway.frontends.admin.curricula import CurriculumRoutes
from gateway.frontends.admin.episodes import EpisodeRoutes
from gateway.frontends.admin.flaky import FlakyRoutes
from gateway.frontends.admin.nodes import NodeRoutes
from gateway.frontends.admin.replays import ReplayRoutes
from gateway.frontends.admin.tasks import TaskProbe, TaskRoutes
from gateway.frontends.areal.app import ArealFrontend
from gateway.frontends.asgi import FrontendParts
from gateway.frontends.auth import Authenticator
from gateway.frontends.dashboard.app import Dashboard
from gateway.frontends.dashboard.pages import Pages
from gateway.frontends.dashboard.sign_in import SignIn
from gateway.frontends.nemo.app import NemoFrontend
from gateway.frontends.openenv.app import OpenEnvFrontend
from gateway.frontends.ors.app import OrsFrontend
from gateway.frontends.replicas import ReplicaFrontend
from gateway.frontends.rollouts import RolloutFrontend
from gateway.frontends.router import Router
from gateway.frontends.tracing import Tracing, span_exporter
from gateway.metrics import Metrics
from gateway.pool.audit import Audit
from gateway.pool.background import BackgroundTasks
from gateway.pool.executor import PlanExecutor
from gateway.pool.expiry import Expiry
from gateway.pool.leadership import Leadership
from gateway.pool.loop import ControlLoop
from gateway.pool.pausing import Pausing
from gateway.pool.planner import Planner
from gateway.pool.recovery import StoreRecovery
from gateway.pool.starts import WorkerStarts
from gateway.pool.stops import WorkerStops
from gateway.pool.suspects import SuspectWorkers
from gateway.server import Lifecycle
from gateway.sessions.cache import SessionCache
from gateway.sessions.call_parts import CallParts
from gateway.sessions.closing import SessionCloser
from gateway.sessions.interruption import AdmissionGate
from gateway.sessions.last_replies import KeptResults, LastReplies
from gateway.sessions.opening import SessionOpener
from gateway.sessions.service import Sessions
from gateway.sessions.unrecorded_ends import UnrecordedEnds
from gateway.sessions.worker_queries import WorkerQueries
from gateway.settings import Settings
from gateway.settings.session_secrets import SessionSecrets
from gateway.stores.step_log.reader import StepLogReader
from gateway.stores.step_log.writer import StepLogWriter
from gateway.tasks.curricula.service import Curricula
from gateway.tasks.curricula.stats import TaskStats
from gateway.tasks.curricula.tables import TaskTables
from gateway.tasks.file_watch import TaskFileWatch
from gateway.tasks.lookup import TaskLookup
from gateway.tasks.resolver import TaskResolver
from gateway.tasks.reward_records import signing_key
from gateway.tasks.runtime import RuntimeTasks
from gateway.tasks.signing import read_trusted
from gateway.upstreams.areal.upstream import ArealUpstream
from gateway.upstreams.idempotency.recorder import Recorder
from gateway.upstreams.nemo.upstream import NemoUpstream
from gateway.upstreams.openenv.upstream import OpenEnvUpstream
from gateway.upstreams.ors.own import OrsUpstream
from gateway.upstreams.ors.third_party import ThirdPartyOrsUpstream
from gateway.upstreams.replica_client import ReplicaClient, default_peer_url
from gateway.upstreams.replica_logs import LOG, ReplicaLogs, answer
from gateway.upstreams.transport import HttpTransport

logger = logging.getLogger(__name__)

EXTERNAL_END_S = 20.0
"""Seconds after which a gateway that stops begins no further end of a session on an external server."""
SESSIONS_MAX = 1_000_000
"""More than the sessions that one store holds."""
IDENTITY_S = 30.0
"""Seconds between two looks whether the store still has the gateway's identity."""
IMAGES_WAIT_S = 5.0
"""Seconds that a start waits for the engine's ids of the images; pulls continue in the background."""


class Gateway:
    """Wires all parts of one gateway process; no other class does."""

    def __init__(
        self,
        settings: Settings,
        content: Content,
        *,
        port: int | None = None,
        replica: str = "",
        stores: Stores | None = None,
        backend: Backend | None = None,
        upstreams: Mapping[UpstreamKind, Upstream] | None = None,
        store_patience_s: float = STORE_PATIENCE_S,
    ) -> None:
        """Wire everything; connect to nothing yet.

        Args:
            settings: Settings of this process.
            content: Environments, tasks and curricula to serve.
            port: The port that the gateway listens on, if the settings leave it open.
            replica: Unique name of this process; empty: a name is generated.
            stores: Replace the stores of the settings; the caller closes them, and workers outlive this gateway as the
                stores do.
            backend: Replaces the backend of the settings; the caller closes it.
            upstreams: Replace the default upstreams of the same kind; the caller closes them.
            store_patience_s: Seconds that a request waits for a store that does not answer.
        """
        self.settings = settings
        self.catalog, self.tasks, self._static = content.catalog, content.tasks, content.static
        self.keys = settings.keyring()
        self.keys.changed(self.catalog.set_tenants)
        self.lifecycle, self.metrics, self.lease = Lifecycle(), Metrics(), LeaderLease()
        self._new_identity = new_identity(settings, port or settings.port)
        self.replica = replica or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._owned = contextlib.AsyncExitStack()
        """Closes everything that this gateway created, in reverse order."""
        self._has_own_stores = stores is None
        self.stores = stores or make_stores(settings, self.replica)
        self.store = self.stores.sessions
        if stores is None:
            self._owned.push_async_callback(self.stores.aclose)
        self.secrets = SessionSecrets(settings.secrets_dir)
        self.log = StepLogWriter(
            settings.step_log_path,
            self.replica,
            max_bytes=settings.step_log_bytes,
            max_days=settings.step_log_days,
            secrets=settings.known_secrets(),
            of_sessions=self.secrets.of,
        )
        self._owned.push_async_callback(self.log.aclose)
        self._own_log = StepLogReader(settings.step_log_path)
        self.metrics.show_step_log(lambda: self.log.lost)
        self._wire_workers(backend)
        upstreams = self._wire_upstreams(upstreams or {}, port)
        self._wire_sessions(content, upstreams, store_patience_s)
        self._wire_reload()
        self._wire_pool(upstreams)
        self._wire_control_loop(upstreams)
        self.app = self._frontends()

    # -- wiring, from the outside in ------------------------------------------------------------------------------

    def _wire_workers(self, backend: Backend | None) -> None:
        """Create the backend, which starts workers, and the transport, which reaches them."""
        settings, catalog = self.settings, self.catalog
        cluster = make_nodes(settings) if backend is None else None
        self._nodes = cluster[0] if cluster is not None else None
        self._dialer = cluster[1] if cluster is not None else None
        self.swarm = None
        if self._nodes is not None:
            self.swarm = make_swarm(settings, catalog, self._nodes, store=self.store, lease=self.lease)
            self.lease.follow(self.swarm)
        default = backend or self.swarm or make_backend(settings, catalog)
        self.backend = RoutedBackend(default, list(catalog), store=self.store)
        if backend is None:
            self._owned.push_async_callback(self.backend.aclose)
        self.transport = HttpTransport(dial=self._dialer.dial if self._dialer is not None else None)
        self._owned.push_async_callback(self.transport.aclose)

    def _wire_upstreams(
        self, given: Mapping[UpstreamKind, Upstream], port: int | None
    ) -> Mapping[UpstreamKind, Upstream]:
        """Create the upstreams, one for each kind of server."""
        settings, secret = self.settings, self.settings.read_secret()
        self.peers = None
        if settings.store != "memory":  # the memory store has no other replicas
            me = settings.peer_url or default_peer_url(settings.host, port or settings.port)
            self.peers = ReplicaClient(me, secret)
            self._owned.push_async_callback(self.peers.aclose)
        self.logs: StepLogQueries = self._own_log
        if self.peers is not None and self.stores.replicas is not None:
            self.logs = ReplicaLogs(self._own_log, client=self.peers, peers=self.stores.replicas.live)
        recorder = None
        if self.stores.calls is not None:
            recorder = Recorder(self.stores.calls)
            self._owned.push_async_callback(recorder.aclose)
        self._results = results = KeptResults(self.store)
        ors = ThirdPartyOrsUpstream(self.transport, recorder=recorder, results=results)
        areal = ArealUpstream(self.transport, recorder=recorder, results=results)
        nemo = NemoUpstream(self.transport, recorder=recorder, results=results)
        self._openenv = OpenEnvUpstream(
            self.transport,
            self.peers,
            store=self.store,
            recorder=recorder,
            results=results,
            dial_socket=self._dialer.dial_socket if self._dialer is not None else None,
        )
        for upstream in (areal, nemo, ors, self._openenv):
            self._owned.push_async_callback(upstream.aclose)
        return {
            UpstreamKind.OWN: OrsUpstream(self.transport, secret=secret, results=results),
            UpstreamKind.ORS: ors,
            UpstreamKind.OPENENV: self._openenv,
            UpstreamKind.AREAL: areal,
            UpstreamKind.NEMO: nemo,
            **given,
        }

    def _wire_sessions(self, content: Content, upstreams: Mapping[UpstreamKind, Upstream], patience_s: float) -> None:
        """Create the request path: tasks and curricula to choose from, and sessions to open and to act in."""
        store, catalog, tasks = self.store, self.catalog, self.tasks
        self.records = TaskStats(self.stores.curricula, registry=tasks)
        self.closer = SessionCloser(
            store=store, upstreams=upstreams, metrics=self.metrics, log=self.log, records=self.records
        )
        self.admission = AdmissionGate()
        self.queries = WorkerQueries(store=store, upstreams=upstreams, closer=self.closer, waiting=self.admission)
        self.curricula = Curricula(
            store=self.stores.curricula,
            records=self.records,
            tables=TaskTables(tasks, catalog=catalog, queries=self.queries),
            files=content.curricula,
            catalog=catalog,
        )
        self.runtime_tasks = RuntimeTasks(registry=tasks, store=self.stores.tasks, catalog=catalog)
        lookup = TaskLookup(self.runtime_tasks, queries=self.queries, curricula=self.curricula)
        self.resolver = TaskResolver(lookup=lookup, queries=self.queries, catalog=catalog)
        self.session_cache = cache = SessionCache(store, catalog, log=self.log, patience_s=patience_s)
        opener = SessionOpener(
            store=store,
            upstreams=upstreams,
            closer=self.closer,
            cache=cache,
            metrics=self.metrics,
            log=self.log,
            patience_s=patience_s,
            waiting=self.admission,
            tickets=self.curricula,
            keys=self.keys,
            secrets=self.secrets,
            scorers=self.records.current,
        )
        calls = CallParts(
            store=store,
            upstreams=upstreams,
            frames=cast(FrameUpstream, upstreams[UpstreamKind.OPENENV]),
            catalog=catalog,
            cache=cache,
            closer=self.closer,
            results=self._results,
            keys=self.keys,
            metrics=self.metrics,
            log=self.log,
        )
        self.sessions = Sessions(
            opener=opener,
            closer=self.closer,
            cache=cache,
            calls=calls,
            replies=LastReplies(self.store, patience_s=patience_s),
            patience_s=patience_s,
        )

    def _wire_reload(self) -> None:
        """Create the parts that detect changed files and images."""
        settings, catalog = self.settings, self.catalog
        self.custom_tasks = CustomTaskFolders(settings.custom_tasks_dir, catalog)
        self.task_files = TaskFileWatch(self.tasks, catalog)
        self.reload = CatalogReload(
            catalog,
            backend=self.backend if settings.uses_containers else None,
            directory=None if settings.static_servers() and not settings.environments else settings.catalog_dir,
            names=settings.environments,
            containers=settings.uses_containers,
            image_tag=settings.image_tag,
            completion=Completion(catalog, self.tasks, self.custom_tasks),
        )
        self.lease.follow(self.reload)
        if self._nodes is not None:  # a new machine may have an image that the other machines lack, or lack an image
            self._nodes.changed(lambda view: self.reload.ask_again() if view.is_live else None)

    def _wire_pool(self, upstreams: Mapping[UpstreamKind, Upstream]) -> None:
        """Create the parts that start and stop workers, and leader election."""
        store, backend, metrics = self.store, self.backend, self.metrics
        self.background, self.demands = BackgroundTasks(), Demands()
        self.starts = WorkerStarts(
            store=store,
            backend=backend,
            upstreams=upstreams,
            transport=self.transport,
            metrics=metrics,
            lease=self.lease,
            demands=self.demands,
        )
        self.worker_stops = WorkerStops(
            store=store,
            backend=backend,
            transport=self.transport,
            catalog=self.catalog,
            metrics=metrics,
            closer=self.closer,
            tasks=self.background,
        )
        recovery = StoreRecovery(
            store=store,
            backend=backend,
            upstreams=upstreams,
            catalog=self.catalog,
            closer=self.closer,
            cache=self.session_cache,
        )
        self.leadership = Leadership(
            store=store,
            replica=self.replica,
            lease=self.lease,
            recovery=recovery,
            starts=self.starts,
            stops=self.worker_stops,
            tasks=self.background,
            metrics=metrics,
        )

    def _wire_control_loop(self, upstreams: Mapping[UpstreamKind, Upstream]) -> None:
        """Create the control loop and the audit."""
        store, backend, catalog, tasks = self.store, self.backend, self.catalog, self.background
        self.planner = Planner(
            catalog=catalog,
            forecast=self.curricula,
            starts=self.starts,
            demands=self.demands,
            metrics=self.metrics,
            max_workers=self.settings.max_workers,
        )
        executor = PlanExecutor(
            store=store,
            backend=backend,
            catalog=catalog,
            starts=self.starts,
            stops=self.worker_stops,
            pausing=Pausing(store=store, backend=backend, lease=self.lease, tasks=tasks),
            reload=self.reload,
            tasks=tasks,
        )
        self.expiry = Expiry(store=store, upstreams=upstreams, catalog=catalog, closer=self.closer, tasks=tasks)
        self.pool = ControlLoop(
            store=store,
            backend=backend,
            leadership=self.leadership,
            planner=self.planner,
            executor=executor,
            expiry=self.expiry,
            suspects=SuspectWorkers(store=store, upstreams=upstreams, catalog=catalog, tasks=tasks),
            tasks=tasks,
        )
        self.audit = Audit(
            store=store,
            backend=backend,
            upstreams=upstreams,
            catalog=catalog,
            stops=self.worker_stops,
            metrics=self.metrics,
            replica=self.replica,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start in order; on exit, end running calls, then stop workers that no other gateway could find again.

        Raises:
            ConfigError, StoreUnavailable, BackendError: The start failed.
        """
        try:
            await start_store(self.store)
            await own_store(self.store, self.settings)
            self.log.gateway = await identify(self.stores.curricula, self._new_identity)
            await self.backend.check()
            await self.custom_tasks.look()  # before the audit: remaining workers have this revision
            await self.reload.look_images(timeout_s=IMAGES_WAIT_S)  # likewise
            await self.leadership.until_complete()
            await self.audit.begin()
            async with self.looping():
                yield
                self.lifecycle.is_draining = self.lifecycle.is_closing = True
                await self.sessions.drain(self.settings.drain_s)
        finally:
            with anyio.CancelScope(shield=True):
                await self.pool.aclose()  # before its store and backend, even if it was not started
                await self.reload.aclose()
                if not self._workers_are_found_again:
                    # External servers continue. Their sessions continue too, if the store does.
                    external = {one.name: one for one in self.catalog.all() if one.server.url}
                    is_kept = self.settings.store != "memory"
                    with contextlib.suppress(StoreUnavailable):
                        if external and not is_kept:
                            held = await self.store.sessions(limit=SESSIONS_MAX)
                            ended = [(one, external[one.environment]) for one in held if one.environment in external]
                            await self.closer.end_all(ended, CloseReason.SHUTDOWN, within_s=EXTERNAL_END_S)
                        await self.pool.stop_all(spare=external if is_kept else ())
                await self.records.flush()
                await self.curricula.aclose()
                await self.aclose()

    @contextlib.asynccontextmanager
    async def looping(self) -> AsyncIterator[None]:
        """Run all background loops; when this ends, they and their tasks have ended too."""
        async with anyio.create_task_group() as group:
            for loop in (
                self.keys.run,
                self.session_cache.run,
                self.pool.run,
                self.audit.run,
                self.custom_tasks.run,
                self.reload.run,
                self.runtime_tasks.run,
                self.task_files.run,
                self.records.run,
                self.curricula.run,
                self.log.run,
                self._announce,
                self._keep_identity,
                UnrecordedEnds(store=self.store, log=self.log, episodes=self._own_log).run,
                self.metrics.watch_event_loop,
            ):
                group.start_soon(loop)
            if self._static is not None:
                group.start_soon(self._static.run, self.reload.offer)
            yield
            group.cancel_scope.cancel()

    async def _keep_identity(self) -> None:
        """Give the gateway's identity back to a store that lost its data, for replicas that start later."""
        while True:
            await pause(IDENTITY_S)
            if self.log.gateway:
                with contextlib.suppress(StoreUnavailable):
                    await identify(self.stores.curricula, self.log.gateway)

    async def aclose(self) -> None:
        """Close the connections and stores that this gateway created. `running` does it at its end."""
        await self._owned.aclose()

    def leave(self) -> None:
        """Answer all running requests: clients may retry waiting openings, and calls may continue in their workers."""
        self.admission.end()
        self.transport.leave()

    @property
    def _workers_are_found_again(self) -> bool:
        """True if workers outlive this gateway, for the next gateway or for other replicas."""
        return not self._has_own_stores or (self.settings.store != "memory" and self.settings.uses_containers)

    def _admin_frontend(self) -> ASGIApp:
        settings, tasks, probe = self.settings, self.runtime_tasks, TaskProbe(self.sessions, self.catalog)
        task_routes = TaskRoutes(
            tasks=tasks,
            max_body_bytes=settings.max_body_bytes,
            trusted=read_trusted(settings.task_keys),
            signatures=settings.task_signatures,
            instance=settings.instance,
            probe=probe,
        )
        curriculum_routes = CurriculumRoutes(curricula=self.curricula, records=self.records, tasks=tasks)
        flaky_routes = FlakyRoutes(flaky=self.curricula.weights.flaky, records=self.records, catalog=self.catalog)
        queries = self.logs
        episode_routes = EpisodeRoutes(
            log=self.log, queries=queries, key=signing_key(settings.read_secret()), instance=settings.instance
        )
        replay_routes = ReplayRoutes(
            sessions=self.sessions, catalog=self.catalog, store=self.store, log=self.log, queries=queries
        )
        routes = [
            *task_routes.routes(),
            *NodeRoutes(self.swarm).routes(),
            *curriculum_routes.routes(),
            *flaky_routes.routes(),
            *episode_routes.routes(),
            *replay_routes.routes(),
        ]
        return AdminFrontend(
            store=self.store,
            sessions=self.sessions,
            backend=self.backend,
            catalog=self.catalog,
            metrics=self.metrics,
            lifecycle=self.lifecycle,
            routes=routes,
        ).app()

    async def _serve_replica(self, operation: str, session: str, lease: str, message: bytes, within_s: float) -> bytes:
        """Run another replica's request: an operation in a session that this replica holds, or a look in its log."""
        if operation == LOG:
            return await answer(self.log, self._own_log, message)
        return await self._openenv.serve(operation, session, lease, message, within_s)

    async def _announce(self) -> None:
        """Tell the other replicas where they reach this one, until cancelled."""
        if self.peers is not None and self.stores.replicas is not None:
            await self.stores.replicas.run(self.peers.me)

    def _frontends(self) -> ASGIApp:
        settings, secret = self.settings, self.settings.read_secret()
        parts = FrontendParts(
            sessions=self.sessions,
            queries=self.queries,
            resolver=self.resolver,
            store=self.store,
            catalog=self.catalog,
            metrics=self.metrics,
            lifecycle=self.lifecycle,
            max_body_bytes=settings.max_body_bytes,
        )
        self.areal = ArealFrontend(parts)
        sign_in = SignIn(secret, self.keys)
        router = Router(
            ors=OrsFrontend(
                parts,
                lazy_binding=settings.lazy_binding,
                strict_paths=settings.strict_paths,
                strip_platform_keys=settings.strip_platform_keys,
            ),
            openenv=OpenEnvFrontend(parts, secret=secret),
            areal=self.areal,
            nemo=NemoFrontend(parts, secret=secret),
            rollouts=RolloutFrontend(parts, log=self.log).app(),
            admin=self._admin_frontend(),
            dashboard=self._dashboard(sign_in),
            replicas=ReplicaFrontend(secret, self._serve_replica),
        )
        inside: ASGIApp = router
        if settings.otlp_endpoint:
            provider = span_exporter(settings.otlp_endpoint, self.replica)
            self._owned.push_async_callback(asyncio.to_thread, provider.shutdown)
            inside = Tracing(router, provider)
        return Authenticator(inside, settings, self.keys, self.metrics, sign_in=sign_in)

    def _dashboard(self, sign_in: SignIn) -> ASGIApp:
        pages = Pages(
            store=self.store,
            catalog=self.catalog,
            metrics=self.metrics,
            log=self.log,
            queries=self.logs,
            curricula=self.curricula,
            records=self.records,
            settings=self.settings,
            cluster=self.swarm,
        )
        return Dashboard(pages, sign_in=sign_in, queries=self.logs, metrics=self.metrics).app()
