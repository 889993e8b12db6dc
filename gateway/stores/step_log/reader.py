"""Reads the step log: lists of episodes, and the calls of one episode from all replicas that served it."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from gateway.core.errors import StoreUnavailable
from gateway.core.ports.step_log import EpisodeFilter, EpisodeWithoutEnd, RecordedCalls
from gateway.stores.step_log.database import INDEX, StepLogDatabase
from gateway.stores.step_log.segments import SUFFIX, calls_of

T = TypeVar("T")
PAGE: Final = 500
"""Number of episodes that are read together."""


class StepLogReader:
    """Reads one folder of the step log; implements ``StepLogQueries`` and ``EndlessEpisodes`` of the port."""

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
        """See ``EndlessEpisodes.without_end``."""
        nothing: list[EpisodeWithoutEnd] = []
        after = (float("-inf"), "")
        while True:
            page = await self._query(lambda database: database.without_end(before, after, limit=PAGE), nothing)  # noqa: B023
            for episode in page:
                yield episode
            if len(page) < PAGE:
                return
            after = (page[-1].at, page[-1].lease)

    async def end_unrecorded(self, leases: Sequence[str]) -> int:
        """See ``EndlessEpisodes.end_unrecorded``."""
        return await self._query(lambda database: database.end_unrecorded(leases), 0)

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
        try:
            with contextlib.closing(StepLogDatabase(path)) as database:
                return ask(database)
        except (sqlite3.Error, OSError) as error:
            raise StoreUnavailable(
                f"the index of the step log, {path}, cannot be read: {error}. A gateway that records moves a damaged "
                "file aside; otherwise check its rights and the disk"
            ) from None

    def _calls(self, episode: dict[str, Any]) -> RecordedCalls:
        damaged: list[str] = []
        found = self._records(episode["lease"], damaged)
        return RecordedCalls(sorted(found, key=lambda call: (call[0], call[1])), damaged)

    def _messages(self, rollout: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the messages of a rollout in their order, each once."""
        found = {record[4]["id"]: record[4] for record in self._records(rollout["key"], [])}
        return sorted(found.values(), key=lambda message: (message.get("index") or 0, message["at"]))

    def _records(self, key: str, damaged: list[str]) -> Iterator[Sequence[Any]]:
        """Yield what was recorded under a lease or a rollout's key.

        The index knows which complete segments have calls of it. All others are searched.
        """
        paths = sorted(self._folder.glob(f"*{SUFFIX}"))  # before the index is asked: a segment may become complete
        nothing: tuple[set[str], set[str]] = set(), set()
        complete, having = self._asked(lambda database: (set(database.segments()), database.segments_of(key)), nothing)
        for path in paths:
            if path.name in having or path.name not in complete:
                yield from calls_of(path, key, damaged)
