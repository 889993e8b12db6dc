"""Curricula on offer: what each handle stands for, and what a trainer that asks for more is told.

A curriculum is one more split, ``train:<name>``, of each of its environments. Its index *i* is a **handle**, which
stands for a draw: the first opening of it makes the draw, those that follow join its group, and once ``group_size``
openings have, the handle stands for the next draw. What was drawn is kept in the store, so that all replicas, and the
next gateway, agree.

In an environment's own protocol all sessions are of that environment. So a curriculum of several ones is drawn from
within each by the weights of that one's components (the *scope* ``<name>@<environment>``); `sample` draws from all.
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
from gateway.core.ports.curricula import CurriculumStore, Drawn, Turn
from gateway.core.scaling import WINDOW_S
from gateway.core.session import GroupMembership
from gateway.tasks.curricula.definitions import from_document, splits_named
from gateway.tasks.curricula.model import Curriculum, scope_of, scopes
from gateway.tasks.curricula.sampling import TaskPlace
from gateway.tasks.curricula.stats import TaskStats
from gateway.tasks.curricula.tables import Rows, TaskTables, count_rows, parts_of
from gateway.tasks.curricula.weights import TaskWeights

logger = logging.getLogger(__name__)

FOLLOW_S: Final = 1.0
"""How often definitions that came by the API are looked for."""
JOINS: Final = 16
"""How often an opening tries to join a group whose turn others take meanwhile."""
LEAST_RATE: Final = 0.01
"""Draws a second below which nothing is kept ready for a curriculum: none for some minutes."""
MAX_LEAVING: Final = 10_000
"""Places in groups that are just being given back."""
MAX_SAMPLE: Final = 10_000


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a curriculum is drawn from."""

    number: int
    """Of the next draw, at the last look."""
    at: float
    rate: float = 0.0
    """Draws a second, averaged over some `WINDOW_S`."""

    def looked(self, number: int, now: float) -> Pace:
        """The pace after another look; draws that were forgotten begin at 0 again."""
        kept = math.exp(-(now - self.at) / WINDOW_S)
        return Pace(number, now, self.rate * kept + max(0, number - self.number) / WINDOW_S)


@dataclass(frozen=True, slots=True)
class Handed:
    """What a handle stands for, for one opening."""

    place: TaskPlace
    ticket: GroupMembership | None
    """None: the draw was for this opening alone."""
    policy: str
    """That was last said for the curriculum; empty: none was."""


class Curricula:
    """Draws tasks by what is known of them."""

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
            files: Those of the folder of curricula; one that comes by the API can't take a name of theirs.
        """
        self._store = store
        self._records = records
        self._tables = tables
        self.weights = TaskWeights(store=store, records=records, tables=tables)
        self._files = dict(files)
        self._catalog = catalog
        # The state: what the API has defined, and what goes on behind requests.
        self._defined: dict[str, Curriculum] = {}
        self._version = ""
        self._leaving: set[asyncio.Task[None]] = set()
        self._paces: dict[str, Pace] = {}
        self._expected: Mapping[EnvironmentName, Expected] = {}

    # -- what there is --------------------------------------------------------------------------------------------

    def all(self) -> list[Curriculum]:
        """All curricula, by name."""
        return [known for _, known in sorted({**self._defined, **self._files}.items())]

    def named(self, name: str) -> Curriculum:
        """One curriculum. Raises ``UnknownTask`` if there is none of that name."""
        known = self._files.get(name) or self._defined.get(name)
        if known is None:
            raise UnknownTask(f"there is no curriculum {name[:64]!r}")
        return known

    def is_offered(self, environment: str) -> bool:
        """Whether an environment of this name is on offer."""
        return environment.lower() in self._catalog.offered

    def is_in_file(self, name: str) -> bool:
        """Whether it stands in a file, and so can't be changed by the API."""
        return name in self._files

    def splits(self, environment: EnvironmentName) -> list[str]:
        """The splits that curricula are in *environment*."""
        return [PREFIX + known.name for known in self.all() if environment in known.environments]

    async def scope(self, environment: EnvironmentName, split: str) -> Curriculum | None:
        """Return what of a curriculum is drawn in *environment*, if *split* is one's: its name is that of the scope.

        Another replica may have been told of it just now.
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
        """What outcomes of *task*, an id, an alias or ``split/index``, are kept under.

        None: the environment has no such task, and none was played there (as one that came with its episode is), as far
        as this replica and the store know.

        Raises:
            GatewayError: workers can't be asked for their tasks, or the store does not answer.
        """
        if (key := self._records.find(environment, task)) is not None:
            return key
        split, _, index = task.rpartition("/")
        if split and index.isascii() and index.isdigit():  # a place in an image
            rows = await self._tables.of(environment, split)
            if int(index) < len(rows) and rows[int(index)].task == task:
                return task
        await self._records.write()  # an episode that has just ended may wait there
        return task if task in await self._records.of(environment) else None

    async def count(self, scope: Curriculum) -> int:
        """How many handles there are. Raises ``InvalidRequest``: a component has no task."""
        return scope.handles or count_rows(parts_of(scope, await self.weights.tables_of(scope)))

    # -- draws ----------------------------------------------------------------------------------------------------

    async def hand(self, scope: Curriculum, handle: int | None) -> Handed:
        """Join the group that *handle* stands for, with a draw if it has none; None: draw for one opening alone.

        Raises:
            InvalidRequest: a component or a stage has no task.
            StoreUnavailable: the store does not answer.
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
                    # Of another definition of that name, in a file that was changed.
                    await self._store.reset(scope.name)
        except BaseException:  # a cancellation too: a command that was on its way may have joined
            self.unused(ticket)
            raise
        self.unused(ticket)
        raise StoreUnavailable(f"handle {handle} of curriculum {scope.name!r} changes faster than it can be joined")

    def unused(self, ticket: GroupMembership | None) -> None:
        """Give an opening's place in its group back, behind whoever says so: nothing was opened with it."""
        if ticket is None:
            return
        if len(self._leaving) >= MAX_LEAVING:
            logger.warning("ticket_left curriculum=%s handle=%d", ticket.curriculum, ticket.handle)
            return
        task = asyncio.ensure_future(self._left(ticket))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def sample(self, scope: Curriculum, count: int) -> list[tuple[int, TaskPlace]]:
        """Draw *count* times, at most `MAX_SAMPLE`, for the one who asks alone. Raises as `hand`."""
        weighed = await self.weights.of(scope)
        first = await self._store.numbers(scope.name, count)
        return [(number, weighed.prepared.draw(number)) for number in range(first, first + count)]

    async def tag(self, name: str, policy: str) -> None:
        """Say which policy plays from now on: sessions that are opened by a handle are of it."""
        for scope in scopes(self.named(name)):
            await self.weights.note(scope.name, policy=policy)
            self.weights.forget(scope.name)

    async def reset(self, name: str) -> None:
        """Begin anew: draws, groups and stages are forgotten, records are not."""
        for scope in scopes(self.named(name)):
            await self._store.reset(scope.name)
            self.weights.forget(scope.name)

    # -- capacity ---------------------------------------------------------------------------------------------------

    def expected(self) -> Mapping[EnvironmentName, Expected]:
        """Openings that are foreseen: as many as are drawn of late, where the tasks are drawn from now.

        By the environment that sessions run in: splits with resources of their own have one.
        """
        return self._expected

    async def look_ahead(self, now: float) -> None:
        """Work out what is expected, at *now* by this process's clock. Raises ``StoreUnavailable``."""
        expected: dict[EnvironmentName, Expected] = {}
        for curriculum in self.all():
            for scope in scopes(curriculum):
                number = await self._store.numbers(scope.name, 0)
                pace = self._paces[scope.name] = self._paces.get(scope.name, Pace(number, now)).looked(number, now)
                if pace.rate < LEAST_RATE:
                    continue
                with contextlib.suppress(GatewayError):  # its tasks are gone, or its workers can't be asked for them
                    for (environment, split), share in (await self.weights.of(scope)).prepared.split_shares().items():
                        if share > 0:
                            rate = pace.rate * share * scope.group_size
                            name = self._runs_in(environment, split)
                            expected[name] = expected.get(name, Expected()) + Expected(rate, scope.group_size)
        self._expected = expected

    # -- definitions by the API -----------------------------------------------------------------------------------

    async def define(self, name: str, document: Mapping[str, Any]) -> Curriculum:
        """Offer a curriculum, or another one of that name; its draws go on where its handles are.

        Raises:
            InvalidRequest: the document is wrong, an environment is not on offer, a component or a stage has no task,
                or the name stands in a file; with every problem.
            GatewayError: workers can't be asked for their tasks.
        """
        if self.is_in_file(name):
            raise InvalidRequest(f"curriculum {name!r} stands in a file: change it there")
        tables = {
            (environment, split): await self._tables.of(environment, split)
            for environment, split in splits_named(document)
            if self.is_offered(environment)
        }

        def look(environment: EnvironmentName, split: str) -> Rows:
            if (table := tables.get((environment, split))) is None:
                raise UnknownEnvironment(f"no environment {environment[:64]!r} is on offer")
            return table

        curriculum = from_document(name, document, look)
        if (known := self._defined.get(name)) is not None and set(known.environments) != set(curriculum.environments):
            for scope in scopes(known):  # groups that are half open are of an environment that this one may not have
                await self._store.reset(scope.name)
        await self._store.define(name, json.dumps(document, separators=(",", ":")).encode())
        await self.refresh()
        return curriculum

    async def undefine(self, name: str) -> None:
        """Forget a curriculum that came by the API, with its draws. Raises ``UnknownTask``, ``InvalidRequest``."""
        if self.is_in_file(name):
            raise InvalidRequest(f"curriculum {name!r} stands in a file: remove it there")
        known = self.named(name)
        await self._store.undefine(name)
        for scope in scopes(known):
            await self._store.reset(scope.name)
        await self.refresh()

    async def refresh(self) -> None:
        """Take over what other replicas were told. Raises ``StoreUnavailable``."""
        if await self._store.definitions_version() == self._version:
            return
        version, bodies = await self._store.definitions()
        defined: dict[str, Curriculum] = {}
        for name, body in bodies.items():
            try:
                defined[name] = from_document(name, json.loads(body))
            except (InvalidRequest, ValueError) as error:  # of another version of the gateway
                logger.warning("curriculum_left_out name=%s error=%s", name, error)
        self._defined, self._version = defined, version
        self.weights.forget()

    async def run(self) -> None:
        """Follow definitions, and foresee what will be opened, until cancelled."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            try:
                await self.refresh()
                await self.look_ahead(time.monotonic())
            except StoreUnavailable:
                pass  # the link has logged it; what is known goes on being served
            except Exception:
                logger.exception("tick_failed loop=curricula")

    async def aclose(self) -> None:
        """Wait for places that are being given back."""
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
        with contextlib.suppress(StoreUnavailable):  # then its group's time ends it
            await self._store.leave(ticket.curriculum, ticket.handle, member=ticket.member)


def _written(place: TaskPlace) -> bytes:
    return json.dumps([place.environment, place.split, place.index, place.task], separators=(",", ":")).encode()


def _read(body: bytes) -> TaskPlace:
    environment, split, index, task = json.loads(body)
    return TaskPlace(environment, split, index, task)
