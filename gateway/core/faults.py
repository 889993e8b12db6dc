"""Exceptions of an environment author's code, as workers report them: place, error and traceback."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple

INTERNAL_HEADERS: Final = (b"x-session-fault", b"x-session-result")
"""Prefixes of the names of headers that only the gateway reads."""
RESULT_HEADER: Final = b"x-session-result"
"""Header or trailer of the answer that ends an episode, with the episode's summary as JSON."""
TURN_HEADER: Final = b"x-session-turn"
"""Header of a worker's answer to a call, with the number of the call in its session."""
FAULT_HEADER: Final = b"x-session-fault"
"""Header of a refusal because the session takes no more requests; its value is the `FaultKind` at fault."""
FAULTS_HEADER: Final = b"x-session-faults"
"""Header or trailer of any answer, with faults as JSON. In a request to open a session it asks for such answers."""


class FaultKind(StrEnum):
    """The party at fault if an episode ends, or a step fails, and the agent is not at fault."""

    AUTHOR = "author"  #: environment author: a tool, reset, judge or reference raised, or a reward is not a number
    INFRASTRUCTURE = "infrastructure"  #: a sandbox died, or no thread could be started


class Fault(NamedTuple):
    """One failure, with the party at fault."""

    kind: FaultKind
    place: str
    """The code that raised it: ``reset``, ``tool:NAME``, ``reward``. If the server does not report it, the operation
    that failed."""
    error: str
    traceback: str = ""
    """The traceback; empty if the server sends none, and only its own log contains it."""


def author_faults(message: str, place: str) -> tuple[Fault, ...]:
    """Return the fault of a third-party server, which sends only a *message* and no traceback."""
    return (Fault(FaultKind.AUTHOR, place, message),)


def read_faults(written: str | bytes) -> tuple[Fault, ...]:
    """Parse the faults that a worker of the gateway's own images wrote as JSON; skip entries that are not valid."""
    try:
        found = json.loads(written)
    except (ValueError, RecursionError):
        return ()
    return faults_of(found)


def faults_of(found: object) -> tuple[Fault, ...]:
    """Parse faults from decoded JSON, a list of objects; skip everything else."""
    faults: list[Fault] = []
    for one in found if isinstance(found, list) else ():
        if isinstance(one, Mapping) and one.get("kind") in set(FaultKind):
            place, error, traceback = (str(one.get(key, "")) for key in ("place", "error", "traceback"))
            faults.append(Fault(FaultKind(one["kind"]), place, error, traceback))
    return tuple(faults)
