"""The tasks that this process offers by id. Task modules register them at their import."""

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from envserver.generic.task import GenericTask, TaskError, parse_task, registered

MAX_TASKS = 100_000


class UnknownTask(KeyError):
    """There is no registered task with this id."""

    def __str__(self) -> str:
        return f"Unknown task: {self.args[0]}"


class TaskRegistry:
    """Tasks by id, in the order of their registration. Safe for use from many threads.

    An id identifies one task across all environments.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: dict[str, GenericTask] = {}

    def __repr__(self) -> str:
        return f"<TaskRegistry of {len(self._tasks)} tasks>"

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._tasks

    def register(
        self, task_id: str, env_type: str, config: Mapping[str, Any] | GenericTask, *, replace: bool = False
    ) -> GenericTask:
        """Register and return a task. *config* is a whole task or an environment's configuration.

        A mapping with ``instruction``, ``config`` or ``evaluation`` is a whole task. In any other mapping, ``goal`` and
        ``reward_fn`` have the meaning of the RFC's short form. All other keys are the configuration.

        Args:
            replace: Replace a task with the same id, instead of raising ValueError.

        Raises:
            TaskError: A ValueError. The task does not match the schema, or states another id or environment.
            ValueError: The id is taken, or `MAX_TASKS` tasks are registered.
        """
        if isinstance(config, GenericTask):
            whole = config.to_dict()
        elif not isinstance(config, Mapping):
            raise TaskError([("", f"a task is an object, not {type(config).__name__}")])
        else:
            whole = registered(config)
        for key, value in (("id", task_id), ("env_type", env_type)):
            if not value or whole.get(key, value) != value:
                said = (
                    f"registered as {value!r:.80}, and the task says {whole[key]!r:.80}" if value else "none is given"
                )
                raise TaskError([(key, said)])
        task = parse_task({**whole, "id": task_id, "env_type": env_type})
        with self._lock:
            if task.id in self._tasks and not replace:
                raise ValueError(f"the task {task.id} is registered already")
            if task.id not in self._tasks and len(self._tasks) >= MAX_TASKS:
                raise ValueError(f"at most {MAX_TASKS} tasks can be registered")
            self._tasks[task.id] = task
        return task

    def unregister(self, task_id: str) -> GenericTask:
        """Remove a task and return it. Open sessions on it continue.

        Raises:
            UnknownTask: A KeyError. There is no task with this id.
        """
        with self._lock:
            task = self.get(task_id)
            del self._tasks[task_id]
        return task

    def get(self, task_id: str) -> GenericTask:
        """Return a task.

        Raises:
            UnknownTask: A KeyError. There is no task with this id.
        """
        try:
            return self._tasks[task_id]
        except KeyError:
            raise UnknownTask(task_id) from None

    def snapshot(self) -> dict[str, GenericTask]:
        """Return a copy of the registered tasks, for ``restore``."""
        with self._lock:
            return dict(self._tasks)

    def restore(self, snapshot: Mapping[str, GenericTask]) -> None:
        """Restore exactly the tasks of *snapshot*."""
        with self._lock:
            self._tasks = dict(snapshot)

    def list(
        self, env_type: str | Iterable[str] | None = None, tag: str | None = None, split: str | None = None
    ) -> list[GenericTask]:
        """Return the tasks of an environment (by one or several names), with a tag, and of a split."""
        names = None if env_type is None else {env_type} if isinstance(env_type, str) else set(env_type)
        with self._lock:
            tasks = [*self._tasks.values()]
        return [
            task
            for task in tasks
            if (names is None or task.env_type in names)
            and (tag is None or tag in task.tags)
            and (split is None or task.split == split)
        ]


registry = TaskRegistry()
"""The registry of this process. Module state on purpose: a module has no other way to register tasks at its import."""
