"""The store seam: the lead, and the fences that stop a former leader. Run on memory and on Redis."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from gateway.core.errors import NotLeading, PoolExhausted, StoreUnavailable
from gateway.core.ids import WorkerId
from gateway.core.ports.store import Store
from gateway.core.session import CloseReason
from gateway.core.worker import WorkerState
from tests.contract.store_worlds import (
    MATH,
    RedisWorld,
    World,
    add_ready,
    end,
    opened,
    opening,
    queued,
    waiting,
    worker,
)

pytest_plugins = ["tests.contract.store_fixtures"]

W1 = WorkerId("w1")


async def state_of(store: Store, id: WorkerId) -> WorkerState:
    found = await store.worker(id)
    assert found is not None
    return found.state


# -- the leader -------------------------------------------------------------------------------------------------


async def test_there_is_one_leader_until_its_lead_expires_or_is_renewed(store_world: World) -> None:
    store = await store_world.open()
    assert (await store.lead("a", ttl_s=10)).fence
    assert not (await store.lead("b", ttl_s=10)).fence
    store_world.pass_time(8)
    assert (await store.lead("a", ttl_s=10)).fence
    store_world.pass_time(8)
    assert not (await store.lead("b", ttl_s=10)).fence

    store_world.pass_time(3)

    assert (await store.lead("b", ttl_s=10)).fence
    assert not (await store.lead("a", ttl_s=10)).fence


async def test_a_leader_keeps_its_fence_while_it_renews_its_lead_and_each_new_lead_has_a_higher_one(
    store_world: World,
) -> None:
    store = await store_world.open()
    first = (await store.lead("a", ttl_s=10)).fence
    store_world.pass_time(8)
    assert (await store.lead("a", ttl_s=10)).fence == first

    store_world.pass_time(11)
    second = (await store.lead("a", ttl_s=10)).fence
    store_world.pass_time(11)
    third = (await store.lead("b", ttl_s=10)).fence

    assert first < second < third
    assert (await store.lead("b", ttl_s=10)).fence == third


# -- the owner ------------------------------------------------------------------------------------------------


def silence(world: World) -> None:
    """Let all replicas be silent for longer than a live replica ever is."""
    world.pass_time(11)
    if isinstance(world, RedisWorld):
        with world.server.client() as client:
            client.decrby(f"{{{world.prefix}}}:heard", 11_000)


async def test_a_store_belongs_to_the_owner_that_claimed_it_first(store_world: World) -> None:
    store = await store_world.open()

    assert await store.own("one") == "one"
    assert await store.own("one") == "one"
    assert await store.own("two") == "one"
    assert await store.own("two") == "one"


async def test_an_owner_takes_over_a_store_only_when_no_replica_is_alive(store_world: World) -> None:
    store = await store_world.open()
    await store.own("one")
    await store.lead("a", ttl_s=10)

    assert await store.own("two", takes_over=True) == "one"
    silence(store_world)
    assert await store.own("two") == "one"
    assert await store.own("two", takes_over=True) == "two"
    assert await store.own("one") == "two"


@pytest.mark.redis
async def test_a_replica_whose_store_was_taken_over_cannot_lead(redis_world: RedisWorld) -> None:
    first, second = await redis_world.open(replica="a"), await redis_world.open(replica="b")
    await first.own("one")
    await first.lead("a", ttl_s=10)
    silence(redis_world)
    await second.own("two", takes_over=True)

    with pytest.raises(StoreUnavailable, match="another GATEWAY_SECRET"):
        await first.lead("a", ttl_s=10)
    assert (await second.lead("b", ttl_s=10)).fence


@pytest.mark.redis
async def test_a_replica_claims_a_store_that_lost_its_data_for_its_owner(redis_world: RedisWorld) -> None:
    first, second = await redis_world.open(replica="a"), await redis_world.open(replica="b")
    await first.own("one")
    with redis_world.server.client() as client:
        client.delete(*redis_world.keys(client))

    await first.lead("a", ttl_s=10)

    assert await second.own("two") == "one"


# -- fences -----------------------------------------------------------------------------------------------------

FENCED: dict[str, Callable[[Store, int], Awaitable[object]]] = {
    "add_worker": lambda store, fence: store.add_worker(worker("w9"), fence=fence),
    "pause_worker": lambda store, fence: store.pause_worker(W1, fence=fence),
    "drain_worker": lambda store, fence: store.drain_worker(W1, fence=fence),
    "remove_worker": lambda store, fence: store.remove_worker(W1, CloseReason.SHUTDOWN, fence=fence),
    "fail_waiting": lambda store, fence: store.fail_waiting(MATH, "broken", fence=fence),
    "open_breaker": lambda store, fence: store.fail_waiting(MATH, "broken", for_s=60, fence=fence),
    "adopt": lambda store, fence: store.adopt(worker("w9"), [], fence=fence),
    "rebuilt": lambda store, fence: store.rebuilt(fence=fence),
}


@pytest.mark.parametrize("name", FENCED)
async def test_a_former_leader_is_refused_and_changes_nothing(store_world: World, name: str) -> None:
    store = await store_world.open()
    await add_ready(store)
    session = await opened(store, opening("s1"))
    task = await queued(store, opening("s2"))
    old = (await store.lead("a", ttl_s=10)).fence
    store_world.pass_time(11)
    await store.lead("b", ttl_s=10)
    before = await store.load()

    with pytest.raises(NotLeading):
        await FENCED[name](store, old)

    assert [entry.worker for entry in (await store.load())[MATH].workers] == [
        entry.worker for entry in before[MATH].workers
    ]
    assert await waiting(store) == 1
    await end(store, session)
    assert (await task).id == "s2"


@pytest.mark.redis
@pytest.mark.parametrize("name", FENCED)
async def test_a_leader_from_before_a_data_loss_is_refused_even_without_a_new_leader(
    redis_world: RedisWorld, name: str
) -> None:
    store = await redis_world.open()
    fence = (await store.lead("a", ttl_s=10)).fence
    with redis_world.server.client() as client:
        client.delete(*redis_world.keys(client))

        with pytest.raises(NotLeading):
            await FENCED[name](store, fence)

        assert redis_world.keys(client) == []


@pytest.mark.parametrize("name", FENCED)
async def test_the_leader_and_callers_without_a_fence_are_not_refused(store: Store, name: str) -> None:
    fence = (await store.lead("a", ttl_s=10)).fence

    await FENCED[name](store, 0)
    await FENCED[name](store, fence)


async def test_a_leader_whose_lead_expired_may_act_until_another_replica_leads(
    store_world: World,
) -> None:
    store = await store_world.open()
    fence = (await store.lead("a", ttl_s=10)).fence
    store_world.pass_time(11)
    await store.add_worker(worker("w1"), fence=fence)

    await store.lead("b", ttl_s=10)

    with pytest.raises(NotLeading):
        await store.remove_worker(W1, CloseReason.SHUTDOWN, fence=fence)
    assert await store.worker(W1) is not None


# -- pausing ----------------------------------------------------------------------------------------------------


async def test_a_paused_worker_takes_no_session_until_it_is_woken(store: Store) -> None:
    await add_ready(store, slots=2)

    assert await store.pause_worker(W1)

    assert [entry.worker.state for entry in (await store.load())[MATH].workers] == [WorkerState.PAUSED]
    with pytest.raises(PoolExhausted):
        await store.claim(opening("s1"), wait_s=0)
    assert await store.wake_worker(W1)
    assert await state_of(store, W1) is WorkerState.READY
    assert (await store.claim(opening("s1"), wait_s=0)).worker == W1


async def test_waking_a_worker_grants_its_slots_to_waiting_claims(store: Store) -> None:
    await add_ready(store, slots=2)
    await store.pause_worker(W1)
    tasks = [await queued(store, opening(f"s{n}")) for n in range(3)]

    await store.wake_worker(W1)

    assert [(await task).id for task in tasks[:2]] == ["s0", "s1"]
    assert await waiting(store) == 1
    tasks[2].cancel()


async def test_only_a_ready_worker_without_a_session_is_paused(store: Store) -> None:
    await add_ready(store, "w1", slots=2)
    await store.add_worker(worker("w2"))
    await add_ready(store, "w3")
    await store.drain_worker(WorkerId("w3"))
    session = await opened(store, opening("s1"))

    paused = {id: await store.pause_worker(WorkerId(id)) for id in ("w1", "w2", "w3", "nobody")}

    assert not any(paused.values())
    await end(store, session)
    assert await store.pause_worker(W1)
    assert await store.pause_worker(W1)


async def test_only_a_paused_worker_is_woken(store: Store) -> None:
    await add_ready(store, "w1")
    await store.add_worker(worker("w2"))

    woken = {id: await store.wake_worker(WorkerId(id)) for id in ("w1", "w2", "nobody")}

    assert not any(woken.values())
    assert await state_of(store, WorkerId("w2")) is WorkerState.STARTING


async def test_a_paused_worker_is_drained_and_removed_like_an_idle_one(store: Store) -> None:
    await add_ready(store)
    await store.pause_worker(W1)

    assert await store.drain_worker(W1, only_if_idle=True)

    assert await state_of(store, W1) is WorkerState.DRAINING
    assert not await store.wake_worker(W1)
    assert await store.remove_worker(W1, CloseReason.SHUTDOWN) == []
    assert await store.worker(W1) is None


async def test_a_paused_worker_that_is_removed_leaves_no_slot_behind(store: Store) -> None:
    await add_ready(store)
    await store.pause_worker(W1)

    await store.remove_worker(W1, CloseReason.SHUTDOWN)

    assert not await store.wake_worker(W1)
    with pytest.raises(PoolExhausted):
        await store.claim(opening("s1"), wait_s=0)


async def test_a_workers_idle_time_restarts_when_it_is_woken(store_world: World) -> None:
    store = await store_world.open()
    await add_ready(store)
    store_world.pass_time(100)
    await store.pause_worker(W1)
    store_world.pass_time(50)
    (paused,) = (await store.load())[MATH].workers

    await store.wake_worker(W1)

    (woken,) = (await store.load())[MATH].workers
    assert 150 <= paused.idle_s < 160
    assert woken.idle_s < 10


# -- suspects ---------------------------------------------------------------------------------------------------


async def test_a_suspect_worker_keeps_its_sessions_and_gets_no_more_until_it_is_woken(store: Store) -> None:
    await add_ready(store, slots=2)
    first, second = await opened(store, opening("s1")), await opened(store, opening("s2"))

    assert await store.suspect_worker(W1)

    assert await state_of(store, W1) is WorkerState.SUSPECT
    await end(store, second)
    with pytest.raises(PoolExhausted):
        await store.claim(opening("s3"), wait_s=0)
    assert (await store.find(first.id)).worker == W1
    assert not await store.drain_worker(W1, only_if_idle=True)
    waiting_ones = [await queued(store, opening(f"s{n}")) for n in (3, 4)]
    assert await store.wake_worker(W1)
    assert (await waiting_ones[0]).worker == W1
    assert await waiting(store) == 1, "one slot is held still"
    waiting_ones[1].cancel()


async def test_only_a_ready_worker_becomes_suspect(store: Store) -> None:
    await add_ready(store, "w1")
    await store.add_worker(worker("w2"))
    await add_ready(store, "w3")
    await store.drain_worker(WorkerId("w3"))
    await add_ready(store, "w4")
    await store.pause_worker(WorkerId("w4"))

    suspected = [(id, await store.suspect_worker(WorkerId(id))) for id in ("w1", "w1", "w2", "w3", "w4", "nobody")]

    assert suspected == [("w1", True), ("w1", True), ("w2", False), ("w3", False), ("w4", False), ("nobody", False)]
