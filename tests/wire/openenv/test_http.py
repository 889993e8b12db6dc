"""Plain HTTP requests: the Task API, descriptions, and the routes without a session."""

from typing import Any

import pytest

from tests.wire.openenv.servers import ALL, EMBEDDED, Place, on

pytestmark = [pytest.mark.wire]


def id_of(task: dict[str, Any]) -> str:
    """Return the task's id, the field that the tasks of both servers share."""
    return str(task["id"])


@on(*ALL)
async def test_tasks_are_listed_by_split(place: Place) -> None:
    async with place.http() as http:
        environments = (await http.get("/list_environments")).json()
        splits = (await http.get("/counting/splits")).json()
        tasks = (await http.post("/COUNTING/tasks", json={"split": "test"})).json()
        count = (await http.post("/counting/num_tasks", json={"split": "train"})).json()
        task = (await http.post("/counting/task", json={"split": "test", "index": 1})).json()
        ranges = [
            (await http.post("/counting/task_range", json={"split": "test", **bounds})).json()["tasks"]
            for bounds in ({"start": 0, "stop": 2}, {"start": 3}, {"stop": 1}, {})
        ]

    assert "counting" in environments
    assert sorted(splits, key=id_or_name) == [{"name": "test", "type": "test"}, {"name": "train", "type": "train"}]
    assert [id_of(each) for each in tasks["tasks"]] == [f"test-{n}" for n in range(5)]
    assert tasks["env_name"] == "counting"
    assert count == {"num_tasks": 20}
    assert id_of(task["task"]) == "test-1"
    assert [[id_of(each) for each in found] for found in ranges] == [
        ["test-0", "test-1"],
        ["test-3", "test-4"],
        ["test-0"],
        [f"test-{n}" for n in range(5)],
    ]


def id_or_name(entry: dict[str, Any]) -> str:
    return str(entry["name"])


@on(*ALL)
async def test_unknown_routes_and_tasks_get_the_official_servers_errors(place: Place) -> None:
    async with place.http() as http:
        unknown = await http.get("/nope/splits")
        beyond = await http.post("/counting/task", json={"split": "test", "index": 5})
        missing = await http.post("/counting/task", json={"split": "test"})
        wrong = await http.post("/counting/num_tasks", json={"split": 7})
        method = await http.get("/counting/tasks")
        nothing = await http.get("/nosuch/route/at/all")

    assert (unknown.status_code, unknown.json()) == (404, {"detail": "unknown environment 'nope'"})
    assert (beyond.status_code, beyond.json()) == (400, {"detail": "Invalid task index"})
    assert missing.status_code == wrong.status_code == 422
    assert missing.json()["detail"][0]["loc"] == ["body", "index"]
    assert wrong.json()["detail"][0]["loc"] == ["body", "split"]
    assert (method.status_code, nothing.status_code) == (405, 404)


@on(*ALL)
async def test_an_environment_describes_itself(place: Place) -> None:
    async with place.http() as http:
        metadata = (await http.get("/metadata")).json()
        schema = (await http.get("/schema")).json()
        described = (await http.get("/openapi.json")).json()

    assert set(metadata) >= {"name", "description", "readme_content", "version", "author", "documentation_url"}
    assert set(schema) >= {"action", "observation", "state", "reset_observation"}
    assert described["info"]["version"].startswith("1.")
    assert set(described["paths"]) >= {"/reset", "/step", "/state", "/health", "/schema", "/mcp"}
    assert "op" in str(schema["action"])


@on(*ALL)
async def test_a_request_without_a_session_sees_no_earlier_request(place: Place) -> None:
    async with place.http() as http:
        reset = (await http.post("/reset", json={"seed": 1})).json()
        bare = (await http.post("/reset")).json()
        state = (await http.get("/state")).json()

    assert (reset["reward"], reset["done"], reset["observation"]["target"]) == (None, False, 4)
    assert bare["observation"]["text"] == "ready"
    assert state["step_count"] == 0


@on(EMBEDDED)
async def test_a_step_without_a_session_runs_in_its_own_episode(place: Place) -> None:
    async with place.http() as http:
        await http.post("/reset", json={"seed": 1})
        steps = [(await http.post("/step", json={"action": {"op": "inc"}})).json() for _ in range(2)]

    assert [step["observation"]["value"] for step in steps] == [1, 1]


@on(*ALL)
@pytest.mark.parametrize(
    ("path", "body", "location"),
    [
        ("/reset", {"seed": -1}, ["body", "seed"]),
        ("/reset", {"episode_id": "x" * 256}, ["body", "episode_id"]),
        ("/step", {"op": "inc"}, ["body", "action"]),
        ("/step", {"action": {}, "timeout_s": 0}, ["body", "timeout_s"]),
    ],
)
async def test_a_malformed_body_is_422_and_names_the_field(
    place: Place, path: str, body: dict[str, Any], location: list[str]
) -> None:
    async with place.http() as http:
        answer = await http.post(path, json=body)

    assert answer.status_code == 422
    assert location in [error["loc"] for error in answer.json()["detail"]]


@on(*ALL)
@pytest.mark.parametrize("path", ["/health", "/metadata", "/schema"])
async def test_descriptions_accept_no_post(place: Place, path: str) -> None:
    async with place.http() as http:
        posted = await http.post(path, json={})

    assert posted.status_code == 405


@on(EMBEDDED)
async def test_an_episode_is_played_over_http_by_its_session_id(place: Place) -> None:
    def request(method: str, **params: str) -> dict[str, Any]:
        return {"jsonrpc": "2.0", "method": f"openenv/session/{method}", "params": params, "id": 1}

    async with place.http() as http:
        created = (await http.post("/mcp", json=request("create"))).json()["result"]["session_id"]
        http.headers["X-Session-ID"] = created
        reset = (await http.post("/reset", json={"episode_id": "e", "index": 0})).json()
        steps = [(await http.post("/step", json={"action": {"op": "inc"}})).json() for _ in range(3)]
        state = (await http.get("/state")).json()
        again = (await http.post("/reset", json={"split": "test", "index": 0})).json()
        closed = (await http.post("/mcp", json=request("close", session_id=created))).json()

    assert reset["observation"]["target"] == 3
    assert [(step["observation"]["value"], step["done"]) for step in steps] == [(1, False), (2, False), (3, True)]
    assert (state["episode_id"], state["step_count"]) == ("e", 3)
    assert again["observation"]["target"] == 2
    assert closed["result"] == {"session_id": created, "closed": True}
