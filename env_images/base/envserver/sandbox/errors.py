"""The one error of this package."""

from envserver.errors import EnvServerError


class SandboxError(EnvServerError):
    """A sandbox could not be opened, or cannot do what was asked; the message says why and what to do.

    A command that fails is no error: it is a ``Completed`` with its status.

    Attributes:
        code: ``unsupported`` (this machine can't), ``ended`` (the sandbox is gone: closed, killed by its watchdog or by
            its own agent), ``refused`` (this request can't be done: no such file, no such program, too large) or
            ``full`` (no room: disk, processes, sandboxes).
    """

    def __init__(self, message: str, *, code: str = "refused") -> None:
        super().__init__(message)
        self.code = code

    @property
    def is_infrastructure(self) -> bool:
        """Whether the sandbox is at fault, and not what was asked of it."""
        return self.code != "refused"
