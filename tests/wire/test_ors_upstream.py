"""Standard ORS servers as workers: unmodified servers of both official packages, and the gateway's own server."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from gateway.core.environment import ActionMapping, Split, SplitType, Timeouts
from gateway.core.episode import Action, ImageBlock, TextBlock
from gateway.core.errors import (
    AuthorFault,
    CallConflict,
    InvalidRequest,
    SessionNotFound,
    UnknownSplit,
    UpstreamError,
    UpstreamGone,
)
from gateway.core.session import SessionSetup
from gateway.upstreams.ors.third_party import ThirdPartyOrsUpstream
from gateway.upstreams.transport import HttpTransport
from tests.fakes.eventually import eventually
from tests.wire.cutting import Relay as Cutting
from tests.wire.cutting import relay as cutting
from tests.wire.gateways import WIRE
from tests.wire.ors_driver import Driver, environment, text
from tests.wire.processes import ServerProcess
from tests.wire.raw import MAX_LINE_BYTES, parse
from tests.wire.targets import OFFICIAL, Folder, Roots, World, runs_once, token

pytestmark = pytest.mark.wire

SERVERS = (*OFFICIAL, "envserver")
AWKWARD = "def f(x):\n" + "    return x  \n\n" * 40_000 + " " * 20_000 + "\u2028\u3000\u00a0é🙂" * 60_000
"""More than 1 MB of text with white space throughout: clients lose some white space at the cuts between pieces."""


@pytest.fixture
async def upstream() -> AsyncIterator[ThirdPartyOrsUpstream]:
    transport = HttpTransport()
    upstream = ThirdPartyOrsUpstream(transport)
    yield upstream
    await upstream.aclose()
    await transport.aclose()


@pytest.fixture
def server(request: pytest.FixtureRequest, world: World, upstream: ThirdPartyOrsUpstream) -> Driver:
    return Driver(upstream, world.named(request.param).url)


@pytest.fixture
def shared(tmp_path: Path) -> Folder:
    return Folder(str(tmp_path), Roots(tmp_path))


def on(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("server", names, indirect=True)


@on(*SERVERS)
async def test_a_server_is_ready_when_it_serves_the_environment(server: Driver) -> None:
    assert await server.upstream.ready(server.worker, environment()) == 0
    assert await server.upstream.ready(server.worker, environment("mine")) == 0  # the server's default environment
    await server.upstream.alive(server.worker, environment())
    with pytest.raises(UpstreamError, match="not 'yours'"):
        await server.upstream.ready(server.worker, environment("mine", upstream_name="yours"))


@on(*SERVERS)
async def test_the_servers_splits_and_tasks_are_served(server: Driver) -> None:
    there = environment("counter")

    splits = await server.upstream.splits(server.worker, there)
    assert splits == [Split("train", SplitType.TRAIN), Split("test", SplitType.TEST)]
    assert await server.upstream.count(server.worker, there, "train") == 3
    tasks = await server.upstream.tasks(server.worker, there, "train", 1, 10)
    assert tasks == [{"id": "counter-1", "start": 1}, {"id": "counter-2", "start": 2}]
    assert await server.upstream.tasks(server.worker, there, "train", 3, 10) == []
    with pytest.raises(UnknownSplit, match="Invalid split"):
        await server.upstream.count(server.worker, there, "nope")
    with pytest.raises(UnknownSplit, match="Invalid split"):
        await server.upstream.tasks(server.worker, there, "nope", 0, 1)


@on(*SERVERS)
async def test_the_list_of_tools_has_every_key_of_the_standard(server: Driver) -> None:
    tools = json.loads(await server.upstream.tools(server.worker, environment()))

    assert tools.keys() >= {"tools", "terminal_tool", "supports_score_group", "message_block_types"}
    assert "echo" in {tool["name"] for tool in tools["tools"]}
    assert all(tool.keys() == {"name", "description", "input_schema"} for tool in tools["tools"])
    async with server.on(task={"tools": ["hint"]}) as episode:
        status, body = await episode.ask("task_tools")
    assert status == 200
    assert "hint" in {tool["name"] for tool in json.loads(body)["tools"]}


@on(*SERVERS)
async def test_an_episode_is_opened_by_its_task_or_by_its_index(server: Driver) -> None:
    async with server.on("counter", {"start": 41}) as episode:
        assert await server.upstream.prompt(episode.session, episode.there) == [TextBlock("The counter stands at 41.")]
        assert text(await episode.act("add", n=1)) == "42"
        ended = await episode.act("stop")
        assert (ended.reward, ended.finished) == (4.2, True)
        assert await server.upstream.steps(episode.session, episode.there) == 2
        summary = await server.upstream.close(episode.session, episode.there)
    assert summary is not None
    assert (summary.reward, summary.finished, summary.steps) == (4.2, True, 2)
    place = SessionSetup(spec={}, split="train", index=2)
    async with server.episode(environment("counter"), place) as episode:
        assert await server.upstream.prompt(episode.session, episode.there) == [TextBlock("The counter stands at 2.")]
    with pytest.raises(InvalidRequest, match="Invalid index"):
        await server.upstream.open(server.session(), environment("counter"), replace(place, index=99))


@on("openreward-server")
async def test_the_server_refuses_an_unknown_toolset(server: Driver) -> None:
    with pytest.raises(InvalidRequest, match=r"'nosuch'.*codex"):
        await server.upstream.open(server.session(), environment(), SessionSetup(spec={}, toolset="nosuch"))


@on(*SERVERS)
async def test_secrets_reach_the_environment(server: Driver) -> None:
    setup = SessionSetup(spec={"question": "?"}, secrets={"TOKEN": "s3cr3t é"})

    async with server.episode(environment(), setup) as episode:
        assert text(await episode.act("secret", name="TOKEN")) == "s3cr3t é"


@on(*SERVERS)
async def test_configuration_that_an_ors_server_cannot_receive_is_refused(server: Driver) -> None:
    setup = SessionSetup(spec={}, seed=3, config={"seed": 3, "difficulty": "hard"})

    with pytest.raises(InvalidRequest, match="'difficulty'"):
        await server.upstream.open(server.session(), environment(), setup)
    async with server.episode(environment(), SessionSetup(spec={}, seed=3, config={"seed": 3})):
        pass


@on(*SERVERS)
async def test_results_arrive_complete(server: Driver) -> None:
    async with server.on() as episode:
        acted = await episode.act("echo", text=AWKWARD)
        forwarded = await episode.call("echo", {"text": AWKWARD})
        noted = await episode.act("note")
        image = await episode.act("image")

    assert text(acted) == forwarded.text == AWKWARD
    assert all(not line[0].isspace() and len(line.encode()) < MAX_LINE_BYTES for line in forwarded.lines)
    assert noted.blocks == (TextBlock("noted", {"k": 1}),)
    assert noted.metadata == {"depth": {"n": [1, 2.5, None, "é"]}}
    assert (noted.reward, noted.finished) == (None, False)
    assert isinstance(image.blocks[0], ImageBlock)
    assert (image.blocks[0].mime_type, image.blocks[0].detail) == ("image/png", {"pixels": 1})


@on(*SERVERS)
async def test_failed_calls_return_the_reason(server: Driver) -> None:
    async with server.on() as episode:
        unknown = await episode.call("nope", {})
        invalid = await episode.call("echo", {"words": 1})
        raised = await episode.call("fail", {})
        acted = await episode.act("fail")

    assert (unknown.result["ok"], unknown.result["reason"]) == (False, "not_found")
    assert (invalid.result["ok"], invalid.result["reason"]) == (False, "input_validation")
    assert raised.error.removeprefix("RuntimeError: ") == "the first line\nthe second line"
    assert (acted.error, acted.reason) == (raised.error, "tool_error")


@on("openreward-server", "envserver")
async def test_no_call_runs_after_the_episode_has_finished(server: Driver) -> None:
    async with server.on() as episode:
        ended = await episode.call("finish", {"reward": 0.5})
        after = await episode.act("echo", text="hi")

    assert ended.result["output"]["finished"] is True
    assert ended.result["output"]["reward"] == 0.5
    assert after.reason == "episode_finished"


@on(*SERVERS)
async def test_a_text_is_the_input_of_the_default_tool(server: Driver) -> None:
    said = Action(text="hello")
    async with server.on(actions=ActionMapping(default_tool="echo")) as episode:
        assert text(await server.upstream.act(episode.session, episode.there, said)) == "hello"
        fields = Action(fields={"text": "field"})
        assert text(await server.upstream.act(episode.session, episode.there, fields)) == "field"
    async with server.on() as episode:
        refused = await server.upstream.act(episode.session, episode.there, said)
        written = Action(text=json.dumps({"name": "echo", "arguments": {"text": "called"}}))
        assert text(await server.upstream.act(episode.session, episode.there, written)) == "called"
    assert refused.reason == "input_validation"
    assert (refused.error or "").startswith("This is no call of a tool. Reply with JSON such as ")


@on("openreward-server")
async def test_a_text_is_the_final_message_for_a_terminal_tool(server: Driver) -> None:
    async with server.on("judge", {"question": "?"}) as episode:
        result = await server.upstream.act(episode.session, episode.there, Action(text="abc"))

    assert (text(result), result.reward, result.finished) == ("3 characters", 0.25, True)


@on(*SERVERS)
async def test_the_prompt_and_calls_wait_for_a_running_setup(server: Driver, shared: Folder) -> None:
    word = token()
    task = {"gate": f"{shared.inside}/{word}.gate", "folder": shared.inside}
    async with server.on("slowsetup", task) as episode:
        prompt = asyncio.ensure_future(server.upstream.prompt(episode.session, episode.there))
        call = asyncio.ensure_future(episode.act("count", token=word))
        done, _ = await asyncio.wait({prompt, call}, timeout=0.2)
        assert not done
        shared.open_gate(word)

        assert await prompt == [TextBlock("Ready.")]
        assert text(await call) == "counted"
    assert shared.runs(word) == 1


@on(*SERVERS)
async def test_a_failed_setup_is_an_author_fault_with_the_servers_message(server: Driver) -> None:
    async with server.on("slowsetup", {"error": "no such puzzle"}) as episode:

        async def refused() -> None:
            with pytest.raises(AuthorFault, match="no such puzzle"):
                await server.upstream.prompt(episode.session, episode.there)

        await eventually(refused)
        with pytest.raises(AuthorFault, match="no such puzzle"):
            await episode.ask("prompt")
        with pytest.raises(AuthorFault, match="no such puzzle"):
            await episode.act("count", token="x")


@on(*SERVERS)
async def test_calls_with_the_same_key_run_once(server: Driver, shared: Folder) -> None:
    word = token()
    async with server.on(task={"folder": shared.inside}) as episode:
        results = [await episode.act("count", key="k", token=word) for _ in range(3)]
        with pytest.raises(CallConflict):
            await episode.act("count", key="k", token="another")

    assert [text(result) for result in results] == ["1", "1", "1"]
    assert shared.runs(word) == 1


@on(*SERVERS)
async def test_an_abandoned_call_goes_on_and_its_outcome_is_available_by_its_task_id(
    server: Driver, shared: Folder
) -> None:
    word = token()
    async with server.on(task={"folder": shared.inside}) as episode:
        headers = [(b"content-type", b"application/json"), (b"accept", b"text/event-stream")]
        body = json.dumps({"name": "hold", "input": {"token": word}}).encode()
        exchange = await server.upstream.forward(episode.session, episode.there, "call", body=body, headers=headers)
        task_id = parse((await anext(exchange.chunks())).decode()).task_id
        await exchange.aclose()
        await eventually(lambda: runs_once(shared, word))
        assert [one.id for one in await server.upstream.sessions(server.worker, episode.there) or ()] == [
            episode.session.id
        ]
        shared.open_gate(word)

        outcome = await episode.call("hold", {"token": word}, task_id=task_id)

        unknown = await episode.call("hold", {"token": word}, task_id="0" * 32)
    assert (outcome.text, outcome.task_id) == ("1", task_id)
    assert unknown.error == "unknown task_id"
    assert shared.runs(word) == 1


@on(*SERVERS)
async def test_a_broken_stream_is_resumed(server: Driver, upstream: ThirdPartyOrsUpstream, shared: Folder) -> None:
    word = token()
    host, port = server.worker.address.split(":")[1:]
    async with cutting(f"http://{host}:{port}") as between:
        driver = Driver(upstream, between.url)
        async with driver.on(task={"folder": shared.inside}) as episode:
            call = asyncio.ensure_future(episode.act("hold", token=word))
            await eventually(lambda: _has_begun(between))
            await eventually(lambda: runs_once(shared, word))
            between.cut()
            await eventually(lambda: _called_again(between))
            shared.open_gate(word)

            assert text(await call) == "1"
    assert shared.runs(word) == 1


@on(*SERVERS)
async def test_a_stream_that_breaks_before_its_task_id_is_not_retried(
    server: Driver, upstream: ThirdPartyOrsUpstream, shared: Folder
) -> None:
    word = token()
    host, port = server.worker.address.split(":")[1:]
    async with cutting(f"http://{host}:{port}") as between:
        driver = Driver(upstream, between.url)
        async with driver.on(task={"folder": shared.inside}) as episode:
            between.mute()
            call = asyncio.ensure_future(episode.act("count", token=word))
            await eventually(lambda: runs_once(shared, word))
            between.cut()

            with pytest.raises(UpstreamGone) as caught:
                await call
    assert caught.value.sent
    assert between.calls == 1
    assert shared.runs(word) == 1


async def _has_begun(between: Cutting) -> None:
    assert between.task_ids


async def _called_again(between: Cutting) -> None:
    assert between.calls >= 2


@on(*SERVERS)
async def test_a_closed_session_is_gone_and_its_id_is_free(server: Driver) -> None:
    there = environment("counter")
    session = server.session()
    for start in (1, 2):
        await server.upstream.open(session, there, SessionSetup(spec={"start": start}))
        assert await server.upstream.prompt(session, there) == [TextBlock(f"The counter stands at {start}.")]
        await server.upstream.close(session, there)

    with pytest.raises(SessionNotFound):
        await server.upstream.prompt(session, there)
    with pytest.raises(SessionNotFound):
        await server.upstream.act(session, there, Action(name="add", arguments={"n": 1}))
    assert await server.upstream.close(session, there) is None


@on(*OFFICIAL)
async def test_opening_a_session_ends_an_earlier_session_of_the_same_id_in_the_server(server: Driver) -> None:
    there = environment("counter")
    session = server.session()
    await server.upstream.open(session, there, SessionSetup(spec={"start": 1}))

    await server.upstream.open(session, there, SessionSetup(spec={"start": 2}))

    assert await server.upstream.prompt(session, there) == [TextBlock("The counter stands at 2.")]
    await server.upstream.close(session, there)


@on(*OFFICIAL)
async def test_a_call_that_outlives_its_session_makes_closing_an_error(server: Driver, shared: Folder) -> None:
    word = token()
    there = environment(timeouts=Timeouts(close_s=1.0))
    session = server.session()
    await server.upstream.open(session, there, SessionSetup(spec={"folder": shared.inside}))
    call = asyncio.ensure_future(server.upstream.act(session, there, Action(name="hold", arguments={"token": word})))
    await eventually(lambda: runs_once(shared, word))

    with pytest.raises(UpstreamError, match="still runs"):
        await server.upstream.close(session, there)

    shared.open_gate(word)
    with pytest.raises(UpstreamGone):  # never "not found": the call has run
        await call


@on("ors-server", "openreward-server")
async def test_conversations_and_group_scores_come_from_a_server_that_supports_them(server: Driver) -> None:
    has_them = "judge" in await _environments(server)
    name = "judge" if has_them else "probe"
    async with server.on(name, {"question": "Hm?"}) as episode:
        status, said = await episode.ask("messages")
        candidate = {"messages": [{"role": "user", "blocks": [{"type": "text", "text": "a"}]}], "metadata": {"n": 1}}
        scored, body = await episode.ask("score_group", {"candidates": [candidate]})
        bad, _ = await episode.ask("score_group", {"candidates": 1})

    assert status == 200
    roles = [message["role"] for message in json.loads(said)]
    if not has_them:
        assert roles == ["user"]
        assert (scored, json.loads(body)) == (404, {"detail": "Environment 'probe' does not implement score_group"})
        return
    assert roles == ["system", "user", "assistant", "user"]
    assert (scored, bad) == (200, 422)
    outcome = parse(body.decode())
    assert outcome.result == {"scores": [{"reward": 1.0, "metadata": {"n": 1}}]}


async def _environments(server: Driver) -> list[str]:
    host, port = server.worker.address.split(":")[1:]
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.get(f"http://{host}:{port}/list_environments")
    names: list[str] = answer.json()
    return names


@pytest.mark.parametrize("package", ["ors", "openreward"])
async def test_a_server_that_is_killed_in_mid_call_is_gone(
    package: str, upstream: ThirdPartyOrsUpstream, shared: Folder, tmp_path: Path
) -> None:
    process = ServerProcess(
        [sys.executable, str(WIRE / "references" / "server.py"), package],
        variables={"OPENREWARD_DISABLE_UPDATE_CHECK": "1"},
        ready=r"Uvicorn running on (http://[^\s]+)",
        log=tmp_path / "server.log",
    )
    word = token()
    try:
        await asyncio.to_thread(process.start)
        driver = Driver(upstream, process.address)
        session = driver.session()
        await upstream.ready(driver.worker, environment())
        await upstream.open(session, environment(), SessionSetup(spec={"folder": shared.inside}))
        action = Action(name="hold", arguments={"token": word})
        call = asyncio.ensure_future(upstream.act(session, environment(), action))
        await eventually(lambda: runs_once(shared, word))
        process.kill()

        with pytest.raises(UpstreamGone) as caught:
            await call
        assert caught.value.sent
        with pytest.raises(UpstreamGone) as later:
            await upstream.act(session, environment(), action)
        assert not later.value.sent
    finally:
        process.kill()
