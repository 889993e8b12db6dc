"""Connects to a Redis behind Sentinels. Each new connection first queries the Sentinels for the master's address.

The URL is ``redis+sentinel://[[USER]:PASSWORD@]HOST[:PORT][,HOST[:PORT]…]/SERVICE[/DB]``. ``rediss+sentinel://…`` uses
TLS to both Redis and the Sentinels. ``?sentinel_password=`` (and ``sentinel_username=``) log in to the Sentinels.

On a failover, the gateway closes every connection to the old master. Commands in flight fail as when a Redis stops, and
later commands go to the new master. Its data has another run id, so it is not whole until the leader has rebuilt it.
The rebuild also covers writes that the old master had not replicated yet.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, unquote

from redis.asyncio import Redis
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedConnection

PORT: Final = 26379
ASK_S: Final = 1.0
"""Maximum seconds of wait for one Sentinel. The next Sentinel has the same answer."""
FORM: Final = (
    "redis+sentinel://[[USER]:PASSWORD@]HOST[:PORT][,HOST[:PORT]...]/SERVICE[/DB][?sentinel_password=PASSWORD]"
)

# Not urlsplit: Python 3.11.2 refuses a host list with an IPv6 address, and later versions quote the text in brackets.
_URL: Final = re.compile(
    r"redis(?P<tls>s?)\+sentinel://(?:(?P<username>[^:/?#]*):(?P<password>[^/?#]*)@)?(?P<hosts>[^@/?#]+)"
    r"/(?P<service>[^/?#]+)(?:/(?P<db>[0-9]{1,5}))?(?:\?(?P<query>[^#]*))?(?:#.*)?"
)
_RAW_PASSWORD: Final = re.compile(r"[^/?#]*(?:/[^?#]*@|(?:/[^?#]*)?\?[^=#]*@|[^#]*#.*@)")
"""The rest of a URL whose host stands behind what ends the host's part."""
_HOST: Final = re.compile(r"(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<name>[^:\[\]]+))(?::(?P<port>[0-9]{1,5}))?")
_OPTIONS: Final = {"sentinel_username", "sentinel_password"}


@dataclass(frozen=True, slots=True, repr=False)
class SentinelUrl:
    """The parts of a Sentinel URL. The class has no ``repr``, because it contains passwords."""

    sentinels: tuple[tuple[str, int], ...]
    service: str
    master: dict[str, Any]
    """Arguments of redis-py for connections to the master: database, login and TLS."""
    sentinel: dict[str, Any]
    """Arguments of redis-py for connections to the Sentinels: login and TLS."""


def is_sentinel(url: str) -> bool:
    """Return True if *url* names Sentinels instead of a Redis."""
    return url.startswith(("redis+sentinel://", "rediss+sentinel://"))


def unencoded(url: str) -> str:
    """Return how to mend a password in *url* that has a raw ``/``, ``?`` or ``#``. Else, return an empty text."""
    is_raw = _RAW_PASSWORD.match(url.partition("://")[2])
    return "; write /, ? and # of a password as %2F, %3F and %23" if is_raw else ""


def read_url(url: str) -> SentinelUrl:
    """Parse a Sentinel URL.

    Raises:
        ValueError: *url* has another form. The message contains no password.
    """
    found = _URL.fullmatch(url)
    hosts = [_HOST.fullmatch(host) for host in found["hosts"].split(",")] if found else []
    options = dict(parse_qsl(found["query"] or "", keep_blank_values=True)) if found else {}
    sentinels = tuple((host["ipv6"] or host["name"], int(host["port"] or PORT)) for host in hosts if host)
    is_known = len(sentinels) == len(hosts) and all(0 < port < 65536 for _, port in sentinels)
    if not found or not is_known or not options.keys() <= _OPTIONS:
        raise ValueError(f"must be {FORM}{unencoded(url)}")
    tls = {"ssl": True} if found["tls"] else {}
    login = {name: unquote(found[name] or "") or None for name in ("username", "password")}
    sentinel_login = {name: options.get(f"sentinel_{name}") or None for name in ("username", "password")}
    return SentinelUrl(
        sentinels=sentinels,
        service=unquote(found["service"]),
        master={"db": int(found["db"] or 0), **login, **tls},
        sentinel={**sentinel_login, **tls},
    )


class MasterPool(SentinelConnectionPool):
    """Keeps connections to the current master only.

    An old master that was silent and resumes accepts commands until Sentinel demotes it, up to ten seconds later. These
    commands are lost. redis-py closes the idle connections to it. A connection in use would go back to the pool and
    serve further commands, so this pool closes it too.
    """

    async def get_master_address(self) -> tuple[str, int]:
        """Query the master's host and port, and close the connections to any other server."""
        address: tuple[str, int] = await super().get_master_address()  # type: ignore[no-untyped-call]
        others = [
            connection
            for connection in (*self._available_connections, *self._in_use_connections)
            if isinstance(connection, SentinelManagedConnection)
            and connection.is_connected
            and (connection.host, connection.port) != address
        ]
        # Without a wait: an old master that is silent still may not receive the rest of a command.
        await asyncio.gather(*(connection.disconnect(nowait=True) for connection in others))
        return address


class Master(Sentinel):
    """Finds the server that the Sentinels report as the master.

    Concurrent callers share one query to the Sentinels, because redis-py moves the Sentinel that answered to the front
    of its list. A second query that iterates over this list then overwrites an entry. So a Sentinel with its open
    connection is lost, until only one Sentinel is left.
    """

    def __init__(self, url: str, *, max_connections: int, options: Mapping[str, Any]) -> None:
        """Create a client without a connection. *options* apply to the master's connections. Raises as `read_url`."""
        read = read_url(url)
        waits = {"socket_connect_timeout": ASK_S, "socket_timeout": ASK_S}
        super().__init__(  # type: ignore[no-untyped-call]  # redis-py's own gap
            list(read.sentinels),
            sentinel_kwargs={"protocol": 2, "retry": options.get("retry"), **waits, **read.sentinel},
        )
        self._query: asyncio.Task[tuple[str, int]] | None = None
        self.client: Redis = self.master_for(
            read.service,
            connection_pool_class=MasterPool,
            max_connections=max_connections,
            **read.master,
            **options,
        )

    async def look(self) -> None:
        """Query the master's address, and close the connections to any other server.

        Raises redis-py's errors if no Sentinel knows the master.
        """
        pool = self.client.connection_pool
        assert isinstance(pool, MasterPool)
        await pool.get_master_address()

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """Return the master's host and port. Raises ``MasterNotFoundError`` if no Sentinel knows the master."""
        if self._query is None or self._query.done():
            self._query = asyncio.create_task(super().discover_master(service_name))
            self._query.add_done_callback(lambda task: task.cancelled() or task.exception())
        # Shielded, because a cancelled caller must not cancel the query of the other callers.
        return await asyncio.shield(self._query)

    async def aclose(self) -> None:
        """Wait for a query in flight (`ASK_S` per Sentinel at most), and close the connections to the Sentinels.

        The caller closes `client` separately.
        """
        if self._query is not None:
            await asyncio.wait({self._query})
        await super().aclose()
