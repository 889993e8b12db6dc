"""A Redis that comes back empty while replicas serve. Replicas and workers restore the data that they know."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest

from gateway.core.environment import Environment, Server, ServerProtocol, UpstreamKind
from gateway.core.episode import Action, StepResult
from gateway.core.errors import SessionClosed, SessionNotFound, StoreUnavailable
from gateway.core.ids import EnvironmentName, SessionId
from gateway.core.session import EpisodeRequest, Session, SessionSetup, SessionState
from gateway.core.worker import WorkerState
from tests.contract.store_worlds import RedisWorld
from tests.fakes.eventually import eventually, until
from tests.fakes.upstreams import CounterImage
from tests.fakes.workers import FakeBackend
from tests.service.foreign_world import image
from tests.service.stack import OWNER, Replica, environment, stack

pytest_plugins = ["tests.contract.store_fixtures"]
pytestmark = pytest.mark.redis

STEP = Action(name="go_on")
COUNT = Action(fields={"op": "inc"})
_numbers = itertools.count(1)


@pytest.fixture(autouse=True)
def quick_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the loops often, and shorten the waits between them accordingly."""
    monkeypatch.setattr("gateway.pool.loop.TICK_S", 0.05)
    monkeypatch.setattr("gateway.sessions.cache.TICK_S", 0.1)
    monkeypatch.setattr("gateway.pool.recovery.GRACE_S", 0.5)
    monkeypatch.setattr("gateway.pool.recovery.ASK_S", 1.0)


@dataclass
class Replicas:
    """Replicas on one Redis and one engine."""

    world: RedisWorld
    backend: FakeBackend
    environments: list[Environment]
    foreign: CounterImage

    async def another(self) -> Replica:
        """Return a further process. No loop runs in it yet."""
        name = f"replica-{next(_numbers)}"
        store = await self.world.open(replica=name, is_whole=False)
        return Replica(
            store=store,
            backend=self.backend,
            environments=self.environments,
            name=name,
            upstreams={UpstreamKind.OPENENV: self.foreign},
            store_patience_s=10.0,
        )

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Replica]:
        """Run a process that starts as the composition root starts it."""
        one = await self.another()
        await one.leadership.until_complete()
        await one.audit.begin()
        async with one.looping():
            yield one
        await one.aclose()

    def empty(self) -> None:
        """Delete all data in Redis."""
        with self.world.server.client() as client:
            for key in self.world.keys(client):
                client.delete(key)


@pytest.fixture
async def replicas(redis_world: RedisWorld) -> AsyncIterator[Replicas]:
    """Provide replicas with one environment of the gateway's own images, unless a test replaces it."""
    async with stack() as built:
        yield Replicas(redis_world, built.backend, [environment(slots=4, max_workers=2)], CounterImage())


async def opened(gateway: Replica, name: str) -> Session:
    """Open a session of the first environment through *gateway*."""
    kind = gateway.catalog.default
    request = EpisodeRequest(
        owner=OWNER, name=name, environment=kind, setup=SessionSetup(spec={"target": 9}), fingerprint="f"
    )
    return (await gateway.sessions.open(request)).session


async def stepped(gateway: Replica, name: str, action: Action = STEP) -> StepResult:
    return await gateway.act(name, action, within_s=10.0)


async def is_whole(gateway: Replica) -> None:
    """Wait until the store is complete, so that it can again report an unknown session as not found."""

    async def check() -> None:
        try:
            await gateway.store.find(SessionId("nobody"))
        except SessionNotFound:
            return
        except StoreUnavailable as error:
            raise AssertionError("the store is not whole") from error

    await eventually(check)


async def leases(gateway: Replica) -> dict[str, str]:
    """Return the leases of the store's open sessions, by session name."""
    return {one.name: one.lease for one in await gateway.store.sessions() if one.state is SessionState.OPEN}


async def test_sessions_of_the_gateways_own_workers_are_restored_even_if_no_replica_remembers_them(
    replicas: Replicas,
) -> None:
    async with replicas.serving() as first, replicas.serving() as second:
        before = {"a": (await opened(first, "a")).lease, "b": (await opened(second, "b")).lease}
        async with replicas.serving() as third:
            before["c"] = (await opened(third, "c")).lease  # no replica remembers it once the third has ended
        worker = replicas.backend.only

        replicas.empty()
        during = await asyncio.gather(stepped(first, "a"), stepped(second, "b"))
        await is_whole(first)

        assert not any(step.error for step in during)
        assert await leases(first) == before
        assert await first.used() == 3
        assert not (await stepped(second, "c")).error
        assert (replicas.backend.asked, replicas.backend.stopped) == (1, [])
        assert worker.ran == ["go_on"] * 3
        for name in before:
            await second.sessions.close(OWNER, name)
        assert (await first.used(), worker.sessions) == (0, {})


async def test_a_session_that_was_opened_anew_after_a_data_loss_is_found_by_the_replica_that_knew_the_former_one(
    replicas: Replicas,
) -> None:
    async with replicas.serving() as first, replicas.serving() as second:
        await opened(first, "a")
        former = replicas.backend.only
        replicas.empty()
        await former.die(announced=False)  # the emptied store knows no session that ends with it
        await is_whole(second)
        after = await opened(second, "a")

        assert not (await stepped(first, "a")).error
        assert await leases(first) == {"a": after.lease}
        (worker,) = (one for one in replicas.backend.workers.values() if one.is_running)
        assert (former.ran, worker.ran) == ([], ["go_on"])


async def test_an_opening_that_waits_during_the_data_loss_gets_a_slot_that_is_really_free(replicas: Replicas) -> None:
    replicas.environments = [environment(slots=2, max_workers=1)]
    async with replicas.serving() as first, replicas.serving() as second:
        for name in ("a", "b"):
            await opened(first, name)
        worker = replicas.backend.only
        waiting = asyncio.ensure_future(opened(second, "c"))
        await first.eventually_waiting(1)

        replicas.empty()
        late = asyncio.ensure_future(opened(first, "d"))
        await is_whole(first)
        await first.eventually_waiting(2)
        assert len(worker.sessions) == 2, "no slot is given away twice"
        for name in ("a", "b"):
            await second.sessions.close(OWNER, name)

        assert {(await waiting).name, (await late).name} == {"c", "d"}
        assert await first.used() == 2
        assert len(worker.sessions) == 2


async def test_a_third_party_worker_keeps_remembered_sessions_takes_no_new_sessions_and_stops(
    replicas: Replicas,
) -> None:
    replicas.environments = [image(ServerProtocol.OPENENV, slots=4, max_workers=2)]
    async with replicas.serving() as first, replicas.serving() as second:
        before = {"a": (await opened(first, "a")).lease, "b": (await opened(second, "b")).lease}
        async with replicas.serving() as third:
            await opened(third, "c")
        worker = replicas.backend.only.worker.id

        replicas.empty()
        await is_whole(first)

        assert await leases(first) == before
        [entry] = await first.workers("image")
        assert (entry.worker.id, entry.worker.state, entry.used) == (worker, WorkerState.DRAINING, 2)
        new = await opened(first, "d")
        assert new.worker != worker, "nobody knows what else the old one holds"
        for gateway, name in ((first, "a"), (second, "b")):
            assert not (await stepped(gateway, name, COUNT)).error
        with pytest.raises(SessionNotFound):
            await stepped(first, "c", COUNT)
        for name in ("a", "b"):
            await first.sessions.close(OWNER, name)
        await until(lambda: worker in replicas.backend.stopped)


async def test_a_worker_that_does_not_answer_is_not_adopted_and_the_audit_removes_it(replicas: Replicas) -> None:
    async with replicas.serving() as first:
        await opened(first, "a")
        worker = replicas.backend.only
        worker.listing.clear()

        replicas.empty()
        await is_whole(first)
        assert await first.workers() == []
        findings = await first.audit.once()

        assert findings.orphans == (worker.worker.id,)
        assert not worker.is_running
        with pytest.raises((SessionNotFound, SessionClosed)):
            await stepped(first, "a")
        assert (await opened(first, "a")).worker != worker.worker.id


async def test_a_third_party_server_still_takes_sessions_after_the_data_loss(replicas: Replicas) -> None:
    kind = image(ServerProtocol.OPENENV, slots=4)
    replicas.environments = [replace(kind, server=Server(url="http://127.0.0.1:9"))]
    async with replicas.serving() as first, replicas.serving() as second:
        before = {"a": (await opened(first, "a")).lease, "b": (await opened(second, "b")).lease}
        [entry] = await first.workers("image")
        worker = entry.worker.id

        replicas.empty()
        await is_whole(first)

        assert await leases(first) == before
        new = await opened(second, "c")
        assert new.worker == worker
        [entry] = await first.workers("image")
        assert (entry.worker.state, entry.used) == (WorkerState.READY, 3)
        assert replicas.backend.stopped == []


async def test_sessions_of_an_older_restored_state_end_if_their_workers_do_not_have_them(replicas: Replicas) -> None:
    async with replicas.serving() as first:
        await opened(first, "a")
        b = await opened(first, "b")
        with replicas.world.server.client() as client:
            kept = {key: client.dump(key) for key in _lasting(replicas.world.keys(client), b)}
        await first.sessions.close(OWNER, "b")
        c = await opened(first, "c")

        replicas.empty()
        with replicas.world.server.client() as client:
            for key, value in kept.items():
                assert isinstance(value, bytes)
                client.restore(key, 0, value)
        await is_whole(first)

        assert (await leases(first)).keys() == {"a", "c"}
        assert (await leases(first))["c"] == c.lease
        assert await first.used() == 2
        assert set(replicas.backend.only.sessions) == {one.id for one in await first.store.sessions()}


async def test_a_silent_worker_of_an_older_restored_state_takes_no_more_sessions(
    replicas: Replicas,
) -> None:
    async with replicas.serving() as first:
        a = await opened(first, "a")
        worker = replicas.backend.only
        with replicas.world.server.client() as client:
            kept = {key: client.dump(key) for key in _lasting(replicas.world.keys(client), a)}
        b = await opened(first, "b")  # the older state does not have this session
        worker.listing.clear()

        replicas.empty()
        with replicas.world.server.client() as client:
            for key, value in kept.items():
                assert isinstance(value, bytes)
                client.restore(key, 0, value)
        await is_whole(first)

        [entry] = [one for one in await first.workers() if one.worker.id == worker.worker.id]
        assert entry.worker.state is WorkerState.DRAINING
        assert (await opened(first, "c")).worker != worker.worker.id
        assert not (await stepped(first, "a")).error
        assert not (await stepped(first, "b")).error
        assert (await leases(first))["b"] == b.lease
        worker.listing.set()


def _lasting(keys: list[str], session: Session) -> list[str]:
    kinds = ("session", "deadlines", "worker", "held", "workers", "free", "number", "fence")
    return [key for key in keys if key.split(":")[1] in kinds]


async def test_a_replica_that_starts_on_an_empty_store_removes_no_worker_and_skips_the_grace_time(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.pool.recovery.GRACE_S", 3600.0)  # applies only if workers do not list all sessions
    async with replicas.serving() as first:
        session = await opened(first, "a")
    worker = replicas.backend.only
    replicas.empty()
    later = await replicas.another()

    with pytest.raises(StoreUnavailable):
        await later.audit.once()
    await later.leadership.until_complete()
    findings = await later.audit.begin()

    assert (findings.adopted, findings.orphans, findings.lost) == ((worker.worker.id,), (), ())
    assert await leases(later) == {"a": session.lease}
    async with later.looping():
        assert not (await stepped(later, "a")).error
    await later.aclose()


async def test_two_replicas_that_start_concurrently_on_an_empty_store_rebuild_it_once(
    replicas: Replicas, caplog: pytest.LogCaptureFixture
) -> None:
    async with replicas.serving() as first:
        session = await opened(first, "a")
    worker = replicas.backend.only
    asked = worker.lists_asked
    replicas.empty()
    caplog.clear()
    caplog.set_level("INFO", "gateway.pool")

    async with contextlib.AsyncExitStack() as both:
        started = await asyncio.gather(
            *(both.enter_async_context(one) for one in (replicas.serving(), replicas.serving()))
        )
        assert [await leases(one) for one in started] == [{"a": session.lease}] * 2
        events = Counter(record.getMessage().partition(" ")[0] for record in caplog.records)
        assert events["store_rebuilt"] == events["worker_taken_back"] == 1
        # A machine that stands still for longer than a lead lasts gives the lead, and the rebuilding, to the next one.
        assert asked < worker.lists_asked <= asked + events["lead_taken"]
        assert worker.is_running
        assert EnvironmentName("math") in await started[0].store.load()
