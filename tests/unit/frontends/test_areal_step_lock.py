"""Locks that run the steps of each episode one after the other."""

from __future__ import annotations

import asyncio

import pytest

from gateway.core.errors import InvalidRequest
from gateway.core.ids import Owner
from gateway.frontends.areal.app import AT_ONCE_MAX, StepLocks

ALICE, BOB = Owner("alice"), Owner("bob")
LONG_S = 60.0


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_steps_of_one_episode_never_overlap_and_keep_their_order() -> None:
    turns, seen = StepLocks(), []

    async def step(number: int) -> None:
        async with turns.one(ALICE, "e", within_s=LONG_S):
            seen.append(("begin", number))
            await settle()
            seen.append(("end", number))

    await asyncio.gather(*map(step, range(4)))

    assert seen == [(what, number) for number in range(4) for what in ("begin", "end")]
    assert len(turns._places) == 0


async def test_other_episodes_and_other_owners_do_not_wait() -> None:
    turns = StepLocks()

    async with (
        turns.one(ALICE, "e", within_s=LONG_S),
        turns.one(ALICE, "f", within_s=LONG_S),
        turns.one(BOB, "e", within_s=LONG_S),
    ):
        assert len(turns._places) == 3

    assert len(turns._places) == 0


async def test_a_step_waits_only_for_a_limited_time() -> None:
    turns = StepLocks()

    async with turns.one(ALICE, "e", within_s=LONG_S):
        with pytest.raises(InvalidRequest, match="another step"):
            async with turns.one(ALICE, "e", within_s=0.01):
                pass

    async with turns.one(ALICE, "e", within_s=0.01):
        assert len(turns._places) == 1


async def test_the_number_of_waiting_steps_is_bounded() -> None:
    turns = StepLocks()

    async def step() -> None:
        async with turns.one(ALICE, "e", within_s=LONG_S):
            await asyncio.Event().wait()

    steps = [asyncio.ensure_future(step()) for _ in range(AT_ONCE_MAX)]
    await settle()
    with pytest.raises(InvalidRequest, match="run or wait"):
        async with turns.one(ALICE, "e", within_s=LONG_S):
            pass
    for one in steps:
        one.cancel()
    await asyncio.gather(*steps, return_exceptions=True)

    assert len(turns._places) == 0


@pytest.mark.parametrize("after", range(8))
async def test_a_step_that_is_cancelled_at_any_moment_leaves_the_queue(after: int) -> None:
    turns = StepLocks()

    async def step() -> None:
        async with turns.one(ALICE, "e", within_s=LONG_S):
            await asyncio.Event().wait()

    async with turns.one(ALICE, "e", within_s=LONG_S):
        waiting = asyncio.ensure_future(step())
        for _ in range(after):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})

    assert len(turns._places) == 0
    async with turns.one(ALICE, "e", within_s=0.01):
        pass
