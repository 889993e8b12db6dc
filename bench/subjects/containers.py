"""A container for each session, by the Docker SDK alone: create, start, a command in it, remove.

Systems that run an agent's commands by ``docker exec`` work like this. This version is cheaper than usual: the
container has no network, and only one ``sleep`` runs in it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from docker import APIClient
from docker.errors import DockerException, ImageNotFound
from requests import RequestException

from bench.load.boxes import Taken
from bench.load.episodes import WrongAnswer
from bench.subjects.processes import StartError
from gateway.backends.docker.container import LABEL_ENVIRONMENT, LABEL_INSTANCE

LABEL = "env-gateway.bench"
"""Label of containers without a gateway. A gateway would remove unknown containers with its own label."""
THREADS = 16
MOST_EXECS = 3
"""Number of attempts to read the output of one command: an engine under load may lose the output of a short exec."""
ENGINE_S = 120
"""Timeout in seconds of one request to an engine under full load."""


def build_image(client: APIClient, folder: Path, tag: str, base_image: str) -> None:
    """Build the image of an environment.

    Raises:
        StartError: It cannot be built.
    """
    for line in client.build(path=str(folder), tag=tag, rm=True, decode=True, buildargs={"BASE": base_image}):
        if "error" in line:
            raise StartError(f"building {tag} on {base_image} (scripts/build-images base): {line['error']}")


class Containers:
    """Containers of one run on one engine."""

    def __init__(self, client: APIClient, image: str, instance: str) -> None:
        self._client = client
        self._image = image
        self._instance = instance
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="bench-container")

    def check_image(self) -> None:
        """Check that the engine has the image.

        Raises:
            StartError: The engine does not have the image.
        """
        try:
            self._client.inspect_image(self._image)  # type: ignore[no-untyped-call]  # not ours
        except ImageNotFound as error:
            raise StartError(f"no image {self._image}; scripts/build-images base base-sandbox os makes it") from error

    async def session(self, token: str) -> Taken:
        """Start a container, print *token* in a shell in it, and remove it.

        Raises:
            WrongAnswer: The output is different, or an engine operation failed.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._session, token)
        except (DockerException, RequestException) as error:
            raise WrongAnswer(f"engine: {error}") from error

    def _session(self, token: str) -> Taken:
        client, began_at = self._client, time.perf_counter()
        container = client.create_container(
            self._image,
            entrypoint=["sleep", "infinity"],
            user="0:0",
            labels={LABEL: self._instance},
            host_config=client.create_host_config(network_mode="none", init=True),
        )["Id"]
        try:
            client.start(container)
            ready_at = time.perf_counter()
            said = b""
            for _ in range(MOST_EXECS):
                execution = client.exec_create(container, ["/bin/bash", "-c", f"echo {token}"])["Id"]
                said = client.exec_start(execution)
                if said:
                    break
            said_at = time.perf_counter()
        finally:
            client.remove_container(container, force=True)
        if said.decode().strip() != token:
            raise WrongAnswer(f"exec: {said[:200]!r}")
        return Taken(ready_at - began_at, said_at - ready_at, time.perf_counter() - said_at)

    def memory_bytes(self, environment: str) -> int:
        """Return the kernel's count for the workers of *environment*: their processes, files in memory, sockets.

        It excludes the file pages that the kernel would reclaim first, like ``docker stats``.
        """
        return sum(charged_bytes(stats) for stats in self._stats(environment))

    def cpu_s(self, environment: str) -> float:
        """Return the CPU seconds of the workers of *environment* so far, with all processes that ever ran in them."""
        return sum(int(stats["cpu_stats"]["cpu_usage"]["total_usage"]) for stats in self._stats(environment)) / 1e9

    def _stats(self, environment: str) -> Iterator[dict[str, Any]]:
        for worker in self._workers(environment):
            yield self._client.stats(worker, stream=False, one_shot=True)

    def _workers(self, environment: str) -> list[str]:
        labels = [f"{LABEL_INSTANCE}={self._instance}", f"{LABEL_ENVIRONMENT}={environment}"]
        return [str(each["Id"]) for each in self._client.containers(quiet=True, filters={"label": labels})]

    def close(self) -> None:
        """Remove the remaining containers of this run and of its gateway."""
        self._threads.shutdown()
        for label in (LABEL, LABEL_INSTANCE):
            for container in self._client.containers(
                all=True, quiet=True, filters={"label": f"{label}={self._instance}"}
            ):
                self._client.remove_container(container["Id"], force=True)


@contextmanager
def containers(engine: str, image: str, instance: str) -> Iterator[Containers]:
    """Connect to *engine*. Remove the run's containers on leaving."""
    client = APIClient(base_url=engine, version="auto", timeout=ENGINE_S, max_pool_size=THREADS)
    try:
        made = Containers(client, image, instance)
        try:
            yield made
        finally:
            made.close()
    finally:
        client.close()


def charged_bytes(stats: dict[str, Any]) -> int:
    """Return the charged memory in the engine's statistics of one container."""
    memory = stats["memory_stats"]
    details = memory.get("stats", {})
    # Names of control groups version 1 begin with "total_".
    given_up_first = details.get("total_inactive_file", details.get("inactive_file", 0))
    return int(memory["usage"]) - int(given_up_first)
