"""The store on a Redis that Sentinels watch: it finds the master, and the server that takes over from it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from gateway.core.errors import StoreUnavailable
from gateway.core.leader_lease import Lead
from gateway.core.session import SessionState
from gateway.stores.redis.sentinel import Master, MasterPool
from gateway.stores.redis.sessions import RedisStore
from tests.contract.store_worlds import add_ready, end, needs_redis_server, opened, opening, queued, waiting
from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually
from tests.fakes.sentinels import SERVICE, Failover

pytestmark = pytest.mark.redis

REPLICA = "one"
LEAD_S = 30.0


@pytest.fixture(params=["open", "with passwords"])
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Failover]:
    needs_redis_server()
    passwords = {"password": "p@ss,w:rd/%", "sentinel_password": "s&nt=nel"} if request.param != "open" else {}
    failover = Failover(tmp_path, **passwords)
    try:
        failover.start()
        yield failover
    finally:
        failover.stop()


@pytest.fixture
async def store(servers: Failover) -> AsyncIterator[RedisStore]:
    store = RedisStore(url=servers.url, replica=REPLICA, prefix="test")
    await store.start()
    yield store
    await store.aclose()


async def led(store: RedisStore) -> Lead:
    """Return the lead, once the store answers."""

    async def check() -> Lead:
        try:
            return await store.lead(REPLICA, ttl_s=LEAD_S)
        except StoreUnavailable as error:
            raise AssertionError(error) from error

    return await eventually(check)


async def test_sessions_and_waiting_claims_outlive_the_master(servers: Failover, store: RedisStore) -> None:
    await store.rebuilt(fence=(await led(store)).fence)
    await add_ready(store, "w1", slots=1)
    session = await opened(store, opening("held"))
    waits = await queued(store, opening("waits"))
    await asyncio.to_thread(servers.synchronise)
    before = servers.master

    servers.kill()
    await asyncio.to_thread(servers.await_takeover, before)
    lead = await led(store)

    assert not lead.is_whole, "its data may lack what the master had not sent"
    with pytest.raises(StoreUnavailable):
        await store.find(opening("unknown").id)
    await store.rebuilt(fence=lead.fence)
    assert (await store.find(session.id)).state is SessionState.OPEN
    assert await waiting(store) == 1
    await end(store, session)
    await asyncio.wait({waits}, timeout=HANG_S)
    assert waits.result().id == "waits", "it heard of it from the new master"


async def test_the_store_does_not_use_a_former_master_that_comes_back(servers: Failover, store: RedisStore) -> None:
    await store.rebuilt(fence=(await led(store)).fence)
    await add_ready(store, "w1", slots=2)
    await opened(store, opening("one"))
    await asyncio.to_thread(servers.synchronise)

    silent = servers.pause()
    await asyncio.to_thread(servers.await_takeover, silent)
    servers.go_on(silent)
    lead = await led_elsewhere(store, servers)
    await store.rebuilt(fence=lead.fence)
    await opened(store, opening("two"))

    with servers.client(servers.master) as client:
        assert client.exists("{test}:session:two")


async def test_connections_in_use_leave_a_former_master_that_resumes(tmp_path: Path) -> None:
    needs_redis_server()
    servers = Failover(tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(servers.stop)
        servers.start()
        options = {"retry": Retry(NoBackoff(), 0), "protocol": 2, "socket_timeout": HANG_S}
        master = Master(servers.url, max_connections=4, options=options)
        stack.push_async_callback(master.aclose)
        stack.push_async_callback(master.client.aclose)
        pubsub = master.client.pubsub()
        stack.push_async_callback(pubsub.aclose)
        await pubsub.subscribe("news")
        await pubsub.get_message(timeout=HANG_S)
        await master.client.ping()

        silent = servers.pause()
        write = asyncio.ensure_future(master.client.set("written", "before the failover"))
        await eventually(lambda: in_use(master, 2))
        await asyncio.to_thread(servers.await_takeover, silent)
        await eventually(lambda: at(master, servers.master))
        servers.go_on(silent)

        await asyncio.wait({write}, timeout=HANG_S)
        assert isinstance(write.exception(), RedisConnectionError), "it did not run on the former master"
        await master.client.set("written", "after it")
        with servers.client(servers.master) as client:
            assert client.get("written") == "after it"
            await eventually(lambda: hears(pubsub, client))


async def in_use(master: Master, number: int) -> None:
    """Assert that *number* connections are in use, and so each command was sent."""
    pool = master.client.connection_pool
    assert len(pool._in_use_connections) == number


async def hears(pubsub: PubSub, client: Redis) -> None:
    """Assert that the subscription receives what *client* publishes."""
    with contextlib.suppress(RedisConnectionError):
        await pubsub.get_message(timeout=0)  # connects and subscribes again
    assert client.publish("news", "heard") == 1


async def at(master: Master, port: int) -> None:
    """Assert that the Sentinel that *master* asks knows the new master."""
    await asked(master)
    pool = master.client.connection_pool
    assert isinstance(pool, MasterPool)
    assert pool.master_address == ("127.0.0.1", port)


async def led_elsewhere(store: RedisStore, servers: Failover) -> Lead:
    """Return the lead over the new master's data. They are not whole, unlike those of the old master."""

    async def check() -> Lead:
        lead = await led(store)
        assert not lead.is_whole
        return lead

    return await eventually(check)


async def test_no_sentinel_is_forgotten_when_many_connections_ask_concurrently(tmp_path: Path) -> None:
    needs_redis_server()
    failover = Failover(tmp_path)
    silent, other = failover.sentinels
    master = Master(
        f"redis+sentinel://127.0.0.1:{silent},127.0.0.1:{other}/{SERVICE}",
        max_connections=4,
        options={"retry": Retry(NoBackoff(), 0), "protocol": 2},
    )
    try:
        failover.start()
        failover.pause(silent)
        await asyncio.gather(*(master.look() for _ in range(10)))  # each finds the first silent, and asks the next

        failover.go_on(silent)
        failover.kill_server(other)

        await eventually(lambda: asked(master))
    finally:
        await master.client.aclose()
        await master.aclose()
        failover.stop()


async def asked(master: Master) -> None:
    """Assert that a Sentinel states the master's address. A resumed Sentinel may be silent for a moment."""
    try:
        await master.look()
    except RedisError as error:
        raise AssertionError(error) from error


async def test_the_store_is_unavailable_if_no_sentinel_answers(tmp_path: Path) -> None:
    nowhere = Failover(tmp_path)
    store = RedisStore(url=nowhere.url, replica=REPLICA, prefix="test")

    with pytest.raises(StoreUnavailable):
        await store.start()


async def test_the_store_is_unavailable_if_the_sentinels_do_not_know_the_service(servers: Failover) -> None:
    store = RedisStore(url=servers.url.replace("/games/", "/others/"), replica=REPLICA, prefix="test")

    with pytest.raises(StoreUnavailable):
        await store.start()
