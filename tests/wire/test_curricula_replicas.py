"""Draws are independent of gateways: two replicas make the same draws, even after both are killed and restarted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import httpx
import pytest

from tests.deadlines import HANG_S
from tests.wire.catalog import EMBEDDED, STACK
from tests.wire.curricula_world import NUMBER, SPLIT, TASKS, Operator, asked, curricula_gateway
from tests.wire.gateways import Gateway
from tests.wire.raw import new_sid
from tests.wire.sdks import OPENREWARD, ORS, EnvironmentClient

pytestmark = [pytest.mark.wire, pytest.mark.docker, pytest.mark.redis, pytest.mark.needs("image:math")]

GROUP = 8
DRAWS = 40
IN_TURN = f'environment = "math"\ngroup_size = {GROUP}\nsampler = {{kind = "sequential"}}\n'
APT: dict[str, Any] = {"environment": "math", "seed": 11, "sampler": {"kind": "target_success", "prior": 1.0}}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, Gateway]]:
    """Two replicas on one Redis and one engine. A test that kills them starts them again."""
    with curricula_gateway(STACK, files={"mine": IN_TURN}) as first:
        second = Gateway(tmp_path_factory.mktemp("second"), first.variables)
        try:
            second.start()
            yield first, second
        finally:
            second.stop()


@pytest.fixture
async def gateways(pair: tuple[Gateway, Gateway]) -> tuple[Gateway, Gateway]:
    """The two replicas, with the curriculum's draws reset."""
    await Operator(pair[0]).reset("mine")
    return pair


@contextlib.asynccontextmanager
async def trainers(gateways: Sequence[Gateway]) -> AsyncIterator[tuple[EnvironmentClient, EnvironmentClient]]:
    """Connect a trainer of each package, each to its own replica."""
    async with (
        ORS.connect(gateways[0].url, None) as one,
        OPENREWARD.connect(gateways[1].url, None) as other,
    ):
        yield one.environment("math"), other.environment("math")


async def prompted(stack: contextlib.AsyncExitStack, math: EnvironmentClient, index: int) -> int:
    """Open a session by a handle, keep it open with *stack*, and return the number of its task."""
    session = await stack.enter_async_context(math.session(split=SPLIT, index=index))
    return asked("".join(block.text for block in await session.get_prompt()))


async def opened(math: EnvironmentClient, index: int) -> int:
    """Open a session by a handle, end it, and return the number of its task."""
    async with contextlib.AsyncExitStack() as stack:
        return await prompted(stack, math, index)


def outcomes() -> list[dict[str, Any]]:
    """Return outcomes of tasks: some tasks are solved in different shares, and others are not attempted."""
    return [
        {"environment": "math", "task": task["id"], "reward": float(attempt < number), "key": f"{number}-{attempt}"}
        for number, task in enumerate(TASKS[: NUMBER - 3])
        for attempt in range(8)
    ]


async def test_a_group_split_between_two_replicas_plays_one_task(gateways: tuple[Gateway, Gateway]) -> None:
    async with trainers(gateways) as both, contextlib.AsyncExitStack() as stack:
        groups = [
            await asyncio.gather(*(prompted(stack, both[member % 2], handle) for member in range(GROUP)))
            for handle in (4, 4, 0)
        ]

    assert groups == [[number] * GROUP for number in range(3)]


async def test_a_create_repeated_at_the_other_replica_takes_no_second_place_in_the_group(
    gateways: tuple[Gateway, Gateway],
) -> None:
    body, headers = {"env_name": "math", "split": SPLIT, "index": 0}, {"X-Session-ID": new_sid()}
    async with contextlib.AsyncExitStack() as stack:
        for gateway in (*gateways, *gateways):
            http = await stack.enter_async_context(
                httpx.AsyncClient(base_url=gateway.url, verify=False, trust_env=False, timeout=HANG_S)
            )
            assert (await http.post("/create", json=body, headers=headers)).status_code == 200
        both = await stack.enter_async_context(trainers(gateways))
        drawn = [await opened(both[member % 2], 0) for member in range(GROUP)]
        assert (await http.post("/delete", headers=headers)).is_success

    assert drawn == [0] * (GROUP - 1) + [1]


async def test_handles_mean_the_same_draws_after_both_gateways_were_killed(
    gateways: tuple[Gateway, Gateway],
) -> None:
    async with trainers(gateways) as both:
        before = [await opened(both[member % 2], 0) for member in range(GROUP // 2)]
        full = [await opened(both[member % 2], 1) for member in range(GROUP)]
    for gateway in gateways:
        gateway.kill()
    for gateway in gateways:
        gateway.restart()
    async with trainers(gateways) as both:
        after = [await opened(both[member % 2], 0) for member in range(GROUP // 2)]
        then = [await opened(both[0], 0), await opened(both[1], 1)]

    assert before + after == [0] * GROUP, "the group that was half open"
    assert full == [1] * GROUP
    assert then == [2, 3], "draws go on where they were"


async def test_a_curriculum_defined_over_the_api_outlives_the_gateways_with_its_records_and_draws(
    gateways: tuple[Gateway, Gateway],
) -> None:
    first, second = (Operator(gateway) for gateway in gateways)
    await first.define("apt", **APT)
    await first.feedback("apt", outcomes())
    drawn = await first.sample("apt", count=DRAWS)
    records = await first.records()
    for gateway in gateways:
        gateway.kill()
    for gateway in gateways:
        gateway.restart()
    kept = await second.records()
    more = await second.sample("apt", count=DRAWS)
    await second.reset("apt")
    again = await second.sample("apt", count=2 * DRAWS)

    assert kept == records
    assert [draw["number"] for draw in (*drawn, *more)] == list(range(2 * DRAWS))
    assert again == [*drawn, *more], "the same seed and records give the same draws"


async def test_two_unrelated_gateways_make_the_same_draws_from_the_same_definition_and_records() -> None:
    drawn = []
    for kind in (EMBEDDED, STACK):
        with curricula_gateway(kind) as gateway:
            operator = Operator(gateway)
            await operator.define("apt", **APT)
            untold = await operator.sample("apt", count=DRAWS)
            await operator.feedback("apt", outcomes())
            await operator.define("apt", **APT)  # another version of the definition: the weights are computed anew
            drawn.append((untold, await operator.sample("apt", count=DRAWS)))

    assert drawn[0] == drawn[1]
    untold, told = ([draw["task"] for draw in some] for some in drawn[0])
    near = {TASKS[number]["id"] for number in (3, 4, 5, *range(NUMBER - 3, NUMBER))}
    assert sum(task in near for task in told) > sum(task in near for task in untold), "records were looked at"
