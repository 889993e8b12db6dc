"""Play episodes on `math` through the public ORS SDK and print a table of rewards.

    make demo                       # starts a gateway of its own if none answers
    python examples/demo.py --url http://127.0.0.1:8080 --episodes 64 --at-once 16

The "agent" is a small script: it solves six families of questions and guesses at the others, so that the table shows
both. A real agent would send the prompt to a model.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import math
import operator
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from statistics import mean
from typing import Any

import httpx
from ors.client import AsyncORS
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

PROJECT = Path(__file__).resolve().parent.parent
READY = "gateway_ready url="
OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass(frozen=True, slots=True)
class Episode:
    """The outcome of one episode."""

    family: str
    difficulty: int
    reward: float
    seconds: float


@contextlib.contextmanager
def a_gateway(url: str | None, key: str) -> Iterator[str]:
    """Yield the address of a gateway: *url*, the default address if it answers, or a gateway started for the demo."""
    if url is not None:
        yield url
        return
    usual = "http://127.0.0.1:8080"
    with contextlib.suppress(httpx.HTTPError):
        headers = {"X-API-Key": key} if key else {}
        names = httpx.get(f"{usual}/list_environments", timeout=2, headers=headers).json()
        if "math" in names:
            yield usual
            return
    environ = os.environ | {"GATEWAY_PORT": "0", "GATEWAY_ENVIRONMENTS": "math"}
    command = [str(Path(sys.executable).with_name("gateway")), "serve"]
    process = subprocess.Popen(command, cwd=PROJECT, env=environ, stderr=subprocess.PIPE, text=True)
    try:
        yield _address(process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if READY in line:
            return line.split(READY)[1].split()[0]
    raise SystemExit("the gateway did not start:\n" + "".join(said))


def solve(question: str) -> str:
    """Answer a question about whole numbers, or guess."""
    numbers = [int(digits) for digits in re.findall(r"\d+", question)]
    if "Greatest Common Divisor" in question:
        return str(math.gcd(*numbers))
    if "Least Common Multiple" in question:
        return str(math.lcm(*numbers))
    if "how many prime numbers" in question:
        first, last = numbers
        return str(sum(all(n % d for d in range(2, math.isqrt(n) + 1)) for n in range(max(first, 2), last + 1)))
    asked = re.search(r"(?:problem:|Calculate|multiplication:) ([-+*/() \d]+?)(?:\.| =)", question)
    return str(value_of(ast.parse(asked[1], mode="eval").body)) if asked else "42"


def value_of(node: ast.expr) -> Fraction:
    """Return the value of an expression of numbers, + - * and /."""
    match node:
        case ast.BinOp(left, op, right):
            return OPERATORS[type(op)](value_of(left), value_of(right))
        case ast.UnaryOp(ast.USub(), operand):
            return -value_of(operand)
        case ast.Constant(int(number)):
            return Fraction(number)
    raise ValueError(f"not a number or an operation: {ast.unparse(node)}")


async def play(environment: Any, task: Any) -> Episode:
    """Play one episode: open, read the prompt, answer, close."""
    began_at = time.monotonic()
    async with environment.session(task=task) as session:
        (question,) = await session.get_prompt()
        result = await session.call_tool("submit", {"answer": solve(question.text)})
    tags = task.task_spec["tags"]
    return Episode(tags[0], task.task_spec["difficulty"], result.reward or 0.0, time.monotonic() - began_at)


async def play_all(url: str, key: str, *, episodes: int, at_once: int, seed: int) -> list[Episode]:
    """Play *episodes* episodes, *at_once* at a time, with a progress bar."""
    agent = random.Random(seed)
    room = asyncio.Semaphore(at_once)
    played: list[Episode] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    client = AsyncORS(base_url=url, api_key=key or None)  # kept, because its connections close when it is collected
    environment = client.environment("math")
    total = await environment.num_tasks("train")
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("episodes", total=min(episodes, total))

        async def one(index: int) -> None:
            async with room:
                task = await environment.get_task("train", index)
                played.append(await play(environment, task))
                progress.advance(bar)

        async with asyncio.TaskGroup() as group:
            for index in agent.sample(range(total), min(episodes, total)):
                group.create_task(one(index))
    return played


def show(played: list[Episode], seconds: float) -> None:
    """Print the rewards by family."""
    families: defaultdict[str, list[Episode]] = defaultdict(list)
    for episode in played:
        families[episode.family].append(episode)
    table = Table("family", "episodes", "mean reward", "full", "partial", "none", title="Rewards")
    for family, some in sorted(families.items()):
        rewards = [episode.reward for episode in some]
        partial = sum(0 < reward < 1 for reward in rewards)
        full, none = sum(reward >= 1 for reward in rewards), sum(reward <= 0 for reward in rewards)
        table.add_row(family, str(len(some)), f"{mean(rewards):.2f}", str(full), str(partial), str(none))
    Console().print(table)
    rewards = [episode.reward for episode in played]
    print(f"{len(played)} episodes in {seconds:.1f} s, mean reward {mean(rewards):.3f}")


def main() -> None:
    """Parse the command line and play."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a gateway; default: the usual address, or one that is started")
    parser.add_argument("--key", default=os.environ.get("GATEWAY_KEY", ""), help="a trainer's key, if it wants one")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    with a_gateway(options.url, options.key) as url:
        began_at = time.monotonic()
        work = play_all(url, options.key, episodes=options.episodes, at_once=options.at_once, seed=options.seed)
        show(asyncio.run(work), time.monotonic() - began_at)


if __name__ == "__main__":
    main()
