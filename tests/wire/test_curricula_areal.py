"""AReaL's unmodified workflow trains from a curriculum, because the environment's file names the curriculum's split."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from tests.wire.areal_client import ArealClient, Failed, Trajectory
from tests.wire.catalog import EMBEDDED, on_stack
from tests.wire.curricula_world import IN_TURN, NUMBER, SPLIT, TASKS, Operator, answer_of, asked, curricula_gateway
from tests.wire.gateways import Gateway

pytestmark = pytest.mark.wire

GROUP = 4
BY_NUMBERS = f'\n[areal]\nsplit = "{SPLIT}"\n'


@contextlib.contextmanager
def training(kind: str) -> Iterator[Gateway]:
    with curricula_gateway(kind, files={"mine": IN_TURN}, sections={"math": BY_NUMBERS}) as gateway:
        yield gateway


@pytest.fixture(params=[EMBEDDED, on_stack("math")])
def gateway(request: pytest.FixtureRequest) -> Iterator[Gateway]:
    """A gateway for one test, because its records must start empty."""
    with training(request.param) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def shared() -> Iterator[Gateway]:
    """A gateway for tests that do not check records."""
    with training(EMBEDDED) as gateway:
        yield gateway


@pytest.fixture
async def client(shared: Gateway) -> ArealClient:
    """A client of the shared gateway, with the curriculum's draws reset."""
    await Operator(shared).reset("mine")
    return ArealClient(shared.url)


def solve(prompt: str) -> str:
    return f"Let me think. <answer>{answer_of(asked(prompt))}</answer>"


def give_up(prompt: str) -> str:
    return "<answer>certainly not this</answer>"


async def group(client: ArealClient, sample: str | int) -> list[Trajectory]:
    """Play a group on one sample concurrently, with right answers from half of its members."""
    return await asyncio.gather(*(client.rollout(sample, solve if n % 2 else give_up) for n in range(GROUP)))


def drawn(group: list[Trajectory]) -> set[int]:
    """Return the numbers of the tasks that the members of a group got."""
    return {asked(trajectory.seen[0]) for trajectory in group}


async def test_an_epoch_over_all_samples_trains_on_the_tasks_that_the_curriculum_draws(gateway: Gateway) -> None:
    client = ArealClient(gateway.url)
    count = (await client.info())["num_samples"]
    groups = [await group(client, sample) for sample in range(count)]
    records = await Operator(gateway).eventually_records(NUMBER * GROUP)

    assert count == NUMBER
    assert [drawn(some) for some in groups] == [{number} for number in range(NUMBER)]
    for some in groups:
        assert [trajectory.info["success"] for trajectory in some] == [False, True] * (GROUP // 2)
    assert {id: record["attempts"] for id, record in records.items()} == {task["id"]: GROUP for task in TASKS}
    assert (await client.ask("GET", "/health"))["active_episodes"] == 0


async def test_a_sample_is_the_same_handle_as_a_number_and_as_a_text(client: ArealClient) -> None:
    samples: tuple[str | int, ...] = (7, "7", f"{SPLIT}/7", 7)
    first = [asked((await client.rollout(sample, solve)).seen[0]) for sample in samples]
    second = [asked((await client.rollout(sample, solve)).seen[0]) for sample in samples]

    assert first == [0] * GROUP
    assert second == [1] * GROUP


async def test_a_start_describes_the_task_that_was_drawn(client: ArealClient) -> None:
    for number in range(2):
        for _ in range(GROUP):
            started = await client.start(0)
            await client.cancel(started["episode_id"])

            assert started["info"]["task_description"] == TASKS[number]["instruction"]


async def test_a_member_cancelled_before_its_first_action_uses_its_place_in_the_group_but_is_not_an_attempt(
    gateway: Gateway,
) -> None:
    client = ArealClient(gateway.url)
    await client.cancel((await client.start(0))["episode_id"])
    for _ in range(GROUP - 1):
        assert asked((await client.rollout(0, solve)).seen[0]) == 0
    assert asked((await client.rollout(0, solve)).seen[0]) == 1

    records = await Operator(gateway).eventually_records(GROUP)

    assert {id: record["attempts"] for id, record in records.items()} == {TASKS[0]["id"]: GROUP - 1, TASKS[1]["id"]: 1}


async def test_a_sample_beyond_the_last_handle_is_refused_and_joins_no_group(
    shared: Gateway, client: ArealClient
) -> None:
    for sample in (NUMBER, str(NUMBER), f"{SPLIT}/{NUMBER}", "train:none/0"):
        with pytest.raises(Failed) as refused:
            await client.start(sample)
        assert 400 <= refused.value.status < 500, refused.value

    assert drawn(await group(client, 0)) == {0}
    assert await shared.sessions() == []
