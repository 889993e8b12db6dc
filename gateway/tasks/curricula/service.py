"""Manages the available curricula, and draws tasks for trainers.

A curriculum is an additional split, ``train:<name>``, of each of its environments. Each index of this split is a
**handle**. The first opening of a handle makes a draw, and the next openings join the draw's group. Once the group has
``group_size`` openings, the next opening makes a new draw. The store keeps the draws, so that all replicas, and the
gateway after a restart, agree.

In an environment's own protocol all sessions belong to that environment. So a curriculum of several environments has a
*scope* in each, ``<name>@<environment>``, which draws by the weights of that environment's components.
`Curricula.sample` also draws from the curriculum as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from gateway.catalog.catalog import Catalog
from gateway.core.capacity import Expected
from gateway.core.curriculum import PREFIX
from gateway.core.errors import GatewayError, InvalidRequest, StoreUnavailable, UnknownEnvironment, UnknownTask
from gateway.core.ids import EnvironmentName
from gateway.core.periodic import pause
from gateway.core.ports.curricula import CurriculumStore, Drawn, Turn
from gateway.core.scaling import WINDOW_S
from gateway.core.session import GroupMembership
from gateway.core.task_name import TaskName
from gateway.tasks.curricula.definitions import from_document, splits_named
from gateway.tasks.curricula.model import Curriculum, is_index, scope_of, scopes
from gateway.tasks.curricula.sampling import TaskPlace
from gateway.tasks.curricula.stats import TaskStats
from gateway.tasks.curricula.tables import Rows, TaskTables, count_rows, parts_of
from gateway.tasks.curricula.weights import TaskWeights

logger = logging.getLogger(__name__)

FOLLOW_S: Final = 1.0
"""Seconds between two checks for definitions that arrived by the API."""
JOINS: Final = 16
"""Attempts of an opening to join a group while other openings take its turn."""
LEAST_RATE: Final = 0.01
"""Draws per second below which the gateway expects no openings: there was no draw for some minutes."""
MAX_LEAVING: Final = 10_000
"""Maximum number of places in groups that this replica releases concurrently."""
MAX_SAMPLE: Final = 10_000


@dataclass(frozen=True, slots=True)
class Pace:
    """The rate at which trainers draw from a curriculum."""

    number: int
    """Number of the next draw, at the last check."""
    at: float
    rate: float = 0.0
    """Draws per second, averaged over about `WINDOW_S`."""

    def looked(self, number: int, now: float) -> Pace:
        """Return the pace after another check. A reset, which restarts the numbers at 0, counts as no draws."""
        kept = math.exp(-(now - self.at) / WINDOW_S)
        return Pace(number, now, self.rate * kept + max(0, number - self.number) / WINDOW_S)


@dataclass(frozen=True, slots=True)
class Handed:
    """The result of a draw for one opening."""

    place: TaskPlace
    ticket: GroupMembership | None
    """The opening's group membership. None: the draw was for this opening alone."""
    policy: str
    """The policy's tag that the trainer last set for the curriculum. Empty: the trainer set no tag."""


class Curricula:
    """Draws tasks by their records, and manages the definitions of curricula."""

    def __init__(
        self,
        *,
        store: CurriculumStore,
        records: TaskStats,
        tables: TaskTables,
        files: Mapping[str, Curriculum],
        catalog: Catalog,
    ) -> None:
        """
        Args:
            files: The curricula of the folder. The API cannot use their names.
        """
        self._store = store
        self._records = records
        self._tables = tables
        self.weights = TaskWeights(store=store, records=records, tables=tables)
        self._files = dict(files)
        self._catalog = catalog
        # The state: the definitions of the API, and the work in the background.
        self._defined: dict[str, Curriculum] = {}
        self._version = ""
        self._leaving: set[asyncio.Task[None]] = set()
        self._paces: dict[str, Pace] = {}
        self._expected: Mapping[EnvironmentName, Expected] = {}

    # -- what there is --------------------------------------------------------------------------------------------

    def all(self) -> list[Curriculum]:
        """Return all curricula, sorted by name."""
        return [known for _, known in sorted({**self._defined, **self._files}.items())]

    def named(self, name: str) -> Curriculum:
        """Return one curriculum. Raises ``UnknownTask`` if no curriculum has that name."""
        known = self._files.get(name) or self._defined.get(name)
        if known is None:
            raise UnknownTask(f"there is no curriculum {name[:64]!r}")
        return known

    def is_offered(self, environment: str) -> bool:
        """Return True if an environment with this name is available."""
        return environment.lower() in self._catalog.offered

    def is_in_file(self, name: str) -> bool:
        """Return True if a file defines the curriculum, so that the API cannot change it."""
        return name in self._files

    def splits(self, environment: EnvironmentName) -> list[str]:
        """Return the splits of the curricula in *environment*."""
        return [PREFIX + known.name for known in self.all() if environment in known.environments]

    async def scope(self, environment: EnvironmentName, split: str) -> Curriculum | None:
        """Return the scope in *environment* of the curriculum of *split*, or None if no curriculum has it.

        Refresh the definitions on a miss, because another replica may just have received the curriculum.
        """
        if not split.startswith(PREFIX):
            return None
        name = split.removeprefix(PREFIX)
        if (found := self._within(environment, name)) is None:
            with contextlib.suppress(StoreUnavailable):
                await self.refresh()
            found = self._within(environment, name)
        return found

    async def record_key(self, environment: EnvironmentName, task: str) -> str | None:
        """Return the record key of *task*, which is an id, an alias or ``split/index``.

        Return None if the environment has no such task and the store has no record of it. A task that a request brought
        whole has only a record; of several with one id, it is the one that was played last.

        Raises:
            GatewayError: The gateway cannot query workers for their tasks, or the store does not answer.
        """
        if (key := self._records.find(environment, task)) is not None:
            return key
        split, _, index = task.rpartition("/")
        if split and is_index(index):  # a place in an image
            rows = await self._tables.of(environment, split)
            if int(index) < len(rows) and rows[int(index)].task == task:
                return task
        await self._records.write()  # the outcome of an episode that has just ended may wait there
        known = (await self._records.of(environment)).values()
        found = [one for one in known if task in (one.task, TaskName.of(one.task).id)]
        return max(found, key=lambda one: one.seen_at).task if found else None

    async def count(self, scope: Curriculum) -> int:
        """Return the number of handles. Raises ``InvalidRequest`` if a component has no task."""
        return scope.handles or count_rows(parts_of(scope, await self.weights.tables_of(scope)))

    # -- draws ----------------------------------------------------------------------------------------------------

    async def hand(self, scope: Curriculum, handle: int | None) -> Handed:
        """Join the present group of *handle*, or make a new draw. Without a *handle*, draw for this opening alone.

        Raises:
            InvalidRequest: A component or a stage has no task.
            StoreUnavailable: The store does not answer, or the handle changes too fast to be joined.
        """
        if handle is None:
            weighed = await self.weights.of(scope)
            number = await self._store.numbers(scope.name, 1)
            return Handed(weighed.prepared.draw(number), None, weighed.policy)
        ticket = GroupMembership(scope.name, handle, uuid.uuid4().hex)
        try:
            for _ in range(JOINS):
                found: Drawn | Turn | None = await self._store.join(
                    scope.name, handle, member=ticket.member, group_size=scope.group_size, group_s=scope.group_s
                )
                if isinstance(found, Turn):
                    weighed = await self.weights.of(scope)
                    place = _written(weighed.prepared.draw(found.number))
                    found = await self._store.propose(scope.name, handle, found, place, member=ticket.member)
                if found is not None:
                    drawn = _read(found.place)
                    if drawn.environment in scope.environments:
                        ticket = replace(ticket, number=found.number, group_size=scope.group_size)
                        return Handed(drawn, ticket, await self.weights.recent_policy(scope))
                    # The draw comes from an earlier definition of that name, in a file that was changed.
                    await self._store.reset(scope.name)
        except BaseException:  # a cancellation too: a command in flight may have joined
            self.unused(ticket)
            raise
        self.unused(ticket)
        raise StoreUnavailable(f"handle {handle} of curriculum {scope.name!r} changes faster than it can be joined")

    def unused(self, ticket: GroupMembership | None) -> None:
        """Release an opening's place in its group in the background, because no session opened with it."""
        if ticket is None:
            return
        if len(self._leaving) >= MAX_LEAVING:
            logger.warning("ticket_left curriculum=%s handle=%d", ticket.curriculum, ticket.handle)
            return
        task = asyncio.ensure_future(self._left(ticket))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def sample(self, scope: Curriculum, count: int) -> list[tuple[int, TaskPlace]]:
        """Make *count* draws, at most `MAX_SAMPLE`, for the caller alone, without groups. Raises as `hand`."""
        weighed = await self.weights.of(scope)
        first = await self._store.numbers(scope.name, count)
        return [(number, weighed.prepared.draw(number)) for number in range(first, first + count)]

    async def tag(self, name: str, policy: str) -> None:
        """Set the tag of the policy that plays from now on. Sessions on drawn tasks get this tag."""
        for scope in scopes(self.named(name)):
            await self.weights.note(scope.name, policy=policy)
            self.weights.forget(scope.name)

    async def reset(self, name: str) -> None:
        """Restart the curriculum: forget its draws, groups and stages, but keep the records."""
        for scope in scopes(self.named(name)):
            await self._store.reset(scope.name)
            self.weights.forget(scope.name)

    # -- capacity ---------------------------------------------------------------------------------------------------

    def expected(self) -> Mapping[EnvironmentName, Expected]:
        """Return the expected openings by the environment in which the sessions run.

        The forecast combines the recent rate of draws with the present shares of the splits. A split with its own
        resources has an environment of its own.
        """
        return self._expected

    async def look_ahead(self, now: float) -> None:
        """Compute the expected openings at *now*, by this process's clock. Raises ``StoreUnavailable``."""
        expected: dict[EnvironmentName, Expected] = {}
        for curriculum in self.all():
            for scope in scopes(curriculum):
                number = await self._store.numbers(scope.name, 0)
                pace = self._paces[scope.name] = self._paces.get(scope.name, Pace(number, now)).looked(number, now)
                if pace.rate < LEAST_RATE:
                    continue
                with contextlib.suppress(GatewayError):  # its tasks are gone, or its workers cannot be queried
                    for (environment, split), share in (await self.weights.of(scope)).prepared.split_shares().items():
                        if share > 0:
                            rate = pace.rate * share * scope.group_size
                            name = self._runs_in(environment, split)
                            expected[name] = expected.get(name, Expected()) + Expected(rate, scope.group_size)
        self._expected = expected

    # -- definitions by the API -----------------------------------------------------------------------------------

    async def define(self, name: str, document: Mapping[str, Any]) -> Curriculum:
        """Define or redefine a curriculum. Its handles keep their present draws unless its environments change.

        Raises:
            InvalidRequest: The document is invalid, an environment is not available, a component or a stage has no
                task, or a file has the name. The message has all problems.
            GatewayError: The gateway cannot query workers for their tasks.
        """
        if self.is_in_file(name):
            raise InvalidRequest(f"curriculum {name!r} is defined in a file: change it there")
        tables = {
            (environment, split): await self._tables.of(environment, split)
            for environment, split in splits_named(document)
            if self.is_offered(environment)
        }

        def look(environment: EnvironmentName, split: str) -> Rows:
            if (table := tables.get((environment, split))) is None:
                raise UnknownEnvironment(f"no environment {environment[:64]!r} is available")
            return table

        curriculum = from_document(name, document, look)
        if (known := self._defined.get(name)) is not None and set(known.environments) != set(curriculum.environments):
            for scope in scopes(known):  # its open groups may belong to an environment that the new definition lacks
                await self._store.reset(scope.name)
        await self._store.define(name, json.dumps(document, separators=(",", ":")).encode())
        await self.refresh()
        return curriculum

    async def undefine(self, name: str) -> None:
        """Remove a curriculum that the API defined, with its draws. Raises ``UnknownTask``, ``InvalidRequest``."""
        if self.is_in_file(name):
            raise InvalidRequest(f"curriculum {name!r} is defined in a file: remove it there")
        known = self.named(name)
        await self._store.undefine(name)
        for scope in scopes(known):
            await self._store.reset(scope.name)
        await self.refresh()

    async def refresh(self) -> None:
        """Fetch the definitions that other replicas received. Raises ``StoreUnavailable``."""
        if await self._store.definitions_version() == self._version:
            return
        version, bodies = await self._store.definitions()
        defined: dict[str, Curriculum] = {}
        for name, body in bodies.items():
            try:
                defined[name] = from_document(name, json.loads(body))
            except (InvalidRequest, ValueError) as error:  # from another version of the gateway
                logger.warning("curriculum_left_out name=%s error=%s", name, error)
        self._defined, self._version = defined, version
        self.weights.forget()

    async def run(self) -> None:
        """Refresh the definitions and the expected openings every `FOLLOW_S` seconds until cancelled."""
        while True:
            await pause(FOLLOW_S)
            try:
                await self.refresh()
                await self.look_ahead(time.monotonic())
            except StoreUnavailable:
                pass  # the store's client has logged it; the replica serves the known curricula
            except Exception:
                logger.exception("tick_failed loop=curricula")

    async def aclose(self) -> None:
        """Wait up to 5 s for the releases of places in groups."""
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=5.0)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _within(self, environment: EnvironmentName, name: str) -> Curriculum | None:
        known = self._files.get(name) or self._defined.get(name)
        return scope_of(known, environment) if known is not None and environment in known.environments else None

    def _runs_in(self, environment: EnvironmentName, split: str) -> EnvironmentName:
        found = self._catalog.offered.get(environment)
        return found.splits.get(split, found).name if found is not None else environment

    async def _left(self, ticket: GroupMembership) -> None:
        with contextlib.suppress(StoreUnavailable):  # then the group ends after ``group_s``
            await self._store.leave(ticket.curriculum, ticket.handle, member=ticket.member)


def _written(place: TaskPlace) -> bytes:
    return json.dumps([place.environment, place.split, place.index, place.task], separators=(",", ":")).encode()


def _read(body: bytes) -> TaskPlace:
    environment, split, index, task = json.loads(body)
    return TaskPlace(environment, split, index, task)
