"""Sends the outcomes of sessions to the store in the background, and follows the store's records of tasks.

An attempt is an episode whose reward the agent earned (`core/outcomes`). Other episodes say nothing about the task.

Each version of a scorer has records of its own, so a record never mixes rewards of two versions. The current version is
the one that judged the session that opened last. The store keeps the list of versions, the current one last.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from gateway.core.curriculum import Outcome, TaskRecord, book_of
from gateway.core.environment import Environment
from gateway.core.episode import Summary
from gateway.core.errors import InvalidRequest, StoreUnavailable, UnknownTask
from gateway.core.ids import EnvironmentName
from gateway.core.periodic import pause
from gateway.core.ports.curricula import MAX_OUTCOMES, CurriculumStore
from gateway.core.session import Session
from gateway.core.task_name import TaskName
from gateway.tasks.curricula.model import is_index
from gateway.tasks.registry import TaskRegistry
from gateway.tasks.task_ref import name_of

logger = logging.getLogger(__name__)

WRITE_S: Final = 0.5
"""Seconds between two writes to the store. Each write sends all waiting outcomes."""
MAX_WAITING: Final = 100_000
"""Maximum number of outcomes that wait for the store. Beyond it the oldest outcomes are lost."""
MOST_REWARD: Final = 1e100
"""Largest absolute reward of an outcome. The spread needs the square of a reward, which could overflow beyond it."""
SCORERS_KEPT: Final = 8
"""Versions of a scorer whose records are kept. With a further version, the records of the oldest are removed."""
FLUSH_S: Final = 5.0
"""Seconds that a replica waits at its end for the store to receive the last outcomes."""


class TaskStats:
    """Sends outcomes to the store, and caches the records of all attempted tasks."""

    def __init__(self, store: CurriculumStore, *, registry: TaskRegistry) -> None:
        """*registry* maps a task's place or alias to its name."""
        self._store = store
        self._registry = registry
        # The state: outcomes not yet sent to the store, and records received from it.
        self._waiting: deque[Outcome] = deque(maxlen=MAX_WAITING)
        self._lost = 0
        """Total number of outcomes lost because too many waited."""
        self._writing = asyncio.Lock()
        self.current: dict[EnvironmentName, str] = {}
        """Version of the scorer of the session that opened last. The opener of sessions sets it directly, so that an
        opening need not pass through this module."""
        self._seen: dict[EnvironmentName, str] = {}
        """The current version in the store. Another value in `current` means that a session has opened since."""
        self._noted: dict[EnvironmentName, list[str]] = {}
        """Versions of noted outcomes, which the store may not list yet."""
        self._known: dict[EnvironmentName, dict[str, TaskRecord]] = {}
        self._versions: dict[EnvironmentName, str] = {}
        self._following: dict[EnvironmentName, asyncio.Lock] = {}

    def note(self, session: Session, environment: Environment, summary: Summary, reward: float) -> None:
        """Note the outcome of an episode whose *reward* the agent earned."""
        if not session.task:
            return
        if abs(reward) > MOST_REWARD or not math.isfinite(summary.seconds):
            told = (session.id, reward, summary.seconds)
            logger.warning("outcome_left_out session=%s reward=%s seconds=%s", *told)
            return
        name = environment.base or environment.name
        if session.scorer and session.scorer != self._seen.get(name):
            self._noted[name] = [*_without(self._noted.get(name, ()), session.scorer), session.scorer]
        self.add(
            Outcome(
                environment=book_of(name, session.scorer),
                task=session.task,
                reward=reward,
                finished=summary.finished,
                steps=summary.steps,
                seconds=summary.seconds,
                policy=session.policy,
                lease=session.lease,
            )
        )

    def add(self, outcome: Outcome) -> None:
        """Queue an outcome for the store: of an episode in this gateway, or reported by a trainer."""
        self._lost += len(self._waiting) == MAX_WAITING
        self._waiting.append(outcome)

    def key(self, environment: EnvironmentName, task: str) -> str:
        """Return the record key of *task*, an id, alias or place: its name's key, or *task* itself if it is unknown."""
        return self.find(environment, task) or task

    def find(self, environment: EnvironmentName, task: str) -> str | None:
        """Return the record key as `key` does, or None if the registry has no task of this id, alias or place."""
        split, _, number = task.rpartition("/")
        with contextlib.suppress(UnknownTask):
            if split and is_index(number):
                with contextlib.suppress(UnknownTask):
                    return self._key(environment, split, int(number))
            return self._key(environment, *self._registry.find(environment, task, prefer=""))
        return None

    # -- in the background ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Send waiting outcomes to the store every `WRITE_S` seconds until cancelled."""
        told_lost = 0
        while True:
            await pause(WRITE_S)
            try:
                await self.write()
            except StoreUnavailable:
                pass  # the next turn sends them; the store's client has logged it
            except Exception:
                logger.exception("tick_failed loop=task_records")
            if self._lost > told_lost:
                logger.warning("outcomes_lost number=%d", self._lost - told_lost)
                told_lost = self._lost

    async def write(self) -> None:
        """Send all waiting outcomes to the store. Raises ``StoreUnavailable``: the unsent outcomes keep waiting."""
        async with self._writing:  # two concurrent writes would send and remove the same outcomes
            for environment in {*self._noted, *self.current}:
                if environment in self._noted or self._moved(environment):
                    await self._write_scorers(environment)
            await self._write()

    async def _write_scorers(self, environment: EnvironmentName) -> None:
        version, known = await self._scorers(environment)
        kept = self._kept(environment, known)
        if known != kept and not await self._store.set_state(_name(environment), version, _encoded(kept)):
            return  # another replica wrote at the same time: the next turn tries again
        for old in kept[:-SCORERS_KEPT]:
            await self._store.forget(book_of(environment, old))
        self._seen[environment] = kept[-1]
        if left := _without(self._noted.pop(environment, ()), *kept):
            self._noted[environment] = left

    def _moved(self, environment: EnvironmentName) -> str:
        """Return the current version if the store does not know yet that it is the current one; else an empty text."""
        current = self.current.get(environment, "")
        return current if current != self._seen.get(environment) else ""

    def _kept(self, environment: EnvironmentName, known: Sequence[str]) -> list[str]:
        """Return the *known* versions and the versions that the store lacks, the current one last."""
        moved = self._moved(environment)
        late = _without(self._noted.get(environment, ()), *known, moved)
        return [*late, *_without(known, moved), *([moved] if moved else [])]

    async def _scorers(self, environment: EnvironmentName) -> tuple[int, list[str]]:
        """Return the version of the state in the store, and the scorer's versions, the current one last."""
        version, body = await self._store.state(_name(environment))
        return version, json.loads(body) if body else []

    async def _write(self) -> None:
        while self._waiting:
            some = [self._waiting[place] for place in range(min(MAX_OUTCOMES, len(self._waiting)))]
            lost = self._lost
            try:
                await self._store.note(some)
            except InvalidRequest:  # one invalid outcome must not block the outcomes after it
                await self._write_each(some)
            for _ in range(max(0, len(some) - (self._lost - lost))):  # some may have been lost meanwhile
                self._waiting.popleft()

    async def _write_each(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            try:
                await self._store.note([outcome])
            except InvalidRequest as error:
                logger.error("outcome_refused environment=%s error=%s", outcome.environment, error)

    async def flush(self) -> None:
        """Send the last outcomes to the store at this replica's end, within `FLUSH_S` seconds."""
        with contextlib.suppress(StoreUnavailable):
            writing = asyncio.ensure_future(self.write())
            await asyncio.wait({writing}, timeout=FLUSH_S)
            if writing.done():
                writing.result()
            else:
                writing.cancel()
                logger.warning("outcomes_lost number=%d", len(self._waiting))

    # -- reading --------------------------------------------------------------------------------------------------

    async def scorers(self, environment: EnvironmentName) -> list[str]:
        """Return the scorer's versions that have records, the current one last; empty: the version is not known.

        Raises:
            StoreUnavailable: The store does not answer.
        """
        _, known = await self._scorers(environment)
        return ["", *self._kept(environment, known)]

    async def of(self, environment: EnvironmentName, scorer: str | None = None) -> Mapping[str, TaskRecord]:
        """Return the newest records of an environment's tasks. Callers must not modify them.

        *scorer*: the version of the scorer; None: the current one.

        Raises:
            StoreUnavailable: The store does not answer.
        """
        if scorer is None:
            scorer = (await self.scorers(environment))[-1]
            if scorer and not self._moved(environment):
                self.current[environment] = self._seen[environment] = scorer
        book = book_of(environment, scorer)
        async with self._following.setdefault(book, asyncio.Lock()):
            version = self._versions.get(book, "")
            known = self._known.get(book, {})
            changed, is_copied = known, False
            while True:
                page = await self._store.records(book, version)
                if page.is_whole and (known or page.records):
                    changed, is_copied = {}, True
                if (page.records or page.removed) and not is_copied:
                    changed, is_copied = dict(known), True  # earlier callers keep the old mapping
                for task in page.removed:
                    changed.pop(task, None)
                for record in page.records:
                    changed[record.task] = replace(record, environment=environment, scorer=scorer)
                version = page.version
                if page.is_last:
                    break
            self._known[book], self._versions[book] = changed, version
            return changed

    async def forget(self, environment: EnvironmentName, task: str = "") -> int:
        """Remove the records of one task, or of all, by every version of the scorer. Return the number of records.

        The records of a task include those of its former lines, which have the same id.

        Raises:
            StoreUnavailable: The store does not answer.
        """
        await self.write()  # otherwise waiting outcomes would recreate the record
        key = self.key(environment, task) if task else ""
        ids = {one for one in (task, TaskName.of(key).id) if one}
        removed = 0
        for scorer in await self.scorers(environment):
            former = [one for one in await self.of(environment, scorer) if TaskName.of(one).id in ids] if task else []
            for one in {key, *former}:
                removed += await self._store.forget(book_of(environment, scorer), one)
        return removed

    def _key(self, environment: EnvironmentName, split: str, index: int) -> str:
        return name_of(self._registry.task(environment, split, index)).key


def _without(versions: Iterable[str], *others: str) -> list[str]:
    return [one for one in versions if one not in others]


def _name(environment: EnvironmentName) -> str:
    return f"scorers:{environment}"  # no curriculum has a colon in its name


def _encoded(scorers: Sequence[str]) -> bytes:
    return json.dumps(scorers[-SCORERS_KEPT:]).encode()
