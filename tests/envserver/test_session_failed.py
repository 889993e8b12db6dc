"""Sessions that fail through authors' code or infrastructure: reported as failed, then refused, never rewarded."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from envserver import Environment, GroupCandidate, SessionFailed, SessionLost, StepResult, Task, ToolCall, tool

from tests.envserver.conftest import Running, Start
from tests.envserver.eventually import eventually
from tests.envserver.worlds import GATES

JSON = {"Accept": "application/json"}
REASON = "SessionFailed: the judge is gone"
FAILED = {"ok": False, "error": "the judge is gone", "reason": "author_fault"}


class Fragile(Environment):
    """Breaks in each way that an environment can."""

    default_tool = "break_down"

    def reset(self, task: Task, *, seed: int) -> str:
        if task.get("broken"):
            raise SessionFailed("the judge is gone")
        if gate := task.get("gate"):
            GATES.pass_through(gate)
        return "Break."

    @tool
    def win(self) -> StepResult:
        return StepResult("won", reward=1.0)

    @tool
    def break_down(self) -> StepResult:
        raise SessionFailed("the judge is gone")

    @tool
    def lose_the_box(self) -> StepResult:
        raise SessionLost("the box is gone")

    @tool
    async def break_later(self, gate: str) -> StepResult:
        await asyncio.to_thread(GATES.pass_through, gate)
        raise SessionFailed("the judge is gone")

    @tool(inline=True)
    def break_at_once(self) -> StepResult:
        raise SessionFailed("the judge is gone")

    @tool(concurrent=True)
    async def win_beside(self, gate: str) -> StepResult:
        await asyncio.to_thread(GATES.pass_through, gate)
        return StepResult("won", reward=1.0)

    def parse_text(self, text: str) -> ToolCall | str:
        raise SessionFailed("the judge is gone")

    def score_group(self, candidates: Sequence[GroupCandidate]) -> list[float]:
        raise SessionFailed("the judge is gone")


@pytest.fixture
async def server(start: Start) -> Running:
    server = await start(Fragile)
    await server.open()
    return server


ACTIONS = [
    pytest.param({"name": "break_down", "input": {}}, id="a tool"),
    pytest.param({"name": "break_at_once", "input": {}}, id="an inline tool"),
    pytest.param({"text": "anything"}, id="parse_text"),
]


@pytest.mark.parametrize("action", ACTIONS)
async def test_the_failing_call_returns_the_reason_and_later_calls_are_refused(
    server: Running, action: dict[str, Any]
) -> None:
    won = await server.call("win", headers=JSON)

    broke = await server.ask("POST", "/call", sid="s1", body=action, headers=JSON)
    later = [await server.call("win", headers=accept) for accept in (JSON, {})]
    row = await server.row("s1")
    deleted = await server.ask("POST", "/delete", sid="s1")

    assert won.json["output"]["reward"] == 1.0
    assert (broke.status, broke.json) == (200, FAILED)
    assert [(answer.status, answer.json) for answer in later] == [(500, {"detail": REASON})] * 2
    assert row is not None
    assert row["state"] == "failed"
    assert deleted.json["summary"]["finished"] is False


async def test_in_a_stream_the_failure_is_an_error_event(server: Running) -> None:
    broke = await server.call("break_down")

    assert broke.status == 200
    assert broke.events[-1] == ("error", "author_fault: the judge is gone")


async def test_a_failure_of_the_infrastructure_is_reported_as_such(server: Running) -> None:
    broke = await server.call("lose_the_box", headers=JSON)
    later = await server.call("win", headers=JSON)
    summary = (await server.ask("POST", "/delete", sid="s1")).json["summary"]

    assert broke.json == {"ok": False, "error": "the box is gone", "reason": "session_failed"}
    assert (later.status, later.headers["x-session-fault"]) == (500, "infrastructure")
    assert (summary["fault"], summary["reward"]) == ("infrastructure", 0)


async def test_in_a_stream_a_failure_of_the_infrastructure_begins_with_its_reason(server: Running) -> None:
    broke = await server.call("lose_the_box")

    assert broke.events[-1] == ("error", "session_failed: the box is gone")


async def test_a_group_judge_that_fails_also_fails_its_session(server: Running) -> None:
    candidate: dict[str, Any] = {"messages": [], "metadata": {}}

    broke = await server.ask("POST", "/score_group", sid="s1", body={"candidates": [candidate]}, headers=JSON)

    assert broke.json == FAILED
    assert (await server.call("win")).status == 500


async def test_the_same_key_gets_the_failure_again_and_another_key_is_refused(server: Running) -> None:
    first = await server.call("break_down", headers={**JSON, "Idempotency-Key": "k1"})

    again = await server.call("break_down", headers={**JSON, "Idempotency-Key": "k1"})
    other_body = await server.call("win", headers={**JSON, "Idempotency-Key": "k1"})
    others = [await server.call("win", headers={**JSON, "Idempotency-Key": "k2"}) for _ in range(2)]

    assert (first.json, again.json) == (FAILED, FAILED)
    assert other_body.status == 409
    assert [answer.status for answer in others] == [500, 500]


async def test_earlier_answers_are_repeated_after_the_failure(server: Running) -> None:
    key = {**JSON, "Idempotency-Key": "k1"}
    won = await server.call("win", headers=key)
    streamed = await server.call("win")
    task_id = streamed.events[0][1]

    await server.call("break_down")
    again = await server.call("win", headers=key)
    resume = {"name": "win", "input": {}}
    resumed = await server.ask("POST", "/call", sid="s1", body={**resume, "task_id": task_id})
    unknown = await server.ask("POST", "/call", sid="s1", body={**resume, "task_id": "0" * 32})

    assert again.json == won.json
    assert resumed.result == streamed.result
    assert (unknown.status, unknown.json) == (500, {"detail": REASON})


async def test_waiting_calls_are_refused_and_never_run(server: Running) -> None:
    breaking = asyncio.create_task(server.call("break_later", {"gate": "waiting"}, headers=JSON))
    await GATES.until_came("waiting")
    waiting = asyncio.create_task(server.call("win", headers={**JSON, "Idempotency-Key": "w"}))

    async def is_waiting() -> bool:
        return len(server.server.sessions.get("s1").turns.waiting) == 1

    await eventually(is_waiting)
    GATES.open("waiting")
    answers = [await breaking, await waiting]
    summary = (await server.ask("POST", "/delete", sid="s1")).json["summary"]

    assert answers[0].json == FAILED
    assert (answers[1].status, answers[1].json) == (500, {"detail": REASON})
    assert (summary["reward"], summary["steps"]) == (0, 1)


async def test_calls_that_wait_for_the_setup_are_refused_if_the_first_of_them_fails_immediately(start: Start) -> None:
    server = await start(Fragile)
    await server.ask("POST", "/create", sid="s1", body={"task_spec": {"gate": "setup of a fragile session"}})
    calls = []
    for name in ("break_at_once", "win"):
        calls.append(asyncio.create_task(server.call(name, headers=JSON)))

        async def are_waiting() -> bool:
            return len(server.server.sessions.get("s1").turns.waiting) == len(calls)

        await eventually(are_waiting)

    GATES.open("setup of a fragile session")
    answers = [await call for call in calls]

    assert answers[0].json == FAILED
    assert (answers[1].status, answers[1].json) == (500, {"detail": REASON})


async def test_a_call_that_ends_during_the_failure_gives_no_reward(server: Running) -> None:
    beside = asyncio.create_task(server.call("win_beside", {"gate": "beside"}, headers=JSON))
    await GATES.until_came("beside")

    await server.call("break_at_once")
    GATES.open("beside")
    answer = await beside
    summary = (await server.ask("POST", "/delete", sid="s1")).json["summary"]

    assert (answer.json["ok"], answer.json["reason"]) == (False, "author_fault")
    assert (summary["reward"], summary["fault"]) == (0, "author")


async def test_a_session_failure_in_reset_is_a_failed_setup(start: Start) -> None:
    server = await start(Fragile)
    await server.ask("POST", "/create", sid="s1", body={"task_spec": {"broken": True}})

    answers = [await server.ask("GET", "/prompt", sid="s1"), await server.call("win")]

    assert [(answer.status, answer.json) for answer in answers] == [(500, {"detail": REASON})] * 2


async def test_a_session_that_is_deleted_during_the_failing_call_stays_deleted(server: Running) -> None:
    breaking = asyncio.create_task(server.call("break_later", {"gate": "deleted"}, headers=JSON))
    await GATES.until_came("deleted")

    deleted = await server.ask("POST", "/delete", sid="s1")
    GATES.open("deleted")
    answer = await breaking

    assert deleted.status == 200
    assert answer.json == FAILED
    assert (await server.call("win")).status == 404
