"""One task and one script of actions give all clients the same reward, over whichever frontend they play.

The ORS client is its SDK. AReaL's API is called as AReaL's workflow calls it, and NeMo Gym's as its Simple Agent does.
OpenEnv's package sends actions for the environment's default tool as plain actions.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gateway.tasks.reward_records import verify
from gateway.tasks.signing import trusted_of
from tests.fakes.eventually import eventually
from tests.fakes.user import need_other_users
from tests.wire.areal_client import ArealClient
from tests.wire.catalog import EMBEDDED, PROJECT, STACK, on_stack, serving
from tests.wire.coding_play import SPECS, problem_of
from tests.wire.gateways import Gateway
from tests.wire.nemo_client import Call, NemoEpisode, row_of
from tests.wire.openenv.clients import NEWEST, Driver, connected
from tests.wire.sdks import SDKS

pytestmark = [pytest.mark.wire, pytest.mark.sandbox, pytest.mark.needs("openenv-clients")]

Act = tuple[str, dict[str, Any]]
"""A tool's name and its arguments."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A task, and scripts of actions that end its episode."""

    environment: str
    default_tool: str
    task: Mapping[str, Any]
    scripts: Mapping[str, Sequence[Act]]
    worth: Mapping[str, float]
    """The scripts whose reward is known beforehand, with that reward."""


@dataclass(frozen=True)
class Played:
    """The total reward and the number of steps that a trainer got for an episode."""

    reward: float
    steps: int


def first_task(environment: str) -> dict[str, Any]:
    """Return the first of the project's own tasks for an environment."""
    lines = (PROJECT / "tasks" / environment / "train.jsonl").read_text("utf-8").split("\n")
    task: dict[str, Any] = json.loads(lines[0])
    return task


def math() -> Case:
    task = first_task("math")
    right = str(task["evaluation"]["entry"]["answer"])
    return Case(
        environment="math",
        default_tool="submit",
        task=task,
        scripts={"right": [("submit", {"answer": right})], "wrong": [("submit", {"answer": "certainly not this"})]},
        worth={"right": 1.0},
    )


def os() -> Case:
    task = first_task("os")
    reference = task["reference"]
    commands: list[Act] = [("bash_action", {"script": command}) for command in reference["commands"]]
    return Case(
        environment="os",
        default_tool="bash_action",
        task=task,
        scripts={
            "right": [*commands, ("answer_action", {"answer": reference["answer"]})],
            "wrong": [*commands, ("answer_action", {"answer": "certainly not this"})],
            "given up": [("finish_action", {"thought": "I do not know."})],
        },
        worth={"right": 1.0, "wrong": 0.0, "given up": 0.0},
    )


def coding() -> Case:
    task = SPECS["train"][0]
    problem = problem_of(task)
    return Case(
        environment="coding",
        default_tool="submit",
        task=task,
        scripts={
            "right": [("execute", {"command": "ls"}), ("submit", {"code": problem.reference})],
            "wrong": [("submit", {"code": problem.wrong_solution})],
        },
        worth={"right": 1.0},
    )


def game() -> Case:
    there = [("act", {"message": "[right]"})] * 3
    return Case(
        environment="game",
        default_tool="act",
        task={
            "id": "three-steps",
            "instruction": "Reach the goal.",
            "config": {"game": "grid", "level": {"map": ["S..G"]}, "max_turns": 9},
            "evaluation": {"reward_function": "efficiency(slack=1.5)"},
        },
        scripts={
            "straight": there,
            "with a detour": [there[0], ("act", {"message": "[left]"}), *there],
            "lost": [("act", {"message": "[up]"})] * 9,
        },
        worth={"straight": 1.0, "lost": 0.0},
    )


def textarena() -> Case:
    moves = ("A C", "A B", "C B", "A C", "B A", "B C", "A C")
    return Case(
        environment="textarena",
        default_tool="move",
        task={"id": "hanoi", "config": {"game": "TowerOfHanoi-v0-hard", "seed": 7, "parameters": {"num_disks": 3}}},
        scripts={
            "right": [("move", {"text": f"[{move}]"}) for move in moves],
            "invalid": [("move", {"text": "[nothing]"})] * 2,
        },
        worth={"right": 1.0, "invalid": 0.0},
    )


def chat() -> Case:
    task = first_task("chat")
    return Case(
        environment="chat",
        default_tool="reply",
        task=task,
        scripts={
            "right": [("reply", {"message": task["evaluation"]["reference"]})],
            "wrong": [("reply", {"message": "certainly not this"})],
        },
        worth={"right": 1.0, "wrong": 0.0},
    )


def reasoning_gym() -> Case:
    return Case(
        environment="reasoning_gym",
        default_tool="submit",
        task={"family": "chain_sum", "seed": 7, "parameters": {"min_terms": 2, "max_terms": 2}},  # 60 + 93
        scripts={
            "right": [("submit", {"answer": "153"})],
            "with more": [("submit", {"answer": "153 or 154"})],
            "wrong": [("submit", {"answer": "certainly not this"})],
        },
        worth={"right": 1.0, "with more": 0.0, "wrong": 0.0},
    )


def browser() -> Case:
    page = (
        "<!doctype html><html lang=en><head><title>Press</title></head><body>"
        "<button onclick=\"document.getElementById('said').textContent = 'pressed'\">Press</button>"
        "<p id=said role=status></p></body></html>"
    )
    return Case(
        environment="browser",
        default_tool="act",
        task={
            "id": "custom/press",
            "env_type": "browser",
            "instruction": "Press the button.",
            "config": {"benchmark": "custom", "task_name": "press", "html": page, "max_steps": 2},
            "evaluation": {"reward_function": "element_text_equals('#said', 'pressed')"},
        },
        scripts={
            # Elements have numbers in the page's order: html, head, title, body, button.
            "pressed": [("act", {"action_str": "noop()"}), ("act", {"action_str": "click('4')"})],
            "left alone": [("act", {"action_str": "noop()"})] * 2,
        },
        worth={"pressed": 1.0, "left alone": 0.0},
    )


CASES = {
    case.environment: case for case in (math(), os(), coding(), game(), textarena(), chat(), reasoning_gym(), browser())
}
IN_CONTAINERS_ONLY = ("browser",)
"""Environments that need more than Python packages."""


def catalog(folder: Path) -> Path:
    """Write the environments' files anew, each with the one task of its case, and return the catalog's folder."""
    images = folder / "environments"
    for name, case in CASES.items():
        tasks = folder / "tasks" / name
        tasks.mkdir(parents=True)
        (tasks / "train.jsonl").write_text(json.dumps(case.task) + "\n", "utf-8")
        # A local worker runs in this folder; a container has its own files.
        (images / name).mkdir(parents=True)
        for path in (PROJECT / "env_images" / name).iterdir():
            (images / name / path.name).symlink_to(path)
        configured = (images / name / "environment.toml").resolve().read_text("utf-8")
        line = f'\ndirectory = "tasks/{name}"\n'
        assert configured.count(line) == 1, name
        (images / name / "environment.toml").unlink()
        (images / name / "environment.toml").write_text(configured.replace(line, f'\ndirectory = "{tasks}"\n'), "utf-8")
    return images


@pytest.fixture(scope="module", params=[EMBEDDED, on_stack(*CASES)])
def gateway(request: pytest.FixtureRequest) -> Iterator[Gateway]:
    if request.param == EMBEDDED:  # a container always has other users
        need_other_users()
    with tempfile.TemporaryDirectory(prefix="three-clients-") as name:
        Path(name).chmod(0o755)
        names = [name for name in CASES if request.param == STACK or name not in IN_CONTAINERS_ONLY]
        with serving(request.param, *names, GATEWAY_CATALOG_DIR=str(catalog(Path(name)))) as gateway:
            yield gateway


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    with contextlib.closing(Driver(NEWEST)) as driver:
        yield driver


@contextlib.asynccontextmanager
async def over_ors(gateway: Gateway, environment: str) -> AsyncIterator[Callable[[Act], Awaitable[Any]]]:
    sdk = SDKS["openreward"]
    async with (
        sdk.connect(gateway.url, None) as client,
        client.environment(environment).session(split="train", index=0) as session,
    ):

        async def act(action: Act) -> tuple[float | None, bool]:
            output = await session.call_tool(*action)
            return output.reward, output.finished

        yield act


@contextlib.asynccontextmanager
async def over_areal(gateway: Gateway, environment: str) -> AsyncIterator[Callable[[Act], Awaitable[Any]]]:
    client = ArealClient(f"{gateway.url}/areal/{environment}")
    episode = (await client.start(0))["episode_id"]

    async def act(action: Act) -> tuple[float | None, bool]:
        reply = await client.tool(episode, action[0], **action[1])
        return reply["reward"], reply["done"]

    yield act


@contextlib.asynccontextmanager
async def over_openenv(
    gateway: Gateway, environment: str, driver: Driver
) -> AsyncIterator[Callable[[Act], Awaitable[Any]]]:
    async with connected(driver, f"{gateway.url}/openenv/{environment}") as client:
        await client.reset(split="train", index=0)

        async def act(action: Act) -> tuple[float | None, bool]:
            tool, arguments = action
            if tool != CASES[environment].default_tool:
                arguments = {"type": "call_tool", "tool_name": tool, "arguments": arguments}
            result = await client.step(arguments)
            return result["reward"], result["done"]

        yield act


@contextlib.asynccontextmanager
async def over_nemo(gateway: Gateway, environment: str) -> AsyncIterator[Callable[[Act], Awaitable[Any]]]:
    episode = NemoEpisode(f"{gateway.url}/nemo/{environment}", row_of(environment))
    await episode.seed()

    async def act(action: Act) -> tuple[float | None, bool]:
        is_end = json.loads(await episode.call(Call(*action))).get("finished", False)
        return (await episode.verify() if is_end else None), is_end

    yield act


async def played(act: Callable[[Act], Awaitable[Any]], script: Sequence[Act]) -> Played:
    """Play *script*, and assert that exactly its last action ends the episode."""
    total, ends = 0.0, []
    for action in script:
        reward, is_end = await act(action)
        total += reward or 0.0
        ends.append(is_end)
    assert ends == [False] * (len(script) - 1) + [True]
    return Played(total, len(script))


@pytest.mark.parametrize("environment", [name for name in CASES if name not in IN_CONTAINERS_ONLY])
async def test_the_same_actions_earn_the_same_reward_over_every_frontend(
    gateway: Gateway, driver: Driver, environment: str
) -> None:
    await expect_the_same_rewards(gateway, driver, environment)


@pytest.mark.parametrize("gateway", [on_stack(*CASES)], indirect=True)
@pytest.mark.parametrize("environment", IN_CONTAINERS_ONLY)
async def test_the_same_actions_earn_the_same_reward_in_an_environment_that_needs_containers(
    gateway: Gateway, driver: Driver, environment: str
) -> None:
    await expect_the_same_rewards(gateway, driver, environment)


@pytest.mark.parametrize(
    ("environment", "action", "seen"),
    [
        pytest.param("coding", ("execute", {"command": "echo shown; exit 3"}), {"status": 3}, id="coding"),
        pytest.param("game", ("act", {"message": "[right]"}), {"game": "grid", "turn": 1}, id="game"),
    ],
)
async def test_a_tool_client_of_openenv_gets_a_tools_text_next_to_its_data(
    gateway: Gateway, driver: Driver, environment: str, action: Act, seen: dict[str, Any]
) -> None:
    tool, arguments = action
    async with connected(driver, f"{gateway.url}/openenv/{environment}", kind="mcp") as client:
        await client.reset(split="train", index=0)
        result = await client.call("call_tool", tool, **arguments)

    assert result.items() >= seen.items()
    assert {"coding": "shown\n[exit status 3]", "game": ".@.G"}[environment] in result["text"]


async def expect_the_same_rewards(gateway: Gateway, driver: Driver, environment: str) -> None:
    """Play each script of the case over each frontend, and compare the rewards."""
    case = CASES[environment]
    rewards: dict[str, list[float]] = {}
    for name, script in case.scripts.items():
        fronts = (
            over_ors(gateway, environment),
            over_areal(gateway, environment),
            over_openenv(gateway, environment, driver),
            over_nemo(gateway, environment),
        )
        rewards[name] = []
        for front in fronts:
            async with front as act:
                rewards[name].append((await played(act, script)).reward)

    async def nothing_is_open() -> None:
        assert await gateway.sessions() == []

    await eventually(nothing_is_open)
    assert {name: len(set(got)) for name, got in rewards.items()} == dict.fromkeys(case.scripts, 1), rewards
    assert {name: rewards[name][0] for name in case.worth} == case.worth
    assert len({got[0] for got in rewards.values()}) > 1, "scripts of one worth would show nothing"
    await expect_the_log_to_tell_it(gateway, case, rewards)


async def expect_the_log_to_tell_it(gateway: Gateway, case: Case, rewards: Mapping[str, Sequence[float]]) -> None:
    """Assert that the step log has each episode of each frontend, with all actions and rewards."""
    episodes = await gateway.ask("episodes", environment=case.environment, limit=str(4 * len(case.scripts)))
    trusted = trusted_of({"gateway": await gateway.fetch("signing-key")})
    told = iter(reversed(episodes["episodes"]))
    for name, script in case.scripts.items():
        for protocol, reward in zip(("ors", "areal", "openenv", "nemo"), rewards[name], strict=True):
            listed = next(told)
            episode = await gateway.ask(f"episodes/{listed['id']}")
            steps = [step for step in episode["steps"] if step["operation"] == "call"]

            assert (listed["protocol"], listed["outcome"], listed["steps"]) == (protocol, "finished", len(script))
            assert listed["reward"] == pytest.approx(reward)
            assert episode["begin"]["spec"] == case.task
            for step, (tool, arguments) in zip(steps, script, strict=True):  # plain actions name no tool
                assert step["action"] in ({"tool": tool, "input": arguments}, {"fields": arguments})
            assert sum(step.get("reward") or 0.0 for step in steps) == pytest.approx(reward)
            assert [step.get("finished", False) for step in steps] == [False] * (len(script) - 1) + [True]
            assert all(step["outcome"] == "ok" and step["blocks"] for step in steps)
            report = await gateway.ask(f"episodes/{listed['id']}/replay", "POST")
            assert (report["differs_in"], report["steps"]) == ([], len(script)), report
            *signed, end = verify(await gateway.fetch(f"episodes/{listed['id']}/record"), trusted)
            assert end["reward"] == listed["reward"]
            assert sum(record["reward"] for record in signed) == pytest.approx(reward)
