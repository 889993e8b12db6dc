"""Execution of authors' code: threads and lanes start when needed and end when unused."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
from envserver.errors import AuthorCancelled
from envserver.execution.loop_threads import Lanes
from envserver.execution.runner import Place, Runner, Threads

from tests.deadlines import HANG_S
from tests.envserver.eventually import eventually


@pytest.fixture
async def lanes() -> AsyncIterator[Lanes]:
    lanes = Lanes(2, linger_s=0.01)
    yield lanes
    await eventually(lambda: _is(len(lanes), 0))


@pytest.fixture
async def runner(lanes: Lanes) -> Runner:
    return Runner(threads=Threads(4, idle_s=0.01), lanes=lanes)


async def _is(found: int, expected: int) -> bool:
    return found == expected


async def test_plain_code_runs_in_another_thread(runner: Runner) -> None:
    assert await runner.run(Place(), threading.get_ident) != threading.get_ident()


async def test_arguments_results_and_exceptions_are_passed_through(runner: Runner) -> None:
    place = Place()

    async def double(n: int, *, plus: int) -> int:
        if n < 0:
            raise ValueError("negative")
        return 2 * n + plus

    try:
        assert await runner.run(place, double, 2, plus=1) == 5
        assert await runner.run(place, divmod, 7, 2) == (3, 1)
        with pytest.raises(ValueError, match="negative"):
            await runner.run(place, double, -1, plus=1)
        with pytest.raises(TypeError, match="missing"):
            await runner.run(place, double, 1)
        with pytest.raises(ZeroDivisionError):
            await runner.run(place, divmod, 7, 0)
    finally:
        runner.leave(place)


@pytest.mark.parametrize("error", [SystemExit("bye"), KeyboardInterrupt("bye"), StopIteration("bye")])
async def test_an_exception_that_would_end_a_thread_or_confuse_a_loop_becomes_a_runtime_error(
    runner: Runner, error: BaseException
) -> None:
    place = Place()

    def leave() -> int:
        raise error

    async def leave_async() -> int:
        raise error

    try:
        for function in (leave, leave_async):
            with pytest.raises(RuntimeError, match=r"bye|StopIteration"):
                await runner.run(place, function)
        assert await runner.run(place, divmod, 7, 2) == (3, 1)
    finally:
        runner.leave(place)


async def test_a_coroutine_can_be_cancelled(runner: Runner) -> None:
    place = Place()
    began = threading.Event()

    async def for_ever() -> None:
        began.set()
        await asyncio.Event().wait()

    running = asyncio.create_task(runner.run(place, for_ever))
    assert await asyncio.to_thread(began.wait, 10)
    cancel = place.cancel
    assert cancel is not None
    cancel()

    with pytest.raises(AuthorCancelled):
        await running
    assert place.cancel is None
    runner.leave(place)


async def test_a_coroutine_that_is_cancelled_before_its_first_line_raises_too(runner: Runner) -> None:
    place = Place()

    async def nothing() -> None:
        await asyncio.Event().wait()

    running = asyncio.create_task(runner.run(place, nothing))
    await asyncio.sleep(0)  # starts running here, and not yet on the lane
    assert place.cancel is not None
    place.cancel()

    with pytest.raises(AuthorCancelled):
        await running
    runner.leave(place)


async def test_a_place_stays_on_its_lane_and_places_spread_over_lanes(runner: Runner, lanes: Lanes) -> None:
    async def ident() -> int:
        return threading.get_ident()

    places = [Place() for _ in range(4)]

    threads = [[await runner.run(place, ident) for _ in range(2)] for place in places]

    assert all(first == second for first, second in threads)
    assert len({first for first, _ in threads}) == 2
    assert len(lanes) == 2
    for place in places:
        runner.leave(place)


async def test_a_lane_without_places_ends(runner: Runner, lanes: Lanes) -> None:
    async def nothing() -> None:
        pass

    place = Place()
    await runner.run(place, nothing)
    alive = len(lanes)

    runner.leave(place)
    runner.leave(place)

    assert alive == 1
    await eventually(lambda: _is(len(lanes), 0))
    await eventually(lambda: _is(sum("lane" in thread.name for thread in threading.enumerate()), 0))


async def test_a_lane_that_is_used_again_stays(runner: Runner, lanes: Lanes) -> None:
    async def ident() -> int:
        return threading.get_ident()

    first, second = Place(), Place()
    before = await runner.run(first, ident)
    runner.leave(first)

    after = await runner.run(second, ident)
    runner.leave(second)

    assert before == after


async def test_a_place_that_is_kept_has_its_own_lane_until_the_end(runner: Runner, lanes: Lanes) -> None:
    async def ident() -> int:
        return threading.get_ident()

    kept = Place()
    runner.keep(kept)
    lodger, strangers = Place(kept), [Place(), Place(), Place()]
    first = await runner.run(lodger, ident)
    runner.leave(lodger)
    others = {await runner.run(stranger, ident) for stranger in strangers}
    for stranger in strangers:
        runner.leave(stranger)
    await eventually(lambda: _is(len(lanes), 0))  # the lanes of the other places are gone

    again = await runner.run(Place(kept), ident)
    runner.close()

    assert first == again
    assert first not in others
    await eventually(lambda: _is(int(runner.busy), 0))


async def test_a_shared_place_leaves_its_lane_with_its_last_lodger(runner: Runner, lanes: Lanes) -> None:
    async def ident() -> int:
        return threading.get_ident()

    common = Place()
    lodgers = [Place(common), Place(common)]

    threads = {await runner.run(lodger, ident) for lodger in lodgers}
    runner.leave(lodgers[0])
    still = common.lane
    runner.leave(lodgers[1])

    assert len(threads) == 1
    assert still is not None
    assert common.lane is None


async def test_tasks_that_an_author_left_behind_are_cancelled_with_the_lane(runner: Runner, lanes: Lanes) -> None:
    cancelled = threading.Event()

    async def leave_behind() -> None:
        async def for_ever() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        kept.append(asyncio.create_task(for_ever()))
        await asyncio.sleep(0)

    kept: list[asyncio.Task[None]] = []
    place = Place()
    await runner.run(place, leave_behind)

    runner.leave(place)

    assert await asyncio.to_thread(cancelled.wait, 10)


async def test_code_that_blocks_its_lane_does_not_block_other_lanes(runner: Runner, lanes: Lanes) -> None:
    gate, began = threading.Event(), threading.Event()

    async def block() -> None:
        began.set()
        gate.wait(HANG_S)

    async def pass_by() -> str:
        return "passed"

    blocked, free = Place(), Place()
    blocking = asyncio.create_task(runner.run(blocked, block))
    assert await asyncio.to_thread(began.wait, 10)

    assert await runner.run(free, pass_by) == "passed"

    gate.set()
    await blocking
    runner.leave(blocked)
    runner.leave(free)


async def test_there_are_at_most_the_allowed_threads_and_no_threads_without_work() -> None:
    threads = Threads(2, idle_s=0.01)
    gate = threading.Event()
    ran: list[int] = []

    def work() -> None:
        gate.wait(HANG_S)
        ran.append(1)

    for _ in range(5):
        threads.submit(work)

    assert threads.alive == 2
    gate.set()
    await eventually(lambda: _is(len(ran), 5))
    await eventually(lambda: _is(threads.alive, 0))
    assert not threads.busy
    threads.submit(lambda: ran.append(5))
    await eventually(lambda: _is(len(ran), 6))


async def test_if_no_thread_can_start_a_job_waits_for_a_running_thread_or_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = Threads(4, idle_s=0.01)
    gate, ran = threading.Event(), threading.Event()
    threads.submit(lambda: gate.wait(HANG_S))

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        threads.submit(ran.set)
        with pytest.raises(RuntimeError, match="can't start"):
            Threads(1).submit(ran.set)
    gate.set()

    await eventually(lambda: _is(int(ran.is_set()), 1))
    await eventually(lambda: _is(threads.alive, 0))
