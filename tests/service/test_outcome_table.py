"""The table of outcomes in docs/reference.md: in each protocol, each event has the documented answer and outcome.

The test of a cell plays the event with a client of the protocol, and compares what the client gets and what the log
records with the table. `EVENTS` has a function for each row, which returns what the client got.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect

from gateway.core.environment import Areal, OpenEnv
from gateway.core.session import CloseReason
from gateway.upstreams.ors import own
from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually, until
from tests.fakes.workers import Start
from tests.service.stack import IDLE_S, Replica, Stack, environment, tasks
from tests.service.test_nemo import CALLED, Agent
from tests.service.test_reasons import LATE_S, ArealPlayer, OpenEnvSocket, Ors, Player, Told, _told
from tests.service.test_step_log import listed, logging
from tests.service.test_store_down import Switch

REFERENCE = Path(__file__).parents[2] / "docs/reference.md"
HALF = {"reward": 0.5, "finished": False}
"""The summary of an episode that its environment did not end."""
SUM = {"finished": 1.0, "stopped": 0.5}
"""The rewards of the episodes here, by their outcome."""
KEY = {"Idempotency-Key": "last"}
TASKS: dict[str, dict[str, Any]] = {
    "": {"question": "1+1"},
    "half": {"question": "1+1", "summary": HALF},
    "nothing": {"question": "1+1", "summary": {"reward": 0.0, "finished": False, "steps": 0}},
    "fault": {"question": "1+1", "summary": HALF | {"fault": "author"}},
    "broken": {"question": "1+1", "summary": HALF | {"fault": "infrastructure"}},
    "no reward": {"question": "1+1", "summary": {"reward": 0.0, "rewarded": False}},
    "reset": {"question": "1+1", "on_create": "author"},
    "lost": {"question": "1+1", "on_create": "die"},
    "silent": {"question": "1+1", "summary": HALF, "on_delete": "fail"},
}
NAMES = list(TASKS)


class Trainer(Player):
    """A client of one protocol. Methods that a protocol does not have belong to cells that are "-"."""

    async def open(self, task: str) -> Told | None:
        """Open an episode on *task*."""
        raise NotImplementedError

    async def end(self) -> Told | None:
        """End the episode, so that its steps count."""
        raise NotImplementedError

    async def cancel(self) -> Told | None:
        """End the episode, so that its steps do not count."""
        raise NotImplementedError

    async def discard(self) -> Told | None:
        """End the episode if it is still open."""
        return await self.end()

    async def twice(self) -> Told | None:
        """Send the last request twice, and return what the repeat got."""
        raise NotImplementedError

    async def other_body(self) -> Told | None:
        """Send the last request, and its key with another body. Return what the second one got."""
        raise NotImplementedError


class OrsTrainer(Trainer, Ors):
    """An ORS client that requests JSON, as the table states the statuses. Streams have the same reasons."""

    async def open(self, task: str) -> Told | None:
        place = {"env_name": "math", "split": "train", "index": NAMES.index(task)}
        return _told(await self.http.post("/create", json=place))

    async def act(self, tool: str) -> Told | None:
        return self._read(await self._call(tool))

    async def _call(self, tool: str, **headers: str) -> httpx.Response:
        wish = {"name": tool, "input": {}}
        return await self.http.post("/math/call", json=wish, headers={"Accept": "application/json", **headers})

    def _read(self, answer: httpx.Response) -> Told | None:
        told = _told(answer)
        if told is None and not answer.json()["ok"]:
            return Told(200, answer.json()["reason"], answer.text)
        return told

    async def end(self) -> Told | None:
        return _told(await self.http.post("/delete"))

    async def twice(self) -> Told | None:
        first, again = [await self._call("echo", **KEY) for _ in range(2)]
        assert first.json() == again.json()
        return self._read(again)

    async def other_body(self) -> Told | None:
        await self._call("echo", **KEY)
        return self._read(await self._call("go_on", **KEY))


class ArealTrainer(Trainer, ArealPlayer):
    async def open(self, task: str) -> Told | None:
        body = {"sample_id": NAMES.index(task), "config": {}}
        answer = await self.http.post("/areal/math/api/episode/start", json=body)
        self.episode = answer.json().get("episode_id", "")
        return _told(answer)

    async def _step(self, tool: str, **headers: str) -> httpx.Response:
        body = {"episode_id": self.episode, "action": {"type": "text", "content": tool}}
        return await self.http.post("/areal/math/api/episode/step", json=body, headers=headers)

    async def cancel(self) -> Told | None:
        return _told(await self.http.post("/areal/math/api/episode/cancel", json={"episode_id": self.episode}))

    end = discard = cancel

    async def twice(self) -> Told | None:
        first, again = [await self._step("echo", **KEY) for _ in range(2)]
        assert first.json() == again.json()
        assert again.json()["reward"] == 1.0
        return _told(again)

    async def other_body(self) -> Told | None:
        await self._step("echo", **KEY)
        return _told(await self._step("go_on", **KEY))


class OpenEnvTrainer(Trainer, OpenEnvSocket):
    @contextlib.asynccontextmanager
    async def there(self) -> AsyncIterator[Player]:
        base = str(self.http.base_url).replace("http", "ws").rstrip("/")
        key = {"X-API-Key": self.http.headers["X-API-Key"]}
        async with connect(f"{base}/openenv/math/ws", proxy=None, additional_headers=key) as self.connection:
            yield self

    async def open(self, task: str) -> Told | None:
        return await self._ask({"type": "reset", "data": {"split": "train", "index": NAMES.index(task)}})

    async def end(self) -> Told | None:
        await self.connection.close()
        return None


class NemoTrainer(Trainer):
    def __init__(self, http: httpx.AsyncClient) -> None:
        super().__init__(http)
        self.agent = Agent(http)

    async def open(self, task: str) -> Told | None:
        metadata = {"split": "train", "index": NAMES.index(task)}
        return self._read(await self.agent.post("seed_session", {"verifier_metadata": metadata}))

    async def act(self, tool: str) -> Told | None:
        return self._read(await self.agent.call(tool))

    async def end(self) -> Told | None:
        """Verify, by which a trainer of NeMo Gym ends an episode and gets its reward."""
        return self._read(await self.agent.verify(CALLED))

    async def cancel(self) -> Told | None:
        return self._read(await self.agent.post("close_session", {}))

    discard = cancel

    async def twice(self) -> Told | None:
        await self.agent.call("echo")
        first, again = [await self.agent.verify(CALLED) for _ in range(2)]
        assert first.json() == again.json()
        assert again.json()["reward"] == 1.0
        return self._read(again)

    async def other_body(self) -> Told | None:
        await self.agent.call("echo")
        await self.agent.verify(CALLED)
        return self._read(await self.agent.verify())

    def _read(self, answer: httpx.Response) -> Told | None:
        if answer.status_code == 200:
            return None
        body = answer.json()
        return Told(answer.status_code, body.get("reason"), str(body["detail"]))


PLAYERS: dict[str, type[Trainer]] = {
    "ORS": OrsTrainer,
    "AReaL": ArealTrainer,
    "OpenEnv": OpenEnvTrainer,
    "NeMo Gym": NemoTrainer,
}


@dataclass
class World:
    """A gateway with a client of one protocol."""

    stack: Stack
    gateway: Replica
    http: httpx.AsyncClient
    player: Trainer
    clock: Switch

    @contextlib.contextmanager
    def store_is_away(self) -> Iterator[None]:
        self.clock.is_off = True
        try:
            yield
        finally:
            self.clock.is_off = False

    async def leave(self) -> None:
        """End the episode, if it is still open, as a trainer that discards it. Wait until it is recorded."""
        self.stack.backend.starts.clear()
        await self.player.discard()

        async def has_ended() -> None:
            assert all(one["closed_at"] or one["name"] == "holder" for one in await listed(self.http))

        await eventually(has_ended)

    async def play(self, task: str, *tools: str) -> Told | None:
        """Open an episode on *task* and call *tools*. Return what the last request got."""
        told = await self.player.open(task)
        for tool in tools:
            assert told is None, told
            told = await self.player.act(tool)
        return told

    async def during_a_call(self, event: Callable[[], Awaitable[Any]]) -> Told | None:
        """Let *event* happen while a call runs, and return what the call got."""
        await self.play("half", "go_on")
        async with asyncio.TaskGroup() as group:
            call = group.create_task(self.player.act("quiet"))
            await until(lambda: self.stack.backend.only.waiting == 1)
            await event()
        return call.result()

    async def operator_ends(self) -> None:
        [session] = await self.gateway.store.sessions()
        await self.gateway.sessions.end(session.owner, session.name, CloseReason.OPERATOR, wait_s=HANG_S)

    async def expire(self) -> None:
        await self.gateway.session_cache.write_notes()
        for session in self.stack.backend.only.sessions.values():
            session.idle_s = IDLE_S + 1
        self.clock.advance(IDLE_S + 1)
        await self.gateway.eventually_used(0)


Event = Callable[[World], Awaitable[Told | None]]
EVENTS: dict[str, Event] = {}


def event(name: str) -> Callable[[Event], Event]:
    def keep(function: Event) -> Event:
        EVENTS[name] = function
        return function

    return keep


@event("The environment ends the episode")
async def _ends(world: World) -> Told | None:
    told = await world.play("", "go_on", "echo")
    return told if isinstance(world.player, ArealTrainer) else told or await world.player.end()


@event("The trainer ends it after a step")
async def _stops(world: World) -> Told | None:
    return await world.play("half", "go_on") or await world.player.end()


@event("The trainer cancels it")
async def _cancels(world: World) -> Told | None:
    return await world.play("half", "go_on") or await world.player.cancel()


@event("The trainer ends it before the first step")
async def _unplayed(world: World) -> Told | None:
    return await world.play("nothing") or await world.player.end()


@event("It is idle for too long; next request")
async def _expires(world: World) -> Told | None:
    await world.play("half", "go_on")
    await world.expire()
    return await world.player.act("go_on")


@event("The trainer repeats the last request")
async def _repeats(world: World) -> Told | None:
    return await world.play("") or await world.player.twice()


@event("The trainer repeats its key with another body")
async def _conflicts(world: World) -> Told | None:
    return await world.play("") or await world.player.other_body()


@event("A tool raises `ToolError`")
async def _errs(world: World) -> Told | None:
    return await world.play("half", "go_on", "error")


@event("A tool raises another exception, and the episode goes on")
async def _raises(world: World) -> Told | None:
    return await world.play("half", "go_on", "raise")


@event("That was the last step; the trainer ends it")
async def _raised_last(world: World) -> Told | None:
    await world.play("fault", "go_on", "raise")
    return await world.player.end()


@event("A judge raises, or a reward is not a number")
async def _judge(world: World) -> Told | None:
    return await world.play("fault", "go_on", "judge")


@event("The next request after that")
async def _after_judge(world: World) -> Told | None:
    await world.play("fault", "go_on", "judge")
    return await world.player.act("go_on")


@event("The environment ends the episode, and no step had a reward")
async def _no_reward(world: World) -> Told | None:
    told = await world.play("no reward", "go_on", "null")
    return told if isinstance(world.player, ArealTrainer) else told or await world.player.end()


@event("The prompt or the reset raises")
async def _reset(world: World) -> Told | None:
    return await world.play("reset")


@event("A part of the session breaks")
async def _breaks(world: World) -> Told | None:
    return await world.play("broken", "go_on", "break")


@event("The worker dies during a call")
async def _dies(world: World) -> Told | None:
    return await world.during_a_call(lambda: world.stack.backend.only.die())


@event("The worker dies between calls; next request")
async def _died(world: World) -> Told | None:
    await world.play("half", "go_on")
    await world.stack.backend.only.die()
    await world.gateway.eventually_used(0)
    return await world.player.act("go_on")


@event("The worker dies after the environment ended the episode")
async def _died_after(world: World) -> Told | None:
    told = await world.play("", "go_on", "echo")
    await world.stack.backend.only.die()
    await world.gateway.eventually_used(0)
    return told or (await world.player.end() if isinstance(world.player, NemoTrainer) else None)


@event("The worker does not confirm the end")
async def _unconfirmed(world: World) -> Told | None:
    return await world.play("silent", "go_on") or await world.player.end()


@event("A call takes too long")
async def _late(world: World) -> Told | None:
    return await world.play("half", "go_on", "quiet")


@event("An operator ends it during a call")
async def _interrupted(world: World) -> Told | None:
    return await world.during_a_call(world.operator_ends)


@event("An operator ends it between calls; next request")
async def _ended(world: World) -> Told | None:
    await world.play("half", "go_on")
    await world.operator_ends()
    return await world.player.act("go_on")


@event("The store does not answer: a step")
async def _without_store(world: World) -> Told | None:
    await world.play("half", "go_on")
    with world.store_is_away():
        return await world.player.act("go_on")


@event("The store does not answer: an opening")
async def _no_opening(world: World) -> Told | None:
    with world.store_is_away():
        return await world.player.open("")


@event("Workers do not start")
async def _no_workers(world: World) -> Told | None:
    world.stack.backend.starts[world.gateway.catalog.default.name] = Start.DIES
    return await world.player.open("")


@event("No slot is free in time")
async def _full(world: World) -> Told | None:
    await world.http.post(
        "/create", json={"env_name": "math", "split": "train", "index": 0}, headers={"X-Session-ID": "holder"}
    )
    return await world.player.open("")


def rows() -> list[list[str]]:
    """Return the rows of the table: event, answers, outcome and reward."""
    text = REFERENCE.read_text().partition("| event | ORS |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines()[2:]]


CELLS = [
    pytest.param(row, protocol, id=f"{protocol}: {row[0]}")
    for row in rows()
    for protocol, cell in zip(PLAYERS, row[1:], strict=False)
    if cell != "-"
]


@pytest.mark.parametrize(("row", "protocol"), CELLS)
async def test_each_cell_of_the_table_is_what_its_client_gets(
    row: list[str], protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, cell, logged = row[0], row[1 + list(PLAYERS).index(protocol)], row[5]

    async with _world(protocol, name, tmp_path, monkeypatch) as world:
        told = await EVENTS[name](world)
        await world.leave()
        episodes = await listed(world.http)

    assert _written(told) == cell
    if logged == "-":
        return
    outcome = re.findall(r"`(\w+)`", logged)
    assert [episode["outcome"] for episode in episodes if episode["name"] != "holder"] == outcome
    wanted = None if logged.endswith("none") else SUM[outcome[0]]
    for episode in episodes:
        if episode["name"] != "holder":
            assert episode["reward"] == wanted


def test_each_row_of_the_table_is_played() -> None:
    assert [row[0] for row in rows()] == list(EVENTS)


def _written(told: Told | None) -> str:
    """Return what a client got in the form of a cell."""
    if told is None:
        return "200"
    status = str(told.status) if isinstance(told.status, int) else f"`{told.status}`"
    return f"{status} `{told.reason}`" if told.reason else status


@contextlib.asynccontextmanager
async def _world(protocol: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(own, "MARGIN_S", 0.0)
    late_s = LATE_S if name == "A call takes too long" else HANG_S
    policy: dict[str, Any] = {"min_workers": 0 if name == "Workers do not start" else 1}
    if name == "No slot is free in time":
        policy |= {"slots": 1, "max_workers": 1, "open_s": 0.2}
    math = environment(call_s=late_s, areal=Areal(step_s=late_s, start_s=HANG_S), **policy)
    reset_s = policy.get("open_s", HANG_S)
    math = replace(math, openenv=OpenEnv(step_s=late_s, reset_s=reset_s))
    clock = Switch()
    train = tasks(train=[{"id": key or "plain", **task} for key, task in TASKS.items()])
    async with logging(folder, math, clock=clock, tasks_math=train) as (stack, gateway, http):
        trainer = PLAYERS[protocol](http)
        async with trainer.there():
            yield World(stack, gateway, http, trainer, clock)
