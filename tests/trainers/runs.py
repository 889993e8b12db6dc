"""The training runs of ``make trainers``: each starts its own gateway, lets a trainer learn, and checks the result."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.deadlines import COMMAND_S
from tests.trainers.chat_model import chat_model
from tests.trainers.world import Served, served
from tests.wire.areal_client import ArealClient
from tests.wire.catalog import PROJECT

VENVS: Final = PROJECT / ".venv-trainers"
LAST: Final = 10
"""Number of steps at the end of a curve whose mean reward must reach a run's bound."""
KILL_AT: Final = 46
"""Number of opened sessions at which a run kills a replica: a trial session, 5 groups of 8, and a part of the sixth."""
MOST_UNTOLD: Final = 8
"""Most sessions that may end in the moment in which their replica is killed: one group."""


@dataclass
class Played:
    """What a trainer reported."""

    curve: list[float]
    """Mean reward of each optimizer step, or the reward of each episode of a scripted run."""
    versions: dict[str, str]
    rewards: list[float | None] = field(default_factory=list)
    """Rewards of all episodes, if the run reports them. None: the episode has no reward."""
    failed: int = 0
    """Number of episodes without a reward because a call failed."""


@dataclass
class Result:
    """One run: what the trainer reported, and what the gateway counted."""

    name: str
    trainer: str
    protocol: str
    environments: str
    curve: list[float]
    opened: int
    closed: int
    expired: int
    failed: int
    """Episodes without a reward because a call failed. The trainer left them out."""
    seconds: float
    versions: dict[str, str]


@dataclass(frozen=True)
class Run:
    """A run and its bounds.

    Args:
        play: Lets the trainer play on a gateway.
        learns_to: Least mean reward of the last steps. None: the episodes are scripted.
        scripted: Rewards that the episodes of a scripted run must have, in any order.
        kills: A replica dies in the middle of the run.
    """

    name: str
    trainer: str
    protocol: str
    environments: str
    play: Callable[[Served], Awaitable[Played]]
    learns_to: float | None = None
    scripted: tuple[float, ...] = ()
    kills: bool = False

    async def result(self) -> Result:
        """Run it. Raises ``AssertionError`` if a bound does not hold."""
        began = time.monotonic()
        async with served(replicas=2 if self.kills else 1) as gateway:
            played = await self.play(gateway)
            account = await gateway.account()
        assert account.opened == account.closed + account.expired + account.untold, account
        assert account.untold <= MOST_UNTOLD, account
        assert not account.errors, account.errors
        assert self.kills or (played.failed, account.expired) == (0, 0), (played.failed, account)
        theirs = Counter(reward for reward in played.rewards if reward is not None)
        unknown = theirs - account.rewards
        assert unknown.total() <= account.untold, f"rewards that no session had: {unknown}"
        if self.learns_to is None:
            assert sorted(played.curve) == sorted(self.scripted), played.curve
        else:
            assert _mean(played.curve[-LAST:]) >= self.learns_to, played.curve
            assert _mean(played.curve[:3]) < self.learns_to, f"there was nothing to learn: {played.curve}"
        return Result(
            name=self.name,
            trainer=self.trainer,
            protocol=self.protocol,
            environments=self.environments,
            curve=played.curve,
            opened=account.opened,
            closed=account.closed,
            expired=account.expired,
            failed=played.failed,
            seconds=round(time.monotonic() - began, 1),
            versions=played.versions,
        )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def learning(name: str) -> Callable[[Served], Awaitable[Played]]:
    """Return a player that runs *name* of learning.py. If there are two replicas, it kills the first in the middle."""

    async def play(gateway: Served) -> Played:
        if len(gateway.replicas) == 1:
            return await _learn(name, gateway.url)
        killing = asyncio.ensure_future(gateway.kill_one(KILL_AT))
        try:
            played = await _learn(name, gateway.url)
            assert killing.done(), "the run ended before the replica was killed"
            await killing
        finally:
            killing.cancel()
        return played

    return play


async def _learn(name: str, url: str) -> Played:
    program = PROJECT / "tests" / "trainers" / "learning.py"
    rewards: list[float | None] = []
    failed = 0
    async with _lines(str(VENVS / "learning" / "bin" / "python"), str(program), name, url) as lines:
        async for line in lines:
            if line.startswith('{"'):  # TRL's own log has other lines
                told = json.loads(line)
                if "curve" in told:
                    return Played(told["curve"], told["versions"], rewards, failed)
                rewards += told["rewards"]
                failed += told["failed"]
    raise AssertionError(f"{name} ended without a result")


@contextlib.asynccontextmanager
async def _lines(*command: str) -> AsyncIterator[AsyncIterator[str]]:
    """Run *command*, and yield the lines of its stdout. A failure's error contains the end of its stderr.

    Raises:
        AssertionError: It failed, or did not end within `COMMAND_S`.
    """
    environ = _environ() | {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "OPENAI_API_KEY": "unused"}
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryDirectory(prefix="learning-") as folder:
        process = await asyncio.create_subprocess_exec(
            *command, env=environ, cwd=folder, stdout=subprocess.PIPE, stderr=errors, limit=2**22
        )
        stdout = process.stdout
        assert stdout is not None

        async def lines() -> AsyncIterator[str]:
            async for line in stdout:
                yield line.decode()

        try:
            async with asyncio.timeout(COMMAND_S):
                yield lines()
                status = await process.wait()
        except (TimeoutError, AssertionError) as error:
            raise AssertionError(f"{' '.join(command)}: {error!r}\n{_end_of(errors)}") from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert status == 0, _end_of(errors)


def _end_of(file: Any) -> str:
    file.seek(0)
    return str(file.read()[-4000:].decode(errors="replace"))


def _environ() -> dict[str, str]:
    """Return the environment without settings of a gateway that runs already."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("GATEWAY_", "OPENREWARD_"))}


def verifiers(config: str) -> Callable[[Served], Awaitable[Played]]:
    """Return a player that evaluates a scripted model by ``vf-eval`` and a file of examples/trainers."""

    async def play(gateway: Served) -> Played:
        with tempfile.TemporaryDirectory(prefix="verifiers-") as name, chat_model(_answer) as model:
            folder = Path(name)
            text = (PROJECT / "examples" / "trainers" / config).read_text()
            for example, real in (("http://127.0.0.1:8000/v1", model), ("http://127.0.0.1:8080", gateway.url)):
                assert example in text
                text = text.replace(example, real)
            rollouts = await asyncio.to_thread(_evaluate, folder, text, gateway.url)
        errors = [trace["errors"] for rollout in rollouts for trace in rollout["traces"] if trace["errors"]]
        assert not errors, errors
        assert all(rollout["ok"] for rollout in rollouts), rollouts
        rewards = [sum(r["score"] for r in rollout["traces"][0]["rewards"].values()) for rollout in rollouts]
        rewards.sort(reverse=True)  # rollouts run at the same time
        return Played(rewards, {"verifiers": _version("verifiers", "verifiers")}, list(rewards))

    return play


def _evaluate(folder: Path, config: str, url: str) -> list[dict[str, Any]]:
    """Run ``vf-eval`` in *folder*, and return its rollouts. It makes a venv for its harness with the program ``uv``."""
    (folder / "eval.toml").write_text(config)
    gateway = [str(PROJECT / ".venv" / "bin" / "gateway")]
    export = [*gateway, "tasks", "export", "nemo-gym", "math", "--split", "train", "--url", url, "-o", "train.jsonl"]
    environ = _environ() | {
        "HOME": str(folder),
        "PATH": f"{PROJECT / 'scripts'}:{os.environ['PATH']}",
        "PYTHONPATH": str(PROJECT / "clients" / "python"),
        "OPENAI_API_KEY": "unused",
        "UV_CACHE_DIR": str(Path.home() / ".cache" / "uv"),
    }
    evaluate = [str(VENVS / "verifiers" / "bin" / "vf-eval"), "@", "eval.toml", "--no-rich"]
    for command in (export, evaluate):
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=COMMAND_S)
        assert done.returncode == 0, f"{command[0]} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    (traces,) = folder.glob("outputs/*/traces.jsonl")
    return [json.loads(line) for line in traces.read_text().splitlines()]


def _answer(request: Mapping[str, Any]) -> str:
    """Answer the first task of `math` rightly, and each other task wrongly."""
    conversation = json.dumps(request["messages"])
    answer = "40" if "13 + 73 - 46" in conversation else "41"
    if "action_schema" not in conversation:
        return answer
    return json.dumps({"type": "call_tool", "tool_name": "submit", "arguments": {"answer": answer}})


def _version(venv: str, package: str) -> str:
    (metadata,) = (VENVS / venv).glob(f"lib/python3*/site-packages/{package}-*.dist-info")
    return metadata.name.removesuffix(".dist-info").removeprefix(f"{package}-")


async def areal_task_server(gateway: Served) -> Played:
    """Play as AReaL's task server workflow does, with a scripted engine."""
    client = ArealClient(f"{gateway.url}/areal/math")

    async def reward(answer: str) -> float:
        return (await client.rollout(0, lambda _: f"<answer>{answer}</answer>")).reward

    rewards = [await reward("40"), await reward("41")]
    return Played(rewards, {}, list(rewards))


RUNS: Final = [
    Run("trl-ors-math", "TRL", "ORS", "`math`", learning("trl-ors-math"), learns_to=0.95),
    Run("trl-ors-game", "TRL", "ORS", "`game`, several calls", learning("trl-ors-game"), learns_to=0.9),
    Run("trl-ors-mixture", "TRL", "ORS", "`math` and `chat` in one run", learning("trl-ors-mixture"), learns_to=0.9),
    Run("trl-ors-curriculum", "TRL", "ORS", "`math`, a curriculum", learning("trl-ors-curriculum"), learns_to=0.95),
    Run(
        "trl-ors-kill",
        "TRL",
        "ORS",
        "`math`, a replica is killed",
        learning("trl-ors-kill"),
        learns_to=0.95,
        kills=True,
    ),
    Run("trl-openenv-math", "TRL", "OpenEnv", "`math`", learning("trl-openenv-math"), learns_to=0.95),
    Run("trl-openenv-game", "TRL", "OpenEnv", "`game`, several calls", learning("trl-openenv-game"), learns_to=0.9),
    Run("trl-client-math", "TRL, client package", "ORS", "`math`", learning("trl-client-math"), learns_to=0.95),
    Run(
        "gymnasium-ors-game",
        "Gymnasium, client package",
        "ORS",
        "`game`, several calls",
        learning("gymnasium-ors-game"),
        learns_to=0.95,
    ),
    Run(
        "verifiers-openenv-math",
        "verifiers",
        "OpenEnv",
        "`math`",
        verifiers("verifiers_openenv.toml"),
        scripted=(1.0, 0.0),
    ),
    Run(
        "verifiers-nemo-math",
        "verifiers",
        "NeMo Gym",
        "`math`",
        verifiers("verifiers_nemo_gym.toml"),
        scripted=(1.0, 0.0),
    ),
    Run(
        "verifiers-ors-math",
        "verifiers, client package",
        "ORS",
        "`math`",
        verifiers("verifiers_gateway.toml"),
        scripted=(1.0, 0.0),
    ),
    Run(
        "skyrl-ors-math", "SkyRL's environment class", "ORS", "`math`", learning("skyrl-ors-math"), scripted=(1.0, 0.0)
    ),
    Run("areal-ors-math", "AReaL's workflow class", "ORS", "`math`", learning("areal-ors-math"), scripted=(1.0, 0.0)),
    Run(
        "areal-task-server-math",
        "the requests of AReaL's task server workflow",
        "AReaL",
        "`math`",
        areal_task_server,
        scripted=(1.0, 0.0),
    ),
]
"""All runs, in the order of the page."""
