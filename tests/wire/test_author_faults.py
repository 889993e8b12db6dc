"""What the environment's author does wrong is a typed error in every protocol, and never a reward.

Every row of `ROWS` is played on its kind of worker by a client of every protocol. What the client is told depends on
where the author's code fails, and on nothing else.
"""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deadlines import scaled
from tests.fakes.eventually import eventually
from tests.service.wire import events
from tests.wire.areal_client import ArealClient, Failed
from tests.wire.gateways import OPERATOR_KEY, Gateway, short_folder
from tests.wire.openenv.clients import NEWEST, python_of
from tests.wire.openenv.frames import socket

pytestmark = [pytest.mark.wire, pytest.mark.needs("openenv-clients"), pytest.mark.timeout(240)]

CATALOG = Path(__file__).parent / "faulty" / "catalog"
OWN, ORS, OPENENV, AREAL = "faulty", "faulty-ors", "faulty-openenv", "faulty-areal"
"""Kinds of workers: our own environment server, and unmodified servers of three protocols."""

ROWS = [
    # kind     what fails  what the client is told
    (OWN, "reset", "no opening"),
    (OWN, "tool", "a failed tool"),
    (OWN, "judge", "the end"),
    (OWN, "program", "the end"),
    (OWN, "reward", "the end"),
    (ORS, "reset", "no opening"),
    (ORS, "tool", "a failed tool"),
    (OPENENV, "reset", "no opening"),
    (OPENENV, "tool", "a failed tool"),
    (AREAL, "reset", "no opening"),
    (AREAL, "tool", "the end"),
    (AREAL, "reward", "the end"),
]
"""``no opening``: the reset fails. ``a failed tool``: the agent reads the tool's own message, and the episode goes on
until its trainer, or the limit of turns, ends it. ``the end``: the step ends the episode."""


ORS_CALLS: Mapping[str, Mapping[str, Any]] = {
    OWN: {"name": "answer", "input": {"text": "4"}},
    ORS: {"name": "answer", "input": {"text": "4"}},
    OPENENV: {"action": {"text": "4"}},
    AREAL: {"name": "act", "input": {"content": "4"}},
}
"""The answer in ORS' words."""


@dataclass
class Heard:
    """What a client got."""

    errors: list[tuple[int | str, str]] = field(default_factory=list)
    """Status or code, and the reason in one word, of each error."""
    rewards: list[float | None] = field(default_factory=list)
    is_done: bool = False


Play = Callable[[str, str, str], AbstractAsyncContextManager[Heard]]


@asynccontextmanager
async def over_ors(url: str, environment: str, task: str) -> AsyncIterator[Heard]:
    """Begin, ask for the prompt, answer twice, delete."""
    heard = Heard()
    headers = {"X-Session-ID": f"{environment}-{task}"}
    spec = {"id": task, "config": {"fails": task}}
    async with httpx.AsyncClient(
        base_url=url, headers=headers, trust_env=False, verify=False, timeout=scaled(60)
    ) as http:
        answers = [await http.post("/create", json={"env_name": environment, "task_spec": spec})]
        if answers[-1].status_code == 200:
            answers.append(await http.get(f"/{environment}/prompt"))
        if answers[-1].status_code == 200:
            for accept in ("text/event-stream", "application/json"):
                call = ORS_CALLS[environment]
                answers.append(await http.post(f"/{environment}/call", json=call, headers={"Accept": accept}))
        await http.post("/delete")
    for answer in answers:
        if answer.status_code != 200:
            heard.errors.append((answer.status_code, answer.json().get("reason", "")))
            continue
        body = answer.text
        if answer.headers["content-type"].startswith("text/event-stream"):
            name, body = events(answer.text)[-1]
            if name == "error":
                heard.errors.append((200, "author_fault" if body.startswith("author_fault: ") else "tool_failed"))
                continue
        match json.loads(body):
            case {"ok": True, "output": output}:
                heard.is_done = heard.is_done or output["finished"]
                heard.rewards.append(output["reward"])
            case {"ok": False, "reason": reason}:
                heard.errors.append((200, reason))
    yield heard


@asynccontextmanager
async def over_areal(url: str, environment: str, task: str) -> AsyncIterator[Heard]:
    """Begin, answer twice."""
    heard = Heard()
    client = ArealClient(f"{url}/areal/{environment}")
    try:
        episode = (await client.start(task))["episode_id"]
        for _ in range(2):
            reply = await client.step(episode, "4")
            heard.rewards.append(reply["reward"])
            heard.is_done = heard.is_done or reply["done"]
    except Failed as error:
        heard.errors.append((error.status, error.body.get("reason", "")))
    yield heard


@asynccontextmanager
async def over_openenv(url: str, environment: str, task: str) -> AsyncIterator[Heard]:
    """Begin, answer twice, close."""
    heard = Heard()
    async with socket(f"{url}/openenv/{environment}") as ws:
        replies = [await ws.reset(task=task)]
        if replies[0]["type"] != "error":
            said = {"content": "4"} if environment == AREAL else {"text": "4"}
            replies += [await ws.step(**said), await ws.step(**said)]
        for reply in replies:
            data = reply["data"]
            if reply["type"] == "error":
                heard.errors.append((data["code"], data.get("reason", "")))
            else:
                heard.is_done = heard.is_done or data["done"]
                heard.rewards += [] if data["reward"] is None else [data["reward"]]
    yield heard


PROTOCOLS: Mapping[str, tuple[Play, Mapping[str, list[tuple[int | str, str]]]]] = {
    "ors": (
        over_ors,
        {
            "no opening": [(500, "author_fault")],
            "a failed tool": [(200, "tool_failed")],
            "the end": [(200, "author_fault"), (410, "author_fault")],
        },
    ),
    "areal": (
        over_areal,
        {
            "no opening": [(500, "author_fault")],
            "a failed tool": [(500, "author_fault")],  # the second one, at the limit of turns
            "the end": [(500, "author_fault")],
        },
    ),
    "openenv": (
        over_openenv,
        {
            "no opening": [("EXECUTION_ERROR", "author_fault")],
            "a failed tool": [("EXECUTION_ERROR", "")],
            "the end": [("SESSION_ERROR", "author_fault")],
        },
    ),
}
"""How each protocol says it: the first error, and what it may say after that."""


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    python_of(NEWEST)  # makes the venv that the OpenEnv server runs in
    folder = short_folder()
    settings = {
        "GATEWAY_CATALOG_DIR": str(CATALOG),
        "GATEWAY_ENVIRONMENTS": ",".join((OWN, ORS, OPENENV, AREAL)),
        "GATEWAY_DEFAULT_ENVIRONMENT": OWN,
        "GATEWAY_TRAINER_KEYS": "",
    }
    gateway = Gateway(folder, settings)
    try:
        gateway.start()
        yield gateway
    finally:
        gateway.stop()
        shutil.rmtree(folder, ignore_errors=True)


async def told(gateway: Gateway, path: str, body: object = None) -> httpx.Response:
    """What an operator is answered; with a *body* to a POST."""
    headers = {"Authorization": f"Bearer {OPERATOR_KEY}"}
    async with httpx.AsyncClient(
        base_url=gateway.url, headers=headers, trust_env=False, verify=False, timeout=scaled(60)
    ) as http:
        return await (http.get(path) if body is None else http.post(path, json=body))


async def counted(gateway: Gateway, environment: str) -> dict[str, float]:
    """Episodes of *environment* by outcome, and under ``rewards`` the rewards that were counted."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families((await told(gateway, "/metrics")).text):
        for sample in family.samples:
            if sample.labels.get("environment") == environment:
                if sample.name == "gateway_episodes_total":
                    found[sample.labels["outcome"]] = sample.value
                elif sample.name == "gateway_episode_reward_count":
                    found["rewards"] = sample.value
    return found


async def failed_calls(gateway: Gateway, environment: str) -> float:
    """Calls of *environment* that ended with the author's fault."""
    for family in text_string_to_metric_families((await told(gateway, "/metrics")).text):
        for sample in family.samples:
            wanted = {"environment": environment, "outcome": "author_fault"}
            if sample.name == "gateway_calls_total" and wanted.items() <= sample.labels.items():
                return sample.value
    return 0.0


async def counted_as(gateway: Gateway, environment: str, before: Mapping[str, float], **more: int) -> None:
    """Wait until so many *more* than *before* are counted, and nothing else."""

    async def check() -> None:
        after = await counted(gateway, environment)
        found = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
        assert found == more

    await eventually(check)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("environment", "fails", "expected"), ROWS)
async def test_an_authors_fault_is_a_typed_error_and_never_a_reward(
    gateway: Gateway, environment: str, fails: str, expected: str, protocol: str
) -> None:
    play, says = PROTOCOLS[protocol]
    before, already_logged = await counted(gateway, environment), len(gateway.log)
    calls_before = await failed_calls(gateway, environment)

    async with play(gateway.url, environment, fails) as heard:
        pass

    await counted_as(gateway, environment, before, author_fault=1)
    more_calls = await failed_calls(gateway, environment) - calls_before
    assert more_calls == 0 if fails == "reset" else more_calls >= 1
    assert heard.errors[0] == says[expected][0], heard
    assert set(heard.errors) <= set(says[expected]), heard
    assert not heard.is_done
    assert not any(heard.rewards)
    assert f'"task":"{fails}"' not in (await told(gateway, f"/admin/v1/records?environment={environment}")).text
    line = _fault_line(gateway.log[already_logged:])
    assert f"environment={environment} task=" in line
    if environment == OWN:
        _check_traceback(line, fails)


def _fault_line(log: str) -> str:
    """The first line of a log that tells of an author's fault."""
    lines = [line for line in log.splitlines() if " ERROR " in line and "author_fault environment=" in line]
    assert lines, log
    return lines[0]


def _check_traceback(line: str, fails: str) -> None:
    """Check that the author finds the place of the mistake, and first what is the author's own."""
    text: str = ast.literal_eval(line.partition(" traceback=")[2])
    error = {
        "reset": "KeyError: 'toop'",
        "tool": "KeyError: 'toop'",
        "judge": "SessionFailed: the judge failed",
        "program": "FileNotFoundError",
        "reward": "a reward is a finite number",
    }[fails]
    assert error in text
    if fails != "reward":  # no line of the author's raised it
        first = next(row for row in text.splitlines() if row.strip().startswith("File "))
        assert "faulty_own.py" in first, text


async def test_rewards_are_counted_of_episodes_that_the_agent_played(gateway: Gateway) -> None:
    before = await counted(gateway, OWN)
    client = ArealClient(f"{gateway.url}/areal/{OWN}")

    won = await client.step((await client.start("nothing"))["episode_id"], "4")
    await client.cancel((await client.start("nothing"))["episode_id"])
    task = {"id": "probed", "env_type": OWN, "instruction": "Answer.", "config": {"fails": "nothing"}}
    tried = await told(gateway, "/admin/v1/tasks/validate", task)

    assert (won["reward"], won["done"]) == (1.0, True)
    assert tried.json()["results"][0]["ok"] is True
    await counted_as(gateway, OWN, before, finished=1, unplayed=2, rewards=1)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("environment", "fails"),
    [(OWN, "no rewards"), (ORS, "reward"), (ORS, "no rewards"), (OPENENV, "reward"), (OPENENV, "no rewards")],
)
async def test_an_end_without_any_reward_is_no_reward_of_0(
    gateway: Gateway, environment: str, fails: str, protocol: str
) -> None:
    """Unmodified servers write a reward that is NaN as null, which nobody can tell from no reward."""
    play, _ = PROTOCOLS[protocol]
    before, already_logged = await counted(gateway, environment), len(gateway.log)

    async with play(gateway.url, environment, fails) as heard:
        pass

    assert not any(heard.rewards)
    await counted_as(gateway, environment, before, author_fault=1)
    assert gateway.log[already_logged:].count("author_fault environment=") == 1
    assert "gave no reward in any of its" in _fault_line(gateway.log[already_logged:])
    if protocol == "areal":  # whose clients want a number
        assert heard.errors == [(500, "author_fault")]
        assert not heard.is_done
    else:
        assert heard.is_done
        assert 0.0 not in heard.rewards
    assert f'"task":"{fails}"' not in (await told(gateway, f"/admin/v1/records?environment={environment}")).text


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("task", ["late reward", "early reward"])
@pytest.mark.parametrize("environment", [OWN, ORS, OPENENV])
async def test_steps_that_give_no_reward_take_none_from_those_that_do(
    gateway: Gateway, environment: str, task: str, protocol: str
) -> None:
    play, _ = PROTOCOLS[protocol]
    before = await counted(gateway, environment)

    async with play(gateway.url, environment, task) as heard:
        pass

    assert not heard.errors
    assert heard.is_done
    assert sum(reward or 0.0 for reward in heard.rewards) == 1.0
    await counted_as(gateway, environment, before, finished=1, rewards=1)

    async def is_recorded() -> None:
        assert f'"task":"{task}"' in (await told(gateway, f"/admin/v1/records?environment={environment}")).text

    await eventually(is_recorded)
