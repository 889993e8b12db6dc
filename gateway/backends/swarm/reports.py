"""Reading a node's report, which is JSON from another machine, and resolving the hosts in the settings."""

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

MAX_REPORT_BYTES: Final = 4 * 2**20
"""Some 100 bytes a worker and 200 an image: far beyond what one machine has."""
_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", re.ASCII)
_NUMBERS: Final = ("cpus", "memory_bytes", "available_bytes", "max_containers", "containers")
_REPORT: Final = TypeAdapter(NodeReport)


def read_report(body: bytes) -> NodeReport:
    """Read the answer to ``GET /env-gateway/node``.

    Raises:
        ValueError: it is no report; with the field that is wrong.
    """
    try:
        report = _REPORT.validate_json(body, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'a report'}: {first['msg']}") from error
    if not _NODE_ID.fullmatch(report.id) or not report.name:
        raise ValueError(f"id: {report.id!r:.200} with the name {report.name!r:.80} is no id of a node")
    for name in _NUMBERS:
        if not 0 <= getattr(report, name) < 2**63:
            raise ValueError(f"{name}: it must be a number from 0 on, and is {getattr(report, name)}")
    return report


PORT: Final = 7443
"""Of a node's process: gate, reports and images; workers' sockets are on the next one."""
RESOLVE_WITHIN_S: Final = 5.0


class Endpoint(NamedTuple):
    """Where a node's process is."""

    host: str
    port: int

    def url(self, path: str) -> str:
        """The URL of *path* there."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"https://{host}:{self.port}{path}"


@dataclass(slots=True)
class Host:
    """What a name in the settings stands for."""

    name: str
    port: int
    endpoints: frozenset[Endpoint] = field(default_factory=frozenset)
    was_resolved: bool = False
    error: str = ""

    async def resolve(self) -> None:
        """Look up what it stands for now; where that fails, what it stood for before stays."""
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
    """Read ``HOST[:PORT]`` entries; an IPv6 address with a port stands in brackets.

    Raises:
        ConfigError: one is none, or there is none at all.
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
