"""Parse nodes' reports, which are JSON from other machines, and resolve the hosts in the settings."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pydantic import TypeAdapter, ValidationError

from gateway.core.errors import ConfigError
from gateway.core.placement import NodeReport
from gateway.core.validation import reason_of

MAX_REPORT_BYTES: Final = 4 * 2**20
"""Maximum size of a report. A worker takes about 100 bytes and an image 200, so no machine reaches it."""
_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", re.ASCII)
_NUMBERS: Final = ("cpus", "memory_bytes", "available_bytes", "max_containers", "containers")
_REPORT: Final = TypeAdapter(NodeReport)


def read_report(body: bytes) -> NodeReport:
    """Parse the response to ``GET /env-gateway/node``.

    Raises:
        ValueError: *body* is not a valid report; the error names the wrong field.
    """
    try:
        report = _REPORT.validate_json(body, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'a report'}: {reason_of(first)}") from error
    if not _NODE_ID.fullmatch(report.id) or not report.name:
        raise ValueError(f"id: {report.id!r:.200} with the name {report.name!r:.80} is not an id of a node")
    for name in _NUMBERS:
        if not 0 <= getattr(report, name) < 2**63:
            raise ValueError(f"{name}: must be a number of 0 or more, not {getattr(report, name)}")
    return report


PORT: Final = 7443
"""Default port of a node's process for gate, reports and images. The next port leads to the workers' sockets."""
RESOLVE_WITHIN_S: Final = 5.0


class Endpoint(NamedTuple):
    """The address of a node's process."""

    host: str
    port: int

    def url(self, path: str) -> str:
        """Return the URL of *path* at this address."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"https://{host}:{self.port}{path}"


@dataclass(slots=True)
class Host:
    """A host name in the settings, with its resolved addresses."""

    name: str
    port: int
    endpoints: frozenset[Endpoint] = field(default_factory=frozenset)
    was_resolved: bool = False
    error: str = ""

    async def resolve(self) -> None:
        """Look up the name's addresses; keep the previous addresses if the lookup fails."""
        loop = asyncio.get_running_loop()
        asked = asyncio.ensure_future(loop.getaddrinfo(self.name, self.port, type=socket.SOCK_STREAM))
        await asyncio.wait({asked}, timeout=RESOLVE_WITHIN_S)
        try:
            if not asked.done():
                raise TimeoutError("the name service does not answer")
            self.endpoints = frozenset(Endpoint(str(place[4][0]), self.port) for place in asked.result())
            self.error = ""
        except (OSError, UnicodeError) as error:
            self.error = str(error)
        finally:
            asked.cancel()
            self.was_resolved = True


def parse_hosts(texts: Sequence[str]) -> list[tuple[str, int]]:
    """Parse ``HOST[:PORT]`` entries; an IPv6 address with a port must be in brackets.

    Raises:
        ConfigError: An entry is invalid, or there are no entries.
    """
    hosts = []
    for text in texts:
        name, port = text, PORT
        if text.startswith("["):
            name, _, rest = text[1:].partition("]")
            given = (rest[1:] if rest.startswith(":") else "") if rest else str(PORT)
        elif text.count(":") == 1:
            name, _, given = text.partition(":")
        else:
            given = str(PORT)
        if not name or not (given.isascii() and given.isdigit()) or not 0 < (port := int(given)) < 65_535:
            raise ConfigError(f"GATEWAY_NODES: {text!r} is not of the form HOST or HOST:PORT")
        hosts.append((name, port))
    if not hosts:
        raise ConfigError("GATEWAY_NODES: name the hosts of the nodes, HOST[:PORT] each, comma-separated")
    return hosts
