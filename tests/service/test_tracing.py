"""The W3C trace context goes from the trainer to the worker, and spans go to an OpenTelemetry collector."""

from __future__ import annotations

import sys

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as serve_sockets

from gateway.core.errors import ConfigError
from gateway.core.ids import EnvironmentName
from gateway.core.ports.transport import TRACE
from gateway.frontends.asgi import trace_of
from gateway.frontends.tracing import span_exporter
from gateway.upstreams.openenv.websocket import WebSocketPool
from tests.deadlines import HANG_S
from tests.fakes.eventually import until
from tests.fakes.ports import reserved_port
from tests.fakes.raw_http import Connection, RawServer
from tests.fakes.workers import Start
from tests.service.openenv_world import world
from tests.service.stack import Stack, running
from tests.service.wire import create, delete

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
CALL = {"name": "echo", "input": {"x": 1}}


async def called(client: httpx.AsyncClient, **headers: str) -> httpx.Response:
    return await client.post("/math/call", json=CALL, headers=headers)


def passed(stack: Stack) -> list[tuple[str, str]]:
    """Return the trace context of each call that the worker got."""
    calls = [request for request in stack.backend.only.requests if request.target == "/math/call"]
    return [(call.headers.get("traceparent", ""), call.headers.get("tracestate", "")) for call in calls]


async def test_the_trace_context_of_a_call_reaches_the_worker_with_this_call_only() -> None:
    async with running() as (stack, _, client):
        await create(client)
        await called(client, traceparent=PARENT, tracestate="vendor=1")
        await called(client)

    assert passed(stack) == [(PARENT, "vendor=1"), ("", "")]


async def test_the_trace_context_of_an_opening_reaches_the_worker() -> None:
    async with running() as (stack, _, client):
        client.headers["traceparent"] = PARENT
        await create(client)

        (opening,) = [request for request in stack.backend.only.requests if request.target == "/create"]

    assert opening.headers["traceparent"] == PARENT


@pytest.mark.parametrize(
    "parents",
    [
        pytest.param([], id="none"),
        pytest.param(["nonsense"], id="not of the form"),
        pytest.param([PARENT.upper()], id="capital letters"),
        pytest.param([f"00-{'0' * 32}-{SPAN_ID}-01"], id="no trace"),
        pytest.param([f"00-{TRACE_ID}-{'0' * 16}-01"], id="no span"),
        pytest.param([f"ff{PARENT[2:]}"], id="a forbidden version"),
        pytest.param([PARENT, PARENT], id="two"),
    ],
)
def test_a_trace_context_that_is_not_valid_is_ignored(parents: list[str]) -> None:
    scope = {"headers": [(b"tracestate", b"vendor=1"), *((b"traceparent", parent.encode()) for parent in parents)]}

    assert trace_of(scope) == ()


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        pytest.param([b"a=1", b"b=2"], [b"a=1,b=2"], id="two headers"),
        pytest.param([b"a=" + b"x" * 511], [], id="too long"),
        pytest.param([b""], [], id="empty"),
    ],
)
def test_the_trace_state_goes_with_a_valid_parent(states: list[bytes], expected: list[bytes]) -> None:
    scope = {"headers": [(b"traceparent", PARENT.encode()), *((b"tracestate", state) for state in states)]}

    assert trace_of(scope) == ((b"traceparent", PARENT.encode()), *((b"tracestate", state) for state in expected))


# -- spans ------------------------------------------------------------------------------------------------------------


class Collector:
    """An OpenTelemetry collector: takes spans over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()

    async def __call__(self, connection: Connection) -> None:
        while True:
            request = await connection.request()
            assert (request.method, request.target) == ("POST", "/v1/traces")
            for resource in ExportTraceServiceRequest.FromString(request.body).resource_spans:
                self.services |= {a.value.string_value for a in resource.resource.attributes if a.key == "service.name"}
                self.spans += [span for scope in resource.scope_spans for span in scope.spans]
            await connection.answer(b"", kind="application/x-protobuf")


def attributes(span: Span) -> dict[str, str | int]:
    return {one.key: one.value.string_value or one.value.int_value for one in span.attributes}


async def test_a_collector_gets_a_span_of_each_request_between_the_trainers_and_the_workers() -> None:
    collector = Collector()
    async with RawServer(collector) as server:
        url = f"http://{server.address.removeprefix('tcp:')}"
        async with running(otlp_endpoint=url, trainers={"alice": "the-key-of-alice"}) as (stack, _, client):
            client.headers["X-API-Key"] = "the-key-of-alice"
            await create(client)
            await called(client, traceparent=PARENT)
            await client.get("/k/the-key-of-alice/math/prompt")
            await delete(client)
        # The gateway sent the last spans at its end.
        by_name = {span.name: span for span in collector.spans}

    span = by_name["POST /math/call"]
    assert set(by_name) == {"POST /create", "POST /math/call", "GET /math/prompt", "POST /delete"}
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, SPAN_ID)
    assert span.end_time_unix_nano > span.start_time_unix_nano
    assert attributes(span) == {
        "http.request.method": "POST",
        "url.path": "/math/call",
        "http.response.status_code": 200,
        "gateway.key": "alice",
        "gateway.session": "one",
    }
    assert collector.services == {"env-gateway"}
    assert passed(stack) == [(f"00-{TRACE_ID}-{span.span_id.hex()}-01", "")]
    assert "the-key-of-alice" not in str(collector.spans)


async def test_a_failed_start_is_an_error_in_its_span_and_a_wrong_request_is_not() -> None:
    collector = Collector()
    async with RawServer(collector) as server:
        async with running(otlp_endpoint=f"http://{server.address.removeprefix('tcp:')}") as (stack, _, client):
            stack.backend.starts[EnvironmentName("math")] = Start.REFUSED
            failed = await create(client)
            wrong = await client.post("/nowhere/call", json=CALL)
        found = {
            span.name: (attributes(span)["http.response.status_code"], span.status.code) for span in collector.spans
        }

    assert found == {
        "POST /create": (failed.status_code, Status.STATUS_CODE_ERROR),
        "POST /nowhere/call": (wrong.status_code, Status.STATUS_CODE_UNSET),
    }


async def test_a_collector_that_is_not_there_costs_no_step() -> None:
    async with running(otlp_endpoint=f"http://127.0.0.1:{reserved_port()}") as (_, _, client):
        await create(client)
        assert (await called(client)).status_code == 200


async def test_the_trace_context_of_an_openenv_socket_goes_with_all_its_steps() -> None:
    async with world() as gateway, gateway.client(additional_headers={"traceparent": PARENT}) as client:
        await client.reset(question="?")
        await client.step()

        requests = gateway.stack.backend.only.requests
    assert {request.headers.get("traceparent") for request in requests if request.target != "/health"} >= {PARENT}


async def test_the_trace_context_reaches_a_third_party_openenv_server() -> None:
    async def serve(connection: ServerConnection) -> None:
        assert connection.request is not None
        given.append(connection.request.headers["traceparent"])

    given: list[str] = []
    TRACE.set(((b"traceparent", PARENT.encode()),))
    async with serve_sockets(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        connection = await WebSocketPool().open(f"tcp:127.0.0.1:{port}", "/ws", answer_s=HANG_S)
        await until(lambda: given)
        await connection.close(within_s=5)

    assert given == [PARENT]


def test_without_the_packages_the_setting_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)

    with pytest.raises(ConfigError, match=r"install env-gateway\[telemetry\]"):
        span_exporter("http://127.0.0.1:4318", "one")
