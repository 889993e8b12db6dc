"""Sends the outcomes of sessions to the store in the background, and follows the store's records of tasks.

An attempt is an episode whose reward the agent earned (`core/outcomes`). Other episodes say nothing about the task.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from gateway.core.curriculum import Outcome, TaskRecord
from gateway.core.environment import Environment
from gateway.core.episode import Summary
from gateway.core.errors import InvalidRequest, StoreUnavailable, UnknownTask
from gateway.core.ids import EnvironmentName
from gateway.core.periodic import pause
from gateway.core.ports.curricula import MAX_OUTCOMES, CurriculumStore
from gateway.core.session import Session
from gateway.tasks.curricula.model import is_index
from gateway.tasks.registry import TaskRegistry

logger = logging.getLogger(__name__)

WRITE_S: Final = 0.5
"""Seconds between two writes to the store. Each write sends all waiting outcomes."""
MAX_WAITING: Final = 100_000
"""Maximum number of outcomes that wait for the store. Beyond it the oldest outcomes are lost."""
MOST_REWARD: Final = 1e100
"""Largest absolute reward of an outcome. The spread needs the square of a reward, which could overflow beyond it."""
FLUSH_S: Final = 5.0
"""Seconds that a replica waits at its end for the store to receive the last outcomes."""


class TaskStats:
    """Sends outcomes to the store, and caches the records of all attempted tasks."""

    def __init__(self, store: CurriculumStore, *, registry: TaskRegistry) -> None:
        """*registry* maps a task's place or alias to its id."""
        self._store = store
        self._registry = registry
        # The state: outcomes not yet sent to the store, and records received from it.
        self._waiting: deque[Outcome] = deque(maxlen=MAX_WAITING)
        self._lost = 0
        """Total number of outcomes lost because too many waited."""
        self._writing = asyncio.Lock()
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
        self.add(
            Outcome(
                environment=name,
                task=self.key(name, session.task),
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
        """Return the record key of *task* (an id, alias or place): its id, or *task* itself if it is unknown."""
        return self.find(environment, task) or task

    def find(self, environment: EnvironmentName, task: str) -> str | None:
        """Return the record key as `key` does, or None if the registry has no task of this id, alias or place."""
        split, _, number = task.rpartition("/")
        with contextlib.suppress(UnknownTask):
            if split and is_index(number):
                with contextlib.suppress(UnknownTask):
                    return self._id(environment, split, int(number))
            return self._id(environment, *self._registry.find(environment, task, prefer=""))
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
            await self._write()

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

    async def of(self, environment: EnvironmentName) -> Mapping[str, TaskRecord]:
        """Return the current records of an environment's tasks. Callers must not modify them.

        Raises:
            StoreUnavailable: The store does not answer.
        """
        async with self._following.setdefault(environment, asyncio.Lock()):
            version = self._versions.get(environment, "")
            known = self._known.get(environment, {})
            changed, is_copied = known, False
            while True:
                page = await self._store.records(environment, version)
                if page.is_whole and (known or page.records):
                    changed, is_copied = {}, True
                if (page.records or page.removed) and not is_copied:
                    changed, is_copied = dict(known), True  # earlier callers keep the old mapping
                for task in page.removed:
                    changed.pop(task, None)
                for record in page.records:
                    changed[record.task] = record
                version = page.version
                if page.is_last:
                    break
            self._known[environment], self._versions[environment] = changed, version
            return changed

    async def forget(self, environment: EnvironmentName, task: str = "") -> int:
        """Remove the record of one task, or of all, and return the number of records. Raises ``StoreUnavailable``."""
        await self.write()  # otherwise waiting outcomes would recreate the record
        return await self._store.forget(environment, self.key(environment, task) if task else "")

    def _id(self, environment: EnvironmentName, split: str, index: int) -> str:
        id = self._registry.task(environment, split, index).get("id")
        return id if isinstance(id, str) and id else f"{split}/{index}"
