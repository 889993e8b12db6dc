"""One step: run a tool and write its result, in whatever thread the tool runs.

What comes back is bytes and two plain values, so that the server's loop never writes a large result itself.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from envserver.content import GroupCandidate, GroupScore, StepResult
from envserver.environment import Environment
from envserver.http.json_text import encode
from envserver.sessions.outcomes import Ending, Outcome
from envserver.tools import Tool

Ran: TypeAlias = tuple[bytes, float | None, bool]
"""The result's JSON, its reward and whether it ends the episode."""


def run(tool: Tool, environment: Environment | None, arguments: dict[str, Any]) -> Ran:
    """Run a plain tool; *environment* is None where the function is bound already."""
    bound = () if environment is None else (environment,)
    return _written(tool.name, tool.function(*bound, **arguments))


async def run_async(tool: Tool, environment: Environment | None, arguments: dict[str, Any]) -> Ran:
    """Run an asynchronous tool."""
    bound = () if environment is None else (environment,)
    return _written(tool.name, await tool.function(*bound, **arguments))


def score(environment: Environment, candidates: Sequence[GroupCandidate]) -> bytes:
    """Judge a group with a plain ``score_group``."""
    return _scores(environment.score_group(candidates), len(candidates))


async def score_async(environment: Environment, candidates: Sequence[GroupCandidate]) -> bytes:
    """Judge a group with an asynchronous ``score_group``."""
    judged: Any = environment.score_group(candidates)
    return _scores(await judged, len(candidates))


def refusal(reason: str, text: str) -> Outcome:
    """Write what the agent reads where no tool ran; the reasons are the protocol's."""
    return "result", encode({"ok": False, "error": text, "reason": reason})


def failed(text: str, *, ending: Ending = "tool_failed") -> Outcome:
    """Write what becomes an ``error`` event."""
    return ending, text.encode(errors="replace")


def _written(name: str, result: object) -> Ran:
    if not isinstance(result, StepResult):
        if hasattr(result, "close"):
            result.close()  # a coroutine that nobody awaits would warn
        raise TypeError(f"{name!r} returned {type(result).__name__}; expected ToolOutput")
    output = result.wire()
    return encode({"ok": True, "output": output}), output["reward"], output["finished"]


def _scores(judged: Any, count: int) -> bytes:
    scores = [score if isinstance(score, GroupScore) else GroupScore(float(score)) for score in judged]
    if len(scores) != count:
        raise ValueError(f"score_group returned {len(scores)} scores for {count} candidates")
    for score in scores:
        if not math.isfinite(score.reward):
            raise ValueError(f"score_group returned the score {score.reward}; a score is a finite number")
    return encode({"scores": [score.wire() for score in scores]})
