"""A worker that dies in mid-call: an immediate typed error, no second run, and no other session is affected."""

import asyncio
import os
import signal

import aiohttp
import httpx
import pytest
from openreward.api.environments import SessionTerminatedError

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually
from tests.wire.raw import RawEpisode, create, episode, new_sid, parse
from tests.wire.sdks import Client, Sdk, text
from tests.wire.targets import BOTH_GATEWAYS, Folder, Target, on, runs_once, token, with_clients

pytestmark = pytest.mark.wire


async def worker_of(target: Target, sid: str) -> str:
    """Return the worker that serves the session *sid*."""
    assert target.gateway is not None
    (session,) = [each for each in await target.gateway.sessions() if each["name"] == sid]
    return str(session["worker"])


def kill(target: Target, worker: str, pid: str) -> None:
    """Kill the worker without warning. *pid* is the process id that a local worker reported."""
    if target.stack is not None:
        target.stack.containers.kill(worker)
    else:
        os.kill(int(pid), signal.SIGKILL)


@with_clients(*BOTH_GATEWAYS)
async def test_a_tool_whose_worker_is_killed_in_mid_call_runs_at_most_once(
    target: Target, client: Client, sdk: Sdk, folder: Folder
) -> None:
    word = token()
    task = sdk.task("probe", {"folder": folder.inside})

    async with client.environment("probe").session(task=task) as session, asyncio.timeout(HANG_S):
        pid = text(await session.call_tool("pid"))
        worker = await worker_of(target, session.sid)
        call = asyncio.create_task(session.call_tool("hold", {"token": word}))
        await eventually(lambda: runs_once(folder, word))
        kill(target, worker, pid)
        with pytest.raises((sdk.failed, SessionTerminatedError)):
            await call

    assert folder.runs(word) <= 1  # a container's own ledger is lost with it


@with_clients(*BOTH_GATEWAYS)
async def test_a_session_is_gone_after_the_death_of_its_worker_and_the_next_session_plays(
    target: Target, client: Client, sdk: Sdk, folder: Folder
) -> None:
    word = token()
    probe = client.environment("probe")
    task = sdk.task("probe", {"folder": folder.inside})

    async with asyncio.timeout(HANG_S):
        async with probe.session(task=task) as session:
            pid = text(await session.call_tool("pid"))
            kill(target, await worker_of(target, session.sid), pid)
            with pytest.raises((aiohttp.ClientResponseError, SessionTerminatedError, RuntimeError)) as caught:
                await session.call_tool("count", {"token": word})
        async with probe.session(task=task) as following:
            counted = text(await following.call_tool("count", {"token": token()}))

    assert "410" in str(caught.value) or "gone" in str(caught.value) or "worker" in str(caught.value)
    assert counted == "1"
    assert folder.runs(word) == 0


@on(*BOTH_GATEWAYS)
async def test_a_call_whose_worker_dies_ends_with_an_error_event(
    target: Target, http: httpx.AsyncClient, folder: Folder
) -> None:
    word = token()

    async with (
        episode(http, {"folder": folder.inside}) as opened,
        episode(http, {"start": 1}, environment="counter") as elsewhere,
        asyncio.timeout(HANG_S),
    ):
        pid = (await opened.call("pid")).text
        worker = await worker_of(target, opened.sid)
        async with opened.streaming("hold", {"token": word}) as stream:
            await eventually(lambda: runs_once(folder, word))
            kill(target, worker, pid)
            outcome = await stream.outcome()
        added = await elsewhere.call("add", {"n": 1})
        await eventually(lambda: lost(target, worker))
        prompt, again = await opened.get("prompt"), await opened.ask("pid")

    assert [event.name for event in outcome.events] == ["task_id", "error"]
    assert added.text == "2"
    assert (prompt.status_code, again.status_code) == (410, 410)
    assert "worker_lost" in prompt.json()["detail"]


@on(*BOTH_GATEWAYS)
async def test_no_status_makes_a_client_repeat_a_call_that_may_have_run(
    target: Target, http: httpx.AsyncClient, folder: Folder
) -> None:
    words = [token() for _ in range(16)]

    async with episode(http, {"folder": folder.inside}) as opened, asyncio.timeout(HANG_S):
        pid = (await opened.call("pid")).text
        worker = await worker_of(target, opened.sid)
        calls = [asyncio.create_task(opened.ask("hold", {"token": word})) for word in words]
        await eventually(lambda: runs_once(folder, words[0]))
        kill(target, worker, pid)
        answers = await asyncio.gather(*calls)

    for answer in answers:
        # Both clients repeat a call that gets a status of 500 or more; 503 means that nothing was sent.
        assert answer.status_code in (200, 410, 503), answer.text
        if answer.status_code == 200:
            assert parse(answer.text).error


async def lost(target: Target, worker: str) -> None:
    assert target.gateway is not None
    assert worker not in [each["id"] for each in await target.gateway.workers()]


@on(*BOTH_GATEWAYS)
async def test_creates_find_another_worker_after_the_death_of_a_worker(target: Target, http: httpx.AsyncClient) -> None:
    async with episode(http) as opened:
        pid = (await opened.call("pid")).text
        kill(target, await worker_of(target, opened.sid), pid)
        sids = [new_sid() for _ in range(8)]
        created = await asyncio.gather(*(create(http, sid, env_name="probe", task_spec={}) for sid in sids))
        # A slot may have been assigned on the dying worker. The create then fails, and the trainer tries again.
        later = [new_sid() for _ in range(8)]
        await eventually(lambda: lost_all_of(target, pid, http))
        created_later = await asyncio.gather(*(create(http, sid, env_name="probe", task_spec={}) for sid in later))
        calls = await asyncio.gather(*(RawEpisode(http, sid, "probe").call("pid") for sid in later))
        for sid in sids + later:
            await http.post("/delete", headers={"X-Session-ID": sid})

    assert {response.status_code for response in created} <= {200, 410, 429, 500, 502, 503}
    assert {response.status_code for response in created_later} == {200}
    assert len(calls) == 8


async def lost_all_of(target: Target, pid: str, http: httpx.AsyncClient) -> None:
    """Assert that new sessions are served by another process than *pid*, or by another container."""
    async with episode(http) as trial:
        assert target.stack is not None or (await trial.call("pid")).text != pid
