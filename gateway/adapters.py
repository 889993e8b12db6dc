"""Creates the adapters that the settings name: stores and backends. Only this module and `app` know their classes.

A gateway on a laptop needs neither redis-py nor the Docker SDK nor httpx, which would take two fifths of its start
time. They are therefore imported only if the settings name them.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.backends.process import ProcessBackend
from gateway.catalog.catalog import Catalog
from gateway.core.errors import ConfigError, StoreUnavailable
from gateway.core.file_lock import Taken, hold
from gateway.core.leader_lease import LeaderLease
from gateway.core.placement import NodeId
from gateway.core.ports.backend import Backend
from gateway.core.ports.calls import CallStore
from gateway.core.ports.curricula import CurriculumStore
from gateway.core.ports.store import Store
from gateway.core.ports.tasks import TaskStore
from gateway.settings import Settings, inherited_environ
from gateway.stores.memory.curricula import MemoryCurriculumStore
from gateway.stores.memory.sessions import MemoryStore
from gateway.stores.memory.tasks import MemoryTaskStore

if TYPE_CHECKING:
    from gateway.backends.docker.backend import DockerBackend
    from gateway.backends.swarm.backend import SwarmBackend
    from gateway.backends.swarm.dialing import NodeDialer
    from gateway.backends.swarm.nodes import Nodes
    from gateway.stores.redis.replicas import RedisReplicas

logger = logging.getLogger(__name__)

STORE_WAIT_S = 30.0
"""Seconds that a start waits for a store that is still starting."""
IDENTITY = "gateway:identity"
"""Name of the gateway's identity among the states of curricula, whose names have no colon."""
OWNER_WAIT_S = 6.0
"""Seconds that a start waits for a sign of life of the gateway that owns the store. The store counts a gateway that was
silent for 5 s as gone."""


def check_store(store: str) -> str:
    """Return the location that *store* names without user and password, because another gateway may read it.

    Raises:
        ConfigError: *store* is neither ``memory`` nor a valid URL.
    """
    if store == "memory":
        return store
    from gateway.stores.redis.client import place_of

    try:
        return place_of(store)
    except ValueError as error:
        raise ConfigError(f"GATEWAY_STORE: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """The stores that replicas share, each with its own interface."""

    sessions: Store
    tasks: TaskStore
    """Tasks that are added at run time."""
    curricula: CurriculumStore
    """Task records and draws of curricula."""
    calls: CallStore | None = None
    """Calls to third-party servers; None if there are no other replicas."""
    replicas: RedisReplicas | None = None
    """Addresses of the replicas; None if there are no others."""

    async def aclose(self) -> None:
        """Close all stores."""
        for store in (self.replicas, self.calls, self.tasks, self.curricula, self.sessions):
            if store is not None:
                await store.aclose()


def make_stores(settings: Settings, replica: str) -> Stores:
    """Create the stores that the settings name, for the process *replica*; connect to nothing yet."""
    if settings.store == "memory":
        return Stores(
            sessions=MemoryStore(queue_max=settings.queue_max, closed_kept_s=settings.closed_kept_s),
            tasks=MemoryTaskStore(),
            curricula=MemoryCurriculumStore(),
        )
    check_store(settings.store)
    from gateway.stores.redis.calls import RedisCallStore
    from gateway.stores.redis.curricula import RedisCurriculumStore
    from gateway.stores.redis.replicas import RedisReplicas
    from gateway.stores.redis.sessions import RedisStore
    from gateway.stores.redis.tasks import RedisTaskStore

    url, prefix = settings.store, settings.store_prefix
    return Stores(
        sessions=RedisStore(
            url=url,
            prefix=prefix,
            replica=replica,
            queue_max=settings.queue_max,
            closed_kept_s=settings.closed_kept_s,
        ),
        tasks=RedisTaskStore(url=url, prefix=prefix),
        curricula=RedisCurriculumStore(url=url, prefix=prefix),
        calls=RedisCallStore(url=url, prefix=prefix, replica=replica),
        replicas=RedisReplicas(url, prefix=prefix),
    )


async def start_store(store: Store) -> None:
    """Connect to *store*, and wait if it is still starting. Raises ``StoreUnavailable``, for a refusal at once."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + STORE_WAIT_S
    while True:
        try:
            await store.start()
            await store.ping()
        except StoreUnavailable as error:
            if error.is_refusal or loop.time() > deadline:
                raise
            logger.warning("store_unavailable during=start error=%s", error)
            await asyncio.sleep(1)
        else:
            return


async def own_store(store: Store, settings: Settings) -> None:
    """Ensure that all replicas of a store with container workers have the same secret.

    The workers' labels are derived from the secret. Replicas with another secret would not see each other's workers,
    and would end the sessions in them.

    Raises:
        ConfigError: A gateway with another secret uses the store.
    """
    if not settings.uses_containers:
        return
    owner = settings.read_owner()
    if await store.own(owner) == owner:
        return
    await asyncio.sleep(OWNER_WAIT_S)
    theirs = await store.own(owner, takes_over=True)
    if theirs != owner:
        raise ConfigError(
            f"GATEWAY_STORE with GATEWAY_STORE_PREFIX={settings.store_prefix} is in use by a gateway with "
            f"another secret (owner {theirs}, this one is {owner}), and they would end each other's sessions: set "
            "the same GATEWAY_SECRET in both, or another GATEWAY_STORE_PREFIX here"
        )


async def identify(store: CurriculumStore, own: str) -> str:
    """Return the identity of the gateway whose replicas share *store*. A store without one takes *own*.

    Raises ``StoreUnavailable``.
    """
    while True:
        version, body = await store.state(IDENTITY)
        if body:
            return body.decode()
        if await store.set_state(IDENTITY, version, own.encode()):
            return own


def new_identity(settings: Settings, port: int) -> str:
    """Return an identity for a gateway whose store has none: 32 hexadecimal digits.

    With a store in memory it is the same after a restart, so that the gateway finds its episodes.
    """
    if settings.store != "memory":
        return secrets.token_hex(16)
    place = f"{settings.state_dir.resolve()}\0{settings.instance}\0{port}"
    return hashlib.sha256(place.encode()).hexdigest()[:32]


def make_backend(settings: Settings, catalog: Catalog) -> Backend:
    """Create the backend that the settings name."""
    if settings.backend == "process":
        return ProcessBackend(
            socket_dir=settings.socket_dir,
            sandbox_dir=settings.sandbox_dir,
            custom_tasks_dir=settings.custom_tasks_dir,
            environ=inherited_environ(),
        )
    return _docker_backend(settings, catalog, url=settings.docker_url)


def make_nodes(settings: Settings) -> tuple[Nodes, NodeDialer] | None:
    """Return the cluster's machines and their dialer; return None if the settings name another backend.

    Raises:
        ConfigError: The hosts, or the files of the cluster, are wrong.
    """
    if settings.backend != "swarm":
        return None
    from gateway.backends.swarm.dialing import NodeDialer
    from gateway.backends.swarm.nodes import Nodes
    from gateway.backends.swarm.reports import parse_hosts
    from gateway.node.tls import NODE_NAME, client_context

    tls = client_context(*settings.cluster_files())
    nodes = Nodes(parse_hosts(settings.nodes), tls=tls, tls_name=NODE_NAME, lost_s=settings.nodes_lost_s)
    return nodes, NodeDialer(nodes)


def make_swarm(
    settings: Settings,
    catalog: Catalog,
    nodes: Nodes,
    *,
    store: Store | None = None,
    lease: LeaderLease | None = None,
) -> SwarmBackend:
    """Create the backend for many machines; see `SwarmBackend` for *store* and *lease*."""
    from gateway.backends.swarm.backend import SwarmBackend

    def engine(url: str, node: NodeId) -> DockerBackend:
        return _docker_backend(settings, catalog, url=url, node=node)

    return SwarmBackend(
        nodes=nodes,
        engine=engine,
        gates_dir=settings.socket_dir,
        environments=[environment for environment in catalog if not environment.server.url],
        forwarder_image=settings.forwarder_image,
        store=store,
        lease=lease,
    )


def hold_containers(settings: Settings) -> ExitStack:
    """Claim this gateway's containers for this process, until the returned stack is closed or the process ends.

    Replicas find in their store which containers are in use. A gateway with another store would remove them as
    leftovers of a dead gateway. So would a second process with a memory store.

    Raises:
        ConfigError: A live process has the containers, the store's URL is invalid, or the state folder can't be
            written.
    """
    held = ExitStack()
    if not settings.uses_containers:
        return held
    path = settings.state_dir / f"{settings.instance}-{settings.read_owner()}.lock"
    alone = settings.store == "memory"
    ours = check_store(settings.store)
    if not alone:
        ours += f" GATEWAY_STORE_PREFIX={settings.store_prefix}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        held.enter_context(hold(path, ours, alone=alone))
    except Taken as taken:
        theirs = taken.content or "memory"
        raise ConfigError(
            f"another gateway with GATEWAY_INSTANCE={settings.instance} runs, with GATEWAY_STORE={theirs} "
            f"where this one has {ours}, and they would remove each other's workers ({path} is locked): "
            "set another GATEWAY_INSTANCE here, or the same Redis in both"
        ) from None
    except OSError as error:
        # A given secret needs no state folder, as in a read-only container. No other gateway shares that folder.
        if alone or settings.secret is None:
            raise ConfigError(f"GATEWAY_STATE_DIR={settings.state_dir}: {error}") from error
    return held


def _docker_backend(settings: Settings, catalog: Catalog, *, url: str, node: NodeId | None = None) -> DockerBackend:
    from gateway.backends.docker.backend import DockerBackend, EnginePace
    from gateway.backends.docker.mounts import HostPaths

    return DockerBackend(
        url=url,
        instance=settings.instance,
        owner=settings.read_owner(),
        paths=HostPaths(
            socket_dir=settings.socket_dir,
            socket_volume=settings.socket_volume,
            node=node,
            custom_tasks_dir=settings.custom_tasks_dir,
            custom_tasks_volume=settings.custom_tasks_volume,
        ),
        pace=EnginePace(threads=settings.docker_threads),
        environments=[environment for environment in catalog if not environment.server.url],
        forwarder_image=settings.forwarder_image,
    )
