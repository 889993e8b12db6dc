"""Tasks by id alone: an environment's own tasks, and tasks that task modules register.

Task modules are Python modules that the operator names. The server imports them once at start. It does not search: it
imports only the modules in `OPENENV_TASK_MODULE` and their own imports. A failed module is reported and leaves no task
behind. The server serves everything else without it.
"""

import asyncio
import logging
import os
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from envserver.errors import Refused, describe
from envserver.schema.environment_types import Kind
from envserver.tasks.sets import TaskSets

if TYPE_CHECKING:  # a server without registered tasks does not import it
    from envserver.generic.registry import TaskRegistry

logger = logging.getLogger("envserver")
IMPORT_S = 20.0
"""Seconds for all modules together. A slower import delays neither the start nor the end of the server."""
MAX_MODULES = 32
MAX_ERROR_CHARS = 500
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_WAITING = "it was not imported: the time was up with the modules before it"
MAX_LISTED = 10_000
MAX_DESCRIPTION_CHARS = 500
MAX_SHOWN_CHARS = 100
"""Longest text from a task's configuration that a listing shows."""


class TaskModules:
    """The named task modules, with the result of each import."""

    def __init__(self, names: Sequence[str], *, folder: str, import_s: float = IMPORT_S) -> None:
        """Store the names. *folder* is appended to the import path."""
        self._names = list(dict.fromkeys(names))
        self._folder = folder
        self._import_s = import_s
        self._errors: dict[str, str | None] = dict.fromkeys(self._names, _WAITING)

    def rows(self) -> list[dict[str, str | None]]:
        """Return an entry for each module, in the order of the setting. An *error* of None means success."""
        return [{"module": name, "error": self._errors[name]} for name in self._names]

    def complaint(self) -> str:
        """Return the failed modules with reasons, as the end of a message, or an empty text."""
        failed = [f"task module {name} failed: {error}" for name, error in self._errors.items() if error is not None]
        return f" ({'; '.join(failed)})" if failed else ""

    async def load(self) -> None:
        """Import the modules one after another in a thread. Return when all are imported or the time is over."""
        if not self._names:
            return
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def finish() -> None:
            if not done.done():
                done.set_result(None)

        def work() -> None:
            self._import_all()
            try:
                loop.call_soon_threadsafe(finish)
            except RuntimeError:  # the server has stopped meanwhile
                return

        # A daemon thread: a hanging import must not keep the process, and no thread pool should wait for it.
        threading.Thread(target=work, name="task modules", daemon=True).start()
        await asyncio.wait((done,), timeout=self._import_s)
        if not done.done():
            hanging = next((name for name in self._names if self._errors[name] == _WAITING), None)
            if hanging is not None:
                self._fail(hanging, f"it was not imported within {self._import_s:g} s")

    def _import_all(self) -> None:
        if self._folder not in sys.path:
            sys.path.append(self._folder)
        for place, name in enumerate(self._names):
            if place >= MAX_MODULES:
                self._fail(name, f"at most {MAX_MODULES} modules can be named")
            else:
                self._import(name)

    def _import(self, name: str) -> None:
        from envserver.generic.registry import registry
        from envserver.generic.rewards import REWARDS

        tasks, rewards = registry.snapshot(), dict(REWARDS)
        try:
            if not _NAME.fullmatch(name):
                raise ImportError(f"{name!r:.80} is not a dotted name of a module")
            _load(name, self._folder)
        except BaseException as error:  # noqa: BLE001  # SystemExit too: an operator's module never ends the server
            registry.restore(tasks)
            REWARDS.clear()
            REWARDS.update(rewards)
            self._fail(name, f"{describe(error)}{_place(error)}")
        else:
            self._errors[name] = None
            logger.info("task_module_loaded module=%s tasks=%d", name, len(registry) - len(tasks))

    def _fail(self, name: str, reason: str) -> None:
        self._errors[name] = reason[:MAX_ERROR_CHARS]
        logger.warning("task_module_failed module=%s error=%s", name, self._errors[name])


def _load(name: str, folder: str) -> None:
    from importlib import import_module

    package, _, rest = name.partition(".")
    beside = os.path.join(folder, package)
    if rest and os.path.isdir(beside):
        # The image may have a module of the same name, which hides the folder. Then add the folder to that module's
        # path.
        parent: Any = import_module(package)
        path = getattr(parent, "__path__", None)
        if path is None:
            parent.__path__ = [beside]
        elif beside not in path:
            path.append(beside)
    import_module(name)


def _place(error: BaseException) -> str:
    """Return the place where *error* was raised, ignoring the import system and this package."""
    own = os.path.dirname(os.path.dirname(__file__)) + os.sep
    place, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(("<", own)) and f"{os.sep}importlib{os.sep}" not in file:
            place = f" ({os.path.basename(file)}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return place


class Registered:
    """The tasks that a server offers by id. Used from the server's thread only."""

    def __init__(self, *, modules: TaskModules, tasks: Mapping[str, TaskSets]) -> None:
        self._modules = modules
        self._tasks = tasks

    async def resolve(self, kind: Kind, spec: dict[str, Any]) -> dict[str, Any]:
        """Return the task that *spec* names, or *spec* itself if the environment resolves ids on its own.

        Raises:
            Refused: 400: There is no such task, or it is for another environment.
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
        """Return an environment's registered tasks, up to `MAX_LISTED`, the task modules, and its default tool."""
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
    """Return True if *value* is short enough for a listing, so that a task can be selected by it."""
    return isinstance(value, int | float) or (isinstance(value, str) and len(value) <= MAX_SHOWN_CHARS)


def _check_type(kind: Kind, task_id: str, env_type: object) -> None:
    if env_type not in (None, "", *kind.env_types):
        raise Refused(400, f"the task {task_id:.200} is for the environment {env_type!r:.100}, not for {kind.name!r}")


def _registry() -> "TaskRegistry | None":
    """Return this process's registry, or None if it was never imported and is therefore empty."""
    module = sys.modules.get("envserver.generic.registry")
    return module.registry if module is not None else None
