"""The images of ``tests/foreign`` as a trainer sees them: their prompts, and how an episode is won and lost."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Act:
    """One action in the forms of the four protocols."""

    tool: str
    arguments: Mapping[str, Any]
    text: str = ""
    """The action as a model writes it. Empty: the action is possible only as a tool call."""
    is_plain: bool = False
    """Whether OpenEnv's clients send only the arguments."""
    is_answer: bool = False
    """Whether *text* is the final answer of an agent of NeMo Gym."""


Agent = Callable[[Sequence[str]], Act]
"""Maps the texts seen so far, the prompt first, to the next action."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """An environment, on an image or a process that is independent of the gateway."""

    environment: str
    tasks: int
    """The number of tasks in ``train``."""
    asked: str
    """A part of the first task's prompt."""
    tools: frozenset[str]
    right: Agent
    """Ends the episode with a reward of 1.0."""
    wrong: Agent
    """Ends the episode with a smaller reward."""
    turns: int = 8
    own: Sequence[str] = ("openenv-0.10.0", "openenv-0.2.0")
    """The clients of the image's own protocol."""
    port: int = 8000
    is_local: bool = True
    """Whether scripts/openenv-clients installs everything that the environment needs to run without an engine."""

    @property
    def image(self) -> str:
        """The folder of the environment's image in ``tests/foreign``."""
        return self.environment.removesuffix("-guess")


def count_up(seen: Sequence[str]) -> Act:
    """Increase the counter by one."""
    return Act(tool="step", arguments={"op": "inc"}, text="inc", is_plain=True)


def give_up(seen: Sequence[str]) -> Act:
    """Increase the counter once, then stop."""
    op = "inc" if len(seen) == 1 else "stop"
    return Act(tool="step", arguments={"op": op}, text=op, is_plain=True)


def finish(word: str) -> Agent:
    """Return an agent that tries another tool and then answers with *word*."""

    def agent(seen: Sequence[str]) -> Act:
        if len(seen) == 1:
            return Act(tool="echo_message", arguments={"message": "hello"})
        return Act(tool="finish", arguments={"word": word}, text=word)

    return agent


def answer(word: str) -> Agent:
    """Return an agent that asks for a missing secret and then answers with *word*."""

    def agent(seen: Sequence[str]) -> Act:
        if len(seen) == 1:
            return Act(tool="has_secret", arguments={"name": "nosuch"})
        return Act(tool="answer", arguments={"text": word}, text=word, is_plain=True)

    return agent


def halve(seen: Sequence[str]) -> Act:
    """Guess a number by bisection."""
    low, high = 1, 100
    for told in seen[1:]:
        found = re.search(r"(higher|lower) than (\d+)", told)
        assert found is not None, told
        low, high = (int(found[2]) + 1, high) if found[1] == "higher" else (low, int(found[2]) - 1)
    return _said(f"Think: it is between {low} and {high}.\nAct: guess({(low + high) // 2})")


def stop(seen: Sequence[str]) -> Act:
    """Write a text without an action, then give up."""
    return _said("I do not know." if len(seen) == 1 else "Think: no.\nAct: stop")


def _said(text: str) -> Act:
    return Act(tool="act", arguments={"content": text}, text=text)


RIDDLES = frozenset(["answer", "crash", "has_secret", "step", "wait"])
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
