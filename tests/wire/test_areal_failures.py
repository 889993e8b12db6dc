"""Failures over AReaL's API: a dead worker is an error and never a reward, and a restart keeps the count of turns."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from tests.wire.areal_client import ArealClient, Failed
from tests.wire.gateways import TRAINER_KEYS, Gateway
from tests.wire.stack import Stack
from tests.wire.targets import BOTH_GATEWAYS, Target, on

pytestmark = pytest.mark.wire


def areal(url: str, environment: str = "probe") -> ArealClient:
    """Return a client with alice's key in its path."""
    return ArealClient(f"{url}/k/{TRAINER_KEYS['alice']}/areal/{environment}")


async def turn_of(client: ArealClient, episode: str) -> int:
    """Take one more turn and return its number."""
    turn: int = (await client.tool(episode, "echo", text="x"))["info"]["turn"]
    return turn


@on(*BOTH_GATEWAYS)
async def test_a_worker_killed_in_mid_step_is_500_and_its_episode_is_gone(target: Target) -> None:
    gateway = target.gateway
    assert gateway is not None
    client = areal(target.url)
    episode = (await client.start(0))["episode_id"]
    pid = (await client.tool(episode, "pid"))["observation"]["content"]
    (worker,) = {one["worker"] for one in await gateway.sessions() if one["name"] == episode}
    running = asyncio.create_task(client.tool(episode, "block", seconds=60))
    await turn_of_another(client)  # several requests in sequence: afterwards the step above has reached its worker
    if target.stack is not None:
        target.stack.containers.kill(worker)
    else:
        os.kill(int(pid), signal.SIGKILL)

    with pytest.raises(Failed) as died:
        await running
    with pytest.raises(Failed) as after:
        await turn_of(client, episode)
    following = await client.start(0)
    first = await turn_of(client, following["episode_id"])
    await client.cancel(following["episode_id"])

    assert (died.value.status, died.value.body["status"]) == (500, "environment_lost")
    assert died.value.body["episode_id"] == episode
    assert "reward" not in died.value.body
    assert (after.value.status, after.value.body["error"]) == (404, "episode not found")
    assert after.value.body["status"] == "environment_lost"
    assert first == 1


async def turn_of_another(client: ArealClient) -> None:
    """Play a whole episode next to the tests' other episodes."""
    episode = (await client.start(1))["episode_id"]
    await client.tool(episode, "finish", reward=0.0)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack()
    try:
        stack.start()
        yield stack
    finally:
        stack.close()


@pytest.fixture(scope="module")
def second(stack: Stack) -> Iterator[Gateway]:
    """A second replica."""
    second = stack.replica("second")
    try:
        second.start()
        yield second
    finally:
        second.stop()


@pytest.mark.docker
@pytest.mark.redis
async def test_the_count_of_turns_survives_a_killed_gateway_and_is_the_same_on_every_replica(
    stack: Stack, second: Gateway
) -> None:
    one, other = areal(stack.gateway.url), areal(second.url)
    episode = (await one.start(0))["episode_id"]
    turns = [await turn_of(client, episode) for client in (one, other, one)]

    stack.gateway.kill()
    stack.gateway.restart()
    turns += [await turn_of(client, episode) for client in (one, other)]
    cancelled = await other.cancel(episode)
    with pytest.raises(Failed) as gone:
        await turn_of(one, episode)

    assert turns == [1, 2, 3, 4, 5]
    assert cancelled == {"status": "cancelled", "episode_id": episode}
    assert gone.value.status == 404


@pytest.mark.docker
@pytest.mark.redis
async def test_a_cancel_at_one_replica_ends_a_step_that_runs_at_another(stack: Stack, second: Gateway) -> None:
    one, other = areal(stack.gateway.url), areal(second.url)
    episode = (await one.start(0))["episode_id"]
    running = asyncio.create_task(one.tool(episode, "sleep", seconds=50))
    await turn_of_another(one)
    await other.cancel(episode)
    with pytest.raises(Failed) as gone:
        await running

    assert gone.value.status == 404
