"""Holds the tasks of all environments in memory, by split and index or by id. Index -1 is the last task, as in ORS.

Tasks come from files, which operators may change, and at run time from the store. In a split with both, the file's
tasks come first. The store's tasks follow in the order of their registration. As long as no file changes, an index
never names a different task. The index of a removed task has no task, and listings omit it.
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
    """True if the task was registered at run time, False if it is in a file."""
    signed_by: str

    @property
    def cursor(self) -> str:
        """The value of ``after`` with which a listing continues after this entry."""
        return f"{self.environment}/{self.split}/{self.index}"


class TaskRegistry:
    """The splits of every environment, in memory."""

    def __init__(
        self,
        splits: Mapping[EnvironmentName, Mapping[str, Sequence[bytes]]],
        *,
        env_types: Mapping[EnvironmentName, Sequence[str]] | None = None,
    ) -> None:
        """Index the tasks of the files.

        Args:
            splits: Environment → split name → tasks as compact JSON.
            env_types: Environment → further names for it that tasks may use. It also lists environments without tasks.
        """
        self.version = ""
        """The version of the store's tasks that this registry holds. Empty: the registry has read no version yet."""
        # The indices are built once, so that a look-up never walks a large split.
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
        """Add an environment with its tasks. An environment that the registry already knows keeps its tasks."""
        if environment in self._env_types:
            return
        self._files[environment] = {name: splits[name] for name in sorted(splits, key=rank)}
        self._views[environment] = dict(self._files[environment])
        self._env_types[environment] = {environment, *env_types}

    def replace_files(self, environment: EnvironmentName, views: Mapping[str, SplitView | None]) -> list[str]:
        """Replace the file tasks of some splits. Tasks registered at run time stay, after the tasks of the file.

        Args:
            environment: The environment that the files belong to.
            views: Split name → the new content of its file, or None if the file is gone.

        Returns:
            Each changed split as ``name:before→after`` for log messages, with the numbers of its file's tasks.
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
        """Return the environment's splits: train, validation, test, then the others by name."""
        return [Split(name, split_type(name)) for name in self._views.get(environment, {})]

    def count(self, environment: EnvironmentName, split: str) -> int:
        """Return the number of indices in *split*, including those of removed tasks. Raises ``UnknownSplit``."""
        return len(self._view(environment, split).tasks)

    def raw(self, environment: EnvironmentName, split: str, index: int) -> bytes:
        """Return one task as compact JSON. Raises ``UnknownSplit``, ``UnknownTask``."""
        tasks = self._view(environment, split).tasks
        if not -len(tasks) <= index < len(tasks):
            raise unknown_index(split, index, len(tasks))
        task = tasks[index]
        if task is None:
            raise UnknownTask(f"Invalid index: the task {split}/{index} was removed")
        return task

    def task(self, environment: EnvironmentName, split: str, index: int) -> dict[str, Any]:
        """Return one task, parsed. Raises ``UnknownSplit``, ``UnknownTask``."""
        task: dict[str, Any] = json.loads(self.raw(environment, split, index))
        return task

    def all(self, environment: EnvironmentName, split: str) -> Sequence[bytes | None]:
        """Return all tasks of a split by index, with None at the indices of removed tasks. Raises ``UnknownSplit``.

        The registry never modifies the returned object. It returns the same object until the split changes.
        """
        return self._view(environment, split).tasks

    def range(self, environment: EnvironmentName, split: str, start: int | None, stop: int | None) -> Sequence[bytes]:
        """Return the tasks of the Python slice ``[start:stop]``, without removed ones. Raises ``UnknownSplit``."""
        view = self._view(environment, split)
        some = view.tasks[start:stop]
        # A split without removed tasks needs no filter. Splits may be large, and clients request whole splits.
        return [task for task in some if task is not None] if view.has_holes else cast("Sequence[bytes]", some)

    # -- by name --------------------------------------------------------------------------------------------------

    def find(self, environment: EnvironmentName, name: str, *, prefer: str) -> tuple[str, int]:
        """Return split and index of the task with this id or alias. If several splits have it, *prefer* comes first.

        Raises:
            UnknownTask: The environment has no such task.
        """
        splits = self._views.get(environment, {})
        for split in (prefer, *splits):
            view = splits.get(split)
            if view is not None and (index := view.names.get(name)) is not None:
                return split, index
        raise UnknownTask(f"no task {name!r}")

    def get(self, environment: EnvironmentName, task_id: str) -> tuple[dict[str, Any], str, int]:
        """Return the task with this id or alias, its split and its index.

        Raises:
            WrongEnvironment: The task belongs to another environment.
            UnknownTask: No environment has such a task.
        """
        try:
            split, index = self.find(environment, task_id, prefer="")
        except UnknownTask:
            for other, views in self._views.items():
                if any(task_id in view.names for view in views.values()):
                    raise WrongEnvironment(
                        f"the task {task_id!r} belongs to {other!r}, not to {environment!r}"
                    ) from None
            raise UnknownTask(f"Unknown task: {task_id}") from None
        task = self.task(environment, split, index)
        self.check_env_type(environment, task)
        return task, split, index

    def check_env_type(self, environment: EnvironmentName, task: Mapping[str, Any]) -> None:
        """Raise ``WrongEnvironment`` if the ``env_type`` of *task* names another environment."""
        env_type = task.get("env_type")
        if env_type and env_type not in self._env_types.get(environment, {environment}):
            name = f"the task {task['id']!r}" if task.get("id") else "the task"
            raise WrongEnvironment(f"{name} belongs to {env_type!r}, not to {environment!r}")

    def environment_of(self, env_type: str) -> EnvironmentName | None:
        """Return the environment with this name or further name, or None if there is no such environment."""
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
        """List at most *limit* tasks after the cursor *after*, in the order of environments, splits and indices.

        Returns the tasks, and the cursor of the next page. The cursor is empty after the last task.

        Raises:
            InvalidRequest: *after* is not a cursor of a listing.
        """
        entries: list[TaskEntry] = []
        for entry in self._entries(environment, tag, split, _place(after)):
            if len(entries) == limit:
                return entries, entries[-1].cursor
            entries.append(entry)
        return entries, ""

    def holders(self, environment: EnvironmentName, name: str) -> Iterator[tuple[str, StoredTask | None]]:
        """Yield each split with a task of this id or alias, and the stored task, or None for a task of a file."""
        for split, view in self._views.get(environment, {}).items():
            if (index := view.names.get(name)) is not None:
                added = view.added.get(index)
                yield split, added.stored if added is not None else None

    def first_added(self, environment: EnvironmentName, split: str) -> int:
        """Return the index of the first run-time task of a split, which is the number of tasks in the split's file."""
        file = self._files.get(environment, {}).get(split)
        return len(file.tasks) if file is not None else 0

    def stored(self, environment: EnvironmentName, task_id: str) -> StoredTask | None:
        """Return this replica's copy of the run-time task with this id, or None."""
        added = self._added.get(environment, {}).get(task_id)
        return added.stored if added is not None else None

    def entry(self, environment: EnvironmentName, task_id: str) -> TaskEntry:
        """Return one task as a listing's entry. Raises as `get`."""
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
        """Apply the changes in *store* since the last refresh. Callers that wait for a running refresh share the next.

        Raises:
            StoreUnavailable: The store does not answer. The registry keeps its tasks.
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
        # All pages are applied in one step, so that no request sees half a batch.
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
        """Rebuild the views of *splits* from their files' tasks and the tasks registered at run time."""
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
    """Parse a cursor into environment, split and index. An empty cursor is a place before all tasks."""
    if not cursor:
        return "", "", -1
    environment, slash, rest = cursor.partition("/")
    split, other_slash, index = rest.rpartition("/")
    if not slash or not other_slash or not index.isdecimal() or len(index) > 18:
        raise InvalidRequest("after: must be a cursor from an earlier listing")
    return environment, split, int(index)


def split_type(name: str) -> SplitType:
    """Return the type of a split by its name. Names other than train, validation and test are validation, as in ORS."""
    return SplitType(name) if name in ORDER else SplitType.VALIDATION


def load_tasks(environments: Iterable[Environment]) -> TaskRegistry:
    """Read every environment's ``<split>.jsonl`` files.

    Raises:
        ConfigError: A file is invalid (with file, line and reason), or a task folder has no split.
    """
    registry = TaskRegistry({})
    for environment in environments:
        registry.offer(environment.name, read_splits(environment.tasks), environment.env_types)
    return registry


def read_splits(folder: Path | None) -> dict[str, SplitView]:
    """Read the ``<split>.jsonl`` files of a task folder. Without a *folder* there are no splits.

    Raises:
        ConfigError: A file is invalid (with file, line and reason), or the folder has no such file.
    """
    if folder is None:
        return {}
    paths = sorted(folder.glob("*.jsonl"), key=lambda path: rank(path.stem))
    if not paths:
        raise ConfigError(f"{folder}: no <split>.jsonl in it")
    return {path.stem: read_split(path) for path in paths}
