"""Gateways that serve the images of ``tests/foreign``: on local processes, and on Redis and an engine.

Each gateway starts for the first test that uses it and lives until the test process ends. The images must exist
(``scripts/foreign-images``, ``scripts/build-images base``).

Every test runs on ``embedded``. It also runs on ``stack`` if a container or the store can change its outcome: a worker
that starts, dies or is full, or a session that expires. A client of each protocol plays each image there once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from tests.fakes.eventually import eventually, eventually_now
from tests.runner.shared import SharedServers
from tests.wire.gateways import Gateway, short_folder
from tests.wire.openenv.clients import NEWEST, python_of
from tests.wire.stack import Redis, Stack

PROJECT = Path(__file__).resolve().parents[3]
CATALOG = PROJECT / "tests" / "foreign" / "catalog"
EMBEDDED, STACK = "embedded", "stack"
ONLY_IN_CONTAINERS = frozenset(["openenv-counter-030"])
"""Environments whose packages no venv of the machine has."""


@dataclass(frozen=True)
class Place:
    """A running gateway."""

    name: str
    gateway: Gateway
    stack: Stack | None = None

    @property
    def url(self) -> str:
        return self.gateway.url

    def openenv(self, environment: str) -> str:
        """Return the base URL of an environment for OpenEnv's clients."""
        return f"{self.url}/openenv/{environment}"

    def open_sockets(self) -> int:
        """Return the number of sockets of the gateway's process."""
        return sum(_is_socket(entry) for entry in Path(f"/proc/{self.gateway.pid}/fd").iterdir())

    async def workers(self, environment: str) -> set[str]:
        """Return the ids of the workers of *environment*."""
        return {worker["id"] for worker in await self.gateway.workers(environment)}

    async def nothing_is_left(self) -> None:
        """Wait until no session holds a slot, and every running container belongs to a worker."""

        async def check() -> None:
            assert await self.gateway.sessions() == []
            if self.stack is not None:
                known = {worker["id"] for worker in await self.gateway.workers()}
                strays = [one.name for one in self.stack.containers.list() if not _is_of(one, known)]
                assert strays == []

        await eventually(check)


class Places(SharedServers[Place]):
    """All gateways of one test process."""

    def started(self, name: str) -> Place:
        """Start a gateway."""
        python_of(NEWEST)  # also creates the venvs that local processes run in
        if name == EMBEDDED:
            folder = short_folder()
            self._undo.callback(shutil.rmtree, folder, ignore_errors=True)
            gateway = Gateway(folder, settings(*(each for each in environments() if each not in ONLY_IN_CONTAINERS)))
            self._undo.callback(gateway.stop)
            gateway.start()
            return Place(name, gateway)
        stack = Stack()
        self._undo.callback(stack.close)
        stack.redis.start()
        gateway = Gateway(stack.folder, stack.settings() | settings(*environments()))
        self._undo.callback(gateway.stop)
        gateway.start()
        return Place(name, gateway, stack)


class Replica(Gateway):
    """A gateway that records whether it runs."""

    is_running = False

    def start(self) -> None:
        super().start()
        self.is_running = True

    def kill(self) -> None:
        self.is_running = False
        super().kill()

    def stop(self) -> int:
        self.is_running = False
        return super().stop()


class Pair:
    """Gateways A and B on one Redis, in front of third-party servers (``gateway serve --static``).

    A test may stop A, B and Redis. `revive` starts them again for the next test.
    """

    def __init__(self, servers: Mapping[str, str]) -> None:
        """Map environments to the URLs of their *servers*. This starts nothing yet."""
        self._folder = short_folder()
        self.redis = Redis(self._folder)
        shared = {
            "GATEWAY_STORE": self.redis.url,
            "GATEWAY_STATIC": ",".join(f"{name}={url}" for name, url in servers.items()),
            "GATEWAY_ENVIRONMENTS": "",
            "GATEWAY_DEFAULT_ENVIRONMENT": next(iter(servers)),
            "GATEWAY_STATE_DIR": str(self._folder / "state"),
        }
        for name in "ab":
            (self._folder / name).mkdir()
        self.a, self.b = (Replica(self._folder / name, shared) for name in "ab")

    def revive(self) -> None:
        """Start the stopped parts, and return when both gateways are ready."""
        with contextlib.closing(self.redis.database()) as store:
            try:
                store.ping()
            except redis.ConnectionError:
                self.redis.start()
        both = (self.a, self.b)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(Replica.start, [each for each in both if not each.is_running]))
        eventually_now(lambda: all_ready(both))

    def close(self) -> None:
        """Stop both gateways and Redis, and delete their files."""
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(Replica.stop, (self.a, self.b)))
        self.redis.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


def all_ready(gateways: Sequence[Gateway]) -> None:
    """Assert that each of *gateways* reaches its store."""
    for gateway in gateways:
        try:
            status = httpx.get(f"{gateway.url}/readyz", verify=False, trust_env=False).status_code
        except httpx.TransportError as error:
            raise AssertionError("a gateway does not answer yet") from error
        assert status == 200


def environments() -> Sequence[str]:
    """Return the names of all environments in the catalog."""
    return sorted(path.parent.name for path in CATALOG.glob("*/environment.toml"))


def settings(*names: str) -> dict[str, str]:
    """Return settings for a gateway that serves *names* and requires no key, because AReaL's clients send none."""
    return {
        "GATEWAY_CATALOG_DIR": str(CATALOG),
        "GATEWAY_ENVIRONMENTS": ",".join(names),
        "GATEWAY_DEFAULT_ENVIRONMENT": names[0],
        "GATEWAY_TRAINER_KEYS": "",
    }


def on(*names: str) -> pytest.MarkDecorator:
    """Run a test on each of these gateways."""
    return on_rows("", *((name,) for name in names))


def on_rows(others: str, *rows: Sequence[object]) -> pytest.MarkDecorator:
    """Run a test on each row: a gateway, and values of the arguments that *others* names."""
    values = [pytest.param(*row, marks=_marks(row[0])) for row in rows]
    return pytest.mark.parametrize(("place", *others.split()), values, indirect=["place"])


def _marks(place: object) -> list[pytest.MarkDecorator]:
    """Return the marks for the requirements of a test on the gateway *place*."""
    return [pytest.mark.docker, pytest.mark.redis] if place == STACK else []


def _is_of(container: Any, workers: set[str]) -> bool:
    return any(worker in container.name for worker in workers)


def _is_socket(entry: Path) -> bool:
    try:
        return os.readlink(entry).startswith("socket:")
    except FileNotFoundError:  # closed after the listing
        return False
