"""Creates that wait for a slot, creates that are sent twice, and creates whose trainer hangs up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.core.errors import PoolExhausted
from gateway.core.session import EpisodeRequest, SessionSetup
from gateway.core.worker import WorkerState
from gateway.sessions.cache import session_id
from tests.deadlines import HANG_S
from tests.fakes.eventually import until
from tests.fakes.workers import Start
from tests.service.stack import OWNER, environment, running
from tests.service.wire import call, create, delete, detail, hang_up, under_way

ONE_SLOT: dict[str, Any] = {"slots": 1, "max_workers": 1}


async def test_creates_wait_for_a_slot_and_are_served_in_order() -> None:
    async with running(environment(**ONE_SLOT)) as (stack, gateway, client):
        await create(client, sid="holder")
        served: list[str] = []

        async def waits(sid: str) -> None:
            answer = await create(client, sid=sid)
            assert answer.status_code == 200
            served.append(sid)

        waiting = []
        for place, sid in enumerate(("a", "b", "c"), 1):
            waiting.append(asyncio.ensure_future(waits(sid)))
            await gateway.eventually_waiting(place)
        for count, sid in enumerate(("holder", "a", "b"), 1):
            await delete(client, sid=sid)
            await until(lambda count=count: len(served) == count)  # type: ignore[misc]  # mypy has no type for this default
        await asyncio.gather(*waiting)

        assert served == ["a", "b", "c"]
        assert stack.backend.asked == 1


async def test_a_create_that_finds_no_slot_in_time_is_429_with_a_retry_time() -> None:
    async with running(environment(**ONE_SLOT, min_workers=1, open_s=0.1)) as (_, gateway, client):
        await gateway.eventually_workers(1, state=WorkerState.READY)
        await create(client)

        refused = await create(client, sid="two")

        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 10
        assert await gateway.waiting() == 0


async def test_an_opening_that_waited_until_its_deadline_is_refused_for_lack_of_capacity() -> None:
    async with running(environment(min_workers=1)) as (_, gateway, _client):
        await gateway.eventually_workers(1, state=WorkerState.READY)
        kind = gateway.catalog.wanted("math")

        with pytest.raises(PoolExhausted) as late:
            await gateway.sessions.open(
                EpisodeRequest(
                    owner=OWNER,
                    name="late",
                    environment=kind,
                    setup=SessionSetup(spec={}),
                    fingerprint="f",
                    within_s=-0.0008,
                )
            )

        assert late.value.detail == "no slot of math became free in time"
        await gateway.eventually_used(0)


async def test_as_many_workers_start_as_the_waiting_creates_need_and_no_more_than_are_allowed() -> None:
    async with running(environment(slots=2, max_workers=3)) as (stack, gateway, client):
        answers = await asyncio.gather(*(create(client, sid=f"s{number}") for number in range(6)))

        assert [answer.status_code for answer in answers] == [200] * 6
        assert len(stack.backend.workers) == 3
        assert await gateway.used() == 6


async def test_a_trainer_that_hangs_up_while_it_waits_leaves_the_queue() -> None:
    async with running(environment(**ONE_SLOT)) as (stack, gateway, client):
        await create(client)
        async with under_way(create(client, sid="left")) as [left]:
            await gateway.eventually_waiting(1)

            await hang_up(left)
        await gateway.eventually_waiting(0)
        await delete(client)

        await gateway.eventually_used(0)
        assert session_id(OWNER, "left") not in stack.backend.only.sessions


async def test_a_trainer_that_hangs_up_during_the_setup_leaves_neither_slot_nor_session() -> None:
    async with running(environment(**ONE_SLOT)) as (stack, gateway, client):
        async with under_way(create(client, on_create="gate")) as [left]:
            await until(lambda: stack.backend.workers and stack.backend.only.waiting == 1)

            await hang_up(left)
        await gateway.eventually_used(0)

        worker = stack.backend.only
        assert worker.deleted == [session_id(OWNER, "one")]
        again = await create(client, sid="two")
        assert again.status_code == 200


async def test_a_trainer_that_hangs_up_while_the_worker_starts_leaves_the_queue_and_the_worker_stays() -> None:
    async with running() as (stack, gateway, client):
        stack.backend.may_start.clear()
        async with under_way(create(client)) as [left]:
            await gateway.eventually_waiting(1)

            await hang_up(left)
        await gateway.eventually_waiting(0)
        stack.backend.may_start.set()

        assert (await create(client, sid="two")).status_code == 200
        assert stack.backend.asked == 1


async def test_hundreds_of_hang_ups_at_any_moment_leave_nothing_behind() -> None:
    async with running(environment(slots=3, max_workers=2)) as (stack, gateway, client):
        await create(client, sid="first")
        for turns in range(60):
            request = asyncio.ensure_future(create(client, sid=f"s{turns}"))
            for _ in range(turns):
                await asyncio.sleep(0)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)

        # A create that was answered before the hang-up has opened a session, which its trainer deletes.
        for turns in range(60):
            await delete(client, sid=f"s{turns}")

        await gateway.eventually_used(1)
        assert await gateway.waiting() == 0
        await until(lambda: sum(len(worker.sessions) for worker in stack.backend.workers.values()) == 1)


async def test_concurrent_identical_creates_open_one_session() -> None:
    async with running() as (stack, gateway, client):
        answers = await asyncio.gather(*(create(client) for _ in range(20)))

        assert [answer.status_code for answer in answers] == [200] * 20
        assert sum(worker.created for worker in stack.backend.workers.values()) == 1
        assert await gateway.used() == 1


async def test_an_identical_create_waits_for_the_setup_of_the_first_create() -> None:
    async with running() as (stack, _, client):
        async with under_way(create(client, on_create="gate"), create(client, on_create="gate")) as both:
            await until(lambda: stack.backend.workers and stack.backend.only.waiting == 1)
            stack.backend.only.gate.set()
            answers = await asyncio.gather(*both)

        assert [answer.status_code for answer in answers] == [200, 200]
        assert stack.backend.only.created == 1


async def test_an_identical_create_takes_over_after_the_first_trainer_hung_up() -> None:
    async with running() as (stack, gateway, client):
        async with under_way(create(client, on_create="gate")) as [first]:
            await until(lambda: stack.backend.workers and stack.backend.only.waiting == 1)
            async with under_way(create(client, on_create="gate")) as [second]:
                await hang_up(first)
                await until(lambda: stack.backend.only.deleted)
                stack.backend.only.gate.set()
                answer = await second

        assert answer.status_code == 200
        assert (await call(client)).status_code == 200
        assert await gateway.used() == 1


async def test_a_create_with_another_body_on_a_taken_id_is_refused_and_changes_nothing() -> None:
    async with running() as (_, gateway, client):
        await create(client, question="first")

        other = await create(client, question="second")
        prompt = await client.get("/math/prompt")

        assert (other.status_code, detail(other)) == (400, "Session already exists")
        assert prompt.json()[0]["text"] == "first"
        assert await gateway.used() == 1


async def test_a_taken_id_is_reported_before_a_wrong_environment_or_index() -> None:
    async with running() as (_, _gateway, client):
        await create(client)

        answers = [
            await client.post("/create", json=body)
            for body in ({"env_name": "nosuch", "task_spec": {}}, {"split": "train", "index": 99})
        ]

        assert [(one.status_code, detail(one)) for one in answers] == [(400, "Session already exists")] * 2


async def test_a_create_whose_session_was_deleted_and_recreated_does_not_affect_the_new_session() -> None:
    async with running() as (stack, gateway, client):
        async with under_way(create(client, on_create="gate")) as [first]:
            await until(lambda: stack.backend.workers and stack.backend.only.waiting == 1)
            await delete(client)
            second = await create(client, question="anew")

            stack.backend.only.gate.set()
            first_answer = await first

        assert second.status_code == 200
        assert first_answer.status_code >= 400
        prompt = await client.get("/math/prompt")
        assert prompt.status_code == 200, prompt.text
        assert prompt.json()[0]["text"] == "anew"
        assert await gateway.open_sessions() == 1


@pytest.mark.parametrize("how", [Start.REFUSED, Start.DIES, Start.NEVER_READY, Start.GARBAGE, Start.STRANGER])
async def test_creates_that_wait_for_a_worker_that_does_not_start_get_503_with_the_reason(how: Start) -> None:
    async with running(environment(start_s=0.3, max_workers=1)) as (stack, gateway, client):
        stack.backend.starts[gateway.catalog.default.name] = how

        answers = await asyncio.gather(*(create(client, sid=f"s{number}") for number in range(3)))

        assert [answer.status_code for answer in answers] == [503] * 3
        assert all("'math' does not start" in detail(answer) for answer in answers)
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
        if how is not Start.REFUSED:  # an engine that refuses has no log of a worker
            assert all("the last words of math" in detail(answer) for answer in answers)
        await until(lambda: not stack.backend.workers)
        assert await gateway.workers() == []


async def test_an_environment_that_does_not_start_does_not_delay_other_environments() -> None:
    # As many slow starts as the gateway runs concurrently.
    broken = environment("broken", slots=1, max_workers=8, start_s=300.0, open_s=300.0)
    async with running(broken, environment()) as (stack, _, client):
        stack.backend.starts[broken.name] = Start.NEVER_READY
        async with under_way(*(create(client, sid=f"s{n}", env_name="broken") for n in range(8))):
            await until(lambda: len(stack.backend.workers) == 8)

            async with asyncio.timeout(HANG_S):  # far below the start time of the broken environment
                served = await create(client)

        assert served.status_code == 200
