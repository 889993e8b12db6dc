"""Where nodes' processes are: what the hosts in the settings stand for."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gateway.core.errors import ConfigError

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
