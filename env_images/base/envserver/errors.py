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
    """Raised by an environment's code: what the session stands on is broken, so it has no reward and can't go on.

    A judge that cannot judge, a sandbox that is lost: the trainer sees an error, and every later call is refused with
    it. A failure that the agent brought about, or can mend, is none of these: return a result, or raise anything else.
    """


class AuthorCancelled(EnvServerError):
    """The author's coroutine was cancelled, by the server or by itself; it has no result."""


def describe(error: BaseException) -> str:
    """Name *error* as ORS servers do in a 500: ``RuntimeError: message``."""
    return f"{type(error).__name__}: {error}"
