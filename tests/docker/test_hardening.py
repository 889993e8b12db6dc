"""The hardening of a worker's container, checked from inside and outside on the real engine."""

from __future__ import annotations

import asyncio
import json
import socket
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker
import httpx
import pytest

from gateway.core.environment import Limits, Relaxations
from gateway.core.errors import StartFailed
from gateway.core.session import CloseReason
from tests.contract.backend_world import World, healthy, labelled, run_inside, worker_of
from tests.deadlines import HANG_S

pytestmark = [pytest.mark.docker]
pytest_plugins = ["tests.contract.backend_fixtures"]

STARVING_BYTES = 7 * 2**20
"""Bytes of memory: too little for Python, and enough for the engine to start the container."""
GATEWAY_SECRET = "gateway-secret-0123456789"


async def inside(address: str, program: str) -> Any:
    """Run a program in the worker, and return the JSON that it prints."""
    printed = await run_inside(address, textwrap.dedent(program))
    try:
        return json.loads(printed)
    except ValueError:
        pytest.fail(f"the program in the worker failed:\n{printed}")


async def started(world: World, **changes: Any) -> str:
    environment = world.variant(**changes)
    address = await world.backend.start(worker_of(environment), environment)
    await healthy(address)
    return address


async def test_every_flag_is_set_on_the_container(
    docker_world: World, docker_engine: docker.APIClient, instance: str
) -> None:
    await started(docker_world)

    (entry,) = labelled(docker_engine, instance)
    container = docker_engine.inspect_container(entry["Id"])
    host = container["HostConfig"]
    assert container["Config"]["User"] == "10001:10001"
    assert host["CapDrop"] == ["ALL"]
    assert not host["CapAdd"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert (host["Privileged"], host["ReadonlyRootfs"], host["Init"]) == (False, True, True)
    assert (host["NetworkMode"], host["IpcMode"], host["PidMode"], host["UTSMode"]) == ("none", "private", "", "")
    assert (host["Memory"], host["MemorySwap"]) == (128 * 2**20, 128 * 2**20)
    assert (host["NanoCpus"], host["PidsLimit"], host["ShmSize"]) == (500_000_000, 64, 8 * 2**20)
    assert host["LogConfig"] == {"Type": "json-file", "Config": {"max-file": "1", "max-size": "1m"}}
    assert host["RestartPolicy"]["Name"] == "no"
    assert {limit["Name"]: limit["Hard"] for limit in host["Ulimits"]} == {"nofile": 4096, "core": 0}
    for key in ("Binds", "Devices", "VolumesFrom", "PortBindings"):
        assert not host[key], key
    assert [mount["Destination"] for mount in container["Mounts"]] == ["/run/envserver"]
    assert "/proc/kcore" in host["MaskedPaths"]
    assert "/proc/sys" in host["ReadonlyPaths"]
    assert {name for name in container["Config"]["Labels"] if name.startswith("env-gateway.")} == {
        "env-gateway.instance",
        "env-gateway.owner",
        "env-gateway.worker",
        "env-gateway.environment",
        "env-gateway.digest",
    }


async def test_the_worker_has_no_rights_and_cannot_get_any(docker_world: World) -> None:
    address = await started(docker_world)

    status = await inside(
        address,
        """
        import json
        lines = open("/proc/self/status").read().splitlines()
        print(json.dumps(dict(line.split(":\\t", 1) for line in lines if ":\\t" in line)))
        """,
    )

    assert status["Uid"].split() == ["10001"] * 4
    assert status["Gid"].split() == ["10001"] * 4
    assert not status["Groups"].split() or status["Groups"].split() == ["10001"]
    for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[kind], 16) == 0, kind
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


async def test_only_tmp_shared_memory_and_the_socket_folder_are_writable(docker_world: World) -> None:
    address = await started(docker_world)

    writable = await inside(
        address,
        """
        import json, os
        found = []
        for folder, folders, files in os.walk("/"):
            if folder in ("/proc", "/sys"):
                folders.clear()
            path = os.path.join(folder, "tried")
            try:
                open(path, "w").close()
            except OSError:
                continue
            found.append(folder)
        print(json.dumps(found))
        """,
    )

    assert sorted(writable) == ["/dev/mqueue", "/dev/shm", "/run/envserver", "/tmp"]


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
async def test_the_size_of_writable_folders_is_bounded(docker_world: World, folder: str) -> None:
    address = await started(docker_world)

    written_bytes, error = await inside(
        address,
        f"""
        import errno, json
        written, name = 0, ""
        try:
            with open("{folder}/large", "wb", buffering=0) as file:
                while written < 2**28:
                    written += file.write(b"x" * 2**16)
        except OSError as error:
            name = errno.errorcode[error.errno]
        print(json.dumps([written, name]))
        """,
    )

    assert (written_bytes, error) == (8 * 2**20, "ENOSPC")


async def test_nothing_in_tmp_can_be_executed(docker_world: World) -> None:
    address = await started(docker_world)

    error = await inside(
        address,
        """
        import errno, json, os, subprocess
        with open("/tmp/program", "w") as file:
            file.write("#!/bin/sh\\nexit 0\\n")
        os.chmod("/tmp/program", 0o755)
        try:
            subprocess.run(["/tmp/program"])
            print(json.dumps("it ran"))
        except OSError as error:
            print(json.dumps(errno.errorcode[error.errno]))
        """,
    )

    assert error == "EACCES"


async def test_there_is_no_network_and_no_way_to_the_machine(docker_world: World) -> None:
    with socket.create_server(("0.0.0.0", 0)) as listener:
        address = await started(docker_world)
        port = listener.getsockname()[1]

        found = await inside(
            address,
            f"""
            import errno, json, os, socket

            def tried(family, target):
                with socket.socket(family, socket.SOCK_STREAM) as client:
                    client.settimeout(3)
                    try:
                        client.connect(target)
                        return "connected"
                    except OSError as error:
                        return errno.errorcode.get(error.errno, str(error))

            print(json.dumps({{
                "interfaces": [name for _, name in socket.if_nameindex()],
                "loopback": tried(socket.AF_INET, ("127.0.0.1", {port})),
                "bridge": tried(socket.AF_INET, ("172.17.0.1", {port})),
                "outside": tried(socket.AF_INET, ("192.0.2.1", 80)),
                "six": tried(socket.AF_INET6, ("2001:db8::1", 80)),
                "engine": tried(socket.AF_UNIX, "/var/run/docker.sock"),
                "abstract": tried(socket.AF_UNIX, "\\0/containerd-shim"),
                "metadata": tried(socket.AF_INET, ("169.254.169.254", 80)),
            }}))
            """,
        )

    assert found.pop("interfaces") == ["lo"]
    assert found.pop("loopback") == "ECONNREFUSED"  # its own loopback, on which nothing listens
    assert found.pop("six") in ("ENETUNREACH", "EADDRNOTAVAIL")  # the latter where the machine has no IPv6
    assert found == {
        "bridge": "ENETUNREACH",
        "outside": "ENETUNREACH",
        "metadata": "ENETUNREACH",
        "engine": "ENOENT",
        "abstract": "ECONNREFUSED",
    }


async def test_a_worker_sees_no_other_worker(docker_world: World) -> None:
    first, second = await started(docker_world), await started(docker_world)
    other = Path(second.removeprefix("unix:"))

    found = await inside(
        first,
        f"""
        import json, os
        mounts = open("/proc/self/mountinfo").read()
        print(json.dumps({{
            "folder": sorted(os.listdir("/run/envserver")),
            "other": os.path.exists("{other}"),
            "up": sorted(os.listdir("/run/envserver/..")),
            "processes": [name for name in os.listdir("/proc") if name.isdigit()],
        }}))
        """,
    )

    assert found["folder"] == ["worker.sock"]
    assert found["other"] is False
    assert "envserver" in found["up"]
    assert len(found["processes"]) <= 4  # init and the server


async def test_the_engine_shows_no_secret_of_the_gateway(
    docker_world: World, docker_engine: docker.APIClient, instance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEWAY_SECRET", GATEWAY_SECRET)
    address = await started(docker_world)

    (entry,) = labelled(docker_engine, instance)
    inspected = json.dumps(docker_engine.inspect_container(entry["Id"]))
    seen = await run_inside(address, "import os; print(dict(os.environ))")

    assert GATEWAY_SECRET not in inspected + seen
    assert "GATEWAY_" not in inspected + seen


async def test_a_fork_bomb_meets_its_limit_and_the_worker_still_answers(docker_world: World) -> None:
    address = await started(docker_world)

    children = await inside(
        address,
        """
        import json, os, signal
        children = []
        try:
            while len(children) < 1000:
                child = os.fork()
                if child == 0:
                    signal.pause()
                children.append(child)
        except OSError:
            pass
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        print(json.dumps(len(children)))
        """,
    )

    assert 40 < children < 64
    assert await healthy(address) == {"status": "ok"}


@pytest.fixture(params=["docker_world", "gate_world"])
def either_world(request: pytest.FixtureRequest) -> World:
    """The Docker backend, directly on the engine and through the gate."""
    found: World = request.getfixturevalue(request.param)
    return found


async def test_only_the_worker_that_takes_too_much_memory_dies_and_its_death_names_the_cause(
    either_world: World,
) -> None:
    world = either_world
    deaths = world.backend.deaths()
    environment = world.environment
    hungry, neighbour = worker_of(environment), worker_of(environment)
    address = await world.backend.start(hungry, environment)
    other = await world.backend.start(neighbour, environment)
    await healthy(address)
    await healthy(other)

    eating = asyncio.create_task(_eat(address))

    async with asyncio.timeout(HANG_S):
        death = await anext(deaths)
    assert (death.id, death.reason) == (hungry.id, CloseReason.OUT_OF_MEMORY)
    await eating
    assert await healthy(other) == {"status": "ok"}
    await world.kill(neighbour.id, other)
    async with asyncio.timeout(HANG_S):
        death = await anext(deaths)
    assert (death.id, death.reason) == (neighbour.id, CloseReason.WORKER_LOST)


async def test_a_worker_lives_on_without_a_report_if_only_its_child_took_too_much_memory(
    docker_world: World,
) -> None:
    deaths = docker_world.backend.deaths()
    worker = worker_of(docker_world.environment)
    address = await docker_world.backend.start(worker, docker_world.environment)
    await healthy(address)

    status = await inside(
        address,
        """
        import subprocess, sys
        eat = "open('/proc/self/oom_score_adj', 'w').write('1000'); x = bytearray(2**30); x[::4096] = b'x' * 2**18"
        print(subprocess.run([sys.executable, "-c", eat]).returncode)
        """,
    )

    assert status == -9
    assert await healthy(address) == {"status": "ok"}
    hears = asyncio.ensure_future(anext(deaths))
    await docker_world.backend.stop(worker.id)
    async with asyncio.timeout(HANG_S):
        assert (await hears).id == worker.id  # the first death of all


async def test_a_start_that_runs_out_of_memory_reports_it(docker_world: World) -> None:
    starving = replace(docker_world.environment.limits, memory_bytes=STARVING_BYTES)
    environment = docker_world.variant(limits=starving)
    worker = worker_of(environment)
    deaths = docker_world.backend.deaths()

    try:
        await docker_world.backend.start(worker, environment)
    except StartFailed as error:
        told = str(error)
    else:
        told = "out of memory"  # it died just after the backend's last check: the death reports it
    assert "out of memory" in told
    async with asyncio.timeout(HANG_S):
        death = await anext(deaths)

    assert (death.id, death.reason) == (worker.id, CloseReason.OUT_OF_MEMORY)


async def _eat(address: str) -> None:
    with pytest.raises(httpx.TransportError):  # the other side dies during the answer
        await run_inside(address, "x = bytearray(2**30); x[::4096] = b'x' * len(x[::4096])")


async def test_the_kernel_enforces_the_engines_seccomp_profile(docker_world: World) -> None:
    address = await started(docker_world)

    found = await inside(
        address,
        """
        import ctypes, errno, json
        libc = ctypes.CDLL(None, use_errno=True)

        def tried(call):
            ctypes.set_errno(0)
            return errno.errorcode.get(ctypes.get_errno(), "done") if call() == -1 else "done"

        NEWUSER, NEWNS = 0x10000000, 0x00020000
        print(json.dumps({
            "user namespace": tried(lambda: libc.unshare(NEWUSER)),
            "mount namespace": tried(lambda: libc.unshare(NEWNS)),
            "mount": tried(lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)),
            "chroot": tried(lambda: libc.chroot(b"/tmp")),
            "setuid": tried(lambda: libc.setuid(0)),
            "reboot": tried(lambda: libc.reboot(0)),
        }))
        """,
    )

    assert set(found.values()) == {"EPERM"}


async def test_only_the_named_relaxations_apply(docker_world: World) -> None:
    loosened = Relaxations(user="0:0", writable_root=True, capabilities=("CHOWN",))
    address = await started(docker_world, loosened=loosened)

    found = await inside(
        address,
        """
        import json, os
        open("/etc/written", "w").close()
        os.chown("/etc/written", 5, 5)
        status = dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
        print(json.dumps([os.getuid(), int(status["CapEff"], 16), int(status["CapBnd"], 16), status["NoNewPrivs"]]))
        """,
    )

    assert found == [0, 1, 1, "1\n"]  # CAP_CHOWN is bit 0


async def test_the_container_has_the_limits_of_the_environment(
    docker_world: World, docker_engine: docker.APIClient, instance: str
) -> None:
    limits = replace(Limits(), memory_bytes=64 * 2**20, cpus=0.25, pids=32, tmp_bytes=2**20)
    await started(docker_world, limits=limits)

    (entry,) = labelled(docker_engine, instance)
    host = docker_engine.inspect_container(entry["Id"])["HostConfig"]
    assert (host["Memory"], host["NanoCpus"], host["PidsLimit"]) == (64 * 2**20, 250_000_000, 32)
    assert "size=1048576" in host["Tmpfs"]["/tmp"]


async def test_on_an_engine_without_gpus_a_start_that_needs_one_fails_with_the_reason(
    docker_engine: docker.APIClient, docker_world: World
) -> None:
    if "nvidia" in docker_engine.info()["Runtimes"]:
        pytest.skip("this engine has GPUs")
    environment = docker_world.variant(limits=replace(docker_world.environment.limits, gpus=1))

    with pytest.raises(StartFailed, match="device driver"):
        await docker_world.backend.start(worker_of(environment), environment)

    assert docker_world.leftovers() == []
