"""Gateways with machines, for a comparison. Each gateway has its own store, instance and nodes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from bench.load.episodes import ok
from bench.load.http1 import Address, ask_once, request_bytes
from bench.measures.nodes_report import GATEWAY, NODES, REDIS, WORKERS, Way, rss_mib
from bench.subjects.catalogs import STEPS, STEPS_IMAGE, write_catalog
from bench.subjects.lab import Lab, Machine, NodeSettings, node_ready, processes_of, start_node
from bench.subjects.processes import ServerProcess, StartError, Usage, usage
from bench.subjects.redis_server import RedisServer, redis_server
from bench.subjects.targets import Servers
from gateway.core.addresses import parse_address
from gateway.node.tls import CA_FILE, GATEWAY_FILES, make_certificates

HERE = "this one"
PORT = 7443
"""Port of the nodes of the first cluster. The next cluster's port is ten higher, because clusters share machines."""
ANSWER_S = 10.0
WARM_S = 90.0
SPREAD_S = 180.0
LOOK_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A running gateway with its machines and its figures."""

    instance: str
    process: ServerProcess
    machines: Sequence[Machine]
    parts: Mapping[str, Sequence[Sequence[int]]]
    """Process numbers of the copies of each part. A node's numbers are its init and itself."""
    way: Way

    def usage(self) -> dict[str, Usage]:
        """Return the usage of each part so far.

        Raises:
            StartError: A process of the cluster has ended.
        """
        return {part: added_usage(number for copy in copies for number in copy) for part, copies in self.parts.items()}

    def rss_mib(self) -> dict[str, float]:
        """Return the resident memory of one copy of each part. Raises the errors of `usage`."""
        return rss_mib({part: [added_usage(copy).rss_bytes for copy in copies] for part, copies in self.parts.items()})

    async def containers(self, environment: str) -> dict[str, list[str]]:
        """Return the running workers' containers on each machine."""
        return {each.name: await asyncio.to_thread(each.workers, self.instance, environment) for each in self.machines}

    async def sessions(self) -> dict[str, int]:
        """Return the number of open shared sessions on each machine.

        Raises:
            WrongAnswer, OSError, ProtocolError: The gateway does not report it.
        """
        names = {row["id"]: row["name"] for row in await _admin(self.process.address, "nodes")}
        found = {each.name: 0 for each in self.machines}
        for row in await _admin(self.process.address, "workers"):
            if row["environment"] == STEPS:
                node = parse_address(row["address"]).node
                found[names[node] if node else HERE] += row["used"]
        return found


class Clusters:
    """Makes gateways with nodes. A cluster of *n* machines has the first *n* machines of the lab."""

    def __init__(
        self,
        servers: Servers,
        lab: Lab,
        *,
        machines: Sequence[Machine],
        engine: str,
        instance: str,
        image: str,
        catalog: Mapping[str, str],
        warm: int,
    ) -> None:
        """Store the arguments, without starting anything.

        Args:
            servers: Makes the gateways.
            lab: The running lab.
            machines: This machine, then the lab's machines in their order.
            engine: Address of this machine's engine.
            instance: Prefix of the instance of each cluster.
            image: Image of the nodes.
            catalog: The environments' files by name: the shared environment, and others that keep no workers.
            warm: Number of warm workers of the shared environment.
        """
        self._servers = servers
        self._lab = lab
        self._here, *self._machines = machines
        self._engine = engine
        self._instance = instance
        self._image = image
        self._catalog = catalog
        self._warm = warm
        self._certificates = servers.folder / "certificates"
        self._variables: dict[str, str] = {}
        self._nodes: dict[int, list[str]] = {0: []}
        """The nodes' containers, by the cluster's number of machines."""

    async def prepare(self) -> None:
        """Write the files that all clusters share, and start all nodes.

        Raises:
            StartError: A node does not start.
        """
        self._variables = write_catalog(self._servers.folder, **self._catalog)
        make_certificates(self._certificates, days=2)
        for count in range(1, len(self._machines) + 1):
            settings = self._settings(count)
            chosen = self._machines[:count]
            self._nodes[count] = [await asyncio.to_thread(start_node, each, settings) for each in chosen]
        for count, containers in self._nodes.items():
            for place, container in enumerate(containers, 1):
                address = self._lab.address(place), self._settings(count).port
                await node_ready(self._machines[place - 1], container, address)

    async def spread(self) -> float:
        """Let a gateway bring the workers' image from the first machine to all. Return the seconds from its start.

        Raises:
            StartError: It does not start, or a machine lacks the image after ``SPREAD_S``.
        """
        other = next(name for name in self._catalog if name != STEPS)
        own = {"GATEWAY_ENVIRONMENTS": other, "GATEWAY_DEFAULT_ENVIRONMENT": other}
        began_at = time.perf_counter()
        async with self._servers.running(GATEWAY, self._settings_of(len(self._machines)) | own) as process:
            for each in self._machines:
                while not await asyncio.to_thread(each.has_image, STEPS_IMAGE):
                    if time.perf_counter() > began_at + SPREAD_S:
                        raise StartError(f"{each.name} has no {STEPS_IMAGE} after {SPREAD_S:.0f} s:\n{process.tail()}")
                    await asyncio.sleep(LOOK_S)
            return time.perf_counter() - began_at

    @asynccontextmanager
    async def running(self, count: int) -> AsyncIterator[Cluster]:
        """Start a gateway with *count* machines, 0 for this machine only, and wait for its warm workers.

        Raises:
            StartError: It does not start, or has too few workers after ``WARM_S``.
        """
        folder = self._servers.folder / f"n{count}"
        folder.mkdir()
        began_at = time.perf_counter()
        async with redis_server(folder) as store:
            variables = self._settings_of(count) | {"GATEWAY_STORE": store.url}
            async with self._servers.running(GATEWAY, variables) as process:
                await _warm(process, self._warm)
                way = Way(count, warm_s=time.perf_counter() - began_at)
                yield await asyncio.to_thread(self._cluster, count, process, store, way)

    def _cluster(self, count: int, process: ServerProcess, store: RedisServer, way: Way) -> Cluster:
        instance = self._settings(count).instance
        machines = self._machines[:count] or [self._here]
        workers = [id for each in machines for id in each.workers(instance, STEPS)]
        nodes = self._nodes[count]
        found = processes_of([*workers, *nodes])
        parts: dict[str, list[list[int]]] = {
            GATEWAY: [[process.pid]],
            NODES: [found[id] for id in nodes],
            WORKERS: [found[id] for id in workers],
            REDIS: [[store.pid]],
        }
        chosen = {part: copies for part, copies in parts.items() if copies}
        return Cluster(instance=instance, process=process, machines=machines, parts=chosen, way=way)

    def _settings(self, count: int) -> NodeSettings:
        return NodeSettings(
            instance=f"{self._instance}-{count}",
            port=PORT + 10 * (count - 1),
            image=self._image,
            catalog=self._servers.folder / "catalog",
            environments=self._variables["GATEWAY_ENVIRONMENTS"],
            certificates=self._certificates,
        )

    def _settings_of(self, count: int) -> dict[str, str]:
        """Return the gateway's variables."""
        settings = self._settings(count)
        own = self._variables | {"GATEWAY_INSTANCE": settings.instance}
        if not count:
            return own | {"GATEWAY_BACKEND": "docker", "GATEWAY_DOCKER_URL": self._engine}
        places = range(1, count + 1)
        cert, key = GATEWAY_FILES
        return own | {
            "GATEWAY_BACKEND": "swarm",
            "GATEWAY_NODES": ",".join(f"{self._lab.address(place)}:{settings.port}" for place in places),
            "GATEWAY_SOCKET_VOLUME": settings.volume,
            "GATEWAY_CLUSTER_CA": str(self._certificates / CA_FILE[0]),
            "GATEWAY_CLUSTER_CERT": str(self._certificates / cert),
            "GATEWAY_CLUSTER_KEY": str(self._certificates / key),
        }


async def _warm(process: ServerProcess, count: int) -> None:
    until = time.perf_counter() + WARM_S
    while True:
        rows = [row for row in await _admin(process.address, "workers") if row["environment"] == STEPS]
        if sum(row["state"] == "ready" for row in rows) >= count:
            return
        if time.perf_counter() > until:
            raise StartError(f"{len(rows)} of {count} workers after {WARM_S:.0f} s:\n{process.tail()}")
        await asyncio.sleep(LOOK_S)


async def _admin(address: Address, what: str) -> list[dict[str, Any]]:
    """Return the rows of an operator's request.

    Raises:
        WrongAnswer, OSError, ProtocolError, TimeoutError: The gateway does not report them.
    """
    async with asyncio.timeout(ANSWER_S):
        answer = ok(await ask_once(address, request_bytes("GET", f"/admin/v1/{what}", {})))
    rows: list[dict[str, Any]] = json.loads(answer.body)[what]
    return rows


def added_usage(numbers: Iterable[int]) -> Usage:
    """Return the summed usage of these processes.

    Raises:
        StartError: A process has ended.
    """
    try:
        each = [usage(number) for number in numbers]
    except (FileNotFoundError, ProcessLookupError) as error:
        raise StartError(f"a process that is measured has ended: {error}") from error
    return Usage(sum(one.cpu_s for one in each), sum(one.rss_bytes for one in each))
