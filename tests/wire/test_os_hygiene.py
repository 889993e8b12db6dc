"""Clients that disconnect, cancel or are slow, and workers that die: no reward is invented, and nothing is left."""

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from tests.fakes.eventually import eventually
from tests.wire import os_containers
from tests.wire.areal_client import ArealClient, Failed
from tests.wire.catalog import STACK
from tests.wire.gateways import Gateway
from tests.wire.os_catalog import counting, serving_os
from tests.wire.os_episodes import Play, bash, playing

pytestmark = [pytest.mark.wire, pytest.mark.docker, pytest.mark.redis, pytest.mark.needs("image:os")]

IDLE_S = 4.0
"""Replaces the idle time of 300 s in a gateway whose sessions must expire."""
TASKS = [
    counting("count"),
    counting("slow", init=["mkdir /srv/data; touch /srv/data/{a,b,c}", "sleep 9.75"], live_init=True),
]


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with serving_os(STACK, tasks=TASKS) as gateway:
        yield gateway


@pytest.fixture
def client(gateway: Gateway) -> ArealClient:
    return ArealClient(gateway.url)


async def runs(gateway: Gateway, command: str) -> None:
    """Assert that *command* is the command line of a process in a worker."""
    running = [line for lines in (await os_containers.processes(gateway)).values() for line in lines]
    assert command in running, running


async def hang_up(request: "asyncio.Task[object]") -> None:
    """Close the connection on which *request* waits."""
    request.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await request


async def test_a_client_that_disconnects_during_start_leaves_no_session_or_process(
    gateway: Gateway, client: ArealClient
) -> None:
    starting = asyncio.create_task(client.start("slow"))
    await eventually(lambda: runs(gateway, "sleep 9.75"))

    await hang_up(starting)

    await eventually(lambda: os_containers.nothing_is_left(gateway))


async def test_an_episode_goes_on_after_its_client_disconnects_in_mid_step(
    gateway: Gateway, client: ArealClient
) -> None:
    async with playing(client, "count") as play:
        stepping = asyncio.create_task(play.run("sleep 4.25; echo through > /tmp/done"))
        await eventually(lambda: runs(gateway, "sleep 4.25"))
        await hang_up(stepping)
        seen = await play.run("cat /tmp/done")
        verdict = await play.answer("3")

    assert seen == "through"
    assert verdict.reward == 1.0
    await eventually(lambda: os_containers.nothing_is_left(gateway))


async def test_a_cancel_in_mid_step_kills_the_command_and_the_step_is_404(
    gateway: Gateway, client: ArealClient
) -> None:
    play = Play(client, await client.start("count"))
    stepping = asyncio.create_task(play.say(bash("sleep 25.5")))
    await eventually(lambda: runs(gateway, "sleep 25.5"))

    cancelled = await client.cancel(play.id)
    with pytest.raises(Failed) as gone:
        await stepping
    with pytest.raises(Failed) as again:
        await client.cancel(play.id)

    assert cancelled == {"status": "cancelled", "episode_id": play.id}
    assert (gone.value.status, again.value.status) == (404, 404)
    assert "reward" not in gone.value.body
    await eventually(lambda: os_containers.nothing_is_left(gateway))


async def test_a_worker_killed_in_mid_step_fails_each_of_its_episodes_and_never_earns_a_reward(
    gateway: Gateway, client: ArealClient
) -> None:
    plays = [Play(client, await client.start("count")) for _ in range(4)]
    (worker,) = {session["worker"] for session in await gateway.sessions()}
    said = [bash("sleep 27.5"), bash("sleep 28.5"), bash("sleep 29.5")]
    stepping = [asyncio.create_task(play.say(text)) for play, text in zip(plays, said, strict=False)]
    for command in ("sleep 27.5", "sleep 28.5", "sleep 29.5"):
        await eventually(lambda command=command: runs(gateway, command))  # type: ignore[misc]  # mypy has no type for this default

    await os_containers.kill(gateway, worker)
    died = await asyncio.gather(*stepping, return_exceptions=True)
    async with playing(client, "count") as following:
        verdict = await following.answer("3")
    with pytest.raises(Failed) as between:
        await plays[-1].answer("3")

    for failed in died:
        assert isinstance(failed, Failed), failed
        assert (failed.status, failed.body["status"]) == (500, "environment_lost"), failed
        assert "reward" not in failed.body
    assert between.value.status in (404, 500)
    assert between.value.body["status"] == "environment_lost"
    assert "reward" not in between.value.body
    assert verdict.reward == 1.0
    await eventually(lambda: os_containers.nothing_is_left(gateway))


async def test_an_idle_episode_expires_with_its_processes_and_an_episode_with_a_long_step_does_not() -> None:
    with serving_os(STACK, tasks=TASKS, changes={"idle_s = 300": f"idle_s = {IDLE_S:g}"}) as gateway:
        client = ArealClient(gateway.url)
        async with playing(client, "count") as busy:
            left = Play(client, await client.start("count"))
            await left.run("sleep 3600 &")
            seen = await busy.run(f"sleep {IDLE_S * 2.5:g}; echo through")
            verdict = await busy.answer("3")
        await eventually(lambda: os_containers.nothing_is_left(gateway))
        with pytest.raises(Failed) as gone:
            await left.answer("3")
        health = await client.ask("GET", "/health")

    assert seen == "through"
    assert verdict.reward == 1.0
    assert (gone.value.status, gone.value.body["error"]) == (404, "episode not found")
    assert "expired" in gone.value.body["detail"]
    assert (health["expired"], health["leaked"]) == (1, 0)
