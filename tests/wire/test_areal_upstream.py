"""A small AReaL task server in its own process, driven as AReaL's workflow drives it and as a worker of the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.core.environment import Environment, Server, ServerProtocol
from gateway.core.episode import Action, StepResult, TextBlock
from gateway.core.errors import InvalidRequest, SessionNotFound, UpstreamGone, WorkerFull
from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.session import Session, SessionSetup, SessionState
from gateway.core.worker import Worker
from gateway.upstreams.areal.upstream import ArealUpstream
from gateway.upstreams.transport import HttpTransport
from tests.fakes.eventually import eventually
from tests.wire.areal_client import ArealClient, Failed
from tests.wire.processes import ServerProcess

pytestmark = pytest.mark.wire

SERVER = Path(__file__).parents[1] / "foreign/areal/server.py"
GUESS = Environment(
    name=EnvironmentName("guess"),
    image="guess",
    directory=Path("/"),
    command=(),
    protocol=ServerProtocol.AREAL,
    server=Server(port=5000),
)
Run = Callable[..., str]
"""Starts a server with these arguments and returns its ``HOST:PORT``."""


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    started: dict[tuple[str, ...], ServerProcess] = {}

    def run(*arguments: str, fresh: bool = False) -> str:
        if fresh or arguments not in started:
            log = tmp_path_factory.mktemp("areal") / "log"
            command = [sys.executable, str(SERVER), "--port", "0", *arguments]
            process = ServerProcess(command, variables={}, ready=r"running on http://(\S+)", log=log)
            started[(*arguments, str(log)) if fresh else arguments] = process
            process.start()
            return process.address
        return started[arguments].address

    yield run
    for process in started.values():
        process.kill()


def client(place: str) -> ArealClient:
    return ArealClient(f"http://{place}")


async def counted(areal: ArealClient, **wanted: int) -> None:
    """Wait until the server's ``/health`` reports these numbers."""

    async def check() -> None:
        health = await areal.ask("GET", "/health")
        assert {key: health[key] for key in wanted} == wanted

    await eventually(check)


class Halving:
    """An agent that finds the number by bisection."""

    def __init__(self) -> None:
        self.low, self.high = 1, 100

    def __call__(self, seen: str) -> str:
        if found := re.search(r"is (higher|lower) than (\d+)", seen):
            if found[1] == "higher":
                self.low = int(found[2]) + 1
            else:
                self.high = int(found[2]) - 1
        return f"Think: in the middle.\nAct: guess({(self.low + self.high) // 2})"


class World:
    """An upstream on the gateway's own transport, and its sessions in one server."""

    def __init__(self, place: str) -> None:
        self.relay = HttpTransport()
        self.upstream = ArealUpstream(self.relay)
        address = f"tcp:{place}"
        self.worker = Worker(id=WorkerId("w"), environment=GUESS.name, digest="", slots=16, address=address)
        self.client = client(place)
        self._numbers = itertools.count()

    def session(self) -> Session:
        return Session(
            id=SessionId(f"s-{next(self._numbers)}"),
            name="episode",
            owner=Owner(""),
            environment=GUESS.name,
            lease="l",
            fingerprint="f",
            idle_s=300.0,
            worker=self.worker.id,
            address=self.worker.address,
            state=SessionState.OPEN,
        )

    async def open(self, sample: Any = 7, *, session: Session | None = None, seed: int | None = None) -> Session:
        setup = SessionSetup(spec={"sample_id": sample}, seed=seed)
        return await self.upstream.open(session or self.session(), GUESS, setup)

    async def say(self, session: Session, text: str) -> StepResult:
        return await self.upstream.act(session, GUESS, Action(text=text))

    async def play(self, session: Session) -> StepResult:
        agent, seen = Halving(), ""
        while True:
            result = await self.say(session, agent(seen))
            if result.finished:
                return result
            seen = " ".join(block.text for block in result.blocks if isinstance(block, TextBlock))

    async def counted(self, **wanted: int) -> None:
        await counted(self.client, **wanted)


@contextlib.asynccontextmanager
async def world_of(place: str) -> AsyncIterator[World]:
    world = World(place)
    try:
        yield world
    finally:
        await world.upstream.aclose()
        await world.relay.aclose()


# -- the server, as AReaL's workflow drives it ----------------------------------------------------------------------


async def test_areals_workflow_wins_an_episode_on_the_server(processes: Run) -> None:
    trajectory = await client(processes()).rollout(42, Halving())

    assert trajectory.reward == 1.0
    assert trajectory.info["success"] is True
    assert trajectory.info["num_turns"] == trajectory.turns
    assert trajectory.info["status"] == "completed"


async def test_the_server_describes_its_task(processes: Run) -> None:
    info = await client(processes()).info()

    assert {key: type(value) for key, value in info.items()} == {
        "name": str,
        "num_samples": int,
        "max_episode_length": int,
        "observation_type": str,
        "action_type": str,
        "description": str,
    }
    assert (info["num_samples"], info["observation_type"], info["action_type"]) == (100, "text", "text")


async def test_the_server_answers_badly_formatted_text_with_an_error_until_the_turn_limit(processes: Run) -> None:
    areal = client(processes())
    begun = await areal.start("3")
    first = await areal.step(begun["episode_id"], "forty-two?")
    for _ in range(6):
        await areal.step(begun["episode_id"], "Act: guess(nothing)")
    last = await areal.step(begun["episode_id"], "Think: no idea")

    assert (begun["reward"], begun["done"], begun["info"]["turn"]) == (0.0, False, 0)
    assert begun["info"]["sample_id"] == "3"
    assert first["observation"]["content"].startswith("Error:")
    assert first["info"] == {"turn": 1, "parsed_action": {"thought": None, "action": None, "content": None}}
    assert (last["done"], last["reward"], last["observation"]) == (True, 0.0, None)
    assert (last["info"]["success"], last["info"]["status"]) == (False, "task limit reached")


async def test_the_members_of_a_group_get_the_same_number_from_the_server(processes: Run) -> None:
    areal = client(processes())

    same = await asyncio.gather(*[areal.rollout("5", Halving()) for _ in range(8)])
    numbers = set()
    for seed in range(6):
        episode = (await areal.start("5", config={"seed": seed}))["episode_id"]
        agent, seen = Halving(), ""
        while not (reply := await areal.step(episode, agent(seen)))["done"]:
            seen = reply["observation"]["content"]
        numbers.add(reply["info"]["answer"])

    assert len({trajectory.info["answer"] for trajectory in same}) == 1
    assert len(numbers) > 1


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/episode/start", b"", 400),
        ("/episode/start", b"{", 400),
        ("/episode/start", b"[1]", 400),
        ("/episode/start", b"{}", 400),
        ("/episode/start", b'{"sample_id": true}', 400),
        ("/episode/start", b'{"sample_id": 1, "config": 7}', 400),
        ("/episode/start", b'{"sample_id": "nope"}', 404),
        ("/episode/start", b'{"sample_id": 100}', 404),
        ("/episode/step", b"{}", 400),
        ("/episode/step", b'{"episode_id": "x"}', 400),
        ("/episode/step", b'{"episode_id": "x", "action": "go"}', 400),
        ("/episode/step", b'{"episode_id": "x", "action": {"type": "text", "content": 3}}', 400),
        ("/episode/step", b'{"episode_id": "x", "action": {"type": "dance", "content": "go"}}', 400),
        ("/episode/step", b'{"episode_id": "x", "action": {"type": "text", "content": "go"}}', 404),
        ("/episode/cancel", b"{}", 400),
        ("/episode/cancel", b'{"episode_id": "x"}', 404),
        ("/nowhere", b"{}", 404),
    ],
)
async def test_the_server_refuses_a_request_in_the_apis_form(
    processes: Run, path: str, body: bytes, status: int
) -> None:
    answered, reply = await client(processes()).request("POST", path, data=body)

    assert answered == status
    assert reply["error"]
    assert reply["detail"]
    if b'"episode_id"' in body:
        assert reply["episode_id"] == "x"


async def test_the_server_cancels_an_episode_while_a_step_runs(processes: Run) -> None:
    areal = client(processes("--knobs"))
    episode = (await areal.start(1))["episode_id"]
    step = asyncio.ensure_future(areal.step(episode, "Act: sleep(100)"))
    second = asyncio.ensure_future(areal.step(episode, "Act: stop"))
    await counted(areal, running_steps=2)

    assert await areal.cancel(episode) == {"status": "cancelled", "episode_id": episode}
    for late in (step, second, areal.cancel(episode)):
        with pytest.raises(Failed) as failed:
            await late
        assert failed.value.status == 404


async def test_the_server_drops_an_idle_episode(processes: Run) -> None:
    areal = client(processes("--idle-s", "0.2"))
    episode = (await areal.start(1))["episode_id"]
    await counted(areal, active_episodes=0)
    with pytest.raises(Failed) as failed:
        await areal.step(episode, "Act: stop")
    assert failed.value.status == 404


# -- the server as a worker -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), id="text"),
        pytest.param(("--observation", "messages"), id="messages"),
        pytest.param(("--observation", "json"), id="json"),
        pytest.param(("--prefix", ""), id="without the prefix"),
    ],
)
async def test_an_upstream_plays_and_wins_an_episode(processes: Run, arguments: tuple[str, ...]) -> None:
    async with world_of(processes(*arguments)) as world:
        assert await world.upstream.ready(world.worker, GUESS) == 0
        session = await world.open()
        prompt = await world.upstream.prompt(session, GUESS)
        result = await world.play(session)
        later = await world.say(session, "Act: stop")
        summary = await world.upstream.close(session, GUESS)

    assert "A number from 1 to 100 is hidden" in str(prompt)
    assert (result.reward, result.finished) == (1.0, True)
    assert result.metadata is not None
    assert result.metadata["success"] is True
    assert later.reason == "episode_finished"
    assert summary is not None
    assert (summary.reward, summary.finished, summary.steps) == (1.0, True, result.metadata["num_turns"])


async def test_a_server_with_structured_actions_receives_objects(processes: Run) -> None:
    async with world_of(processes("--action", "structured")) as world:
        session = await world.open()
        first = await world.upstream.act(session, GUESS, Action(fields={"guess": 0}))
        second = await world.upstream.act(session, GUESS, Action(name="act", arguments={"guess": 101}))
        last = await world.upstream.act(session, GUESS, Action(text='{"stop": true}'))

    assert "higher than 0" in str(first.blocks)
    assert "lower than 101" in str(second.blocks)
    assert (last.reward, last.finished) == (0.0, True)


async def test_the_samples_are_tasks_and_each_can_be_opened(processes: Run) -> None:
    async with world_of(processes()) as world:
        [split] = await world.upstream.splits(world.worker, GUESS)
        count = await world.upstream.count(world.worker, GUESS, split.name)
        tasks = await world.upstream.tasks(world.worker, GUESS, split.name, 98, 200)
        for task in tasks:
            setup = SessionSetup(spec=task, split=split.name)
            await world.upstream.close(await world.upstream.open(world.session(), GUESS, setup), GUESS)
        with pytest.raises(InvalidRequest, match="samples 0 to 99"):
            await world.open("nope")

    assert (split.name, count) == ("train", 100)
    assert [task["sample_id"] for task in tasks] == [98, 99]


async def test_many_sessions_play_episodes_concurrently_and_leave_none_open(processes: Run) -> None:
    async with world_of(processes(fresh=True)) as world:

        async def episode(sample: int) -> float | None:
            session = await world.open(sample)
            try:
                return (await world.play(session)).reward
            finally:
                await world.upstream.close(session, GUESS)

        rewards = await asyncio.gather(*[episode(sample) for sample in range(40)])

        assert rewards == [1.0] * 40
        await world.counted(active_episodes=0)


async def test_a_full_server_reports_no_capacity_and_accepts_a_session_again_after_a_close(processes: Run) -> None:
    async with world_of(processes("--capacity", "1")) as world:
        session = await world.open()
        with pytest.raises(WorkerFull, match="no capacity"):
            await world.open()
        await world.upstream.close(session, GUESS)
        session = await world.open()
        await world.upstream.close(session, GUESS)

        await world.counted(active_episodes=0)


async def test_another_replica_continues_the_episode(processes: Run) -> None:
    async with world_of(processes()) as world, world_of(processes()) as other:
        session = await world.open(11, seed=3)
        await world.say(session, "Act: guess(0)")
        result = await other.say(session, "Act: guess(0)")
        await other.upstream.close(session, GUESS)
        with pytest.raises(SessionNotFound):
            await world.say(session, "Act: guess(0)")

    assert result.metadata is not None
    assert result.metadata["turn"] == 2


async def test_a_session_that_the_server_dropped_is_not_found(processes: Run) -> None:
    async with world_of(processes("--idle-s", "0.2")) as world:
        session = await world.open()
        await world.counted(active_episodes=0)
        with pytest.raises(SessionNotFound):
            await world.say(session, "Act: guess(1)")
        assert await world.upstream.close(session, GUESS) is None


async def test_a_step_and_a_close_fail_as_gone_when_the_server_dies_in_mid_step(processes: Run) -> None:
    async with world_of(processes("--knobs", fresh=True)) as world:
        session = await world.open()
        with pytest.raises(UpstreamGone) as gone:
            await world.say(session, "Act: crash")
        with pytest.raises(UpstreamGone):
            await world.upstream.close(session, GUESS)

    assert gone.value.sent


async def test_a_close_ends_a_running_step(processes: Run) -> None:
    async with world_of(processes("--knobs")) as world:
        session = await world.open()
        step = asyncio.ensure_future(world.say(session, "Act: sleep(100)"))
        waiting = asyncio.ensure_future(world.say(session, "Act: guess(1)"))
        await world.counted(running_steps=1)
        await world.upstream.close(session, GUESS)

        for late in (step, waiting):
            with pytest.raises(SessionNotFound):
                await late


async def test_an_episode_that_starts_after_a_cancelled_opening_is_cancelled(processes: Run, tmp_path: Path) -> None:
    gate = tmp_path / "go"
    async with world_of(processes("--slow-start-file", str(gate), fresh=True)) as world:
        session = world.session()
        opening = asyncio.ensure_future(world.open(session=session))
        await world.counted(starting=1)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        closing = asyncio.ensure_future(world.upstream.close(session, GUESS))
        gate.touch()

        assert await closing is None
        await world.counted(starting=0, active_episodes=0)


async def test_a_slow_step_that_is_cancelled_and_repeated_runs_once(processes: Run, tmp_path: Path) -> None:
    gate = tmp_path / "go"
    async with world_of(processes("--slow-step-file", str(gate), fresh=True)) as world:
        session = await world.open()
        text = Action(text="Act: guess(0)")
        first = asyncio.ensure_future(world.upstream.act(session, GUESS, text, key="one"))
        await world.counted(running_steps=1)
        first.cancel()
        again = asyncio.ensure_future(world.upstream.act(session, GUESS, text, key="one"))
        gate.touch()
        result = await again

    assert result.metadata is not None
    assert result.metadata["turn"] == 1


async def test_ors_operations_are_answered_in_ors_form(processes: Run) -> None:
    async with world_of(processes("--observation", "messages")) as world:
        session = await world.open()
        listed = json.loads(await world.upstream.tools(world.worker, GUESS))

        async def forward(operation: str, body: Any = None) -> tuple[int, bytes]:
            headers = [(b"content-type", b"application/json"), (b"accept", b"application/json")]
            data = b"" if body is None else json.dumps(body).encode()
            exchange = await world.upstream.forward(session, GUESS, operation, body=data, headers=headers)
            try:
                return exchange.status, await exchange.read(2**20)
            finally:
                await exchange.aclose()

        prompt = json.loads((await forward("prompt"))[1])
        messages = json.loads((await forward("messages"))[1])
        call = {"name": listed["tools"][0]["name"], "input": {"content": "Act: stop"}}
        status, outcome = await forward("call", call)

    assert [block["text"] for block in prompt][::2] == ["[system]", "[user]"]
    assert [message["role"] for message in messages] == ["system", "user"]
    assert status == 200
    output = json.loads(outcome)["output"]
    assert (output["reward"], output["finished"]) == (0.0, True)
