"""Turn numbers of a session's calls, in a header of JSON answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from envserver import Environment, SessionFailed, StepResult, Task, tool
from envserver.http import responses
from envserver.http.responses import SLICE_CHARS
from envserver.sessions.session import Session

from tests.envserver.conftest import Running, Start
from tests.envserver.eventually import eventually
from tests.envserver.raw import Answer
from tests.envserver.worlds import GATES, CounterEnv, Listener, MathEnv, Talker

JSON = {"Accept": "application/json"}


class Breakable(Environment):
    """Fails on request."""

    default_tool = "break_down"

    def reset(self, task: Task, *, seed: int) -> str:
        return "Break."

    @tool
    def break_down(self) -> StepResult:
        raise SessionFailed("the judge is gone")


class Silent(Environment):
    """Ends its episode with the requested reward, or without one."""

    def reset(self, task: Task, *, seed: int) -> str:
        return "End."

    @tool
    def end(self, reward: float | None, finished: bool) -> StepResult:
        return StepResult("done", reward=reward, finished=finished)


def turn(answer: Answer) -> str | None:
    return answer.headers.get("x-session-turn")


async def step(server: Running, body: dict[str, Any], *, key: str = "", **given: Any) -> Answer:
    headers = JSON | ({"Idempotency-Key": key} if key else {})
    return await server.ask("POST", "/call", sid="s1", body=body, headers=headers, **given)


def named(name: str, **given: Any) -> dict[str, Any]:
    return {"name": name, "input": given}


async def test_turns_are_counted_whether_a_tool_ran_raised_or_does_not_exist(start: Start) -> None:
    server = await start(MathEnv)
    await server.open()
    bodies = [
        named("think"),
        named("fail", text="no"),
        named("nope"),
        named("submit", answer=[4]),
        named("quick"),
        {"text": "no default tool"},
        named("submit", answer="4"),
    ]

    answers = [await step(server, body) for body in bodies]

    assert [turn(answer) for answer in answers] == ["1", "2", "3", "4", "5", "6", "7"]
    assert [answer.json["ok"] for answer in answers] == [True, False, False, False, True, False, True]
    assert (await server.row("s1") or {})["steps"] == 4, "steps are tools that ran, as ever"


@pytest.mark.parametrize(
    ("kind", "texts"),
    [(Talker, ["!loud", "what?", "crash", "!again"]), (Listener, ["left", "", "right", "up"])],
)
async def test_texts_without_an_action_are_turns_too(start: Start, kind: type[Environment], texts: list[str]) -> None:
    server = await start(kind)
    await server.open()

    answers = [await step(server, {"text": text}) for text in texts]

    assert [turn(answer) for answer in answers] == ["1", "2", "3", "4"]


async def test_a_request_that_is_refused_is_not_a_turn(start: Start) -> None:
    server = await start(MathEnv)
    await server.open()
    await step(server, named("think"), key="k")

    conflict = await step(server, named("quick"), key="k")
    malformed = await step(server, {"name": "think"})
    unknown = await step(server, named("think") | {"task_id": "0" * 32})
    following = await step(server, named("think"))

    assert [answer.status for answer in (conflict, malformed, unknown)] == [409, 422, 200]
    assert [turn(answer) for answer in (conflict, malformed, unknown)] == [None] * 3
    assert turn(following) == "2"


async def test_neither_a_failure_of_the_session_nor_a_judgement_is_a_turn(start: Start) -> None:
    broken = await start(Breakable)
    await broken.open()
    judged = await start(CounterEnv)
    await judged.open("s1", {"start": 0})

    failed = await step(broken, named("break_down"))
    group: dict[str, Any] = {"candidates": [{"messages": [], "metadata": None}]}
    scores = await judged.ask("POST", "/score_group", sid="s1", body=group, headers=JSON)
    following = await step(judged, named("add", amount=1))

    assert failed.json["reason"] == "author_fault"
    assert scores.json["scores"]
    assert (turn(failed), turn(scores), turn(following)) == (None, None, "1")


async def test_a_repeated_key_has_the_turn_of_its_call(start: Start) -> None:
    server = await start(MathEnv)
    await server.open("s1", {"id": "turns of keys"})

    answers = [await step(server, named("quick"), key=key) for key in ("a", "a", "", "b", "a", "b")]

    assert [turn(answer) for answer in answers] == ["1", "1", "2", "3", "1", "3"]
    assert GATES.came["quick turns of keys"] == 3


async def test_a_key_in_flight_has_one_turn_for_all_waiting_requests(start: Start) -> None:
    server = await start(MathEnv)
    await server.open()
    waiting = [asyncio.create_task(step(server, named("wait", gate="one turn"), key="k")) for _ in range(3)]
    await GATES.until_came("one turn")
    session = server.server.sessions.get("s1")
    await eventually(lambda: _listeners(session, 3))

    GATES.open("one turn")

    assert {turn(answer) for answer in await asyncio.gather(*waiting)} == {"1"}
    assert turn(await step(server, named("think"))) == "2"


async def _listeners(session: Session, count: int) -> bool:
    return sum(call.listeners for call in session.calls.values()) == count


async def test_concurrent_steps_have_different_turns(start: Start) -> None:
    server = await start(MathEnv)
    await server.open()
    gates = [f"turn {n}" for n in range(4)]
    waiting = [asyncio.create_task(step(server, named("wait_beside", gate=gate))) for gate in gates]
    for gate in gates:
        await GATES.until_came(gate)

    for gate in gates:
        GATES.open(gate)

    assert sorted(turn(answer) or "" for answer in await asyncio.gather(*waiting)) == ["1", "2", "3", "4"]


async def leave(server: Running, gate: str, *, key: str = "") -> None:
    """Disconnect from a running step, so that no client receives its end."""
    wire = await server.wire()
    headers = JSON | ({"Idempotency-Key": key} if key else {})
    leaving = asyncio.create_task(wire.ask("POST", "/call", sid="s1", body=named("wait", gate=gate), headers=headers))
    await GATES.until_came(gate)
    leaving.cancel()
    await wire.close()
    session = server.server.sessions.get("s1")
    await eventually(lambda: _is_cut(session))
    GATES.open(gate)
    await eventually(lambda: _is_quiet(session))


async def _is_cut(session: Session) -> bool:
    return len(session.cut) == 1


async def _is_quiet(session: Session) -> bool:
    return not session.calls


async def test_a_step_whose_client_disconnected_before_its_end_is_a_turn(start: Start) -> None:
    server = await start(MathEnv)
    await server.open()

    await leave(server, "unheard turn")

    assert turn(await step(server, named("think"))) == "2"


async def test_a_step_that_never_started_is_not_a_turn(start: Start) -> None:
    server = await start(MathEnv)
    await server.open()
    running = asyncio.create_task(step(server, named("wait", gate="before the unbegun")))
    await GATES.until_came("before the unbegun")
    wire = await server.wire()
    body = named("think")
    leaving = asyncio.create_task(wire.ask("POST", "/call", sid="s1", body=body, headers=JSON))
    session = server.server.sessions.get("s1")
    await eventually(lambda: _listeners(session, 2))
    leaving.cancel()
    await wire.close()
    await eventually(lambda: _listeners(session, 1))
    GATES.open("before the unbegun")

    assert [turn(await running), turn(await step(server, named("think")))] == ["1", "2"]


@pytest.mark.parametrize("key", ["", "k"])
async def test_a_step_that_is_repeated_after_a_disconnect_is_one_turn(start: Start, key: str) -> None:
    server = await start(MathEnv)
    await server.open()
    gate = f"left turn {key}"
    await leave(server, gate, key=key)

    before = await step(server, named("think"))
    again = [await step(server, named("wait", gate=gate), key=key)]
    after = await step(server, named("think"))
    if key:
        again.append(await step(server, named("wait", gate=gate), key=key))

    assert ({turn(one) for one in again}, turn(before), turn(after)) == ({"1"}, "2", "3")
    assert GATES.came[gate] == 1


async def test_a_key_has_the_turn_of_its_call_also_if_it_was_repeated_without_the_key(start: Start) -> None:
    server = await start(MathEnv)
    await server.open()
    await leave(server, "keyless turn", key="k")

    keyless = await step(server, named("wait", gate="keyless turn"))
    keyed = await step(server, named("wait", gate="keyless turn"), key="k")

    assert (turn(keyless), turn(keyed)) == ("1", "1")
    assert GATES.came["keyless turn"] == 1


async def test_each_session_counts_its_own_turns_and_a_new_session_with_an_old_id_starts_at_1(start: Start) -> None:
    server = await start(MathEnv)
    for sid in ("s1", "s2"):
        await server.open(sid)
    turns = [turn(await server.call("think", sid=sid, headers=JSON)) for sid in ("s1", "s1", "s2")]
    await server.ask("POST", "/delete", sid="s1")
    await server.open("s1")

    turns.append(turn(await server.call("think", headers=JSON)))

    assert turns == ["1", "2", "1", "1"]


async def test_a_stream_has_its_turn_in_its_last_event(start: Start) -> None:
    server = await start(MathEnv)
    await server.open()

    short = await server.call("think")
    long = await server.call("text", {"text": "x" * 3 * SLICE_CHARS})
    raised = await server.call("fail", {"text": "no"})
    object = await step(server, named("think"))

    assert [_id_of_last_event(answer) for answer in (short, long, raised)] == [b"1", b"2", b"3"]
    assert b"".join((short.body, long.body, raised.body)).count(b"\r\nid: ") == 3
    assert turn(short) is None
    assert turn(object) == "4"


async def test_a_stream_that_began_before_its_result_has_its_turn_too(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "GRACE_S", 0.0)
    server = await start(MathEnv)
    await server.open()
    streaming = asyncio.create_task(server.call("wait", {"gate": "streamed turn"}))
    await GATES.until_came("streamed turn")
    GATES.open("streamed turn")

    assert _id_of_last_event(await streaming) == b"1"


def _id_of_last_event(answer: Answer) -> bytes | None:
    *_, last, _ = answer.body.split(b"\r\n\r\n")
    return next((line.removeprefix(b"id: ") for line in last.split(b"\r\n") if line.startswith(b"id: ")), None)


@pytest.mark.parametrize(
    ("rewards", "told"), [([None, None], "0"), ([None, 0.0], "1"), ([0.0, None], "1"), ([1.0], "1"), ([None], "0")]
)
async def test_the_end_of_an_episode_reports_whether_any_turn_gave_a_reward(
    start: Start, rewards: list[float | None], told: str
) -> None:
    server = await start(Silent)
    await server.open()

    answers = [
        await step(server, named("end", reward=reward, finished=number == len(rewards)))
        for number, reward in enumerate(rewards, 1)
    ]
    summary = (await server.ask("POST", "/delete", sid="s1")).json["summary"]

    assert [answer.headers.get("x-session-rewarded") for answer in answers] == [None] * (len(rewards) - 1) + [told]
    assert summary["rewarded"] is (told == "1")
