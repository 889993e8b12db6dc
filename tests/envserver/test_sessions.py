"""A session's life: created once, set up in the background, deleted by any client, never left behind."""

import asyncio
import base64
import json
from typing import Any

import pytest
from envserver import Task
from envserver.sessions import session as waits

from tests.envserver.conftest import Running, Start
from tests.envserver.eventually import eventually
from tests.envserver.worlds import GATES, Builder, CounterEnv, Endless, Loner, MathEnv, Sharer

NOT_FOUND = {"detail": "Active environment not found"}


def header(entries: object) -> dict[str, str]:
    return {"X-Secrets": base64.b64encode(json.dumps(entries).encode()).decode()}


async def test_a_session_id_is_offered_as_a_stream(start: Start) -> None:
    server = await start(MathEnv)

    answer = await server.ask("POST", "/create_session", raw=b"{}", headers={"Accept": "text/event-stream"})

    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    sid = answer.events[0][1]
    assert answer.body == f"event: task_id\r\ndata: {sid}\r\n\r\nevent: end\r\ndata: \r\n\r\n".encode()
    assert [len(part) for part in sid.split("-")] == [8, 4, 4, 4, 12]


async def test_an_environment_shows_its_clients_a_state(start: Start) -> None:
    server = await start(MathEnv)
    await server.ask("POST", "/create", sid="s1", body={"task_spec": {"state": {"url": "a"}}})
    await server.ask("POST", "/create", sid="s2", body={"task_spec": {}})

    states = [(await server.ask("GET", "/mathenv/state", sid=sid)).json for sid in ("s1", "s2")]

    assert states == [{"url": "a"}, {}]
    assert (await server.ask("GET", "/state", sid="s3")).json == NOT_FOUND


async def test_a_session_id_is_offered_as_json_to_clients_that_accept_only_json(start: Start) -> None:
    server = await start(MathEnv)

    answer = await server.ask("POST", "/create_session", headers={"Accept": "application/json"})

    assert len(answer.json["sid"]) == 36


async def test_an_episode_from_create_to_delete(start: Start) -> None:
    server = await start(MathEnv)

    created = await server.ask("POST", "/create", sid=" s1 ", body={"task_spec": {"question": "2+2?"}, "seed": 7})
    prompt = await server.ask("GET", "/mathenv/prompt", sid="s1")
    await server.call("think")
    submitted = await server.call("submit", {"answer": "4"})
    deleted = await server.ask("POST", "/delete", sid="s1")

    assert created.body == b'{"sid":"s1"}'
    assert prompt.body == b'[{"text":"2+2?","detail":{"seed":7},"type":"text"}]'
    assert submitted.result["output"]["reward"] == 1.0
    summary = deleted.json["summary"]
    assert summary.pop("seconds") >= 0
    assert deleted.json["sid"] == "s1"
    assert summary == {"reward": 1.1, "rewarded": True, "judged": False, "finished": True, "steps": 2}
    assert (await server.ask("GET", "/prompt", sid="s1")).json == NOT_FOUND


class Picky(MathEnv):
    @classmethod
    def check_task(cls, task: Task) -> None:
        if "question" not in task:
            raise ValueError(f"no question in {task.get('kind')!r}")


async def test_a_task_of_the_request_that_the_class_refuses_is_a_400_and_opens_nothing(start: Start) -> None:
    server = await start(Picky)
    whole = {"X-Task-Is-Whole": "1"}

    refused = await server.ask("POST", "/create", sid="s1", body={"task_spec": {"kind": "odd"}})
    again = await server.ask("POST", "/create", sid="s1", body={"task_spec": {"question": "2+2?"}})
    listed = await server.ask("POST", "/create", sid="s2", body={"task_spec": {"kind": "odd"}}, headers=whole)
    by_place = await server.ask("POST", "/create", sid="s3", body={"split": "train", "index": 0})

    assert (refused.status, refused.json["detail"]) == (400, "no question in 'odd'")
    assert [again.status, listed.status, by_place.status] == [200, 200, 200]
    assert len((await server.ask("GET", "/sessions")).json["sessions"]) == 3


async def test_a_task_by_reference_is_the_same_task(start: Start) -> None:
    server = await start(MathEnv)
    await server.open("by index", split="train", index=-1, task_spec=None)
    await server.open("by task", {"question": "q4"}, seed=1)

    by_index = await server.ask("GET", "/prompt", sid="by index")
    by_task = await server.ask("GET", "/prompt", sid="by task")

    assert by_index.json[0]["text"] == by_task.json[0]["text"] == "q4"
    assert (await server.row("by index") or {})["task_id"] == "t4"


@pytest.mark.parametrize(
    ("body", "status", "detail"),
    [
        ({"task_spec": {}, "split": "train", "index": 0}, 422, "Provide either"),
        ({}, 422, "Provide either"),
        ({"split": "train"}, 422, "Provide either"),
        ({"task_spec": {}, "index": 0}, 422, "split and index must both be provided together"),
        ({"task_spec": {}, "env_name": "x"}, 404, "unknown environment 'x'"),
        ({"task_spec": {}, "env_name": ""}, 404, "unknown environment ''"),
        ({"split": "none", "index": 0}, 400, "Invalid split"),
        ({"split": "train", "index": 5}, 400, "Invalid index"),
        ({"task_spec": {}, "toolset_name": "x"}, 400, "unknown toolset 'x'; valid options are []"),
    ],
)
async def test_refusals_of_create(start: Start, body: dict[str, Any], status: int, detail: str) -> None:
    server = await start(MathEnv)

    answer = await server.ask("POST", "/create", sid="s1", body=body)

    assert answer.status == status
    if status == 422:
        (entry,) = answer.json["detail"]
        assert entry["type"] == "value_error"
        assert entry["msg"].startswith(f"Value error, {detail}")
        assert entry["input"] == body
        assert entry["ctx"] == {"error": {}}
    else:
        assert answer.json == {"detail": detail}
    assert (await server.ask("POST", "/ping", sid="s1")).json == NOT_FOUND


async def test_an_empty_task_is_accepted_and_environment_names_ignore_case(start: Start) -> None:
    server = await start(MathEnv, CounterEnv)

    created = await server.ask(
        "POST", "/create", sid="s1", body={"env_name": "COUNTERenv", "task_spec": {"start": 1}, "secrets": {}}
    )

    assert created.status == 200
    assert (await server.call("add", {"amount": "2"})).result["output"]["blocks"][0]["text"] == "3"


@pytest.mark.parametrize("path", ["/create", "/ping", "/delete", "/delete_session", "/call"])
async def test_a_session_needs_an_id(start: Start, path: str) -> None:
    server = await start(MathEnv)

    answer = await server.ask("POST", path, sid="  ", body={})

    assert (answer.status, answer.json) == (400, {"detail": "X-Session-ID header is required"})


async def test_two_different_session_ids_in_a_request_are_refused(start: Start) -> None:
    server = await start(MathEnv)
    await server.open("s1")
    await server.open("s2")

    both = await server.ask("POST", "/ping", sid="s1", headers={"x-session-id": "s2"})
    same = await server.ask("POST", "/ping", sid="s1", headers={"x-session-id": "s1"})

    assert (both.status, both.json) == (400, {"detail": "x-session-id was sent with different values"})
    assert same.status == 200


@pytest.mark.parametrize("sid", [None, "nobody"])
async def test_a_malformed_body_is_refused_before_an_unknown_session_and_an_invalid_body_after_it(
    start: Start, sid: str | None
) -> None:
    server = await start(MathEnv)

    malformed = await server.ask("POST", "/call", sid=sid, raw=b"{bad")
    invalid = await server.ask("POST", "/call", sid=sid, body={"x": 1})

    assert malformed.status == 422
    assert invalid.status == (400 if sid is None else 404)


async def test_deleting_is_idempotent_and_a_session_can_be_created_again(start: Start) -> None:
    server = await start(MathEnv)
    await server.open("s1", {"id": "once"})

    first = await server.ask("POST", "/delete", sid="s1")
    second = await server.ask("POST", "/delete", sid="s1")
    unknown = await server.ask("POST", "/delete_session", sid="s1")

    assert first.json["summary"]["steps"] == 0
    assert second.json == {"sid": "s1", "summary": None}
    assert unknown.json == {"sid": "s1"}
    assert GATES.came["closed once"] == 1
    await server.open("s1", {"id": "another"})


async def test_delete_session_tears_nothing_down(start: Start) -> None:
    server = await start(MathEnv)
    await server.open()

    await server.ask("POST", "/delete_session", sid="s1")

    assert (await server.ask("POST", "/ping", sid="s1")).json == {"status": "ok"}


async def test_identical_concurrent_creates_make_one_environment(start: Start) -> None:
    server = await start(Builder)
    body = {"task_spec": {"plan": "a tower", "build gate": "one build"}}
    wires = [await server.wire() for _ in range(50)]

    asking = [asyncio.create_task(wire.ask("POST", "/create", sid="s1", body=body)) for wire in wires]
    await GATES.until_came("one build")
    different = await server.ask("POST", "/create", sid="s1", body={"task_spec": {"plan": "a hut"}})
    GATES.open("one build")
    answers = await asyncio.gather(*asking)
    retry = await server.ask("POST", "/create", sid="s1", body=body)

    assert {answer.status for answer in answers} == {200}
    assert GATES.came["one build"] == 1
    assert (different.status, different.json) == (400, {"detail": "Session already exists"})
    assert retry.json == {"sid": "s1"}


async def test_the_same_body_with_other_secrets_is_another_session(start: Start) -> None:
    server = await start(MathEnv)
    body: dict[str, Any] = {"task_spec": {}}
    await server.ask("POST", "/create", sid="s1", body=body, headers=header({"K": {"value": "1"}}))

    other = await server.ask("POST", "/create", sid="s1", body=body, headers=header({"K": {"value": "2"}}))

    assert other.status == 400


async def test_a_failing_constructor_fails_the_create(start: Start) -> None:
    server = await start(Builder)

    answer = await server.ask("POST", "/create", sid="s1", body={"task_spec": {"broken": True}})

    assert (answer.status, answer.json) == (500, {"detail": "RuntimeError: no bricks"})
    assert (await server.ask("POST", "/ping", sid="s1")).status == 404
    await server.open("s1", {"plan": "a shed"})


async def test_a_failed_setup_is_reported_until_the_session_is_deleted(start: Start) -> None:
    server = await start(MathEnv)
    await server.ask("POST", "/create", sid="s1", body={"task_spec": {"error": "no ladder"}})

    prompts = [await server.ask("GET", "/prompt", sid="s1") for _ in range(2)]
    call = await server.call("think")

    for answer in (*prompts, call):
        assert (answer.status, answer.json) == (500, {"detail": "RuntimeError: no ladder"})
    assert (await server.ask("POST", "/ping", sid="s1")).status == 200
    assert (await server.ask("POST", "/delete", sid="s1")).status == 200


async def test_a_long_setup_is_answered_with_503_and_a_retry_time(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envserver.http.routes.SETUP_WAIT_S", 0.01)
    server = await start(MathEnv)
    await server.ask("POST", "/create", sid="s1", body={"task_spec": {"gate": "long setup"}})

    early = await server.ask("GET", "/prompt", sid="s1")
    ping = await server.ask("POST", "/ping", sid="s1")
    GATES.open("long setup")

    assert waits.SETUP_WAIT_S == 25
    assert (early.status, early.json) == (503, {"detail": "Environment still starting."})
    assert early.headers["x-backend-state"] == "starting"
    assert early.headers["retry-after"] == "2"
    assert ping.status == 200
    await eventually(lambda: _is_ready(server))


async def _is_ready(server: Running) -> bool:
    return (await server.ask("GET", "/prompt", sid="s1")).status == 200


async def test_a_delete_during_the_setup_ends_waiting_requests(start: Start) -> None:
    server = await start(MathEnv)
    await server.ask("POST", "/create", sid="s1", body={"task_spec": {"gate": "never opened setup", "id": "halfway"}})
    await GATES.until_came("never opened setup")
    wire = await server.wire()
    waiting = asyncio.create_task(wire.ask("GET", "/prompt", sid="s1"))
    await eventually(lambda: _is_busy(server, "s1"))

    deleted = await server.ask("POST", "/delete", sid="s1")
    answer = await waiting
    GATES.open("never opened setup")

    assert deleted.status == 200
    assert (answer.status, answer.json) == (410, {"detail": "Session deleted"})
    assert GATES.came["closed halfway"] == 1


async def test_a_delete_cancels_a_setup_that_awaits_and_then_closes(start: Start) -> None:
    server = await start(Endless)
    await server.ask("POST", "/create", sid="s1", body={"task_spec": {}})
    await GATES.until_came("endless began")

    await server.ask("POST", "/delete", sid="s1")

    assert GATES.came["endless cancelled"] == GATES.came["endless closed"] == 1


async def _is_busy(server: Running, sid: str) -> bool:
    return bool((await server.row(sid) or {"busy": False})["busy"])


async def test_secrets_come_by_header_and_body_and_the_header_wins(start: Start) -> None:
    server = await start(MathEnv)
    entries = {"A": {"value": "header", "allowed_domains": ["x"]}, "B": {"value": "ü"}}
    body = {"task_spec": {}, "secrets": {"A": "body", "C": "body"}, "seed": 3, "config": {"hard": True}}
    await server.ask("POST", "/create", sid="s1", body=body, headers=header(entries))

    told = (await server.call("whoami")).result["output"]["data"]

    assert told["secrets"] == {"A": "header", "B": "ü", "C": "body"}
    assert (told["seed"], told["config"]) == (3, {"hard": True})


@pytest.mark.parametrize("value", ["!", "e30", "W10=", "eyJBIjoxfQ==", "eyJBIjp7InZhbHVlIjoxfX0="])
async def test_malformed_secrets_are_400_and_not_repeated_in_the_answer(start: Start, value: str) -> None:
    server = await start(MathEnv)

    answer = await server.ask("POST", "/create", sid="s1", body={"task_spec": {}}, headers={"X-Secrets": value})

    assert (answer.status, answer.json) == (400, {"detail": "malformed X-Secrets header"})
    assert (await server.ask("POST", "/ping", sid="s1")).status == 404


async def test_there_are_at_most_as_many_sessions_as_slots(start: Start) -> None:
    server = await start(MathEnv, slots=2)
    await server.open("s1")
    await server.open("s2")

    refused = await server.ask("POST", "/create", sid="s3", body={"task_spec": {}})
    await server.ask("POST", "/delete", sid="s1")

    assert (refused.status, refused.json) == (429, {"detail": "no free slot"})
    assert int(refused.headers["retry-after"]) >= 1
    await server.open("s3")


async def test_an_idle_session_is_reaped_and_a_busy_session_is_not(start: Start) -> None:
    server = await start(MathEnv, idle_s=0.2)
    await server.open("idle", {"id": "the idle one"})
    await server.open("busy", {"id": "the busy one"})
    wire = await server.wire()
    call = {"name": "wait", "input": {"gate": "reaper"}}
    waiting = asyncio.create_task(wire.ask("POST", "/call", sid="busy", body=call))
    await GATES.until_came("reaper")

    await GATES.until_came("closed the idle one")
    await server.open("idle", {"id": "idle for longer"})
    await GATES.until_came("closed idle for longer")  # the busy session was silent for even longer
    still_there = await server.row("busy")
    GATES.open("reaper")

    assert await server.row("idle") is None
    assert still_there is not None
    assert still_there["busy"] is True
    assert (await waiting).result["ok"] is True
    await GATES.until_came("closed the busy one")


async def test_the_list_of_sessions_has_a_row_for_each(start: Start) -> None:
    server = await start(MathEnv)
    await server.open("s1", {"id": "t9"})
    await server.call("think")

    (row,) = (await server.ask("GET", "/sessions")).json["sessions"]

    assert row.pop("idle_s") >= 0
    assert row == {
        "sid": "s1",
        "env_name": "mathenv",
        "task_id": "t9",
        "state": "ready",
        "busy": False,
        "steps": 1,
        "note": "",
    }


async def test_a_client_can_request_some_of_the_sessions(start: Start) -> None:
    server = await start(MathEnv)
    for sid in ("s1", "s2", "s3"):
        await server.open(sid, {"id": "t9"})

    some = await server.ask("POST", "/sessions", body={"ids": ["s3", "nobody's", "s1"]})
    none = await server.ask("POST", "/sessions", body={"ids": []})
    wrong = await server.ask("POST", "/sessions", body={"ids": [3]})

    assert [row["sid"] for row in some.json["sessions"]] == ["s3", "s1"]
    assert none.json == {"sessions": []}
    assert wrong.status == 422


async def test_a_note_is_kept_with_its_session(start: Start) -> None:
    server = await start(MathEnv)
    wish = {"env_name": "mathenv", "task_spec": {"id": "t1"}}

    first = await server.ask("POST", "/create", sid="s1", body=wish, headers={"X-Session-Note": "lease 1"})
    again = await server.ask("POST", "/create", sid="s1", body=wish, headers={"X-Session-Note": "lease 2"})
    refused = await server.ask("POST", "/create", sid="s2", body=wish, headers={"X-Session-Note": "x" * 8193})

    assert (first.status, again.status, refused.status) == (200, 200, 400)
    assert "x-session-note" in refused.json["detail"]
    rows = (await server.ask("GET", "/sessions")).json["sessions"]
    assert [(row["sid"], row["note"]) for row in rows] == [("s1", "lease 2")]


async def test_a_late_delete_of_an_earlier_session_with_the_same_id_does_not_end_the_new_session(start: Start) -> None:
    server = await start(MathEnv)
    wish = {"env_name": "mathenv", "task_spec": {"id": "t1"}}
    await server.ask("POST", "/create", sid="s1", body=wish, headers={"X-Session-Lease": "two"})

    late = await server.ask("POST", "/delete", sid="s1", headers={"X-Session-Lease": "one"})
    between = (await server.ask("GET", "/sessions")).json["sessions"]
    own = await server.ask("POST", "/delete", sid="s1", headers={"X-Session-Lease": "two"})

    assert (late.status, late.json["summary"]) == (200, None)
    assert [row["sid"] for row in between] == ["s1"]
    assert own.json["summary"] is not None
    assert (await server.ask("GET", "/sessions")).json["sessions"] == []


async def test_a_create_ends_an_earlier_session_with_the_same_id_and_another_lease(start: Start) -> None:
    server = await start(MathEnv)
    wish = {"env_name": "mathenv", "task_spec": {"id": "t1"}}
    await server.ask("POST", "/create", sid="s1", body=wish, headers={"X-Session-Lease": "one"})
    await server.call("think")

    again = await server.ask("POST", "/create", sid="s1", body=wish, headers={"X-Session-Lease": "two"})
    (row,) = (await server.ask("GET", "/sessions")).json["sessions"]
    retried = await server.ask("POST", "/create", sid="s1", body=wish, headers={"X-Session-Lease": "two"})
    late = await server.ask("POST", "/delete", sid="s1", headers={"X-Session-Lease": "one"})

    assert (again.status, retried.status) == (200, 200)
    assert row["steps"] == 0, "it is a new one"
    assert late.status == 200
    assert len((await server.ask("GET", "/sessions")).json["sessions"]) == 1


async def test_a_create_that_arrives_after_the_delete_of_its_lease_starts_nothing(start: Start) -> None:
    server = await start(MathEnv)
    wish = {"env_name": "mathenv", "task_spec": {"id": "t1"}}
    await server.ask("POST", "/create", sid="s1", body=wish, headers={"X-Session-Lease": "two"})

    ended = await server.ask("POST", "/delete", sid="s1", headers={"X-Session-Lease": "one"})
    late = await server.ask("POST", "/create", sid="s1", body=wish, headers={"X-Session-Lease": "one"})

    (row,) = (await server.ask("GET", "/sessions")).json["sessions"]
    assert (ended.status, ended.json["summary"]) == (200, None)
    assert (late.status, late.json["detail"]) == (410, "Session deleted")
    assert row["sid"] == "s1", "its successor goes on"


async def test_a_repeated_delete_returns_the_same_summary_and_a_later_create_starts_nothing(start: Start) -> None:
    server = await start(MathEnv)
    wish = {"env_name": "mathenv", "task_spec": {"id": "t1", "answer": "4"}}
    lease = {"X-Session-Lease": "one"}
    await server.ask("POST", "/create", sid="s1", body=wish, headers=lease)
    await server.call("submit", {"answer": "4"})

    ended = await server.ask("POST", "/delete", sid="s1", headers=lease)
    again = await server.ask("POST", "/delete", sid="s1", headers=lease)
    late = await server.ask("POST", "/create", sid="s1", body=wish, headers=lease)

    assert ended.json["summary"]["reward"] == 1.0
    assert again.json == ended.json
    assert (late.status, late.json["detail"]) == (410, "Session deleted")


async def test_a_request_without_a_lease_concerns_the_current_session(start: Start) -> None:
    server = await start(MathEnv)
    wish = {"env_name": "mathenv", "task_spec": {"id": "t1"}}
    await server.ask("POST", "/create", sid="s1", body=wish, headers={"X-Session-Lease": "one"})

    again = await server.ask("POST", "/create", sid="s1", body=wish)
    ended = await server.ask("POST", "/delete", sid="s1")

    assert (again.status, ended.status) == (200, 200)
    assert ended.json["summary"] is not None


async def test_task_tools_are_listed_after_the_shared_tools(start: Start) -> None:
    server = await start(MathEnv)
    await server.open("s1", {"tools": ["think_again", "hint"]})

    listing = (await server.ask("GET", "/mathenv/task_tools", sid="s1")).json
    hinted = await server.call("hint", {"level": "high"})
    unhinted = await server.call("hint", {"level": "none"})

    names = [tool["name"] for tool in listing["tools"]]
    assert names[-2:] == ["think_again", "hint"]
    assert names[:-2] == sorted(names[:-2])
    assert hinted.result["output"]["blocks"][0]["text"] == "high"
    assert unhinted.result["reason"] == "input_validation"


async def test_a_conversation_is_served_as_messages_and_as_a_prompt(start: Start) -> None:
    server = await start(CounterEnv, MathEnv)
    await server.open("s1", {"start": 0})
    await server.open("s2", {"question": "q"}, env_name="mathenv")

    messages = (await server.ask("GET", "/messages", sid="s1")).json
    prompt = (await server.ask("GET", "/prompt", sid="s1")).json
    plain = (await server.ask("GET", "/messages", sid="s2")).json

    assert [message["role"] for message in messages] == ["system", "user"]
    assert [block["text"] for block in prompt] == ["[system]", "Count.", "[user]", "Go."]
    assert prompt[0]["detail"] == {"role": "system"}
    assert plain[0]["role"] == "user"
    assert plain[0]["blocks"][0]["text"] == "q"
    assert plain[0]["detail"] is None


async def test_strict_paths_refuse_another_environments_path(start: Start) -> None:
    server = await start(MathEnv, CounterEnv, strict_paths=True)
    await server.open("s1", {"start": 1}, env_name="counterenv")

    wrong = await server.ask("GET", "/mathenv/prompt", sid="s1")

    assert wrong.status == 409
    assert (await server.ask("GET", "/counterenv/prompt", sid="s1")).status == 200
    assert (await server.ask("GET", "/prompt", sid="s1")).status == 200


async def test_sessions_share_a_loop_or_have_their_own(start: Start) -> None:
    server = await start(Loner, Sharer)
    loops: dict[str, set[str]] = {}
    for env in ("loner", "sharer"):
        for i in range(3):
            await server.open(f"{env}{i}", env_name=env)
            for _ in range(2):
                answer = await server.call("loop_number", sid=f"{env}{i}")
                loops.setdefault(env, set()).add(answer.result["output"]["blocks"][0]["text"])

    assert len(loops["loner"]) == 3
    assert len(loops["sharer"]) == 1


async def test_a_subprocess_of_a_session_runs_on_its_lane(start: Start) -> None:
    server = await start(Loner)
    await server.open()

    answer = await server.call("shell", {"command": "echo $((6 * 7))"})

    assert answer.result["output"]["blocks"][0]["text"] == "42\n"
