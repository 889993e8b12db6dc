"""Successive episodes on one attachment: the upstream resets the server's session, as OpenEnv's own clients do."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from gateway.core.episode import Action
from gateway.core.errors import AuthorFault, UpstreamError, UpstreamGone
from gateway.core.session import CloseReason, Session, SessionState
from gateway.upstreams.openenv.websocket import LiveSession
from tests.fakes.eventually import until
from tests.wire.openenv.upstream_worlds import RELEASES, Image, Replica, alone, environment, image

pytestmark = [pytest.mark.wire]

WHERE = environment()
INC = Action(fields={"op": "inc"})


def successor(session: Session, lease: str = "next") -> Session:
    """Return the session that gets this session's slot: same id, another lease."""
    return replace(session, lease=lease, handle="", state=SessionState.OPEN)


def sockets(started: Image) -> int:
    """Return the number of WebSockets that the server has accepted."""
    return started.process.log.count("WebSocket /ws")


def held(replica: Replica) -> LiveSession:
    """Return the only session that the replica holds."""
    (found,) = replica.upstream._holding._held.values()
    return found


async def has_room(replica: Replica, started: Image) -> bool:
    """Return True if the server accepts a session."""
    session = await replica.opened(started.session(), WHERE)
    await replica.upstream.close(session, WHERE)
    return True


@pytest.mark.parametrize("version", RELEASES)
async def test_the_next_episode_starts_in_the_same_session_of_the_server(version: str) -> None:
    with image("counter", version=version, capacity=1) as started:
        async with alone() as replica:
            upstream = replica.upstream
            first = await replica.opened(started.session(), WHERE, seed=0, episode="one")
            await upstream.act(first, WHERE, INC)
            before = sockets(started)

            summary = await upstream.close(first, WHERE, keeps=True)
            second = await replica.opened(successor(first), WHERE, seed=1, episode="two")
            result = await upstream.act(second, WHERE, INC)
            steps = await upstream.steps(second, WHERE)
            ended = await upstream.close(second, WHERE)

            assert summary is not None
            assert summary.steps == 1
            assert result.data == {"value": 1, "target": 4, "text": "value=1"}
            assert steps == 1
            assert ended is not None
            assert ended.steps == 1
            assert sockets(started) == before
            assert await has_room(replica, started)


@pytest.mark.parametrize("version", RELEASES)
async def test_a_kept_session_is_released_when_no_episode_follows(version: str) -> None:
    with image("counter", version=version, capacity=1) as started:
        async with alone() as replica:
            upstream = replica.upstream
            first = await replica.opened(started.session(), WHERE)

            await upstream.close(first, WHERE, keeps=True)
            await upstream.close(first, WHERE)  # there was no slot to transfer
            assert await has_room(replica, started)

            second = await replica.opened(started.session(), WHERE)
            await upstream.close(second, WHERE, keeps=True)
            given_up = replace(successor(second), state=SessionState.CLOSING, reason=CloseReason.DELETED)
            await upstream.close(given_up, WHERE)  # its trainer hung up before the session was opened
            assert await has_room(replica, started)


@pytest.mark.parametrize("version", RELEASES)
async def test_a_failed_reset_in_a_kept_session_releases_its_slot(version: str) -> None:
    with image("counter", version=version, capacity=1) as started:
        async with alone() as replica:
            first = await replica.opened(started.session(), WHERE)
            await replica.upstream.close(first, WHERE, keeps=True)

            with pytest.raises(AuthorFault, match="no such level"):
                await replica.opened(successor(first), WHERE, config={"fails": True})

            assert await has_room(replica, started)


async def test_a_session_in_which_a_step_still_runs_is_not_kept() -> None:
    with image("counter", capacity=1) as started:
        async with alone() as replica:
            upstream = replica.upstream
            first = await replica.opened(started.session(), WHERE)
            step = asyncio.ensure_future(upstream.act(first, WHERE, Action(fields={"op": "wait", "file": "/nowhere"})))
            await until(lambda: held(replica).line.is_busy)

            with pytest.raises(UpstreamError, match="a step still runs"):
                await upstream.close(first, WHERE, keeps=True)

            with pytest.raises(UpstreamGone):
                await step
