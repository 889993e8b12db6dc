"""The client's side of an OpenEnv socket: frames keep their order, and work for a disconnected client ends."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from gateway.frontends.openenv import websocket as openenv_peer
from gateway.frontends.openenv.websocket import AHEAD_MAX, ClientSocket, Left
from tests.fakes.eventually import until

GONE: Message = {"type": "websocket.disconnect", "code": 1006}


def said(text: str) -> Message:
    return {"type": "websocket.receive", "text": text}


class Wire:
    """The ASGI server's side of a socket: messages to receive, and the messages that were sent."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Message] = asyncio.Queue()
        self.sent: list[Message] = []
        self.is_lost = False
        self.peer = ClientSocket(self.queue.get, self.take)

    async def take(self, message: Message) -> None:
        if self.is_lost:
            raise OSError
        self.sent.append(message)


@pytest.fixture(autouse=True)
def watched_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the concurrent reader immediately, so that no test waits for it."""
    monkeypatch.setattr(openenv_peer, "WATCHED_AFTER_S", 0.0)


async def test_frames_arrive_one_by_one_until_the_client_disconnects() -> None:
    wire = Wire()
    for message in (said("a"), {"type": "websocket.receive", "bytes": b"x"}, said("b"), GONE):
        wire.queue.put_nowait(message)

    assert [await wire.peer.next() for _ in range(3)] == ["a", None, "b"]
    for _ in range(2):
        with pytest.raises(Left):
            await wire.peer.next()


async def test_frames_that_arrive_while_work_runs_are_kept_in_order() -> None:
    wire, done = Wire(), asyncio.Event()
    work = asyncio.ensure_future(wire.peer.attended(done.wait()))
    frames = [str(number) for number in range(AHEAD_MAX + 5)]
    for text in frames:
        wire.queue.put_nowait(said(text))
    await until(lambda: wire.queue.qsize() == 5)

    done.set()

    assert await work is True
    assert wire.queue.qsize() == 5, "beyond its bound nothing is read"
    assert [await wire.peer.next() for _ in frames] == frames


async def test_work_is_cancelled_when_its_client_disconnects() -> None:
    wire = Wire()
    ended = asyncio.Event()

    async def forever() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    work = asyncio.ensure_future(wire.peer.attended(forever()))
    wire.queue.put_nowait(said("ahead"))
    await until(wire.queue.empty)
    wire.queue.put_nowait(GONE)

    with pytest.raises(Left):
        await work
    assert ended.is_set()
    assert not work.cancelled()


async def test_work_that_swallows_its_cancellation_is_not_answered() -> None:
    wire = Wire()

    async def stubborn() -> str:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            return "done all the same"
        raise AssertionError("it was let go without a cancellation")

    async def serve() -> int:
        with pytest.raises(Left):
            await wire.peer.attended(stubborn())
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    serving = asyncio.ensure_future(serve())
    wire.queue.put_nowait(GONE)

    assert await serving == 0, "what comes next is not cancelled"


async def test_a_cancellation_from_outside_propagates() -> None:
    wire, begun = Wire(), asyncio.Event()

    async def forever() -> None:
        begun.set()
        await asyncio.get_running_loop().create_future()

    work = asyncio.ensure_future(wire.peer.attended(forever()))
    await begun.wait()
    work.cancel()

    await asyncio.wait({work})
    assert work.cancelled()
    wire.queue.put_nowait(said("a"))
    assert await wire.peer.next() == "a"


@pytest.mark.parametrize("turns", range(6))
async def test_no_frame_is_lost_at_whatever_turn_the_work_ends(turns: int) -> None:
    wire = Wire()

    async def short() -> None:
        for turn in range(turns):
            wire.queue.put_nowait(said(str(turn)))
            await asyncio.sleep(0)

    await wire.peer.attended(short())
    wire.queue.put_nowait(said("last"))

    expected = [*map(str, range(turns)), "last"]
    assert [await wire.peer.next() for _ in expected] == expected


async def test_an_error_of_the_server_while_sending_counts_as_a_disconnect() -> None:
    wire = Wire()
    await wire.peer.accept()
    await wire.peer.say("a")
    wire.is_lost = True

    with pytest.raises(Left):
        await wire.peer.say("b")
    with pytest.raises(Left):
        await wire.peer.next()
    assert [message["type"] for message in wire.sent] == ["websocket.accept", "websocket.send"]
