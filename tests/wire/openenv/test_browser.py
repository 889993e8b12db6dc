"""The official OpenEnv client plays the browser environment on a Docker engine: right and wrong scripts, and a picture.

Every episode needs its own container, so this file plays few of them. tests/docker/test_browser_tasks.py plays every
task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest

from scripts.browser_problems import SPLITS
from tests.docker.test_browser_sessions import pixel_colours
from tests.envs.browser_solutions import SOLVERS, written
from tests.wire.catalog import STACK, serving
from tests.wire.gateways import Gateway
from tests.wire.openenv.clients import NEWEST, Driver, OpenEnv, connected

pytestmark = [pytest.mark.wire, pytest.mark.docker, pytest.mark.redis, pytest.mark.needs("image:browser")]

PROBLEMS = {problem.slug: problem for problems in SPLITS.values() for problem in problems}


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with serving(STACK, "browser") as gateway:
        yield gateway


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    with closing(Driver(NEWEST)) as driver:
        yield driver


async def follow(client: OpenEnv, seen: dict[str, Any], templates: Sequence[str]) -> dict[str, Any]:
    """Play a script's steps and return the result of the last step. Only the last step ends the episode."""
    result: dict[str, Any] = {}
    for place, template in enumerate(templates, 1):
        result = await client.step({"action_str": written(template, seen["axtree_txt"])})
        seen = result["observation"]
        assert not seen["error"], f"{template}: {seen['error']}"
        assert result["done"] is (place == len(templates)), template
    return result


async def test_a_custom_task_is_solved_by_its_solution(gateway: Gateway, driver: Driver) -> None:
    problem = PROBLEMS["find-price"]
    async with connected(driver, f"{gateway.url}/openenv/browser") as client:
        seen = (await client.reset(task=f"custom/{problem.slug}"))["observation"]

        assert seen["goal"] == problem.text
        assert (await follow(client, seen, problem.solution))["reward"] == 1.0


async def test_actions_name_elements_by_selectors_too(gateway: Gateway, driver: Driver) -> None:
    """The RFC writes them like this: ``click('#login-button')``."""
    async with connected(driver, f"{gateway.url}/openenv/browser") as client:
        await client.reset(task="custom/login-test")

        missed = await client.step({"action_str": "click('#no-such-button')"})
        broken = await client.step({"action_str": "click('#[')"})
        typed = await client.step({"action_str": "fill('#user', 'admin')\nfill(bid='#password', value='1234')"})
        last = await client.step({"action_str": "click('#login-button')"})

    assert "there is no element '#no-such-button'" in missed["observation"]["error"]
    assert "is not a CSS selector" in broken["observation"]["error"]
    assert not typed["observation"]["error"]
    assert (last["reward"], last["done"]) == (1.0, True)


async def test_an_official_miniwob_task_is_solved(gateway: Gateway, driver: Driver) -> None:
    async with connected(driver, f"{gateway.url}/openenv/browser") as client:
        seen = (await client.reset(benchmark="miniwob", task_name="login-user", seed=7))["observation"]

        for call in str(SOLVERS["login-user"](seen["goal"], seen["axtree_txt"])).splitlines():
            result = await client.step({"action_str": call})

        assert (result["reward"], result["done"]) == (1.0, True), f"{seen['goal']}\n{seen['axtree_txt']}"


async def test_a_picture_in_the_observation_shows_the_page(gateway: Gateway, driver: Driver) -> None:
    page = '<!doctype html><title>Red</title><body style="margin:0;background:rgb(200,10,20)"><button>Go</button>'
    task = {
        "id": "custom/red",
        "env_type": "browser",
        "instruction": "Look.",
        "config": {"html": page, "viewport": {"width": 320, "height": 200}},
        "evaluation": {"reward_function": "element_present('#none')"},
    }
    async with connected(driver, f"{gateway.url}/openenv/browser") as client:
        seen = (await client.reset(task=task))["observation"]

        (picture,) = seen["images"]
        width, height, colours = pixel_colours(picture["data"])
        assert picture["mime_type"] == "image/png"
        assert (width, height) == (320, 200)
        assert any(colour[:3] == bytes((200, 10, 20)) for colour in colours)


async def test_wrong_scripts_of_both_benchmarks_on_one_socket_of_a_typed_client_earn_nothing(
    gateway: Gateway, driver: Driver
) -> None:
    wrong = {
        "custom/newsletter-choice": PROBLEMS["newsletter-choice"].wrong,
        "miniwob/click-test-2~1": ["click({button 'TWO'})"],
    }
    async with connected(driver, f"{gateway.url}/openenv/browser", kind="browser") as client:
        for task, script in wrong.items():
            seen = (await client.reset(task=task, seed=3))["observation"]
            assert seen["metadata"]["benchmark"] == task.split("/")[0]
            state = await client.state()
            assert state["task_id"] == task
            assert f"{state['benchmark']}/{state['task_name']}" == task.partition("~")[0]
            assert (state["goal"], state["current_url"], state["max_steps"]) == (seen["goal"], seen["url"], 20)

            assert (await follow(client, seen, script))["reward"] == 0.0
            assert (await client.state())["cum_reward"] == 0.0
