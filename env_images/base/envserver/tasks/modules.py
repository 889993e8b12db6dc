"""Task modules: Python modules that an operator names, imported once as the server starts, which register tasks.

Nothing is looked for: only what `OPENENV_TASK_MODULE` names is imported, and what those modules import themselves. A
module that fails is reported and leaves no task behind; everything else is served without it.
"""

import asyncio
import logging
import os
import re
import sys
import threading
from collections.abc import Sequence
from typing import Any

from envserver.errors import describe

logger = logging.getLogger("envserver")
IMPORT_S = 20.0
"""For all modules together. One that takes longer holds up neither the start nor the end of the server."""
MAX_MODULES = 32
MAX_ERROR_CHARS = 500
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_WAITING = "it was not imported: the time was up with the modules before it"


class TaskModules:
    """The modules that were named, and what became of each."""

    def __init__(self, names: Sequence[str], *, folder: str, import_s: float = IMPORT_S) -> None:
        """*folder* is put on the import path, behind everything else that is there."""
        self._names = list(dict.fromkeys(names))
        self._folder = folder
        self._import_s = import_s
        self._errors: dict[str, str | None] = dict.fromkeys(self._names, _WAITING)

    def __repr__(self) -> str:
        return f"<TaskModules {', '.join(self._names) or 'none'}>"

    def rows(self) -> list[dict[str, str | None]]:
        """Describe each module, in the order of their names in the setting; an *error* of None is none."""
        return [{"module": name, "error": self._errors[name]} for name in self._names]

    def complaint(self) -> str:
        """Say which modules failed and why, as the end of a message; empty where none did."""
        failed = [f"task module {name} failed: {error}" for name, error in self._errors.items() if error is not None]
        return f" ({'; '.join(failed)})" if failed else ""

    async def load(self) -> None:
        """Import the modules, one after the other in a thread; returns when they are, or when the time is up."""
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
            except RuntimeError:  # the server was stopped meanwhile
                return

        # A daemon: one that hangs must not keep the process, and no pool of threads should wait for it.
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
                raise ImportError(f"{name!r:.80} is no dotted name of a module")
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
        # The image may have a module of that very name, which hides a folder of the same: let the folder be its inside.
        parent: Any = import_module(package)
        path = getattr(parent, "__path__", None)
        if path is None:
            parent.__path__ = [beside]
        elif beside not in path:
            path.append(beside)
    import_module(name)


def _place(error: BaseException) -> str:
    """Say where it was raised, as far as that was not in the import system, or in this package."""
    own = os.path.dirname(os.path.dirname(__file__)) + os.sep
    place, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(("<", own)) and f"{os.sep}importlib{os.sep}" not in file:
            place = f" ({os.path.basename(file)}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return place
