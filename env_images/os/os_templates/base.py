"""The parts of a template, and the bash that sets up a box without a clock, a network or chance."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

END = "END_OF_FILE"
FOLDERS = ("/srv/depot", "/srv/harbor", "/opt/atlas", "/opt/quartz", "/var/lib/meadow", "/home/shared", "/srv/tundra")
WORDS = (
    *("amber", "basil", "cedar", "delta", "ember", "fjord", "grove", "heron", "indigo", "juniper", "kelp", "lotus"),
    *(
        "maple",
        "nectar",
        "ochre",
        "pepper",
        "quill",
        "raven",
        "saffron",
        "tulip",
        "umber",
        "velvet",
        "willow",
        "zephyr",
    ),
)


@dataclass(frozen=True)
class Draft:
    """One drawn task without its name."""

    instruction: str
    init: tuple[str, ...]
    commands: tuple[str, ...]
    """The reference solution; if there is an answer, the last command prints only the answer."""
    answer: str | None = None
    """The answer, computed here in Python and again in the box by `example`."""
    example: str = ""
    """Bash that prints the expected value."""
    matcher: str = "integer-match"
    match: Mapping[str, Any] | None = None
    """Instead of `example`: the required answer, if it does not depend on the box's programs."""
    state: tuple[Mapping[str, str], ...] = ()
    """Instead of an answer: the checks of the end state."""
    wrong_answer: str | None = None
    wrong_commands: tuple[str, ...] = ()
    start: str = ""
    live: bool = False


@dataclass(frozen=True)
class Template:
    """A kind of task; all its tasks are in one split."""

    name: str
    topic: str
    split: Literal["train", "test"]
    difficulty: int
    """The difficulty from 1 (one command) to 3 (several commands, or a trap)."""
    draw: Callable[[Random], Draft]


def put(path: str, text: str) -> str:
    """Return a script that writes a file with *text*, which ends with a newline, and the folders above it."""
    folder = posixpath.dirname(path)
    return f"mkdir -p {shlex.quote(folder)}\ncat > {shlex.quote(path)} <<'{END}'\n{text}{END}"


def sized(path: str, size_bytes: int) -> str:
    """Return a script that makes a file of *size_bytes* zeros."""
    return f"mkdir -p {shlex.quote(posixpath.dirname(path))}\ntruncate -s {size_bytes} {shlex.quote(path)}"


def lines(*parts: str) -> str:
    """Join the parts of a script, which ends at the first failing part."""
    return "\n".join(("set -e", *parts))


def words(random: Random, count: int) -> list[str]:
    """Draw *count* different words."""
    return random.sample(WORDS, count)


def paths(random: Random, folder: str, count: int, *, suffix: str = "", depth: int = 2) -> list[str]:
    """Draw *count* different paths of files under *folder*, at most *depth* folders below it."""
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        between = words(random, random.randint(0, depth))
        drawn["/".join([folder, *between, f"{random.choice(WORDS)}-{random.randint(10, 99)}{suffix}"])] = None
    return list(drawn)


def shuffled(random: Random, parts: list[str]) -> list[str]:
    """Return *parts* in another order."""
    return random.sample(parts, len(parts))
