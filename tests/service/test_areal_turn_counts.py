"""Turn counts of AReaL episodes in the gateway's own workers. The worker counts, so all gateways share one count and
a step needs no call to the store.

The workers are real environment servers in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from envserver import Environment as Played
from envserver import StepResult, Task, ToolCall, tool
from envserver.schema.environment_types import kinds_of
from envserver.server import Server
from envserver.settings import Settings

from gateway.core.environment import Areal, Environment
from gateway.core.errors import SessionNotFound, StoreUnavailable
from gateway.core.ids import SessionId, WorkerId
from gateway.core.leader_lease import LeaderLease
from gateway.core.ports.store import Store
from gateway.core.worker import BackendWorker, Worker
from gateway.sessions.cache import session_id
from gateway.stores.memory.sessions import MemoryStore
from tests.contract.store_worlds import RedisWorld
from tests.deadlines import HANG_S
from tests.fakes.clock import Clock
from tests.fakes.eventually import eventually, until
from tests.fakes.workers import FakeBackend
from tests.service.stack import OWNER, Replica, environment, tasks
from tests.service.test_store_down import Switch
from tests.service.wire import hang_up, under_way

pytest_plugins = ["tests.contract.store_fixtures"]

_names = itertools.count(1)


class Walk(Played):
    """An environment whose actions are the texts ``go_WORD``, ``wait_WORD`` and ``fail_WORD``."""

    name = "math"
    ran: list[str]
    """Words of the tools that ran in any session, in order."""
    doors: dict[str, asyncio.Event]

    def reset(self, task: Task, *, seed: int) -> str:
        return "Walk."

    @tool(inline=True)
    async def go(self, word: str) -> StepResult:
        self.ran.append(word)
        return StepResult(word, reward=0.5)

    @tool(inline=True, concurrent=True)
    async def wait(self, word: str) -> StepResult:
        self.ran.append(word)
        async with asyncio.timeout(HANG_S):
            await self.doors.setdefault(word, asyncio.Event()).wait()
        return StepResult(word)

    @tool(inline=True)
    async def fail(self, word: str) -> StepResult:
        self.ran.append(word)
        raise RuntimeError(word)

    def parse_text(self, text: str) -> ToolCall | str:
        name, _, word = text.partition("_")
        return ToolCall(name, {"word": word}) if word else "name a tool and a word"


class OwnWorkers(FakeBackend):
    """An engine whose workers are environment servers."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._sockets = folder
        self._servers: dict[WorkerId, tuple[Server, BackendWorker]] = {}
        self.walk: type[Walk] = type("Walk", (Walk,), {"ran": [], "doors": {}})

    async def start(self, worker: Worker, environment: Environment, lease: LeaderLease | None = None) -> str:
        self.asked += 1
        settings = Settings(socket=str(self._sockets / f"{worker.id}.sock"), slots=worker.slots)
        server = Server(settings, kinds_of([self.walk], tasks=settings.tasks))
        address = f"unix:{await server.start()}"
        found = BackendWorker(
            id=worker.id, environment=worker.environment, digest=worker.digest, address=address, running=True
        )
        self._servers[worker.id] = (server, found)
        return address

    async def stop(self, id: WorkerId) -> None:
        self.stopped.append(id)
        if (running := self._servers.pop(id, None)) is not None:
            await running[0].stop()

    async def logs(self, id: WorkerId, *, lines: int = 20) -> str:
        return ""

    async def found(self) -> list[BackendWorker]:
        return [found for _, found in self._servers.values()]

    async def aclose(self) -> None:
        for id in list(self._servers):
            await self.stop(id)

    def unheard(self, episode: str) -> int:
        """Return the number of an episode's started steps whose caller has hung up."""
        [(server, _)] = self._servers.values()
        return len(server.sessions.get(session_id(OWNER, episode)).cut)

    def running(self, episode: str) -> int:
        """Return the number of an episode's steps that have not ended."""
        [(server, _)] = self._servers.values()
        return len(server.sessions.get(session_id(OWNER, episode)).calls)

    def open(self, word: str) -> None:
        """Let ``wait_WORD`` end."""
        self.walk.doors.setdefault(word, asyncio.Event()).set()


@dataclass
class Gateways:
    """Replicas on one store and one engine."""

    store: Callable[[str], Store]
    backend: FakeBackend
    max_turns: int = 30

    @contextlib.asynccontextmanager
    async def one(self, *, is_looping: bool = True) -> AsyncIterator[tuple[Replica, httpx.AsyncClient]]:
        """Run a gateway that serves. Without its loops only requests call the store."""
        name = f"gateway-{next(_names)}"
        gateway = Replica(
            store=self.store(name),
            backend=self.backend,
            environments=[environment(areal=Areal(max_turns=self.max_turns), slots=4, max_workers=1)],
            name=name,
            tasks_math=tasks(train=[{"question": "1+1"}]),
        )
        try:
            async with gateway.looping() if is_looping else contextlib.nullcontext(), gateway.serving() as client:
                yield gateway, client
        finally:
            await gateway.aclose()


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gw-") as path:  # short, as the path of a Unix socket holds 107 bytes
        yield Path(path)


@pytest.fixture
async def own(folder: Path) -> AsyncIterator[OwnWorkers]:
    backend = OwnWorkers(folder)
    yield backend
    await backend.aclose()


@pytest.fixture
async def gateways(own: OwnWorkers) -> AsyncIterator[Gateways]:
    store = MemoryStore(clock=time.monotonic, closed_kept_s=600.0, queue_max=100)
    yield Gateways(lambda _: store, own)
    await store.aclose()


async def started(client: httpx.AsyncClient) -> str:
    answer = await client.post("/areal/math/api/episode/start", json={"sample_id": 0, "config": {}})
    assert answer.status_code == 200, answer.text
    episode: str = answer.json()["episode_id"]
    return episode


async def step(client: httpx.AsyncClient, episode: str, text: str, *, key: str = "") -> httpx.Response:
    body = {"episode_id": episode, "action": {"type": "text", "content": text}}
    headers = {"Idempotency-Key": key} if key else {}
    return await client.post("/areal/math/api/episode/step", json=body, headers=headers)


async def turn(client: httpx.AsyncClient, episode: str, text: str, *, key: str = "") -> int:
    answer = await step(client, episode, text, key=key)
    assert answer.status_code == 200, answer.text
    number: int = answer.json()["info"]["turn"]
    return number


async def waited(client: httpx.AsyncClient, episode: str, word: str) -> int:
    """Return the turn of an action that its worker runs concurrently with other actions."""
    action = {"type": "structured", "content": {"name": "wait", "arguments": {"word": word}}}
    body = {"episode_id": episode, "action": action}
    answer = await client.post("/areal/math/api/episode/step", json=body)
    number: int = answer.json()["info"]["turn"]
    return number


async def test_all_gateways_share_one_turn_count_also_after_a_restart(gateways: Gateways, own: OwnWorkers) -> None:
    async with gateways.one() as (_, one):
        async with gateways.one() as (_, other):
            episode = await started(one)
            turns = [await turn(one, episode, "go_a"), await turn(other, episode, "go_b")]
        async with gateways.one() as (_, restarted):
            turns += [await turn(restarted, episode, "go_c"), await turn(one, episode, "go_d")]

    assert turns == [1, 2, 3, 4]
    assert own.walk.ran == ["a", "b", "c", "d"]


async def test_refused_and_failed_actions_are_turns_and_bad_requests_are_not(
    gateways: Gateways, own: OwnWorkers
) -> None:
    async with gateways.one() as (_, one), gateways.one() as (_, other):
        episode = await started(one)
        turns = [
            await turn(one, episode, "hello"),
            await turn(other, episode, "fly away"),
            await turn(one, episode, "fail_a"),
        ]
        keyed = await turn(one, episode, "go_b", key="k")
        conflict = await step(other, episode, "go_c", key="k")
        body = {"episode_id": episode, "action": {"type": "song", "content": "la"}}
        malformed = await other.post("/areal/math/api/episode/step", json=body)
        turns += [keyed, await turn(other, episode, "go_d")]

    assert (conflict.status_code, malformed.status_code) == (400, 400)
    assert turns == [1, 2, 3, 4, 5]
    assert own.walk.ran == ["a", "b", "d"]


async def test_the_limit_holds_over_all_gateways(gateways: Gateways, own: OwnWorkers) -> None:
    gateways.max_turns = 3
    async with gateways.one() as (gateway, one), gateways.one() as (_, other):
        episode = await started(one)
        replies = [
            (await step(one, episode, "hello")).json(),
            (await step(other, episode, "go_a")).json(),
            (await step(one, episode, "go_b")).json(),
        ]
        late = await step(other, episode, "go_c")

        assert [reply["done"] for reply in replies] == [False, False, True]
        assert (replies[2]["info"]["num_turns"], replies[2]["info"]["status"]) == (3, "task limit reached")
        assert late.status_code == 404
        assert await gateway.used() == 0
    assert own.walk.ran == ["a", "b"]


async def test_concurrent_steps_at_two_gateways_have_different_turns(gateways: Gateways, own: OwnWorkers) -> None:
    async with gateways.one() as (_, one), gateways.one() as (_, other):
        episode = await started(one)
        both = [asyncio.ensure_future(waited(client, episode, word)) for client, word in ((one, "a"), (other, "b"))]
        await until(lambda: len(own.walk.ran) == 2)
        for word in "ab":
            own.open(word)

        turns = await asyncio.gather(*both)
        following = await turn(one, episode, "go_c")

    assert (sorted(turns), following) == ([1, 2], 3)


async def test_a_key_is_one_turn_at_all_gateways_even_with_other_steps_in_between(
    gateways: Gateways, own: OwnWorkers
) -> None:
    async with gateways.one() as (_, one), gateways.one() as (_, other):
        episode = await started(one)
        both = [asyncio.ensure_future(turn(client, episode, "wait_a", key="first")) for client in (one, other)]
        await until(lambda: own.walk.ran)
        own.open("a")
        turns = [*await asyncio.gather(*both), await turn(one, episode, "hello", key="second")]
        turns += [await turn(other, episode, "go_b"), await turn(other, episode, "wait_a", key="first")]
        turns += [await turn(one, episode, "hello", key="second")]

    assert turns == [1, 1, 2, 3, 1, 2]
    assert own.walk.ran == ["a", "b"]


async def test_a_step_whose_trainer_hung_up_is_a_turn(gateways: Gateways, own: OwnWorkers) -> None:
    async with gateways.one() as (_, one), gateways.one() as (_, other):
        episode = await started(one)
        async with under_way(step(one, episode, "wait_a", key="k")) as [running]:
            await until(lambda: own.walk.ran)
            await hang_up(running)
        await until(lambda: own.unheard(episode))
        own.open("a")
        await until(lambda: not own.running(episode))
        turns = [await turn(other, episode, "go_b"), await turn(other, episode, "wait_a", key="k")]
        turns += [await turn(one, episode, "go_c"), await turn(one, episode, "wait_a", key="k")]

    assert turns == [2, 1, 3, 1]
    assert own.walk.ran == ["a", "b", "c"]


async def test_turns_are_counted_while_the_store_is_away(own: OwnWorkers) -> None:
    switch = Switch()
    store = MemoryStore(clock=switch, closed_kept_s=600.0, queue_max=100)
    gateways = Gateways(lambda _: store, own, max_turns=5)
    async with gateways.one() as (_, one), gateways.one() as (gateway, other):
        episode = await started(one)
        turns = [await turn(one, episode, "go_a"), await turn(other, episode, "go_b")]
        switch.is_off = True
        turns += [await turn(client, episode, "go_c") for client in (one, other)]
        switch.is_off = False
        last = (await step(other, episode, "go_d")).json()

        assert turns == [1, 2, 3, 4]
        assert (last["done"], last["info"]["num_turns"]) == (True, 5)
        await gateway.eventually_used(0)


@pytest.mark.redis
async def test_turns_go_on_after_a_store_lost_its_data(
    redis_world: RedisWorld, own: OwnWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.pool.loop.TICK_S", 0.05)
    monkeypatch.setattr("gateway.pool.recovery.GRACE_S", 0.5)
    stores = {name: await redis_world.open(replica=name) for name in ("gateway-a", "gateway-b")}
    unused = iter(stores.values())
    gateways = Gateways(lambda _: next(unused), own)
    async with gateways.one() as (gateway, one), gateways.one() as (_, other):
        episode = await started(one)
        turns = [await turn(one, episode, "go_a"), await turn(one, episode, "hello")]

        with redis_world.server.client() as client:
            for key in redis_world.keys(client):
                client.delete(key)
        turns.append(await turn(one, episode, "go_b"))
        await eventually(lambda: _is_whole(gateway))
        turns += [await turn(other, episode, "go_c"), await turn(one, episode, "go_d")]

    assert turns == [1, 2, 3, 4, 5]


async def _is_whole(gateway: Replica) -> None:
    try:
        await gateway.store.find(SessionId("nobody"))
    except SessionNotFound:
        return
    except StoreUnavailable as error:
        raise AssertionError("the store is not whole") from error


class Readings(Clock):
    """The store's clock. It counts its readings, because every store operation reads it."""

    readings = 0

    def __call__(self) -> float:
        self.readings += 1
        return super().__call__()


@pytest.mark.parametrize(("is_counting", "least", "most"), [(True, 0, 0), (False, 10, 1000)])
async def test_a_step_makes_no_store_call_if_the_worker_counts_turns(
    folder: Path, is_counting: bool, least: int, most: int
) -> None:
    backend = OwnWorkers(folder) if is_counting else FakeBackend(folder)
    clock = Readings()
    store = MemoryStore(clock=clock, closed_kept_s=600.0, queue_max=100)
    gateways = Gateways(lambda _: store, backend)
    try:
        async with gateways.one() as (_, client):
            episode = await started(client)
        async with gateways.one(is_looping=False) as (_, client):
            await turn(client, episode, "go_on")  # a replica looks a session up once
            clock.readings = 0
            turns = [await turn(client, episode, "go_on") for _ in range(10)]
            readings = clock.readings
    finally:
        await backend.aclose()

    assert turns == list(range(2, 12))
    assert least <= readings <= most
