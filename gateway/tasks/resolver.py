"""Finds the task that a trainer requests through any protocol.

The gateway finds, checks and draws the task before it changes a session, so that an invalid request does not disturb a
running episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from gateway.catalog.catalog import Catalog
from gateway.core.curriculum import PREFIX
from gateway.core.environment import Environment, SeedRule, UpstreamKind
from gateway.core.errors import (
    EnvironmentUnavailable,
    PoolExhausted,
    StoreUnavailable,
    UnknownSplit,
    UnknownTask,
    WrongEnvironment,
)
from gateway.core.ids import EnvironmentName
from gateway.core.ports.tasks import BeingReplaced, TaskQueries
from gateway.core.session import Group, SessionSetup
from gateway.core.worker import WorkerTasks
from gateway.tasks.curricula.model import is_index
from gateway.tasks.lookup import TaskLookup
from gateway.tasks.registry import TaskRegistry
from gateway.tasks.schema import parse
from gateway.tasks.task_ref import SEED_BITS, TaskRef, seed_of

SHOWN_CHARS: Final = 200
"""Characters of an id or a value that an error message shows."""
REPLACED_S: Final = 10.0
"""Seconds for which workers that are being replaced are queried again."""
QUERY_PAUSE_S: Final = 0.5
GAPS_MAX: Final = 1000
"""Maximum number of consecutive indices that the resolver tries in order to pass removed tasks."""


_Values = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRequest:
    """The task that a trainer requests: by a whole task, ids, values or a place, or without any of these."""

    spec: Mapping[str, Any] | None = None
    """A task as an object. An object with only an id, or a listed task's public view, is looked up by the id."""
    ids: Sequence[str] = ()
    """Spellings of one id or alias, in the order in which the resolver tries them."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values that the task must have, by their dotted paths in it."""
    split: str | None = None
    index: int | None = None
    """Place of the task in its split. -1 is the last task."""
    seed: int | None = None
    """Seed that selects among the matching tasks. None: the choice is random."""
    usual_split: str = ""
    """Split of a request that names none, and the preferred split for an id that several splits have."""
    may_pass_place: bool = False
    """True if a third-party OpenEnv server whose reset reads split and index may receive them unchanged."""
    numbers_are_indices: bool = False
    """True if a number that is not the id of a task may be an index in the environment's AReaL split."""
    is_checked: bool = False
    """True if a whole task must have the form of the gateway's own tasks."""
    passes_unknown: bool = False
    """True if a server of the gateway's own images, or an ORS server, receives an id unknown to the gateway."""


class TaskResolver:
    """Finds tasks in files, in the store, in curricula, and among the workers' own tasks."""

    def __init__(self, *, lookup: TaskLookup, queries: TaskQueries, catalog: Catalog) -> None:
        self.lookup = lookup
        """The look-up of tasks, which listings use directly."""
        self._queries = queries
        self._catalog = catalog
        self._fields = TaskFields()

    async def resolve(self, environment: Environment, request: TaskRequest) -> TaskRef:
        """Find the task of *request*. For a curriculum, draw a task, whose group membership the caller must release.

        Raises:
            UnknownTask, WrongEnvironment: There is no such task, or the task belongs to another environment.
            TaskInvalid: The request has a whole task, which is malformed.
            InvalidRequest, StoreUnavailable: As `CurriculumIndices.draw`.
            PoolExhausted, EnvironmentUnavailable: The gateway could query no worker for its tasks.
        """
        task = await self._find(environment, request)
        if task.handle is None:
            return task
        return await self.lookup.indices.draw(task.handle, partial(self.lookup.at, environment))

    @contextlib.asynccontextmanager
    async def admitted(self, environment: Environment, setup: SessionSetup) -> AsyncIterator[None]:
        """Take one of the starts that the task's ``rate_limit`` allows, for a session that the context opens.

        If the context fails, release a drawn task's place in its group. Raises as `RuntimeTasks.admit`.
        """
        with self.lookup.indices.held(setup.ticket) if setup.ticket is not None else contextlib.nullcontext():
            limit = setup.spec.get("rate_limit")
            # In the own tasks of a third-party image, ``rate_limit`` may have any meaning.
            is_images = environment.server.is_foreign and (setup.split or not isinstance(limit, Mapping))
            if limit is not None and not is_images:
                await self.lookup.tasks.admit(setup.spec, environment.name)
            yield

    def passes_place(self, environment: Environment, request: TaskRequest) -> bool:
        """Return True if *request* names its task only by arguments that the image's own reset reads.

        The gateway does not look such a task up, and adds nothing to the reset's arguments.
        """
        if not request.may_pass_place or request.spec is not None or request.ids:
            return False
        if not self.lookup.asks(environment) or environment.wire is not UpstreamKind.OPENENV:
            return False
        split = request.split or request.usual_split
        if split.startswith(PREFIX) or request.split in self.lookup.registered_splits(environment):
            return False
        given = {key for key in ("split", "index") if getattr(request, key) is not None}
        return given <= set(environment.resets.keys)

    async def _find(self, environment: Environment, request: TaskRequest) -> TaskRef:
        if request.values:
            return await self._with_values(environment, request)
        ids = request.ids
        if request.spec is not None:
            id = request.spec.get("id")
            if not isinstance(id, str):
                return await self._given(environment, request.spec, is_checked=request.is_checked)
            if request.spec.keys() != {"id"}:
                listed = await self.lookup.of_view(environment, request.spec)
                listed = listed or self.lookup.copied(environment, request.spec)
                return listed or await self._given(environment, request.spec, is_checked=request.is_checked)
            ids = ids or (id,)
        if ids:
            return await self._named(environment, ids, request)
        if self.passes_place(environment, request):
            return TaskRef(spec={}, split=request.split or "", index=request.index)
        return await self._placed(environment, request)

    # -- a whole task ---------------------------------------------------------------------------------------------

    async def _given(self, environment: Environment, spec: Mapping[str, Any], *, is_checked: bool) -> TaskRef:
        if environment.wire is not UpstreamKind.OWN and self.lookup.asks(environment):
            task = await self.lookup.recognised(environment, spec)
            # An image's own task may have any form. Any other task must have the form of the gateway's tasks.
            if task.is_images or (environment.wire is not UpstreamKind.OPENENV and not spec.get("env_type")):
                return task
        if not is_checked:
            return TaskRef(spec=spec)
        kind = spec.get("env_type")
        if isinstance(kind, str) and kind not in (environment.name, *environment.env_types):
            raise WrongEnvironment(
                f"env_type: the task belongs to environment {kind[:64]!r}, not to {environment.name!r}"
            )
        return TaskRef(spec=parse(spec, isolation=environment.isolation))

    # -- by id ----------------------------------------------------------------------------------------------------

    async def _named(self, environment: Environment, ids: Sequence[str], request: TaskRequest) -> TaskRef:
        try:
            return await self.lookup.find(environment, *ids, prefer=request.split or request.usual_split)
        except UnknownTask:
            pass
        except StoreUnavailable:  # a task of this id may have been added elsewhere; else the number is an index
            task = self.lookup.numbered(environment, ids[0]) if request.numbers_are_indices else None
            if task is None:
                raise
            return task
        if request.passes_unknown and environment.wire in (UpstreamKind.OWN, UpstreamKind.ORS):
            return TaskRef(spec={"id": ids[0]})  # the environment may know the id, or its tasks may consist of an id
        if request.numbers_are_indices and is_index(ids[0]):
            return await self._numbered(environment, int(ids[0]))
        self._refuse_id_of_another(environment, ids[0])
        if environment.wire is not UpstreamKind.OWN:
            return await self._of_image(environment, ids)
        known = await self._known_to_workers(environment, f"task {ids[0][:SHOWN_CHARS]!r}")
        for id in ids:
            if (task := await self.lookup.images_own(environment, id)) is not None:
                return task
        for id in ids:
            if id in known.tasks:
                return TaskRef(spec={"id": id})
        failed = "; ".join(f"{module}: {reason}" for module, reason in known.failed.items())
        raise _unknown_id(ids[0], f" (modules that did not load: {failed})" if failed else "")

    async def _of_image(self, environment: Environment, ids: Sequence[str]) -> TaskRef:
        for id in reversed(ids):  # the id without the environment's name first: an AReaL server takes any id
            task = await self.lookup.images_own(environment, id)
            if task is None and environment.wire is UpstreamKind.OPENENV:
                task = await self.lookup.recognised(environment, {"id": id})
            if task is not None and task.is_images:
                return task
        raise _unknown_id(ids[0])

    async def _numbered(self, environment: Environment, index: int) -> TaskRef:
        """Return the task at *index* in the environment's AReaL split, or in an image's first split."""
        split = await self.lookup.areal_split(environment)
        try:
            return await self.lookup.at(environment, split, index)
        except UnknownSplit as error:
            raise UnknownTask(f"{environment.name!r} has no split {split!r}, to which integer indices refer") from error
        except UnknownTask as error:
            count = await self.lookup.count(environment, split)
            raise UnknownTask(f"split {split!r} of {environment.name!r} has the indices 0 to {count - 1}") from error

    def _refuse_id_of_another(self, environment: Environment, id: str) -> None:
        """Raise ``WrongEnvironment`` if *id* begins with another environment's name, or names a task of it."""
        prefix = id.partition("/")[0]
        for other in self._catalog:
            if other.name != environment.name and prefix in (other.name, *other.env_types):
                raise WrongEnvironment(
                    f"task {id[:SHOWN_CHARS]!r} belongs to environment {other.name!r}, not to {environment.name!r}"
                )
        try:
            self.lookup.registry.get(environment.name, id)
        except WrongEnvironment:
            raise
        except UnknownTask:
            return

    async def _known_to_workers(self, environment: Environment, what: str) -> WorkerTasks:
        """Query the workers for the tasks that they know. If the workers are being replaced, wait for the new workers.

        Raises:
            PoolExhausted, EnvironmentUnavailable: The gateway could query no worker. The message names *what*.
        """
        deadline = time.monotonic() + REPLACED_S
        while True:
            try:
                return await self._queries.registered(environment)
            except (PoolExhausted, EnvironmentUnavailable) as error:
                if not isinstance(error, BeingReplaced) or time.monotonic() + QUERY_PAUSE_S >= deadline:
                    message = f"{what} is in no file, and no worker could be asked for it: {error.detail}"
                    raise type(error)(message, retry_after_s=error.retry_after_s) from error
            await asyncio.sleep(QUERY_PAUSE_S)

    # -- by values ------------------------------------------------------------------------------------------------

    async def _with_values(self, environment: Environment, request: TaskRequest) -> TaskRef:
        found = await self._registered_with_values(environment, request)
        if not found:
            await self.lookup.refresh()
            found = await self._registered_with_values(environment, request)
        if not found and request.split is None:
            known = await self._known_to_workers(environment, "a task with these values")
            found = [
                TaskRef(spec={"id": id})
                for id, row in known.tasks.items()
                if all(value_at(row, place) == value for place, value in request.values.items())
            ]
        if not found:
            keys = {place: key for key, place in environment.openenv.task_keys.items()}
            wanted = " and ".join(
                f"{keys.get(place, place)} {str(value)[:SHOWN_CHARS]!r}" for place, value in request.values.items()
            )
            where = f" in split {request.split!r}" if request.split is not None else ""
            raise UnknownTask(f"Unknown task: no task of {environment.name!r}{where} has {wanted}")
        return found[request.seed % len(found)] if request.seed is not None else random.choice(found)

    async def _registered_with_values(self, environment: Environment, request: TaskRequest) -> list[TaskRef]:
        """Return the registered tasks with these values from the first split that has any."""
        registry, name = self.lookup.registry, environment.name
        splits = self.lookup.registered_splits(environment)
        for split in sorted(splits, key=lambda one: one != request.usual_split):
            if request.split is None or split == request.split:
                indices = await self._fields.find(registry, name, split, request.values)
                if indices:
                    return [TaskRef(spec=registry.task(name, split, at), split=split, index=at) for at in indices]
        return []

    # -- by split and index ---------------------------------------------------------------------------------------

    async def _placed(self, environment: Environment, request: TaskRequest) -> TaskRef:
        split = request.split
        if split is None:
            split = await self.lookup.usual_split(environment, request.usual_split)
        if split is None and request.index is None:
            return TaskRef(spec={})  # an environment without tasks chooses how an episode starts
        split = request.usual_split if split is None else split
        if request.index is not None:
            return await self.lookup.at(environment, split, request.index)
        drawn = None
        if request.seed is None and split.startswith(PREFIX):
            drawn = await self.lookup.indices.next_of(environment, split)
        if drawn is not None:
            return drawn
        count = await self.lookup.count(environment, split)
        first = 0 if count == 0 else random.randrange(count) if request.seed is None else request.seed % count
        for step in range(min(count, GAPS_MAX)):
            with contextlib.suppress(UnknownTask):  # removed: indices never shift
                return await self.lookup.at(environment, split, (first + step) % count)
        raise UnknownTask(f"split {split!r} has no task")


def session_setup(
    environment: Environment,
    task: TaskRef,
    *,
    seed: int | None = None,
    config: Mapping[str, Any] | None = None,
    secrets: Mapping[str, str] = MappingProxyType({}),
    toolset: str = "",
    episode: str = "",
    policy: str = "",
    group: Group | None = None,
) -> SessionSetup:
    """Return the setup that a worker receives for *task* and the trainer's other values; see ``SessionSetup``.

    *policy* takes precedence over the curriculum's policy. Without a *seed* of the trainer, a listed task has its own
    seed, so that it begins alike every time. Otherwise the members of a group share a seed.
    """
    name = task.name
    if environment.wire is UpstreamKind.ORS:
        seed = None  # the standard servers take none
    elif seed is None:
        group_of_all = task.ticket.group if task.ticket is not None else group
        seed = _usual_seed(environment, task, name.id or name.digest, group_of_all, config)
    return SessionSetup(
        spec=task.spec,
        task=name.key,
        place=task.place,
        seed=seed,
        config=config,
        secrets=secrets,
        split=task.split if task.is_images else "",  # the worker knows no other splits
        index=task.index if task.is_images else None,
        toolset=toolset,
        episode=episode,
        of_split=task.split,
        policy=policy or task.policy,
        group=group,
        ticket=task.ticket,
    )


def _usual_seed(
    environment: Environment, task: TaskRef, name: str, group: Group | None, config: Mapping[str, Any] | None
) -> int | None:
    """Return the seed of an episode whose trainer gives none; None: its server takes no seed, or chooses one."""
    if environment.wire is not UpstreamKind.OWN:
        if environment.wire is UpstreamKind.OPENENV and "seed" not in environment.resets.keys:
            return None
        # The server finds this seed in the task or the configuration. Another one would replace it.
        places = (config, task.spec.get("config"), task.spec.get("environment_config"), task.spec)
        said = [place["seed"] for place in places if isinstance(place, Mapping) and "seed" in place]
        if said:
            return said[0] if isinstance(said[0], int) and not isinstance(said[0], bool) else None
    if environment.seed_rule is SeedRule.TASK and task.is_listed and name:
        return seed_of(name)
    if group is not None:
        return seed_of(group.name)
    # Drawn here and not in the worker, so that the step log has it.
    return random.getrandbits(SEED_BITS) if environment.wire is UpstreamKind.OWN else None


def _unknown_id(id: str, why: str = "") -> UnknownTask:
    return UnknownTask(f"Unknown task: {id[:SHOWN_CHARS]}{why}")


class TaskFields:
    """Caches the indices of tasks by the tasks' values."""

    def __init__(self) -> None:
        self._known: dict[tuple[EnvironmentName, str, tuple[str, ...]], tuple[object, dict[_Values, list[int]]]] = {}
        """Environment, split and paths → the indexed tasks, and the indices of each combination of values."""

    async def find(
        self, registry: TaskRegistry, environment: EnvironmentName, split: str, wanted: Mapping[str, Any]
    ) -> Sequence[int]:
        """Return the indices in *split* of the tasks that have the values *wanted*, given by their dotted paths."""
        places = tuple(sorted(wanted))
        tasks = registry.all(environment, split)  # the same object for as long as nothing has changed
        known = self._known.get((environment, split, places))
        if known is None or known[0] is not tasks:
            # A thread indexes the tasks, because a split may have a hundred thousand.
            known = tasks, await asyncio.to_thread(_indexed, tasks, places)
            self._known[environment, split, places] = known
        return known[1].get(tuple(_written(wanted[place]) for place in places), ())


def value_at(task: Mapping[str, Any], place: str) -> Any:
    """Return the value at *place*, a path of keys joined by dots, or None if the task has no such value."""
    found: Any = task
    for key in place.split("."):
        if not isinstance(found, Mapping):
            return None
        found = found.get(key)
    return found


def _indexed(tasks: Sequence[bytes | None], places: Sequence[str]) -> dict[_Values, list[int]]:
    found: defaultdict[_Values, list[int]] = defaultdict(list)
    for index, raw in enumerate(tasks):
        if raw is not None:
            task = json.loads(raw)
            found[tuple(_written(value_at(task, place)) for place in places)].append(index)
    return dict(found)


def _written(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
