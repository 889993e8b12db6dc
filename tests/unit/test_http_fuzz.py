"""The HTTP parsers of gateway and workers take no request that h11, a strict parser, refuses or reads differently.

``HTTP_FUZZ_EXAMPLES=100000`` runs longer.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, TypeVar

import h11
import pytest
import uvicorn
from envserver.errors import Refused
from envserver.http.messages import Receiver
from envserver.http.messages import Request as WorkerRequest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from gateway.frontends.asgi import respond
from gateway.server import HttpServer
from gateway.server.http import BoundedHttp
from tests.deadlines import HANG_S

T = TypeVar("T")
EXAMPLES = int(os.environ.get("HTTP_FUZZ_EXAMPLES", "300"))
BODY_MAX_BYTES = 1000
pytestmark = pytest.mark.timeout(HANG_S + EXAMPLES)


@dataclass(frozen=True)
class Parsed:
    """A request as a parser reads it. Header names are in lower case."""

    method: bytes
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


def by_h11(data: bytes) -> list[Parsed] | None:
    """Return the complete requests in *data*. None: h11 refuses it.

    llhttp, the parser of gateway and workers, accepts several spaces around a target, and empty lines before a request.
    """
    data = re.sub(rb"\A[\r\n]*([!-~]+) +([!-\xff]+) +HTTP", rb"\1 \2 HTTP", data)
    found: list[Parsed] = []
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(data)
    try:
        while True:
            request, body = connection.next_event(), b""
            if not isinstance(request, h11.Request):
                return found
            while isinstance(event := connection.next_event(), h11.Data):
                body += bytes(event.data)
            if not isinstance(event, h11.EndOfMessage):
                return found
            headers = tuple((bytes(name), bytes(value)) for name, value in request.headers)
            found.append(Parsed(bytes(request.method), bytes(request.target), headers, body))
            connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            connection.send(h11.EndOfMessage())
            if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                return found
            connection.start_next_cycle()
    except h11.RemoteProtocolError:
        return found or None


def by_worker(pieces: Sequence[bytes]) -> list[Parsed]:
    """Return the complete requests that a worker accepts."""
    found: list[WorkerRequest | Refused] = []
    receiver = Receiver(body_max_bytes=BODY_MAX_BYTES, on_received=found.append, on_expect=lambda: None)
    for piece in pieces:
        receiver.feed(piece)
    receiver.close()
    return [
        Parsed(one.method, one.path + (b"?" + one.query if one.query else b""), tuple(one.headers.items()), one.body)
        for one in found
        if isinstance(one, WorkerRequest)
    ]


class Wire(asyncio.Transport):
    """A client's connection without a network."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += bytes(data)

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_protocol(self) -> Any:
        return self.protocol

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol


async def by_gateway(pieces: Sequence[bytes]) -> list[Parsed]:
    """Return the complete requests that reach an application of the gateway's server."""
    found: list[Parsed] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        found.append(Parsed(scope["method"].encode(), target, tuple(scope["headers"]), body))
        await respond(send, 200, b"")

    config = uvicorn.Config(app, http=BoundedHttp, ws="none", lifespan="off", log_config=None)
    config.load()
    server = HttpServer(config)
    protocol, wire = BoundedHttp(config=config, server_state=server.server_state, app_state={}), Wire()
    wire.set_protocol(protocol)
    protocol.connection_made(wire)
    for piece in pieces:
        if not wire.is_closing():
            protocol.data_received(piece)
        await _settled()
    protocol.connection_lost(None)
    for task in list(server.server_state.tasks):
        await task
    return found


async def _settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


# -- requests -------------------------------------------------------------------------------------------------------

odd = st.sampled_from(
    [b"", b" ", b"\t", b"\x00", b"\r", b"\n", b"\r\n", b"\x0b", b"\x80", b"\xff", b":", b";", b",", b"+", b"0"]
)
others = st.sampled_from(
    [b"X-Session-ID", b"Content-Length", b"content-length", b"Transfer-Encoding", b"Connection", b"Expect"]
)
names = others | st.just(b"Host")
values = st.sampled_from(
    [b"5", b"05", b"+5", b"5,5", b"0x5", b"5 5", b"-1", b"0", b"99999999999999999999", b"chunked", b"Chunked", b"gzip",
     b"chunked, chunked", b"gzip, chunked", b"identity", b"xchunked", b"h", b"close", b"keep-alive", b"a\x00b", b"\xe9"]
)  # fmt: skip
BODIES = (
    [b"", b"hello", b"5\r\nhello\r\n0\r\n\r\n", b"5;x=y\r\nhello\r\n0\r\nAuthorization: k\r\n\r\n",
     b"5\nhello\r\n0\r\n\r\n",
     b"5 \r\nhello\r\n0\r\n\r\n", b"0x5\r\nhello\r\n0\r\n\r\n", b"+5\r\nhello\r\n0\r\n\r\n", b"5\r\nhelloX0\r\n\r\n",
     b"fffffffffffffffff\r\nhello", b"0\r\n\r\nGET /two HTTP/1.1\r\nHost: h\r\n\r\n",
     b"helloGET /two HTTP/1.1\r\nHost: h\r\n\r\n"]
)  # fmt: skip


TARGETS = [b"/", b"/a?b=c", b"/%2e%2e/x", b"/a b", b"//h/x", b"/\xff", b"*"]
CHUNKS = b"5\r\nhello\r\n0\r\n\r\n"
FRAMES: list[tuple[list[bytes], bytes]] = [
    ([], b""),
    ([b"Content-Length: 5"], b"hello"),
    ([b"Transfer-Encoding: chunked"], CHUNKS),
    ([b"Transfer-Encoding: chunked"], b"5\r\nhello\r\n0\r\nX-Session-ID: other\r\n\r\n"),
    ([b"Transfer-Encoding: gzip, chunked"], CHUNKS),
    ([b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"], CHUNKS),
    ([b"Content-Length: 5", b"Transfer-Encoding: chunked"], CHUNKS),
]
"""Headers that state the length of a body, and such a body."""


def mostly(first: T, *others: T) -> st.SearchStrategy[T]:
    """Return *first* in two of three cases."""
    return st.integers(0, 2).flatmap(lambda number: st.sampled_from(others) if number == 2 else st.just(first))


@st.composite
def requests(draw: st.DrawFn, names: st.SearchStrategy[bytes] = names) -> bytes:
    """Return a request with some odd parts, and some bytes replaced, removed or inserted anywhere."""
    version = draw(mostly(b" HTTP/1.1", b" HTTP/1.0", b" HTTP/2.0", b" http/1.1", b"", b"HTTP/1.1"))
    lines = [draw(mostly(b"POST", b"GET", b"post", b"G ET")) + b" " + draw(mostly(*TARGETS)) + version]
    lines += draw(mostly([b"Host: h"], []))
    framing, body = draw(st.sampled_from(FRAMES))
    lines += framing
    for _ in range(draw(st.integers(0, 2))):
        lines.append(draw(names) + draw(mostly(b": ", b":", b" : ", b":\t", b": \x0b")) + draw(values))
    data = draw(mostly(b"\r\n", b"\n")).join(lines) + b"\r\n\r\n" + draw(mostly(body, *BODIES))
    for _ in range(draw(mostly(0, 1, 2))):
        at, cut = draw(st.integers(0, len(data))), draw(st.integers(0, 2))
        data = data[:at] + draw(odd) + data[at + cut :]
    return data


def agrees(ours: Sequence[Parsed], theirs: Sequence[Parsed] | None, *, merges: bool) -> None:
    """Check that each request of *ours* is one of h11 too, in its form. *merges*: the last of equal names stays."""
    assert len(ours) <= len(theirs or ()), f"h11 refuses {ours[len(theirs or ()) :]}"
    for one, other in zip(ours, theirs or (), strict=False):
        one = replace(one, headers=tuple((name, _as_h11(name, value)) for name, value in one.headers))
        headers = tuple(dict(other.headers).items()) if merges else other.headers
        assert one == Parsed(other.method, other.target, headers, other.body)


def _as_h11(name: bytes, value: bytes) -> bytes:
    """Return a header's value without spaces around it, and a coding in lower case."""
    value = value.strip(b" \t")
    return value.lower() if name == b"transfer-encoding" else value


PLAIN = b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello"


@pytest.mark.parametrize("split", [0, 10, len(PLAIN) - 2])
async def test_both_parsers_read_a_plain_request_as_h11_does(split: int) -> None:
    pieces = [PLAIN[:split], PLAIN[split:]]
    theirs = by_h11(PLAIN)

    assert theirs is not None
    assert len(theirs) == 1
    assert by_worker(pieces) == theirs
    assert await by_gateway(pieces) == theirs


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), derandomize=os.environ.get("CI") == "true")
@given(data=requests(names=others), split=st.integers(0, 200))
def test_a_worker_takes_no_request_that_h11_refuses_or_reads_differently(data: bytes, split: int) -> None:
    ours = by_worker([data[:split], data[split:]])
    ours = list(takewhile(lambda one: b"host" in dict(one.headers), ours))  # only the gateway requires it
    agrees(ours, by_h11(data), merges=True)


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), derandomize=os.environ.get("CI") == "true")
@given(data=requests(), split=st.integers(0, 200))
def test_the_gateway_takes_no_request_that_h11_refuses_or_reads_differently(data: bytes, split: int) -> None:
    agrees(asyncio.run(by_gateway([data[:split], data[split:]])), by_h11(data), merges=False)
