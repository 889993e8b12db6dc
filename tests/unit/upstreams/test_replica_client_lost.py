"""Authentication between replicas, and replicas that are lost before, during or after a request."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from gateway.core.errors import (
    SessionNotFound,
    UpstreamError,
    UpstreamGone,
    UpstreamTimeout,
)
from gateway.frontends.asgi import respond
from gateway.upstreams.replica_client import CLOCKS_DIFFER, SKEW_S, ReplicaClient
from tests.deadlines import HANG_S
from tests.fakes.eventually import until
from tests.fakes.raw_http import Connection, RawServer
from tests.fakes.replicas import SECRET, Holder, ask, failing, replica, served

PROJECT = Path(__file__).parents[3]


@pytest.fixture
async def peers() -> AsyncIterator[ReplicaClient]:
    made = ReplicaClient("http://127.0.0.1:1/", SECRET, late_s=0.2)
    yield made
    await made.aclose()


# -- authentication ---------------------------------------------------------------------------------------------------


async def recorded(secret: bytes = SECRET, clock: Callable[[], float] = time.time) -> tuple[dict[str, str], bytes]:
    """Return the headers and the body of a request that a replica sends."""

    async def drop(connection: Connection) -> None:
        await connection.request()
        connection.abort()

    peers = ReplicaClient("", secret, clock=clock)
    async with RawServer(drop) as server:
        with pytest.raises(UpstreamGone):
            await ask(peers, server.address.replace("tcp:", "http://"))
        [request] = server.requests
    await peers.aclose()
    own = {name: value for name, value in request.headers.items() if name.startswith("x-gateway-")}
    assert len(own) == 6
    return own, request.body


async def refused(method: str, url: str, headers: dict[str, str], body: bytes) -> bool:
    """Return True if the answer to a request is the answer for an unknown route."""
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        answer = await client.request(method, url, headers=raw, content=body)
    if answer.status_code == 200:
        return False
    assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"})
    assert not any(name.startswith("x-gateway-") for name in answer.headers)
    return True


async def test_only_a_request_with_a_valid_signature_of_all_its_parts_is_served() -> None:
    headers, body = await recorded()
    async with replica(Holder()) as holder:
        url = f"{holder.url}/peers/v1/act"
        assert await refused("POST", url, {}, body)
        for name, value in headers.items():
            without = {other: kept for other, kept in headers.items() if other != name}
            assert await refused("POST", url, without, body), name
            for other in ("", value + "0", "+" + value, "é" + value[1:], "0" * len(value)):
                assert await refused("POST", url, headers | {name: other}, body), (name, other)
        assert await refused("POST", url, headers, body + b"!")
        assert await refused("POST", f"{holder.url}/peers/v1/close", headers, body)
        assert await refused("GET", url, headers, body)
        for path in ("/peers/v1/", "/peers/v1", "/peers/v1/act/", "/peers/v2/act", "//peers/v1/act", "/"):
            assert await refused("POST", holder.url + path, headers, body), path
        assert holder.asked == []

        assert not await refused("POST", url, headers, body)  # the unchanged request is valid
        assert len(holder.asked) == 1


async def test_the_body_of_an_unsigned_request_is_not_read_into_memory() -> None:
    """The head alone suffices for the refusal. Otherwise any client could fill a replica's memory."""
    async with replica(Holder()) as holder:
        host, port = holder.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /peers/v1/act HTTP/1.1\r\nhost: h\r\ncontent-length: 100000000\r\n\r\n")

        async with asyncio.timeout(HANG_S):
            answer = await reader.readuntil(b"}")

        assert answer.startswith(b"HTTP/1.1 404")
        writer.close()


async def test_replicas_with_different_secrets_refuse_each_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stranger = ReplicaClient("", b"another secret")
    async with replica(Holder()) as holder:
        with pytest.raises(UpstreamError, match="the same secret") as caught:
            await ask(stranger, holder.url)

    assert type(caught.value) is UpstreamError
    assert holder.url not in caught.value.detail
    assert holder.asked == []
    assert f"peer_unknown peer={holder.url}" in caplog.text
    await stranger.aclose()


@pytest.mark.parametrize("apart_s", [-3600, -SKEW_S - 2, SKEW_S + 2, 3600])
async def test_a_replica_with_another_clock_gets_each_request_with_its_own_time(
    apart_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    now = {"here": 1000.0, "there": 1000.0 + apart_s}
    peers = ReplicaClient("", SECRET, clock=lambda: now["here"])
    async with replica(Holder(), clock=lambda: now["there"]) as holder:
        answers = [await ask(peers, holder.url) for _ in range(2)]
        now["here"] += apart_s  # its clock is set right
        answers.append(await ask(peers, holder.url))

    assert answers == [b"answer to hello"] * 3
    assert len(holder.asked) == 3, "no request ran twice"
    assert caplog.text.count("peer_refused operation=act clocks_apart_s=") == 2
    await peers.aclose()


async def test_a_request_of_another_time_is_refused() -> None:
    headers, body = await recorded()
    async with replica(Holder(), clock=lambda: time.time() + SKEW_S + 2) as holder:
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        async with httpx.AsyncClient(trust_env=False, verify=False) as client:
            answer = await client.post(f"{holder.url}/peers/v1/act", headers=raw, content=body)

    assert answer.status_code == CLOCKS_DIFFER
    assert holder.asked == []


@pytest.mark.parametrize("apart_s", [-SKEW_S + 2, SKEW_S - 2])
async def test_clocks_may_differ_by_less_than_a_minute(apart_s: float) -> None:
    peers = ReplicaClient("", SECRET, clock=lambda: 1000.0)
    async with replica(Holder(), clock=lambda: 1000.0 + apart_s) as holder:
        assert await ask(peers, holder.url) == b"answer to hello"
    await peers.aclose()


@pytest.mark.parametrize("status", [200, 302, 404, 502])
async def test_another_server_at_the_address_is_not_mistaken_for_a_replica(status: int, peers: ReplicaClient) -> None:
    async def other(scope: Scope, receive: Receive, send: Send) -> None:
        found = b'{"code": "session_not_found", "detail": "x"}'
        await respond(send, status, found, [(b"location", b"/elsewhere"), (b"x-gateway-proof", b"00\xff")])

    async with served(other) as url:
        with pytest.raises(UpstreamError) as caught:
            await ask(peers, url)

    assert type(caught.value) is UpstreamError


async def test_the_answer_to_an_earlier_request_is_not_accepted_for_a_later_request(peers: ReplicaClient) -> None:
    async with replica(Holder()) as holder, httpx.AsyncClient(trust_env=False, verify=False) as client:
        headers, body = await recorded()
        earlier = await client.post(f"{holder.url}/peers/v1/act", headers=headers, content=body)
    proof = earlier.headers["x-gateway-proof"].encode()

    async def again(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, 200, earlier.content, [(b"x-gateway-proof", proof)])

    async with served(again) as url:
        with pytest.raises(UpstreamError, match="the same secret"):
            await ask(peers, url, b"another message")


# -- lost replicas ----------------------------------------------------------------------------------------------------

HOLDER = """
import asyncio, sys, uvicorn
from gateway.frontends.replicas import ReplicaFrontend
from gateway.server import HttpServer, listen
from gateway.server.http import BoundedHttp

async def serve(operation, session_id, lease, message, within_s):
    if message == b"hang":
        print("begun", flush=True)
        await asyncio.sleep(3600)
    return message

async def main():
    listener = listen("127.0.0.1", 0)
    print(listener.getsockname()[1], flush=True)
    front = ReplicaFrontend(sys.argv[1].encode(), serve)
    config = uvicorn.Config(front, http=BoundedHttp, ws="none", lifespan="off", log_config=None)
    await HttpServer(config).serve([listener])

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def process() -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """Run a replica in a process of its own, and yield its URL and the process."""
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER, SECRET.decode(), cwd=PROJECT, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield f"http://127.0.0.1:{int(await line(running))}", running
    finally:
        with contextlib.suppress(ProcessLookupError):
            running.kill()
        await running.wait()


async def line(running: asyncio.subprocess.Process) -> bytes:
    assert running.stdout is not None
    async with asyncio.timeout(HANG_S):
        return await running.stdout.readline()


async def test_a_request_to_a_holder_that_was_killed_before_was_not_sent(peers: ReplicaClient) -> None:
    async with process() as (url, running):
        assert await ask(peers, url) == b"hello"  # opens a connection that is kept
        running.send_signal(signal.SIGKILL)
        await running.wait()

        with pytest.raises(UpstreamGone) as caught:
            await ask(peers, url)

    assert not caught.value.sent
    assert url not in caught.value.detail


async def test_a_request_to_a_holder_that_is_killed_during_its_work_may_have_run(peers: ReplicaClient) -> None:
    async with process() as (url, running):
        asking = asyncio.create_task(ask(peers, url, b"hang"))
        assert await line(running) == b"begun\n"
        running.send_signal(signal.SIGKILL)

        with pytest.raises(UpstreamGone) as caught:
            await asking

    assert caught.value.sent


@pytest.mark.parametrize("url", ["", "nonsense", "ftp://127.0.0.1", "http://", "http://[::1", "http://no.invalid:1"])
async def test_an_invalid_address_is_treated_as_a_lost_replica(url: str, peers: ReplicaClient) -> None:
    with pytest.raises(UpstreamGone) as caught:
        await ask(peers, url)

    assert not caught.value.sent


async def test_a_broken_request_is_never_sent_again(peers: ReplicaClient) -> None:
    async def broken(connection: Connection) -> None:
        await connection.request()
        connection.abort()

    async with RawServer(broken) as server:
        with pytest.raises(UpstreamGone) as caught:
            await ask(peers, server.address.replace("tcp:", "http://"))

        assert caught.value.sent
        assert len(server.requests) == 1
        assert len(server.connections) == 1


async def test_an_incomplete_answer_is_an_error_and_the_request_may_have_run(peers: ReplicaClient) -> None:
    async def half(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
        connection.writer.close()

    async with RawServer(half) as server:
        with pytest.raises(UpstreamGone) as caught:
            await ask(peers, server.address.replace("tcp:", "http://"))

    assert caught.value.sent


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf"])
async def test_a_request_to_a_silent_holder_ends_at_its_deadline(said: bytes, peers: ReplicaClient) -> None:
    async def silent(connection: Connection) -> None:
        await connection.request()
        await connection.send(said)
        await connection.left()

    async with RawServer(silent) as server:
        with pytest.raises(UpstreamTimeout):
            await ask(peers, server.address.replace("tcp:", "http://"), within_s=0.1)
        await until(lambda: server.open_connections == 0)


async def test_a_request_to_a_holder_that_answers_byte_by_byte_ends_at_its_deadline(peers: ReplicaClient) -> None:
    async def trickle(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
        while True:
            await connection.send(b"x")
            await asyncio.sleep(0.02)

    async with RawServer(trickle) as server:
        async with asyncio.timeout(HANG_S):
            with pytest.raises(UpstreamTimeout):
                await ask(peers, server.address.replace("tcp:", "http://"), within_s=0.1)
        await until(lambda: server.open_connections == 0)


async def test_with_too_many_pending_requests_nothing_is_sent_and_no_replica_counts_as_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise another replica would take a session from a holder that is alive."""
    monkeypatch.setattr("gateway.upstreams.transport.MAX_CONNECTIONS", 2)
    peers = ReplicaClient("", SECRET, late_s=0.1)
    may_end = asyncio.Event()

    async def wait(message: bytes) -> bytes:
        await may_end.wait()
        return message

    async with replica(Holder(wait)) as holder:
        under_way = [asyncio.create_task(ask(peers, holder.url, b"%d" % n)) for n in range(2)]
        await until(lambda: len(holder.asked) == 2)

        with pytest.raises(UpstreamTimeout):
            await ask(peers, holder.url, within_s=0.1)

        may_end.set()
        assert await asyncio.gather(*under_way) == [b"0", b"1"]
        assert len(holder.asked) == 2
        assert await ask(peers, holder.url, b"next") == b"next"
    await peers.aclose()


async def test_a_cancelled_request_does_not_end_the_work_and_holds_no_connection(peers: ReplicaClient) -> None:
    began, may_end = asyncio.Event(), asyncio.Event()

    async def wait(message: bytes) -> bytes:
        began.set()
        await may_end.wait()
        return message

    async with replica(Holder(wait)) as holder:
        asking = asyncio.create_task(ask(peers, holder.url))
        await began.wait()
        asking.cancel()
        await asyncio.wait({asking})
        assert asking.cancelled()

        assert holder.answered == 0
        may_end.set()
        await until(lambda: holder.answered == 1)
        assert await ask(peers, holder.url, b"next") == b"next"


async def test_a_request_may_be_cancelled_at_any_turn_and_the_next_request_is_answered(peers: ReplicaClient) -> None:
    async with replica(Holder()) as holder:
        for turns in range(40):
            asking = asyncio.create_task(ask(peers, holder.url))
            for _ in range(turns):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait({asking})
            assert asking.cancelled() or asking.result() == b"answer to hello"

            assert await ask(peers, holder.url, b"next") == b"answer to next"


async def test_a_replica_that_shuts_down_sends_no_requests(peers: ReplicaClient) -> None:
    async with replica(Holder()) as holder:
        await peers.aclose()

        with pytest.raises(UpstreamError, match="is shutting down"):
            await ask(peers, holder.url)

    assert holder.asked == []


async def test_a_restarted_holder_does_not_know_the_session(peers: ReplicaClient) -> None:
    async with replica(failing(SessionNotFound("no such session"))) as holder:
        with pytest.raises(SessionNotFound):
            await ask(peers, holder.url)
