"""Calls that run at most once in one replica."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.errors import (
    CallConflict,
    InvalidRequest,
    PoolExhausted,
    SessionNotFound,
    UpstreamError,
    UpstreamGone,
    UpstreamTimeout,
)
from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.ports.calls import KEYED_S, UNKEYED_S
from gateway.core.session import Session, SessionState
from gateway.upstreams.idempotency.call import Call
from gateway.upstreams.idempotency.calls import QUIET_S, OnceOnlyCalls
from tests.fakes.eventually import until

SESSION = Session(
    id=SessionId("s"),
    name="s",
    owner=Owner(""),
    environment=EnvironmentName("e"),
    lease="l",
    fingerprint="f",
    idle_s=300.0,
    worker=WorkerId("w"),
    address="",
    state=SessionState.OPEN,
)
OTHER = replace(SESSION, id=SessionId("t"))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Work:
    """Work that counts its runs and ends when the test opens its gate."""

    def __init__(self, *, value: str = "done", error: Exception | None = None) -> None:
        self.runs = 0
        self.cancelled = 0
        self.gate = asyncio.Event()
        self._value = value
        self._error = error

    async def __call__(self) -> str:
        self.runs += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self._error is not None:
            raise self._error
        return self._value


def at_once(value: str) -> Callable[[], Awaitable[str]]:
    work = Work(value=value)
    work.gate.set()
    return work


async def ended(calls: OnceOnlyCalls[str], call: Call[str]) -> Call[str]:
    """Wait until the call's task has ended and kept its outcome."""
    await until(lambda: call.is_over and not calls.running(SESSION))
    return call


async def test_a_call_runs_once_for_all_requests_with_its_task_id() -> None:
    calls: OnceOnlyCalls[str] = OnceOnlyCalls()
    work = Work()

    call = calls.begin(SESSION, {"a": 1}, work, within_s=60)
    assert calls.find(SESSION, call.task_id) is call
    work.gate.set()

    assert [await call.outcome(), await call.outcome()] == ["done", "done"]
    assert (work.runs, len(call.task_id)) == (1, 32)
    assert calls.find(SESSION, call.task_id) is call
    assert calls.find(OTHER, call.task_id) is None
    assert calls.find(SESSION, "") is None


async def test_a_cancelled_caller_does_not_end_the_call() -> None:
    calls: OnceOnlyCalls[str] = OnceOnlyCalls()
    work = Work()
    run = asyncio.ensure_future(calls.run(SESSION, {}, work, within_s=60, key="k"))
    await until(lambda: work.runs)

    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    work.gate.set()

    assert await calls.run(SESSION, {}, Work(), within_s=60, key="k") == "done"
    assert (work.runs, work.cancelled) == (1, 0)


async def test_the_same_key_gets_the_first_outcome_and_another_action_is_refused() -> None:
    calls: OnceOnlyCalls[str] = OnceOnlyCalls()
    first, second = Work(), Work()
    one = asyncio.ensure_future(calls.run(SESSION, {"a": 1, "b": 2}, first, within_s=60, key="k"))
    two = asyncio.ensure_future(calls.run(SESSION, {"b": 2, "a": 1}, second, within_s=60, key="k"))
    await until(lambda: first.runs)
    with pytest.raises(CallConflict, match="another body"):
        await calls.run(SESSION, {"a": 2}, second, within_s=60, key="k")

    first.gate.set()

    assert [await one, await two] == ["done", "done"]
    assert await calls.run(OTHER, {"a": 2}, at_once("other"), within_s=60, key="k") == "other"
    assert (first.runs, second.runs) == (1, 0)


@pytest.mark.parametrize(
    ("error", "runs"),
    [
        (UpstreamGone("no connection", sent=False), 2),
        (InvalidRequest("no"), 2),
        (SessionNotFound("s"), 2),
        (UpstreamGone("broke", sent=True), 1),
        (UpstreamTimeout("silent"), 1),
        (UpstreamError("odd"), 1),
        (ValueError("a mistake of ours"), 1),
    ],
)
async def test_a_key_may_be_used_again_only_if_nothing_ran(error: Exception, runs: int) -> None:
    calls: OnceOnlyCalls[str] = OnceOnlyCalls()
    work = Work(error=error)
    work.gate.set()

    for _ in range(2):
        with pytest.raises(type(error), match=str(error)):
            await calls.run(SESSION, {}, work, within_s=60, key="k")

    assert work.runs == runs


async def test_a_call_that_takes_too_long_is_cancelled() -> None:
    calls: OnceOnlyCalls[str] = OnceOnlyCalls()
    work = Work()

    with pytest.raises(UpstreamTimeout, match=r"longer than 0\.01 s"):
        await calls.run(SESSION, {}, work, within_s=0.01)

    await until(lambda: work.cancelled)
    assert work.runs == 1


async def test_outcomes_are_kept_for_one_minute_and_for_ten_minutes_with_a_key() -> None:
    clock = Clock()
    calls: OnceOnlyCalls[str] = OnceOnlyCalls(clock=clock)
    told = await ended(calls, calls.begin(SESSION, {}, at_once("told"), within_s=60))
    keyed = await ended(calls, calls.begin(SESSION, {}, at_once("keyed"), within_s=60, key="k"))

    clock.now += UNKEYED_S - 1
    assert calls.find(SESSION, told.task_id) is told
    clock.now += 2
    assert calls.find(SESSION, told.task_id) is None
    assert await calls.run(SESSION, {}, Work(), within_s=60, key="k") == "keyed"
    clock.now += KEYED_S
    assert calls.find(SESSION, keyed.task_id) is None
    with pytest.raises(CallConflict, match="no longer kept"):
        await calls.run(SESSION, {}, Work(), within_s=60, key="k")


async def test_a_session_keeps_its_newest_outcomes_and_never_drops_a_running_call() -> None:
    calls: OnceOnlyCalls[str] = OnceOnlyCalls(session_max=3)
    work = Work()
    begun = calls.begin(SESSION, "begun", work, within_s=60)
    done = []
    for number in range(5):
        call = calls.begin(SESSION, number, at_once("x"), within_s=60)
        done.append(call)
        await call.outcome()
        await until(lambda: calls.running(SESSION) == 1)

    assert [calls.find(SESSION, call.task_id) is not None for call in done] == [False, False, True, True, True]
    assert calls.find(SESSION, begun.task_id) is begun
    work.gate.set()
    assert await begun.outcome() == "done"


@pytest.mark.parametrize("bounds", [{"session_bytes": 2500}, {"total_bytes": 2500}, {"total_max": 2}])
async def test_the_kept_outcomes_are_bounded(bounds: dict[str, Any]) -> None:
    calls: OnceOnlyCalls[str] = OnceOnlyCalls(**bounds)

    done = [await ended(calls, calls.begin(SESSION, n, at_once("x" * 1000), within_s=60)) for n in range(4)]

    assert [calls.find(SESSION, call.task_id) is not None for call in done] == [False, False, True, True]
    calls.forget(SESSION)
    assert repr(calls) == "<Calls of 0 sessions, 0 kept, 0 bytes>"


async def test_too_many_concurrent_calls_are_refused() -> None:
    calls: OnceOnlyCalls[str] = OnceOnlyCalls(session_max=2)
    for number in range(2):
        calls.begin(SESSION, number, Work(), within_s=60)

    with pytest.raises(PoolExhausted):
        calls.begin(SESSION, 2, Work(), within_s=60)

    await calls.aclose()


async def test_a_call_whose_stream_was_cut_is_found_by_its_repetition() -> None:
    calls: OnceOnlyCalls[str] = OnceOnlyCalls()
    work, again = Work(), Work()
    call = calls.begin(SESSION, {"a": 1}, work, within_s=60)
    await until(lambda: work.runs)
    with calls.listening(SESSION, call):
        assert (
            calls.begin(SESSION, {"a": 1}, again, within_s=60) is not call
        )  # a listener still waits, so the repetition is a second call

    assert calls.begin(SESSION, {"a": 2}, again, within_s=60) is not call
    found = calls.begin(SESSION, {"a": 1}, again, within_s=60)
    with calls.listening(SESSION, found):
        found.was_delivered = True

    assert found is call
    assert calls.begin(SESSION, {"a": 1}, again, within_s=60) is not call
    await calls.aclose()
    assert work.runs == 1


async def test_an_ended_session_is_forgotten_and_its_calls_are_cancelled() -> None:
    calls: OnceOnlyCalls[str] = OnceOnlyCalls()
    work = Work()
    call = calls.begin(SESSION, {}, work, within_s=60, key="k")
    done = calls.begin(SESSION, {}, at_once("x"), within_s=60)
    await done.outcome()
    await until(lambda: calls.running(SESSION) == 1)
    assert [session.id for session in calls.busy(WorkerId("w"))] == ["s"]
    assert not await calls.settle(SESSION, within_s=0.01)

    calls.forget(SESSION)

    with pytest.raises(UpstreamGone) as caught:
        await call.outcome()
    assert caught.value.sent
    await until(lambda: work.cancelled)
    assert calls.find(SESSION, done.task_id) is None
    assert calls.busy(WorkerId("w")) == []
    assert await calls.settle(SESSION, within_s=0)
    assert repr(calls) == "<Calls of 0 sessions, 0 kept, 0 bytes>"


async def test_another_lease_of_the_same_session_shares_nothing() -> None:
    calls: OnceOnlyCalls[str] = OnceOnlyCalls()
    call = await ended(calls, calls.begin(SESSION, {}, at_once("old"), within_s=60, key="k"))
    successor = replace(SESSION, lease="m")

    assert calls.find(successor, call.task_id) is None
    assert await calls.run(successor, {}, at_once("new"), within_s=60, key="k") == "new"


async def test_sessions_that_another_replica_closed_are_forgotten_after_a_while() -> None:
    clock = Clock()
    calls: OnceOnlyCalls[str] = OnceOnlyCalls(clock=clock)
    await ended(calls, calls.begin(SESSION, {}, at_once("x"), within_s=60, key="k"))

    clock.now += QUIET_S + 1
    calls.find(OTHER, "")

    assert repr(calls) == "<Calls of 0 sessions, 0 kept, 0 bytes>"
