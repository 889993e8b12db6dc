"""The reason of a lost episode is one word, the same in every protocol and in the metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from websockets.asyncio.client import ClientConnection, connect

from gateway.core.environment import Areal, Environment, OpenEnv
from gateway.core.session import CloseReason
from gateway.core.worker import WorkerState
from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually, until
from tests.fakes.workers import FakeWorker, Start
from tests.service.stack import OWNER, Replica, Stack, environment, running
from tests.service.wire import events

LATE_S = 0.4


@dataclass(frozen=True)
class Told:
    """The error that a client received."""

    status: int | str
    """The HTTP status, or the code of a frame or of an error object."""
    reason: str | None
    text: str
    again_s: int | None = None
    """Seconds after which the client may retry."""


class Player:
    """A client of one frontend. ``quiet`` names the tool that waits at the worker's gate."""

    quiet = "quiet"

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    @contextlib.asynccontextmanager
    async def there(self) -> AsyncIterator[Player]:
        """Yield this client while its connection is open."""
        yield self

    async def begin(self) -> Told | None:
        """Start an episode. Return the error, or None if it started."""
        raise NotImplementedError

    async def act(self, tool: str) -> Told | None:
        """Call *tool*. Return the error, or None if the call succeeded."""
        raise NotImplementedError


def _told(answer: httpx.Response, text: str = "detail") -> Told | None:
    if answer.status_code == 200:
        return None
    body = answer.json()
    again = answer.headers.get("retry-after")
    return Told(answer.status_code, body.get("reason"), body[text], None if again is None else int(again))


class Ors(Player):
    async def begin(self) -> Told | None:
        return _told(await self.http.post("/create", json={"env_name": "math", "task_spec": {}}))

    async def act(self, tool: str) -> Told | None:
        answer = await self.http.post("/math/call", json={"name": tool, "input": {}})
        if answer.status_code != 200:
            return _told(answer)
        name, data = events(answer.text)[-1]
        return Told(200, data.partition(": ")[0], data) if name == "error" else None


class OrsStream(Ors):
    """An ORS client whose calls wait after the response's headers were sent."""

    quiet = "gate"


class ArealPlayer(Player):
    episode = ""

    async def begin(self) -> Told | None:
        answer = await self.http.post("/areal/math/api/episode/start", json={"sample_id": 0, "config": {}})
        self.episode = answer.json().get("episode_id", "")
        return _told(answer)

    async def act(self, tool: str) -> Told | None:
        body = {"episode_id": self.episode, "action": {"type": "text", "content": tool}}
        return _told(await self.http.post("/areal/math/api/episode/step", json=body))


class OpenEnvHttp(Player):
    async def begin(self) -> Told | None:
        return _told(await self.http.post("/openenv/math/reset", json={}))

    async def act(self, tool: str) -> Told | None:
        return _told(await self.http.post("/openenv/math/step", json={"action": {"tool": tool}}))


class OpenEnvRpc(OpenEnvHttp):
    async def act(self, tool: str) -> Told | None:
        params = {"session_id": self.http.headers["X-Session-ID"], "name": tool, "arguments": {}}
        body = {"jsonrpc": "2.0", "method": "tools/call", "params": params, "id": 1}
        reply = (await self.http.post("/openenv/math/mcp", json=body)).json()
        if "error" not in reply:
            return None
        error = reply["error"]
        return Told(error["code"], (error["data"] or {}).get("reason"), error["message"])


class OpenEnvSocket(Player):
    connection: ClientConnection

    @contextlib.asynccontextmanager
    async def there(self) -> AsyncIterator[Player]:
        base = str(self.http.base_url).replace("http", "ws").rstrip("/")
        async with connect(f"{base}/openenv/math/ws", proxy=None) as self.connection:
            yield self

    async def begin(self) -> Told | None:
        return await self._ask({"type": "reset", "data": {}})

    async def act(self, tool: str) -> Told | None:
        return await self._ask({"type": "step", "data": {"tool": tool}})

    async def _ask(self, frame: dict[str, Any]) -> Told | None:
        await self.connection.send(json.dumps(frame))
        reply = json.loads(await self.connection.recv())
        if reply["type"] != "error":
            return None
        data = reply["data"]
        return Told(data["code"], data.get("reason"), data["message"], data.get("retry_after_s"))


FRONTS: dict[str, Callable[[httpx.AsyncClient], Player]] = {
    "ors": Ors,
    "ors-stream": OrsStream,
    "areal": ArealPlayer,
    "openenv-socket": OpenEnvSocket,
    "openenv-http": OpenEnvHttp,
    "openenv-rpc": OpenEnvRpc,
}


def impatient(**policy: Any) -> Environment:
    """Return an environment whose calls have short deadlines."""
    slow = environment(call_s=LATE_S, areal=Areal(step_s=LATE_S), **policy)
    return replace(slow, openenv=OpenEnv(step_s=LATE_S))


@contextlib.asynccontextmanager
async def playing(front: str, *environments: Environment) -> AsyncIterator[tuple[Stack, Replica, Player]]:
    """Run a gateway with all frontends, and yield a client of *front*."""
    async with running(*environments) as (stack, gateway, http), FRONTS[front](http).there() as player:
        yield stack, gateway, player


async def in_flight(player: Player, stack: Stack) -> tuple[asyncio.Task[Told | None], FakeWorker]:
    """Start an episode, and a call in it that waits in the worker."""
    assert await player.begin() is None
    worker = stack.backend.only
    call = asyncio.ensure_future(player.act(player.quiet))
    await until(lambda: worker.waiting == 1)
    return call, worker


async def counted(gateway: Replica, metric: str, **labels: str) -> None:
    """Wait until *metric* is 1 for these labels."""

    async def check() -> None:
        families = text_string_to_metric_families(gateway.metrics.exposition().decode())
        samples = [sample for family in families for sample in family.samples if sample.name == f"gateway_{metric}"]
        wanted = {"environment": "math", **labels}
        found = {tuple(sample.labels.items()): sample.value for sample in samples}
        assert [sample.value for sample in samples if sample.labels == wanted] == [1], found

    await eventually(check)


def of(front: str, **statuses: Any) -> Any:
    """Return the entry of *statuses* for *front*, by its name or by the first word of its name."""
    name = front.replace("-", "_")
    return statuses[name] if name in statuses else statuses[name.partition("_")[0]]


@pytest.mark.parametrize("reason", [CloseReason.WORKER_LOST, CloseReason.OUT_OF_MEMORY])
@pytest.mark.parametrize("front", FRONTS)
async def test_a_worker_that_dies_in_a_call_is_reported_with_its_reason_in_that_call_and_the_next(
    front: str, reason: CloseReason
) -> None:
    async with playing(front) as (stack, gateway, player):
        call, worker = await in_flight(player, stack)

        await worker.die(reason=reason)
        during, after = await call, await player.act("echo")

        assert during is not None
        assert after is not None
        assert (during.reason, after.reason) == (reason.value, reason.value)
        assert reason.value in during.text or front.startswith(("areal", "openenv"))
        assert during.status == of(
            front, ors=410, ors_stream=200, areal=500, openenv_socket="SESSION_ERROR", openenv_http=410, openenv=-32603
        )
        assert after.status == of(
            front, ors=410, areal=404, openenv_socket="SESSION_ERROR", openenv_http=410, openenv=-32603
        )
        assert after.reason == reason.value
        assert len(worker.ran) == 1
        await counted(gateway, "calls_total", outcome=reason.value)
        await counted(gateway, "sessions_closed_total", reason=reason.value)
        await counted(gateway, "workers_lost_total", reason=reason.value)


# Before its headers only the limit of the worker's silence, a minute, bounds an ORS call.
@pytest.mark.parametrize("front", [name for name in FRONTS if name != "ors"])
async def test_a_call_that_takes_too_long_is_a_timeout(front: str) -> None:
    async with playing(front, impatient()) as (stack, gateway, player):
        call, worker = await in_flight(player, stack)

        late = await call

        assert late is not None
        assert late.reason == "timeout"
        assert late.status == of(
            front,
            ors=410,
            ors_stream=200,
            areal=500,
            openenv_socket="EXECUTION_ERROR",
            openenv_http=504,
            openenv=-32603,
        )
        assert len(worker.ran) == 1
        if not front.startswith("ors"):  # an ORS session stays open: its trainer may fetch the outcome by its id
            after = await player.act("echo")
            assert after is not None
            assert after.reason == "timeout"
            await counted(gateway, "sessions_closed_total", reason="timeout")
            await counted(gateway, "calls_total", outcome="timeout")


@pytest.mark.parametrize("front", [name for name in FRONTS if not name.startswith("ors")])
async def test_a_session_that_breaks_in_its_worker_has_another_reason_than_a_lost_worker(front: str) -> None:
    async with playing(front) as (_, gateway, player):
        assert await player.begin() is None

        during, after = await player.act("break"), await player.act("echo")

        assert during is not None
        assert after is not None
        assert (during.reason, after.reason) == ("session_failed", "session_failed")
        await counted(gateway, "sessions_closed_total", reason="session_failed")
        await counted(gateway, "calls_total", outcome="session_failed")


@pytest.mark.parametrize(
    "reason", [CloseReason.EXPIRED, CloseReason.OPERATOR, CloseReason.TIMEOUT, CloseReason.SESSION_FAILED]
)
@pytest.mark.parametrize("front", FRONTS)
async def test_the_next_request_after_the_end_of_a_session_gets_the_reason(front: str, reason: CloseReason) -> None:
    async with playing(front) as (_, gateway, player):
        assert await player.begin() is None
        [session] = await gateway.store.sessions()

        await gateway.sessions.end(OWNER, session.name, reason, wait_s=5)
        after = await player.act("echo")

        assert after is not None
        assert after.reason == reason.value
        assert after.status == of(
            front, ors=410, areal=404, openenv_socket="SESSION_ERROR", openenv_http=410, openenv=-32603
        )


@pytest.mark.parametrize("front", FRONTS)
async def test_failed_worker_starts_are_reported_with_the_end_of_the_log_and_a_retry_time(front: str) -> None:
    async with playing(front) as (stack, gateway, player):
        stack.backend.starts[gateway.catalog.default.name] = Start.DIES

        refused = await player.begin()

        assert refused is not None
        assert refused.reason == "start_failed"
        assert "the last words of math" in refused.text
        assert refused.again_s is not None
        assert 1 <= refused.again_s <= 600
        assert refused.status == of(front, ors=503, areal=500, openenv_socket="FACTORY_ERROR", openenv=503)
        await counted(gateway, "sessions_refused_total", code="start_failed")
        await counted(gateway, "worker_starts_total", outcome="failed")


async def test_a_start_that_is_never_ready_is_counted_as_a_timeout() -> None:
    async with playing("ors", environment(start_s=0.3)) as (stack, gateway, player):
        stack.backend.starts[gateway.catalog.default.name] = Start.NEVER_READY

        refused = await player.begin()

        assert refused is not None
        assert refused.reason == "start_failed"
        await counted(gateway, "worker_starts_total", outcome="timeout")


@pytest.mark.parametrize("front", FRONTS)
async def test_a_full_environment_returns_a_retry_time(front: str) -> None:
    async with playing(front, environment(slots=1, min_workers=1, max_workers=1, open_s=0.2)) as (_, gateway, player):
        await gateway.eventually_workers(1, state=WorkerState.READY)
        await gateway.queries.tools(gateway.catalog.default)
        held = await player.http.post(
            "/create", json={"env_name": "math", "task_spec": {}}, headers={"X-Session-ID": "holder"}
        )
        assert held.status_code == 200

        refused = await player.begin()

        assert refused is not None
        assert refused.again_s is not None
        assert 1 <= refused.again_s <= 600
        assert refused.status == of(front, ors=429, areal=503, openenv_socket="CAPACITY_REACHED", openenv=503)
        await counted(gateway, "claims_total", outcome="refused")


@pytest.mark.parametrize("front", FRONTS)
async def test_the_worker_knows_how_long_the_gateway_waits_for_a_step(front: str) -> None:
    slow = replace(environment(call_s=7000.0, areal=Areal(step_s=5000.0)), openenv=OpenEnv(step_s=6000.0))
    async with playing(front, slow) as (stack, _, player):
        assert await player.begin() is None
        assert await player.act("go_on") is None

        (seconds,) = (
            float(request.headers["x-step-seconds"])
            for request in stack.backend.only.requests
            if request.target.endswith("/call")
        )
        limit_s = of(front, ors=7000.0, areal=5000.0, openenv=6000.0)
        assert limit_s - HANG_S < seconds <= limit_s
