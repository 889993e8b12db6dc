"""Logged calls of every protocol as steps in one form."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.frontends.admin.steps import action_of, result_of, steps_of


def logged(reply: Any = None, *, operation: str = "call", request: Any = b'{"name":"t","input":{"a":1}}') -> list[Any]:
    return [100.0, 0.5, operation, "ok", request, reply, None, []]


def streamed(result: str, id: str = "1") -> bytes:
    return f"event: task_id\r\ndata: {id}\r\n\r\n: ping\r\n\r\nevent: end\r\ndata: {result}\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("request_", "shown"),
    [
        (b'{"name":"t","input":{"a":1}}', {"tool": "t", "input": {"a": 1}}),
        ({"name": "t", "arguments": {"a": 1}}, {"tool": "t", "input": {"a": 1}}),
        ({"text": "right"}, {"text": "right"}),
        (b'{"type":"step","data":{"x":1}}', {"frame": "step", "data": {"x": 1}}),
        (b"{broken", "{broken"),
        (None, None),
    ],
)
def test_an_action_of_any_form_is_shown(request_: Any, shown: Any) -> None:
    assert action_of(request_) == shown


@pytest.mark.parametrize(
    ("reply", "shown"),
    [
        pytest.param(
            streamed(
                '{"ok":true,"output":{"blocks":[{"type":"text","text":"x","detail":null}],"reward":0.5,"finished":true}}'
            ),
            {"blocks": [{"text": "x"}], "reward": 0.5, "finished": True, "call_id": "1"},
            id="an ORS stream",
        ),
        pytest.param(
            b'{"ok":false,"error":"no such tool","reason":"not_found"}',
            {"error": "no such tool", "reason": "not_found"},
            id="an ORS refusal",
        ),
        pytest.param(
            b'[{"type":"image","data":"QQ==","mimeType":"image/png","detail":null}]',
            {"blocks": [{"image": "QQ==", "mime_type": "image/png"}]},
            id="an ORS prompt",
        ),
        pytest.param(
            b'{"type":"observation","data":{"observation":{"n":1},"reward":1.0,"done":true}}',
            {"frame": "observation", "observation": {"n": 1}, "reward": 1.0, "finished": True},
            id="an OpenEnv frame",
        ),
        pytest.param(
            {"blocks": [{"text": "x"}], "reward": 0.0, "finished": False},
            {"blocks": [{"text": "x"}], "reward": 0.0, "finished": False},
            id="a result of the gateway's model",
        ),
        pytest.param(b"event: error\r\ndata: broke\r\n\r\n", {"error": "broke", "call_id": ""}, id="a broken stream"),
        pytest.param(b"<html>", {"text": "<html>"}, id="no protocol"),
        pytest.param(None, {}, id="no reply"),
    ],
)
def test_a_reply_of_any_protocol_is_shown(reply: Any, shown: Any) -> None:
    assert result_of(reply) == shown


def test_steps_count_from_one_and_a_repeated_call_keeps_its_number() -> None:
    end = '{"ok":true,"output":{"blocks":[],"reward":null,"finished":false}}'
    calls = [
        logged(b"[]", operation="prompt", request=None),
        logged(streamed(end, "a")),
        logged(streamed(end, "a")),
        logged(streamed(end, "b")),
    ]

    steps = steps_of(calls)

    assert [(step["number"], step.get("repeated", False)) for step in steps] == [
        (0, False),
        (1, False),
        (1, True),
        (2, False),
    ]
    assert "reward" not in steps[1], "null is no reward"


def test_the_workers_number_of_a_step_shows_that_earlier_ones_are_missing() -> None:
    calls = [logged({"text": "a", "turn": turn} if turn else {"text": "a"}) for turn in (1, None, 5, None)]

    assert [step["number"] for step in steps_of(calls)] == [1, 2, 5, 6]


def test_the_workers_number_is_also_in_a_stream_or_beside_its_reply() -> None:
    stream = b'event: task_id\r\ndata: a\r\n\r\nevent: end\r\nid: 3\r\ndata: {"ok":true,"output":{}}\r\n\r\n'
    error = b"event: error\r\nid: 4\r\ndata: broke\r\n\r\n"
    calls = [logged(b"{}"), logged(stream), logged(stream), logged(error), [*logged(b"{}"), 9], [*logged(b"{}"), 0]]

    assert [step["number"] for step in steps_of(calls)] == [1, 3, 3, 4, 9, 10]


def test_faults_are_shown_with_their_traceback() -> None:
    call = logged(b'{"ok":false,"error":"failed"}')
    call[7] = [["author", "tool:t", "KeyError: 'a'", "Traceback …"]]

    (step,) = steps_of([call])

    assert step["faults"] == [
        {"kind": "author", "place": "tool:t", "error": "KeyError: 'a'", "traceback": "Traceback …"}
    ]


def test_a_step_shows_whether_its_result_came_as_a_stream() -> None:
    whole = '{"ok":true,"output":{"reward":1.0}}'
    replies = [streamed(whole), streamed(whole, "2"), whole.encode(), {"reward": 1.0}]

    assert [step.get("streamed") for step in steps_of([logged(reply) for reply in replies])] == [True, True, None, None]
