"""The official OpenEnv clients, unmodified. Each release runs in its own process and venv, driven over a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

from tests.deadlines import COMMAND_S, HANG_S

HERE = Path(__file__).parent
PROJECT = HERE.parents[2]
NEWEST = "0.10.0"
FIRST_ASYNC = "0.2.3"
OLDEST = "0.2.0"
"""A release with only synchronous, typed clients, which ignore headers."""


class ClientError(Exception):
    """An exception of a client. *kind* is the name of its class."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


def python_of(version: str) -> str:
    """Return the Python of a venv with that release of the package, and create the venv if it is missing."""
    return str(_venvs() / version / "bin" / "python")


@cache
def _venvs() -> Path:
    """Create the missing venvs of all releases."""
    # Uses the same path as scripts/test: the script's stamp contains the path, and another path creates all venvs anew.
    subprocess.run(["scripts/openenv-clients"], cwd=PROJECT, check=True, timeout=COMMAND_S)
    return PROJECT / ".venv-openenv"


class Driver:
    """A process that holds clients of one release.

    A thread reads its answers, so that one driver serves tests with different event loops.
    """

    def __init__(self, version: str) -> None:
        self.version = version
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {0: Future()}
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [python_of(version), "-W", "ignore", str(HERE / "driver.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        ready = self._waiting[0]
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert ready.result(HANG_S) == "ready"

    async def ask(self, client: str, do: str, **more: Any) -> Any:
        """Let *client* do something, and return the result.

        Raises:
            ClientError: The client raised an exception.
        """
        answer: Future[Any] = Future()
        number = next(self._numbers)
        with self._lock:
            self._waiting[number] = answer
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps({"id": number, "client": client, "do": do, **more}) + "\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                raise ClientError("DriverEnded", "the process of this client has ended") from None
        async with asyncio.timeout(HANG_S):
            return await asyncio.wrap_future(answer)

    def kill(self) -> None:
        """Kill the process like a power failure: only the kernel closes its sockets."""
        self._process.kill()
        self._process.wait(HANG_S)

    def close(self) -> None:
        """End the process with all its clients."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(HANG_S)
            except subprocess.TimeoutExpired:
                self.kill()
        self._reader.join(HANG_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            waiting = self._waiting.pop(said["id"])
            if "error" in said:
                waiting.set_exception(ClientError(said["error"]["type"], said["error"]["message"]))
            else:
                waiting.set_result(said["value"])
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ClientError("DriverEnded", "the process of this client has ended"))


DriverOf = Callable[[str], Driver]
"""Maps a release to the driver of its clients."""


class OpenEnv:
    """One client, as a test uses it. It returns the client's objects as dictionaries of their fields."""

    def __init__(self, driver: Driver, name: str) -> None:
        self._driver = driver
        self._name = name

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await self._driver.ask(self._name, method, args=args, kwargs=kwargs)

    async def reset(self, **kwargs: Any) -> dict[str, Any]:
        result: dict[str, Any] = await self.call("reset", **kwargs)
        return result

    async def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = await self.call("step", action)
        return result

    async def act(self, op: str, by: int = 1) -> dict[str, Any]:
        """Move the counter."""
        return await self.step({"op": op, "by": by})

    async def tool(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Call a tool as a step, and return its observation."""
        result = await self.step({"type": "call_tool", "tool_name": name, "arguments": arguments})
        observation: dict[str, Any] = result["observation"]
        return observation

    async def state(self) -> dict[str, Any]:
        state: dict[str, Any] = await self.call("state")
        return state

    async def abort(self) -> None:
        """Drop the connection abruptly."""
        await self._driver.ask(self._name, "abort")

    async def child(self) -> OpenEnv:
        """Open another session of this client, which ends with the client."""
        name = f"child-{next(_names)}"
        await self._driver.ask(self._name, "child", **{"as": name})
        return OpenEnv(self._driver, name)

    async def close(self) -> None:
        await self.call("close")


_names = itertools.count(1)


@asynccontextmanager
async def connected(
    driver: Driver, url: str, *, kind: str = "generic", mode: str = "async", **options: Any
) -> AsyncIterator[OpenEnv]:
    """Connect a client of *kind* (``generic``, ``typed``, ``browser``, ``mcp``), used in *mode* (see `driver.py`).

    Args:
        options: Further arguments of the client's class.
    """
    client = OpenEnv(driver, f"client-{next(_names)}")
    await driver.ask(client._name, "make", kind=kind, mode=mode, options={"base_url": url, **options})
    try:
        await client.call("connect")
        yield client
    finally:
        with contextlib.suppress(ClientError):  # the test must report its own failure
            await client.close()


def run_cli(*arguments: str | Path, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run the package's own command ``openenv``."""
    command: Sequence[str | Path] = [python_of(NEWEST), "-W", "ignore", "-m", "openenv.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
