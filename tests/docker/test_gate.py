"""Attacks on the engine gate, with the real engine behind it: each is refused, and nothing is created or changed.

`tests/unit/node/test_policy.py` has longer tables. These tests take one row of each kind, to check that the gate acts
on its decisions.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import stat
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import docker
import httpx
import pytest

from gateway.backends.docker.backend import DockerBackend
from gateway.backends.docker.container import container_body, container_name
from gateway.backends.docker.mounts import HostPaths
from gateway.core.environment import Environment
from gateway.core.errors import BackendError, ConfigError, StartFailed
from gateway.core.ids import WorkerId
from gateway.node.gate import Gate
from gateway.node.policy import Rules
from gateway.node.serve import mountpoint, serving_gate
from tests.contract.backend_world import (
    ENGINE_URL,
    eventually,
    fake_environment,
    healthy,
    labelled,
    new_id,
    remove_labelled,
    worker_of,
)
from tests.deadlines import HANG_S

pytestmark = [pytest.mark.docker]
pytest_plugins = ["tests.contract.backend_fixtures"]


@pytest.fixture(scope="module")
def instance() -> str:
    """One instance for all tests. Each test removes its containers, so all share the third-party container."""
    return f"eg-test-{secrets.token_hex(4)}"


@pytest.fixture(scope="module")
def foreign(docker_engine: docker.APIClient, worker_image: str, instance: str) -> Iterator[str]:
    """A running container of another instance. Yields its id."""
    labels = {"env-gateway.instance": f"{instance}-2", "env-gateway.worker": "theirs"}
    container = docker_engine.create_container(
        worker_image, command=["python3", "-c", "import signal; signal.pause()"], labels=labels, network_disabled=True
    )
    docker_engine.start(container["Id"])
    yield container["Id"]
    remove_labelled(docker_engine, f"{instance}-2")


class Attacker:
    """An attacker who controls the gateway, and so the gate's socket."""

    def __init__(self, gate: httpx.AsyncClient, rules: Rules, environment: Environment) -> None:
        self._gate = gate
        self._rules = rules
        self._environment = environment

    def body(self, id: WorkerId) -> dict[str, Any]:
        """Return the body that the gateway's own backend would send."""
        source = f"{self._rules.socket_root}/{id}"
        worker = worker_of(self._environment, id)
        return container_body(worker, self._environment, instance=self._rules.instance, source=source)

    async def create(self, body: dict[str, Any] | bytes, *, name: str | None = None) -> httpx.Response:
        name = name or container_name(self._rules.instance, "fake", new_id())
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self._gate.post("/v1.41/containers/create", params={"name": name}, content=content)

    async def created(self) -> tuple[WorkerId, str]:
        """Create an allowed container. Return the worker's id and the container's."""
        id = new_id()
        response = await self.create(self.body(id))
        assert response.status_code == 201, response.text
        return id, response.json()["Id"]


@pytest.fixture
def attacker(gate: httpx.AsyncClient, rules: Rules, environment: Environment) -> Attacker:
    return Attacker(gate, rules, environment)


def nothing_there(engine: docker.APIClient, rules: Rules) -> bool:
    """Return True if the instance has no container, by label or by name, and no folder."""
    by_name = engine.containers(all=True, filters={"name": f"{rules.instance}-"})
    own = [entry for entry in by_name if entry["Labels"].get("env-gateway.instance") != f"{rules.instance}-2"]
    return own == [] and labelled(engine, rules.instance) == [] and os.listdir(rules.socket_root) == []


HOST_CONFIG_ATTACKS = {
    "privileged": {"Privileged": True},
    "the host's root": {"Binds": ["/:/host"]},
    "the engine's socket": {"Binds": ["/var/run/docker.sock:/docker.sock"]},
    "the host's root as a mount": {"Mounts": [{"Type": "bind", "Source": "/", "Target": "/host"}]},
    "the host's processes": {"PidMode": "host"},
    "the host's network": {"NetworkMode": "host"},
    "the host's shared memory": {"IpcMode": "host"},
    "the host's name": {"UTSMode": "host"},
    "the host's users": {"UsernsMode": "host"},
    "all capabilities": {"CapAdd": ["ALL"]},
    "capabilities kept": {"CapDrop": []},
    "a device": {"Devices": [{"PathOnHost": "/dev/kmsg", "PathInContainer": "/dev/kmsg", "CgroupPermissions": "rwm"}]},
    "no seccomp": {"SecurityOpt": ["no-new-privileges:true", "seccomp=unconfined"]},
    "new privileges": {"SecurityOpt": []},
    "a writable root": {"ReadonlyRootfs": False},
    "no limits": {"Memory": 0, "MemorySwap": 0, "NanoCpus": 0, "PidsLimit": 0},
    "a cgroup of one's choice": {"CgroupParent": "/docker"},
    "the sysctls": {"Sysctls": {"net.ipv4.ip_forward": "1"}},
    "a restart policy": {"RestartPolicy": {"Name": "always"}},
}


@pytest.mark.parametrize("attack", HOST_CONFIG_ATTACKS.values(), ids=HOST_CONFIG_ATTACKS.keys())
async def test_a_host_configuration_other_than_a_workers_is_refused(
    attacker: Attacker, docker_engine: docker.APIClient, rules: Rules, attack: dict[str, Any]
) -> None:
    body = attacker.body(new_id())
    body["HostConfig"] |= attack

    response = await attacker.create(body)

    assert response.status_code == 403
    assert next(iter(attack)) in response.json()["message"]
    assert nothing_there(docker_engine, rules)


BODY_ATTACKS = {
    "root": {"User": "0:0"},
    "the image's user": {"User": ""},
    "a foreign image": {"Image": "env-gateway/debian-python:trixie"},
    "an image by id": {"Image": "sha256:" + "0" * 64},
    "no labels": {"Labels": {}},
    "another instance": {"Labels": {"env-gateway.instance": "theirs"}},
    "a variable for the entry point": {"Env": ["LD_PRELOAD=/run/envserver/x.so"]},
    "a command": {"Cmd": ["sh", "-c", "id"]},
    "an entry point": {"Entrypoint": ["sh"]},
    "a second host configuration": {"hostconfig": {"Privileged": True}},
    "networks by the back door": {"NetworkingConfig": {"EndpointsConfig": {"bridge": {}}}},
}


@pytest.mark.parametrize("attack", BODY_ATTACKS.values(), ids=BODY_ATTACKS.keys())
async def test_a_body_other_than_a_workers_is_refused(
    attacker: Attacker, docker_engine: docker.APIClient, rules: Rules, attack: dict[str, Any]
) -> None:
    response = await attacker.create(attacker.body(new_id()) | attack)

    assert response.status_code == 403
    assert nothing_there(docker_engine, rules)


async def test_other_spellings_of_a_key_do_not_change_the_created_container(
    attacker: Attacker, docker_engine: docker.APIClient
) -> None:
    body = attacker.body(new_id())
    body["HostConfig"] |= {"capdrop": [], "SECURITYOPT": [], "readonlyrootfs": False, "memory": 0}

    response = await attacker.create(body)

    host = docker_engine.inspect_container(response.json()["Id"])["HostConfig"]
    assert (host["CapDrop"], host["ReadonlyRootfs"]) == (["ALL"], True)
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert host["Memory"] == 128 * 2**20


async def test_a_repeated_key_is_refused(attacker: Attacker, docker_engine: docker.APIClient, rules: Rules) -> None:
    text = json.dumps(attacker.body(new_id()))
    twice = text.replace('"NetworkMode": "none"', '"NetworkMode": "none", "NetworkMode": "host"')
    assert twice != text

    response = await attacker.create(twice.encode())

    assert (response.status_code, "occurs twice" in response.json()["message"]) == (400, True)
    assert nothing_there(docker_engine, rules)


@pytest.mark.parametrize("name", ["theirs-x", "", "../x", "x" * 300])
async def test_a_name_outside_the_instance_is_refused(
    attacker: Attacker, gate: httpx.AsyncClient, docker_engine: docker.APIClient, rules: Rules, name: str
) -> None:
    response = await gate.post("/containers/create", params={"name": name}, json=attacker.body(new_id()))

    assert response.status_code == 403
    assert nothing_there(docker_engine, rules)


async def test_a_huge_body_is_refused_before_it_is_read_completely(
    attacker: Attacker, docker_engine: docker.APIClient, rules: Rules
) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(2**10):
            sent += 2**16
            yield b" " * 2**16

    transport = httpx.AsyncHTTPTransport(uds=str(Path(rules.socket_root).parent / "gate.sock"), verify=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gate", timeout=HANG_S) as client:
        response = await client.post("/containers/create?name=xx", content=endless())

    assert response.status_code == 413
    assert sent < 2**26  # the size of the complete body
    assert nothing_there(docker_engine, rules)


async def test_concurrent_creates_do_not_exceed_the_allowed_number_of_containers(
    attacker: Attacker, docker_engine: docker.APIClient, rules: Rules
) -> None:
    responses = await asyncio.gather(*[attacker.create(attacker.body(new_id())) for _ in range(8)])

    statuses = sorted(response.status_code for response in responses)
    assert statuses.count(201) <= 3
    assert set(statuses) <= {201, 403}
    assert len(labelled(docker_engine, rules.instance)) == statuses.count(201)
    assert len(os.listdir(rules.socket_root)) == statuses.count(201)


async def test_the_allowed_number_of_containers_can_be_created_and_one_more_is_refused(
    attacker: Attacker, docker_engine: docker.APIClient, rules: Rules
) -> None:
    for _ in range(3):
        await attacker.created()

    response = await attacker.create(attacker.body(new_id()))

    assert response.json()["message"] == "there are 3 containers, and 3 are allowed"


FOREIGN_REQUESTS = [
    ("GET", "/containers/{id}/json"),
    ("GET", "/containers/{id}/logs?stdout=1"),
    ("GET", "/containers/{id}/stats?stream=0"),
    ("POST", "/containers/{id}/start"),
    ("POST", "/containers/{id}/stop?t=0"),
    ("POST", "/containers/{id}/kill?signal=SIGKILL"),
    ("POST", "/containers/{id}/pause"),
    ("POST", "/containers/{id}/unpause"),
    ("POST", "/containers/{id}/wait"),
    ("DELETE", "/containers/{id}?force=1&v=1"),
]


@pytest.mark.parametrize(("method", "target"), FOREIGN_REQUESTS)
async def test_a_third_party_container_gets_the_same_answer_as_an_unknown_one(
    gate: httpx.AsyncClient, docker_engine: docker.APIClient, foreign: str, method: str, target: str
) -> None:
    never_was = "f" * 64

    answers = [await gate.request(method, target.format(id=id)) for id in (foreign, foreign[:12], never_was)]

    assert [answer.status_code for answer in answers] == [404, 404, 404]
    messages = [answer.json() for answer in answers]
    assert messages == [{"message": f"No such container: {id}"} for id in (foreign, foreign[:12], never_was)]
    state = docker_engine.inspect_container(foreign)["State"]
    assert (state["Running"], state["Paused"]) == (True, False)


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("POST", "/containers/{id}/exec"),
        ("POST", "/containers/{id}/attach?stream=1&stdin=1"),
        ("GET", "/containers/{id}/archive?path=/"),
        ("GET", "/containers/{id}/export"),
        ("POST", "/containers/{id}/update"),
        ("POST", "/containers/{id}/rename?name=x"),
    ],
)
async def test_even_the_gateways_own_containers_cannot_be_entered(
    attacker: Attacker, gate: httpx.AsyncClient, method: str, target: str
) -> None:
    _, container = await attacker.created()

    response = await gate.request(method, target.format(id=container), json={"Cmd": ["id"], "AttachStdout": True})

    assert response.status_code == 403


async def test_a_host_configuration_in_the_body_of_a_start_is_refused(
    attacker: Attacker, gate: httpx.AsyncClient, docker_engine: docker.APIClient
) -> None:
    _, container = await attacker.created()

    response = await gate.post(f"/containers/{container}/start", json={"Privileged": True})

    assert response.status_code == 403
    assert docker_engine.inspect_container(container)["State"]["Status"] == "created"


async def test_a_container_that_ended_is_not_started_again(
    attacker: Attacker, gate: httpx.AsyncClient, docker_engine: docker.APIClient
) -> None:
    _, container = await attacker.created()
    assert (await gate.post(f"/containers/{container}/start")).status_code == 204
    await gate.post(f"/containers/{container}/kill", params={"signal": "SIGKILL"})
    await gate.post(f"/containers/{container}/wait")

    response = await gate.post(f"/containers/{container}/start")

    assert (response.status_code, "was started before" in response.json()["message"]) == (409, True)
    assert docker_engine.inspect_container(container)["State"]["Running"] is False


@asynccontextmanager
async def raw_connection(path: Path) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()


async def first_lines(path: Path, request: bytes) -> list[bytes]:
    """Send raw bytes. Return the status lines of all responses."""
    async with raw_connection(path) as (reader, writer):
        writer.write(request)
        writer.write_eof()
        async with asyncio.timeout(HANG_S):
            answered = await reader.read()
    return [line for line in answered.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]


@pytest.mark.parametrize(
    "target",
    [
        b"/containers/../images/json",
        b"/containers/%2e%2e/images/json",
        b"/containers/x%2F..%2F..%2Fimages%2Fjson/json",
        b"/v1.41/containers/../../images/json",
        b"//images/json",
        b"/containers/json/../../images/json",
        b"/./images/json",
        b"/images/json?x=/containers/json",
        b"/images/json#/containers/json",
        b"/containers/json\\..\\..\\images\\json",
        b"http://engine/images/json",
    ],
)
async def test_a_path_with_detours_is_refused(gate_socket: Path, target: bytes) -> None:
    (line,) = await first_lines(gate_socket, b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")

    assert line.split(b" ")[1] in (b"400", b"403")


async def test_a_second_request_cannot_be_smuggled_behind_a_first_one(gate_socket: Path, foreign: str) -> None:
    hidden = b"DELETE /containers/" + foreign.encode() + b"?force=1 HTTP/1.1\r\nHost: x\r\n\r\n"
    lengths = b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % len(hidden)

    lines = await first_lines(gate_socket, b"POST /_ping HTTP/1.1\r\nHost: x\r\n" + lengths + hidden)

    assert all(line.split(b" ")[1] in (b"400", b"403", b"404") for line in lines)


async def test_an_upgrade_is_not_a_way_to_the_engine(gate_socket: Path) -> None:
    request = b"POST /session HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 0\r\n\r\n"

    lines = await first_lines(gate_socket, request)

    assert [line.split(b" ")[1] for line in lines] == [b"403"]


async def test_the_list_shows_only_the_gateways_own_containers(
    attacker: Attacker, gate: httpx.AsyncClient, instance: str, foreign: str
) -> None:
    _, container = await attacker.created()
    theirs = json.dumps({"label": [f"env-gateway.instance={instance}-2"]})

    everything = (await gate.get("/containers/json", params={"all": "1"})).json()
    of_theirs = (await gate.get("/containers/json", params={"all": "1", "filters": theirs})).json()
    by_id = (await gate.get("/containers/json", params={"filters": json.dumps({"id": [foreign]})})).json()

    assert [entry["Id"] for entry in everything] == [container]
    assert of_theirs == []
    assert by_id == []


async def test_events_report_only_the_gateways_own_containers(
    attacker: Attacker, gate: httpx.AsyncClient, docker_engine: docker.APIClient, foreign: str
) -> None:
    _, container = await attacker.created()
    async with gate.stream("GET", "/events") as response:
        lines = response.aiter_lines()
        docker_engine.restart(foreign, timeout=0)
        await gate.post(f"/containers/{container}/start")

        async with asyncio.timeout(HANG_S):
            seen = [json.loads(await anext(lines))]

    assert [event["Actor"]["ID"] for event in seen] == [container]


async def test_the_gates_information_about_the_engine_names_no_third_party_object(gate: httpx.AsyncClient) -> None:
    info = (await gate.get("/info")).json()

    assert info["NCPU"] > 0
    assert not info.keys() & {"Containers", "Images", "Swarm", "RegistryConfig", "Labels", "Plugins", "DockerRootDir"}


async def test_only_images_of_the_catalog_can_be_inspected(gate: httpx.AsyncClient, environment: Environment) -> None:
    own = await gate.get(f"/images/{environment.image}/json")
    other = await gate.get("/images/env-gateway/debian-python:trixie/json")

    assert (own.status_code, other.status_code) == (200, 403)


async def test_the_gate_creates_a_workers_folder_and_removes_it_with_the_container(
    attacker: Attacker, gate: httpx.AsyncClient, rules: Rules
) -> None:
    id, container = await attacker.created()
    mode = os.stat(f"{rules.socket_root}/{id}").st_mode
    await gate.post(f"/containers/{container}/start")
    await healthy(f"unix:{rules.socket_root}/{id}/worker.sock")

    response = await gate.delete(f"/containers/{container}", params={"force": "1"})

    assert response.status_code == 204
    assert (stat.S_ISDIR(mode), mode & 0o777) == (True, 0o777)
    assert os.listdir(rules.socket_root) == []


async def test_a_link_in_place_of_a_workers_folder_is_not_mounted(
    attacker: Attacker, docker_engine: docker.APIClient, rules: Rules
) -> None:
    os.symlink("/etc", f"{rules.socket_root}/planted")

    response = await attacker.create(attacker.body(WorkerId("planted")))

    assert response.status_code == 403
    assert labelled(docker_engine, rules.instance) == []
    os.unlink(f"{rules.socket_root}/planted")


async def test_a_container_that_the_engine_refuses_leaves_no_folder(
    attacker: Attacker, docker_engine: docker.APIClient, rules: Rules
) -> None:
    name = container_name(rules.instance, "fake", new_id())
    await attacker.create(attacker.body(new_id()), name=name)

    response = await attacker.create(attacker.body(new_id()), name=name)

    assert response.status_code == 409
    assert len(os.listdir(rules.socket_root)) == 1


async def test_a_lost_engine_and_a_lost_container_are_different_errors(shared_dir: Path, rules: Rules) -> None:
    gate = Gate(engine=f"unix://{shared_dir}/missing.sock", rules=rules)
    async with serving_gate(gate, shared_dir / "gate.sock"):
        transport = httpx.AsyncHTTPTransport(uds=str(shared_dir / "gate.sock"), verify=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gate") as client:
            response = await client.get("/containers/abc/json")

    assert response.status_code == 503
    assert "does not answer" in response.json()["message"]


async def test_the_gates_socket_is_for_its_user_and_group_and_is_removed_at_the_end(
    shared_dir: Path, rules: Rules
) -> None:
    path = shared_dir / "gate.sock"
    async with serving_gate(Gate(engine=ENGINE_URL, rules=rules), path):
        mode = os.stat(path).st_mode

        with pytest.raises(ConfigError, match="another process already listens"):
            async with serving_gate(Gate(engine=ENGINE_URL, rules=rules), path):
                pass

    assert (stat.S_ISSOCK(mode), mode & 0o777) == (True, 0o660)
    assert os.listdir(shared_dir) == []


async def test_a_socket_that_a_killed_gate_left_behind_is_replaced(shared_dir: Path, rules: Rules) -> None:
    path = shared_dir / "gate.sock"
    server = await asyncio.start_unix_server(lambda reader, writer: None, path)
    server.close()
    assert os.listdir(shared_dir) == ["gate.sock"]

    async with serving_gate(Gate(engine=ENGINE_URL, rules=rules), path):
        transport = httpx.AsyncHTTPTransport(uds=str(path), verify=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gate") as client:
            response = await client.get("/_ping")

    assert response.text == "OK"


async def test_the_gates_limit_is_a_failed_start_for_the_gateways_backend(
    docker_engine: docker.APIClient, worker_image: str, shared_dir: Path, instance: str
) -> None:
    environment = fake_environment(worker_image)
    rules = Rules.of([environment], instance=instance, socket_root=str(shared_dir), max_containers=1)
    async with serving_gate(Gate(engine=ENGINE_URL, rules=rules), shared_dir / "gate.sock"):
        backend = DockerBackend(
            url=f"unix://{shared_dir}/gate.sock", instance=instance, paths=HostPaths(socket_dir=shared_dir)
        )
        first, second = worker_of(environment), worker_of(environment)
        await backend.start(first, environment)

        with pytest.raises(StartFailed, match="1 are allowed"):
            await backend.start(second, environment)

        assert [entry.id for entry in await backend.found()] == [first.id]
        await backend.stop(first.id)
        await backend.aclose()
    assert labelled(docker_engine, instance) == []


@pytest.fixture
def volume(docker_engine: docker.APIClient, worker_image: str, shared_dir: Path, instance: str) -> Iterator[str]:
    """A volume in use. The test sees it at ``shared_dir``, as a gateway in a container sees its mount."""
    name, labels = f"{instance}-sockets", {"env-gateway.instance": f"{instance}-2"}
    options = {"type": "none", "o": "bind", "device": str(shared_dir)}
    docker_engine.create_volume(name, driver_opts=options, labels=labels)
    holder = docker_engine.create_container(
        worker_image,
        command=["python3", "-c", "import signal; signal.pause()"],
        labels=labels,
        host_config=docker_engine.create_host_config(binds=[f"{name}:/sockets"], network_mode="none"),
    )
    docker_engine.start(holder["Id"])
    yield name
    docker_engine.remove_container(holder["Id"], force=True)
    docker_engine.remove_volume(name)


async def test_gateway_gate_and_engine_share_the_folders_of_a_volume(
    docker_engine: docker.APIClient, worker_image: str, shared_dir: Path, instance: str, volume: str
) -> None:
    environment = fake_environment(worker_image)
    root = await mountpoint(ENGINE_URL, volume)
    rules = Rules.of([environment], instance=instance, socket_root=root)
    async with serving_gate(Gate(engine=ENGINE_URL, rules=rules, socket_volume=volume), shared_dir / "gate.sock"):
        backend = DockerBackend(
            url=f"unix://{shared_dir}/gate.sock",
            instance=instance,
            paths=HostPaths(socket_dir=shared_dir, socket_volume=volume),
            environments=[environment],
        )
        await backend.check()
        worker = worker_of(environment)
        address = await backend.start(worker, environment)

        answered = await healthy(address)

        (entry,) = labelled(docker_engine, instance)
        await backend.stop(worker.id)
        await backend.aclose()
    assert answered == {"status": "ok"}
    assert [mount["Source"] for mount in entry["Mounts"]] == [f"{root}/{worker.id}"]


async def test_only_the_volume_with_the_sockets_can_be_inspected(gate: httpx.AsyncClient, volume: str) -> None:
    response = await gate.get(f"/volumes/{volume}")

    assert response.status_code == 403


async def test_without_its_volume_the_gate_explains_how_to_create_it(docker_engine: docker.APIClient) -> None:
    with pytest.raises(BackendError, match="docker volume create eg-no-such-volume"):
        await mountpoint(ENGINE_URL, "eg-no-such-volume")


async def test_the_command_serves_until_it_gets_a_signal(shared_dir: Path, environment: Environment) -> None:
    program = f"""
        import asyncio, pathlib
        from gateway.catalog.catalog import Catalog
        from gateway.core.environment import Environment
        from gateway.node.serve import run_node
        from gateway.settings import Settings
        folder = pathlib.Path({str(shared_dir)!r})
        catalog = Catalog([Environment(name="fake", image={environment.image!r}, directory=folder, command=("x",))])
        settings = Settings(node_socket=folder / "gate.sock", node_engine={ENGINE_URL!r}, socket_dir=folder / "sockets")
        asyncio.run(run_node(settings, catalog, makes_folders=True))
        print("ended in order")
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(program), stdout=asyncio.subprocess.PIPE
    )
    transport = httpx.AsyncHTTPTransport(uds=str(shared_dir / "gate.sock"), verify=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gate") as client:

        async def answered() -> bool:
            try:
                return (await client.get("/_ping")).text == "OK"
            except httpx.TransportError:
                return False

        await eventually(answered)
    process.terminate()
    said, _ = await process.communicate()

    assert (process.returncode, said) == (0, b"ended in order\n")
    assert os.listdir(shared_dir) == ["sockets"]


async def test_a_client_that_hangs_up_on_the_events_leaves_no_task_running(gate_socket: Path) -> None:
    async with raw_connection(gate_socket) as (reader, writer):
        writer.write(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(HANG_S):
            await reader.readuntil(b"\r\n\r\n")
        assert streams_passed_on() == 1

    async def ended() -> bool:
        return streams_passed_on() == 0

    await eventually(ended)


def streams_passed_on() -> int:
    return sum("_pump" in repr(task.get_coro()) for task in asyncio.all_tasks())
