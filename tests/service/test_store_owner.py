"""Gateways with different secrets do not see each other's workers, so a store accepts only one of them."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from gateway import adapters
from gateway.app import Gateway
from gateway.catalog.catalog import Catalog
from gateway.content import Content
from gateway.core.errors import ConfigError
from gateway.settings import Settings
from gateway.tasks.registry import TaskRegistry
from tests.contract.store_worlds import RedisWorld
from tests.deadlines import HANG_S
from tests.fakes.workers import FakeBackend
from tests.service.stack import TASKS, environment
from tests.service.wire import call, create, result

pytest_plugins = ["tests.contract.store_fixtures"]
pytestmark = pytest.mark.redis


@pytest.fixture
def folder() -> Iterator[Path]:
    """Make a folder with a short name: the path of a Unix socket in it must fit into 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="gw-") as name:
        yield Path(name)


@pytest.fixture
async def backend(folder: Path) -> AsyncIterator[FakeBackend]:
    made = FakeBackend(folder)
    yield made
    await made.aclose()


def gateway(world: RedisWorld, backend: FakeBackend, *, secret: str) -> Gateway:
    """Return a gateway on the store of *world*. It sees only the workers of *backend*, as with a secret of its own."""
    settings = Settings(
        store=world.server.url,
        store_prefix=world.prefix,
        backend="docker",
        secret=secret,  # type: ignore[arg-type]  # as in a variable
    )
    kind = environment()
    content = Content(Catalog([kind]), TaskRegistry({kind.name: TASKS}))
    return Gateway(settings, content, backend=backend)


async def test_a_gateway_with_another_secret_is_refused_and_the_sessions_of_the_first_live_on(
    redis_world: RedisWorld, backend: FakeBackend, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "OWNER_WAIT_S", 0.0)
    first = gateway(redis_world, backend, secret="one")
    second = gateway(redis_world, FakeBackend(folder), secret="another")
    transport = httpx.ASGITransport(app=first.app)
    async with (
        first.running(),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=HANG_S) as client,
    ):
        await create(client)

        with pytest.raises(ConfigError, match=f"GATEWAY_STORE_PREFIX={redis_world.prefix} is in use.*GATEWAY_SECRET"):
            async with second.running():
                pass

        assert result(await call(client))["ok"]
        assert backend.stopped == []
