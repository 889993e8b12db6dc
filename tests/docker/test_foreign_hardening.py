"""A third-party image from inside and outside: hardened like the gateway's own, with an entrance unknown to it."""

from __future__ import annotations

import asyncio
import json
import os
import textwrap
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker
import httpx
import pytest

from gateway.backends.docker import calls
from gateway.backends.docker.backend import DockerBackend
from gateway.backends.docker.container import forwarder_body, server_body
from gateway.backends.docker.mounts import HostPaths
from gateway.core.environment import Environment, Relaxations, Server, Volume
from gateway.core.errors import BackendError, StartFailed
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.node.gate import Gate
from gateway.node.policy import Rules
from gateway.node.serve import serving_gate
from tests.contract.backend_foreign_world import (
    PORT,
    ForeignWorld,
    foreign_environment,
    healthy,
    part,
    run_inside,
)
from tests.contract.backend_world import ENGINE_URL, eventually, labelled, new_id, remove_labelled, worker_of
from tests.deadlines import HANG_S

pytestmark = [pytest.mark.docker]
pytest_plugins = ["tests.contract.backend_foreign_fixtures"]


async def inside(address: str, program: str) -> Any:
    """Run a program in the worker, and return the JSON that it prints."""
    printed = await run_inside(address, textwrap.dedent(program))
    try:
        return json.loads(printed)
    except ValueError:
        pytest.fail(f"the program in the worker failed:\n{printed}")


async def started(world: ForeignWorld, **changes: Any) -> tuple[WorkerId, str]:
    environment = world.variant(**changes)
    worker = worker_of(environment)
    address = await world.backend.start(worker, environment)
    await healthy(address)
    return worker.id, address


async def test_every_flag_is_set_on_both_containers(
    foreign_docker_world: ForeignWorld, docker_engine: docker.APIClient, forwarder_image: str
) -> None:
    id, _ = await started(foreign_docker_world)

    server, forwarder = (part(docker_engine, id, role) for role in ("server", "forwarder"))
    for container in (server, forwarder):
        host = container["HostConfig"]
        assert container["Config"]["User"] == "10001:10001"
        assert (host["CapDrop"], host["CapAdd"] or []) == (["ALL"], [])
        assert host["SecurityOpt"] == ["no-new-privileges:true"]
        assert (host["Privileged"], host["ReadonlyRootfs"]) == (False, True)
        assert (host["IpcMode"], host["PidMode"], host["UTSMode"]) == ("private", "", "")
        assert host["MemorySwap"] == host["Memory"] > 0
        assert host["NanoCpus"] > 0
        assert host["RestartPolicy"]["Name"] == "no"
        for key in ("Binds", "Devices", "VolumesFrom", "PortBindings"):
            assert not host[key], key
    assert (server["HostConfig"]["NetworkMode"], server["HostConfig"]["PidsLimit"]) == ("none", 64)
    assert server["Config"]["Healthcheck"] == {"Test": ["NONE"]}
    assert server["Config"]["Entrypoint"] == ["python3", "/srv/backend_tcp_server.py"]  # the image's own
    assert forwarder["HostConfig"]["NetworkMode"] == f"container:{server['Id']}"
    assert (forwarder["Config"]["Image"], forwarder["HostConfig"]["PidsLimit"]) == (forwarder_image, 8)
    assert [mount["Destination"] for mount in server["Mounts"]] == ["/cache"]  # the image's own
    assert [mount["Destination"] for mount in forwarder["Mounts"]] == ["/run/envserver"]


KINDS = ("net", "pid", "mnt", "ipc")


def spaces_of(engine: docker.APIClient, container: str) -> dict[str, str]:
    """Return a container's namespaces by kind.

    They are read inside, because the engine may have another process namespace than this test.
    """
    argv = ["readlink", *(f"/proc/self/ns/{kind}" for kind in KINDS)]
    _, printed = calls.run(engine, container=container, argv=argv)
    return dict(zip(KINDS, printed.decode().split(), strict=True))


async def test_the_forwarder_is_in_the_namespace_of_its_server_and_in_no_other(
    foreign_docker_world: ForeignWorld, docker_engine: docker.APIClient
) -> None:
    id, _ = await started(foreign_docker_world)
    other, _ = await started(foreign_docker_world)

    spaces = {
        (worker, role): spaces_of(docker_engine, part(docker_engine, worker, role)["Id"])
        for worker in (id, other)
        for role in ("server", "forwarder")
    }

    assert spaces[id, "server"]["net"] == spaces[id, "forwarder"]["net"]
    assert spaces[id, "server"]["net"] not in (spaces[other, "server"]["net"], os.readlink("/proc/self/ns/net"))
    for kind in ("pid", "mnt", "ipc"):
        assert spaces[id, "server"][kind] != spaces[id, "forwarder"][kind]


async def test_a_third_party_server_has_no_network_no_folder_of_the_gateway_and_no_right(
    foreign_docker_world: ForeignWorld,
) -> None:
    _, address = await started(foreign_docker_world)

    found = await inside(
        address,
        """
        import json, os, socket
        status = dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)

        def written(path):
            try:
                open(path + "/tried", "w").close()
                return True
            except OSError:
                return False

        def reached(target):
            with socket.socket() as client:
                client.settimeout(3)
                return client.connect_ex(target)

        print(json.dumps({
            "interfaces": [name for _, name in socket.if_nameindex()],
            "outside": reached(("192.0.2.1", 80)) != 0,
            "folder": os.path.exists("/run/envserver"),
            "mounts": "envserver" in open("/proc/self/mountinfo").read(),
            "writable": [path for path in ("/", "/srv", "/etc", "/usr", "/tmp", "/dev/shm") if written(path)],
            "rights": int(status["CapEff"], 16) | int(status["CapBnd"], 16),
            "rest": [status["NoNewPrivs"].strip(), status["Seccomp"].strip(), os.getuid(), os.getgid()],
            "processes": len([name for name in os.listdir("/proc") if name.isdigit()]),
        }))
        """,
    )

    assert found == {
        "interfaces": ["lo"],
        "outside": True,
        "folder": False,
        "mounts": False,
        "writable": ["/tmp", "/dev/shm"],
        "rights": 0,
        "rest": ["1", "2", 10001, 10001],
        "processes": 2,  # the engine's init, and the server: it cannot see the forwarder
    }


async def test_a_relaxation_applies_to_the_server_and_not_to_its_forwarder(
    foreign_docker_world: ForeignWorld, docker_engine: docker.APIClient
) -> None:
    loosened = Relaxations(user="0:0", writable_root=True)
    id, address = await started(foreign_docker_world, loosened=loosened)

    found = await inside(
        address,
        """
        import json, os
        open("/etc/written", "w").close()
        status = dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
        print(json.dumps([os.getuid(), int(status["CapEff"], 16), status["NoNewPrivs"].strip()]))
        """,
    )

    assert found == [0, 0, "1"]  # root, without any right of root
    forwarder = part(docker_engine, id, "forwarder")
    assert (forwarder["Config"]["User"], forwarder["HostConfig"]["ReadonlyRootfs"]) == ("10001:10001", True)


@pytest.fixture
def data(tasks_dir: Path) -> Path:
    """A folder that workers may read."""
    (tasks_dir / "file").write_text("from outside")
    return tasks_dir


@pytest.fixture
def named_volume(docker_engine: docker.APIClient, instance: str) -> Iterator[str]:
    name = f"{instance}-data"
    docker_engine.create_volume(name)
    yield name
    remove_labelled(docker_engine, instance)
    docker_engine.remove_volume(name)


async def test_volumes_are_mounted_read_only_by_default(
    foreign_docker_world: ForeignWorld, data: Path, named_volume: str
) -> None:
    volumes = (
        Volume(source=str(data), target="/data"),
        Volume(source=named_volume, target="/named", read_only=False),
    )
    loosened = Relaxations(user="0:0")  # the volume's owner
    id, address = await started(foreign_docker_world, volumes=volumes, loosened=loosened)

    found = await inside(
        address,
        """
        import json
        def written(path):
            try:
                open(path, "w").close()
                return True
            except OSError:
                return False
        print(json.dumps([open("/data/file").read(), written("/data/other"), written("/named/other")]))
        """,
    )
    await foreign_docker_world.backend.stop(id)

    assert found == ["from outside", False, True]
    assert (data / "file").read_text() == "from outside"
    assert foreign_docker_world.left() == []


@pytest.mark.parametrize(
    ("volume", "advice"),
    [
        (Volume(source="eg-no-such-volume", target="/data"), "docker volume create eg-no-such-volume"),
        (Volume(source="/no/such/folder", target="/data"), "paths of the engine's machine"),
    ],
)
async def test_a_missing_volume_fails_the_start_and_is_not_created(
    foreign_docker_world: ForeignWorld, docker_engine: docker.APIClient, volume: Volume, advice: str
) -> None:
    environment = foreign_docker_world.variant(volumes=(volume,))

    with pytest.raises(StartFailed, match=advice):
        await foreign_docker_world.backend.start(worker_of(environment), environment)

    assert foreign_docker_world.left() == []
    volumes = docker_engine.volumes()["Volumes"] or []
    assert "eg-no-such-volume" not in [found["Name"] for found in volumes]


@pytest.mark.parametrize("role", ["server", "forwarder"])
async def test_the_end_of_either_container_is_the_workers_death_and_stopping_removes_both(
    foreign_docker_world: ForeignWorld, docker_engine: docker.APIClient, role: str
) -> None:
    world = foreign_docker_world
    deaths = world.backend.deaths()
    id, _ = await started(world)
    other, _ = await started(world)

    docker_engine.kill(part(docker_engine, id, role)["Id"], signal="SIGKILL")

    async with asyncio.timeout(HANG_S):
        assert (await anext(deaths)).id == id

    async def seen() -> bool:
        return {found.id: found.running for found in await world.backend.found()} == {id: False, other: True}

    await eventually(seen)
    await world.backend.stop(id)
    await world.backend.stop(other)
    assert world.left() == []


@pytest.mark.parametrize("role", ["server", "forwarder"])
async def test_half_a_worker_is_found_dead_and_is_removed(
    foreign_docker_world: ForeignWorld, docker_engine: docker.APIClient, role: str
) -> None:
    id, _ = await started(foreign_docker_world)
    docker_engine.remove_container(part(docker_engine, id, role)["Id"], force=True)

    (found,) = await foreign_docker_world.backend.found()
    await foreign_docker_world.backend.stop(id)

    assert (found.id, found.running) == (id, False)
    assert foreign_docker_world.left() == []


async def test_without_the_forwarders_image_nothing_starts_and_nothing_is_left(
    docker_engine: docker.APIClient, foreign_image: str, shared_dir: Path, instance: str
) -> None:
    environment = foreign_environment(foreign_image)
    missing = "env-gateway-tests/none"
    backend = DockerBackend(
        url=ENGINE_URL, instance=instance, paths=HostPaths(socket_dir=shared_dir), forwarder_image=missing
    )

    with pytest.raises(StartFailed, match=f"no image {missing} on this engine"):
        await backend.start(worker_of(environment), environment)
    await backend.aclose()

    assert labelled(docker_engine, instance) == []
    assert os.listdir(shared_dir) == []


async def test_a_forwarder_that_fails_immediately_fails_the_start_with_its_reason(
    docker_engine: docker.APIClient, foreign_image: str, shared_dir: Path, instance: str
) -> None:
    environment = foreign_environment(foreign_image)
    backend = DockerBackend(
        url=ENGINE_URL, instance=instance, paths=HostPaths(socket_dir=shared_dir), forwarder_image=foreign_image
    )
    worker = worker_of(environment)

    said = ""
    try:
        await backend.start(worker, environment)  # the engine may be quicker than Python's failure
    except StartFailed as error:
        said = str(error)
    else:

        async def logged() -> str:
            text = await backend.logs(worker.id)
            return text if "submodule_search_locations" in text else ""

        said = await eventually(logged)
        await backend.stop(worker.id)
    await backend.aclose()

    assert "submodule_search_locations" in said
    assert labelled(docker_engine, instance) == []


class Attacker:
    """An attacker who controls the gateway, and so the gate's socket."""

    def __init__(self, gate: httpx.AsyncClient, rules: Rules, environment: Environment) -> None:
        self.gate = gate
        self.rules = rules
        self.environment = environment

    def server(self, id: WorkerId, **changes: Any) -> dict[str, Any]:
        worker = worker_of(self.environment, id)
        return server_body(worker, replace(self.environment, **changes), instance=self.rules.instance)

    def forwarder(self, id: WorkerId, beside: str) -> dict[str, Any]:
        return forwarder_body(
            worker_of(self.environment, id),
            self.environment,
            instance=self.rules.instance,
            source=f"{self.rules.socket_root}/{id}",
            beside=beside,
            image=self.rules.forwarder_image,
        )

    async def create(self, body: dict[str, Any]) -> httpx.Response:
        name = f"{self.rules.instance}-{new_id()}"
        return await self.gate.post("/v1.41/containers/create", params={"name": name}, json=body)


@pytest.fixture
async def attacker(
    docker_engine: docker.APIClient, foreign_image: str, forwarder_image: str, shared_dir: Path, instance: str
) -> AsyncIterator[Attacker]:
    environment = foreign_environment(foreign_image)
    (shared_dir / "s").mkdir(mode=0o711)
    rules = Rules.of(
        [
            environment,
            replace(environment, name=EnvironmentName("elsewhere"), server=Server(url="http://elsewhere.example")),
        ],
        instance=instance,
        socket_root=str(shared_dir / "s"),
        forwarder_image=forwarder_image,
    )
    gate = Gate(engine=ENGINE_URL, rules=rules, socket_view=shared_dir / "s")
    async with serving_gate(gate, shared_dir / "gate.sock"):
        transport = httpx.AsyncHTTPTransport(uds=str(shared_dir / "gate.sock"), verify=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gate", timeout=HANG_S) as client:
            yield Attacker(client, rules, environment)
    remove_labelled(docker_engine, instance)


async def test_the_gate_lets_a_forwarder_share_only_the_network_of_its_own_server(
    attacker: Attacker, docker_engine: docker.APIClient, instance: str
) -> None:
    victim, id = new_id(), new_id()
    server = (await attacker.create(attacker.server(victim))).json()["Id"]
    assert os.listdir(attacker.rules.socket_root) == []  # a server has no folder
    strangers = docker_engine.create_container(
        attacker.environment.image,
        labels={"env-gateway.instance": f"{instance}-2", "env-gateway.worker": id, "env-gateway.role": "server"},
        network_disabled=True,
    )["Id"]

    refused = [
        await attacker.create(attacker.forwarder(id, beside))
        for beside in (server, strangers, "f" * 64, server[:12], "self", "host")
    ]
    allowed = await attacker.create(attacker.forwarder(victim, server))
    beside_forwarder = await attacker.create(attacker.forwarder(victim, allowed.json()["Id"]))
    docker_engine.remove_container(strangers, force=True)

    assert [answer.status_code for answer in refused] == [403] * 6
    assert all("NetworkMode" in answer.json()["message"] for answer in refused)
    assert (allowed.status_code, beside_forwarder.status_code) == (201, 403)
    assert os.listdir(attacker.rules.socket_root) == [victim]
    assert len(labelled(docker_engine, instance)) == 2


async def test_the_gate_lets_only_a_forwarder_share_a_network(attacker: Attacker) -> None:
    server = (await attacker.create(attacker.server(new_id()))).json()["Id"]
    body = attacker.server(new_id())
    body["HostConfig"]["NetworkMode"] = f"container:{server}"

    answer = await attacker.create(body)

    assert (answer.status_code, "NetworkMode" in answer.json()["message"]) == (403, True)


async def test_the_gate_keeps_a_workers_folder_until_its_forwarder_is_removed(attacker: Attacker) -> None:
    id = new_id()
    server = (await attacker.create(attacker.server(id))).json()["Id"]
    forwarder = (await attacker.create(attacker.forwarder(id, server))).json()["Id"]

    await attacker.gate.delete(f"/containers/{server}?force=1")
    there = os.listdir(attacker.rules.socket_root)
    await attacker.gate.delete(f"/containers/{forwarder}?force=1")

    assert (there, os.listdir(attacker.rules.socket_root)) == ([id], [])


async def test_a_worker_answers_through_a_gate_that_creates_the_folders(attacker: Attacker) -> None:
    server = (await attacker.create(attacker.server(id := new_id()))).json()["Id"]
    forwarder = (await attacker.create(attacker.forwarder(id, server))).json()["Id"]

    for container in (server, forwarder):
        assert (await attacker.gate.post(f"/containers/{container}/start")).status_code == 204

    assert await healthy(f"unix:{attacker.rules.socket_root}/{id}/server.sock") == {"status": "ok"}


async def test_the_gate_creates_no_container_of_a_static_server(attacker: Attacker) -> None:
    for role in ("server", "forwarder", None):
        body = attacker.server(new_id())
        body["Labels"] |= {"env-gateway.environment": "elsewhere"} | ({"env-gateway.role": role} if role else {})
        if role is None:
            del body["Labels"]["env-gateway.role"]

        answer = await attacker.create(body)

        assert (answer.status_code, "env-gateway.role" in answer.json()["message"]) == (403, True)


async def test_the_gate_refuses_a_forwarder_to_a_port_other_than_the_catalogs(attacker: Attacker) -> None:
    server = (await attacker.create(attacker.server(id := new_id()))).json()["Id"]
    body = attacker.forwarder(id, server)
    assert body["Cmd"][-1] == str(PORT)

    answer = await attacker.create(body | {"Cmd": [*body["Cmd"][:-1], "22"]})

    assert (answer.status_code, "Cmd" in answer.json()["message"]) == (403, True)


async def test_an_engine_error_while_stopping_is_raised(foreign_docker_world: ForeignWorld) -> None:
    id, _ = await started(foreign_docker_world)
    await foreign_docker_world.backend.aclose()

    with pytest.raises(BackendError):
        await foreign_docker_world.backend.stop(id)
