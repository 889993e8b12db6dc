"""An environment whose workers never get ready: its breaker opens with the reason, and other environments go on."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from functools import partial

import httpx
import pytest

from tests.fakes.eventually import eventually
from tests.faults.invariants import at_rest, nothing_left
from tests.faults.players import counted, delete_all, opened
from tests.faults.world import IMAGE, World, environment_toml, running
from tests.wire.raw import create, new_sid

POOL = {"slots": 4, "max_workers": 2}
START_S = 3
MENDED = "env-gateway/faults-mended"

BROKEN = {
    "absent": environment_toml("absent", image="env-gateway/no-such-image", pool=POOL),
    "crash": environment_toml("crash", variables={"MODE": "crash"}, pool=POOL),
    "silent": environment_toml("silent", variables={"MODE": "silent"}, pool=POOL, timeouts={"start_s": START_S}),
    "port": environment_toml("port", server={"port": 9999}, pool=POOL, timeouts={"start_s": START_S}),
}
SAID = {
    "absent": ("no image env-gateway/no-such-image",),
    "crash": ("cannot load the weights", "unruly begins"),
    "silent": ("not ready within 3 s", "still downloading"),
    "port": ("not ready within 3 s", "unruly begins"),
}
"""Texts that the error must contain: the cause, and the end of the log where there is one."""
OUTCOME = {"absent": "failed", "crash": "failed", "silent": "timeout", "port": "timeout"}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    healthy = environment_toml("healthy", pool=POOL)
    with running(healthy, *BROKEN.values()) as world:
        yield world


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with world.http() as http:
        yield http


@pytest.mark.parametrize("broken", BROKEN)
async def test_a_worker_that_never_gets_ready_opens_the_breaker_with_the_reason(
    world: World, http: httpx.AsyncClient, broken: str
) -> None:
    episode = await opened(http, "healthy")
    together = [asyncio.create_task(_try(http, broken)) for _ in range(5)]
    meanwhile = await counted(episode)
    refused = [await answer for answer in together]
    await eventually(lambda: _breaker_is_open(world, http, broken))
    tries = len(world.events.of("create", environment=broken))
    at_once = [await _try(http, broken) for _ in range(10)]
    afterwards = await counted(episode)
    await delete_all([episode])

    for answer in refused + at_once:
        assert answer.status_code == 503, answer.text
        assert int(answer.headers["retry-after"]) >= 1
        assert all(words in answer.json()["detail"] for words in SAID[broken]), answer.text
        assert "reward" not in answer.text
    # A create starts no worker while the breaker is open. The pool's own next trial may.
    assert len(world.events.of("create", environment=broken)) <= tries + 1
    assert (meanwhile, afterwards) == (1, 2)
    assert await world.metric("gateway_worker_starts_total", environment=broken, outcome=OUTCOME[broken]) >= 1
    assert f"worker_start_failed environment={broken}" in world.log
    await at_rest(world)


async def test_of_two_replicas_one_counts_each_start_of_a_worker_that_never_gets_ready() -> None:
    silent = environment_toml(
        "silent", variables={"MODE": "silent"}, pool={"slots": 4, "max_workers": 1}, timeouts={"start_s": START_S}
    )
    with running(silent, replicas=2) as world:
        async with world.http(0) as one, world.http(1) as other:
            refused = await asyncio.gather(*(_try(http, "silent") for http in (one, other, one, other)))
            for http in (one, other):
                await eventually(partial(_breaker_is_open, world, http, "silent"))
            refused += [await _try(http, "silent") for http in (one, other)]
        failures = re.findall(r"worker_start_failed environment=silent worker=(\w+) failures=(\d+)", world.log)
        lost = await world.metric("gateway_workers_lost_total", environment="silent")
        await at_rest(world)

        assert "worker_lost environment=" not in world.log

    for answer in refused:
        assert answer.status_code == 503, answer.text
        assert all(words in answer.json()["detail"] for words in SAID["silent"]), answer.text
    assert len(failures) >= 2
    assert [int(count) for _, count in failures] == list(range(1, len(failures) + 1))
    assert len({worker for worker, _ in failures}) == len(failures)
    assert lost == 0


async def test_a_repaired_image_closes_the_breaker() -> None:
    name = f"{MENDED}-{new_sid()[:8]}"
    with running(environment_toml("mended", image=name, pool=POOL)) as world:
        try:
            _make_crash(world, name)
            async with world.http() as http:
                refused = await _try(http, "mended")
                await eventually(lambda: _breaker_is_open(world, http, "mended"))
                world.engine.images.get(IMAGE).tag(name)
                await eventually(lambda: _is_served(http, "mended"))
                episode = await opened(http, "mended")
                count = await counted(episode)
                await delete_all([episode])
            await at_rest(world)
            # The creates of this time count as demand for slots. A restarted gateway does not know of them.
            assert world.gateway.stop() == 0
            world.gateway.restart()
            await nothing_left(world)
        finally:
            world.engine.images.remove(name, force=True)

    assert refused.status_code == 503
    assert "cannot load the weights" in refused.json()["detail"]
    assert count == 1


async def _try(http: httpx.AsyncClient, environment: str) -> httpx.Response:
    return await create(http, new_sid(), env_name=environment, task_spec={})


async def _breaker_is_open(world: World, http: httpx.AsyncClient, environment: str) -> None:
    """Assert that a create is refused without starting a worker."""
    tries = len(world.events.of("create", environment=environment))
    answer = await _try(http, environment)
    assert answer.status_code == 503
    assert len(world.events.of("create", environment=environment)) == tries


async def _is_served(http: httpx.AsyncClient, environment: str) -> None:
    sid = new_sid()
    answer = await create(http, sid, env_name=environment, task_spec={})
    assert answer.status_code == 200, answer.text
    await http.post("/delete", headers={"X-Session-ID": sid})


def _make_crash(world: World, name: str) -> None:
    """Build an image of that name whose server ends immediately."""
    made = world.engine.containers.create(IMAGE, network_disabled=True)
    try:
        made.commit(repository=name, changes=["ENV MODE=crash", 'CMD ["python3", "server.py"]'])
    finally:
        made.remove(force=True)
