"""A problem: its statement, its hand-made examples, hidden inputs, a right solution and a wrong solution.

The examples' outputs are written by hand, and the reference computes the hidden outputs. Each checks the other: the
reference must give the examples' outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem: for a function with the name `slug`, or for a program if the reference defines no such function."""

    slug: str
    level: int
    """The level from 1 (easy) to 3 (hard)."""
    topic: str
    text: str
    """The statement without the name and the form of the solution, which `statement` adds."""
    reference: str
    """Python code; the function's `def` line is the signature that the statement shows."""
    wrong: tuple[str, str]
    """A piece of the reference, and a plausible mistake in its place."""
    examples: Sequence[tuple[Any, Any]]
    """(arguments, output) for a function, with a tuple of arguments; (input, output) for a program."""
    hidden: Sequence[Any]
    """Tuples of arguments, or inputs of a program."""
    revision: int = 1
    """Number of the problem's revision. Each change of the task, or of how it is judged, gives the task another id."""

    @property
    def signature(self) -> str | None:
        """The `def` line of the function, or None for a program."""
        start = f"def {self.slug}("
        return next((line.rstrip(":") for line in self.reference.splitlines() if line.startswith(start)), None)

    @property
    def is_yes_or_no(self) -> bool:
        """Whether the answers are yes or no."""
        return (self.signature or "").endswith("-> bool")

    def task_id(self, split: str) -> str:
        """Return the id of the problem's task in *split*."""
        return f"{split}-{self.slug}" + (f"-{self.revision}" if self.revision > 1 else "")

    @property
    def wrong_solution(self) -> str:
        """The reference with the mistake in it."""
        right, mistaken = self.wrong
        assert self.reference.count(right) == 1, f"{self.slug}: {right!r} is not once in the reference"
        return self.reference.replace(right, mistaken)

    @property
    def statement(self) -> str:
        """The problem for the agent, without the examples."""
        text = " ".join(self.text.split())
        if (signature := self.signature) is not None:
            return f"{text}\n\nWrite the function `{signature}`."
        return f"{text}\n\nWrite a program that reads standard input and prints to standard output."


def each(*values: Any) -> list[tuple[Any]]:
    """Return the arguments of a function with one parameter, one tuple for each of *values*."""
    return [(value,) for value in values]
