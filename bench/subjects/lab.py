"""The lab of `scripts/swarm-lab` under its own name, and a cluster's ``gateway node`` processes on its machines.

The lab's machines are engines on this machine. So their processes are in this machine's /proc, with its numbers.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import tempfile
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from docker import APIClient
from docker.errors import ImageNotFound

from bench.subjects.catalogs import STEPS_FOLDER
from bench.subjects.containers import ENGINE_S
from bench.subjects.processes import STOP_S, StartError
from gateway.backends.docker.container import LABEL_ENVIRONMENT, LABEL_INSTANCE
from gateway.node.tls import CA_FILE, NODE_FILES

LOCKS = Path("/var/lib/swarm-lab")
SCRIPT = Path(__file__).parents[2] / "scripts" / "swarm-lab"
GATEWAY_IMAGE = "env-gateway/gateway:latest"
"""Image with the command ``gateway``; ``scripts/build-images gateway`` makes it."""
COMMAND_S = 300.0
"""Timeout of a script's command in seconds. Another lab's command may hold the lock for 180 s first."""
NODE_S = 60.0
LOOK_S = 0.05
SECRETS, CATALOG, WORKERS = "/run/secrets", "/catalog", "/run/gateway/workers"
_ID = re.compile(r"[0-9a-f]{64}")


# -- the machines -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lab:
    """A lab, with its machines up or down."""

    name: str
    net: str
    """First three numbers of its network address."""
    machines: int
    lock: int | None = None
    """Descriptor of the lab's lock. With it, this process owns the lab, and no other process may remove it."""

    @property
    def directory(self) -> Path:
        """Folder of the lab's disks, logs and sockets."""
        return LOCKS / self.name

    def address(self, place: int) -> str:
        """Return the address of machine *place* for this machine. Places count from 1."""
        return f"{self.net}.{10 + place}"

    def engine(self, place: int) -> str:
        """Return the address of the engine of machine *place* for this machine."""
        return f"unix://{self.directory}/node{place}/docker.sock"

    async def run(self, *words: str, engine: str | None = None) -> None:
        """Run the script with *words*. *engine* is this machine's engine, for commands that need it.

        Raises:
            StartError: It fails, or takes longer than ``COMMAND_S``. The message has its output.
        """
        # To a file, because machines that the script starts may keep a pipe open, and reading it would hang.
        with tempfile.TemporaryFile() as output:
            process = await asyncio.create_subprocess_exec(
                *(str(SCRIPT), *words),
                env=self._environ(engine),
                pass_fds=self._inherited(),
                stdin=DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C must reach only the benchmark, which then removes the lab
            )
            try:
                async with asyncio.timeout(COMMAND_S):
                    await process.wait()
            except TimeoutError as error:
                raise StartError(f"{SCRIPT} {words}: not done after {COMMAND_S:.0f} s: {_end_of(output)}") from error
            finally:
                await _end(process)
            if process.returncode:
                raise StartError(f"{SCRIPT} {words}: {_end_of(output)}")

    def remove(self) -> None:
        """Remove the lab, in any state. This blocks on purpose, so that a signal does not cancel it.

        Raises:
            StartError: It cannot be removed.
        """
        with tempfile.TemporaryFile() as output:
            try:
                done = subprocess.run(
                    [str(SCRIPT), "down"],
                    env=self._environ(None),
                    pass_fds=self._inherited(),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    timeout=COMMAND_S,
                    check=False,
                    start_new_session=True,
                )
            except subprocess.TimeoutExpired as error:
                raise StartError(f"{SCRIPT} down: not done after {COMMAND_S:.0f} s: {_end_of(output)}") from error
            if done.returncode:
                raise StartError(f"{SCRIPT} down: {_end_of(output)}")

    def _inherited(self) -> tuple[int, ...]:
        return () if self.lock is None else (self.lock,)

    def _environ(self, engine: str | None) -> dict[str, str]:
        own = {
            "SWARM_LAB_NAME": self.name,
            "SWARM_LAB_NET": self.net,
            "SWARM_LAB_DIR": str(self.directory),
            "SWARM_LAB_NODES": str(self.machines),
            "SWARM_LAB_LOCK": "" if self.lock is None else str(self.lock),
        }
        return {**os.environ, **own, **({"DOCKER_HOST": engine} if engine else {})}


@asynccontextmanager
async def running_lab(lab: Lab) -> AsyncIterator[None]:
    """Start the machines, and remove them on leaving. No other process may remove them meanwhile.

    Raises:
        StartError: They do not start, cannot be removed, or belong to another process or checkout.
    """
    with _own(lab) as own:
        await own.run("down")  # removes a killed run's lab; if the script refuses, the lab is not this run's
        try:
            await own.run("up")
            yield
        finally:
            own.remove()


@contextmanager
def _own(lab: Lab) -> Iterator[Lab]:
    """Open the lab's lock, unless the caller has it. The script locks it."""
    if lab.lock is not None:
        yield lab
        return
    LOCKS.mkdir(parents=True, exist_ok=True)
    with (LOCKS / f"{lab.name}.lock").open("a") as lock:
        yield replace(lab, lock=lock.fileno())


def _end_of(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read().decode(errors="replace")[-1000:]


async def _end(process: Process) -> None:
    """End the script and its commands, if they still run. The machines that it started are not among them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await process.wait()


# -- engines ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine's engine, for one request at a time."""

    name: str
    client: APIClient

    def workers(self, instance: str, environment: str) -> list[str]:
        """Return the ids of the running workers' containers."""
        labels = [f"{LABEL_INSTANCE}={instance}", f"{LABEL_ENVIRONMENT}={environment}"]
        return [str(each["Id"]) for each in self.client.containers(quiet=True, filters={"label": labels})]

    def has_image(self, image: str) -> bool:
        """Return True if the engine has *image*."""
        try:
            self.client.inspect_image(image)  # type: ignore[no-untyped-call]  # not ours
        except ImageNotFound:
            return False
        return True

    def take_image(self, image: str, source: Machine) -> None:
        """Copy *image* from another machine, without the gateways."""
        for _ in self.client.load_image(source.client.get_image(image)):  # type: ignore[no-untyped-call]  # not ours
            pass

    def remove_instance(self, instance: str) -> None:
        """Remove all containers of *instance*."""
        filters = {"label": f"{LABEL_INSTANCE}={instance}"}
        for container in self.client.containers(all=True, quiet=True, filters=filters):
            self.client.remove_container(container["Id"], force=True)


@contextmanager
def machine(name: str, engine: str) -> Iterator[Machine]:
    """Connect to *engine*."""
    client = APIClient(base_url=engine, version="auto", timeout=ENGINE_S)
    try:
        yield Machine(name, client)
    finally:
        client.close()


def processes_of(containers: Collection[str]) -> dict[str, list[int]]:
    """Return the numbers, on this machine, of the processes in each container, by its id.

    Raises:
        StartError: A container has no process: it ended, or its engine is on another machine.
    """
    found: dict[str, list[int]] = {id: [] for id in containers}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # the process ended
                for id in found.keys() & set(_ID.findall((entry / "cgroup").read_text())):
                    found[id].append(int(entry.name))
    if lost := [id[:12] for id, numbers in found.items() if not numbers]:
        raise StartError(f"no process of the containers {', '.join(lost)} is seen here")
    return found


# -- nodes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """The settings of a ``gateway node`` of one instance."""

    instance: str
    port: int
    """Port of the gate. The relay has the next port."""
    image: str
    catalog: Path
    environments: str
    """Names of the environments, comma-separated."""
    certificates: Path

    @property
    def volume(self) -> str:
        """Name of the volume with the workers' sockets on each machine."""
        return f"{self.instance}_workers"


def start_node(machine: Machine, settings: NodeSettings) -> str:
    """Start a node in a container like that of ``deploy/swarm/stack.yaml``. Return the container's id.

    Raises:
        DockerException: An engine operation failed.
    """
    tasks = str(STEPS_FOLDER / "tasks")  # the same path as in the catalog
    mounts = {
        "/var/run/docker.sock": "/var/run/docker.sock",
        settings.volume: WORKERS,
        f"{settings.instance}_node": "/var/lib/gateway",
    }
    files = {str(settings.certificates / name): f"{SECRETS}/{name}" for name in (CA_FILE[0], *NODE_FILES)}
    files |= {str(settings.catalog): CATALOG, tasks: tasks}
    client = machine.client
    host = client.create_host_config(
        network_mode="host",
        read_only=True,
        cap_drop=["ALL"],
        cap_add=["DAC_OVERRIDE"],
        init=True,
        mem_limit="512m",
        pids_limit=128,
        tmpfs={"/tmp": "size=16777216"},
        binds=[f"{source}:{target}" for source, target in mounts.items()]
        + [f"{source}:{target}:ro" for source, target in files.items()],
    )
    container = client.create_container(
        settings.image, command=["node"], user="0:10000", environment=node_variables(settings), host_config=host
    )["Id"]
    client.start(container)
    return str(container)


async def node_ready(machine: Machine, container: str, address: tuple[str, int]) -> None:
    """Wait until the node of *container* accepts connections at *address*.

    Raises:
        StartError: It ended, or is not ready within ``NODE_S``. The message has the end of its log.
    """
    until = time.perf_counter() + NODE_S
    while not await _listens(address):
        state = (await asyncio.to_thread(machine.client.inspect_container, container))["State"]
        if not state["Running"] or time.perf_counter() > until:
            said = await asyncio.to_thread(machine.client.logs, container, tail=20)
            raise StartError(f"the node on {machine.name} is not ready:\n{said.decode(errors='replace')}")
        await asyncio.sleep(LOOK_S)


def node_variables(settings: NodeSettings) -> dict[str, str]:
    """Return the settings of a node's process."""
    ca, (cert, key) = CA_FILE[0], NODE_FILES
    return {
        "GATEWAY_NODE_LISTEN": f"0.0.0.0:{settings.port}",
        "GATEWAY_NODE_SOCKET": "/tmp/engine.sock",
        "GATEWAY_NODE_ENGINE": "unix:///var/run/docker.sock",
        "GATEWAY_NODE_MAKES_FOLDERS": "true",
        "GATEWAY_STATE_DIR": "/var/lib/gateway",
        "GATEWAY_SOCKET_DIR": WORKERS,
        "GATEWAY_SOCKET_VOLUME": settings.volume,
        "GATEWAY_INSTANCE": settings.instance,
        "GATEWAY_CATALOG_DIR": CATALOG,
        "GATEWAY_ENVIRONMENTS": settings.environments,
        "GATEWAY_DEFAULT_ENVIRONMENT": settings.environments.partition(",")[0],
        "GATEWAY_CLUSTER_CA": f"{SECRETS}/{ca}",
        "GATEWAY_CLUSTER_CERT": f"{SECRETS}/{cert}",
        "GATEWAY_CLUSTER_KEY": f"{SECRETS}/{key}",
    }


async def _listens(address: tuple[str, int]) -> bool:
    try:
        async with asyncio.timeout(1.0):
            _, writer = await asyncio.open_connection(*address)
    except OSError:  # including a TimeoutError
        return False
    writer.close()
    return True
