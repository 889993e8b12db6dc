"""Several replicas of the gateway's OpenEnv upstream, which query each other over HTTP, and official servers."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from websockets.asyncio.client import connect

from gateway.core.episode import Action, TextBlock
from gateway.core.errors import CallConflict, SessionNotFound, UpstreamError
from gateway.core.session import CloseReason, Session
from tests.fakes.eventually import eventually, until
from tests.wire.openenv.upstream_worlds import (
    OLDER,
    OLDEST,
    RELEASES,
    Handles,
    Image,
    Replica,
    environment,
    image,
    replica,
)

pytestmark = [pytest.mark.wire]

WHERE = environment()
INC = Action(fields={"op": "inc"})
STATE = b'{"type":"state"}'


async def value(where: Replica, session: Session) -> int:
    """Return the counter's present value."""
    return int((await where.upstream.act(session, WHERE, Action(fields={"op": "noop"}))).data["value"])


@pytest.mark.parametrize("version", RELEASES)
async def test_every_replica_serves_a_session_through_the_replica_that_holds_it(version: str) -> None:
    handles = Handles()
    with image("counter", version=version, capacity=1) as started:
        async with replica(handles) as holder, replica(handles) as other:
            session = await holder.opened(started.session(), WHERE, seed=1)

            prompt = await other.upstream.prompt(session, WHERE)
            first = await other.upstream.pass_frame(session, WHERE, b"")
            acted = await other.upstream.act(session, WHERE, INC)
            failed = await other.upstream.act(session, WHERE, Action(fields={"op": "raise"}))
            state = json.loads(await other.upstream.pass_frame(session, WHERE, STATE))
            here = await holder.upstream.act(session, WHERE, INC)
            steps = await other.upstream.steps(session, WHERE)
            summary = await other.upstream.close(session, WHERE)

            del handles.sessions[session.id]
            for one in (holder, other):
                with pytest.raises(SessionNotFound):
                    await one.upstream.act(session, WHERE, INC)
            again = await other.opened(started.session(), WHERE)  # the slot is free
            await other.upstream.close(again, WHERE)

    assert isinstance(prompt[0], TextBlock)
    assert prompt[0].text == "Count to 4.\n\nvalue: 0\ntarget: 4"
    assert json.loads(first)["data"]["observation"]["text"] == "Count to 4."
    assert (acted.data["value"], here.data["value"], steps) == (1, 2, 3)
    assert (failed.error, failed.reason) == ("boom from env", "tool_error")
    assert state["data"]["step_count"] == 2
    assert summary is not None
    assert (summary.steps, summary.is_whole) == (3, True)
    assert handles.rebound == 0


async def test_a_large_first_observation_comes_from_the_replica_that_holds_the_session() -> None:
    handles = Handles()
    with image("counter") as started:
        async with replica(handles) as holder, replica(handles) as other:
            session = await holder.opened(started.session(), WHERE)
            holder.upstream._holding._held[session.lease].first = large = b"x" * 2**20
            stripped = replace(session, handle=session.handle.partition('"first"')[0] + '"first":""}')

            assert await other.upstream.pass_frame(stripped, WHERE, b"") == large
            await holder.upstream.close(session, WHERE)


async def test_another_replica_takes_over_a_session_whose_holder_has_left() -> None:
    handles = Handles()
    with image("counter", capacity=1) as started:
        async with replica(handles) as other, replica(handles) as third:
            async with replica(handles) as holder:
                session = await holder.opened(started.session(), WHERE)
                await holder.upstream.act(session, WHERE, Action(fields={"op": "inc", "by": 7}))

            # Both replicas resume the session concurrently, each with the handle that it remembers: one attaches, the
            # other queries it. This takes a while, because the server has not noticed yet that a socket is gone.
            async with connect(f"ws://{started.address.removeprefix('tcp:')}/ws?session_id={sid_of(session)}"):
                asking = [asyncio.ensure_future(value(one, session)) for one in (other, third) for _ in range(4)]
                await until(lambda: handles.rebound)
                await asyncio.wait(asking, timeout=0.3)
            values = await asyncio.gather(*asking)
            steps = await third.upstream.steps(session, WHERE)
            prompt = await third.upstream.prompt(session, WHERE)
            summary = await other.upstream.close(handles.sessions[session.id], WHERE)
            again = await other.opened(started.session(), WHERE)
            await other.upstream.close(again, WHERE)

    assert values == [7] * 8
    assert handles.rebound == 1
    assert steps == 9
    assert len(prompt) == 1
    assert summary is not None
    assert not summary.is_whole  # only the holder that left knew the rewards of the earlier steps


def sid_of(session: Session) -> str:
    """Return the session's id in the server."""
    return str(json.loads(session.handle)["sid"])


@pytest.mark.parametrize("version", [OLDEST, OLDER])
async def test_a_session_in_an_older_server_is_lost_with_the_replica_that_holds_it(version: str) -> None:
    handles = Handles()
    with image("counter", version=version, capacity=1) as started:
        async with replica(handles) as other:
            async with replica(handles) as holder:
                session = await holder.opened(started.session(), WHERE)

            with pytest.raises(SessionNotFound):
                await other.upstream.act(session, WHERE, INC)
            assert await other.upstream.close(session, WHERE) is None
            again = await eventually(lambda: opened(other, started))
            assert await value(other, again) == 0
            await other.upstream.close(again, WHERE)

        assert started.process.log.count('"WebSocket /ws') == 2


async def opened(where: Replica, started: Image) -> Session:
    try:
        return await where.opened(started.session(), WHERE)
    except UpstreamError as error:
        raise AssertionError("there is no place yet") from error


async def test_any_replica_closes_a_session_whose_holder_has_left() -> None:
    handles = Handles()
    with image("counter", capacity=1) as started:
        async with replica(handles) as other:
            async with replica(handles) as holder:
                session = await holder.opened(started.session(), WHERE)

            assert await other.upstream.close(session, WHERE) is None
            again = await other.opened(started.session(), WHERE)
            await other.upstream.close(again, WHERE)


async def test_a_session_that_was_closed_is_not_taken_over() -> None:
    handles = Handles()
    with image("counter", capacity=1) as started:
        async with replica(handles) as other:
            async with replica(handles) as holder:
                session = await holder.opened(started.session(), WHERE)
            before = started.process.log.count('"WebSocket /ws')
            del handles.sessions[session.id]  # as if the store is just ending the session

            with pytest.raises(SessionNotFound):
                await other.upstream.act(session, WHERE, INC)
            assert await other.upstream.steps(session, WHERE) is None

            assert started.process.log.count('"WebSocket /ws') == before


async def test_the_same_key_runs_once_at_whichever_replica_it_arrives() -> None:
    handles = Handles()
    with image("counter") as started:
        async with replica(handles) as holder, replica(handles) as other, replica(handles) as third:
            session = await holder.opened(started.session(), WHERE)

            results = [await one.upstream.act(session, WHERE, INC, key="k-1") for one in (other, third, holder, other)]
            with pytest.raises(CallConflict):
                await third.upstream.act(session, WHERE, Action(fields={"op": "dec"}), key="k-1")
            body = json.dumps({"name": "step", "input": {"op": "inc"}}).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"accept", b"application/json"),
                (b"idempotency-key", b"k-2"),
            ]
            for one in (third, holder, other):
                exchange = await one.upstream.forward(session, WHERE, "call", body=body, headers=headers)
                answer = json.loads(await exchange.read(2**20))
                await exchange.aclose()
                assert answer["output"]["data"]["value"] == 2
            await holder.upstream.close(session, WHERE)

    assert [result.data["value"] for result in results] == [1] * 4


async def test_closing_an_opening_that_another_replica_did_not_finish_is_an_error() -> None:
    with image("counter") as started:
        async with replica(Handles()) as other:
            failed = replace(started.session(), reason=CloseReason.OPEN_FAILED)
            with pytest.raises(UpstreamError, match="did not finish its opening"):
                await other.upstream.close(failed, WHERE)
            asked = replace(started.session(), reason=CloseReason.DELETED)  # a query's slot: nothing was opened
            assert await other.upstream.close(asked, WHERE) is None


async def test_an_opening_of_an_older_server_ends_with_its_replica() -> None:
    with image("counter", version=OLDER) as started:
        async with replica(Handles()) as other:
            failed = replace(started.session(), reason=CloseReason.OPEN_FAILED)
            assert await other.upstream.close(failed, WHERE) is None
