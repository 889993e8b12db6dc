"""Episodes that end by an author's fault: failing environments, the clients that play them, and the operators' view.

The environments are those of ``faulty/catalog``. The id of a task names the part that fails. `WAYS` has a client for
each protocol, and for each form in which a protocol can report the first failure.
"""

from __future__ import annotations

import ast
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually
from tests.service.wire import events
from tests.wire.areal_client import ArealClient, Failed
from tests.wire.gateways import OPERATOR_KEY, Gateway
from tests.wire.openenv.frames import socket

SSE, JSON = "text/event-stream", "application/json"
FAULTY = Path(__file__).parent / "faulty"
OWN, OS, ORS, OPENREWARD = "faulty", "os", "faulty-ors", "faulty-openreward"
IMPORT = "faulty-import"
"""An environment that no worker can start, because its module raises."""
FAIL, AGENT = "faulty-fail", "faulty-agent"
"""`OWN` with another value of ``[errors] unexpected``."""
OPENENV, MCP, AREAL = "faulty-openenv", "faulty-mcp", "faulty-areal"
"""Kinds of workers: two environments on the gateway's own server, and unmodified third-party servers."""
OS_TASKS = {task["id"]: task for task in map(json.loads, (FAULTY / "os_tasks/train.jsonl").read_text().splitlines())}

OWN_ROWS = [
    # what fails        what the client gets
    ("constructor", "no opening"),
    ("reset", "no opening"),
    ("tool", "a failed tool"),
    ("judge", "the end"),
    ("program", "the end"),
    ("reward", "the end"),
    ("infinite reward", "the end"),
]
"""The client's view.

``no opening``: the reset fails. ``a failed tool``: the agent reads the tool's own message, and the episode goes on
until its trainer, or the limit of turns, ends it. ``the end``: the step ends the episode.
"""

CALLS: Mapping[str, Mapping[str, Any]] = {
    OS: {"name": "answer_action", "input": {"answer": "3"}},
    OPENENV: {"action": {"text": "4"}},
    AREAL: {"name": "act", "input": {"content": "4"}},
}
"""The answer as a call of ORS. Environments that are not listed use `CALL`."""
CALL: Mapping[str, Any] = {"name": "answer", "input": {"text": "4"}}
STEPS: Mapping[str, Mapping[str, Any]] = {
    OS: {"type": "call_tool", "tool_name": "answer_action", "arguments": {"answer": "3"}},
    MCP: {"type": "call_tool", "tool_name": "answer", "arguments": {"text": "4"}},
    AREAL: {"content": "4"},
}
"""The answer as an action of OpenEnv. Environments that are not listed use `STEP`."""
STEP: Mapping[str, Any] = {"text": "4"}
TEXTS: Mapping[str, str] = {OS: "Think: I count them.\nAct: answer(3)"}
"""The answer as a model's text for AReaL. Environments that are not listed use ``4``."""


STEPS_MAX = 3
"""More than the steps of any episode of these environments."""


@dataclass
class Heard:
    """The errors and rewards that a client got."""

    errors: list[tuple[int | str, str]] = field(default_factory=list)
    """The status or code of each error, with the reason in one word."""
    rewards: list[float | None] = field(default_factory=list)
    is_done: bool = False


Play = Callable[[str, str, str], AbstractAsyncContextManager[Heard]]


@asynccontextmanager
async def over_ors(
    url: str, environment: str, task: str, *, accepts: Sequence[str] = (SSE, JSON)
) -> AsyncIterator[Heard]:
    """Open a session, get the prompt, answer once in each form of *accepts*, and delete the session."""
    heard = Heard()
    headers = {"X-Session-ID": f"{environment}-{task}"}
    spec = OS_TASKS[task] if environment == OS else {"id": task, "config": {"fails": task}}
    async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, verify=False, timeout=HANG_S) as http:
        answers = [await http.post("/create", json={"env_name": environment, "task_spec": spec})]
        if answers[-1].status_code == 200:
            answers.append(await http.get(f"/{environment}/prompt"))
        if answers[-1].status_code == 200:
            for accept in accepts:
                call = CALLS.get(environment, CALL)
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
                heard.errors.append((200, "author_fault" if body.startswith("author_fault: ") else ""))
                continue
        match json.loads(body):
            case {"ok": True, "output": output}:
                heard.is_done = heard.is_done or output["finished"]
                heard.rewards.append(output["reward"])
            case {"ok": False, "reason": reason}:
                heard.errors.append((200, reason))
    yield heard


@asynccontextmanager
async def finished(url: str, environment: str, over: str, task: str = "late reward") -> AsyncIterator[float]:
    """Play an episode to its end *over* a protocol, and yield its sum of rewards while its session is still open."""
    rewards: list[float | None] = []
    if over == "openenv":
        async with socket(f"{url}/openenv/{environment}") as ws:
            await ws.reset(task=task)
            for _ in range(STEPS_MAX):
                data = (await ws.step(**STEPS.get(environment, STEP)))["data"]
                rewards.append(data.get("reward"))
                if data.get("done"):
                    break
            assert data.get("done"), data
            yield sum(reward or 0.0 for reward in rewards)
        return
    headers = {"X-Session-ID": f"finished-{environment}", "Accept": JSON if over == "ors-json" else SSE}
    async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, verify=False, timeout=HANG_S) as http:
        spec = {"id": task, "config": {"fails": task}}
        created = await http.post("/create", json={"env_name": environment, "task_spec": spec})
        assert created.status_code == 200, created.text
        for _ in range(STEPS_MAX):
            answer = await http.post(f"/{environment}/call", json=CALLS.get(environment, CALL))
            body = answer.text if over == "ors-json" else events(answer.text)[-1][1]
            output = json.loads(body).get("output", {}) if body.startswith("{") else {}
            rewards.append(output.get("reward"))
            if output.get("finished"):
                break
        assert output.get("finished"), answer.text
        yield sum(reward or 0.0 for reward in rewards)
        await http.post("/delete")


@asynccontextmanager
async def over_areal(url: str, environment: str, task: str) -> AsyncIterator[Heard]:
    """Start an episode and answer twice."""
    heard = Heard()
    client = ArealClient(f"{url}/areal/{environment}")
    try:
        episode = (await client.start(task))["episode_id"]
        for _ in range(2):
            reply = await client.step(episode, TEXTS.get(environment, "4"))
            heard.rewards.append(reply["reward"])
            heard.is_done = heard.is_done or reply["done"]
    except Failed as error:
        heard.errors.append((error.status, error.body.get("reason", "")))
    yield heard


@asynccontextmanager
async def over_nemo(url: str, environment: str, task: str) -> AsyncIterator[Heard]:
    """Seed a session, answer twice, and verify."""
    heard = Heard()
    base = f"{url}/nemo/{environment}/"
    row = {"responses_create_params": {"input": []}, "verifier_metadata": {"id": task}, "response": {"output": []}}
    async with httpx.AsyncClient(base_url=base, trust_env=False, verify=False, timeout=HANG_S) as http:
        answers = [await http.post("seed_session", json=row)]
        if answers[0].status_code == 200:
            call = CALLS.get(environment, CALL)
            answers += [await http.post(call["name"], json=call["input"]) for _ in range(2)]
            answers.append(await http.post("verify", json=row))
    for answer in answers:
        body = answer.json()
        if answer.status_code != 200:
            heard.errors.append((answer.status_code, body.get("reason", "")))
        heard.is_done = heard.is_done or body.get("finished") is True
        heard.rewards += [body["reward"]] if "reward" in body else []
    yield heard


@asynccontextmanager
async def over_openenv(url: str, environment: str, task: str) -> AsyncIterator[Heard]:
    """Reset, answer twice, and close."""
    heard = Heard()
    async with socket(f"{url}/openenv/{environment}") as ws:
        replies = [await ws.reset(task=task)]
        if replies[0]["type"] != "error":
            said = STEPS.get(environment, STEP)
            replies += [await ws.step(**said), await ws.step(**said)]
        for reply in replies:
            _hear(heard, reply["data"])
    yield heard


@asynccontextmanager
async def over_openenv_http(url: str, environment: str, task: str) -> AsyncIterator[Heard]:
    """Do as `over_openenv`, without a socket."""
    heard = Heard()
    async with _openenv_session(url, environment) as (http, _):
        answers = [await http.post("reset", json={"task": task})]
        if answers[0].status_code == 200:
            answers += [await http.post("step", json={"action": STEPS.get(environment, STEP)}) for _ in range(2)]
        for answer in answers:
            assert (answer.status_code == 200) == ("code" not in answer.json()), answer.text
            _hear(heard, answer.json())
    yield heard


@asynccontextmanager
async def over_mcp(url: str, environment: str, task: str) -> AsyncIterator[Heard]:
    """Reset, call the tool twice by JSON-RPC, and close. These calls report no reward and no end."""
    heard = Heard()
    call = CALLS.get(environment, CALL)
    async with _openenv_session(url, environment) as (http, id):
        begun = await http.post("reset", json={"task": task})
        _hear(heard, begun.json())
        if begun.status_code == 200:
            for _ in range(2):
                params = {"name": call["name"], "arguments": call["input"], "session_id": id}
                answer = await _rpc(http, "tools/call", **params)
                if (error := answer.get("error")) is not None:
                    heard.errors.append((error["code"], (error["data"] or {}).get("reason", "")))
    yield heard


@asynccontextmanager
async def _openenv_session(url: str, environment: str) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """Yield a client for a session's HTTP routes, and the session's id."""
    base = f"{url}/openenv/{environment}/"
    async with httpx.AsyncClient(base_url=base, trust_env=False, verify=False, timeout=HANG_S) as http:
        id = (await _rpc(http, "openenv/session/create"))["result"]["session_id"]
        http.headers["X-Session-ID"] = id
        yield http, id
        await _rpc(http, "openenv/session/close", session_id=id)


async def _rpc(http: httpx.AsyncClient, method: str, **params: Any) -> dict[str, Any]:
    answer = await http.post("mcp", json={"jsonrpc": "2.0", "method": method, "params": params, "id": 1})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def _hear(heard: Heard, data: Mapping[str, Any]) -> None:
    """Record an observation or an error of OpenEnv.

    A failed tool is an error, or an observation with an error type, which a third-party server guesses.
    """
    if "code" in data:
        heard.errors.append((data["code"], data.get("reason", "")))
        return
    heard.is_done = heard.is_done or data["done"]
    heard.rewards += [] if data["reward"] is None else [data["reward"]]
    if data["observation"].get("error"):
        heard.errors.append(("EXECUTION_ERROR", ""))


PROTOCOLS: Mapping[str, tuple[Play, Mapping[str, list[tuple[int | str, str]]]]] = {
    "ors": (
        over_ors,
        {
            "no opening": [(500, "author_fault")],
            "a failed tool": [(200, ""), (200, "tool_failed")],
            "the end": [(200, "author_fault"), (410, "author_fault")],
        },
    ),
    "areal": (
        over_areal,
        {
            "no opening": [(500, "author_fault")],
            "a failed tool": [(500, "author_fault")],  # the second answer, at the limit of turns
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
"""The form of each protocol: the first error, and the errors that may follow."""

WAYS: Mapping[str, tuple[Play, Mapping[str, list[tuple[int | str, str]]]]] = {
    **PROTOCOLS,
    "ors-json": (
        partial(over_ors, accepts=(JSON, SSE)),
        {**PROTOCOLS["ors"][1], "a failed tool": [(200, "tool_failed"), (200, "")]},
    ),
    "openenv-http": (over_openenv_http, PROTOCOLS["openenv"][1]),
    "openenv-mcp": (
        over_mcp,
        {
            "no opening": [("EXECUTION_ERROR", "author_fault")],
            "a failed tool": [(-32603, "")],
            "the end": [(-32603, "author_fault")],
        },
    ),
}
"""As `PROTOCOLS`, with every form of the first call that fails."""


NEMO: tuple[Play, Mapping[str, list[tuple[int | str, str]]]] = (
    over_nemo,
    {
        "no opening": [(500, "author_fault")],
        "a failed tool": [(500, ""), (500, "author_fault")],  # the calls, and the verify
        "the end": [(500, "author_fault")],
    },
)
"""The same for NeMo Gym, which `WAYS` does not have: its episodes end by a verify only."""


async def told(gateway: Gateway, path: str, body: object = None) -> httpx.Response:
    """Send an operator's request and return its response. With a *body*, the request is a POST."""
    headers = {"Authorization": f"Bearer {OPERATOR_KEY}"}
    async with httpx.AsyncClient(
        base_url=gateway.url, headers=headers, trust_env=False, verify=False, timeout=HANG_S
    ) as http:
        return await (http.get(path) if body is None else http.post(path, json=body))


async def counted(gateway: Gateway, environment: str) -> dict[str, float]:
    """Return the episodes of *environment* by outcome, the number of ``rewards``, and of ``marked`` episodes."""
    found: dict[str, float] = {}
    for name, labels, value in await _samples(gateway, environment):
        if name == "gateway_episodes_total":
            found[labels["outcome"]] = value
        elif name == "gateway_episode_reward_count":
            found["rewards"] = value
        elif name == "gateway_episodes_marked_total":
            found["marked"] = value
    return found


async def failed_calls(gateway: Gateway, environment: str) -> float:
    """Return the number of calls of *environment* that ended with an author fault."""
    calls = [
        value
        for name, labels, value in await _samples(gateway, environment)
        if name == "gateway_calls_total" and labels["outcome"] == "author_fault"
    ]
    return sum(calls)


async def _samples(gateway: Gateway, environment: str) -> list[tuple[str, Mapping[str, str], float]]:
    lines = (await told(gateway, "/metrics")).text.splitlines()
    text = "\n".join(line for line in lines if f'environment="{environment}"' in line)  # parsing everything takes 20 ms
    return [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text + "\n")
        for sample in family.samples
    ]


async def counted_as(gateway: Gateway, environment: str, before: Mapping[str, float], **more: int) -> None:
    """Wait until exactly *more* episodes than *before* are counted."""

    async def check() -> None:
        after = await counted(gateway, environment)
        found = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
        assert found == more, (found, gateway.log[-3000:])

    await eventually(check)


async def play_and_check(gateway: Gateway, environment: str, fails: str, expected: str, way: str) -> None:
    """Play an episode over *way*, and check the client's and the operator's view of its fault."""
    play, says = WAYS[way]
    before, already_logged = await counted(gateway, environment), len(gateway.log)
    calls_before = await failed_calls(gateway, environment)

    async with play(gateway.url, environment, fails) as heard:
        pass

    marked = {"marked": 1} if expected == "a failed tool" else {}
    await counted_as(gateway, environment, before, author_fault=1, **marked)
    more_calls = await failed_calls(gateway, environment) - calls_before
    assert more_calls == 0 if expected == "no opening" else more_calls >= 1
    assert heard.errors, heard
    assert heard.errors[0] == says[expected][0], heard
    assert set(heard.errors) <= set(says[expected]), heard
    assert not heard.is_done
    assert not any(heard.rewards)
    assert f'"task":"{fails}"' not in (await told(gateway, f"/admin/v1/records?environment={environment}")).text
    line = fault_line(gateway.log[already_logged:])
    assert f"environment={environment} task=" in line
    if environment in (OWN, OS):
        _check_traceback(line, fails)
    await eventually(lambda: _check_end(gateway.log[already_logged:], environment))


async def _check_end(log: str, environment: str) -> None:
    """Check the log line about the session's end."""
    ends = [line for line in log.splitlines() if "session_closed " in line and f"environment={environment} " in line]
    assert len(ends) == 1, log
    assert " outcome=author_fault reward=None " in ends[0]


def fault_line(log: str) -> str:
    """Return the first line of a log that reports an author fault."""
    lines = [line for line in log.splitlines() if " ERROR " in line and "author_fault environment=" in line]
    assert lines, log
    return lines[0]


def _check_traceback(line: str, fails: str) -> None:
    """Check that the traceback shows the place of the mistake, with the author's own code first."""
    text: str = ast.literal_eval(line.partition(" traceback=")[2])
    error = {
        "reset": "KeyError: 'toop'",
        "tool": "KeyError: 'toop'",
        "judge": "SessionFailed: the judge failed",
        "program": "FileNotFoundError",
        "constructor": "KeyError: 'toop'",
        "reward": "a reward is a finite number",
        "infinite reward": "a reward is a finite number",
        "reference": "the example ended with 4: the-cause",
        "reference at the end": "the example ended with 4: the-cause",
    }[fails]
    assert error in text
    if "reward" not in fails:  # no line of the author's code raised it
        first = next(row for row in text.splitlines() if row.strip().startswith("File "))
        assert "/os_" in first if "reference" in fails else "faulty_own.py" in first, text
