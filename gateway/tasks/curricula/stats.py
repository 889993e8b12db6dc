"""What came of the sessions on each task: told to the store behind the sessions' ends, and followed from there.

An attempt is an episode whose reward the agent earned (`core/outcomes`). Any other says nothing about the task.
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
from gateway.core.ports.curricula import MAX_OUTCOMES, CurriculumStore
from gateway.core.session import Session
from gateway.tasks.registry import TaskRegistry

logger = logging.getLogger(__name__)

WRITE_S: Final = 0.5
"""How long an outcome may wait to be told to the store together with others."""
MAX_WAITING: Final = 100_000
"""Outcomes that a store which does not answer has not been told yet; beyond it the oldest ones are lost."""
MOST_REWARD: Final = 1e100
"""Beyond it the square of a reward, which the spread is made of, is no number any more."""
FLUSH_S: Final = 5.0
"""How long the end of this replica waits for the store to take the last ones."""


class TaskStats:
    """Records of all tasks that were played."""

    def __init__(self, store: CurriculumStore, *, registry: TaskRegistry) -> None:
        """*registry* says what id a task has that was asked for by its place."""
        self._store = store
        self._registry = registry
        # The state: what the store was not told yet, and what it told.
        self._waiting: deque[Outcome] = deque(maxlen=MAX_WAITING)
        self._lost = 0
        """Outcomes that were pushed out, ever."""
        self._writing = asyncio.Lock()
        self._known: dict[EnvironmentName, dict[str, TaskRecord]] = {}
        self._versions: dict[EnvironmentName, str] = {}
        self._following: dict[EnvironmentName, asyncio.Lock] = {}

    def note(self, session: Session, environment: Environment, summary: Summary, reward: float) -> None:
        """Note how an episode went whose *reward* the agent earned."""
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
        """Note an outcome that is told by somebody else, too."""
        self._lost += len(self._waiting) == MAX_WAITING
        self._waiting.append(outcome)

    def key(self, environment: EnvironmentName, task: str) -> str:
        """What a task is kept under: its id, also where it was asked for by its place or an alias."""
        return self.find(environment, task) or task

    def find(self, environment: EnvironmentName, task: str) -> str | None:
        """As `key`, of a task that the registry has; None: it has none of this id, alias or place."""
        split, _, number = task.rpartition("/")
        with contextlib.suppress(UnknownTask):
            if split and number.isascii() and number.isdigit():
                with contextlib.suppress(UnknownTask):
                    return self._id(environment, split, int(number))
            return self._id(environment, *self._registry.find(environment, task, prefer=""))
        return None

    # -- in the background ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Tell the store what is new, twice a second, until cancelled."""
        told_lost = 0
        while True:
            await asyncio.sleep(WRITE_S)
            try:
                await self.write()
            except StoreUnavailable:
                pass  # told at the next turn; the link has logged it
            except Exception:
                logger.exception("tick_failed loop=task_records")
            if self._lost > told_lost:
                logger.warning("outcomes_lost number=%d", self._lost - told_lost)
                told_lost = self._lost

    async def write(self) -> None:
        """Tell the store all that waits. Raises ``StoreUnavailable``: what was not taken waits on."""
        async with self._writing:  # else two would tell, and strike out, the same ones
            await self._write()

    async def _write(self) -> None:
        while self._waiting:
            some = [self._waiting[place] for place in range(min(MAX_OUTCOMES, len(self._waiting)))]
            lost = self._lost
            try:
                await self._store.note(some)
            except InvalidRequest:  # it would hold up all that come after it
                await self._write_each(some)
            for _ in range(max(0, len(some) - (self._lost - lost))):  # those that were pushed out meanwhile are gone
                self._waiting.popleft()

    async def _write_each(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            try:
                await self._store.note([outcome])
            except InvalidRequest as error:
                logger.error("outcome_refused environment=%s error=%s", outcome.environment, error)

    async def flush(self) -> None:
        """Tell the store what is left, as this replica ends; not longer than `FLUSH_S`."""
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
        """The records of an environment's tasks, up to date; not to be changed. Raises ``StoreUnavailable``."""
        async with self._following.setdefault(environment, asyncio.Lock()):
            version = self._versions.get(environment, "")
            known = self._known.get(environment, {})
            changed, is_copied = known, False
            while True:
                page = await self._store.records(environment, version)
                if page.is_whole and (known or page.records):
                    changed, is_copied = {}, True
                if (page.records or page.removed) and not is_copied:
                    changed, is_copied = dict(known), True  # who was given the old ones goes on with them
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
        """Remove the record of one task, or of all; how many there were. Raises ``StoreUnavailable``."""
        await self.write()  # else what waits here would come after it
        return await self._store.forget(environment, self.key(environment, task) if task else "")

    def _id(self, environment: EnvironmentName, split: str, index: int) -> str:
        id = self._registry.task(environment, split, index).get("id")
        return id if isinstance(id, str) and id else f"{split}/{index}"
