"""The subjects: official servers, the environment server alone, and the gateway with its worker."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.load.http1 import Address
from bench.subjects.processes import ServerProcess, Usage, usage

BENCH = Path(__file__).parents[1]
ENVIRONMENTS = BENCH / "environments"
MATH = BENCH.parent / "env_images" / "math"
OS_FOLDER = BENCH.parent / "env_images" / "os"
UVICORN_READY = r"Uvicorn running on http://127\.0\.0\.1:(\d+)"
ENVSERVER_READY = r"server_ready address=\S*127\.0\.0\.1:(\d+)"
GATEWAY_READY = r"gateway_ready url=http://127\.0\.0\.1:(\d+)"

OFFICIAL = ("ors-sdk", "openreward")
"""The official servers, as their packages install them."""
FAST = "ors-sdk-fast"
"""The leaner official server on uvloop and httptools: the gain that its users have without a gateway."""
ENVSERVER = "envserver"
GATEWAY = "gateway"
MATH_SERVER = "math"
OS_TARGET = "os"
"""The os environment's server. Its variables must set the paths of its box and of its sandboxes' mounts."""


@dataclass(frozen=True, slots=True)
class Target:
    """A running server."""

    name: str
    process: ServerProcess
    environment: str = "noop"
    """Path segment of its environment."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Further processes that do its work, by role: a gateway's worker."""

    @property
    def address(self) -> Address:
        """The server's address."""
        return self.process.address

    def usage(self) -> dict[str, Usage]:
        """Return the usage of each of its processes so far."""
        return {self.name: self.process.usage()} | {part: usage(pid) for part, pid in self.parts.items()}

    def rss_bytes(self) -> dict[str, int]:
        """Return the resident memory of each of its processes."""
        return {part: used.rss_bytes for part, used in self.usage().items()}


class Servers:
    """Makes servers, each with its own folder below a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made = 0

    def make(self, name: str, variables: Mapping[str, str] | None = None) -> ServerProcess:
        """Return a server that is not started yet. *variables* are settings in addition to the required settings.

        Raises:
            ValueError: There is no such server.
        """
        self._made += 1
        folder = self.folder / f"{name}-{self._made}"
        folder.mkdir()
        command, own, ready, cwd = _recipe(name, folder)
        return ServerProcess(command, variables=own | dict(variables or {}), ready=ready, log=folder / "log", cwd=cwd)

    @asynccontextmanager
    async def running(self, name: str, variables: Mapping[str, str] | None = None) -> AsyncIterator[ServerProcess]:
        """Start a server, and end it on leaving."""
        process = self.make(name, variables)
        try:
            await process.start()
            yield process
        finally:
            await process.stop()


@asynccontextmanager
async def servers(parent: Path | None = None) -> AsyncIterator[Servers]:
    """Make a folder for servers below *parent*, whose path must be short enough for Unix sockets."""
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=parent))
    try:
        yield Servers(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _recipe(name: str, folder: Path) -> tuple[Sequence[str], dict[str, str], str, Path | None]:
    """Return the command, variables, pattern of readiness and working directory of the server *name*."""
    python = sys.executable
    if name in (*OFFICIAL, FAST):
        package, _, rest = name.partition("-")
        words = [package, "fast"] if rest == "sdk-fast" else [package]
        return (
            [python, str(BENCH / "references" / "server.py"), *words],
            {"OPENREWARD_DISABLE_UPDATE_CHECK": "1", "NO_COLOR": "1"},
            UVICORN_READY,
            None,
        )
    if name in (ENVSERVER, MATH_SERVER, OS_TARGET):
        program = {MATH_SERVER: MATH / "math_server.py", OS_TARGET: OS_FOLDER / "os_server.py"}.get(
            name, ENVIRONMENTS / "noop" / "server.py"
        )
        own = {"ENVSERVER_HOST": "127.0.0.1", "ENVSERVER_PORT": "0"}
        if name == MATH_SERVER:
            own["ENVSERVER_TASKS"] = str(BENCH.parent / "tasks" / "math")
        if name == OS_TARGET:
            own["ENVSERVER_SANDBOX_HOST"] = "1"
        return [python, program.name], own, ENVSERVER_READY, program.parent
    if name == GATEWAY:
        return [str(Path(python).parent / "gateway"), "serve"], gateway_variables(folder), GATEWAY_READY, None
    raise ValueError(f"no server is called {name!r}")


def gateway_variables(folder: Path) -> dict[str, str]:
    """Return the settings of an embedded gateway, with process workers and the store in memory."""
    return {
        "GATEWAY_HOST": "127.0.0.1",
        "GATEWAY_PORT": "0",
        "GATEWAY_STORE": "memory",
        "GATEWAY_BACKEND": "process",
        "GATEWAY_SOCKET_DIR": str(folder / "s"),
        "GATEWAY_STATE_DIR": str(folder / "state"),
        "GATEWAY_CATALOG_DIR": str(ENVIRONMENTS),
        "GATEWAY_ENVIRONMENTS": "noop,cold",
        "GATEWAY_LOG_LEVEL": "info",
        "PATH": os.environ.get("PATH", os.defpath),
    }
