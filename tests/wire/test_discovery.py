"""Information that a trainer can get before it opens a session."""

from typing import Any

import httpx
import pytest

from tests.wire.sdks import Client, Sdk, names
from tests.wire.targets import ALL, OURS, Target, on, tasks_of, with_clients

pytestmark = pytest.mark.wire

SPLITS = "/probe/splits"
TOOLS = [
    *("big", "block", "count", "echo", "fail", "finish", "hold", "hold_blocking", "image", "note", "pid"),
    *("raise_empty", "score", "secret", "sleep", "spaces", "wrong_type"),
]


@with_clients(*ALL)
async def test_splits_and_tasks_match_the_task_files(client: Client) -> None:
    probe = client.environment("probe")

    assert await probe.list_splits() == ["train", "test"]
    for split in ("train", "test"):
        tasks = list(tasks_of("probe", split))
        assert await probe.num_tasks(split) == len(tasks)
        assert [task.task_spec for task in await probe.list_tasks(split)] == tasks


@with_clients(*ALL)
@pytest.mark.parametrize(
    ("start", "stop"),
    [(None, None), (1, 3), (-2, None), (None, -1), (3, 1), (2, 99), (-99, 2), (99, None), (0, 0)],
)
async def test_a_range_of_tasks_works_like_a_python_slice(client: Client, start: int | None, stop: int | None) -> None:
    expected = list(tasks_of("probe", "train"))[start:stop]

    tasks = await client.environment("probe").get_task_range("train", start, stop)

    assert [task.task_spec for task in tasks] == expected
    assert {task.environment_name for task in tasks} <= {"probe"}


@with_clients(*ALL)
@pytest.mark.parametrize("index", [0, 4, -1, -5])
async def test_a_task_is_found_by_a_positive_or_negative_index(client: Client, index: int) -> None:
    task = await client.environment("probe").get_task("train", index)

    assert task.task_spec == list(tasks_of("probe", "train"))[index]
    assert task.environment_name == "probe"


@with_clients(*ALL)
async def test_tools_are_listed_by_name_with_description_and_schema(client: Client) -> None:
    tools = await client.environment("probe").list_tools()

    assert names(tools) == TOOLS
    described = {tool.name: tool for tool in tools}
    assert described["echo"].description == "Give the text back."
    assert described["echo"].input_schema["required"] == ["text"]
    assert described["echo"].input_schema["properties"]["text"]["type"] == "string"
    assert described["image"].input_schema is None


@with_clients(*ALL)
@pytest.mark.parametrize("provider", ["openai", "anthropic", "google", "openrouter"])
async def test_tools_come_in_the_form_of_a_model_provider(client: Client, provider: str) -> None:
    tools = await client.environment("counter").list_tools(format=provider)

    named = {tool.get("name") or tool["function"]["name"]: tool for tool in tools}
    assert sorted(named) == ["add", "stop"]
    schema = named["add"].get("input_schema") or named["add"]["parameters"]
    assert schema["properties"]["n"]["type"] == "integer"


@with_clients(*ALL)
async def test_two_environments_have_their_own_tools_and_tasks(client: Client) -> None:
    counter = client.environment("counter")

    assert names(await counter.list_tools()) == ["add", "stop"]
    assert await counter.num_tasks("test") == 1


@on(*ALL)
async def test_health_and_the_list_of_environments_are_served(target: Target, http: httpx.AsyncClient) -> None:
    health = await http.get("/health")
    environments = await http.get("/list_environments")

    assert health.text == '{"status":"ok"}'
    assert environments.json()[:3] == ["probe", "counter", "slowsetup"]
    assert "content-encoding" not in environments.headers
    assert int(environments.headers["content-length"]) == len(environments.content)


@on("openreward-server", *OURS)
async def test_the_version_has_two_keys(http: httpx.AsyncClient) -> None:
    version = (await http.get("/version")).json()

    assert list(version) == ["version", "build_sha"]
    assert isinstance(version["version"], str)


@on(*ALL)
async def test_each_split_has_a_type(http: httpx.AsyncClient) -> None:
    assert (await http.get(SPLITS)).json() == [{"name": "train", "type": "train"}, {"name": "test", "type": "test"}]


@on("openreward-server", *OURS)
async def test_a_tool_list_has_every_key_and_a_tool_exactly_three(http: httpx.AsyncClient) -> None:
    listed = (await http.get("/probe/tools")).json()

    assert list(listed) == ["tools", "terminal_tool", "supports_score_group", "message_block_types"]
    assert listed["terminal_tool"] is None
    assert listed["supports_score_group"] in (None, False)
    assert {tuple(tool) for tool in listed["tools"]} == {("name", "description", "input_schema")}


@on("openreward-server", *OURS)
@pytest.mark.parametrize(
    ("operation", "body", "key"),
    [
        ("task", {"split": "train", "index": 0}, "task"),
        ("task_range", {"split": "train"}, "tasks"),
        ("tasks", {"split": "train"}, "tasks"),
    ],
)
async def test_tasks_name_their_environment_with_the_spelling_of_the_path(
    http: httpx.AsyncClient, operation: str, body: dict[str, Any], key: str
) -> None:
    response = await http.post(f"/PrObE/{operation}", json=body)

    assert response.status_code == 200, response.text
    assert response.json()["env_name"] == "PrObE"
    assert key in response.json()


@on(*ALL)
@pytest.mark.parametrize(("index", "meant"), [("2", 2), (2.0, 2), (True, 1)])
async def test_an_index_may_be_a_text_or_a_float_or_a_boolean(
    http: httpx.AsyncClient, index: object, meant: int
) -> None:
    response = await http.post("/probe/task", json={"split": "train", "index": index})

    assert response.status_code == 200, response.text
    assert response.json()["task"] == list(tasks_of("probe", "train"))[meant]


@on(*ALL)
async def test_a_new_session_id_has_no_session_yet(target: Target, http: httpx.AsyncClient) -> None:
    response = await http.post("/create_session", json={}, headers={"Accept": "text/event-stream"})
    sid = response.text.split("data:")[1].split()[0]

    ping = await http.post("/ping", headers={"X-Session-ID": sid})

    assert ping.status_code == 404
    assert ping.text == '{"detail":"Active environment not found"}'


@on(*ALL)
async def test_a_session_id_arrives_in_an_event_stream(http: httpx.AsyncClient) -> None:
    response = await http.post("/create_session", json={}, headers={"Accept": "text/event-stream"})

    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = response.text.replace("\r\n", "\n").split("\n")
    assert lines[0] == "event: task_id"
    assert len(lines[1].removeprefix("data: ")) == 36
    assert lines[3] == "event: end"


@with_clients("ors-server", "openreward-server", *OURS)
async def test_the_client_refuses_a_wrong_choice_of_task_before_it_sends_it(client: Client, sdk: Sdk) -> None:
    probe = client.environment("probe")

    with pytest.raises(ValueError, match="task"):
        probe.session()
    with pytest.raises(ValueError, match="task"):
        probe.session(split="train")
    with pytest.raises(ValueError, match="task"):
        probe.session(task=sdk.task("probe", {}), split="train", index=0)
