"""Limits and shutdown of the server's WebSockets, tested with the client package of OpenEnv's own clients."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from gateway.server import HttpServer, listen
from gateway.server.http import BoundedHttp
from gateway.server.websocket import FRAME_MAX_BYTES, LOST_AFTER_S, PART_CHARS, BoundedSocket
from tests.deadlines import HANG_S
from tests.fakes.eventually import until


class Echo:
    """An application that answers each message with its length, and ``wait`` only after its gate opens.

    It answers ``give N`` with so many characters.
    """

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.holds = asyncio.Event()
        self.connections: list[object] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            text = message.get("text") or ""
            if text == "wait":
                self.holds.set()
                await self.gate.wait()
            answer = "é" * int(text.removeprefix("give ")) if text.startswith("give ") else str(len(text))
            await send({"type": "websocket.send", "text": answer})


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[tuple[HttpServer, str]]:
    """Run a server of *app*, and yield it and its address."""
    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(
        app,
        http=BoundedHttp,
        ws=BoundedSocket,
        ws_max_size=FRAME_MAX_BYTES,
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=5,
    )
    server = HttpServer(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    host, port = listener.getsockname()
    try:
        yield server, f"ws://{host}:{port}"
    finally:
        server.should_exit = True
        await running
        listener.close()


async def asked(client: ClientConnection, text: str) -> str | bytes:
    await client.send(text)
    return await client.recv()


async def test_a_message_of_16_mib_is_accepted_and_a_larger_message_closes_the_socket_with_1009() -> None:
    async with asyncio.timeout(HANG_S), served(Echo()) as (_, url), connect(url) as client:
        assert await asked(client, "a" * FRAME_MAX_BYTES) == str(FRAME_MAX_BYTES)

        with pytest.raises(ConnectionClosed) as closed:
            await asked(client, "a" * (FRAME_MAX_BYTES + 1))

    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1009


@pytest.mark.parametrize("count", [PART_CHARS, PART_CHARS + 1, 3 * PART_CHARS, 5 * PART_CHARS - 7])
async def test_a_large_answer_arrives_whole_and_in_order(count: int) -> None:
    async with asyncio.timeout(HANG_S), served(Echo()) as (_, url), connect(url, max_size=None) as client:
        await client.send(f"give {count}")
        await client.send("abc")
        first, second = await client.recv(), await client.recv()

    assert first == "é" * count
    assert second == "3"


async def test_other_clients_are_answered_while_a_large_answer_is_not_read() -> None:
    async with asyncio.timeout(HANG_S), served(Echo()) as (_, url), connect(url, max_size=None) as slow:
        slow.transport.pause_reading()
        await slow.send(f"give {20 * PART_CHARS}")
        async with connect(url) as other:
            assert await asked(other, "abcd") == "4"
        slow.transport.resume_reading()
        assert len(await slow.recv()) == 20 * PART_CHARS


async def test_the_shutdown_waits_for_a_pending_answer_and_closes_with_1001() -> None:
    app = Echo()
    async with asyncio.timeout(HANG_S), served(app) as (server, url), connect(url) as busy, connect(url) as idle:
        await busy.send("wait")
        await app.holds.wait()

        server.should_exit = True
        with pytest.raises(ConnectionClosed) as first:
            await idle.recv()
        app.gate.set()
        answer = await busy.recv()
        with pytest.raises(ConnectionClosed) as second:
            await busy.recv()

    assert answer == "4"
    assert [closed.value.rcvd and closed.value.rcvd.code for closed in (first, second)] == [1001, 1001]


async def test_a_message_that_arrives_after_the_close_is_never_processed() -> None:
    app = Echo()
    async with asyncio.timeout(HANG_S), served(app) as (server, url), connect(url) as client:
        assert await asked(client, "x") == "1"
        client.transport.pause_reading()  # the client package answers a close as soon as it reads the close

        server.should_exit = True
        await until(lambda: not server.servers or not server.servers[0].sockets)
        await client.send("wait")
        client.transport.resume_reading()
        with pytest.raises(ConnectionClosed) as closed:
            await client.recv()

    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1001
    assert not app.holds.is_set()


async def test_no_log_shows_the_path_because_it_may_contain_a_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with asyncio.timeout(HANG_S), served(Echo()) as (_, url), connect(f"{url}/k/a-secret-key/ws") as client:
        await client.send("x")
        await client.recv()

    ours = [record for record in caplog.records if not record.name.startswith("websockets.client")]
    assert not any("a-secret-key" in record.getMessage() for record in ours)


async def test_messages_are_not_compressed() -> None:
    async with asyncio.timeout(HANG_S), served(Echo()) as (_, url), connect(url) as client:
        assert client.response is not None
        assert "Sec-WebSocket-Extensions" not in client.response.headers


async def test_sockets_use_keepalive_and_a_user_timeout_to_detect_lost_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []
    connection_made = BoundedSocket.connection_made

    def remember(self: BoundedSocket, transport: asyncio.BaseTransport) -> None:
        connection_made(self, transport)
        made.append(transport.get_extra_info("socket"))

    monkeypatch.setattr(BoundedSocket, "connection_made", remember)
    async with asyncio.timeout(HANG_S), served(Echo()) as (_, url), connect(url):
        (server_side,) = made
        assert server_side.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert server_side.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == LOST_AFTER_S * 1000
