"""A task of the os environment, read from its line and checked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from os_judge import Evaluation
from os_scripts import Script

DEFAULT_TURNS = 8
"""The default number of turns, as in AgentBench and in `[areal].max_turns` of environment.toml."""
MOST_TURNS = 200


class InvalidTask(ValueError):
    """The task cannot be played: no session starts."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A session's data about its task, without `reference`, the solution."""

    instruction: str
    init: tuple[Script, ...]
    start: str
    """A line that is typed into the session's shell, or an empty text."""
    live_init: bool
    """True if the init scripts leave processes, so that they run again for each session."""
    evaluation: Evaluation
    max_turns: int
    newlines: int
    """The number of line ends in front of a displayed output: 1, or 2 for AgentBench's own form."""

    @property
    def init_sleeps(self) -> bool:
        """True if an init script waits, so that file times differ."""
        return any("sleep" in script.code for script in self.init)

    @classmethod
    def read(cls, task: Mapping[str, Any]) -> Problem:
        """Read and check a task line.

        Raises:
            InvalidTask: A field is missing or has an invalid shape.
        """
        instruction, config = task.get("instruction"), task.get("config") or {}
        if not isinstance(instruction, str) or not instruction.strip():
            raise InvalidTask("the task has no instruction")
        if not isinstance(config, Mapping):
            raise InvalidTask("config must be an object")
        given = config.get("init") or []
        try:
            init = tuple(Script.read(script) for script in (given if isinstance(given, list) else [given]))
            # A task whose init scripts leave processes is about these.
            evaluation = Evaluation.read(task.get("evaluation"), live=config.get("live_init") is True)
        except ValueError as error:
            raise InvalidTask(str(error)) from error
        start = config.get("start") or ""
        if not isinstance(start, str):
            raise InvalidTask("config.start must be a text")
        return cls(
            instruction=instruction.strip(),
            init=init,
            start=start,
            live_init=config.get("live_init") is True,
            evaluation=evaluation,
            max_turns=_whole(config, "max_turns", default=DEFAULT_TURNS, most=MOST_TURNS),
            newlines=_whole(config, "newlines", default=1, most=2),
        )

    def key(self, seed: int, moment: int) -> str:
        """Return the name of the state after the init scripts, equal for all sessions that start in the same state.

        Args:
            moment: The date of its files.
        """
        draws = any(script.draws for script in self.init)
        return _digest([[[script.language, script.code] for script in self.init], seed if draws else None, moment])

    def expected_key(self, seed: int, moment: int) -> str:
        """Return the name of the expected value in that state; equal names have equal values."""
        example = self.evaluation.example
        return _digest([self.key(seed, moment), self.start, example and [example.language, example.code]])


def _whole(config: Mapping[str, Any], key: str, *, default: int, most: int) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InvalidTask(f"config.{key} must be an integer from 1 to {most}")
    return value


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
