"""Several replicas on one store, restarted replicas, and the repairs of an audit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from gateway.core.ids import WorkerId
from gateway.core.worker import BackendWorker, Worker, WorkerState
from gateway.sessions.cache import session_id
from tests.fakes.eventually import until
from tests.fakes.workers import FakeBackend, Start
from tests.service.stack import OWNER, Replica, environment, running, stack
from tests.service.wire import call, create, delete, detail, under_way


async def test_sessions_go_on_after_a_restart_of_the_gateway() -> None:
    async with stack() as built:
        async with built.first.looping(), built.first.serving() as client:
            await create(client)
            await call(client)
        worker = built.backend.only
        restarted = built.another()

        findings = await restarted.audit.begin()
        async with restarted.looping(), restarted.serving() as client:
            called = await call(client)
            deleted = await delete(client)

        assert findings.adopted == (worker.worker.id,)
        assert (findings.orphans, findings.lost) == ((), ())
        assert called.status_code == 200
        assert deleted.status_code == 200
        assert worker.ran == ["echo", "echo"]
        assert worker.deleted == [session_id(OWNER, "one")]
        assert await restarted.used() == 0


async def test_an_identical_create_after_a_restart_gets_the_same_session() -> None:
    async with stack() as built:
        async with built.first.looping(), built.first.serving() as client:
            await create(client)
        restarted = built.another()
        async with restarted.looping(), restarted.serving() as client:
            again = await create(client)

        assert again.status_code == 200
        assert built.backend.only.created == 1


async def test_every_replica_serves_every_session_and_is_notified_of_its_end() -> None:
    async with stack() as built:
        second = built.another()
        async with (
            built.first.looping(),
            second.looping(),
            built.first.serving() as one,
            second.serving() as other,
        ):
            await create(one)
            before = await call(other)
            await delete(one)

            after = await call(other)

        assert (before.status_code, after.status_code) == (200, 404)


async def test_a_replica_that_missed_a_delete_learns_it_from_the_worker() -> None:
    async with stack() as built:
        deaf = built.another()  # its loops do not run, so it follows no notices
        async with built.first.looping(), built.first.serving() as one, deaf.serving() as other:
            await create(one)
            await call(other)
            await delete(one)

            answer = await call(other)

        assert (answer.status_code, detail(answer)) == (404, "Active environment not found")


async def test_a_replica_that_missed_that_a_session_moved_finds_it_where_it_is() -> None:
    async with stack(environment(slots=1, max_workers=2)) as built:
        deaf = built.another()
        async with built.first.looping(), built.first.serving() as one, deaf.serving() as other:
            await create(one, question="before")
            await call(other)
            await delete(one)
            await create(one, sid="in the way")
            await create(one, question="after")

            answer = await other.get("/math/prompt")

        assert (answer.status_code, answer.text.count("after")) == (200, 1), answer.text


async def test_an_audit_removes_a_worker_that_only_the_backend_knows() -> None:
    async with stack() as built:
        kind = built.environments[0]
        stray = Worker(id=WorkerId("stray"), environment=kind.name, digest=kind.digest(), slots=1)
        await built.backend.start(stray, kind)

        findings = await built.first.audit.once(undoing_s=0.1)

        assert findings.orphans == ("stray",)
        assert built.first.metrics.tally(kind.name).leaked == 1
        assert built.backend.workers == {}


class _Undoing(FakeBackend):
    """A backend whose worker is being removed: it is gone from the second listing on."""

    looks = 0

    async def found(self) -> list[BackendWorker]:
        found = await super().found()
        self.looks += 1
        if self.looks == 1:
            await super().stop(WorkerId("undone"))
        return found


async def test_a_worker_that_is_being_removed_during_an_audit_does_not_count_as_leaked(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    async with stack() as built:
        kind, backend = built.environments[0], _Undoing(tmp_path)
        backend.starts[kind.name] = Start.NEVER_READY
        undone = Worker(id=WorkerId("undone"), environment=kind.name, digest=kind.digest(), slots=1)
        await backend.start(undone, kind)
        replica = Replica(store=built.store, backend=backend, environments=[kind], name="another")

        with caplog.at_level("INFO"):
            findings = await replica.audit.once()

        assert findings.orphans == ()
        assert backend.looks == 2, "it looks again as long as something is there, and no longer"
        assert replica.metrics.tally(kind.name).leaked == 0
        assert backend.stopped == ["undone"], "it was left to who is removing it"
        assert "worker_removed" not in caplog.text
        await replica.aclose()


class _Late(FakeBackend):
    """A backend whose worker is registered in the store during the audit's second listing."""

    looks = 0
    tell: Callable[[], Awaitable[None]]

    async def found(self) -> list[BackendWorker]:
        self.looks += 1
        if self.looks == 2:
            await self.tell()
        return await super().found()


async def test_a_worker_that_is_registered_in_the_store_during_an_audit_is_no_orphan(tmp_path: Path) -> None:
    async with stack() as built:
        kind, backend = built.environments[0], _Late(tmp_path)
        late = Worker(id=WorkerId("late"), environment=kind.name, digest=kind.digest(), slots=1)
        backend.tell = partial(built.store.add_worker, late)
        await backend.start(late, kind)
        replica = Replica(store=built.store, backend=backend, environments=[kind], name="another")

        findings = await replica.audit.once(undoing_s=0.5)

        assert findings.orphans == ()
        assert list(backend.workers) == ["late"]
        await replica.aclose()
        await backend.aclose()


async def test_an_audit_ends_the_sessions_of_a_worker_that_only_the_store_knows() -> None:
    async with running() as (stack, gateway, client):
        await create(client)
        await stack.backend.stop(stack.backend.only.worker.id)

        await gateway.audit.once()

        answer = await call(client)
        assert (answer.status_code, "worker_lost" in detail(answer)) == (410, True)
        assert await gateway.used() == 0


async def test_an_audit_does_not_touch_a_worker_that_is_starting() -> None:
    async with running() as (stack, gateway, client):
        stack.backend.may_start.clear()
        async with under_way(create(client)) as [creating]:
            await gateway.eventually_workers(1, state=WorkerState.STARTING)

            findings = await gateway.audit.begin()
            stack.backend.may_start.set()
            answer = await creating

        assert (findings.orphans, findings.lost, findings.adopted) == ((), (), ())
        assert answer.status_code == 200


async def test_a_worker_that_does_not_answer_when_a_gateway_starts_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.pool.audit.ANSWER_S", 0.2)
    async with stack() as built:
        async with built.first.looping(), built.first.serving() as client:
            await create(client)
        silent = built.backend.only
        await silent.fall_silent()
        restarted = built.another()

        findings = await restarted.audit.begin()

        assert findings.lost == (silent.worker.id,)
        assert built.backend.workers == {}
        async with restarted.looping(), restarted.serving() as client:
            assert (await call(client)).status_code == 410


async def test_an_audit_goes_on_when_one_worker_cannot_be_removed() -> None:
    async with running(environment(slots=1, max_workers=2)) as (stack, gateway, client):
        await asyncio.gather(create(client, sid="a"), create(client, sid="b"))
        for worker in list(stack.backend.workers.values()):
            await worker.die(announced=False)
        stack.backend.unstoppable.add(min(stack.backend.workers))

        try:
            await gateway.audit.once()
        finally:
            stack.backend.unstoppable.clear()
        assert len(stack.backend.workers) == 1  # the worker that could not be removed
        await gateway.audit.once()

        await until(lambda: not any(not one.is_running for one in stack.backend.workers.values()))
        assert [(await call(client, sid=sid)).status_code for sid in ("a", "b")] == [410, 410]


async def test_a_start_does_not_wait_for_workers_that_the_last_gateway_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.pool.audit.UNDOING_S", 0.1)
    async with stack() as built:
        kind = built.environments[0]
        stray = Worker(id=WorkerId("stray"), environment=kind.name, digest=kind.digest(), slots=1)
        await built.backend.start(stray, kind)

        findings = await built.first.audit.begin()
        left = list(built.backend.workers)
        auditing = asyncio.ensure_future(built.first.audit.run())
        try:
            await until(lambda: not built.backend.workers)
        finally:
            auditing.cancel()
            await asyncio.wait({auditing})

        assert (findings.orphans, left) == (("stray",), ["stray"])
        assert built.first.metrics.tally(kind.name).leaked == 1
