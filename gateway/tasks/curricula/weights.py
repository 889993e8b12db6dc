"""Weighs a curriculum's tasks for draws by their newest records, at most once per second.

The result also depends on the curriculum's state in the store: its stage, and the tag of the policy that plays.
"""

from __future__ import annotations

import asyncio
import json
import logging
import operator
import time
from dataclasses import dataclass
from typing import Final

from gateway.core.errors import InvalidRequest, StoreUnavailable
from gateway.core.ids import EnvironmentName
from gateway.core.ports.curricula import CurriculumStore
from gateway.tasks.curricula.flaky import FlakyTasks
from gateway.tasks.curricula.model import Curriculum, SamplerKind
from gateway.tasks.curricula.sampling import Prepared, prepare
from gateway.tasks.curricula.stages import Standing, advance, standings
from gateway.tasks.curricula.stats import TaskStats
from gateway.tasks.curricula.tables import Records, Rows, Tables, TaskTables

logger = logging.getLogger(__name__)

FRESH_S: Final = 1.0
"""Seconds for which the weights of all tasks stay valid. Newer records affect draws after this time."""
WRITES: Final = 16
"""Maximum number of attempts to change a curriculum's state while other replicas change it too."""
_LOOKS_AT_RECORDS = frozenset((SamplerKind.TARGET_SUCCESS, SamplerKind.LEARNING_PROGRESS, SamplerKind.STAGED))


@dataclass(slots=True)
class WeightedTasks:
    """The weights of all tasks, with the inputs of the computation."""

    prepared: Prepared
    sampler: bytes
    """The sampler's state behind these weights."""
    source: tuple[object, ...]
    """The tables and records behind these weights. They are never modified: new content is a new object."""
    at: float
    policy: str


class TaskWeights:
    """Weighs the tasks of scopes, for `gateway.tasks.curricula.service.Curricula`."""

    def __init__(self, *, store: CurriculumStore, records: TaskStats, tables: TaskTables) -> None:
        self._store = store
        self._records = records
        self._tables = tables
        self.flaky = FlakyTasks(store, self._scorer)
        # The state: the latest weights of each scope, a lock for their computation, and tables without flaky tasks.
        self._weighed: dict[str, WeightedTasks] = {}
        self._weighing: dict[str, asyncio.Lock] = {}
        self._steady: dict[tuple[EnvironmentName, str], tuple[Rows, frozenset[str], Rows]] = {}

    def forget(self, name: str = "") -> None:
        """Discard the weights of a scope, or of all scopes, so that the next draw computes them again."""
        self._weighed = {known: one for known, one in self._weighed.items() if name and known != name}

    async def standings(self, scope: Curriculum) -> list[Standing]:
        """Return the progress of *scope* through its stages, or an empty list if it has no stages. Raises as `of`."""
        if scope.sampler.kind is not SamplerKind.STAGED:
            return []
        await self.of(scope)  # moves the scope to another stage if due
        tables, records = await self._read(scope)
        return await asyncio.to_thread(standings, scope, tables, records, await self._sampler(scope.name))

    async def tables_of(self, curriculum: Curriculum) -> Tables:
        """Return the tables of the curriculum's components."""
        keys = [(one.environment, one.split) for one in curriculum.components]
        return {key: await self._tables.of(*key) for key in keys}

    async def policy(self, name: str) -> str:
        """Return the policy's tag that the trainer last set for a scope. Empty: there is no tag."""
        return (await self._state(name))[1].get("policy", "")

    async def recent_policy(self, scope: Curriculum) -> str:
        """Return the same as `policy`, at most a second old."""
        weighed = self._weighed.get(scope.name)
        if weighed is not None and time.monotonic() - weighed.at < FRESH_S:
            return weighed.policy
        return await self.policy(scope.name)

    async def of(self, scope: Curriculum) -> WeightedTasks:
        """Return the weights of all tasks by the newest records, computed at most once per second.

        Raises:
            InvalidRequest: A component or a stage has no task, or all tasks of a split are marked as flaky.
            StoreUnavailable: The store does not answer.
        """
        async with self._weighing.setdefault(scope.name, asyncio.Lock()):
            weighed = self._weighed.get(scope.name)
            now = time.monotonic()
            if weighed is not None and now - weighed.at < FRESH_S and weighed.prepared.curriculum == scope:
                return weighed
            tables, records = await self._read(scope)
            sampler, policy = await self._advanced(scope, tables, records)
            source = (*tables.values(), *records.values())
            if (
                weighed is None
                or (weighed.prepared.curriculum, weighed.sampler) != (scope, sampler)
                or len(weighed.source) != len(source)
                or not all(map(operator.is_, weighed.source, source))
            ):
                prepared = await asyncio.to_thread(prepare, scope, tables, records, sampler)
                if weighed is not None and weighed.prepared.stage != prepared.stage:
                    logger.info("curriculum_moved name=%s stage=%s", scope.name, prepared.stage)
                weighed = WeightedTasks(prepared, sampler, source, now, policy)
            weighed.at, weighed.policy = now, policy
            self._weighed[scope.name] = weighed
            return weighed

    async def note(self, name: str, **changes: str) -> None:
        """Write *changes* into a scope's state and keep its other keys. Raises ``StoreUnavailable``."""
        for _ in range(WRITES):
            version, state = await self._state(name)
            if await self._store.set_state(name, version, json.dumps({**state, **changes}).encode()):
                return
        raise StoreUnavailable(f"the state of curriculum {name!r} changes faster than it can be written")

    async def _read(self, scope: Curriculum) -> tuple[Tables, Records]:
        """Read the tables of *scope* without flaky tasks, and the records if its sampler uses them."""
        looks = scope.sampler.kind in _LOOKS_AT_RECORDS
        marked = {name: frozenset(await self.flaky.of(name)) for name in scope.environments}
        tables = {
            place: self._without(place, marked[place[0]], all) for place, all in (await self.tables_of(scope)).items()
        }
        return tables, {name: await self._records.of(name) for name in (scope.environments if looks else ())}

    async def _scorer(self, environment: EnvironmentName) -> str:
        """Return the current version of the scorer, or an empty text."""
        return (await self._records.scorers(environment))[-1]

    def _without(self, place: tuple[EnvironmentName, str], marked: frozenset[str], rows: Rows) -> Rows:
        """Return *rows* without the *marked* tasks: the same object for the same arguments, so weights stay valid."""
        if not marked or not rows:
            return rows
        known = self._steady.get(place)
        if known is None or known[0] is not rows or known[1] != marked:
            steady = tuple(row for row in rows if row.task not in marked)
            known = self._steady[place] = rows, marked, steady if len(steady) < len(rows) else rows
        if not known[2]:
            raise InvalidRequest(
                f"all {len(rows)} tasks in split {place[1]!r} of {place[0]} are marked as flaky: repair them, and "
                f"remove the marks with `gateway curricula unmark {place[0]} TASK`"
            )
        return known[2]

    async def _advanced(self, scope: Curriculum, tables: Tables, records: Records) -> tuple[bytes, str]:
        """Move *scope* to another stage if due. Return the sampler's state, and the tag of the policy that plays."""
        version, state = await self._state(scope.name)
        sampler = state.get("sampler", "").encode()
        moved = await asyncio.to_thread(advance, scope, tables, records, sampler)
        if moved != sampler:
            # If another replica wrote first, this replica takes that state. Both moved by the same records.
            await self._store.set_state(scope.name, version, json.dumps({**state, "sampler": moved.decode()}).encode())
            _, state = await self._state(scope.name)
        return state.get("sampler", "").encode(), state.get("policy", "")

    async def _sampler(self, name: str) -> bytes:
        return (await self._state(name))[1].get("sampler", "").encode()

    async def _state(self, name: str) -> tuple[int, dict[str, str]]:
        """Return the version and the content of a scope's state in the store: ``sampler`` and ``policy``, if set."""
        version, body = await self._store.state(name)
        state = json.loads(body) if body else {}
        return version, {key: str(value) for key, value in state.items()} if isinstance(state, dict) else {}
