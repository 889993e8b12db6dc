"""Curricula as splits of their environments: the same draws in every protocol and at every replica."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import Counter
from typing import Any

import httpx

from gateway.core.environment import Areal
from gateway.core.ids import EnvironmentName
from gateway.core.task_name import TaskName
from gateway.core.worker import WorkerState
from gateway.stores.memory.curricula import MemoryCurriculumStore
from gateway.tasks.curricula.model import Component, Curriculum, Sampler, SamplerKind, Stage
from gateway.tasks.task_ref import name_of
from tests.fakes.eventually import eventually
from tests.service.openenv_world import world
from tests.service.stack import Stack, environment, running, stack, tasks
from tests.service.wire import call, delete

MATH, GAME = EnvironmentName("math"), EnvironmentName("game")
SPLIT = "train:mine"
TASKS = tasks(
    train=[{"id": f"t{n}", "question": f"question {n}", "difficulty": n // 10, "tags": ["all"]} for n in range(40)],
    test=[{"question": "held out"}],
)


def curriculum(kind: SamplerKind = SamplerKind.UNIFORM, **more: Any) -> dict[str, Curriculum]:
    sampler = more.pop("sampler", Sampler(kind=kind))
    components = more.pop("components", (Component(environment=MATH),))
    return {"mine": Curriculum(name="mine", components=components, sampler=sampler, **more)}


async def open_one(client: httpx.AsyncClient, index: int, **headers: str) -> str:
    """Open a session by a handle, and return the session's id."""
    sid = uuid.uuid4().hex
    body = {"env_name": "math", "split": SPLIT, "index": index}
    answer = await client.post("/create", json=body, headers={"X-Session-ID": sid, **headers})
    assert answer.status_code == 200, answer.text
    return sid


def played(stack: Stack) -> list[str]:
    """Return the tasks that workers were asked to set up, worker by worker, in order."""
    return [
        json.loads(request.body)["task_spec"]["id"]
        for worker in stack.backend.workers.values()
        for request in worker.requests
        if request.target == "/create"
    ]


async def test_a_curriculum_is_one_more_split_whose_tasks_are_handles() -> None:
    async with running(tasks_math=TASKS, curricula=curriculum(handles=5)) as (_, _, client):
        splits = (await client.get("/math/splits")).json()
        count = (await client.post("/math/num_tasks", json={"split": SPLIT})).json()
        one = (await client.post("/math/task", json={"split": SPLIT, "index": -1})).json()
        some = (await client.post("/math/task_range", json={"split": SPLIT, "start": 1, "stop": 3})).json()
        beyond = await client.post("/math/task", json={"split": SPLIT, "index": 5})

        assert splits[-1] == {"name": SPLIT, "type": "train"}
        assert count == {"num_tasks": 5}
        assert one["task"] == {"id": f"{SPLIT}/4"}
        assert some["tasks"] == [{"id": f"{SPLIT}/1"}, {"id": f"{SPLIT}/2"}]
        assert beyond.status_code == 400


async def test_a_curriculum_without_a_number_of_handles_has_as_many_handles_as_tasks() -> None:
    async with running(tasks_math=TASKS, curricula=curriculum()) as (_, _, client):
        count = (await client.post("/math/num_tasks", json={"split": SPLIT})).json()

        assert count == {"num_tasks": 40}


async def test_a_group_plays_one_task_and_then_the_handle_stands_for_the_next_draw() -> None:
    async with running(environment(slots=16), tasks_math=TASKS, curricula=curriculum(group_size=3)) as (
        stack,
        _,
        client,
    ):
        for _ in range(12):
            await open_one(client, 7)

        groups = [played(stack)[at : at + 3] for at in range(0, 12, 3)]
        assert [len(set(group)) for group in groups] == [1, 1, 1, 1]
        assert len({group[0] for group in groups}) > 1


async def test_a_group_that_opens_concurrently_at_two_replicas_plays_one_task() -> None:
    shared = MemoryCurriculumStore()
    front: dict[str, Any] = {"tasks_math": TASKS, "curricula": curriculum(group_size=8), "curriculum_store": shared}
    async with stack(environment(slots=32), **front) as built:
        other = built.another()
        async with (
            built.first.looping(),
            other.looping(),
            built.first.serving() as one,
            other.serving() as two,
        ):
            await asyncio.gather(*(open_one(client, handle) for handle in (0, 1) for client in (one, two) * 4))

            assert sorted(Counter(played(built)).values()) in ([8, 8], [16])


async def test_draws_do_not_depend_on_the_gateway_that_makes_them() -> None:
    async def drawn() -> list[str]:
        async with running(environment(slots=32), tasks_math=TASKS, curricula=curriculum(seed=3)) as (stack, _, client):
            for handle in range(20):
                await open_one(client, handle)
            return played(stack)

    first = await drawn()

    assert await drawn() == first
    assert len(set(first)) > 10


async def test_a_create_may_name_a_handle_as_its_task() -> None:
    async with running(tasks_math=TASKS, curricula=curriculum(group_size=2)) as (stack, gateway, client):
        body = {"env_name": "math", "task_spec": {"id": f"{SPLIT}/3"}}
        answer = await client.post("/create", json=body, headers={"X-Session-ID": "by-spec"})
        await open_one(client, 3)

        assert answer.status_code == 200
        first, second = played(stack)
        assert first == second
        assert TaskName.of((await gateway.found("by-spec")).task).id == first


async def test_an_opening_that_finds_no_slot_releases_its_place_in_the_group() -> None:
    tight = environment(slots=1, min_workers=1, max_workers=1, open_s=0.2)
    async with running(tight, tasks_math=TASKS, curricula=curriculum(group_size=2, seed=5)) as (stack, gateway, client):
        await gateway.eventually_workers(1, state=WorkerState.READY)
        held = await open_one(client, 0)
        refused = await client.post(
            "/create",
            json={"env_name": "math", "split": SPLIT, "index": 0},
            headers={"X-Session-ID": "late"},
        )
        await delete(client, held)
        sid = await open_one(client, 0)
        await delete(client, sid)
        await open_one(client, 0)

        assert refused.status_code == 429
        first, second, third = played(stack)
        assert first == second, "the place of the one that was refused"
        assert third != first


async def test_an_identical_retry_takes_one_place() -> None:
    async with running(environment(slots=8), tasks_math=TASKS, curricula=curriculum(group_size=3, seed=1)) as (
        stack,
        _,
        client,
    ):
        body, headers = {"env_name": "math", "split": SPLIT, "index": 0}, {"X-Session-ID": "again"}
        answers = [await client.post("/create", json=body, headers=headers) for _ in range(4)]
        for _ in range(3):
            await open_one(client, 0)

        assert {answer.status_code for answer in answers} == {200}
        first, second, third, fourth = played(stack)
        assert first == second == third != fourth


async def test_the_outcome_of_a_session_is_in_its_tasks_record() -> None:
    async with running(tasks_math=TASKS) as (_, gateway, client):
        for sid, wish in (("a", {"split": "train", "index": 4}), ("b", {"task_spec": {"id": "t4"}})):
            headers = {"X-Session-ID": sid, "X-Policy-Tag": f"step-{sid}"}
            await client.post("/create", json={"env_name": "math", **wish}, headers=headers)
            await call(client, sid=sid)
            await delete(client, sid)
        await client.post("/create", json={"env_name": "math", "split": "train", "index": 5})
        await delete(client)
        await gateway.records.write()

        lines = (await client.get("/admin/v1/records", params={"environment": "math"})).text.splitlines()

        (record,) = [json.loads(line) for line in lines]
        assert record.pop("seen_at") > 0
        assert record == {
            "environment": "math",
            "task": "t4",
            "task_digest": name_of(json.loads(TASKS["train"][4])).digest,
            "scorer": None,
            "attempts": 2,
            "finished": 2,
            "mean": 1.0,
            "deviation": 0.0,
            "steps": 1.0,
            "seconds": 0.5,
            "policy": "step-b",
            "recent": [1.0, 1.0],
        }


async def test_a_session_that_expired_or_lost_its_worker_is_no_attempt() -> None:
    async with running(tasks_math=TASKS) as (stack, gateway, client):
        await client.post("/create", json={"env_name": "math", "split": "train", "index": 4})
        await call(client, "go_on")
        await stack.backend.only.die()
        await gateway.eventually_used(0)
        await gateway.records.write()

        answer = await client.get("/admin/v1/records", params={"environment": "math"})

        assert (answer.status_code, answer.text) == (200, "")


async def test_inline_tasks_without_an_id_have_records_of_their_own() -> None:
    async with running(tasks_math=TASKS) as (_, gateway, client):
        for sid, question in (("a", "x"), ("b", "y"), ("c", "x")):
            wish = {"env_name": "math", "task_spec": {"question": question}}
            await client.post("/create", json=wish, headers={"X-Session-ID": sid})
            await call(client, sid=sid)
            await delete(client, sid)
        await gateway.records.write()

        records = await gateway.records.of(MATH)

        assert sorted(record.attempts for record in records.values()) == [1, 2]
        assert all(TaskName.of(key).label.startswith("sha256:") for key in records)


async def test_draws_follow_the_records() -> None:
    """All rewards of the fake worker are 1, so a played difficulty is solved and no longer near the target."""
    target = Sampler(kind=SamplerKind.TARGET_SUCCESS, explore=0.0, width=0.05, prior=1.0)
    async with running(environment(slots=64), tasks_math=TASKS, curricula=curriculum(sampler=target)) as (
        stack,
        gateway,
        client,
    ):
        for index in range(30):
            for _ in range(2):
                sid = uuid.uuid4().hex
                wish = {"env_name": "math", "split": "train", "index": index}
                await client.post("/create", json=wish, headers={"X-Session-ID": sid})
                await call(client, sid=sid)
                await delete(client, sid)
        await gateway.records.write()
        before = len(played(stack))

        for handle in range(10):
            await open_one(client, handle)

        assert {int(task[1:]) // 10 for task in played(stack)[before:]} == {3}


async def test_stages_advance_and_the_state_shows_the_stage() -> None:
    stages = tuple(Stage(name=f"level-{n}", min_difficulty=n, max_difficulty=n) for n in range(4))
    staged = Sampler(kind=SamplerKind.STAGED, stages=stages, min_attempts=4, window=4, review=0.0)
    async with running(environment(slots=64), tasks_math=TASKS, curricula=curriculum(sampler=staged)) as (
        stack,
        _,
        client,
    ):
        for handle in range(4):
            sid = await open_one(client, handle)
            await call(client, sid=sid)
            await delete(client, sid)
        first = played(stack)

        async def has_moved() -> None:
            state = (await client.get("/admin/v1/curriculum/mine")).json()
            assert state["stage"] == "level-1", state
            assert state["standing"]["position"] == 1
            assert state["standing"]["counted"] <= state["standing"]["outcomes"]

        await eventually(has_moved)
        await open_one(client, 4)

        assert {int(task[1:]) // 10 for task in first} == {0}
        assert int(played(stack)[-1][1:]) // 10 == 1


async def test_areal_plays_a_curriculum_by_numbers() -> None:
    shown = environment(slots=16, areal=Areal(split=SPLIT))
    async with running(shown, tasks_math=TASKS, curricula=curriculum(group_size=2)) as (stack, _, client):
        info = (await client.get("/areal/math/api/task/info")).json()
        answers = [
            await client.post("/areal/math/api/episode/start", json={"sample_id": sample, "config": {}})
            for sample in (0, "0", f"{SPLIT}/0", 0)
        ]

        assert info["num_samples"] == 40
        assert {answer.status_code for answer in answers} == {200}
        first, second, third, fourth = played(stack)
        assert (first, third) == (second, fourth)


async def test_openenv_plays_a_curriculum_by_index_by_seed_by_task_and_by_split_alone() -> None:
    async with world(tasks=TASKS, curricula=curriculum(group_size=2)) as gw, gw.client() as client:
        told = [
            (await client.reset(**wish))["metadata"]["task_id"]
            for wish in (
                {"split": SPLIT, "index": 1},
                {"split": SPLIT, "seed": 41},
                {"task": f"{SPLIT}/2"},
                {"task": {"id": f"{SPLIT}/2"}},
                {"split": SPLIT},
            )
        ]

        assert told[0] == told[1]
        assert told[2] == told[3]
        assert all(task.startswith("t") for task in told)


async def test_workers_start_where_tasks_are_drawn_before_a_trainer_opens_them() -> None:
    """A sample of a curriculum over two environments starts workers of both, without a create."""
    both = (Component(environment=MATH, weight=3.0), Component(environment=GAME))
    environments = (environment(slots=4, max_workers=4), environment("game", slots=4, max_workers=4))
    async with running(
        *environments, tasks_math=TASKS, tasks_game=TASKS, curricula=curriculum(components=both, group_size=4)
    ) as (_, gateway, client):
        await gateway.curricula.look_ahead(time.monotonic())
        answer = await client.post("/admin/v1/curriculum/mine/sample", json={"count": 120})

        await gateway.eventually_workers(3, "math", WorkerState.READY)
        await gateway.eventually_workers(1, "game", WorkerState.READY)
        drawn = Counter(draw["environment"] for draw in answer.json()["draws"])
        assert drawn == {"math": 90, "game": 30}


async def test_idle_workers_make_room_for_workers_of_another_environment() -> None:
    environments = (
        environment(slots=1, max_workers=3, warm=2, idle_worker_s=3600.0),
        environment("game", slots=1, max_workers=3, idle_worker_s=3600.0),
    )
    async with running(*environments, max_workers=2) as (stack, gateway, client):
        await gateway.eventually_workers(2, "math", WorkerState.READY)

        opened = await client.post("/create", json={"env_name": "game", "task_spec": {"question": "x"}})

        assert opened.status_code == 200
        assert (stack.backend.asked, len(stack.backend.stopped)) == (3, 1)
        assert len(await gateway.workers("math")) == len(await gateway.workers("game")) == 1
