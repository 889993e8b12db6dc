"""Reads the step log: lists of episodes, and the calls of one episode from all replicas that served it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from gateway.core.ports.step_log import EpisodeFilter, EpisodeWithoutEnd, RecordedCalls
from gateway.stores.step_log.database import INDEX, StepLogDatabase
from gateway.stores.step_log.segments import calls_of, segments

T = TypeVar("T")
PAGE: Final = 500
"""Number of episodes that are read together."""
MARGIN_S: Final = 5.0
"""Seconds by which a call's record may lie outside of its episode's times: clocks differ, and writes come later."""


class StepLogReader:
    """Reads one folder of the step log; implements `gateway.core.ports.step_log.StepLogQueries`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._threads = asyncio.Semaphore(2)

    async def episodes(self, wanted: EpisodeFilter, *, limit: int) -> list[dict[str, Any]]:
        """See ``StepLogQueries.episodes``."""
        return await self._query(lambda database: database.episodes(wanted, limit=limit), [])

    async def episode(self, id: str) -> dict[str, Any] | None:
        """See ``StepLogQueries.episode``."""
        return await self._query(lambda database: database.episode(id), None)

    async def without_end(self, before: float) -> AsyncIterator[EpisodeWithoutEnd]:
        """Yield the episodes of this folder that have no end and began before a Unix time, oldest first."""
        nothing: list[EpisodeWithoutEnd] = []
        after = (float("-inf"), "")
        while True:
            page = await self._query(lambda database: database.without_end(before, after, limit=PAGE), nothing)  # noqa: B023
            for episode in page:
                yield episode
            if len(page) < PAGE:
                return
            after = (page[-1].at, page[-1].lease)

    async def calls(self, episode: dict[str, Any]) -> RecordedCalls:
        """See ``StepLogQueries.calls``."""
        async with self._threads:
            return await asyncio.to_thread(self._calls, episode)

    async def rollouts(self, episode: dict[str, Any]) -> list[dict[str, Any]]:
        """See ``StepLogQueries.rollouts``."""
        nothing: list[dict[str, Any]] = []
        found = await self._query(lambda database: database.rollouts(episode), nothing)
        async with self._threads:
            return await asyncio.to_thread(lambda: [{**row, "messages": self._messages(row)} for row in found])

    async def link(self, key: str, lease: str) -> None:
        """See ``StepLogQueries.link``."""
        await self._query(lambda database: database.link(key, lease), None)

    async def blob(self, digest: str) -> bytes | None:
        """See ``StepLogQueries.blob``."""
        return await self._query(lambda database: database.blob(digest), None)

    async def _query(self, ask: Callable[[StepLogDatabase], T], nothing: T) -> T:
        async with self._threads:
            return await asyncio.to_thread(self._asked, ask, nothing)

    def _asked(self, ask: Callable[[StepLogDatabase], T], nothing: T) -> T:
        path = self._folder / INDEX
        if not path.exists():
            return nothing
        database = StepLogDatabase(path)
        try:
            return ask(database)
        finally:
            database.close()

    def _calls(self, episode: dict[str, Any]) -> RecordedCalls:
        began_at, ended_at = episode["opened_at"] or episode["at"], episode["closed_at"]
        damaged: list[str] = []
        found = self._records(episode["lease"], began_at, ended_at, damaged)
        return RecordedCalls(sorted(found, key=lambda call: (call[0], call[1])), damaged)

    def _messages(self, rollout: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the messages of a rollout in their order, each once."""
        records = self._records(rollout["key"], rollout["started_at"], None, [])
        found = {record[4]["id"]: record[4] for record in records}
        return sorted(found.values(), key=lambda message: (message.get("index") or 0, message["at"]))

    def _records(
        self, key: str, began_at: float, ended_at: float | None, damaged: list[str]
    ) -> Iterator[Sequence[Any]]:
        for segment in segments(self._folder):
            if segment.changed_at < began_at - MARGIN_S:
                continue
            if ended_at is None or segment.began_at <= ended_at + MARGIN_S:
                yield from calls_of(segment.path, key, damaged)
