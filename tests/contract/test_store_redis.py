"""Properties of the Redis store only: several replicas, and a Redis that goes away."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.core.errors import GatewayError, SessionExists, SessionNotFound, StoreUnavailable
from gateway.core.ids import Owner, SessionId, WorkerId
from gateway.core.session import Activity, CapacityWanted, CloseReason, Session, SessionEnded
from gateway.stores.redis.sessions import RedisStore
from tests.contract.store_worlds import (
    CODING,
    MATH,
    RedisServer,
    RedisWorld,
    add_ready,
    end,
    ended_late,
    needs_redis_server,
    opened,
    opening,
    queued,
    waiting,
    worker,
)
from tests.fakes.eventually import until

pytest_plugins = ["tests.contract.store_fixtures"]
pytestmark = pytest.mark.redis

ROOT = Path(__file__).parents[2]


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis that the test may stop."""
    needs_redis_server()
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def own_world(own_server: RedisServer) -> AsyncIterator[RedisWorld]:
    world = RedisWorld(own_server)
    yield world
    await world.aclose()


async def answers_again(store: RedisStore) -> None:
    """Wait until the store answers. The server is up already, so this takes one connect at most."""
    for _ in range(50):
        try:
            await store.ping()
        except StoreUnavailable:
            await asyncio.sleep(0.1)
        else:
            return
    raise AssertionError("the store never came back")


# -- several replicas -------------------------------------------------------------------------------------------


async def test_claims_of_two_replicas_are_served_in_the_order_of_their_arrival(redis_world: RedisWorld) -> None:
    a, b = await redis_world.open(replica="a"), await redis_world.open(replica="b")
    await add_ready(a)
    held = await opened(a, opening("holder"))
    tasks = [await queued((a, b)[n % 2], opening(f"s{n}")) for n in range(10)]
    served = []

    for task in tasks:
        await end(b, held)
        held = await task
        served.append(held.id)

    assert served == [f"s{n}" for n in range(10)]


async def test_a_release_at_one_replica_wakes_a_claim_that_waits_at_another(redis_world: RedisWorld) -> None:
    a, b = await redis_world.open(replica="a"), await redis_world.open(replica="b")
    await add_ready(a)
    holder = await opened(a, opening("holder"))
    task = await queued(b, opening("s1"))

    await end(a, holder)

    session = await task
    assert (session.id, await a.find(session.id)) == ("s1", session)


async def test_notices_of_one_replica_reach_all(redis_world: RedisWorld) -> None:
    a, b = await redis_world.open(replica="a"), await redis_world.open(replica="b")
    followers = [store.notices() for store in (a, b)]
    await add_ready(a)
    session = await opened(a, opening("s1"))

    await b.begin_close(session.id, CloseReason.EXPIRED)
    task = await queued(a, opening("s2"))

    for notices in followers:
        assert [await anext(notices), await anext(notices)] == [
            SessionEnded(session.id, session.lease),
            CapacityWanted(MATH),
        ]
    task.cancel()
    await asyncio.wait({task})


async def test_of_two_replicas_one_leads(redis_world: RedisWorld) -> None:
    a, b = await redis_world.open(replica="a"), await redis_world.open(replica="b")

    first = await asyncio.gather(a.lead("a", ttl_s=10), b.lead("b", ttl_s=10))
    again = await asyncio.gather(a.lead("a", ttl_s=10), b.lead("b", ttl_s=10))

    assert sorted(lead.fence > 0 for lead in first) == [False, True]
    assert again == first


async def test_of_two_replicas_that_claim_one_id_concurrently_one_gets_it(redis_world: RedisWorld) -> None:
    a, b = await redis_world.open(replica="a"), await redis_world.open(replica="b")
    await add_ready(a, slots=200)

    for n in range(50):
        outcomes = await asyncio.gather(
            *(store.claim(opening(f"s{n}"), wait_s=0) for store in (a, b)), return_exceptions=True
        )
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Session", "SessionExists"]

    (entry,) = (await a.load())[MATH].workers
    assert entry.used == 50


async def test_of_two_replicas_that_wait_for_one_id_concurrently_one_waits(redis_world: RedisWorld) -> None:
    a, b = await redis_world.open(replica="a"), await redis_world.open(replica="b")
    tasks = [asyncio.create_task(store.claim(opening("s1"), wait_s=60)) for store in (a, b)]

    done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)

    assert [type(task.exception()) for task in done] == [SessionExists]
    assert await waiting(a) == 1
    await add_ready(b)
    assert (await left.pop()).id == "s1"


async def test_slots_are_leased_once_however_many_replicas_claim_and_hang_up(redis_world: RedisWorld) -> None:
    stores = [await redis_world.open(replica=f"r{n}") for n in range(3)]
    await add_ready(stores[0], slots=4)
    done = 0

    async def episode(n: int) -> None:
        nonlocal done
        store = stores[n % 3]
        claim = asyncio.create_task(store.claim(opening(f"s{n}"), wait_s=60))
        if n % 5 == 0:
            for _ in range(n % 37):
                await asyncio.sleep(0)
            claim.cancel()
        await asyncio.wait({claim})
        if not claim.cancelled():
            (entry,) = (await store.load())[MATH].workers
            assert entry.used <= 4
            await end(stores[(n + 1) % 3], claim.result())
            done += 1

    await asyncio.gather(*(episode(n) for n in range(200)))

    assert done >= 160
    load = (await stores[0].load())[MATH]
    assert (load.waiting, [entry.used for entry in load.workers]) == (0, [0])


async def test_gateways_of_different_prefixes_do_not_see_each_other(redis_server: RedisServer) -> None:
    worlds = [RedisWorld(redis_server) for _ in range(2)]
    worlds[1].prefix = worlds[0].prefix + ":more"
    a, b = [await world.open() for world in worlds]
    notices = b.notices()
    await add_ready(a)
    session = await opened(a, opening("s1"))
    await a.begin_close(session.id, CloseReason.EXPIRED)

    with pytest.raises(SessionNotFound):
        await b.find(session.id)

    assert await b.load() == {}
    for world in worlds:
        await world.aclose()
    assert [notice async for notice in notices] == []


# -- a replica dies ---------------------------------------------------------------------------------------------

REPLICA = """
import asyncio, sys
from gateway.core.ids import EnvironmentName, Owner, SessionId
from gateway.core.session import SessionRequest
from gateway.stores.redis.sessions import RedisStore

async def main():
    store = RedisStore(url=sys.argv[1], prefix=sys.argv[2], replica="doomed")
    await store.start()
    wish = SessionRequest(id=SessionId("doomed"), name="n", owner=Owner(""), environment=EnvironmentName("math"),
                   lease="doomed-lease", fingerprint="f", idle_s=300, setup_s=30)
    await store.claim(wish, wait_s=60)

asyncio.run(main())
"""


async def killed_while_it_waits(world: RedisWorld, store: RedisStore) -> None:
    """Let a replica in its own process wait for a slot, and kill it."""
    command = [sys.executable, "-c", REPLICA, world.server.url, world.prefix]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=asyncio.subprocess.DEVNULL)
    try:
        for _ in range(200):
            if await waiting(store):
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the replica never waited")
    finally:
        process.kill()
        await process.wait()


async def test_a_slot_granted_to_a_killed_replica_is_released_after_the_setup_time(
    redis_world: RedisWorld,
) -> None:
    store = await redis_world.open()
    await add_ready(store)
    holder = await opened(store, opening("holder"))
    await killed_while_it_waits(redis_world, store)
    task = await queued(store, opening("alive"))
    await end(store, holder)
    assert (await store.find(SessionId("doomed"))).lease == "doomed-lease"

    redis_world.pass_time(31)
    (late,) = await ended_late(store, 10)

    assert (late.id, late.reason) == ("doomed", CloseReason.OPEN_FAILED)
    await store.release(late.id, late.lease)
    assert (await task).id == "alive"


async def test_a_ticket_of_a_killed_replica_is_skipped_once_its_wait_is_over(redis_world: RedisWorld) -> None:
    store = await redis_world.open()
    await add_ready(store)
    holder = await opened(store, opening("holder"))
    await killed_while_it_waits(redis_world, store)
    redis_world.pass_time(62)

    await end(store, holder)

    assert await waiting(store) == 0
    assert (await store.claim(opening("s1"), wait_s=0)).id == "s1"


# -- Redis goes away --------------------------------------------------------------------------------------------


async def test_the_store_is_unavailable_while_redis_is_down_and_works_again_when_redis_returns_empty(
    own_server: RedisServer, own_world: RedisWorld
) -> None:
    store = await own_world.open()
    await add_ready(store)
    session = await opened(store, opening("s1"))
    own_server.stop()

    for ask in (
        store.find(session.id),
        store.claim(opening("s2"), wait_s=5),
        store.touch([Activity(session.id, 0.0)]),
        store.begin_close(session.id, CloseReason.DELETED),
        ended_late(store, 10),
        store.load(),
        store.lead("a", ttl_s=5),
        store.ping(),
    ):
        with pytest.raises(StoreUnavailable) as caught:
            await ask
        assert str(own_server.socket) not in caught.value.detail

    own_server.start()
    await answers_again(store)
    await store.rebuilt(fence=0)
    with pytest.raises(SessionNotFound):
        await store.find(session.id)
    await add_ready(store, "w2")
    again = await opened(store, opening("s1"))
    assert await store.touch([Activity(again.id, 0.0)]) == []


async def test_waiting_and_notices_go_on_after_a_restart(own_server: RedisServer, own_world: RedisWorld) -> None:
    a, b = await own_world.open(replica="a"), await own_world.open(replica="b")
    notices = a.notices()
    own_server.stop()
    own_server.start()
    for store in (a, b):
        await answers_again(store)
    await b.rebuilt(fence=0)
    await add_ready(b)
    holder = await opened(b, opening("holder"))
    task = await queued(a, opening("s1"))

    await end(b, holder)

    assert (await task).id == "s1"
    # A notice before the subscription is back may be lost. Later notices must arrive.
    for n in range(50):
        session = await b.claim(opening(f"x{n}"), wait_s=0) if n else await a.find(SessionId("s1"))
        await b.begin_close(session.id, CloseReason.EXPIRED)
        await b.release(session.id, session.lease)
        following = asyncio.ensure_future(anext(notices))
        heard, _ = await asyncio.wait({following}, timeout=0.1)
        if heard:
            return
        following.cancel()
        await asyncio.wait({following})
    raise AssertionError("no notice was heard after the restart")


async def test_scripts_that_redis_forgot_are_loaded_again(redis_world: RedisWorld) -> None:
    store = await redis_world.open()
    await add_ready(store, slots=50)
    with redis_world.server.client() as client:
        client.script_flush()

    sessions = await asyncio.gather(*(store.claim(opening(f"s{n}"), wait_s=0) for n in range(50)))

    assert len({session.id for session in sessions}) == 50


async def test_a_grant_whose_message_was_lost_is_found_by_polling(redis_world: RedisWorld) -> None:
    store = await redis_world.open()
    await add_ready(store)
    holder = await opened(store, opening("holder"))
    task = await queued(store, opening("s1"))
    with redis_world.server.client() as client:
        client.client_kill_filter(_type="pubsub")

        await end(store, holder)

    assert (await task).id == "s1"


async def test_releasing_a_claim_by_a_stale_lease_changes_nothing(redis_world: RedisWorld) -> None:
    store = await redis_world.open()
    await add_ready(store)
    session = await store.claim(opening("s1"), wait_s=0)

    assert await store._link.run("give_back", session.id, session.environment, session.owner, "stale") == 0

    assert await store.find(session.id) == session
    assert await store._link.run("give_back", session.id, session.environment, session.owner, session.lease) == 1


async def test_the_store_is_unavailable_while_redis_hangs_and_late_claims_are_due_after_their_setup_time(
    own_server: RedisServer, own_world: RedisWorld
) -> None:
    store = await own_world.open()
    await add_ready(store, slots=2)
    own_server.signal(signal.SIGSTOP)

    outcomes = await asyncio.gather(
        store.find(SessionId("s1")),
        store.claim(opening("s1", setup_s=30), wait_s=0),
        store.claim(opening("s2", setup_s=30), wait_s=60),
        return_exceptions=True,
    )

    own_server.signal(signal.SIGCONT)
    assert [type(outcome) for outcome in outcomes] == [StoreUnavailable] * 3
    await answers_again(store)
    own_world.pass_time(31)
    for late in await ended_late(store, 10):
        await store.release(late.id, late.lease)
    (entry,) = (await store.load())[MATH].workers
    assert entry.used == 0


async def test_starting_without_redis_raises_unavailable_and_leaves_nothing_running(tmp_path: Path) -> None:
    store = RedisStore(url=f"unix://{tmp_path}/none.sock", replica="a")

    with pytest.raises(StoreUnavailable):
        await store.start()

    assert asyncio.all_tasks() == {asyncio.current_task()}
    with pytest.raises(StoreUnavailable):
        await store.ping()


async def test_a_closed_store_leaves_neither_tasks_nor_connections(
    own_server: RedisServer, own_world: RedisWorld
) -> None:
    store = await own_world.open()
    await asyncio.gather(*(store.ping() for _ in range(20)))
    task = await queued(store, opening("s1"))

    await store.aclose()

    assert asyncio.all_tasks() - {task} == {asyncio.current_task()}
    assert isinstance(task.exception(), StoreUnavailable)
    with own_server.client() as client:
        mine = client.client_id()
        for _ in range(100):
            others = [entry for entry in client.client_list() if entry["id"] != str(mine)]
            if not others:
                break
            await asyncio.sleep(0.02)
        assert others == []
        assert client.exists(f"{{{own_world.prefix}}}:ticket:s1") == 0


async def test_pending_claims_leave_nothing_behind_when_the_store_is_closed(
    redis_world: RedisWorld,
) -> None:
    for turns in range(0, 60, 2):
        store = await redis_world.open()
        await add_ready(store)
        await end(store, await opened(store, opening("before")))
        tasks = [asyncio.create_task(store.claim(opening(f"s{n}"), wait_s=60)) for n in range(5)]
        for _ in range(turns):
            await asyncio.sleep(0)

        await store.aclose()

        assert all(task.done() for task in tasks)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        other = await redis_world.open(replica="b")
        assert await waiting(other) == 0
        granted = {outcome.id for outcome in outcomes if isinstance(outcome, Session)}
        assert {session.id for session in await other.sessions()} == granted
        await other.remove_worker(WorkerId("w1"), CloseReason.SHUTDOWN)
        await other.aclose()


async def test_a_spurious_wake_costs_one_read_and_the_claim_waits_on(
    own_server: RedisServer, own_world: RedisWorld
) -> None:
    store = await own_world.open()
    wish = opening("s1")
    task = await queued(store, wish)
    with own_server.client() as client:
        before = client.info("commandstats")["cmdstat_evalsha"]["calls"]

        store._claims.wake(wish.lease)
        await asyncio.sleep(0.1)

        assert client.info("commandstats")["cmdstat_evalsha"]["calls"] - before <= 2
    assert not task.done()
    task.cancel()
    await asyncio.wait({task})


@pytest.mark.parametrize("verb", ["find", "load"])
async def test_a_cancelled_command_ends_as_cancelled_and_costs_no_connection(
    own_server: RedisServer, own_world: RedisWorld, verb: str
) -> None:
    store = await own_world.open()
    await add_ready(store)
    session = await opened(store, opening("s1"))
    with own_server.client() as client:
        before = int(client.info("stats")["total_connections_received"])

        for turns in range(160):
            task: asyncio.Task[object] = asyncio.create_task(store.find(session.id) if verb == "find" else store.load())
            for _ in range(turns % 16):
                await asyncio.sleep(0)
            was_done = task.done()
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled() is not was_done
            await store.ping()

        # A cancelled command may still run during the ping, which then uses a second connection.
        assert int(client.info("stats")["total_connections_received"]) - before <= 3


async def test_a_waiting_claim_that_is_cancelled_ends_immediately_even_if_redis_is_down(
    own_server: RedisServer, own_world: RedisWorld
) -> None:
    store = await own_world.open()
    task = await queued(store, opening("s1"))
    own_server.stop()

    task.cancel()

    await asyncio.wait({task})
    assert task.cancelled()


async def test_a_ticket_that_could_not_be_released_is_released_once_redis_returns(tmp_path: Path) -> None:
    needs_redis_server()
    server = RedisServer(tmp_path, keeps_all=True)
    server.start()
    world = RedisWorld(server)
    try:
        store = await world.open()
        task = await queued(store, opening("s1"))
        server.stop()
        task.cancel()
        await asyncio.wait({task})

        server.start()

        with server.client() as client:
            assert "ticket" in {key.split(":")[1] for key in world.keys(client)}, "it was kept"

            def is_given_back() -> bool:
                return not {"ticket", "waits"} & {key.split(":")[1] for key in world.keys(client)}

            await until(is_given_back)
    finally:
        await world.aclose()
        server.stop()


# -- Redis' clock jumps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("leads_after", ["a", "b"], ids=["the leader notices", "another replica notices"])
async def test_no_session_ends_early_when_redis_clock_jumps_an_hour_ahead(
    redis_world: RedisWorld, leads_after: str
) -> None:
    stores = {name: await redis_world.open(replica=name) for name in ("a", "b")}
    store = stores["a"]
    await add_ready(store, slots=2)
    idle = await opened(store, opening("idle", idle_s=300))
    half_open = await store.claim(opening("half", setup_s=60), wait_s=0)
    for name in stores:
        await stores[name].lead(name, ttl_s=5)

    redis_world.shift(3600)

    assert await stores[leads_after].lead(leads_after, ttl_s=5)
    for name in stores:
        await stores[name].lead(name, ttl_s=5)
        assert await stores[name].late(10) == await ended_late(stores[name], 10) == []
    redis_world.pass_time(61)
    await store.lead("a", ttl_s=5)
    assert [late.id for late in await ended_late(store, 10)] == [half_open.id]
    redis_world.pass_time(240)
    await store.lead("a", ttl_s=5)
    assert idle.id in {late.id for late in await ended_late(store, 10)}


async def test_when_redis_clock_jumps_an_hour_back_sessions_still_end_in_time(redis_world: RedisWorld) -> None:
    store = await redis_world.open()
    await add_ready(store)
    session = await opened(store, opening("s1", idle_s=300))
    await store.lead("a", ttl_s=5)

    redis_world.shift(-3600)

    await store.lead("a", ttl_s=5)
    redis_world.pass_time(290)
    await store.lead("a", ttl_s=5)
    assert await ended_late(store, 10) == []
    redis_world.pass_time(15)
    await store.lead("a", ttl_s=5)
    assert [late.id for late in await ended_late(store, 10)] == [session.id]


async def test_a_session_opened_between_a_jump_ahead_and_its_notice_does_not_live_longer(
    redis_world: RedisWorld,
) -> None:
    store = await redis_world.open()
    await add_ready(store)
    await store.lead("a", ttl_s=5)
    redis_world.shift(3600)
    session = await opened(store, opening("s1", idle_s=300))

    await store.lead("a", ttl_s=5)
    redis_world.pass_time(290)
    await store.lead("a", ttl_s=5)
    assert await ended_late(store, 10) == []
    redis_world.pass_time(15)
    await store.lead("a", ttl_s=5)

    assert [late.id for late in await ended_late(store, 10)] == [session.id]


async def test_a_session_opened_between_a_jump_back_and_its_notice_does_not_end_early(redis_world: RedisWorld) -> None:
    store = await redis_world.open()
    await add_ready(store)
    await store.lead("a", ttl_s=5)
    redis_world.shift(-3600)
    session = await opened(store, opening("s1", idle_s=300))

    await store.lead("a", ttl_s=5)
    assert await ended_late(store, 10) == []
    redis_world.pass_time(290)
    await store.lead("a", ttl_s=5)
    assert await ended_late(store, 10) == []
    redis_world.pass_time(15)
    await store.lead("a", ttl_s=5)

    assert [late.id for late in await ended_late(store, 10)] == [session.id]


@pytest.mark.parametrize("jump_s", [3600, -3600])
async def test_an_opening_under_way_when_a_jump_is_noticed_has_its_normal_time(
    redis_world: RedisWorld, jump_s: int
) -> None:
    store = await redis_world.open()
    await add_ready(store)
    await store.lead("a", ttl_s=5)
    redis_world.shift(jump_s)
    session = await store.claim(opening("s1", setup_s=30), wait_s=0)

    await store.lead("a", ttl_s=5)
    assert await ended_late(store, 10) == []
    redis_world.pass_time(25)
    await store.lead("a", ttl_s=5)
    assert await ended_late(store, 10) == []
    redis_world.pass_time(15)
    await store.lead("a", ttl_s=5)

    assert [late.id for late in await ended_late(store, 10)] == [session.id]


async def test_a_replica_that_led_long_ago_does_not_mistake_the_time_of_other_leaders_for_a_jump(
    redis_world: RedisWorld,
) -> None:
    a, b = await redis_world.open(replica="a"), await redis_world.open(replica="b")
    await add_ready(a)
    session = await opened(a, opening("s1", idle_s=10_000))
    await a.lead("a", ttl_s=5)
    for _ in range(10):
        redis_world.pass_time(900)
        await b.lead("b", ttl_s=5)

    await a.lead("a", ttl_s=5)

    assert await ended_late(a, 10) == []
    redis_world.pass_time(1001)
    assert [late.id for late in await ended_late(a, 10)] == [session.id]


async def test_clocks_of_processes_that_ended_are_forgotten_a_day_later(redis_world: RedisWorld) -> None:
    for n in range(3):
        old = await redis_world.open(replica=f"old{n}")
        await old.lead(f"old{n}", ttl_s=5)
    redis_world.pass_time(25 * 3600)

    new = await redis_world.open(replica="new")
    await new.lead("new", ttl_s=5)

    with redis_world.server.client() as client:
        assert client.hlen(f"{{{redis_world.prefix}}}:paced") == 1


# -- keys -------------------------------------------------------------------------------------------------------


def documented() -> dict[str, str]:
    """Return the rows of the page's first table, that of sessions and workers: kind of key, and its type."""
    found: dict[str, str] = {}
    first, _, _ = (ROOT / "docs" / "design" / "store.md").read_text().partition("Tasks that arrived at run time")
    for row in re.findall(r"^\| (`.+)$", first, re.MULTILINE):
        names, types = row.split(" | ")[:2]
        kinds = re.findall(r"`([a-z_]+)", names)
        each = types.split(", ")
        found |= dict(zip(kinds, each * len(kinds) if len(each) == 1 else each, strict=True))
    return found


async def every_key(world: RedisWorld, store: RedisStore) -> dict[str, str]:
    """Create each kind of key, and return the types of the observed keys, by kind."""
    seen: dict[str, str] = {}

    def look() -> None:
        with world.server.client() as client:
            for key in world.keys(client):
                seen[key.removeprefix(f"{{{world.prefix}}}:").split(":")[0]] = client.type(key)

    await store.own("one")
    await store.lead("a", ttl_s=10)
    await store.pace(Owner("lab"), per_s=0.1, within_s=60)
    await store.add_worker(worker("w1", slots=2))
    await store.worker_ready(WorkerId("w1"), "unix:/run/w1.sock")
    held = [await opened(store, opening("s0"))]
    look()
    held.append(await opened(store, opening("s1")))
    await store.keep_reply(held[0].id, b"reply")
    tasks = [await queued(store, opening(f"t{n}")) for n in range(2)]
    in_group = await queued(store, replace(opening("g0"), group="g", group_size=2, together_s=60))
    look()
    in_group.cancel()
    await asyncio.wait({in_group})
    await add_ready(store, "w2", environment=CODING, slots=3)
    wish = replace(opening("g1", environment=CODING), group="h", group_size=3, together_s=1)
    held.append(await store.claim(wish, wait_s=0))
    look()
    world.shift(1)
    await store.load()
    look()
    await end(store, held.pop())
    await store.remove_worker(WorkerId("w2"), CloseReason.SHUTDOWN)
    await end(store, held.pop(), CloseReason.EXPIRED)
    held.append(await tasks[0])
    # No replica fetches the reason of the failure, as if its replica were dead.
    await store.fail_waiting(MATH, "broken", for_s=60)
    look()
    await asyncio.wait(tasks)
    world.shift(3600)
    await store.lead("a", ttl_s=10)
    look()
    for session in held:
        await end(store, session)
    world.pass_time(100)
    await store.load()
    await store.remove_worker(WorkerId("w1"), CloseReason.SHUTDOWN)
    return seen


async def test_every_key_and_its_type_is_in_the_docs_and_every_key_in_the_docs_exists(redis_world: RedisWorld) -> None:
    store = await redis_world.open()

    seen = await every_key(redis_world, store)

    # A replica fetches a failure within milliseconds, mostly before the test reads the keys.
    assert {"failed": "string"} | seen == documented()


async def test_the_keys_of_sessions_and_workers_are_gone_once_all_have_ended(redis_world: RedisWorld) -> None:
    store = await redis_world.open()
    await every_key(redis_world, store)

    with redis_world.server.client() as client:
        left = {key.split(":")[1]: client.ttl(key) for key in redis_world.keys(client)}

    for kind in ("number", "paced", "jumped", "counts", "fence", "whole", "replicas", "heard", "heard_run", "owner"):
        assert left.pop(kind) == -1
    assert set(left) <= {"session", "leader", "failed", "cause", "pace", "group", "unfilled"}
    assert all(0 <= ttl_s <= 600 for ttl_s in left.values()), left  # in whole seconds


@pytest.mark.parametrize(
    "url",
    ["redis://user:hunter2@127.0.0.1:1/0", "redis+sentinel://user:hunter2@127.0.0.1:1/games?sentinel_password=hunter2"],
)
async def test_no_secret_of_the_url_is_in_an_error_or_in_the_log(url: str, caplog: pytest.LogCaptureFixture) -> None:
    store = RedisStore(url=url, replica="a")

    with pytest.raises(GatewayError) as caught:
        await store.start()

    assert "hunter2" not in str(caught.value) + caplog.text
    assert "store_lost" in caplog.text
