"""Tasks by environment, split and index, or by id. Index -1 is the last task, as in ORS.

Tasks come from files, which operators may change, and from the store, at run time. Of a split that has both, those of
the file come first, and those of the store after them in the order in which they were registered. As long as no file
changes an index never comes to mean another task: where one was removed it means none, which listings leave out.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from gateway.core.environment import Environment, Split, SplitType
from gateway.core.errors import (
    ConfigError,
    InvalidRequest,
    UnknownTask,
    WrongEnvironment,
    unknown_index,
    unknown_split,
)
from gateway.core.ids import EnvironmentName
from gateway.core.ports.tasks import StoredTask, TaskStore
from gateway.tasks.split_view import ORDER, Added, SplitView, indexed, merged, rank, read, read_split


@dataclass(frozen=True, slots=True)
class TaskEntry:
    """One task in a listing."""

    environment: EnvironmentName
    split: str
    index: int
    task: Mapping[str, Any]
    is_stored: bool
    """It came at run time; otherwise it stands in a file."""
    signed_by: str

    @property
    def cursor(self) -> str:
        """What a listing that goes on after this one is told."""
        return f"{self.environment}/{self.split}/{self.index}"


class TaskRegistry:
    """The splits of every environment, in memory."""

    def __init__(
        self,
        splits: Mapping[EnvironmentName, Mapping[str, Sequence[bytes]]],
        *,
        env_types: Mapping[EnvironmentName, Sequence[str]] | None = None,
    ) -> None:
        """Index what the files have.

        Args:
            splits: environment → split name → tasks as compact JSON.
            env_types: environment → further names that tasks may call it by. Environments without tasks are known
                from here.
        """
        self.version = ""
        """Of the store's tasks that are known; empty: none yet."""
        # Built once, so that a look-up never walks a large split.
        self._files: dict[EnvironmentName, dict[str, SplitView]] = {}
        self._views: dict[EnvironmentName, dict[str, SplitView]] = {}
        self._added: dict[EnvironmentName, dict[str, Added]] = {}
        self._env_types: dict[EnvironmentName, set[str]] = {}
        self._refreshing = asyncio.Lock()
        self._refreshes = 0
        self._refreshed = 0
        others = env_types or {}
        for name in (*splits, *others):
            views = {split: indexed(tasks) for split, tasks in splits.get(name, {}).items()}
            self.offer(name, views, others.get(name, ()))

    def offer(
        self, environment: EnvironmentName, splits: Mapping[str, SplitView], env_types: Sequence[str] = ()
    ) -> None:
        """Add the tasks of an environment that is offered from now on; a known environment keeps its tasks."""
        if environment in self._env_types:
            return
        self._files[environment] = {name: splits[name] for name in sorted(splits, key=rank)}
        self._views[environment] = dict(self._files[environment])
        self._env_types[environment] = {environment, *env_types}

    def replace_files(self, environment: EnvironmentName, views: Mapping[str, SplitView | None]) -> list[str]:
        """Serve other files from now on; tasks that came at run time stay, behind those of their split's file.

        Args:
            environment: Whose files they are.
            views: By split: what its file has now, or None where the file is gone.

        Returns:
            For people: each split that has other tasks now, as ``name:before→after`` in numbers of the files' tasks.
        """
        files = self._files.setdefault(environment, {})
        none = SplitView()
        changed: dict[str, str] = {}
        for split, view in views.items():
            before, now = files.get(split, none).tasks, (view or none).tasks
            if (split in files) != (view is not None) or list(before) != list(now):
                changed[split] = f"{split}:{len(before)}→{len(now)}"
                files.pop(split, None)
                if view is not None:
                    files[split] = view
        self._rebuild(environment, changed)
        return list(changed.values())

    # -- by split and index ---------------------------------------------------------------------------------------

    def splits(self, environment: EnvironmentName) -> list[Split]:
        """The environment's splits: train, validation, test, then others by name."""
        return [Split(name, split_type(name)) for name in self._views.get(environment, {})]

    def count(self, environment: EnvironmentName, split: str) -> int:
        """How many indices *split* has, those of removed tasks included. Raises ``UnknownSplit``."""
        return len(self._view(environment, split).tasks)

    def raw(self, environment: EnvironmentName, split: str, index: int) -> bytes:
        """One task as compact JSON. Raises ``UnknownSplit``, ``UnknownTask``."""
        tasks = self._view(environment, split).tasks
        if not -len(tasks) <= index < len(tasks):
            raise unknown_index(split, index, len(tasks))
        task = tasks[index]
        if task is None:
            raise UnknownTask(f"Invalid index: the task {split}/{index} was removed")
        return task

    def task(self, environment: EnvironmentName, split: str, index: int) -> dict[str, Any]:
        """One task, parsed. Raises ``UnknownSplit``, ``UnknownTask``."""
        task: dict[str, Any] = json.loads(self.raw(environment, split, index))
        return task

    def all(self, environment: EnvironmentName, split: str) -> Sequence[bytes | None]:
        """A whole split as it is now, by index; None where a task was removed. Raises ``UnknownSplit``.

        Never changed: as long as the same object is returned, nothing is new.
        """
        return self._view(environment, split).tasks

    def range(self, environment: EnvironmentName, split: str, start: int | None, stop: int | None) -> Sequence[bytes]:
        """Tasks from *start* up to, not including, *stop*, as Python slices count. Raises ``UnknownSplit``."""
        view = self._view(environment, split)
        some = view.tasks[start:stop]
        # Without a hole the slice is all there is to do: splits may be large, and are asked for whole.
        return [task for task in some if task is not None] if view.has_holes else cast("Sequence[bytes]", some)

    # -- by name --------------------------------------------------------------------------------------------------

    def find(self, environment: EnvironmentName, name: str, *, prefer: str) -> tuple[str, int]:
        """Split and index of the task with this id or alias; of several the one in split *prefer*, else in the first.

        Raises:
            UnknownTask: there is none.
        """
        splits = self._views.get(environment, {})
        for split in (prefer, *splits):
            view = splits.get(split)
            if view is not None and (index := view.names.get(name)) is not None:
                return split, index
        raise UnknownTask(f"no task {name!r}")

    def get(self, environment: EnvironmentName, task_id: str) -> tuple[dict[str, Any], str, int]:
        """The task of this id or alias, its split and its index there.

        Raises:
            WrongEnvironment: it is one of another environment.
            UnknownTask: nobody has it.
        """
        try:
            split, index = self.find(environment, task_id, prefer="")
        except UnknownTask:
            for other, views in self._views.items():
                if any(task_id in view.names for view in views.values()):
                    raise WrongEnvironment(
                        f"the task {task_id!r} is one of {other!r}, not of {environment!r}"
                    ) from None
            raise UnknownTask(f"Unknown task: {task_id}") from None
        task = self.task(environment, split, index)
        self.check_env_type(environment, task)
        return task, split, index

    def check_env_type(self, environment: EnvironmentName, task: Mapping[str, Any]) -> None:
        """Raise ``WrongEnvironment`` if *task* says that it is one of another environment."""
        env_type = task.get("env_type")
        if env_type and env_type not in self._env_types.get(environment, {environment}):
            name = f"the task {task['id']!r}" if task.get("id") else "the task"
            raise WrongEnvironment(f"{name} is one of {env_type!r}, not of {environment!r}")

    def environment_of(self, env_type: str) -> EnvironmentName | None:
        """The environment that tasks call so; None if there is none."""
        name = EnvironmentName(env_type)
        if name in self._env_types:
            return name
        return next((environment for environment, names in self._env_types.items() if env_type in names), None)

    # -- listing --------------------------------------------------------------------------------------------------

    def listing(
        self,
        *,
        environment: EnvironmentName | None = None,
        tag: str | None = None,
        split: str | None = None,
        after: str = "",
        limit: int = 100,
    ) -> tuple[list[TaskEntry], str]:
        """Tasks in the order of environments, splits and indices, at most *limit* that come after the cursor *after*.

        Returns them, and the cursor to go on from; empty: there are no more.

        Raises:
            InvalidRequest: *after* is no cursor.
        """
        entries: list[TaskEntry] = []
        for entry in self._entries(environment, tag, split, _place(after)):
            if len(entries) == limit:
                return entries, entries[-1].cursor
            entries.append(entry)
        return entries, ""

    def holders(self, environment: EnvironmentName, name: str) -> Iterator[tuple[str, StoredTask | None]]:
        """Give each split that has a task of this id or alias, with the task if it came at run time; None: a file's."""
        for split, view in self._views.get(environment, {}).items():
            if (index := view.names.get(name)) is not None:
                added = view.added.get(index)
                yield split, added.stored if added is not None else None

    def first_added(self, environment: EnvironmentName, split: str) -> int:
        """The index of a split's first place for tasks that come at run time: how many its file has."""
        file = self._files.get(environment, {}).get(split)
        return len(file.tasks) if file is not None else 0

    def stored(self, environment: EnvironmentName, task_id: str) -> StoredTask | None:
        """The task of this id that came at run time, as it is known here."""
        added = self._added.get(environment, {}).get(task_id)
        return added.stored if added is not None else None

    def entry(self, environment: EnvironmentName, task_id: str) -> TaskEntry:
        """One task as in a listing. Raises as `get`."""
        _, split, index = self.get(environment, task_id)
        return self._entry(environment, split, index)

    def _entries(
        self, environment: EnvironmentName | None, tag: str | None, split: str | None, after: tuple[str, str, int]
    ) -> Iterator[TaskEntry]:
        last_environment, last_split, last_index = after
        last = (last_environment, rank(last_split))
        for name in sorted(self._views) if environment is None else [environment]:
            for one, view in self._views.get(name, {}).items():
                here = (name, rank(one))
                if here < last or split not in (None, one):
                    continue
                first = last_index + 1 if here == last else 0
                for index in range(first, len(view.tasks)) if tag is None else view.tags.get(tag, ()):
                    if index >= first and view.tasks[index] is not None:
                        yield self._entry(name, one, index)

    def _entry(self, environment: EnvironmentName, split: str, index: int) -> TaskEntry:
        added = self._views[environment][split].added.get(index)
        return TaskEntry(
            environment=environment,
            split=split,
            index=index,
            task=self.task(environment, split, index),
            is_stored=added is not None,
            signed_by=added.stored.signed_by if added is not None else "",
        )

    # -- tasks of the store ---------------------------------------------------------------------------------------

    async def refresh(self, store: TaskStore) -> None:
        """Take over what changed in *store*; what is known stays if the store does not answer.

        Callers that come while a refresh is under way share the next one.

        Raises:
            StoreUnavailable: The store does not answer.
        """
        asked = self._refreshes
        async with self._refreshing:
            if self._refreshed > asked:
                return
            self._refreshes += 1
            number = self._refreshes
            if await store.version() != self.version:
                await self._follow(store)
            self._refreshed = number

    async def _follow(self, store: TaskStore) -> None:
        version, is_whole, is_last = self.version, False, False
        changed: dict[tuple[EnvironmentName, str], Added | None] = {}
        while not is_last:
            page = await store.since(version)
            if page.is_whole:
                changed, is_whole = {}, True
            changed |= {(task.environment, task.id): read(task) for task in page.tasks}
            changed |= dict.fromkeys(page.removed)
            version, is_last = page.version, page.is_last
        # Applied in one go: nobody sees half a batch.
        if is_whole:
            gone = {(name, id): None for name, some in self._added.items() for id in some if (name, id) not in changed}
            changed.update(gone)
        self._apply(changed)
        self.version = version

    def _apply(self, changed: Mapping[tuple[EnvironmentName, str], Added | None]) -> None:
        touched: dict[EnvironmentName, set[str]] = {}
        for (environment, id), added in changed.items():
            some = self._added.setdefault(environment, {})
            for one in (some.pop(id, None), added):
                if one is not None:
                    touched.setdefault(environment, set()).add(one.stored.split)
            if added is not None:
                some[id] = added
        for environment, splits in touched.items():
            self._rebuild(environment, splits)

    def _rebuild(self, environment: EnvironmentName, splits: Collection[str]) -> None:
        """Put the views of *splits* together anew, of their files and of what came at run time."""
        files = self._files.get(environment, {})
        added: dict[str, list[Added]] = {}
        for one in self._added.get(environment, {}).values():
            added.setdefault(one.stored.split, []).append(one)
        views = dict(self._views.get(environment, {}))
        for split in splits:
            views.pop(split, None)
            if split in added:
                views[split] = merged(files.get(split, SplitView()), added[split])
            elif split in files:
                views[split] = files[split]
        self._views[environment] = dict(sorted(views.items(), key=lambda item: rank(item[0])))

    def _view(self, environment: EnvironmentName, split: str) -> SplitView:
        try:
            return self._views[environment][split]
        except KeyError:
            raise unknown_split(split, self._views.get(environment, ())) from None


def _place(cursor: str) -> tuple[str, str, int]:
    """What a cursor says; of an empty one, a place before all."""
    if not cursor:
        return "", "", -1
    environment, slash, rest = cursor.partition("/")
    split, other_slash, index = rest.rpartition("/")
    if not slash or not other_slash or not index.isdecimal() or len(index) > 18:
        raise InvalidRequest("after: a listing's own cursor is wanted")
    return environment, split, int(index)


def split_type(name: str) -> SplitType:
    """The type that a split's name stands for; a name that is none of the three is validation, as in ORS."""
    return SplitType(name) if name in ORDER else SplitType.VALIDATION


def load_tasks(environments: Iterable[Environment]) -> TaskRegistry:
    """Read every environment's ``<split>.jsonl`` files.

    Raises:
        ConfigError: a file is wrong (with file, line and reason), or a task folder has no split.
    """
    registry = TaskRegistry({})
    for environment in environments:
        registry.offer(environment.name, read_splits(environment.tasks), environment.env_types)
    return registry


def read_splits(folder: Path | None) -> dict[str, SplitView]:
    """Read the ``<split>.jsonl`` files of a task folder; an environment without a folder has no splits.

    Raises:
        ConfigError: a file is wrong (with file, line and reason), or there is none.
    """
    if folder is None:
        return {}
    paths = sorted(folder.glob("*.jsonl"), key=lambda path: rank(path.stem))
    if not paths:
        raise ConfigError(f"{folder}: no <split>.jsonl in it")
    return {path.stem: read_split(path) for path in paths}
