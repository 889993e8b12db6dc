"""Tables of wrong requests, each with the protocol's only right answer."""

import json
from dataclasses import dataclass
from typing import Any

NO_SID = "X-Session-ID header is required"
NO_SESSION = "Active environment not found"
ONE_SOURCE = "Value error, Provide either task_spec or both split and index, not both/neither"
BOTH_OF_A_PAIR = "Value error, split and index must both be provided together"
CONTINUED = ("unknown environment ", "Invalid split", "Invalid index", "Not Found")
"""Beginnings of answers that the gateway continues with the valid choices."""
NOT_AN_OBJECT = "Input should be a valid dictionary or object to extract fields from"


@dataclass(frozen=True)
class Row:
    """A request and the answer that it must get."""

    path: str
    body: Any
    """The request body: bytes are sent unchanged, other values as JSON."""
    status: int
    detail: Any
    method: str = "POST"
    sid: bool = True
    content_type: str = "application/json"

    @property
    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


def entry(type: str, loc: list[Any], msg: str, input: Any, **ctx: Any) -> list[dict[str, Any]]:
    """Return the only entry of a validation error's ``detail``, with its keys in the order of the wire."""
    found: dict[str, Any] = {"type": type, "loc": ["body", *loc], "msg": msg, "input": input}
    return [found | {"ctx": ctx["ctx"]}] if ctx else [found]


def rule(message: str, body: Any) -> list[dict[str, Any]]:
    return entry("value_error", [], message, body, ctx={"error": {}})


PAIR = {"env_name": "probe", "split": "train", "index": 0}
NOT_AN_INT = "Input should be a valid integer"
CREATE = {
    "no body": Row("/create", b"", 422, entry("missing", [], "Field required", None)),
    "no json": Row(
        "/create",
        b"{bad",
        422,
        entry(
            "json_invalid",
            [1],
            "JSON decode error",
            {},
            ctx={"error": "Expecting property name enclosed in double quotes"},
        ),
    ),
    "no json, and no session id": Row(
        "/create",
        b"[1,",
        422,
        entry("json_invalid", [3], "JSON decode error", {}, ctx={"error": "Expecting value"}),
        sid=False,
    ),
    "no session id": Row("/create", {"task_spec": {}}, 400, NO_SID, sid=False),
    "no session id, and a wrong body": Row("/create", {"x": 1}, 400, NO_SID, sid=False),
    "a list": Row("/create", [1], 422, entry("model_attributes_type", [], NOT_AN_OBJECT, [1])),
    "a text as content type": Row(
        "/create", b"{}", 422, entry("model_attributes_type", [], NOT_AN_OBJECT, "{}"), content_type="text/plain"
    ),
    "no task": Row("/create", {}, 422, rule(ONE_SOURCE, {})),
    "two tasks": Row("/create", {"task_spec": {}, **PAIR}, 422, rule(ONE_SOURCE, {"task_spec": {}, **PAIR})),
    "a task that is null": Row("/create", {"task_spec": None}, 422, rule(ONE_SOURCE, {"task_spec": None})),
    "half a pair": Row("/create", {"split": "train"}, 422, rule(ONE_SOURCE, {"split": "train"})),
    "half a pair with null": Row(
        "/create", {"split": "train", "index": None}, 422, rule(ONE_SOURCE, {"split": "train", "index": None})
    ),
    "a task and half a pair": Row(
        "/create", {"task_spec": {}, "index": 1}, 422, rule(BOTH_OF_A_PAIR, {"task_spec": {}, "index": 1})
    ),
    "a task that is a text": Row(
        "/create",
        {"task_spec": "x"},
        422,
        entry("dict_type", ["task_spec"], "Input should be a valid dictionary", "x"),
    ),
    "an unknown key": Row(
        "/create",
        {"task_spec": {}, "x": 1},
        422,
        entry("extra_forbidden", ["x"], "Extra inputs are not permitted", 1),
    ),
    "a name that is a number": Row(
        "/create", {**PAIR, "env_name": 5}, 422, entry("string_type", ["env_name"], "Input should be a valid string", 5)
    ),
    "an index that is a fraction": Row(
        "/create",
        {**PAIR, "index": 2.5},
        422,
        entry("int_from_float", ["index"], f"{NOT_AN_INT}, got a number with a fractional part", 2.5),
    ),
    "an index that is a word": Row(
        "/create",
        {**PAIR, "index": "two"},
        422,
        entry("int_parsing", ["index"], f"{NOT_AN_INT}, unable to parse string as an integer", "two"),
    ),
    "an index that is a list": Row("/create", {**PAIR, "index": []}, 422, entry("int_type", ["index"], NOT_AN_INT, [])),
    "an unknown environment": Row("/create", {"env_name": "Nope", "task_spec": {}}, 404, "unknown environment 'Nope'"),
    "an unknown environment with a quote": Row(
        "/create", {"env_name": "it's", "task_spec": {}}, 404, 'unknown environment "it\'s"'
    ),
    "an environment without a name": Row("/create", {"env_name": "", "task_spec": {}}, 404, "unknown environment ''"),
    "an unknown split": Row("/create", {**PAIR, "split": "nope"}, 400, "Invalid split"),
    "an unknown split, and no such index": Row("/create", {**PAIR, "split": "", "index": 99}, 400, "Invalid split"),
    "an index beyond the end": Row("/create", {**PAIR, "index": 5}, 400, "Invalid index"),
    "an index beyond the start": Row("/create", {**PAIR, "index": -6}, 400, "Invalid index"),
}
DISCOVERY = {
    "tasks of no split": Row("/probe/tasks", {}, 422, entry("missing", ["split"], "Field required", {})),
    "tasks of an unknown split": Row("/probe/tasks", {"split": "nope"}, 400, "Invalid split"),
    "number of tasks of an unknown split": Row("/probe/num_tasks", {"split": "nope"}, 400, "Invalid split"),
    "a range of an unknown split": Row("/probe/task_range", {"split": "nope"}, 400, "Invalid split"),
    "a range with a wrong start": Row(
        "/probe/task_range",
        {"split": "train", "start": "x"},
        422,
        entry("int_parsing", ["start"], f"{NOT_AN_INT}, unable to parse string as an integer", "x"),
    ),
    "a task without an index": Row(
        "/probe/task",
        {"split": "train"},
        422,
        entry("missing", ["index"], "Field required", {"split": "train"}),
    ),
    "a task whose index is null": Row(
        "/probe/task", {"split": "train", "index": None}, 422, entry("int_type", ["index"], NOT_AN_INT, None)
    ),
    "a task whose index is a fraction": Row(
        "/probe/task",
        {"split": "train", "index": 2.5},
        422,
        entry("int_from_float", ["index"], f"{NOT_AN_INT}, got a number with a fractional part", 2.5),
    ),
    "a task beyond the end": Row("/probe/task", {"split": "train", "index": 5}, 400, "Invalid index"),
    "a task of an unknown split": Row("/probe/task", {"split": "nope", "index": 0}, 400, "Invalid split"),
    "a split that is a number": Row(
        "/probe/tasks", {"split": 1}, 422, entry("string_type", ["split"], "Input should be a valid string", 1)
    ),
    "no environment of that name": Row("/nosuch/tools", b"", 404, "Not Found", method="GET"),
    "no such operation": Row("/probe/nosuch", b"", 404, "Not Found", method="GET"),
}
NO_SUCH_SESSION = {
    "a call without a session id": Row("/probe/call", {"name": "pid", "input": {}}, 400, NO_SID, sid=False),
    "a call in an unknown session": Row("/probe/call", {"name": "pid", "input": {}}, 404, NO_SESSION),
    "a wrong call in an unknown session": Row("/probe/call", {"name": 5}, 404, NO_SESSION),
    "no json in an unknown session": Row(
        "/probe/call",
        b"{bad",
        422,
        entry(
            "json_invalid",
            [1],
            "JSON decode error",
            {},
            ctx={"error": "Expecting property name enclosed in double quotes"},
        ),
    ),
    "a prompt without a session id": Row("/probe/prompt", b"", 400, NO_SID, method="GET", sid=False),
    "a prompt of an unknown session": Row("/probe/prompt", b"", 404, NO_SESSION, method="GET"),
    "tools of an unknown session": Row("/probe/task_tools", b"", 404, NO_SESSION, method="GET"),
    "messages of an unknown session": Row("/probe/messages", b"", 404, NO_SESSION, method="GET"),
    "scores of an unknown session": Row("/probe/score_group", {"candidates": []}, 404, NO_SESSION),
    "a ping without a session id": Row("/ping", b"", 400, NO_SID, sid=False),
    "a ping of an unknown session": Row("/ping", b"", 404, NO_SESSION),
    "a delete without a session id": Row("/delete", b"", 400, NO_SID, sid=False),
    "a delete_session without a session id": Row("/delete_session", b"", 400, NO_SID, sid=False),
}
IN_A_SESSION = {
    "a call of nothing": Row(
        "/probe/call", {"input": {}}, 422, entry("missing", ["name"], "Field required", {"input": {}})
    ),
    "a call without input": Row(
        "/probe/call", {"name": "pid"}, 422, entry("missing", ["input"], "Field required", {"name": "pid"})
    ),
    "a call whose input is null": Row(
        "/probe/call",
        {"name": "pid", "input": None},
        422,
        entry("dict_type", ["input"], "Input should be a valid dictionary", None),
    ),
    "a call with an unknown key": Row(
        "/probe/call",
        {"name": "pid", "input": {}, "x": [1]},
        422,
        entry("extra_forbidden", ["x"], "Extra inputs are not permitted", [1]),
    ),
    "a call whose name is a number": Row(
        "/probe/call",
        {"name": 5, "input": {}},
        422,
        entry("string_type", ["name"], "Input should be a valid string", 5),
    ),
    "a call of a list": Row("/probe/call", [], 422, entry("model_attributes_type", [], NOT_AN_OBJECT, [])),
}
