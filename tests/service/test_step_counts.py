"""The cost of a step in counts, not seconds: store operations, requests to the worker, tasks, and Python calls.

A change that makes each step call the store or start a task fails here without a clock. The gateway is whole and real:
uvloop, uvicorn as it is configured, and a worker process. The clients run in separate threads, so that the counts of
the loop's thread belong to the gateway alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import inspect
import json
import shutil
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
import uvloop
from websockets.sync.client import connect

from gateway.app import Gateway
from gateway.content import load_content
from gateway.core.ports.store import Store
from gateway.server import HttpServer, configured, listen
from gateway.settings import Settings
from tests.deadlines import HANG_S
from tests.wire.gateways import short_folder

KEY = "a-key-of-alice"
STEPS = 200
WARM_UP = 50
ROUNDS = 3
SERVER = """
from envserver import Environment, StepResult, serve, tool

class Echo(Environment):
    name = "echo"

    async def reset(self, task, *, seed):
        return "say something"

    @tool(inline=True)
    async def say(self, text: str) -> StepResult:
        return StepResult(text)

serve(Echo)
"""
FILE = """
name = "echo"
image = "none/echo"
protocol = "ors"
isolation = "shared"
command = ["python3", "main.py"]

[pool]
slots = 8
min_workers = 1
max_workers = 1

[areal]
max_turns = 100000

[tasks]
directory = "{tasks}"
"""


@dataclass
class Counts:
    """Counts of the gateway while its client takes ``STEPS`` steps."""

    store: Counter[str] = field(default_factory=Counter)
    """Store operations of requests, without those of the gateway's loops."""
    upstream: int = 0
    tasks: Counter[str] = field(default_factory=Counter)
    """Started tasks by the name of their coroutine."""
    calls: int = 0
    """Number of called Python functions and resumed coroutines."""
    blocks: int = 0
    """Number of additional memory blocks in use."""


def _is_requests(task: asyncio.Task[Any]) -> bool:
    return "run_asgi" in str(task.get_coro())


class Meter:
    """Counts in the thread of the gateway's loop."""

    def __init__(self, gateway: Gateway) -> None:
        self.counts = Counts()
        self._is_on = False
        self._loops: set[asyncio.Task[Any]] = set()
        """Background tasks, which do not count. On a busy machine steps take longer, and these tasks run more often."""
        for name, _ in inspect.getmembers(Store, inspect.isfunction):
            if inspect.iscoroutinefunction(operation := getattr(gateway.store, name, None)):
                setattr(gateway.store, name, self._counting(name, cast(Any, operation)))
        self._written = gateway.log.flush
        """Writes what the step log holds, which is no part of a step."""
        send = gateway.transport.send

        async def counted(*args: Any, **kwargs: Any) -> Any:
            self.counts.upstream += self._is_on
            return await send(*args, **kwargs)

        gateway.transport.send = counted  # type: ignore[method-assign]  # counts, and does the same
        asyncio.get_running_loop().set_task_factory(cast(Any, self._task))

    async def during(self, work: Callable[[], Awaitable[None]]) -> Counts:
        """Count while *work* runs."""
        self.counts = Counts()
        self._loops = {task for task in asyncio.all_tasks() if not _is_requests(task)}
        await self._written()
        gc.collect()
        before = sys.getallocatedblocks()
        self._is_on = True
        sys.setprofile(self._profiled)
        try:
            await work()
        finally:
            sys.setprofile(None)
            self._is_on = False
        await self._written()
        gc.collect()
        self.counts.blocks = sys.getallocatedblocks() - before
        return self.counts

    def _profiled(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and asyncio.current_task() not in self._loops:
            self.counts.calls += 1

    def _counting(self, name: str, operation: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def counted(*args: Any, **kwargs: Any) -> Any:
            task = asyncio.current_task()
            if self._is_on and task is not None and _is_requests(task):
                self.counts.store[name] += 1
            return await operation(*args, **kwargs)

        return counted

    def _task(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **more: Any) -> asyncio.Task[Any]:
        if self._is_on and asyncio.current_task(loop) not in self._loops:
            self.counts.tasks[getattr(work, "__qualname__", "")] += 1
        return asyncio.Task(work, loop=loop, **more)


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[Meter, int]]:
    """Run a gateway, and yield its meter and its port."""
    place = folder / "catalog" / "echo"
    (place / "tasks").mkdir(parents=True)
    (place / "tasks" / "train.jsonl").write_text('{"id": "one", "question": "?"}\n')
    (place / "main.py").write_text(SERVER)
    (place / "environment.toml").write_text(FILE.format(tasks=place / "tasks"))
    settings = Settings(
        host="127.0.0.1",
        port=0,
        socket_dir=folder / "sockets",
        state_dir=folder / "state",
        catalog_dir=folder / "catalog",
        default_environment="echo",
        trainer_keys=f"alice:{KEY}",  # type: ignore[arg-type]  # as in a variable
    ).checked()
    content = await load_content(settings)
    listener = listen(settings.host, settings.port)
    port = listener.getsockname()[1]
    gateway = Gateway(settings, content, port=port)
    server = HttpServer(configured(gateway.app, end_s=settings.drain_s))
    meter = Meter(gateway)
    async with gateway.running():
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield meter, port
        finally:
            server.should_exit = True
            await running
            listener.close()


class Ors:
    """A client that calls a tool over a kept connection."""

    def __init__(self, port: int, accept: str) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_S)
        self._headers = {"X-Session-ID": "one", "X-API-Key": KEY, "Accept": accept, "Content-Type": "application/json"}
        self._post("/create", {"env_name": "echo", "split": "train", "index": 0})

    def step(self, number: int) -> None:
        assert f"said {number}" in self._post("/echo/call", {"name": "say", "input": {"text": f"said {number}"}})

    def close(self) -> None:
        self._http.close()

    def _post(self, path: str, body: object) -> str:
        self._http.request("POST", path, json.dumps(body), self._headers)
        answer = self._http.getresponse()
        text = answer.read().decode()
        assert answer.status == 200, text
        return text


class Areal(Ors):
    """A client that steps an AReaL episode over a kept connection. AReaL's own client keeps no connection."""

    def __init__(self, port: int) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_S)
        self._headers = {"X-API-Key": KEY, "Content-Type": "application/json"}
        begun = self._post("/areal/echo/api/episode/start", {"sample_id": 0, "config": {}})
        self._episode = json.loads(begun)["episode_id"]

    def step(self, number: int) -> None:
        action = {"type": "structured", "content": {"name": "say", "arguments": {"text": f"said {number}"}}}
        body = {"episode_id": self._episode, "action": action}
        assert f"said {number}" in self._post("/areal/echo/api/episode/step", body)


class OpenEnv:
    """A client that steps over one socket."""

    def __init__(self, port: int) -> None:
        self._stack = contextlib.ExitStack()
        url = f"ws://127.0.0.1:{port}/k/{KEY}/openenv/echo/ws"
        self._socket = self._stack.enter_context(connect(url, compression=None))
        self._ask({"type": "reset", "data": {}})

    def step(self, number: int) -> None:
        assert f"said {number}" in self._ask({"type": "step", "data": {"text": f"said {number}"}})

    def close(self) -> None:
        self._stack.close()

    def _ask(self, frame: object) -> str:
        self._socket.send(json.dumps(frame))
        text = str(self._socket.recv(timeout=HANG_S))
        assert json.loads(text)["type"] == "observation", text
        return text


async def counted(make: Callable[[int], Ors | OpenEnv], folder: Path) -> Counts:
    async with serving(folder) as (meter, port):
        client = await asyncio.to_thread(make, port)

        def steps(count: int) -> None:
            for number in range(count):
                client.step(number)

        await asyncio.to_thread(steps, WARM_UP)
        rounds = [await meter.during(lambda: asyncio.to_thread(steps, STEPS)) for _ in range(ROUNDS)]
        await asyncio.to_thread(client.close)
    # A leak of a step shows in every round. Objects of the loops and growing caches do not.
    return replace(rounds[-1], blocks=min(one.blocks for one in rounds))


REQUEST = "RequestResponseCycle.run_asgi"


@pytest.mark.parametrize(
    ("make", "began", "calls"),
    [
        pytest.param(lambda port: Ors(port, "application/json"), {REQUEST: STEPS}, 149, id="ORS, JSON"),
        pytest.param(lambda port: Ors(port, "text/event-stream"), {REQUEST: STEPS}, 160, id="ORS, event stream"),
        pytest.param(Areal, {REQUEST: STEPS}, 219, id="AReaL"),
        pytest.param(OpenEnv, {}, 187, id="OpenEnv"),
    ],
)
def test_a_step_costs_no_more_than_it_did(
    make: Callable[[int], Ors | OpenEnv], began: dict[str, int], calls: int
) -> None:
    """*calls* were counted with Python 3.11. The margin allows for another Python version or a new feature."""
    folder = short_folder()
    gc.freeze()  # keeps the objects of other tests out of the collections here
    try:
        found = uvloop.run(counted(make, folder))
    finally:
        gc.unfreeze()
        shutil.rmtree(folder)

    assert found.store == Counter(), "a step asks no store"
    assert found.upstream == STEPS, "and its worker once"
    loops = sum(found.tasks.values()) - sum(began.values())
    assert {name: found.tasks[name] for name in began} == began, "uvicorn begins a task for each request"
    assert loops < STEPS / 10, f"a step begins no task of its own: {found.tasks}"
    assert found.blocks < STEPS, "a step leaves nothing behind"
    assert found.calls / STEPS < calls * 1.2, found.calls / STEPS
