"""The official clients of three protocols behind one interface: open a task, read its prompt, act, see the end."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.wire.any.cases import Act, Agent, Case
from tests.wire.areal_client import ArealClient, Failed
from tests.wire.openenv.clients import NEWEST, OLDEST, Driver, connected
from tests.wire.sdks import SDKS, names


@dataclass(frozen=True)
class Seen:
    """The result of an action."""

    text: str
    reward: float | None
    done: bool


@dataclass(frozen=True)
class Episode:
    """An open episode."""

    prompt: str
    act: Callable[[Act], Awaitable[Seen]]


@dataclass(frozen=True)
class Door:
    """The addresses of one environment, at a gateway or at its own server. Its own server speaks only one protocol."""

    ors: str
    name: str
    """The environment's name in ORS."""
    areal: str
    openenv: str


def at_gateway(url: str, environment: str) -> Door:
    """Return the door of *environment* at the gateway at *url*."""
    return Door(url, environment, f"{url}/areal/{environment}", f"{url}/openenv/{environment}")


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
            async with environment.session(**place) as session:

                async def act(action: Act) -> Seen:
                    output = await session.call_tool(action.tool, dict(action.arguments))
                    return Seen(_text(output.blocks), output.reward, output.finished)

                assert await session.list_tools()
                yield Episode(_text(await session.get_prompt()), act)

    return Trainer(name, check, open)


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
        started = await client.start("0" if by_task else 0)
        id = started["episode_id"]

        async def act(action: Act) -> Seen:
            if action.text:
                reply = await client.step(id, action.text)
            else:
                call = {"name": action.tool, "arguments": action.arguments}
                reply = await client.act(id, {"type": "structured", "content": call})
            text = "" if reply["done"] else reply["observation"]["content"]
            return Seen(text, reply["reward"], reply["done"])

        try:
            yield Episode(started["observation"]["content"], act)
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
                result = await client.step(said)
                return Seen(_told(result["observation"]), result["reward"], result["done"])

            assert first["done"] is False
            yield Episode(_told(first["observation"]), act)

    return Trainer(f"openenv-{version}", check, open)


def _told(observation: Mapping[str, Any]) -> str:
    """Return the text of an observation, or of the tool result in it."""
    if "text" in observation:
        return str(observation["text"])
    return "\n".join(block["text"] for block in (observation.get("result") or {}).get("content", ()))


TRAINERS: Mapping[str, Callable[[Callable[[str], Driver]], Trainer]] = {
    "ors": lambda _: ors_trainer("ors"),
    "openreward": lambda _: ors_trainer("openreward"),
    "areal": lambda _: areal_trainer(),
    "openenv-0.10.0": lambda driver_of: openenv_trainer(NEWEST, driver_of),
    "openenv-0.2.0": lambda driver_of: openenv_trainer(OLDEST, driver_of),
}
