"""A tool runs once per call, even if the connection drops, the session ends or other calls run concurrently."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.fakes.eventually import eventually
from tests.wire.raw import RawEpisode, create, episode, new_sid, parse
from tests.wire.sdks import Client, Sdk, text
from tests.wire.targets import BOTH_GATEWAYS, OFFICIAL, ONE_GATEWAY, Folder, Target, on, runs_once, token, with_clients

pytestmark = pytest.mark.wire


async def round_trips(bystander: RawEpisode) -> None:
    """Send three requests to the worker and wait: requests sent earlier on other connections have then arrived."""
    for _ in range(3):
        assert (await bystander.get("prompt")).status_code == 200


@on(*OFFICIAL, *BOTH_GATEWAYS)
async def test_a_repeated_call_gets_the_complete_result_again(http: httpx.AsyncClient) -> None:
    async with episode(http) as opened:
        first = await opened.call("big", {"n": 30_000})
        again = await opened.call("ignored", {"n": "ignored"}, task_id=first.task_id)

    assert again.task_id == first.task_id
    assert again.result == first.result


@on(*OFFICIAL, *ONE_GATEWAY)
@pytest.mark.parametrize("task_id", ["", "nope", "0" * 32])
async def test_a_call_with_an_unknown_task_id_runs_nothing(
    http: httpx.AsyncClient, folder: Folder, task_id: str
) -> None:
    word = token()

    async with episode(http, {"folder": folder.inside}) as opened:
        outcome = await opened.call("count", {"token": word}, task_id=task_id)

    assert [(event.name, event.data) for event in outcome.events] == [("error", "unknown task_id")]
    assert folder.runs(word) == 0


@on(*OFFICIAL, *ONE_GATEWAY)
async def test_a_null_task_id_counts_as_missing(http: httpx.AsyncClient) -> None:
    async with episode(http) as opened:
        outcome = await opened.call("echo", {"text": "new"}, task_id=None)

    assert outcome.text == "new"


@on(*BOTH_GATEWAYS)
async def test_a_session_cannot_read_the_result_of_another_sessions_call(http: httpx.AsyncClient) -> None:
    async with episode(http) as one, episode(http) as other:
        secret = await one.call("echo", {"text": "for one alone"})
        stolen = await other.call("echo", {"text": "x"}, task_id=secret.task_id)

    assert [(event.name, event.data) for event in stolen.events] == [("error", "unknown task_id")]


@on(*OFFICIAL, *BOTH_GATEWAYS)
async def test_a_call_whose_connection_dropped_is_resumed_and_runs_once(
    http: httpx.AsyncClient, folder: Folder
) -> None:
    word = token()

    async with episode(http, {"folder": folder.inside}) as opened:
        task_id = await opened.drop_after_task_id("hold", {"token": word})
        await eventually(lambda: runs_once(folder, word))
        resumed = asyncio.create_task(opened.call("hold", {"token": word}, task_id=task_id))
        folder.open_gate(word)
        outcome = await resumed

    assert outcome.task_id == task_id
    assert outcome.text == "1"
    assert folder.runs(word) == 1


@on(*BOTH_GATEWAYS)
async def test_a_call_abandoned_before_its_tool_started_never_runs(
    http: httpx.AsyncClient, folder: Folder, target: Target
) -> None:
    abandoned, wanted, gate = token(), token(), token()
    task = {"folder": folder.inside, "gate": f"{folder.inside}/{gate}.gate"}

    async with (
        episode(http, environment="slowsetup") as bystander,
        episode(http, task, environment="slowsetup") as opened,
    ):
        await round_trips(bystander)
        call = asyncio.create_task(opened.ask("count", {"token": abandoned}))
        await round_trips(bystander)
        call.cancel()
        await asyncio.wait({call})
        await round_trips(bystander)
        folder.open_gate(gate)
        outcome = await opened.call("count", {"token": wanted})

    assert outcome.text == "counted"
    assert (folder.runs(abandoned), folder.runs(wanted)) == (0, 1)


@on(*BOTH_GATEWAYS)
async def test_a_call_sent_three_times_during_the_setup_runs_once(http: httpx.AsyncClient, folder: Folder) -> None:
    word, gate = token(), token()
    task = {"folder": folder.inside, "gate": f"{folder.inside}/{gate}.gate"}

    async with (
        episode(http, environment="slowsetup") as bystander,
        episode(http, task, environment="slowsetup") as opened,
    ):
        for _ in range(2):
            call = asyncio.create_task(opened.ask("count", {"token": word}))
            await round_trips(bystander)
            call.cancel()
            await asyncio.wait({call})
        last = asyncio.create_task(opened.call("count", {"token": word}))
        await round_trips(bystander)
        folder.open_gate(gate)
        outcome = await last

    assert outcome.text == "counted"
    assert folder.runs(word) == 1


@with_clients(*OFFICIAL, *BOTH_GATEWAYS)
async def test_a_call_waits_for_the_setup(client: Client, sdk: Sdk, folder: Folder) -> None:
    word, gate = token(), token()
    task = sdk.task("slowsetup", {"folder": folder.inside, "gate": f"{folder.inside}/{gate}.gate"})
    slowsetup = client.environment("slowsetup")

    async with slowsetup.session(task=sdk.task("slowsetup", {})) as bystander, slowsetup.session(task=task) as session:
        call = asyncio.create_task(session.call_tool("count", {"token": word}))
        await bystander.get_prompt()
        began_before_its_time = folder.runs(word)
        folder.open_gate(gate)
        outcome = await call

    assert text(outcome) == "counted"
    assert (began_before_its_time, folder.runs(word)) == (0, 1)


@on("openreward-server", *BOTH_GATEWAYS)
async def test_a_concurrent_tool_runs_while_another_tool_runs(http: httpx.AsyncClient, folder: Folder) -> None:
    word = token()

    async with episode(http, {"folder": folder.inside}) as opened:
        held = asyncio.create_task(opened.call("hold", {"token": word}))
        await eventually(lambda: runs_once(folder, word))
        beside = await opened.call("pid")
        folder.open_gate(word)
        outcome = await held

    assert int(beside.text) > 0
    assert outcome.text == "1"


@on("openreward-server", *BOTH_GATEWAYS)
async def test_calls_of_one_blocking_tool_run_in_sequence(http: httpx.AsyncClient, folder: Folder) -> None:
    first, second = token(), token()

    async with episode(http, {"folder": folder.inside}) as opened, episode(http) as bystander:
        calls = [asyncio.create_task(opened.call("hold_blocking", {"token": first}))]
        await eventually(lambda: runs_once(folder, first))
        calls.append(asyncio.create_task(opened.call("hold_blocking", {"token": second})))
        await round_trips(bystander)
        began_beside = folder.runs(second)
        folder.open_gate(second)
        folder.open_gate(first)
        outcomes = await asyncio.gather(*calls)

    assert began_beside == 0
    assert [outcome.text for outcome in outcomes] == ["1", "1"]


@on("openreward-server", *BOTH_GATEWAYS)
async def test_a_deletion_during_a_call_lets_the_call_finish(http: httpx.AsyncClient, folder: Folder) -> None:
    word = token()

    async with episode(http, {"folder": folder.inside}) as opened:
        call = asyncio.create_task(opened.call("hold", {"token": word}))
        await eventually(lambda: runs_once(folder, word))
        deleting = asyncio.create_task(opened.delete())
        await eventually(lambda: not_found(opened))
        folder.open_gate(word)
        outcome = await call
        deleted = await deleting

    assert outcome.text == "1"
    assert deleted.status_code == 200


async def not_found(opened: RawEpisode) -> None:
    assert (await opened.post("/ping")).status_code == 404


@on(*BOTH_GATEWAYS)
async def test_a_call_with_a_key_runs_once(http: httpx.AsyncClient, folder: Folder) -> None:
    word = token()
    body = {"name": "count", "input": {"token": word}}

    async with episode(http, {"folder": folder.inside}) as opened:
        headers = opened.headers | {"Idempotency-Key": word}
        first = parse((await http.post("/probe/call", headers=headers, json=body)).text)
        again = parse((await http.post("/probe/call", headers=headers, json=body)).text)
        other = await http.post("/probe/call", headers=headers, json={"name": "pid", "input": {}})

    assert first.result == again.result
    assert folder.runs(word) == 1
    assert other.status_code == 409
    assert isinstance(other.json()["detail"], str)


@on(*BOTH_GATEWAYS)
async def test_a_call_with_a_key_joins_the_running_call_with_that_key(http: httpx.AsyncClient, folder: Folder) -> None:
    word = token()
    body = {"name": "hold", "input": {"token": word}}

    async with episode(http, {"folder": folder.inside}) as opened, episode(http) as bystander:
        headers = opened.headers | {"Idempotency-Key": word}
        calls = [asyncio.create_task(http.post("/probe/call", headers=headers, json=body)) for _ in range(3)]
        await eventually(lambda: runs_once(folder, word))
        await round_trips(bystander)
        folder.open_gate(word)
        outcomes = [parse(response.text) for response in await asyncio.gather(*calls)]

    assert {outcome.text for outcome in outcomes} == {"1"}
    assert folder.runs(word) == 1


@on(*ONE_GATEWAY)
@pytest.mark.parametrize(
    ("tool", "input", "expected"),
    [
        ("echo", {"text": " x"}, {"ok": True}),
        ("nope", {}, {"ok": False, "error": "'nope' is not a valid tool", "reason": "not_found"}),
        ("fail", {}, {"ok": False, "error": "RuntimeError: the first line\nthe second line", "reason": "tool_failed"}),
    ],
)
async def test_a_client_that_accepts_json_gets_one_object(
    http: httpx.AsyncClient, tool: str, input: dict[str, Any], expected: dict[str, Any]
) -> None:
    async with episode(http) as opened:
        headers = opened.headers | {"Accept": "application/json"}
        response = await http.post("/probe/call", headers=headers, json={"name": tool, "input": input})

    assert response.status_code == 200
    assert response.headers["content-type"].startswith("application/json")
    result = response.json()
    assert {key: result[key] for key in expected} == expected


@on(*ONE_GATEWAY)
async def test_a_call_in_a_session_whose_create_was_refused_is_not_found(http: httpx.AsyncClient) -> None:
    sid = new_sid()

    refused = await create(http, sid, env_name="probe", split="train", index=99)
    call = await http.post("/probe/call", headers={"X-Session-ID": sid}, json={"name": "pid", "input": {}})

    assert refused.status_code == 400
    assert call.status_code == 404
