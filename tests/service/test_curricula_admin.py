"""The operators' routes for curricula and records, and the commands that use these routes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from typer.testing import CliRunner, Result

from gateway.cli.main import app as commands
from gateway.core.ids import EnvironmentName
from gateway.core.task_name import TaskName
from gateway.tasks.curricula.model import Component, Curriculum, Sampler, SamplerKind, Stage
from gateway.tasks.curricula.service import MAX_SAMPLE
from gateway.tasks.task_ref import name_of
from tests.service.stack import running, tasks
from tests.service.wire import call, delete, detail

MATH = EnvironmentName("math")
TASKS = tasks(
    train=[{"id": f"t{n}", "question": f"question {n}", "difficulty": n // 10, "tags": ["all"]} for n in range(40)],
    test=[{"question": "held out"}],
)
T3 = name_of(json.loads(TASKS["train"][3])).key


def curriculum(**more: Any) -> dict[str, Curriculum]:
    return {"mine": Curriculum(**{"name": "mine", "components": (Component(environment=MATH),), **more})}


async def test_the_api_defines_samples_takes_feedback_and_deletes_a_curriculum() -> None:
    async with running(tasks_math=TASKS) as (_, gateway, client):
        document = {"environment": "math", "seed": 9, "group_size": 4, "sampler": {"kind": "target_success"}}
        url = "/admin/v1/curriculum/later"
        defined = await client.put(url, json=document)
        drawn = await client.post(f"{url}/sample", json={"count": 6, "policy": "step-1"})
        outcome = {"environment": "math", "split": "train", "index": 3, "reward": 0.25, "key": "one"}
        told = [
            await client.post(f"{url}/feedback", json={"policy": "step-2", "outcomes": [outcome]}) for _ in range(2)
        ]
        state = (await client.get(url, params={"tasks": "40"})).json()
        listed = (await client.get("/admin/v1/curriculum")).json()["curricula"]
        removed = await client.delete(url)
        gone = await client.get(url)

        assert defined.status_code == 200, defined.text
        assert drawn.json()["group_size"] == 4
        assert [draw["group"] for draw in drawn.json()["draws"]] == [f"later/{number}" for number in range(6)]
        assert [draw["number"] for draw in drawn.json()["draws"]] == list(range(6))
        assert {draw["environment"] for draw in drawn.json()["draws"]} == {"math"}
        assert [answer.status_code for answer in told] == [200, 200]
        (record,) = (await gateway.records.of(MATH)).values()
        assert (record.task, record.attempts, record.mean, record.policy) == (
            T3,
            1,
            0.25,
            "step-2",
        )
        assert state["policy"] == "step-2"
        assert (state["tasks"], state["shares"]) == (40, {"math": 1.0})
        assert [one["name"] for one in listed] == ["later"]
        assert (removed.status_code, gone.status_code) == (204, 404)


async def test_wrong_requests_are_refused_with_the_reason_and_store_nothing() -> None:
    async with running(tasks_math=TASKS, curricula=curriculum()) as (_, _, client):
        url = "/admin/v1/curriculum/later"
        answers = {
            "kind": await client.put(url, json={"environment": "math", "sampler": {"kind": "clever"}}),
            "environment": await client.put(url, json={"environment": "chess"}),
            "split: math has no task": await client.put(url, json={"environment": "math", "split": "none"}),
            "in a file": await client.put("/admin/v1/curriculum/mine", json={"environment": "math"}),
            "JSON": await client.put(url, content=b"{", headers={"content-type": "application/json"}),
            "count": await client.post("/admin/v1/curriculum/mine/sample", json={"count": 0}),
            "count: ": await client.post("/admin/v1/curriculum/mine/sample", json={"count": MAX_SAMPLE + 1}),
            "group_size": await client.post("/admin/v1/curriculum/mine/sample", json={"group_size": 4097}),
            "outcomes[0]": await client.post(
                "/admin/v1/curriculum/mine/feedback", json={"outcomes": [{"environment": "math", "reward": 1.0}]}
            ),
            "reward": await client.post(
                "/admin/v1/curriculum/mine/feedback",
                json={"outcomes": [{"environment": "math", "task": "t1", "reward": "much"}]},
            ),
            "X-Policy-Tag": await client.post(
                "/create",
                json={"env_name": "math", "split": "train", "index": 0},
                headers={"X-Policy-Tag": "x" * 201},
            ),
        }

        for word, answer in answers.items():
            assert answer.status_code in (400, 422), (word, answer.status_code, answer.text)
            assert word in detail(answer), (word, answer.text)
        assert (await client.get("/admin/v1/records", params={"environment": "math"})).text == ""
        assert [one["name"] for one in (await client.get("/admin/v1/curriculum")).json()["curricula"]] == ["mine"]


async def test_feedback_on_an_unknown_task_is_refused_and_nothing_is_recorded() -> None:
    async with running(tasks_math=TASKS, curricula=curriculum()) as (_, gateway, client):
        sid = "inline"
        given = {"env_name": "math", "task_spec": {"id": "given-whole", "question": "?"}}
        await client.post("/create", json=given, headers={"X-Session-ID": sid})
        await call(client, sid=sid)
        await delete(client, sid)
        url = "/admin/v1/curriculum/mine/feedback"
        good: list[Mapping[str, object]] = [
            {"task": "t1"},
            {"split": "test", "index": 0},
            {"task": "train/2"},
            {"task": "given-whole"},
        ]
        wrong: list[Mapping[str, object]] = [
            {"task": "skill-typo"},
            {"split": "train", "index": 999},
            {"split": "trian", "index": 0},
        ]

        def told(tasks: Sequence[Mapping[str, object]]) -> dict[str, Any]:
            return {"policy": "new", "outcomes": [{"environment": "math", "reward": 0.5, **task} for task in tasks]}

        refused = await client.post(url, json=told([*good, *wrong]))
        policy = (await client.get("/admin/v1/curriculum/mine")).json()["policy"]
        before = await gateway.records.of(MATH)
        noted = await client.post(url, json=told(good))

        assert refused.status_code == 400
        for number, name in ((4, "skill-typo"), (5, "train/999"), (6, "trian/0")):
            assert f"outcomes[{number}]: math has no task '{name}'" in detail(refused)
        assert (policy, [TaskName.of(key).id for key in before]) == ("", ["given-whole"])
        assert noted.json() == {"noted": 4}
        known = [TaskName.of(key) for key in await gateway.records.of(MATH)]
        held_out = name_of(json.loads(TASKS["test"][0]))
        assert sorted(one.label for one in known) == sorted(["given-whole", "t1", "t2", held_out.label])


async def test_records_are_cleared_by_environment_and_by_task_and_an_unknown_environment_is_not_found() -> None:
    async with running(tasks_math=TASKS, curricula=curriculum()) as (_, gateway, client):
        outcomes = [{"environment": "math", "task": f"t{number}", "reward": 1.0} for number in range(3)]
        await client.post("/admin/v1/curriculum/mine/feedback", json={"outcomes": outcomes})
        url = "/admin/v1/records"

        no_index = await client.delete(url, params={"environment": "math", "task": f"train/{'9' * 5000}"})
        one = await client.delete(url, params={"environment": "math", "task": "train/1"})
        left = (await client.get(url, params={"environment": "math"})).text.splitlines()
        all_of_them = await client.delete(url, params={"environment": "math"})
        unknown = [await client.request(method, url, params={"environment": "chess"}) for method in ("GET", "DELETE")]
        unnamed = await client.delete(url)

        assert (one.json(), all_of_them.json()) == ({"removed": 1}, {"removed": 2})
        assert [json.loads(line)["task"] for line in left] == ["t0", "t2"]
        assert dict(await gateway.records.of(MATH)) == {}
        assert [answer.status_code for answer in (*unknown, unnamed)] == [404, 404, 400]
        assert (no_index.status_code, no_index.json()) == (200, {"removed": 0})
        assert "'chess'" in detail(unknown[0])


async def test_the_state_lists_each_component_that_advances_on_its_own() -> None:
    stages = tuple(Stage(name=f"level-{n}", min_difficulty=n, max_difficulty=n) for n in range(4))
    sampler = Sampler(kind=SamplerKind.STAGED, stages=stages, min_attempts=2, per_component=True)
    halves = (Component(environment=MATH, tags=("all",)), Component(environment=MATH, tags=("odd",), weight=2.0))
    some = tasks(
        train=[{"id": f"t{n}", "difficulty": n // 10, "tags": ["all", "odd"] if n % 2 else ["all"]} for n in range(40)]
    )
    async with running(tasks_math=some, curricula=curriculum(sampler=sampler, components=halves)) as (_, _, client):
        state = (await client.get("/admin/v1/curriculum/mine")).json()

        assert (state["tasks"], state["stage"], state["standing"]) == (40, None, None)
        assert [(one["component"]["tags"], one["stage"]) for one in state["standings"]] == [
            (["all"], "level-0"),
            (["odd"], "level-0"),
        ]


async def test_the_command_line_lists_shows_resets_and_clears() -> None:
    staged = Sampler(kind=SamplerKind.STAGED, stages=(Stage(name="first"),))
    async with running(tasks_math=TASKS, curricula=curriculum(sampler=staged)) as (_, gateway, client):
        outcome = {"environment": "math", "task": "t3", "reward": 0.25}
        await client.get("/admin/v1/curriculum/mine")  # the curriculum enters its first stage
        await client.post("/admin/v1/curriculum/mine/feedback", json={"policy": "p", "outcomes": [outcome]})

        async def ran(*arguments: str) -> Result:
            command = ["curricula", *arguments, "--url", str(client.base_url)]
            return await asyncio.to_thread(CliRunner().invoke, commands, command, env={"COLUMNS": "160"})

        listed, shown = await ran("list"), await ran("show", "mine", "--tasks", "40")
        as_json = [json.loads((await ran(*said, "--json")).output) for said in (["list"], ["show", "mine"])]
        reset, cleared = await ran("reset", "mine"), await ran("clear", "math")
        unknown = await ran("show", "nosuch")

        assert [done.exit_code for done in (listed, shown, reset, cleared)] == [0, 0, 0, 0]
        assert "train:mine" in listed.output
        assert "mine: staged over 40 tasks (math 100%), 40 handles" in shown.output
        assert "stage first: success rate 0.00, 1 outcomes, 1 counted" in shown.output
        assert "0.25" in shown.output
        assert (as_json[0][0]["name"], as_json[1]["policy"]) == ("mine", "p")
        assert await gateway.curricula.weights.policy("mine") == ""
        assert "removed 1 record of math" in cleared.output
        assert dict(await gateway.records.of(MATH)) == {}
        assert unknown.exit_code == 2
        assert "there is no curriculum 'nosuch'" in unknown.output
