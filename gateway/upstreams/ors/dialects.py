"""Which standard ORS server a worker is, found out once for each: they differ in where secrets go, and in what they
offer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from gateway.core.environment import Environment
from gateway.core.errors import UpstreamError
from gateway.core.ids import WorkerId
from gateway.upstreams.ors.client import Link

KNOWN_MAX: Final = 4096
"""Workers that are remembered."""


@dataclass(frozen=True, slots=True)
class Flavour:
    """What one server is like."""

    environments: tuple[str, ...]
    """What it serves, its default one first."""
    secrets_in_body: bool
    secrets_in_header: bool
    operations: frozenset[str] | None
    """What it offers of an environment; None: it does not tell."""

    def offers(self, operation: str) -> bool:
        """Whether it is sure to know *operation*."""
        return self.operations is not None and operation in self.operations

    def named(self, environment: Environment) -> str:
        """What *environment* is called there: as it is configured, else as here, else it is the default one.

        Raises:
            UpstreamError: it serves none of the name that was configured.
        """
        known = {name.lower(): name for name in self.environments}
        name = known.get(environment.worker_name.lower())
        if name is not None:
            return name
        if environment.upstream_name or not self.environments:
            raise UpstreamError(f"the server serves {list(self.environments)!r}, not {environment.worker_name!r}")
        return self.environments[0]


class Flavours:
    """What is known of the servers."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._known: OrderedDict[tuple[WorkerId, str], Flavour] = OrderedDict()

    async def of(self, worker: WorkerId, address: str) -> Flavour:
        """Look a server's flavour up; the first time, ask it.

        Raises:
            UpstreamError: it is no ORS server, or does not answer.
        """
        known = self._known.get((worker, address))
        if known is None:
            known = self._known[worker, address] = await self._detect(worker, address)
            if len(self._known) > KNOWN_MAX:
                self._known.popitem(last=False)
        return known

    def forget(self, worker: WorkerId, address: str) -> None:
        """Ask anew the next time: the server at an address may have been replaced."""
        self._known.pop((worker, address), None)

    async def _detect(self, worker: WorkerId, address: str) -> Flavour:
        listed = await self._link.ask(worker, address, b"/list_environments")
        names = listed.parsed("/list_environments") if listed.status == 200 else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UpstreamError(f"no ORS server: it answered {listed.status} to /list_environments")
        described = await self._link.ask(worker, address, b"/openapi.json")
        document = described.parsed("/openapi.json") if described.status == 200 else None
        fields = _fields_of_create(document)
        if fields is None:
            # It does not describe itself. One of the two packages has a version; the documented standard takes secrets
            # in the body, and both clients send the header, which is ignored where it is not known.
            versioned = await self._link.ask(worker, address, b"/version")
            return Flavour(tuple(names), versioned.status != 200, True, None)
        in_body = "secrets" in fields
        return Flavour(tuple(names), in_body, not in_body, _operations(document))


def path(name: str, operation: str) -> bytes:
    """Where an operation of the environment *name* is."""
    return f"/{quote(name, safe='')}/{operation}".encode()


def _fields_of_create(document: Any) -> Mapping[str, Any] | None:
    found = document
    for key in ("components", "schemas", "CreateSession", "properties"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None


def _operations(document: Any) -> frozenset[str]:
    paths = document.get("paths") or ()
    return frozenset(str(one).rpartition("/")[2] for one in paths if str(one).count("/") == 2)
