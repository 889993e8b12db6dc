"""Which Redis a URL means, in a word that may be shown: without user, password and options."""

from __future__ import annotations

from redis.asyncio.connection import parse_url

from gateway.stores.redis.sentinel import is_sentinel, read_url


def place_of(url: str) -> str:
    """The place that *url* names: host, port and database of a Redis, or the Sentinels and the name of their master.

    Two names of one host are two places: nobody is asked.

    Raises:
        ValueError: *url* can't be read; without a word of its passwords.
    """
    if is_sentinel(url):
        read = read_url(url)
        sentinels = ",".join(sorted(_address(host, port) for host, port in read.sentinels))
        return f"sentinels {sentinels} master {read.service} database {read.db}"
    try:
        parts = parse_url(url)
    except ValueError:
        # What it quotes may be a part of the password.
        raise ValueError("redis://[[USER]:PASSWORD@]HOST[:PORT][/DB] is wanted") from None
    database = int(parts.get("db", 0))
    if "path" in parts:
        return f"{parts['path']} database {database}"
    return f"{_address(parts.get('host', 'localhost'), parts.get('port', 6379))} database {database}"


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
