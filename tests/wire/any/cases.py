"""The images of ``tests/foreign`` as a trainer sees them: what is asked, how an episode is won, and how it is lost."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Act:
    """One action in the spellings that the three protocols have."""

    tool: str
    arguments: Mapping[str, Any]
    text: str = ""
    """As a model writes it; empty: it can only be said as a tool call."""
    is_plain: bool = False
    """Whether OpenEnv's clients say the arguments alone."""


Agent = Callable[[Sequence[str]], Act]
"""From what was seen so far, the prompt first, to the next action."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """An environment, on an image or a process that knows nothing of the gateway."""

    environment: str
    tasks: int
    """In ``train``."""
    asked: str
    """Stands in the prompt of the first of them."""
    tools: frozenset[str]
    right: Agent
    """Ends the episode with a reward of 1.0."""
    wrong: Agent
    """Ends it with less."""
    turns: int = 8
    own: Sequence[str] = ("openenv-0.10.0", "openenv-0.2.0")
    """The clients of the image's own protocol."""
    port: int = 8000
    is_local: bool = True
    """Whether what it needs to run without an engine is made by scripts/openenv-clients."""

    @property
    def image(self) -> str:
        """The folder of its image in ``tests/foreign``."""
        return self.environment.removesuffix("-guess")


def count_up(seen: Sequence[str]) -> Act:
    """Increase the counter by one."""
    return Act(tool="step", arguments={"op": "inc"}, text="inc", is_plain=True)


def give_up(seen: Sequence[str]) -> Act:
    """Increase it once, then stop."""
    op = "inc" if len(seen) == 1 else "stop"
    return Act(tool="step", arguments={"op": op}, text=op, is_plain=True)


def finish(word: str) -> Agent:
    """Try another tool, then answer with *word*."""

    def agent(seen: Sequence[str]) -> Act:
        if len(seen) == 1:
            return Act(tool="echo_message", arguments={"message": "hello"})
        return Act(tool="finish", arguments={"word": word}, text=word)

    return agent


def answer(word: str) -> Agent:
    """Ask for a secret that nobody gave, then answer with *word*."""

    def agent(seen: Sequence[str]) -> Act:
        if len(seen) == 1:
            return Act(tool="has_secret", arguments={"name": "nosuch"})
        return Act(tool="answer", arguments={"text": word}, text=word, is_plain=True)

    return agent


def halve(seen: Sequence[str]) -> Act:
    """Guess a number by halving."""
    low, high = 1, 100
    for told in seen[1:]:
        found = re.search(r"(higher|lower) than (\d+)", told)
        assert found is not None, told
        low, high = (int(found[2]) + 1, high) if found[1] == "higher" else (low, int(found[2]) - 1)
    return _said(f"Think: it is between {low} and {high}.\nAct: guess({(low + high) // 2})")


def stop(seen: Sequence[str]) -> Act:
    """Write what cannot be understood, then give up."""
    return _said("I do not know." if len(seen) == 1 else "Think: no.\nAct: stop")


def _said(text: str) -> Act:
    return Act(tool="act", arguments={"content": text}, text=text)


RIDDLES = frozenset(["answer", "crash", "has_secret", "wait"])
COUNTERS = [
    Case(
        environment=name,
        tasks=20,
        asked="Count to 3.",
        tools=frozenset(["step"]),
        right=count_up,
        wrong=give_up,
        is_local=is_local,
    )
    for name, is_local in (("openenv-counter", True), ("openenv-counter-030", False), ("openenv-counter-020", True))
]
CASES = {
    case.environment: case
    for case in (
        *COUNTERS,
        Case(
            environment="openenv-mcp",
            tasks=20,
            asked="'river'",
            tools=frozenset(["echo_message", "finish", "wait"]),
            right=finish("river"),
            wrong=finish("sea"),
        ),
        *(
            Case(
                environment=name,
                tasks=7,
                own=(name.removesuffix("-sdk"),),
                port=8080,
                asked="'river'",
                tools=RIDDLES,
                right=answer("river"),
                wrong=answer("sea"),
            )
            for name in ("ors-sdk", "openreward")
        ),
        Case(
            environment="areal-guess",
            tasks=100,
            own=("areal",),
            port=5000,
            asked="A number from 1 to 100 is hidden.",
            tools=frozenset(["act"]),
            right=halve,
            wrong=stop,
        ),
    )
}
