"""Reading what a node reports of itself: JSON from another machine, checked field by field.

Where nodes' processes are: what the hosts in the settings stand for.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from gateway.core.errors import ConfigError
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.placement import NodeId, NodeReport

MAX_REPORT_BYTES: Final = 4 * 2**20
"""Some 100 bytes a worker and 200 an image: far beyond what one machine has."""
_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", re.ASCII)


def read_report(body: bytes) -> NodeReport:
    """Read the answer to ``GET /env-gateway/node``.

    Raises:
        ValueError: it is no report; with the field that is wrong.
    """
    found = json.loads(body)
    if not isinstance(found, dict):
        raise ValueError("a node's report is no object")
    id = _text(found, "id")
    if not _NODE_ID.fullmatch(id):
        raise ValueError(f"id: {id!r} is no id of a node")
    return NodeReport(
        id=NodeId(id),
        name=_text(found, "name"),
        cpus=_number(found, "cpus"),
        memory_bytes=int(_number(found, "memory_bytes")),
        available_bytes=int(_number(found, "available_bytes")),
        max_containers=int(_number(found, "max_containers")),
        containers=int(_number(found, "containers")),
        is_draining=found.get("is_draining") is True,
        images={name: str(image) for name, image in _object(found, "images").items()},
        built_at={name: float(at) for name, at in _object(found, "built_at").items()},
        workers={WorkerId(one): EnvironmentName(str(name)) for one, name in _object(found, "workers").items()},
    )


def _text(found: Mapping[str, Any], name: str) -> str:
    value = found.get(name)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}: a text is wanted, and not {value!r:.80}")
    return value


def _number(found: Mapping[str, Any], name: str) -> float:
    value = found.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**63:
        raise ValueError(f"{name}: a number from 0 on is wanted, and not {value!r:.80}")
    return value


def _object(found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = found.get(name, {})
    if not isinstance(value, dict):
        raise ValueError(f"{name}: an object is wanted, and not {value!r:.80}")
    return value


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
