"""An operator registers tasks while the gateway runs, and stock clients play them immediately."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.deadlines import HANG_S
from tests.wire.gateways import OPERATOR_KEY
from tests.wire.openenv.clients import OLDEST, ClientError, Driver, DriverOf, connected
from tests.wire.openenv.servers import EMBEDDED, Place, on

pytestmark = [pytest.mark.wire]


@pytest.fixture
async def operator(place: Place) -> AsyncIterator[httpx.AsyncClient]:
    """A client for the operators' routes. Tasks that a test registers are removed at its end."""
    headers = {"Authorization": f"Bearer {OPERATOR_KEY}"}
    async with httpx.AsyncClient(
        base_url=place.root, headers=headers, verify=False, trust_env=False, timeout=HANG_S
    ) as http:
        yield http
        for task in (await http.get("/admin/v1/tasks", params={"split": "custom"})).json()["tasks"]:
            await http.delete(f"/admin/v1/tasks/{task['environment']}/{task['id']}")


def task(name: str, target: int, **more: Any) -> dict[str, Any]:
    return {
        "id": f"custom/{name}",
        "env_type": "counting",
        "instruction": f"Count to {target}.",
        "config": {"target": target},
        "evaluation": {"reward_function": "counting"},
        **more,
    }


@on(EMBEDDED)
async def test_a_registered_task_can_be_played_immediately_and_is_unknown_after_its_removal(
    place: Place, newest: Driver, operator: httpx.AsyncClient
) -> None:
    async with connected(newest, place.url()) as client, place.http() as http:
        with pytest.raises(ClientError) as before:
            await client.reset(task="custom/copy-paste")
        added = await operator.post("/admin/v1/tasks", json=task("copy-paste", 11))
        first = await client.reset(task="custom/copy-paste", episode_id="e")
        last = await client.act("inc", 11)
        splits = (await http.get("/counting/splits")).json()
        number = (await http.post("/counting/num_tasks", json={"split": "custom"})).json()["num_tasks"]
        index = number - 1  # tasks that other tests removed leave their positions empty
        listed = (await http.post("/counting/task", json={"split": "custom", "index": index})).json()["task"]
        placed = await client.reset(split="custom", index=index)
        removed = await operator.delete("/admin/v1/tasks/counting/custom/copy-paste")
        with pytest.raises(ClientError) as after:
            await client.reset(task="custom/copy-paste")

    assert (added.status_code, removed.status_code) == (201, 204)
    assert (first["observation"]["target"], first["metadata"]["task_id"]) == (11, "custom/copy-paste")
    assert (last["reward"], last["done"]) == (1.0, True)
    assert {"name": "custom", "type": "validation"} in splits
    assert listed["id"] == "custom/copy-paste"
    assert placed["observation"]["target"] == 11
    for failed in (before, after):
        assert "Unknown task: custom/copy-paste" in failed.value.message
        assert "EXECUTION_ERROR" in failed.value.message


@on(EMBEDDED)
async def test_the_oldest_client_plays_a_registered_task(
    place: Place, driver_of: DriverOf, operator: httpx.AsyncClient
) -> None:
    await operator.post("/admin/v1/tasks", json=task("login-demo", 4))

    async with connected(driver_of(OLDEST), place.url(), kind="typed", mode="direct") as client:
        first = await client.reset(task="custom/login-demo")

    assert first["observation"]["target"] == 4


@on(EMBEDDED)
async def test_a_task_beyond_its_rate_limit_is_refused_with_the_time_to_wait(
    place: Place, newest: Driver, operator: httpx.AsyncClient
) -> None:
    limited = task("heavy", 5, rate_limit={"starts": 2, "per_s": 3600})
    await operator.post("/admin/v1/tasks", json=limited)

    async with connected(newest, place.url()) as client:
        for _ in range(2):
            await client.reset(task="custom/heavy")
        await client.act("inc")
        with pytest.raises(ClientError) as refused:
            await client.reset(task="custom/heavy")
        state = await client.state()

    assert "EXECUTION_ERROR" in refused.value.message
    assert "again in" in refused.value.message
    assert state["step_count"] == 1
