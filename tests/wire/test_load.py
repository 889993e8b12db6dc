"""Many concurrent episodes on few workers: all are played, in turn, and afterwards the surplus workers end."""

import asyncio
import contextlib

import pytest

from tests.fakes.eventually import eventually
from tests.wire.sdks import SDKS, EnvironmentClient, Sdk
from tests.wire.targets import BOTH_GATEWAYS, Target, on

pytestmark = [pytest.mark.wire]

EPISODES = 64
MAX_WORKERS = 3
"""The environment's ``max_workers``: with 16 slots each, 16 episodes must wait."""
COUNT_EVERY_S = 0.2


class Census:
    """Counts the environment's workers periodically."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.most = 0

    async def watch(self) -> None:
        while True:
            self.most = max(self.most, await self.count())
            await asyncio.sleep(COUNT_EVERY_S)

    async def count(self) -> int:
        """Count the environment's containers, or its workers if it has no containers."""
        if self._target.stack is not None:
            return await asyncio.to_thread(self._target.stack.containers.count, "counter")
        assert self._target.gateway is not None
        return len(await self._target.gateway.workers("counter"))


async def play(sdk: Sdk, counter: EnvironmentClient, start: int) -> float | None:
    async with counter.session(task=sdk.task("counter", {"start": start})) as session:
        await session.get_prompt()
        await session.call_tool("add", {"n": 1})
        return (await session.call_tool("stop")).reward


@on(*BOTH_GATEWAYS)
async def test_many_episodes_share_few_workers(target: Target) -> None:
    census = Census(target)

    async with contextlib.AsyncExitStack() as clients:
        counters = [
            (sdk, (await clients.enter_async_context(sdk.connect(target.url, target.key))).environment("counter"))
            for sdk in SDKS.values()
        ]
        watching = asyncio.create_task(census.watch())
        try:
            rewards = await asyncio.gather(*(play(*counters[n % len(counters)], n) for n in range(EPISODES)))
        finally:
            watching.cancel()
            await asyncio.wait({watching})

    assert rewards == [(start + 1) / 10 for start in range(EPISODES)]
    assert 1 <= census.most <= MAX_WORKERS

    async def surplus_is_gone() -> None:
        assert target.gateway is not None
        assert await target.gateway.sessions() == []
        # The openings of the last 30 s let the pool keep one more worker than `min_workers`, which is 0.
        assert await census.count() <= 1

    await eventually(surplus_is_gone)
