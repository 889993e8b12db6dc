"""The gateway as its operators run it: processes, a Redis and containers of its own, which a test may break at will."""

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
from typing import Any, TypeVar

import docker
import httpx
import redis

from gateway.settings import Settings
from tests.deadlines import scaled
from tests.fakes.eventually import eventually
from tests.fakes.images import built_once, files_of
from tests.faults.engine_events import EngineEvents
from tests.wire.gateways import OPERATOR_KEY, TRAINER_KEYS, Gateway, short_folder
from tests.wire.stack import INSTANCE_LABEL, SHARED_MEMORY, Redis

SCALE = float(os.environ.get("FAULTS_SCALE", "1"))
"""How much more of everything than in the short form: sessions, steps, creates."""
ENVIRONMENTS = Path(__file__).parent / "environments"
IMAGE = "env-gateway/faults-unruly"
WORKER_LABEL = "env-gateway.worker"
ROLE_LABEL = "env-gateway.role"
PREFIX = "{gateway}:"
POOLS = 32
LOG_SHOWN = 20_000
"""Characters of the gateways' logs that a test that failed shows."""
ENGINE = "unix:///var/run/docker.sock"
"""The machine's own."""
Table = Mapping[str, object]


def environment_toml(name: str, *, image: str = IMAGE, **tables: Table) -> str:
    """Write the ``environment.toml`` of an environment of the unruly image; *tables* replace single values.

    By default it keeps no worker that is idle, so that a test can see that everything goes.
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
    return [f"{key} = {json.dumps(value)}" for key, value in values.items()]  # of these kinds JSON is TOML, too


class World:
    """One instance of the gateway and all that it runs on.

    Args:
        environments: The text of each ``environment.toml`` by name; the first is the default.
        replicas: Gateway processes on the one Redis.
        redis: Makes the store's server, with a folder for its files.
        engine: The URL of the engine that workers run on.
        settings: Further settings of all of them.
    """

    def __init__(
        self,
        environments: Mapping[str, str],
        *,
        replicas: int = 1,
        redis: Callable[[Path], Redis] = Redis,
        engine: str = ENGINE,
        settings: Mapping[str, str],
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
        self.gateways = [self._gateway(f"gateway-{n}", settings) for n in range(replicas)]

    @property
    def gateway(self) -> Gateway:
        """The first replica."""
        return self.gateways[0]

    @property
    def sockets(self) -> Path:
        """Where each worker has its folder."""
        return self.folder / "s"

    @property
    def owner(self) -> str:
        """The identity of its gateways, which made their secret as the first of them started."""
        return Settings(state_dir=self.folder / "state").read_owner()

    @property
    def log(self) -> str:
        """What all replicas ever logged."""
        return "".join(gateway.log for gateway in self.gateways)

    def start(self) -> None:
        self.events.start()
        self.redis.start()
        for gateway in self.gateways:
            gateway.start()

    def close(self) -> None:
        """End and remove everything, whatever state it is in."""
        for gateway in self.gateways:
            gateway.stop()
        self.redis.stop()
        for container in self.containers():
            with contextlib.suppress(docker.errors.NotFound):
                container.remove(force=True)
        self.events.stop()
        self.engine.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- to break things, and to look past the gateway ------------------------------------------------------------

    def containers(self) -> list[Any]:
        """All containers of this instance, dead ones too."""
        # Sparse: the details of a container that goes meanwhile can't be had.
        return self.engine.containers.list(
            ignore_removed=True, all=True, sparse=True, filters={"label": f"{INSTANCE_LABEL}={self.instance}"}
        )

    def container(self, worker: str, *, role: str = "") -> Any:
        """The container of *worker*; of one of somebody else's image that in a *role*, ``server`` or ``forwarder``."""
        labels = [f"{INSTANCE_LABEL}={self.instance}", f"{WORKER_LABEL}={worker}"]
        labels += [f"{ROLE_LABEL}={role}"] if role else []
        (container,) = self.engine.containers.list(all=True, ignore_removed=True, filters={"label": labels})
        return container

    def database(self) -> redis.Redis:
        """A connection to the store; close it."""
        return self.redis.database()

    def open_gate(self, gate: str) -> None:
        """Let the steps go on that wait for *gate*, in every worker."""
        for folder in self.sockets.iterdir():
            with contextlib.suppress(FileNotFoundError):  # its worker ended meanwhile
                (folder / gate).touch()

    def waiting_steps(self, gate: str) -> int:
        """How many steps began to wait for *gate*; each notes it once."""
        count = 0
        for ledger in self.sockets.glob(f"*/{gate}.ledger"):
            with contextlib.suppress(FileNotFoundError):  # its worker ended meanwhile
                count += len(ledger.read_text().splitlines())
        return count

    # -- to ask it ------------------------------------------------------------------------------------------------

    def http(self, replica: int = 0, *, owner: str = "alice") -> httpx.AsyncClient:
        """A trainer's client of one replica, with as many connections as it likes."""
        headers = {"X-API-Key": TRAINER_KEYS[owner]}
        return httpx.AsyncClient(
            transport=_ManyPools(), base_url=self.gateways[replica].url, headers=headers, timeout=scaled(120)
        )

    async def sessions(self, replica: int = 0) -> list[dict[str, Any]]:
        """The sessions that hold a slot."""
        return list((await self._operators("/admin/v1/sessions", replica)).json()["sessions"])

    async def workers(self, replica: int = 0) -> list[dict[str, Any]]:
        """The workers that are known."""
        return list((await self._operators("/admin/v1/workers", replica)).json()["workers"])

    async def waiting(self, environment: str) -> int:
        """Openings that wait for a slot."""
        return int((await self._operators("/admin/v1/workers")).json()["waiting"].get(environment, 0))

    async def metric(self, name: str, **labels: str) -> float:
        """The sum, over replicas, of the samples of *name* that have these labels."""
        total = 0.0
        for replica in range(len(self.gateways)):
            text = (await self._operators("/metrics", replica)).text
            total += sum(_samples(text, name, labels))
        return total

    async def counts(self, number: float, name: str, **labels: str) -> None:
        """Wait until a metric has come to *number*: what is counted may be told before."""

        async def check() -> None:
            found = await self.metric(name, **labels)
            assert found == number, f"{name} {labels} is {found}, not {number}"

        await eventually(check)

    async def _operators(self, path: str, replica: int = 0) -> httpx.Response:
        headers = {"Authorization": f"Bearer {OPERATOR_KEY}"}
        # Asked all the time: to read certificates, for connections that need none, takes longer than the rest.
        async with httpx.AsyncClient(headers=headers, verify=False, timeout=scaled(30), trust_env=False) as http:
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
    """Spreads requests over pools of connections: a pool looks at each of its own for each request."""

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
    **settings: str,
) -> Iterator[World]:
    """Run a world with these ``environment.toml`` texts; it is removed at the end, whatever happened."""
    names = [found[1] for text in environments if (found := re.match(r'name = "(.+)"', text))]
    texts = dict(zip(names, environments, strict=True))
    with started(World(texts, replicas=replicas, redis=redis, engine=engine, settings=settings)) as world:
        yield world


W = TypeVar("W", bound=World)


@contextlib.contextmanager
def started(world: W) -> Iterator[W]:
    """Run *world*; it is removed at the end, whatever happened."""
    try:
        world.start()
        yield world
    except BaseException:
        print(world.log[-LOG_SHOWN:])  # with the test's report; the folder goes
        raise
    finally:
        world.close()


def build_image() -> None:
    """Build the unruly image."""
    with contextlib.closing(docker.from_env(version="auto")) as engine:
        built_once(engine.api, IMAGE, files_of(ENVIRONMENTS / "unruly"))
