"""What went wrong in an author's code, as the gateway tells operators: where, what, and the traceback.

Agents and trainers are never shown a traceback. It goes to the client that asked for it as it created the session,
in a header (or a trailer) of the next answer.
"""

import json
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from envserver.errors import EnvServerError, describe

ERROR_MAX_CHARS = 1000
TRACEBACK_MAX_CHARS = 4000
"""Of a longer traceback the middle is left out: its first lines tell the entry, its last ones the error."""
UNTOLD_MAX = 4
"""Faults that a session keeps until they are told: the header stays below the 256 KiB that the gateway reads."""
_OWN_FOLDER = str(Path(__file__).parent)


class SessionFault(NamedTuple):
    """One exception of an author's code."""

    kind: Literal["author", "infrastructure"]
    """Who is at fault."""
    place: str
    """The hook that raised it: ``constructor``, ``reset``, ``task_tools``, ``tool:NAME``, ``reward``, …"""
    error: str
    """As ``KeyError: 'toop'``."""
    traceback: str
    """Without this package's frames in front of the author's."""


def fault_of(error: BaseException, place: str, *, secrets: Collection[str] = ()) -> SessionFault:
    """Describe *error*; the values of *secrets* are left out of it."""
    is_infrastructure = isinstance(error, EnvServerError) and error.is_infrastructure
    return SessionFault(
        "infrastructure" if is_infrastructure else "author",
        place,
        _shortened(_without(describe(error), secrets), ERROR_MAX_CHARS),
        _shortened(_without(_traceback_of(error), secrets), TRACEBACK_MAX_CHARS),
    )


def written(faults: Sequence[SessionFault]) -> str:
    """Write *faults* as a header's value: JSON in ASCII."""
    return json.dumps([fault._asdict() for fault in faults], separators=(",", ":"))


def _traceback_of(error: BaseException) -> str:
    whole = traceback.TracebackException.from_exception(error)
    _leave_own_frames(whole)
    return "".join(whole.format())


def _leave_own_frames(one: traceback.TracebackException) -> None:
    """Take this package's frames off the start of each traceback of a chain."""
    frames = list(one.stack)
    while frames and frames[0].filename.startswith(_OWN_FOLDER):
        del frames[0]
    one.stack[:] = frames
    for other in (one.__cause__, one.__context__, *(one.exceptions or ())):
        if other is not None:
            _leave_own_frames(other)


def _without(text: str, secrets: Collection[str]) -> str:
    for secret in secrets:
        if secret:
            text = text.replace(secret, "***")
    return text


def _shortened(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
