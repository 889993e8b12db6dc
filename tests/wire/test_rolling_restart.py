"""Replicas are replaced one by one under load: no step fails, and none runs twice.

Two gateways share a Redis and an engine, behind a small load balancer. The balancer queries each for ``/readyz`` and
sends new connections to the ready gateways. Steps are not retried here, except where OpenEnv's close code 1001 allows
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually, until
from tests.wire.balancer import Balancer
from tests.wire.gateways import TRAINER_KEYS, Gateway
from tests.wire.raw import new_sid, parse
from tests.wire.stack import Stack
from tests.wire.targets import Folder, Roots, token

pytestmark = [pytest.mark.wire, pytest.mark.docker, pytest.mark.redis]

KEY: Final = {"X-API-Key": TRAINER_KEYS["alice"]}
NOTICE_S: Final = 5.0
"""Seconds of notice before a gateway stops listening: many times the balancer's delay, also on a busy machine."""
STEPS: Final = 8
"""The steps of one episode; then another episode starts."""
PAUSE_S: Final = 0.1
"""Seconds between two steps of a client. More steps would show nothing more and take CPU time from the other clients.
"""


@dataclass(slots=True)
class Load:
    """The state of the load, and the results of its clients."""

    folder: Folder
    stopping: bool = False
    steps: dict[str, int] = field(default_factory=dict)
    """The number of answered steps for each client."""
    tokens: list[str] = field(default_factory=list)
    """The tokens that ORS steps recorded in their worker."""
    moved: int = 0
    """The number of sockets that were closed with 1001."""

    def stepped(self, client: str) -> None:
        self.steps[client] = self.steps.get(client, 0) + 1

    async def goes_on(self) -> None:
        """Wait until every client has made `STEPS` more steps."""
        before = dict(self.steps)
        await until(lambda: all(self.steps[name] >= count + STEPS for name, count in before.items()))


async def ors(load: Load, name: str, url: str) -> None:
    """Play episodes over persistent connections."""
    async with httpx.AsyncClient(base_url=url, headers=KEY, verify=False, trust_env=False, timeout=HANG_S) as http:
        while not load.stopping:
            sid = {"X-Session-ID": new_sid()}
            body = {"env_name": "probe", "task_spec": {"folder": load.folder.inside}}
            created = await http.post("/create", json=body, headers=sid)
            assert created.status_code == 200, created.text
            for number in range(STEPS):
                noted = token()
                load.tokens.append(noted)
                answer = await http.post("/probe/call", json={"name": "count", "input": {"token": noted}}, headers=sid)
                assert answer.status_code == 200, answer.text
                assert parse(answer.text).text == "1"
                if number % 4 == 0:  # this call may still run when its replica must stop
                    answer = await http.post(
                        "/probe/call", json={"name": "sleep", "input": {"seconds": 0.5}}, headers=sid
                    )
                    assert parse(answer.text).text == "slept"
                load.stepped(name)
                await asyncio.sleep(PAUSE_S)
            deleted = await http.post("/delete", headers=sid)
            assert deleted.status_code == 200, deleted.text


async def areal(load: Load, name: str, url: str) -> None:
    """Play episodes with one connection for each request."""

    async def ask(path: str, **body: Any) -> Any:
        async with httpx.AsyncClient(base_url=url, headers=KEY, verify=False, trust_env=False, timeout=HANG_S) as http:
            answer = await http.post(f"/areal/counter/api/episode/{path}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    while not load.stopping:
        begun = await ask("start", sample_id=0, config={})
        value = _number(begun["observation"]["content"])
        for _ in range(STEPS):
            action = {"type": "structured", "content": {"name": "add", "arguments": {"n": 1}}}
            reply = await ask("step", episode_id=begun["episode_id"], action=action)
            value += 1
            assert reply["observation"]["content"] == str(value)
            load.stepped(name)
            await asyncio.sleep(PAUSE_S)
        await ask("cancel", episode_id=begun["episode_id"])


async def openenv(load: Load, name: str, url: str) -> None:
    """Play one session over successive sockets: after a close with 1001 the client opens a new socket elsewhere."""
    async with httpx.AsyncClient(base_url=url, headers=KEY, verify=False, trust_env=False, timeout=HANG_S) as http:
        body = {"jsonrpc": "2.0", "method": "openenv/session/create", "id": 1}
        id = (await http.post("/openenv/counter/mcp", json=body)).json()["result"]["session_id"]
    address = f"{url.replace('http', 'ws')}/openenv/counter/ws?session_id={id}"
    requests = _openenv_requests(load, name)
    request: str | None = next(requests)
    while request is not None:
        async with connect(address, proxy=None, additional_headers=KEY) as socket:
            try:
                while request is not None:
                    await socket.send(request)
                    reply = json.loads(await socket.recv())
                    request = requests.send(reply)
                    await asyncio.sleep(PAUSE_S)
            except ConnectionClosed as closed:
                if closed.rcvd is None or closed.rcvd.code != 1001:
                    raise
                load.moved += 1  # a request without a reply was not started: the client sends it again


def _openenv_requests(load: Load, name: str) -> Generator[str | None, Any, None]:
    """Yield a session's requests. Each receives the reply to the request before it; None ends the session."""
    while not load.stopping:
        reply = yield json.dumps({"type": "reset", "data": {"split": "train", "index": 0}})
        assert reply["type"] == "observation", reply
        value = _number(reply["data"]["observation"]["text"])
        for _ in range(STEPS):
            action = {"type": "call_tool", "tool_name": "add", "arguments": {"n": 1}}
            reply = yield json.dumps({"type": "step", "data": action})
            assert reply["type"] == "observation", reply
            value += 1
            assert reply["data"]["observation"]["result"]["data"] == str(value), reply
            load.stepped(name)
    yield None


def _number(text: str) -> int:
    return int("".join(character for character in text if character.isdigit()))


async def leaves(gateway: Gateway, balancer: Balancer) -> None:
    """Stop a gateway, and assert that it reports unready before it closes its listener, and that it exits with 0."""
    ending = asyncio.ensure_future(asyncio.to_thread(gateway.stop))
    try:
        async with httpx.AsyncClient(base_url=gateway.url, verify=False, trust_env=False, timeout=HANG_S) as http:

            async def unready() -> None:
                answer = await http.get("/readyz")
                assert (answer.status_code, answer.headers.get("connection")) == (503, "close")

            await eventually(unready)
            await until(lambda: gateway not in balancer.ready)
            late = await http.get("/healthz")  # a new connection, which the balancer no longer sends
            assert (late.status_code, late.headers.get("connection")) == (200, "close")
    finally:
        status = await ending
    assert status == 0
    balancer.gateways.remove(gateway)


@pytest.fixture
def stack() -> Iterator[Stack]:
    stack = Stack()
    try:
        stack.containers.build_images()
        stack.redis.start()
        yield stack
    finally:
        stack.close()


@contextlib.contextmanager
def gateways(stack: Stack, *names: str) -> Iterator[list[Gateway]]:
    """Create gateways on one store and engine, without starting them."""
    shared = {"GATEWAY_STATE_DIR": str(stack.folder / "state"), "GATEWAY_DRAIN_NOTICE_S": str(NOTICE_S)}
    made = []
    for name in names:
        folder = stack.folder / name
        folder.mkdir()
        made.append(Gateway(folder, stack.settings() | shared))
    try:
        yield made
    finally:
        for one in made:
            one.stop()


CLIENTS: Final[dict[str, Callable[[Load, str, str], Coroutine[Any, Any, None]]]] = {
    "ors-1": ors,
    "ors-2": ors,
    "areal-1": areal,
    "areal-2": areal,
    "openenv-1": openenv,
    "openenv-2": openenv,
}


async def test_replicas_are_replaced_one_by_one_and_no_step_fails_or_runs_twice(stack: Stack) -> None:
    with gateways(stack, "a", "b", "c") as (first, second, third):
        for gateway in (first, second):
            await asyncio.to_thread(gateway.start)
        load = Load(Folder("/run/envserver", Roots(stack.gateway.socket_dir, per_worker=True)))
        load.steps = dict.fromkeys(CLIENTS, 0)
        async with Balancer().running() as balancer:
            balancer.gateways += [first, second]
            await until(lambda: len(balancer.ready) == 2)
            clients = [asyncio.ensure_future(play(load, name, balancer.url)) for name, play in CLIENTS.items()]
            try:
                async with _unless_one_fails(clients):
                    await load.goes_on()
                    await leaves(first, balancer)
                    await load.goes_on()
                    await asyncio.to_thread(third.start)
                    balancer.gateways.append(third)
                    await until(lambda: third in balancer.ready)
                    await leaves(second, balancer)
                    await load.goes_on()
                    load.stopping = True
                    await asyncio.wait(clients, timeout=HANG_S)
            finally:
                for client in clients:
                    client.cancel()
                ends = await asyncio.gather(*clients, return_exceptions=True)

            assert ends == [None] * len(clients)
            assert balancer.refused == 0
            assert {load.folder.runs(noted) for noted in load.tokens} == {1}
            assert load.moved >= 2, "no socket was ever moved"
            assert third.pid in balancer.taken
        for gateway in (first, second, third):
            assert "\nTraceback" not in gateway.log, gateway.log[-4000:]


@contextlib.asynccontextmanager
async def _unless_one_fails(clients: list[asyncio.Task[None]]) -> AsyncIterator[None]:
    """Cancel the block as soon as a client fails, and raise an error with the client's failure."""
    task = asyncio.current_task()
    assert task is not None
    failed: list[BaseException] = []

    def on_end(client: asyncio.Task[None]) -> None:
        error = None if client.cancelled() else client.exception()
        if error is not None:
            failed.append(error)
            task.cancel()

    for client in clients:
        client.add_done_callback(on_end)
    try:
        yield
    except asyncio.CancelledError:
        if not failed:
            raise
        task.uncancel()
        raise AssertionError(f"a client failed: {failed[0]!r}") from failed[0]
    finally:
        for client in clients:
            client.remove_done_callback(on_end)
