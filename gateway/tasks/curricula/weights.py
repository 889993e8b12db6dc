"""What is known of a curriculum's tasks, weighed for draws: by the newest records, once a second at most.

Draws follow from the weights and from the curriculum's state in the store: its stage, and the policy that plays.
"""

from __future__ import annotations

import asyncio
import json
import logging
import operator
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from gateway.core.curriculum import Curriculum, SamplerKind
from gateway.core.errors import StoreUnavailable
from gateway.core.ports.curricula import CurriculumStore
from gateway.tasks.curricula.sampling import Prepared, prepare
from gateway.tasks.curricula.stages import Standing, advance, standings
from gateway.tasks.curricula.stats import TaskStats
from gateway.tasks.curricula.tables import Tables
from gateway.tasks.curricula.task_tables import TaskTables

logger = logging.getLogger(__name__)

FRESH_S: Final = 1.0
"""How long a weighing of all tasks holds: records that are newer change the next draws."""
WRITES: Final = 16
"""How often a change of a curriculum's state is tried that others change meanwhile."""
_LOOKS_AT_RECORDS = frozenset((SamplerKind.TARGET_SUCCESS, SamplerKind.LEARNING_PROGRESS, SamplerKind.STAGED))


@dataclass(frozen=True, slots=True)
class _Source:
    """What a weighing is made from. Tables and records are never changed: another state of them is another object."""

    scope: Curriculum
    sampler: bytes
    parts: tuple[object, ...]

    def is_as(self, other: _Source) -> bool:
        """Whether another weighing would come to the same."""
        same = len(self.parts) == len(other.parts) and all(map(operator.is_, self.parts, other.parts))
        return same and (self.scope, self.sampler) == (other.scope, other.sampler)


@dataclass(slots=True)
class WeightedTasks:
    """A weighing of all tasks."""

    prepared: Prepared
    source: _Source
    at: float
    policy: str


class TaskWeights:
    """Weighs the tasks of scopes, for `gateway.tasks.curricula.service.Curricula`."""

    def __init__(self, *, store: CurriculumStore, records: TaskStats, tables: TaskTables) -> None:
        self._store = store
        self._records = records
        self._tables = tables
        # The state: what was weighed, and who is about to.
        self._weighed: dict[str, WeightedTasks] = {}
        self._weighing: dict[str, asyncio.Lock] = {}

    def forget(self, name: str) -> None:
        """Weigh the tasks of a scope anew, when it is drawn from next."""
        self._weighed.pop(name, None)

    def forget_all(self) -> None:
        """Weigh those of all anew."""
        self._weighed.clear()

    async def standings(self, scope: Curriculum) -> list[Standing]:
        """How far *scope* is in its stages by the newest records; empty where it has none. Raises as `of`."""
        if scope.sampler.kind is not SamplerKind.STAGED:
            return []
        await self.of(scope)  # moves it, if that is due
        names = {one.environment for one in scope.components}
        records = {name: await self._records.of(name) for name in names}
        _, state = await self.state(scope.name)
        tables = await self.tables_of(scope)
        return await asyncio.to_thread(standings, scope, tables, records, str(state.get("sampler", "")).encode())

    async def tables_of(self, curriculum: Curriculum) -> Tables:
        """The tasks of each of its components."""
        keys = [(one.environment, one.split) for one in curriculum.components]
        return {key: await self._tables.of(*key) for key in keys}

    async def policy(self, scope: Curriculum) -> str:
        """The tag of the policy that was last said, as of a second ago at most."""
        weighed = self._weighed.get(scope.name)
        if weighed is not None and time.monotonic() - weighed.at < FRESH_S:
            return weighed.policy
        _, state = await self.state(scope.name)
        return str(state.get("policy", ""))

    async def of(self, scope: Curriculum) -> WeightedTasks:
        """Weigh all tasks by the newest records, once a second at most.

        Raises:
            InvalidRequest: a component or a stage has no task.
            StoreUnavailable: the store does not answer.
        """
        async with self._weighing.setdefault(scope.name, asyncio.Lock()):
            weighed = self._weighed.get(scope.name)
            now = time.monotonic()
            if weighed is not None and now - weighed.at < FRESH_S and weighed.source.scope == scope:
                return weighed
            tables = await self.tables_of(scope)
            records = {}
            if scope.sampler.kind in _LOOKS_AT_RECORDS:
                names = {one.environment for one in scope.components}
                records = {name: await self._records.of(name) for name in names}
            version, state = await self.state(scope.name)
            sampler = str(state.get("sampler", "")).encode()
            moved = await asyncio.to_thread(advance, scope, tables, records, sampler)
            if moved != sampler:
                # Who comes second takes what the first one wrote: both moved from the same records.
                await self.change(scope.name, lambda known: {**known, "sampler": moved.decode()}, version=version)
                version, state = await self.state(scope.name)
                sampler = str(state.get("sampler", "")).encode()
            source = _Source(scope, sampler, (*tables.values(), *records.values()))
            if weighed is None or not weighed.source.is_as(source):
                prepared = await asyncio.to_thread(prepare, scope, tables, records, sampler)
                if weighed is not None and weighed.prepared.stage != prepared.stage:
                    logger.info("curriculum_moved name=%s stage=%s", scope.name, prepared.stage)
                weighed = WeightedTasks(prepared, source, now, "")
            weighed.at, weighed.policy = now, str(state.get("policy", ""))
            self._weighed[scope.name] = weighed
            return weighed

    async def state(self, name: str) -> tuple[int, dict[str, Any]]:
        """What the store keeps of a scope, with its version: ``sampler`` and ``policy``, where they are known."""
        version, body = await self._store.state(name)
        state = json.loads(body) if body else {}
        return version, state if isinstance(state, dict) else {}

    async def change(
        self, name: str, change: Callable[[dict[str, Any]], dict[str, Any]], *, version: int | None = None
    ) -> None:
        """Change the state, from *version* only if it is given: then nothing is done where there is another one."""
        for _ in range(WRITES):
            found, state = await self.state(name)
            if version is not None and found != version:
                return
            if await self._store.set_state(name, found, json.dumps(change(state)).encode()):
                return
        raise StoreUnavailable(f"the state of curriculum {name!r} changes faster than it can be written")
