"""A dead worker, a late step or an idle episode on a third-party image: a typed error, and never a fresh episode.

The environments are counters with one worker and one session each. The next client therefore needs the slot that the
previous client left.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from openreward.api.environments import SessionTerminatedError

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually, until
from tests.wire.any.places import EMBEDDED, STACK, Place, on, on_rows
from tests.wire.areal_client import ArealClient, Failed
from tests.wire.openenv.clients import OLDEST, ClientError, Driver, connected
from tests.wire.openenv.frames import Socket, said, socket
from tests.wire.sdks import SDKS

pytestmark = [pytest.mark.wire]

NEW, OLD = "counter-brittle", "counter-brittle-020"
"""The first environment's server keeps sessions when their sockets close. In the second, a session is its socket."""
KILLS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    NEW: ("step", {"op": "kill"}, {"op": "noop"}),
    OLD: ("step", {"op": "kill"}, {"op": "noop"}),
    "ors-sdk": ("crash", {}, {}),
    "areal-guess": ("act", {"content": "Act: crash"}, {"content": "Act: stop"}),
}
"""For each environment: its tool, arguments that kill its worker, and harmless arguments."""
LOST = (aiohttp.ClientResponseError, SessionTerminatedError, RuntimeError)
"""The exceptions by which the two packages report that a session is gone."""


async def lives(ws: Socket) -> None:
    """Assert that a socket still plays an episode after a failure."""
    reset = await ws.reset(seed=2, episode_id="again")
    first = await ws.step(op="inc", by=2)
    state = await ws.state()
    last = await ws.step(op="inc", by=3)
    assert reset["data"]["observation"]["target"] == 5
    assert (first["data"]["observation"]["value"], first["data"]["done"]) == (2, False)
    assert state["data"] == {"episode_id": "again", "step_count": 1}
    assert (last["data"]["reward"], last["data"]["done"]) == (1.0, True)


async def no_sessions(place: Place) -> None:
    assert await place.gateway.sessions() == []


async def nothing_comes(ws: Socket) -> None:
    """Assert that the next request gets its own answer: no unrequested frame arrived."""
    reply = await ws.ask({"type": "nosuch"})
    assert said(reply)[0] == "UNKNOWN_TYPE"


# -- a worker that dies in mid-step ---------------------------------------------------------------------------------


@on_rows("environment", (EMBEDDED, NEW), (EMBEDDED, OLD), (STACK, NEW))
async def test_a_worker_killed_in_mid_step_is_one_error_frame_and_never_a_fresh_episode(
    place: Place, environment: str
) -> None:
    async with socket(place.openenv(environment)) as ws:
        await ws.reset(seed=1)
        await ws.step(op="inc", by=1)
        before = await place.workers(environment)
        died = await ws.step(op="kill")
        refused = [await ws.step(op="inc"), await ws.state(), await ws.step(op="inc")]
        await nothing_comes(ws)
        await lives(ws)
        after = await place.workers(environment)

    assert said(died)[0] == "SESSION_ERROR"
    assert [said(reply)[0] for reply in refused] == ["SESSION_ERROR"] * 3
    assert not before & after


@on_rows(
    "environment sdk",
    (EMBEDDED, NEW, "ors"),
    (EMBEDDED, OLD, "openreward"),
    (EMBEDDED, "ors-sdk", "openreward"),
    (EMBEDDED, "areal-guess", "ors"),
    (STACK, NEW, "openreward"),
    (STACK, "ors-sdk", "ors"),
    (STACK, "areal-guess", "openreward"),
)
async def test_a_worker_killed_in_mid_call_is_an_error_for_an_ors_client(
    place: Place, environment: str, sdk: str
) -> None:
    tool, kill, harmless = KILLS[environment]
    async with SDKS[sdk].connect(place.url, None) as client, asyncio.timeout(HANG_S):
        offered = client.environment(environment)
        async with offered.session(split="train", index=1) as session:
            with pytest.raises((SDKS[sdk].failed, *LOST)) as died:
                await session.call_tool(tool, kill)
            after = await called(place, environment, session.sid, tool, harmless)
        async with offered.session(split="train", index=1) as following:
            prompt = await following.get_prompt()

    assert not isinstance(died.value, SDKS[sdk].refused)
    # Until the gateway notices the death, a call may start and then fail in its stream.
    assert after.status_code in (404, 410) or "event: error" in after.text, after.text
    assert "event: end" not in after.text
    assert prompt


@on_rows("environment text", (EMBEDDED, NEW, "kill"), (EMBEDDED, "areal-guess", "Act: crash"), (STACK, OLD, "kill"))
async def test_a_worker_killed_in_mid_step_is_500_for_an_areal_client(
    place: Place, environment: str, text: str
) -> None:
    client = ArealClient(f"{place.url}/areal/{environment}")
    async with asyncio.timeout(HANG_S):
        episode = (await client.start(1))["episode_id"]
        with pytest.raises(Failed) as died:
            await client.step(episode, text)
        with pytest.raises(Failed) as after:
            await client.step(episode, text)
        again = await client.start(1)
        await client.cancel(again["episode_id"])

    assert (died.value.status, died.value.body["status"]) == (500, "environment_lost")
    assert after.value.status == 404
    assert again["observation"]["content"]


async def called(place: Place, environment: str, sid: str, tool: str, arguments: dict[str, Any]) -> httpx.Response:
    """Call a tool with a plain HTTP request: one of the clients sends no call in a session that is gone."""
    async with httpx.AsyncClient(base_url=place.url, verify=False, trust_env=False, timeout=HANG_S) as http:
        body = {"name": tool, "input": arguments}
        return await http.post(f"/{environment}/call", json=body, headers={"X-Session-ID": sid})


# -- time -----------------------------------------------------------------------------------------------------------


@on(EMBEDDED, STACK)
async def test_a_step_beyond_its_deadline_ends_the_episode_and_its_worker(place: Place) -> None:
    async with socket(place.openenv("counter-hasty")) as ws:
        await ws.reset(seed=1)
        before = await place.workers("counter-hasty")
        late = await ws.step(op="wait", seconds=600)
        refused = await ws.step(op="inc")
        await lives(ws)
        after = await place.workers("counter-hasty")

    assert said(late)[0] == "EXECUTION_ERROR"
    assert said(refused)[0] == "SESSION_ERROR"
    assert not before & after


@on(EMBEDDED)
async def test_a_step_beyond_its_deadline_is_500_for_an_areal_client(place: Place) -> None:
    client = ArealClient(f"{place.url}/areal/counter-hasty")
    structured = {"type": "structured", "content": {"op": "wait", "seconds": 600}}
    episode = (await client.start(1))["episode_id"]
    with pytest.raises(Failed) as late:
        await client.act(episode, structured)
    again = await client.start(1)
    await client.cancel(again["episode_id"])

    assert late.value.status == 500


@on_rows("environment", (EMBEDDED, "counter-brief"), (EMBEDDED, "counter-brief-020"), (STACK, "counter-brief"))
async def test_an_idle_episode_expires_and_its_socket_stays_open(place: Place, environment: str) -> None:
    async with socket(place.openenv(environment)) as ws:
        await ws.reset(seed=1)
        await ws.step(op="inc")
        await eventually(lambda: no_sessions(place))
        refused = [await ws.step(op="inc"), await ws.step(op="inc")]
        await lives(ws)

    assert [said(reply)[0] for reply in refused] == ["SESSION_ERROR"] * 2
    assert "idle" in said(refused[0])[1]


@on(EMBEDDED)
async def test_a_session_with_a_running_step_does_not_expire_as_idle(place: Place) -> None:
    async with socket(place.openenv("counter-brief")) as ws:
        await ws.reset(seed=1)
        waited = await ws.step(op="wait", seconds=5)
        stepped = await ws.step(op="inc")

    assert waited["data"]["observation"]["value"] == 0
    assert stepped["data"]["observation"]["value"] == 1


# -- clients that disconnect ----------------------------------------------------------------------------------------


@on(EMBEDDED)
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "in mid-step"])
async def test_the_slot_of_a_killed_client_goes_to_the_next_client(
    place: Place, newest: Driver, tmp_path: Path, busy: bool
) -> None:
    url, file = place.openenv(NEW), tmp_path / "go"
    with contextlib.closing(Driver(OLDEST)) as doomed:  # the release that needs the least CPU to start
        async with connected(doomed, url, kind="typed", mode="direct") as victim:
            await victim.reset(seed=1)
            before = await place.workers(NEW)
            if busy:
                running = asyncio.create_task(victim.step({"op": "wait", "seconds": 600, "file": str(file)}))
                await until(Path(f"{file}.began").exists)
            doomed.kill()
            if busy:
                with pytest.raises(ClientError):
                    await running
            async with connected(newest, url) as client:
                reset = await client.reset(seed=2)
                after = await place.workers(NEW)

    assert reset["observation"].items() >= {"value": 0, "target": 5}.items()
    assert bool(before & after) is not busy  # a worker in which a step still runs is replaced


@on_rows("environment", (EMBEDDED, NEW), (EMBEDDED, OLD))
async def test_fifty_dropped_sockets_leave_no_session_behind(place: Place, environment: str) -> None:
    async def drop(n: int) -> None:
        async with socket(place.openenv(environment)) as ws:
            if n % 2:
                await ws.reset(seed=n)
            if n % 4 == 3:
                await ws.step(op="inc")
            if n % 4 == 2:
                await ws.send({"type": "reset", "data": {}})
            ws.inner.transport.abort()

    for _ in range(10):
        await asyncio.gather(*map(drop, range(5)))

    await place.nothing_is_left()
    async with socket(place.openenv(environment)) as ws:
        await lives(ws)


@on(EMBEDDED)
async def test_an_error_from_the_image_does_not_end_the_episode(place: Place) -> None:
    async with socket(place.openenv("counter-brittle")) as ws:
        await ws.reset(seed=1)
        await ws.step(op="inc")
        raised = await ws.step(op="raise")
        invalid = await ws.step(op="nosuch")
        stepped = await ws.step(op="inc")

    assert said(raised) == ("EXECUTION_ERROR", "boom from env")
    assert said(invalid)[0] == "VALIDATION_ERROR"
    assert stepped["data"]["observation"]["value"] == 2
