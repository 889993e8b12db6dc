"""Broken tasks and machines: an error with the cause, no reward, no session left. A model's mistake costs a turn."""

import io
import uuid
from collections.abc import Iterator
from typing import Any

import docker
import pytest

from tests.fakes.eventually import eventually
from tests.wire import os_containers
from tests.wire.areal_client import ArealClient, Failed
from tests.wire.catalog import STACK
from tests.wire.gateways import Gateway
from tests.wire.os_catalog import counting, serving_os
from tests.wire.os_episodes import MAX_TURNS, Play, bash, playing
from tests.wire.stack import INSTANCE_LABEL

pytestmark = [pytest.mark.wire, pytest.mark.docker, pytest.mark.redis, pytest.mark.needs("image:os")]

BROKEN_INIT = ["mkdir /srv/data", "echo the-cause >&2; exit 3"]
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "an init that fails": (counting("init", init=BROKEN_INIT), "init script 1 ended with 3: the-cause"),
    "an init that fails, for each session": (
        counting("live-init", init=BROKEN_INIT, live_init=True),
        "init script 1 ended with 3: the-cause",
    ),
    "an example that fails": (
        {**counting("example"), "evaluation": {"check": [None], "example": "echo the-cause >&2; exit 4"}},
        "the example ended with 4: the-cause",
    ),
    "a matcher that is none": (
        {**counting("matcher"), "evaluation": {"check": [{"matcher": "magic"}]}},
        "no matcher 'magic'",
    ),
    "no evaluation": ({**counting("evaluation"), "evaluation": {}}, "evaluation needs match or check"),
    "no turns": (counting("turns", max_turns=0), "config.max_turns"),
}
SLOW_CHECK = {"id": "slow-check", "instruction": "Finish.", "evaluation": {"check": ["exec sleep 3600"]}}
REMINDER = "Error: no action was found in your text"


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with serving_os(STACK, tasks=[counting("count"), SLOW_CHECK, *(task for task, _ in BROKEN.values())]) as gateway:
        yield gateway


@pytest.fixture
def client(gateway: Gateway) -> ArealClient:
    return ArealClient(gateway.url)


# -- tasks and machines that are broken ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BROKEN)
async def test_a_task_that_cannot_be_played_is_500_with_the_cause_each_time(
    gateway: Gateway, client: ArealClient, name: str
) -> None:
    task, cause = BROKEN[name]

    for _ in range(2):
        with pytest.raises(Failed) as failed:
            await client.start(task["id"])

        assert failed.value.status == 500
        assert failed.value.body["error"] == "environment failed"
        assert cause in failed.value.body["detail"]
        assert "reward" not in failed.value.body
    await eventually(lambda: os_containers.nothing_is_left(gateway))


@pytest.mark.parametrize("sample", ["none", "train-001-count-suffix-00000", 99, -1, "0x0"])
async def test_an_unknown_sample_is_404(gateway: Gateway, client: ArealClient, sample: str | int) -> None:
    with pytest.raises(Failed) as failed:
        await client.start(sample)

    assert (failed.value.status, failed.value.body["error"]) == (404, "sample not found")
    assert await gateway.sessions() == []


async def test_a_check_that_does_not_end_is_a_reward_of_0(gateway: Gateway, client: ArealClient) -> None:
    play = Play(client, await client.start("slow-check"))

    verdict = await play.finish()
    with pytest.raises(Failed) as after:
        await play.finish()

    assert verdict.reward == 0.0
    assert after.value.status == 404
    await eventually(lambda: os_containers.nothing_is_left(gateway))


LACKING = {
    "bubblewrap": ("RUN rm /usr/bin/bwrap", "bubblewrap is missing"),
    "box": ("RUN rm -r /srv/box", "the box /srv/box is not a directory"),
}


@pytest.fixture(params=LACKING)
def lacking(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """An image of the environment in which the sandboxes lack a requirement, and the cause that its error names."""
    line, cause = LACKING[request.param]
    engine = docker.from_env(version="auto")
    image = f"env-gateway/wire-os-{uuid.uuid4().hex[:8]}"
    recipe = f"FROM env-gateway/os\nUSER root\n{line}\n"
    try:
        engine.images.build(
            fileobj=io.BytesIO(recipe.encode()), tag=image, labels={INSTANCE_LABEL: "wire-tests"}, rm=True
        )
        yield image, cause
    finally:
        engine.images.remove(image, force=True)
        engine.close()


async def test_an_image_that_cannot_run_sandboxes_opens_no_episode_and_names_the_cause(
    lacking: tuple[str, str],
) -> None:
    image, cause = lacking
    changed = {'image = "env-gateway/os"': f'image = "{image}"'}
    with serving_os(STACK, tasks=[counting("count")], changes=changed) as gateway:
        client = ArealClient(gateway.url)

        details = []
        for _ in range(2):
            with pytest.raises(Failed) as failed:
                await client.start("count")
            assert failed.value.status == 500, failed.value.body
            details.append(failed.value.body["detail"])
        await eventually(lambda: os_containers.nothing_is_left(gateway))

    assert all(cause in detail for detail in details), details


# -- mistakes of a model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param("I do not know.", id="no action"),
        pytest.param("Think: bash.\nAct: bash", id="bash without a block"),
        pytest.param("Act: bash\n```bash\n```", id="an empty block"),
        pytest.param("Act: bash\n```sh\nls\n```", id="another block"),
        pytest.param("Act: bash\n```bash\nls", id="a block without an end"),
        pytest.param("Act: answer 3", id="an answer without brackets"),
        pytest.param("act: finish", id="another label"),
        pytest.param("Act: reset\nAct: /delete", id="a word that is not an action"),
        pytest.param("\x00\ud83d\udc1a" * 3_000, id="noise"),
        pytest.param("Act: answer(" * 3_000, id="brackets that are not closed"),
    ],
)
async def test_a_text_without_an_action_gets_a_reminder_and_costs_a_turn(client: ArealClient, text: str) -> None:
    async with playing(client, "count") as play:
        reply = await play.say(text)
        following = await play.say(bash("ls /srv/data | wc -l"))
        verdict = await play.answer("3")

    assert reply["observation"]["content"].startswith(REMINDER)
    assert (reply["reward"], reply["done"], reply["info"]["turn"]) == (0.0, False, 1)
    assert reply["info"]["parsed_action"] == {"thought": None, "action": None, "content": None}
    assert (following["observation"]["content"], following["info"]["turn"]) == ("The output of the OS:\n3", 2)
    assert (verdict.reward, verdict.info["num_turns"]) == (1.0, 3)


@pytest.mark.parametrize(
    "name", ["reset", "close", "step", "state", "_end", "_judged", "parse_text", "__init__", "delete"]
)
async def test_an_action_can_call_only_a_tool(client: ArealClient, name: str) -> None:
    async with playing(client, "count") as play:
        for arguments in ({}, {"answer": "3"}, {"text": "x", "act": "y", "success": True}):
            reply = await client.tool(play.id, name, **arguments)
            assert (reply["done"], reply["reward"]) == (False, 0.0), reply
            assert reply["observation"]["content"], reply
        verdict = await play.answer("3")

    assert verdict.reward == 1.0


@pytest.mark.parametrize(
    ("said", "reward", "status"),
    [
        pytest.param("Act: answer(3)", 1.0, "completed", id="the right answer"),
        pytest.param("Act: answer(4)", 0.0, "completed", id="a wrong answer"),
        pytest.param("Act: finish", 0.0, "completed", id="no answer"),
        pytest.param(bash("ls"), 0.0, "task limit reached", id="a command"),
        pytest.param("I do not know.", 0.0, "task limit reached", id="no action"),
    ],
)
async def test_the_last_turn_ends_the_episode_and_is_judged_if_it_answers(
    client: ArealClient, said: str, reward: float, status: str
) -> None:
    async with playing(client, "count") as play:
        for turn in range(1, MAX_TURNS):
            reply = await play.say(bash("true") if turn % 2 else "nothing to do")
            assert (reply["done"], reply["info"]["turn"]) == (False, turn)
        last = await play.say(said)
        with pytest.raises(Failed) as after:
            await play.answer("3")

    assert (last["done"], last["observation"], last["reward"]) == (True, None, reward)
    assert last["info"]["success"] is (reward == 1.0)
    assert (last["info"]["status"], last["info"]["num_turns"]) == (status, MAX_TURNS)
    assert after.value.status == 404
