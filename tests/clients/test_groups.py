"""Groups of episodes that begin together, through the client."""

import pytest
from env_gateway_client import AsyncGateway, Gateway, NoCapacity, UnknownTask, text_of

from tests.wire.targets import ONE_GATEWAY, Target, on

pytestmark = pytest.mark.wire


@on(*ONE_GATEWAY)
async def test_the_members_of_a_group_open_together_with_one_seed(target: Target, client: AsyncGateway) -> None:
    async with await client.open_group("judge", 4, task={"question": "?"}) as group:
        given = {(await episode.step("given")).text for episode in group}

    assert len(group) == 4
    assert len(given) == 1, "the gateway derives one seed for the group"
    assert len({episode.id for episode in group}) == 4


@on(*ONE_GATEWAY)
async def test_a_group_that_cannot_open_leaves_no_session(target: Target, client: AsyncGateway) -> None:
    with pytest.raises(NoCapacity):
        await client.open_group("narrow", 2, task={}, wait_s=1)
    with pytest.raises(UnknownTask):
        await client.open_group("probe", 3, split="train", index=99)
    # The fixture asserts that the gateway holds no session.


def test_the_blocking_client_opens_a_group(math: Gateway) -> None:
    with math.open_group("game", 4, split="train", index=0, name="step-1/0") as group:
        prompts = {text_of(episode.prompt) for episode in group}

    assert len(prompts) == 1
    assert group.name == "step-1/0"
    assert all(episode.is_closed for episode in group)


def test_a_blocking_group_that_cannot_open_raises_the_first_error(math: Gateway) -> None:
    with pytest.raises(UnknownTask):
        math.open_group("math", 3, split="train", index=10**6)
