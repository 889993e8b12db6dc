"""Episodes of scripted NeMo Gym servers; the test decides every byte of their answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any

import pytest

from gateway.core.episode import Action, StepResult, TextBlock
from gateway.core.errors import (
    AuthorFault,
    InvalidRequest,
    SessionFailed,
    UpstreamError,
    UpstreamGone,
    WorkerFull,
)
from gateway.core.session import Session
from gateway.upstreams.idempotency.recorder import Recorder
from gateway.upstreams.nemo.upstream import MAX_CALLS_BYTES, NemoUpstream
from tests.fakes.areal_server import GUESS, Held, Scripted, asked
from tests.fakes.eventually import until
from tests.fakes.replicas import Shared, View

BODY = {"requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Add"}}}}}
SCHEMA = {"type": "object", "properties": {"by": {"$ref": "#/components/schemas/By"}}, "required": ["by"]}
DOCUMENT: dict[str, Any] = {
    "paths": {
        **{path: {"post": {}} for path in ("/seed_session", "/verify", "/aggregate_metrics", "/{anything}")},
        "/add": {"post": {"description": "Add to the sum.", **BODY}},
        "/health": {"get": {}},
    },
    "components": {"schemas": {"Add": SCHEMA, "By": {"type": "integer"}}},
}
GYM: dict[str, Any] = {"paths": {path: {"post": {}} for path in ("/reset", "/step", "/aggregate_metrics")}}
COOKIE = "set-cookie: session=a.b-c; path=/; HttpOnly\r\nset-cookie: route=7; path=/\r\n"
SEEDED: tuple[int, Any, str] = (200, {}, COOKIE)
ROW: dict[str, Any] = {
    "responses_create_params": {"input": [{"role": "user", "content": "Make three."}], "parallel_tool_calls": False},
    "expected": 3,
}
IMAGE = "data:image/png;base64,iVBORw0KGgo="
ADD = Action(name="add", arguments={"by": 3})
DONE = Action(text="It is three.")


def server(document: Mapping[str, Any] = DOCUMENT, **answers: Any) -> Scripted:
    """A server that answers 200 to each request, unless *answers* has a list for the route."""
    usual = {"seed_session": [SEEDED], "add": [{"sum": 3}], "verify": [verified()], "close_session": [{}]}
    paths = {f"/{name}": given for name, given in {**usual, **answers}.items()}
    return Scripted({"/openapi.json": [document], **paths})


def verified(reward: Any = 1.0, **more: Any) -> dict[str, Any]:
    return {**ROW, "response": {}, "reward": reward, "mask_sample": False, "failure_kind": None, **more}


@contextlib.asynccontextmanager
async def playing(scripted: Scripted, row: Mapping[str, Any] = ROW, **setup: Any) -> Any:
    """Yield a function that acts in an open episode, its session, and the upstream."""
    async with asked(scripted, kind=NemoUpstream) as world:
        session = await world.open(spec={"row": row}, **setup)

        async def act(action: Action, **more: Any) -> StepResult:
            result: StepResult = await world.upstream.act(session, GUESS, action, **more)
            return result

        yield act, session, world


def output_of(scripted: Scripted, path: str = "/verify") -> list[dict[str, Any]]:
    """The output of the model in the last request."""
    found: list[dict[str, Any]] = scripted.bodies(path)[-1]["response"]["output"]
    return found


# -- the server -----------------------------------------------------------------------------------------------------


async def test_a_starting_server_is_asked_until_it_describes_its_routes() -> None:
    starting = Scripted({"/openapi.json": [None, (503, {}), (500, {}), DOCUMENT]})

    async with asked(starting, kind=NemoUpstream) as world:
        assert await world.upstream.ready(world.worker, GUESS) == 0


@pytest.mark.parametrize("document", [{"paths": {"/reset": {}, "/step": {}}}, {}, {"paths": 3}, (404, {}), (200, b"x")])
async def test_another_server_is_refused(document: Any) -> None:
    async with asked(Scripted({"/openapi.json": [document]}), kind=NemoUpstream) as world:
        with pytest.raises(UpstreamError):
            await world.upstream.ready(world.worker, GUESS)


async def test_the_tools_are_the_routes_with_their_schemas_and_one_for_the_answer() -> None:
    async with asked(server(), kind=NemoUpstream) as world:
        listed = json.loads(await world.upstream.tools(world.worker, GUESS))

    assert [tool["name"] for tool in listed["tools"]] == ["add", "reply"]
    assert listed["tools"][0]["input_schema"]["properties"] == {"by": {"type": "integer"}}
    assert listed["tools"][0]["description"] == "Add to the sum."
    assert listed["terminal_tool"] == listed["tools"][1]


async def test_the_tools_of_a_row_replace_the_routes() -> None:
    tools = [{"type": "function", "name": "sub", "parameters": {"type": "object"}, "description": None}, {"no": "name"}]
    parameters = {**ROW["responses_create_params"], "tools": tools}

    async with playing(server(), {**ROW, "responses_create_params": parameters}) as (_, session, world):
        listed = json.loads(await world.upstream.task_tools(session, GUESS))

    assert [tool["name"] for tool in listed["tools"]] == ["sub", "reply"]


# -- the start ------------------------------------------------------------------------------------------------------


async def test_a_seed_sends_the_row_and_each_request_the_cookies() -> None:
    scripted = server()

    async with playing(scripted) as (act, session, world):
        await act(ADD)
        await world.upstream.close(session, GUESS)

    assert scripted.bodies("/seed_session") == [ROW]
    asked_with = {request.target: request.headers.get("cookie") for request in scripted.requests}
    assert asked_with["/seed_session"] is None
    assert asked_with["/add"] == asked_with["/close_session"] == "session=a.b-c; route=7"


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        ({"spec": {}}, "row: the task of a NeMo Gym server"),
        ({"spec": {"row": {"input": "x"}}}, "row.responses_create_params: must be an object"),
        ({"spec": {"row": {"responses_create_params": {"input": 3}}}}, "row.responses_create_params.input"),
        ({"spec": {"row": ROW}, "config": {"level": 3}}, "config: level would be lost"),
        ({"spec": {"row": ROW}, "secrets": {"openai_api_key": "x"}}, "secrets openai_api_key"),
        ({"spec": {"row": {**ROW, "pad": "x" * 2**20}}}, "larger than"),
    ],
)
async def test_a_task_that_is_no_row_is_refused(setup: dict[str, Any], words: str) -> None:
    async with asked(server(), kind=NemoUpstream) as world:
        with pytest.raises(InvalidRequest, match=words):
            await world.open(**setup)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((422, {"detail": [{"loc": ["body", "expected"], "msg": "Field required"}]}), InvalidRequest),
        ((500, b"Internal Server Error"), AuthorFault),
        ((503, {"detail": "full"}), WorkerFull),
        ((403, {}), UpstreamError),
        (None, UpstreamGone),
    ],
)
async def test_a_refused_seed_opens_nothing(answer: Any, error: type[Exception]) -> None:
    async with asked(server(seed_session=[answer]), kind=NemoUpstream) as world:
        with pytest.raises(error):
            await world.open(spec={"row": ROW})


@pytest.mark.parametrize(("given", "sent"), [(None, 7), (5, 5)])
async def test_a_rows_null_seed_becomes_the_episodes(given: int | None, sent: int) -> None:
    scripted = server()

    async with playing(scripted, {**ROW, "seed": given}, seed=7):
        assert scripted.bodies("/seed_session")[0]["seed"] == sent


async def test_the_prompt_is_the_rows_conversation() -> None:
    said = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Look:"}, {"type": "input_image", "image_url": IMAGE}],
        },
        {"type": "function_call", "name": "add", "arguments": "{}", "call_id": "c"},
    ]
    row = {"responses_create_params": {"input": said, "instructions": "You count."}}

    async with playing(server(), row) as (_, session, world):
        messages = json.loads(await world.upstream.messages(session, GUESS))

    assert [message["role"] for message in messages] == ["system", "system", "user", "assistant"]
    assert [block["type"] for block in messages[2]["blocks"]] == ["text", "image"]
    assert '"name":"add"' in messages[3]["blocks"][0]["text"]


# -- steps ----------------------------------------------------------------------------------------------------------


async def test_calls_and_answer_are_verified_together() -> None:
    scripted = server(
        add=[{"sum": 1}, (422, {"detail": "by: no"}), (500, b"broken"), {"sum": 3}], verify=[verified(0.5, found=3)]
    )

    async with playing(scripted) as (act, session, world):
        results = [await act(Action(name="add", arguments={"by": by})) for by in (1, "x", 2, 2)]
        last = await act(DONE)
        again = await act(DONE)
        after = await act(ADD)
        summary = await world.upstream.close(session, GUESS)

    assert [(result.error, result.reason) for result in results] == [
        (None, ""),
        ("by: no", "input_validation"),
        ("the server answered 500 and gave no reason", "tool_error"),
        (None, ""),
    ]
    assert results[0].blocks == (TextBlock('{"sum": 1}'),)
    assert (last.reward, last.finished, last.metadata) == (0.5, True, {"found": 3})
    assert again.reason == after.reason == "episode_finished"
    assert len(scripted.bodies("/verify")) == 1
    assert len(scripted.bodies("/add")) == 4
    made = output_of(scripted)
    assert [item["type"] for item in made] == [*["function_call", "function_call_output"] * 4, "message"]
    assert [item.get("output") for item in made[1::2]] == ['{"sum": 1}', '{"detail": "by: no"}', "broken", '{"sum": 3}']
    assert len({item["call_id"] for item in made[:8]}) == 4
    assert made[-1]["content"][0]["text"] == "It is three."
    assert scripted.bodies("/verify")[0]["expected"] == 3
    assert scripted.bodies("/verify")[0]["response"]["parallel_tool_calls"] is False
    assert (summary.reward, summary.finished, summary.steps) == (0.5, True, 4)


@pytest.mark.parametrize(
    ("action", "route"),
    [
        (Action(text='{"name": "add", "arguments": {"by": 3}}'), "/add"),
        (Action(text='<tool_call>{"name": "add", "arguments": {"by": 3}}</tool_call>'), "/add"),
        (Action(text='{"name": "add", "arguments": {"by": 3}}', is_final=True), "/verify"),
        (Action(text='{"name": "reply", "arguments": {"text": "3"}}'), "/verify"),
        (Action(name="reply", arguments={"text": "3"}), "/verify"),
        (Action(fields={"text": "3"}), "/verify"),
        (Action(text=""), "/verify"),
        (Action(name="a/b ü", arguments={}), "/a%2Fb%20%C3%BC"),
    ],
)
async def test_an_action_goes_to_its_route(action: Action, route: str) -> None:
    scripted = server()

    async with playing(scripted) as (act, *_):
        await act(action)

    assert scripted.requests[-1].target == route


@pytest.mark.parametrize(
    "action", [Action(fields={"by": 3}), Action(name="reply", arguments={"text": 3}), Action(fields={})]
)
async def test_an_object_without_the_text_is_answered_with_the_form(action: Action) -> None:
    async with playing(server()) as (act, *_):
        result = await act(action)

    assert result.reason == "input_validation"
    assert '{"text":' in (result.error or "")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((422, {"detail": "expected: Field required"}), AuthorFault),
        ((500, b"boom"), AuthorFault),
        (verified("high"), AuthorFault),
        (verified(None), AuthorFault),
        ((200, b'{"reward": NaN}'), AuthorFault),
        ((200, b"[1]"), UpstreamError),
        (verified(1.0, mask_sample=True, failure_kind="judge", failure_reason="no key"), SessionFailed),
        (None, UpstreamGone),
    ],
)
async def test_a_failed_verification_gives_no_reward(answer: Any, error: type[Exception]) -> None:
    scripted = server(verify=[answer, verified()])

    async with playing(scripted) as (act, session, world):
        with pytest.raises(error):
            await act(DONE)
        with contextlib.suppress(UpstreamError):
            await act(DONE)
        summary = await world.upstream.close(session, GUESS)

    assert len(scripted.bodies("/verify")) == 1
    assert not summary.is_rewarded


async def test_two_answers_at_once_are_verified_once() -> None:
    held = Held(verified())
    scripted = server(verify=[held])

    async with playing(scripted) as (act, *_):
        both = [asyncio.ensure_future(act(DONE)), asyncio.ensure_future(act(Action(text="four")))]
        await until(lambda: scripted.bodies("/verify"))
        held.free.set()
        results = await asyncio.gather(*both)

    assert sorted([result.reward or 0.0 for result in results]) == [0.0, 1.0]
    assert len(scripted.bodies("/verify")) == 1


async def test_calls_that_are_too_large_to_verify_fail_the_episode() -> None:
    scripted = server(add=[(200, b"x" * (MAX_CALLS_BYTES // 2))])

    async with playing(scripted) as (act, *_):
        await act(ADD)
        with pytest.raises(SessionFailed, match="more than 1048576 bytes"):
            await act(ADD)


async def test_another_replica_continues_and_verifies_an_episode() -> None:
    scripted, shared = server(add=[{"sum": 1}, {"sum": 2}, {"sum": 3}]), Shared()
    recorders = [Recorder(View(shared, name), tick_s=0.01) for name in "ab"]

    async with contextlib.AsyncExitStack() as stack:
        a, b = [await stack.enter_async_context(asked(scripted, one, kind=NemoUpstream)) for one in recorders]
        b.session = a.session
        session: Session = await a.open(spec={"row": ROW})
        for world in (a, b, a):
            await world.upstream.act(session, GUESS, ADD)
        last = await b.upstream.act(session, GUESS, DONE)
        after = await a.upstream.act(session, GUESS, DONE)
        for recorder in recorders:
            await recorder.aclose()

    assert [item["output"] for item in output_of(scripted)[1::2]] == ['{"sum": 1}', '{"sum": 2}', '{"sum": 3}']
    assert last.reward == 1.0
    assert after.reason == "episode_finished"
    assert len(scripted.bodies("/verify")) == 1


async def test_an_episode_whose_calls_are_not_all_known_is_not_verified() -> None:
    scripted, shared = server(), Shared()
    recorders = [Recorder(View(shared, name), tick_s=0.01, write_s=0.05) for name in "ab"]

    async with contextlib.AsyncExitStack() as stack:
        a, b = [await stack.enter_async_context(asked(scripted, one, kind=NemoUpstream)) for one in recorders]
        session = await a.open(spec={"row": ROW})
        await a.upstream.act(session, GUESS, ADD)
        shared.lose()
        with pytest.raises(SessionFailed, match="not all known"):
            await b.upstream.act(session, GUESS, DONE)
        for recorder in recorders:
            await recorder.aclose()

    assert scripted.bodies("/verify") == []


# -- servers with steps ---------------------------------------------------------------------------------------------


async def test_a_server_with_steps_gives_a_reward_for_each() -> None:
    first = {"observation": None, "reward": 0.25, "terminated": False, "info": {"tool_outputs": [{"output": "3"}]}}
    last = {"observation": "Well done.", "reward": 0.75, "terminated": True, "info": {}}
    reset = (200, {"observation": "Count.", "info": {"supports_explicit_close": True}}, COOKIE)
    scripted = server(GYM, reset=[reset], step=[first, last], close=[{}])

    async with playing(scripted) as (act, session, world):
        prompt = await world.upstream.prompt(session, GUESS)
        results = [await act(ADD), await act(DONE), await act(DONE)]
        summary = await world.upstream.close(session, GUESS)

    assert [block.text for block in prompt if isinstance(block, TextBlock)] == [
        "[user]",
        "Make three.",
        "[user]",
        "Count.",
    ]
    assert [(result.reward, result.finished) for result in results] == [(0.25, False), (0.75, True), (None, False)]
    assert [[block.text for block in result.blocks] for result in results] == [["3"], ["Well done."], []]
    assert [item["type"] for body in scripted.bodies("/step") for item in body["response"]["output"]] == [
        "function_call",
        "message",
    ]
    assert scripted.bodies("/close") == [{}]
    assert (summary.reward, summary.steps) == (1.0, 2)


@pytest.mark.parametrize(("status", "is_confirmed"), [(200, True), (404, True), (422, True), (500, False)])
async def test_a_server_that_cannot_close_an_episode_keeps_its_slot(status: int, is_confirmed: bool) -> None:
    async with playing(server(close_session=[(status, {})])) as (_, session, world):
        if is_confirmed:
            assert (await world.upstream.close(session, GUESS)).steps == 0
        else:
            with pytest.raises(UpstreamError):
                await world.upstream.close(session, GUESS)
