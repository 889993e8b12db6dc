"""The last request of an episode over AReaL and NeMo Gym, repeated after its reply was lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.core.errors import StoreUnavailable
from gateway.core.session import CloseReason
from gateway.sessions import service
from gateway.sessions.cache import session_id
from tests.fakes.clock import Clock
from tests.fakes.eventually import eventually
from tests.service.stack import IDLE_S, OWNER, environment, running
from tests.service.test_areal import TASKS as AREAL_TASKS
from tests.service.test_areal import cancel, started, step
from tests.service.test_nemo import CALLED, TASKS, Agent, refused, said
from tests.service.test_step_log import listed, logging

KEY = {"Idempotency-Key": "last"}


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that makes operations of a store fail until the returned context is undone."""

    def go_away(store: Any, *operations: str) -> pytest.MonkeyPatch:
        patch = pytest.MonkeyPatch()

        async def is_down(*_: Any, **__: Any) -> None:
            raise StoreUnavailable("the store does not answer")

        for operation in operations:
            patch.setattr(store, operation, is_down)
        return patch

    return go_away


# -- AReaL ------------------------------------------------------------------------------------------------------------


async def test_a_repeated_last_step_gets_its_reply_at_any_replica() -> None:
    async with running(**AREAL_TASKS) as (stack, gateway, one), stack.another().serving() as other:
        episode = await started(one)
        await step(one, episode)

        first = await step(one, episode, "echo", **KEY)
        again = [await step(client, episode, "echo", **KEY) for client in (one, other, other)]

        assert (first.json()["done"], first.json()["reward"]) == (True, 1.0)
        assert [answer.json() for answer in again] == [first.json()] * 3
        assert stack.backend.only.ran == ["go_on", "echo"]
        assert await gateway.used() == 0


async def test_only_the_same_step_is_a_repeat() -> None:
    async with running(**AREAL_TASKS) as (_, _, client):
        episode = await started(client)
        await step(client, episode, "echo", **KEY)

        other_body = await step(client, episode, "go_on", **KEY)
        other_key = await step(client, episode, "echo", **{"Idempotency-Key": "other"})
        no_key = await step(client, episode, "echo")
        no_episode = await step(client, "nosuch", "echo", **KEY)

        assert (other_body.status_code, "another body" in other_body.text) == (400, True)
        assert [answer.status_code for answer in (other_key, no_key, no_episode)] == [404] * 3
        assert not any("reward" in answer.json() for answer in (other_body, other_key, no_key, no_episode))


async def test_a_cancelled_or_expired_episode_has_no_last_reply() -> None:
    clock = Clock()
    async with running(clock=clock, **AREAL_TASKS) as (stack, gateway, client):
        cancelled, expired = await started(client), await started(client)
        for episode in (cancelled, expired):
            await step(client, episode, **KEY)
        await cancel(client, cancelled)
        stack.backend.only.sessions[session_id(OWNER, expired)].idle_s = IDLE_S + 1
        clock.advance(IDLE_S + 1)
        await gateway.eventually_used(0)

        answers = [await step(client, episode, **KEY) for episode in (cancelled, expired)]

        assert [answer.status_code for answer in answers] == [404, 404]


async def test_last_replies_are_kept_for_a_while() -> None:
    clock = Clock()
    async with running(clock=clock, **AREAL_TASKS) as (_, _, client):
        episode = await started(client)
        await step(client, episode, "echo", **KEY)
        clock.advance(599)
        kept = await step(client, episode, "echo", **KEY)
        clock.advance(2)
        gone = await step(client, episode, "echo", **KEY)

        assert (kept.status_code, gone.status_code) == (200, 404)


@pytest.mark.parametrize("headers", [KEY, {}])
async def test_the_reward_of_a_last_step_is_delivered_while_the_store_does_not_answer(
    tmp_path: Path, away: Any, headers: dict[str, str]
) -> None:
    math = environment(min_workers=1)
    async with logging(tmp_path, math, store_patience_s=60.0, **AREAL_TASKS) as (stack, gateway, client):
        episode = await started(client)
        outage = away(stack.store, "keep_reply", "begin_close", "release")

        first = await step(client, episode, "echo", **headers)
        outage.undo()
        await gateway.eventually_used(0)

        async def is_logged() -> None:
            (line,) = await listed(client)
            assert (line["outcome"], line["reward"]) == ("finished", 1.0)

        await eventually(is_logged)
        again = await step(client, episode, "echo", **headers)

        assert (first.json()["done"], first.json()["reward"]) == (True, 1.0)
        assert again.json() == first.json() if headers else again.status_code == 404


# -- NeMo Gym ---------------------------------------------------------------------------------------------------------


async def test_a_repeated_verify_gets_its_reward_at_any_replica() -> None:
    async with running(**TASKS) as (stack, gateway, http), stack.another().serving() as other:
        agent = Agent(http)
        await agent.seeded("half")
        await agent.call()

        first = await agent.verify(said("go_on"))
        agent.http = other
        again = [await agent.verify(said("go_on")) for _ in range(2)]

        assert first.json()["reward"] == 0.5
        assert [answer.json() for answer in again] == [first.json()] * 2
        assert stack.backend.only.ran == ["go_on", "go_on"]
        assert await gateway.used() == 0


async def test_verifies_at_the_same_time_get_the_same_reward() -> None:
    async with running(**TASKS) as (stack, _, http), stack.another().serving() as other:
        agents = [Agent(http), Agent(other)]
        await agents[0].seeded("half")
        await agents[0].call()
        agents[1].cookies = agents[0].cookies

        answers = await asyncio.gather(*(agent.verify(CALLED) for agent in agents * 2))

        assert [answer.json()["reward"] for answer in answers] == [0.5] * 4


async def test_another_verify_is_no_repeat() -> None:
    async with running(**TASKS) as (_, _, http):
        agent = Agent(http)
        await agent.seeded("half")
        await agent.call()
        await agent.verify(CALLED)

        refused(await agent.verify(said("another")), 409, "another body")
        await agent.seeded("half")
        refused(await Agent(http).verify(CALLED), 404)


@pytest.mark.parametrize("id", ["author", "silent"])
async def test_a_verify_without_a_reward_never_gets_one(id: str) -> None:
    async with running(**TASKS) as (_, _, http):
        agent = Agent(http)
        await agent.seeded(id)
        await agent.call()

        answers = [await agent.verify(CALLED) for _ in range(2)]

        assert all(answer.status_code >= 400 and "reward" not in answer.json() for answer in answers)


async def test_a_new_episode_of_the_same_name_has_no_last_reply() -> None:
    clock = Clock()
    async with running(clock=clock, **TASKS) as (stack, _, http):
        agent = Agent(http)
        name = await agent.seeded("half")
        await agent.call()
        await agent.verify(CALLED)
        id = session_id(OWNER, name)
        kept = await stack.store.kept_reply(id)
        headers = {"X-Session-ID": name}
        await http.post("/create", json={"env_name": "math", "task_spec": {"question": "1+1"}}, headers=headers)

        assert kept is not None
        assert await stack.store.kept_reply(id) is None


async def test_a_verify_whose_replica_was_lost_ends_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "REPEAT_WAIT_S", 0.0)
    async with running(**TASKS) as (stack, gateway, http):
        agent = Agent(http)
        name = await agent.seeded("half")
        await agent.call()
        await stack.store.begin_close(session_id(OWNER, name), CloseReason.DELETED)  # the lost replica's last act

        verified = [await agent.verify(CALLED) for _ in range(2)]

        assert [answer.json().get("reward") for answer in verified] == [0.5, 0.5]
        assert await gateway.used() == 0


async def test_a_closed_episode_has_no_reward_for_a_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "REPEAT_WAIT_S", 0.0)
    async with running(**TASKS) as (stack, _, http):
        agent = Agent(http)
        name = await agent.seeded("half")
        await agent.call()
        await stack.store.begin_close(session_id(OWNER, name), CloseReason.CANCELLED)

        refused(await agent.verify(CALLED), 404)


async def test_the_reward_of_a_verify_is_delivered_while_the_store_does_not_answer(away: Any) -> None:
    async with running(store_patience_s=60.0, **TASKS) as (stack, gateway, http):
        agent = Agent(http)
        await agent.seeded("half")
        await agent.call()
        outage = away(stack.store, "keep_reply", "release")

        first = await agent.verify(CALLED)
        outage.undo()
        await gateway.eventually_used(0)
        again = await agent.verify(CALLED)

        assert first.json()["reward"] == again.json()["reward"] == 0.5
