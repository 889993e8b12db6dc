"""Exceptions of authors' code: the server reports each once, with its traceback, only to clients that request it."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from envserver import Environment, GroupCandidate, SessionFailed, SessionLost, StepResult, Task, ToolError, tool
from envserver.errors import ERROR_MAX_CHARS, TRACEBACK_MAX_CHARS

from tests.envserver.conftest import Running, Start
from tests.envserver.eventually import eventually
from tests.envserver.raw import Answer, request
from tests.envserver.worlds import GATES

JSON = {"Accept": "application/json"}
ASKED = {"X-Session-Faults": "1"}
SECRET = "secret-4711"
LINES = Path(__file__).read_text().splitlines()


class Unwritable(Exception):
    """An exception that cannot be written as text."""

    def __str__(self) -> str:
        raise ValueError("no text")


ODD = {
    "a list": [1.0],
    "complex": 1 + 0j,
    "a text": "1.0",
    "too large": 10**400,
    "huge": 10**9999,
    "an object": object(),
}


class Careless(Environment):
    """Its author made a mistake in each hook; the task says which one it comes to."""

    def __init__(self) -> None:
        self._fail_in("constructor")

    def reset(self, task: Task, *, seed: int) -> str:
        self._fail_in("reset")
        return "Try."

    def task_tools(self, task: Task) -> Sequence[Callable[..., Any]]:
        self._fail_in("task_tools")
        return ()

    def close(self) -> None:
        self._fail_in("close")

    def score_group(self, candidates: Sequence[GroupCandidate]) -> list[float]:
        self._fail_in("score_group")
        return [float("nan")]

    def _fail_in(self, hook: str) -> None:
        if self.task.get("fails_in") == hook:
            raise KeyError("toop")

    @tool
    def work(self) -> StepResult:
        return StepResult("done", reward=0.5)

    @tool(inline=True)
    def slip(self, text: str = "toop") -> StepResult:
        raise KeyError(text)

    @tool
    async def slip_slowly(self, gate: str) -> StepResult:
        await asyncio.to_thread(GATES.pass_through, gate)
        raise KeyError("toop")

    @tool
    def slip_deeply(self) -> StepResult:
        try:
            raise ValueError(f"{SECRET} \ud800\n" + "x" * 3 * TRACEBACK_MAX_CHARS)
        except ValueError as error:
            raise SessionFailed("the judge failed") from error

    @tool
    def slip_without_words(self) -> StepResult:
        raise Unwritable

    @tool
    def move(self, to: str) -> StepResult:
        raise ToolError(f"there is no way to {to}")

    @tool
    async def mix_up(self, text: str) -> StepResult:
        return StepResult(str(json.loads(text)))

    @tool
    def lose(self) -> StepResult:
        raise SessionLost("the box is gone")

    @tool
    def grade(self, reward: str) -> StepResult:
        return StepResult("graded", reward=float(reward), finished=True)

    @tool
    def grade_oddly(self, kind: str) -> StepResult:
        odd: Any = ODD[kind]
        return StepResult("graded", reward=odd)

    @tool
    def win_much(self) -> StepResult:
        return StepResult("won", reward=1e308)


@pytest.fixture
async def server(start: Start) -> Running:
    return await start(Careless)


async def create(server: Running, sid: str = "s1", *, headers: Mapping[str, str] = ASKED, hook: str = "") -> Answer:
    """Open a session whose author made a mistake in *hook*."""
    body = {"task_spec": {"fails_in": hook}, "secrets": {"key": SECRET}}
    return await server.ask("POST", "/create", sid=sid, body=body, headers=headers)


def told(answer: Answer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(answer.headers.get("x-session-faults", "[]"))
    return found


async def ended(server: Running, sid: str = "s1") -> dict[str, Any]:
    summary: dict[str, Any] = (await server.ask("POST", "/delete", sid=sid)).json["summary"]
    return summary


@pytest.mark.parametrize("hook", ["constructor", "reset", "task_tools"])
async def test_a_hook_that_raises_before_the_first_call(server: Running, hook: str) -> None:
    answer = await create(server, hook=hook)
    if hook != "constructor":
        assert answer.status == 200
        answer = await server.ask("GET", "/prompt", sid="s1")
        again = await server.call("work", headers=JSON)
        assert (again.status, again.headers["x-session-fault"], told(again)) == (500, "author", [])
        assert (await ended(server))["fault"] == "author"

    [fault] = told(answer)
    assert (answer.status, answer.json, answer.headers["x-session-fault"]) == (
        500,
        {"detail": "KeyError: 'toop'"},
        "author",
    )
    assert (fault["kind"], fault["place"], fault["error"]) == ("author", hook, "KeyError: 'toop'")
    first = next(line for line in fault["traceback"].splitlines() if line.startswith("  File "))
    assert "test_faults.py" in first, "the server's own frames are left out"
    assert 'raise KeyError("toop")' in fault["traceback"]


@pytest.mark.parametrize("accept", [JSON, {}])
async def test_a_tools_exception_is_reported_with_its_answer_and_counts_only_while_it_is_the_last(
    server: Running, accept: dict[str, str]
) -> None:
    await create(server)
    await create(server, "s2")

    failed = await server.call("slip", headers=accept)
    went_on = await server.call("work", headers=accept)
    await server.call("slip", sid="s2", headers=accept)

    [fault] = told(failed)
    assert (fault["kind"], fault["place"]) == ("author", "tool:slip")
    assert told(went_on) == []
    assert "fault" not in await ended(server)
    assert (await ended(server, "s2"))["fault"] == "author"


async def test_a_stream_that_has_started_reports_a_fault_in_a_trailer(server: Running) -> None:
    await create(server)
    wire = await server.wire()
    body = {"name": "slip_slowly", "input": {"gate": "a trailer"}}
    wire.send(request("POST", "/call", sid="s1", body=body))
    head = await wire.head()
    GATES.open("a trailer")
    answer = await wire.rest(*head)

    assert answer.events[-1] == ("error", "KeyError: 'toop'")
    assert [fault["place"] for fault in told(answer)] == ["tool:slip_slowly"]


async def test_a_fault_without_a_listening_client_is_reported_when_the_session_ends(server: Running) -> None:
    await create(server, hook="close")
    wire = await server.wire()
    body = {"name": "slip_slowly", "input": {"gate": "left fault"}}
    leaving = asyncio.create_task(wire.ask("POST", "/call", sid="s1", body=body, headers=JSON))
    await GATES.until_came("left fault")
    leaving.cancel()
    await wire.close()
    session = server.server.sessions.get("s1")

    async def is_left() -> bool:
        return not session.requests

    async def is_quiet() -> bool:
        return not session.calls

    await eventually(is_left)
    GATES.open("left fault")
    await eventually(is_quiet)
    summary = await ended(server)

    assert summary["fault"] == "author"
    assert [fault["place"] for fault in summary["faults"]] == ["tool:slip_slowly", "close"]


@pytest.mark.parametrize("reward", ["nan", "inf", "-inf"])
async def test_a_reward_that_is_not_a_finite_number_ends_the_session(server: Running, reward: str) -> None:
    await create(server)
    won = await server.call("work", headers=JSON)

    graded = await server.call("grade", {"reward": reward}, headers=JSON)
    later = await server.call("work", headers=JSON)
    summary = await ended(server)

    assert won.json["output"]["reward"] == 0.5
    assert (graded.json["ok"], graded.json["reason"]) == (False, "author_fault")
    assert "a reward is a finite number" in graded.json["error"]
    assert [fault["place"] for fault in told(graded)] == ["reward"]
    assert later.status == 500
    assert (summary["finished"], summary["fault"]) == (False, "author")


@pytest.mark.parametrize("kind", ODD)
async def test_a_reward_of_another_type_ends_the_session(server: Running, kind: str) -> None:
    await create(server)

    graded = await server.call("grade_oddly", {"kind": kind}, headers=JSON)
    summary = await ended(server)

    assert (graded.json["ok"], graded.json["reason"]) == (False, "author_fault")
    assert "a reward is a finite number" in graded.json["error"]
    assert [fault["place"] for fault in told(graded)] == ["reward"]
    assert (summary["rewarded"], summary["fault"]) == (False, "author")


async def test_a_sum_of_rewards_beyond_all_numbers_ends_the_session(server: Running) -> None:
    await create(server)
    first = await server.call("win_much", headers=JSON)

    second = await server.call("win_much", headers=JSON)
    summary = await ended(server)

    assert first.json["output"]["reward"] == 1e308
    assert (second.json["ok"], second.json["reason"]) == (False, "author_fault")
    assert (summary["reward"], summary["fault"]) == (1e308, "author")


@pytest.mark.parametrize("hook", ["score_group", ""])
async def test_a_group_judge_that_raises_or_returns_no_number_is_an_author_fault(server: Running, hook: str) -> None:
    await create(server, hook=hook)
    group: dict[str, Any] = {"candidates": [{"messages": [], "metadata": None}]}

    scored = await server.ask("POST", "/score_group", sid="s1", body=group, headers=JSON)

    assert (scored.json["ok"], scored.json["reason"]) == (False, "author_fault")
    assert [fault["place"] for fault in told(scored)] == ["score_group"]
    assert (await server.call("work", headers=JSON)).json["ok"] is True


async def test_a_traceback_is_bounded_one_line_json_without_secrets(server: Running) -> None:
    await create(server)

    answer = await server.call("slip_deeply", headers=JSON)

    [fault] = told(answer)
    assert answer.headers["x-session-faults"].isascii()
    assert len(fault["traceback"]) < 2 * TRACEBACK_MAX_CHARS
    assert fault["traceback"].rstrip().endswith("SessionFailed: the judge failed")
    assert SECRET not in json.dumps(fault)
    assert "***" in fault["traceback"]


async def test_an_exception_that_cannot_be_written_as_text_is_still_reported(server: Running) -> None:
    await create(server)

    answer = await server.call("slip_without_words", headers=JSON)

    error = "Unwritable: (its text raised ValueError)"
    assert answer.json == {"ok": False, "error": error, "reason": "tool_failed"}
    assert told(answer)[0]["error"] == "Unwritable: (its text raised ValueError)"


async def test_a_lost_sandbox_is_an_infrastructure_fault(server: Running) -> None:
    await create(server)

    answer = await server.call("lose", headers=JSON)

    assert [fault["kind"] for fault in told(answer)] == ["infrastructure"]


async def test_a_client_that_did_not_request_faults_gets_no_traceback(server: Running) -> None:
    await create(server, headers={})
    await create(server, "s2", headers={}, hook="reset")

    await server.call("slip", {"text": "first"})
    answers = [
        await server.call("slip", headers=JSON),
        await server.call("slip"),
        await server.ask("GET", "/prompt", sid="s2"),
    ]
    summary = await ended(server)

    assert all("x-session-faults" not in answer.headers for answer in answers)
    assert summary.keys() == {"reward", "rewarded", "judged", "finished", "steps", "seconds", "fault"}


@pytest.mark.parametrize("accept", [JSON, {}])
@pytest.mark.parametrize("unexpected", ["mark", "fail", "agent"])
async def test_a_tool_error_is_the_agents_own(start: Start, unexpected: str, accept: dict[str, str]) -> None:
    server = await start(Careless, unexpected=unexpected)
    await create(server)
    won = await server.call("work", headers=JSON)

    refused = await server.call("move", {"to": "\x1b[2J up"}, headers=accept)
    summary = await ended(server)

    expected = {"ok": False, "error": "there is no way to \x1b[2J up", "reason": "tool_error"}
    assert (refused.json if accept else refused.result) == expected
    assert told(refused) == []
    assert won.json["output"]["reward"] == summary["reward"] == 0.5
    assert (summary["steps"], summary.keys() & {"fault", "faults", "unexpected"}) == (2, set())


async def test_a_tool_error_after_an_unexpected_exception_is_no_fault_of_the_author(server: Running) -> None:
    await create(server)
    await server.call("slip")
    await server.call("move", {"to": "up"})

    summary = await ended(server)

    assert "fault" not in summary
    assert summary["unexpected"].startswith("KeyError: 'toop' (test_faults.py, line ")


@pytest.mark.parametrize("accept", [JSON, {}])
async def test_the_first_unexpected_exception_marks_the_session_with_its_line(
    server: Running, accept: dict[str, str]
) -> None:
    await create(server)

    failed = await server.call("mix_up", {"text": "no JSON"}, headers=accept)
    await server.call("slip", headers=accept)
    went_on = await server.call("work", headers=JSON)
    summary = await ended(server)

    error = "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"
    if accept:
        assert failed.json == {"ok": False, "error": error, "reason": "tool_failed"}
    else:
        assert failed.events[-1] == ("error", error)
    assert went_on.json["ok"] is True
    line = next(number for number, text in enumerate(LINES, 1) if "json.loads(text)" in text)
    assert summary["unexpected"] == f"{error} (test_faults.py, line {line})", "the author's line, not the library's"
    assert (summary["reward"], "fault" in summary) == (0.5, False)


async def test_with_fail_an_unexpected_exception_ends_the_session(start: Start) -> None:
    server = await start(Careless, unexpected="fail")
    await create(server)

    failed = await server.call("slip", headers=JSON)
    later = await server.call("work", headers=JSON)
    summary = await ended(server)

    assert failed.json == {"ok": False, "error": "KeyError: 'toop'", "reason": "author_fault"}
    assert [fault["place"] for fault in told(failed)] == ["tool:slip"]
    assert (later.status, later.headers["x-session-fault"]) == (500, "author")
    assert (summary["fault"], "unexpected" in summary) == ("author", False)


async def test_with_agent_an_unexpected_exception_is_the_agents_own(start: Start) -> None:
    server = await start(Careless, unexpected="agent")
    await create(server)
    await create(server, "s2")

    failed = await server.call("slip", headers=JSON)
    broken = await server.call("lose", sid="s2", headers=JSON)

    assert failed.json == {"ok": False, "error": "KeyError: 'toop'", "reason": "tool_error"}
    assert told(failed) == []
    assert not (await ended(server)).keys() & {"fault", "unexpected"}
    assert broken.json["reason"] == "session_failed", "a lost sandbox is never the agent's fault"


@pytest.mark.parametrize("unexpected", ["mark", "fail", "agent"])
async def test_a_judge_that_raises_is_no_tool(start: Start, unexpected: str) -> None:
    server = await start(Careless, unexpected=unexpected)
    await create(server, hook="score_group")
    group: dict[str, Any] = {"candidates": [{"messages": [], "metadata": None}]}

    scored = await server.ask("POST", "/score_group", sid="s1", body=group, headers=JSON)
    await server.call("work")
    summary = await ended(server)

    assert (scored.json["ok"], scored.json["reason"]) == (False, "author_fault")
    assert (summary["reward"], summary.keys() & {"fault", "unexpected"}) == (0.5, set())


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "KeyError: ''"),
        (f"key {SECRET}", "KeyError: 'key ***'"),
        ("\x00\x1b[31m\n\u2028", r"KeyError: '\x00\x1b[31m\n\u2028'"),
        ("x" * 10_000_000, None),
    ],
)
async def test_the_text_of_an_exception_is_bounded_and_has_no_secret(
    server: Running, text: str, error: str | None
) -> None:
    await create(server)

    failed = await server.call("slip", {"text": text}, headers=JSON)
    summary = await ended(server)

    shown = failed.json["error"]
    assert shown == error if error is not None else len(shown) < ERROR_MAX_CHARS + 100
    assert summary["unexpected"].startswith(shown)
    assert told(failed)[0]["error"] == shown
