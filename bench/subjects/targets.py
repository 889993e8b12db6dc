"""What is measured: official servers, the environment server alone, and the gateway with its worker."""

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
"""The official servers as their packages install them."""
FAST = "ors-sdk-fast"
"""The leaner one of them on uvloop and httptools: what its users gain without a gateway."""
ENVSERVER = "envserver"
GATEWAY = "gateway"
MATH_SERVER = "math"
OS_TARGET = "os"
"""The os environment's server; where its box is and its sandboxes are mounted has to be said by its variables."""


@dataclass(frozen=True, slots=True)
class Target:
    """A running server."""

    name: str
    process: ServerProcess
    environment: str = "noop"
    """The path segment of its environment."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Further processes that do its work, by what they are: a gateway's worker."""

    @property
    def address(self) -> Address:
        """Where it listens."""
        return self.process.address

    def usage(self) -> dict[str, Usage]:
        """What each of its processes has used so far."""
        return {self.name: self.process.usage()} | {part: usage(pid) for part, pid in self.parts.items()}

    def rss_bytes(self) -> dict[str, int]:
        """The resident memory of each of its processes."""
        return {part: used.rss_bytes for part, used in self.usage().items()}


class Servers:
    """Makes servers, each with a folder of its own below one that is removed in the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made = 0

    def make(self, name: str, variables: Mapping[str, str] | None = None) -> ServerProcess:
        """A server that is not started yet; *variables* are settings besides those that it needs here.

        Raises:
            ValueError: there is no such server.
        """
        self._made += 1
        folder = self.folder / f"{name}-{self._made}"
        folder.mkdir()
        command, own, ready, cwd = _recipe(name, folder)
        return ServerProcess(command, variables=own | dict(variables or {}), ready=ready, log=folder / "log", cwd=cwd)

    @asynccontextmanager
    async def running(self, name: str, variables: Mapping[str, str] | None = None) -> AsyncIterator[ServerProcess]:
        """Start a server; it is ended on leaving."""
        process = self.make(name, variables)
        try:
            await process.start()
            yield process
        finally:
            await process.stop()


@asynccontextmanager
async def servers(parent: Path | None = None) -> AsyncIterator[Servers]:
    """A place for servers' folders; *parent* must be one whose paths are short enough for Unix sockets."""
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=parent))
    try:
        yield Servers(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _recipe(name: str, folder: Path) -> tuple[Sequence[str], dict[str, str], str, Path | None]:
    """Command, variables, pattern of readiness and working directory of the server *name*."""
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
    """The settings of an embedded gateway: processes for workers, memory for a store."""
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
