"""A server's description of its environments and its refusals of invalid requests."""

from pathlib import Path
from typing import Any

import pytest

from tests.envserver.conftest import Start
from tests.envserver.worlds import TASKS, CounterEnv, Listener, MathEnv

GET_PATHS = ("/health", "/version", "/list_environments", "/tools", "/splits", "/prompt", "/task_tools")


async def test_the_server_reports_its_health_version_and_environments(start: Start) -> None:
    server = await start(MathEnv, CounterEnv)

    assert (await server.ask("GET", "/health")).body == b'{"status":"ok"}'
    assert (await server.ask("GET", "/version")).body == b'{"version":"0.2.0","build_sha":null}'
    names = await server.ask("GET", "/list_environments")
    assert names.body == b'["mathenv","counterenv"]'
    assert names.headers["content-type"] == "application/json"


async def test_tools_are_listed_by_name_with_every_key(start: Start) -> None:
    server = await start(MathEnv)

    listing = (await server.ask("GET", "/mathenv/tools")).json

    assert list(listing) == ["tools", "terminal_tool", "supports_score_group", "message_block_types"]
    names = [tool["name"] for tool in listing["tools"]]
    assert names == sorted(names)
    assert "done" not in names
    assert "hint" not in names
    assert listing["terminal_tool"] == {"name": "done", "arg": "message", "description": "Take the final message."}
    assert listing["supports_score_group"] is False
    assert listing["message_block_types"] == ["text", "image", "reasoning", "tool_call", "tool_result"]
    tools = {tool["name"]: tool for tool in listing["tools"]}
    assert tools["think"] == {"name": "think", "description": "Think.", "input_schema": None}
    assert tools["submit"]["input_schema"] == {
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "The answer."}},
        "required": ["answer"],
    }
    assert tools["quick"]["input_schema"]["properties"] == {"n": {"type": "integer", "default": 1}}


async def test_splits_without_a_type_get_one(start: Start) -> None:
    server = await start(MathEnv)

    assert (await server.ask("GET", "/splits")).json == [
        {"name": "train", "type": "train"},
        {"name": "test", "type": "test"},
        {"name": "gpu", "type": "validation"},
        {"name": "extra", "type": "train"},
    ]


async def test_tasks_are_listed_counted_and_fetched(start: Start) -> None:
    server = await start(MathEnv)

    async def post(path: str, body: dict[str, Any]) -> Any:
        return (await server.ask("POST", path, body=body)).json

    assert await post("/mathenv/tasks", {"split": "train"}) == {"tasks": TASKS, "env_name": "mathenv"}
    assert await post("/num_tasks", {"split": "test"}) == {"num_tasks": 2}
    assert await post("/MathEnv/task", {"split": "train", "index": -1}) == {"task": TASKS[4], "env_name": "MathEnv"}


@pytest.mark.parametrize(
    ("start_index", "stop_index", "expected"),
    [
        pytest.param(None, None, [0, 1, 2, 3, 4], id="absent bounds are the ends"),
        pytest.param(1, 3, [1, 2], id="stop is exclusive"),
        pytest.param(-2, None, [3, 4], id="negatives count from the end"),
        pytest.param(-99, 2, [0, 1], id="negatives are floored at 0"),
        pytest.param(3, 99, [3, 4], id="the stop is clamped"),
        pytest.param(4, 1, [], id="an inverted range is empty"),
        pytest.param(True, "3", [1, 2], id="integers are lenient"),
    ],
)
async def test_a_range_of_tasks_is_read_like_a_slice(
    start: Start, start_index: Any, stop_index: Any, expected: list[int]
) -> None:
    server = await start(MathEnv)

    body = {"split": "train", "start": start_index, "stop": stop_index}
    answer = await server.ask("POST", "/task_range", body=body)

    assert answer.json == {"tasks": [TASKS[i] for i in expected], "env_name": "mathenv"}


async def test_a_range_of_tasks_that_are_known_by_index_only_is_served(start: Start) -> None:
    server = await start(CounterEnv)

    answer = await server.ask("POST", "/task_range", body={"split": "train", "start": -3, "stop": -1})

    assert answer.json["tasks"] == [{"start": 7}, {"start": 8}]


async def test_tasks_that_are_known_by_index_only_are_not_listed(start: Start) -> None:
    server = await start(CounterEnv)

    refused = await server.ask("POST", "/tasks", body={"split": "train"})

    assert refused.status == 400
    assert refused.json == {
        "detail": "list_tasks is not supported for this environment. "
        "Use the index-based API (num_tasks + get_task) instead."
    }
    assert (await server.ask("POST", "/task", body={"split": "train", "index": -1})).json["task"] == {"start": 9}


@pytest.mark.parametrize(
    ("path", "body", "detail"),
    [
        ("/tasks", {"split": "none"}, "Invalid split"),
        ("/num_tasks", {"split": "none"}, "Invalid split"),
        ("/task", {"split": "none", "index": 0}, "Invalid split"),
        ("/task_range", {"split": "none"}, "Invalid split"),
        ("/task", {"split": "train", "index": 5}, "Invalid index"),
        ("/task", {"split": "train", "index": -6}, "Invalid index"),
    ],
)
async def test_an_unknown_split_or_index_is_400(start: Start, path: str, body: dict[str, Any], detail: str) -> None:
    server = await start(MathEnv)

    answer = await server.ask("POST", path, body=body)

    assert (answer.status, answer.json) == (400, {"detail": detail})


async def test_task_files_are_served(start: Start, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "test.jsonl").write_text('{"n":1}\n\n{"n":"é"}\n', encoding="utf-8")
    (tasks / "train.jsonl").write_text('{"n":3}')
    (tasks / "odd.jsonl").write_text("")

    server = await start(Listener, tasks=str(tasks))

    names = [split["name"] for split in (await server.ask("GET", "/splits")).json]
    assert names == ["train", "test", "odd"]
    assert (await server.ask("POST", "/num_tasks", body={"split": "odd"})).json == {"num_tasks": 0}
    assert (await server.ask("POST", "/tasks", body={"split": "test"})).json["tasks"] == [{"n": 1}, {"n": "é"}]
    assert (await server.ask("POST", "/task", body={"split": "train", "index": 0})).json["task"] == {"n": 3}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/nosuch/tools", 404),
        ("/", 404),
        ("/mathenv", 404),
        ("/mathenv/nosuch", 404),
        ("/nosuch", 404),
        ("/mathenv/tools/more", 404),
        ("/mathenv//tools", 404),
        ("/MATHENV/tools", 200),
        ("/math%65nv/tools", 200),
        ("/tools?a=b%20c", 200),
        ("http://elsewhere/tools", 200),
    ],
)
async def test_paths(start: Start, path: str, status: int) -> None:
    server = await start(MathEnv)

    answer = await server.ask("GET", path)

    assert answer.status == status
    if status == 404:
        assert answer.body == b'{"detail":"Not Found"}'


async def test_a_path_with_a_trailing_slash_is_redirected(start: Start) -> None:
    server = await start(MathEnv)

    answer = await server.ask("GET", "/mathenv/tools/?x=1", headers={"Host": "some.host:99"})

    assert answer.status == 307
    assert answer.headers["location"] == "http://some.host:99/mathenv/tools?x=1"
    assert answer.body == b""


@pytest.mark.parametrize("path", GET_PATHS)
@pytest.mark.parametrize("method", ["POST", "PUT", "OPTIONS", "HEAD"])
async def test_a_wrong_method_is_405(start: Start, method: str, path: str) -> None:
    server = await start(MathEnv)
    wire = await server.wire()

    answer = await wire.ask(method, path)

    assert answer.status == 405
    assert answer.headers["allow"] == "GET"
    assert (await wire.ask("GET", "/health")).status == 200


@pytest.mark.parametrize("method", ["PUT", "OPTIONS", "HEAD"])
async def test_the_answer_to_a_wrong_method_names_all_allowed_methods(start: Start, method: str) -> None:
    server = await start(MathEnv)
    wire = await server.wire()

    answer = await wire.ask(method, "/sessions")

    assert (answer.status, answer.headers["allow"]) == (405, "GET, POST")


@pytest.mark.parametrize(
    ("raw", "content_type", "entry"),
    [
        (b"", "application/json", {"type": "missing", "loc": ["body"], "msg": "Field required", "input": None}),
        (b"null", "application/json", {"type": "missing", "loc": ["body"], "msg": "Field required", "input": None}),
        (
            b"{bad",
            "application/json",
            {
                "type": "json_invalid",
                "loc": ["body", 1],
                "msg": "JSON decode error",
                "input": {},
                "ctx": {"error": "Expecting property name enclosed in double quotes"},
            },
        ),
        (
            b"[1]",
            "application/json; charset=utf-8",
            {
                "type": "model_attributes_type",
                "loc": ["body"],
                "msg": "Input should be a valid dictionary or object to extract fields from",
                "input": [1],
            },
        ),
        (
            b'{"split":"train"}',
            "text/plain",
            {
                "type": "model_attributes_type",
                "loc": ["body"],
                "msg": "Input should be a valid dictionary or object to extract fields from",
                "input": '{"split":"train"}',
            },
        ),
        (
            b"{}",
            "application/json",
            {"type": "missing", "loc": ["body", "split"], "msg": "Field required", "input": {}},
        ),
        (
            b'{"split":1}',
            "application/vnd.api+json",
            {"type": "string_type", "loc": ["body", "split"], "msg": "Input should be a valid string", "input": 1},
        ),
        (
            b'{"split":"train","x":1}',
            "application/json",
            {"type": "extra_forbidden", "loc": ["body", "x"], "msg": "Extra inputs are not permitted", "input": 1},
        ),
    ],
)
async def test_bad_bodies_are_422(start: Start, raw: bytes, content_type: str, entry: dict[str, Any]) -> None:
    server = await start(MathEnv)

    answer = await server.ask("POST", "/num_tasks", raw=raw, headers={"Content-Type": content_type})

    assert answer.status == 422
    assert answer.json == {"detail": [entry]}
    assert list(answer.json["detail"][0]) == list(entry)


@pytest.mark.parametrize("raw", [b'"\xff"', b"[" * 100_000, b"9" * 5000], ids=["not UTF-8", "nested", "a long number"])
async def test_an_unreadable_body_is_400(start: Start, raw: bytes) -> None:
    server = await start(MathEnv)

    answer = await server.ask("POST", "/num_tasks", raw=raw)

    assert (answer.status, answer.json) == (400, {"detail": "There was an error parsing the body"})


@pytest.mark.parametrize(
    ("value", "kind"),
    [(2.5, "int_from_float"), ("x", "int_parsing"), (None, "int_type"), ([], "int_type")],
)
async def test_the_422_for_a_wrong_index_names_the_type_error(start: Start, value: Any, kind: str) -> None:
    server = await start(MathEnv)

    answer = await server.ask("POST", "/task", body={"split": "train", "index": value})

    assert answer.status == 422
    assert answer.json["detail"][0]["type"] == kind


async def test_a_failing_hook_is_500_with_its_message(start: Start) -> None:
    class Broken(MathEnv):
        @classmethod
        def tasks(cls, split: str) -> Any:
            raise RuntimeError("no tasks today")

    server = await start(Broken)

    answer = await server.ask("POST", "/num_tasks", body={"split": "train"})

    assert (answer.status, answer.json) == (500, {"detail": "RuntimeError: no tasks today"})
