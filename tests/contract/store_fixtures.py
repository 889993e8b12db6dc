"""Fixtures of the store's contract; a module uses them with ``pytest_plugins = ["tests.contract.store_fixtures"]``.

Functions that tests import are in store_worlds, because pytest must be the first to import a plugin.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from gateway.core.ports.store import Store
from tests.contract.store_worlds import MemoryWorld, RedisServer, RedisWorld, World, needs_redis_server


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis that many tests share, each under its own prefix."""
    needs_redis_server()
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
async def store_world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """Each implementation in turn."""
    here: World = MemoryWorld() if request.param == "memory" else RedisWorld(request.getfixturevalue("redis_server"))
    yield here
    await here.aclose()


@pytest.fixture
async def store(store_world: World) -> Store:
    """A store of this world with the defaults."""
    return await store_world.open()


@pytest.fixture
async def redis_world(redis_server: RedisServer) -> AsyncIterator[RedisWorld]:
    """A world with Redis, for tests of several replicas."""
    here = RedisWorld(redis_server)
    yield here
    await here.aclose()
