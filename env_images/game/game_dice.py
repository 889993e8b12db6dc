"""Randomness for games that draw from Python's module `random`, so that sessions of one process do not share it.

TextArena's games call `random.seed(…)` and `random.choice(…)`: one generator for the whole process, which every opening
session would reset. Instead, their modules get `DICE` under the name `random`. It passes each draw to the generator in
play in this thread. Outside of a game there is no generator, and the process's own random state is never touched.
"""

from __future__ import annotations

import contextvars
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_in_play: contextvars.ContextVar[random.Random] = contextvars.ContextVar("dice_in_play")


class Dice:
    """A substitute for the module `random`, with all attributes of a `random.Random`."""

    def __getattr__(self, name: str) -> Any:
        """Return the method of the generator in play.

        Raises:
            LookupError: No generator is in play.
        """
        return getattr(_in_play.get(), name)

    @contextmanager
    def of(self, generator: random.Random) -> Iterator[None]:
        """Use *generator* as the source of random numbers for the code in the block."""
        token = _in_play.set(generator)
        try:
            yield
        finally:
            _in_play.reset(token)


DICE = Dice()
