"""The Docker backend's requirements before workers start: images, CPUs, memory and GPUs of the engine's machine."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.backends.docker.backend import PULL_THREADS, DockerBackend
from gateway.backends.docker.calls import shortcomings
from gateway.backends.docker.mounts import HostPaths
from gateway.core.environment import ALL_GPUS, Environment, Limits, Server
from gateway.core.errors import BackendError, StartFailed
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.worker import Worker
from tests.deadlines import HANG_S
from tests.fakes.engine import FakeEngine, Hold

ENVIRONMENT = Environment(
    name=EnvironmentName("fake"), image="env-gateway/fake", directory=Path("/nowhere"), command=("python3", "server.py")
)
FORWARDER = "env-gateway/forwarder"
FAR = "registry.example/far:1"
GIB = 2**30


def of(image: str = ENVIRONMENT.image, **limits: Any) -> Environment:
    return replace(ENVIRONMENT, image=image, limits=Limits(**limits))


def with_split(base: Environment, split: str, **limits: Any) -> Environment:
    """Return the environment with a split that has other limits."""
    variant = replace(base, name=EnvironmentName(f"{base.name}.{split}"), base=base.name, limits=Limits(**limits))
    return replace(base, splits={split: variant})


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="eg-") as name:
        yield Path(name)


@pytest.fixture
def engine(folder: Path) -> Iterator[FakeEngine]:
    with FakeEngine(folder / "engine.sock") as running:
        yield running


def backend_of(engine: FakeEngine, *environments: Environment) -> DockerBackend:
    return DockerBackend(
        url=engine.url,
        instance="ours",
        paths=HostPaths(socket_dir=Path(engine.url.removeprefix("unix://")).parent / "sockets"),
        environments=environments,
        forwarder_image=FORWARDER,
    )


@pytest.fixture
async def backend(engine: FakeEngine) -> AsyncIterator[DockerBackend]:
    made = backend_of(engine)
    yield made
    await made.aclose()


async def reached(hold: Hold) -> None:
    assert await asyncio.to_thread(hold.reached.wait, HANG_S)


# -- images


async def test_prepare_returns_the_images_id_and_another_id_after_a_rebuild(
    backend: DockerBackend, engine: FakeEngine
) -> None:
    before = [await backend.prepare(ENVIRONMENT) for _ in range(2)]
    engine.builds[ENVIRONMENT.image] = 1

    after = await backend.prepare(ENVIRONMENT)

    assert before == [before[0]] * 2
    assert before[0].startswith("sha256:")
    assert after.startswith("sha256:")
    assert after != before[0]
    assert engine.count("POST pull") == 0


async def test_a_missing_image_of_a_registry_is_pulled_before_any_worker_starts(
    backend: DockerBackend, engine: FakeEngine
) -> None:
    id = await backend.prepare(of(FAR))

    assert id == engine.image_id(FAR)
    assert (engine.count("POST pull"), engine.containers) == (1, {})


async def test_the_forwarders_image_is_pulled_together_with_a_third_party_image(engine: FakeEngine) -> None:
    engine.registry.add("registry.example/forwarder:1")
    backend = DockerBackend(
        url=engine.url,
        instance="ours",
        paths=HostPaths(socket_dir=Path("/nowhere")),
        forwarder_image="registry.example/forwarder:1",
    )

    id = await backend.prepare(replace(of(FAR), server=Server(port=8000)))
    await backend.aclose()

    assert id == engine.image_id(FAR)
    assert {FAR, "registry.example/forwarder:1"} <= engine.images


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        pytest.param(of("env-gateway/unbuilt"), "there is no image env-gateway/unbuilt .* build it", id="an own image"),
        pytest.param(
            of("registry.example/none:1"), "manifest for registry.example/none:1 not found", id="a registry's image"
        ),
        pytest.param(
            replace(ENVIRONMENT, server=Server(port=8000)), f"there is no image {FORWARDER}", id="the forwarder's image"
        ),
    ],
)
async def test_an_unavailable_image_is_a_failed_start_that_names_the_image(
    backend: DockerBackend, environment: Environment, message: str
) -> None:
    with pytest.raises(StartFailed, match=message):
        await backend.prepare(environment)


async def test_a_pull_that_the_engine_gate_refuses_fails_with_advice(
    backend: DockerBackend, engine: FakeEngine
) -> None:
    engine.refuse("POST pull", 403, "not among the requests that this gate passes on")

    with pytest.raises(StartFailed, match=f"docker pull {FAR}"):
        await backend.prepare(of(FAR))


async def test_an_unreachable_engine_is_distinguished_from_a_missing_image(
    backend: DockerBackend, engine: FakeEngine
) -> None:
    engine.lose("GET image")

    with pytest.raises(BackendError, match="does not answer") as raised:
        await backend.prepare(ENVIRONMENT)

    assert not isinstance(raised.value, StartFailed)


async def test_concurrent_pulls_are_limited_and_other_calls_continue(
    backend: DockerBackend, engine: FakeEngine
) -> None:
    images = [f"registry.example/far:{number}" for number in range(PULL_THREADS + 2)]
    engine.registry |= set(images)
    holds = [engine.hold("POST pull") for _ in images]

    preparing = asyncio.gather(*[backend.prepare(of(image)) for image in images])
    for hold in holds[:PULL_THREADS]:
        await reached(hold)
    # Meanwhile other calls of the engine continue, and further pulls wait.
    assert await backend.prepare(ENVIRONMENT) == engine.image_id(ENVIRONMENT.image)
    pulls_at_once = engine.count("POST pull")
    for hold in holds:
        hold.released.set()

    assert pulls_at_once == PULL_THREADS
    assert await preparing == [engine.image_id(image) for image in images]


# -- CPUs, memory, GPUs

INFO: dict[str, Any] = {"NCPU": 4, "MemTotal": 8 * GIB, "Runtimes": {"runc": {}}}
NVIDIA: dict[str, Any] = INFO | {"Runtimes": {"runc": {}, "nvidia": {}}}
DEVICES = [f"nvidia.com/gpu={name}" for name in ("0", "GPU-aaaa", "1", "GPU-bbbb", "all")]
LISTED: dict[str, Any] = INFO | {"DiscoveredDevices": [{"Source": "cdi", "ID": id} for id in DEVICES]}


@pytest.mark.parametrize(
    ("limits", "info"),
    [
        pytest.param({"cpus": 4.0, "memory_bytes": 8 * GIB}, INFO, id="the whole machine"),
        pytest.param({"cpus": 99.0, "memory_bytes": 99 * GIB}, {}, id="an engine that reports no resources"),
        pytest.param({"gpus": 1}, NVIDIA, id="a GPU runtime"),
        pytest.param({"gpus": ALL_GPUS}, NVIDIA, id="all GPUs of a runtime"),
        pytest.param({"gpu_ids": ("GPU-aaaa",)}, NVIDIA, id="certain GPUs of a runtime"),
        pytest.param({"gpus": 2}, LISTED, id="as many GPUs as are listed"),
        pytest.param({"gpus": ALL_GPUS}, LISTED, id="all listed GPUs"),
        pytest.param({"gpu_ids": ("1", "GPU-aaaa")}, LISTED, id="by number and by UUID"),
        pytest.param(
            {"gpus": 1}, INFO | {"DiscoveredDevices": [{"ID": "nvidia.com/gpu=all"}]}, id="a list without numbers"
        ),
    ],
)
def test_limits_within_the_machines_resources_are_accepted(limits: dict[str, Any], info: dict[str, Any]) -> None:
    assert shortcomings([of(**limits)], info) == []


@pytest.mark.parametrize(
    ("limits", "info", "said"),
    [
        pytest.param({"cpus": 4.5}, INFO, "fake asks for 4.5 CPUs a worker (cpus), and the engine's machine has 4"),
        pytest.param(
            {"memory_bytes": 9 * GIB}, INFO, "9.0 GiB of memory a worker (memory_mib), and the engine's machine"
        ),
        pytest.param({"gpus": 1}, INFO, "1 GPUs, and the engine has neither a runtime 'nvidia' nor GPUs"),
        pytest.param({"gpus": ALL_GPUS}, INFO, "all GPUs, and the engine has neither"),
        pytest.param({"gpu_ids": ("0", "1")}, INFO, "GPUs 0, 1, and the engine has neither"),
        pytest.param({"gpus": 3}, LISTED, "3 GPUs, and the engine's machine has 2"),
        pytest.param({"gpu_ids": ("0", "GPU-cccc")}, LISTED, "and the engine's machine has no GPU-cccc"),
        pytest.param(
            {"gpus": 1}, INFO | {"DiscoveredDevices": [{"ID": "vendor.com/nic=0"}]}, "nor GPUs", id="other devices"
        ),
    ],
)
def test_a_shortcoming_states_the_limit_and_the_machines_resources(
    limits: dict[str, Any], info: dict[str, Any], said: str
) -> None:
    (sentence,) = shortcomings([of(**limits)], info)

    assert said in sentence


def test_limits_of_splits_are_compared_too_but_those_of_static_servers_are_not() -> None:
    theirs = replace(of(cpus=99.0), server=Server(url="http://127.0.0.1:1"))

    (sentence,) = shortcomings([with_split(of(), "hard", cpus=99.0), theirs], INFO)

    assert sentence.startswith("environment fake.hard asks for 99 CPUs")


async def test_an_environment_with_limits_above_the_machines_resources_fails_the_check(engine: FakeEngine) -> None:
    backend = backend_of(engine, ENVIRONMENT, with_split(of(cpus=64.0), "hard", gpus=1))

    with pytest.raises(BackendError, match=r"fake asks for 64 CPUs.*; .*fake\.hard asks for 1 GPUs"):
        await backend.check()
    await backend.aclose()

    assert engine.count("POST create") == 0


@pytest.mark.parametrize(
    ("limits", "request_"),
    [
        pytest.param(
            {"gpus": 2}, {"Driver": "", "Count": 2, "DeviceIDs": [], "Capabilities": [["gpu"]]}, id="a number of GPUs"
        ),
        pytest.param(
            {"gpus": ALL_GPUS}, {"Driver": "", "Count": -1, "DeviceIDs": [], "Capabilities": [["gpu"]]}, id="all GPUs"
        ),
        pytest.param(
            {"gpu_ids": ("0", "GPU-aaaa")},
            {"Driver": "", "Count": 0, "DeviceIDs": ["0", "GPU-aaaa"], "Capabilities": [["gpu"]]},
            id="certain GPUs",
        ),
    ],
)
async def test_gpus_are_requested_in_the_form_of_the_docker_cli(
    backend: DockerBackend, engine: FakeEngine, limits: dict[str, Any], request_: dict[str, Any]
) -> None:
    environment = of(**limits)
    worker = Worker(id=WorkerId("w1"), environment=environment.name, digest=environment.digest(), slots=4)

    await backend.start(worker, environment)

    (container,) = engine.containers.values()
    assert container.body["HostConfig"]["DeviceRequests"] == [request_]


async def test_the_server_of_a_third_party_image_gets_the_gpus_and_its_forwarder_gets_none(
    backend: DockerBackend, engine: FakeEngine
) -> None:
    engine.images.add(FORWARDER)
    environment = replace(of(gpus=1), server=Server(port=8000))
    worker = Worker(id=WorkerId("w1"), environment=environment.name, digest=environment.digest(), slots=4)

    await backend.start(worker, environment)

    given = {one.labels["env-gateway.role"]: one.body["HostConfig"] for one in engine.containers.values()}
    assert given["server"]["DeviceRequests"][0]["Count"] == 1
    assert "DeviceRequests" not in given["forwarder"]
