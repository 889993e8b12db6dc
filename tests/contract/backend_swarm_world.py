"""A cluster whose only machine is this one: a real node over TLS on loopback, in front of the real engine."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway.backends.docker.backend import DockerBackend, EnginePace
from gateway.backends.docker.mounts import HostPaths
from gateway.backends.swarm.backend import SwarmBackend
from gateway.backends.swarm.dialing import NodeDialer
from gateway.backends.swarm.nodes import Nodes
from gateway.core.environment import Environment
from gateway.core.placement import NodeId
from gateway.node.cluster import Cluster
from gateway.node.gate import Gate
from gateway.node.policy import Rules
from gateway.node.serve import serving_cluster
from gateway.node.tls import NODE_NAME, client_context, server_context
from gateway.node.tunnel import Tunnel as NodeRelay
from gateway.node.vouchers import Vouchers
from tests.contract.backend_world import ENGINE_URL, SOCKETS_ON_NODES
from tests.fakes.certificates import cluster
from tests.fakes.nodes import HOST
from tests.fakes.ports import reserved_port

DIALERS: dict[str, NodeDialer] = {}
"""The dialer to the workers of each node of a test, by the node's id."""


@dataclass(frozen=True)
class Machine:
    """The world's view of its node."""

    backend: SwarmBackend
    nodes: Nodes
    gate: Gate
    dialer: NodeDialer

    def offer(self, environment: Environment) -> None:
        """Put *environment* into the catalog of the node, in place of all others."""
        self.gate.take(self.gate.rules.with_environments([environment]))


@asynccontextmanager
async def swarm_at(
    rules: Rules, environment: Environment, shared_dir: Path, *, tasks_dir: Path | None = None
) -> AsyncIterator[Machine]:
    """Yield a backend over one node, whose gate has the *rules*. The workers' folders are in *shared_dir*."""
    async with AsyncExitStack() as stack:
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="eg-")))
        gateways, nodes_own = cluster(own / "tls")
        gate = Gate(engine=ENGINE_URL, rules=rules, socket_view=shared_dir, custom_tasks_view=tasks_dir)
        stack.push_async_callback(gate.aclose)
        vouchers = Vouchers(nodes_own.ca, nodes_own.cert, nodes_own.key)
        node = Cluster(gate, engine=ENGINE_URL, vouchers=vouchers, state=own / "state", image_max_bytes=2**30)
        stack.push_async_callback(node.aclose)
        node.check()
        tls = server_context(nodes_own.ca, nodes_own.cert, nodes_own.key)
        relay, port = NodeRelay(sockets=shared_dir, tls=tls), reserved_port(count=2)
        await stack.enter_async_context(serving_cluster(node, relay, host=HOST, port=port, tls=tls, drain_s=0.5))
        nodes = Nodes(
            [(HOST, port)],
            tls=client_context(gateways.ca, gateways.cert, gateways.key),
            tls_name=NODE_NAME,
            every_s=0.2,
        )
        backend = SwarmBackend(
            nodes=nodes,
            engine=_engine(rules, environment, shared_dir, tasks_dir),
            gates_dir=own / "gates",
            environments=[environment],
            forwarder_image=rules.forwarder_image,
        )
        stack.push_async_callback(backend.aclose)
        await nodes.settled()
        (found,) = nodes.live()
        SOCKETS_ON_NODES[found.id], DIALERS[found.id] = shared_dir, NodeDialer(nodes)
        yield Machine(backend, nodes, gate, DIALERS[found.id])


def _engine(
    rules: Rules, environment: Environment, shared_dir: Path, tasks_dir: Path | None
) -> Callable[[str, NodeId], DockerBackend]:
    def engine(url: str, node: NodeId) -> DockerBackend:
        return DockerBackend(
            url=url,
            instance=rules.instance,
            owner="0" * 16,
            paths=HostPaths(socket_dir=shared_dir, node=node, custom_tasks_dir=tasks_dir),
            pace=EnginePace(threads=4, stop_grace_s=1.0),
            environments=[environment],
            forwarder_image=rules.forwarder_image,
        )

    return engine
