"""Sessions over each protocol that step continuously. Numbered steps reveal lost or repeated ones."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually
from tests.faults.players import counted, opened
from tests.faults.world import World, environment_toml
from tests.wire.gateways import TRAINER_KEYS
from tests.wire.openenv.frames import Socket, socket
from tests.wire.raw import RawEpisode, create, new_sid

TASKS = Path(__file__).parent / "tasks" / "unruly"
"""The folder from which AReaL trainers choose a task."""
PAUSE_S = 0.25
"""Seconds between two steps of a session."""
Count = Callable[[int], Awaitable[int]]
"""Takes a step at a replica and returns the number of the step."""


def steady_toml(**pool: object) -> str:
    """Return the environment of steady sessions. *pool* holds values of its pool."""
    return environment_toml(
        "unruly", pool=pool, tasks={"directory": str(TASKS)}, areal={"max_turns": 100_000}, timeouts={"open_s": HANG_S}
    )


def brief_toml(idle_s: int) -> str:
    """Return an environment whose sessions expire soon, and whose worker stays."""
    pool = {"slots": 4, "min_workers": 1, "max_workers": 1}
    return environment_toml("brief", pool=pool, timeouts={"idle_s": idle_s})


@dataclass
class Steady:
    """One session."""

    name: str
    replica: int
    count: Count
    can_move: bool
    """True if another replica may serve the session."""
    sid: str = ""
    """The trainer's name of the session. Empty where the gateway chooses it."""
    end: Callable[[], Awaitable[object]] | None = None
    last: int = -1
    steps: int = 0
    longest_s: float = 0.0
    wrong: list[str] = field(default_factory=list)
    leaving: bool = False

    async def run(self) -> None:
        """Step until the test asks the session to leave. An error is recorded and ends the loop."""
        while not self.leaving:
            began_at = time.monotonic()
            try:
                number = await self.count(self.replica)
            except Exception as error:  # noqa: BLE001  # whatever it is, it is the outcome of the test
                self.wrong.append(f"{self.name} after {self.steps} steps: {error!r}")
                return
            self.longest_s = max(self.longest_s, time.monotonic() - began_at)
            if self.last >= 0 and number != self.last + 1:
                self.wrong.append(f"{self.name}: step {number} follows step {self.last}")
                return
            self.last = number
            self.steps += 1
            await asyncio.sleep(PAUSE_S)


class Crowd:
    """The steady sessions, and a client of each replica for them."""

    def __init__(self, world: World, clients: Sequence[httpx.AsyncClient], sockets: contextlib.AsyncExitStack) -> None:
        self.world = world
        self.members: list[Steady] = []
        self._clients = clients
        self._sockets = sockets
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def longest_s(self) -> float:
        """Seconds of the longest step of all sessions."""
        return max(member.longest_s for member in self.members)

    def begin(self, member: Steady) -> Steady:
        self.members.append(member)
        self._tasks[member.name] = asyncio.create_task(member.run())
        return member

    async def ors(self, replica: int, *, environment: str = "unruly") -> Steady:
        """Open a session over ORS and step it."""
        episode = await opened(self._clients[replica], environment, start=1000 * len(self.members))

        async def count(at: int) -> int:
            return await counted(type(episode)(self._clients[at], episode.sid, environment))

        async def end() -> object:
            return await episode.delete()

        return self.begin(Steady(f"ors-{len(self.members)}", replica, count, can_move=True, sid=episode.sid, end=end))

    async def areal(self, replica: int) -> Steady:
        """Open an episode over AReaL's protocol and step it."""
        sample = len(self.members) % 8
        begun = await self._ask(replica, "start", sample_id=sample, config={})
        action = {"type": "structured", "content": {"name": "count", "arguments": {}}}

        async def count(at: int) -> int:
            reply = await self._ask(at, "step", episode_id=begun["episode_id"], action=action)
            return int(reply["observation"]["content"])

        async def end() -> object:
            return await self._ask(replica, "cancel", episode_id=begun["episode_id"])

        return self.begin(Steady(f"areal-{len(self.members)}", replica, count, can_move=True, end=end))

    async def openenv(self, replica: int) -> Steady:
        """Open an OpenEnv socket, reset it and step it. Such a session ends with its socket."""
        url = f"{self.world.gateways[replica].url}/openenv/unruly"
        ws: Socket = await self._sockets.enter_async_context(
            socket(url, additional_headers={"X-API-Key": TRAINER_KEYS["alice"]}, ping_interval=None)
        )
        reset = await ws.reset(split="train", index=len(self.members) % 8)
        assert reset["type"] == "observation", reset

        async def count(at: int) -> int:
            reply = await ws.step(type="call_tool", tool_name="count", arguments={})
            assert reply["type"] == "observation", reply
            return int(reply["data"]["observation"]["result"]["data"])

        return self.begin(Steady(f"openenv-{len(self.members)}", replica, count, can_move=False, end=ws.inner.close))

    async def goes_on(self, steps: int = 3) -> None:
        """Return once each session took *steps* more steps. Raise the first recorded error."""
        before = {member.name: member.steps for member in self.members}

        def on() -> bool:
            self.nothing_is_wrong()
            return all(member.steps >= before[member.name] + steps for member in self.members)

        deadline = time.monotonic() + HANG_S
        while not on():
            behind = [member.name for member in self.members if member.steps < before[member.name] + steps]
            if time.monotonic() > deadline:
                raise TimeoutError(f"these do not go on: {behind}")
            await asyncio.sleep(PAUSE_S)

    def nothing_is_wrong(self) -> None:
        wrong = [text for member in self.members for text in member.wrong]
        if wrong:
            raise RuntimeError("\n".join(wrong))  # not an AssertionError: `eventually` would wait for it

    def move(self) -> None:
        """Move each session that allows it to the next replica."""
        for member in self.members:
            if member.can_move:
                member.replica = (member.replica + 1) % len(self._clients)

    async def leave(self, *members: Steady) -> None:
        """Stop stepping the given sessions, or all, and end them."""
        leaving = list(members or self.members)
        for member in leaving:
            member.leaving = True
        await asyncio.wait([self._tasks[member.name] for member in leaving], timeout=HANG_S)
        self.nothing_is_wrong()
        for member in leaving:
            assert member.end is not None
            await member.end()
            self.members.remove(member)

    async def stand_still(self) -> None:
        """Stop stepping all sessions, and leave them open."""
        for member in self.members:
            member.leaving = True
        await asyncio.wait(self._tasks.values(), timeout=HANG_S)
        self.nothing_is_wrong()

    def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _ask(self, replica: int, path: str, **body: Any) -> Any:
        answer = await self._clients[replica].post(f"/areal/unruly/api/episode/{path}", json=body)
        assert answer.status_code == 200, (answer.status_code, answer.text)
        return answer.json()


@contextlib.asynccontextmanager
async def crowd(world: World) -> AsyncIterator[Crowd]:
    """Yield a crowd without sessions. At the end it cancels the remaining steps and leaves the sessions open."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(world.http(n)) for n in range(len(world.gateways))]
        made = Crowd(world, clients, stack)
        try:
            yield made
        finally:
            made.stop()


async def of_every_protocol(crowd: Crowd) -> None:
    """Open two sessions of each protocol at each replica."""
    for n in range(2 * len(crowd.world.gateways)):
        replica = n % len(crowd.world.gateways)
        await crowd.ors(replica)
        await crowd.areal(replica)
        await crowd.openenv(replica)


async def their_own_lists(world: World) -> dict[str, set[str]]:
    """Return the ids of the sessions that each worker reports itself."""
    secret = (world.folder / "state" / "secret").read_text().strip().encode()
    told: dict[str, set[str]] = {}
    for worker in await world.workers():
        assert worker["state"] != "starting", f"it has no list yet: {worker}"
        id = str(worker["id"])
        token = hmac.new(secret, id.encode(), "sha256").hexdigest()
        transport = httpx.AsyncHTTPTransport(uds=str(worker["address"]).removeprefix("unix:"), verify=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://worker", timeout=HANG_S) as http:
            try:
                answer = await http.get("/sessions", headers={"X-Worker-Token": token})
            except httpx.TransportError as error:  # it ended after the list was made
                raise AssertionError(f"{id} does not answer") from error
        assert answer.status_code == 200, answer.text
        told[id] = {str(row["sid"]) for row in answer.json()["sessions"]}
    return told


async def no_slot_is_leased_twice(world: World) -> None:
    """Assert that each worker holds the sessions that the store lists, and no more than it has slots."""
    told = await their_own_lists(world)
    sessions, workers = await world.sessions(), await world.workers()
    known = {str(worker["id"]): set[str]() for worker in workers}
    for session in sessions:
        known.setdefault(str(session["worker"]), set()).add(str(session["id"]))
    assert told == known, f"workers hold {told}, the store says {known}"
    assert all(len(told[str(worker["id"])]) <= int(worker["slots"]) for worker in workers)


async def gone_at(world: World, name: str) -> float:
    """Return the time at which the session ended (``time.monotonic()``)."""
    await eventually(lambda: is_gone(world, name))
    return time.monotonic()


async def is_gone(world: World, name: str) -> None:
    assert name not in {session["name"] for session in await world.sessions()}


async def patient_create(http: httpx.AsyncClient) -> RawEpisode:
    """Create a session, and retry when the gateway asks for it. Fail on any other answer."""
    sid = new_sid()
    deadline = time.monotonic() + HANG_S
    while True:
        answer = await create(http, sid, env_name="unruly", task_spec={})
        if answer.status_code == 200:
            return RawEpisode(http, sid, "unruly")
        assert answer.status_code == 503, (answer.status_code, answer.text)
        assert time.monotonic() < deadline
        await asyncio.sleep(int(answer.headers["retry-after"]))
