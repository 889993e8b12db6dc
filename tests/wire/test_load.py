"""Many episodes at once on few workers: all are played, in turn; afterwards the workers that are too many go."""

import asyncio

import pytest

from tests.fakes.eventually import eventually
from tests.wire.gateways import Gateway
from tests.wire.sdks import Client, Sdk
from tests.wire.targets import GATEWAYS, Target, with_clients

pytestmark = [pytest.mark.wire, pytest.mark.slow]

EPISODES = 64
MAX_WORKERS = 3
"""``max_workers`` of the environment; with 16 slots each, 16 episodes have to wait."""


class Census:
    """Looks again and again how many workers of an environment there are."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.most = 0

    async def watch(self) -> None:
        while True:
            self.most = max(self.most, await self.count())
            await asyncio.sleep(0.1)

    async def count(self) -> int:
        """The containers of the environment, or the workers where there are none."""
        if self._target.stack is not None:
            containers = await asyncio.to_thread(self._target.stack.containers.list)
            return len([container for container in containers if "counter" in container.name])
        assert self._target.gateway is not None
        return len(await self._target.gateway.workers("counter"))


@with_clients(*GATEWAYS)
async def test_many_episodes_share_few_workers(target: Target, client: Client, sdk: Sdk) -> None:
    counter = client.environment("counter")
    census = Census(target)

    async def play(start: int) -> float | None:
        async with counter.session(task=sdk.task("counter", {"start": start})) as session:
            await session.get_prompt()
            await session.call_tool("add", {"n": 1})
            return (await session.call_tool("stop")).reward

    watching = asyncio.create_task(census.watch())
    try:
        rewards = await asyncio.gather(*(play(start) for start in range(EPISODES)))
    finally:
        watching.cancel()
        await asyncio.wait({watching})

    assert rewards == [(start + 1) / 10 for start in range(EPISODES)]
    assert 1 <= census.most <= MAX_WORKERS
    assert target.gateway is not None
    gateway = target.gateway
    await eventually(lambda: none_is_left(gateway, census), within_s=150)  # an idle worker may live for 60 s


async def none_is_left(gateway: Gateway, census: Census) -> None:
    """Assert that the environment is back at its ``min_workers``, which is 0."""
    assert await gateway.sessions() == []
    assert await gateway.workers("counter") == []
    assert await census.count() == 0
