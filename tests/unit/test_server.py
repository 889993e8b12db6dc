"""The HTTP server bounds the size and time of heads and bodies, and ends its connections gracefully."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

import pytest
import uvicorn
import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.core.errors import ConfigError
from gateway.frontends.asgi import respond
from gateway.server import HttpServer, listen
from gateway.server.http import BoundedHttp
from tests.deadlines import HANG_S


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await respond(send, 200, b"hello")


@asynccontextmanager
async def served(
    app: ASGIApp = hello, *, told: Callable[[HttpServer], None] = lambda _: None, max_connections: int | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Run a server of *app* and yield a connection to it; *told* is called with the server."""
    listener = listen("127.0.0.1", 0)
    server = HttpServer(
        uvicorn.Config(app, http=BoundedHttp, ws="none", lifespan="off", log_config=None),
        max_connections=max_connections,
    )
    told(server)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        server.should_exit = True
        await running
        listener.close()


async def read(reader: asyncio.StreamReader, until: bytes) -> bytes:
    async with asyncio.timeout(HANG_S):
        return await reader.readuntil(until)


async def test_requests_on_one_connection_are_answered_in_turn() -> None:
    async with served() as (reader, writer):
        for _ in range(3):
            writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
            assert (await read(reader, b"hello")).startswith(b"HTTP/1.1 200")


async def test_an_endless_head_is_refused() -> None:
    async with served() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: h\r\nx-long: ")
        for _ in range(40):
            writer.write(b"a" * 65_536)

        answer = await read(reader, b"}")

    assert answer.startswith(b"HTTP/1.1 431")


async def test_a_head_of_64_kib_is_served() -> None:
    async with served() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: h\r\nx-long: " + b"a" * 65_536 + b"\r\n\r\n")

        assert (await read(reader, b"hello")).startswith(b"HTTP/1.1 200")


async def test_incomplete_heads_of_all_connections_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.server.http.HEADS_MAX_BYTES", 100_000)
    async with served() as (reader, writer):
        first_reader, first = await asyncio.open_connection(*writer.get_extra_info("peername"))
        first.write(b"GET / HTTP/1.1\r\nhost: h\r\nx-long: " + b"a" * 60_000)
        writer.write(b"GET / HTTP/1.1\r\nhost: h\r\nx-long: " + b"a" * 60_000)
        answers = {asyncio.ensure_future(read(stream, b"}")) for stream in (reader, first_reader)}
        done, late = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        for answer in late:
            answer.cancel()
        first.close()

    assert {one.result()[:12] for one in done} == {b"HTTP/1.1 503"}


async def test_connections_beyond_the_limit_are_refused_and_a_closed_one_makes_room() -> None:
    async with served(max_connections=2) as (reader, writer):
        address = writer.get_extra_info("peername")
        writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
        assert (await read(reader, b"hello")).startswith(b"HTTP/1.1 200")
        second_reader, second = await asyncio.open_connection(*address)
        second.write(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
        assert (await read(second_reader, b"hello")).startswith(b"HTTP/1.1 200")

        third_reader, third = await asyncio.open_connection(*address)
        refused = await read(third_reader, b"}")
        third.close()
        writer.write(b"GET / HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
        assert (await read(reader, b"hello")).startswith(b"HTTP/1.1 200")
        assert await reader.read() == b""

        fourth_reader, fourth = await asyncio.open_connection(*address)
        fourth.write(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
        assert (await read(fourth_reader, b"hello")).startswith(b"HTTP/1.1 200")
        fourth.close()
        second.close()

    assert refused.startswith(b"HTTP/1.1 503")
    assert b"2 connections" in refused


async def test_a_head_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.server.http.HEAD_S", 0.05)
    async with served() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n")

        answer = await read(reader, b"}")

    assert answer.startswith(b"HTTP/1.1 408")


async def test_a_stalled_body_is_refused_and_the_application_gets_a_disconnect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.server.http.BODY_S", 0.1)
    heard: list[str] = []
    is_over = asyncio.Event()

    async def reading(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] == "http.request" and message["more_body"]:
            heard.append(message["body"].decode())
        heard.append(message["type"])
        is_over.set()

    async with served(reading) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 100\r\n\r\nfirst")
        answer = await read(reader, b"}")
        async with asyncio.timeout(HANG_S):
            assert await reader.read() == b""
            await is_over.wait()

    assert answer.startswith(b"HTTP/1.1 408")
    assert "".join(heard) == "firsthttp.disconnect"


async def test_a_body_that_is_too_slow_on_average_is_refused_even_with_short_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.server.http.BODY_LEAST_S", 0.1)
    monkeypatch.setattr("gateway.server.http.BODY_S", HANG_S)
    is_over = asyncio.Event()

    async def reading(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] == "http.request":
            pass
        is_over.set()

    async with served(reading) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 100\r\n\r\n")
        for byte in (b"a", b"b", b"c"):
            writer.write(byte)
            await writer.drain()
        answer = await read(reader, b"}")
        async with asyncio.timeout(HANG_S):
            assert await reader.read() == b""
            await is_over.wait()

    assert answer.startswith(b"HTTP/1.1 408")
    assert b"less than 32768 bytes a second" in answer


async def test_the_time_for_a_body_grows_with_its_received_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.server.http.BODY_LEAST_S", 0.0)
    monkeypatch.setattr("gateway.server.http.BODY_RATE", 0.01)
    has_begun = asyncio.Event()

    async def reading(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            has_begun.set()
        await respond(send, 200, b"hello")

    async with served(reading) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 10\r\n\r\nfirst")
        async with asyncio.timeout(HANG_S):
            await has_begun.wait()
        writer.write(b" half")

        assert (await read(reader, b"hello")).startswith(b"HTTP/1.1 200")


async def test_a_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.server.http.HEAD_S", 0.05)
    async with served() as (reader, _):
        async with asyncio.timeout(HANG_S):
            assert await reader.read() == b""


def test_an_address_in_use_is_an_error_that_names_the_address() -> None:
    taken = listen("127.0.0.1", 0)
    try:
        with pytest.raises(ConfigError, match=r"can't listen on 127\.0\.0\.1"):
            listen("127.0.0.1", taken.getsockname()[1])
    finally:
        taken.close()


async def test_a_leaving_server_still_accepts_connections_and_closes_each_after_one_answer() -> None:
    servers: list[HttpServer] = []
    async with served(told=servers.append) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
        assert b"connection: close" not in await read(reader, b"hello")

        servers[0].leave()
        writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
        kept = await read(reader, b"hello")
        new_reader, new_writer = await asyncio.open_connection(*writer.get_extra_info("peername"))
        new_writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
        new = await read(new_reader, b"hello")

        for answer, one in ((kept, reader), (new, new_reader)):
            assert answer.startswith(b"HTTP/1.1 200")
            assert answer.count(b"connection: close") == 1
            async with asyncio.timeout(HANG_S):
                assert await one.read() == b""
        new_writer.close()


async def test_a_leaving_server_closes_only_connections_whose_answer_had_not_started() -> None:
    servers: list[HttpServer] = []
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/late":
            begun.set()
            await go_on.wait()
            await respond(send, 200, b"hello")
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        begun.set()
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"hello"})

    for path, closes in ((b"/early", 0), (b"/late", 1)):
        begun.clear()
        go_on.clear()
        async with served(slow, told=servers.append) as (reader, writer):
            writer.write(b"GET " + path + b" HTTP/1.1\r\nhost: h\r\n\r\n")
            async with asyncio.timeout(HANG_S):
                await begun.wait()
            servers[-1].leave()
            go_on.set()

            assert (await read(reader, b"hello")).count(b"connection: close") == closes


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_client_that_does_not_read_is_cut_off(
    run: Callable[[Coroutine[object, object, None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.server.http.STALL_S", 0.1)

    async def cut_off() -> None:
        ended = asyncio.Event()

        async def endless(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while not scope["gateway.connection"].is_lost:
                await send({"type": "http.response.body", "body": b"a" * 65_536, "more_body": True})
            ended.set()

        async with served(endless) as (reader, writer):
            writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
            await read(reader, b"200")
            async with asyncio.timeout(HANG_S):
                await ended.wait()  # the client does not read meanwhile

    run(cut_off())


# -- details of HTTP ------------------------------------------------------------------------------------------------


async def streamed(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with two parts of unknown length."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"one ", "more_body": True})
    await send({"type": "http.response.body", "body": b"two"})


async def test_an_http_10_client_gets_a_response_of_unknown_length_without_chunks() -> None:
    async with served(streamed) as (reader, writer):
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        async with asyncio.timeout(HANG_S):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")

    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body == b"one two"


async def test_an_http_11_client_gets_a_response_of_unknown_length_in_chunks() -> None:
    async with served(streamed) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")

        assert (await read(reader, b"0\r\n\r\n")).endswith(b"4\r\none \r\n3\r\ntwo\r\n0\r\n\r\n")


async def test_an_http_10_client_gets_a_response_of_known_length_as_it_is() -> None:
    async with served() as (reader, writer):
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        async with asyncio.timeout(HANG_S):
            answer = await reader.read()

    assert b"content-length: 5" in answer
    assert answer.endswith(b"\r\n\r\nhello")


@pytest.mark.parametrize("hosts", [b"", b"host: a\r\nhost: b\r\n", b"host: a\r\nHOST: a\r\n"])
async def test_a_request_without_exactly_one_host_is_refused(hosts: bytes) -> None:
    asked: list[Scope] = []

    async def noting(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append(scope)
        await hello(scope, receive, send)

    async with served(noting) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\n" + hosts + b"content-length: 3\r\n\r\nabcGET / HTTP/1.1\r\nhost: h\r\n\r\n")
        async with asyncio.timeout(HANG_S):
            answer = await reader.read()

    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1
    assert asked == []


@pytest.mark.parametrize(
    "head",
    [
        b"POST /HTTP/1.1\r\nhost: h\r\n",  # HTTP/0.9: a target without a version
        b"POST /\r\nhost: h\r\n",
        b"POST / HTTP/2.0\r\nhost: h\r\n",
        b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: gzip, chunked\r\n",
        b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
    ],
)
async def test_other_versions_and_codings_are_refused(head: bytes) -> None:
    async with served() as (reader, writer):
        writer.write(head + b"\r\n5\r\nhello\r\n0\r\n\r\n")
        async with asyncio.timeout(HANG_S):
            assert (await reader.read()).startswith(b"HTTP/1.1 400")


async def test_trailers_of_a_chunked_body_are_no_headers() -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def noting(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        seen.extend(scope["headers"])
        await hello(scope, receive, send)

    async with served(noting) as (reader, writer):
        body = b"3\r\nabc\r\n0\r\nauthorization: Bearer stolen\r\nx-session-id: other\r\n\r\n"
        writer.write(b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n" + body)
        assert (await read(reader, b"hello")).startswith(b"HTTP/1.1 200")

    assert seen == [(b"host", b"h"), (b"transfer-encoding", b"chunked")]


async def test_a_bad_request_behind_a_response_that_is_being_sent_does_not_mix_with_it() -> None:
    gate = asyncio.Event()

    async def half(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        await gate.wait()

    async with served(half) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
        await read(reader, b"half")
        writer.write(b"not HTTP\r\n\r\n")
        try:
            async with asyncio.timeout(HANG_S):
                assert await reader.read() == b""
        finally:
            gate.set()
