"""Failures, waiting clients and idle episodes: one frame for each request, and no slot is lost."""

import asyncio
import contextlib
from pathlib import Path

import httpx
import pytest

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually, until
from tests.wire.gateways import Gateway, short_folder
from tests.wire.openenv.clients import OLDEST, ClientError, Driver, connected
from tests.wire.openenv.conftest import nothing_is_left
from tests.wire.openenv.frames import Socket, said, socket
from tests.wire.openenv.servers import ALICE, BOTH_GATEWAYS, EMBEDDED, STACK, Place, on, settings
from tests.wire.targets import token

pytestmark = [pytest.mark.wire]


async def call(ws: Socket, tool: str, **arguments: object) -> dict[str, object]:
    return await ws.step(type="call_tool", tool_name=tool, arguments=arguments)


async def lives(ws: Socket) -> None:
    """Assert that a socket still plays an episode after a failure."""
    await ws.reset(task="test-0", episode_id="again")
    last = await ws.step(op="inc", by=2)
    assert (last["data"]["reward"], last["data"]["done"]) == (1.0, True)


# -- free slots -----------------------------------------------------------------------------------------------------


@on(*BOTH_GATEWAYS)
async def test_a_client_that_finds_no_free_slot_waits_for_a_slot(place: Place, newest: Driver) -> None:
    url = place.url("lonely")
    async with connected(newest, url) as first, connected(newest, url) as second:
        await first.reset(index=0)
        waiting = asyncio.create_task(second.reset(index=1))
        for _ in range(5):
            await first.act("noop")
        was_waiting = not waiting.done()
        await first.close()
        reset = await waiting

    assert was_waiting
    assert reset["observation"]["target"] == 4


async def finds_room(url: str) -> None:
    async with socket(url) as ws:
        assert (await ws.reset(index=0))["type"] == "observation"


@on(*BOTH_GATEWAYS)
async def test_a_client_that_gets_no_slot_in_time_receives_capacity_reached(place: Place, newest: Driver) -> None:
    url = place.url("curt")
    await eventually(lambda: finds_room(url))  # a worker may take longer to start than a client may wait here
    async with socket(url) as first:
        await first.reset(index=0)
        async with socket(url) as second:
            refused = await second.reset(index=0)
            code = await second.closed()
        with pytest.raises(ClientError) as failed:
            async with connected(newest, url) as third:
                await third.reset(index=0)
        await first.step(op="inc")

    assert said(refused)[0] == "CAPACITY_REACHED"
    assert "1/1 sessions active" in said(refused)[1]
    assert (refused["data"]["active_sessions"], refused["data"]["max_sessions"]) == (1, 1)
    assert code == 1000
    assert "CAPACITY_REACHED" in failed.value.message or failed.value.kind.startswith("ConnectionClosed")


@on(*BOTH_GATEWAYS)
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "in mid-step"])
async def test_the_slot_of_a_killed_client_goes_to_the_next_client(
    place: Place, newest: Driver, tmp_path: Path, busy: bool
) -> None:
    url, folder, word = place.url("lonely"), place.folder(tmp_path), token()
    with contextlib.closing(Driver(OLDEST)) as doomed:  # the release that needs the least CPU to start
        async with connected(doomed, url, kind="typed", mode="direct") as victim:
            await victim.reset(index=0)
            if busy:
                began = f"{folder.inside}/{word}.began"
                running = asyncio.create_task(victim.tool("sleep", seconds=45, began=began))
                await until(lambda: any((root / f"{word}.began").exists() for root in folder.roots()))
            doomed.kill()
            if busy:
                with pytest.raises(ClientError):
                    await running
            async with connected(newest, url) as client:
                reset = await client.reset(index=0)
            await eventually(lambda: nothing_is_left(place))

    assert reset["observation"]["text"] == "ready"


@on(*BOTH_GATEWAYS)
async def test_a_client_that_disconnects_while_it_waits_leaves_the_queue(place: Place, newest: Driver) -> None:
    url = place.url("lonely")
    async with socket(url) as first:
        await first.reset(index=0)
        async with socket(url) as leaver:
            await leaver.send({"type": "reset", "data": {}})
            leaver.inner.transport.abort()
        async with connected(newest, url) as patient:
            waiting = asyncio.create_task(patient.reset(index=1))
            await first.step(op="inc")
            await first.send({"type": "close"})
            reset = await waiting
            names = [session["name"] for session in await place.behind().sessions()]

    assert reset["observation"]["target"] == 4
    assert len(names) == 1


@on(*BOTH_GATEWAYS)
async def test_two_hundred_dropped_sockets_leave_no_session_behind(place: Place) -> None:
    async def drop(n: int) -> None:
        async with socket(place.url()) as ws:
            if n % 4:
                await ws.reset(index=0)
            if n % 4 == 2:
                await ws.send({"type": "step", "data": {"op": "inc"}})
            if n % 4 == 3:
                await ws.send({"type": "reset", "data": {}})
            ws.inner.transport.abort()

    for _ in range(10):
        await asyncio.gather(*map(drop, range(20)))

    await eventually(lambda: nothing_is_left(place))
    async with socket(place.url()) as ws:
        await lives(ws)


@on(*BOTH_GATEWAYS)
async def test_more_clients_than_slots_are_all_served(place: Place, newest: Driver) -> None:
    async def play(n: int) -> tuple[int, float]:
        async with connected(newest, place.url()) as client:
            reset = await client.reset(index=n % 20)
            last = await client.act("inc", 3 + n % 5)
            return reset["observation"]["target"], last["reward"]

    assert await asyncio.gather(*map(play, range(96))) == [(3 + n % 5, 1.0) for n in range(96)]


# -- workers that die -----------------------------------------------------------------------------------------------


@on(*BOTH_GATEWAYS)
async def test_a_worker_that_dies_in_mid_step_causes_one_error_and_never_a_fresh_episode(place: Place) -> None:
    async with socket(place.url("brittle")) as ws, socket(place.url("brittle")) as neighbour:
        await ws.reset(index=0)
        await neighbour.reset(index=0)
        died = await call(ws, "die")
        refused = [await ws.step(op="inc") for _ in range(2)]
        lost = await neighbour.step(op="inc")
        await lives(ws)
        await lives(neighbour)

    assert said(died)[0] == "SESSION_ERROR"
    assert [said(reply)[0] for reply in refused] == ["SESSION_ERROR"] * 2
    assert said(lost)[0] == "SESSION_ERROR"


@on(STACK)
async def test_a_client_that_waits_for_a_step_gets_an_error_when_the_container_is_killed(place: Place) -> None:
    assert place.stack is not None
    async with socket(place.url("lonely")) as ws:
        await ws.reset(index=0)
        (session,) = await place.behind().sessions()
        await ws.send(
            {"type": "step", "data": {"type": "call_tool", "tool_name": "sleep", "arguments": {"seconds": 40}}}
        )
        place.stack.containers.kill(session["worker"])
        died = await ws.reply()
        await lives(ws)

    assert said(died)[0] == "SESSION_ERROR"


@on(*BOTH_GATEWAYS)
async def test_a_step_beyond_its_deadline_ends_the_episode_and_a_reset_starts_another_episode(
    place: Place, newest: Driver
) -> None:
    async with socket(place.url("hasty")) as ws:
        await ws.reset(index=0)
        late = await call(ws, "sleep", seconds=40)
        refused = await ws.step(op="inc")
        await lives(ws)

    assert said(late)[0] == "EXECUTION_ERROR"
    assert "1" in said(late)[1]
    assert said(refused)[0] == "SESSION_ERROR"


@on(*BOTH_GATEWAYS)
async def test_an_idle_episode_expires_and_its_socket_stays_open(place: Place) -> None:
    async with socket(place.url("brittle")) as ws:
        await ws.reset(index=0)
        await ws.step(op="inc")
        await eventually(lambda: nothing_is_left(place))
        refused = [await ws.step(op="inc"), await ws.step(op="inc")]
        await lives(ws)

    assert [said(reply)[0] for reply in refused] == ["SESSION_ERROR"] * 2
    assert "idle" in said(refused[0])[1]


# -- the gateway itself ---------------------------------------------------------------------------------------------


@on(EMBEDDED)  # needs only the place's environments; the test starts its own gateway
async def test_a_gateway_that_stops_closes_its_sockets_with_code_1001(place: Place, tmp_path: Path) -> None:
    gateway = Gateway(short_folder(), settings("counting"))
    gateway.start()
    try:
        async with socket(f"{gateway.url}/k/{ALICE}/openenv/counting") as ws:
            await ws.reset(index=0)
            stopped = await asyncio.to_thread(gateway.stop)
            code = await ws.closed()
    finally:
        gateway.stop()

    assert stopped in (0, -15)
    assert code == 1001


@on(STACK)
async def test_a_tool_clients_episode_outlives_a_gateway_that_is_killed(place: Place, newest: Driver) -> None:
    async with connected(newest, place.url(), kind="mcp") as client:
        await client.reset(index=0, episode_id="e")
        await client.call("call_tool", "act", op="inc")
        place.behind().kill()
        place.behind().restart()
        last = await client.step({"$call_tool": {"tool_name": "act", "arguments": {"op": "inc", "by": 2}}})
        state = await client.state()

    assert (last["reward"], last["done"]) == (1.0, True)
    assert (state["episode_id"], state["step_count"]) == ("e", 2)


@on(STACK)
async def test_a_session_is_known_at_every_replica(place: Place) -> None:
    second = place.replica("second")
    second.start()
    try:
        here, there = place.url(), f"{second.url}/k/{ALICE}/openenv/counting"
        async with httpx.AsyncClient(verify=False, trust_env=False, timeout=HANG_S) as http:
            body = {"jsonrpc": "2.0", "method": "openenv/session/create", "params": {}, "id": 1}
            session = (await http.post(f"{here}/mcp", json=body)).json()["result"]["session_id"]
            call = {"name": "act", "arguments": {"op": "inc"}, "session_id": session}
            async with socket(f"{here}?session_id={session}") as ws:
                await ws.reset(index=0, episode_id="e")
                body |= {"method": "tools/call", "params": call}
                called = (await http.post(f"{there}/mcp", json=body)).json()
                ws.inner.transport.abort()
            async with socket(f"{there}?session_id={session}") as ws:
                state = await ws.state()
                last = await ws.step(op="inc", by=2)
            body |= {"method": "openenv/session/close", "params": {"session_id": session}}
            closed = (await http.post(f"{there}/mcp", json=body)).json()
    finally:
        second.stop()

    assert called["result"]["is_error"] is False
    assert state["data"].items() >= {"episode_id": "e", "step_count": 1}.items()
    assert (last["data"]["reward"], last["data"]["done"]) == (1.0, True)
    assert closed["result"]["closed"] is True
