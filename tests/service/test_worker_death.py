"""Workers that die, hang or send invalid responses while sessions are open in them."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

import pytest

from gateway.core.ids import WorkerId
from gateway.core.leader_lease import LEASE_S
from gateway.core.session import CloseReason
from gateway.core.worker import Worker, WorkerState
from gateway.sessions.cache import session_id
from gateway.stores.memory.sessions import MemoryStore
from tests.deadlines import HANG_S
from tests.fakes.clock import Clock
from tests.fakes.eventually import eventually, until
from tests.fakes.workers import FakeBackend
from tests.service.stack import OWNER, Replica, environment, impatience, running, stack, tasks
from tests.service.test_areal import started, step
from tests.service.test_step_log import listed, logging
from tests.service.wire import EVENT_STREAM, call, create, delete, detail, events, under_way


async def test_a_worker_that_dies_before_it_answers_a_call_is_410_with_the_reason_and_the_tool_ran_once() -> None:
    async with running() as (stack, gateway, client):
        await create(client)
        worker = stack.backend.only
        async with under_way(call(client, "quiet")) as [calling]:
            await until(lambda: worker.waiting == 1)

            await worker.die()
            answer = await calling

        again = await call(client)
        assert answer.status_code == 410
        assert (again.status_code, "worker_lost" in detail(again)) == (410, True)
        assert worker.ran == ["quiet"]
        assert await gateway.used() == 0


async def test_a_worker_that_dies_in_mid_stream_ends_it_with_an_error_event() -> None:
    async with running() as (stack, _, client):
        await create(client)
        worker = stack.backend.only

        answer = await call(client, "die_later")

        assert answer.status_code == 200
        assert [name for name, _ in events(answer.text)] == ["task_id", "error"]
        assert "worker" in events(answer.text)[-1][1]
        assert (await call(client)).status_code == 410
        assert worker.ran == ["die_later"]


async def test_all_calls_in_a_worker_that_dies_fail_and_other_workers_are_not_affected() -> None:
    async with running(environment(slots=10, max_workers=2)) as (stack, gateway, client):
        await asyncio.gather(*(create(client, sid=f"s{number}") for number in range(11)))
        victim, other = sorted(stack.backend.workers.values(), key=lambda worker: -len(worker.sessions))
        victims = [sid for sid in (f"s{n}" for n in range(11)) if session_id(OWNER, sid) in victim.sessions]
        others = [sid for sid in (f"s{n}" for n in range(11)) if sid not in victims]
        async with under_way(*(call(client, "gate", sid=sid) for sid in victims + others)) as calls:
            await until(lambda: (victim.waiting, other.waiting) == (len(victims), len(others)))

            await victim.die()
            broken = await asyncio.gather(*calls[: len(victims)])
            other.gate.set()
            whole = await asyncio.gather(*calls[len(victims) :])

        assert len(victims) + len(others) == 11
        assert {events(answer.text)[-1][0] for answer in broken} == {"error"}
        assert {events(answer.text)[-1][0] for answer in whole} == {"end"}
        assert await gateway.open_sessions() == len(others)


async def test_after_an_unannounced_death_calls_get_typed_errors_and_an_audit_ends_the_sessions() -> None:
    async with running() as (stack, gateway, client):
        await create(client)
        worker = stack.backend.only
        async with under_way(call(client, "quiet")) as [calling]:
            await until(lambda: worker.waiting == 1)
            await worker.die(announced=False)
            in_flight = await calling

        unsent = await call(client)
        await gateway.audit.once()
        after = await call(client)

        assert in_flight.status_code == 410
        assert (unsent.status_code, unsent.headers["retry-after"]) == (503, "1")  # no byte went out: nothing ran
        assert (after.status_code, "worker_lost" in detail(after)) == (410, True)
        assert worker.ran == ["quiet"]
        assert await gateway.used() == 0


async def test_the_pool_replaces_a_worker_that_died() -> None:
    async with running(environment(min_workers=1, max_workers=1)) as (stack, gateway, client):
        await gateway.eventually_workers(1)
        await create(client)
        dead = stack.backend.only

        await dead.die()

        await until(lambda: dead.worker.id in stack.backend.stopped)
        assert (await create(client, sid="two")).status_code == 200
        assert stack.backend.only is not dead


@pytest.mark.parametrize("tool", ["fail", "garbage", "die"])
async def test_a_call_that_may_have_run_is_never_answered_with_500_or_more(tool: str) -> None:
    async with running() as (stack, _, client):
        await create(client)
        worker = stack.backend.only

        answer = await call(client, tool)

        assert answer.status_code == 410
        assert worker.ran == [tool]


async def test_a_call_to_a_silent_worker_ends_with_410(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.upstreams.ors.own.SILENCE_S", 0.2)
    async with running() as (stack, _, client):
        await create(client)

        answer = await call(client, "hang")

        assert answer.status_code == 410
        assert "silent" in detail(answer)
        assert stack.backend.only.ran == ["hang"]


async def test_a_call_that_takes_longer_than_its_environment_allows_ends_with_an_error_event() -> None:
    async with running(environment(call_s=0.3)) as (stack, _, client):
        await create(client)

        answer = await call(client, "gate")

        assert [name for name, _ in events(answer.text)] == ["task_id", "error"]
        assert stack.backend.only.ran == ["gate"]


@pytest.mark.parametrize("goes_on", [False, True])
async def test_an_episode_whose_last_call_took_too_long_has_no_reward(tmp_path: Path, goes_on: bool) -> None:
    async with logging(tmp_path, environment(call_s=0.3)) as (_, gateway, client):
        await create(client, summary={"finished": False, "reward": 0.5})
        late = await call(client, "gate")
        if goes_on:
            wish = {"name": "echo", "input": {}}
            later = await client.post("/math/call", json=wish, headers={"Accept": "application/json"})
            assert later.json()["ok"] is True
        await delete(client)
        await gateway.eventually_used(0)
        (line,) = await listed(client)

    assert events(late.text)[-1][1].startswith("timeout: ")
    expected = ("stopped", 0.5) if goes_on else ("infrastructure", None)
    assert (line["outcome"], line["reward"]) == expected


async def test_an_error_event_after_a_partial_stream_is_a_separate_event() -> None:
    async with running(environment(call_s=0.3)) as (_, _gateway, client):
        await create(client)

        answer = await call(client, "gate")

        assert answer.text.endswith("\r\n\r\n")
        assert answer.text.index("\r\n\r\nevent: error\r\n") > 0


async def test_a_worker_s_404_that_means_the_operation_is_passed_on_and_the_session_lives() -> None:
    async with running() as (_, gateway, client):
        await create(client)

        answer = await call(client, "not_implemented")

        assert (answer.status_code, "does not implement" in detail(answer)) == (404, True)
        assert (await call(client)).status_code == 200
        assert await gateway.used() == 1


async def test_a_session_that_its_worker_no_longer_knows_is_reported_as_lost_and_its_slot_is_free() -> None:
    async with running() as (stack, gateway, client):
        await create(client)
        stack.backend.only.sessions.clear()

        first, second = await call(client), await call(client)

        assert (first.status_code, "worker_lost" in detail(first)) == (410, True)
        assert (second.status_code, "worker_lost" in detail(second)) == (410, True)
        await gateway.eventually_used(0)


async def test_a_teardown_that_fails_drains_the_worker_and_answers_the_trainer() -> None:
    async with running(environment(slots=2, max_workers=2)) as (stack, gateway, client):
        await create(client, on_delete="fail")
        bad = stack.backend.only

        answer = await delete(client)
        after = await create(client, sid="two")

        assert answer.status_code == 200
        assert after.status_code == 200
        assert session_id(OWNER, "two") not in bad.sessions
        await until(lambda: bad.worker.id in stack.backend.stopped)
        assert await gateway.used() == 1


async def test_a_teardown_that_hangs_times_out_and_its_slot_is_not_used_again() -> None:
    async with running(environment(slots=2, max_workers=2, close_s=0.2)) as (stack, gateway, client):
        await create(client, on_delete="hang")
        bad = stack.backend.only

        answer = await delete(client)
        await create(client, sid="two")

        assert answer.status_code == 200
        assert session_id(OWNER, "two") not in bad.sessions
        await until(lambda: bad.worker.id in stack.backend.stopped)
        assert await gateway.used() == 1


@pytest.mark.parametrize("how", ["fail", "hang"])
async def test_an_unfinished_episode_whose_teardown_fails_in_its_worker_counts_as_an_infrastructure_failure(
    how: str,
) -> None:
    async with running(environment(close_s=0.2)) as (_, gateway, client):
        await create(client, on_delete=how)
        await call(client, "go_on")

        await delete(client)

        shown = gateway.metrics.exposition().decode().splitlines()
        counted = [line for line in shown if line.startswith("gateway_episodes_total{")]
        assert counted == ['gateway_episodes_total{environment="math",outcome="infrastructure"} 1.0']
        assert not [line for line in shown if line.startswith("gateway_episode_reward_count{")]


async def test_a_create_that_its_worker_does_not_answer_in_time_releases_its_slot() -> None:
    async with running(environment(slots=1, max_workers=1)) as (stack, gateway, client):
        with impatience(gateway, timeouts={"setup_s": 0.3}):
            answer = await create(client, on_create="gate")

        assert answer.status_code in (500, 504)
        await gateway.eventually_used(0)
        assert stack.backend.only.deleted == [session_id(OWNER, "one")]
        assert (await create(client, sid="two")).status_code == 200


async def test_a_trainer_that_hangs_up_in_a_call_does_not_end_the_call_or_the_session() -> None:
    async with running() as (stack, gateway, client):
        await create(client)
        worker = stack.backend.only
        body = json.dumps({"name": "gate", "input": {}})
        headers = {"Content-Type": "application/json", **EVENT_STREAM}
        async with client.stream("POST", "/math/call", content=body, headers=headers) as answer:
            assert answer.status_code == 200
        busy_in_the_worker = worker.sessions[session_id(OWNER, "one")].busy

        worker.gate.set()

        assert busy_in_the_worker == 1
        assert (await call(client)).status_code == 200
        assert worker.ran == ["gate", "echo"]
        assert await gateway.used() == 1


async def test_an_episode_is_opened_elsewhere_if_its_assigned_worker_has_died_unnoticed() -> None:
    async with running(environment(max_workers=2)) as (stack, gateway, client):
        await create(client)
        dead = stack.backend.only
        await dead.die(announced=False)

        opened = await create(client, sid="two")
        answer = await call(client, sid="two")

        assert (opened.status_code, answer.status_code) == (200, 200)
        assert (await gateway.found("two")).worker != dead.worker.id


async def test_an_episode_whose_worker_dies_during_the_opening_is_opened_in_another_worker() -> None:
    async with running(environment(max_workers=2)) as (stack, gateway, client):
        async with under_way(create(client, on_create="gate")) as [opening]:
            await until(lambda: any(worker.waiting for worker in stack.backend.workers.values()))
            first = stack.backend.only
            await first.die()
            await until(lambda: any(worker.waiting for worker in stack.backend.workers.values() if worker is not first))
            (second,) = (worker for worker in stack.backend.workers.values() if worker is not first)
            second.gate.set()
            opened = await opening

        assert opened.status_code == 200
        assert (await gateway.found()).worker == second.worker.id
        assert await gateway.used() == 1


async def test_an_episode_whose_workers_die_during_the_opening_is_refused_after_the_second_worker() -> None:
    async with running(environment(max_workers=1)) as (stack, gateway, client):
        died: set[str] = set()
        async with under_way(create(client, on_create="gate")) as [opening]:
            for _ in range(2):
                await until(lambda: any(w.waiting for id, w in stack.backend.workers.items() if id not in died))
                (worker,) = (w for id, w in stack.backend.workers.items() if id not in died)
                died.add(worker.worker.id)
                await worker.die()
            refused = await opening

        assert refused.status_code == 502
        assert await gateway.used() == 0


class _Remote(MemoryStore):
    """A store that lets other callers run between two calls of one caller, as a remote store does."""

    async def worker(self, id: WorkerId) -> Worker | None:
        found = await super().worker(id)
        for _ in range(10):
            await asyncio.sleep(0)
        return found


async def test_a_death_that_an_event_and_an_audit_report_is_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with stack(environment(slots=4)) as built:
        store = _Remote()
        replica = Replica(store=store, backend=built.backend, environments=built.environments, name="remote")
        async with replica.looping(), replica.serving() as client:
            await create(client)
            worker = built.backend.only

            await worker.die(announced=False)
            ends = [
                replica.worker_stops.lost(worker.worker.id),
                replica.audit.once(),
                replica.worker_stops.lost(worker.worker.id),
            ]
            await asyncio.gather(*ends)

            assert b'gateway_workers_lost_total{environment="math",reason="worker_lost"} 1.0' in (
                replica.metrics.exposition()
            )
            assert caplog.text.count("worker_lost environment=math") == 1
        await replica.aclose()
        await store.aclose()


@pytest.mark.parametrize("sessions", [0, 1])
async def test_a_death_that_is_reported_to_two_replicas_is_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture, sessions: int
) -> None:
    kind = environment(slots=4, min_workers=1, max_workers=1)
    async with stack(kind) as built:
        store = _Remote()
        one, two = (
            Replica(store=store, backend=built.backend, environments=[kind], name=name) for name in ("one", "two")
        )
        async with one.looping(), two.looping(), one.serving() as client:
            await one.eventually_workers(1, state=WorkerState.READY)
            for number in range(sessions):
                await create(client, sid=f"s{number}")
            worker = built.backend.only

            await worker.die()
            await until(lambda: worker.worker.id in built.backend.stopped)

            lost = b'gateway_workers_lost_total{environment="math",reason="worker_lost"} 1.0'
            assert sorted(lost in replica.metrics.exposition() for replica in (one, two)) == [False, True]
            assert caplog.text.count("worker_lost environment=math") == 1
        for replica in (one, two):
            await replica.aclose()
        await store.aclose()


class _SlowToStop(FakeBackend):
    """A backend whose engine has stopped a worker but is slow to answer."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_answer = asyncio.Event()

    async def stop(self, id: WorkerId) -> None:
        await super().stop(id)
        await self.may_answer.wait()


async def test_a_worker_that_is_being_stopped_with_its_sessions_is_not_counted_as_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    async with stack(environment(), environment("coding"), clock=clock) as built:
        with tempfile.TemporaryDirectory(prefix="gw-") as folder:
            backend = _SlowToStop(Path(folder))
            first, later = (
                Replica(store=built.store, backend=backend, environments=some, name=name)
                for some, name in ((built.environments, "one"), (built.environments[:1], "two"))
            )
            async with first.looping(), first.serving() as client:
                await create(client, env_name="coding")
            clock.advance(LEASE_S)
            async with later.looping():
                await until(lambda: backend.stopped)

                auditing = asyncio.ensure_future(later.audit.once())
                await asyncio.wait({auditing}, timeout=HANG_S)
                backend.may_answer.set()
                findings = await auditing
                await later.eventually_workers(0, "coding")

            assert findings.lost == tuple(backend.stopped)
            assert "worker_lost" not in caplog.text
            assert b"gateway_workers_lost_total{" not in later.metrics.exposition()
            for replica in (first, later):
                await replica.aclose()


@pytest.mark.parametrize("accept", ["text/event-stream", "application/json"])
async def test_a_finished_episode_keeps_its_reward_whatever_happens_to_its_worker(tmp_path: Path, accept: str) -> None:
    async with logging(tmp_path) as (stack, gateway, client):
        await create(client)
        wish = {"name": "echo", "input": {}}
        answer = await client.post("/math/call", json=wish, headers={"Accept": accept})
        await stack.backend.only.die()
        await gateway.eventually_used(0)

        async def is_recorded() -> None:
            (line,) = await listed(client)
            assert (line["outcome"], line["reason"], line["reward"]) == ("finished", "worker_lost", 1.0)

        await eventually(is_recorded)
        assert answer.status_code == 200
        assert not any("result" in name for name in answer.headers)
        assert "x-session-result" not in answer.text.lower()


async def test_an_episode_that_its_worker_s_death_interrupted_has_no_reward(tmp_path: Path) -> None:
    async with logging(tmp_path) as (stack, gateway, client):
        await create(client)
        await call(client, "go_on")
        await stack.backend.only.die()
        await gateway.eventually_used(0)

        async def is_recorded() -> None:
            (line,) = await listed(client)
            assert (line["outcome"], line["reason"], line["reward"]) == ("infrastructure", "worker_lost", None)

        await eventually(is_recorded)


@pytest.mark.parametrize("how", ["fail", "hang"])
async def test_a_last_step_keeps_its_reward_if_the_teardown_fails(tmp_path: Path, how: str) -> None:
    train = tasks(train=[{"question": "1+1", "on_delete": how}])
    async with logging(tmp_path, environment(close_s=0.2), tasks_math=train) as (_, gateway, client):
        answer = await step(client, await started(client), "echo")
        await gateway.eventually_used(0)

        async def is_recorded() -> None:
            (line,) = await listed(client)
            assert (line["outcome"], line["reward"]) == ("finished", 1.0)

        await eventually(is_recorded)
        assert (answer.json()["done"], answer.json()["reward"]) == (True, 1.0)


async def test_an_operator_s_end_of_a_finished_episode_leaves_its_reward(tmp_path: Path) -> None:
    async with logging(tmp_path) as (_, gateway, client):
        await create(client)
        await call(client)
        [session] = await gateway.store.sessions()
        await gateway.sessions.end(session.owner, session.name, CloseReason.OPERATOR, wait_s=HANG_S)
        (line,) = await listed(client)

    assert (line["outcome"], line["reason"], line["reward"]) == ("finished", "operator", 1.0)


async def test_a_result_that_the_store_does_not_take_delays_an_answer_only_a_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with logging(tmp_path) as (stack, _, client):
        await create(client)

        async def never(*_: object) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(stack.store, "note_result", never)
        answer = await call(client)
        await delete(client)
        (line,) = await listed(client)

    assert events(answer.text)[-1][0] == "end"
    assert (line["outcome"], line["reward"]) == ("finished", 1.0)
