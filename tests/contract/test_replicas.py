"""The addresses at which replicas find each other, on a real Redis."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from gateway.core.errors import StoreUnavailable
from gateway.stores.redis import replicas as module
from gateway.stores.redis.replicas import RedisReplicas
from tests.contract.store_worlds import RedisServer
from tests.fakes.eventually import eventually

pytest_plugins = ["tests.contract.store_fixtures"]
pytestmark = pytest.mark.redis


async def test_replicas_know_each_other_until_they_end(redis_server: RedisServer) -> None:
    prefix = uuid.uuid4().hex
    first, second = RedisReplicas(redis_server.url, prefix=prefix), RedisReplicas(redis_server.url, prefix=prefix)
    other = RedisReplicas(redis_server.url, prefix=uuid.uuid4().hex)
    await first.announce("http://one")
    announcing = asyncio.ensure_future(second.run("http://two"))

    async def both_are_known() -> None:
        assert await first.live() == ["http://one", "http://two"]

    await eventually(both_are_known)
    assert await other.live() == []
    announcing.cancel()
    await asyncio.gather(announcing, return_exceptions=True)
    await second.aclose()
    assert await first.live() == ["http://one"]
    await first.aclose()
    await other.aclose()


async def test_a_replica_that_died_is_forgotten(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = RedisReplicas(redis_server.url, prefix=uuid.uuid4().hex)
    await replicas.announce("http://one")
    monkeypatch.setattr(module, "KEPT_S", -1.0)

    assert await replicas.live() == []
    await replicas.aclose()


async def test_without_redis_there_is_an_error_and_the_loop_goes_on() -> None:
    replicas = RedisReplicas("redis://127.0.0.1:1")
    with pytest.raises(StoreUnavailable):
        await replicas.live()
    announcing = asyncio.ensure_future(replicas.run("http://one"))
    done, _ = await asyncio.wait({announcing}, timeout=0.1)
    assert not done
    announcing.cancel()
    await asyncio.gather(announcing, return_exceptions=True)
    await replicas.aclose()
