"""Gateways that serve the images of ``tests/foreign``: on local processes, and on Redis and an engine.

Each is started when the first test asks for it and lives until the test process ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.eventually import eventually
from tests.wire.gateways import Gateway, short_folder
from tests.wire.openenv.clients import NEWEST, python_of
from tests.wire.stack import Stack

PROJECT = Path(__file__).resolve().parents[3]
CATALOG = PROJECT / "tests" / "foreign" / "catalog"
EMBEDDED, STACK = "embedded", "stack"
GATEWAYS = (EMBEDDED, STACK)
ONLY_IN_CONTAINERS = frozenset(["openenv-counter-030"])
"""No venv of the machine has these packages."""


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
        """The base URL of an environment for OpenEnv's clients."""
        return f"{self.url}/openenv/{environment}"

    def open_sockets(self) -> int:
        """How many sockets the gateway's process has."""
        return sum(_is_socket(entry) for entry in Path(f"/proc/{self.gateway.pid}/fd").iterdir())

    async def workers(self, environment: str) -> set[str]:
        """The ids of the workers of *environment*."""
        return {worker["id"] for worker in await self.gateway.workers(environment)}

    async def nothing_is_left(self) -> None:
        """Wait until no session holds a slot, and no container runs that is no worker."""

        async def check() -> None:
            assert await self.gateway.sessions() == []
            if self.stack is not None:
                known = {worker["id"] for worker in await self.gateway.workers()}
                strays = [one.name for one in self.stack.containers.list() if not _is_of(one, known)]
                assert strays == []

        await eventually(check, within_s=30)


class Places:
    """All gateways of one test process."""

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}
        self._failed: dict[str, str] = {}
        self._undo = contextlib.ExitStack()

    def place(self, name: str) -> Place:
        """Look a gateway up; the first time, start it."""
        if name in self._failed:
            # Once is enough: each try may take a minute.
            pytest.fail(f"{name} did not start before: {self._failed[name]}")
        if name not in self._places:
            try:
                self._places[name] = self._started(name)
            except Exception as error:
                self._failed[name] = str(error)
                raise
        return self._places[name]

    def close(self) -> None:
        self._undo.close()

    def _started(self, name: str) -> Place:
        python_of(NEWEST)  # makes the venvs that local processes run in, too
        if name == EMBEDDED:
            folder = short_folder()
            self._undo.callback(shutil.rmtree, folder, ignore_errors=True)
            gateway = Gateway(folder, settings(*(each for each in environments() if each not in ONLY_IN_CONTAINERS)))
            self._undo.callback(gateway.stop)
            gateway.start()
            return Place(name, gateway)
        build_images()
        subprocess.run(
            [PROJECT / "scripts" / "build-images", "base"], check=True, timeout=600
        )  # what forwards to a port
        stack = Stack()
        self._undo.callback(stack.close)
        stack.redis.start()
        gateway = Gateway(stack.folder, stack.settings() | settings(*environments()))
        self._undo.callback(gateway.stop)
        gateway.start()
        return Place(name, gateway, stack)


def environments() -> Sequence[str]:
    """The names of all environments of the catalog."""
    return sorted(path.parent.name for path in CATALOG.glob("*/environment.toml"))


def settings(*names: str) -> dict[str, str]:
    """Settings of a gateway that serves *names* and asks for no key: AReaL's clients know none."""
    return {
        "GATEWAY_CATALOG_DIR": str(CATALOG),
        "GATEWAY_ENVIRONMENTS": ",".join(names),
        "GATEWAY_DEFAULT_ENVIRONMENT": names[0],
        "GATEWAY_TRAINER_KEYS": "",
    }


def build_images(*names: str) -> None:
    """Build the images; the engine's cache makes this quick."""
    subprocess.run([PROJECT / "scripts" / "foreign-images", *names], check=True, timeout=900)


def on(*names: str) -> pytest.MarkDecorator:
    """Run a test on each of these gateways."""
    return pytest.mark.parametrize("place", [pytest.param(name, marks=marks(name)) for name in names], indirect=True)


def marks(name: str) -> list[pytest.MarkDecorator]:
    """What a test on the gateway *name* needs."""
    return [pytest.mark.docker, pytest.mark.redis] if name == STACK else []


def _is_of(container: Any, workers: set[str]) -> bool:
    return any(worker in container.name for worker in workers)


def _is_socket(entry: Path) -> bool:
    try:
        return os.readlink(entry).startswith("socket:")
    except FileNotFoundError:  # closed since it was listed
        return False
