"""Opens a worker's sandboxes, and keeps the layers that they fork from."""

import asyncio
import itertools
import logging
import socket
import time
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from envserver.sandbox.channel import Channel
from envserver.sandbox.launch import SpawnerProcess, launch
from envserver.sandbox.oom import oom_kills
from envserver.sandbox.sandbox import Sandbox
from envserver.sandbox.values import Box, Limits, SandboxError

logger = logging.getLogger("envserver")
MOST_LAYERS = 32
"""Maximum number of kept layers. Each takes as much memory as its build wrote, at most ``disk_bytes``."""
LAYER_DISKS = 4
"""Maximum memory of the kept layers together, in ``disk_bytes``. A layer that a sandbox uses counts, and stays."""
_OPEN_S = 30.0
_RELEASE_S = 20.0
"""Seconds for a kill and two unmounts. If they take longer, the kernel cannot end a process."""


class Layer:
    """A prepared state that sandboxes fork from. It never changes.

    It lives as long as a reference to it: from the cache, from a sandbox on it, or from the environment.
    """

    def __init__(self, key: str, number: int) -> None:
        self.key = key
        self.number = number
        """The spawner's number of the layer."""


@dataclass
class _Making:
    task: "asyncio.Task[Layer]"
    waiting: int = 0


class Layers:
    """Keeps the layers that were used last: at most *most*. The layers that are in use count for *most_bytes* too.

    *drop* is called with the number of a layer without references.
    """

    def __init__(self, most: int, most_bytes: int, *, drop: Callable[[int], None]) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._drop = drop
        self._bytes: dict[int, int] = {}
        """The bytes of each layer with a reference, by its number."""
        self._kept: OrderedDict[str, Layer] = OrderedDict()
        self._making: dict[str, _Making] = {}

    def __len__(self) -> int:
        return len(self._kept)

    async def get(self, key: str, make: Callable[[], Awaitable[tuple[int, int]]]) -> Layer:
        """Return the layer of *key*. *make* returns a layer's number and bytes, and runs once for all waiting callers.

        If it fails, all waiting callers fail and nothing is kept: the next caller tries again. If the last caller is
        cancelled, so is *make*.
        """
        if (layer := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return layer
        making = self._making.get(key)
        if making is None:
            task = asyncio.get_running_loop().create_task(self._make(key, make))
            making = self._making[key] = _Making(task)
            # The next caller must not find a failed attempt, regardless of the order of wake-ups.
            task.add_done_callback(lambda _: self._forget(key, making))
        making.waiting += 1
        try:
            return await asyncio.shield(making.task)
        finally:
            making.waiting -= 1
            if not making.waiting and not making.task.done():
                self._forget(key, making)
                making.task.cancel()
                await asyncio.wait({making.task}, timeout=20.0)

    def _forget(self, key: str, making: _Making) -> None:
        if self._making.get(key) is making:
            del self._making[key]

    async def _make(self, key: str, make: Callable[[], Awaitable[tuple[int, int]]]) -> Layer:
        number, self._bytes[number] = await make()
        layer = Layer(key, number)
        weakref.finalize(layer, self._on_last_reference, number).atexit = False
        self._kept[key] = layer
        while len(self._kept) > self._most or (len(self._kept) > 1 and sum(self._bytes.values()) > self._most_bytes):
            self._kept.popitem(last=False)
        return layer

    def _on_last_reference(self, number: int) -> None:
        self._bytes.pop(number, None)
        self._drop(number)

    def clear(self) -> None:
        self._kept.clear()


class Sandboxes:
    """Opens sandboxes through one spawner, which starts with the first sandbox.

    Args:
        box: The agent's root filesystem.
        work: An empty folder. Only the spawner sees the mounts in it.
        limits: Limits of each sandbox.
        most_layers: Maximum number of kept layers.
        most_layer_bytes: Maximum memory of the kept layers together; by default four times ``disk_bytes``.
    """

    def __init__(
        self,
        box: Box,
        work: str | Path = "/work",
        limits: Limits | None = None,
        *,
        most_layers: int = MOST_LAYERS,
        most_layer_bytes: int | None = None,
    ) -> None:
        self._box = box
        self._work = Path(work)
        self._limits = limits or Limits()
        self._numbers = itertools.count(1)
        self._first_number = 0
        """Lowest valid number. Sandboxes and layers with lower numbers were lost with a spawner."""
        self._starting = asyncio.Lock()
        self._is_closed = False
        self._spawner: SpawnerProcess | None = None
        self._ended: dict[int, asyncio.Future[int]] = {}
        """The ends of the open sandboxes, with the bytes that each leaves as a layer."""
        self._open: dict[int, tuple[Sandbox, Layer | None]] = {}
        if most_layer_bytes is None:
            most_layer_bytes = LAYER_DISKS * self._limits.disk_bytes
        self._layers = Layers(most_layers, most_layer_bytes, drop=self._drop_later)
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
            SandboxError: This machine does not support sandboxes. The message states the remedy.
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
            SandboxError: ``unsupported``: see ``check``. ``full``: there is no room for another sandbox. ``ended``:
                *layer* was lost with its spawner.
        """
        return await self._opened(layer, is_build=False)

    async def _opened(self, layer: Layer | None, *, is_build: bool) -> Sandbox:
        """Open a sandbox. *is_build*: its files may be kept as a layer."""
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
        except BaseException as error:  # also a cancellation: the trainer disconnected
            self._undo(number, channel)
            if isinstance(error, TimeoutError):
                raise SandboxError("a sandbox did not open in time", code="full") from None
            raise
        finally:
            spawner.channel.forget(number)

        async def release() -> None:
            await self._wait_ended(number, ended)

        pid = spawner.process.pid
        sandbox = Sandbox(number, channel, limits=self._limits, release=release, oom_kills=lambda: oom_kills(pid))
        self._open[number] = sandbox, layer  # an open sandbox keeps its layer alive
        return sandbox

    def _undo(self, number: int, channel: Channel | None) -> None:
        """Release the resources of a failed or cancelled opening. Its supervisor ends when its connection closes."""
        self._ended.pop(number, None)
        if channel is not None:
            channel.close()

    async def _wait_ended(self, number: int, ended: "asyncio.Future[int]") -> None:
        try:
            await asyncio.wait({ended}, timeout=_RELEASE_S)
            if not ended.done():
                logger.error("sandbox_stuck sandbox=%d wait_s=%.0f", number, _RELEASE_S)
        finally:
            self._ended.pop(number, None)
            self._open.pop(number, None)

    async def layer(
        self,
        key: str,
        build: Callable[[Sandbox], Awaitable[object]],
        *,
        moment: int | None = None,
        keeps_seconds: bool = False,
    ) -> Layer:
        """Return the layer that *build* creates in a new sandbox. *build* runs once per *key* while the layer is kept.

        Only files are kept: processes that *build* leaves behind are killed.

        Args:
            moment: Seconds since the epoch. Files that *build* writes get this time instead of the build's, so that
                they are the same in every worker.
            keeps_seconds: Add to *moment* the whole seconds since the build started. For a build that sleeps to
                distinguish files by their times.

        Raises:
            SandboxError: No sandbox could open. Exceptions of *build* propagate too. In both cases nothing is kept.
        """
        began = time.time_ns()
        dates = None
        if moment is not None:
            dates = {"moment": moment * 1_000_000_000, "began": began, "keeps_seconds": keeps_seconds}
        return await self._layers.get(key, lambda: self._build(build, dates))

    async def _build(
        self, build: Callable[[Sandbox], Awaitable[object]], dates: Mapping[str, object] | None
    ) -> tuple[int, int]:
        """Return the number and the bytes of the layer that *build* makes."""
        sandbox = await self._opened(None, is_build=True)
        ended = self._ended[sandbox.number]
        try:
            await build(sandbox)
            if sandbox.is_closed:
                raise SandboxError(f"a build ended its sandbox: {sandbox.killed}", code="ended")
            await self._tell_spawner({"op": "keep", "room": sandbox.number, "dates": dates})
        except BaseException:  # also a cancellation
            await sandbox.close()
            self._drop_later(sandbox.number)  # the spawner may already keep it
            raise
        await sandbox.close()
        return sandbox.number, ended.result() if ended.done() else self._limits.disk_bytes

    async def _tell_spawner(self, message: dict[str, object]) -> None:
        spawner = await self._started()
        with spawner.channel.expect(next(self._numbers)) as expectation:
            try:
                async with asyncio.timeout(_OPEN_S):
                    await spawner.channel.send({**message, "id": expectation.number})
                    await expectation.get()
            except TimeoutError:
                raise SandboxError("the spawner does not answer", code="ended") from None

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
                self._layers.clear()  # they belonged to the last spawner
                spawner = await launch(self._box, self._work, self._limits)
                if self._is_closed:  # during the start
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
            ended.set_result(int(str(event["kept_bytes"])))

    def _on_spawner_end(self) -> None:
        """Record that all sandboxes and layers died with the spawner. The next ``open`` starts another."""
        self._layers.clear()
        self._first_number = next(self._numbers)
        for ended in self._ended.values():
            if not ended.done():
                ended.set_result(0)

    async def close(self) -> None:
        """End every sandbox, drop every layer, stop the spawner and open no more sandboxes. Idempotent.

        Openings and builds in progress fail with a ``SandboxError``, ``ended``.
        """
        self._is_closed = True
        await asyncio.gather(*(sandbox.close() for sandbox, _ in list(self._open.values())))
        for task in list(self._tasks):
            task.cancel()
        spawner, self._spawner = self._spawner, None
        self._layers.clear()
        if spawner is not None:
            spawner.stop()
        async with self._starting:  # a caller that is just starting a spawner stops it
            pass


async def _ready(channel: Channel) -> None:
    event = await channel.next_event()
    if event.get("event") != "ready":
        reason = event.get("error", "it ended while it was opened")
        raise SandboxError(f"a sandbox did not open: {reason}; see SANDBOX.md, 'Machines'", code="unsupported")
