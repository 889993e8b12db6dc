"""What the os environment needs of a sandbox: the methods of `envserver.sandbox` that it calls, and no more.

Shell, judge and set-up know these protocols only, so that anything that runs commands in a root of its own will do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

HOME = "/root"
"""Where init scripts, shell and judge start: many tasks use `~` and relative paths."""

ENVIRONMENT: Mapping[str, str] = {
    "HOME": HOME,
    "USER": "root",
    "LOGNAME": "root",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
}
"""Equal for all processes of a session. Time zone and locale are named, so that dates and sorting are the same
everywhere."""


def is_refusal(error: Exception) -> bool:
    """Say whether *error* of a sandbox means that this file or program is not to be had, and the box is otherwise well.

    Told by its code, not by its class: the library is not imported where there are no sandboxes.
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
        """Give what there is, at most *max_bytes*.

        Empty at the end of the stream; nothing within *timeout_s* is empty with `is_closed` false, or a TimeoutError.
        """
        ...

    def silence(self) -> None:
        """Turn echo and the CR before each newline off, until something inside turns them on again."""
        ...

    async def interrupt(self) -> None: ...
    async def kill_foreground(self) -> None: ...
    async def close(self) -> None: ...


class Sandbox(Protocol):
    """A root file system with processes of its own."""

    @property
    def killed(self) -> str | None: ...
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
    async def read_file(self, path: str, *, max_bytes: int) -> bytes: ...
    async def close(self) -> None: ...


class Sandboxes(Protocol):
    """Where sandboxes come from."""

    async def open(self, layer: Any = None) -> Sandbox: ...
    async def layer(
        self,
        key: str,
        build: Callable[[Any], Awaitable[None]],
        *,
        moment: int | None = None,
        keeps_seconds: bool = False,
    ) -> Any: ...
