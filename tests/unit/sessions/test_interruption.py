"""What breaks off a call, and what does not."""

from __future__ import annotations

import asyncio

import pytest

from gateway.sessions.interruption import CallScope, Interrupted, Watcher


async def for_ever() -> None:
    await asyncio.get_running_loop().create_future()


async def test_the_end_of_a_session_breaks_off_whatever_waits_in_it() -> None:
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


async def test_so_does_the_end_of_its_time() -> None:
    with pytest.raises(Interrupted) as broken, CallScope(set(), 0.01):
        await for_ever()

    assert broken.value.cause == "late"


async def test_no_time_at_all_still_lets_what_is_there_already_through() -> None:
    with CallScope(set(), -1):
        found = "there"

    assert found == "there"


async def test_the_first_cause_is_the_one_that_is_told() -> None:
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


async def test_a_cancellation_from_outside_goes_on_also_beside_an_end() -> None:
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


async def test_what_swallows_the_cancellation_has_its_answer_taken_and_the_task_is_sound() -> None:
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


async def test_an_error_of_what_ran_is_not_hidden() -> None:
    with pytest.raises(ValueError, match="broken"), CallScope(set(), 60):
        raise ValueError("broken")
