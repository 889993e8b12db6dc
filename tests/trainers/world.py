"""The gateways of the training runs: tasks for the tiny model, and an account of all sessions, read from the logs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.deadlines import COMMAND_S
from tests.fakes.eventually import eventually, until
from tests.wire.balancer import Balancer
from tests.wire.catalog import PROJECT
from tests.wire.curricula_world import write_catalog
from tests.wire.gateways import Gateway, short_folder
from tests.wire.stack import Stack

LOOK_S: Final = 0.2
IDLE_S: Final = 20
"""Idle timeout in seconds of the sessions in a run, so that sessions of a lost replica expire within the run."""
CURRICULUM: Final = (
    'environment = "math"\ngroup_size = 8\n'
    '[sampler]\nkind = "staged"\npromote_at = 0.8\nmin_attempts = 16\nwindow = 16\n'
    '[[sampler.stages]]\nname = "first"\nmax_difficulty = 1\n'
    '[[sampler.stages]]\nname = "second"\nmin_difficulty = 2\n'
)
GAME: Final = {
    "id": "two-steps",
    "difficulty": 1,
    "instruction": "Reach the goal.",
    "config": {
        "game": "grid",
        "level": {"width": 3, "height": 3, "walls": 0, "doors": 0, "hazards": 0, "seed": 7},
        "max_turns": 3,
    },
    "evaluation": {"reward_function": "efficiency(slack=1.5)"},
}
"""A world of 3 x 3 cells whose goal is two steps to the right. A game has at most three moves."""
_OPENED = re.compile(r" session_opened session=(\w+) ")
_CLOSED = re.compile(r" session_closed session=(\w+) .* reason=(\w+) outcome=\w+ reward=(\S+) ")
_ERROR = re.compile(r"^.* (?:ERROR|CRITICAL) .*$|^Traceback .*$", re.M)


def math_tasks() -> list[dict[str, Any]]:
    """Return the first task of `math`, whose answer is 40, and a task of difficulty 2 with the same answer."""
    first = _first("math")
    harder = "State the final answer to the following arithmetic problem: 5 * 4 + 60 / 3 ="
    return [first, first | {"id": "second-stage", "difficulty": 2, "instruction": harder}]


def _first(environment: str) -> dict[str, Any]:
    with (PROJECT / "tasks" / environment / "train.jsonl").open() as lines:
        task: dict[str, Any] = json.loads(next(lines))
    return task


@dataclass(frozen=True)
class Account:
    """What the gateway's replicas logged about the sessions of a run."""

    opened: int
    closed: int
    """Sessions that closed for any reason but ``expired``."""
    expired: int
    rewards: Counter[float]
    """Rewards of closed sessions. Sessions without a reward are not counted."""
    errors: list[str]
    """Errors and tracebacks in the logs."""
    untold: int = 0
    """Sessions that a replica ended in the moment in which it was killed, before it could log their end."""


@dataclass
class Served:
    """A gateway of one or more replicas."""

    url: str
    replicas: list[Gateway]
    is_one_killed: bool = False

    async def kill_one(self, opened: int) -> None:
        """Kill the first replica as soon as the replicas have opened *opened* sessions."""
        async with asyncio.timeout(COMMAND_S):  # a trainer may take minutes to open them
            while len(_OPENED.findall(self._log())) < opened:  # noqa: ASYNC110  # another process opens them
                await asyncio.sleep(LOOK_S)
        self.is_one_killed = True
        await asyncio.to_thread(self.replicas[0].kill)

    def _log(self) -> str:
        return "".join(replica.log for replica in self.replicas)

    async def account(self) -> Account:
        """Wait until all sessions have ended, and return their account.

        Raises:
            AssertionError: A session stayed open for longer than its idle timeout.
        """

        async def ended() -> Account:
            log = self._log()
            opened = set(_OPENED.findall(log))
            closed = {id: (reason, reward) for id, reason, reward in _CLOSED.findall(log)}
            untold = opened - set(closed)
            if untold and self.is_one_killed:
                untold -= {session["id"] for session in (await self.replicas[-1].ask("sessions"))["sessions"]}
            assert opened - untold <= set(closed), f"{len(opened - untold - set(closed))} sessions are open"
            assert self.is_one_killed or not untold, untold
            reasons = Counter(reason for reason, _ in closed.values())
            rewards = Counter(float(reward) for _, reward in closed.values() if reward != "None")
            expired = reasons["expired"]
            closed_here = reasons.total() - expired
            return Account(len(opened), closed_here, expired, rewards, _ERROR.findall(log), len(untold))

        return await eventually(ended)


@contextlib.asynccontextmanager
async def served(*, replicas: int = 1) -> AsyncIterator[Served]:
    """Serve three environments with local workers, or `math` by replicas on Redis and containers behind a balancer."""
    folder = Path(tempfile.mkdtemp(prefix="training-"))
    folders = [folder]
    stack = Stack() if replicas > 1 else None
    gateways: list[Gateway] = []
    try:
        settings = _settings(folder)
        if stack is not None:
            await asyncio.to_thread(stack.redis.start)
            settings |= stack.settings() | {
                "GATEWAY_STATE_DIR": str(stack.folder / "state"),
                "GATEWAY_ENVIRONMENTS": "math",  # only this image is built
            }
        for _ in range(replicas):
            folders.append(short_folder())
            gateways.append(Gateway(folders[-1], settings))
            await asyncio.to_thread(gateways[-1].start)
        if stack is None:
            yield Served(gateways[0].url, gateways)
        else:
            async with _balanced(gateways) as url:
                yield Served(url, gateways)
    finally:
        await asyncio.to_thread(_stop, gateways, stack)
        for made in folders:
            shutil.rmtree(made, ignore_errors=True)


@contextlib.asynccontextmanager
async def _balanced(gateways: Sequence[Gateway]) -> AsyncIterator[str]:
    async with Balancer().running() as balancer:
        balancer.gateways += gateways
        await until(lambda: len(balancer.ready) == len(gateways))
        yield balancer.url


def _stop(gateways: Sequence[Gateway], stack: Stack | None) -> None:
    for gateway in gateways:
        gateway.stop()
    if stack is not None:
        stack.close()


def _settings(folder: Path) -> dict[str, str]:
    tasks = {"math": {"train": math_tasks()}, "game": {"train": [GAME]}, "chat": {"train": [_first("chat")]}}
    catalog = write_catalog(folder, tasks, {})
    for file in catalog.glob("*/environment.toml"):
        text = file.read_text()
        assert "\nidle_s = 300\n" in text
        file.write_text(text.replace("\nidle_s = 300\n", f"\nidle_s = {IDLE_S}\n"))
    curricula = folder / "curricula"
    curricula.mkdir()
    (curricula / "levels.toml").write_text(CURRICULUM)
    return {
        "GATEWAY_CATALOG_DIR": str(catalog),
        "GATEWAY_CURRICULA_DIR": str(curricula),
        "GATEWAY_ENVIRONMENTS": "math,game,chat",
        "GATEWAY_DEFAULT_ENVIRONMENT": "math",
        "GATEWAY_TRAINER_KEYS": "",
    }
