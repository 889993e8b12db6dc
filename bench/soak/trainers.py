"""The load of a soak: trainers of three protocols. Some of them vanish, disconnect, or send a step twice.

A trainer knows the steps that ran and the steps that may have run. Its worker's count must lie between the two.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from bench.load.episodes import JSON, WrongAnswer
from bench.load.http1 import ProtocolError, Response, connect, request_bytes
from bench.load.steps import Stepped, call_bytes, read_openenv
from bench.load.websocket import Socket, connect_socket, frame
from bench.soak.errors import Failed, Ledger, Untyped, read_areal, read_frame, read_json, read_ors
from bench.soak.world import ALONE, IDLE_S, Replica, World
from bench.subjects.catalogs import STEPS

ANSWER_S = 90.0
"""Seconds for any answer, longer than every timeout of the gateway."""
PAUSE_S = (0.01, 0.15)
LONG_SHARE, TWICE_SHARE, KEYED_SHARE = 0.05, 0.1, 0.3
LONG_S = 1.5
TRIES = 20
"""Number of attempts, half a second apart, for a step with a key whose connection broke."""
AGAIN_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Number of trainers of each kind."""

    ors: int = 10
    alone: int = 4
    areal: int = 6
    openenv: int = 6
    vanishing: int = 2
    hanging_up: int = 2


class Broken(Exception):
    """The connection broke. The request on it may have been executed."""


class Episode:
    """A trainer's knowledge of its session."""

    def __init__(self, ledger: Ledger, who: str) -> None:
        self._ledger = ledger
        self._who = who
        self._numbers = itertools.count()
        self._sent = 0
        self._answered = 0
        self._answered_at = time.monotonic()

    def next_token(self) -> str:
        """Return the name of the next step to send."""
        self._sent += 1
        return f"{next(self._numbers)}"

    def check(self, token: str, stepped: Stepped) -> None:
        """Check the answer to the step *token* against the possible counts."""
        if stepped.doubled:
            self._ledger.violate(f"{self._who}: a worker ran {stepped.doubled} steps twice")
        if stepped.token != token or not self._answered < stepped.count <= self._sent:
            self._ledger.violate(
                f"{self._who}: {stepped} for step {token}, of {self._sent} sent and {self._answered} counted"
            )
        self._answered = stepped.count
        self._answered_at = time.monotonic()
        self._ledger.steps[self._who] += 1

    def fail(self, failed: Failed) -> None:
        """Record an error, except an expiry of a session that its trainer really left idle."""
        if failed.kind == "expired" and time.monotonic() - self._answered_at >= IDLE_S - 2:
            return
        self._ledger.add_error(self._who, failed)


class Trainers:
    """All trainers. `run` returns after *stopping* is set and the last episode has ended."""

    def __init__(self, world: World, ledger: Ledger, *, seed: int, stopping: asyncio.Event) -> None:
        self._world = world
        self._ledger = ledger
        self._random = random.Random(seed)
        self._stopping = stopping

    async def run(self, numbers: Numbers) -> None:
        """Play until stopped."""
        kinds: list[tuple[int, Callable[[], Coroutine[Any, Any, None]]]] = [
            (numbers.ors, lambda: self._ors(STEPS)),
            (numbers.alone, lambda: self._ors(ALONE)),
            (numbers.areal, self._areal),
            (numbers.openenv, self._openenv),
            (numbers.vanishing, self._vanish),
            (numbers.hanging_up, self._hang_up),
        ]
        async with asyncio.TaskGroup() as group:
            for number, play in kinds:
                for _ in range(number):
                    group.create_task(self._again_and_again(play))

    async def warm_up(self) -> None:
        """Play one episode of each kind."""
        for environment in (STEPS, ALONE):
            await self._ors(environment)
        await self._areal()
        await self._openenv()

    async def _again_and_again(self, play: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while not self._stopping.is_set():
            try:
                await play()
            except Broken:
                pass  # already recorded where it broke
            except (Untyped, WrongAnswer, KeyError) as error:
                self._ledger.violate(f"{type(error).__name__}: {error}")
            await self._pause()

    # -- kinds of trainers ----------------------------------------------------------------------------------------

    async def _ors(self, environment: str) -> None:
        who = f"ORS {environment}"
        sid = str(uuid.uuid4())
        if not await self._create(who, environment, sid):
            return
        episode = Episode(self._ledger, who)
        for _ in range(self._length()):
            token, seconds = episode.next_token(), self._seconds()
            key = token if self._random.random() < KEYED_SHARE else None
            if key and self._random.random() < TWICE_SHARE:
                found = await self._twice(who, environment, sid, token, seconds)
            else:
                found = await self._call(who, call_bytes(environment, sid, token, seconds, key=key), retry=bool(key))
            if isinstance(found, Stepped):
                episode.check(token, found)
            elif found is not None:
                episode.fail(found)
                if found.is_over or found.kind == "worker_lost":
                    return
            await self._pause()
        response = await self._ask(who, request_bytes("POST", "/delete", JSON | {"X-Session-ID": sid}))
        if response.status != 200:
            episode.fail(read_json(response))
        self._ledger.episodes[who] += 1

    async def _create(self, who: str, environment: str, sid: str) -> bool:
        body = json.dumps({"task_spec": {"id": "only"}, "env_name": environment}).encode()
        response = await self._ask(who, request_bytes("POST", "/create", JSON | {"X-Session-ID": sid}, body))
        if response.status == 200:
            return True
        self._ledger.add_error(f"{who} create", read_json(response))
        return False

    async def _call(self, who: str, request: bytes, *, retry: bool) -> Stepped | Failed | None:
        """Send a step. Return None if the connection broke and the step may have run. *retry* sends it again."""
        for _ in range(TRIES if retry else 1):
            try:
                return read_ors(await self._ask(who, request))
            except Broken:
                await asyncio.sleep(AGAIN_S)
        return None

    async def _twice(self, who: str, environment: str, sid: str, token: str, seconds: float) -> Stepped | Failed | None:
        """Send one step twice at the same moment, to random replicas, and check that both answers agree."""
        request = call_bytes(environment, sid, token, seconds, key=token)
        one, other = await asyncio.gather(self._call(who, request, retry=True), self._call(who, request, retry=True))
        if (
            isinstance(one, Stepped)
            and isinstance(other, Stepped)
            and (one.token, one.count)
            != (
                other.token,
                other.count,
            )
        ):
            self._ledger.violate(f"{who}: a step that was sent twice has two outcomes: {one} and {other}")
        return one if isinstance(one, Stepped) else other

    async def _areal(self) -> None:
        who = "AReaL"

        async def ask(what: str, body: dict[str, Any]) -> Response:
            headers = JSON | {"Connection": "close"}
            path = f"/areal/{STEPS}/api/episode/{what}"
            return await self._ask(who, request_bytes("POST", path, headers, json.dumps(body).encode()))

        response = await ask("start", {"sample_id": "only", "config": {}})
        if response.status != 200:
            self._ledger.add_error(f"{who} start", read_json(response))
            return
        id = json.loads(response.body)["episode_id"]
        episode = Episode(self._ledger, who)
        for _ in range(self._length()):
            token = episode.next_token()
            action = {"type": "text", "content": f"{token} {self._seconds()}"}
            try:
                found = read_areal(await ask("step", {"episode_id": id, "action": action}))
            except Broken:
                continue
            if isinstance(found, Stepped):
                episode.check(token, found)
            else:
                episode.fail(found)
                if found.kind != "store_unavailable":
                    return
            await self._pause()
        response = await ask("cancel", {"episode_id": id})
        if response.status != 200:
            episode.fail(read_json(response))
        self._ledger.episodes[who] += 1

    async def _openenv(self) -> None:
        who, replica = "OpenEnv", self._replica()
        since = time.monotonic()
        try:
            socket = await connect_socket(replica.address, f"/openenv/{STEPS}/ws")
        except (OSError, ProtocolError) as error:
            self._broken(who, replica, since, error)
            return
        try:
            for _ in range(2):
                if not isinstance(await self._say(who, replica, socket, "reset", {}), dict):
                    return
                episode = Episode(self._ledger, who)
                for _ in range(self._length() // 2):
                    token = episode.next_token()
                    said = await self._say(who, replica, socket, "step", {"token": token, "seconds": self._seconds()})
                    if isinstance(said, Failed):
                        return
                    episode.check(token, read_openenv(said))
                    await self._pause()
                self._ledger.episodes[who] += 1
        finally:
            socket.close()

    async def _say(self, who: str, replica: Replica, socket: Socket, kind: str, data: Any) -> dict[str, Any] | Failed:
        since = time.monotonic()
        try:
            async with asyncio.timeout(ANSWER_S):
                payload = await socket.request(frame(json.dumps({"type": kind, "data": data}).encode()))
        except TimeoutError:
            self._ledger.violate(f"{who}: no answer to a {kind} within {ANSWER_S:g} s")
            raise Broken from None
        except (OSError, ProtocolError) as error:
            raise self._broken(who, replica, since, error) from error
        found = read_frame(payload)
        if isinstance(found, Failed):
            self._ledger.add_error(f"{who} {kind}", found)
        return found

    async def _vanish(self) -> None:
        """Open a session, take a step, and send nothing more, or leave during the step."""
        who, sid = "vanishing", str(uuid.uuid4())
        if not await self._create(who, STEPS, sid):
            await asyncio.sleep(1.0)
            return
        request = call_bytes(STEPS, sid, "0", LONG_S if self._random.random() < 0.5 else 0.0)
        await self._cut_off(request, self._random.uniform(0.1, 1.0))
        self._ledger.episodes[who] += 1
        await asyncio.sleep(2.0)  # each of these sessions holds a slot until it expires

    async def _hang_up(self) -> None:
        """Send some creates concurrently, and leave before their answers or just after them."""
        who = "hanging up"
        body = json.dumps({"task_spec": {"id": "only"}, "env_name": STEPS}).encode()
        requests = [
            request_bytes("POST", "/create", JSON | {"X-Session-ID": str(uuid.uuid4())}, body)
            for _ in range(self._random.randint(1, 6))
        ]
        await asyncio.gather(*(self._cut_off(request, self._random.uniform(0.0, 0.05)) for request in requests))
        self._ledger.episodes[who] += len(requests)
        await asyncio.sleep(3.0)

    # -- requests -------------------------------------------------------------------------------------------------

    async def _ask(self, who: str, request: bytes) -> Response:
        """Send one request to a random replica, on its own connection.

        Raises:
            Broken: There is no answer.
        """
        replica, since = self._replica(), time.monotonic()
        connection = None
        try:
            async with asyncio.timeout(ANSWER_S):
                connection = await connect(replica.address)
                return await connection.request(request)
        except TimeoutError:
            self._ledger.violate(f"{who}: no answer within {ANSWER_S:g} s to {request[:300]!r}")
            raise Broken from None
        except (OSError, ProtocolError) as error:
            raise self._broken(who, replica, since, error) from error
        finally:
            if connection is not None:
                connection.close()

    async def _cut_off(self, request: bytes, after_s: float) -> None:
        replica = self._replica()
        try:
            connection = await connect(replica.address)
        except OSError:
            return
        asking = asyncio.create_task(connection.request(request))
        await asyncio.wait({asking}, timeout=after_s)
        connection.close()
        await asyncio.wait({asking})
        if not asking.cancelled():
            asking.exception()  # marks the error as retrieved

    def _broken(self, who: str, replica: Replica, since: float, error: Exception) -> Broken:
        self._ledger.add_broken(f"{who} at {replica.name}", error, is_explained=replica.may_break(since))
        return Broken(who)

    def _replica(self) -> Replica:
        """Return a random replica that is up, like a load balancer."""
        up = [replica for replica in self._world.replicas if replica.is_up]
        return self._random.choice(up or self._world.replicas)

    def _length(self) -> int:
        return self._random.randint(4, 30)

    def _seconds(self) -> float:
        return LONG_S if self._random.random() < LONG_SHARE else 0.0

    async def _pause(self) -> None:
        await asyncio.sleep(self._random.uniform(*PAUSE_S))
