"""Tasks that only a third-party image has: listed, opened and refused in the terms of each protocol."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import httpx
import pytest

from gateway.core.environment import Environment, ResetMapping, Server, ServerProtocol, UpstreamKind
from gateway.core.errors import UpstreamGone
from gateway.core.session import Session, SessionSetup
from gateway.core.worker import Worker
from gateway.sessions import opening as openings
from tests.fakes.eventually import until
from tests.fakes.upstreams import CounterImage
from tests.service.foreign_world import TEST, TRAIN, foreign, image
from tests.service.openenv_world import code, message
from tests.service.stack import environment, running
from tests.service.wire import call, create, delete, detail, hang_up, result, under_way

ANY = pytest.mark.parametrize("protocol", list(ServerProtocol))
SPLIT_KEYS = ResetMapping(keys=("seed", "episode_id", "split", "index"))


def only(setups: list[SessionSetup]) -> SessionSetup:
    """Return the setup of the only episode."""
    assert len(setups) == 1, setups
    return setups[0]


# -- ORS ------------------------------------------------------------------------------------------------------------


@ANY
async def test_ors_lists_the_tasks_of_the_image(protocol: ServerProtocol) -> None:
    async with foreign(image(protocol)) as world:
        splits = (await world.ors("splits")).json()
        tasks = (await world.ors("tasks", split="train")).json()
        count = (await world.ors("num_tasks", split="test")).json()
        last = (await world.ors("task", split="train", index=-1)).json()
        some = (await world.ors("task_range", split="train", start=1)).json()

    assert splits == [{"name": "train", "type": "train"}, {"name": "test", "type": "train"}]
    assert tasks == {"tasks": TRAIN, "env_name": "image"}
    assert count == {"num_tasks": 1}
    assert last == {"task": TRAIN[2], "env_name": "image"}
    assert some["tasks"] == TRAIN[1:]


@ANY
async def test_ors_opens_a_task_by_its_index_and_the_image_receives_the_index(protocol: ServerProtocol) -> None:
    async with foreign(image(protocol)) as world:
        body = {"env_name": "image", "split": "train", "index": -3}
        assert (await world.http.post("/create", json=body)).status_code == 200
        outcome = result(await call(world.http, "move", env="image"))
        await delete(world.http)

    assert outcome["ok"] is False, "this tool call names no move"
    setup = only(world.image.setups)
    assert (setup.spec, setup.split, setup.index) == (TRAIN[0], "train", 0)


async def test_a_toolset_is_passed_on_to_a_standard_ors_server_only() -> None:
    async with foreign(image(ServerProtocol.ORS)) as world:
        wish = {"task_spec": TRAIN[0], "toolset_name": "codex"}
        created = await world.http.post("/create", json={"env_name": "image", **wish})
    async with foreign(image(ServerProtocol.AREAL)) as elsewhere:
        refused = await elsewhere.http.post("/create", json={"env_name": "image", **wish})

    assert (created.status_code, world.image.setups[0].toolset) == (200, "codex")
    assert (refused.status_code, detail(refused)) == (400, "unknown toolset 'codex'; valid options are []")


async def test_an_images_own_task_may_have_a_rate_limit_of_its_own_meaning() -> None:
    async with foreign(image(ServerProtocol.ORS)) as world:
        by_place = await world.http.post("/create", json={"env_name": "image", "split": "test", "index": 0})
        await delete(world.http)
        whole = await world.http.post("/create", json={"env_name": "image", "task_spec": TEST[0]})

    assert (by_place.status_code, whole.status_code) == (200, 200), (by_place.text, whole.text)


@ANY
async def test_ors_refuses_unknown_splits_and_indices_and_queries_the_image_once(protocol: ServerProtocol) -> None:
    async with foreign(image(protocol)) as world:
        for _ in range(3):
            split = await world.ors("num_tasks", split="nosuch")
            index = await world.ors("task", split="train", index=3)
            created = await world.http.post("/create", json={"env_name": "image", "split": "train", "index": -4})

    nowhere = "Invalid split: there is no 'nosuch'; there are train, test"
    assert (split.status_code, detail(split)) == (400, nowhere)
    assert (index.status_code, detail(index)) == (400, "Invalid index: 3; split 'train' has 3 tasks")
    assert (created.status_code, detail(created)) == (400, "Invalid index: -4; split 'train' has 3 tasks")
    assert (world.image.asked["splits"], world.image.asked["count"]) == (1, 1)
    assert not world.image.setups


async def test_a_create_that_names_no_environment_does_not_start_a_worker_of_each_environment() -> None:
    async with foreign(image(ServerProtocol.ORS), None, environment("math")) as world:
        created = await world.http.post("/create", json={"split": "train", "index": 2})
        assert (created.status_code, world.stack.backend.asked) == (200, 0)

        prompt = await world.http.get("/image/prompt")

    assert "Reach 3." in prompt.text
    assert only(world.image.setups).index == 2


async def test_tasks_registered_at_run_time_come_first_and_the_image_does_not_receive_their_index() -> None:
    async with foreign(image(ServerProtocol.ORS)) as world:
        await world.register(id="mine", target=1)

        names = [split["name"] for split in (await world.ors("splits")).json()]
        await world.http.post("/create", json={"env_name": "image", "split": "custom", "index": 0})

    assert names == ["custom", "train", "test"]
    setup = only(world.image.setups)
    assert (setup.spec["id"], setup.split, setup.index) == ("mine", "", None)


async def test_an_environment_with_a_tasks_folder_does_not_query_its_image_for_tasks(tmp_path: Any) -> None:
    async with foreign(replace(image(ServerProtocol.ORS), tasks=tmp_path)) as world:
        assert (await world.ors("splits")).json() == []
        refused = await world.ors("num_tasks", split="train")

    assert (refused.status_code, world.image.asked.total()) == (400, 0)


async def test_an_inline_task_is_matched_to_the_index_of_the_same_task_in_an_openenv_image() -> None:
    async with foreign(image(ServerProtocol.OPENENV, resets=SPLIT_KEYS)) as world:
        for task in (TRAIN[1], {"n": 1, "target": 99}):
            await create_whole(world.http, task)
        await create_whole(world.http, {"seed": 4})

    assert [(setup.spec, setup.split, setup.index) for setup in world.image.setups] == [
        (TRAIN[1], "train", 1),
        ({"n": 1, "target": 99}, "", None),
        ({"seed": 4}, "", None),
    ]


async def create_whole(http: Any, task: dict[str, Any]) -> None:
    """Open and end an episode of an inline task."""
    created = await http.post("/create", json={"env_name": "image", "task_spec": task})
    assert created.status_code == 200, created.text
    await delete(http)


# -- queries --------------------------------------------------------------------------------------------------------


async def test_a_query_takes_no_slot_from_the_episode_that_holds_the_only_slot() -> None:
    async with foreign(image(ServerProtocol.ORS)) as world:
        await create_whole(world.http, {"target": 1})
        created = await create(world.http, env_name="image", target=1)
        assert created.status_code == 200

        listed = await world.ors("tasks", split="train")

        assert listed.json()["tasks"] == TRAIN
        await world.gateway.eventually_used(1, "image")
        assert world.stack.backend.asked == 1


async def test_a_worker_that_was_started_for_a_query_is_free_afterwards() -> None:
    async with foreign(image(ServerProtocol.ORS)) as world:
        await world.ors("splits")

        await world.gateway.eventually_used(0, "image")
        assert (await create(world.http, env_name="image", target=1)).status_code == 200


async def test_one_worker_of_a_single_use_image_answers_all_queries_and_then_serves() -> None:
    async with foreign(image(ServerProtocol.OPENENV, max_uses=1)) as world:
        await world.ors("splits")
        await asyncio.gather(
            world.ors("num_tasks", split="train"),
            world.ors("task", split="test", index=0),
            world.http.get("/image/tools"),
            world.http.get("/openenv/image/schema"),
        )

        created = await create(world.http, env_name="image", target=1)

        assert created.status_code == 200
        assert world.stack.backend.asked == 1
        assert world.image.asked == {"splits": 1, "count": 2, "tasks": 2, "tools": 1, "about": 1}


async def test_a_large_split_is_fetched_in_pages_and_each_page_once() -> None:
    many = CounterImage({"train": [{"n": n} for n in range(1000)]})
    async with foreign(image(ServerProtocol.ORS), many) as world:
        one = (await world.ors("task", split="train", index=700)).json()["task"]
        few = (await world.ors("task_range", split="train", start=690, stop=710)).json()["tasks"]
        asked = many.asked["tasks"]
        whole = (await world.ors("tasks", split="train")).json()["tasks"]

    assert (one, [task["n"] for task in few]) == ({"n": 700}, list(range(690, 710)))
    assert (asked, [task["n"] for task in whole]) == (2, list(range(1000)))


# -- AReaL ----------------------------------------------------------------------------------------------------------


@ANY
async def test_areal_counts_tasks_and_opens_them_by_number_and_by_split_and_index(protocol: ServerProtocol) -> None:
    async with foreign(image(protocol)) as world:
        info = (await world.http.get("/areal/image/api/task/info")).json()
        by_number, by_place = await world.start(1), None
        await cancel(world.http, by_number)
        by_place = await world.start("test/0")

    assert info["num_samples"] == 3
    prompt, _, tools = by_number.json()["observation"]["content"].partition("\n\n")
    assert prompt == "Reach 2."
    if protocol is ServerProtocol.AREAL:
        assert not tools, "its prompts are for agents that act by texts"
    else:
        assert tools.startswith('You act by calling tools. Reply with JSON such as {"name": "move", "arguments": {}}.')
    assert by_place.status_code == 200, by_place.text
    assert [(setup.split, setup.index) for setup in world.image.setups] == [("train", 1), ("test", 0)]


async def cancel(http: Any, started: Any) -> None:
    """Cancel an AReaL episode."""
    episode = started.json()["episode_id"]
    ended = await http.post("/areal/image/api/episode/cancel", json={"episode_id": episode})
    assert ended.status_code == 200, ended.text


@ANY
async def test_areal_refuses_an_unknown_sample_and_names_the_valid_indices(protocol: ServerProtocol) -> None:
    async with foreign(image(protocol)) as world:
        refused = await world.start(3)

    assert (refused.status_code, refused.json()["error"]) == (404, "sample not found")
    assert "indices 0 to 2" in refused.json()["detail"]
    assert not world.image.setups


async def test_areal_takes_the_first_split_of_an_image_without_the_usual_split() -> None:
    async with foreign(image(ServerProtocol.ORS), CounterImage({"dev": TEST})) as world:
        info = (await world.http.get("/areal/image/api/task/info")).json()
        started = await world.start(0)

    assert (info["num_samples"], started.status_code) == (1, 200)


async def test_an_areal_servers_own_task_info_is_shown_and_it_opens_samples_that_only_it_knows() -> None:
    async with foreign(image(ServerProtocol.AREAL)) as world:
        world.image.told = {"name": "guess", "max_episode_length": 7, "action_type": "structured", "description": 3}
        info = (await world.http.get("/areal/image/api/task/info")).json()
        started = await world.start("dev-001-00042")
        await cancel(world.http, started)
        refused = await world.start("nosuch")

    assert (info["name"], info["max_episode_length"], info["action_type"]) == ("guess", 7, "structured")
    assert started.json()["info"]["max_turns"] == 7
    assert only(world.image.setups).spec["sample_id"] == "dev-001-00042"
    assert (refused.status_code, refused.json()["error"]) == (404, "sample not found")


async def test_a_task_that_is_a_seed_keeps_it_unless_the_trainer_requests_another() -> None:
    seeds = CounterImage({"train": [{"seed": 0}, {"seed": 1}]})
    async with foreign(image(ServerProtocol.OPENENV), seeds) as world:
        await cancel(world.http, await world.start(1))
        await cancel(world.http, await world.start(1, seed=5))

    assert [setup.seed for setup in seeds.setups] == [1, 5]


# -- OpenEnv --------------------------------------------------------------------------------------------------------


@ANY
async def test_openenvs_task_api_shows_the_tasks_of_the_image(protocol: ServerProtocol) -> None:
    async with foreign(image(protocol)) as world:
        base = "/openenv/image/image"
        splits = (await world.http.get(f"{base}/splits")).json()
        count = (await world.http.post(f"{base}/num_tasks", json={"split": "train"})).json()
        task = (await world.http.post(f"{base}/task", json={"split": "train", "index": 1})).json()
        some = (await world.http.post(f"{base}/task_range", json={"split": "train", "stop": 2})).json()
        index = await world.http.post(f"{base}/task", json={"split": "train", "index": 3})
        split = await world.http.post(f"{base}/tasks", json={"split": "nosuch"})

    assert [one["name"] for one in splits] == ["train", "test"]
    assert (count, task, some) == ({"num_tasks": 3}, {"task": TRAIN[1]}, {"tasks": TRAIN[:2]})
    assert (index.status_code, detail(index)) == (400, "Invalid task index")
    nowhere = "Invalid split: there is no 'nosuch'; there are train, test"
    assert (split.status_code, detail(split)) == (400, nowhere)


async def test_an_image_without_tasks_has_no_task_api() -> None:
    async with foreign(image(ServerProtocol.ORS), CounterImage()) as world:
        answer = await world.http.get("/openenv/image/image/splits")

    assert (answer.status_code, detail(answer)) == (501, "list_splits is not supported for this environment")


@ANY
async def test_openenv_resets_to_a_split_and_index_or_to_an_id_that_names_them(protocol: ServerProtocol) -> None:
    async with foreign(image(protocol)) as world, world.client() as client:
        await client.reset(split="train", index=2)
        await client.reset(task="image/train/1")
        reset = await client.reset(split="test", seed=9)

    assert [(s.split, s.index) for s in world.image.setups] == [("train", 2), ("train", 1), ("test", 0)]
    assert reset["observation"]["text"] == "Reach 2."


@pytest.mark.parametrize("protocol", [ServerProtocol.ORS, ServerProtocol.AREAL])
async def test_openenv_takes_any_task_of_another_protocols_image(protocol: ServerProtocol) -> None:
    async with foreign(image(protocol)) as world, world.client() as client:
        first = await client.reset()
        await client.reset(task={"n": 7, "target": 1, "id": 7, "class": "algebra"})

    assert "Reach" in first["observation"]["text"]
    assert world.image.setups[0].split == "train"
    assert world.image.setups[1].spec == {"n": 7, "target": 1, "id": 7, "class": "algebra"}


@pytest.mark.parametrize("protocol", [ServerProtocol.ORS, ServerProtocol.OPENENV])
async def test_openenv_refuses_unknown_tasks_and_the_episode_goes_on(protocol: ServerProtocol) -> None:
    async with foreign(image(protocol)) as world, world.client() as client:
        await client.reset(split="train", index=1)
        index = await client.ask("reset", {"split": "train", "index": 3})
        split = await client.ask("reset", {"split": "nosuch", "index": 0})
        id = await client.ask("reset", {"task": "nosuch"})
        place = await client.ask("reset", {"task": "train/3"})
        step = await client.ask("step", {"op": "inc"})

    assert [code(reply) for reply in (index, split, id, place)] == ["EXECUTION_ERROR"] * 4
    assert "Invalid index: 3; split 'train' has 3 tasks" in message(index)
    assert "there are train, test" in message(split)
    assert message(id) == "Unknown task: nosuch"
    assert step["type"] == "observation", step


async def test_a_third_party_server_is_played_as_images_are() -> None:
    static = image(ServerProtocol.ORS, server=Server(url="http://127.0.0.1:9/prefix"))
    upstream = CounterImage({"train": TRAIN})
    async with running(static, tasks_image={}, upstreams={UpstreamKind.ORS: upstream}) as (_, _, http):
        answer = await http.post("/image/num_tasks", json={"split": "train"})

    assert answer.json() == {"num_tasks": 3}


# -- turns ------------------------------------------------------------------------------------------------------------


async def test_a_step_whose_trainer_hung_up_is_a_turn() -> None:
    async with foreign(image(ServerProtocol.AREAL)) as world:
        started = (await world.start("train/2")).json()

        def step(text: str) -> Coroutine[Any, Any, httpx.Response]:
            body = {"episode_id": started["episode_id"], "action": {"type": "text", "content": text}}
            return world.http.post("/areal/image/api/episode/step", json=body)

        async with under_way(step("wait")) as [running]:
            await world.image.stuck.wait()
            await hang_up(running)
        world.image.opened.set()
        await until(lambda: not world.gateway.session_cache.is_busy())

        assert (await step("inc")).json()["info"]["turn"] == 2


async def test_an_opening_polls_an_unreachable_server_and_opens_once_it_is_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Away(CounterImage):
        signs = 0

        async def alive(self, worker: Worker, environment: Environment, *, busy_counts: bool = True) -> None:
            self.signs += 1
            if self.signs < 10:
                raise UpstreamGone("no connection to the worker", sent=False)

        async def open(self, session: Session, environment: Environment, setup: SessionSetup) -> Session:
            if self.signs < 10:
                raise UpstreamGone("no connection to the worker", sent=False)
            return await super().open(session, environment, setup)

    monkeypatch.setattr(openings, "FULL_PAUSE_S", 0.01)
    caplog.set_level(logging.INFO)
    static, upstream = image(ServerProtocol.ORS, server=Server(url="http://127.0.0.1:9")), Away({"train": TRAIN})
    async with running(static, tasks_image={}, upstreams={UpstreamKind.ORS: upstream}) as (_, _, http):
        created = await http.post("/create", json={"env_name": "image", "task_spec": TRAIN[0]})

    assert created.status_code == 200, created.text
    tried = [line.message for line in caplog.records if line.message.startswith("session_opened_elsewhere")]
    assert len(tried) == 1
