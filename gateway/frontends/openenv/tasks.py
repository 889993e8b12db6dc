"""Which task a reset means: an id, a task as an object, split and index, a seed, or none of these.

A task is looked up, checked and admitted before anything is touched: whatever is wrong here leaves the episode that
runs as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from gateway.catalog.catalog import Catalog
from gateway.catalog.toml import RESET_KEYS
from gateway.core.curriculum import PREFIX
from gateway.core.environment import Environment, UpstreamKind
from gateway.core.errors import (
    EnvironmentUnavailable,
    PoolExhausted,
    UnknownTask,
    WrongEnvironment,
    unknown_index,
    unknown_split,
)
from gateway.core.ports.tasks import TaskQueries
from gateway.core.worker import WorkerTasks
from gateway.frontends.openenv.frames import Json, ResetWish, invalid
from gateway.sessions.worker_queries import BeingReplaced
from gateway.tasks.fields import TaskFields, value_at
from gateway.tasks.lookup import TaskLookup
from gateway.tasks.schema import parse
from gateway.tasks.task_ref import TaskRef

NAME_MAX: Final = 200
"""Of what is told of a task to people."""
REPLACED_S: Final = 10.0
"""How long workers that are being replaced are asked again."""
ASK_PAUSE_S: Final = 0.5
GAPS_MAX: Final = 1000
"""How many removed tasks in a row are passed over in search of one that is there."""


class TaskChooser:
    """Finds tasks among those on offer, and among those that an environment's workers know by themselves."""

    def __init__(self, *, lookup: TaskLookup, queries: TaskQueries, catalog: Catalog) -> None:
        self._lookup = lookup
        self._queries = queries
        self._catalog = catalog
        self._fields = TaskFields()

    async def choose(self, environment: Environment, wish: ResetWish) -> TaskRef:
        """Find the task of *wish*.

        Raises:
            Refused: the wish has a key that nobody would look at, or says twice which task it means.
            UnknownTask, WrongEnvironment, TaskInvalid: there is none; it is another environment's; it is malformed.
        """
        if wish.index is not None and wish.index < 0 and not self.passes_place(environment, wish):
            told = "Input should be greater than or equal to 0"
            entry = {"type": "greater_than_equal", "loc": ["data", "index"], "msg": told, "input": wish.index}
            raise invalid([entry], f"Invalid message: data.index: {told}")
        if wish.config:
            await self._refuse_unknown_keys(environment, wish)
        places = environment.openenv.task_keys
        if selected := {place: wish.config[key] for key, place in places.items() if wish.config.get(key) is not None}:
            return await self._selected(environment, wish, selected)
        chosen = await self._drawn(environment, wish)
        return chosen if chosen is not None else await self._choose(environment, wish)

    @staticmethod
    def config(environment: Environment, wish: ResetWish) -> Json:
        """What of *wish* the environment itself is told."""
        return {key: value for key, value in wish.config.items() if key not in environment.openenv.task_keys}

    async def _refuse_unknown_keys(self, environment: Environment, wish: ResetWish) -> None:
        """Refuse keys that would be dropped silently.

        An OpenEnv image's own reset is told all of them, as by its own clients; other servers say what they take.

        Raises:
            Refused: there are such.
        """
        given = {key: value for key, value in self.config(environment, wish).items() if value is not None}
        if not given or environment.wire is UpstreamKind.OPENENV:
            return
        taken = (await self._queries.registered(environment)).config_keys
        if taken is None:
            return
        unknown = [key for key in given if key not in taken]
        if not unknown:
            return
        entries = [
            {
                "type": "extra_forbidden",
                "loc": ["data", key],
                "msg": "Extra inputs are not permitted",
                "input": given[key],
            }
            for key in unknown
        ]
        known = ", ".join((*RESET_KEYS, *environment.openenv.task_keys, *taken))
        told = ", ".join(repr(key[:NAME_MAX]) for key in unknown)
        raise invalid(entries, f"Invalid message: data: reset of {environment.name!r} has no {told}; it takes {known}")

    async def _selected(self, environment: Environment, wish: ResetWish, wanted: Json) -> TaskRef:
        """The task that has the values *wanted*, by their places in it; of several the seed's, or one by chance."""
        keys = [key for key in environment.openenv.task_keys if wish.config.get(key) is not None]
        if wish.task is not None or wish.index is not None:
            twice = "task" if wish.task is not None else "index"
            entry = {"type": "value_error", "loc": ["data", keys[0]], "msg": f"{twice} is given too", "input": None}
            raise invalid([entry], f"Invalid message: data: only one of {twice} and {', '.join(keys)} may be given")
        found = await self._with_values(environment, wish, wanted)
        if not found:
            await self._lookup.refresh()
            found = await self._with_values(environment, wish, wanted)
        if not found and wish.split is None:
            known = await self._asked_for_tasks(environment, "a task with these values")
            found = [
                TaskRef(spec={"id": id})
                for id, row in known.tasks.items()
                if all(value_at(row, place) == value for place, value in wanted.items())
            ]
        if not found:
            told = " and ".join(f"{key} {str(wish.config[key])[:NAME_MAX]!r}" for key in keys)
            where = f" in split {wish.split!r}" if wish.split is not None else ""
            raise UnknownTask(f"Unknown task: no task of {environment.name!r}{where} has {told}")
        return found[wish.seed % len(found)] if wish.seed is not None else random.choice(found)

    async def _with_values(self, environment: Environment, wish: ResetWish, wanted: Json) -> list[TaskRef]:
        """The registry's tasks with these values, all of one split."""
        splits = self._registered_splits(environment)
        for split in sorted(splits, key=lambda name: name != environment.openenv.split):
            if wish.split is None or split == wish.split:
                indices = await self._fields.find(self._lookup.registry, environment.name, split, wanted)
                if indices:
                    tasks = self._lookup.registry
                    return [
                        TaskRef(spec=tasks.task(environment.name, split, index), split=split, index=index)
                        for index in indices
                    ]
        return []

    async def _drawn(self, environment: Environment, wish: ResetWish) -> TaskRef | None:
        """What a curriculum draws for *wish*; None if it means none of a curriculum's."""
        task: object = wish.task
        if isinstance(task, dict):
            task = task["id"] if task.keys() == {"id"} else None
        offer: TaskRef | None = None
        if isinstance(task, str) and task.startswith(PREFIX):
            offer = await self._lookup.find(environment, task, prefer="")
        elif wish.task is None and (split := wish.split or environment.openenv.split).startswith(PREFIX):
            if wish.index is None and wish.seed is None:
                offer = await self._lookup.handles.next_of(environment, split)
            elif (count := await self._lookup.count(environment, split)) > 0:
                index = wish.index if wish.index is not None else (wish.seed or 0) % count
                offer = await self._lookup.at(environment, split, index)
        if offer is None or offer.handle is None:
            return None
        return await self._lookup.drawn(environment, offer)

    async def _choose(self, environment: Environment, wish: ResetWish) -> TaskRef:
        task = wish.task
        if isinstance(task, dict):
            if task.keys() != {"id"} or not isinstance(task["id"], str):
                return await self._inline(environment, task)
            task = task["id"]
        if isinstance(task, str):
            return await self._by_id(environment, task, prefer=wish.split or environment.openenv.split)
        if self._lookup.asks(environment):
            return await self._by_place_of_image(environment, wish)
        return await self._lookup.sure(lambda: self._by_place(environment, wish))

    def passes_place(self, environment: Environment, wish: ResetWish) -> bool:
        """Whether *wish* names no task but in words that the image's own reset understands, or leaves it to the image.

        Such a reset is the image's matter: nobody looks its task up, and nothing of ours is added.
        """
        if environment.wire is not UpstreamKind.OPENENV or wish.task is not None or not self._lookup.asks(environment):
            return False
        given = {key for key in ("split", "index") if getattr(wish, key) is not None}
        if wish.split is not None and wish.split in self._registered_splits(environment):
            return False
        return given <= set(environment.resets.keys)

    def _registered_splits(self, environment: Environment) -> list[str]:
        return [split.name for split in self._lookup.registry.splits(environment.name)]

    async def _inline(self, environment: Environment, task: Json) -> TaskRef:
        """A task that the client sent whole."""
        if self._lookup.asks(environment) and environment.wire is not UpstreamKind.OWN:
            own = await self._lookup.recognised(environment, task)
            # What an image hands out may be of any form; what it does not know as its own has the form of all tasks.
            if own.is_images or (environment.wire is not UpstreamKind.OPENENV and not task.get("env_type")):
                return own
        _refuse_stranger(environment, task)
        checked = parse(task, isolation=environment.isolation)
        return TaskRef(spec=checked.to_dict())

    async def _by_id(self, environment: Environment, id: str, *, prefer: str) -> TaskRef:
        names = list(_spellings(environment, id))
        with contextlib.suppress(UnknownTask):
            return await self._lookup.find(environment, *names, prefer=prefer)
        self._refuse_other_environments(environment, id)
        if environment.wire is not UpstreamKind.OWN:
            return await self._of_image(environment, id, names)
        known = await self._asked_for_tasks(environment, f"task {id[:NAME_MAX]!r}")
        for name in names:
            if (offer := await self._lookup.images_own(environment, name)) is not None:
                return offer
        for name in names:
            if name in known.tasks:
                return TaskRef(spec={"id": name})
        self._refuse_known_elsewhere(environment, id)
        failed = "; ".join(f"{module}: {reason}" for module, reason in known.failed.items())
        told = f" (modules that did not load: {failed})" if failed else ""
        raise UnknownTask(f"Unknown task: {id[:NAME_MAX]}{told}")

    async def _of_image(self, environment: Environment, id: str, names: list[str]) -> TaskRef:
        self._refuse_known_elsewhere(environment, id)
        for name in reversed(names):  # without the environment's name first: an AReaL server is asked for any
            offer = await self._lookup.images_own(environment, name)
            if offer is None and environment.wire is UpstreamKind.OPENENV:
                offer = await self._lookup.recognised(environment, {"id": name})
            if offer is not None and offer.is_images:
                return offer
        raise UnknownTask(f"Unknown task: {id[:NAME_MAX]}")

    async def _asked_for_tasks(self, environment: Environment, what: str) -> WorkerTasks:
        """As `_asked`; what it raises, ``PoolExhausted`` or ``EnvironmentUnavailable``, names *what* is asked for."""
        try:
            return await self._asked(environment)
        except (PoolExhausted, EnvironmentUnavailable) as error:
            told = f"{what} is in no file, and no worker could be asked for it: {error.detail}"
            raise type(error)(told, retry_after_s=error.retry_after_s) from error

    async def _asked(self, environment: Environment) -> WorkerTasks:
        """What its workers know; while they are just being replaced, their successors are waited for."""
        deadline = time.monotonic() + REPLACED_S
        while True:
            try:
                return await self._queries.registered(environment)
            except BeingReplaced:
                if time.monotonic() + ASK_PAUSE_S >= deadline:
                    raise
            await asyncio.sleep(ASK_PAUSE_S)

    def _refuse_known_elsewhere(self, environment: Environment, id: str) -> None:
        try:
            self._lookup.registry.get(environment.name, id)
        except WrongEnvironment:
            raise
        except UnknownTask:
            return

    def _refuse_other_environments(self, environment: Environment, id: str) -> None:
        prefix = id.partition("/")[0]
        for other in self._catalog:
            if other.name != environment.name and prefix in (other.name, *other.env_types):
                raise WrongEnvironment(
                    f"task {id[:NAME_MAX]!r} is one of environment {other.name!r}, not of {environment.name!r}"
                )

    def _by_place(self, environment: Environment, wish: ResetWish) -> TaskRef:
        tasks = self._lookup.registry
        splits = self._registered_splits(environment)
        if wish.split is None and wish.index is None and not splits:
            return TaskRef(spec={})  # an environment without tasks: what it begins with is its own matter
        split = _split(environment, wish, splits)
        for index in _places(split, tasks.count(environment.name, split), wish):
            try:
                task = tasks.task(environment.name, split, index)
            except UnknownTask:
                if wish.index is not None:
                    raise
                continue  # it was removed; indices never shift
            return TaskRef(spec=task, split=split, index=index)
        raise UnknownTask(f"split {split!r} has no task")

    async def _by_place_of_image(self, environment: Environment, wish: ResetWish) -> TaskRef:
        if self.passes_place(environment, wish):
            return TaskRef(spec={}, split=wish.split or "", index=wish.index)
        splits = [split.name for split in await self._lookup.splits(environment)]
        if wish.split is not None and wish.split not in splits:
            await self._lookup.refresh()
            splits = [split.name for split in await self._lookup.splits(environment)]
        if wish.split is None and wish.index is None and not splits:
            return TaskRef(spec={})
        split = _split(environment, wish, splits)
        for index in _places(split, await self._lookup.count(environment, split), wish):
            try:
                return await self._lookup.at(environment, split, index)
            except UnknownTask:
                if wish.index is not None:
                    raise
        raise UnknownTask(f"split {split!r} has no task")


def _split(environment: Environment, wish: ResetWish, splits: list[str]) -> str:
    """The split that *wish* means. Raises ``UnknownTask``."""
    split = wish.split if wish.split is not None else TaskLookup.usual(splits, environment.openenv.split)
    if split not in splits:
        raise unknown_split(split, splits)
    return split


def _places(split: str, count: int, wish: ResetWish) -> Iterator[int]:
    """The indices to try, in their order. Raises ``UnknownTask``."""
    if wish.index is not None:
        if not 0 <= wish.index < count:
            raise unknown_index(split, wish.index, count)
        return iter((wish.index,))
    if count == 0:
        raise UnknownTask(f"split {split!r} has no task")
    first = random.randrange(count) if wish.seed is None else wish.seed % count
    return ((first + step) % count for step in range(min(count, GAPS_MAX)))


def _spellings(environment: Environment, id: str) -> Iterator[str]:
    """What *id* may be kept as: itself, and without the environment's name in front of it."""
    yield id
    prefix, slash, rest = id.partition("/")
    if slash and rest and prefix in (environment.name, *environment.env_types):
        yield rest


def _refuse_stranger(environment: Environment, task: Mapping[str, Any]) -> None:
    """Refuse a task that says it is another environment's."""
    kind = task.get("env_type")
    if isinstance(kind, str) and kind not in (environment.name, *environment.env_types):
        raise WrongEnvironment(f"env_type: the task is one of environment {kind[:64]!r}, not of {environment.name!r}")
