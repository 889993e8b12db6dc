"""Reads the step logs of all replicas: replicas on other machines have folders of their own, and answer for them.

`ReplicaLogs` asks every replica that announced itself, and combines what it gets with the local log. A replica that
does not answer is left out. `answer` is the other side.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, Final

import msgpack

from gateway.core.errors import GatewayError, InvalidRequest
from gateway.core.ports.step_log import EpisodeFilter, RecordedCalls, StepLog, StepLogQueries
from gateway.upstreams.replica_client import ReplicaClient

logger = logging.getLogger(__name__)

LOG: Final = "log"
"""Operation of requests to other replicas."""
WITHIN_S: Final = 10.0
"""Seconds that another replica has for an answer."""
_FILTERS: Final = frozenset(field.name for field in fields(EpisodeFilter))

Peers = Callable[[], Awaitable[Sequence[str]]]
"""Returns the URLs of all live replicas. Raises ``StoreUnavailable``."""


class ReplicaLogs:
    """The step logs of all replicas; implements `gateway.core.ports.step_log.StepLogQueries`."""

    def __init__(self, local: StepLogQueries, *, client: ReplicaClient, peers: Peers) -> None:
        self._local = local
        self._client = client
        self._peers = peers

    async def episodes(self, wanted: EpisodeFilter, *, limit: int) -> list[dict[str, Any]]:
        """See ``StepLogQueries.episodes``. An episode may have begun at one replica and ended at another."""
        found = await self._all(self._local.episodes(wanted, limit=limit), "episodes", [asdict(wanted), limit])
        rows: dict[str, dict[str, Any]] = {}
        for row in (row for some in found for row in some):
            rows[row["lease"]] = _merged(rows.get(row["lease"]), row)
        return sorted(rows.values(), key=lambda row: (row["at"], row["lease"]), reverse=True)[:limit]

    async def episode(self, id: str) -> dict[str, Any] | None:
        """See ``StepLogQueries.episode``."""
        found = [row for row in await self._all(self._local.episode(id), "episode", [id]) if row is not None]
        newest = max(found, key=lambda row: (row["lease"] == id, row["at"]), default=None)
        if newest is None:
            return None
        whole: dict[str, Any] | None = None
        for row in await self._all(self._local.episode(newest["lease"]), "episode", [newest["lease"]]):
            if row is not None and row["lease"] == newest["lease"]:
                whole = _merged(whole, row)
        return whole

    async def calls(self, episode: dict[str, Any]) -> RecordedCalls:
        """See ``StepLogQueries.calls``. Replicas may share a folder, so each call and each damage counts once."""
        found = await self._all(self._local.calls(episode), "calls", [_brief(episode)])
        known = {msgpack.packb(call[:3]): call for calls, _ in found for call in calls}
        damaged = {place for _, places in found for place in places}
        return RecordedCalls(sorted(known.values(), key=lambda call: (call[0], call[1])), sorted(damaged))

    async def rollouts(self, episode: dict[str, Any]) -> list[dict[str, Any]]:
        """See ``StepLogQueries.rollouts``. The messages of one rollout may be in several logs."""
        found = await self._all(self._local.rollouts(episode), "rollouts", [_brief(episode)])
        rows = {row["key"]: row for some in found for row in some}
        for key, row in rows.items():
            parts = (part["messages"] for some in found for part in some if part["key"] == key)
            messages = {message["id"]: message for part in parts for message in part}
            row["messages"] = sorted(messages.values(), key=lambda one: (one.get("index") or 0, one["at"]))
        return list(rows.values())

    async def link(self, key: str, lease: str) -> None:
        """See ``StepLogQueries.link``."""
        await self._all(self._local.link(key, lease), "link", [key, lease])

    async def blob(self, digest: str) -> bytes | None:
        """See ``StepLogQueries.blob``."""
        found = await self._local.blob(digest)
        if found is not None:
            return found
        others = await self._others("blob", [digest])
        return next((data for data in others if data is not None), None)

    async def _all(self, local: Awaitable[Any], operation: str, arguments: list[Any]) -> list[Any]:
        """Return the answers of all replicas, the local one first."""
        own, others = await asyncio.gather(local, self._others(operation, arguments))
        return [own, *others]

    async def _others(self, operation: str, arguments: list[Any]) -> list[Any]:
        message = _packed([operation, *arguments])
        try:
            peers = [peer for peer in await self._peers() if peer != self._client.me]
        except GatewayError:  # this replica's own log can be read without the store
            return []
        answers = await asyncio.gather(*(self._asked(peer, message) for peer in peers))
        return [answer[0] for answer in answers if answer is not None]

    async def _asked(self, peer: str, message: bytes) -> list[Any] | None:
        try:
            body = await self._client.ask(peer, LOG, None, message, within_s=WITHIN_S)
        except GatewayError as error:
            logger.warning("step_log_not_read peer=%s error=%s", peer, error)
            return None
        answer: list[Any] = msgpack.unpackb(body, strict_map_key=False, unicode_errors="surrogatepass")
        return answer


async def answer(log: StepLog, queries: StepLogQueries, message: bytes) -> bytes:
    """Answer another replica's request for what this replica's folder has. Raises ``InvalidRequest``."""
    operation, *arguments = msgpack.unpackb(message, strict_map_key=False, unicode_errors="surrogatepass")
    await log.flush()
    if operation == "episodes":
        wanted, limit = arguments
        before = wanted.get("before")
        known = {name: value for name, value in wanted.items() if name in _FILTERS}
        found: Any = await queries.episodes(
            EpisodeFilter(**{**known, "before": tuple(before) if before else None}), limit=limit
        )
    elif operation in ("episode", "calls", "rollouts", "link", "blob"):
        found = await getattr(queries, operation)(*arguments)
    else:
        raise InvalidRequest(f"replicas do not ask their logs for {str(operation)[:40]!r}")
    return _packed([found])


def _brief(episode: Mapping[str, Any]) -> dict[str, Any]:
    """Return what finds an episode's calls and rollouts, without its task and its end."""
    return {name: value for name, value in episode.items() if name not in ("begin", "end")}


def _packed(value: object) -> bytes:
    return bytes(msgpack.packb(value, unicode_errors="surrogatepass", default=_plain))


def _merged(one: Mapping[str, Any] | None, other: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with what either replica knows: one may know the begin, and the other the end."""
    if one is None:
        return dict(other)
    row = {**other, **{name: value for name, value in one.items() if value not in (None, "")}}
    return {**row, "at": min(one["at"], other["at"])}


def _plain(value: object) -> Any:
    if isinstance(value, int):  # of more than 64 bits
        return float(value)
    return list(value) if isinstance(value, tuple) else repr(value)
