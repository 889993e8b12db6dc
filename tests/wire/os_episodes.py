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
"""The limit of turns in ``[areal]`` of the environment."""
FIRST_LINE = "The output of the OS:\n"
EMPTY = "The output of the OS is empty."
TREE = (
    "hour=$(($(date +%s) / 3600 * 3600));"
    " find / -xdev -mindepth 1 \\( -path /run -o -path /proc -o -path /sys -o -path /dev \\) -prune"
    " -o -printf '%P %y %m %U %G %s %T@ %l\\n'"
    ' | sed -E "s/ ($hour|$((hour - 3600)))[.]0+ / hour /" | LC_ALL=C sort | sha256sum | cut -c1-64'
)
"""Prints a digest of the files in the box: names, kinds, modes, owners, sizes, times and links.

The digest leaves out /run, where commands arrive. Times at the start of this hour and of the last hour count as equal:
the files of init scripts have the time of the hour in which their box was made.
"""


def tasks_of(split: str) -> list[dict[str, Any]]:
    """Return the project's own tasks, in the order of their indices."""
    return [json.loads(line) for line in (TASKS / f"{split}.jsonl").read_text("utf-8").split("\n") if line]


def bash(script: str) -> str:
    """Return the text that a model writes to run *script*."""
    return f"Think: I look at it.\nAct: bash\n```bash\n{script}\n```"


@dataclass(frozen=True)
class Verdict:
    """The reward and the ``info`` at the end of an episode."""

    reward: float
    info: Mapping[str, Any]

    @property
    def status(self) -> str:
        return str(self.info["status"])


class Play:
    """A running episode."""

    def __init__(self, client: ArealClient, started: Mapping[str, Any]) -> None:
        self.id: str = started["episode_id"]
        self.prompt: str = started["observation"]["content"]
        self.problem: str = started["info"]["task_description"]
        self._client = client

    async def say(self, text: str) -> dict[str, Any]:
        """Take a turn and return the whole reply."""
        reply: dict[str, Any] = await self._client.step(self.id, text)
        return reply

    async def observed(self, script: str) -> str:
        """Run *script* in a turn that must not end the episode, and return the model's observation."""
        reply = await self.say(bash(script))
        assert (reply["done"], reply["reward"]) == (False, 0.0), reply
        content: str = reply["observation"]["content"]
        return content

    async def run(self, script: str) -> str:
        """Run *script* as `observed` does. Return its output, followed by any notice about the command or the shell."""
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
        """End the episode with *answer*, or without an answer if it is None."""
        return await (self.finish() if answer is None else self.answer(answer))

    async def cancel(self) -> None:
        """Cancel the episode if it still exists."""
        with contextlib.suppress(Failed):
            await self._client.cancel(self.id)

    @staticmethod
    def _ended(reply: Mapping[str, Any]) -> Verdict:
        assert (reply["done"], reply["observation"]) == (True, None), reply
        assert reply["info"]["success"] is (reply["reward"] == 1.0), reply
        return Verdict(reply["reward"], reply["info"])


@contextlib.asynccontextmanager
async def playing(client: ArealClient, sample: str | int) -> AsyncIterator[Play]:
    """Play *sample*, and cancel the episode if it was not played to its end."""
    play = Play(client, await client.start(sample))
    try:
        yield play
    finally:
        await play.cancel()
