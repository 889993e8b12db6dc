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
"""As AgentBench has it, and `[areal].max_turns` of environment.toml."""
MOST_TURNS = 200


class InvalidTask(ValueError):
    """The task cannot be played: no session begins."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What a session needs to know of its task; `reference`, the solution, is not among it."""

    instruction: str
    init: tuple[Script, ...]
    start: str
    """Typed into the session's shell; empty for nothing."""
    live_init: bool
    """The init scripts leave processes: they run for each session anew."""
    evaluation: Evaluation
    max_turns: int
    newlines: int
    """Line ends in front of an output that is shown: 1, or 2 for AgentBench's own form."""

    @property
    def init_sleeps(self) -> bool:
        """Whether an init script waits, to tell files apart by their times."""
        return any("sleep" in script.code for script in self.init)

    @classmethod
    def read(cls, task: Mapping[str, Any]) -> Problem:
        """Check a task line.

        Raises:
            InvalidTask: a field is missing or has a shape that it must not have.
        """
        instruction, config = task.get("instruction"), task.get("config") or {}
        if not isinstance(instruction, str) or not instruction.strip():
            raise InvalidTask("the task has no instruction")
        if not isinstance(config, Mapping):
            raise InvalidTask("config must be an object")
        given = config.get("init") or []
        try:
            init = tuple(Script.read(script) for script in (given if isinstance(given, list) else [given]))
            evaluation = Evaluation.read(task.get("evaluation"))
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
        """Name the state after the init scripts: equal for all sessions that begin in the same one.

        Args:
            moment: at which its files are dated.
        """
        draws = any(script.draws for script in self.init)
        return _digest([[[script.language, script.code] for script in self.init], seed if draws else None, moment])

    def expected_key(self, seed: int, moment: int) -> str:
        """Name what is expected in that state: equal where it need not be worked out again."""
        example = self.evaluation.example
        return _digest([self.key(seed, moment), self.start, example and [example.language, example.code]])


def _whole(config: Mapping[str, Any], key: str, *, default: int, most: int) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InvalidTask(f"config.{key} must be an integer from 1 to {most}")
    return value


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
