"""ASGI helpers of all frontends: bounded bodies, JSON answers, and cancellation when the trainer disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from starlette.types import Message, Scope

from gateway.core.errors import BodyTooLarge
from gateway.core.json_text import dump
from gateway.frontends.asgi import Attended, HungUp, header, headers, read_body, respond, respond_json
from tests.deadlines import HANG_S

LEFT: Message = {"type": "http.disconnect"}


class Line:
    """A connection as the gateway's own server exposes it in the scope."""

    def __init__(self) -> None:
        self.is_lost = False
        self.on_lost: Callable[[], None] | None = None


class Client:
    """A trainer's side of a request: it sends its messages, then waits until it disconnects."""

    def __init__(self, *messages: Message, shown: bool = False) -> None:
        """*shown*: the server exposes the connection in the scope, as the gateway's own server does."""
        self._messages = list(messages)
        self._left = asyncio.Event()
        self._line = Line()
        self.scope: Scope = {"type": "http", "gateway.connection": self._line} if shown else {"type": "http"}
        self.waits = 0

    def hang_up(self) -> None:
        self._left.set()
        self._line.is_lost = True
        if self._line.on_lost is not None:
            self._line.on_lost()

    async def receive(self) -> Message:
        if self._messages:
            return self._messages.pop(0)
        self.waits += 1
        await self._left.wait()
        return LEFT


def piece(data: bytes, *, more: bool = False) -> Message:
    return {"type": "http.request", "body": data, "more_body": more}


def scope(**given: str) -> Scope:
    return {
        "type": "http",
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()],
    }


SHOWN = pytest.mark.parametrize("shown", [False, True], ids=["by its messages", "by its connection"])


# -- disconnects ----------------------------------------------------------------------------------------------------


@SHOWN
async def test_completed_work_is_not_cancelled_by_a_later_disconnect(shown: bool) -> None:
    client = Client(shown=shown)

    async with Attended(client.scope, client.receive) as trainer:
        await asyncio.sleep(0)

    assert not trainer.left
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    client.hang_up()
    await asyncio.sleep(0)
    assert task.cancelling() == 0


@SHOWN
async def test_a_disconnect_cancels_the_work_and_the_cancellation_does_not_escape(shown: bool) -> None:
    client, cleaned = Client(shown=shown), []

    async with asyncio.timeout(HANG_S), Attended(client.scope, client.receive) as trainer:
        asyncio.get_running_loop().call_soon(client.hang_up)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            cleaned.append(True)

    assert trainer.left
    assert cleaned == [True]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)  # the cancellation must not hit the next wait


@SHOWN
async def test_work_for_a_client_that_already_disconnected_is_cancelled_at_its_first_wait(shown: bool) -> None:
    client = Client(shown=shown)
    client.hang_up()

    async with asyncio.timeout(HANG_S), Attended(client.scope, client.receive) as trainer:
        await asyncio.get_running_loop().create_future()

    assert trainer.left


async def test_unread_pieces_of_a_body_are_not_a_disconnect() -> None:
    client = Client(piece(b"a", more=True), piece(b"b"))

    async with Attended(client.scope, client.receive) as trainer:
        for _ in range(10):
            await asyncio.sleep(0)

    assert not trainer.left
    assert client.waits == 1


@SHOWN
async def test_work_that_swallowed_its_cancellation_sees_that_the_trainer_disconnected(shown: bool) -> None:
    client = Client(shown=shown)

    async with Attended(client.scope, client.receive) as trainer:
        client.hang_up()
        try:
            async with asyncio.timeout(HANG_S):
                await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            pass
        seen_inside = trainer.left

    assert seen_inside
    await asyncio.sleep(0)


@pytest.mark.parametrize("leaves", [False, True])
@SHOWN
async def test_an_error_of_the_work_propagates_whether_the_trainer_disconnected_or_not(
    shown: bool, leaves: bool
) -> None:
    client = Client(shown=shown)

    async def work() -> None:
        async with Attended(client.scope, client.receive):
            try:
                if leaves:
                    client.hang_up()
                    await asyncio.sleep(10)
            finally:
                raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await work()
    await asyncio.sleep(0)  # a cancellation must not hit the next wait


@SHOWN
async def test_a_cancellation_from_outside_is_not_mistaken_for_a_disconnect(shown: bool) -> None:
    client, began = Client(shown=shown), asyncio.Event()

    async def work() -> None:
        async with Attended(client.scope, client.receive):
            began.set()
            await asyncio.get_running_loop().create_future()

    task = asyncio.ensure_future(work())
    await began.wait()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task


@SHOWN
async def test_a_cancellation_from_outside_propagates_even_together_with_a_disconnect(shown: bool) -> None:
    client, began = Client(shown=shown), asyncio.Event()

    async def work() -> None:
        async with Attended(client.scope, client.receive):
            began.set()
            await asyncio.get_running_loop().create_future()

    task = asyncio.ensure_future(work())
    await began.wait()
    client.hang_up()
    if not shown:
        await asyncio.sleep(0)  # lets the watcher receive the disconnect
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task


@SHOWN
async def test_a_deadline_of_the_work_is_not_mistaken_for_a_disconnect(shown: bool) -> None:
    client = Client(shown=shown)

    async with Attended(client.scope, client.receive) as trainer:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.get_running_loop().create_future()
        await asyncio.sleep(0)

    assert not trainer.left


@pytest.mark.parametrize("turns", range(12))
@SHOWN
async def test_the_cancellation_of_a_disconnect_at_any_turn_of_the_loop_never_escapes(shown: bool, turns: int) -> None:
    client = Client(shown=shown)

    async def leave() -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        client.hang_up()

    leaving = asyncio.ensure_future(leave())
    async with Attended(client.scope, client.receive) as trainer:
        for _ in range(6):
            await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)

    await leaving
    assert trainer.left or turns >= 3


# -- bodies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages",
    [
        [piece(b"abcdef")],
        [piece(b"abc", more=True), piece(b"def")],
        [piece(b"abc", more=True), piece(b"", more=True), piece(b"def", more=True), piece(b"")],
        [{"type": "http.request", "body": b"abcdef"}],
    ],
)
async def test_a_body_is_the_same_in_one_or_many_pieces(messages: list[Message]) -> None:
    assert await read_body(scope(), Client(*messages).receive, 6) == b"abcdef"


async def test_an_empty_body_is_empty() -> None:
    assert await read_body(scope(), Client({"type": "http.request"}).receive, 6) == b""


@pytest.mark.parametrize(
    "messages",
    [
        [piece(b"abcdefg")],
        [piece(b"abcdef", more=True), piece(b"g")],
        [piece(b"abcdefg", more=True), piece(b"h")],
        [*[piece(b"a", more=True)] * 9, {"type": "http.disconnect"}],
    ],
)
async def test_a_body_beyond_the_limit_is_refused_and_its_rest_is_discarded(messages: list[Message]) -> None:
    client = Client(*messages)

    with pytest.raises(BodyTooLarge, match="exceeds 6 bytes"):
        async with asyncio.timeout(HANG_S):
            await read_body(scope(), client.receive, 6)

    assert not client._messages, "a client whose connection is closed while it sends never reads the answer"


async def test_a_body_whose_announced_length_exceeds_the_limit_is_refused_and_discarded() -> None:
    client = Client(piece(b"a", more=True), piece(b"b"))

    with pytest.raises(BodyTooLarge):
        await read_body(scope(content_length="7"), client.receive, 6)

    assert not client._messages


@pytest.mark.parametrize("length", ["6", "x", "-1", ""])
async def test_a_body_with_a_valid_or_malformed_content_length_is_read(length: str) -> None:
    assert await read_body(scope(content_length=length), Client(piece(b"abcdef")).receive, 6) == b"abcdef"


@pytest.mark.parametrize("messages", [[LEFT], [piece(b"a", more=True), LEFT]])
async def test_a_trainer_that_disconnects_before_its_body_is_complete_raises_an_error(messages: list[Message]) -> None:
    with pytest.raises(HungUp):
        await read_body(scope(), Client(*messages).receive, 6)


# -- headers and answers --------------------------------------------------------------------------------------------


def test_headers_are_found_by_name() -> None:
    given: Scope = {"headers": [(b"a", b"1"), (b"b", b"\xe9"), (b"a", b"2")]}

    assert (header(given, b"a"), headers(given, b"a")) == ("1", ["1", "2"])
    assert header(given, b"b") == "é"
    assert (header(given, b"c"), headers(given, b"c")) == (None, [])


async def test_an_answer_is_complete_json_with_its_length() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await respond_json(send, 418, {"a": "é", "b": [1, None]}, [(b"retry-after", b"1")])

    start, body = sent
    assert start["status"] == 418
    assert body["body"] == '{"a":"é","b":[1,null]}'.encode()
    assert dict(start["headers"]) == {
        b"content-length": str(len(body["body"])).encode(),
        b"content-type": b"application/json",
        b"retry-after": b"1",
    }
    assert not body.get("more_body", False)


async def test_an_answer_may_have_any_content_type() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await respond(send, 200, b"text", [(b"content-type", b"text/plain")])

    assert dict(sent[0]["headers"]) == {b"content-length": b"4", b"content-type": b"text/plain"}


@pytest.mark.parametrize("value", ["\ud800", {"input": float("nan")}, {"input": [float("inf"), -float("inf")]}])
def test_every_value_is_answered_as_valid_json(value: object) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    json.loads(dump(value).decode("utf-8", "surrogatepass"), parse_constant=refuse)
