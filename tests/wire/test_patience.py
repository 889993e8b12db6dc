"""Keepalives let both SDKs wait for a call or a setup that takes longer than their 30 s timeout between two bytes."""

import asyncio

import pytest

from tests.wire.sdks import SDKS, Sdk, text
from tests.wire.targets import Folder, Target, on, token

pytestmark = [pytest.mark.wire]

LONG_S = 35.0


async def run(target: Target, sdk: Sdk, tool: str) -> str:
    """Play an episode with one long call."""
    async with (
        sdk.connect(target.url, target.key) as client,
        client.environment("probe").session(task=sdk.task("probe", {})) as session,
    ):
        return text(await session.call_tool(tool, {"seconds": LONG_S}))


async def set_up(target: Target, sdk: Sdk, folder: Folder, word: str) -> list[str]:
    """Play an episode with a long setup, for which both its call and its prompt must wait."""
    task = sdk.task("slowsetup", {"folder": folder.inside, "setup_s": LONG_S})
    async with (
        sdk.connect(target.url, target.key) as client,
        client.environment("slowsetup").session(task=task) as session,
    ):
        output, prompt = await asyncio.gather(session.call_tool("count", {"token": word}), session.get_prompt())
        return [text(output), prompt[0].text]


@on("stack")
async def test_both_sdks_wait_for_long_tools_and_long_setups(target: Target, folder: Folder) -> None:
    # The test needs the full duration. All episodes run concurrently on one target: the environment server sends the
    # keepalives, and a gateway on Docker passes the same bytes as a gateway on local processes.
    words = {sdk.name: token() for sdk in SDKS.values()}

    runs = asyncio.gather(*(run(target, sdk, tool) for sdk in SDKS.values() for tool in ("sleep", "block")))
    setups = asyncio.gather(*(set_up(target, sdk, folder, words[sdk.name]) for sdk in SDKS.values()))
    outputs, prepared = await asyncio.gather(runs, setups)

    assert outputs == ["slept", "blocked"] * 2
    assert prepared == [["counted", "Ready."]] * 2
    assert [folder.runs(word) for word in words.values()] == [1, 1]
