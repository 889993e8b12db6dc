"""Actions and prompts over HTTP to a scripted worker; the test decides every byte of its answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.core.environment import Environment
from gateway.core.episode import Action, StepResult, TextBlock
from gateway.core.errors import (
    CallConflict,
    GatewayError,
    InvalidRequest,
    SessionNotFound,
    UpstreamError,
    UpstreamGone,
)
from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.session import Session, SessionSetup, SessionState
from gateway.core.worker import Worker, worker_of
from gateway.upstreams.ors.own import OrsUpstream, WorkerClient, write_record
from gateway.upstreams.transport import HttpTransport
from tests.fakes.raw_http import Connection, RawServer, Request

MATH = Environment(
    name=EnvironmentName("math"), image="one", directory=Path("/"), command=("x",), upstream_name="mathenv"
)
STARTING = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nx-backend-state: starting\r\n"
    b'content-length: 22\r\n\r\n{"detail":"not ready"}'
)
DONE = json.dumps({"ok": True, "output": {"blocks": [], "reward": 1, "finished": True, "metadata": None}}).encode()


class Scripted:
    """A worker that sends these answers in turn; ``None`` drops the connection."""

    def __init__(self, *answers: tuple[int, bytes] | bytes | None) -> None:
        self.answers = list(answers)
        self.requests: list[Request] = []

    async def __call__(self, connection: Connection) -> None:
        while True:
            self.requests.append(await connection.request())
            answer = self.answers.pop(0)
            if answer is None:
                connection.abort()
                return
            if isinstance(answer, bytes):
                await connection.send(answer)
            else:
                await connection.answer(answer[1], status=answer[0])


@contextlib.asynccontextmanager
async def asked(worker: Scripted, relay: HttpTransport | None = None) -> AsyncIterator[tuple[OrsUpstream, Session]]:
    async with RawServer(worker) as server:
        relay = relay or HttpTransport()
        session = Session(
            id=SessionId("5e5510"),
            name="episode",
            owner=Owner(""),
            environment=MATH.name,
            lease="l",
            fingerprint="f",
            idle_s=300.0,
            worker=WorkerId("w"),
            address=server.address,
            state=SessionState.OPEN,
        )
        try:
            yield OrsUpstream(relay, secret=b"secret"), session
        finally:
            await relay.aclose()


async def test_an_action_is_sent_as_one_call_with_its_key_and_accepts_json() -> None:
    worker = Scripted((200, DONE))

    async with asked(worker) as (upstream, session):
        result = await upstream.act(session, MATH, Action(text="42"), key="é-1")

    [request] = worker.requests
    assert result == StepResult(reward=1.0, finished=True)
    assert (request.method, request.target) == ("POST", "/mathenv/call")
    assert json.loads(request.body) == {"text": "42"}
    assert request.headers["accept"] == "application/json"
    assert request.headers["idempotency-key"] == "é-1"
    assert request.headers["x-session-id"] == "5e5510"
    token = WorkerClient(HttpTransport(), secret=b"secret").token(WorkerId("w"))
    assert request.headers["x-worker-token"] == token.decode()


async def test_an_action_without_a_key_sends_no_key_header() -> None:
    worker = Scripted((200, DONE))

    async with asked(worker) as (upstream, session):
        await upstream.act(session, MATH, Action(name="stop"))

    assert "idempotency-key" not in worker.requests[0].headers


@pytest.mark.parametrize(
    "body",
    [DONE, b'{"ok":false,"error":"no","reason":"not_found"}', b'{"ok":false,"error":"no","reason":"tool_failed"}'],
)
async def test_a_result_has_the_number_of_the_turn_if_the_worker_counts_turns(body: bytes) -> None:
    async with asked(Scripted(counted(body, b"17"), (200, body))) as (upstream, session):
        turns = [(await upstream.act(session, MATH, Action(text="42"))).turn for _ in range(2)]

    assert turns == [17, None], "one that does not count says nothing"


@pytest.mark.parametrize("number", [b"", b"0", b"-1", b"1.0", b"one", b"9" * 5000])
async def test_an_answer_with_an_invalid_turn_number_is_an_error(number: bytes) -> None:
    async with asked(Scripted(counted(DONE, number))) as (upstream, session):
        with pytest.raises(UpstreamError, match="can't be read"):
            await upstream.act(session, MATH, Action(text="42"))


@pytest.mark.parametrize(
    ("accepts", "silence_s"),
    [
        ([b"application/json"], 3605.0),
        ([b"Application/JSON"], 3605.0),
        ([b"text/event-stream"], 30.0),
        ([b"application/json, text/event-stream"], 30.0),
        ([b"application/json, TEXT/Event-Stream"], 30.0),
        ([b"text/event-stream", b"application/json"], 30.0),
        ([b"*/*", b"application/json"], 3605.0),
    ],
)
async def test_the_wait_for_a_json_answer_may_be_as_long_as_a_call(accepts: list[bytes], silence_s: float) -> None:
    class Recording(HttpTransport):
        async def send(self, *arguments: Any, silence_s: float) -> Any:
            waited.append(silence_s)
            return await super().send(*arguments, silence_s=silence_s)

    waited: list[float] = []
    worker = Scripted((200, DONE), (200, b"[]"))
    async with asked(worker, Recording()) as (upstream, session):
        headers = [(b"accept", accept) for accept in accepts]
        for operation in ("call", "prompt"):
            exchange = await upstream.forward(session, MATH, operation, body=b"{}", headers=headers)
            await exchange.read(1000)
            await exchange.aclose()

    assert waited == [silence_s, 30.0]
    accept = worker.requests[0].headers["accept"]  # the worker decides by one value, in lower case
    assert ("application/json" in accept and "text/event-stream" not in accept) is (silence_s > 30)


async def test_a_worker_that_cannot_work_is_not_ready_and_the_error_states_the_reason() -> None:
    answer = b'{"detail":"no sandboxes: bubblewrap is missing"}'

    async with asked(Scripted((503, answer))) as (upstream, session):
        worker = Worker(id=session.worker, environment=MATH.name, digest="d", slots=1, address=session.address)
        with pytest.raises(UpstreamError, match="answered 503 to /list_environments: no sandboxes: bubblewrap"):
            await upstream.ready(worker, MATH)


def counted(body: bytes, number: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nX-Session-Turn: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (number, len(body)) + body


async def test_a_prompt_and_a_call_wait_for_a_running_setup() -> None:
    worker = Scripted(STARTING, (200, b'[{"type":"text","text":"hello","detail":null}]'), STARTING, (200, DONE))

    async with asked(worker) as (upstream, session):
        prompt = await upstream.prompt(session, MATH)
        result = await upstream.act(session, MATH, Action(text="42"))

    assert prompt == [TextBlock("hello")]
    assert result.finished
    assert [request.target for request in worker.requests] == ["/mathenv/prompt"] * 2 + ["/mathenv/call"] * 2


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (404, b'{"detail":"Active environment not found"}', SessionNotFound, ""),
        (410, b'{"detail":"Session deleted"}', SessionNotFound, ""),
        (409, b'{"detail":"the key stands for another call"}', CallConflict, "another call"),
        (404, b'{"detail":"Not Found"}', InvalidRequest, "Not Found"),
        (
            422,
            b'{"detail":[{"msg":"Field required"},{"msg":"too short"}]}',
            InvalidRequest,
            "Field required; too short",
        ),
        (429, b'{"detail":"too many calls wait"}', InvalidRequest, "too many"),
        (500, b'{"detail":"RuntimeError: no such puzzle"}', UpstreamError, "no such puzzle"),
        (503, b'{"detail":"later"}', UpstreamError, "later"),
        (500, b"", UpstreamError, "no reason"),
        (500, b"<html>", UpstreamError, "answered 500 and gave no reason"),
        (200, b"<html>", UpstreamError, "can't be read"),
    ],
)
async def test_a_refusal_of_a_worker_is_a_typed_error(
    status: int, body: bytes, kind: type[GatewayError], words: str
) -> None:
    async with asked(Scripted((status, body))) as (upstream, session):
        with pytest.raises(kind) as refused:
            await upstream.act(session, MATH, Action(text="42"))

    assert type(refused.value) is kind
    assert words in refused.value.detail


async def test_a_prompt_after_a_failed_setup_is_an_error_with_the_reason() -> None:
    async with asked(Scripted((500, b'{"detail":"RuntimeError: no such puzzle"}'))) as (upstream, session):
        with pytest.raises(UpstreamError, match="no such puzzle"):
            await upstream.prompt(session, MATH)


async def test_an_action_is_never_sent_twice() -> None:
    worker = Scripted(None, (200, DONE))

    async with asked(worker) as (upstream, session):
        with pytest.raises(UpstreamGone) as gone:
            await upstream.act(session, MATH, Action(text="42"))

    assert gone.value.sent
    assert len(worker.requests) == 1


@pytest.mark.parametrize("status", [410, 503])
async def test_a_session_that_ends_while_it_is_opened_may_be_opened_elsewhere(status: int) -> None:
    async with asked(Scripted((status, b'{"detail":"Session deleted"}'))) as (upstream, session):
        with pytest.raises(UpstreamGone, match="Session deleted"):
            await upstream.open(session, MATH, SessionSetup(spec={"id": "t1"}))


async def test_open_and_close_send_the_lease_of_the_session_to_the_worker() -> None:
    worker = Scripted((200, b'{"sid":"5e5510"}'), (200, b'{"sid":"5e5510","summary":null}'))

    async with asked(worker) as (upstream, session):
        await upstream.open(session, MATH, SessionSetup(spec={"id": "t1"}))
        await upstream.close(session, MATH)

    assert [request.headers["x-session-lease"] for request in worker.requests] == [session.lease] * 2


@pytest.mark.parametrize(
    ("reported", "scorer"), [("5" * 64, "5" * 64), ("5" * 63, ""), ("latest", ""), ("5" * 65, ""), ("", "")]
)
async def test_a_session_has_the_scorer_that_its_worker_reports(reported: str, scorer: str) -> None:
    reply = b'{"sid":"5e5510"}'
    head = f"HTTP/1.1 200 OK\r\nx-scorer-version: {reported}\r\ncontent-length: {len(reply)}\r\n\r\n"

    async with asked(Scripted(head.encode() + reply)) as (upstream, session):
        opened = await upstream.open(session, MATH, SessionSetup(spec={"id": "t1"}))

    assert opened == replace(session, scorer=scorer)


async def test_a_listed_session_has_the_scorer_of_its_worker() -> None:
    worker = Scripted()

    async with asked(worker) as (upstream, session):
        note = write_record(session, upstream._client.token(session.worker)).decode()
        entry = {"sid": session.id, "busy": False, "steps": 0, "idle_s": 0.0, "note": note}
        worker.answers.append((200, json.dumps({"sessions": [entry], "scorer": "5" * 64}).encode()))
        listed = await upstream.sessions(worker_of(session), MATH)

    assert listed is not None
    assert [one.session.scorer for one in listed if one.session is not None] == ["5" * 64]


async def test_a_wait_for_a_setup_can_be_cancelled() -> None:
    async with asked(Scripted(*[STARTING] * 100)) as (upstream, session):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await upstream.prompt(session, MATH)
