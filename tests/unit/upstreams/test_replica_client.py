"""Requests between replicas over real HTTP: answers, errors, limits, and addresses."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import httpx
import pytest

from gateway.core import errors
from gateway.core.errors import (
    GatewayError,
    InvalidRequest,
    UpstreamError,
    UpstreamGone,
    UpstreamTimeout,
)
from gateway.upstreams.replica_client import ReplicaClient, default_peer_url, read_error, told
from tests.deadlines import HANG_S
from tests.fakes.replicas import SECRET, SESSION, Holder, ask, failing, replica


@pytest.fixture
async def peers() -> AsyncIterator[ReplicaClient]:
    made = ReplicaClient("http://127.0.0.1:1/", SECRET, late_s=0.2)
    yield made
    await made.aclose()


# -- answers ----------------------------------------------------------------------------------------------------------


async def test_a_request_reaches_the_other_replica_completely_and_its_answer_returns(peers: ReplicaClient) -> None:
    async with replica(Holder()) as holder:
        answer = await peers.ask(holder.url + "/", "take_over", SESSION, b"\x00\xff{}", within_s=7)

    assert answer == b"answer to \x00\xff{}"
    assert holder.asked == [("take_over", SESSION.id, SESSION.lease, b"\x00\xff{}", 7.0)]
    assert peers.me == "http://127.0.0.1:1"


async def test_large_and_empty_messages_arrive_unchanged(peers: ReplicaClient) -> None:
    big = bytes(range(256)) * 2**16

    async def echo(message: bytes) -> bytes:
        return message

    async with replica(Holder(echo)) as holder:
        assert await ask(peers, holder.url, big) == big
        assert await ask(peers, holder.url, b"") == b""


async def test_many_concurrent_requests_each_get_their_own_answer(peers: ReplicaClient) -> None:
    async with replica(Holder()) as holder:
        answers = await asyncio.gather(*(ask(peers, holder.url, b"%d" % n) for n in range(200)))

    assert answers == [b"answer to %d" % n for n in range(200)]


async def test_a_proxy_in_the_environment_variables_is_not_used_between_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    peers = ReplicaClient("", SECRET)

    async with replica(Holder()) as holder:
        assert await ask(peers, holder.url) == b"answer to hello"
    await peers.aclose()


# -- errors -----------------------------------------------------------------------------------------------------------


def tree(root: type[GatewayError] = GatewayError) -> list[type[GatewayError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in tree(child))]


KINDS = [kind for kind in tree() if kind.__module__ == errors.__name__]


def made(kind: type[GatewayError]) -> GatewayError:
    match kind:
        case errors.SessionClosed:
            return errors.SessionClosed("worker_lost")
        case errors.UpstreamGone:
            return errors.UpstreamGone("gone", sent=True)
        case errors.WorkerFull:
            return errors.WorkerFull("full", capacity=3)
        case errors.TaskInvalid:
            return errors.TaskInvalid([("config.x", "is wrong"), ("", "too large")], where="tasks[3]")
        case errors.RateLimited:
            return errors.RateLimited("too often", retry_after_s=3.5)
    return kind('it "went" wrong: é 😀 \ud800')


@pytest.mark.parametrize("kind", KINDS)
async def test_an_error_of_the_other_replica_is_raised_here_as_the_same_error(
    kind: type[GatewayError], peers: ReplicaClient
) -> None:
    there = made(kind)

    async with replica(failing(there)) as holder:
        with pytest.raises(GatewayError) as caught:
            await ask(peers, holder.url)

    assert type(caught.value) is kind
    assert caught.value.detail == there.detail
    assert vars(caught.value) == vars(there)


async def test_the_report_of_the_holder_that_nothing_was_sent_is_kept(peers: ReplicaClient) -> None:
    async with replica(failing(UpstreamGone("no connection", sent=False))) as holder:
        with pytest.raises(UpstreamGone) as caught:
            await ask(peers, holder.url)

    assert not caught.value.sent


async def test_an_adapter_s_own_subclass_of_an_error_arrives_as_its_ancestor(peers: ReplicaClient) -> None:
    class Refined(errors.SessionClosed):
        pass

    async with replica(failing(Refined("expired"))) as holder:
        with pytest.raises(errors.SessionClosed) as caught:
            await ask(peers, holder.url)

    assert type(caught.value) is errors.SessionClosed
    assert caught.value.reason == "expired"


async def test_an_internal_error_of_the_other_replica_is_in_its_log_but_not_in_its_answer(
    peers: ReplicaClient, caplog: pytest.LogCaptureFixture
) -> None:
    for bug in (RuntimeError("the secret"), TimeoutError("the secret")):
        async with replica(failing(bug)) as holder:
            with pytest.raises(UpstreamError) as caught:
                await ask(peers, holder.url)

        assert type(caught.value) is UpstreamError
        assert "secret" not in caught.value.detail
    assert caplog.text.count("peer_failed operation=act") == 2
    assert "the secret" in caplog.text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"7",
        b'{"detail": "x"}',
        b'{"code": "unheard_of", "detail": "x"}',
        b'{"code": ["upstream"], "detail": "x"}',
        b'{"code": "upstream_gone", "detail": "x"}',
        b'{"code": "task_invalid", "detail": "x", "problems": [7]}',
        b"[" * 100_000,
    ],
)
def test_reading_a_malformed_error_returns_none(body: bytes) -> None:
    assert read_error(body) is None


def test_the_answer_of_an_error_contains_the_fields_of_its_class() -> None:
    assert told(UpstreamGone("lost", sent=False)) == {"code": "upstream_gone", "detail": "lost", "sent": False}
    assert told(InvalidRequest("bad")) == {"code": "invalid_request", "detail": "bad"}


async def test_work_beyond_its_deadline_is_cancelled_at_the_other_replica(peers: ReplicaClient) -> None:
    ended = asyncio.Event()

    async def hang(message: bytes) -> bytes:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()
        return b""

    async with replica(Holder(hang)) as holder:
        with pytest.raises(UpstreamTimeout, match=r"had 0\.1 s"):
            await ask(peers, holder.url, within_s=0.1)

        assert ended.is_set()


@pytest.mark.parametrize("within_s", [0.0, -1.0, float("nan")])
async def test_no_request_is_sent_when_no_time_is_left(within_s: float, peers: ReplicaClient) -> None:
    async with replica(Holder()) as holder:
        with pytest.raises(UpstreamTimeout):
            await ask(peers, holder.url, within_s=within_s)

    assert holder.asked == []


# -- bounds -----------------------------------------------------------------------------------------------------------


async def test_a_message_that_is_too_large_is_refused_by_sender_and_receiver(peers: ReplicaClient) -> None:
    small = ReplicaClient("", SECRET, max_body_bytes=100)
    async with replica(Holder(), max_body_bytes=1000) as holder:
        with pytest.raises(InvalidRequest, match="100 bytes"):
            await ask(small, holder.url, b"x" * 101)
        with pytest.raises(InvalidRequest, match="1000 bytes"):
            await ask(peers, holder.url, b"x" * 2**20)

        assert holder.asked == []
        assert await ask(peers, holder.url, b"x" * 990) == b"answer to " + b"x" * 990
    await small.aclose()


async def test_an_answer_that_is_too_large_is_an_error_at_sender_and_receiver(peers: ReplicaClient) -> None:
    small = ReplicaClient("", SECRET, max_body_bytes=100)
    async with replica(Holder(), max_body_bytes=1000) as holder:
        with pytest.raises(UpstreamError, match="answer exceeds 100 bytes"):
            await ask(small, holder.url, b"x" * 91)
        with pytest.raises(UpstreamError, match="answer exceeds 1000 bytes"):
            await ask(peers, holder.url, b"x" * 991)
    await small.aclose()


# -- the address for other replicas-----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8080"),
        ("::1", "http://[::1]:8080"),
        ("localhost", "http://localhost:8080"),
        ("10.1.2.3", "http://10.1.2.3:8080"),
        ("fd00::7", "http://[fd00::7]:8080"),
        ("[fd00::7]", "http://[fd00::7]:8080"),
        ("gateway-1.internal", "http://gateway-1.internal:8080"),
    ],
)
def test_the_default_url_of_a_gateway_is_the_address_where_it_listens(host: str, url: str) -> None:
    assert default_peer_url(host, 8080) == url


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_the_default_url_of_a_gateway_that_listens_everywhere_is_an_address_of_its_machine(host: str) -> None:
    family = socket.AF_INET6 if ":" in host and socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.create_server((host if family is socket.AF_INET6 else "", 0), family=family) as listener:
        url = httpx.URL(default_peer_url(host, listener.getsockname()[1]))

        assert url.host not in ("0.0.0.0", "::")
        with socket.create_connection((url.host, url.port or 0), timeout=HANG_S):
            pass
