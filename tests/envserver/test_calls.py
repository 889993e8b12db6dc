"""Calls: each runs once and in its turn, and its outcome reaches every client that requests it."""

import asyncio
import json
from typing import Any

import pytest
from envserver import Environment, StepResult, Task, tool
from envserver.http import responses
from envserver.sessions.session import Session

from tests.envserver.conftest import Running, Start
from tests.envserver.eventually import eventually
from tests.envserver.raw import Wire, events
from tests.envserver.worlds import GATES, CounterEnv, Guesser, Listener, MathEnv, Sorter, Talker, Thrower

JSON = {"Accept": "application/json"}


def text_of(result: Any) -> str:
    text: str = result["output"]["blocks"][0]["text"]
    return text


def hold(
    wire: Wire, name: str, gate: str, *, headers: dict[str, str] | None = None, **more: Any
) -> "asyncio.Task[Any]":
    body = {"name": name, "input": {"gate": gate, **more}}
    return asyncio.create_task(wire.ask("POST", "/call", sid="s1", body=body, headers=headers))


async def is_waiting(server: Running, count: int) -> bool:
    """Return True if the session has *count* calls, running or waiting."""
    return len(server.server.sessions.get("s1").calls) == count


async def test_a_small_result_is_written_byte_for_byte(start: Start) -> None:
    server = await start(MathEnv)
    await server.open()

    answer = await server.call("think")

    task_id = answer.events[0][1]
    assert len(task_id) == 32
    assert (
        answer.body
        == (
            f"event: task_id\r\ndata: {task_id}\r\n\r\n"
            "event: end\r\nid: 1\r\n"
            'data: {"ok":true,"output":{"blocks":[{"text":"think","detail":{"k":1},"type":"text"}],'
            '"metadata":null,"reward":0.1,"finished":false}}\r\n\r\n'
        ).encode()
    )
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["transfer-encoding"] == "chunked"
    assert answer.headers["connection"] == "keep-alive"


async def test_numbers_and_text_are_written_as_clients_expect(start: Start) -> None:
    server = await start(MathEnv)
    await server.open()

    answer = await server.call("quick", headers=JSON)

    assert answer.headers["content-type"] == "application/json"
    assert (
        answer.body
        == (
            '{"ok":true,"output":{"blocks":[{"text":"x","detail":null,"type":"text"}],'
            '"metadata":{"nan":null,"é":"ü"},"reward":0.0,"finished":false}}'
        ).encode()
    )


async def test_structured_data_is_written_if_there_is_any(start: Start) -> None:
    server = await start(MathEnv)
    await server.open()

    output = (await server.call("picture")).result["output"]

    assert output == {
        "blocks": [{"data": "AAAA", "mimeType": "image/png", "detail": None, "type": "image"}],
        "metadata": {"w": 1},
        "reward": None,
        "finished": False,
        "data": {"pixels": [0, 1]},
    }


@pytest.mark.parametrize(
    ("name", "given", "reason", "error"),
    [
        ("nope", {}, "not_found", "'nope' is not a valid tool"),
        ("reset", {}, "not_found", "'reset' is not a valid tool"),
        ("close", {}, "not_found", "'close' is not a valid tool"),
        ("hint", {}, "not_found", "'hint' is not a valid tool"),
        (
            "submit",
            {"answer": True, "more": 1},
            "input_validation",
            "Tool input validation error: [{'type': 'string_type', 'loc': ('answer',), "
            "'msg': 'Input should be a valid string', 'input': True}]",
        ),
        (
            "submit",
            {},
            "input_validation",
            "Tool input validation error: [{'type': 'missing', 'loc': ('answer',), "
            "'msg': 'Field required', 'input': {}}]",
        ),
    ],
)
async def test_what_cannot_be_run_is_an_outcome(
    start: Start, name: str, given: dict[str, Any], reason: str, error: str
) -> None:
    server = await start(MathEnv)
    await server.open()

    streamed = await server.call(name, given)
    as_json = await server.call(name, given, headers=JSON)

    assert streamed.result == as_json.json == {"ok": False, "error": error, "reason": reason}
    assert (await server.row("s1") or {})["steps"] == 0


@pytest.mark.parametrize(("given", "reward"), [(4, 1.0), (4.0, 0.0), (-4, 0.0), ("4", 1.0), (10**400, 0.0)])
async def test_a_number_for_a_text_argument_is_its_text(start: Start, given: object, reward: float) -> None:
    server = await start(MathEnv)
    await server.open()

    answer = await server.ask(
        "POST", "/call", sid="s1", body={"name": "submit", "input": {"answer": given}}, headers=JSON
    )

    assert answer.json["output"]["reward"] == reward


async def test_a_task_tool_with_the_name_of_an_environment_tool_collides(start: Start) -> None:
    server = await start(MathEnv)
    await server.open("s1", {"tools": ["think"]})

    result = (await server.call("think")).result

    assert result["reason"] == "name_collision"
    assert result["error"].startswith("Tool name collision: 'think' is defined in both the environment and ")


@pytest.mark.parametrize(
    ("name", "given", "data"),
    [
        ("fail", {"text": "one\n  two\r\nthree"}, ["RuntimeError: one", "  two", "three"]),
        ("fail", {"text": ""}, ["RuntimeError"]),
        ("fail", {"text": "\ud800"}, ["RuntimeError: ?"]),
        ("bad", {}, ["TypeError: 'bad' returned str; expected StepResult"]),
        ("leave", {}, ["SystemExit: over"]),
        ("leave_lane", {}, ["RuntimeError: SystemExit: over"]),
    ],
)
async def test_a_tool_that_raises_is_an_error_event(
    start: Start, name: str, given: dict[str, Any], data: list[str]
) -> None:
    server = await start(MathEnv)
    await server.open()

    streamed = await server.call(name, given)
    as_json = await server.call(name, given, headers=JSON)

    lines = "".join(f"data: {line}\r\n" for line in data)
    assert streamed.body.decode().split("\r\n\r\n", 1)[1] == f"event: error\r\nid: 1\r\n{lines}\r\n"
    assert as_json.json["ok"] is False
    assert as_json.json["reason"] == "tool_failed"
    assert as_json.json["error"].splitlines() == data
    assert (await server.call("think")).result["ok"] is True


@pytest.mark.parametrize("size", [1, 4096, 4097, 100_000, 1_000_000])
@pytest.mark.parametrize("character", ["a", " ", "é", "😀", "\x00", "\u2028"])
async def test_outputs_of_all_sizes_arrive_whole(start: Start, character: str, size: int) -> None:
    server = await start(MathEnv)
    await server.open()
    text = (character * size)[: size - 1] + "x"

    answer = await server.call("text", {"text": text})

    assert text_of(answer.result) == text
    lines = answer.body.split(b"\r\n")
    assert max(map(len, lines)) <= 65_536
    for line in lines:
        if line.startswith(b"data: "):
            assert not line[len(b"data: ") :].decode()[:1].isspace()


async def test_a_result_is_repeated_to_its_own_session_only(start: Start) -> None:
    server = await start(MathEnv)
    await server.open("s1", {"id": "replay"})
    await server.open("s2")
    first = await server.call("quick")
    task_id = first.events[0][1]

    again = await server.ask("POST", "/call", sid="s1", body={"name": "x", "input": {"y": 1}, "task_id": task_id})
    foreign = await server.ask("POST", "/call", sid="s2", body={"name": "x", "input": {}, "task_id": task_id})
    unknown = await server.ask("POST", "/call", sid="s1", body={"name": "quick", "input": {}, "task_id": ""})

    assert again.body == first.body
    assert foreign.body == unknown.body == b"event: error\r\ndata: unknown task_id\r\n\r\n"
    assert GATES.came["quick replay"] == 1


async def test_a_new_session_with_an_old_id_does_not_know_the_old_results(start: Start) -> None:
    server = await start(MathEnv)
    await server.open("s1")
    task_id = (await server.call("think")).events[0][1]
    await server.ask("POST", "/delete", sid="s1")
    await server.open("s1")

    again = await server.ask("POST", "/call", sid="s1", body={"name": "x", "input": {}, "task_id": task_id})

    assert again.events == [("error", "unknown task_id")]


async def test_a_long_call_opens_its_stream_and_keeps_it_alive(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    assert responses.PING_S <= 10
    monkeypatch.setattr(responses, "PING_S", 0.01)
    server = await start(MathEnv)
    await server.open()
    wire = await server.wire()

    call = {"name": "wait", "input": {"gate": "kept alive"}}
    wire.send(_call_bytes(call))
    status, _ = await wire.head()
    first = await wire.chunk()
    pings = [await wire.chunk() for _ in range(3)]
    GATES.open("kept alive")
    rest = b""
    while (chunk := await wire.chunk()) is not None:
        rest += chunk

    assert status == 200
    assert events(first or b"")[0][0] == "task_id"
    assert set(pings) == {b": ping\r\n\r\n"}
    assert events(rest)[-1][0] == "end"


def _call_bytes(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = "POST /call HTTP/1.1\r\nHost: x\r\nX-Session-ID: s1\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content


async def test_calls_of_a_session_run_one_at_a_time_in_their_order(start: Start) -> None:
    server = await start(MathEnv)
    await server.open()
    first = hold(await server.wire(), "wait", "order 1")
    await GATES.until_came("order 1")
    others = []
    for i in (2, 3):
        others.append(hold(await server.wire(), "wait_badly", f"order {i}"))
        await eventually(lambda i=i: is_waiting(server, i))  # type: ignore[misc]  # mypy: a default makes it untyped

    GATES.open("order 3")
    assert GATES.came["order 2"] == 0
    GATES.open("order 1")
    await GATES.until_came("order 2")
    assert GATES.came["order 3"] == 0
    GATES.open("order 2")

    for task in (first, *others):
        assert (await task).result["ok"] is True


async def test_concurrent_calls_run_side_by_side_and_exclusive_calls_run_alone(start: Start) -> None:
    server = await start(MathEnv)
    await server.open()
    beside = [hold(await server.wire(), "wait_beside", f"beside {i}") for i in range(2)]
    for i in range(2):
        await GATES.until_came(f"beside {i}")
    alone = hold(await server.wire(), "wait_alone", "alone")
    await eventually(lambda: is_waiting(server, 3))
    late = hold(await server.wire(), "wait_beside", "late")
    await eventually(lambda: is_waiting(server, 4))

    GATES.open("beside 0")
    await beside[0]
    assert GATES.came["alone"] == GATES.came["late"] == 0
    GATES.open("beside 1")
    await GATES.until_came("alone")
    assert GATES.came["late"] == 0
    GATES.open("alone")
    GATES.open("late")

    assert text_of((await alone).result) == "alone"
    assert text_of((await late).result) == "late"


async def test_no_call_runs_after_the_episode_has_finished(start: Start) -> None:
    server = await start(MathEnv)
    await server.open("s1", {"id": "latch"})
    beside = hold(await server.wire(), "wait_beside", "latch")
    await GATES.until_came("latch")

    first = await server.call("submit", {"answer": "4"})
    after = await server.call("quick")
    GATES.open("latch")
    late = await beside
    wrong = await server.call("nope")

    assert first.result["output"]["finished"] is True
    expected = (
        "'quick' was not run: the episode has finished (a tool returned finished=True), "
        "so no further tool calls are accepted."
    )
    assert after.result == {"ok": False, "error": expected, "reason": "episode_finished"}
    assert late.result["reason"] == "episode_finished"
    assert wrong.result["reason"] == "not_found"
    assert GATES.came["quick latch"] == 0
    assert (await server.ask("GET", "/prompt", sid="s1")).status == 200
    summary = (await server.ask("POST", "/delete", sid="s1")).json["summary"]
    assert (summary["reward"], summary["finished"]) == (1.0, True)


async def test_a_call_abandoned_before_its_tool_began_never_runs(start: Start) -> None:
    server = await start(MathEnv)
    await server.open("s1", {"id": "abandoned"})
    first = hold(await server.wire(), "wait", "before the abandoned")
    await GATES.until_came("before the abandoned")
    leaver = await server.wire()
    leaver.send(_call_bytes({"name": "quick", "input": {}}))
    await eventually(lambda: is_waiting(server, 2))

    await leaver.close()
    await eventually(lambda: is_waiting(server, 1))
    GATES.open("before the abandoned")
    await first
    await server.call("think")

    assert GATES.came["quick abandoned"] == 0


async def test_a_call_abandoned_during_the_setup_never_runs(start: Start) -> None:
    server = await start(MathEnv)
    task = {"id": "early leaver", "gate": "setup of the early leaver"}
    await server.ask("POST", "/create", sid="s1", body={"task_spec": task})
    leaver = await server.wire()
    leaver.send(_call_bytes({"name": "quick", "input": {}}))
    await eventually(lambda: is_waiting(server, 1))

    await leaver.close()
    await eventually(lambda: is_waiting(server, 0))
    GATES.open("setup of the early leaver")
    await server.call("think")

    assert GATES.came["quick early leaver"] == 0


async def test_a_repeated_call_whose_stream_was_cut_runs_once(start: Start) -> None:
    server = await start(MathEnv)
    await server.open()
    leaver = await server.wire()
    leaver.send(_call_bytes({"name": "wait", "input": {"gate": "cut"}}))
    await GATES.until_came("cut")
    session = server.server.sessions.get("s1")

    await leaver.close()
    await eventually(lambda: _has_cut(session, 1))
    again = hold(await server.wire(), "wait", "cut")
    await eventually(lambda: _listens(session, "cut"))
    GATES.open("cut")
    answer = await again
    fresh = await server.call("wait", {"gate": "cut"})

    assert text_of(answer.result) == text_of(fresh.result) == "cut"
    assert answer.events[0] != fresh.events[0]
    assert GATES.came["cut"] == 2


async def _has_cut(session: Session, count: int) -> bool:
    return len(session.cut) == count


async def _listens(session: Session, gate: str) -> bool:
    return any(call.action.given["gate"] == gate and call.listeners for call in session.calls.values())


async def test_a_cut_call_that_ended_meanwhile_is_delivered_once_more(start: Start) -> None:
    server = await start(MathEnv)
    await server.open()
    leaver = await server.wire()
    leaver.send(_call_bytes({"name": "wait", "input": {"gate": "cut and ended"}}))
    await GATES.until_came("cut and ended")
    session = server.server.sessions.get("s1")
    await leaver.close()
    await eventually(lambda: _has_cut(session, 1))
    GATES.open("cut and ended")
    await eventually(lambda: is_waiting(server, 0))

    other = await server.call("wait", {"gate": "cut and ended", "ignored": 1})
    same = await server.call("wait", {"gate": "cut and ended"})

    assert other.events[0] != same.events[0]
    assert same.result["ok"] is True
    assert GATES.came["cut and ended"] == 2
    assert not session.cut


async def test_a_call_delivered_to_one_client_is_not_cut_when_another_client_hangs_up(start: Start) -> None:
    server = await start(MathEnv)
    await server.open("s1", {"id": "two readers"})
    session = server.server.sessions.get("s1")
    given = {"n": 20_000_000}
    first = await server.call("quick", given)
    again = {"name": "quick", "input": given, "task_id": first.events[0][1]}

    leaver = await server.wire()
    leaver.send(_call_bytes(again))
    await leaver.head()
    await leaver.close()
    await eventually(lambda: _is_quiet(session))

    assert not session.cut
    assert (await server.call("quick", given)).events[0] != first.events[0]


async def _is_quiet(session: Session) -> bool:
    return not session.is_busy


async def test_a_new_call_is_never_attached_to_a_delivered_call(start: Start) -> None:
    server = await start(MathEnv)
    await server.open("s1", {"id": "twice"})
    wire = await server.wire()

    first = await wire.ask("POST", "/call", sid="s1", body={"name": "quick", "input": {}})
    await wire.close()
    second = await server.call("quick")

    assert first.events[0] != second.events[0]
    assert GATES.came["quick twice"] == 2


async def test_a_call_during_the_setup_opens_its_stream_and_waits_inside(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envserver.http.responses.HOLD_S", 0.01)
    server = await start(MathEnv)
    await server.ask("POST", "/create", sid="s1", body={"task_spec": {"gate": "setup 1"}})
    wire = await server.wire()

    wire.send(_call_bytes({"name": "think", "input": {}}))
    status, _ = await wire.head()
    first = await wire.chunk()
    GATES.open("setup 1")
    second = await wire.chunk()

    assert status == 200
    assert events(first or b"")[0][0] == "task_id"
    assert events(second or b"")[0][0] == "end"


@pytest.mark.parametrize("ending", ["failed", "deleted"])
async def test_a_setup_that_ends_badly_keeps_its_status_for_calls_that_wait(start: Start, ending: str) -> None:
    server = await start(MathEnv)
    gate = f"setup that is {ending}"
    await server.ask("POST", "/create", sid="s1", body={"task_spec": {"gate": gate, "error": "broken"}})
    wires = [await server.wire() for _ in range(2)]
    asking = [
        asyncio.create_task(wire.ask("POST", "/call", sid="s1", body={"name": "think", "input": {}}, headers=headers))
        for wire, headers in zip(wires, ({}, JSON), strict=True)
    ]
    await eventually(lambda: is_waiting(server, 2))

    if ending == "deleted":
        await server.ask("POST", "/delete", sid="s1")
    GATES.open(gate)

    for answer in await asyncio.gather(*asking):
        expected = (410, "Session deleted") if ending == "deleted" else (500, "RuntimeError: broken")
        assert (answer.status, answer.json["detail"]) == expected


async def test_a_setup_that_fails_under_an_open_stream_is_an_error_event(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envserver.http.responses.HOLD_S", 0.01)
    server = await start(MathEnv)
    await server.ask("POST", "/create", sid="s1", body={"task_spec": {"gate": "setup 2", "error": "broken"}})
    wire = await server.wire()
    wire.send(_call_bytes({"name": "think", "input": {}}))
    await wire.head()
    await wire.chunk()

    GATES.open("setup 2")

    assert events(await wire.chunk() or b"") == [("error", "RuntimeError: broken")]


async def test_a_json_call_during_a_long_setup_is_refused_as_starting_and_does_not_run(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envserver.http.responses.SETUP_WAIT_S", 0.01)
    server = await start(MathEnv)
    task = {"id": "patient", "gate": "setup 3"}
    await server.ask("POST", "/create", sid="s1", body={"task_spec": task})

    answer = await server.call("quick", headers=JSON)
    GATES.open("setup 3")
    await server.call("think")

    assert (answer.status, answer.headers["x-backend-state"]) == (503, "starting")
    assert GATES.came["quick patient"] == 0


async def test_a_running_call_outlives_its_sessions_delete(start: Start) -> None:
    server = await start(MathEnv)
    await server.open()
    running = hold(await server.wire(), "wait_beside", "outliving")
    await GATES.until_came("outliving")
    queued = hold(await server.wire(), "wait_alone", "queued behind")
    await eventually(lambda: is_waiting(server, 2))

    deleted = await server.ask("POST", "/delete", sid="s1")
    GATES.open("outliving")

    assert deleted.json["summary"]["steps"] == 0
    assert text_of((await running).result) == "outliving"
    ended = await queued
    if ended.status == 200:
        assert ended.events[-1] == ("error", "Session deleted")
    else:
        assert (ended.status, ended.json) == (410, {"detail": "Session deleted"})
    assert GATES.came["queued behind"] == 0
    assert (await server.call("think")).status == 404


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"text": "left"}, "left"),
        ({"action": {"move": "up", "times": 2}}, "upup"),
        ({"name": "act", "input": {"move": "down"}, "text": None}, "down"),
    ],
)
async def test_an_action_has_three_spellings(start: Start, body: dict[str, Any], expected: str) -> None:
    server = await start(Listener)
    await server.open()

    answer = await server.ask("POST", "/call", sid="s1", body=body)

    assert text_of(answer.result) == expected


@pytest.mark.parametrize(
    ("world", "text", "expected"),
    [
        pytest.param(Guesser, " 7 ", "guessed 7", id="a number"),
        pytest.param(Guesser, "-12\n", "guessed -12", id="a number below 0"),
        pytest.param(Thrower, "\tpaper\n", "threw 'paper'", id="a word of a list"),
        pytest.param(Listener, " left ", " left ", id="a text, unchanged"),
    ],
)
async def test_a_text_is_the_only_argument_of_the_only_tool(
    start: Start, world: type[Environment], text: str, expected: str
) -> None:
    server = await start(world)
    await server.open()

    answer = await server.ask("POST", "/call", sid="s1", body={"text": text})

    assert text_of(answer.result) == expected


@pytest.mark.parametrize(
    ("world", "text", "error"),
    [
        pytest.param(Guesser, "x", "Tool input validation error: [{'type': 'int_parsing'", id="not a number"),
        pytest.param(
            Thrower, "well", "Tool input validation error: [{'type': 'literal_error'", id="not a word of the list"
        ),
        pytest.param(Sorter, '["a"]', "free text is not understood here", id="where a list is expected"),
    ],
)
async def test_a_text_that_does_not_fit_the_argument_is_refused(
    start: Start, world: type[Environment], text: str, error: str
) -> None:
    server = await start(world)
    await server.open()

    result = (await server.ask("POST", "/call", sid="s1", body={"text": text})).result

    assert (result["ok"], result["reason"]) == (False, "input_validation")
    assert result["error"].startswith(error)


@pytest.mark.parametrize(
    "body",
    [
        {"text": "left", "action": {"move": "up"}},
        {"text": "left", "name": "act", "input": {}},
        {"action": {}, "name": "act"},
        {},
        {"name": "act"},
        {"input": {}},
        {"name": "act", "input": None},
        {"name": "act", "input": []},
        {"text": 1},
        {"action": []},
        {"name": "act", "input": {}, "more": 1},
    ],
)
async def test_a_body_without_exactly_one_spelling_is_422(start: Start, body: dict[str, Any]) -> None:
    server = await start(Listener)
    await server.open()

    assert (await server.ask("POST", "/call", sid="s1", body=body)).status == 422


async def test_an_action_object_must_have_no_unknown_keys_but_a_named_tools_input_may(start: Start) -> None:
    server = await start(Listener)
    await server.open()

    refused = await server.ask("POST", "/call", sid="s1", body={"action": {"move": "up", "speed": 9}})
    ran = await server.ask("POST", "/call", sid="s1", body={"name": "act", "input": {"move": "up", "speed": 9}})

    assert (refused.result["ok"], refused.result["reason"]) == (False, "input_validation")
    assert "'extra_forbidden'" in refused.result["error"]
    assert "('speed',)" in refused.result["error"]
    assert text_of(ran.result) == "up"


async def test_without_a_default_tool_only_names_are_understood(start: Start) -> None:
    server = await start(MathEnv)
    await server.open()

    for body in ({"text": "hello"}, {"action": {"x": 1}}):
        result = (await server.ask("POST", "/call", sid="s1", body=body)).result
        assert (result["ok"], result["reason"]) == (False, "not_found")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("!hello", {"ok": True, "text": "hello!"}),
        ("hello", {"ok": False, "error": "start with an exclamation mark", "reason": "input_validation"}),
    ],
)
async def test_an_environment_can_parse_text_itself(start: Start, text: str, expected: dict[str, Any]) -> None:
    server = await start(Talker)
    await server.open()

    result = (await server.ask("POST", "/call", sid="s1", body={"text": text})).result

    assert (result if "error" in expected else {"ok": True, "text": text_of(result)}) == expected


async def test_an_exception_while_parsing_text_is_reported_as_the_tools_failure(start: Start) -> None:
    server = await start(Talker)
    await server.open()

    answer = await server.ask("POST", "/call", sid="s1", body={"text": "crash"})

    assert answer.events[-1] == ("error", "ValueError: cannot parse")


async def test_calls_with_the_same_key_run_once(start: Start) -> None:
    server = await start(MathEnv)
    await server.open("s1", {"id": "keyed"})
    key = {"Idempotency-Key": "k1"}

    first = await server.call("quick", {"n": 3}, headers=key)
    again = await server.call("quick", {"n": 3}, headers=key | JSON)
    other_body = await server.call("quick", {"n": 4}, headers=key)
    other_key = await server.call("quick", {"n": 3}, headers={"Idempotency-Key": "k2"})

    assert again.json == first.result
    assert other_body.status == 409
    assert other_body.json == {"detail": "Idempotency-Key was used with another body"}
    assert other_key.events[0] != first.events[0]
    assert GATES.came["quick keyed"] == 2


async def test_a_call_with_a_key_in_flight_is_attached_to_the_running_call(start: Start) -> None:
    server = await start(MathEnv)
    await server.open()
    key = {"Idempotency-Key": "k1"}
    tasks = [hold(await server.wire(), "wait", "in flight", headers=key | accept) for accept in ({}, JSON)]
    await GATES.until_came("in flight")
    session = server.server.sessions.get("s1")
    await eventually(lambda: _listeners(session, 2))

    GATES.open("in flight")
    streamed, as_json = await asyncio.gather(*tasks)

    assert streamed.result == as_json.json
    assert GATES.came["in flight"] == 1


async def _listeners(session: Session, count: int) -> bool:
    return sum(call.listeners for call in session.calls.values()) == count


async def test_a_key_whose_call_never_ran_can_be_used_again(start: Start) -> None:
    server = await start(MathEnv)
    await server.open("s1", {"id": "free key"})
    first = hold(await server.wire(), "wait", "before the keyed")
    await GATES.until_came("before the keyed")
    leaver = await server.wire()
    call = _call_bytes({"name": "quick", "input": {}}).replace(b"Host", b"Idempotency-Key: k1\r\nHost")
    leaver.send(call)
    await eventually(lambda: is_waiting(server, 2))
    await leaver.close()
    await eventually(lambda: is_waiting(server, 1))
    GATES.open("before the keyed")
    await first

    other_body = await server.call("quick", {"n": 2}, headers={"Idempotency-Key": "k1"})

    assert other_body.status == 200
    assert GATES.came["quick free key"] == 1


async def test_sessions_do_not_share_keys(start: Start) -> None:
    server = await start(MathEnv)
    await server.open("s1")
    await server.open("s2")
    key = {"Idempotency-Key": "k1"}

    first = await server.call("text", {"text": "mine"}, headers=key)
    second = await server.call("text", {"text": "yours"}, sid="s2", headers=key)

    assert (text_of(first.result), text_of(second.result)) == ("mine", "yours")


async def test_too_many_waiting_calls_are_refused_and_can_be_repeated(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envserver.sessions.calls.WAITING_MAX", 1)
    server = await start(MathEnv)
    await server.open("s1", {"id": "crowd"})
    first = hold(await server.wire(), "wait", "crowd")
    await GATES.until_came("crowd")
    second = hold(await server.wire(), "wait", "crowd 2")
    await eventually(lambda: is_waiting(server, 2))
    key = {"Idempotency-Key": "k1"}

    refused = await server.call("quick", headers=key)
    GATES.open("crowd")
    GATES.open("crowd 2")
    await asyncio.gather(first, second)

    assert refused.status == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert (await server.call("quick", headers=key)).result["ok"] is True
    assert GATES.came["quick crowd"] == 1


def candidates(*lengths: int, metadata: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    block = {"text": "hi", "detail": None, "type": "text"}
    message = {"role": "assistant", "blocks": [block], "detail": None}
    return [{"messages": [message] * length, "metadata": metadata} for length in lengths]


async def test_candidates_of_a_group_are_scored_in_their_order(start: Start) -> None:
    server = await start(CounterEnv)
    await server.open("s1", {"start": 0})

    answer = await server.ask("POST", "/score_group", sid="s1", body={"candidates": candidates(2, 1)})
    broken = await server.ask(
        "POST", "/score_group", sid="s1", body={"candidates": candidates(1, metadata={"broken": True})}
    )

    assert answer.result == {"scores": [{"reward": 2.0, "metadata": None}, {"reward": 1.0, "metadata": None}]}
    assert broken.events[-1] == ("error", "author_fault: ValueError: score_group returned 0 scores for 1 candidates")


async def test_score_group_of_an_environment_without_a_judge_is_404(start: Start) -> None:
    server = await start(MathEnv)
    await server.open()

    answer = await server.ask("POST", "/mathenv/score_group", sid="s1", body={"candidates": candidates(1)})

    assert answer.status == 404
    assert answer.json == {"detail": "Environment 'mathenv' does not implement score_group"}


@pytest.mark.parametrize(
    "block",
    [
        {"text": "hm", "type": "reasoning"},
        {"id": "1", "name": "x", "input": {}, "type": "tool_call"},
        {"text": 1, "type": "text"},
        {"text": "x", "type": "sound"},
        {"text": "x", "type": "text", "more": 1},
    ],
)
async def test_blocks_in_the_wrong_place_are_422(start: Start, block: dict[str, Any]) -> None:
    server = await start(CounterEnv)
    await server.open("s1", {"start": 0})
    body = {"candidates": [{"messages": [{"role": "user", "blocks": [block]}]}]}

    assert (await server.ask("POST", "/score_group", sid="s1", body=body)).status == 422


async def test_every_kind_of_block_is_accepted_in_its_place(start: Start) -> None:
    server = await start(CounterEnv)
    await server.open("s1", {"start": 0})
    image = {"data": "AAAA", "mimeType": "image/png", "type": "image"}
    result = {"tool_call_id": "1", "blocks": [image], "is_error": True, "type": "tool_result"}
    call = {"id": "1", "name": "x", "input": {}, "type": "tool_call"}
    messages = [
        {"role": "assistant", "blocks": [{"text": "hm", "signature": None, "type": "reasoning"}, call]},
        {"role": "user", "blocks": [result, {"text": "x", "type": "text"}]},
    ]

    answer = await server.ask("POST", "/score_group", sid="s1", body={"candidates": [{"messages": messages}]})

    assert answer.result["scores"][0]["reward"] == 2.0


async def test_blocking_code_of_one_session_does_not_block_other_sessions(start: Start) -> None:
    server = await start(MathEnv)
    held = []
    for i in range(8):
        await server.open(f"b{i}")
        wire = await server.wire()
        body = {"name": "wait_badly" if i % 2 else "wait", "input": {"gate": f"blocked {i}"}}
        held.append(asyncio.create_task(wire.ask("POST", "/call", sid=f"b{i}", body=body)))
    for i in range(8):
        await GATES.until_came(f"blocked {i}")
    await server.open("free")

    assert (await server.ask("GET", "/health")).status == 200
    assert (await server.call("think", sid="free")).result["ok"] is True
    assert (await server.call("quick_async", sid="free")).result["ok"] is True

    for i in range(8):
        GATES.open(f"blocked {i}")
    for answer in await asyncio.gather(*held):
        assert answer.result["ok"] is True


async def test_the_terminal_tool_is_callable_by_name(start: Start) -> None:
    server = await start(MathEnv)
    await server.open()

    answer = await server.call("done", {"message": "bye"})

    assert answer.result["output"]["finished"] is True


class Hurried(Environment):
    """Tools of each kind, which return how long they may still take."""

    resolves_ids = False

    async def reset(self, task: Task, *, seed: int) -> str:
        return "Hurry."

    @tool
    def threaded(self) -> StepResult:
        return StepResult("", data=self.step_left_s)

    @tool
    async def on_lane(self) -> StepResult:
        await asyncio.sleep(0)
        return StepResult("", data=self.step_left_s)

    @tool(inline=True)
    def inline(self) -> StepResult:
        return StepResult("", data=self.step_left_s)


@pytest.mark.parametrize("name", ["threaded", "on_lane", "inline"])
async def test_a_tool_knows_how_much_of_its_step_is_left(start: Start, name: str) -> None:
    server = await start(Hurried)
    await server.open(task={"id": "t"})

    async def left_s(seconds: str | None) -> float:
        told = {} if seconds is None else {"X-Step-Seconds": seconds}
        answer = await server.call(name, headers={**JSON, **told})
        left: float | None = answer.json["output"]["data"]
        return float("inf") if left is None else left  # JSON has no infinity

    assert [await left_s(seconds) for seconds in (None, "soon", "nan", "-1")] == [float("inf")] * 4
    assert 999_000 < await left_s("1000000") <= 999_995
    assert 0.1 <= await left_s("10") <= 9
    assert await left_s("0") == 0.1
    assert await left_s(None) == float("inf"), "of this step only"
