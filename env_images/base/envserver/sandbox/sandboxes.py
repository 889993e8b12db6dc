"""Where sandboxes come from: one per worker."""

import asyncio
import itertools
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path

from envserver.sandbox.channel import Channel
from envserver.sandbox.errors import SandboxError
from envserver.sandbox.launch import SpawnerProcess, launch
from envserver.sandbox.layers import Layer, Layers
from envserver.sandbox.sandbox import Sandbox
from envserver.sandbox.values import Box, Limits

logger = logging.getLogger("envserver")
MOST_LAYERS = 32
"""Each is as large in memory as what its build wrote, at most ``disk_bytes``."""
_OPEN_S = 30.0
_RELEASE_S = 20.0
"""A kill and two unmounts; more means that the kernel cannot end a process."""


class Sandboxes:
    """Opens sandboxes through one spawner, which starts with the first of them.

    Args:
        box: the agent's root filesystem.
        work: an empty folder; what is mounted on it is seen by the spawner alone.
        limits: of each sandbox.
        most_layers: prepared states to keep.
    """

    def __init__(
        self, box: Box, work: str | Path = "/work", limits: Limits | None = None, *, most_layers: int = MOST_LAYERS
    ) -> None:
        self._box = box
        self._work = Path(work)
        self._limits = limits or Limits()
        self._numbers = itertools.count(1)
        self._first_number = 0
        """What has a smaller one was lost with a spawner."""
        self._starting = asyncio.Lock()
        self._is_closed = False
        self._spawner: SpawnerProcess | None = None
        self._ended: dict[int, asyncio.Future[None]] = {}
        self._open: dict[int, Sandbox] = {}
        self._below: dict[int, Layer] = {}
        self._layers = Layers(most_layers, drop=self._drop_later)
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Sandboxes {len(self._open)} open, {len(self._layers)} layers>"

    async def __aenter__(self) -> "Sandboxes":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def check(self) -> None:
        """Open a sandbox, run a program in it and close it.

        Raises:
            SandboxError: this machine can't; the message says what to change.
        """
        sandbox = await self.open()
        try:
            done = await sandbox.run(["/bin/cat", "/proc/self/uid_map"], cwd="/")
            if done.status != 0:
                raise SandboxError(f"a sandbox opens, but runs nothing: {done.stderr!r}", code="unsupported")
        finally:
            await sandbox.close()

    async def open(self, layer: Layer | None = None) -> Sandbox:
        """Open a sandbox on the box, or on *layer*.

        Raises:
            SandboxError: ``unsupported`` as for ``check``; ``full`` when there is no room for another one; ``ended``
                where *layer* was lost with its spawner.
        """
        return await self._opened(layer, is_build=False)

    async def _opened(self, layer: Layer | None, *, is_build: bool) -> Sandbox:
        """Open a sandbox; *is_build*: its files may be kept."""
        spawner = await self._started()
        if layer is not None and layer.number < self._first_number:
            raise SandboxError(f"the layer {layer.key!r} was lost with its spawner", code="ended")
        number = next(self._numbers)
        ended = self._ended[number] = asyncio.get_running_loop().create_future()
        expectation = spawner.channel.expect(number)
        channel: Channel | None = None
        try:
            async with asyncio.timeout(_OPEN_S):
                layers = [layer.number] if layer is not None else []
                await spawner.channel.send({"op": "open", "id": number, "layers": layers, "build": is_build})
                _, files = await expectation.get()
                channel = Channel(socket.socket(fileno=files[0]))
                await _ready(channel)
        except BaseException as error:  # a cancellation too: the trainer hung up
            self._undo(number, channel)
            if isinstance(error, TimeoutError):
                raise SandboxError("a sandbox did not open in time", code="full") from None
            raise
        finally:
            spawner.channel.forget(number)

        async def release() -> None:
            await self._wait_ended(number, ended)

        if layer is not None:
            self._below[number] = layer
        sandbox = self._open[number] = Sandbox(number, channel, limits=self._limits, release=release)
        return sandbox

    def _undo(self, number: int, channel: Channel | None) -> None:
        """Let go of what an opening that failed or was cancelled had; its supervisor ends when it is hung up on."""
        self._ended.pop(number, None)
        if channel is not None:
            channel.close()

    async def _wait_ended(self, number: int, ended: "asyncio.Future[None]") -> None:
        try:
            await asyncio.wait({ended}, timeout=_RELEASE_S)
            if not ended.done():
                logger.error("sandbox_stuck sandbox=%d wait_s=%.0f", number, _RELEASE_S)
        finally:
            self._ended.pop(number, None)
            self._open.pop(number, None)
            self._below.pop(number, None)

    async def layer(
        self,
        key: str,
        build: Callable[[Sandbox], Awaitable[object]],
        *,
        moment: int | None = None,
        keeps_seconds: bool = False,
    ) -> Layer:
        """Give the state that *build* makes of a fresh sandbox; it runs once per *key* while that is kept.

        Only files are kept: processes that *build* leaves behind are killed.

        Args:
            moment: seconds since the epoch. Files that *build* writes get this time instead of that of the build, so
                that they are the same in every worker.
            keeps_seconds: add to *moment* the whole seconds since the build began, for a build that sleeps to tell
                files apart by their times.

        Raises:
            SandboxError: no sandbox could be opened; and whatever *build* raises. Nothing stays then.
        """
        began = time.time_ns()
        dates = None
        if moment is not None:
            dates = {"moment": moment * 1_000_000_000, "began": began, "keeps_seconds": keeps_seconds}
        return await self._layers.get(key, lambda: self._build(build, dates))

    async def _build(self, build: Callable[[Sandbox], Awaitable[object]], dates: Mapping[str, object] | None) -> int:
        sandbox = await self._opened(None, is_build=True)
        try:
            await build(sandbox)
            if sandbox.is_closed:
                raise SandboxError(f"a build ended its sandbox: {sandbox.killed}", code="ended")
            await self._tell_spawner({"op": "keep", "room": sandbox.number, "dates": dates})
        except BaseException:  # a cancellation too
            await sandbox.close()
            self._drop_later(sandbox.number)  # the spawner may keep it by now
            raise
        await sandbox.close()
        return sandbox.number

    async def _tell_spawner(self, message: dict[str, object]) -> None:
        spawner = await self._started()
        number = next(self._numbers)
        expectation = spawner.channel.expect(number)
        try:
            async with asyncio.timeout(_OPEN_S):
                await spawner.channel.send({**message, "id": number})
                await expectation.get()
        except TimeoutError:
            raise SandboxError("the spawner does not answer", code="ended") from None
        finally:
            spawner.channel.forget(number)

    def _drop_later(self, number: int) -> None:
        if self._spawner is None or self._spawner.channel.is_closed:
            return
        task = asyncio.get_running_loop().create_task(self._drop(number))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drop(self, number: int) -> None:
        with suppress(SandboxError):  # the spawner is gone, and the layer with it
            await self._tell_spawner({"op": "drop", "room": number})

    async def _started(self) -> SpawnerProcess:
        async with self._starting:
            if self._spawner is not None and self._spawner.channel.is_closed:
                self._spawner.stop()
                self._spawner = None
            if self._spawner is None:
                self._check_open()
                self._layers.clear()  # they were the last spawner's
                spawner = await launch(self._box, self._work, self._limits)
                if self._is_closed:  # while it started
                    spawner.stop()
                self._check_open()
                self._spawner = spawner
                self._spawner.channel.listen(self._on_event, self._on_spawner_end)
            return self._spawner

    def _check_open(self) -> None:
        if self._is_closed:
            raise SandboxError("the sandboxes are closed", code="ended")

    def _on_event(self, event: dict[str, object]) -> None:
        ended = self._ended.get(int(str(event.get("ended", 0))))
        if ended is not None and not ended.done():
            ended.set_result(None)

    def _on_spawner_end(self) -> None:
        """Every sandbox and layer dies with the spawner; the next ``open`` starts another."""
        self._layers.clear()
        self._first_number = next(self._numbers)
        for ended in self._ended.values():
            if not ended.done():
                ended.set_result(None)

    async def close(self) -> None:
        """End every sandbox, drop every layer and stop the spawner; no more are opened. Idempotent.

        What is being opened or built meanwhile fails with a ``SandboxError``, ``ended``.
        """
        self._is_closed = True
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._open.values())))
        for task in list(self._tasks):
            task.cancel()
        spawner, self._spawner = self._spawner, None
        self._layers.clear()
        if spawner is not None:
            spawner.stop()
        async with self._starting:  # a spawner that was just starting is stopped by whoever started it
            pass


async def _ready(channel: Channel) -> None:
    event = await channel.next_event()
    if event.get("event") != "ready":
        reason = event.get("error", "it ended while it was opened")
        raise SandboxError(f"a sandbox did not open: {reason}; see SANDBOX.md, 'Machines'", code="unsupported")
