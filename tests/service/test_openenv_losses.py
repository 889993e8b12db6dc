"""OpenEnv's socket when its episode fails: one error in reply to the next request, and a reset that works."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.core.errors import StoreUnavailable
from gateway.core.ids import Owner
from gateway.core.session import CloseReason
from tests.fakes.clock import Clock
from tests.fakes.eventually import eventually, until
from tests.fakes.workers import Start
from tests.service.openenv_world import Client, World, code, message, world
from tests.service.stack import IDLE_S, environment, impatience, tasks

ONE_SLOT: dict[str, Any] = {"slots": 1, "max_workers": 1}
TASKS = tasks(
    train=[
        {"question": "1+1"},
        {"id": "gate", "on_create": "gate"},
        {"id": "refuse", "on_create": "refuse"},
        {"id": "fail", "on_create": "fail"},
        {"id": "die", "on_create": "die"},
        {"id": "slow", "question": "slow", "slow_setup": True},
    ]
)


async def refused(client: Client) -> None:
    """Check that steps of an ended episode fail, and that a reset starts a new episode."""
    assert code(await client.step()) == "SESSION_ERROR"
    assert code(await client.step()) == "SESSION_ERROR"
    await client.reset(index=0)
    assert (await client.ask("state"))["data"]["step_count"] == 0
    assert (await client.step())["type"] == "observation"


async def the_only_episode(gw: World) -> tuple[Owner, str]:
    [session] = await gw.gateway.store.sessions()
    return session.owner, session.name


async def test_a_step_beyond_its_deadline_ends_the_episode_and_the_next_reset_works_immediately() -> None:
    async with world(environment(**ONE_SLOT), tasks=TASKS) as gw, gw.client() as client:
        await client.reset(index=0)

        with impatience(gw.gateway, openenv={"step_s": 0.2}):
            late = await client.step("quiet")

        assert code(late) == "EXECUTION_ERROR"
        assert "deadline of 0.2 s (openenv.step_s of its environment.toml)" in message(late)
        await refused(client)
        assert await gw.gateway.used() == 1


@pytest.mark.parametrize("tool", ["die", ""], ids=["in mid-step", "between two steps"])
async def test_a_worker_that_dies_is_one_error_and_the_reset_has_another_worker(tool: str) -> None:
    async with world(tasks=TASKS) as gw, gw.client() as client:
        await client.reset(index=0)
        dead = gw.stack.backend.only
        if tool:
            reply = await client.step(tool)
        else:
            await dead.die()
            reply = await client.step()

        assert code(reply) == "SESSION_ERROR"
        assert "its environment was lost" in message(reply) or "worker" in message(reply)
        await refused(client)
        assert gw.stack.backend.only is not dead


async def test_a_worker_that_lost_its_sessions_is_an_error_and_not_a_fresh_episode() -> None:
    async with world(tasks=TASKS) as gw, gw.client() as client:
        await client.reset(index=0)
        gw.stack.backend.only.sessions.clear()  # as after a restart inside the worker

        assert code(await client.step()) == "SESSION_ERROR"
        await refused(client)


async def test_a_session_that_breaks_in_its_worker_is_an_error_and_never_a_reward() -> None:
    async with world(tasks=TASKS) as gw, gw.client() as client:
        await client.reset(index=0)

        reply = await client.step("break")

        assert code(reply) == "SESSION_ERROR"
        await refused(client)


async def test_a_500_of_the_worker_ends_the_episode() -> None:
    async with world(tasks=TASKS) as gw, gw.client() as client:
        await client.reset(index=0)

        assert code(await client.step("fail")) == "SESSION_ERROR"
        await refused(client)


async def test_an_idle_episode_expires_under_an_open_socket_and_the_next_reply_gives_the_reason() -> None:
    clock = Clock()
    async with world(tasks=TASKS, clock=clock) as gw, gw.client() as client:
        await client.reset(index=0)
        await gw.gateway.session_cache.write_notes()

        clock.advance(IDLE_S + 60)
        gw.stack.backend.only.sessions[next(iter(gw.stack.backend.only.sessions))].idle_s = IDLE_S + 60
        await gw.gateway.eventually_used(0)

        async def told() -> None:
            reply = await client.ask("state")
            assert reply["type"] == "error", reply
            assert "idle for longer" in message(reply)

        await eventually(told)
        await refused(client)


async def test_a_step_that_runs_when_an_operator_ends_its_episode_gets_the_reason() -> None:
    async with world(tasks=TASKS) as gw, gw.client() as client:
        await client.reset(index=0)
        owner, name = await the_only_episode(gw)
        await client.connection.send(json.dumps({"type": "step", "data": {"tool": "quiet"}}))
        await until(lambda: gw.stack.backend.only.waiting)

        await gw.gateway.sessions.end(owner, name, CloseReason.OPERATOR, wait_s=1)

        reply = await client.hear()
        assert code(reply) == "SESSION_ERROR"
        assert "an operator ended it" in message(reply)
        await refused(client)


# -- resets that fail ------------------------------------------------------------------------------------------------


async def test_one_more_client_than_slots_waits_and_gets_the_slot_that_becomes_free() -> None:
    async with world(environment(**ONE_SLOT)) as gw, gw.client() as holder, gw.client() as waiter:
        await holder.reset()
        await waiter.connection.send(json.dumps({"type": "reset"}))
        await gw.gateway.eventually_waiting(1)

        await holder.connection.send('{"type":"close"}')

        assert (await waiter.hear())["type"] == "observation"
        assert await gw.gateway.used() == 1


async def test_a_client_keeps_its_slot_over_resets_although_other_clients_wait() -> None:
    async with world(environment(**ONE_SLOT)) as gw, gw.client() as holder, gw.client() as waiter:
        await holder.reset()
        await waiter.connection.send(json.dumps({"type": "reset"}))
        await gw.gateway.eventually_waiting(1)

        for _ in range(3):
            await holder.reset()

        assert await gw.gateway.waiting() == 1


async def test_a_wait_that_ends_without_a_slot_is_capacity_reached_and_closes() -> None:
    async with world(environment(**ONE_SLOT)) as gw, gw.client() as holder, gw.client() as waiter:
        await holder.reset()

        with impatience(gw.gateway, openenv={"reset_s": 0.2}):
            reply = await waiter.ask("reset")

        assert code(reply) == "CAPACITY_REACHED"
        assert message(reply).startswith("Server at capacity: 1/1 sessions active. Cannot accept new connections.")
        assert (reply["data"]["active_sessions"], reply["data"]["max_sessions"]) == (1, 1)
        assert await waiter.closed() == 1000
        assert await gw.gateway.waiting() == 0


@pytest.mark.parametrize(
    ("id", "told"),
    [("refuse", "EXECUTION_ERROR"), ("fail", "EXECUTION_ERROR"), ("die", "SESSION_ERROR")],
)
async def test_a_task_that_cannot_be_set_up_is_an_error_and_leaves_no_episode(id: str, told: str) -> None:
    async with world(tasks=TASKS) as gw, gw.client() as client:
        await client.reset(index=0)

        assert code(await client.ask("reset", {"task": id})) == told

        await refused(client)
        assert await gw.gateway.used() == 1


async def test_a_reset_waits_for_a_setup_that_continues_after_the_opening() -> None:
    async with world(tasks=TASKS) as gw, gw.client() as client:
        assert (await client.reset(task="slow"))["observation"]["text"] == "slow"


async def test_a_setup_beyond_the_deadline_leaves_nothing() -> None:
    async with world(environment(**ONE_SLOT), tasks=TASKS) as gw, gw.client() as client:
        await client.reset(index=0)

        with impatience(gw.gateway, openenv={"reset_s": 0.5}):
            assert code(await client.ask("reset", {"task": "gate"})) == "EXECUTION_ERROR"

        await gw.gateway.eventually_used(0)


async def test_workers_that_do_not_start_are_a_factory_error_with_the_cause() -> None:
    async with world() as gw, gw.client() as client:
        gw.stack.backend.starts[gw.gateway.catalog.default.name] = Start.DIES

        reply = await client.ask("reset")

        assert code(reply) == "FACTORY_ERROR"
        assert "the last words of math" in message(reply)
        assert reply["data"]["factory_name"] == "math"
        assert await client.closed() == 1000


async def test_without_the_store_requests_fail_and_the_socket_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(tasks=TASKS) as gw, gw.client() as client, gw.client() as other:
        await client.reset(index=0)

        async def down(*_: Any, **__: Any) -> Any:
            raise StoreUnavailable("the store does not answer")

        with monkeypatch.context() as outage:
            for operation in ("begin_close", "claim", "find"):
                outage.setattr(gw.gateway.store, operation, down)
            assert code(await client.ask("reset", {"index": 0})) == "SESSION_ERROR"
            assert code(await other.ask("reset", {"index": 0})) == "SESSION_ERROR"

        assert (await client.ask("reset", {"index": 0}))["type"] == "observation"
        assert (await other.ask("reset", {"index": 0}))["type"] == "observation"


async def test_a_replica_that_drains_starts_no_episode_and_serves_its_open_episodes() -> None:
    async with world() as gw, gw.client() as client:
        await client.reset()
        gw.gateway.lifecycle.is_closing = True

        reply = await client.ask("reset")

        assert code(reply) == "SESSION_ERROR"
        assert "about to stop" in message(reply)
        assert (await client.step())["type"] == "observation"


async def ten(client: Client) -> AsyncIterator[str]:
    for _ in range(10):
        yield (await client.ask("frobnicate"))["type"]


async def test_the_server_sends_no_frame_without_a_request() -> None:
    async with world(tasks=TASKS) as gw, gw.client() as client:
        await client.reset(index=0)
        await gw.stack.backend.only.die()
        await gw.gateway.eventually_used(0)

        assert [kind async for kind in ten(client)] == ["error"] * 10, "replies would be shifted by a frame unasked"
        assert code(await client.step()) == "SESSION_ERROR"
