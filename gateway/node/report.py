"""Reports this machine's state as a `gateway.core.placement.NodeReport`, with data of the engine and the kernel.

Each replica of the gateway requests a report once a second, so a report lists the containers only. Slowly changing data
(the machine, its images) is cached.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import httpx

from gateway.backends.docker.container import LABEL_ENVIRONMENT, LABEL_ROLE, LABEL_WORKER, Role
from gateway.core.errors import BackendError
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.placement import NodeId, NodeReport
from gateway.node.gate import Gate
from gateway.node.policy import Rules
from gateway.node.routes import own_containers

logger = logging.getLogger(__name__)

IMAGES_S: Final = 5.0
"""Seconds for which data about the images is cached."""
MACHINE_S: Final = 60.0
LOOKS_MAX: Final = 8
"""Maximum number of concurrent image inspections."""
_UP = frozenset(("running", "paused"))
_BOTH = frozenset((Role.SERVER.value, Role.FORWARDER.value))
_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB", re.M)


class Reporter:
    """Creates reports from the engine's answers."""

    def __init__(self, engine: httpx.AsyncClient, *, gate: Gate, draining: Path) -> None:
        """Set up reports by the rules of *gate*. The caller closes *engine*. *draining*: a file that exists while the
        machine drains, so that it takes no more workers."""
        self._engine = engine
        self._gate = gate
        self._draining = draining
        self._images: tuple[float, Rules, Mapping[str, dict[str, Any]]] | None = None
        self._machine: tuple[float, Mapping[str, Any]] | None = None
        self._looking = asyncio.Lock()

    def forget_images(self) -> None:
        """Inspect the images again for the next report, because a new image arrived."""
        self._images = None

    async def report(self) -> NodeReport:
        """Return the machine's current state.

        Raises:
            BackendError: The engine answered with an error.
            httpx.TransportError: The engine does not answer.
        """
        machine, images = await self._slow()
        filters = json.dumps(own_containers("", self._gate.rules.instance))
        containers = await self.ask("/containers/json", {"all": "1", "filters": filters})
        return NodeReport(
            id=NodeId(hashlib.sha256(str(machine.get("ID", "")).encode()).hexdigest()[:16]),
            name=str(machine.get("Name", "")),
            cpus=float(machine.get("NCPU", 0)),
            memory_bytes=int(machine.get("MemTotal", 0)),
            available_bytes=available_bytes(),
            max_containers=self._gate.rules.max_containers,
            containers=len(containers),
            is_draining=self._draining.exists(),
            images={reference: str(image.get("Id", "")) for reference, image in images.items()},
            built_at={reference: built_at(image.get("Created")) for reference, image in images.items()},
            workers=running_workers(containers),
        )

    async def image(self, reference: str) -> dict[str, Any] | None:
        """Return the engine's data of image *reference*, or None if it is missing. Raises the errors of `report`."""
        response = await self._engine.get(f"/images/{quote(reference, safe='/:@')}/json")
        if response.status_code == HTTPStatus.NOT_FOUND:
            return None
        found: dict[str, Any] = _content(response)
        return found

    async def ask(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        """Return the engine's JSON response to a GET of *path*. Raises the errors of `report`."""
        return _content(await self._engine.get(path, params=dict(query or {})))

    async def _slow(self) -> tuple[Mapping[str, Any], Mapping[str, dict[str, Any]]]:
        now = asyncio.get_running_loop().time()
        async with self._looking:  # concurrent reports share one query
            if self._machine is None or now - self._machine[0] > MACHINE_S:
                self._machine = now, await self.ask("/info")
            rules = self._gate.rules
            if (known := self._images) is None or now - known[0] > IMAGES_S or known[1] is not rules:
                known = self._images = now, rules, await self._look_at_images(rules)
            return self._machine[1], known[2]

    async def _look_at_images(self, rules: Rules) -> Mapping[str, dict[str, Any]]:
        bound = asyncio.Semaphore(LOOKS_MAX)

        async def look(reference: str) -> tuple[str, dict[str, Any] | None]:
            async with bound:
                return reference, await self.image(reference)

        found = await asyncio.gather(*(look(reference) for reference in sorted(rules.images)))
        return {reference: image for reference, image in found if image is not None}


def running_workers(containers: Iterable[Mapping[str, Any]]) -> dict[WorkerId, EnvironmentName]:
    """Return the running workers in *containers*, the engine's list. A worker with two containers needs both."""
    up: dict[tuple[str, str], set[str]] = {}
    for container in containers:
        labels = container.get("Labels") or {}
        if container.get("State") in _UP and labels.get(LABEL_WORKER):
            found = up.setdefault((labels[LABEL_WORKER], labels.get(LABEL_ENVIRONMENT, "")), set())
            found.add(labels.get(LABEL_ROLE, ""))
    return {
        WorkerId(worker): EnvironmentName(environment)
        for (worker, environment), roles in up.items()
        if "" in roles or roles >= _BOTH
    }


def built_at(created: object) -> float:
    """Return an image's build time as Unix time, or 0 without one (engines then give the year 1, or nothing)."""
    try:
        return max(0.0, datetime.fromisoformat(str(created)).timestamp())
    except (ValueError, OverflowError):
        return 0.0


def available_bytes(path: Path = Path("/proc/meminfo")) -> int:
    """Return the bytes of memory that are available to programs, or 0 if unknown."""
    try:
        match = _AVAILABLE.search(path.read_text())
    except OSError:
        return 0
    return int(match[1]) * 1024 if match is not None else 0


def _content(response: httpx.Response) -> Any:
    if response.status_code != HTTPStatus.OK:
        raise BackendError(f"the engine answers {response.status_code}: {response.text[:200]}")
    return response.json()
