"""What can go wrong, as classes; a class exists only where somebody handles it differently.

A tool that fails is no error of the server: it is an outcome, and it never travels as one of these classes.
"""

from collections.abc import Mapping


class EnvServerError(Exception):
    """The root of this package's errors."""


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


class AuthorCancelled(EnvServerError):
    """The author's coroutine was cancelled, by the server or by itself; it has no result."""


def describe(error: BaseException) -> str:
    """Name *error* as ORS servers do in a 500: ``RuntimeError: message``."""
    return f"{type(error).__name__}: {error}"
