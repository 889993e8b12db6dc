"""Workers of third-party images, two containers each, with a fake engine that can refuse, hang and forget."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.backends.docker.backend import DockerBackend, EnginePace
from gateway.backends.docker.mounts import HostPaths
from gateway.core.environment import Environment, Limits, Relaxations, Server, Volume
from gateway.core.errors import BackendError, StartFailed
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.worker import Worker
from tests.deadlines import HANG_S
from tests.fakes.engine import FakeContainer, FakeEngine, Hold, Refusal

ENVIRONMENT = Environment(
    name=EnvironmentName("theirs"),
    image="registry.example/theirs:1",
    directory=Path("/nowhere"),
    command=(),
    server=Server(port=8000),
    variables={"COLOUR": "green"},
    limits=Limits(memory_bytes=2**28, cpus=1.5, pids=99, tmp_bytes=2**20),
)
FORWARDER = "env-gateway/base:latest"
OWN = replace(ENVIRONMENT, name=EnvironmentName("own"), image="env-gateway/fake", server=Server(), command=("x",))


class Engine(FakeEngine):
    """An engine with named volumes, and with networks that are shared only with a running container."""

    refused: tuple[str, int] = ("", 0)
    """The operation to refuse, and the number of the call that is refused."""
    stuck: FakeContainer | None = None
    """A container whose first removal fails."""

    def passed(self, operation: str) -> None:
        super().passed(operation)
        if (operation, self.count(operation)) == self.refused:
            raise Refusal(500, "the disk is full")

    def remove(self, container: FakeContainer) -> None:
        if container is self.stuck:
            self.stuck = None
            raise Refusal(500, "device is busy")
        super().remove(container)

    def create(self, name: str, body: dict[str, Any]) -> FakeContainer:
        mounts = body["HostConfig"].get("Mounts", [])
        shown = {**body, "HostConfig": {**body["HostConfig"], "Mounts": [m for m in mounts if m["Type"] == "bind"]}}
        container = super().create(name, shown)
        container.body = body
        return container

    def start(self, container: FakeContainer) -> None:
        kind, _, beside = container.body["HostConfig"]["NetworkMode"].partition(":")
        if kind == "container" and self.find(beside).state != "running":
            raise Refusal(409, f"cannot join network of a non running container: {beside}")
        super().start(container)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="eg-") as name:
        yield Path(name)


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    running = Engine(folder / "engine.sock")
    with running:
        running.images |= {ENVIRONMENT.image, FORWARDER}
        yield running


@pytest.fixture
def sockets(folder: Path) -> Path:
    return folder / "sockets"


@pytest.fixture
async def backend(engine: Engine, sockets: Path) -> AsyncIterator[DockerBackend]:
    made = DockerBackend(
        url=engine.url, instance="ours", paths=HostPaths(socket_dir=sockets), pace=EnginePace(stop_grace_s=HANG_S)
    )
    yield made
    await made.aclose()


def worker(id: str = "w1", environment: Environment = ENVIRONMENT) -> Worker:
    return Worker(id=WorkerId(id), environment=environment.name, digest=environment.digest(), slots=4)


def left(engine: Engine, sockets: Path) -> list[str]:
    """Return the names of the existing containers and folders."""
    folders = [entry.name for entry in sockets.iterdir()] if sockets.is_dir() else []
    return [container.name for container in engine.containers.values()] + folders


def parts(engine: Engine) -> tuple[FakeContainer, FakeContainer]:
    """Return the server and the forwarder of the only worker."""
    by_role = {container.labels["env-gateway.role"]: container for container in engine.containers.values()}
    return by_role["server"], by_role["forwarder"]


async def reached(hold: Hold) -> None:
    assert await asyncio.to_thread(hold.reached.wait, HANG_S)


async def test_a_third_party_image_runs_unmodified_and_as_hardened_as_an_own_image(
    backend: DockerBackend, engine: Engine, sockets: Path
) -> None:
    address = await backend.start(worker(), ENVIRONMENT)
    await backend.start(worker("own", OWN), OWN)

    server = next(one for one in engine.containers.values() if one.labels.get("env-gateway.role") == "server")
    own = next(one for one in engine.containers.values() if "env-gateway.role" not in one.labels)
    assert address == f"unix:{sockets}/w1/server.sock"
    assert (server.name, server.state) == ("ours-theirs-w1", "running")
    assert server.body == {
        "Image": "registry.example/theirs:1",
        "User": "10001:10001",
        "Env": ["COLOUR=green", "HOME=/tmp", "PYTHONDONTWRITEBYTECODE=1"],
        "Labels": {
            "env-gateway.instance": "ours",
            "env-gateway.worker": "w1",
            "env-gateway.environment": "theirs",
            "env-gateway.digest": ENVIRONMENT.digest(),
            "env-gateway.role": "server",
        },
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": own.body["HostConfig"] | {"Mounts": []},
    }


async def test_the_forwarder_shares_the_servers_network_and_mounts_the_socket_folder(
    backend: DockerBackend, engine: Engine, sockets: Path
) -> None:
    await backend.start(worker(), replace(ENVIRONMENT, loosened=Relaxations(user="0:0", writable_root=True)))

    server, forwarder = parts(engine)
    host = forwarder.body["HostConfig"]
    assert (forwarder.name, forwarder.state) == ("ours-theirs-w1-forwarder", "running")
    assert (forwarder.body["Image"], forwarder.body["User"], forwarder.body["Env"]) == (FORWARDER, "10001:10001", [])
    assert forwarder.body["Entrypoint"] == ["python3"]
    assert forwarder.body["Cmd"][-4:] == ["--socket", "/run/envserver/server.sock", "--port", "8000"]
    assert forwarder.labels == server.labels | {"env-gateway.role": "forwarder"}
    assert host["NetworkMode"] == f"container:{server.id}"
    assert [mount["Source"] for mount in host["Mounts"]] == [f"{sockets}/w1"]
    assert (host["ReadonlyRootfs"], host["CapDrop"], host["CapAdd"]) == (True, ["ALL"], [])
    assert (host["Memory"], host["PidsLimit"], host["Init"]) == (2**28, 8, False)
    assert {limit["Name"]: limit["Hard"] for limit in host["Ulimits"]} == {"nofile": 8192, "core": 0}


async def test_the_environments_variables_override_the_defaults(backend: DockerBackend, engine: Engine) -> None:
    environment = replace(ENVIRONMENT, variables={"HOME": "/home/theirs", "PYTHONDONTWRITEBYTECODE": ""})

    await backend.start(worker(), environment)

    assert parts(engine)[0].body["Env"] == ["HOME=/home/theirs", "PYTHONDONTWRITEBYTECODE="]


@pytest.mark.parametrize("environment", [ENVIRONMENT, OWN], ids=["somebody else's", "our own"])
async def test_volumes_are_mounted_in_third_party_and_own_images(
    backend: DockerBackend, engine: Engine, folder: Path, environment: Environment
) -> None:
    engine.volumes["data"] = "/var/lib/docker/volumes/data/_data"
    volumes = (
        Volume(source=str(folder), target="/models"),
        Volume(source="data", target="/data", read_only=False),
    )
    environment = replace(environment, volumes=volumes)

    await backend.start(worker(environment=environment), environment)

    body = next(one.body for one in engine.containers.values() if one.body["Image"] == environment.image)
    assert [mount for mount in body["HostConfig"]["Mounts"] if mount["Target"] != "/run/envserver"] == [
        {"Type": "bind", "Source": str(folder), "Target": "/models", "ReadOnly": True},
        {"Type": "volume", "Source": "data", "Target": "/data", "ReadOnly": False},
    ]


async def test_a_missing_volume_fails_the_start_before_the_engine_could_create_it(
    backend: DockerBackend, engine: Engine, sockets: Path
) -> None:
    environment = replace(ENVIRONMENT, volumes=(Volume(source="data", target="/data"),))

    with pytest.raises(StartFailed, match="docker volume create data"):
        await backend.start(worker(), environment)

    assert engine.count("POST create") == 0
    assert left(engine, sockets) == []


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("operation", ["POST create", "POST start", "GET inspect"])
async def test_a_refusal_at_any_step_of_either_container_leaves_nothing_behind_and_states_the_reason(
    backend: DockerBackend, engine: Engine, sockets: Path, operation: str, times: int
) -> None:
    engine.refused = (operation, times)

    with pytest.raises(StartFailed, match="the disk is full"):
        await backend.start(worker(), ENVIRONMENT)

    assert left(engine, sockets) == []


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("operation", ["POST create", "POST start", "GET inspect"])
async def test_a_start_that_is_cancelled_during_a_call_of_the_engine_is_undone_after_the_call(
    backend: DockerBackend, engine: Engine, sockets: Path, operation: str, number: int
) -> None:
    holds = [engine.hold(operation) for _ in range(number)]
    starting = asyncio.create_task(backend.start(worker(), ENVIRONMENT))
    for hold in holds[:-1]:
        await reached(hold)
        hold.released.set()
    await reached(holds[-1])

    starting.cancel()
    await asyncio.sleep(0)
    holds[-1].released.set()
    await asyncio.wait({starting})

    assert starting.cancelled()
    assert left(engine, sockets) == []


@pytest.mark.parametrize("turns", range(0, 30, 2))
async def test_a_start_that_is_cancelled_at_any_turn_of_the_loop_leaves_nothing(
    backend: DockerBackend, engine: Engine, sockets: Path, turns: int
) -> None:
    starting = asyncio.create_task(backend.start(worker(), ENVIRONMENT))
    for _ in range(turns):
        await asyncio.sleep(0)

    starting.cancel()
    await asyncio.wait({starting})

    assert left(engine, sockets) == []


async def test_a_create_with_an_unknown_outcome_is_undone(
    backend: DockerBackend, engine: Engine, sockets: Path
) -> None:
    hold = engine.hold("POST create")
    starting = asyncio.create_task(backend.start(worker(), ENVIRONMENT))
    await reached(hold)
    engine.lose("POST create")  # this affects the second create: the first has already arrived
    hold.released.set()

    with pytest.raises(BackendError, match="does not answer") as caught:
        await starting
    assert not isinstance(caught.value, StartFailed), "it says nothing of the image"

    assert left(engine, sockets) == []


async def test_a_server_that_dies_during_its_start_is_a_failed_start_with_the_end_of_its_log(
    backend: DockerBackend, engine: Engine, sockets: Path
) -> None:
    engine.dying = b"no such module\n"

    with pytest.raises(StartFailed, match=r"theirs:1 died at once \(exit status 3\)\n.*\nno such module"):
        await backend.start(worker(), ENVIRONMENT)

    assert left(engine, sockets) == []


async def test_the_error_for_a_missing_forwarder_image_names_the_image(
    backend: DockerBackend, engine: Engine, sockets: Path
) -> None:
    engine.images.remove(FORWARDER)

    with pytest.raises(StartFailed, match=r"no image env-gateway/base:latest .* scripts/build-images"):
        await backend.start(worker(), ENVIRONMENT)

    assert left(engine, sockets) == []


async def test_the_image_of_the_forwarder_can_be_configured(engine: Engine, sockets: Path) -> None:
    engine.images.add("mirror.example/base:2")
    backend = DockerBackend(
        url=engine.url, instance="ours", paths=HostPaths(socket_dir=sockets), forwarder_image="mirror.example/base:2"
    )

    await backend.start(worker(), ENVIRONMENT)
    await backend.aclose()

    assert parts(engine)[1].body["Image"] == "mirror.example/base:2"


async def test_a_stop_signals_the_server_first_and_removes_both_containers(
    backend: DockerBackend, engine: Engine, sockets: Path
) -> None:
    await backend.start(worker(), ENVIRONMENT)

    await backend.stop(WorkerId("w1"))

    assert (engine.count("POST kill"), engine.count("DELETE container")) == (1, 2)
    assert left(engine, sockets) == []


@pytest.mark.parametrize("number", [0, 1])
async def test_a_stop_that_fails_for_one_container_is_an_error_and_can_be_repeated(
    backend: DockerBackend, engine: Engine, sockets: Path, number: int
) -> None:
    await backend.start(worker(), ENVIRONMENT)
    engine.stuck = stuck = parts(engine)[number]

    with pytest.raises(BackendError, match="device is busy"):
        await backend.stop(WorkerId("w1"))
    assert left(engine, sockets) == [stuck.name]  # a container is found again by the next audit, a folder would not be
    await backend.stop(WorkerId("w1"))

    assert left(engine, sockets) == []


@pytest.mark.parametrize("number", [0, 1])
async def test_the_death_of_either_container_is_the_death_of_the_worker(
    backend: DockerBackend, engine: Engine, number: int
) -> None:
    await backend.start(worker(), ENVIRONMENT)
    deaths = backend.deaths()
    await asyncio.to_thread(engine.followed)

    engine.die(parts(engine)[number])

    assert (await anext(deaths)).id == "w1"
    assert [(found.id, found.running) for found in await backend.found()] == [("w1", False)]


async def test_both_containers_are_found_as_one_worker_that_runs_if_both_run(
    backend: DockerBackend, engine: Engine, sockets: Path
) -> None:
    hold = engine.hold("POST start")
    starting = asyncio.create_task(backend.start(worker(), ENVIRONMENT))
    await reached(hold)
    before = [(found.id, found.running) for found in await backend.found()]
    hold.released.set()
    address = await starting

    (found,) = await backend.found()

    assert before == [("w1", False)]
    assert (found.id, found.environment, found.digest) == ("w1", "theirs", ENVIRONMENT.digest())
    assert (found.address, found.running) == (address, True)


async def test_the_log_of_the_server_is_followed_by_the_log_of_the_forwarder(
    backend: DockerBackend, engine: Engine
) -> None:
    await backend.start(worker(), ENVIRONMENT)
    server, forwarder = parts(engine)
    server.output, forwarder.output = b"one\ntwo\n", b"too many open files\n"

    assert await backend.logs(WorkerId("w1"), lines=1) == "two\ntoo many open files\n"


async def test_the_check_probes_server_and_forwarder_but_no_static_server(engine: Engine, sockets: Path) -> None:
    static = replace(ENVIRONMENT, name=EnvironmentName("far"), server=Server(url="http://far.example"))
    backend = DockerBackend(
        url=engine.url, instance="ours", paths=HostPaths(socket_dir=sockets), environments=[static, ENVIRONMENT]
    )

    await backend.check()
    await backend.aclose()

    assert (engine.count("POST create"), engine.count("POST start")) == (2, 0)
    assert left(engine, sockets) == []
