"""The sandbox interface that the os environment needs: only the methods of `envserver.sandbox` that it calls.

Shell, judge and setup use only these protocols, so any implementation with its own root directory works.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

HOME = "/root"
"""The start directory of init scripts, shell and judge: many tasks use `~` and relative paths."""

ENVIRONMENT: Mapping[str, str] = {
    "HOME": HOME,
    "USER": "root",
    "LOGNAME": "root",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
}
"""The same variables for all processes of a session. Time zone and locale are set, so dates and sorting never vary."""


def is_refusal(error: Exception) -> bool:
    """Return True if a sandbox's *error* refuses this file or program only, while the box is otherwise intact.

    The error's code decides, not its class, because the library is not imported where there are no sandboxes.
    """
    return isinstance(error, OSError) or getattr(error, "code", None) == "refused"


class Completed(Protocol):
    """A process that has ended."""

    @property
    def status(self) -> int: ...
    @property
    def stdout(self) -> bytes: ...
    @property
    def stderr(self) -> bytes: ...
    @property
    def timed_out(self) -> bool: ...
    @property
    def truncated(self) -> bool: ...


class Terminal(Protocol):
    """A process on a pseudo terminal."""

    @property
    def is_closed(self) -> bool: ...
    async def write(self, data: bytes, /) -> None: ...
    async def read(self, max_bytes: int, timeout_s: float) -> bytes:
        """Return the available bytes, at most *max_bytes*.

        The result is empty at the end of the stream. If no byte arrives within *timeout_s*, the result is empty with
        `is_closed` False, or the method raises TimeoutError.
        """
        ...

    def silence(self) -> None:
        """Turn off echo and the CR before each newline, until a program inside turns them on again."""
        ...

    async def interrupt(self) -> None: ...
    async def kill_foreground(self) -> None: ...
    async def close(self) -> None: ...


class Sandbox(Protocol):
    """A root file system with its own processes."""

    judged: Any
    """A judge's claim to CPU time for the next `run`, an `envserver.sandbox.Judged`, or None."""

    @property
    def killed(self) -> str | None: ...
    @property
    def oom_kills(self) -> int:
        """The number of programs that the kernel has killed because the worker was out of memory."""
        ...

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str = HOME,
        env: Mapping[str, str] = {},
        user: str = "root",
        timeout_s: float = 30.0,
        output_bytes: int | None = None,
    ) -> Completed: ...
    async def terminal(
        self, argv: Sequence[str], *, cwd: str = HOME, env: Mapping[str, str] = {}, rows: int = 24, cols: int = 80
    ) -> Terminal: ...
    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None: ...
    async def freeze(self) -> None:
        """Stop all processes inside for good."""
        ...

    async def read_file(self, path: str, *, max_bytes: int) -> bytes: ...
    async def open_folder(self, path: str) -> int:
        """Return a file descriptor of the folder *path*; the caller closes it."""
        ...

    async def close(self) -> None: ...


class Sandboxes(Protocol):
    """Opens sandboxes and keeps layers."""

    async def open(self, layer: Any = None) -> Sandbox: ...
    async def layer(
        self,
        key: str,
        build: Callable[[Any], Awaitable[None]],
        *,
        moment: int | None = None,
        keeps_seconds: bool = False,
    ) -> Any: ...
