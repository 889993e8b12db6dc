"""Exceptions of an environment author's code, as workers tell of them: where, what, and the traceback."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple

FAULT_HEADERS: Final = b"x-session-fault"
"""What the names of headers begin with that only the gateway reads."""
FAULT_HEADER: Final = b"x-session-fault"
"""Of a refusal: who is at fault that the session takes no more requests; a `FaultKind`."""
FAULTS_HEADER: Final = b"x-session-faults"
"""Of any answer, also as a trailer: faults in JSON. In a request to open a session: such answers are wanted."""


class FaultKind(StrEnum):
    """Who is at fault where an episode ends, or a step fails, by no doing of the agent's."""

    AUTHOR = "author"  #: of the environment: a tool, a reset, a judge or a reference raised, a reward is no number
    INFRASTRUCTURE = "infrastructure"  #: a sandbox died, no thread could be started


class Fault(NamedTuple):
    """One of them."""

    kind: FaultKind
    place: str
    """What raised it: ``reset``, ``tool:NAME``, ``reward``; of servers that do not say, the operation that failed."""
    error: str
    traceback: str = ""
    """Empty where the server tells none: then only its own log has it."""


def author_faults(message: str, place: str) -> tuple[Fault, ...]:
    """Return the fault of a third-party server, whose *message* is all that it says: it sends no traceback."""
    return (Fault(FaultKind.AUTHOR, place, message),)


def read_faults(written: str | bytes) -> tuple[Fault, ...]:
    """Read the faults that a worker of our own wrote as JSON; those that can't be read are left out."""
    try:
        found = json.loads(written)
    except (ValueError, RecursionError):
        return ()
    return faults_of(found)


def faults_of(found: object) -> tuple[Fault, ...]:
    """Read faults from parsed JSON: a list of objects. What is none of these is left out."""
    faults: list[Fault] = []
    for one in found if isinstance(found, list) else ():
        if isinstance(one, Mapping) and one.get("kind") in set(FaultKind):
            place, error, traceback = (str(one.get(key, "")) for key in ("place", "error", "traceback"))
            faults.append(Fault(FaultKind(one["kind"]), place, error, traceback))
    return tuple(faults)
