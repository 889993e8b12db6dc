"""Calls that run at most once among replicas: the records in the store, and their use by other replicas."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from gateway.core import sse
from gateway.core.episode import ImageBlock, StepResult, TextBlock
from gateway.core.errors import (
    CallConflict,
    GatewayError,
    InvalidRequest,
    SessionFailed,
    StoreUnavailable,
    UpstreamError,
    UpstreamGone,
    UpstreamTimeout,
)
from gateway.core.ports.calls import CallState
from gateway.upstreams.idempotency.call import Call
from gateway.upstreams.idempotency.calls import OnceOnlyCalls
from gateway.upstreams.idempotency.codec import EVENTS, RESULTS, Codec
from gateway.upstreams.idempotency.recorder import Recorder
from gateway.upstreams.idempotency.records import NOTED_BYTES, Records
from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually, until
from tests.fakes.replicas import SESSION, Shared, View

WORDS: Codec[str] = Codec("word", str, str)
NEVER_S = 3600.0
LOST = "the gateway that ran it was lost"


class Replica:
    """One replica with its calls, its recorder and its view of the store."""

    def __init__(self, shared: Shared, name: str, **limits: Any) -> None:
        self.view = View(shared, name)
        self.recorder = Recorder(self.view, **{"tick_s": 0.01, "write_s": 0.05} | limits)
        self.calls: OnceOnlyCalls[str] = OnceOnlyCalls(Records(self.recorder, WORDS))

    def keyed(
        self, run: Callable[[], Awaitable[str]], *, what: str = "what", key: str = "k", within_s: float = 60.0
    ) -> asyncio.Future[str]:
        waits = asyncio.ensure_future(self.calls.run(SESSION, what, run, within_s=within_s, key=key))
        waits.add_done_callback(lambda _: waits.cancelled() or waits.exception())  # not every test awaits the call
        return waits

    def free(self, run: Callable[[], Awaitable[str]]) -> Call[str]:
        return self.calls.begin(SESSION, "what", run, within_s=60)

    async def sought(self, task_id: str) -> str | None:
        call = await self.calls.seek(SESSION, task_id, within_s=60)
        return None if call is None else await call.outcome()

    async def aclose(self) -> None:
        self.view.gate.set()
        await self.calls.aclose()
        await self.recorder.aclose()


class Work:
    """Work that counts its runs and ends when its gate is open."""

    def __init__(self, outcome: str | Exception = "done", *, at_once: bool = True) -> None:
        self.runs = 0
        self.gate = asyncio.Event()
        self._outcome = outcome
        if at_once:
            self.gate.set()

    async def __call__(self) -> str:
        self.runs += 1
        await self.gate.wait()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


@pytest.fixture
def shared() -> Shared:
    return Shared()


@pytest.fixture
async def a(shared: Shared) -> AsyncIterator[Replica]:
    replica = Replica(shared, "a")
    yield replica
    await replica.aclose()


@pytest.fixture
async def b(shared: Shared) -> AsyncIterator[Replica]:
    replica = Replica(shared, "b")
    yield replica
    await replica.aclose()


# -- with a key -----------------------------------------------------------------------------------------------------


async def test_a_call_with_a_key_needs_two_requests_to_the_store_and_its_repetition_none(shared: Shared) -> None:
    a = Replica(shared, "a", tick_s=NEVER_S)
    work = Work()

    assert await a.keyed(work) == "done"
    assert a.view.trips == ["begin", "write"]
    assert await a.keyed(Work()) == "done"
    assert a.view.trips == ["begin", "write"]
    assert work.runs == 1
    await a.aclose()


async def test_the_same_key_at_two_replicas_runs_once(a: Replica, b: Replica) -> None:
    work, other = Work(at_once=False), Work()
    first = a.keyed(work)
    await until(lambda: work.runs)
    second = b.keyed(other)
    await until(lambda: "settled" in b.view.trips)

    work.gate.set()

    assert [await first, await second, await b.keyed(other)] == ["done"] * 3
    assert (work.runs, other.runs) == (1, 0)


async def test_another_body_is_refused_at_the_other_replica(a: Replica, b: Replica) -> None:
    await a.keyed(Work())
    other = Work()

    with pytest.raises(CallConflict, match="another body"):
        await b.keyed(other, what="other")

    assert other.runs == 0


@pytest.mark.parametrize(
    "error",
    [
        UpstreamGone("broke", sent=True),
        UpstreamTimeout("silent"),
        SessionFailed("its judge broke"),
        UpstreamError("odd \ud800"),
    ],
)
async def test_an_error_is_the_outcome_for_all_replicas(a: Replica, b: Replica, error: GatewayError) -> None:
    other = Work()

    for replica, work in ((a, Work(error)), (b, other), (b, other)):
        with pytest.raises(type(error)) as caught:
            await replica.keyed(work)
        assert caught.value.detail == error.detail
        assert getattr(caught.value, "sent", True)

    assert other.runs == 0


async def test_other_replicas_do_not_see_the_message_of_an_internal_error(a: Replica, b: Replica) -> None:
    with pytest.raises(ValueError, match="a secret"):
        await a.keyed(Work(ValueError("a secret")))

    with pytest.raises(UpstreamError, match="failed in the gateway"):
        await b.keyed(Work())


@pytest.mark.parametrize(
    "error", [UpstreamGone("no connection", sent=False), InvalidRequest("no"), StoreUnavailable("away")]
)
async def test_a_call_that_never_ran_may_run_at_another_replica(a: Replica, b: Replica, error: GatewayError) -> None:
    with pytest.raises(type(error)):
        await a.keyed(Work(error))
    await until(lambda: "write" in a.view.trips)

    assert await b.keyed(Work("there")) == "there"
    assert await a.keyed(Work()) == "there"


async def test_a_replica_that_waited_for_a_call_that_never_ran_runs_it(a: Replica, b: Replica) -> None:
    work = Work(InvalidRequest("no"), at_once=False)
    first = a.keyed(work)
    await until(lambda: work.runs)
    second = b.keyed(Work("there"))
    await until(lambda: "settled" in b.view.trips)

    work.gate.set()

    with pytest.raises(InvalidRequest):
        await first
    assert await second == "there"


async def test_a_call_of_a_lost_replica_never_runs_again(a: Replica, b: Replica, shared: Shared) -> None:
    work, other = Work(at_once=False), Work()
    a.keyed(work)
    await until(lambda: work.runs)
    shared.gone.add("a")

    for _ in range(2):
        with pytest.raises(UpstreamGone, match=LOST) as caught:
            await b.keyed(other)
        assert caught.value.sent
        assert not caught.value.retryable
    shared.gone.clear()  # the replica was only slow
    work.gate.set()

    assert await b.keyed(other) == "done"
    assert (work.runs, other.runs) == (1, 0)


async def test_an_outcome_that_is_too_large_is_returned_where_it_ran_and_refused_at_other_replicas(
    a: Replica, b: Replica
) -> None:
    large = "x" * 2**20
    other = Work()

    assert await a.keyed(Work(large)) == large

    assert await a.keyed(other) == large
    with pytest.raises(CallConflict, match="not kept"):
        await b.keyed(other)
    assert other.runs == 0


async def test_a_cancelled_caller_does_not_end_a_recorded_call(a: Replica, b: Replica) -> None:
    work = Work(at_once=False)
    first = a.keyed(work)
    await until(lambda: work.runs)

    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    work.gate.set()

    assert await b.keyed(Work()) == "done"


async def test_a_call_that_takes_too_long_is_a_timeout_at_all_replicas(a: Replica, b: Replica) -> None:
    with pytest.raises(UpstreamTimeout, match=r"longer than 0\.05 s"):
        await a.keyed(Work(at_once=False), within_s=0.05)
    await until(lambda: "write" in a.view.trips)

    with pytest.raises(UpstreamTimeout, match=r"longer than 0\.05 s"):
        await b.keyed(Work())


async def test_a_wait_that_timed_out_may_be_repeated(a: Replica, b: Replica) -> None:
    work = Work(at_once=False)
    a.keyed(work)
    await until(lambda: work.runs)
    with pytest.raises(UpstreamTimeout):
        await b.keyed(Work(), within_s=0.05)

    work.gate.set()

    assert await b.keyed(Work()) == "done"


# -- another replica sends a call to the holder of the session --------------------------------------------------------


async def test_a_replica_that_waits_for_another_runs_the_call_when_the_other_requests_it(
    a: Replica, b: Replica
) -> None:
    work = Work()
    a_is_waiting = asyncio.Event()

    async def ask_a() -> str:
        await a_is_waiting.wait()
        return await a.calls.run(SESSION, "what", work, within_s=60, key="k", is_asked=True)

    at_b = b.keyed(ask_a)
    await until(lambda: "begin" in b.view.trips)
    at_a = a.keyed(Work("never"))
    await until(lambda: "settled" in a.view.trips)
    a_is_waiting.set()

    assert [await at_b, await at_a] == ["done", "done"]
    assert work.runs == 1


async def test_a_replica_whose_begin_is_still_pending_runs_the_call_when_a_faster_replica_requests_it(
    a: Replica, b: Replica
) -> None:
    work = Work()
    a.view.gate.clear()
    at_a = a.keyed(Work("never"))
    await until(lambda: "begin" in a.view.trips)

    async def ask_a() -> str:
        asked = asyncio.ensure_future(a.calls.run(SESSION, "what", work, within_s=60, key="k", is_asked=True))
        await asyncio.wait({asked}, timeout=HANG_S)
        a.view.gate.set()
        return await asked

    at_b = b.keyed(ask_a)

    assert [await at_b, await at_a] == ["done", "done"]
    assert work.runs == 1


async def test_the_outcome_of_a_requested_call_is_known_where_it_ran_after_the_requesting_replica_is_lost(
    a: Replica, b: Replica, shared: Shared
) -> None:
    work = Work(at_once=False)

    async def ask_a() -> str:
        return await a.calls.run(SESSION, "what", work, within_s=60, key="k", is_asked=True)

    b.keyed(ask_a)
    await until(lambda: work.runs)
    shared.gone.add("b")
    again = a.keyed(Work())

    work.gate.set()

    assert await again == "done"
    assert work.runs == 1


# -- an unavailable store -------------------------------------------------------------------------------------------


async def test_without_the_store_a_call_with_a_key_does_not_run(a: Replica) -> None:
    work = Work()
    a.view.is_away = True
    with pytest.raises(StoreUnavailable):
        await a.keyed(work)
    assert work.runs == 0

    a.view.is_away = False

    assert await a.keyed(work) == "done"


async def test_a_begin_whose_answer_was_lost_does_not_occupy_the_key(a: Replica, b: Replica) -> None:
    a.view.loses_answers = True
    with pytest.raises(StoreUnavailable):
        await a.keyed(Work())
    a.view.loses_answers = False

    assert await a.keyed(Work("there")) == "there"
    assert await b.keyed(Work()) == "there"


async def test_a_begin_whose_answer_was_lost_frees_the_key_for_other_replicas_when_the_store_is_back(
    a: Replica, b: Replica
) -> None:
    a.view.loses_answers = True
    with pytest.raises(StoreUnavailable):
        await a.keyed(Work())
    at_b = b.keyed(Work("there"))
    await until(lambda: "settled" in b.view.trips or at_b.done())

    a.view.loses_answers = False

    assert await at_b == "there"


async def test_an_outcome_is_returned_while_the_store_is_unavailable_and_written_when_it_is_back(
    a: Replica, b: Replica
) -> None:
    work = Work(at_once=False)
    at_a = a.keyed(work)
    await until(lambda: work.runs)
    a.view.is_away = True
    work.gate.set()
    assert await at_a == "done"
    at_b = b.keyed(Work())
    await until(lambda: "settled" in b.view.trips)

    a.view.is_away = False

    assert await at_b == "done"


async def test_a_store_that_hangs_delays_an_outcome_only_briefly(a: Replica) -> None:
    work = Work(at_once=False)
    at_a = a.keyed(work)
    await until(lambda: work.runs)
    a.view.gate.clear()

    work.gate.set()

    assert await at_a == "done"


async def test_outcomes_that_wait_for_the_store_are_bounded(shared: Shared, b: Replica) -> None:
    a = Replica(shared, "a", unsent_bytes=150, tick_s=NEVER_S)
    works = [Work("x" * 100, at_once=False) for _ in range(2)]
    at_a = [a.keyed(work, key=str(number)) for number, work in enumerate(works)]
    await until(lambda: all(work.runs for work in works))
    a.view.is_away = True
    for work, waits in zip(works, at_a, strict=True):
        work.gate.set()
        await waits

    a.view.is_away = False
    await a.aclose()

    assert await b.keyed(Work(), key="0") == "x" * 100
    with pytest.raises(CallConflict, match="not kept"):
        await b.keyed(Work(), key="1")


async def test_all_keys_are_written_again_to_a_store_that_lost_its_data(a: Replica, b: Replica, shared: Shared) -> None:
    ran, runs, other = Work(), Work(at_once=False), Work()
    await a.keyed(ran, key="ran")
    at_a = a.keyed(runs, key="runs")
    await until(lambda: runs.runs)
    await until(lambda: a.view.trips.count("write") >= 2)
    shared.lose()

    async def told_again() -> None:
        found = [shared.look(SESSION.id, SESSION.lease, task_id) for task_id in shared.runner]
        assert [one.state for one in found if one is not None] == [CallState.DONE, CallState.RUNNING]

    await eventually(told_again)
    at_b = [b.keyed(other, key="ran"), b.keyed(other, key="runs")]
    runs.gate.set()

    assert [await at_a, *[await waits for waits in at_b]] == ["done"] * 3
    assert (ran.runs, runs.runs, other.runs) == (1, 1, 0)


async def test_a_call_that_ends_before_it_is_written_again_as_running_is_written_as_ended(
    shared: Shared, b: Replica
) -> None:
    a = Replica(shared, "a", tick_s=NEVER_S)
    work, other = Work(at_once=False), Work()
    await a.keyed(Work(), key="before")
    at_a = a.keyed(work, key="runs")
    await until(lambda: work.runs)
    shared.lose()
    await a.keyed(Work(), key="after")  # the answer of the store reveals the loss

    a.view.is_away = True
    work.gate.set()
    assert await at_a == "done"
    a.view.is_away = False
    await a.aclose()

    assert [await b.keyed(other, key=key) for key in ("before", "runs", "after")] == ["done"] * 3
    assert other.runs == 0


async def test_a_call_that_was_written_again_before_its_begin_arrives_still_runs(a: Replica, shared: Shared) -> None:
    work = Work()
    a.view.gate.clear()
    at_a = a.keyed(work)
    await until(lambda: a.view.begun)

    shared.write("a", a.view.begun[0])
    a.view.gate.set()

    assert await at_a == "done"
    assert work.runs == 1


async def test_outcomes_that_can_be_written_again_are_bounded_but_all_keys_stay_known(
    shared: Shared, b: Replica
) -> None:
    a = Replica(shared, "a", kept_bytes=150)
    for key in ("1", "2"):
        await a.keyed(Work("x" * 100), key=key)
    await until(lambda: a.view.trips.count("write") >= 3)
    shared.lose()

    async def told_again() -> None:
        for task_id in shared.runner:
            assert shared.look(SESSION.id, SESSION.lease, task_id) is not None

    await eventually(told_again)
    with pytest.raises(CallConflict, match="not kept"):
        await b.keyed(Work(), key="1")
    assert await b.keyed(Work(), key="2") == "x" * 100
    await a.aclose()


# -- without a key --------------------------------------------------------------------------------------------------


async def test_a_call_without_a_key_needs_no_request_of_its_own_and_outcomes_are_written_together(
    shared: Shared, b: Replica
) -> None:
    a = Replica(shared, "a", tick_s=NEVER_S)
    calls = [a.free(Work(str(number))) for number in range(20)]
    for call in calls:
        await call.outcome()
    await until(lambda: a.calls.running(SESSION) == 0)
    assert a.view.trips == []

    await a.aclose()

    assert a.view.trips == ["write"]
    assert [await b.sought(call.task_id) for call in calls] == [str(number) for number in range(20)]
    assert await b.sought("f" * 32) is None


async def test_malformed_task_ids_are_not_looked_up(b: Replica) -> None:
    for task_id in ("", "nope", "F" * 32, "f" * 33, "f" * 31 + "\n"):
        assert await b.sought(task_id) is None
    assert b.view.trips == []


async def test_another_replica_waits_for_a_running_call_without_a_key(a: Replica, b: Replica) -> None:
    work = Work(at_once=False)
    call = a.free(work)
    await until(lambda: "write" in a.view.trips)
    found = await b.calls.seek(SESSION, call.task_id, within_s=60)
    assert found is not None
    assert await b.calls.seek(SESSION, call.task_id, within_s=60) is found
    assert not found.is_over

    work.gate.set()

    assert (await found.outcome(), found.task_id) == ("done", call.task_id)
    assert work.runs == 1


async def test_a_call_without_a_key_is_lost_with_its_replica(a: Replica, b: Replica, shared: Shared) -> None:
    call = a.free(Work(at_once=False))
    await until(lambda: "write" in a.view.trips)
    shared.gone.add("a")

    for _ in range(2):
        with pytest.raises(UpstreamGone, match=LOST):
            await b.sought(call.task_id)


async def test_without_the_store_calls_without_a_key_run_and_unknown_ids_are_an_error_of_the_store(a: Replica) -> None:
    a.view.is_away = True
    call = a.free(Work())

    assert await call.outcome() == "done"
    assert await a.sought(call.task_id) == "done"
    with pytest.raises(StoreUnavailable):
        await a.sought("f" * 32)


@pytest.mark.parametrize("runs_long", [False, True])
async def test_large_outcomes_without_a_key_are_not_written(a: Replica, b: Replica, runs_long: bool) -> None:
    work = Work("x" * NOTED_BYTES, at_once=not runs_long)
    call = a.free(work)
    if runs_long:
        await until(lambda: "write" in a.view.trips)
        work.gate.set()
    await call.outcome()

    async def unknown() -> bool:
        return await b.sought(call.task_id) is None

    if runs_long:
        with contextlib.suppress(UpstreamGone):  # the wait found that the outcome was not kept
            await b.sought(call.task_id)
    assert await unknown()


async def test_of_too_many_outcomes_in_one_tick_the_newest_are_not_written(shared: Shared, b: Replica) -> None:
    a = Replica(shared, "a", tick_s=NEVER_S, notes_bytes=1000)
    calls = []
    for _ in range(3):
        calls.append(a.free(Work("x" * 400)))
        await calls[-1].outcome()
    await a.aclose()

    assert [await b.sought(call.task_id) for call in calls] == ["x" * 400, "x" * 400, None]


# -- endings --------------------------------------------------------------------------------------------------------


async def test_an_ended_session_is_forgotten_by_all_replicas(a: Replica, b: Replica) -> None:
    work = Work(at_once=False)
    await a.keyed(Work(), key="old")
    running = a.keyed(work)
    await until(lambda: work.runs)

    a.calls.forget(SESSION)

    with pytest.raises(UpstreamGone, match="session was ended"):
        await running
    await until(lambda: a.recorder.is_idle)
    assert await b.keyed(Work("new"), key="old") == "new"
    assert await b.keyed(Work("new")) == "new"


async def test_a_session_that_ends_while_a_call_is_being_recorded_leaves_its_key_free(a: Replica, b: Replica) -> None:
    work = Work()
    a.view.gate.clear()
    running = a.keyed(work)
    await until(lambda: "begin" in a.view.trips)
    a.calls.forget(SESSION)
    with pytest.raises(UpstreamGone):
        await running

    a.view.gate.set()
    await until(lambda: "write" in a.view.trips)

    assert await b.keyed(Work("new")) == "new"
    assert work.runs == 0


async def test_a_replica_that_shuts_down_records_the_outcome_of_its_calls(a: Replica, b: Replica) -> None:
    work = Work(at_once=False)
    running = a.keyed(work)
    await until(lambda: work.runs)

    await a.aclose()

    for waits in (running, b.keyed(Work())):
        with pytest.raises(UpstreamGone, match="gateway went away") as caught:
            await waits
        assert caught.value.sent


async def test_a_replica_reports_that_it_is_alive_while_a_call_runs(a: Replica) -> None:
    work = Work(at_once=False)
    running = a.keyed(work)

    await until(lambda: a.view.trips.count("write") >= 3)
    work.gate.set()
    await running
    await until(lambda: a.recorder.is_idle)


# -- outcomes as bytes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "result",
    [
        StepResult(),
        StepResult(error="no \ud800", reason="tool_failed"),
        StepResult(
            blocks=(TextBlock("é\ud800\x00", {"k": [1]}), ImageBlock("aGk=", "image/png")),
            reward=0.1 + 0.2,
            finished=True,
            metadata={"n": 12345678901234567890, "f": 1e-300},
            data=[None, {"a": "b"}],
        ),
        StepResult(reward=0.0),
        StepResult(reward=None, data=0),
    ],
)
def test_a_result_survives_writing_and_reading(result: StepResult) -> None:
    written = RESULTS.write(result)

    assert written.isascii()
    assert RESULTS.read(written) == result


def test_an_event_survives_writing_and_reading_and_other_bytes_are_refused() -> None:
    event = sse.Event("end", '{"a": 1}\n\ud800')

    assert EVENTS.read(EVENTS.write(event)) == event
    for written in (b"", b"[]", b"{}", b'{"event":1}', RESULTS.write(StepResult()), b'{"error":{"code":1}}'):
        with pytest.raises(UpstreamError, match="can't be read"):
            EVENTS.read(written)


def test_an_error_that_may_have_run_is_never_read_as_one_that_did_not() -> None:
    for sent in (True, False):
        error = RESULTS.read(RESULTS.write(UpstreamGone("gone", sent=sent)))
        assert isinstance(error, UpstreamGone)
        assert error.sent is sent
    unsure = RESULTS.read(b'{"error":{"code":"upstream_gone","detail":"x","sent":null}}')
    assert isinstance(unsure, UpstreamGone)
    assert unsure.sent
