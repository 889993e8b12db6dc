"""A Redis that Sentinels watch over: its address is asked of them at each new connection.

``redis+sentinel://[[USER]:PASSWORD@]HOST[:PORT][,HOST[:PORT]…]/SERVICE[/DB]``, and ``rediss+sentinel://…`` for TLS with
both. Sentinels that want a password get it by ``?sentinel_password=`` (and ``sentinel_username=``).

When another server takes over, Sentinel breaks the connections to the one before; commands under way fail as they do
where a Redis goes away, and the next ones go to the new master. Its data is another run's, so it is not whole until the
leader has rebuilt it, whatever the old master had not sent yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qsl, unquote

from redis.asyncio import Redis
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool

SCHEMES: Final = {"redis+sentinel": False, "rediss+sentinel": True}
"""Whether each speaks TLS."""
PORT: Final = 26379
ASK_S: Final = 1.0
"""The longest that one Sentinel is waited for: the next one knows as well."""
_OPTIONS: Final = ("sentinel_username", "sentinel_password")


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """What such a URL says."""

    sentinels: tuple[tuple[str, int], ...]
    service: str
    db: int = 0
    is_tls: bool = False
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)


def is_sentinel(url: str) -> bool:
    """Whether *url* names Sentinels, and not a Redis."""
    return url.partition("://")[0] in SCHEMES


def read_url(url: str) -> SentinelUrl:
    """Read *url*.

    Raises:
        ValueError: what is wrong with it, without a word of its passwords.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES:
        raise ValueError(f"one of {', '.join(f'{name}://' for name in SCHEMES)} is wanted")
    # Not by urlsplit: Python 3.11.2 refuses a list with an IPv6 address, later ones quote what stands between brackets.
    rest, _, query = rest.partition("#")[0].partition("?")
    netloc, _, path = rest.partition("/")
    login, at, hosts = netloc.rpartition("@")
    username, colon, password = login.partition(":")
    if at and not colon:
        raise ValueError("before '@' stands [USER]:PASSWORD")
    service, *more = [unquote(part) for part in path.split("/")]
    if not service:
        raise ValueError("the name of the master that the Sentinels watch is wanted after their addresses: /SERVICE")
    if len(more) > 1 or not all(part.isascii() and part.isdigit() and len(part) < 6 for part in more):
        raise ValueError("after /SERVICE may stand the number of a database: /SERVICE/0")
    asked = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := asked.keys() - set(_OPTIONS):
        raise ValueError(f"{min(unknown)[:64]!r} is no option; there are {', '.join(_OPTIONS)}")
    return SentinelUrl(
        sentinels=tuple(_address(host) for host in hosts.split(",")),
        service=service,
        db=int(more[0]) if more else 0,
        is_tls=SCHEMES[scheme],
        username=unquote(username) or None,
        password=unquote(password) or None,
        sentinel_username=asked.get("sentinel_username") or None,
        sentinel_password=asked.get("sentinel_password") or None,
    )


class Master:
    """The server that Sentinels call the master; nothing is connected yet."""

    def __init__(self, url: str, *, max_connections: int, options: Mapping[str, Any]) -> None:
        """*options* go to the connections to the master. Raises ``ValueError``, as `read_url`."""
        read = read_url(url)
        tls: dict[str, Any] = {"ssl": True} if read.is_tls else {}
        self._sentinel = _Sentinels(  # type: ignore[no-untyped-call]  # redis-py's own gap
            list(read.sentinels),
            sentinel_kwargs={
                "username": read.sentinel_username,
                "password": read.sentinel_password,
                "socket_connect_timeout": ASK_S,
                "socket_timeout": ASK_S,
                "protocol": 2,
                "retry": options.get("retry"),
                **tls,
            },
        )
        self.client: Redis = self._sentinel.master_for(
            read.service,
            max_connections=max_connections,
            db=read.db,
            username=read.username,
            password=read.password,
            **options,
            **tls,
        )

    async def look(self) -> None:
        """Ask which server it is; connections to another one that nobody uses are closed, the others after their use.

        Until Sentinel has told it otherwise, a master that was silent for a while and goes on would take commands that
        are lost. Raises redis-py's errors: no Sentinel knows.
        """
        pool = self.client.connection_pool
        assert isinstance(pool, SentinelConnectionPool)
        await pool.get_master_address()  # type: ignore[no-untyped-call]  # redis-py's own gap

    async def aclose(self) -> None:
        """Close the connections to the Sentinels; `client` is closed by itself."""
        await self._sentinel.aclose()


class _Sentinels(Sentinel):
    """Sentinels that are asked once for all callers that want the master's address at the same time.

    redis-py moves the Sentinel that answered to the front of its list. A second caller that iterates over the same list
    then overwrites an entry: a Sentinel is lost, with its open connection, until the last one left is asked alone.
    """

    _query: asyncio.Task[tuple[str, int]] | None = None

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """Return the master's host and port. Raises ``MasterNotFoundError``: no Sentinel knows one."""
        if self._query is None or self._query.done():
            self._query = asyncio.create_task(super().discover_master(service_name))
            self._query.add_done_callback(lambda task: task.cancelled() or task.exception())
        # Shielded: a caller that is cancelled must not take the answer from the others.
        return await asyncio.shield(self._query)

    async def aclose(self) -> None:
        """Wait for a query under way, which `ASK_S` bounds for each Sentinel, and close the connections."""
        if self._query is not None:
            await asyncio.wait({self._query})
        await super().aclose()


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or port.endswith("]"):  # no port; the colon was one of an address in brackets
        host, port = text, str(PORT)
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not host or (":" in host and not text.startswith("[")):
        raise ValueError("the Sentinels' addresses are wanted: HOST[:PORT], with commas between them, IPv6 in brackets")
    if not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
        raise ValueError(f"the port of Sentinel {host[:64]!r} is no number from 1 to 65535")
    return host, int(port)
