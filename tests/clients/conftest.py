"""Fixtures of the client package's tests: the wire tests' servers, and a gateway with ``math`` and ``game``."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from env_gateway_client import AsyncGateway, Gateway, Timeouts

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually
from tests.wire import gateways
from tests.wire.targets import Folder, Target, World, gateway_target

PROJECT = Path(__file__).resolve().parents[2]
QUICK = Timeouts(request_s=HANG_S, open_s=HANG_S, call_s=HANG_S, close_s=HANG_S, reconnect_s=HANG_S)
"""Limits after which a test that hangs fails."""


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    world = World()
    try:
        yield world
    finally:
        world.close()


@pytest.fixture
async def target(request: pytest.FixtureRequest, world: World) -> AsyncIterator[Target]:
    """A running server, named by ``on``. On a gateway, the test must leave no session behind."""
    target = world.named(request.param)
    yield target
    if target.gateway is not None:
        await eventually(lambda: nothing_is_left(target))


@pytest.fixture(scope="session")
def _bundled() -> Iterator[Target]:
    folder = gateways.short_folder()
    gateway = gateways.Gateway(
        folder,
        {
            "GATEWAY_CATALOG_DIR": str(PROJECT / "env_images"),
            "GATEWAY_ENVIRONMENTS": "math,game",
            "GATEWAY_DEFAULT_ENVIRONMENT": "math",
        },
    )
    gateway.start()
    try:
        yield gateway_target("bundled", gateway)
    finally:
        gateway.stop()


@pytest.fixture
async def bundled(_bundled: Target) -> AsyncIterator[Target]:
    """A gateway with the project's own environments. The test must leave no session behind."""
    yield _bundled
    await eventually(lambda: nothing_is_left(_bundled))


async def nothing_is_left(target: Target) -> None:
    """Assert, for `eventually`, that the gateway holds no session."""
    assert target.gateway is not None
    assert await target.gateway.sessions() == []


@pytest.fixture
def folder(target: Target, tmp_path: Path) -> Folder:
    """A folder that the test shares with the workers."""
    return target.folder(tmp_path)


@pytest.fixture
async def client(target: Target) -> AsyncIterator[AsyncGateway]:
    """An async client of the target."""
    async with AsyncGateway(target.url, target.key or "", timeouts=QUICK) as client:
        yield client


@pytest.fixture
def math(bundled: Target) -> Iterator[Gateway]:
    """A blocking client of the gateway with ``math`` and ``game``."""
    with Gateway(bundled.url, bundled.key or "", timeouts=QUICK) as client:
        yield client
