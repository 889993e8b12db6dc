"""A running worker that does not answer gets no new sessions until it answers, and loses none of its sessions."""

from __future__ import annotations

import asyncio

import pytest

from gateway.core.environment import Server, ServerProtocol
from gateway.core.session import SessionState
from gateway.core.worker import WorkerState
from gateway.sessions.cache import session_id
from tests.fakes.eventually import eventually, until
from tests.fakes.workers import FakeWorker
from tests.service.foreign_world import foreign, image
from tests.service.stack import OWNER, Replica, Stack, environment, running
from tests.service.wire import call, create, delete, result, under_way


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Query a worker early and with a short timeout. A worker that answers here takes less."""
    monkeypatch.setattr("gateway.sessions.interruption.SUSPECT_S", 0.05)
    monkeypatch.setattr("gateway.sessions.liveness.ANSWER_S", 0.3)


async def served_by(gateway: Replica, stack: Stack, sid: str) -> FakeWorker:
    """Return the worker of a session, as the store records it."""
    return stack.backend.workers[(await gateway.store.find(session_id(OWNER, sid))).worker]


async def test_a_create_goes_to_another_worker_and_the_silent_worker_takes_sessions_once_it_answers() -> None:
    async with running(environment(slots=2, min_workers=2)) as (stack, gateway, client):
        await gateway.eventually_workers(2, state=WorkerState.READY)
        await create(client, sid="before")
        silent = await served_by(gateway, stack, "before")
        silent.is_awake.clear()
        await create(client, sid="elsewhere")  # goes to the less used worker
        answer = await create(client, sid="s0")  # of two equally used workers the older is next: the silent worker

        answering = await served_by(gateway, stack, "s0")
        sids = {session_id(OWNER, sid) for sid in ("elsewhere", "s0")}
        assert answer.status_code == 200
        assert set(answering.sessions) == sids
        assert [entry.worker.id for entry in await gateway.workers(state=WorkerState.SUSPECT)] == [silent.worker.id]
        assert result(await call(client, sid="s0"))["ok"]

        silent.is_awake.set()

        await gateway.eventually_workers(2, state=WorkerState.READY)
        await until(lambda: set(silent.sessions) == {session_id(OWNER, "before")})
        assert result(await call(client, sid="before"))["ok"], "it lost nothing"
        assert (await create(client, sid="later")).status_code == 200
        assert await served_by(gateway, stack, "later") is silent
        assert len(await gateway.store.sessions()) == await gateway.used() == 4
        assert set(answering.sessions) == sids


async def test_a_create_waits_for_the_only_worker_to_answer_and_opens_one_session() -> None:
    async with running(environment(slots=2, max_workers=1)) as (stack, gateway, client):
        await create(client, sid="before")
        worker = stack.backend.only
        worker.is_awake.clear()
        async with under_way(create(client)) as [opening]:
            await gateway.eventually_workers(1, state=WorkerState.SUSPECT)
            worker.is_awake.set()

            assert (await opening).status_code == 200

        async def has_both() -> None:
            assert set(worker.sessions) == {session_id(OWNER, sid) for sid in ("before", "one")}
            assert {session.state for session in await gateway.store.sessions()} == {SessionState.OPEN}

        await eventually(has_both)
        leases = {session.lease for session in await gateway.store.sessions()}
        assert {session.lease for session in worker.sessions.values()} == leases
        assert result(await call(client))["ok"]
        assert (await delete(client)).status_code == 200


async def test_a_create_whose_time_ends_before_its_silent_worker_answers_may_try_again() -> None:
    async with running(environment(slots=2, min_workers=1, max_workers=1, open_s=0.2)) as (stack, gateway, client):
        await gateway.eventually_workers(1, state=WorkerState.READY)
        stack.backend.only.is_awake.clear()

        answer = await create(client)

        assert (answer.status_code, answer.json()["code"]) == (429, "pool_exhausted")
        assert "does not answer" in answer.json()["detail"]
        assert int(answer.headers["retry-after"]) >= 1


async def test_a_silent_worker_without_a_session_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.pool.suspects.REPLACED_S", 0.1)
    async with running(environment(slots=2, max_workers=1)) as (stack, gateway, client):
        await create(client, sid="before")
        await delete(client, sid="before")
        silent = stack.backend.only
        silent.is_awake.clear()

        answer = await create(client)

        assert answer.status_code == 200
        assert stack.backend.only is not silent
        assert silent.worker.id in stack.backend.stopped
        assert await served_by(gateway, stack, "one") is stack.backend.only


async def test_a_restart_replaces_a_silent_worker() -> None:
    async with running(environment(slots=2, max_workers=1, close_s=0.2)) as (stack, gateway, client):
        await create(client, sid="before")
        silent = stack.backend.only
        silent.is_awake.clear()
        async with under_way(create(client)) as [opening]:
            await gateway.eventually_workers(1, state=WorkerState.SUSPECT)

            restarted = (await client.post("/admin/v1/environments/math/restart")).json()
            await delete(client, sid="before")

            assert restarted["draining"] == [silent.worker.id]
            assert (await opening).status_code == 200

        assert silent.worker.id in stack.backend.stopped
        assert await served_by(gateway, stack, "one") is stack.backend.only


async def test_a_create_waits_for_a_long_opening_in_a_worker_that_answers() -> None:
    async with running(environment(slots=2, min_workers=2)) as (stack, gateway, client):
        await gateway.eventually_workers(2, state=WorkerState.READY)
        async with under_way(create(client, on_create="gate")) as [opening]:
            await gateway.eventually_used(1)
            worker = await served_by(gateway, stack, "one")
            before = len(worker.requests)
            await until(lambda: len(worker.requests) > before + 1)  # the worker answered repeated queries
            assert not opening.done()
            worker.gate.set()

            assert (await opening).status_code == 200

        assert worker.created == 1
        assert await gateway.workers(state=WorkerState.SUSPECT) == []


async def test_a_trainer_that_hangs_up_while_its_worker_is_silent_leaves_nothing() -> None:
    async with running(environment(slots=2, max_workers=1, close_s=0.2)) as (stack, gateway, client):
        await create(client, sid="before")
        worker = stack.backend.only
        worker.is_awake.clear()
        async with under_way(create(client)) as [opening]:
            await gateway.eventually_workers(1, state=WorkerState.SUSPECT)
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)

        worker.is_awake.set()

        await gateway.eventually_used(1)
        await until(lambda: set(worker.sessions) == {session_id(OWNER, "before")})
        await gateway.eventually_waiting(0)


# -- third-party images ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ServerProtocol)
async def test_an_opening_in_a_silent_third_party_worker_continues_and_later_openings_go_elsewhere(
    protocol: ServerProtocol,
) -> None:
    async with foreign(image(protocol, slots=3, max_workers=2, min_workers=2)) as world:
        gateway, asked = world.gateway, {"env_name": "image"}
        await gateway.eventually_workers(2, "image", state=WorkerState.READY)
        await create(world.http, sid="before", **asked)
        [silent] = world.image.opened_in
        awake = world.image.asleep[silent] = asyncio.Event()
        await create(world.http, sid="elsewhere", **asked)  # goes to the less used worker
        async with under_way(create(world.http, sid="caught", **asked)) as [caught]:  # goes to the silent worker
            await gateway.eventually_workers(1, "image", state=WorkerState.SUSPECT)
            later = [await create(world.http, sid=f"later-{number}", **asked) for number in range(2)]

            assert [answer.status_code for answer in later] == [200, 200]
            assert world.image.opened_in.count(silent) == 1
            assert not caught.done()
            awake.set()

            assert (await caught).status_code == 200
        await gateway.eventually_workers(2, "image", state=WorkerState.READY)
        assert world.image.opened_in[0] == world.image.opened_in[-1] == silent
        assert len(world.image.opened_in) == 5, "no opening was repeated"


async def test_a_third_party_worker_that_answers_during_a_long_opening_is_not_suspect() -> None:
    async with foreign(image(ServerProtocol.OPENENV, slots=2)) as world:
        opening = create(world.http, env_name="image", on_open="gate")
        async with under_way(opening) as [caught]:
            await until(lambda: world.image.asked["alive"] > 2)
            assert [entry.worker.state for entry in await world.gateway.workers("image")] == [WorkerState.READY]
            assert not caught.done()
            world.image.gate.set()

            assert (await caught).status_code == 200


async def test_a_silent_third_party_server_is_polled_and_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.pool.suspects.REPLACED_S", 0.0)
    server = Server(url="http://127.0.0.1:9")
    async with foreign(image(ServerProtocol.ORS, slots=2, setup_s=1.0, close_s=0.1, server=server)) as world:
        await create(world.http, sid="before", env_name="image")
        [silent] = world.image.opened_in
        await delete(world.http, sid="before")
        awake = world.image.asleep[silent] = asyncio.Event()
        failed = await create(world.http, env_name="image")
        assert failed.status_code == 504
        await world.gateway.eventually_used(0, "image")
        asked = world.image.asked["alive"]
        await until(lambda: world.image.asked["alive"] > asked + 1)

        awake.set()

        assert (await create(world.http, env_name="image")).status_code == 200
        assert set(world.image.opened_in) == {silent}
