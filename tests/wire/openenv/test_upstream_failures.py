"""The gateway's OpenEnv upstream and official servers: abandoned steps, cut sockets, killed servers, large frames."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.core.environment import Timeouts
from gateway.core.episode import Action
from gateway.core.errors import (
    AuthorFault,
    PoolExhausted,
    SessionNotFound,
    UpstreamError,
    UpstreamGone,
    UpstreamTimeout,
)
from gateway.core.session import Session, SessionSetup
from gateway.upstreams.openenv.websocket import QUEUE_MAX
from tests.fakes.eventually import eventually, until
from tests.wire.cutting import Relay, relay
from tests.wire.openenv.clients import NEWEST
from tests.wire.openenv.upstream_worlds import (
    FIRST_WITH,
    LAST_WITHOUT,
    OLDER,
    OLDEST,
    RELEASES,
    Image,
    Replica,
    alone,
    environment,
    image,
)

pytestmark = [pytest.mark.wire]

WHERE = environment()
INC = Action(fields={"op": "inc"})


def waits_for(file: Path) -> Action:
    return Action(fields={"op": "wait", "file": str(file)})


@asynccontextmanager
async def cuttable(started: Image) -> AsyncIterator[Relay]:
    """A relay in front of a server. `through` makes sessions that connect through the relay."""
    async with relay(started.url) as between:
        yield between


def through(between: Relay, started: Image) -> Session:
    return started.session(address=f"tcp:{between.url.removeprefix('http://')}")


async def value(replica: Replica, session: Session) -> int:
    """Return the counter's present value."""
    return int((await replica.upstream.act(session, WHERE, Action(fields={"op": "noop"}))).data["value"])


# -- callers that cancel ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
async def test_the_reply_to_a_cancelled_step_never_answers_another_request(version: str, tmp_path: Path) -> None:
    slow = json.dumps({"type": "step", "data": {"op": "wait", "file": str(tmp_path / "go")}}).encode()
    inc = b'{"type":"step","data":{"op":"inc"}}'
    with image("counter", version=version) as started:
        async with alone() as replica:
            session = await replica.opened(started.session(), WHERE)
            left = asyncio.ensure_future(replica.upstream.pass_frame(session, WHERE, slow))
            never_sent = asyncio.ensure_future(replica.upstream.pass_frame(session, WHERE, inc))
            state = asyncio.ensure_future(replica.upstream.pass_frame(session, WHERE, b'{"type":"state"}'))
            await until(begun(tmp_path / "go"))  # the others wait for their turn
            left.cancel()
            never_sent.cancel()
            await asyncio.gather(left, never_sent, return_exceptions=True)
            (tmp_path / "go").touch()

            assert json.loads(await state)["data"]["step_count"] == 1
            assert (
                json.loads(await replica.upstream.pass_frame(session, WHERE, inc))["data"]["observation"]["value"] == 1
            )
            summary = await replica.upstream.close(session, WHERE)

    assert summary is not None
    assert summary.steps == 2


async def test_a_request_that_is_cancelled_at_any_moment_shifts_no_reply() -> None:
    with image("counter", on_socket=True) as started:
        async with alone() as replica:
            session = await replica.opened(started.session(), WHERE)
            for turns in range(40):
                left = asyncio.ensure_future(
                    replica.upstream.pass_frame(session, WHERE, b'{"type":"step","data":{"op":"inc"}}')
                )
                for _ in range(turns % 20):
                    await asyncio.sleep(0)
                left.cancel()
                await asyncio.gather(left, return_exceptions=True)
                state = json.loads(await replica.upstream.pass_frame(session, WHERE, b'{"type":"state"}'))

                assert state["type"] == "state"
                assert state["data"]["step_count"] == await replica.upstream.steps(session, WHERE)
            await replica.upstream.close(session, WHERE)


async def test_requests_beyond_the_queue_are_refused_and_queued_requests_are_answered(tmp_path: Path) -> None:
    with image("counter") as started:
        async with alone() as replica:
            session = await replica.opened(started.session(), WHERE)
            frame = json.dumps({"type": "step", "data": {"op": "wait", "file": str(tmp_path / "go")}}).encode()
            asked = [
                asyncio.ensure_future(replica.upstream.pass_frame(session, WHERE, frame)) for _ in range(QUEUE_MAX + 5)
            ]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            (tmp_path / "go").touch()
            ended = await asyncio.gather(*asked, return_exceptions=True)
            await replica.upstream.close(session, WHERE)

    assert {type(one) for one in ended} == {bytes, PoolExhausted}
    assert sum(isinstance(one, bytes) for one in ended) >= QUEUE_MAX


@pytest.mark.parametrize("version", RELEASES)
async def test_a_session_whose_step_still_runs_is_not_closed_cleanly(version: str, tmp_path: Path) -> None:
    with image("counter", version=version) as started:
        async with alone() as replica:
            session = await replica.opened(started.session(), WHERE)
            step = asyncio.ensure_future(replica.upstream.act(session, WHERE, waits_for(tmp_path / "go")))
            await until(begun(tmp_path / "go"))

            with pytest.raises(UpstreamError, match="a step still runs"):
                await replica.upstream.close(session, WHERE)
            with pytest.raises(UpstreamGone) as gone:
                await step
            (tmp_path / "go").touch()

    assert gone.value.sent


def begun(file: Path) -> Callable[[], bool]:
    """Return a predicate: True once the server has started the action that waits for *file*."""
    return Path(f"{file}.began").exists


async def test_a_step_without_a_reply_ends_at_its_timeout(tmp_path: Path) -> None:
    where = environment(timeouts=Timeouts(call_s=0.5, close_s=5))
    with image("counter") as started:
        async with alone() as replica:
            session = await replica.opened(started.session(), where)

            with pytest.raises(UpstreamTimeout):
                await replica.upstream.act(session, where, waits_for(tmp_path / "go"))
            # The step still runs in the server, which has not released the socket.
            with pytest.raises(UpstreamError, match="already has an attached"):
                await replica.upstream.pass_frame(session, where, b'{"type":"state"}')
            (tmp_path / "go").touch()


@pytest.mark.parametrize("version", RELEASES)
async def test_an_opening_that_is_cancelled_in_its_reset_leaves_no_session(version: str, tmp_path: Path) -> None:
    config = {"waits_for": str(tmp_path / "go")}
    with image("counter", version=version, capacity=1) as started:
        async with alone() as replica:
            session = started.session()
            opening = asyncio.ensure_future(replica.opened(session, WHERE, config=config))
            await until(begun(tmp_path / "go"))
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            closing = asyncio.ensure_future(replica.upstream.close(session, WHERE))
            if version == NEWEST:  # the upstream can wait for its end, longer than the 1 s that a reply may take
                await asyncio.wait({closing}, timeout=1.5)
                assert not closing.done()
                (tmp_path / "go").touch()
                assert await closing is None
            else:
                with pytest.raises(UpstreamError, match="a reset still runs"):
                    await closing
                (tmp_path / "go").touch()

            again = await eventually(lambda: opened_again(replica, started))
            await replica.upstream.close(again, WHERE)


async def opened_again(replica: Replica, started: Image) -> Session:
    try:
        return await replica.opened(started.session(), WHERE)
    except UpstreamError as error:
        raise AssertionError("there is no place yet") from error


@pytest.mark.parametrize("version", RELEASES)
async def test_an_opening_that_is_cancelled_at_any_moment_leaves_no_session(version: str) -> None:
    with image("counter", version=version, capacity=1, on_socket=True) as started:
        async with alone() as replica:
            first = await replica.opened(started.session(), WHERE)  # the server's abilities are now known
            await replica.upstream.close(first, WHERE)
            for moment in range(60):
                session = started.session()
                opening = asyncio.ensure_future(replica.upstream.open(session, WHERE, SessionSetup(spec={})))
                await asyncio.sleep(moment / 8000)  # an opening takes about 5 ms
                opening.cancel()
                await asyncio.gather(opening, return_exceptions=True)
                if opening.cancelled():
                    assert await replica.upstream.close(session, WHERE) is None
                else:
                    opened = replica.handles.opened(opening.result())
                    assert await replica.upstream.close(opened, WHERE) is not None
            last = await replica.opened(started.session(), WHERE)
            assert await value(replica, last) == 0
            await replica.upstream.close(last, WHERE)


@pytest.mark.parametrize("version", RELEASES)
async def test_a_failed_reset_is_an_error_and_its_slot_is_free_immediately(version: str) -> None:
    with image("counter", version=version, capacity=1) as started:
        async with alone() as replica:
            session = started.session()
            with pytest.raises(AuthorFault, match="no such level"):
                await replica.opened(session, WHERE, config={"fails": True})
            assert await replica.upstream.close(session, WHERE) is None

            after = await replica.opened(started.session(), WHERE)
            await replica.upstream.close(after, WHERE)


# -- cut sockets and killed servers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [FIRST_WITH, NEWEST])
async def test_the_upstream_attaches_again_after_a_cut_socket_and_the_same_episode_goes_on(version: str) -> None:
    with image("counter", version=version) as started:
        async with alone() as replica, cuttable(started) as between:
            session = await replica.opened(through(between, started), WHERE)
            await replica.upstream.act(session, WHERE, Action(fields={"op": "inc", "by": 7}))
            between.cut()
            await eventually(lambda: noticed(replica, session))

            assert await value(replica, session) == 7
            summary = await replica.upstream.close(session, WHERE)

    assert summary is not None
    assert summary.steps == 2


@pytest.mark.parametrize("version", [OLDEST, OLDER, LAST_WITHOUT])
async def test_a_cut_socket_to_an_older_server_ends_its_session(version: str) -> None:
    with image("counter", version=version) as started:
        async with alone() as replica, cuttable(started) as between:
            session = await replica.opened(through(between, started), WHERE)
            before = sockets(started)
            between.cut()
            await eventually(lambda: lost(replica, session))

            with pytest.raises(SessionNotFound):
                await replica.upstream.pass_frame(session, WHERE, b'{"type":"state"}')
            assert sockets(started) == before  # the upstream opened no other socket
            assert await replica.upstream.close(session, WHERE) is not None


def sockets(started: Image) -> int:
    """Return the number of WebSockets that the server has accepted."""
    return started.process.log.count('"WebSocket /ws')


async def noticed(replica: Replica, session: Session) -> None:
    assert not replica.upstream._holding._held[session.lease].line.is_open, "the cut was not noticed yet"


async def lost(replica: Replica, session: Session) -> None:
    with pytest.raises((UpstreamGone, SessionNotFound)):
        await replica.upstream.act(session, WHERE, INC)
    assert not replica.upstream._holding._held[session.lease].line.is_open


async def test_a_step_whose_socket_is_cut_is_not_run_again(tmp_path: Path) -> None:
    with image("counter") as started:
        async with alone() as replica, cuttable(started) as between:
            session = await replica.opened(through(between, started), WHERE)
            await value(replica, session)
            between.mute()
            action = Action(fields={"op": "inc", "by": 7, "file": str(tmp_path / "x")})
            step = asyncio.ensure_future(replica.upstream.act(session, WHERE, action))
            await until(begun(tmp_path / "x"))  # the relay withholds its reply
            between.cut()

            with pytest.raises(UpstreamGone) as gone:
                await step
            assert gone.value.sent
            assert await value(replica, session) == 7
            await replica.upstream.close(session, WHERE)


@pytest.mark.parametrize("version", RELEASES)
async def test_a_server_killed_in_mid_step_is_gone_and_later_calls_find_no_session(version: str) -> None:
    with image("counter", version=version) as started:
        async with alone() as replica:
            session = await replica.opened(started.session(), WHERE)

            with pytest.raises(UpstreamGone) as gone:
                await replica.upstream.act(session, WHERE, Action(fields={"op": "kill"}))
            assert gone.value.sent
            for _ in range(2):
                with pytest.raises(SessionNotFound):
                    await replica.upstream.act(session, WHERE, INC)


async def test_the_second_sweep_drops_a_session_that_was_lost_with_its_server() -> None:
    with image("counter", capacity=2) as lives, image("counter") as dies:
        async with alone() as replica:
            kept = await replica.opened(lives.session(), WHERE)
            lost = await replica.opened(dies.session(), WHERE)
            dies.process.kill()
            await eventually(lambda: noticed(replica, lost))
            holding = replica.upstream._holding

            holding.sweep()
            seen_once = {held.session.id for held in holding._held.values()}
            holding.sweep()

            assert seen_once == {kept.id, lost.id}
            assert [held.session.id for held in holding._held.values()] == [kept.id]
            assert (await replica.upstream.act(kept, WHERE, INC)).error is None


async def test_a_session_that_a_new_server_does_not_know_is_not_found() -> None:
    with image("counter") as first, image("counter") as second:
        async with alone() as replica, cuttable(first) as between:
            session = await replica.opened(through(between, first), WHERE)
            between._port = int(second.address.rpartition(":")[2])
            between.cut()
            await eventually(lambda: noticed(replica, session))

            with pytest.raises(SessionNotFound):
                await replica.upstream.act(session, WHERE, INC)


# -- large frames -----------------------------------------------------------------------------------------------------


async def test_large_actions_and_observations_arrive_complete() -> None:
    with image("counter") as started:
        async with alone() as replica:
            session = await replica.opened(started.session(), WHERE)
            action = json.dumps({"type": "step", "data": {"op": "size", "file": "y" * (15 * 2**20)}}).encode()
            sent = json.loads(await replica.upstream.pass_frame(session, WHERE, action))
            got = await replica.upstream.pass_frame(
                session, WHERE, b'{"type":"step","data":{"op":"long","by":%d}}' % (90 * 2**20)
            )
            acted = await replica.upstream.act(session, WHERE, Action(fields={"op": "long", "by": 20 * 2**20}))
            summary = await replica.upstream.close(session, WHERE)

    assert sent["data"]["observation"]["text"] == str(15 * 2**20)
    assert len(got) > 90 * 2**20
    assert len(acted.data["text"]) == 20 * 2**20
    assert summary is not None
    assert summary.steps == 3
