"""OpenEnv's HTTP routes: discovery, the Task API, and episodes for clients without a socket."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from gateway.core.errors import StoreUnavailable
from gateway.stores.memory.tasks import MemoryTaskStore
from gateway.tasks.task_ref import name_of
from tests.fakes.eventually import until
from tests.service.openenv_world import Json, World, world
from tests.service.stack import environment, tasks
from tests.service.wire import hang_up

NAME = name_of({"question": "2+2"}).label
TASKS = tasks(train=[{"id": "a", "question": "1+1"}, {"question": "2+2"}], test=[{"question": "3+3"}], extra=[])


async def get(gw: World, path: str, **headers: str) -> httpx.Response:
    return await gw.http.get(f"/openenv/math/{path}", headers=headers)


async def post(gw: World, path: str, body: Any = None, **headers: str) -> httpx.Response:
    content = {} if body is None else {"json": body}
    return await gw.http.post(f"/openenv/math/{path}", headers=headers, **content)


async def in_session(gw: World, path: str, body: Any = None) -> Json:
    answer = await post(gw, path, body, **{"X-Session-ID": "mine"})
    assert answer.status_code == 200, answer.text
    seen: Json = answer.json()
    return seen


# -- the environment -------------------------------------------------------------------------------------------------


async def test_health_needs_no_key_and_reports_only_the_status() -> None:
    async with world(trainers={"lab": "a-trainer"}) as gw:
        assert (await get(gw, "health")).json() == {"status": "healthy"}
        assert (await get(gw, "metadata")).status_code == 401
        assert (await gw.http.head("/openenv/math/health")).status_code == 405
        assert (await gw.http.get("/openenv/nowhere/health")).status_code == 404


async def test_an_environment_serves_the_documents_that_validators_fetch() -> None:
    async with world(environment()) as gw:
        metadata, schema, page = [(await get(gw, path)).json() for path in ("metadata", "schema", "openapi.json")]

        assert (metadata["name"], metadata["description"]) == ("math", "math environment")
        assert schema.keys() == {"action", "observation", "state", "reset_observation"}
        assert {"const": "echo"} in [one.get("properties", {}).get("tool_name") for one in schema["action"]["anyOf"]]
        assert page["info"]["version"].startswith("1.")
        assert page["paths"].keys() >= {"/reset", "/step", "/state", "/health", "/mcp"}
        assert await gw.gateway.used() == 0


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "health", 405),
        ("GET", "reset", 405),
        ("GET", "math/tasks", 405),
        ("GET", "nothing", 404),
        ("GET", "", 404),
        ("GET", "math/splits/more", 404),
    ],
)
async def test_other_routes_and_methods_are_refused(method: str, path: str, status: int) -> None:
    async with world() as gw:
        assert (await gw.http.request(method, f"/openenv/math/{path}")).status_code == status


# -- tasks -----------------------------------------------------------------------------------------------------------


async def test_the_task_api_lists_names_splits_and_tasks() -> None:
    async with world(tasks=TASKS) as gw:
        a, b = {"id": "a", "question": "1+1"}, {"question": "2+2"}
        assert (await get(gw, "list_environments")).json() == ["math"]
        assert (await get(gw, "MATH/splits")).json() == [
            {"name": "train", "type": "train"},
            {"name": "test", "type": "test"},
            {"name": "extra", "type": "validation"},
        ]
        assert (await post(gw, "math/tasks", {"split": "train"})).json() == {"tasks": [a, b], "env_name": "math"}
        assert (await post(gw, "math/num_tasks", {"split": "train"})).json() == {"num_tasks": 2}
        assert (await post(gw, "math/task", {"split": "train", "index": 1})).json() == {"task": b}
        assert (await post(gw, "math/task_range", {"split": "train", "start": 0, "stop": 1})).json() == {"tasks": [a]}
        assert (await post(gw, "math/task_range", {"split": "train"})).json() == {"tasks": [a, b]}


async def test_the_task_api_refuses_as_stock_servers_do() -> None:
    async with world(environment(), environment("bare"), tasks=TASKS) as gw:
        unknown = await get(gw, "nope/splits")
        assert (unknown.status_code, unknown.json()) == (404, {"detail": "unknown environment 'nope'"})
        late = await post(gw, "math/task", {"split": "train", "index": 9})
        assert (late.status_code, late.json()) == (400, {"detail": "Invalid task index"})
        assert (await post(gw, "math/num_tasks", {"split": "nope"})).status_code == 400
        for body in ({}, {"split": 4}, {"split": "train", "more": 1}, [1]):
            assert (await post(gw, "math/tasks", body)).status_code == 422


async def test_the_task_api_lists_known_tasks_while_the_store_is_away() -> None:
    class Away(MemoryTaskStore):
        async def version(self) -> str:
            raise StoreUnavailable("the store does not answer")

    async with world(tasks=TASKS, task_store=Away()) as gw:
        assert (await post(gw, "math/num_tasks", {"split": "train"})).json() == {"num_tasks": 2}
        unknown = await post(gw, "reset", {"task": "b"})
        assert (unknown.status_code, unknown.json()["code"]) == (503, "SESSION_ERROR"), "nobody can tell that it is not"


async def test_an_environment_without_tasks_reports_that_it_has_no_task_api() -> None:
    async with world(tasks={}) as gw:
        none = await get(gw, "math/splits")
        assert (none.status_code, none.json()) == (501, {"detail": "list_splits is not supported for this environment"})
        assert (await post(gw, "math/task", {"split": "train", "index": 0})).status_code == 501


# -- episodes --------------------------------------------------------------------------------------------------------


async def test_without_a_session_each_call_has_a_temporary_episode() -> None:
    async with world(tasks=TASKS) as gw:
        reset = await post(gw, "reset", {"index": 1})
        step = await post(gw, "step", {"action": {"tool": "submit"}, "timeout_s": 15})
        bare = await post(gw, "reset")
        state = await get(gw, "state")

        assert reset.json() == {
            "observation": {"text": "2+2", "metadata": {"task_id": NAME, "split": "train", "index": 1}},
            "reward": None,
            "done": False,
            "metadata": {"task_id": NAME, "split": "train", "index": 1},
        }
        assert step.json() == {
            "observation": {"text": "null", "metadata": {}},
            "reward": 1.0,
            "done": True,
            "metadata": None,
        }
        assert bare.status_code == 200
        assert state.json() == {"episode_id": None, "step_count": 0}
        await gw.gateway.eventually_used(0)


async def test_with_a_session_all_calls_use_one_episode() -> None:
    async with world(tasks=TASKS) as gw:
        await in_session(gw, "reset", {"index": 0, "episode_id": "e1"})
        for _ in range(2):
            await in_session(gw, "step", {"action": {"tool": "go_on"}})

        state = (await get(gw, "state", **{"X-Session-ID": "mine"})).json()

        assert state == {"episode_id": "e1", "step_count": 2, "task_id": "a"}
        other = await post(gw, "step", {"action": {"tool": "go_on"}}, **{"X-Session-ID": "other"})
        assert (other.status_code, other.json()["code"]) == (404, "SESSION_ERROR")
        assert await gw.gateway.used() == 1
        closed = await gw.rpc("openenv/session/close", session_id="mine")
        assert closed["result"] == {"session_id": "mine", "closed": True}
        await gw.gateway.eventually_used(0)
        again = await gw.rpc("openenv/session/close", session_id="mine")
        assert again["error"]["message"] == "Unknown session_id: mine"


async def test_a_session_of_mcp_is_the_same_over_http() -> None:
    async with world(tasks=TASKS) as gw:
        id = (await gw.rpc("openenv/session/create"))["result"]["session_id"]
        await post(gw, "reset", {"episode_id": "e1"}, **{"X-Session-ID": id})

        async with gw.client(path=f"ws?session_id={id}") as client:
            assert (await client.ask("state"))["data"]["episode_id"] == "e1"


@pytest.mark.parametrize(
    ("path", "body", "kind", "place"),
    [
        ("reset", {"seed": -1}, "greater_than_equal", ["body", "seed"]),
        ("reset", {"seed": "x"}, "int_type", ["body", "seed"]),
        ("reset", {"episode_id": "e" * 256}, "string_too_long", ["body", "episode_id"]),
        ("reset", {"task": 4}, "task_type", ["body", "task"]),
        ("step", {"op": "inc"}, "missing", ["body", "action"]),
        ("step", {"action": 4}, "dict_type", ["body", "action"]),
        ("step", {"action": {}, "timeout_s": 0}, "greater_than", ["body", "timeout_s"]),
        ("step", {"action": {"type": "call_tool"}}, "missing", ["tool_name"]),
        ("step", [], "model_attributes_type", ["body"]),
    ],
)
async def test_a_wrong_body_is_422_with_each_fault_in_its_place(path: str, body: Any, kind: str, place: Any) -> None:
    async with world() as gw:
        answer = await post(gw, path, body)

        assert answer.status_code == 422
        [entry] = answer.json()["detail"]
        assert (entry["type"], entry["loc"]) == (kind, place)
        await gw.gateway.eventually_used(0)


async def test_a_body_that_is_not_json_is_422_and_a_body_beyond_the_limit_is_413() -> None:
    async with world(max_body_bytes=1024) as gw:
        broken = await gw.http.post("/openenv/math/step", content="{", headers={"content-type": "application/json"})
        large = await post(gw, "step", {"action": {"x": "y" * 2000}})

        assert (broken.status_code, broken.json()["detail"][0]["type"]) == (422, "json_invalid")
        assert large.status_code == 413


async def test_an_unknown_task_is_404_and_a_session_id_that_is_too_long_is_400() -> None:
    async with world() as gw:
        unknown = await post(gw, "reset", {"task": "nope"})
        long = await post(gw, "reset", {}, **{"X-Session-ID": "x" * 256})

        assert (unknown.status_code, unknown.json()["detail"]) == (404, "Unknown task: nope")
        assert long.status_code == 400


async def test_a_client_that_hangs_up_in_mid_step_leaves_no_temporary_episode() -> None:
    async with world(tasks=TASKS) as gw:
        step = asyncio.ensure_future(post(gw, "step", {"action": {"tool": "quiet"}}))
        await until(lambda: gw.stack.backend.workers and gw.stack.backend.only.waiting)

        await hang_up(step)

        await gw.gateway.eventually_used(0)


async def test_the_health_of_an_unknown_environment_lists_no_environments() -> None:
    keys: dict[str, Any] = {"trainers": {"alice": "alice-key-1234"}}
    async with world(environment(), environment("hidden"), **keys) as here:
        unknown = [await here.http.get(f"/openenv/{name}/health") for name in ("nosuch", "hidde", "HIDDENN")]
        known = await here.http.get("/openenv/hidden/health")

    assert [answer.text for answer in unknown] == ['{"detail":"Not Found"}'] * 3
    assert {answer.status_code for answer in unknown} == {404}
    assert known.status_code == 200
