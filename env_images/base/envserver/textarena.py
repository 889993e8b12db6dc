"""Games of TextArena without the package around them, each with a random generator of its own.

A usual import of the package `textarena` loads its online play, its judges and their requirements (requests,
websockets, nltk, openai, chess). This module loads only the core and single games, under bare parent packages whose
`__init__` never runs. This takes 2 MiB and 15 ms, and needs no other package and no download. Nothing is loaded at
import, so that the base works without TextArena.

TextArena's games call `random.seed(…)` and `random.choice(…)`: one generator for the whole process, which every opening
session would reset. Instead, their modules get `DICE` under the name `random`. It passes each draw to the generator in
play in this thread. Outside of a game there is no generator, and the process's own random state is never touched.
"""

from __future__ import annotations

import contextvars
import importlib
import importlib.util
import random
import re
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

PACKAGE = "textarena"

GAME_ID = -1
"""TextArena's `GAME_ID`: the sender of the game's own messages."""

MAX_MOVE_CHARS = 100
"""The maximum characters of a move, more than any game's moves have; no game recognizes a longer move, which is cut."""

_MARKED = re.compile(r"\[([^\[\]]*)\]")

_in_play: contextvars.ContextVar[random.Random] = contextvars.ContextVar("dice_in_play")


class Dice:
    """A substitute for the module `random`, with all attributes of a `random.Random`."""

    Random = random.Random

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


def game_module(folder: str) -> ModuleType:
    """Import the game in *folder* below `textarena.envs`, so that it draws from `DICE`.

    Raises:
        ImportError: TextArena is not installed, or the game is not in its place.
    """
    envs = f"{_core().__name__}.envs"
    if envs not in sys.modules:
        _bare(envs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's, about the library's escape sequences
        module = importlib.import_module(f"{envs}.{folder}.env")
    if hasattr(module, "random"):
        module.random = DICE  # type: ignore[attr-defined]  # see the head
    return module


def new_messages(game: Any) -> str:
    """Return the messages of *game* since the last call, without the player's own messages."""
    _, observations = game.get_observation()
    return "\n".join(str(message).strip("\n") for sender, message, _ in observations if sender == GAME_ID)


def rules_of(prompt: str) -> frozenset[str]:
    """Return the lines of *prompt* that show a move in square brackets among other words."""
    lines = (line.strip() for line in prompt.splitlines())
    return frozenset(line for line in lines if _MARKED.search(line) and not _MARKED.fullmatch(line))


def move_of(message: str, rules: frozenset[str] = frozenset()) -> str:
    """Return the move in *message*: the text in its last pair of square brackets, or else the whole message.

    White space becomes single spaces. The last pair counts, because models think aloud before they decide. Lines that
    repeat *rules* do not count: an example in the rules is no move of the agent.
    """
    return moves_of(message, rules, most=1)[0]


def moves_of(message: str, rules: frozenset[str] = frozenset(), *, most: int) -> list[str]:
    """Return the last *most* moves in *message* in their order, at least one, each in the form of `move_of`."""
    if not rules.isdisjoint(line.strip() for line in message.splitlines()):
        message = "\n".join(line for line in message.splitlines() if line.strip() not in rules)
    texts = deque((marked[1] for marked in _MARKED.finditer(message)), maxlen=most) or [message]
    return [" ".join(text[: 10 * MAX_MOVE_CHARS].split())[:MAX_MOVE_CHARS] for text in texts]


def _core() -> ModuleType:
    """Return the package `textarena` with the few names that its games use."""
    if PACKAGE in sys.modules and hasattr(sys.modules[PACKAGE], "SinglePlayerState"):
        return sys.modules[PACKAGE]
    package = _bare(PACKAGE)
    core = importlib.import_module(f"{PACKAGE}.core")
    for name in ("GAME_ID", "Env", "Info", "ObservationType", "State"):
        setattr(package, name, getattr(core, name))
    state = importlib.import_module(f"{PACKAGE}.state")
    package.SinglePlayerState = state.SinglePlayerState  # type: ignore[attr-defined]  # a bare module from `_bare`
    for drawing in (core, state):
        drawing.random = DICE  # type: ignore[attr-defined]  # see the head
    return package


def _bare(name: str) -> ModuleType:
    """Make the package *name* importable without running its `__init__`."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"no package {name}", name=name)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    return module
