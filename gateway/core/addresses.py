"""Parses the addresses of workers' servers.

An address is ``unix:PATH``, ``tcp:HOST:PORT``, ``node:NODE/WORKER/SOCKET``, or the URL of an external server. ``node:``
means a Unix socket on another machine, which is named by its node id and not by its host.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from urllib.parse import urlsplit

DEFAULT_PORTS = {"http": 80, "https": 443}
FOREIGN_SOCKET = "server.sock"
"""File name of a Unix socket that forwards to the TCP port of a third-party server."""
NODE_LEAVES = b"-this node's process ends\n"
"""What a node writes to an idle connection before its process ends. It forwards nothing that arrives afterwards, so a
request whose only answer is this line never reached the worker."""
_ON_NODE = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9_.-]{0,127})/([A-Za-z0-9][A-Za-z0-9_.-]{0,63}/[A-Za-z0-9][A-Za-z0-9_.-]{0,63})"
)
"""Matches three plain names: a request to a node is one line that contains them, and they name a folder and a file
there."""


class Kind(Enum):
    """How the gateway connects to a worker."""

    UNIX = "unix"
    TCP = "tcp"
    URL = "url"
    NODE = "node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A parsed address."""

    kind: Kind
    path: str = ""
    """Path of the Unix socket, on a node ``WORKER/SOCKET``; empty for the other kinds."""
    node: str = ""
    """Node id of the worker's machine; empty: the address needs no node."""
    host: str = ""
    """Host name or IP address, IPv6 without brackets; empty for a Unix socket."""
    port: int = 0
    prefix: str = ""
    """Prefix of each request's path: ``""``, or ``/a/b`` without a trailing slash."""
    tls: bool = False

    @property
    def is_unix(self) -> bool:
        """True if it is a Unix socket that this process can open."""
        return self.kind is Kind.UNIX

    @property
    def is_on_node(self) -> bool:
        """True if it is a Unix socket on another machine."""
        return self.kind is Kind.NODE

    @property
    def is_own(self) -> bool:
        """True if a server of the gateway's own images is there.

        It keeps idle connections open; third-party servers close them.
        """
        return self._is_socket and not self.path.endswith(f"/{FOREIGN_SOCKET}")

    @property
    def authority(self) -> str:
        """The ``Host`` header of requests; the port is omitted if it is the default.

        On a Unix socket it is ``worker`` for the gateway's own images. For third-party servers it is ``localhost``, the
        only name that they all accept.
        """
        if self._is_socket:
            return "worker" if self.is_own else "localhost"
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = DEFAULT_PORTS["https" if self.tls else "http"]
        return host if self.port == usual else f"{host}:{self.port}"

    @property
    def _is_socket(self) -> bool:
        return self.is_unix or self.is_on_node

    def url(self, target: str, *, scheme: str = "http") -> str:
        """Return the URL of *target* (path and query) in *scheme* (``http``, ``ws``), with an appended s for TLS."""
        return f"{scheme}{'s' if self.tls else ''}://{self.authority}{self.prefix}{target}"


@lru_cache(maxsize=4096)
def parse_address(text: str) -> Address:
    """Parse an address.

    Raises:
        ValueError: *text* is not an address; the message gives the reason.
    """
    if text.startswith(("http://", "https://")):
        return _url(text)
    kind, colon, place = text.partition(":")
    if kind == "unix" and colon and place.startswith("/"):
        return Address(kind=Kind.UNIX, path=place)
    if kind == "node":
        if (found := _ON_NODE.fullmatch(place)) is None:
            raise ValueError(f"{text!r} is not an address: node:NODE/WORKER/SOCKET")
        return Address(kind=Kind.NODE, node=found[1], path=found[2])
    if kind != "tcp":
        raise ValueError(
            f"{text!r} is not an address: unix:/PATH, tcp:HOST:PORT, node:NODE/WORKER/SOCKET, http://… or https://…"
        )
    host, _, port = place.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65_536:
        raise ValueError(f"{text!r} is not an address: tcp:HOST:PORT")
    return Address(kind=Kind.TCP, host=host, port=int(port))


def node_address(node: str, worker: str, socket: str) -> str:
    """Return the address of the *socket* of *worker* on the machine *node*."""
    return f"{Kind.NODE.value}:{node}/{worker}/{socket}"


def _url(text: str) -> Address:
    if not text.isascii() or any(character <= " " or character == "\x7f" for character in text):
        raise ValueError(f"{text!r} has blanks, control characters or letters that must be escaped")
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from error
    if not host or port == 0:
        raise ValueError(f"{text!r} has no host, or a port outside 1 to 65535")
    if "@" in parts.netloc:
        raise ValueError(f"the URL of {host} has a user in it, which would not be sent")
    if parts.query or parts.fragment or text.endswith(("?", "#")):
        raise ValueError(f"{text!r} has a query or a fragment, which would not be sent")
    return Address(
        kind=Kind.URL,
        host=host,
        port=port or DEFAULT_PORTS[parts.scheme],
        prefix=parts.path.rstrip("/"),
        tls=parts.scheme == "https",
    )
