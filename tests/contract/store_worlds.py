"""The worlds of the store's contract: a memory store with a movable clock, and a real Redis.

Redis' clock cannot be moved. The Redis world moves the past instead: `pass_time` makes every stored moment older.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest
import redis

from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.ports.store import Store
from gateway.core.session import CloseReason, Session, SessionRequest, SessionState
from gateway.core.worker import Worker, WorkerState
from gateway.stores.memory.sessions import MemoryStore
from gateway.stores.redis.sessions import RedisStore
from tests.fakes.clock import Clock
from tests.fakes.eventually import until_now
from tests.runner import logs

MATH = EnvironmentName("math")
CODING = EnvironmentName("coding")
TURNS = 10_000
"""Turns of the event loop within which an operation that waits for no time must finish."""

_leases = itertools.count(1)


class World(Protocol):
    """Operations of a contract test besides calls of the store."""

    async def open(
        self,
        *,
        replica: str = "a",
        queue_max: int = 10_000,
        closed_kept_s: float = 600.0,
        closing_s: float = 60.0,
        is_whole: bool = True,
    ) -> Store:
        """Return a started store, which the world closes. With *is_whole* there is nothing to rebuild in it."""
        ...

    def pass_time(self, seconds: float) -> None:
        """Advance the store's time."""
        ...

    async def aclose(self) -> None:
        """Close every store."""
        ...


class MemoryWorld:
    """One process: its store, and the clock of that store."""

    def __init__(self) -> None:
        self.clock = Clock()
        self._stores: list[MemoryStore] = []

    async def open(
        self,
        *,
        replica: str = "a",
        queue_max: int = 10_000,
        closed_kept_s: float = 600.0,
        closing_s: float = 60.0,
        is_whole: bool = True,
    ) -> MemoryStore:
        store = MemoryStore(
            clock=self.clock,
            queue_max=queue_max,
            closed_kept_s=closed_kept_s,
            closing_s=closing_s,
            is_whole=is_whole,
        )
        await store.start()
        self._stores.append(store)
        return store

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    async def aclose(self) -> None:
        for store in self._stores:
            await store.aclose()


class RedisServer:
    """A separate Redis on a Unix socket. It writes to disk only when a test calls `save`.

    With *keeps_all* it writes everything immediately, and a kill loses nothing.
    """

    def __init__(self, directory: Path, *, keeps_all: bool = False) -> None:
        self.socket = directory / "redis.sock"
        self._keeps_all = keeps_all
        self._directory = directory
        self._log = directory / "redis.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        """Start the server and wait until it accepts connections."""
        command = ["redis-server", "--port", "0", "--unixsocket", str(self.socket), "--dir", str(self._directory)]
        command += ["--save", "", "--appendonly", "yes" if self._keeps_all else "no", "--appendfsync", "always"]
        with self._log.open("ab") as log:
            logs.follow(self._log)
            began_at = log.tell()
            self._process = process = subprocess.Popen(command, stdout=log)
        until_now(
            lambda: process.poll() is not None or b"eady to accept connections" in self._log.read_bytes()[began_at:]
        )
        assert process.poll() is None, "redis-server ended before it took connections"

    def stop(self) -> None:
        """Kill the server, as a crash would: unsaved data are lost."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process = None

    def save(self) -> None:
        """Save the present state. A later start restores it and nothing newer."""
        with self.client() as client:
            client.save()

    def signal(self, number: int) -> None:
        """Send the server a signal: SIGSTOP suspends it, SIGCONT resumes it."""
        assert self._process is not None
        self._process.send_signal(number)

    def client(self) -> redis.Redis:
        """Return a plain client, which bypasses the store."""
        return redis.Redis(unix_socket_path=str(self.socket), decode_responses=True, protocol=2)


class RedisWorld:
    """Replicas that share one Redis under their own prefix."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.prefix = f"test-{uuid.uuid4().hex[:8]}"
        self.clock = Clock()
        self._stores: list[RedisStore] = []

    async def open(
        self,
        *,
        replica: str = "a",
        queue_max: int = 10_000,
        closed_kept_s: float = 600.0,
        closing_s: float = 60.0,
        is_whole: bool = True,
    ) -> RedisStore:
        store = RedisStore(
            url=self.server.url,
            prefix=self.prefix,
            replica=replica,
            queue_max=queue_max,
            closed_kept_s=closed_kept_s,
            closing_s=closing_s,
            clock=self.clock,
        )
        await store.start()
        self._stores.append(store)
        if is_whole:
            await store.rebuilt(fence=0)
        return store

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.shift(seconds)

    def shift(self, seconds: float) -> None:
        """Make every moment in Redis older by *seconds*, as if its clock had jumped forward."""
        ms = round(seconds * 1000)
        with self.server.client() as client:
            for key in self.keys(client):
                kind = key.split(":")[1]
                if kind in {"deadlines", "waits", "lapse"}:
                    for member in client.zrange(key, 0, -1):
                        client.zincrby(key, -ms, member)
                elif kind == "worker":
                    client.hincrby(key, "added_ms", -ms)
                    client.hincrby(key, "idle_ms", -ms)
                elif kind == "paced":
                    for clock, reading in client.hgetall(key).items():
                        caller_ms, now_ms = reading.split()
                        client.hset(key, clock, f"{caller_ms} {int(now_ms) - ms}")
                elif kind == "group" and client.hexists(key, "kept_ms"):
                    client.hincrby(key, "kept_ms", -ms)
                elif kind == "starts":
                    at_ms, left = client.get(key).split()
                    client.set(key, f"{int(at_ms) - ms} {left}", keepttl=True)
                elif kind == "round":
                    client.hincrby(key, "at_ms", -ms)
                elif kind == "breakers":
                    for environment, kept in client.hgetall(key).items():
                        until_ms, message = kept.split(" ", 1)
                        client.hset(key, environment, f"{int(until_ms) - ms} {message}")
                if (left_ms := client.pttl(key)) > 0:
                    # A time to live that is not positive deletes the key.
                    client.pexpire(key, left_ms - ms)

    def fall_silent(self, replica: str) -> None:
        """Set the last sign of *replica* to long ago, as if it had been killed then."""
        with self.server.client() as client:
            client.hincrby(f"{{{self.prefix}}}:replicas", replica, -6_000)
            run, since_ms = client.get(f"{{{self.prefix}}}:heard_run").split()
            client.set(f"{{{self.prefix}}}:heard_run", f"{run} {int(since_ms) - 6_000}")

    def keys(self, client: redis.Redis) -> list[str]:
        """Return all keys of this world."""
        return sorted(client.scan_iter(match=f"{{{self.prefix}}}:*", count=1000))

    async def aclose(self) -> None:
        for store in self._stores:
            await store.aclose()


def needs_redis_server() -> None:
    """Skip a test where there is no Redis. In CI fail instead, because a skip could stay unnoticed."""
    if shutil.which("redis-server") is not None:
        return
    if os.environ.get("CI") == "true":
        pytest.fail("redis-server is not installed: CI installs it, see CONTRIBUTING")
    pytest.skip("redis-server is not installed: the Redis store is not tried")


def opening(
    id: str = "s1",
    *,
    environment: EnvironmentName = MATH,
    idle_s: float = 300.0,
    setup_s: float = 60.0,
    name: str = "episode",
    task: str = "train/7",
    episode: str = "",
    policy: str = "step-7",
) -> SessionRequest:
    """Return a request for session *id*, under a new lease."""
    return SessionRequest(
        id=SessionId(id),
        name=name,
        owner=Owner("lab"),
        environment=environment,
        lease=f"lease-{next(_leases)}",
        fingerprint="f00d",
        idle_s=idle_s,
        setup_s=setup_s,
        task=task,
        episode=episode,
        policy=policy,
    )


def worker(
    id: str = "w1", *, environment: EnvironmentName = MATH, slots: int = 1, max_uses: int = 0, digest: str = "d1"
) -> Worker:
    """Return a worker in the state "starting"."""
    return Worker(id=WorkerId(id), environment=environment, digest=digest, slots=slots, max_uses=max_uses)


async def add_ready(
    store: Store, id: str = "w1", *, environment: EnvironmentName = MATH, slots: int = 1, max_uses: int = 0
) -> WorkerId:
    """Add a worker and make it ready."""
    made = worker(id, environment=environment, slots=slots, max_uses=max_uses)
    await store.add_worker(made)
    assert await store.worker_ready(made.id, f"unix:/run/{id}.sock")
    return made.id


async def waiting(store: Store, environment: EnvironmentName = MATH) -> int:
    """Return the number of claims that wait for *environment*."""
    load = await store.load()
    return load[environment].waiting if environment in load else 0


async def queued(store: Store, wish: SessionRequest, *, wait_s: float = 60.0) -> asyncio.Task[Session]:
    """Start a claim, and return it once it has its place in the queue."""
    before = await waiting(store, wish.environment)
    task = asyncio.create_task(store.claim(wish, wait_s=wait_s))
    for _ in range(TURNS):
        if await waiting(store, wish.environment) > before:
            return task
        await asyncio.sleep(0)
    raise AssertionError("the claim never joined the queue")


async def opened(store: Store, wish: SessionRequest) -> Session:
    """Claim a free slot and open its session."""
    await store.claim(wish, wait_s=0)
    return await store.opened(wish.id, wish.lease)


async def end(store: Store, session: Session, reason: CloseReason = CloseReason.DELETED) -> None:
    """Close a session completely."""
    assert await store.begin_close(session.id, reason) is not None
    assert await store.release(session.id, session.lease)


async def ended_late(store: Store, limit: int) -> list[Session]:
    """End sessions as a control loop does if no worker reports a call: late open ones, then due ones."""
    expired = await store.expire([session.id for session in await store.late(limit)])
    return expired + await store.due(limit - len(expired))


def running(id: str = "w1", *, slots: int = 1, max_uses: int = 0) -> Worker:
    """Return a running worker, as its labels describe it."""
    made = worker(id, slots=slots, max_uses=max_uses)
    return replace(made, address=f"unix:/run/{id}.sock", state=WorkerState.READY)


def served(wish: SessionRequest, id: str = "w1", *, handle: str = "") -> Session:
    """Return a session as its worker, or the replica that serves it, knows it."""
    return Session(
        id=wish.id,
        name=wish.name,
        owner=wish.owner,
        environment=wish.environment,
        lease=wish.lease,
        fingerprint=wish.fingerprint,
        idle_s=wish.idle_s,
        worker=WorkerId(id),
        address=f"unix:/run/{id}.sock",
        state=SessionState.OPEN,
        task=wish.task,
        policy=wish.policy,
        handle=handle,
    )


async def held(store: Store) -> dict[str, int]:
    """Return the number of held slots of each worker."""
    return {entry.worker.id: entry.used for load in (await store.load()).values() for entry in load.workers}
