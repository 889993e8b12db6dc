"""The clients of four protocols behind one interface: open a task, read its prompt, act, see the end."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.wire.any.cases import Act, Agent, Case
from tests.wire.areal_client import ArealClient, Failed
from tests.wire.nemo_client import Call, NemoEpisode, StockEpisode, row_of
from tests.wire.openenv.clients import NEWEST, OLDEST, ClientError, Driver, connected
from tests.wire.sdks import SDKS, names


@dataclass(frozen=True)
class Seen:
    """The result of an action."""

    text: str
    reward: float | None
    done: bool
    whole: Any = None
    """All that the client got, as JSON."""


@dataclass(frozen=True)
class Episode:
    """An open episode."""

    prompt: str
    act: Callable[[Act], Awaitable[Seen]]
    whole: Any = None
    """All that the client got with the prompt, as JSON."""
    finish: Callable[[], Awaitable[float]] | None = None
    """Ends an episode that its environment has not ended, and returns its reward. None: steps have the rewards."""


@dataclass(frozen=True)
class Door:
    """The addresses of one environment, at a gateway or at its own server. Its own server speaks only one protocol."""

    ors: str
    name: str
    """The environment's name in ORS."""
    areal: str
    openenv: str
    nemo: str = ""
    row: Mapping[str, Any] | None = None
    """The row of the first task for NeMo Gym. None: the gateway knows it by its place."""
    secrets: Mapping[str, str] = field(default_factory=dict)
    """What a session of ORS brings."""
    sample: Any = 0
    """The name of the first sample in AReaL."""


def at_gateway(url: str, environment: str) -> Door:
    """Return the door of *environment* at the gateway at *url*."""
    return Door(
        url, environment, f"{url}/areal/{environment}", f"{url}/openenv/{environment}", f"{url}/nemo/{environment}"
    )


@dataclass(frozen=True)
class Trainer:
    """One kind of client."""

    name: str
    check: Callable[[Door, Case], Awaitable[None]]
    """Check the offered splits, tasks and tools of a case, as far as the protocol shows them."""
    open: Callable[[Door, bool], AbstractAsyncContextManager[Episode]]
    """Opens an episode of the first task of ``train``. The flag requests the task object instead of its index."""


@dataclass(frozen=True)
class Played:
    """The total reward of an episode, whether it ended, and its number of turns."""

    reward: float
    done: bool
    turns: int


async def play(episode: Episode, agent: Agent, *, turns: int) -> Played:
    """Play until the end or for *turns* turns."""
    seen, total = [episode.prompt], 0.0
    for turn in range(1, turns + 1):
        last = await episode.act(agent(seen))
        total += last.reward or 0.0
        if last.done:
            return Played(total, True, turn)
        seen.append(last.text)
    return Played(total, False, turns)


async def plays_both(trainer: Trainer, case: Case, door: Door) -> None:
    """Check the offer, win an episode, and lose another episode."""
    await trainer.check(door, case)
    async with trainer.open(door, False) as episode:
        assert case.asked in episode.prompt
        won = await play(episode, case.right, turns=case.turns)
    async with trainer.open(door, True) as episode:
        assert case.asked in episode.prompt
        lost = await play(episode, case.wrong, turns=case.turns)

    assert (won.reward, won.done) == (1.0, True)
    assert (lost.reward, lost.done) == (0.0, True)


# -- ORS ------------------------------------------------------------------------------------------------------------


def ors_trainer(name: str) -> Trainer:
    """Return the client of one of the two ORS packages."""
    sdk = SDKS[name]

    async def check(door: Door, case: Case) -> None:
        async with sdk.connect(door.ors, None) as client:
            environment = client.environment(door.name)
            assert "train" in await environment.list_splits()
            assert await environment.num_tasks("train") == case.tasks
            assert len(await environment.get_task_range("train", 0, 3)) == 3
            assert len(await environment.list_tasks("train")) == case.tasks
            assert set(names(await environment.list_tools())) == case.tools

    @asynccontextmanager
    async def open(door: Door, by_task: bool) -> AsyncIterator[Episode]:
        async with sdk.connect(door.ors, None) as client:
            environment = client.environment(door.name)
            place: dict[str, Any] = {"split": "train", "index": 0}
            if by_task:
                place = {"task": await environment.get_task("train", 0)}
            if door.secrets:
                place["secrets"] = sdk.secrets(door.secrets)
            async with environment.session(**place) as session:

                async def act(action: Act) -> Seen:
                    try:
                        output = await session.call_tool(action.tool, dict(action.arguments))
                    except sdk.refused as error:
                        return Seen(str(error), None, False, str(error))
                    return Seen(_text(output.blocks), output.reward, output.finished, _shown(output.blocks))

                assert await session.list_tools()
                prompt = await session.get_prompt()
                yield Episode(_text(prompt), act, _shown(prompt))

    return Trainer(name, check, open)


def _shown(blocks: Any) -> list[str]:
    return [block.text if block.type == "text" else block.data for block in blocks]


def _text(blocks: Any) -> str:
    return "\n".join(block.text for block in blocks if block.type == "text")


# -- AReaL ----------------------------------------------------------------------------------------------------------


def areal_trainer() -> Trainer:
    """Return a client that behaves like AReaL's workflow."""

    async def check(door: Door, case: Case) -> None:
        info = await ArealClient(door.areal).info()
        assert info["name"]
        assert info["num_samples"] == case.tasks

    @asynccontextmanager
    async def open(door: Door, by_task: bool) -> AsyncIterator[Episode]:
        client = ArealClient(door.areal)
        started = await client.start(str(door.sample) if by_task else door.sample)
        id = started["episode_id"]

        async def act(action: Act) -> Seen:
            if action.text:
                reply = await client.step(id, action.text)
            else:
                call = {"name": action.tool, "arguments": action.arguments}
                reply = await client.act(id, {"type": "structured", "content": call})
            text = "" if reply["done"] else reply["observation"]["content"]
            return Seen(text, reply["reward"], reply["done"], reply["observation"])

        try:
            first = started["observation"]
            yield Episode(str(first["content"]), act, first)
        finally:
            with contextlib.suppress(Failed):  # 404: the episode is over
                await client.cancel(id)

    return Trainer("areal", check, open)


# -- OpenEnv --------------------------------------------------------------------------------------------------------


def openenv_trainer(version: str, driver_of: Callable[[str], Driver]) -> Trainer:
    """Return a client of a release. The oldest release has only typed clients, without an event loop."""
    kind, mode = ("typed", "direct") if version == OLDEST else ("generic", "async")
    driver = driver_of(version)

    async def check(door: Door, case: Case) -> None:
        """Check nothing: OpenEnv's clients see nothing before a reset."""

    @asynccontextmanager
    async def open(door: Door, by_task: bool) -> AsyncIterator[Episode]:
        async with connected(driver, door.openenv, kind=kind, mode=mode) as client:
            first = await client.reset(split="train", index=0)

            async def act(action: Act) -> Seen:
                said: Mapping[str, Any] = action.arguments
                if not action.is_plain:
                    said = {"type": "call_tool", "tool_name": action.tool, "arguments": action.arguments}
                try:
                    result = await client.step(said)
                except ClientError as error:
                    reason = re.sub(r"^Server error: (.*) \(code: \w+\)$", r"\1", error.message, flags=re.S)
                    return Seen(reason, None, False, reason)
                return Seen(_told(result["observation"]), result["reward"], result["done"], result["observation"])

            assert first["done"] is False
            yield Episode(_told(first["observation"]), act, first["observation"])

    return Trainer(f"openenv-{version}", check, open)


def _told(observation: Mapping[str, Any]) -> str:
    """Return the text of an observation, or of the tool result in it."""
    if "text" in observation:
        return str(observation["text"])
    return "\n".join(block["text"] for block in (observation.get("result") or {}).get("content", ()))


# -- NeMo Gym -------------------------------------------------------------------------------------------------------


def nemo_trainer() -> Trainer:
    """Return an agent that behaves like NeMo Gym's. Its only reward comes at the end of the episode."""

    async def check(door: Door, case: Case) -> None:
        """Check nothing: a resources server lists neither tasks nor tools."""

    @asynccontextmanager
    async def open(door: Door, by_task: bool) -> AsyncIterator[Episode]:
        row = row_of(door.name) if door.row is None else door.row
        episode = (NemoEpisode if door.row is None else StockEpisode)(door.nemo, row)
        prompt = await episode.seed()

        async def act(action: Act) -> Seen:
            if action.is_answer:
                return Seen("", await episode.verify(action.text), True)
            text = await episode.call(Call(action.tool, action.arguments))
            result = _object(text)
            if result.get("finished"):
                return Seen(text, await episode.verify(), True, result)
            return Seen(text, None, False, result or text)

        whole = prompt if door.row is None else door.row["responses_create_params"]["input"]
        yield Episode(prompt, act, whole, episode.verify)

    return Trainer("nemo", check, open)


def _object(text: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        value = json.loads(text)
        return value if isinstance(value, dict) else {}
    return {}


TRAINERS: Mapping[str, Callable[[Callable[[str], Driver]], Trainer]] = {
    "ors": lambda _: ors_trainer("ors"),
    "openreward": lambda _: ors_trainer("openreward"),
    "areal": lambda _: areal_trainer(),
    "openenv-0.10.0": lambda driver_of: openenv_trainer(NEWEST, driver_of),
    "openenv-0.2.0": lambda driver_of: openenv_trainer(OLDEST, driver_of),
    "nemo": lambda _: nemo_trainer(),
}
