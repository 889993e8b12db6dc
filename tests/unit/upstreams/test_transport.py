"""The HTTP transport to workers, against real servers; the tests write every byte of the answers."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from gateway.core.errors import ReplicaLeft, UpstreamError, UpstreamGone, UpstreamTimeout
from gateway.core.ids import WorkerId
from gateway.core.ports.transport import Request
from gateway.upstreams import http1 as connection_module
from gateway.upstreams import transport as module
from gateway.upstreams.http1 import HIGH_WATER_BYTES, MAX_HEAD_BYTES
from gateway.upstreams.transport import HttpTransport, RelayExchange
from tests.deadlines import HANG_S
from tests.fakes.eventually import until
from tests.fakes.raw_http import Connection, RawServer, Script

ONE, TWO = WorkerId("one"), WorkerId("two")
GET = Request(b"GET", b"/hello?a=b%20c", [(b"accept", b"*/*")])
POST = Request(b"POST", b"/math/call", [(b"x-session-id", b"s")], b'{"name":"echo"}')
READ_BYTES = 2**18
"""Bytes that asyncio reads at a time. The buffer may exceed its limit by this amount before reading stops."""
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

Serve = Callable[[Script], "contextlib.AbstractAsyncContextManager[RawServer]"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder with a short path, because the path of a Unix socket is limited."""
    path = Path(tempfile.mkdtemp(prefix="rl-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=["unix", "tcp"])
def serve(request: pytest.FixtureRequest, folder: Path) -> Serve:
    """Return a function that serves a script on a Unix socket or on loopback."""
    numbers = iter(range(100))

    def start(script: Script) -> RawServer:
        return RawServer(script, path=folder / f"{next(numbers)}.sock" if request.param == "unix" else None)

    return start


@pytest.fixture
async def relay() -> AsyncIterator[HttpTransport]:
    relay = HttpTransport()
    yield relay
    await relay.aclose()


def answering(*answers: bytes, then: Callable[[Connection], Awaitable[None]] | None = None) -> Script:
    """Return a script that sends *answers* in turn on each connection and repeats the last answer."""

    async def script(connection: Connection) -> None:
        for number in range(10_000):
            await connection.request()
            await connection.send(answers[min(number, len(answers) - 1)])
            if then is not None:
                await then(connection)

    return script


async def close(connection: Connection) -> None:
    """Close the connection, as a server does after its answer."""
    connection.writer.close()
    raise ConnectionAbortedError


async def ask(
    relay: HttpTransport,
    server: RawServer,
    request: Request = GET,
    *,
    worker: WorkerId = ONE,
    silence_s: float = HANG_S,
) -> tuple[int, bytes]:
    """Send a request and read the whole answer."""
    exchange = await relay.send(worker, server.address, request, silence_s=silence_s)
    try:
        return exchange.status, await exchange.read(2**26)
    finally:
        await exchange.aclose()


def in_use(relay: HttpTransport) -> int:
    """Return the number of connections that requests hold, over all workers; it has no public attribute."""
    return sum(len(worker._busy) for worker in relay._workers.values())


def idle(relay: HttpTransport) -> int:
    """Return the number of connections that wait for a request."""
    return sum(len(worker._idle) for worker in relay._workers.values())


# -- requests and answers -------------------------------------------------------------------------------------------


async def test_a_request_arrives_with_its_target_headers_and_body(relay: HttpTransport, serve: Serve) -> None:
    async with serve(answering(OK)) as server:
        await ask(relay, server, GET)
        await ask(relay, server, POST)

        got, posted = server.requests
        assert (got.method, got.target, got.body) == ("GET", "/hello?a=b%20c", b"")
        host = "worker" if server.address.startswith("unix:") else server.address.removeprefix("tcp:")
        assert got.headers == {"host": host, "accept": "*/*"}
        assert (posted.method, posted.target, posted.body) == ("POST", "/math/call", POST.body)
        assert posted.headers == {"host": host, "x-session-id": "s", "content-length": "15"}


async def test_a_post_without_a_body_has_a_content_length_of_zero(relay: HttpTransport, serve: Serve) -> None:
    async with serve(answering(OK)) as server:
        await ask(relay, server, Request(b"POST", b"/delete"))

        assert server.requests[0].headers["content-length"] == "0"


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        pytest.param(OK, 200, b"ok", id="with a content length"),
        pytest.param(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", 200, b"", id="empty"),
        pytest.param(b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", id="no body"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n",
            200,
            b"abcde",
            id="in chunks without a trailer",
        ),
        pytest.param(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx-trailer: 1\r\n\r\n",
            200,
            b"a",
            id="in chunks with a trailer",
        ),
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n" + OK, 200, b"ok", id="after an interim answer"),
        pytest.param(
            b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n" + OK,
            200,
            b"ok",
            id="after two interim answers",
        ),
        pytest.param(b"HTTP/1.1 503\r\ncontent-length: 2\r\n\r\nno", 503, b"no", id="without a reason phrase"),
        pytest.param(b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok", 200, b"ok", id="of an HTTP/1.0 server"),
    ],
)
async def test_a_body_is_read_completely_with_every_framing(
    relay: HttpTransport, serve: Serve, answer: bytes, status: int, body: bytes
) -> None:
    async with serve(answering(answer)) as server:
        assert await ask(relay, server) == (status, body)
        assert in_use(relay) == 0


async def test_a_body_that_arrives_with_its_head_is_whole(relay: HttpTransport, serve: Serve) -> None:
    answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nx-session-faults: []\r\n\r\n"
    async with serve(answering(answer)) as server:
        exchange = await relay.send(ONE, server.address, GET, silence_s=HANG_S)

        assert exchange.is_whole
        assert await exchange.read(100) == b"abc"
        await exchange.aclose()
        assert in_use(relay) == 0


async def test_a_body_without_framing_ends_when_its_connection_closes(relay: HttpTransport, serve: Serve) -> None:
    async with serve(answering(b"HTTP/1.1 200 OK\r\n\r\nuntil the end", then=close)) as server:
        assert await ask(relay, server) == (200, b"until the end")
        assert await ask(relay, server) == (200, b"until the end")
        assert len(server.connections) == 2


async def test_an_answer_that_arrives_byte_by_byte_is_read_correctly(relay: HttpTransport, serve: Serve) -> None:
    answer = b"HTTP/1.1 200 OK\r\nx-a: 1\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"

    async def script(connection: Connection) -> None:
        await connection.request()
        for byte in answer:
            await connection.send(bytes((byte,)))
            await asyncio.sleep(0)
        await connection.left()

    async with serve(script) as server:
        exchange = await relay.send(ONE, server.address, GET, silence_s=HANG_S)
        assert list(exchange.headers) == [(b"x-a", b"1")]
        assert await exchange.read(100) == b"abc"
        await exchange.aclose()


async def test_headers_are_in_lower_case_and_connection_headers_are_removed(relay: HttpTransport, serve: Serve) -> None:
    answer = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: keep-alive\r\nKeep-Alive: timeout=5\r\n"
        b"X-Twice: 1\r\nX-Twice: 2\r\nTransfer-Encoding: chunked\r\nTrailer: x\r\n\r\n0\r\n\r\n"
    )
    async with serve(answering(answer)) as server:
        exchange = await relay.send(ONE, server.address, GET, silence_s=HANG_S)

        assert list(exchange.headers) == [(b"content-type", b"text/plain"), (b"x-twice", b"1"), (b"x-twice", b"2")]
        await exchange.aclose()


async def test_headers_of_interim_answers_are_dropped(relay: HttpTransport, serve: Serve) -> None:
    answer = b"HTTP/1.1 103 Early Hints\r\nlink: early\r\n\r\nHTTP/1.1 200 OK\r\nx-a: 1\r\ncontent-length: 0\r\n\r\n"
    async with serve(answering(answer)) as server:
        exchange = await relay.send(ONE, server.address, GET, silence_s=HANG_S)

        assert list(exchange.headers) == [(b"x-a", b"1")]
        await exchange.aclose()


async def test_pieces_of_a_body_arrive_as_soon_as_they_are_written(relay: HttpTransport, serve: Serve) -> None:
    go_on = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\none")
        await go_on.wait()
        await connection.send(b"two")
        await connection.left()

    async with serve(script) as server:
        exchange = await relay.send(ONE, server.address, GET, silence_s=HANG_S)
        pieces = exchange.chunks()

        first = await anext(pieces)
        go_on.set()

        assert not exchange.is_whole
        assert first + b"".join([piece async for piece in pieces]) == b"onetwo"
        assert first == b"one"
        await exchange.aclose()


async def test_a_body_beyond_the_limit_is_an_error_and_its_connection_is_not_used_again(
    relay: HttpTransport, serve: Serve
) -> None:
    async with serve(answering(OK)) as server:
        exchange = await relay.send(ONE, server.address, GET, silence_s=HANG_S)
        with pytest.raises(UpstreamError, match="exceeds 1 bytes"):
            await exchange.read(1)
        await exchange.aclose()

        assert await ask(relay, server) == (200, b"ok")
        assert in_use(relay) == 0


# -- kept connections -----------------------------------------------------------------------------------------------


async def test_consecutive_requests_share_a_connection(relay: HttpTransport, serve: Serve) -> None:
    async with serve(answering(OK)) as server:
        for _ in range(20):
            await ask(relay, server)

        assert len(server.connections) == 1
        assert len(server.requests) == 20
        assert (in_use(relay), idle(relay)) == (0, 1)


async def test_concurrent_requests_have_a_connection_each_and_later_requests_reuse_them(
    relay: HttpTransport, serve: Serve
) -> None:
    arrived = 0
    all_there = asyncio.Event()

    async def script(connection: Connection) -> None:
        nonlocal arrived
        while True:
            request = await connection.request()
            arrived += 1
            if arrived == 50:
                all_there.set()
            await all_there.wait()
            await connection.answer(request.body)

    async with serve(script) as server:
        requests = [Request(b"POST", b"/", (), str(number).encode()) for number in range(50)]
        answers = await asyncio.gather(*(ask(relay, server, request) for request in requests))
        await asyncio.gather(*(ask(relay, server, request) for request in requests))

        assert [body for _, body in answers] == [request.body for request in requests]
        assert len(server.connections) == 50


async def test_requests_beyond_the_limit_of_connections_wait_for_a_connection(
    relay: HttpTransport, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 3)
    busy: set[int] = set()
    most = 0

    async def script(connection: Connection) -> None:
        nonlocal most
        while True:
            request = await connection.request()
            busy.add(id(connection))
            most = max(most, len(busy))
            await asyncio.sleep(0)
            busy.discard(id(connection))
            await connection.answer(request.body)

    async with serve(script) as server:
        requests = [Request(b"POST", b"/", (), str(number).encode()) for number in range(30)]
        answers = await asyncio.gather(*(ask(relay, server, request) for request in requests))

        assert [body for _, body in answers] == [request.body for request in requests]
        assert most <= 3
        assert len(server.connections) <= 3


async def test_a_request_that_gets_no_connection_in_time_has_not_been_sent(
    relay: HttpTransport, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 1)

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.left()

    async with serve(script) as server:
        async with _asking(relay, server):
            await until(lambda: len(server.requests) == 1)
            with pytest.raises(UpstreamTimeout):
                await ask(relay, server, silence_s=0.1)

        assert len(server.requests) == 1
        assert in_use(relay) == 0


def behind(gate: asyncio.Event) -> Callable[[Connection], Awaitable[None]]:
    """Return the script of a worker that answers all its requests once *gate* is open."""

    async def script(connection: Connection) -> None:
        while True:
            await connection.request()
            await gate.wait()
            await connection.send(OK)

    return script


async def test_idle_connections_after_a_burst_are_bounded(
    relay: HttpTransport, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_IDLE", 2)
    monkeypatch.setattr(module, "REST_S", 0.05)
    gate = asyncio.Event()

    async with serve(behind(gate)) as server:
        asking = [asyncio.ensure_future(ask(relay, server)) for _ in range(10)]
        await until(lambda: len(server.requests) == 10)
        gate.set()
        await asyncio.gather(*asking)

        await until(lambda: idle(relay) == 2)
        await until(lambda: server.open_connections == 2)


async def test_a_second_burst_reuses_the_connections_of_the_first(
    relay: HttpTransport, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_IDLE", 2)
    gate = asyncio.Event()

    async with serve(behind(gate)) as server:
        for number in (1, 2):
            gate.clear()
            asking = [asyncio.ensure_future(ask(relay, server)) for _ in range(10)]
            await until(lambda wanted=10 * number: len(server.requests) == wanted)  # type: ignore[misc]  # the default binds the value now
            gate.set()
            await asyncio.gather(*asking)

        assert len(server.connections) == 10


async def test_a_connection_belongs_to_one_worker_and_not_to_an_address(relay: HttpTransport, serve: Serve) -> None:
    async with serve(answering(OK)) as server:
        await ask(relay, server, worker=ONE)
        await ask(relay, server, worker=TWO)
        await ask(relay, server, worker=ONE)

        assert [len(connection.requests) for connection in server.connections] == [2, 1]


async def test_a_worker_that_moved_is_reached_only_at_its_new_address(relay: HttpTransport, serve: Serve) -> None:
    async with serve(answering(OK)) as before, serve(answering(OK)) as after:
        await ask(relay, before)
        await ask(relay, after)

        await until(lambda: before.open_connections == 0)
        assert (len(before.requests), len(after.requests)) == (1, 1)


async def test_an_idle_connection_that_the_server_closed_is_not_reused(relay: HttpTransport, serve: Serve) -> None:
    async with serve(answering(OK)) as server:
        await ask(relay, server)
        server.connections[0].abort()
        await until(lambda: server.open_connections == 0)
        await asyncio.sleep(0)  # lets the transport read the end of the connection

        assert await ask(relay, server) == (200, b"ok")
        assert len(server.connections) == 2


async def test_a_tcp_connection_that_was_idle_for_too_long_is_not_used() -> None:
    async with RawServer(answering(OK)) as server, contextlib.aclosing(HttpTransport(kept_s=0.0)) as relay:
        await ask(relay, server)
        await ask(relay, server)

        assert len(server.connections) == 2
        await until(lambda: server.open_connections == 1)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 500 No\r\ncontent-length: 2\r\n\r\nok",
    ],
)
async def test_a_connection_that_the_server_will_close_is_not_used_again(
    relay: HttpTransport, serve: Serve, answer: bytes
) -> None:
    async with serve(answering(answer)) as server:
        assert (await ask(relay, server))[1] == b"ok"
        assert (await ask(relay, server))[1] == b"ok"

        assert [len(connection.requests) for connection in server.connections] == [1, 1]


async def test_unsolicited_bytes_are_never_taken_for_an_answer(relay: HttpTransport, serve: Serve) -> None:
    async with serve(answering(OK)) as server:
        await ask(relay, server)
        await server.connections[0].send(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwrong")
        await until(lambda: server.open_connections == 0)

        assert await ask(relay, server) == (200, b"ok")
        assert len(server.connections) == 2


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(b"HTTP/1.1 500 No\r\nx-a: 1\r\ncontent-length: 5\r\n\r\nwrong", id="a whole answer"),
        pytest.param(b"HTTP/1.1 500 No\r\nx-a: 1\r\n", id="a part of an answer"),
        pytest.param(b"HTT", id="three bytes"),
        pytest.param(b"nonsense\r\n\r\n", id="nonsense"),
    ],
)
async def test_bytes_after_an_answer_are_not_part_of_it_or_of_the_next_answer(
    relay: HttpTransport, serve: Serve, more: bytes
) -> None:
    async with serve(answering(OK + more, OK)) as server:
        exchange = await relay.send(ONE, server.address, GET, silence_s=HANG_S)
        first = (exchange.status, list(exchange.headers), await exchange.read(100))
        await exchange.aclose()
        second = await ask(relay, server)

        assert first == (200, [], b"ok")
        assert second == (200, b"ok")
        assert [len(connection.requests) for connection in server.connections] == [1, 1]


async def test_the_connection_of_a_body_that_was_not_read_completely_is_closed(
    relay: HttpTransport, serve: Serve
) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nsome")
        await connection.left()

    async with serve(script) as server:
        exchange = await relay.send(ONE, server.address, GET, silence_s=HANG_S)
        await exchange.aclose()
        await exchange.aclose()

        await until(lambda: server.open_connections == 0)
        assert (in_use(relay), idle(relay)) == (0, 0)


# -- failures -------------------------------------------------------------------------------------------------------


async def test_a_request_to_a_worker_that_accepts_no_connection_was_not_sent(
    relay: HttpTransport, serve: Serve
) -> None:
    async with serve(answering(OK)) as server:
        pass

    with pytest.raises(UpstreamGone) as error:
        await ask(relay, server)

    assert not error.value.sent
    assert in_use(relay) == 0


async def test_a_request_to_a_worker_that_ends_before_its_answer_may_have_run(
    relay: HttpTransport, serve: Serve
) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()

    async with serve(script) as server:
        with pytest.raises(UpstreamGone) as error:
            await ask(relay, server)

        assert error.value.sent
        assert len(server.requests) == 1  # the request was not sent again
        assert in_use(relay) == 0


@pytest.mark.parametrize(
    "piece",
    [
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n",
    ],
)
async def test_an_incomplete_answer_is_an_error_and_never_a_short_body(
    relay: HttpTransport, serve: Serve, piece: bytes
) -> None:
    async with serve(answering(piece, then=close)) as server:
        with pytest.raises(UpstreamGone) as error:
            await ask(relay, server)

        assert error.value.sent
        assert in_use(relay) == 0


async def test_a_reset_in_a_body_without_framing_is_an_error(relay: HttpTransport) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\n\r\nhalf")
        socket = connection.writer.get_extra_info("socket")
        socket.setsockopt(1, 13, b"\x01\x00\x00\x00\x00\x00\x00\x00")  # SO_LINGER of 0 s: a close sends a reset
        await may_reset.wait()
        connection.abort()

    may_reset = asyncio.Event()
    async with RawServer(script) as server:
        exchange = await relay.send(ONE, server.address, GET, silence_s=HANG_S)
        pieces = exchange.chunks()
        assert await anext(pieces) == b"half"
        may_reset.set()
        with pytest.raises(UpstreamGone):
            await anext(pieces)
        await exchange.aclose()


@pytest.mark.parametrize(
    "garbage",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x00\xff\x00\xff\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nno colon here\r\n\r\n",
    ],
)
async def test_an_answer_that_is_not_http_is_an_error_of_the_worker(
    relay: HttpTransport, serve: Serve, garbage: bytes
) -> None:
    async with serve(answering(garbage)) as server:
        with pytest.raises(UpstreamError) as error:
            await ask(relay, server)

        assert type(error.value) is UpstreamError
        assert (in_use(relay), idle(relay)) == (0, 0)


async def test_an_endless_head_is_an_error(relay: HttpTransport, serve: Serve) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\n")
        while True:
            await connection.send(b"x-filler: " + b"y" * 1000 + b"\r\n")

    async with serve(script) as server:
        with pytest.raises(UpstreamError, match="too large a head"):
            await ask(relay, server)
        assert in_use(relay) == 0


async def test_a_large_head_within_the_limit_is_read(relay: HttpTransport, serve: Serve) -> None:
    filler = b"x" * (MAX_HEAD_BYTES // 4)
    async with serve(
        answering(b"HTTP/1.1 200 OK\r\nx-filler: " + filler + b"\r\ncontent-length: 2\r\n\r\nok")
    ) as server:
        exchange = await relay.send(ONE, server.address, GET, silence_s=HANG_S)
        try:
            assert list(exchange.headers) == [(b"x-filler", filler)]
            assert await exchange.read(100) == b"ok"
        finally:
            await exchange.aclose()


async def test_a_body_in_the_same_piece_as_the_end_of_the_head_does_not_count_as_head(
    relay: HttpTransport, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "MAX_HEAD_BYTES", 200)
    body = b"z" * 10_000

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\n")
        await until(lambda: _head_bytes(relay) > 0)
        await connection.send(b"content-length: %d\r\n\r\n" % len(body) + body)
        await connection.left()

    async with serve(script) as server:
        assert await ask(relay, server) == (200, body)


def _head_bytes(relay: HttpTransport) -> int:
    return sum(connection._head_bytes for worker in relay._workers.values() for connection in worker._busy)


async def test_silence_before_the_head_is_a_timeout(relay: HttpTransport, serve: Serve) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.left()

    async with serve(script) as server:
        with pytest.raises(UpstreamTimeout, match=r"silent for 0\.1 s"):
            await ask(relay, server, silence_s=0.1)

        assert in_use(relay) == 0
        await until(lambda: server.open_connections == 0)


async def test_silence_within_a_body_is_a_timeout(relay: HttpTransport, serve: Serve) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
        await connection.left()

    async with serve(script) as server:
        with pytest.raises(UpstreamTimeout):
            await ask(relay, server, silence_s=0.1)

        assert in_use(relay) == 0


async def test_a_worker_that_sends_something_before_each_timeout_is_not_silent(
    relay: HttpTransport, serve: Serve
) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(20):
            await asyncio.sleep(0.05)  # under test: the sum of the pauses is far above the allowed silence
            await connection.send(b"1\r\n.\r\n")
        await connection.send(b"0\r\n\r\n")
        await connection.left()

    async with serve(script) as server:
        assert await ask(relay, server, silence_s=0.5) == (200, b"." * 20)


async def test_a_request_that_the_worker_does_not_read_is_a_timeout(relay: HttpTransport, serve: Serve) -> None:
    async def script(connection: Connection) -> None:
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a stream's transport can also read
        await asyncio.get_running_loop().create_future()

    async with serve(script) as server:
        with pytest.raises(UpstreamTimeout):
            await ask(relay, server, Request(b"POST", b"/", (), b"x" * 2**24), silence_s=0.2)

        assert in_use(relay) == 0


async def test_an_early_answer_to_a_large_request_is_read(relay: HttpTransport, serve: Serve) -> None:
    async def script(connection: Connection) -> None:
        await connection.reader.readuntil(b"\r\n\r\n")
        await connection.send(b"HTTP/1.1 413 Too Large\r\nconnection: close\r\ncontent-length: 2\r\n\r\nno")
        await connection.left()

    async with serve(script) as server:
        answer = await ask(relay, server, Request(b"POST", b"/", (), b"x" * 2**22))

        assert answer == (413, b"no")


# -- back-pressure --------------------------------------------------------------------------------------------------


async def test_a_reader_that_pauses_makes_the_worker_pause(relay: HttpTransport, serve: Serve) -> None:
    written = 0
    total = 64 * 2**20
    piece = b"x" * 2**16

    async def script(connection: Connection) -> None:
        nonlocal written
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
        while written < total:
            await connection.send(piece)
            written += len(piece)
        await connection.left()

    async with serve(script) as server:
        exchange = await relay.send(ONE, server.address, GET, silence_s=HANG_S)
        pieces = exchange.chunks()
        await anext(pieces)
        await _settled(lambda: written)
        stopped_at = written
        buffered = _buffered(exchange)
        size = stopped_at
        async for chunk in pieces:
            size = max(size, len(chunk))
            assert len(chunk) <= HIGH_WATER_BYTES + READ_BYTES
        await exchange.aclose()

        # Beyond the transport's buffer there are only the buffers of the kernel and of the writer.
        assert buffered <= HIGH_WATER_BYTES + READ_BYTES
        assert stopped_at < total / 4
        assert written == total
        assert in_use(relay) == 0


async def test_a_long_pause_of_the_reader_is_not_mistaken_for_silence_of_the_worker(
    relay: HttpTransport, serve: Serve
) -> None:
    total = 32 * 2**20

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total + b"x" * total)
        await connection.left()

    async with serve(script) as server:
        exchange = await relay.send(ONE, server.address, GET, silence_s=0.2)
        pieces = exchange.chunks()
        size = len(await anext(pieces))
        await until(lambda: _buffered(exchange) > HIGH_WATER_BYTES)
        await asyncio.sleep(0.5)  # under test: the pause is longer than the allowed silence

        async for piece in pieces:
            size += len(piece)
        await exchange.aclose()

        assert size == total


def _buffered(exchange: RelayExchange) -> int:
    assert exchange._connection is not None
    return exchange._connection._buffered_bytes


async def _settled(value: Callable[[], int]) -> None:
    """Wait until *value* no longer changes."""
    last = -1
    for _ in range(1000):
        if value() == last:
            return
        last = value()
        for _ in range(20):
            await asyncio.sleep(0.001)
    raise AssertionError("it changes for ever")


# -- the end of a worker --------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _asking(
    relay: HttpTransport, server: RawServer, *, count: int = 1
) -> AsyncIterator[list[asyncio.Task[tuple[int, bytes]]]]:
    asking = [asyncio.ensure_future(ask(relay, server)) for _ in range(count)]
    try:
        yield asking
    finally:
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def test_forgetting_a_worker_interrupts_its_calls_immediately(relay: HttpTransport, serve: Serve) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
        await connection.left()

    async def silent(connection: Connection) -> None:
        await connection.request()
        await connection.left()

    async with serve(script) as talking, serve(silent) as quiet:
        async with _asking(relay, talking, count=3) as reading:
            await until(lambda: len(talking.requests) == 3)
            relay.forget(ONE)
            outcomes = await asyncio.gather(*reading, return_exceptions=True)
        async with _asking(relay, quiet, count=3) as waiting:
            await until(lambda: len(quiet.requests) == 3)
            relay.forget(ONE)
            outcomes += await asyncio.gather(*waiting, return_exceptions=True)

        assert [type(outcome) for outcome in outcomes] == [UpstreamGone] * 6
        assert all(isinstance(outcome, UpstreamGone) and outcome.sent for outcome in outcomes)
        await until(lambda: talking.open_connections == quiet.open_connections == 0)
        assert relay._workers == {}


async def test_forgetting_a_worker_does_not_affect_other_workers(relay: HttpTransport, serve: Serve) -> None:
    async with serve(answering(OK)) as server:
        await ask(relay, server, worker=ONE)
        await ask(relay, server, worker=TWO)

        relay.forget(ONE)
        relay.forget(ONE)
        relay.forget(WorkerId("never known"))

        assert await ask(relay, server, worker=TWO) == (200, b"ok")
        assert len(server.connections) == 2


async def test_a_request_that_waits_for_a_connection_while_its_worker_is_forgotten_was_not_sent(
    relay: HttpTransport, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 1)

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.left()

    async with serve(script) as server, _asking(relay, server, count=2) as both:
        await until(lambda: len(server.requests) == 1)
        relay.forget(ONE)
        outcomes = await asyncio.gather(*both, return_exceptions=True)

    assert sorted(outcome.sent for outcome in outcomes if isinstance(outcome, UpstreamGone)) == [False, True]


async def test_an_exchange_can_be_closed_after_its_worker_was_forgotten(relay: HttpTransport, serve: Serve) -> None:
    async with serve(answering(OK)) as server:
        exchange = await relay.send(ONE, server.address, GET, silence_s=HANG_S)
        relay.forget(ONE)
        await exchange.aclose()

        assert await ask(relay, server) == (200, b"ok")
        assert in_use(relay) == 0


async def test_requests_to_a_lost_worker_leave_nothing_behind(relay: HttpTransport, folder: Path) -> None:
    for number in range(10):
        worker = WorkerId(f"w{number}")
        with pytest.raises(UpstreamGone):
            await relay.send(worker, f"unix:{folder}/nosuch", GET, silence_s=HANG_S)

    assert len(relay._workers) == 0


# -- cancellation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", range(0, 30, 1))
async def test_a_request_that_is_cancelled_at_any_turn_holds_no_connection(
    relay: HttpTransport, serve: Serve, turns: int
) -> None:
    async def script(connection: Connection) -> None:
        while True:
            await connection.request()
            await connection.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(5):
                await connection.send(b"1\r\n.\r\n")
                await asyncio.sleep(0)
            await connection.send(b"0\r\n\r\n")

    async with serve(script) as server:
        asking = asyncio.ensure_future(ask(relay, server))
        for _ in range(turns):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

        assert in_use(relay) == 0
        assert await ask(relay, server) == (200, b".....")
        await until(lambda: server.open_connections == idle(relay))


async def test_a_request_that_is_cancelled_while_it_waits_for_a_connection_frees_its_place(
    relay: HttpTransport, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 1)
    gate = asyncio.Event()

    async with serve(behind(gate)) as server:
        holder = asyncio.ensure_future(ask(relay, server))
        await until(lambda: len(server.requests) == 1)
        async with _asking(relay, server):
            await asyncio.sleep(0)
        gate.set()

        assert await holder == (200, b"ok")
        assert await ask(relay, server) == (200, b"ok")
        assert len(server.requests) == 2


async def test_a_request_that_is_cancelled_while_the_worker_does_not_read_it_holds_no_connection(
    relay: HttpTransport, serve: Serve
) -> None:
    async def script(connection: Connection) -> None:
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a stream's transport can also read
        await asyncio.get_running_loop().create_future()

    async with serve(script) as server:
        large = Request(b"POST", b"/", (), b"x" * 2**24)
        asking = asyncio.ensure_future(ask(relay, server, large))
        await until(lambda: server.connections and in_use(relay) == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

        assert in_use(relay) == 0


async def test_closing_the_relay_interrupts_all_calls(serve: Serve) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.left()

    relay = HttpTransport()
    async with serve(script) as server, _asking(relay, server, count=2) as both:
        await until(lambda: len(server.requests) == 2)
        await relay.aclose()
        outcomes = await asyncio.gather(*both, return_exceptions=True)

        assert [type(outcome) for outcome in outcomes] == [ReplicaLeft, ReplicaLeft]
        await until(lambda: server.open_connections == 0)
