"""Small stand-ins for the packages of trainers that are not installed: the names and signatures that adapters use."""

import importlib
import sys
import types
from collections.abc import Mapping
from typing import Any

import pytest


def installed(
    patch: pytest.MonkeyPatch, adapter: str, modules: Mapping[str, Mapping[str, Any]]
) -> tuple[types.ModuleType, bool]:
    """Import ``env_gateway_client.ADAPTER``, and return it with whether its trainer's package is the real one.

    Args:
        modules: Stand-ins by name of module, each with the names that it has. They replace a missing package.
    """
    package = next(iter(modules)).partition(".")[0]
    is_real = True
    try:
        importlib.import_module(package)
    except ImportError:
        is_real = False
        for name, names in modules.items():
            patch.setitem(sys.modules, name, _module(name, names))
        for name in modules:
            parent, _, last = name.rpartition(".")
            if parent in modules:
                patch.setattr(sys.modules[parent], last, sys.modules[name], raising=False)
    full = f"env_gateway_client.{adapter}"
    patch.delitem(sys.modules, full, raising=False)
    module = importlib.import_module(full)
    patch.setitem(sys.modules, full, module)
    return module, is_real


def _module(name: str, names: Mapping[str, Any]) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(names)
    module.__path__ = []  # a package
    return module
