"""A Redis that Sentinels watch over: its address is asked of them at each new connection.

``redis+sentinel://[[USER]:PASSWORD@]HOST[:PORT][,HOST[:PORT]…]/SERVICE[/DB]``, and ``rediss+sentinel://…`` for TLS with
both. Sentinels that want a password get it by ``?sentinel_password=`` (and ``sentinel_username=``).

When another server takes over, Sentinel breaks the connections to the one before; commands under way fail as they do
where a Redis goes away, and the next ones go to the new master. Its data is another run's, so it is not whole until the
leader has rebuilt it, whatever the old master had not sent yet.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, unquote

from redis.asyncio import Redis
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool

PORT: Final = 26379
ASK_S: Final = 1.0
"""The longest that one Sentinel is waited for: the next one knows as well."""
FORM: Final = (
    "redis+sentinel://[[USER]:PASSWORD@]HOST[:PORT][,HOST[:PORT]...]/SERVICE[/DB][?sentinel_password=PASSWORD]"
)

# Not by urlsplit: Python 3.11.2 refuses a list with an IPv6 address, later versions quote the text between brackets.
_URL: Final = re.compile(
    r"redis(?P<tls>s?)\+sentinel://(?:(?P<username>[^:/?#]*):(?P<password>[^/?#]*)@)?(?P<hosts>[^@/?#]+)"
    r"/(?P<service>[^/?#]+)(?:/(?P<db>[0-9]{1,5}))?(?:\?(?P<query>[^#]*))?(?:#.*)?"
)
_HOST: Final = re.compile(r"(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<name>[^:\[\]]+))(?::(?P<port>[0-9]{1,5}))?")
_OPTIONS: Final = {"sentinel_username", "sentinel_password"}


@dataclass(frozen=True, slots=True, repr=False)
class SentinelUrl:
    """The content of such a URL; it has no ``repr``, as it holds passwords."""

    sentinels: tuple[tuple[str, int], ...]
    service: str
    master: dict[str, Any]
    """redis-py's arguments for connections to the master: database, login and TLS."""
    sentinel: dict[str, Any]
    """redis-py's arguments for connections to the Sentinels: login and TLS."""


def is_sentinel(url: str) -> bool:
    """Return True if *url* names Sentinels, and not a Redis."""
    return url.startswith(("redis+sentinel://", "rediss+sentinel://"))


def read_url(url: str) -> SentinelUrl:
    """Read *url*.

    Raises:
        ValueError: *url* has another form; the message holds none of its passwords.
    """
    found = _URL.fullmatch(url)
    hosts = [_HOST.fullmatch(host) for host in found["hosts"].split(",")] if found else []
    options = dict(parse_qsl(found["query"] or "", keep_blank_values=True)) if found else {}
    sentinels = tuple((host["ipv6"] or host["name"], int(host["port"] or PORT)) for host in hosts if host)
    is_known = len(sentinels) == len(hosts) and all(0 < port < 65536 for _, port in sentinels)
    if not found or not is_known or not options.keys() <= _OPTIONS:
        raise ValueError(f"{FORM} is wanted")
    tls = {"ssl": True} if found["tls"] else {}
    login = {name: unquote(found[name] or "") or None for name in ("username", "password")}
    sentinel_login = {name: options.get(f"sentinel_{name}") or None for name in ("username", "password")}
    return SentinelUrl(
        sentinels=sentinels,
        service=unquote(found["service"]),
        master={"db": int(found["db"] or 0), **login, **tls},
        sentinel={**sentinel_login, **tls},
    )


class Master(Sentinel):
    """The server that Sentinels call the master; nothing is connected yet.

    Sentinels are asked once for all callers that want the address at the same time: redis-py moves the Sentinel that
    answered to the front of its list. A second caller that iterates over the same list then overwrites an entry: a
    Sentinel is lost, with its open connection, until the last one left is asked alone.
    """

    def __init__(self, url: str, *, max_connections: int, options: Mapping[str, Any]) -> None:
        """*options* go to the connections to the master. Raises ``ValueError``, as `read_url`."""
        read = read_url(url)
        waits = {"socket_connect_timeout": ASK_S, "socket_timeout": ASK_S}
        super().__init__(  # type: ignore[no-untyped-call]  # redis-py's own gap
            list(read.sentinels),
            sentinel_kwargs={"protocol": 2, "retry": options.get("retry"), **waits, **read.sentinel},
        )
        self._query: asyncio.Task[tuple[str, int]] | None = None
        self.client: Redis = self.master_for(read.service, max_connections=max_connections, **read.master, **options)

    async def look(self) -> None:
        """Ask which server it is; connections to another one that nobody uses are closed, the others after their use.

        Until Sentinel has told it otherwise, a master that was silent for a while and goes on would take commands that
        are lost. Raises redis-py's errors: no Sentinel knows.
        """
        pool = self.client.connection_pool
        assert isinstance(pool, SentinelConnectionPool)
        await pool.get_master_address()  # type: ignore[no-untyped-call]  # redis-py's own gap

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """Return the master's host and port. Raises ``MasterNotFoundError``: no Sentinel knows one."""
        if self._query is None or self._query.done():
            self._query = asyncio.create_task(super().discover_master(service_name))
            self._query.add_done_callback(lambda task: task.cancelled() or task.exception())
        # Shielded: a caller that is cancelled must not take the answer from the others.
        return await asyncio.shield(self._query)

    async def aclose(self) -> None:
        """Wait for a query under way, which `ASK_S` bounds for each, and close the connections to the Sentinels.

        `client` is closed by itself.
        """
        if self._query is not None:
            await asyncio.wait({self._query})
        await super().aclose()
