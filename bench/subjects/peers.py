"""The proxies that the gateway is compared with: a recipe for each, and a separate worker behind each.

Proxies and workers are processes. If there are two CPUs, the proxy has one for itself. The worker and the load
generator share the other.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from bench.load.http1 import Address, connect
from bench.subjects.processes import START_S, ServerProcess, StartError, Usage, descendants, usage
from bench.subjects.targets import (
    BENCH,
    ENVIRONMENTS,
    ENVSERVER_READY,
    GATEWAY_READY,
    UVICORN_READY,
    Servers,
    gateway_variables,
)

PEERS = BENCH.parent / ".bench-peers"
"""Folder made by ``scripts/bench-peers``."""
REFERENCES = BENCH / "references"

DIRECTLY = "directly"
BARE = "bare forwarder"
NGINX = "nginx"
NGINX_TCP = "nginx (TCP)"
CHP = "configurable-http-proxy"
FORWARDER = "httpx forwarder"
GATEWAY = "gateway"
GATEWAY_OPEN = "gateway (no keys)"
HTTPX_GATEWAY = "httpx gateway"
HTTPX_GATEWAY_LIMITS = "httpx gateway (default limits)"
ALL = (
    *(DIRECTLY, BARE, NGINX, NGINX_TCP, CHP, FORWARDER),
    *(HTTPX_GATEWAY, HTTPX_GATEWAY_LIMITS, GATEWAY_OPEN, GATEWAY),
)
VARIANTS = (NGINX_TCP, HTTPX_GATEWAY_LIMITS, GATEWAY_OPEN)
"""Variants of another peer. Short runs leave them out."""
CALLERS_MAX = {FORWARDER: 256, HTTPX_GATEWAY: 256, HTTPX_GATEWAY_LIMITS: 64}
"""Maximum number of callers. Above it, httpx scans all waiting requests for each answer: a round would take minutes."""
OURS = (DIRECTLY, GATEWAY, GATEWAY_OPEN)
"""Subjects whose errors are this project's errors."""

PROXY, WORKER = "proxy", "worker"
LOOK_S = 0.005
KEEP_ALIVE_S = 3600
"""Seconds that idle connections are kept: longer than a run. Otherwise reconnects would affect a proxy's figures."""
COMMAND_S = 10.0


@dataclass(frozen=True, slots=True)
class Found:
    """The installed programs and their versions; None for a missing program."""

    nginx: Path | None = None
    nginx_version: str | None = None
    chp: Path | None = None
    chp_version: str | None = None
    node_version: str | None = None
    wrk: Path | None = None
    """wrk, the load generator."""

    def has(self, name: str) -> bool:
        """Return True if all programs of the peer *name* are installed."""
        if name in (NGINX, NGINX_TCP):
            return self.nginx is not None
        return name != CHP or self.chp is not None

    def versions(self) -> dict[str, str | None]:
        """Return the versions for the results."""
        return {"nginx": self.nginx_version, CHP: self.chp_version, "node": self.node_version}


def find(root: Path = PEERS) -> Found:
    """Find nginx and wrk (below *root*, then on the PATH) and configurable-http-proxy (below *root* only)."""
    nginx, nginx_version = None, None
    candidates = [root / "nginx" / "usr" / "sbin" / "nginx", shutil.which("nginx"), "/usr/sbin/nginx"]
    for candidate in candidates:
        if candidate is not None and (told := _told(candidate, "-v")):
            nginx, nginx_version = Path(candidate), told.rpartition("/")[2].split()[0]
            break
    wrk = shutil.which("wrk", path=f"{root / 'wrk'}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    found = Found(nginx, nginx_version, wrk=Path(wrk) if wrk else None)
    folder = root / "chp"
    program = folder / "node_modules" / CHP / "bin" / CHP
    node_version = _told("node", "--version")
    if node_version is None or not program.is_file() or not (folder / "installed").is_file():
        return replace(found, node_version=node_version)
    chp_version = (folder / "installed").read_text().strip()
    return replace(found, chp=program, chp_version=chp_version, node_version=node_version)


def _told(*command: str | Path) -> str | None:
    """Return a program's output, or None if the program is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return (done.stdout or done.stderr).strip() or None


# -- CPUs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cpus:
    """The CPUs of the proxy and of the load."""

    proxy: int
    load: int


@contextmanager
def shared_out(*, wanted: bool = True) -> Iterator[Cpus | None]:
    """Pin this process, and so its later children, to the load's CPU until leaving. Yield None if nothing is pinned.

    Nothing is pinned with fewer than two CPUs, without permission, and if *wanted* is False.
    """
    before = os.sched_getaffinity(0)
    cpus = choose(before) if wanted else None
    if cpus is not None:
        try:
            os.sched_setaffinity(0, {cpus.load})
        except OSError:
            cpus = None
    try:
        yield cpus
    finally:
        if cpus is not None:
            os.sched_setaffinity(0, before)


def choose(usable: set[int]) -> Cpus | None:
    """Return the first two of *usable*, or None if there are fewer than two."""
    if len(usable) < 2:
        return None
    proxy, load = sorted(usable)[:2]
    return Cpus(proxy, load)


def pin(pid: int, cpu: int) -> None:
    """Pin every thread of *pid* to *cpu*. Its later threads and processes inherit this.

    Raises:
        OSError: It is not allowed, or there is no such process.
    """
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), {cpu})


# -- running ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One row of the tables: a running proxy and its worker."""

    name: str
    address: Address
    proxy: Sequence[int] = ()
    """The proxy's processes; empty if the worker is called directly."""
    worker: Sequence[int] = ()

    def usage(self) -> dict[str, Usage]:
        """Return the usage of the proxy and of the worker so far."""
        parts = {PROXY: self.proxy, WORKER: self.worker}
        return {part: _sum(pids) for part, pids in parts.items() if pids}


def _sum(pids: Sequence[int]) -> Usage:
    found = [usage(pid) for pid in pids]
    return Usage(cpu_s=sum(each.cpu_s for each in found), rss_bytes=sum(each.rss_bytes for each in found))


class PlacedProcess(ServerProcess):
    """A server that receives its address in advance, and prints no message when it listens."""

    def __init__(
        self,
        command: Sequence[str],
        address: Address,
        *,
        log: Path,
        variables: Mapping[str, str],
        cwd: Path | None = None,
    ) -> None:
        super().__init__(command, variables=variables, ready=r"(?!)", log=log, cwd=cwd)
        self._place = address

    async def _until_ready(self, until: float) -> Address:
        while True:
            with suppress(OSError):
                (await connect(self._place)).close()
                return self._place
            if self._process is not None and self._process.returncode is not None:
                raise StartError(f"{self._command} ended with {self._process.returncode}:\n{self.tail()}")
            if time.perf_counter() > until:
                raise StartError(f"{self._command} does not listen after {START_S:.0f} s:\n{self.tail()}")
            await asyncio.sleep(LOOK_S)


@asynccontextmanager
async def running(name: str, made: Servers, found: Found, *, key: str, cpus: Cpus | None) -> AsyncIterator[Subject]:
    """Start the peer *name* and its worker, and end both on leaving.

    Args:
        key: The trainer key of the gateway, which every request has.

    Raises:
        StartError: A server does not start.
        ValueError: There is no such peer.
    """
    folder = made.folder / re.sub(r"\W+", "-", name).strip("-")
    folder.mkdir()
    if name in (GATEWAY, GATEWAY_OPEN, HTTPX_GATEWAY, HTTPX_GATEWAY_LIMITS):
        async with _started(_gateway(name, folder, key)) as process:
            worker = await _first_worker(process)
            _pin([process.pid], cpus)
            yield Subject(name=name, address=process.address, proxy=[process.pid], worker=[worker])
        return
    if name not in ALL:
        raise ValueError(f"no peer is called {name!r}")
    async with _started(_worker(folder, over_unix=name in (BARE, NGINX))) as worker_process:
        if name == DIRECTLY:
            yield Subject(name=name, address=worker_process.address, worker=[worker_process.pid])
            return
        async with _started(_proxy(name, folder, worker_process.address, found)) as process:
            pids = [process.pid, *descendants(process.pid)]
            _pin(pids, cpus)
            yield Subject(name=name, address=process.address, proxy=pids, worker=[worker_process.pid])


@asynccontextmanager
async def _started(process: ServerProcess) -> AsyncIterator[ServerProcess]:
    try:
        await process.start()
        yield process
    finally:
        await process.stop()


def _pin(pids: Sequence[int], cpus: Cpus | None) -> None:
    if cpus is not None:
        for pid in pids:
            pin(pid, cpus.proxy)


async def _first_worker(process: ServerProcess) -> int:
    """Wait for the gateway's worker, and return its process number. It stays on the load's CPU."""
    until = time.perf_counter() + START_S
    while not (found := process.children()):
        if time.perf_counter() > until:
            raise StartError(f"no worker after {START_S:.0f} s:\n{process.tail()}")
        await asyncio.sleep(LOOK_S)
    (worker,) = found
    return worker


# -- recipes ------------------------------------------------------------------------------------------------------


def _worker(folder: Path, *, over_unix: bool) -> ServerProcess:
    """Return the environment server alone, over a Unix socket like the gateway's workers, or over TCP."""
    command, log, cwd = [sys.executable, "server.py"], folder / "worker.log", ENVIRONMENTS / "noop"
    variables = {"ENVSERVER_SLOTS": "20000", "ENVSERVER_IDLE_S": str(KEEP_ALIVE_S)}
    if over_unix:
        place = Address(socket=str(folder / "worker"))
        variables["ENVSERVER_SOCKET"] = place.socket
        return PlacedProcess(command, place, log=log, variables=variables, cwd=cwd)
    variables |= {"ENVSERVER_HOST": "127.0.0.1", "ENVSERVER_PORT": "0"}
    return ServerProcess(command, variables=variables, ready=ENVSERVER_READY, log=log, cwd=cwd)


def _gateway(name: str, folder: Path, key: str) -> ServerProcess:
    variables = gateway_variables(folder) | {"GATEWAY_ENVIRONMENTS": "noop"}
    if name != GATEWAY_OPEN:
        variables["GATEWAY_TRAINER_KEYS"] = f"bench:{key}"
    command = [str(Path(sys.executable).parent / "gateway")]
    if name in (HTTPX_GATEWAY, HTTPX_GATEWAY_LIMITS):
        limits = "default" if name == HTTPX_GATEWAY_LIMITS else "unlimited"
        command = [sys.executable, str(REFERENCES / "httpx_gateway.py"), limits]
    return ServerProcess([*command, "serve"], variables=variables, ready=GATEWAY_READY, log=folder / "log")


def _proxy(name: str, folder: Path, worker: Address, found: Found) -> ServerProcess:
    log, python, url = folder / "log", sys.executable, f"http://127.0.0.1:{worker.port}"
    if name == BARE:
        command = [python, str(REFERENCES / "bare_forwarder.py"), worker.socket]
        ready = r"bare_forwarder_ready url=http://127\.0\.0\.1:(\d+)"
        return ServerProcess(command, variables={}, ready=ready, log=log)
    if name == FORWARDER:
        command = [python, str(REFERENCES / "httpx_forwarder.py"), url]
        return ServerProcess(command, variables={"NO_COLOR": "1"}, ready=UVICORN_READY, log=log)
    place = Address(port=free_port())
    if name == CHP:
        command = ["node", str(found.chp), "--ip", "127.0.0.1", "--port", str(place.port), "--default-target", url]
        command += ["--api-ip", "127.0.0.1", "--api-port", str(free_port()), "--log-level", "warn"]
        command += ["--keep-alive-timeout", str(KEEP_ALIVE_S * 1000)]
        return PlacedProcess(command, place, log=log, variables={"CONFIGPROXY_AUTH_TOKEN": secrets.token_hex()})
    configuration = folder / "nginx.conf"
    configuration.write_text(nginx_configuration(folder, place, worker, as_root=os.geteuid() == 0))
    return PlacedProcess([str(found.nginx), "-p", str(folder), "-c", str(configuration)], place, log=log, variables={})


def nginx_configuration(folder: Path, place: Address, worker: Address, *, as_root: bool) -> str:
    """Return a configuration: one worker process, kept connections, no buffering, because an event must not wait.

    As root, nginx stays root, because its worker's socket is in a folder that only root can read.
    """
    server = f"unix:{worker.socket}" if worker.socket else f"127.0.0.1:{worker.port}"
    kept = f"keepalive_requests 1000000000; keepalive_timeout {KEEP_ALIVE_S}s;"
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    folders = " ".join(f"{kind}_temp_path {folder / 'temp'};" for kind in kinds)
    return f"""{"user root root;" if as_root else ""}
daemon off;
worker_processes 1;
worker_rlimit_nofile 16384;
pid {folder / "pid"};
error_log stderr warn;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  {folders}
  {kept}
  upstream worker {{ server {server}; keepalive 2048; {kept} }}
  server {{
    listen 127.0.0.1:{place.port} backlog=2048;
    location / {{
      proxy_pass http://worker;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""


def free_port() -> int:
    """Return a port of 127.0.0.1 on which no server listens now, below the kernel's ephemeral ports.

    Until its server listens, an ephemeral port could go to any outgoing connection.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
