"""The servers for the wire tests: two official servers, the gateway's own environment server, and two gateways.

``embedded`` is the gateway with its own store and local processes, ``stack`` the gateway with Redis and Docker. A
target starts for the first test that uses it and lives until the test process ends.

A test names the targets whose code can change its outcome:

* `ONE_GATEWAY`: the gateway answers from the request and the task files, or passes a worker's bytes on. Neither the
  store nor the backend takes part. Examples are bodies, paths, keys, discovery, outputs and tool errors.
* `BOTH_GATEWAYS`: the store or the backend takes part. Examples are the life of a session, a call that loses its
  worker or its connection, expiry, and secrets. Each frontend also has one episode there.
* `OURS`: the environment server alone answers the request with its own code; behind a gateway, the gateway answers
  instead. Examples are HTTP, discovery, and the creation and deletion of a session. The gateway passes calls as
  bytes, so a row on the gateway also tests the environment server's calls.
* `OFFICIAL`: the reference, for every row that it can run.
"""

import json
import shutil
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deadlines import HANG_S
from tests.runner.shared import SharedServers
from tests.wire.gateways import TRAINER_KEYS, WIRE, Gateway, short_folder
from tests.wire.processes import ServerProcess
from tests.wire.stack import Stack

OFFICIAL = ("ors-server", "openreward-server")
"""The servers of the two packages. Each is driven by its own client, and shows the behavior that the client expects."""
ONE_GATEWAY = ("embedded",)
BOTH_GATEWAYS = (*ONE_GATEWAY, "stack")
ENVSERVER = "envserver"
OURS = (ENVSERVER, *ONE_GATEWAY)
ALL = (*OFFICIAL, *OURS)
_SDKS = {"ors-server": ("ors",), "openreward-server": ("openreward",)}


@dataclass(frozen=True)
class Folder:
    """A folder that a test shares with the workers of its target."""

    inside: str
    """The folder's path for workers: the ``folder`` of a task."""
    roots: "Roots"

    def open_gate(self, token: str) -> None:
        """Release the calls that wait for *token*."""
        for root in self.roots():
            (root / f"{token}.gate").touch()

    def runs(self, token: str) -> int:
        """Return how often a tool recorded *token*."""
        return sum(_words(root / "ledger").count(token) for root in self.roots())


def _words(file: Path) -> list[str]:
    """Return the words of a file, or an empty list if there is no file or its worker ends in the meantime."""
    try:
        return file.read_text().split()
    except FileNotFoundError:
        return []


@dataclass(frozen=True)
class Roots:
    """The paths of a shared folder for the test. A container has its own folder, which is unknown beforehand."""

    path: Path
    per_worker: bool = False

    def __call__(self) -> list[Path]:
        if not self.per_worker:
            return [self.path]
        return [entry for entry in self.path.iterdir() if entry.is_dir()] if self.path.exists() else []


@dataclass(frozen=True, kw_only=True)
class Target:
    """One running server, and access to its log, gateway and stack."""

    name: str
    url: str
    key: str | None = None
    """The key that a client uses. None: the server requires no key."""
    log: Any = field(default=lambda: "", repr=False)
    """Returns the server's output."""
    gateway: Gateway | None = None
    stack: Stack | None = None

    @property
    def host(self) -> str:
        return httpx.URL(self.url).host

    @property
    def port(self) -> int:
        port = httpx.URL(self.url).port
        assert port is not None
        return port

    def folder(self, tmp_path: Path) -> Folder:
        """Return a folder that the workers see too."""
        if self.stack is not None:
            return Folder("/run/envserver", Roots(self.stack.gateway.socket_dir, per_worker=True))
        return Folder(str(tmp_path), Roots(tmp_path))

    def http(self, *, key: str | None = None, headers: Mapping[str, str] | None = None) -> httpx.AsyncClient:
        """Return a client that sends only the test's requests, with this target's key or with *key*."""
        keys = {"X-API-Key": used} if (used := self.key if key is None else key) else {}
        sent = keys | dict(headers or {})
        return httpx.AsyncClient(base_url=self.url, headers=sent, verify=False, trust_env=False, timeout=HANG_S)


class World(SharedServers[Target]):
    """All targets of one test process."""

    def started(self, name: str) -> Target:
        """Start a target."""
        folder = self._folder()
        if name in ONE_GATEWAY:
            gateway = Gateway(folder, {})
            self._undo.callback(gateway.stop)
            gateway.start()
            return gateway_target(name, gateway)
        if name == "stack":
            stack = Stack()
            self._undo.callback(stack.close)
            stack.start()
            return gateway_target(name, stack.gateway, stack)
        process = _server(name, folder / "server.log")
        self._undo.callback(process.stop)
        process.start()
        url = process.address if "://" in process.address else f"http://{process.address}"
        return Target(name=name, url=url, log=lambda: process.log)

    def _folder(self) -> Path:
        folder = short_folder()
        self._undo.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder


def gateway_target(name: str, gateway: Gateway, stack: Stack | None = None) -> Target:
    """Return the target for a running gateway."""
    return Target(
        name=name, url=gateway.url, key=TRAINER_KEYS["alice"], log=lambda: gateway.log, gateway=gateway, stack=stack
    )


def _server(name: str, log: Path) -> ServerProcess:
    if name == ENVSERVER:
        return ServerProcess(
            [sys.executable, str(WIRE / "alone" / "server.py")],
            variables={"ENVSERVER_HOST": "127.0.0.1", "ENVSERVER_PORT": "0", "ENVSERVER_TASKS": str(WIRE / "tasks")},
            ready=r"server_ready address=(\S+)",
            log=log,
        )
    return ServerProcess(
        [sys.executable, str(WIRE / "references" / "server.py"), name.removesuffix("-server")],
        variables={"OPENREWARD_DISABLE_UPDATE_CHECK": "1"},
        ready=r"Uvicorn running on (http://[^\s]+)",
        log=log,
    )


def _marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.docker, pytest.mark.redis] if name == "stack" else []


def on(*names: str) -> pytest.MarkDecorator:
    """Run a test on each of these targets."""
    return pytest.mark.parametrize("target", [pytest.param(name, marks=_marks(name)) for name in names], indirect=True)


def with_clients(*names: str) -> pytest.MarkDecorator:
    """Run a test on each of these targets with each client. An official server runs only with its own client."""
    pairs = [(name, sdk) for name in names for sdk in _SDKS.get(name, ("ors", "openreward"))]
    rows = [pytest.param(name, sdk, marks=_marks(name), id=f"{name}-{sdk}") for name, sdk in pairs]
    return pytest.mark.parametrize(("target", "sdk"), rows, indirect=True)


def token() -> str:
    """Return a unique word."""
    return uuid.uuid4().hex


async def runs_once(folder: Folder, word: str) -> None:
    """Assert, for `eventually`, that a tool recorded *word* once: its call has then started."""
    assert folder.runs(word) == 1


def tasks_of(environment: str, split: str) -> Iterator[dict[str, Any]]:
    """Yield the tasks of a split, directly from its file."""
    for line in (WIRE / "tasks" / environment / f"{split}.jsonl").read_text().splitlines():
        yield json.loads(line)
