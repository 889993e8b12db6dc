"""Randomness for games that draw from Python's module `random`, so that sessions of one process do not share it.

TextArena's games call `random.seed(…)` and `random.choice(…)`: one generator for the whole process, which every session
that opens would set back. Their modules are given `DICE` under the name `random` instead. It passes each draw on to the
generator that is in play in this thread; outside of a game there is none, and nothing of the process's own is touched.
"""

from __future__ import annotations

import contextvars
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_in_play: contextvars.ContextVar[random.Random] = contextvars.ContextVar("dice_in_play")


class Dice:
    """Stands for the module `random`; has whatever a `random.Random` has."""

    def __getattr__(self, name: str) -> Any:
        """Give the method of the generator in play.

        Raises:
            LookupError: no generator is in play.
        """
        return getattr(_in_play.get(), name)

    @contextmanager
    def of(self, generator: random.Random) -> Iterator[None]:
        """Put *generator* into play for what runs inside the block."""
        token = _in_play.set(generator)
        try:
            yield
        finally:
            _in_play.reset(token)


DICE = Dice()
