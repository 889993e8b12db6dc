"""Playing coding episodes over the gateway: the tasks, their known solutions, and many concurrent submissions."""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from scripts.coding_problems import SPLITS, Problem
from tests.wire.areal_client import ArealClient
from tests.wire.catalog import PROJECT
from tests.wire.sdks import Client, Episode, Output, Sdk, text

T = TypeVar("T")
AT_ONCE = 8
"""The number of concurrent sessions: as many as one worker has slots."""

_LINES = {
    split: (PROJECT / "tasks" / "coding" / f"{split}.jsonl").read_text("utf-8").split("\n")
    for split in ("train", "test")
}
SPECS: Mapping[str, Sequence[dict[str, Any]]] = {
    split: [json.loads(line) for line in lines if line] for split, lines in _LINES.items()
}
"""The environment's own tasks, in order."""
_PROBLEMS = {problem.task_id(split): problem for split, problems in SPLITS.items() for problem in problems}


def problem_of(spec: Mapping[str, Any]) -> Problem:
    """Return the problem from which a task was made, with its right and its wrong solution."""
    return _PROBLEMS[str(spec["id"])]


@dataclass(frozen=True)
class Graded:
    """The result of a submission."""

    reward: float | None
    finished: bool
    text: str


def graded(output: Output) -> Graded:
    return Graded(output.reward, output.finished, text(output))


async def all_of(jobs: Iterable[Any], *, at_once: int = AT_ONCE) -> list[Any]:
    """Await the coroutines *jobs*, at most *at_once* of them concurrently, and return their results in order."""
    room = asyncio.Semaphore(at_once)

    async def one(job: Any) -> Any:
        async with room:
            return await job

    return await asyncio.gather(*(one(job) for job in jobs))


@dataclass(frozen=True)
class Player:
    """One official client on the coding environment."""

    sdk: Sdk
    client: Client

    def session(self, spec: Mapping[str, Any]) -> Any:
        """Open a session of a task that is sent inline."""
        return self.client.environment("coding").session(task=self.sdk.task("coding", spec))

    async def by_index(self, split: str, index: int, code: str) -> Graded:
        """Submit *code* for the task at *index*."""
        async with self.client.environment("coding").session(split=split, index=index) as session:
            return await submitted(session, code)

    async def by_spec(self, spec: Mapping[str, Any], code: str) -> Graded:
        async with self.session(spec) as session:
            return await submitted(session, code)


async def submitted(session: Episode, code: str | None = None) -> Graded:
    """Submit *code*, or the solution file in the workspace if *code* is None."""
    return graded(await session.call_tool("submit", {} if code is None else {"code": code}))


async def ran(session: Episode, command: str) -> str:
    """Run *command* as the agent and return its output. Only a submission may earn a reward or end the episode."""
    output = await session.call_tool("execute", {"command": command})
    assert (output.reward, output.finished) == (None, False), output
    return text(output)


async def prompt(session: Episode) -> str:
    return "\n".join(str(block.text) for block in await session.get_prompt())


async def rolled_out(client: ArealClient, sample: str | int, code: str) -> float:
    """Answer in free text with a fenced block, like a model that calls no tool, and return the trajectory's reward."""
    said = f"This should do:\n\n```python\n{code}\n```\nIt handles the edges too."
    trajectory = await client.rollout(sample, lambda _: said)
    assert (trajectory.turns, trajectory.info["status"]) == (1, "completed"), trajectory
    return trajectory.reward
