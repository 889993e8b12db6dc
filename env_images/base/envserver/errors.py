"""The package's errors. A class exists only if some code handles it differently.

A failed tool is an outcome of the call, not an error of the server. These classes never represent it.
"""

import json
import os
import sysconfig
import traceback
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

ERROR_MAX_CHARS = 1000
TRACEBACK_MAX_CHARS = 4000
"""Characters kept of a traceback. A longer traceback loses its middle: the first lines show the entry point and the
last lines the error."""
UNTOLD_MAX = 4
"""Unreported faults that a session keeps. The limit keeps the header below the 256 KiB that the gateway reads."""
_OWN_FOLDER = os.path.dirname(__file__)
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))


Unexpected: TypeAlias = Literal["mark", "fail", "agent"]
"""What an exception in a tool means that is no ``ToolError``. ``mark``: the agent reads it, and the summary has it.
``fail``: the session has failed by its author's fault. ``agent``: the same as a ``ToolError``."""


class EnvServerError(Exception):
    """Base class of this package's errors."""

    is_infrastructure: bool = False
    """Whether an author's code that raises this is not at fault, and neither is the agent."""


class ConfigError(EnvServerError):
    """The server cannot start because a setting or an environment class is wrong. The message states the remedy."""


class InvalidInput(EnvServerError):
    """A tool's input does not match its signature. The agent reads the text."""


class Refused(EnvServerError):
    """A request that the server answers with *status* and ``{"detail": detail}``.

    Create a new instance for each ``raise``: an exception that is raised again keeps the frames of all earlier raises.

    Args:
        status: An HTTP status from 400 to 599.
        detail: A string, or the list of faults of a 422.
        headers: Further response headers, such as ``Retry-After``.
    """

    def __init__(self, status: int, detail: object, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, detail)
        self.status = status
        self.detail = detail
        self.headers: Mapping[str, str] = headers or {}

    def again(self) -> "Refused":
        """Return a new instance with the same content."""
        return Refused(self.status, self.detail, self.headers)


class ToolError(EnvServerError):
    """Raised by a tool for an error that belongs to the episode, such as an illegal move or a file that is missing.

    The agent reads the text, and the episode goes on. The error is the agent's own: it is no fault of the author.
    """


class SessionFailed(EnvServerError):
    """Raised by an environment's code: its author is at fault, so the session has no reward and cannot continue.

    Examples are a failing judge or reference solution, a missing program, and a reward that is not a number. The
    trainer gets a typed error, the operator gets the traceback, and the server refuses every later call. Do not raise
    it for a failure that the agent caused or can repair. Return a result for that, or raise ``ToolError``.
    """


class WrongReward(SessionFailed):
    """A tool returned a reward that is not a finite number. No other number replaces it."""


class SessionLost(SessionFailed):
    """Raised by an environment's code: the infrastructure failed, and neither the author nor the agent is at fault.

    Examples are a sandbox or a browser that died, and a judge that got no CPU time. The session ends as with
    ``SessionFailed``. It does not count as a fault of the environment, because the same task may work in the next
    session.
    """

    is_infrastructure = True


class NoThread(EnvServerError, RuntimeError):
    """No thread could start for an author's code: the worker has reached its limit of processes."""

    is_infrastructure = True


class AuthorCancelled(EnvServerError):
    """The server or the author's coroutine itself cancelled the coroutine. There is no result."""


def describe(error: BaseException) -> str:
    """Return the text of *error* as ORS servers write it in a 500, ``RuntimeError: message``, shortened."""
    return _shortened(f"{type(error).__name__}: {message_of(error)}", TRACEBACK_MAX_CHARS)


def message_of(error: BaseException) -> str:
    """Return the text of *error*, also if the author's ``__str__`` raises."""
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001  # the author's __str__
        return f"(its text raised {type(broken).__name__})"


class SessionFault(NamedTuple):
    """An exception of an author's code, in the form that the gateway shows to operators.

    Agents and trainers never see a traceback. The server sends it only to a client that requested it at the session's
    creation, in a header or trailer of the next answer.
    """

    kind: Literal["author", "infrastructure"]
    """The party at fault."""
    place: str
    """The hook that raised it: ``constructor``, ``reset``, ``task_tools``, ``tool:NAME``, ``reward``, …"""
    error: str
    """Exception type and message, such as ``KeyError: 'toop'``."""
    traceback: str
    """Traceback without this package's frames before the author's."""


def fault_of(error: BaseException, place: str, *, secrets: Collection[str] = ()) -> SessionFault:
    """Describe *error* without the values of *secrets*."""
    is_infrastructure = isinstance(error, EnvServerError) and error.is_infrastructure
    return SessionFault(
        "infrastructure" if is_infrastructure else "author",
        place,
        spoken(error, secrets=secrets),
        _shortened(_without(_traceback_of(error), secrets), TRACEBACK_MAX_CHARS),
    )


def spoken(error: BaseException, *, secrets: Collection[str] = ()) -> str:
    """Return type and text of *error*, such as ``KeyError: 'toop'``, shortened, and without the values of *secrets*."""
    return _shortened(_without(describe(error).removesuffix(": "), secrets), ERROR_MAX_CHARS)


def line_of(error: BaseException) -> str:
    """Return the author's line in which *error* was raised, such as ``server.py, line 3``; empty: it is not known.

    It is the last line outside of this package, of Python and of the installed packages, if there is one.
    """
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    outside = [one for one in lines if not one[0].startswith(_OWN_FOLDER)]
    authors = [one for one in outside if not one[0].startswith(_LIBRARIES)] or outside
    return f"{os.path.basename(authors[-1][0])}, line {authors[-1][1]}" if authors else ""


def written(faults: Sequence[SessionFault]) -> str:
    """Encode *faults* as a header's value: JSON in ASCII."""
    return json.dumps([fault._asdict() for fault in faults], separators=(",", ":"))


def _traceback_of(error: BaseException) -> str:
    whole = traceback.TracebackException.from_exception(error)
    _leave_own_frames(whole)
    return "".join(whole.format())


def _leave_own_frames(one: traceback.TracebackException) -> None:
    """Remove this package's frames from the start of each traceback in a chain."""
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
