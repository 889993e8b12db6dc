"""The gateway as operators run it: its own processes, Redis and containers, which a test may break."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import docker
import httpx
import redis

from gateway.settings import Settings
from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually
from tests.fakes.images import built_once, files_of
from tests.faults.engine_events import EngineEvents
from tests.wire.gateways import OPERATOR_KEY, TRAINER_KEYS, Gateway, short_folder
from tests.wire.stack import INSTANCE_LABEL, SHARED_MEMORY, Redis

SCALE = float(os.environ.get("FAULTS_SCALE", "1"))
"""Factor of the long form for the numbers of sessions, steps and creates."""
ENVIRONMENTS = Path(__file__).parent / "environments"
IMAGE = "env-gateway/faults-unruly"
WORKER_LABEL = "env-gateway.worker"
ROLE_LABEL = "env-gateway.role"
PREFIX = "{gateway}:"
POOLS = 32
ENGINE = "unix:///var/run/docker.sock"
"""The machine's own engine."""
Table = Mapping[str, object]


def environment_toml(name: str, *, image: str = IMAGE, **tables: Table) -> str:
    """Return the ``environment.toml`` of an environment of the unruly image. *tables* replace single values.

    By default it keeps no idle worker, so that a test can see that all workers go.
    """
    head: dict[str, object] = {"image": image, "upstream_name": "unruly", "command": []}
    wanted: dict[str, dict[str, object]] = {
        "pool": {"slots": 16, "min_workers": 0, "max_workers": 2, "idle_worker_s": 1},
        "limits": {"memory_mib": 128, "cpus": 1.0, "pids": 128, "tmp_mib": 8},
        "timeouts": {"idle_s": 300, "start_s": 60, "open_s": 60, "setup_s": 30, "call_s": 300, "close_s": 10},
    }
    for table, values in tables.items():
        if table == "head":
            head |= values
        else:
            wanted[table] = wanted.get(table, {}) | dict(values)
    values = {"name": name, "protocol": "ors", "isolation": "shared"} | head
    lines = _lines(values)
    for table, inside in wanted.items():
        lines += [f"[{table}]", *_lines(inside)]
    return "\n".join(lines) + "\n"


def _lines(values: Table) -> list[str]:
    return [f"{key} = {json.dumps(value)}" for key, value in values.items()]  # such JSON is valid TOML


class World:
    """One instance of the gateway and everything that it runs on.

    Args:
        environments: The text of each ``environment.toml`` by name; the first is the default.
        replicas: Gateway processes on the one Redis.
        redis: Makes the store's server, with a folder for its files.
        engine: The URL of the engine that runs the workers.
        settings: Further settings of all replicas.
        of_last: Further settings of the last replica.
    """

    def __init__(
        self,
        environments: Mapping[str, str],
        *,
        replicas: int = 1,
        redis: Callable[[Path], Redis] = Redis,
        engine: str = ENGINE,
        settings: Mapping[str, str],
        of_last: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.instance = f"faults-{uuid.uuid4().hex[:8]}"
        self.folder = short_folder(SHARED_MEMORY)
        self.redis = redis(self.folder)
        self.engine_url = engine
        self.engine = docker.DockerClient(base_url=engine, version="auto")
        self.events = EngineEvents(self.instance, engine)
        self.environments = tuple(environments)
        for name, text in environments.items():
            (self.folder / "catalog" / name).mkdir(parents=True)
            (self.folder / "catalog" / name / "environment.toml").write_text(text)
        last = {**settings, **of_last}
        self.gateways = [
            self._gateway(f"gateway-{n}", last if n == replicas - 1 else settings) for n in range(replicas)
        ]

    @property
    def gateway(self) -> Gateway:
        """The first replica."""
        return self.gateways[0]

    @property
    def sockets(self) -> Path:
        """The folder that contains a folder of each worker."""
        return self.folder / "s"

    @property
    def owner(self) -> str:
        """The gateways' owner identity, derived from the secret that the first one created at its start."""
        return Settings(state_dir=self.folder / "state").read_owner()

    @property
    def log(self) -> str:
        """The logs of all replicas since the beginning."""
        return "".join(gateway.log for gateway in self.gateways)

    def start(self) -> None:
        self.events.start()
        self.redis.start()
        for gateway in self.gateways:
            gateway.start()

    def close(self) -> None:
        """End and remove everything, whatever its state."""
        for gateway in self.gateways:
            gateway.stop()
        self.redis.stop()
        for container in self.containers():
            with contextlib.suppress(docker.errors.NotFound):
                container.remove(force=True)
        self.events.stop()
        self.engine.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- faults, and views that bypass the gateway -------------------------------------------------------------------

    def containers(self) -> list[Any]:
        """Return all containers of this instance, including dead ones."""
        # Sparse: the engine cannot return details of a container that disappears meanwhile.
        return self.engine.containers.list(
            ignore_removed=True, all=True, sparse=True, filters={"label": f"{INSTANCE_LABEL}={self.instance}"}
        )

    def container(self, worker: str, *, role: str = "") -> Any:
        """Return the container of *worker*. A third-party worker has one per *role*: ``server`` and ``forwarder``."""
        labels = [f"{INSTANCE_LABEL}={self.instance}", f"{WORKER_LABEL}={worker}"]
        labels += [f"{ROLE_LABEL}={role}"] if role else []
        (container,) = self.engine.containers.list(all=True, ignore_removed=True, filters={"label": labels})
        return container

    def database(self) -> redis.Redis:
        """Return a connection to the store. The caller closes it."""
        return self.redis.database()

    def open_gate(self, gate: str) -> None:
        """Release the steps of every worker that wait for *gate*."""
        for folder in self.sockets.iterdir():
            with contextlib.suppress(FileNotFoundError):  # its worker ended meanwhile
                (folder / gate).touch()

    def waiting_steps(self, gate: str) -> int:
        """Return the number of steps that began to wait for *gate*. Each step records it once."""
        count = 0
        for ledger in self.sockets.glob(f"*/{gate}.ledger"):
            with contextlib.suppress(FileNotFoundError):  # its worker ended meanwhile
                count += len(ledger.read_text().splitlines())
        return count

    # -- requests -----------------------------------------------------------------------------------------------------

    def http(self, replica: int = 0, *, owner: str = "alice") -> httpx.AsyncClient:
        """Return a trainer's client of one replica, with an unlimited number of connections."""
        headers = {"X-API-Key": TRAINER_KEYS[owner]}
        return httpx.AsyncClient(
            transport=_ManyPools(), base_url=self.gateways[replica].url, headers=headers, timeout=HANG_S
        )

    async def sessions(self, replica: int = 0) -> list[dict[str, Any]]:
        """Return the sessions that hold a slot."""
        return list((await self._operators("/admin/v1/sessions", replica)).json()["sessions"])

    async def workers(self, replica: int = 0) -> list[dict[str, Any]]:
        """Return the workers that the gateway knows."""
        return list((await self._operators("/admin/v1/workers", replica)).json()["workers"])

    async def waiting(self, environment: str) -> int:
        """Return the number of openings that wait for a slot."""
        return int((await self._operators("/admin/v1/workers")).json()["waiting"].get(environment, 0))

    async def metric(self, name: str, **labels: str) -> float:
        """Return the sum over all replicas of the samples of *name* with these labels."""
        total = 0.0
        for replica in range(len(self.gateways)):
            text = (await self._operators("/metrics", replica)).text
            total += sum(_samples(text, name, labels))
        return total

    async def counts(self, number: float, name: str, **labels: str) -> None:
        """Wait until a metric is *number*: an answer may arrive before the metric counts it."""

        async def check() -> None:
            found = await self.metric(name, **labels)
            assert found == number, f"{name} {labels} is {found}, not {number}"

        await eventually(check)

    async def _operators(self, path: str, replica: int = 0) -> httpx.Response:
        headers = {"Authorization": f"Bearer {OPERATOR_KEY}"}
        # Frequent plain connections: reading certificates for each of them would take longer than the rest.
        async with httpx.AsyncClient(headers=headers, verify=False, timeout=HANG_S, trust_env=False) as http:
            response = await http.get(self.gateways[replica].url + path)
        assert response.status_code == 200, response.text
        return response

    def _gateway(self, name: str, settings: Mapping[str, str]) -> Gateway:
        folder = self.folder / name
        folder.mkdir()
        return Gateway(
            folder,
            {
                "GATEWAY_STORE": self.redis.url,
                "GATEWAY_BACKEND": "docker",
                "GATEWAY_DOCKER_URL": self.engine_url,
                "GATEWAY_SOCKET_DIR": str(self.sockets),
                "GATEWAY_STATE_DIR": str(self.folder / "state"),
                "GATEWAY_INSTANCE": self.instance,
                "GATEWAY_CATALOG_DIR": str(self.folder / "catalog"),
                "GATEWAY_ENVIRONMENTS": ",".join(self.environments),
                "GATEWAY_DEFAULT_ENVIRONMENT": self.environments[0],
                **settings,
            },
        )


class _ManyPools(httpx.AsyncBaseTransport):
    """Spreads requests over several pools, because a pool scans all its connections for each request."""

    def __init__(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._pools = [httpx.AsyncHTTPTransport(verify=False, limits=limits, trust_env=False) for _ in range(POOLS)]
        self._next = itertools.cycle(self._pools)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await next(self._next).handle_async_request(request)

    async def aclose(self) -> None:
        for pool in self._pools:
            await pool.aclose()


def _samples(text: str, name: str, labels: Mapping[str, str]) -> Iterator[float]:
    for line in text.splitlines():
        found = re.match(rf"{re.escape(name)}(?:\{{(.*)\}})? (\S+)$", line)
        if found and labels.items() <= dict(re.findall(r'(\w+)="([^"]*)"', found[1] or "")).items():
            yield float(found[2])


@contextlib.contextmanager
def running(
    *environments: str,
    replicas: int = 1,
    redis: Callable[[Path], Redis] = Redis,
    engine: str = ENGINE,
    of_last: Mapping[str, str] = MappingProxyType({}),
    **settings: str,
) -> Iterator[World]:
    """Run a world with these ``environment.toml`` texts. It is always removed at the end."""
    names = [found[1] for text in environments if (found := re.match(r'name = "(.+)"', text))]
    texts = dict(zip(names, environments, strict=True))
    world = World(texts, replicas=replicas, redis=redis, engine=engine, settings=settings, of_last=of_last)
    with started(world):
        yield world


W = TypeVar("W", bound=World)


@contextlib.contextmanager
def started(world: W) -> Iterator[W]:
    """Run *world*. It is always removed at the end."""
    try:
        world.start()
        yield world
    finally:
        world.close()


def build_image() -> None:
    """Build the unruly image."""
    with contextlib.closing(docker.from_env(version="auto")) as engine:
        built_once(engine.api, IMAGE, files_of(ENVIRONMENTS / "unruly"))
