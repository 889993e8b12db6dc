"""A gateway in front of a third-party image that a fake plays in memory, with every frontend on one address."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
from websockets.asyncio.client import connect

from gateway.core.environment import Areal, Environment, Server, ServerProtocol, UpstreamKind
from tests.fakes.upstreams import CounterImage
from tests.service.openenv_world import Client
from tests.service.stack import Replica, Stack, environment, running

TRAIN = [{"n": 0, "target": 1}, {"n": 1, "target": 2}, {"n": 2, "target": 3}]
TEST = [{"n": 3, "target": 2, "rate_limit": "whatever the image means by it"}]


def image(protocol: ServerProtocol, name: str = "image", **policy: Any) -> Environment:
    """Return a third-party environment. *policy* holds keywords of `environment` and fields of `Environment`."""
    own = {key: policy.pop(key) for key in ("server", "resets", "openenv", "areal") if key in policy}
    ours = environment(name, **{"slots": 1, "max_workers": 1, **policy})
    # As `gateway.catalog.toml` reads a file.
    usual: dict[str, Any] = {"server": Server(port=8000), "areal": Areal(max_turns=None)}
    return replace(ours, protocol=protocol, tasks=None, **(usual | own))


@dataclass(slots=True)
class Foreign:
    """One gateway with one third-party image."""

    stack: Stack
    gateway: Replica
    http: httpx.AsyncClient
    image: CounterImage

    @contextlib.asynccontextmanager
    async def client(self, path: str = "ws", *, name: str = "image") -> AsyncIterator[Client]:
        """Open an OpenEnv client's socket."""
        url = str(self.http.base_url).replace("http", "ws").rstrip("/")
        async with connect(f"{url}/openenv/{name}/{path}", proxy=None) as connection:
            yield Client(connection)

    async def register(self, **task: Any) -> None:
        """Add a task at run time."""
        checked = self.gateway.runtime_tasks.check([("task", task)], environment="image")
        await self.gateway.runtime_tasks.register(checked)

    async def ors(self, operation: str, **body: Any) -> httpx.Response:
        """Query the tasks at the ORS frontend."""
        if operation == "splits":
            return await self.http.get("/image/splits")
        return await self.http.post(f"/image/{operation}", json=body)

    async def start(self, sample: str | int, **config: Any) -> httpx.Response:
        """Start an episode at the AReaL frontend."""
        return await self.http.post("/areal/image/api/episode/start", json={"sample_id": sample, "config": config})


@contextlib.asynccontextmanager
async def foreign(
    environment: Environment, image: CounterImage | None = None, *others: Environment
) -> AsyncIterator[Foreign]:
    """Serve *environment* from *image*, next to the gateway's own environments *others*."""
    image = image or CounterImage({"train": TRAIN, "test": TEST})
    upstreams = {UpstreamKind(environment.protocol.value): image}
    async with running(environment, *others, tasks_image={}, upstreams=upstreams) as (stack, gateway, http):
        yield Foreign(stack, gateway, http, image)
