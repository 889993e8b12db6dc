"""Notices between replicas: a replica forgets a session as soon as another replica ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.deadlines import HANG_S
from tests.fakes.eventually import until
from tests.service.stack import Stack, environment, stack
from tests.service.wire import call, create, delete, under_way


@pytest.fixture(autouse=True)
def _no_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the periodic notes: a replica that writes notes also learns of an end, but a second later."""
    monkeypatch.setattr("gateway.sessions.cache.TICK_S", 3600.0)


@asynccontextmanager
async def two_replicas() -> AsyncIterator[tuple[Stack, httpx.AsyncClient, httpx.AsyncClient]]:
    async with stack(environment()) as built:
        second = built.another()
        async with (
            built.first.looping(),
            second.looping(),
            built.first.serving() as one,
            second.serving() as other,
        ):
            yield built, one, other


async def test_a_session_that_one_replica_ends_is_forgotten_by_the_other_replicas() -> None:
    async with two_replicas() as (built, one, other):
        await create(one)
        assert (await call(other)).status_code == 200
        served = [len(replica.session_cache.sessions()) for replica in built.replicas]

        await delete(one)

        await until(lambda: not any(replica.session_cache.sessions() for replica in built.replicas))
        assert served == [1, 1]


async def test_a_step_that_runs_at_one_replica_is_aborted_when_another_replica_ends_its_episode() -> None:
    async with two_replicas() as (built, one, other):
        begun = await one.post("/areal/math/api/episode/start", json={"sample_id": 0, "config": {}})
        episode = begun.json()["episode_id"]
        body = {"episode_id": episode, "action": {"type": "text", "content": "quiet"}}
        async with under_way(other.post("/areal/math/api/episode/step", json=body)) as [step]:
            await until(lambda: built.backend.only.waiting == 1)

            cancelled = await one.post("/areal/math/api/episode/cancel", json={"episode_id": episode})
            done, _ = await asyncio.wait({step}, timeout=HANG_S)  # the gate at which the step waits stays shut

        assert cancelled.status_code == 200
        assert done, "the step goes on without its episode"
        assert step.result().status_code == 404
