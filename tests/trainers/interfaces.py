"""Compare the client package's adapters with the interfaces of the installed trainers.

    .venv-trainers/learning/bin/python tests/trainers/interfaces.py

It prints a line of JSON for each class: the trainer's version, and what does not fit.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "clients" / "python"))

ADAPTERS = {
    "areal": "areal",
    "gymnasium": "gymnasium",
    "openrlhf": "openrlhf",
    "tinker": "tinker-cookbook",
    "verl": "verl",
}
"""Modules of the client package that subclass a trainer's classes, with the name of the trainer's package."""


def classes(adapter: str) -> Iterator[type]:
    """Yield the classes of an adapter that have a trainer's class as a base."""
    module = importlib.import_module(f"env_gateway_client.{adapter}")
    if adapter == "openrlhf":  # it makes its classes for a place: an executor, and the agent that this makes
        executor = module.executor("http://127.0.0.1:1", "math")
        yield from (executor, executor().agent_instance_cls)
    for _, found in inspect.getmembers(module, inspect.isclass):
        if found.__module__ == module.__name__ and any(adapter in base.__module__ for base in found.__mro__[1:]):
            yield found


def misfits(found: type) -> list[str]:
    """Return what the class lacks of its bases: abstract methods, and parameters that a base's method takes."""
    lacking = [f"abstract: {name}" for name in sorted(getattr(found, "__abstractmethods__", ()))]
    for name, method in vars(found).items():
        base = next((vars(one)[name] for one in found.__mro__[1:] if name in vars(one)), None)
        if name == "__init__" or not inspect.isfunction(method) or not inspect.isfunction(base):
            continue
        ours, theirs = inspect.signature(method).parameters, inspect.signature(base).parameters
        takes_more = any(one.kind is one.VAR_KEYWORD for one in ours.values())
        missing = [one for one in theirs if one not in ours and not takes_more and one not in ("args", "kwargs")]
        if missing:
            lacking.append(f"{name} has no parameter {', '.join(missing)}")
        if inspect.iscoroutinefunction(method) != inspect.iscoroutinefunction(base):
            lacking.append(f"{name} is {'' if inspect.iscoroutinefunction(method) else 'not '}a coroutine function")
    return lacking


def main() -> None:
    for adapter, package in ADAPTERS.items():
        for found in classes(adapter):
            row = {"class": found.__name__, "package": package, "version": version(package), "misfits": misfits(found)}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
