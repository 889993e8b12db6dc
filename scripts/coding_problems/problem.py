"""A problem: its statement, its examples worked by hand, hidden inputs, a right solution and a wrong one.

The examples' outputs are written by hand and the hidden ones computed by the reference, so that neither is believed
alone: the reference has to give the examples' outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem, for a function of the name `slug` or, where no function of this name is defined, a program."""

    slug: str
    level: int
    """1 (easy) to 3 (hard)."""
    topic: str
    text: str
    """Without the name and the form of the solution, which `statement` adds."""
    reference: str
    """Python; the function's `def` line is the signature that the statement shows."""
    wrong: tuple[str, str]
    """A piece of the reference and what a plausible mistake has in its place."""
    examples: Sequence[tuple[Any, Any]]
    """(arguments, output) for a function, with a tuple of arguments; (input, output) for a program."""
    hidden: Sequence[Any]
    """Tuples of arguments, or inputs of a program."""

    @property
    def signature(self) -> str | None:
        """The `def` line of the function; None for a program."""
        start = f"def {self.slug}("
        return next((line.rstrip(":") for line in self.reference.splitlines() if line.startswith(start)), None)

    @property
    def wrong_solution(self) -> str:
        """The reference with the mistake in it."""
        right, mistaken = self.wrong
        assert self.reference.count(right) == 1, f"{self.slug}: {right!r} is not once in the reference"
        return self.reference.replace(right, mistaken)

    @property
    def statement(self) -> str:
        """What the agent is asked, without the examples."""
        text = " ".join(self.text.split())
        if (signature := self.signature) is not None:
            return f"{text}\n\nWrite the function `{signature}`."
        return f"{text}\n\nWrite a program that reads standard input and prints to standard output."


def each(*values: Any) -> list[tuple[Any]]:
    """Make the arguments of a function that takes one out of each of *values*."""
    return [(value,) for value in values]
