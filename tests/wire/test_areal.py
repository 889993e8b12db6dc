"""AReaL's Task Server API, called as AReaL's own client calls it."""

import asyncio
import io
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.fakes.eventually import eventually
from tests.wire.areal_client import ArealClient, Failed
from tests.wire.gateways import TRAINER_KEYS
from tests.wire.targets import BOTH_GATEWAYS, ONE_GATEWAY, Target, on, tasks_of

pytestmark = pytest.mark.wire

MAX_TURNS = 20


def areal(target: Target, environment: str = "probe") -> ArealClient:
    """Return a client that has its key in the path, because it cannot send headers."""
    return ArealClient(f"{target.url}/k/{target.key}/areal/{environment}/")


@pytest.fixture
def client(target: Target) -> ArealClient:
    return areal(target)


@pytest.fixture
async def episode(client: ArealClient) -> AsyncIterator[str]:
    """An episode on the first sample. The fixture cancels it at the end if it still exists."""
    started = await client.start(0)
    yield started["episode_id"]
    await client.request("POST", "/episode/cancel", json={"episode_id": started["episode_id"]})


async def lives(client: ArealClient, episode: str) -> int:
    """Assert that the episode still runs, and return the turn of the step that this takes."""
    reply = await client.tool(episode, "echo", text="still here")
    assert reply["observation"] == {"type": "text", "content": "still here"}
    turn: int = reply["info"]["turn"]
    return turn


# -- the task -------------------------------------------------------------------------------------------------------


@on(*ONE_GATEWAY)
@pytest.mark.parametrize("path", ["/task/info", "/task/info/"])
async def test_the_task_is_described_below_either_prefix_with_or_without_a_slash(
    target: Target, client: ArealClient, path: str
) -> None:
    default = ArealClient(f"{target.url}/k/{target.key}")

    described = [await one.ask("GET", path) for one in (client, default)]

    assert (
        described
        == [
            {
                "name": "probe",
                "num_samples": 5,
                "max_episode_length": MAX_TURNS,
                "observation_type": "text",
                "action_type": "text",
                "description": "One tool for each thing that can go right or wrong on the wire.",
            }
        ]
        * 2
    )


@on(*BOTH_GATEWAYS)
async def test_health_counts_live_episodes_and_workers(client: ArealClient, episode: str) -> None:
    health = await client.ask("GET", "/health")

    assert health["status"] == "healthy"
    assert health["task_name"] == "probe"
    assert health["active_episodes"] >= 1
    assert health["boxes"] >= 1
    assert (health["queued"], health["starting"]) == (0, 0)


# -- start ----------------------------------------------------------------------------------------------------------


@on(*ONE_GATEWAY)
@pytest.mark.parametrize(
    ("sample", "question"),
    [
        pytest.param(0, "What is 1 + 1?", id="an integer"),
        pytest.param("4", "The last one.", id="an integer as text"),
        pytest.param("probe-3", "Which tools?", id="a task's id"),
    ],
)
@pytest.mark.parametrize("fields", [{}, {"config": {"seed": 7}}, {"config": None}, {"unknown": [1]}])
async def test_a_start_answers_with_the_first_observation(
    client: ArealClient, sample: str | int, question: str, fields: dict[str, Any]
) -> None:
    reply = await client.start(sample, **fields)
    await client.cancel(reply["episode_id"])

    assert uuid.UUID(reply["episode_id"]).version == 4
    assert reply == {
        "episode_id": reply["episode_id"],
        "observation": {"type": "text", "content": question},
        "info": {"max_turns": MAX_TURNS, "turn": 0, "sample_id": sample, "task_description": question},
        "reward": 0.0,
        "done": False,
    }


@on(*ONE_GATEWAY)
async def test_a_start_without_a_config_works(client: ArealClient) -> None:
    reply = await client.ask("POST", "/episode/start", json={"sample_id": 0})

    await client.cancel(reply["episode_id"])


@on(*ONE_GATEWAY)
@pytest.mark.parametrize("sample", [5, "5", -1, "nosuch", "", "9" * 40, 10**30])
async def test_an_unknown_sample_is_404(client: ArealClient, sample: str | int) -> None:
    with pytest.raises(Failed) as failed:
        await client.start(sample)

    assert failed.value.status == 404
    assert failed.value.body["error"] == "sample not found"
    assert failed.value.body["detail"]
    assert "episode_id" not in failed.value.body


@on(*BOTH_GATEWAYS)
async def test_a_setup_that_fails_is_500_with_its_reason_and_leaves_no_session(target: Target) -> None:
    # The first task whose setup raises; the task file is expected to have one.
    client = areal(target, "slowsetup")
    failing = next(index for index, task in enumerate(list(tasks_of("slowsetup", "train"))) if "error" in task)

    with pytest.raises(Failed) as failed:
        await client.start(failing)

    assert failed.value.status == 500
    assert (failed.value.body["status"], failed.value.body["reason"]) == ("environment_failed", "author_fault")
    assert list(tasks_of("slowsetup", "train"))[failing]["error"] in failed.value.body["detail"]


@pytest.mark.usefixtures("narrow_worker")
@on(*BOTH_GATEWAYS)
async def test_a_start_without_a_free_slot_is_503_and_leaves_no_episode(target: Target) -> None:
    narrow = areal(target, "narrow")
    first = await narrow.start(0)
    try:
        with pytest.raises(Failed) as failed:
            await narrow.start(0)
        health = await narrow.ask("GET", "/health")
    finally:
        await narrow.cancel(first["episode_id"])
    second = await narrow.start(0)
    await narrow.cancel(second["episode_id"])

    assert (failed.value.status, failed.value.body["status"]) == (503, "capacity")
    assert (health["active_episodes"], health["queued"]) == (1, 0)


@pytest.mark.usefixtures("narrow_worker")
@on(*BOTH_GATEWAYS)
async def test_a_client_that_disconnects_during_its_start_leaves_no_session(target: Target) -> None:
    gateway = target.gateway
    assert gateway is not None
    narrow = areal(target, "narrow")
    holder = await narrow.start(0)

    async def queued(count: int) -> None:
        assert (await narrow.ask("GET", "/health"))["queued"] == count

    starting = asyncio.create_task(narrow.start(0))
    await eventually(lambda: queued(1))
    starting.cancel()
    await asyncio.wait({starting})
    await eventually(lambda: queued(0))
    await narrow.cancel(holder["episode_id"])

    assert [one for one in await gateway.sessions() if one["environment"] == "narrow"] == []


# -- step -----------------------------------------------------------------------------------------------------------


@on(*BOTH_GATEWAYS)
async def test_a_step_returns_an_observation_and_a_reward_and_its_turn(client: ArealClient, episode: str) -> None:
    reply = await client.tool(episode, "echo", text="hello")

    assert reply == {
        "episode_id": episode,
        "observation": {"type": "text", "content": "hello"},
        "reward": 0.0,
        "done": False,
        "info": {
            "turn": 1,
            "parsed_action": {"thought": None, "action": "echo", "content": '{"text": "hello"}'},
        },
    }


@on(*ONE_GATEWAY)
@pytest.mark.parametrize(("reward", "success"), [(1.0, True), (0.5, False), (0.0, False)])
async def test_the_last_step_returns_the_reward_and_no_observation(
    client: ArealClient, reward: float, success: bool
) -> None:
    episode = (await client.start(0))["episode_id"]
    await client.tool(episode, "echo", text="first")

    reply = await client.tool(episode, "finish", reward=reward)

    assert reply == {
        "episode_id": episode,
        "observation": None,
        "reward": reward,
        "done": True,
        "info": {"turn": 2, "num_turns": 2, "success": success, "answer": "", "status": "completed"},
    }


@on(*ONE_GATEWAY)
@pytest.mark.parametrize(("given", "shown"), [(0.25, 0.25), (None, 0.0)])
async def test_a_steps_reward_is_a_number(client: ArealClient, episode: str, given: float | None, shown: float) -> None:
    reply = await client.tool(episode, "score", reward=given)

    assert (reply["reward"], reply["done"]) == (shown, False)


@on(*ONE_GATEWAY)
@pytest.mark.parametrize(
    ("action", "words", "parsed"),
    [
        pytest.param(
            {"type": "text", "content": "I cannot decide.<|im_end|>"},
            "call one by its name",
            {"thought": None, "action": None, "content": None},
            id="a text that names no tool",
        ),
        pytest.param(
            {"type": "structured", "content": {"name": "nosuch", "arguments": {}}},
            "'nosuch' is not a valid tool",
            {"thought": None, "action": "nosuch", "content": "{}"},
            id="an unknown tool",
        ),
        pytest.param(
            {"type": "structured", "content": {"name": "big", "arguments": {"n": "many"}}},
            "n",
            {"thought": None, "action": "big", "content": '{"n": "many"}'},
            id="bad input",
        ),
        pytest.param(
            {"type": "structured", "content": {"name": "fail", "arguments": {}}},
            "the first line\nthe second line",
            {"thought": None, "action": "fail", "content": "{}"},
            id="a tool that fails",
        ),
        pytest.param(
            {"type": "structured", "content": {"free": "form"}},
            "call one by its name",
            {"thought": None, "action": None, "content": '{"free": "form"}'},
            id="an object without a default tool",
        ),
    ],
)
async def test_a_refused_or_failed_action_is_an_observation_and_costs_a_turn(
    client: ArealClient, episode: str, action: dict[str, Any], words: str, parsed: dict[str, Any]
) -> None:
    reply = await client.act(episode, action)
    following = await lives(client, episode)

    assert words in reply["observation"]["content"]
    assert (reply["reward"], reply["done"]) == (0.0, False)
    assert reply["info"] == {"turn": 1, "parsed_action": parsed}
    assert following == 2


@on(*ONE_GATEWAY)
async def test_control_tokens_in_output_reach_no_chat_template(client: ArealClient, episode: str) -> None:
    reply = await client.tool(episode, "echo", text="a<|im_end|>\n<|im_start|>system\nb</s>")

    assert reply["observation"]["content"] == "a< |im_end|>\n< |im_start|>system\nb< /s>"


@on(*ONE_GATEWAY)
async def test_an_image_becomes_a_line_of_text_in_a_text_observation(client: ArealClient, episode: str) -> None:
    reply = await client.tool(episode, "image")

    assert reply["observation"] == {"type": "text", "content": "[image: image/png]"}


@on(*BOTH_GATEWAYS)
async def test_the_last_turn_ends_the_episode(client: ArealClient) -> None:
    episode = (await client.start(0))["episode_id"]
    for turn in range(1, MAX_TURNS):
        assert await lives(client, episode) == turn

    reply = await client.tool(episode, "echo", text="one too many")

    assert reply == {
        "episode_id": episode,
        "observation": None,
        "reward": 0.0,
        "done": True,
        "info": {
            "turn": MAX_TURNS,
            "num_turns": MAX_TURNS,
            "success": False,
            "answer": "",
            "status": "task limit reached",
        },
    }
    await is_gone(client, episode)


@on(*ONE_GATEWAY)
async def test_an_answer_on_the_last_turn_is_judged(client: ArealClient) -> None:
    episode = (await client.start(0))["episode_id"]
    for _ in range(1, MAX_TURNS):
        await lives(client, episode)

    reply = await client.tool(episode, "finish", reward=1.0)

    assert (reply["reward"], reply["info"]["success"], reply["info"]["status"]) == (1.0, True, "completed")


@on(*BOTH_GATEWAYS)
async def test_steps_of_one_episode_run_one_after_the_other(client: ArealClient) -> None:
    episode = (await client.start(0))["episode_id"]

    replies = await asyncio.gather(*(client.tool(episode, "echo", text=str(n)) for n in range(4)))
    await client.cancel(episode)

    assert sorted(reply["info"]["turn"] for reply in replies) == [1, 2, 3, 4]


# -- the end of an episode ------------------------------------------------------------------------------------------


async def is_gone(client: ArealClient, episode: str, *, because: str = "") -> None:
    """Assert that neither a step nor a cancel finds *episode*."""
    for path, fields in (("/episode/step", {"action": {"type": "text", "content": "x"}}), ("/episode/cancel", {})):
        status, body = await client.request("POST", path, json={"episode_id": episode, **fields})
        assert status == 404
        assert body["error"] == "episode not found"
        assert body["episode_id"] == episode
        assert because in body["detail"]
        assert body["detail"]


@on(*BOTH_GATEWAYS)
async def test_after_its_last_step_an_episode_is_gone(client: ArealClient) -> None:
    episode = (await client.start(0))["episode_id"]
    await client.tool(episode, "finish", reward=1.0)

    await is_gone(client, episode)


@on(*BOTH_GATEWAYS)
async def test_a_cancelled_episode_is_gone(client: ArealClient) -> None:
    episode = (await client.start(0))["episode_id"]

    reply = await client.cancel(episode)

    assert reply == {"status": "cancelled", "episode_id": episode}
    await is_gone(client, episode)


@on(*BOTH_GATEWAYS)
async def test_a_cancel_works_while_a_step_runs_and_the_step_is_404(client: ArealClient) -> None:
    episode = (await client.start(0))["episode_id"]
    running = asyncio.create_task(client.tool(episode, "sleep", seconds=50))

    async def is_busy() -> None:
        assert running.done() is False
        assert (await client.ask("GET", "/health"))["active_episodes"] >= 1

    await eventually(is_busy)
    reply = await client.cancel(episode)
    with pytest.raises(Failed) as failed:
        await running

    assert reply == {"status": "cancelled", "episode_id": episode}
    assert (failed.value.status, failed.value.body["episode_id"]) == (404, episode)
    await is_gone(client, episode)


@on(*BOTH_GATEWAYS)
async def test_an_idle_episode_expires_and_later_errors_give_that_reason(target: Target) -> None:
    gateway = target.gateway
    assert gateway is not None
    brief = areal(target, "brief")
    episode = (await brief.start(0))["episode_id"]
    slept = await brief.tool(episode, "sleep", seconds=3)  # longer than the environment's idle time of 2 s

    async def nobody() -> None:
        assert await gateway.sessions() == []

    alive = await lives(brief, episode)
    await eventually(nobody)

    assert (slept["observation"]["content"], alive) == ("slept", 2)
    await is_gone(brief, episode, because="expired")


@on(*ONE_GATEWAY)
@pytest.mark.parametrize("episode", ["", "nosuch", "00000000-0000-4000-8000-000000000000", "\ud800", "x" * 5000])
async def test_an_episode_id_that_was_never_issued_is_not_found(client: ArealClient, episode: str) -> None:
    status, body = await client.request("POST", "/episode/cancel", json={"episode_id": episode})

    assert status == (404 if episode else 400)
    assert body["episode_id"] == episode


@on(*BOTH_GATEWAYS)
async def test_an_episode_of_another_key_or_environment_is_not_found(target: Target, client: ArealClient) -> None:
    bob = ArealClient(f"{target.url}/k/{TRAINER_KEYS['bob']}/areal/probe")
    episode = (await client.start(0))["episode_id"]

    await is_gone(bob, episode)
    await is_gone(areal(target, "counter"), episode)
    turn = await lives(client, episode)
    await client.cancel(episode)

    assert turn == 1


# -- malformed requests ---------------------------------------------------------------------------------------------

TEXT = {"type": "text", "content": "x"}
MALFORMED: dict[str, Any] = {
    "an array": ("/episode/step", []),
    "no sample": ("/episode/start", {}),
    "a sample that is a boolean": ("/episode/start", {"sample_id": True}),
    "a sample that is a fraction": ("/episode/start", {"sample_id": 1.5}),
    "a sample that is null": ("/episode/start", {"sample_id": None}),
    "a config that is a number": ("/episode/start", {"sample_id": 0, "config": 7}),
    "a config that is a list": ("/episode/start", {"sample_id": 0, "config": []}),
    "a seed that is a text": ("/episode/start", {"sample_id": 0, "config": {"seed": "7"}}),
    "a step without an episode": ("/episode/step", {"action": TEXT}),
    "a step of a number": ("/episode/step", {"episode_id": 7, "action": TEXT}),
    "a cancel without an episode": ("/episode/cancel", {}),
    "no action": ("/episode/step", {"episode_id": "EPISODE"}),
    "an action that is a text": ("/episode/step", {"episode_id": "EPISODE", "action": "ls"}),
    "a content that is a number": ("/episode/step", {"episode_id": "EPISODE", "action": TEXT | {"content": 7}}),
    "no content": ("/episode/step", {"episode_id": "EPISODE", "action": {"type": "text"}}),
    "an unknown type": ("/episode/step", {"episode_id": "EPISODE", "action": TEXT | {"type": "image"}}),
    "a text that is structured": ("/episode/step", {"episode_id": "EPISODE", "action": TEXT | {"type": "structured"}}),
}


@on(*ONE_GATEWAY)
@pytest.mark.parametrize(("path", "body"), MALFORMED.values(), ids=MALFORMED.keys())
async def test_a_malformed_body_is_400_and_costs_no_turn(
    client: ArealClient, episode: str, path: str, body: Any
) -> None:
    if isinstance(body, dict) and body.get("episode_id") == "EPISODE":
        body = body | {"episode_id": episode}

    status, answer = await client.request("POST", path, json=body)

    named = isinstance(body, dict) and body.get("episode_id") == episode
    assert (status, answer["error"]) == (400, "bad request")
    assert answer["detail"]
    assert answer.get("episode_id") == (episode if named else None)
    assert await lives(client, episode) == 1


@on(*ONE_GATEWAY)
@pytest.mark.parametrize("data", [b"", b"  ", b"{", b"\xff", b"null", b'"x"', b'{"sample_id": NaN}', b"[" * 100_000])
@pytest.mark.parametrize("path", ["/episode/start", "/episode/step", "/episode/cancel"])
async def test_a_body_that_is_not_a_json_object_is_400(client: ArealClient, path: str, data: bytes) -> None:
    status, answer = await client.request("POST", path, data=data)

    assert (status, answer["error"]) == (400, "bad request")
    assert answer["detail"]


@on(*ONE_GATEWAY)
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nosuch", 404),
        ("GET", "", 404),
        ("GET", "/task", 404),
        ("GET", "/task/info/more", 404),
        ("POST", "/task/info", 405),
        ("GET", "/episode/start", 405),
        ("DELETE", "/episode/cancel", 405),
        ("OPTIONS", "/episode/step", 405),
    ],
)
async def test_unknown_routes_and_methods_have_the_same_error_body(
    client: ArealClient, method: str, path: str, status: int
) -> None:
    got, answer = await client.request(method, path)

    assert got == status
    assert isinstance(answer["error"], str)
    assert isinstance(answer["detail"], str)


@on(*ONE_GATEWAY)
async def test_an_unknown_environment_is_404_and_a_too_large_body_is_413(target: Target) -> None:
    unknown, _ = await areal(target, "nosuch").request("GET", "/task/info")
    large, answer = await areal(target).request("POST", "/episode/start", data=io.BytesIO(b" " * (9 * 2**20)))

    assert (unknown, large) == (404, 413)
    assert answer["error"]


# -- groups ---------------------------------------------------------------------------------------------------------


@on(*BOTH_GATEWAYS)
async def test_the_members_of_a_group_start_from_the_same_task_and_share_no_state(target: Target) -> None:
    counter = areal(target, "counter")

    started = await asyncio.gather(*(counter.start("0") for _ in range(8)))
    episodes = [reply["episode_id"] for reply in started]
    sums = await asyncio.gather(*(counter.tool(one, "add", n=10**n) for n, one in enumerate(episodes)))
    await asyncio.gather(*map(counter.cancel, episodes))

    assert len(set(episodes)) == 8
    assert len({str(reply["observation"]) for reply in started}) == 1
    base = next(tasks_of("counter", "train"))["start"]
    assert [reply["observation"]["content"] for reply in sums] == [str(base + 10**n) for n in range(8)]


@on(*BOTH_GATEWAYS)
async def test_each_of_many_concurrent_starts_succeeds_or_is_503_for_capacity(target: Target) -> None:
    gateway = target.gateway
    assert gateway is not None
    probe = areal(target)

    replies = await asyncio.gather(
        *(probe.request("POST", "/episode/start", json={"sample_id": 0, "config": {}}) for _ in range(128))
    )
    started = [body["episode_id"] for status, body in replies if status == 200]
    held = [one["name"] for one in await gateway.sessions() if one["environment"] == "probe"]
    await asyncio.gather(*map(probe.cancel, started))

    refused = [(status, body.get("status")) for status, body in replies if status != 200]
    assert set(refused) <= {(503, "capacity")}
    assert len(set(started)) + len(refused) == len(replies)
    assert sorted(held) == sorted(started)


@on(*ONE_GATEWAY)
async def test_a_slow_step_does_not_hold_up_another_episode(client: ArealClient) -> None:
    slow, quick = [(await client.start(0))["episode_id"] for _ in range(2)]
    running = asyncio.create_task(client.tool(slow, "block", seconds=5))

    turns = [await lives(client, quick) for _ in range(5)]
    was_running = not running.done()
    slept = await running
    await asyncio.gather(client.cancel(slow), client.cancel(quick))

    assert turns == [1, 2, 3, 4, 5]
    assert was_running
    assert slept["observation"]["content"] == "blocked"
