"""Both ORS packages train from a curriculum's split with the same code as from any other split."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fakes.eventually import eventually
from tests.wire.catalog import EMBEDDED, on_stack
from tests.wire.curricula_world import IN_TURN, NUMBER, SPLIT, TASKS, Operator, answer_of, asked, curricula_gateway
from tests.wire.gateways import Gateway
from tests.wire.sdks import OPENREWARD, ORS, SDKS, EnvironmentClient, Sdk, text

pytestmark = pytest.mark.wire

GROUP = 4
WRONG = "certainly not this"
Agent = Callable[[int, int], str]
"""Maps the number of the task and the number of the group's member to the member's answer."""


@pytest.fixture
def gateway(request: pytest.FixtureRequest) -> Iterator[Gateway]:
    """A gateway for one test, because its records and draws must start anew."""
    with curricula_gateway(request.param, files={"mine": IN_TURN}) as gateway:
        yield gateway


def on(*kinds: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("gateway", kinds, indirect=True)


async def episode(math: EnvironmentClient, member: int, agent: Agent, **task: Any) -> tuple[int, float]:
    """Play one episode and return the number of its task and its reward."""
    async with math.session(**task) as session:
        number = asked("".join(block.text for block in await session.get_prompt()))
        output = await session.call_tool("submit", {"answer": agent(number, member)})
    assert output.finished, text(output)
    return number, output.reward or 0.0


async def group(math: EnvironmentClient, agent: Agent, **task: Any) -> list[tuple[int, float]]:
    """Play a group on one task concurrently, as GRPO does."""
    return await asyncio.gather(*(episode(math, member, agent, **task) for member in range(GROUP)))


async def train(sdk: Sdk, gateway: Gateway, split: str, agent: Agent) -> list[list[tuple[int, float]]]:
    """Train for an epoch on any split: fetch all tasks first, then play a group on each."""
    async with sdk.connect(gateway.url, None) as client:
        math = client.environment("math")
        assert split in [str(getattr(one, "name", one)) for one in await math.list_splits()]
        tasks = await math.list_tasks(split)
        return [await group(math, agent, task=task) for task in tasks]


def right(number: int, member: int) -> str:
    return answer_of(number)


def half_right(number: int, member: int) -> str:
    return answer_of(number) if member % 2 else WRONG


@on(EMBEDDED, on_stack("math"))
async def test_the_same_code_trains_on_a_curriculums_split_and_on_an_ordinary_split(gateway: Gateway) -> None:
    rewards = {}
    for name, sdk in SDKS.items():
        for split in ("train", SPLIT):
            groups = await train(sdk, gateway, split, half_right)
            assert [{number for number, _ in played} for played in groups] == [{number} for number in range(NUMBER)]
            rewards[name, split] = [[reward for _, reward in played] for played in groups]

    records = await Operator(gateway).eventually_records(len(rewards) * NUMBER * GROUP)

    for name in SDKS:
        assert rewards[name, SPLIT] == rewards[name, "train"]
        assert [sum(reward == 1.0 for reward in some) for some in rewards[name, SPLIT]] == [GROUP // 2] * NUMBER
    attempts = {id: record["attempts"] for id, record in records.items()}
    assert attempts == {task["id"]: len(rewards) * GROUP for task in TASKS}
    assert await gateway.sessions() == []


@on(EMBEDDED)
async def test_tasks_that_were_fetched_earlier_yield_new_draws_in_the_next_epoch(gateway: Gateway) -> None:
    for sdk in SDKS.values():
        await Operator(gateway).reset("mine")
        async with sdk.connect(gateway.url, None) as client:
            math = client.environment("math")
            tasks = await math.list_tasks(SPLIT)
            one = await math.get_task(SPLIT, 3)
            some = await math.get_task_range(SPLIT, 2, 4)
            count = await math.num_tasks(SPLIT)

            by_task = [await group(math, right, task=tasks[3]) for _ in range(2)]
            by_place = [await group(math, right, split=SPLIT, index=3) for _ in range(2)]
            by_one = await asyncio.gather(
                *(episode(math, 0, right, **wish) for wish in ({"task": one}, {"split": SPLIT, "index": 3}) * 2)
            )

        assert [task.task_spec for task in tasks] == [{"id": f"{SPLIT}/{index}"} for index in range(NUMBER)]
        assert one.task_spec == some[1].task_spec == tasks[3].task_spec
        assert count == NUMBER
        drawn = [{number for number, _ in played} for played in (*by_task, *by_place, by_one)]
        assert drawn == [{0}, {1}, {2}, {3}, {4}]
        assert all(reward == 1.0 for played in (*by_task, *by_place, by_one) for _, reward in played)


@on(EMBEDDED, on_stack("math"))
async def test_a_target_success_sampler_stops_drawing_solved_tasks(gateway: Gateway) -> None:
    """The agent always knows the answers of even tasks, and in half of its attempts those of odd tasks."""
    operator = Operator(gateway)
    sampler = {"kind": "target_success", "explore": 0.0, "width": 0.05, "prior": 1.0}
    await operator.define("apt", environment="math", seed=1, group_size=GROUP, sampler=sampler)

    def agent(number: int, member: int) -> str:
        return right(number, member) if number % 2 == 0 else half_right(number, member)

    first = await train(ORS, gateway, "train:apt", agent)
    solved = {played[0][0] for played in first if played[0][0] % 2 == 0}
    records = await operator.eventually_records(NUMBER * GROUP)

    async def are_weighed() -> None:
        heaviest = (await operator.state("apt", tasks=str(NUMBER)))["heaviest"]
        shares = {one["task"]: one["share"] for one in heaviest}
        assert len(shares) == NUMBER, shares
        assert all(shares[TASKS[number]["id"]] < 1e-6 for number in solved), shares

    await eventually(are_weighed)
    second = await train(OPENREWARD, gateway, "train:apt", agent)

    assert solved, "a seed whose first epoch draws none of them shows nothing"
    assert all(records[TASKS[number]["id"]]["mean"] == 1.0 for number in solved)
    drawn = {played[0][0] for played in second}
    assert not drawn & solved
    assert all(len({number for number, _ in played}) == 1 for played in (*first, *second))
