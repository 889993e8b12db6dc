"""``from openenv.core.tasks import registry``, the path that RFC 005 of OpenEnv gives it, in our images too.

A finder at the end of the import system's list: whatever is installed comes first. Where the official package is, its
``openenv`` and ``openenv.core`` stay what they are and only ``openenv.core.tasks`` is added; where it is not, those two
are empty packages. Nothing is imported before somebody asks for the name.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

TASKS = "openenv.core.tasks"
_PACKAGES = ("openenv", "openenv.core")


class OpenEnvNames:
    """Finds and makes the three modules."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == TASKS or name in _PACKAGES:
            # mypy: a loader is whatever has its two methods; the abstract class would cost a bare server an import.
            return ModuleSpec(name, OpenEnvNames, origin="envserver", is_package=name in _PACKAGES)  # type: ignore[arg-type]
        return None

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """Leave the making to the import system."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        if module.__name__ != TASKS:
            return
        from envserver import generic

        for name in generic.__all__:
            setattr(module, name, getattr(generic, name))
        module.__dict__.update(Task=generic.GenericTask, __all__=["Task", *generic.__all__], __doc__=generic.__doc__)


def install() -> None:
    """Let the names be found; a second time changes nothing."""
    if OpenEnvNames not in sys.meta_path:
        sys.meta_path.append(OpenEnvNames)
