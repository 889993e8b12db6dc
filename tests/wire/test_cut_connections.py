"""The network fails during a client's call: the client asks again, and the tool has run only once."""

import asyncio

import pytest

from tests.fakes.eventually import eventually
from tests.wire.cutting import Relay, relay
from tests.wire.sdks import Sdk, text
from tests.wire.targets import OFFICIAL, ONE_GATEWAY, Folder, Target, runs_once, token, with_clients

pytestmark = pytest.mark.wire


async def told_its_task_id(between: Relay, before: int) -> None:
    assert between.task_ids > before


async def called_again(between: Relay) -> None:
    assert between.calls >= 2


@with_clients(*OFFICIAL, *ONE_GATEWAY)
async def test_a_call_cut_after_its_task_id_is_resumed(target: Target, sdk: Sdk, folder: Folder) -> None:
    word = token()
    task = sdk.task("probe", {"folder": folder.inside})

    async with (
        relay(target.url) as between,
        sdk.connect(between.url, target.key) as client,
        client.environment("probe").session(task=task) as session,
    ):
        before = between.task_ids
        call = asyncio.create_task(session.call_tool("hold", {"token": word}))
        await eventually(lambda: told_its_task_id(between, before))
        between.cut()
        await eventually(lambda: called_again(between))
        folder.open_gate(word)
        outcome = text(await call)

    assert outcome == "1"
    assert folder.runs(word) == 1


@with_clients(*ONE_GATEWAY)
async def test_a_call_cut_before_its_task_id_runs_once(target: Target, sdk: Sdk, folder: Folder) -> None:
    # Both clients then repeat the call without a task id.
    word = token()
    task = sdk.task("probe", {"folder": folder.inside})

    async with (
        relay(target.url) as between,
        sdk.connect(between.url, target.key) as client,
        client.environment("probe").session(task=task) as session,
    ):
        between.mute()
        call = asyncio.create_task(session.call_tool("hold", {"token": word}))
        await eventually(lambda: runs_once(folder, word))
        between.cut()
        await eventually(lambda: called_again(between))
        folder.open_gate(word)
        outcome = text(await call)

    assert outcome == "1"
    assert folder.runs(word) == 1
