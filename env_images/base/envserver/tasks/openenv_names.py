"""Provides ``from openenv.core.tasks import registry`` in the gateway's own images.

RFC 005 of OpenEnv defines this import path. The finder is last in the import system's list, so any installed package
takes precedence. If the official package exists, its ``openenv`` and ``openenv.core`` stay unchanged and only
``openenv.core.tasks`` is added. Otherwise these two are empty packages. Nothing is imported before code imports the
name.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

TASKS = "openenv.core.tasks"
_PACKAGES = ("openenv", "openenv.core")


class OpenEnvNames:
    """Finds and creates the three modules."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == TASKS or name in _PACKAGES:
            # mypy: a loader is any object with the two methods. The abstract class would cost a bare server an import.
            return ModuleSpec(name, OpenEnvNames, origin="envserver", is_package=name in _PACKAGES)  # type: ignore[arg-type]
        return None

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """Leave the creation to the import system."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        if module.__name__ != TASKS:
            return
        from envserver import generic

        for name in generic.__all__:
            setattr(module, name, getattr(generic, name))
        module.__dict__.update(Task=generic.GenericTask, __all__=["Task", *generic.__all__], __doc__=generic.__doc__)


def install() -> None:
    """Make the names importable. A second call changes nothing."""
    if OpenEnvNames not in sys.meta_path:
        sys.meta_path.append(OpenEnvNames)
