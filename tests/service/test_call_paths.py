"""The number of gateway modules that a request passes through. The limits are a ratchet: they may only go down.
(An opening gives its task a name and a seed, in two modules that had no part in it before.)

A reader that follows a request has to open each of these modules. A module counts if the request enters one of its
functions. A function that waits since before the request, such as the loop of an open socket, does not count.

Two kinds of modules are left out, because they are the same for all requests and a reader can follow a request without
them: the transport to trainer and worker (sockets, HTTP, JSON text), and the inside of the store. A Redis store does
the same work in scripts.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CoroutineType, FrameType
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect

import gateway
from tests.fakes.clock import Clock
from tests.fakes.workers import FakeWorker
from tests.service.openenv_world import Client
from tests.service.stack import IDLE_S, Replica, environment, stack, tasks
from tests.service.wire import call, create

ROOT = Path(gateway.__file__).parent
TRANSPORT = frozenset(
    (
        "server/http.py",
        "server/websocket.py",
        "frontends/asgi.py",
        "core/json_text.py",
        "core/addresses.py",
        "upstreams/transport.py",
        "upstreams/http1.py",
    )
)
STORE = frozenset(
    (
        "core/retry.py",
        "stores/limits.py",
        "stores/memory/owners.py",
        "stores/memory/queue.py",
        "stores/memory/slots.py",
        "stores/step_log/writer.py",
    )
)


@contextlib.contextmanager
def entered() -> Iterator[set[str]]:
    """Collect the modules of the gateway in which a function starts."""
    found: set[str] = set()
    waiting = set(_waiting())

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT) and frame not in waiting:
            found.add(str(path.relative_to(ROOT)))

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        found -= TRANSPORT | STORE


def _waiting() -> Iterator[FrameType]:
    """Yield the frames of all waiting coroutines. A profiler sees a call whenever such a coroutine resumes."""
    for task in asyncio.all_tasks():
        coroutine: Any = task.get_coro()
        while isinstance(coroutine, CoroutineType) and coroutine.cr_frame is not None:
            yield coroutine.cr_frame
            coroutine = coroutine.cr_await


@dataclass
class Warm:
    """A gateway with a ready worker."""

    clock: Clock
    worker: FakeWorker
    gateway: Replica
    client: httpx.AsyncClient


@contextlib.asynccontextmanager
async def warm() -> AsyncIterator[Warm]:
    """Run a gateway with a ready worker, but without its loops, so that only the request enters modules.

    Its time limits are long: on a busy machine a short one would add the modules of a failure.
    """
    splits = tasks(train=[{"id": "a", "question": "1+1"}, {"id": "b", "question": "2+2"}])
    clock = Clock()
    patient = environment(slots=8, min_workers=1, start_s=60.0, open_s=60.0, setup_s=60.0, close_s=60.0)
    async with stack(patient, clock=clock, tasks_math=splits) as built:
        first = built.first
        async with first.looping():
            await first.eventually_workers(1, state=None)
            async with first.serving() as client:
                assert (await create(client, "warm")).status_code == 200
        built.backend.only.counts_turns = True
        async with first.serving() as client:
            yield Warm(clock, built.backend.only, first, client)


async def ors_create(world: Warm) -> set[str]:
    with entered() as found:
        answer = await create(world.client)
    assert answer.status_code == 200
    return found


async def ors_call(world: Warm) -> set[str]:
    await create(world.client)
    with entered() as found:
        answer = await call(world.client, "go_on")  # the call that ends an episode enters further modules
    assert answer.status_code == 200
    return found


async def areal_step(world: Warm) -> set[str]:
    begun = await world.client.post("/areal/math/api/episode/start", json={"sample_id": 0})
    episode = begun.json()["episode_id"]
    step = {"episode_id": episode, "action": {"type": "structured", "content": {"tool": "go_on", "input": {}}}}
    with entered() as found:
        answer = await world.client.post("/areal/math/api/episode/step", json=step)
    assert answer.status_code == 200, answer.text
    return found


async def openenv_reset(world: Warm) -> set[str]:
    return (await _openenv(world.client))[0]


async def openenv_step(world: Warm) -> set[str]:
    return (await _openenv(world.client))[1]


async def _openenv(client: httpx.AsyncClient) -> tuple[set[str], set[str]]:
    url = str(client.base_url).replace("http", "ws", 1)
    async with connect(f"{url.rstrip(chr(47))}/openenv/math/ws", proxy=None) as connection:
        socket = Client(connection)
        with entered() as reset:
            assert (await socket.ask("reset", {"index": 0}))["type"] == "observation"
        with entered() as step:
            assert (await socket.step())["type"] == "observation"
    return reset, step


async def expiry(world: Warm) -> set[str]:
    await create(world.client)
    for session in world.worker.sessions.values():
        session.idle_s = IDLE_S + 1
    world.clock.advance(IDLE_S + 1)
    with entered() as found:
        await world.gateway.expiry.turn()
        await world.gateway.eventually_used(0)
    return found


Walk = Callable[[Warm], Awaitable[set[str]]]


@pytest.mark.parametrize(
    ("walk", "most"),
    [(ors_create, 16), (ors_call, 7), (areal_step, 11), (openenv_reset, 18), (openenv_step, 9), (expiry, 9)],
)
async def test_a_request_passes_through_few_modules(walk: Walk, most: int) -> None:
    async with warm() as world:
        found = await walk(world)

    assert len(found) <= most, "\n".join(sorted(found))
