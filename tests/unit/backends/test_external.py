"""Static third-party servers next to the backend of all other workers. The contract suite also covers both."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.backends.docker.backend import DockerBackend
from gateway.backends.docker.mounts import HostPaths
from gateway.backends.external import RoutedBackend, is_static
from gateway.backends.process import ProcessBackend
from gateway.core.environment import Environment, Server
from gateway.core.errors import BackendError, StartFailed
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.worker import EnvironmentLoad, Worker, WorkerLoad, WorkerState
from gateway.pool.audit import compare

STATIC = Environment(
    name=EnvironmentName("far"),
    image="none",
    directory=Path("/nowhere"),
    command=(),
    server=Server(url="http://far.example:8000/envs"),
)
LOCAL = replace(
    STATIC,
    name=EnvironmentName("near"),
    directory=Path("/"),
    command=("python3", "-c", "import time; time.sleep(100)"),
    server=Server(),
)


def worker(environment: Environment, id: str = "w1", **changes: object) -> Worker:
    made = Worker(id=WorkerId(id), environment=environment.name, digest=environment.digest(), slots=4)
    return replace(made, **changes)  # type: ignore[arg-type]  # the test chooses the fields


class Records:
    """The workers in a store that outlives the process."""

    def __init__(self, *workers: Worker) -> None:
        self.workers = {worker.id: worker for worker in workers}

    async def load(self) -> Mapping[EnvironmentName, EnvironmentLoad]:
        found: dict[EnvironmentName, EnvironmentLoad] = {}
        for one in self.workers.values():
            entry = WorkerLoad(worker=one, used=0, idle_s=0.0, age_s=0.0)
            known = found.get(one.environment, EnvironmentLoad())
            found[one.environment] = EnvironmentLoad(workers=(*known.workers, entry))
        return found


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="eg-") as name:
        yield Path(name)


@pytest.fixture
async def processes(folder: Path) -> AsyncIterator[ProcessBackend]:
    made = ProcessBackend(socket_dir=folder, sandbox_dir=folder / "sandboxes", stop_grace_s=20)
    yield made
    await made.aclose()


@pytest.fixture
async def no_engine(folder: Path) -> AsyncIterator[DockerBackend]:
    """Yield a backend whose engine does not exist."""
    made = DockerBackend(
        url=f"unix://{folder}/missing.sock", instance="ours", paths=HostPaths(socket_dir=folder / "sockets")
    )
    yield made
    await made.aclose()


async def test_the_url_of_a_static_server_is_its_address(no_engine: DockerBackend) -> None:
    backend = RoutedBackend(no_engine, [STATIC])

    assert await backend.start(worker(STATIC), STATIC) == "http://far.example:8000/envs"
    (found,) = await backend.found()
    assert (found.id, found.environment, found.digest) == ("w1", "far", STATIC.digest())
    assert (found.address, found.running) == ("http://far.example:8000/envs", True)


async def test_an_invalid_url_is_a_failed_start_that_names_the_environment(no_engine: DockerBackend) -> None:
    backend = RoutedBackend(no_engine, [STATIC])
    environment = replace(STATIC, server=Server(url="http://user:secret@far.example"))

    with pytest.raises(StartFailed, match=r"environment far: .* a user in it"):
        await backend.start(worker(environment), environment)

    assert await backend.found() == []


async def test_a_restarted_gateway_finds_the_static_servers_in_the_store(no_engine: DockerBackend) -> None:
    ready = worker(STATIC, "kept", address=STATIC.server.url, state=WorkerState.READY)
    starting = worker(STATIC, "begun")
    container = worker(LOCAL, "container", address="unix:/run/container/worker.sock", state=WorkerState.READY)
    records = Records(ready, starting, container)

    found = await RoutedBackend(no_engine, [STATIC], store=records).found()

    assert [(entry.id, entry.address, entry.running) for entry in found] == [("kept", STATIC.server.url, True)]
    findings = compare(records.workers, found, records.workers)
    assert (findings.lost, findings.adopted, findings.orphans) == (("container",), ("kept",), ())


async def test_a_static_server_that_the_store_forgot_is_an_orphan_until_it_is_stopped(
    no_engine: DockerBackend,
) -> None:
    backend = RoutedBackend(no_engine, [STATIC], store=Records())
    await backend.start(worker(STATIC), STATIC)
    assert compare({}, await backend.found(), {}).orphans == ("w1",)

    await backend.stop(WorkerId("w1"))

    assert await backend.found() == []


async def test_a_static_server_that_both_store_and_backend_know_is_found_once(no_engine: DockerBackend) -> None:
    backend = RoutedBackend(no_engine, [STATIC], store=Records(worker(STATIC, address=STATIC.server.url)))
    await backend.start(worker(STATIC), STATIC)

    assert [entry.id for entry in await backend.found()] == ["w1"]


@pytest.mark.parametrize(
    ("address", "static"),
    [
        ("http://far.example", True),
        ("https://far.example/x", True),
        ("unix:/run/w1/worker.sock", False),
        ("tcp:127.0.0.1:8000", False),
        ("", False),
    ],
)
def test_a_static_server_is_recognized_by_its_url(address: str, static: bool) -> None:
    assert is_static(address) is static


async def test_each_environment_and_each_worker_has_its_backend(processes: ProcessBackend) -> None:
    backend = RoutedBackend(processes, [STATIC, LOCAL])

    far = await backend.start(worker(STATIC, "far"), STATIC)
    near = await backend.start(worker(LOCAL, "near"), LOCAL)

    assert (is_static(far), is_static(near)) == (True, False)
    assert {entry.id: entry.address for entry in await backend.found()} == {"far": far, "near": near}
    assert [entry.id for entry in await processes.found()] == ["near"]
    await backend.stop(WorkerId("near"))
    assert [entry.id for entry in await backend.found()] == ["far"]
    await backend.stop(WorkerId("far"))
    assert await backend.found() == []
    await backend.aclose()


async def test_with_only_static_servers_no_engine_is_needed(no_engine: DockerBackend) -> None:
    backend = RoutedBackend(no_engine, [STATIC])

    await backend.check()
    await backend.start(worker(STATIC), STATIC)

    assert [entry.id for entry in await backend.found()] == ["w1"]
    await backend.stop(WorkerId("w1"))
    assert await backend.found() == []
    await backend.aclose()


async def test_a_missing_engine_that_an_environment_needs_is_an_error_and_never_an_empty_list(
    no_engine: DockerBackend,
) -> None:
    backend = RoutedBackend(no_engine, [STATIC, LOCAL])

    with pytest.raises(BackendError):
        await backend.check()
    with pytest.raises(BackendError):
        await backend.found()
    await backend.aclose()


async def test_workers_that_a_gateway_with_other_environments_left_behind_are_still_found(
    processes: ProcessBackend,
) -> None:
    await processes.start(worker(LOCAL, "left"), LOCAL)
    backend = RoutedBackend(processes, [STATIC])

    assert [entry.id for entry in await backend.found()] == ["left"]
    await backend.stop(WorkerId("left"))
    assert await backend.found() == []
    await backend.aclose()


async def test_deaths_are_reported_by_the_backend_that_starts_workers(processes: ProcessBackend) -> None:
    backend = RoutedBackend(processes, [STATIC, LOCAL])
    deaths = backend.deaths()
    environment = replace(LOCAL, command=("python3", "-c", "pass"))

    await backend.start(worker(STATIC, "far"), STATIC)
    await backend.start(worker(environment, "near"), environment)

    assert (await anext(deaths)).id == "near"
    await backend.aclose()
    assert [death async for death in deaths] == []
