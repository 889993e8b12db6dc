"""The engine gate's decisions about third-party images, their forwarders and volumes, without an engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.backends.docker.container import container_body, forwarder_body, server_body
from gateway.core.environment import Environment, Limits, Relaxations, Server, Volume
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.worker import Worker
from gateway.node.policy import Rules, refusal, rewritten, shared_with

ROOT = "/var/lib/docker/volumes/sockets/_data"
BESIDE = "0123456789abcdef" * 4
FORWARDER = "env-gateway/base:latest"
THEIRS = Environment(
    name=EnvironmentName("theirs"),
    image="registry.example/theirs:1",
    directory=Path("/nowhere"),
    command=(),
    server=Server(port=8000),
    limits=Limits(memory_bytes=2**28, cpus=1.5, pids=64, tmp_bytes=2**24),
    volumes=(Volume(source="/srv/models", target="/models"), Volume(source="data", target="/data", read_only=False)),
)
ROOTED = replace(
    THEIRS, name=EnvironmentName("rooted"), loosened=Relaxations(user="0:0", writable_root=True), volumes=()
)
STATIC = replace(THEIRS, name=EnvironmentName("far"), server=Server(url="http://far.example"), volumes=())
OWN = replace(THEIRS, name=EnvironmentName("own"), image="env-gateway/own", server=Server(), command=("python3",))
RULES = Rules.of([THEIRS, ROOTED, STATIC, OWN], instance="ours", socket_root=ROOT)


def worker_of(environment: Environment) -> Worker:
    return Worker(id=WorkerId("w1"), environment=environment.name, digest=environment.digest(), slots=4)


def server(environment: Environment = THEIRS) -> dict[str, Any]:
    return server_body(worker_of(environment), environment, instance="ours")


def forwarder(environment: Environment = THEIRS) -> dict[str, Any]:
    return forwarder_body(
        worker_of(environment), environment, instance="ours", source=f"{ROOT}/w1", beside=BESIDE, image=FORWARDER
    )


def own() -> dict[str, Any]:
    return container_body(worker_of(OWN), OWN, instance="ours", source=f"{ROOT}/w1")


def changed(body: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """Return *body* with one changed value; *path* has slashes between keys."""
    place: Any = body
    *parents, last = path.split("/")
    for key in parents:
        place = place[key]
    place[last] = value
    return body


@pytest.mark.parametrize(
    "body",
    [server(), server(ROOTED), forwarder(), forwarder(ROOTED), own()],
    ids=["server", "loosened", "forwarder", "forwarder of a loosened one", "our own with volumes"],
)
def test_bodies_of_the_backend_are_passed_on_completely(body: dict[str, Any]) -> None:
    assert refusal(body, RULES) is None
    assert rewritten(body) == body


def test_only_a_forwarder_shares_a_network_and_its_body_names_the_other_container() -> None:
    assert shared_with(forwarder()) == BESIDE
    assert shared_with(server()) == ""
    assert shared_with(own()) == ""


@pytest.mark.parametrize(
    ("path", "value"),
    [
        pytest.param("HostConfig/NetworkMode", f"container:{BESIDE}", id="another container's network"),
        pytest.param("HostConfig/NetworkMode", "bridge", id="a network"),
        pytest.param("HostConfig/NetworkMode", "host", id="the host's network"),
        pytest.param("Env", None, id="no variables"),
        pytest.param("Env", ["HOME=/tmp", "PYTHONDONTWRITEBYTECODE=1", "LD_PRELOAD=/x"], id="a library"),
        pytest.param("Env", ["HOME=/run/x", "PYTHONDONTWRITEBYTECODE=1"], id="another home"),
        pytest.param("Env", ["HOME=/tmp", "HOME=/tmp", "PYTHONDONTWRITEBYTECODE=1"], id="a variable twice"),
        pytest.param("HostConfig/PidMode", f"container:{BESIDE}", id="another container's processes"),
        pytest.param("HostConfig/IpcMode", f"container:{BESIDE}", id="another container's memory"),
        pytest.param("HostConfig/VolumesFrom", [BESIDE], id="another container's volumes"),
        pytest.param("Cmd", ["sh"], id="a command"),
        pytest.param("Entrypoint", ["sh"], id="an entry point"),
        pytest.param("Image", FORWARDER, id="the forwarder's image"),
        pytest.param("Healthcheck", {"Test": ["CMD", "sh"]}, id="a health check"),
        pytest.param("User", "0:0", id="root"),
        pytest.param("HostConfig/ReadonlyRootfs", False, id="a writable root"),
    ],
)
def test_a_server_that_asks_for_more_is_refused_by_name(path: str, value: object) -> None:
    assert path.split("/")[-1] in (refusal(changed(server(), path, value), RULES) or "")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        pytest.param("HostConfig/NetworkMode", "none", id="no network"),
        pytest.param("HostConfig/NetworkMode", "host", id="the host's network"),
        pytest.param("HostConfig/NetworkMode", "bridge", id="a network"),
        pytest.param("HostConfig/NetworkMode", None, id="a missing network mode"),
        pytest.param("HostConfig/NetworkMode", [f"container:{BESIDE}"], id="a list"),
        pytest.param("HostConfig/NetworkMode", "container:", id="no container's network"),
        pytest.param("HostConfig/NetworkMode", "container:redis", id="a container by name"),
        pytest.param("HostConfig/NetworkMode", f"container:{BESIDE[:12]}", id="a part of an id"),
        pytest.param("HostConfig/NetworkMode", f"container:{BESIDE}\n", id="a trailing line break"),
        pytest.param("HostConfig/NetworkMode", f"container:{BESIDE.upper()}", id="capital letters"),
        pytest.param("HostConfig/NetworkMode", f"Container:{BESIDE}", id="another spelling"),
        pytest.param("HostConfig/PidMode", f"container:{BESIDE}", id="processes too"),
        pytest.param("HostConfig/IpcMode", f"container:{BESIDE}", id="shared memory too"),
        pytest.param("HostConfig/UTSMode", "host", id="the host's name"),
        pytest.param("Image", THEIRS.image, id="the server's image"),
        pytest.param("Image", "env-gateway/own", id="another image"),
        pytest.param("User", "0:0", id="root"),
        pytest.param("Entrypoint", ["sh"], id="another program"),
        pytest.param("Entrypoint", None, id="the image's own"),
        pytest.param("Cmd", ["-c", "import os"], id="another command"),
        pytest.param("Cmd", None, id="the image's own command"),
        pytest.param("Env", ["PYTHONPATH=/run/envserver"], id="variables"),
        pytest.param("Healthcheck", {"Test": ["CMD", "sh"]}, id="a health check"),
        pytest.param("HostConfig/CapAdd", ["NET_RAW"], id="a capability"),
        pytest.param("HostConfig/ReadonlyRootfs", False, id="a writable root"),
        pytest.param("HostConfig/Memory", 2**28 + 1, id="more memory"),
        pytest.param("HostConfig/PidsLimit", 9, id="more processes"),
        pytest.param("HostConfig/NanoCpus", 1_500_000_000, id="more processors"),
        pytest.param("HostConfig/Mounts", [{"Type": "bind", "Source": "/", "Target": "/host"}], id="the host's root"),
        pytest.param(
            "HostConfig/Mounts",
            [{"Type": "bind", "Source": "/srv/models", "Target": "/models", "ReadOnly": True}],
            id="the server's volume",
        ),
        pytest.param(
            "HostConfig/Mounts",
            [{"Type": "bind", "Source": f"{ROOT}/w2", "Target": "/run/envserver"}],
            id="another worker's folder",
        ),
    ],
)
def test_a_forwarder_that_asks_for_anything_else_is_refused_by_name(path: str, value: object) -> None:
    assert path.split("/")[-1] in (refusal(changed(forwarder(), path, value), RULES) or "")


def test_relaxations_of_an_environment_do_not_apply_to_its_forwarder() -> None:
    for path, value in (("User", "0:0"), ("HostConfig/ReadonlyRootfs", False)):
        assert refusal(changed(server(ROOTED), path, value), RULES) is None
        assert refusal(changed(forwarder(ROOTED), path, value), RULES) is not None


def test_a_server_may_not_mount_a_socket_folder() -> None:
    mounts = [{"Type": "bind", "Source": f"{ROOT}/w1", "Target": "/run/envserver", "ReadOnly": False}]

    assert "Mounts" in (refusal(changed(server(), "HostConfig/Mounts", mounts), RULES) or "")


@pytest.mark.parametrize("role", [None, "", "worker", "SERVER", ["server"], {"server": 1}])
def test_a_container_of_a_third_party_image_must_have_one_of_two_roles(role: object) -> None:
    assert "env-gateway.role" in (refusal(changed(server(), "Labels/env-gateway.role", role), RULES) or "")


@pytest.mark.parametrize("role", ["server", "forwarder", "", "worker"])
def test_a_container_of_an_own_image_must_have_no_role(role: str) -> None:
    assert "env-gateway.role" in (refusal(changed(own(), "Labels/env-gateway.role", role), RULES) or "")


@pytest.mark.parametrize("role", ["server", "forwarder", None])
def test_containers_for_a_static_server_are_refused(role: str | None) -> None:
    assert "env-gateway.role" in (refusal(changed(server(STATIC), "Labels/env-gateway.role", role), RULES) or "")


MODELS = {"Type": "bind", "Source": "/srv/models", "Target": "/models", "ReadOnly": True}
DATA = {"Type": "volume", "Source": "data", "Target": "/data", "ReadOnly": False}


@pytest.mark.parametrize(
    "mount",
    [
        pytest.param(MODELS, id="a read-only folder"),
        pytest.param(DATA, id="a writable volume"),
        pytest.param(DATA | {"ReadOnly": True}, id="less than is allowed"),
        pytest.param({key: DATA[key] for key in ("Type", "Source", "Target")}, id="a missing read-only setting"),
    ],
)
def test_the_catalogs_volumes_may_be_mounted(mount: dict[str, Any]) -> None:
    assert refusal(changed(server(), "HostConfig/Mounts", [mount]), RULES) is None


@pytest.mark.parametrize(
    "mount",
    [
        pytest.param(MODELS | {"ReadOnly": False}, id="writable"),
        pytest.param({key: MODELS[key] for key in ("Type", "Source", "Target")}, id="a missing read-only setting"),
        pytest.param(MODELS | {"ReadOnly": 1}, id="a number for read-only"),
        pytest.param(DATA | {"ReadOnly": 0}, id="a number for writable"),
        pytest.param(MODELS | {"Target": "/etc"}, id="elsewhere"),
        pytest.param(MODELS | {"Source": "/srv"}, id="the folder above"),
        pytest.param(MODELS | {"Source": "/srv/models/../.."}, id="dots"),
        pytest.param(MODELS | {"Type": "volume"}, id="a path as a volume"),
        pytest.param(DATA | {"Type": "bind"}, id="a volume as a path"),
        pytest.param(DATA | {"Source": "sockets"}, id="another volume"),
        pytest.param(DATA | {"VolumeOptions": {"DriverConfig": {"Name": "local"}}}, id="volume options"),
        pytest.param(MODELS | {"BindOptions": {"Propagation": "rshared"}}, id="mounts that leak out"),
        pytest.param(MODELS | {"readonly": False}, id="a second key in lower case"),
    ],
)
def test_volumes_may_not_be_mounted_in_any_other_way(mount: dict[str, Any]) -> None:
    assert "HostConfig.Mounts" in (refusal(changed(server(), "HostConfig/Mounts", [mount]), RULES) or "")


def test_an_environment_without_volumes_may_not_mount_those_of_another() -> None:
    assert "HostConfig.Mounts" in (refusal(changed(server(ROOTED), "HostConfig/Mounts", [MODELS]), RULES) or "")


def test_the_gate_knows_only_the_images_and_volumes_of_the_catalog() -> None:
    assert RULES.images == {THEIRS.image, OWN.image, FORWARDER}
    assert RULES.volumes == {"data"}
    assert Rules.of([OWN, STATIC], instance="ours", socket_root=ROOT).images == {OWN.image}


def test_the_forwarders_image_must_be_the_image_in_the_rules() -> None:
    rules = replace(RULES, forwarder_image="mirror.example/base:2")

    assert "Image" in (refusal(forwarder(), rules) or "")
    assert refusal(changed(forwarder(), "Image", "mirror.example/base:2"), rules) is None
