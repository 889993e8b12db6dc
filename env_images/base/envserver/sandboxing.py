"""The sandboxes of one environment class: opened when the server starts, retried until they work."""

import asyncio
import logging
import os
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from envserver.errors import Refused
from envserver.execution.runner import Place, Runner
from envserver.schema.environment_types import Kind
from envserver.settings import SandboxSettings

if TYPE_CHECKING:  # a bare server does not import these modules
    from envserver.sandbox import Box, Limits, Sandboxes

logger = logging.getLogger("envserver")
CLOSE_S = 0.9
"""Seconds for closing, out of the five seconds that a stop may take. Anything left then dies with the process."""
_MIB = 1024 * 1024


class Sandboxing:
    """Creates the class's ``Sandboxes`` on the lane that all of its sessions share. Used from the server's thread only.

    Without sandboxes no session of the class starts.
    """

    def __init__(self, kind: Kind, limits: "Limits", *, settings: SandboxSettings, runner: Runner) -> None:
        """
        Raises:
            NoThread: No thread could start for the lane.
        """
        self._kind = kind
        self._limits = bounded(limits, settings)
        self._settings = settings
        self._runner = runner
        runner.keep(kind.place)
        self._place = Place(kind.place)
        self._sandboxes: Sandboxes | None = None
        self._made: list[str] = []
        """Folders that this server created, the inner folder first."""
        self._attempt: asyncio.Task[str] | None = None
        self._stopped = asyncio.get_running_loop().create_future()
        """Done when no more attempts are made."""
        self._told = ""
        self.is_ready = False
        """Whether a sandbox could be opened."""

    async def refusal(self) -> str:
        """Wait for the current attempt, or make another. Return the reason and the remedy if there are no sandboxes.

        Returns an empty text if a sandbox could be opened.

        Raises:
            Refused: 503: The server is stopping.
        """
        if self.is_ready:
            return ""
        attempt = self.start()
        await asyncio.wait((attempt, self._stopped), return_when=asyncio.FIRST_COMPLETED)
        if not attempt.done() or self._stopped.done():
            raise Refused(503, "the server is shutting down")
        reason = attempt.result()
        return f"no sandboxes: {reason}" if reason else ""

    def start(self) -> "asyncio.Task[str]":
        """Start an attempt in the background unless one is running. Building a box takes seconds."""
        if self._attempt is None or (self._attempt.done() and not self._stopped.done()):
            self._attempt = asyncio.get_running_loop().create_task(self._try())
        return self._attempt

    async def _try(self) -> str:
        """Create the sandboxes and open one. Return the reason for a failure, or an empty text on success."""
        try:
            await self._make()
        except Exception as error:  # noqa: BLE001  # the server continues: a repaired machine needs no restart
            text = str(error) or type(error).__name__
            if text != self._told and not self._stopped.done():
                logger.warning("sandboxes_refused environment=%s error=%s", self._kind.name, text)
            self._told = text
            return text
        self.is_ready = True
        return ""

    async def _make(self) -> None:
        from envserver.sandbox import Sandboxes

        box, work = await self._runner.run(self._place, self._furnish)
        if self._stopped.done():
            raise RuntimeError("the server is shutting down")
        sandboxes = self._sandboxes = Sandboxes(box, work, self._limits)
        try:
            await self._runner.run(self._place, sandboxes.check)
            if self._stopped.done():  # meanwhile another server in this process may have set the class's sandboxes
                raise RuntimeError("the server is shutting down")
        except BaseException:
            await self._runner.run(self._place, sandboxes.close)
            raise
        self._kind.cls.sandboxes = sandboxes

    def _furnish(self) -> "tuple[Box, str]":
        """Find or create the box and the work folder. Runs in a thread, and takes some seconds the first time."""
        from envserver.sandbox import Box, SandboxError
        from envserver.sandbox.hostbox import box_of_host

        settings = self._settings
        if settings.host:
            box = box_of_host(settings.box)
            self._made = self._made or _make_folders(settings.work)
            return box, self._made[0]
        for path, name, what in (
            (settings.box, "SANDBOX_BOX", "the box"),
            (settings.work, "SANDBOX_WORK", "the work folder"),
        ):
            if not os.path.isdir(path):
                raise SandboxError(
                    f"{what} {path} is not a directory: use an image made for sandboxes, set ENVSERVER_{name}, or set "
                    "ENVSERVER_SANDBOX_HOST=1 to make both of this machine's own programs",
                    code="unsupported",
                )
        return Box(settings.box), settings.work

    def give_up(self) -> None:
        """Make no more attempts, and refuse the callers that wait for one."""
        if not self._stopped.done():
            self._stopped.set_result(None)

    async def close(self) -> None:
        """End every sandbox, layer and spawner. Remove the work folder if this server created it."""
        self.give_up()
        self.is_ready = False
        endings: list[asyncio.Future[Any]] = [self._attempt] if self._attempt is not None else []
        sandboxes, self._sandboxes = self._sandboxes, None
        if sandboxes is not None:
            endings.append(asyncio.ensure_future(self._runner.run(self._place, sandboxes.close)))
        if endings:
            done, left = await asyncio.wait(endings, timeout=CLOSE_S)
            if left or any(ending.exception() is not None for ending in done):
                logger.warning("sandboxes_left environment=%s", self._kind.name)
        with suppress(OSError):  # another server's folder is in it, or the operator removed it
            for folder in self._made:
                os.rmdir(folder)


def bounded(limits: "Limits", settings: SandboxSettings) -> "Limits":
    """Return the class's *limits* with the values that *settings* sets in their place."""
    given = {
        "memory_bytes": settings.memory_mib and settings.memory_mib * _MIB,
        "pids": settings.pids,
        "disk_bytes": settings.disk_mib and settings.disk_mib * _MIB,
        "cpu_s": settings.cpu_s,
    }
    return replace(limits, **{name: value for name, value in given.items() if value is not None})


def _make_folders(work: str) -> list[str]:
    """Create a work folder for this server below *work*, and *work* if it is missing. Return the created folders.

    The server does not use *work* itself. Removing a folder on which another server has mounted something would unmount
    it there.
    """
    import tempfile

    made = [] if os.path.isdir(work) else [work]
    os.makedirs(work, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="worker-", dir=work)
    os.chmod(folder, 0o755)  # the spawner's root, an ordinary user outside, has to reach it
    return [folder, *made]
