"""The Docker backend with a fake engine that can refuse, hang, drop its streams and forget containers."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from docker.errors import APIError

from gateway.backends.docker.backend import DockerBackend, EnginePace
from gateway.backends.docker.calls import create, run
from gateway.backends.docker.container import sandbox_profile
from gateway.backends.docker.engine import connect
from gateway.backends.docker.images import is_from_registry
from gateway.backends.docker.mounts import HostPaths
from gateway.core.environment import CustomTasks, Environment, Isolation, Limits, Relaxations, SandboxLimits
from gateway.core.errors import BackendError, StartFailed
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.worker import Worker
from tests.deadlines import HANG_S
from tests.fakes.engine import FakeEngine, Hold
from tests.fakes.user import ordinary_user

ENVIRONMENT = Environment(
    name=EnvironmentName("fake"), image="env-gateway/fake", directory=Path("/nowhere"), command=("python3", "server.py")
)


def worker(id: str = "w1", environment: Environment = ENVIRONMENT) -> Worker:
    return Worker(id=WorkerId(id), environment=environment.name, digest=environment.digest(), slots=4)


def with_image(image: str) -> Environment:
    return Environment(name=ENVIRONMENT.name, image=image, directory=ENVIRONMENT.directory, command=ENVIRONMENT.command)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder with a short path for sockets, which only its owner can write to."""
    with tempfile.TemporaryDirectory(prefix="eg-") as name:
        yield Path(name)


@pytest.fixture
def engine(folder: Path) -> Iterator[FakeEngine]:
    with FakeEngine(folder / "engine.sock") as running:
        yield running


@pytest.fixture
def sockets(folder: Path) -> Path:
    return folder / "sockets"


@pytest.fixture
async def backend(engine: FakeEngine, sockets: Path) -> AsyncIterator[DockerBackend]:
    made = DockerBackend(
        url=engine.url, instance="ours", paths=HostPaths(socket_dir=sockets), pace=EnginePace(stop_grace_s=HANG_S)
    )
    yield made
    await made.aclose()


def left(engine: FakeEngine, sockets: Path) -> list[str]:
    """Return the names of the existing containers and folders."""
    folders = [entry.name for entry in sockets.iterdir()] if sockets.is_dir() else []
    return [container.name for container in engine.containers.values()] + folders


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o7777


async def reached(hold: Hold) -> None:
    assert await asyncio.to_thread(hold.reached.wait, HANG_S)


async def test_a_container_is_fully_hardened_unless_the_environment_loosens_it(
    backend: DockerBackend, engine: FakeEngine, sockets: Path
) -> None:
    environment = Environment(
        name=EnvironmentName("fake"),
        image="env-gateway/fake",
        directory=Path("/nowhere"),
        command=("python3",),
        variables={"COLOUR": "green", "ENVSERVER_SOCKET": "/tmp/mine"},
        limits=Limits(memory_bytes=2**28, cpus=1.5, pids=99, tmp_bytes=2**20),
    )

    address = await backend.start(worker("w1", environment), environment)

    (container,) = engine.containers.values()
    assert address == f"unix:{sockets}/w1/worker.sock"
    assert container.name == "ours-fake-w1"
    assert container.body == {
        "Image": "env-gateway/fake",
        "User": "10001:10001",
        "Env": [
            "COLOUR=green",
            "ENVSERVER_IDLE_S=0",
            "ENVSERVER_SLOTS=4",
            "ENVSERVER_SOCKET=/run/envserver/worker.sock",
        ],
        "Labels": {
            "env-gateway.instance": "ours",
            "env-gateway.worker": "w1",
            "env-gateway.environment": "fake",
            "env-gateway.digest": environment.digest(),
        },
        "HostConfig": {
            "NetworkMode": "none",
            "IpcMode": "private",
            "ReadonlyRootfs": True,
            "CapDrop": ["ALL"],
            "CapAdd": [],
            "SecurityOpt": ["no-new-privileges:true"],
            "Memory": 2**28,
            "MemorySwap": 2**28,
            "NanoCpus": 1_500_000_000,
            "PidsLimit": 99,
            "ShmSize": 2**20,
            "Tmpfs": {"/tmp": "rw,nosuid,nodev,noexec,size=1048576,mode=1777"},
            "Ulimits": [{"Name": "nofile", "Soft": 4096, "Hard": 4096}, {"Name": "core", "Soft": 0, "Hard": 0}],
            "LogConfig": {"Type": "json-file", "Config": {"max-size": "1m", "max-file": "1"}},
            "Init": True,
            "RestartPolicy": {"Name": "no", "MaximumRetryCount": 0},
            "Mounts": [
                {
                    "Type": "bind",
                    "Source": f"{sockets}/w1",
                    "Target": "/run/envserver",
                    "ReadOnly": False,
                }
            ],
        },
    }


async def test_shared_memory_is_limited_to_a_quarter_of_the_workers_memory(
    backend: DockerBackend, engine: FakeEngine
) -> None:
    environment = replace(ENVIRONMENT, limits=Limits(memory_bytes=2**28, tmp_bytes=2**28))

    await backend.start(worker("w1", environment), environment)

    (container,) = engine.containers.values()
    assert container.body["HostConfig"]["ShmSize"] == 2**26
    assert f"size={2**28}," in container.body["HostConfig"]["Tmpfs"]["/tmp"]


async def test_an_environment_with_sandboxes_gets_only_the_permissions_that_sandboxes_need(
    backend: DockerBackend, engine: FakeEngine
) -> None:
    plain = Environment(
        name=EnvironmentName("fake"),
        image="env-gateway/fake",
        directory=Path("/nowhere"),
        command=("python3",),
        limits=Limits(tmp_bytes=2**24),
    )
    environment = replace(plain, isolation=Isolation.SANDBOX, sandbox=SandboxLimits(memory_bytes=2**28, pids=64))
    await backend.start(worker("w1", plain), plain)
    await backend.start(worker("w2", environment), environment)

    usual, sandboxed = (container.body for container in engine.containers.values())

    assert differing(usual, sandboxed) == {
        "User": "0:0",
        "Env": [
            "ENVSERVER_IDLE_S=0",
            "ENVSERVER_SANDBOX_MEMORY_MIB=256",
            "ENVSERVER_SANDBOX_PIDS=64",
            "ENVSERVER_SLOTS=4",
            "ENVSERVER_SOCKET=/run/envserver/worker.sock",
        ],
        "Labels": sandboxed["Labels"],
        "HostConfig": sandboxed["HostConfig"],
    }
    assert differing(usual["HostConfig"], sandboxed["HostConfig"]) == {
        "CapAdd": ["SETGID", "SETUID"],
        "SecurityOpt": ["no-new-privileges:true", f"seccomp={sandbox_profile()}"],
        "MaskedPaths": [],
        "ReadonlyPaths": [],
        "Tmpfs": {
            "/tmp": "rw,nosuid,nodev,noexec,size=16777216,mode=1777",
            "/work": "rw,nosuid,nodev,noexec,size=1048576,mode=1777",
        },
        "Ulimits": [{"Name": "nofile", "Soft": 4096, "Hard": 16_384}, {"Name": "core", "Soft": 0, "Hard": 0}],
        "Init": False,
        "Mounts": sandboxed["HostConfig"]["Mounts"],
    }


def differing(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the items of *other* that *one* lacks or has with another value."""
    return {key: value for key, value in other.items() if key not in one or one[key] != value}


async def test_the_loosened_settings_of_an_environment_are_applied(backend: DockerBackend, engine: FakeEngine) -> None:
    loosened = Relaxations(user="0:0", writable_root=True, network="bridge", capabilities=("SETUID", "CHOWN"))
    environment = Environment(
        name=EnvironmentName("fake"),
        image="env-gateway/fake",
        directory=Path("/nowhere"),
        command=("python3",),
        loosened=loosened,
    )

    await backend.start(worker("w1", environment), environment)

    (container,) = engine.containers.values()
    host = container.body["HostConfig"]
    assert container.body["User"] == "0:0"
    assert (host["ReadonlyRootfs"], host["NetworkMode"], host["CapAdd"]) == (False, "bridge", ["CHOWN", "SETUID"])
    assert "noexec" not in host["Tmpfs"]["/tmp"]
    assert host["CapDrop"] == ["ALL"]


async def test_a_workers_folder_is_writable_by_all_users_and_its_parent_cannot_be_listed(
    backend: DockerBackend, sockets: Path
) -> None:
    await backend.start(worker(), ENVIRONMENT)

    assert mode_of(sockets / "w1") == 0o777
    assert mode_of(sockets) == 0o711


async def test_with_a_volume_the_folder_is_bound_from_the_engines_path_of_the_volume(
    engine: FakeEngine, sockets: Path
) -> None:
    backend = DockerBackend(
        url=engine.url, instance="ours", paths=HostPaths(socket_dir=sockets, socket_volume="sockets")
    )

    addresses = [await backend.start(worker(id), ENVIRONMENT) for id in ("w1", "w2")]
    await backend.aclose()

    sources = [container.body["HostConfig"]["Mounts"][0]["Source"] for container in engine.containers.values()]
    assert sources == [f"/var/lib/docker/volumes/sockets/_data/{id}" for id in ("w1", "w2")]
    assert addresses == [f"unix:{sockets}/{id}/worker.sock" for id in ("w1", "w2")]
    assert engine.count("GET volume") == 1


async def test_a_volume_that_does_not_exist_fails_the_start(engine: FakeEngine, sockets: Path) -> None:
    backend = DockerBackend(
        url=engine.url, instance="ours", paths=HostPaths(socket_dir=sockets, socket_volume="missing")
    )

    with pytest.raises(StartFailed, match="no such volume"):
        await backend.start(worker(), ENVIRONMENT)
    await backend.aclose()

    assert left(engine, sockets) == []


def with_tasks(content: str = "digest") -> Environment:
    return replace(ENVIRONMENT, custom_tasks=CustomTasks(module="custom_tasks.mine", folder="ours", content=content))


async def test_task_modules_are_mounted_read_only_and_the_worker_gets_the_name_of_its_module(
    engine: FakeEngine, sockets: Path, tmp_path: Path
) -> None:
    (tmp_path / "ours").mkdir()
    backend = DockerBackend(
        url=engine.url, instance="ours", paths=HostPaths(socket_dir=sockets, custom_tasks_dir=tmp_path)
    )
    plain, environment = with_tasks(content=""), with_tasks()
    await backend.start(worker("w1", plain), plain)
    await backend.start(worker("w2", environment), environment)
    await backend.aclose()

    usual, changed = (container.body for container in engine.containers.values())

    assert differing(usual, changed) == {
        "Env": [*usual["Env"], "OPENENV_TASK_MODULE=custom_tasks.mine"],
        "Labels": changed["Labels"],
        "HostConfig": changed["HostConfig"],
    }
    assert usual["Labels"]["env-gateway.digest"] != changed["Labels"]["env-gateway.digest"]
    assert differing(usual["HostConfig"], changed["HostConfig"]) == {"Mounts": changed["HostConfig"]["Mounts"]}
    assert changed["HostConfig"]["Mounts"][1:] == [
        {"Type": "bind", "Source": f"{tmp_path}/ours", "Target": "/opt/openenv/custom_tasks", "ReadOnly": True}
    ]


async def test_task_modules_in_a_volume_are_bound_from_the_engines_path_of_the_volume(
    engine: FakeEngine, sockets: Path, tmp_path: Path
) -> None:
    engine.volumes["tasks"] = "/var/lib/docker/volumes/tasks/_data"
    backend = DockerBackend(
        url=engine.url,
        instance="ours",
        paths=HostPaths(socket_dir=sockets, custom_tasks_dir=tmp_path, custom_tasks_volume="tasks"),
    )

    for id in ("w1", "w2"):
        await backend.start(worker(id, with_tasks()), with_tasks())
    await backend.aclose()

    sources = [container.body["HostConfig"]["Mounts"][1]["Source"] for container in engine.containers.values()]
    assert sources == ["/var/lib/docker/volumes/tasks/_data/ours"] * 2
    assert engine.count("GET volume") == 1


async def test_task_modules_that_the_engine_does_not_see_fail_the_start_with_an_error_that_names_them(
    engine: FakeEngine, sockets: Path, tmp_path: Path
) -> None:
    backend = DockerBackend(
        url=engine.url, instance="ours", paths=HostPaths(socket_dir=sockets, custom_tasks_dir=tmp_path)
    )

    with pytest.raises(StartFailed, match="is the folder of custom tasks there"):
        await backend.start(worker(environment=with_tasks()), with_tasks())
    await backend.aclose()

    assert left(engine, sockets) == []


async def test_task_modules_without_a_folder_in_the_settings_fail_the_start(
    backend: DockerBackend, engine: FakeEngine, sockets: Path
) -> None:
    with pytest.raises(StartFailed, match="custom_tasks_dir is not set"):
        await backend.start(worker(environment=with_tasks()), with_tasks())

    assert left(engine, sockets) == []


@pytest.mark.parametrize("operation", ["POST create", "POST start", "GET inspect"])
async def test_a_refusal_at_any_step_leaves_nothing_behind_and_states_the_reason(
    backend: DockerBackend, engine: FakeEngine, sockets: Path, operation: str
) -> None:
    engine.refuse(operation, 500, "the disk is full")

    with pytest.raises(StartFailed, match="the disk is full"):
        await backend.start(worker(), ENVIRONMENT)

    assert left(engine, sockets) == []


async def test_a_container_that_dies_during_its_start_is_a_failed_start_with_the_end_of_its_log(
    backend: DockerBackend, engine: FakeEngine, sockets: Path
) -> None:
    engine.dying = b"no module named server\n"

    with pytest.raises(StartFailed, match=r"exit status 3\)\nthe worker starts\nno module named server$"):
        await backend.start(worker(), ENVIRONMENT)

    assert left(engine, sockets) == []


@pytest.mark.parametrize("operation", ["GET version", "POST create", "POST start", "GET inspect"])
async def test_a_start_that_is_cancelled_during_a_call_of_the_engine_is_undone_after_the_call(
    backend: DockerBackend, engine: FakeEngine, sockets: Path, operation: str
) -> None:
    hold = engine.hold(operation)
    starting = asyncio.create_task(backend.start(worker(), ENVIRONMENT))
    await reached(hold)

    starting.cancel()
    await asyncio.sleep(0)
    hold.released.set()
    await asyncio.wait({starting})

    assert starting.cancelled()
    assert left(engine, sockets) == []


@pytest.mark.parametrize("turns", range(12))
async def test_a_start_that_is_cancelled_at_any_turn_of_the_loop_leaves_nothing(
    backend: DockerBackend, engine: FakeEngine, sockets: Path, turns: int
) -> None:
    starting = asyncio.create_task(backend.start(worker(), ENVIRONMENT))
    for _ in range(turns):
        await asyncio.sleep(0)

    starting.cancel()
    await asyncio.wait({starting})

    assert starting.cancelled()
    assert left(engine, sockets) == []


async def test_a_start_that_is_cancelled_again_during_its_undo_is_undone_before_the_backend_closes(
    backend: DockerBackend, engine: FakeEngine, sockets: Path
) -> None:
    creating, removing = engine.hold("POST create"), engine.hold("DELETE container")
    starting = asyncio.create_task(backend.start(worker(), ENVIRONMENT))
    await reached(creating)
    starting.cancel()
    creating.released.set()
    await reached(removing)

    starting.cancel()
    await asyncio.wait({starting})
    removing.released.set()
    await backend.aclose()

    assert left(engine, sockets) == []


async def test_a_start_that_is_cancelled_during_the_create_does_not_start_the_container(
    backend: DockerBackend, engine: FakeEngine
) -> None:
    hold = engine.hold("POST create")
    starting = asyncio.create_task(backend.start(worker(), ENVIRONMENT))
    await reached(hold)

    starting.cancel()
    await asyncio.sleep(0)
    hold.released.set()
    await asyncio.wait({starting})

    assert engine.count("POST start") == 0


async def test_a_container_of_the_same_name_is_not_removed_when_a_start_fails_on_it(
    backend: DockerBackend, engine: FakeEngine, sockets: Path
) -> None:
    await backend.start(worker(), ENVIRONMENT)
    (sockets / "w1").rmdir()  # now only the engine knows the container

    with pytest.raises(StartFailed, match="already in use"):
        await backend.start(worker(), ENVIRONMENT)

    assert [container.state for container in engine.containers.values()] == ["running"]


async def test_a_create_with_an_unknown_outcome_is_undone(
    backend: DockerBackend, engine: FakeEngine, sockets: Path
) -> None:
    engine.lose("POST create")

    with pytest.raises(BackendError, match="does not answer") as caught:
        await backend.start(worker(), ENVIRONMENT)
    assert not isinstance(caught.value, StartFailed)

    assert engine.count("POST create") == 1
    assert left(engine, sockets) == []


async def test_the_error_for_a_missing_own_image_names_the_script_that_builds_it(
    backend: DockerBackend, engine: FakeEngine, sockets: Path
) -> None:
    environment = with_image("env-gateway/math")

    with pytest.raises(StartFailed, match=r"no image env-gateway/math .* scripts/build-images"):
        await backend.start(worker("w1", environment), environment)

    assert engine.count("POST pull") == 0
    assert left(engine, sockets) == []


async def test_a_missing_image_of_a_registry_is_pulled(backend: DockerBackend, engine: FakeEngine) -> None:
    environment = with_image("registry.example/far:1")

    await backend.start(worker("w1", environment), environment)

    (container,) = engine.containers.values()
    assert (container.body["Image"], container.state) == ("registry.example/far:1", "running")


async def test_a_pull_that_fails_fails_the_start(backend: DockerBackend, engine: FakeEngine, sockets: Path) -> None:
    environment = with_image("registry.example/unknown")

    with pytest.raises(StartFailed, match=r"manifest for registry.example/unknown:latest not found"):
        await backend.start(worker("w1", environment), environment)

    assert left(engine, sockets) == []


@pytest.mark.parametrize(
    ("image", "far"),
    [
        pytest.param("env-gateway/math", False, id="an own image"),
        pytest.param("env-gateway/math:1.2", False, id="a tag with a dot"),
        pytest.param("math", False, id="a name without a path"),
        pytest.param("registry.example/math", True, id="a host"),
        pytest.param("localhost:5000/math", True, id="a port"),
        pytest.param("math@sha256:" + "0" * 64, True, id="a digest"),
    ],
)
def test_an_image_is_from_a_registry_only_if_its_name_has_a_host_or_a_digest(image: str, far: bool) -> None:
    assert is_from_registry(image) is far


async def test_a_missing_engine_is_not_reported_as_a_fault_of_the_image_and_nothing_is_left_behind(
    folder: Path,
) -> None:
    backend = DockerBackend(
        url=f"unix://{folder}/missing.sock", instance="ours", paths=HostPaths(socket_dir=folder / "sockets")
    )

    with pytest.raises(BackendError, match="does not answer") as caught:
        await backend.start(worker(), ENVIRONMENT)
    assert not isinstance(caught.value, StartFailed)
    with pytest.raises(BackendError, match="does not answer"):
        await backend.stop(WorkerId("w1"))
    with pytest.raises(BackendError, match="does not answer"):
        await backend.check()
    await backend.aclose()

    assert list((folder / "sockets").iterdir()) == []


async def test_an_engine_that_comes_back_is_used_again(engine: FakeEngine, backend: DockerBackend) -> None:
    engine.refuse("GET version", 500, "starting up")
    with pytest.raises(StartFailed, match="starting up"):
        await backend.start(worker(), ENVIRONMENT)

    await backend.start(worker(), ENVIRONMENT)

    assert [container.state for container in engine.containers.values()] == ["running"]


async def test_a_stop_sends_a_signal_before_it_removes_the_container(
    backend: DockerBackend, engine: FakeEngine, sockets: Path
) -> None:
    await backend.start(worker(), ENVIRONMENT)

    await backend.stop(WorkerId("w1"))

    acts = [request for request in engine.requests if request in ("POST kill", "DELETE container")]
    assert acts == ["POST kill", "DELETE container"]
    assert left(engine, sockets) == []


async def test_a_container_that_does_not_end_is_removed_by_force_after_the_grace_period(
    engine: FakeEngine, sockets: Path
) -> None:
    backend = DockerBackend(
        url=engine.url, instance="ours", paths=HostPaths(socket_dir=sockets), pace=EnginePace(stop_grace_s=0.2)
    )
    engine.stubborn = True
    await backend.start(worker(), ENVIRONMENT)

    await backend.stop(WorkerId("w1"))

    assert left(engine, sockets) == []
    await backend.aclose()


async def test_a_stop_holds_no_thread_during_the_grace_period(engine: FakeEngine, sockets: Path) -> None:
    backend = DockerBackend(
        url=engine.url,
        instance="ours",
        paths=HostPaths(socket_dir=sockets),
        pace=EnginePace(threads=1, stop_grace_s=60),
    )
    engine.stubborn = True
    await backend.start(worker(), ENVIRONMENT)
    stopping = asyncio.create_task(backend.stop(WorkerId("w1")))

    async with asyncio.timeout(HANG_S):
        await backend.start(worker("w2"), ENVIRONMENT)  # on the only thread

    assert not stopping.done()
    (first, _) = engine.containers.values()
    engine.die(first)
    await stopping
    await backend.aclose()


async def test_a_stop_succeeds_if_the_container_is_removed_meanwhile(
    backend: DockerBackend, engine: FakeEngine, sockets: Path
) -> None:
    await backend.start(worker(), ENVIRONMENT)
    hold = engine.hold("POST kill")
    stopping = asyncio.create_task(backend.stop(WorkerId("w1")))
    await reached(hold)

    engine.containers.clear()
    hold.released.set()
    await stopping

    assert left(engine, sockets) == []


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_an_interrupted_stop_leaves_no_folder_without_a_container(
    backend: DockerBackend, engine: FakeEngine, sockets: Path, is_cancelled: bool
) -> None:
    await backend.start(worker(), ENVIRONMENT)
    hold = engine.hold("DELETE container")
    stopping = asyncio.create_task(backend.stop(WorkerId("w1")))
    await reached(hold)

    if is_cancelled:
        stopping.cancel()
        await asyncio.wait({stopping})
    at_that_moment = left(engine, sockets)
    hold.released.set()
    await asyncio.wait({stopping})

    assert at_that_moment == ["ours-fake-w1"]


async def test_a_stop_that_the_engine_refuses_is_an_error_and_can_be_repeated(
    backend: DockerBackend, engine: FakeEngine, sockets: Path
) -> None:
    await backend.start(worker(), ENVIRONMENT)
    engine.refuse("DELETE container", 500, "device is busy")

    with pytest.raises(BackendError, match="device is busy"):
        await backend.stop(WorkerId("w1"))
    await backend.stop(WorkerId("w1"))

    assert left(engine, sockets) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a folder as root that another user then cannot remove")
async def test_a_folder_that_cannot_be_removed_is_logged_and_its_worker_is_stopped(
    backend: DockerBackend, engine: FakeEngine, folder: Path, sockets: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await backend.start(worker(), ENVIRONMENT)
    os.chmod(folder, 0o711)
    os.chmod(folder / "engine.sock", 0o777)

    with ordinary_user():
        await backend.stop(WorkerId("w1"))

    assert left(engine, sockets) == ["w1"]
    assert "worker_folder_left worker=w1" in caplog.text


async def test_found_distinguishes_running_dead_and_unstarted_containers_in_one_request(
    backend: DockerBackend, engine: FakeEngine, sockets: Path
) -> None:
    for id in ("w1", "w2", "w3"):
        await backend.start(worker(id), ENVIRONMENT)
    first, second, third = engine.containers.values()
    engine.die(second)
    third.state = "created"
    del first.body["Labels"]["env-gateway.digest"]
    engine.requests.clear()

    found = await backend.found()

    assert {entry.id: entry.running for entry in found} == {"w1": True, "w2": False, "w3": False}
    assert {entry.digest for entry in found} == {"", ENVIRONMENT.digest()}
    assert found[0].address == f"unix:{sockets}/w1/worker.sock"
    # Each thread of the backend requests the engine's version once, at its first use.
    assert [request for request in engine.requests if request != "GET version"] == ["GET list"]


async def test_deaths_while_the_event_stream_is_broken_are_reported_once_and_in_order(
    backend: DockerBackend, engine: FakeEngine
) -> None:
    engine.info["CgroupVersion"] = "1"  # otherwise each death is inspected before its report, two concurrently
    for id in ("w1", "w2", "w3"):
        await backend.start(worker(id), ENVIRONMENT)
    first, second, third = engine.containers.values()
    deaths = backend.deaths()
    await asyncio.to_thread(engine.followed)
    engine.die(first)
    told = [(await anext(deaths)).id]

    engine.refuse("GET events", 500)
    engine.break_streams()
    engine.die(second)
    await asyncio.to_thread(engine.followed)
    # Awaited before the next death: one scan that finds two dead workers reports them in the engine's order.
    told.append((await anext(deaths)).id)
    engine.die(third)
    told.append((await anext(deaths)).id)

    assert told == ["w1", "w2", "w3"]


async def test_a_death_between_the_request_for_events_and_the_engines_answer_is_reported(
    backend: DockerBackend, engine: FakeEngine
) -> None:
    await backend.start(worker(), ENVIRONMENT)
    hold = engine.hold("GET events")
    deaths = backend.deaths()
    await reached(hold)

    engine.die(next(iter(engine.containers.values())))
    hold.released.set()

    assert (await anext(deaths)).id == "w1"


OTHERS = [("theirs", "0" * 16), ("theirs", "1" * 16), ("ours", "1" * 16)]


@pytest.mark.parametrize(("instance", "owner"), OTHERS)
async def test_containers_of_another_gateway_are_not_found_reported_or_removed(
    engine: FakeEngine, sockets: Path, instance: str, owner: str
) -> None:
    own, other = (
        DockerBackend(
            url=engine.url,
            instance=name,
            owner=who,
            paths=HostPaths(socket_dir=sockets / name / who),
            pace=EnginePace(stop_grace_s=HANG_S),
        )
        for name, who in (("ours", "0" * 16), (instance, owner))
    )
    await other.start(worker("foreign"), ENVIRONMENT)
    await own.start(worker(), ENVIRONMENT)
    foreign, mine = engine.containers.values()
    deaths = own.deaths()

    found = await own.found()
    await own.stop(WorkerId("foreign"))
    engine.die(foreign)
    engine.die(mine)

    assert [entry.id for entry in found] == ["w1"]
    assert (await anext(deaths)).id == "w1"
    assert foreign in engine.containers.values()
    for backend in (own, other):
        await backend.aclose()


def backend_folder(engine: FakeEngine) -> Path:
    return Path(engine.url.removeprefix("unix://")).parent


async def test_closing_ends_the_followers_and_keeps_the_containers(backend: DockerBackend, engine: FakeEngine) -> None:
    await backend.start(worker(), ENVIRONMENT)
    deaths = backend.deaths()
    await asyncio.to_thread(engine.followed)

    await backend.aclose()

    assert [death async for death in deaths] == []
    assert [container.state for container in engine.containers.values()] == ["running"]


async def test_the_check_tests_the_socket_folder_with_the_first_image_that_exists(
    engine: FakeEngine, sockets: Path
) -> None:
    backend = DockerBackend(
        url=engine.url,
        instance="ours",
        paths=HostPaths(socket_dir=sockets),
        environments=[with_image("env-gateway/unbuilt"), ENVIRONMENT],
    )

    await backend.check()
    await backend.aclose()

    assert (engine.count("POST create"), engine.count("POST start")) == (1, 0)
    assert left(engine, sockets) == []


@pytest.mark.parametrize(
    ("volume", "advice"),
    [
        pytest.param(None, "socket_volume must name its volume", id="a path"),
        pytest.param("sockets", "is volume sockets mounted at", id="a volume"),
    ],
)
async def test_an_engine_that_does_not_see_the_socket_folder_fails_the_check_with_advice(
    engine: FakeEngine, sockets: Path, volume: str | None, advice: str
) -> None:
    engine.blind = True
    backend = DockerBackend(
        url=engine.url,
        instance="ours",
        paths=HostPaths(socket_dir=sockets, socket_volume=volume),
        environments=[ENVIRONMENT],
    )

    with pytest.raises(BackendError, match=advice):
        await backend.check()
    await backend.aclose()

    assert left(engine, sockets) == []


async def test_without_any_image_the_check_logs_that_it_skipped_the_probe(
    engine: FakeEngine, sockets: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = DockerBackend(
        url=engine.url,
        instance="ours",
        paths=HostPaths(socket_dir=sockets),
        environments=[with_image("env-gateway/unbuilt")],
    )

    with caplog.at_level(logging.INFO):
        await backend.check()
    await backend.aclose()

    assert "backend_probe_skipped" in caplog.text


async def test_a_socket_path_above_the_limit_is_refused(engine: FakeEngine, folder: Path) -> None:
    deep = folder / ("d" * (107 - len(os.fsencode(folder)) - len("/") - len("/w1/worker.sock")))
    fits = DockerBackend(url=engine.url, instance="ours", paths=HostPaths(socket_dir=deep))
    too_long = DockerBackend(url=engine.url, instance="ours", paths=HostPaths(socket_dir=Path(f"{deep}d")))

    await fits.start(worker(), ENVIRONMENT)
    with pytest.raises(StartFailed, match="would have 108 bytes"):
        await too_long.start(worker(), ENVIRONMENT)
    await fits.aclose()
    await too_long.aclose()

    assert len(engine.containers) == 1


def test_no_output_of_a_command_is_lost_that_arrives_with_the_head_of_the_response(engine: FakeEngine) -> None:
    with closing(connect(engine.url)) as client:
        container = create(client, body={"Image": "env-gateway/fake", "HostConfig": {}}, name="w1")

        assert run(client, container=container, argv=["cat", "file"]) == (127, b"outerror")
        with pytest.raises(APIError, match="No such container"):
            run(client, container="unknown", argv=["cat", "file"])
