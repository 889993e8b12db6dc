"""Workers' addresses: where a worker's server is reached.

``unix:PATH``, ``tcp:HOST:PORT``, ``node:NODE/WORKER/SOCKET`` (a Unix socket on another machine, which is named by its
id and not by its host), or the URL of a server that somebody else runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from urllib.parse import urlsplit

DEFAULT_PORTS = {"http": 80, "https": 443}
FOREIGN_SOCKET = "server.sock"
"""The name of a Unix socket behind which is the TCP port of a server of somebody else's."""
_ON_NODE = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9_.-]{0,127})/([A-Za-z0-9][A-Za-z0-9_.-]{0,63}/[A-Za-z0-9][A-Za-z0-9_.-]{0,63})"
)
"""Three plain names: what is asked of a node goes into one line, and names a folder and a file there."""


class Kind(Enum):
    """How a worker is reached."""

    UNIX = "unix"
    TCP = "tcp"
    URL = "url"
    NODE = "node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """An address, taken apart."""

    kind: Kind
    path: str = ""
    """Of the Unix socket; on a node ``WORKER/SOCKET``; empty for the others."""
    node: str = ""
    """The id of the machine where the worker is; empty: reached without a node."""
    host: str = ""
    """A name or a number, IPv6 without brackets; empty for a Unix socket."""
    port: int = 0
    prefix: str = ""
    """What stands before each request's path: ``""``, or ``/a/b`` without a slash at its end."""
    tls: bool = False

    @property
    def is_unix(self) -> bool:
        """Whether it is a Unix socket that this process can open."""
        return self.kind is Kind.UNIX

    @property
    def is_on_node(self) -> bool:
        """Whether it is a Unix socket on another machine."""
        return self.kind is Kind.NODE

    @property
    def is_own(self) -> bool:
        """Whether a server of ours is there, which keeps a connection for as long as it rests; others close it."""
        return self._is_socket and not self.path.endswith(f"/{FOREIGN_SOCKET}")

    @property
    def authority(self) -> str:
        """What requests say as ``Host``, the port only where it is not the usual one.

        On a Unix socket ``worker``; or ``localhost``, the one name that no server of somebody else's refuses.
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
        """The URL of *target* (path and query) in *scheme* (``http``, ``ws``), with an s added where TLS is spoken."""
        return f"{scheme}{'s' if self.tls else ''}://{self.authority}{self.prefix}{target}"


@lru_cache(maxsize=4096)
def parse_address(text: str) -> Address:
    """Take an address apart.

    Raises:
        ValueError: it is none; with the reason.
    """
    if text.startswith(("http://", "https://")):
        return _url(text)
    kind, colon, place = text.partition(":")
    if kind == "unix" and colon and place.startswith("/"):
        return Address(kind=Kind.UNIX, path=place)
    if kind == "node":
        if (found := _ON_NODE.fullmatch(place)) is None:
            raise ValueError(f"{text!r} is no address: node:NODE/WORKER/SOCKET")
        return Address(kind=Kind.NODE, node=found[1], path=found[2])
    if kind != "tcp":
        raise ValueError(
            f"{text!r} is no address: unix:/PATH, tcp:HOST:PORT, node:NODE/WORKER/SOCKET, http://… or https://…"
        )
    host, _, port = place.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65_536:
        raise ValueError(f"{text!r} is no address: tcp:HOST:PORT")
    return Address(kind=Kind.TCP, host=host, port=int(port))


def node_address(node: str, worker: str, socket: str) -> str:
    """The address of the *socket* of *worker* on the machine *node*."""
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
        raise ValueError(f"{text!r} has no host, or a port that is none")
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
