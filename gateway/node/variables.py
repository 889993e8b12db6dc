"""Decides whether the process variables of a create body are exactly those of its environment.

One variable can run any program as a container's first user: ``LD_PRELOAD`` in the image's entry point, or ``PATH``
where the engine looks for it. So the gate computes the complete set itself, from its own reading of the catalog.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from gateway.backends.docker.container import foreign_entries, own_entries
from gateway.core.environment import Environment

_SLOTS = re.compile(r"ENVSERVER_SLOTS=([1-9][0-9]{0,5})", re.ASCII)


def variables_refusal(given: Collection[str], environment: Environment, *, mounts_tasks: bool) -> str | None:
    """Return the reason to refuse the variables *given* as ``NAME=value``, or None if they are *environment*'s.

    Args:
        given: The entries in any order. Each must occur once.
        environment: The container's environment.
        mounts_tasks: True if the container mounts the operator's task modules. Only then it gets their names.
    """
    expected = _expected(given, environment, mounts_tasks=mounts_tasks)
    if sorted(given) == sorted(expected):
        return None
    # Without values, which may be secret.
    names = sorted({entry.partition("=")[0] for entry in {*given} ^ {*expected}})
    return f"Env must be exactly the variables of environment {environment.name}: {_listed(names) or 'one is repeated'}"


def _listed(names: list[str]) -> str:
    return ", ".join(names)[:200] + (" differ" if len(names) > 1 else " differs") if names else ""


def _expected(given: Collection[str], environment: Environment, *, mounts_tasks: bool) -> list[str]:
    if environment.server.is_foreign:
        return foreign_entries(environment)
    # The gate does not read the folder of task modules; a container mounts it exactly if it has content.
    tasks = environment.custom_tasks if mounts_tasks else None
    seen = replace(environment, custom_tasks=replace(tasks, content="mounted") if tasks is not None else None)
    return own_entries(seen, slots=_slots(given, environment.pool.slots))


def _slots(given: Collection[str], most: int) -> int:
    """Return the number of slots among *given* if the environment allows it. A probe of the engine has one slot."""
    found = [int(match[1]) for entry in given if (match := _SLOTS.fullmatch(entry)) is not None]
    return found[0] if len(found) == 1 and found[0] <= most else most
