"""What can go wrong, as classes; a class exists only where somebody handles it differently.

A tool that fails is no error of the server: it is an outcome, and it never travels as one of these classes.
"""

import json
import os
import traceback
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

ERROR_MAX_CHARS = 1000
TRACEBACK_MAX_CHARS = 4000
"""Of a longer traceback the middle is left out: its first lines tell the entry, its last ones the error."""
UNTOLD_MAX = 4
"""Faults that a session keeps until they are told: the header stays below the 256 KiB that the gateway reads."""
_OWN_FOLDER = os.path.dirname(__file__)


class EnvServerError(Exception):
    """The root of this package's errors."""

    @property
    def is_infrastructure(self) -> bool:
        """Whether neither the environment's author nor the agent is at fault, where this ends an author's code."""
        return False


class ConfigError(EnvServerError):
    """The server cannot start: a setting or an environment class is wrong. The message says what to change."""


class InvalidInput(EnvServerError):
    """A tool's input does not fit its signature; the text is what the agent reads."""


class Refused(EnvServerError):
    """A request that is answered with *status* and ``{"detail": detail}``.

    Make a new one for each ``raise``: an exception that is raised again keeps the frames of every time before.

    Args:
        status: an HTTP status, 400 to 599.
        detail: a string, or the list of faults of a 422.
        headers: further response headers, such as ``Retry-After``.
    """

    def __init__(self, status: int, detail: object, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, detail)
        self.status = status
        self.detail = detail
        self.headers: Mapping[str, str] = headers or {}

    def again(self) -> "Refused":
        """Give a new one that says the same."""
        return Refused(self.status, self.detail, self.headers)


class SessionFailed(EnvServerError):
    """Raised by an environment's code: its author is at fault, so the session has no reward and can't go on.

    For a judge or a reference solution that fails, a program that is missing, a reward that is no number. The trainer
    gets a typed error, the operator gets the traceback, and every later call is refused. Do not raise it for what the
    agent brought about, or can mend: return a result for that, or raise any other exception.
    """


class SessionLost(SessionFailed):
    """Raised by an environment's code: the infrastructure failed, and neither the author nor the agent is at fault.

    For a sandbox or a browser that died, or a judge that got no CPU time. The session ends as with ``SessionFailed``,
    but is not counted as a fault of the environment: the same task may work in the next session.
    """

    @property
    def is_infrastructure(self) -> bool:
        return True


class NoThread(EnvServerError, RuntimeError):
    """No thread could be started for an author's code: the worker is at its limit of processes."""

    @property
    def is_infrastructure(self) -> bool:
        return True


class AuthorCancelled(EnvServerError):
    """The author's coroutine was cancelled, by the server or by itself; it has no result."""


def describe(error: BaseException) -> str:
    """Name *error* as ORS servers do in a 500: ``RuntimeError: message``."""
    return f"{type(error).__name__}: {message_of(error)}"


def message_of(error: BaseException) -> str:
    """Give the text of *error*, also where the author's class cannot be written as one."""
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001  # the author's __str__
        return f"(its text raised {type(broken).__name__})"


class SessionFault(NamedTuple):
    """One exception of an author's code, as the gateway shows it to operators.

    Agents and trainers are never shown a traceback. It goes to the client that asked for it as it created the session,
    in a header (or a trailer) of the next answer.
    """

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
