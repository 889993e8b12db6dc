"""Queries the Docker engine about an image and its running container.

It pulls a missing image, and changes nothing else. For a named user it creates a container that it removes again.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from docker import APIClient
from docker.errors import APIError

from gateway.backends.docker import calls
from gateway.backends.docker.container import LABEL_ROLE, LABEL_WORKER, Role
from gateway.backends.docker.engine import Engine, EngineError
from gateway.backends.docker.images import is_from_registry, pull
from gateway.backends.launch import CancelToken
from gateway.core.errors import ConfigError
from gateway.core.ids import WorkerId

T = TypeVar("T")

THREADS = 2
ROOT = "0:0"
_LISTENING = "0A"
_HEAD = b"local_address"
_USER = re.compile(r"(\d+)(?::(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Values from an image's configuration."""

    ports: tuple[int, ...]
    """TCP ports that the image exposes. Its server may listen on other ports."""
    user: str
    """User of the image's processes, as ``uid:gid``."""


@dataclass(frozen=True, slots=True)
class Use:
    """Memory and processes that a container uses; None: the engine did not report the value."""

    memory_bytes: int | None
    pids: int | None


class ImageInspector:
    """Sends queries about images and containers to the Docker engine."""

    def __init__(self, url: str) -> None:
        self._engine = Engine(url, threads=THREADS)

    async def image(self, name: str) -> Image:
        """Return the configuration of an image. Pull a missing image if its name contains a registry.

        Raises:
            ConfigError: The image is missing, and its name has no registry to pull it from.
            EngineError: The engine does not answer, or the registry refused.
        """
        config = await self._call(lambda client: _config(client, name))
        if config is None and is_from_registry(name):
            await self._call(lambda client: pull(client, image=name, wanted=CancelToken()))
            config = await self._call(lambda client: _config(client, name))
        if config is None:
            raise ConfigError(f"there is no image {name} on this engine: build it, or pull it by its full name")
        exposed = [key.partition("/") for key in config.get("ExposedPorts") or {}]
        return Image(
            ports=tuple(sorted(int(port) for port, _, kind in exposed if kind == "tcp" and port.isdigit())),
            user=await self._user(name, config.get("User") or ""),
        )

    async def listening(self, id: WorkerId) -> frozenset[int] | None:
        """Return the TCP ports with a listening socket in a worker's container; None if they cannot be determined."""
        return await self._call(lambda client: _listening(client, id))

    async def use(self, id: WorkerId) -> Use:
        """Return the current resource use of a worker's container."""
        return await self._call(lambda client: _use(client, id))

    async def aclose(self) -> None:
        """Close the engine's threads and clients."""
        await self._engine.aclose()

    async def _user(self, image: str, said: str) -> str:
        if not said or said == "root":
            return ROOT
        if found := _USER.fullmatch(said):
            return f"{found[1]}:{found[2] or found[1]}"
        return await self._call(lambda client: _named_user(client, image, said.partition(":")[0]))

    async def _call(self, work: Callable[[APIClient], T]) -> T:
        return await self._engine.call(work)


def _config(client: APIClient, image: str) -> dict[str, Any] | None:
    try:
        found = client.inspect_image(image)  # type: ignore[no-untyped-call]  # no stubs
    except APIError as error:
        if error.status_code == 404:
            return None
        raise
    config: dict[str, Any] = found.get("Config") or {}
    return config


def _container(client: APIClient, id: WorkerId) -> str | None:
    """Return the id of the worker's own container, not of its forwarder; None if there is none."""
    for entry in client.containers(all=True, filters={"label": [f"{LABEL_WORKER}={id}"]}):
        if entry["Labels"].get(LABEL_ROLE) != Role.FORWARDER:
            return str(entry["Id"])
    return None


def _listening(client: APIClient, id: WorkerId) -> frozenset[int] | None:
    container = _container(client, id)
    if container is None:
        return None
    try:
        _, output = calls.run(client, container=container, argv=["cat", "/proc/net/tcp", "/proc/net/tcp6"])
    except (APIError, EngineError):
        return None  # the container has ended
    if _HEAD not in output:
        return None  # an image without `cat`
    lines = output.decode("ascii", "replace").splitlines()
    return frozenset(port for port in map(listening_port, lines) if port is not None)


def listening_port(line: str) -> int | None:
    """Return the port in a line of ``/proc/net/tcp`` if its socket listens; else None."""
    words = line.split()
    if len(words) < 4 or words[3] != _LISTENING:
        return None
    try:
        return int(words[1].rpartition(":")[2], 16)
    except ValueError:
        return None


def _use(client: APIClient, id: WorkerId) -> Use:
    container = _container(client, id)
    if container is None:
        return Use(None, None)
    try:
        return use_of(client.stats(container, stream=False))
    except APIError:
        return Use(None, None)


def use_of(stats: Mapping[str, Any]) -> Use:
    """Return memory and processes of a container from its statistics. Memory excludes the droppable file cache."""
    memory, pids = stats.get("memory_stats") or {}, stats.get("pids_stats") or {}
    usage, details = memory.get("usage"), memory.get("stats") or {}
    droppable = details.get("total_inactive_file", details.get("inactive_file", 0))
    current = pids.get("current")
    return Use(
        memory_bytes=usage - droppable if isinstance(usage, int) and usage > droppable else None,
        pids=current if isinstance(current, int) and current > 0 else None,
    )


def _named_user(client: APIClient, image: str, name: str) -> str:
    """Return the ``uid:gid`` of a user from the image's ``/etc/passwd``; root's if the user is not listed."""
    made = client.create_container(image, command=["true"], network_disabled=True)
    try:
        chunks, _ = client.get_archive(made["Id"], "/etc/passwd")
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
            file = archive.extractfile(archive.getmembers()[0])
            text = file.read().decode("utf-8", "replace") if file is not None else ""
    except (APIError, tarfile.TarError, IndexError):
        return ROOT
    finally:
        client.remove_container(made["Id"], force=True, v=True)
    for entry in (line.split(":") for line in text.splitlines()):
        if len(entry) > 3 and entry[0] == name and entry[2].isdigit() and entry[3].isdigit():
            return f"{entry[2]}:{entry[3]}"
    return ROOT
