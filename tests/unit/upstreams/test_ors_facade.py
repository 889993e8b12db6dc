"""The facade that serves ORS requests for a server with another protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.core import sse
from gateway.core.environment import Environment, Timeouts
from gateway.core.episode import Action, Block, ImageBlock, StepResult, Summary, TextBlock
from gateway.core.errors import (
    CallConflict,
    GatewayError,
    InvalidRequest,
    SessionFailed,
    SessionNotFound,
    UpstreamError,
    UpstreamGone,
    UpstreamTimeout,
)
from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.ports.transport import Exchange
from gateway.core.session import Session, SessionState
from gateway.core.worker import Worker
from gateway.upstreams.action_mapping import Unreadable
from gateway.upstreams.ors_facade import OrsFacade
from tests.fakes.eventually import until
from tests.wire.raw import MAX_LINE_BYTES, Event, Outcome, parse

ENVIRONMENT = Environment(name=EnvironmentName("puzzle"), image="i", directory=Path("/"), command=())
SESSION = Session(
    id=SessionId("s"),
    name="s",
    owner=Owner(""),
    environment=ENVIRONMENT.name,
    lease="l",
    fingerprint="f",
    idle_s=300.0,
    worker=WorkerId("w"),
    address="",
    state=SessionState.OPEN,
)
JSON = (b"content-type", b"application/json")
STREAM = (b"accept", b"text/event-stream")
WHOLE = (b"accept", b"application/json")
DONE = StepResult(blocks=(TextBlock("done"),), reward=1, finished=True)


class Puzzle(OrsFacade):
    """A server in memory that returns its results in turn, each when its gate is open."""

    ping_s = 0.02

    def __init__(self, *results: StepResult | Exception) -> None:
        super().__init__()
        self.results = list(results)
        self.actions: list[Action] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def step(self, session: Session, environment: Environment, action: Action, *, key: str | None) -> StepResult:
        self.actions.append(action)
        result = self.results.pop(0)
        await self.gate.wait()
        if isinstance(result, Exception):
            raise result
        return result

    async def prompt(self, session: Session, environment: Environment) -> list[Block]:
        if self.results and isinstance(self.results[0], Exception):
            raise self.results[0]
        await self.gate.wait()
        return [TextBlock("Hé?", {"k": 1}), ImageBlock("aGk=", "image/png")]

    async def tools(self, worker: Worker, environment: Environment) -> bytes:
        return b'{"tools":[]}'

    async def ask(self, operation: str, body: Any = None, *headers: tuple[bytes, bytes]) -> Exchange:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.forward(SESSION, ENVIRONMENT, operation, body=content, headers=[JSON, *headers])

    async def call(self, *headers: tuple[bytes, bytes], **more: Any) -> Outcome:
        body = {"name": "echo", "input": {"text": "hi"}} | more
        return parse((await read(await self.ask("call", body, STREAM, *headers))).decode())


async def read(exchange: Exchange) -> bytes:
    assert exchange.status == 200
    try:
        return await exchange.read(2**26)
    finally:
        await exchange.aclose()


@contextlib.asynccontextmanager
async def streaming(puzzle: Puzzle, **more: Any) -> AsyncIterator[tuple[AsyncIterator[bytes], str]]:
    """Start a call and yield the rest of its stream with the task id that it sent."""
    exchange = await puzzle.ask("call", {"name": "echo", "input": {}} | more, STREAM)
    try:
        chunks = exchange.chunks()
        yield chunks, parse((await anext(chunks)).decode()).task_id
    finally:
        await exchange.aclose()


async def test_a_call_is_answered_by_a_stream_of_its_task_id_and_its_end() -> None:
    puzzle = Puzzle(replace(DONE, metadata={"n": [1, 2.5, None, "é"]}))

    exchange = await puzzle.ask("call", {"name": "echo", "input": {"text": "hi"}}, STREAM)
    outcome = parse((await read(exchange)).decode())

    assert dict(exchange.headers)[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert len(outcome.task_id) == 32
    assert outcome.lines[-1] == (
        '{"ok":true,"output":{"blocks":[{"text":"done","detail":null,"type":"text"}],'
        '"metadata":{"n":[1,2.5,null,"é"]},"reward":1.0,"finished":true}}'
    )
    assert puzzle.actions == [Action(name="echo", arguments={"text": "hi"})]


async def test_a_client_that_accepts_json_gets_one_object() -> None:
    exchange = await Puzzle(replace(DONE, reward=None, data={"x": 1})).ask("call", {"name": "a", "input": {}}, WHOLE)

    assert dict(exchange.headers)[b"content-type"] == b"application/json"
    answer = json.loads(await read(exchange))
    assert answer["output"]["reward"] is None
    assert answer["output"]["data"] == {"x": 1}


@pytest.mark.parametrize("reason", ["not_found", "input_validation", "episode_finished", "tool_error"])
async def test_an_error_is_returned_as_a_result_with_its_reason(reason: str) -> None:
    outcome = await Puzzle(StepResult(error="no\nway", reason=reason)).call()

    assert outcome.result == {"ok": False, "error": "no\nway", "reason": reason}


async def test_a_failed_tool_is_an_error_event_if_the_server_is_configured_so() -> None:
    class Raising(Puzzle):
        raises_by_event = True

    failed = StepResult(error="line 1\nline 2", reason="tool_error")

    assert (await Raising(failed).call()).error == "line 1\nline 2"
    answer = json.loads(await read(await Raising(failed).ask("call", {"name": "a", "input": {}}, WHOLE)))
    assert answer == {"ok": False, "error": "line 1\nline 2", "reason": "tool_error"}
    assert (await Raising(StepResult(error="no", reason="not_found")).call()).result["reason"] == "not_found"


@pytest.mark.parametrize("text", ["x" * 4000 + " " * 20_000, "a\u2028 \u3000" * 9000, '"\\\n\t' * 5000, "🙂" * 30_000])
async def test_a_large_result_is_split_into_lines_without_any_loss(text: str) -> None:
    outcome = await Puzzle(StepResult(blocks=(TextBlock(text),))).call()

    assert outcome.text == text
    assert len(outcome.lines) > 2
    assert all(not line[0].isspace() and len(line.encode()) < MAX_LINE_BYTES for line in outcome.lines)


async def test_values_that_json_or_utf8_cannot_encode_are_written_as_substitutes() -> None:
    result = StepResult(blocks=(TextBlock("\ud800"),), metadata={"deep": [float("nan"), float("inf"), 1.5]})

    output = (await Puzzle(result).call()).result["output"]

    assert output["blocks"][0]["text"] == "\ud800"
    assert output["metadata"] == {"deep": [None, None, 1.5]}


async def test_a_long_call_is_kept_alive_by_comments() -> None:
    puzzle = Puzzle(DONE)
    puzzle.gate.clear()

    async with streaming(puzzle) as (chunks, _):
        assert [await anext(chunks) for _ in range(2)] == [sse.PING] * 2
        puzzle.gate.set()
        rest = b"".join([chunk async for chunk in chunks])

    assert rest.replace(sse.PING, b"").startswith(b"event: end\r\ndata: {")


async def test_a_repeated_request_with_the_task_id_gets_the_outcome_of_the_call() -> None:
    puzzle = Puzzle(DONE)
    puzzle.gate.clear()
    async with streaming(puzzle) as (_, task_id):
        pass
    asking = asyncio.ensure_future(puzzle.call(name="other", task_id=task_id))
    puzzle.gate.set()

    first, again = await asking, await puzzle.call(task_id=task_id)

    assert first.task_id == again.task_id == task_id
    assert first.text == again.text == "done"
    assert len(puzzle.actions) == 1
    puzzle.forget(SESSION)
    for unknown in (task_id, ""):
        assert (await puzzle.call(task_id=unknown)).events == (Event("error", "unknown task_id"),)
        body = {"name": "a", "input": {}, "task_id": unknown}
        assert json.loads(await read(await puzzle.ask("call", body, WHOLE)))["reason"] == "unknown_task_id"


async def test_a_call_whose_stream_was_cut_is_found_by_its_repetition() -> None:
    puzzle = Puzzle(DONE, replace(DONE, blocks=(TextBlock("twice"),)))
    puzzle.gate.clear()
    async with streaming(puzzle, input={"text": "hi"}):
        pass
    puzzle.gate.set()

    assert (await puzzle.call()).text == "done"
    assert (await puzzle.call()).text == "twice"  # the first outcome was already delivered


async def test_a_key_runs_one_call_whether_by_ors_request_or_by_act() -> None:
    puzzle = Puzzle(DONE)
    key = (b"idempotency-key", b"k")

    first = await puzzle.call(key)
    acted = await puzzle.act(SESSION, ENVIRONMENT, Action(name="echo", arguments={"text": "hi"}), key="k")

    assert first.text == "done"
    assert acted == DONE
    assert len(puzzle.actions) == 1
    with pytest.raises(CallConflict):
        await puzzle.call(key, input={})


async def test_an_unreadable_text_of_the_agent_is_a_result_with_an_error() -> None:
    puzzle = Puzzle(Unreadable("write a JSON object"))

    result = await puzzle.act(SESSION, ENVIRONMENT, Action(text="five"))

    assert result == StepResult(error="write a JSON object", reason="input_validation")
    assert await puzzle.steps(SESSION, ENVIRONMENT) == 0


@pytest.mark.parametrize(
    "error",
    [
        UpstreamGone("no connection", sent=False),
        UpstreamGone("broke", sent=True),
        UpstreamTimeout("silent"),
        SessionNotFound("s"),
        InvalidRequest("default_tool"),
    ],
)
async def test_a_failure_before_the_response_head_is_raised(error: GatewayError) -> None:
    for headers in (STREAM, WHOLE):
        with pytest.raises(type(error)) as caught:
            await Puzzle(error).ask("call", {"name": "a", "input": {}}, headers)
        assert caught.value is error


async def test_a_failure_keeps_the_message_of_the_worker() -> None:
    for operation in ("call", "prompt", "messages"):
        puzzle = Puzzle(UpstreamError("RuntimeError: no such puzzle"))
        exchange = await puzzle.ask(operation, {"name": "a", "input": {}})
        assert exchange.status == 500
        assert json.loads(await exchange.read(1000)) == {"detail": "RuntimeError: no such puzzle"}


async def test_the_death_of_a_worker_after_the_response_head_breaks_the_stream() -> None:
    puzzle = Puzzle(UpstreamGone("died", sent=True))
    puzzle.gate.clear()

    async with streaming(puzzle) as (chunks, _):
        puzzle.gate.set()
        with pytest.raises(UpstreamGone, match="died"):
            _ = [chunk async for chunk in chunks]


async def test_a_broken_session_is_an_error_instead_of_a_result() -> None:
    assert (await Puzzle(SessionFailed("the judge ended")).call()).error == "the judge ended"
    answer = await Puzzle(SessionFailed("the judge ended")).ask("call", {"name": "a", "input": {}}, WHOLE)
    assert json.loads(await read(answer)) == {"ok": False, "error": "the judge ended", "reason": "session_failed"}


async def test_texts_and_objects_are_actions_too() -> None:
    puzzle = Puzzle(DONE, DONE)

    for body in ({"text": "hi"}, {"action": {"x": 1}, "name": None, "input": None}):
        await read(await puzzle.ask("call", body, STREAM))

    assert puzzle.actions == [Action(text="hi"), Action(fields={"x": 1})]


@pytest.mark.parametrize(
    ("body", "kind", "entry"),
    [
        (b"", JSON[1], {"type": "missing", "loc": ["body"], "msg": "Field required", "input": None}),
        (b'{"name":"a"}', JSON[1], {"type": "missing", "loc": ["body", "input"], "input": {"name": "a"}}),
        (b'{"name":"a","input":null}', JSON[1], {"type": "dict_type", "loc": ["body", "input"], "input": None}),
        (b'{"name":1,"input":{}}', JSON[1], {"type": "string_type", "loc": ["body", "name"], "input": 1}),
        (b'{"name":"a","input":{},"x":1}', JSON[1], {"type": "extra_forbidden", "loc": ["body", "x"], "input": 1}),
        (b"[1]", JSON[1], {"type": "model_attributes_type", "loc": ["body"], "input": [1]}),
        (b'{"name":"a","input":{}}', b"text/plain", {"type": "model_attributes_type", "loc": ["body"]}),
        (b'{"text":"a","name":"b"}', JSON[1], {"type": "value_error", "loc": ["body"], "ctx": {"error": {}}}),
        (b"{bad", JSON[1], {"type": "json_invalid", "loc": ["body", 1], "input": {}}),
        (b'"\xff"', JSON[1], {"type": "json_invalid"}),
    ],
)
async def test_an_invalid_body_is_refused_with_the_validation_errors_of_ors(
    body: bytes, kind: bytes, entry: dict[str, Any]
) -> None:
    puzzle = Puzzle(DONE)

    exchange = await puzzle.forward(SESSION, ENVIRONMENT, "call", body=body, headers=[(b"content-type", kind)])

    [told] = json.loads(await exchange.read(10_000))["detail"]
    assert exchange.status == 422
    assert {key: told[key] for key in entry} == entry
    assert puzzle.actions == []


async def test_a_prompt_is_a_plain_list_and_a_conversation_of_one_message() -> None:
    blocks = [
        {"text": "Hé?", "detail": {"k": 1}, "type": "text"},
        {"data": "aGk=", "mimeType": "image/png", "detail": None, "type": "image"},
    ]

    assert json.loads(await read(await Puzzle().ask("prompt"))) == blocks
    assert json.loads(await read(await Puzzle().ask("messages"))) == [
        {"role": "user", "blocks": blocks, "detail": None}
    ]
    assert await read(await Puzzle().ask("task_tools")) == b'{"tools":[]}'


async def test_a_prompt_that_takes_too_long_is_a_timeout() -> None:
    puzzle = Puzzle()
    puzzle.gate.clear()
    hasty = replace(ENVIRONMENT, timeouts=Timeouts(call_s=0.02))

    with pytest.raises(UpstreamTimeout):
        await puzzle.forward(SESSION, hasty, "prompt", body=b"", headers=[])


async def test_group_scoring_is_answered_as_not_implemented() -> None:
    exchange = await Puzzle().ask("score_group", {"candidates": []})

    assert exchange.status == 404
    assert json.loads(await exchange.read(1000)) == {"detail": "Environment 'puzzle' does not implement score_group"}


async def test_steps_and_rewards_are_counted_until_the_session_is_forgotten() -> None:
    puzzle = Puzzle(
        replace(DONE, reward=0.5, finished=False),
        StepResult(error="no", reason="not_found"),
        StepResult(error="raised", reason="tool_error"),
        DONE,
    )
    puzzle.tallies.begin(SESSION)
    for number in range(4):
        await puzzle.act(SESSION, ENVIRONMENT, Action(name="a", arguments={"n": number}))

    assert await puzzle.steps(SESSION, ENVIRONMENT) == 3
    summary = await puzzle.tallies.summary(SESSION)
    assert summary is not None
    assert replace(summary, seconds=0) == Summary(reward=1.5, finished=True, steps=3, seconds=0)
    puzzle.forget(SESSION)
    assert await puzzle.tallies.summary(SESSION) is None
    assert await puzzle.steps(SESSION, ENVIRONMENT) == 0


@pytest.mark.parametrize(("rewards", "is_rewarded"), [((None, None), False), ((0.0, None), True), ((None, 0.0), True)])
async def test_a_summary_states_whether_any_step_had_a_reward(
    rewards: tuple[float | None, ...], is_rewarded: bool
) -> None:
    puzzle = Puzzle(*(replace(DONE, reward=reward) for reward in rewards))
    puzzle.tallies.begin(SESSION)
    for number in range(len(rewards)):
        await puzzle.act(SESSION, ENVIRONMENT, Action(name="a", arguments={"n": number}))

    summary = await puzzle.tallies.summary(SESSION)

    assert summary is not None
    assert summary.is_rewarded is is_rewarded


async def test_a_cancelled_request_of_a_pending_call_leaves_no_listener() -> None:
    puzzle = Puzzle(DONE)
    puzzle.gate.clear()
    asking = asyncio.ensure_future(puzzle.ask("call", {"name": "echo", "input": {"text": "hi"}}, WHOLE))
    await until(lambda: puzzle.actions)

    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    puzzle.gate.set()

    assert (await puzzle.call()).text == "done"
    assert len(puzzle.actions) == 1
