"""Tasks by id alone: found among an environment's own tasks, or among those that task modules registered."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from envserver.errors import Refused
from envserver.schema.environment_types import Kind
from envserver.tasks.modules import TaskModules
from envserver.tasks.sets import TaskSets

if TYPE_CHECKING:  # a server that registers no task imports nothing of it
    from envserver.generic.registry import TaskRegistry

MAX_LISTED = 10_000
MAX_DESCRIPTION_CHARS = 500
MAX_SHOWN_CHARS = 100
"""Of a text in a task's configuration that a listing shows."""
_REFERENCE = {"id", "env_type"}


def is_reference(spec: Mapping[str, Any]) -> bool:
    """Whether *spec* names a task and says nothing else of it."""
    return len(spec) <= len(_REFERENCE) and isinstance(spec.get("id"), str) and spec.keys() <= _REFERENCE


class Registered:
    """What a server offers by id. Used from the server's thread only."""

    def __init__(self, *, modules: TaskModules, tasks: Mapping[str, TaskSets]) -> None:
        self._modules = modules
        self._tasks = tasks

    async def resolve(self, kind: Kind, spec: dict[str, Any]) -> dict[str, Any]:
        """Give the task that *spec* names; itself where the environment knows ids by its own means.

        Raises:
            Refused: 400, there is no such task, or it is for another environment.
        """
        task_id: str = spec["id"]
        _check_type(kind, task_id, spec.get("env_type"))
        own = self._tasks[kind.name]
        if (found := await own.find(task_id)) is not None:
            return found
        registry = _registry()
        if registry is not None and task_id in registry:
            task = registry.get(task_id)
            _check_type(kind, task_id, task.env_type)
            return task.to_dict()
        if not (kind.cls.resolves_ids and own.has_ids):
            return spec
        raise Refused(400, f"Unknown task: {task_id:.200}{self._modules.complaint()}")

    def listing(self, kind: Kind) -> dict[str, Any]:
        """List an environment's registered tasks, up to `MAX_LISTED`, and the task modules; name its default tool."""
        registry = _registry()
        tasks = [] if registry is None else registry.list(kind.env_types)
        rows = [
            {
                "id": task.id,
                "env_type": task.env_type,
                "name": task.name,
                "description": task.description[:MAX_DESCRIPTION_CHARS],
                "tags": list(task.tags),
                "version": task.version,
                "config": {key: value for key, value in task.config.items() if _is_short(value)},
            }
            for task in tasks[:MAX_LISTED]
        ]
        return {
            "tasks": rows,
            "modules": self._modules.rows(),
            "config_keys": list(kind.cls.config_keys),
            "default_tool": kind.default_tool.name if kind.default_tool is not None else None,
        }


def _is_short(value: object) -> bool:
    """Whether *value* may stand in a listing: a task can be selected by it."""
    return isinstance(value, int | float) or (isinstance(value, str) and len(value) <= MAX_SHOWN_CHARS)


def _check_type(kind: Kind, task_id: str, env_type: object) -> None:
    if env_type not in (None, "", *kind.env_types):
        raise Refused(400, f"the task {task_id:.200} is for the environment {env_type!r:.100}, not for {kind.name!r}")


def _registry() -> "TaskRegistry | None":
    """This process's registry; None where nobody imported it, so that nothing is in it."""
    module = sys.modules.get("envserver.generic.registry")
    return module.registry if module is not None else None
