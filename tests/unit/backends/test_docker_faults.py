"""The Docker backend with an engine that hangs, is restarted or loses events, and with workers out of memory."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from gateway.backends.docker import calls
from gateway.backends.docker.backend import DockerBackend, EnginePace
from gateway.backends.docker.container import owned_filter
from gateway.backends.docker.deaths import LOOK_THREADS, DeathWatcher
from gateway.backends.docker.engine import Engine, EngineError, connect, translated
from gateway.backends.docker.mounts import HostPaths
from gateway.backends.launch import CancelToken, Launches
from gateway.core.environment import Environment, Server
from gateway.core.errors import BackendError, NotLeading, StartFailed
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.leader_lease import Lead, LeaderLease
from gateway.core.session import CloseReason
from gateway.core.worker import Worker
from tests.deadlines import HANG_S
from tests.fakes.engine import FakeContainer, FakeEngine, Hold
from tests.fakes.eventually import until

ENVIRONMENT = Environment(
    name=EnvironmentName("fake"), image="env-gateway/fake", directory=Path("/nowhere"), command=("python3", "server.py")
)
LABELS = owned_filter("ours", "")
REASON_S = 2.0
"""Seconds that `unlucky` waits for a reason. Each test that uses it takes that long."""


def worker(id: str = "w1") -> Worker:
    return Worker(id=WorkerId(id), environment=ENVIRONMENT.name, digest=ENVIRONMENT.digest(), slots=4)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="eg-") as name:
        yield Path(name)


@pytest.fixture
def engine(folder: Path) -> Iterator[FakeEngine]:
    with FakeEngine(folder / "engine.sock") as running:
        yield running


@pytest.fixture
async def backend(engine: FakeEngine, folder: Path) -> AsyncIterator[DockerBackend]:
    made = DockerBackend(
        url=engine.url,
        instance="ours",
        paths=HostPaths(socket_dir=folder / "sockets"),
        pace=EnginePace(stop_grace_s=HANG_S),
    )
    yield made
    await made.aclose()


async def reached(hold: Hold) -> None:
    assert await asyncio.to_thread(hold.reached.wait, HANG_S)


async def started(backend: DockerBackend, engine: FakeEngine, id: str = "w1") -> FakeContainer:
    await backend.start(worker(id), ENVIRONMENT)
    (container,) = (one for one in engine.containers.values() if one.labels["env-gateway.worker"] == id)
    return container


# -- a leader that was replaced


@pytest.mark.parametrize(
    ("server", "during", "starts"),
    [(Server(), "POST create", 0), (Server(port=8000), "POST create", 0), (Server(port=8000), "POST start", 1)],
)
async def test_a_leader_whose_lease_ends_during_a_start_starts_no_further_container_and_undoes_the_start(
    backend: DockerBackend, engine: FakeEngine, folder: Path, server: Server, during: str, starts: int
) -> None:
    engine.images.add("env-gateway/base:latest")  # the image of the forwarder for a third-party server
    lease = LeaderLease(Lead(1))
    hold = engine.hold(during)
    starting = asyncio.create_task(backend.start(worker(), replace(ENVIRONMENT, server=server), lease))
    await reached(hold)

    lease.renew(Lead(0), asked_at=time.monotonic())
    hold.released.set()

    with pytest.raises(NotLeading):
        await starting
    assert engine.requests.count("POST start") == starts
    assert not engine.containers
    assert not list((folder / "sockets").iterdir())


# -- why a worker died


def out_of_memory(engine: FakeEngine, container: FakeContainer) -> None:
    engine.run_out_of_memory(container)


def out_of_memory_without_a_word(engine: FakeEngine, container: FakeContainer) -> None:
    engine.run_out_of_memory(container, says_so=False)


def supervisor_gave_up(engine: FakeEngine, container: FakeContainer) -> None:
    engine.run_out_of_memory(container, dies=False)
    engine.ahead_s = 1.0
    engine.die(container, exit_code=3)


def child_long_ago(engine: FakeEngine, container: FakeContainer) -> None:
    engine.run_out_of_memory(container, dies=False)
    engine.ahead_s = 3600.0
    engine.die(container)


def ended_well_after_a_child(engine: FakeEngine, container: FakeContainer) -> None:
    engine.run_out_of_memory(container, dies=False)
    engine.die(container, exit_code=0)


def killed(engine: FakeEngine, container: FakeContainer) -> None:
    engine.die(container)


def crashed(engine: FakeEngine, container: FakeContainer) -> None:
    engine.die(container, exit_code=1)


@pytest.fixture
async def patient(engine: FakeEngine, folder: Path) -> AsyncIterator[DockerBackend]:
    """Yield a backend that delays a death until the engine reports its reason, even on a loaded machine."""
    made = DockerBackend(
        url=engine.url,
        instance="ours",
        paths=HostPaths(socket_dir=folder / "sockets"),
        pace=EnginePace(stop_grace_s=HANG_S, reason_s=HANG_S),
    )
    yield made
    engine.release()
    await made.aclose()


@pytest.fixture
async def unlucky(engine: FakeEngine, folder: Path) -> AsyncIterator[DockerBackend]:
    """Yield a backend that waits long enough for the reason that even a loaded machine requests it."""
    made = DockerBackend(
        url=engine.url,
        instance="ours",
        paths=HostPaths(socket_dir=folder / "sockets"),
        pace=EnginePace(stop_grace_s=HANG_S, reason_s=REASON_S),
    )
    yield made
    await made.aclose()


@pytest.mark.parametrize(
    ("how", "reason", "detail"),
    [
        pytest.param(out_of_memory, CloseReason.OUT_OF_MEMORY, "out of memory (exit status 137)", id="out of memory"),
        pytest.param(
            out_of_memory_without_a_word,
            CloseReason.OUT_OF_MEMORY,
            "out of memory (exit status 137)",
            id="out of memory without an event",
        ),
        pytest.param(
            supervisor_gave_up, CloseReason.OUT_OF_MEMORY, "out of memory (exit status 3)", id="the supervisor gave up"
        ),
        pytest.param(
            child_long_ago, CloseReason.WORKER_LOST, "exit status 137", id="a child ran out of memory an hour ago"
        ),
        pytest.param(
            ended_well_after_a_child, CloseReason.WORKER_LOST, "exit status 0", id="a child ran out of memory"
        ),
        pytest.param(killed, CloseReason.WORKER_LOST, "exit status 137", id="killed"),
        pytest.param(crashed, CloseReason.WORKER_LOST, "exit status 1", id="crashed"),
    ],
)
async def test_a_death_has_its_reason(
    patient: DockerBackend,
    engine: FakeEngine,
    how: Callable[[FakeEngine, FakeContainer], None],
    reason: CloseReason,
    detail: str,
) -> None:
    container = await started(patient, engine)
    deaths = patient.deaths()
    await asyncio.to_thread(engine.followed)

    how(engine, container)

    death = await anext(deaths)
    assert (death.id, death.reason, death.detail) == ("w1", reason, detail)


async def test_a_death_is_reported_even_if_the_engine_does_not_report_its_reason(
    unlucky: DockerBackend, engine: FakeEngine
) -> None:
    container = await started(unlucky, engine)
    deaths = unlucky.deaths()
    await asyncio.to_thread(engine.followed)
    hold = engine.hold("GET inspect")

    engine.die(container)
    async with asyncio.timeout(HANG_S):
        death = await anext(deaths)

    assert (death.id, death.reason) == ("w1", CloseReason.WORKER_LOST)
    assert hold.reached.is_set()  # the engine was queried and has not answered yet
    assert not hold.released.is_set()


async def test_an_engine_that_reports_every_oom_is_not_queried_for_reasons(
    backend: DockerBackend, engine: FakeEngine
) -> None:
    engine.info["CgroupVersion"] = "1"
    first, second = await started(backend, engine, "w1"), await started(backend, engine, "w2")
    looks, clients = engine.count("GET inspect"), engine.count("GET version")
    deaths = backend.deaths()
    await asyncio.to_thread(engine.followed)

    engine.die(first)
    engine.run_out_of_memory(second)
    reasons = [(await anext(deaths)).reason for _ in range(2)]

    assert reasons == [CloseReason.WORKER_LOST, CloseReason.OUT_OF_MEMORY]
    assert engine.count("GET inspect") == looks
    assert engine.count("GET version") == clients + 1  # the client that follows the events


@pytest.fixture
async def endings(engine: FakeEngine, backend: DockerBackend) -> AsyncIterator[DeathWatcher]:
    """Yield a watcher of *backend*'s workers that delays deaths as long as a reason may still arrive."""
    made = DeathWatcher(engine.url, LABELS, reason_s=HANG_S, late_s=HANG_S)
    yield made
    engine.release()
    await made.aclose()


async def is_warm(engine: FakeEngine, before: int) -> None:
    """Wait until all inspecting threads are connected; *before* counts the version requests before following."""
    await asyncio.to_thread(engine.followed)
    await until(lambda: engine.count("GET version") == before + LOOK_THREADS + 1)


async def test_an_oom_event_after_the_death_becomes_its_reason(
    endings: DeathWatcher, backend: DockerBackend, engine: FakeEngine
) -> None:
    first, second = await started(backend, engine, "w1"), await started(backend, engine, "w2")
    looks = engine.count("GET inspect")
    deaths = endings.follow()
    await asyncio.to_thread(engine.followed)

    engine.die(first)  # the engine answers without an OOM
    await until(lambda: engine.count("GET inspect") == looks + 1)
    engine.run_out_of_memory(first, dies=False)
    told = [await anext(deaths)]
    hold = engine.hold("GET inspect")
    engine.die(second)
    await reached(hold)  # the engine is queried and does not answer
    engine.run_out_of_memory(second, dies=False)
    told.append(await anext(deaths))

    assert [(death.id, death.reason) for death in told] == [
        ("w1", CloseReason.OUT_OF_MEMORY),
        ("w2", CloseReason.OUT_OF_MEMORY),
    ]


async def test_deaths_are_inspected_concurrently_over_existing_connections(
    patient: DockerBackend, engine: FakeEngine
) -> None:
    ids = [f"w{number}" for number in range(LOOK_THREADS)]
    containers = [await started(patient, engine, id) for id in ids]
    before = engine.count("GET version")
    deaths = patient.deaths()
    await is_warm(engine, before)
    slow = [engine.hold("GET inspect") for _ in ids[1:]]
    engine.hold("GET version")

    for container in containers[1:]:
        engine.die(container)
    for hold in slow:
        await reached(hold)
    out_of_memory_without_a_word(engine, containers[0])

    death = await anext(deaths)
    assert (death.id, death.reason) == ("w0", CloseReason.OUT_OF_MEMORY)
    assert engine.count("GET version") == before + LOOK_THREADS + 1


async def test_after_an_unanswered_inspection_the_next_inspection_has_a_connection_too(
    unlucky: DockerBackend, engine: FakeEngine
) -> None:
    first, second = await started(unlucky, engine, "w1"), await started(unlucky, engine, "w2")
    before = engine.count("GET version")
    deaths = unlucky.deaths()
    await is_warm(engine, before)
    engine.lose("GET inspect")

    engine.die(first)
    told = [await anext(deaths)]
    await until(lambda: engine.count("GET version") == before + LOOK_THREADS + 2)
    out_of_memory_without_a_word(engine, second)
    told.append(await anext(deaths))

    assert [death.reason for death in told] == [CloseReason.WORKER_LOST, CloseReason.OUT_OF_MEMORY]


# -- an engine that was restarted, or is silent


async def test_after_a_restart_of_the_engine_dead_workers_are_reported_although_it_forgot_their_deaths(
    backend: DockerBackend, engine: FakeEngine
) -> None:
    first = await started(backend, engine, "w1")
    await started(backend, engine, "w2")
    deaths = backend.deaths()
    await asyncio.to_thread(engine.followed)
    engine.die(first)
    told = [(await anext(deaths)).id]

    engine.restart()
    told.append((await anext(deaths)).id)
    third = await started(backend, engine, "w3")
    engine.die(third)
    told.append((await anext(deaths)).id)

    assert told == ["w1", "w2", "w3"]  # each worker once
    assert {found.id: found.running for found in await backend.found()} == {"w1": False, "w2": False, "w3": False}


async def test_a_silent_stream_is_requested_again_and_no_death_is_reported_twice(
    backend: DockerBackend, engine: FakeEngine
) -> None:
    first, second = await started(backend, engine, "w1"), await started(backend, engine, "w2")
    watcher = DeathWatcher(engine.url, LABELS, silence_s=0.1)
    deaths = watcher.follow()
    await asyncio.to_thread(engine.followed)
    engine.die(first)
    ids = [(await anext(deaths)).id]

    for _ in range(3):
        await asyncio.to_thread(engine.followed)
    engine.die(second)
    ids.append((await anext(deaths)).id)
    await watcher.aclose()

    assert ids == ["w1", "w2"]
    assert [death async for death in deaths] == []


async def test_deaths_are_reported_whatever_the_engines_clock_shows(backend: DockerBackend, engine: FakeEngine) -> None:
    ids = ("w1", "w2", "w3", "w4")
    containers = [await started(backend, engine, id) for id in ids]
    engine.ahead_s = -3600  # the engine's clock is an hour slow
    watcher = DeathWatcher(engine.url, LABELS)
    deaths = watcher.follow()
    await asyncio.to_thread(engine.followed)

    for container, ahead_s in zip(containers, (-3600, 3600, 0, -3600), strict=True):
        engine.ahead_s = ahead_s  # the clock jumps while its events are followed
        engine.die(container)
    engine.break_streams()
    await asyncio.to_thread(engine.followed)  # the repeated events are not reported again
    heard = [(await anext(deaths)).id for _ in ids]
    await watcher.aclose()

    assert sorted(heard) == list(ids)  # the inspections may end in another order
    assert [death async for death in deaths] == []


# -- an engine that hangs


@pytest.fixture
async def small(engine: FakeEngine) -> AsyncIterator[Engine]:
    """Yield an engine client with one thread, one running call and one call that waits."""
    made = Engine(engine.url, threads=1, max_queued=2, queued_s=0.3)
    yield made
    await made.aclose()


LIST = partial(calls.listed, labels=["env-gateway.instance=ours"])


async def test_a_call_to_a_silent_engine_fails_at_its_timeout_and_the_next_call_is_answered(
    small: Engine, engine: FakeEngine
) -> None:
    await small.call(LIST)  # creates a client with a longer timeout
    hold = engine.hold("GET list")

    with pytest.raises(EngineError, match="does not answer") as raised:
        await small.call(LIST, silence_s=0.2)

    assert raised.value.is_silence
    assert not hold.released.is_set()
    assert await small.call(LIST) == []


async def test_the_first_call_to_a_completely_silent_engine_fails_at_its_timeout(
    small: Engine, engine: FakeEngine
) -> None:
    engine.hold("GET version")

    with pytest.raises(EngineError, match="does not answer"):
        await small.call(LIST, silence_s=0.2)

    assert await small.call(LIST) == []


async def test_a_call_to_an_engine_that_is_gone_leaves_no_socket_open(folder: Path) -> None:
    with FakeEngine(folder / "gone.sock") as engine:
        client = connect(engine.url)
    gc.collect()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        with pytest.raises(EngineError, match="does not answer"), translated(engine.url):
            client.info()
        client.close()
        gc.collect()

    assert [str(warning.message) for warning in caught] == []


async def test_a_call_beyond_the_queue_is_refused_immediately_and_a_call_that_waits_too_long_is_never_sent(
    small: Engine, engine: FakeEngine
) -> None:
    hold = engine.hold("GET list")
    under_way = asyncio.create_task(small.call(LIST))
    await reached(hold)
    waiting = asyncio.create_task(small.call(LIST))
    await asyncio.sleep(0)

    with pytest.raises(EngineError, match="2 calls wait for it"):
        await small.call(LIST)
    with pytest.raises(EngineError, match="no call ended"):
        await waiting
    hold.released.set()

    assert await under_way == []
    assert await small.call(LIST) == []
    assert engine.count("GET list") == 2


async def test_a_cancelled_caller_removes_its_call_from_the_queue(small: Engine, engine: FakeEngine) -> None:
    hold = engine.hold("GET list")
    under_way = asyncio.create_task(small.call(LIST))
    await reached(hold)
    waiting = asyncio.create_task(small.call(LIST))
    await asyncio.sleep(0)

    waiting.cancel()
    await asyncio.wait({waiting})
    hold.released.set()

    assert waiting.cancelled()
    assert await under_way == []
    assert await small.call(LIST) == []
    assert engine.count("GET list") == 2


async def test_calls_that_wait_when_the_engine_client_closes_fail_and_the_running_call_ends_at_its_timeout(
    engine: FakeEngine,
) -> None:
    made = Engine(engine.url, threads=1)
    hold = engine.hold("GET list")
    under_way = asyncio.create_task(made.call(LIST, silence_s=0.5))
    await reached(hold)
    waiting = asyncio.create_task(made.call(LIST))
    await asyncio.sleep(0)

    await made.aclose()

    with pytest.raises(EngineError, match="closed"):
        await waiting
    with pytest.raises(EngineError, match="does not answer"):
        await under_way


async def test_a_start_with_an_unknown_outcome_is_undone_when_the_engine_answers_again(
    backend: DockerBackend, engine: FakeEngine
) -> None:
    engine.lose("POST start")
    engine.refuse("DELETE container", 503, "still hanging")

    with pytest.raises(BackendError, match="does not answer"):
        await backend.start(worker(), ENVIRONMENT)

    assert [container.state for container in engine.containers.values()] == ["running"]
    await until(lambda: not engine.containers)


async def test_an_undo_that_waits_for_the_engine_ends_with_the_backend(
    backend: DockerBackend, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.lose("POST start")
    for _ in range(3):
        engine.refuse("DELETE container", 503, "still hanging")
    with pytest.raises(BackendError):
        await backend.start(worker(), ENVIRONMENT)

    await backend.aclose()

    assert engine.count("DELETE container") == 1
    assert "launch_not_undone" in caplog.text


async def test_an_undo_that_fails_repeatedly_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    launches, tries = Launches(undo_pauses_s=[0.0] * 5), []

    async def refused(_: CancelToken) -> None:
        raise StartFailed("no")

    async def undo() -> None:
        tries.append(1)
        if len(tries) < 5:
            raise BackendError("the engine does not answer")

    with pytest.raises(StartFailed):
        await launches.run(refused, undo)
    await until(lambda: len(tries) == 5)
    await launches.drain(HANG_S)

    assert [record.levelname for record in caplog.records if "launch_not_undone" in record.message] == ["ERROR"]


async def test_many_starts_that_cannot_be_undone_are_logged_once_as_an_error(
    backend: DockerBackend, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="gateway.backends.launch")
    for _ in range(10):
        engine.refuse("POST create", 503, "the engine is away")
    for _ in range(1000):  # more than the tries of all undos together
        engine.refuse("DELETE container", 503, "the engine is away")

    for number in range(10):
        with pytest.raises(BackendError, match="the engine is away"):
            await backend.start(worker(f"w{number}"), ENVIRONMENT)
    await backend.aclose()

    levels = [record.levelname for record in caplog.records if "launch_not_undone" in record.message]
    assert levels[0] == "ERROR"
    assert set(levels[1:]) == {"DEBUG"}
    assert len(levels) >= 10


# -- pausing


async def test_a_pause_that_the_engine_refuses_is_an_error_and_the_worker_keeps_running(
    backend: DockerBackend, engine: FakeEngine
) -> None:
    container = await started(backend, engine)
    engine.refuse("POST pause", 500, "no freezer here")

    with pytest.raises(BackendError, match="no freezer here"):
        await backend.pause(WorkerId("w1"))

    assert container.state == "running"


@pytest.mark.parametrize(("refusals", "becomes"), [(calls.FREEZES - 1, "paused"), (calls.FREEZES, "running")])
async def test_a_container_that_the_kernel_does_not_freeze_in_time_is_frozen_again(
    backend: DockerBackend, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, refusals: int, becomes: str
) -> None:
    monkeypatch.setattr(calls, "FREEZE_PAUSE_S", 0.0)
    container = await started(backend, engine)
    for _ in range(refusals):
        engine.refuse("POST pause", 500, "OCI runtime pause failed: unable to freeze: unknown")

    with contextlib.suppress(BackendError):
        await backend.pause(WorkerId("w1"))

    assert container.state == becomes


async def test_a_pause_with_an_unknown_outcome_is_undone(backend: DockerBackend, engine: FakeEngine) -> None:
    container = await started(backend, engine)
    engine.lose("POST pause")

    with pytest.raises(BackendError, match="does not answer"):
        await backend.pause(WorkerId("w1"))

    assert container.state == "running"


async def test_a_paused_worker_is_resumed_before_it_is_signalled_to_end(
    backend: DockerBackend, engine: FakeEngine
) -> None:
    await started(backend, engine)
    await backend.pause(WorkerId("w1"))

    await backend.stop(WorkerId("w1"))

    acts = [name for name in engine.requests if name in ("POST unpause", "POST kill", "DELETE container")]
    assert acts == ["POST unpause", "POST kill", "DELETE container"]
    assert engine.containers == {}


async def test_a_resume_that_fails_is_an_error(backend: DockerBackend, engine: FakeEngine) -> None:
    container = await started(backend, engine)
    await backend.pause(WorkerId("w1"))
    engine.refuse("POST unpause", 500, "no freezer here")

    with pytest.raises(BackendError, match="no freezer here"):
        await backend.resume(WorkerId("w1"))

    assert container.state == "paused"
