"""Scripted standard ORS servers; the test decides every byte of their answers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.core import sse
from gateway.core.environment import ActionMapping, Environment, Server, Split, SplitType, Timeouts
from gateway.core.episode import Action, StepResult, TextBlock
from gateway.core.errors import (
    AuthorFault,
    InvalidRequest,
    SessionNotFound,
    UpstreamError,
    UpstreamGone,
    WorkerFull,
)
from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.session import Session, SessionSetup, SessionState
from gateway.core.worker import Worker
from gateway.upstreams.ors.third_party import ThirdPartyOrsUpstream
from gateway.upstreams.transport import HttpTransport
from tests.fakes.eventually import until
from tests.fakes.raw_http import Connection, RawServer, Request

MATH = Environment(
    name=EnvironmentName("math"), image="i", directory=Path("/"), command=(), server=Server(port=1, ready="/up")
)
SECRETS = {"TOKEN": "value"}
STARTING = (
    b"HTTP/1.1 503 Service Unavailable\r\nx-backend-state: starting\r\nretry-after: 2\r\ncontent-length: 0\r\n\r\n"
)
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nconnection: close\r\n\r\n"
TASK = b"event: task_id\r\ndata: 77\r\n\r\n"
RESULT = {"ok": True, "output": {"blocks": [{"text": "a  b", "type": "text"}], "reward": None, "finished": False}}
END = b"event: end\r\ndata: " + json.dumps(RESULT).encode() + b"\r\n\r\n"
Reply = tuple[int, Any] | bytes


def described(*fields: str) -> dict[str, Any]:
    properties: dict[str, Any] = {name: {} for name in ("env_name", "task_spec", *fields)}
    return {
        "components": {"schemas": {"CreateSession": {"properties": properties}}},
        "paths": {"/health": {}, "/{env_name}/call": {}},
    }


class Scripted:
    """A server that sends each target's replies in turn and repeats the last reply."""

    def __init__(self, **replies: list[Reply]) -> None:
        known: dict[str, list[Reply]] = {
            "list_environments": [(200, ["mathenv", "other"])],
            "openapi.json": [(200, described("secrets"))],
            "up": [(200, {})],
            "health": [(200, {})],
            "create": [(200, {})],
            "delete": [(200, {})],
            "ping": [(200, {})],
        }
        self.replies = known | {name.replace("__", "."): given for name, given in replies.items()}
        self.requests: list[Request] = []

    async def __call__(self, connection: Connection) -> None:
        while True:
            request = await connection.request()
            self.requests.append(request)
            replies = self.replies.get(request.target.rpartition("/")[2], [(404, {"detail": "Not Found"})])
            reply = replies.pop(0) if len(replies) > 1 else replies[0]
            if isinstance(reply, tuple):
                await connection.answer(json.dumps(reply[1]).encode(), status=reply[0])
                continue
            await connection.send(reply)
            if b"content-length" not in reply:
                return

    def asked(self, target: str) -> list[Request]:
        return [request for request in self.requests if request.target.endswith(target)]


@contextlib.asynccontextmanager
async def serving(
    script: Scripted, *, ping_s: float = 240.0
) -> AsyncIterator[tuple[ThirdPartyOrsUpstream, Session, Worker]]:
    async with RawServer(script) as server:
        transport = HttpTransport()
        upstream = ThirdPartyOrsUpstream(transport, ping_s=ping_s)
        session = Session(
            id=SessionId("5e5510"),
            name="episode",
            owner=Owner(""),
            environment=MATH.name,
            lease="1ea5e",
            fingerprint="f",
            idle_s=300.0,
            worker=WorkerId("w"),
            address=server.address,
            state=SessionState.OPEN,
        )
        worker = Worker(id=WorkerId("w"), environment=MATH.name, digest="d", slots=1, address=server.address)
        try:
            yield upstream, session, worker
        finally:
            await upstream.aclose()
            await transport.aclose()


async def act(upstream: ThirdPartyOrsUpstream, session: Session, key: str | None = None) -> StepResult:
    return await upstream.act(session, MATH, Action(name="add", arguments={"n": 1}), key=key)


@pytest.mark.parametrize(
    ("replies", "in_body", "in_header"),
    [
        pytest.param({}, True, False, id="the first package"),
        pytest.param({"openapi__json": [(200, described("toolset_name"))]}, False, True, id="the second package"),
        pytest.param(
            {"openapi__json": [(404, {})], "version": [(200, {})]},
            False,
            True,
            id="the second package without a description",
        ),
        pytest.param({"openapi__json": [(404, {})]}, True, True, id="an unknown package"),
    ],
)
async def test_secrets_are_sent_where_the_server_reads_them(
    replies: dict[str, list[Reply]], in_body: bool, in_header: bool
) -> None:
    script = Scripted(**replies)

    async with serving(script) as (upstream, session, _):
        opened = await upstream.open(session, MATH, SessionSetup(spec={"a": "\ud800"}, secrets=SECRETS))
        await upstream.open(session, MATH, SessionSetup(spec={}, split="train", index=0))

    first, second = script.asked("/create")
    body = json.loads(first.body)
    assert opened.handle == "mathenv"
    assert body.get("secrets") == (SECRETS if in_body else None)
    header = first.headers.get("x-secrets")
    assert (header is not None) == in_header
    assert header is None or json.loads(base64.b64decode(header)) == {"TOKEN": {"value": "value"}}
    assert (body["env_name"], body["task_spec"]) == ("mathenv", {"a": "\ud800"})
    assert first.headers["x-session-id"] == "1ea5e"
    assert json.loads(second.body) == {"env_name": "mathenv", "split": "train", "index": 0}
    assert "x-secrets" not in second.headers
    assert all("x-worker-token" not in request.headers for request in script.requests)
    assert len(script.asked("/openapi.json")) == 1


async def test_a_create_requests_the_toolset_from_the_server() -> None:
    script = Scripted()

    async with serving(script) as (upstream, session, _):
        await upstream.open(session, MATH, SessionSetup(spec={}, toolset="codex"))

    (create,) = script.asked("/create")
    assert json.loads(create.body) == {"env_name": "mathenv", "task_spec": {}, "toolset_name": "codex"}


async def test_readiness_waits_until_the_server_is_ready() -> None:
    script = Scripted(up=[(503, {}), (200, {})], health=[(502, {}), (404, {})])

    async with serving(script) as (upstream, _, worker):
        assert await upstream.ready(worker, MATH) == 0

    assert len(script.asked("/up")) == 3
    assert len(script.asked("/health")) == 2


@pytest.mark.parametrize("reply", [(404, {"detail": "Not Found"}), (200, {"no": "list"}), (200, [])])
async def test_readiness_fails_immediately_for_a_server_that_is_not_an_ors_server(reply: Reply) -> None:
    async with serving(Scripted(list_environments=[reply])) as (upstream, _, worker):
        with pytest.raises(UpstreamError):
            await upstream.ready(worker, MATH)


async def test_a_create_is_repeated_while_the_server_starts() -> None:
    script = Scripted(create=[STARTING, (200, {})])

    async with serving(script) as (upstream, session, _):
        await upstream.open(session, MATH, SessionSetup(spec={}))

    assert len(script.asked("/create")) == 2


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ((400, {"detail": "Invalid index"}), InvalidRequest),
        ((422, {"detail": [{"loc": ["body", "x"], "msg": "Extra inputs"}]}), InvalidRequest),
        ((429, {"detail": "busy"}), WorkerFull),
        ((401, {"detail": "no key"}), UpstreamError),
        ((500, {"detail": "RuntimeError: no"}), AuthorFault),
        ((502, {"detail": "no server"}), UpstreamError),
    ],
)
async def test_the_error_of_a_refused_create_has_the_type_of_its_cause(reply: Reply, error: type[Exception]) -> None:
    async with serving(Scripted(create=[reply])) as (upstream, session, _):
        with pytest.raises(error) as caught:
            await upstream.open(session, MATH, SessionSetup(spec={}))

    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("terminal", "default_tool", "called"),
    [
        ({"name": "answer", "arg": "text"}, "", {"name": "answer", "input": {"text": "Done!"}}),
        ({"name": "answer", "arg": "text"}, "answer", {"name": "answer", "input": {"text": "Done!"}}),
        ({"name": "answer", "arg": "text"}, "look", None),
        (None, "", None),
        (None, "answer", None),
    ],
)
async def test_a_final_text_is_an_action_only_for_the_terminal_tool(
    terminal: Any, default_tool: str, called: dict[str, Any] | None
) -> None:
    schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    tools = [{"name": name, "description": "", "input_schema": schema} for name in ("answer", "look")]
    script = Scripted(task_tools=[(200, {"tools": tools, "terminal_tool": terminal})], call=[STREAM + TASK + END])
    environment = replace(MATH, actions=ActionMapping(default_tool=default_tool))

    async with serving(script) as (upstream, session, _):
        refusal = pytest.raises(InvalidRequest, match="final text") if called is None else contextlib.nullcontext()
        with refusal:
            await upstream.act(session, environment, Action(text="Done!", is_final=True))

    assert [json.loads(request.body) for request in script.asked("/call")] == ([] if called is None else [called])


async def test_a_call_waits_for_the_setup_and_its_stream_is_read_exactly() -> None:
    cut = json.dumps(RESULT).encode()
    at = cut.index(b"  b")
    chunks = b"event: chunk\r\ndata: %b\r\n\r\n: ping\r\n\r\nevent: end\ndata: %b\n\n" % (cut[:at], cut[at:])
    script = Scripted(call=[STARTING, STREAM + b": hello\n\n" + TASK + chunks])

    async with serving(script) as (upstream, session, _):
        result = await act(upstream, session)

    assert result.blocks == (TextBlock("a  b"),)
    assert [json.loads(request.body) for request in script.asked("/call")] == [{"name": "add", "input": {"n": 1}}] * 2


async def test_a_broken_stream_is_requested_again_only_by_its_task_id() -> None:
    script = Scripted(call=[STREAM + TASK, (502, {}), STREAM, STREAM + TASK + b"event: en", STREAM + TASK + END])

    async with serving(script) as (upstream, session, _):
        result = await act(upstream, session)

    assert result.blocks == (TextBlock("a  b"),)
    assert [json.loads(request.body).get("task_id") for request in script.asked("/call")] == [None, *["77"] * 4]


@pytest.mark.parametrize(
    "replies",
    [
        pytest.param([STREAM], id="the stream breaks before the task id"),
        pytest.param([STREAM + TASK, STREAM + b"event: error\ndata: unknown task_id\n\n"], id="the outcome is lost"),
        pytest.param([STREAM + TASK, (404, {"detail": "Active environment not found"})], id="the session is lost"),
        pytest.param([STREAM + TASK, (500, {"detail": "oops"})], id="the server answers with an error"),
    ],
)
async def test_a_lost_call_is_reported_as_possibly_run(replies: list[Reply]) -> None:
    script = Scripted(call=list(replies))

    async with serving(script) as (upstream, session, _):
        for _ in range(2):  # the second call with the key is answered from memory
            with pytest.raises(UpstreamGone) as caught:
                await act(upstream, session, key="k")
            assert caught.value.sent

    assert len(script.asked("/call")) == len(replies)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ((404, {"detail": "Active environment not found"}), SessionNotFound),
        ((410, {"detail": "Session deleted"}), SessionNotFound),
        ((422, {"detail": [{"loc": ["body"], "msg": "Field required"}]}), InvalidRequest),
        ((500, {"detail": "RuntimeError: setup"}), UpstreamError),
    ],
)
async def test_a_refused_call_is_not_reported_as_possibly_run(reply: Reply, error: type[Exception]) -> None:
    async with serving(Scripted(call=[reply])) as (upstream, session, _):
        with pytest.raises(error) as caught:
            await act(upstream, session)

    assert not isinstance(caught.value, UpstreamGone)


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        ({"error": "'x' is not a valid tool"}, "not_found"),
        ({"error": "Tool name collision: 'x' is defined twice", "reason": None}, "name_collision"),
        ({"error": "Tool input validation error: []"}, "input_validation"),
        ({"error": "'x' was not run: the episode has finished (…)"}, "episode_finished"),
        ({"error": "'x' is not a valid tool", "reason": "input_validation"}, "input_validation"),
    ],
)
async def test_a_missing_reason_is_derived_from_the_message(refusal: dict[str, Any], reason: str) -> None:
    end = b"event: end\ndata: " + json.dumps({"ok": False} | refusal).encode() + b"\n\n"

    async with serving(Scripted(call=[STREAM + TASK + end])) as (upstream, session, _):
        result = await act(upstream, session)

    assert (result.error, result.reason) == (refusal["error"], reason)


@pytest.mark.parametrize("data", [b"{", b'{"ok":true,"output":{"blocks":[],"reward":NaN,"finished":true}}', b"\xff"])
async def test_a_result_that_cannot_be_read_has_no_reward(data: bytes) -> None:
    script = Scripted(call=[STREAM + TASK + b"event: end\ndata: " + data + b"\n\n"])

    async with serving(script) as (upstream, session, _):
        with pytest.raises(UpstreamError):
            await act(upstream, session)


async def test_sessions_are_pinged_until_they_are_closed() -> None:
    script = Scripted()
    async with serving(script, ping_s=0.02) as (upstream, session, worker):
        await upstream.open(session, MATH, SessionSetup(spec={}))
        await until(lambda: len(script.asked("/ping")) > 2)
        await upstream.close(session, MATH)
        pings = len(script.asked("/ping"))
        await upstream.alive(worker, MATH)

        assert len(script.asked("/ping")) <= pings + 1
        assert script.asked("/ping")[0].headers["x-session-id"] == "1ea5e"


async def test_an_idle_session_is_not_pinged() -> None:
    script = Scripted()
    idle = replace(MATH, timeouts=Timeouts(idle_s=0.01))
    async with serving(script, ping_s=0.1) as (upstream, session, _):
        await upstream.open(session, idle, SessionSetup(spec={}))
        await until(lambda: upstream._pulse._task is not None and upstream._pulse._task.done())

    assert script.asked("/ping") == []


async def test_splits_may_be_plain_names() -> None:
    script = Scripted(splits=[(200, ["train", "hard", {"name": "held", "type": "test"}, {"name": "odd", "type": "?"}])])

    async with serving(script) as (upstream, _, worker):
        splits = await upstream.splits(worker, MATH)

    assert splits == [
        Split("train", SplitType.TRAIN),
        Split("hard", SplitType.VALIDATION),
        Split("held", SplitType.TEST),
        Split("odd", SplitType.VALIDATION),
    ]


async def test_a_silent_server_with_a_running_call_counts_as_alive() -> None:
    class Blocked(Scripted):
        async def __call__(self, connection: Connection) -> None:
            request = await connection.request()
            self.requests.append(request)
            if request.target.endswith("/call"):
                await connection.send(STREAM + TASK)
            await connection.left()

    script = Blocked()
    async with serving(script) as (upstream, session, worker):
        call = asyncio.ensure_future(act(upstream, replace(session, handle="mathenv")))
        await until(lambda: script.asked("/call"))
        await upstream.alive(worker, MATH)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await upstream.alive(worker, MATH, busy_counts=False)
        assert not call.done()
        call.cancel()


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_a_stream_is_read_in_pieces_of_any_size(step: int) -> None:
    stream = "event: a\r\ndata:  two\r\ndata:\r\ndata:é\r\n\r\n: c\r\n\r\ndata: nameless\n\nevent:b\n\n".encode()
    reader = sse.Reader(max_bytes=100)

    events = [event for at in range(0, len(stream), step) for event in reader.feed(stream[at : at + step])]

    assert events == [sse.Event("a", " two\n\né"), sse.Event("b", "")]


def test_a_line_or_an_event_beyond_the_limit_is_refused() -> None:
    with pytest.raises(UpstreamError, match="line"):
        list(sse.Reader(max_bytes=10).feed(b"x" * 11))
    with pytest.raises(UpstreamError, match="event"):
        list(sse.Reader(max_bytes=10).feed(b"data: 12345\n" * 3))


async def test_a_prompt_waits_for_the_setup() -> None:
    script = Scripted(prompt=[STARTING, STARTING, (200, [{"text": "Ready.", "type": "text"}])])

    async with serving(script) as (upstream, session, _):
        assert await upstream.prompt(session, MATH) == [TextBlock("Ready.")]

    assert [request.target for request in script.asked("/prompt")] == ["/mathenv/prompt"] * 3
