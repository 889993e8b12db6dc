"""Tools that fail, raise, refuse or take long: outcomes that the agent sees, not errors of the transport."""

import asyncio

import httpx
import pytest

from tests.fakes.eventually import eventually
from tests.wire.raw import episode
from tests.wire.sdks import Client, Sdk, text
from tests.wire.targets import OFFICIAL, ONE_GATEWAY, Folder, Target, on, runs_once, token, with_clients

pytestmark = pytest.mark.wire


@with_clients(*OFFICIAL, *ONE_GATEWAY)
@pytest.mark.parametrize(
    ("tool", "input", "message"),
    [
        pytest.param("fail", {}, "the first line\nthe second line", id="an error of two lines"),
        pytest.param("raise_empty", {}, "Unknown SSE error", id="an error without a message"),
        pytest.param("wrong_type", {}, "'wrong_type' returned str; expected", id="a wrong type"),
    ],
)
async def test_an_error_of_a_tool_reaches_the_trainer(
    target: Target, client: Client, sdk: Sdk, tool: str, input: dict[str, str], message: str
) -> None:
    if tool == "raise_empty" and target.name not in OFFICIAL:
        message = "RuntimeError"  # own workers name the type

    async with client.environment("probe").session(task=sdk.task("probe", {})) as session:
        with pytest.raises(sdk.failed) as caught:
            await session.call_tool(tool, input)

    assert message in str(caught.value)


@on("ors-server", *ONE_GATEWAY)
async def test_the_session_goes_on_after_an_error_of_a_tool(target: Target, http: httpx.AsyncClient) -> None:
    async with episode(http) as opened:
        failed = await opened.call("fail")
        after = await opened.call("echo", {"text": "still here"})

    kind = "" if target.name in OFFICIAL else "RuntimeError: "
    assert failed.error == f"{kind}the first line\nthe second line"
    assert [event.name for event in failed.events] == ["task_id", "error"]
    assert after.text == "still here"


@with_clients(*OFFICIAL, *ONE_GATEWAY)
@pytest.mark.parametrize(
    ("tool", "input", "message"),
    [
        pytest.param("nope", {}, "'nope' is not a valid tool", id="an unknown tool"),
        pytest.param("reset", {}, "'reset' is not a valid tool", id="a method that is not a tool"),
        pytest.param("echo", {}, "Tool input validation error: [", id="a missing argument"),
        pytest.param("big", {"n": "many"}, "Tool input validation error: [", id="an argument of a wrong type"),
    ],
)
async def test_a_call_that_cannot_run_is_refused_and_the_session_goes_on(
    client: Client, sdk: Sdk, tool: str, input: dict[str, str], message: str
) -> None:
    async with client.environment("probe").session(task=sdk.task("probe", {})) as session:
        with pytest.raises(sdk.refused) as caught:
            await session.call_tool(tool, input)
        after = text(await session.call_tool("echo", {"text": "still here"}))

    assert message in str(caught.value)
    assert after == "still here"


@on("openreward-server", *ONE_GATEWAY)
@pytest.mark.parametrize(
    ("tool", "input", "reason"),
    [("nope", {}, "not_found"), ("echo", {}, "input_validation")],
)
async def test_a_refusal_names_its_reason(
    http: httpx.AsyncClient, tool: str, input: dict[str, str], reason: str
) -> None:
    async with episode(http) as opened:
        result = (await opened.call(tool, input)).result

    assert list(result) == ["ok", "error", "reason"]
    assert (result["ok"], result["reason"]) == (False, reason)


@on("openreward-server", *ONE_GATEWAY)
async def test_a_failed_setup_is_reported_on_each_request_until_the_session_is_deleted(
    target: Target, http: httpx.AsyncClient
) -> None:
    async with episode(http, {"error": "no such puzzle"}, environment="slowsetup") as opened:
        prompt = await opened.get("prompt")
        again = await opened.get("prompt")
        ping = await opened.post("/ping")

    assert (prompt.status_code, prompt.json()) == (again.status_code, again.json())
    assert prompt.status_code == 500
    assert prompt.json() == {"detail": "RuntimeError: no such puzzle"} | (
        {"detail": "author_fault: RuntimeError: no such puzzle", "code": "author_fault", "reason": "author_fault"}
        if target.gateway is not None
        else {}
    )
    assert ping.status_code == 200


@on("openreward-server", *ONE_GATEWAY)
async def test_a_tool_that_blocks_delays_no_other_session(http: httpx.AsyncClient, folder: Folder) -> None:
    word = token()

    async with episode(http, {"folder": folder.inside}) as one, episode(http) as other:
        blocking = asyncio.create_task(one.call("hold_blocking", {"token": word}))
        await eventually(lambda: runs_once(folder, word))
        health = await http.get("/health")
        echo = await other.call("echo", {"text": "not delayed"})
        folder.open_gate(word)
        outcome = await blocking

    assert health.status_code == 200
    assert echo.text == "not delayed"
    assert outcome.text == "1"
