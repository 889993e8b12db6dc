"""The sandbox interface that this environment needs, as protocols, which `envserver.sandbox` provides.

All methods are asynchronous and bounded. A sandbox has its own writable root directory and no network.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from envserver import SessionLost
from envserver.sandbox import Judged

ENVIRONMENT: Mapping[str, str] = {
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "TERM": "dumb",
}
"""The whole environment of every process that this environment starts in a sandbox."""

ITS_OWN_DOING = ("memory", "pids", "init", "stuck")
"""Reasons of a watchdog that are the code's own fault: memory, processes, a killed first process, or a new
program that could not start.

Any other end of a sandbox is a fault of the infrastructure.
"""


class Completed(Protocol):
    """The end of a process."""

    @property
    def status(self) -> int | None:
        """The exit status; negative, or 128 and more, for a signal."""

    @property
    def stdout(self) -> bytes:
        """The standard output, up to the bound."""

    @property
    def stderr(self) -> bytes:
        """The standard error, up to the bound."""

    @property
    def timed_out(self) -> bool:
        """True if the process was killed at its time limit."""

    @property
    def truncated(self) -> bool:
        """True if the output exceeded the bound."""


class Sandbox(Protocol):
    """One open sandbox."""

    judged: Judged | None
    """The judge's claim to CPU time, set before `run`; afterwards it describes that run."""

    @property
    def killed(self) -> str | None:
        """The reason why a watchdog ended the sandbox ("memory", "pids", …); None while it lives."""

    @property
    def oom_kills(self) -> int:
        """The number of programs that the kernel has killed because the worker was out of memory."""

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str = "/root",
        env: Mapping[str, str] = ...,
        user: str = "root",
        timeout_s: float = 30.0,
        output_bytes: int | None = None,
    ) -> Completed:
        """Run a process to its end or to *timeout_s*."""

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file inside; its directory must exist."""

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        """Read a file inside."""

    async def close(self) -> None:
        """Kill all processes in the sandbox and free its resources; may be called again."""


class Sandboxes(Protocol):
    """Opens sandboxes; a worker has one."""

    async def open(self, layer: Any = None) -> Sandbox:
        """Open a fresh sandbox, on top of *layer* if given."""

    async def layer(self, key: str, build: Callable[[Any], Awaitable[None]], *, moment: int | None = None) -> Any:
        """Return the layer that *build* makes in a sandbox; it runs once for each *key* that is still kept.

        Its files are dated at *moment*, in seconds since the epoch, if given.
        """


class SandboxFault(SessionLost):
    """A sandbox failed through a fault of the infrastructure and not of the solution, so there is no reward."""


class Stopped(Exception):
    """A watchdog ended a sandbox because of the code in it: the outcome of a case, not a fault."""


@asynccontextmanager
async def to_judge_in(sandboxes: Sandboxes, error: type[Exception], layer: Any = None) -> AsyncIterator[Sandbox]:
    """Open a sandbox for judging and close it; *error* is the exception of a sandbox that cannot continue.

    Raises:
        Stopped: The watchdog ended it because of the code in it.
        SandboxFault: It failed for another reason; there is no verdict.
    """
    try:
        sandbox = await sandboxes.open(layer)
    except error as cause:
        raise SandboxFault(f"no sandbox could be opened to judge in: {cause}") from cause
    before = sandbox.oom_kills
    try:
        yield sandbox
        _refuse_kills(sandbox, before)
    except error as cause:
        _refuse_kills(sandbox, before)
        if sandbox.killed not in ITS_OWN_DOING:
            raise SandboxFault(f"a sandbox failed while it judged: {cause}") from cause
        raise Stopped(f"stopped by the watchdog: {sandbox.killed}") from cause
    finally:
        await sandbox.close()


def _refuse_kills(sandbox: Sandbox, before: int) -> None:
    """Refuse a judgement during which the kernel killed programs, because they may be the judged ones.

    Raises:
        SandboxFault: The kernel killed programs of the worker.
    """
    if sandbox.oom_kills != before:
        raise SandboxFault("the worker was out of memory while it judged, and the kernel killed programs in it")
