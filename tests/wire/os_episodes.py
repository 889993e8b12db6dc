"""Episodes of the os environment, played in Think/Act text as a model writes it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.wire.areal_client import ArealClient, Failed
from tests.wire.catalog import PROJECT

TASKS = PROJECT / "tasks" / "os"
MAX_TURNS = 8
"""As ``[areal]`` of the environment has it."""
FIRST_LINE = "The output of the OS:\n"
EMPTY = "The output of the OS is empty."
TREE = (
    "hour=$(($(date +%s) / 3600 * 3600));"
    " find / -xdev -mindepth 1 \\( -path /run -o -path /proc -o -path /sys -o -path /dev \\) -prune"
    " -o -printf '%P %y %m %U %G %s %T@ %l\\n'"
    ' | sed -E "s/ ($hour|$((hour - 3600)))[.]0+ / hour /" | LC_ALL=C sort | sha256sum | cut -c1-64'
)
"""Prints a digest of what is in the box: names, kinds, modes, owners, sizes, times and links.

Not of /run, where commands arrive. Times at the beginning of this hour or the last are one: init scripts' files have
that of the hour in which their box was made.
"""


def tasks_of(split: str) -> list[dict[str, Any]]:
    """The project's own tasks, in the order of their indices."""
    return [json.loads(line) for line in (TASKS / f"{split}.jsonl").read_text("utf-8").split("\n") if line]


def bash(script: str) -> str:
    """Write what a model writes to run *script*."""
    return f"Think: I look at it.\nAct: bash\n```bash\n{script}\n```"


@dataclass(frozen=True)
class Verdict:
    """How an episode ended."""

    reward: float
    info: Mapping[str, Any]

    @property
    def status(self) -> str:
        return str(self.info["status"])


class Play:
    """An episode that is under way."""

    def __init__(self, client: ArealClient, started: Mapping[str, Any]) -> None:
        self.id: str = started["episode_id"]
        self.prompt: str = started["observation"]["content"]
        self.problem: str = started["info"]["task_description"]
        self._client = client

    async def say(self, text: str) -> dict[str, Any]:
        """Take a turn; the whole reply."""
        reply: dict[str, Any] = await self._client.step(self.id, text)
        return reply

    async def observed(self, script: str) -> str:
        """Run *script* in a turn that ends nothing; what the model reads then."""
        reply = await self.say(bash(script))
        assert (reply["done"], reply["reward"]) == (False, 0.0), reply
        content: str = reply["observation"]["content"]
        return content

    async def run(self, script: str) -> str:
        """Run *script* as `observed` does; what it printed, and behind it what is told of the command or the shell."""
        content = await self.observed(script)
        if content.startswith(FIRST_LINE):
            return content.removeprefix(FIRST_LINE)
        assert content == EMPTY or content.startswith(f"{EMPTY}\n"), content
        return content.removeprefix(EMPTY).removeprefix("\n")

    async def answer(self, value: str) -> Verdict:
        """End the episode with an answer."""
        return self._ended(await self.say(f"Think: That is it.\nAct: answer({value})"))

    async def finish(self) -> Verdict:
        """End the episode without an answer."""
        return self._ended(await self.say("Think: It is done.\nAct: finish"))

    async def end(self, answer: str | None) -> Verdict:
        """End the episode; None is the end without an answer."""
        return await (self.finish() if answer is None else self.answer(answer))

    async def cancel(self) -> None:
        """End the episode, if it is still there."""
        with contextlib.suppress(Failed):
            await self._client.cancel(self.id)

    @staticmethod
    def _ended(reply: Mapping[str, Any]) -> Verdict:
        assert (reply["done"], reply["observation"]) == (True, None), reply
        assert reply["info"]["success"] is (reply["reward"] == 1.0), reply
        return Verdict(reply["reward"], reply["info"])


@contextlib.asynccontextmanager
async def playing(client: ArealClient, sample: str | int) -> AsyncIterator[Play]:
    """Play *sample*; an episode that was not played to its end is cancelled."""
    play = Play(client, await client.start(sample))
    try:
        yield play
    finally:
        await play.cancel()
