"""Replicas of the gateway's OpenEnv upstream, and the official servers that they connect to."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import re
import select
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from gateway.core.environment import Environment, PoolPolicy, ResetMapping, Server, ServerProtocol, Timeouts
from gateway.core.errors import SessionNotFound
from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.ports.store import SessionStore
from gateway.core.session import Session, SessionSetup, SessionState
from gateway.core.worker import Worker
from gateway.frontends.replicas import ReplicaFrontend
from gateway.sessions.cache import session_id
from gateway.upstreams.openenv.upstream import OpenEnvUpstream
from gateway.upstreams.replica_client import ReplicaClient
from gateway.upstreams.transport import HttpTransport
from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually_now
from tests.fakes.replicas import SECRET, served
from tests.wire.gateways import short_folder
from tests.wire.openenv.clients import HERE, NEWEST, python_of

OLDEST, OLDER = "0.2.0", "0.2.3"
RELEASES = (OLDEST, OLDER, NEWEST)
LAST_WITHOUT, FIRST_WITH = "0.4.1", "0.5.0"
"""The last release in which sessions end with their sockets, and the first in which they outlive them."""
OWN_TASKS = ResetMapping(keys=("seed", "episode_id", "split", "index", "fails", "waits_for"))
_numbers = itertools.count(1)


def environment(*, resets: ResetMapping = OWN_TASKS, learns: bool = False, url: str = "", **more: Any) -> Environment:
    """Return a third-party OpenEnv environment."""
    server = Server(url=url) if url else Server(port=8000)
    timeouts = Timeouts(start_s=20, setup_s=20, call_s=30, close_s=10)
    made = Environment(
        name=EnvironmentName("counted"),
        image="counter",
        directory=Path("/"),
        command=(),
        protocol=ServerProtocol.OPENENV,
        server=server,
        resets=resets,
        pool=PoolPolicy(learns_slots=learns, slots=1),
        timeouts=timeouts,
    )
    return replace(made, **more)


class Launcher:
    """A process that has imported one release of the package and forks official servers.

    A fork takes a twentieth of the CPU of an import, so that each test gets its own server.
    """

    def __init__(self, version: str) -> None:
        command = [python_of(version), "-W", "ignore", str(HERE / "upstream_server.py")]
        # A new session, because the program kills its whole process group to end its servers.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)

    def fork(self, kind: str, capacity: int, *, log: Path, path: str) -> None:
        """Start a server; ``upstream_server.serve`` describes the arguments."""
        assert self._process.stdin is not None
        request = {"kind": kind, "capacity": capacity, "log": str(log), "path": path}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def check(self) -> None:
        """Raise RuntimeError if the process has ended, as it does if the package cannot be imported."""
        if self._process.poll() is not None:
            raise RuntimeError(f"upstream_server.py ended with {self._process.returncode}; its error is in the output")

    def close(self) -> None:
        """End the process with all its servers."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(HANG_S)


class ForkedServer:
    """An official server that a launcher forked."""

    def __init__(self, launcher: Launcher, kind: str, capacity: int, folder: Path, *, on_socket: bool) -> None:
        self._log = folder / "log"
        self._launcher = launcher
        launcher.fork(kind, capacity, log=self._log, path=str(folder / "s") if on_socket else "")
        pid, self.address = eventually_now(self._started)
        self._pidfd = os.pidfd_open(pid)

    @property
    def log(self) -> str:
        """Everything that the server wrote to stdout and stderr."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def kill(self) -> None:
        """Kill the server without a chance to clean up, and wait until it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        ended, _, _ = select.select([self._pidfd], [], [], HANG_S)
        assert ended, "the server did not end"

    def close(self) -> None:
        self.kill()
        os.close(self._pidfd)

    def _started(self) -> tuple[int, str]:
        self._launcher.check()
        if "\nTraceback" in self.log:  # not an AssertionError, which would be retried
            raise RuntimeError(self.log)
        found = re.search(r"upstream_ready pid=(\d+) address=(\S+)\n", self.log)
        assert found is not None, f"the server is not ready:\n{self.log}"
        return int(found[1]), found[2]


@cache
def launcher_of(version: str) -> Launcher:
    """Start the launcher of a release, which lives until the test process ends."""
    launcher = Launcher(version)
    atexit.register(launcher.close)
    return launcher


@dataclass
class Image:
    """A running official server."""

    version: str
    process: ForkedServer
    worker: WorkerId = field(default_factory=lambda: WorkerId(f"w{next(_numbers)}"))

    @property
    def address(self) -> str:
        """The address in a worker's form, ``tcp:HOST:PORT`` or ``unix:PATH``."""
        return self.process.address

    @property
    def url(self) -> str:
        return f"http://{self.address.removeprefix('tcp:')}"

    def as_worker(self) -> Worker:
        """Return this server as a worker."""
        name = EnvironmentName("counted")
        return Worker(id=self.worker, environment=name, digest="d", slots=1, address=self.address)

    def session(self, *, address: str = "") -> Session:
        """Return a session that has a slot in this server."""
        number = next(_numbers)
        return Session(
            id=session_id(Owner("lab"), f"episode-{number}"),
            name=f"episode-{number}",
            owner=Owner("lab"),
            environment=EnvironmentName("counted"),
            lease=f"lease-{number}",
            fingerprint="f00d",
            idle_s=300,
            worker=self.worker,
            address=address or self.address,
            state=SessionState.OPEN,
        )

    def never_used_stateless_routes(self) -> bool:
        """Return True if no client called the HTTP reset or step, which have no session."""
        return not any(f"POST /{route} " in self.process.log for route in ("reset", "step"))


@contextmanager
def image(
    kind: str = "counter", *, version: str = NEWEST, capacity: int = 4, on_socket: bool = False
) -> Iterator[Image]:
    """Start an official server."""
    folder = short_folder()
    try:
        server = ForkedServer(launcher_of(version), kind, capacity, folder, on_socket=on_socket)
        with contextlib.closing(server):
            yield Image(version, server)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Handles:
    """The store's knowledge of sessions, as far as an upstream needs it: the holder of each session."""

    def __init__(self) -> None:
        self.sessions: dict[SessionId, Session] = {}
        self.rebound = 0

    def opened(self, session: Session) -> Session:
        self.sessions[session.id] = session
        return session

    async def rebind(self, id: SessionId, lease: str, *, was: str, handle: str) -> bool:
        known = self.sessions.get(id)
        if known is None or known.lease != lease or known.handle != was:
            return False
        self.sessions[id] = replace(known, handle=handle)
        self.rebound += 1
        return True

    async def find(self, id: SessionId) -> Session:
        if id not in self.sessions:
            raise SessionNotFound(id)
        return self.sessions[id]


@dataclass
class Replica:
    """An upstream with its transport and its session handles."""

    upstream: OpenEnvUpstream
    transport: HttpTransport
    handles: Handles
    url: str = ""

    async def opened(self, session: Session, where: Environment, **setup: Any) -> Session:
        """Open *session* and return it as the store has it."""
        return self.handles.opened(await self.upstream.open(session, where, SessionSetup(**({"spec": {}} | setup))))


@asynccontextmanager
async def alone() -> AsyncIterator[Replica]:
    """Yield the only replica of a gateway."""
    transport = HttpTransport()
    handles = Handles()
    upstream = OpenEnvUpstream(transport, store=cast("SessionStore", handles))
    try:
        yield Replica(upstream, transport, handles)
    finally:
        await upstream.aclose()
        await transport.aclose()


@asynccontextmanager
async def replica(handles: Handles) -> AsyncIterator[Replica]:
    """Yield one of several replicas, which query each other over HTTP."""
    transport = HttpTransport()
    async with contextlib.AsyncExitStack() as undo:
        undo.push_async_callback(transport.aclose)

        async def serve(operation: str, session: str, lease: str, message: bytes, within_s: float, /) -> bytes:
            return await upstream.serve(operation, session, lease, message, within_s)

        url = await undo.enter_async_context(served(ReplicaFrontend(SECRET, serve)))
        peers = ReplicaClient(url, SECRET)
        undo.push_async_callback(peers.aclose)
        upstream = OpenEnvUpstream(transport, peers, store=cast("SessionStore", handles))
        undo.push_async_callback(upstream.aclose)
        yield Replica(upstream, transport, handles, url)
