"""The causes that interrupt a call: the session's end, a deadline, or a cancellation from outside."""

from __future__ import annotations

import asyncio

import pytest

from gateway.sessions.interruption import CallScope, Interrupted, Watcher


async def for_ever() -> None:
    await asyncio.get_running_loop().create_future()


async def test_the_end_of_a_session_interrupts_all_calls_that_wait_in_it() -> None:
    watchers: set[Watcher] = set()

    async def call() -> str:
        try:
            with CallScope(watchers, 60):
                await for_ever()
        except Interrupted as broken:
            return broken.cause
        return "went on"

    calls = [asyncio.create_task(call()) for _ in range(3)]
    await asyncio.sleep(0)
    for watcher in tuple(watchers):
        watcher.end()

    assert await asyncio.gather(*calls) == ["ended"] * 3
    assert watchers == set()
    assert not any(call.cancelling() for call in calls)


async def test_the_deadline_of_a_call_interrupts_it() -> None:
    with pytest.raises(Interrupted) as broken, CallScope(set(), 0.01):
        await for_ever()

    assert broken.value.cause == "late"


async def test_a_call_without_time_left_still_returns_a_result_that_needs_no_wait() -> None:
    with CallScope(set(), -1):
        found = "there"

    assert found == "there"


async def test_the_first_of_two_causes_is_reported() -> None:
    watchers: set[Watcher] = set()

    async def call() -> None:
        with CallScope(watchers, 0.01):
            await for_ever()

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    next(iter(watchers)).end()
    await asyncio.wait({task})

    error = task.exception()
    assert isinstance(error, Interrupted)
    assert error.cause == "ended"


async def test_a_cancellation_from_outside_propagates_even_when_the_session_ends() -> None:
    watchers: set[Watcher] = set()

    async def call() -> None:
        with CallScope(watchers, 60):
            await for_ever()

    for ends in (False, True):
        task = asyncio.create_task(call())
        await asyncio.sleep(0)
        task.cancel()
        if ends:
            next(iter(watchers)).end()
        await asyncio.wait({task})

        assert task.cancelled()


async def test_a_call_that_swallows_the_interruption_keeps_its_result_and_the_task_is_not_cancelled() -> None:
    async def stubborn() -> str:
        try:
            await for_ever()
        except asyncio.CancelledError:
            return "answer"
        return "never"

    with CallScope(set(), 0.01):
        answer = await stubborn()

    task = asyncio.current_task()
    assert task is not None
    assert (answer, task.cancelling()) == ("answer", 0)
    await asyncio.sleep(0)


async def test_an_error_of_the_call_is_not_hidden() -> None:
    with pytest.raises(ValueError, match="broken"), CallScope(set(), 60):
        raise ValueError("broken")
