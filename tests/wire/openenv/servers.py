"""The servers of the OpenEnv tests: the official server, and the gateway on processes and on containers.

Each server starts for the first test that uses it and lives until the test process ends. A test runs on `ALL` if the
official server can do the same, and otherwise on `EMBEDDED`. It runs on `BOTH_GATEWAYS` if a container or the store can
change its outcome, as in ``tests/wire/targets.py``.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import docker
import httpx
import pytest

from tests.deadlines import HANG_S
from tests.fakes.images import built_once, files_of
from tests.runner.shared import SharedServers
from tests.wire.gateways import TRAINER_KEYS, Gateway, short_folder
from tests.wire.openenv.clients import HERE, NEWEST, python_of
from tests.wire.processes import ServerProcess
from tests.wire.stack import Stack
from tests.wire.targets import Folder, Roots

ENVIRONMENTS = ("counting", "lonely", "curt", "hasty", "brittle")
OFFICIAL, EMBEDDED, STACK = "official", "embedded", "stack"
ALL = (OFFICIAL, EMBEDDED)
BOTH_GATEWAYS = (EMBEDDED, STACK)
IMAGE = "env-gateway/wire-counting"
ALICE, BOB = TRAINER_KEYS["alice"], TRAINER_KEYS["bob"]


@dataclass(frozen=True)
class Place:
    """A running server."""

    name: str
    root: str
    gateway: Gateway | None = None
    stack: Stack | None = None

    def url(self, environment: str = "counting", *, key: str = ALICE) -> str:
        """Return a client's base URL. The official server has only one environment and no keys."""
        return self.root if self.gateway is None else f"{self.root}/k/{key}/openenv/{environment}"

    def behind(self) -> Gateway:
        """Return the gateway behind this place."""
        assert self.gateway is not None
        return self.gateway

    def replica(self, name: str) -> Gateway:
        """Create another gateway on the same store, engine and secret, without starting it."""
        assert self.stack is not None
        folder = self.stack.folder / name
        folder.mkdir()
        state = {"GATEWAY_STATE_DIR": str(self.stack.folder / "state")}
        return Gateway(folder, self.stack.settings() | settings(*ENVIRONMENTS) | state)

    def folder(self, tmp_path: Path) -> Folder:
        """Return a folder that the workers see, too."""
        if self.stack is not None:
            return Folder("/run/envserver", Roots(self.behind().socket_dir, per_worker=True))
        return Folder(str(tmp_path), Roots(tmp_path))

    def http(self, environment: str = "counting") -> httpx.AsyncClient:
        """Return a plain HTTP client for the environment's base URL."""
        return httpx.AsyncClient(base_url=self.url(environment), verify=False, trust_env=False, timeout=HANG_S)


class Servers(SharedServers[Place]):
    """All servers of one test process."""

    def started(self, name: str) -> Place:
        """Start a server."""
        if name == OFFICIAL:
            return self._official()
        stack = None
        if name == STACK:
            stack = Stack()
            self._undo.callback(stack.close)
            build_image()
            stack.redis.start()
        folder = stack.folder if stack else self._folder()
        gateway = Gateway(folder, (stack.settings() if stack else {}) | settings(*ENVIRONMENTS))
        self._undo.callback(gateway.stop)
        gateway.start()
        return Place(name, gateway.url, gateway, stack)

    def _official(self) -> Place:
        process = ServerProcess(
            [python_of(NEWEST), "-W", "ignore", str(HERE / "official.py")],
            variables={},
            ready=r"official_ready url=(http://\S+)",
            log=self._folder() / "official.log",
        )
        self._undo.callback(process.stop)
        process.start()
        return Place(OFFICIAL, process.address)

    def _folder(self) -> Path:
        folder = short_folder()
        self._undo.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder


def settings(*environments: str) -> dict[str, str]:
    """Return settings for a gateway that serves the counting environments."""
    return {
        "GATEWAY_CATALOG_DIR": str(HERE / "environments"),
        "GATEWAY_ENVIRONMENTS": ",".join(environments),
        "GATEWAY_DEFAULT_ENVIRONMENT": environments[0],
        "GATEWAY_MAX_BODY_BYTES": str(64 * 2**20),
    }


def build_image() -> None:
    """Build the image of the counting environments."""
    engine = docker.from_env(version="auto")
    try:
        built_once(engine.api, IMAGE, files_of(HERE / "environments" / "counting"))
    finally:
        engine.close()


def on(*names: str) -> pytest.MarkDecorator:
    """Run a test on each of these servers."""
    marks = {STACK: [pytest.mark.docker, pytest.mark.redis]}
    rows = [pytest.param(name, marks=marks.get(name, [])) for name in names]
    return pytest.mark.parametrize("place", rows, indirect=True)
