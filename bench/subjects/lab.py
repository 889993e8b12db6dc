"""The lab of `scripts/swarm-lab` under a name of its own, and the ``gateway node`` of a cluster on its machines.

Its machines are engines on this one, so their processes are in this machine's /proc, under this machine's numbers.
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
"""Has the command ``gateway``; ``scripts/build-images gateway`` makes it."""
COMMAND_S = 300.0
"""The longest command of the script: another lab's may hold its lock for 180 s before it begins."""
NODE_S = 60.0
LOOK_S = 0.05
SECRETS, CATALOG, WORKERS = "/run/secrets", "/catalog", "/run/gateway/workers"
_ID = re.compile(r"[0-9a-f]{64}")


# -- the machines -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lab:
    """A lab; its machines may be up or not."""

    name: str
    net: str
    """First three numbers of its network."""
    machines: int
    lock: int | None = None
    """Descriptor of its lock, by which it is this process's and no other one may remove it."""

    @property
    def directory(self) -> Path:
        """Its disks, logs and sockets."""
        return LOCKS / self.name

    def address(self, place: int) -> str:
        """Where machine *place* is, from this one; they are counted from 1."""
        return f"{self.net}.{10 + place}"

    def engine(self, place: int) -> str:
        """Where the engine of machine *place* is, from this one."""
        return f"unix://{self.directory}/node{place}/docker.sock"

    async def run(self, *words: str, engine: str | None = None) -> None:
        """Run the script with *words*; *engine* is this machine's, where it asks that one.

        Raises:
            StartError: it fails, or takes longer than ``COMMAND_S``; with what it said.
        """
        # Into a file: the machines that it starts may hold what a pipe's end would be waited for.
        with tempfile.TemporaryFile() as output:
            process = await asyncio.create_subprocess_exec(
                *(str(SCRIPT), *words),
                env=self._environ(engine),
                pass_fds=self._inherited(),
                stdin=DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the benchmark, which then removes the lab
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
        """Remove it, whatever state it is in. It blocks on purpose: a signal must not break this off.

        Raises:
            StartError: it can't be removed.
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
    """Bring the machines up; they are removed on leaving. No other process may remove them meanwhile.

    Raises:
        StartError: they don't come up, can't be removed, or are another process's or checkout's.
    """
    with _own(lab) as own:
        await own.run("down")  # of a run that was killed; refused, nothing of it is ours
        try:
            await own.run("up")
            yield
        finally:
            own.remove()


@contextmanager
def _own(lab: Lab) -> Iterator[Lab]:
    """Have its lock open, unless the caller has; the script locks it."""
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
    """End the script and what it runs, if it still does; machines that it started are not its own any more."""
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
    """A machine's engine; to be asked one question at a time."""

    name: str
    client: APIClient

    def workers(self, instance: str, environment: str) -> list[str]:
        """The containers of workers that run, by their ids."""
        labels = [f"{LABEL_INSTANCE}={instance}", f"{LABEL_ENVIRONMENT}={environment}"]
        return [str(each["Id"]) for each in self.client.containers(quiet=True, filters={"label": labels})]

    def has_image(self, image: str) -> bool:
        """Whether *image* is there."""
        try:
            self.client.inspect_image(image)  # type: ignore[no-untyped-call]  # not ours
        except ImageNotFound:
            return False
        return True

    def take_image(self, image: str, source: Machine) -> None:
        """Get *image* from another machine, past the gateways."""
        for _ in self.client.load_image(source.client.get_image(image)):  # type: ignore[no-untyped-call]  # not ours
            pass

    def remove_instance(self, instance: str) -> None:
        """Remove all containers of *instance*."""
        filters = {"label": f"{LABEL_INSTANCE}={instance}"}
        for container in self.client.containers(all=True, quiet=True, filters=filters):
            self.client.remove_container(container["Id"], force=True)


@contextmanager
def machine(name: str, engine: str) -> Iterator[Machine]:
    """Talk to *engine*."""
    client = APIClient(base_url=engine, version="auto", timeout=ENGINE_S)
    try:
        yield Machine(name, client)
    finally:
        client.close()


def processes_of(containers: Collection[str]) -> dict[str, list[int]]:
    """The numbers, as this machine counts, of the processes in each container, by its id.

    Raises:
        StartError: of one there is none: it ended, or its engine is on another machine.
    """
    found: dict[str, list[int]] = {id: [] for id in containers}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it ended
                for id in found.keys() & set(_ID.findall((entry / "cgroup").read_text())):
                    found[id].append(int(entry.name))
    if lost := [id[:12] for id, numbers in found.items() if not numbers]:
        raise StartError(f"no process of the containers {', '.join(lost)} is seen here")
    return found


# -- nodes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """A ``gateway node`` of one instance."""

    instance: str
    port: int
    """Where it serves the gate; the relay is on the next one."""
    image: str
    catalog: Path
    environments: str
    """Their names, comma-separated."""
    certificates: Path

    @property
    def volume(self) -> str:
        """Where each machine has the workers' sockets."""
        return f"{self.instance}_workers"


def start_node(machine: Machine, settings: NodeSettings) -> str:
    """Start a node in a container like that of ``deploy/swarm/stack.yaml``; returns the container's id.

    Raises:
        DockerException: the engine does not do its part.
    """
    tasks = str(STEPS_FOLDER / "tasks")  # as the catalog names it
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
    """Wait until the node of *container* takes connections at *address*.

    Raises:
        StartError: it ended, or does not within ``NODE_S``; with the end of what it logged.
    """
    until = time.perf_counter() + NODE_S
    while not await _listens(address):
        state = (await asyncio.to_thread(machine.client.inspect_container, container))["State"]
        if not state["Running"] or time.perf_counter() > until:
            said = await asyncio.to_thread(machine.client.logs, container, tail=20)
            raise StartError(f"the node on {machine.name} is not ready:\n{said.decode(errors='replace')}")
        await asyncio.sleep(LOOK_S)


def node_variables(settings: NodeSettings) -> dict[str, str]:
    """The settings of a node's process."""
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
    except OSError:  # a TimeoutError is one, too
        return False
    writer.close()
    return True
