"""Prepared states that sandboxes fork from: made once per key, kept while there is room, never changed."""

import asyncio
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


class Layer:
    """A frozen state. It lives as long as somebody holds it: the cache, a sandbox on it, or the environment."""

    def __init__(self, key: str, number: int) -> None:
        self.key = key
        self.number = number
        """The spawner's name for it."""

    def __repr__(self) -> str:
        return f"<Layer {self.key!r} {self.number}>"


@dataclass
class _Making:
    task: "asyncio.Task[Layer]"
    waiting: int = 0


class Layers:
    """Keeps the *most* layers that were asked for last. *drop* is called with the number of one that nobody holds."""

    def __init__(self, most: int, *, drop: Callable[[int], None]) -> None:
        self._most = most
        self._drop = drop
        self._kept: OrderedDict[str, Layer] = OrderedDict()
        self._making: dict[str, _Making] = {}

    def __len__(self) -> int:
        return len(self._kept)

    async def get(self, key: str, make: Callable[[], Awaitable[int]]) -> Layer:
        """Give the layer of *key*; *make* gives the number of a new one and runs once for all who wait.

        Its failure is the failure of all who wait, and nothing of it stays: the next caller tries again. It ends with
        the last of its callers.
        """
        if (layer := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return layer
        making = self._making.get(key)
        if making is None:
            task = asyncio.get_running_loop().create_task(self._make(key, make))
            making = self._making[key] = _Making(task)
            # The next caller has to find a failed one gone, whoever's turn comes first.
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

    async def _make(self, key: str, make: Callable[[], Awaitable[int]]) -> Layer:
        number = await make()
        layer = Layer(key, number)
        weakref.finalize(layer, self._drop, number).atexit = False
        self._kept[key] = layer
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return layer

    def clear(self) -> None:
        self._kept.clear()
