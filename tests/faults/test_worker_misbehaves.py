"""A worker exhausts its memory, processes, log, disk or time: other workers go on, and the error names the cause."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from tests.fakes.eventually import eventually
from tests.faults.invariants import at_rest
from tests.faults.players import Ended, counted, delete_all, opened, step, workers_of
from tests.faults.world import SCALE, World, environment_toml, running
from tests.wire.raw import RawEpisode

CALL_S = 4
"""Seconds of the longest call of the environment whose tools misbehave."""
HANGS = ["hang", *(["hang_server"] if SCALE > 1 else [])]
"""Tools that hang. A server that hangs completely is detected after 45 s of silence, so the short form omits it."""
LOG_MAX_BYTES = 16 * 2**20
"""More bytes than any worker's log may take."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A world with the environment that misbehaves, one session per worker, and a neighbour of the same image."""
    limits = {"memory_mib": 96, "pids": 64, "tmp_mib": 8}
    timeouts = {"call_s": CALL_S, "close_s": 3}
    # A worker serves one session: leftovers (processes, files) of one must not be the next one's cause of death.
    pool = {"slots": 2, "max_workers": 3, "max_uses": 1}
    bad = environment_toml("bad", limits=limits, timeouts=timeouts, pool=pool)
    # /tmp may take all of its memory. /dev/shm, which no setting enlarges, may not.
    roomy = environment_toml("roomy", limits=limits | {"tmp_mib": 96}, timeouts=timeouts, pool=pool)
    with running(environment_toml("good"), bad, roomy) as world:
        yield world


class Neighbour:
    """Steps continuously in another worker, and asserts that no step is lost or unreasonably slow."""

    def __init__(self, episode: RawEpisode) -> None:
        self._episode = episode
        self._task: asyncio.Task[None] | None = None
        self.steps = 0

    async def __aenter__(self) -> Neighbour:
        self._task = asyncio.create_task(self._play())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    async def _play(self) -> None:
        while True:
            count = await counted(self._episode)
            self.steps += 1
            assert count == self.steps
            await asyncio.sleep(0.05)


async def fault(
    world: World, tool: str, *, environment: str = "bad", **input: object
) -> tuple[Ended, httpx.Response, str]:
    """Let one session misbehave while a neighbour plays.

    Returns the outcome of its step, the answer to its next request, and its worker.
    """
    async with world.http() as http:
        good, bad = await opened(http, "good"), await opened(http, environment)
        (worker,) = workers_of(await world.sessions(), [bad])
        neighbour = Neighbour(good)
        async with neighbour:
            before = await _more(neighbour, 0)
            ended = await step(bad, tool, input)
            later = await bad.ask("count")
            await _more(neighbour, before)
        await delete_all([good, bad])
        return ended, later, worker


async def _more(neighbour: Neighbour, than: int) -> int:
    async def more() -> int:
        assert neighbour.steps > than
        return neighbour.steps

    return await eventually(more)


async def test_a_worker_that_exhausts_its_memory_ends_with_out_of_memory_and_its_neighbour_goes_on(
    world: World,
) -> None:
    ended, later, worker = await fault(world, "eat_memory")

    assert "out_of_memory" in ended.error
    assert later.status_code == 410
    assert "out_of_memory" in later.text
    await world.counts(1, "gateway_sessions_closed_total", environment="bad", reason="out_of_memory")
    await world.counts(1, "gateway_calls_total", environment="bad", outcome="out_of_memory")
    assert [line for line in world.log.splitlines() if worker in line and "out_of_memory" in line]
    await at_rest(world)


async def test_a_fork_bomb_meets_its_limit_and_its_neighbour_goes_on(world: World) -> None:
    ended, _, _ = await fault(world, "fork_bomb")

    # The kernel refuses the tool another process, and the agent sees this error.
    assert "temporarily unavailable" in ended.body
    assert '"finished":true' not in ended.body.replace(" ", "")
    assert '"reward":' not in ended.body.replace(" ", "") or '"reward":null' in ended.body.replace(" ", "")
    await at_rest(world)


async def test_a_flooded_log_stays_below_its_limit(world: World) -> None:
    async with world.http() as http:
        bad = await opened(http, "bad")
        (worker,) = workers_of(await world.sessions(), [bad])
        ended = await step(bad, "flood_log", {"mib": 64})
        kept = await asyncio.to_thread(lambda: len(world.container(worker).logs()))
        following = await step(bad, "count")
        await delete_all([bad])

    assert kept < LOG_MAX_BYTES
    # The call ended or ran into its timeout. Either way only its own session is affected.
    assert ended.outcome.text == "1" if "error" not in ended.body else "timeout" in ended.error
    assert following.status in (200, 410)
    await at_rest(world)


@pytest.mark.parametrize(("environment", "where"), [("bad", "/tmp"), ("bad", "/dev/shm"), ("roomy", "/dev/shm")])
async def test_a_full_disk_is_an_error_of_its_step_and_the_session_goes_on(
    world: World, environment: str, where: str
) -> None:
    ended, later, _ = await fault(world, "fill_disk", environment=environment, where=where)

    assert "No space left on device" in ended.body
    assert later.status_code == 200
    assert '"finished":true' not in ended.body.replace(" ", "")
    await at_rest(world)


@pytest.mark.parametrize("tool", HANGS)
async def test_a_tool_that_hangs_times_out_and_gives_no_reward(world: World, tool: str) -> None:
    before = await world.metric("gateway_calls_total", environment="bad", outcome="timeout")
    ended, later, _ = await fault(world, tool)

    assert "timeout" in ended.error
    # The hanging tool blocks the next step, which gets the same timeout, or a 410 because the session is over.
    assert "reward" not in later.text
    assert (later.status_code, "timeout" in later.text) in ((200, True), (410, True)), later.text
    await eventually(lambda: _timed_out(world, before))
    await at_rest(world)


async def _timed_out(world: World, before: float) -> None:
    assert await world.metric("gateway_calls_total", environment="bad", outcome="timeout") > before
