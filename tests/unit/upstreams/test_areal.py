"""Episodes of a scripted AReaL task server; the test decides every byte of its answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.environment import Areal, Server, Split, SplitType, Timeouts
from gateway.core.episode import Action
from gateway.core.errors import (
    AuthorFault,
    CallConflict,
    GatewayError,
    InvalidRequest,
    SessionFailed,
    SessionNotFound,
    UnknownSplit,
    UpstreamError,
    UpstreamGone,
    UpstreamTimeout,
    WorkerFull,
)
from gateway.upstreams.idempotency.recorder import Recorder
from tests.fakes.areal_server import (
    BEGUN,
    CANCEL,
    GONE,
    GUESS,
    HELLO,
    INFO,
    START,
    STEP,
    WON,
    Held,
    Scripted,
    asked,
    stepped,
)
from tests.fakes.eventually import until
from tests.fakes.replicas import Shared, View

# -- the server -----------------------------------------------------------------------------------------------------


async def test_a_starting_server_is_polled_until_it_is_healthy() -> None:
    starting = (503, {"error": "starting"})
    server = Scripted({"/up": [None, starting, {}], "/api/task/info": [starting, INFO], "/api/health": [starting, {}]})

    async with asked(server) as world:
        room = await world.upstream.ready(world.worker, GUESS)
        other = replace(GUESS, server=Server(port=5000, ready="/up"))
        await world.upstream.ready(world.worker, other)

    assert room == 0
    targets = [request.target for request in server.requests]
    health = targets.index("/up")
    assert targets[:health] == ["/api/task/info"] * 2 + ["/api/health", "/api/task/info", "/api/health"]
    assert targets[health:] == ["/up"] * 3 + ["/api/task/info"]


async def test_a_server_without_a_health_route_is_ready() -> None:
    async with asked(Scripted()) as world:
        assert await world.upstream.ready(world.worker, GUESS) == 0


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        pytest.param((404, b""), "neither /api/task/info nor /task/info", id="another protocol"),
        pytest.param((200, b"<html>"), "not JSON", id="a web page"),
        pytest.param((200, {"status": "ok"}), "without a name", id="another JSON object"),
        pytest.param((401, {"error": "who are you"}), "who are you", id="a key is required"),
    ],
)
async def test_readiness_fails_immediately_for_a_server_that_is_not_a_task_server(answer: Any, words: str) -> None:
    async with asked(Scripted(info=answer)) as world:
        with pytest.raises(UpstreamError, match=words):
            await world.upstream.ready(world.worker, GUESS)


async def test_an_unhealthy_server_is_not_alive() -> None:
    server = Scripted({"/api/health": [(503, {"error": "draining", "detail": "it stops"})]})

    async with asked(server) as world:
        with pytest.raises(UpstreamError, match="draining: it stops"):
            await world.upstream.alive(world.worker, GUESS)


async def test_a_server_may_serve_without_the_api_prefix() -> None:
    server = Scripted({"/task/info": [INFO], "/episode/start": [BEGUN]}, info=(404, {}))

    async with asked(server) as world:
        await world.open()

    assert [request.target for request in server.requests] == ["/api/task/info", "/task/info", "/episode/start"]


async def test_the_samples_of_a_server_are_one_split() -> None:
    environment = replace(GUESS, areal=Areal(split="test"))

    async with asked(Scripted()) as world:
        of_it = world.upstream, world.worker, environment
        splits = await of_it[0].splits(*of_it[1:])
        tasks = await of_it[0].tasks(*of_it[1:], "test", 1, 9)
        count = await of_it[0].count(*of_it[1:], "test")
        with pytest.raises(UnknownSplit):
            await of_it[0].count(*of_it[1:], "train")

    assert splits == [Split("test", SplitType.TEST)]
    assert count == 3
    assert tasks == [{"id": "1", "sample_id": 1}, {"id": "2", "sample_id": 2}]


@pytest.mark.parametrize(
    ("sample_ids", "names"),
    [("dev-{:03d}", ["dev-000", "dev-001", "dev-002"]), (("hard", "easy"), ["hard", "easy"]), ((), []), ("", [])],
)
async def test_samples_have_the_configured_names(sample_ids: str | tuple[str, ...], names: list[str]) -> None:
    environment = replace(GUESS, areal=Areal(sample_ids=sample_ids))

    async with asked(Scripted()) as world:
        splits = await world.upstream.splits(world.worker, environment)
        if not names:
            assert splits == []
            with pytest.raises(UnknownSplit, match="there are none"):
                await world.upstream.count(world.worker, environment, "train")
            return
        count = await world.upstream.count(world.worker, environment, "train")
        tasks = await world.upstream.tasks(world.worker, environment, "train", 0, 9)

    assert (len(splits), count) == (1, len(names))
    assert tasks == [{"id": name, "sample_id": name} for name in names]


async def test_a_server_that_reports_no_number_of_samples_has_no_split() -> None:
    async with asked(Scripted(info={"name": "guess", "num_samples": None})) as world:
        assert await world.upstream.splits(world.worker, GUESS) == []


# -- start ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setup", "body"),
    [
        pytest.param({"spec": {"sample_id": 0, "id": "x"}}, {"sample_id": 0, "config": {}}, id="the task's sample"),
        pytest.param({"spec": {"id": "dev-1"}, "index": 4}, {"sample_id": "dev-1", "config": {}}, id="the task's id"),
        pytest.param({"spec": {}, "index": 4}, {"sample_id": 4, "config": {}}, id="the task's index"),
        pytest.param(
            {"spec": {"id": "x", "environment_config": {"sample_id": "s", "level": 2}}, "config": {"level": 3}},
            {"sample_id": "s", "config": {"level": 3}},
            id="the trainer's configuration overrides the task's",
        ),
        pytest.param({"seed": 7}, {"sample_id": 2, "config": {"seed": 7}}, id="a seed"),
        pytest.param({"secrets": {"api_key": "k"}}, {"sample_id": 2, "config": {}}, id="the platform's key is dropped"),
        pytest.param(
            {"spec": {"id": "3", "name": "three", "tags": ["a"], "instruction": "", "evaluation": {}}},
            {"sample_id": "3", "config": {}},
            id="labels are dropped",
        ),
    ],
)
async def test_a_start_request_contains_the_whole_setup(setup: Mapping[str, Any], body: Any) -> None:
    server = Scripted({START: [BEGUN]})

    async with asked(server) as world:
        await world.open(**setup)

    assert server.bodies(START) == [body]


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        ({"spec": {"sample_id": 1, "instruction": "do it", "evaluation": {"x": 1}}}, "evaluation, instruction"),
        ({"spec": {}}, "does not name a sample"),
        ({"spec": {"sample_id": True}}, "sample_id"),
        ({"spec": {"sample_id": 1, "config": 7}}, "config: must be an object"),
        ({"secrets": {"api_key": "k", "db": "s3cr3t"}}, "secrets db"),
    ],
)
async def test_a_setup_that_the_server_would_ignore_is_refused(setup: Mapping[str, Any], words: str) -> None:
    server = Scripted({START: [BEGUN]})

    async with asked(server) as world:
        with pytest.raises(InvalidRequest, match=words) as refused:
            await world.open(**setup)

    assert "s3cr3t" not in refused.value.detail
    assert server.bodies(START) == []


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        ((503, {"error": "no capacity", "detail": "8 play"}), WorkerFull, "no capacity: 8 play"),
        ((500, {"error": "no room", "detail": "x", "status": "capacity"}), WorkerFull, "no room"),
        ((404, {"error": "sample not found", "detail": "0 to 2"}), InvalidRequest, "sample not found: 0 to 2"),
        ((422, {"detail": [{"loc": ["body", "x"], "msg": "no"}]}), InvalidRequest, "body.x: no"),
        ((500, {"error": "internal", "detail": "init failed"}), AuthorFault, "internal: init failed"),
        ((500, b"<html>"), AuthorFault, "gave no reason"),
        ((200, b"nope"), UpstreamError, "not JSON"),
        ({**BEGUN, "episode_id": ""}, UpstreamError, "episode_id"),
        (None, UpstreamGone, "closed"),
    ],
)
async def test_a_start_that_fails_is_a_typed_error(answer: Any, kind: type[GatewayError], words: str) -> None:
    server = Scripted({START: [answer]})

    async with asked(server) as world:
        with pytest.raises(kind) as refused:
            await world.open()
        assert await world.upstream.close(world.session, GUESS) is None

    assert type(refused.value) is kind
    assert words in refused.value.detail
    assert server.bodies(CANCEL) == []


@pytest.mark.parametrize(
    ("observation", "words"),
    [
        (None, "without an observation"),
        ({"type": "smell", "content": "x"}, "unknown type"),
        ({"type": "text", "content": "x" * 2**20}, "can be kept"),
    ],
)
async def test_an_episode_whose_first_observation_is_unusable_is_cancelled(observation: Any, words: str) -> None:
    server = Scripted({START: [{**BEGUN, "observation": observation}]})

    async with asked(server) as world:
        with pytest.raises(UpstreamError, match=words):
            await world.open()

    assert server.bodies(CANCEL) == [{"episode_id": "e-1"}]


async def test_an_episode_that_starts_after_its_opening_was_cancelled_is_cancelled_too() -> None:
    held = Held(BEGUN)
    server = Scripted({START: [held]})

    async with asked(server) as world:
        opening = asyncio.ensure_future(world.open())
        await until(lambda: server.bodies(START))
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        closing = asyncio.ensure_future(world.upstream.close(world.session, GUESS))
        held.free.set()

        assert await closing is None
        assert server.bodies(CANCEL) == [{"episode_id": "e-1"}]


async def test_a_start_that_takes_too_long_is_a_timeout_and_its_late_episode_is_cancelled() -> None:
    held = Held(BEGUN)
    server = Scripted({START: [held]})

    async with asked(server) as world:
        with pytest.raises(UpstreamTimeout):
            await world.open(replace(GUESS, timeouts=Timeouts(setup_s=0.05)))
        assert server.bodies(CANCEL) == []
        held.free.set()

        await until(lambda: server.bodies(CANCEL) == [{"episode_id": "e-1"}])


# -- steps ----------------------------------------------------------------------------------------------------------


async def test_an_episode_is_played_and_its_rewards_are_summed() -> None:
    server = Scripted({START: [BEGUN], STEP: [stepped(0.25), WON]})

    async with asked(server) as world:
        session = await world.open()
        first = await world.upstream.act(session, GUESS, Action(text="a"))
        last = await world.upstream.act(session, GUESS, Action(text="b"))
        later = await world.upstream.act(session, GUESS, Action(text="c"))
        server.answers[CANCEL] = [(404, GONE)]
        summary = await world.upstream.close(session, GUESS)

    assert (first.reward, first.finished) == (0.25, False)
    assert (last.reward, last.finished, last.metadata) == (1.0, True, {"success": True})
    assert (later.reason, later.reward) == ("episode_finished", None)
    assert [body["action"] for body in server.bodies(STEP)] == [
        {"type": "text", "content": "a"},
        {"type": "text", "content": "b"},
    ]
    assert summary is not None
    assert (summary.reward, summary.finished, summary.steps) == (1.25, True, 2)


async def test_another_replica_continues_the_episode_by_its_handle() -> None:
    server = Scripted({START: [BEGUN], STEP: [stepped(0.25), stepped(0.5)]})

    shared = Shared()
    recorders = [Recorder(View(shared, name), tick_s=0.01) for name in "ab"]
    async with asked(server, recorders[0]) as world, asked(server, recorders[1]) as other:
        session = await world.open()
        await world.upstream.act(session, GUESS, Action(text="a"))
        prompt = await other.upstream.prompt(session, GUESS)
        result = await other.upstream.act(session, GUESS, Action(text="a"))
        summary = await other.upstream.close(session, GUESS)

    assert [block.text for block in prompt if not hasattr(block, "data")] == ["hello"]
    assert result.reward == 0.5
    assert summary is not None
    assert (summary.reward, summary.steps, summary.is_whole) == (0.75, 2, True)
    assert server.bodies(CANCEL) == [{"episode_id": "e-1"}]
    for recorder in recorders:
        await recorder.aclose()


async def test_a_sum_is_incomplete_if_another_replica_may_have_seen_more_steps() -> None:
    server = Scripted({START: [BEGUN], STEP: [stepped(0.5)]})

    async with asked(server) as world, asked(server) as other:
        session = await world.open()
        await other.upstream.act(session, GUESS, Action(text="a"))
        summary = await other.upstream.close(session, GUESS)

    assert summary is not None
    assert not summary.is_whole


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        ((404, GONE), SessionNotFound, ""),
        ((400, {"error": "bad request", "detail": "action"}), InvalidRequest, "bad request: action"),
        ((500, {"error": "lost", "detail": "x", "status": "environment_lost"}), SessionFailed, "lost: x"),
        ((500, {"error": "broken", "detail": "x"}), AuthorFault, "broken: x"),
        ((502, b""), UpstreamError, "502"),
        (None, UpstreamGone, "closed"),
        (stepped(None), AuthorFault, "is not a number"),
        (stepped(True), AuthorFault, "is not a number"),
        (stepped("1"), AuthorFault, "is not a number"),
        ((200, b'{"episode_id":"e","observation":null,"reward":NaN,"done":true,"info":{}}'), AuthorFault, "NaN"),
        ((200, b'{"episode_id":"e","observation":null,"reward":1e999,"done":true}'), AuthorFault, "not finite"),
        ({"observation": None, "done": True, "info": {}}, AuthorFault, "without a reward"),
        ({"observation": HELLO, "reward": 0.0}, UpstreamError, "has no boolean 'done'"),
        ([1], UpstreamError, "is not a JSON object"),
    ],
)
async def test_a_step_that_fails_is_a_typed_error_and_never_a_reward(
    answer: Any, kind: type[GatewayError], words: str
) -> None:
    server = Scripted({START: [BEGUN], STEP: [answer, WON]})

    async with asked(server) as world:
        session = await world.open()
        with pytest.raises(kind) as refused:
            await world.upstream.act(session, GUESS, Action(text="a"))

    assert type(refused.value) is kind
    assert words in refused.value.detail
    assert len(server.bodies(STEP)) == 1


async def test_a_step_that_does_not_end_the_episode_may_omit_the_reward() -> None:
    server = Scripted({START: [BEGUN], STEP: [{"observation": HELLO, "done": False}]})

    async with asked(server) as world:
        result = await world.upstream.act(await world.open(), GUESS, Action(text="a"))

    assert (result.reward, result.finished) == (None, False)


async def test_a_key_runs_one_step_only() -> None:
    server = Scripted({START: [BEGUN], STEP: [stepped(0.5), stepped(0.75)]})

    async with asked(server) as world:
        session = await world.open()
        first = await world.upstream.act(session, GUESS, Action(text="a"), key="k")
        again = await world.upstream.act(session, GUESS, Action(text="a"), key="k")
        with pytest.raises(CallConflict):
            await world.upstream.act(session, GUESS, Action(text="b"), key="k")

    assert first == again
    assert len(server.bodies(STEP)) == 1


async def test_a_second_step_waits_for_the_first_even_if_the_first_caller_left() -> None:
    held = Held(stepped(0.5))
    server = Scripted({START: [BEGUN], STEP: [held, stepped(0.75)]})

    async with asked(server) as world:
        session = await world.open()
        first = asyncio.ensure_future(world.upstream.act(session, GUESS, Action(text="a")))
        await until(lambda: server.bodies(STEP))
        second = asyncio.ensure_future(world.upstream.act(session, GUESS, Action(text="b")))
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        for _ in range(5):  # complete exchanges; the second step would have been sent during these
            await world.upstream.alive(world.worker, GUESS)
        assert len(server.bodies(STEP)) == 1
        held.free.set()
        result = await second
        summary = await world.upstream.close(session, GUESS)

    assert result.reward == 0.75
    assert summary is not None
    assert (summary.steps, summary.reward) == (2, 1.25)


async def test_a_close_ends_the_running_step() -> None:
    held = Held((404, GONE))
    server = Scripted({START: [BEGUN], STEP: [held]})

    async with asked(server) as world:
        session = await world.open()
        step = asyncio.ensure_future(world.upstream.act(session, GUESS, Action(text="a")))
        await until(lambda: server.bodies(STEP))
        closing = asyncio.ensure_future(world.upstream.close(session, GUESS))
        await until(lambda: server.bodies(CANCEL))
        held.free.set()
        await closing

        with pytest.raises(SessionNotFound):
            await step


@pytest.mark.parametrize("answer", [(500, {"error": "stuck", "detail": "x"}), None], ids=["refused", "cut"])
async def test_a_cancel_that_fails_is_an_error(answer: Any) -> None:
    server = Scripted({START: [BEGUN], CANCEL: [answer]})

    async with asked(server) as world:
        session = await world.open()
        with pytest.raises(UpstreamError):
            await world.upstream.close(session, GUESS)


STRUCTURED = {**INFO, "action_type": "structured"}


async def test_a_call_of_an_unknown_tool_is_not_sent() -> None:
    server = Scripted({START: [BEGUN], STEP: [stepped()]})

    async with asked(server) as world:
        session = await world.open()
        result = await world.upstream.act(session, GUESS, Action(name="bash"))
        steps = await world.upstream.steps(session, GUESS)

    assert (result.reason, steps) == ("not_found", 0)
    assert server.bodies(STEP) == []


async def test_a_server_has_one_tool() -> None:
    async with asked(Scripted()) as world, asked(Scripted(info=STRUCTURED)) as other:
        [text] = json.loads(await world.upstream.tools(world.worker, GUESS))["tools"]
        [structured] = json.loads(await other.upstream.tools(other.worker, GUESS))["tools"]

    assert (text["name"], text["input_schema"]["required"]) == ("act", ["content"])
    assert structured["input_schema"] == {"type": "object", "additionalProperties": True}


async def test_an_ors_call_is_answered_as_an_event_stream() -> None:
    server = Scripted({START: [BEGUN], STEP: [WON]})

    async with asked(server) as world:
        session = await world.open()
        body = b'{"name": "act", "input": {"content": "go"}}'
        headers = [(b"content-type", b"application/json")]
        exchange = await world.upstream.forward(session, GUESS, "call", body=body, headers=headers)
        stream = (await exchange.read(2**20)).decode()
        await exchange.aclose()

    assert stream.startswith("event: task_id")
    assert '"reward":1.0' in stream
    assert '"finished":true' in stream
