"""Sessions of the os environment over the wire: open on a task, first command, close, with a check of each answer."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from bench.load.closed_loop import Round, Step, at_once
from bench.load.episodes import JSON, STREAM, Episode, WrongAnswer, ok
from bench.load.http1 import Address, Connection, StreamError, connect, request_bytes, result_of

OS = "os"
AT_ONCE_S = 120.0
"""Seconds for concurrent openings, and for their ends. A longer time means a hang."""

Task: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Taken:
    """Seconds of the parts of one session."""

    open_s: float
    """Seconds to the prompt."""
    command_s: float
    """Seconds from the prompt to the first command's output."""
    close_s: float

    @property
    def first_output_s(self) -> float:
        """Seconds from the start to the first command's output. S8 bounds this time."""
        return self.open_s + self.command_s

    @property
    def whole_s(self) -> float:
        """Seconds from the start to the end."""
        return self.first_output_s + self.close_s


class BoxEpisode:
    """One session of the os environment on one connection."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._episode = Episode(connection, environment=OS)

    async def open(self, task: Task) -> None:
        """Open the session and read its prompt, which must contain the instruction.

        Raises:
            WrongAnswer, OSError, ProtocolError: A request failed. All methods here raise these.
        """
        episode = self._episode
        await episode.create(task)
        response = ok(await self.connection.request(request_bytes("GET", f"/{OS}/prompt", episode.named)))
        texts = [str(block.get("text")) for block in json.loads(response.body)]
        if task["instruction"] not in "".join(texts):
            raise WrongAnswer(f"prompt: {response.body[:200]!r}")

    async def command(self, token: str) -> None:
        """Print *token* in the shell, and check the output."""
        body = json.dumps({"name": "bash_action", "input": {"script": f"echo {token}"}}).encode()
        headers = JSON | STREAM | self._episode.named
        response = ok(await self.connection.request(request_bytes("POST", f"/{OS}/call", headers, body)))
        check_output(response.body, token)

    async def close(self) -> None:
        """End the session."""
        await self._episode.delete()


def check_output(body: bytes, token: str) -> None:
    """Check that the last line of a call's result is *token*.

    Raises:
        WrongAnswer: It is not.
    """
    try:
        result = result_of(body)
    except StreamError as error:
        raise WrongAnswer(f"call: {error}") from error
    match result:
        case {"ok": True, "output": {"blocks": [{"text": str(text)}], "finished": False}}:
            if text.split("\n")[-1] == token:
                return
    raise WrongAnswer(f"call: {result!r}"[:200])


async def session(connection: Connection, task: Task, token: str) -> Taken:
    """Open a session, print *token* in it, and end it."""
    episode = BoxEpisode(connection)
    times = [time.perf_counter()]
    for act in (episode.open(task), episode.command(token), episode.close()):
        await act
        times.append(time.perf_counter())
    began_at, ready_at, said_at, ended_at = times
    return Taken(ready_at - began_at, said_at - ready_at, ended_at - said_at)


async def opened_at_once(address: Address, tasks: Sequence[Task]) -> Round:
    """Open a session on each of *tasks* at the same moment, each over a new connection, and end them all afterwards.

    A sample runs from that moment to a prompt. If all sessions were opened, a failed end counts as an error.
    """
    opened: list[BoxEpisode] = []

    def opening(task: Task) -> Step:
        async def one(_: int) -> None:
            episode = BoxEpisode(await connect(address))
            opened.append(episode)
            await episode.open(task)

        return one

    try:
        became = await at_once([opening(task) for task in tasks], within_s=AT_ONCE_S)
        ended = await at_once([_ending(episode) for episode in opened], within_s=AT_ONCE_S)
        if not became.errors:
            became.errors += ended.errors
    finally:
        for episode in opened:
            episode.connection.close()
    return became


def _ending(episode: BoxEpisode) -> Step:
    async def end(_: int) -> None:
        await episode.close()

    return end


# -- tasks --------------------------------------------------------------------------------------------------------

_EVALUATION = {"match": "done"}
_LIGHT = "mkdir -p /srv/notes && echo one > /srv/notes/one"
_HEAVY = """set -e
mkdir -p /srv/tree && cd /srv/tree
for folder in $(seq 40); do
  mkdir $folder
  for file in $(seq 50); do echo "$folder $file {name}" > $folder/$file; done
done
git init -q . && git add -A
git -c user.name=a -c user.email=a@localhost -c gc.auto=0 -c maintenance.auto=false commit -q -m all
"""
"""A preparation of some tenths of a second: 2,000 files and a repository of them."""


def light_task() -> Task:
    """Return a task that prepares one folder and one file, so that the measurement shows all other costs."""
    return _task("light", _LIGHT)


def heavy_tasks(prefix: str) -> Callable[[], Task]:
    """Return a maker of tasks with a slow preparation that differs for each task."""
    numbers = itertools.count()

    def make() -> Task:
        name = f"{prefix}-{next(numbers)}"
        return _task(name, _HEAVY.replace("{name}", name))

    return make


def _task(name: str, init: str) -> Task:
    return {
        "id": name,
        "instruction": f"Look around, then answer with the word done ({name}).",
        "config": {"init": [init]},
        "evaluation": _EVALUATION,
    }
