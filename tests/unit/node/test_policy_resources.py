"""The engine gate's decisions about GPUs and about splits with their own limits, and its report of the machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.backends.docker.container import container_body, forwarder_body, server_body
from gateway.core.environment import ALL_GPUS, Environment, Limits, Server
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.worker import Worker
from gateway.node.policy import Rules, refusal, rewritten
from gateway.node.routes import shown_info

ROOT = "/var/lib/docker/volumes/sockets/_data"
PLAIN = Environment(
    name=EnvironmentName("math"),
    image="env-gateway/math",
    directory=Path("/nowhere"),
    command=("python3",),
    limits=Limits(memory_bytes=2**28, cpus=1.5),
)
HARD = replace(PLAIN, name=EnvironmentName("math.hard"), base=PLAIN.name, limits=Limits(memory_bytes=2**30, gpus=1))
MATH = replace(PLAIN, splits={"hard": HARD})
TWO = replace(PLAIN, name=EnvironmentName("two"), limits=Limits(gpus=2))
ALL = replace(PLAIN, name=EnvironmentName("all"), limits=Limits(gpus=ALL_GPUS))
CERTAIN = replace(PLAIN, name=EnvironmentName("certain"), limits=Limits(gpu_ids=("0", "GPU-aaaa")))
FOREIGN = replace(PLAIN, name=EnvironmentName("foreign"), server=Server(port=8000), limits=Limits(gpus=1))
RULES = Rules.of([MATH, TWO, ALL, CERTAIN, FOREIGN], instance="ours", socket_root=ROOT)


def worker_of(environment: Environment) -> Worker:
    return Worker(id=WorkerId("w1"), environment=environment.name, digest=environment.digest(), slots=4)


def body_of(environment: Environment) -> dict[str, Any]:
    if environment.server.is_foreign:
        return server_body(worker_of(environment), environment, instance="ours")
    return container_body(worker_of(environment), environment, instance="ours", source=f"{ROOT}/w1")


def asking(environment: Environment, requests: object) -> dict[str, Any]:
    body = body_of(environment)
    body["HostConfig"]["DeviceRequests"] = requests
    return body


@pytest.mark.parametrize("environment", [MATH, HARD, TWO, ALL, CERTAIN, FOREIGN], ids=lambda one: one.name)
def test_requests_of_the_backend_are_passed_on_completely(environment: Environment) -> None:
    body = body_of(environment)

    assert refusal(body, RULES) is None
    assert json.dumps(rewritten(body), sort_keys=True) == json.dumps(body, sort_keys=True)


def test_fewer_resources_than_the_environment_may_have_are_allowed() -> None:
    assert refusal(asking(TWO, []), RULES) is None


def request(**changes: object) -> dict[str, object]:
    return {"Driver": "", "Count": 2, "DeviceIDs": [], "Capabilities": [["gpu"]]} | changes


@pytest.mark.parametrize(
    "requests",
    [
        pytest.param([request(Count=3)], id="one more"),
        pytest.param([request(Count=1)], id="one less"),
        pytest.param([request(Count=-1)], id="all"),
        pytest.param([request(Count="2")], id="a text"),
        pytest.param([request(), request()], id="twice"),
        pytest.param([request(DeviceIDs=["0"])], id="certain GPUs"),
        pytest.param([request(Driver="cdi")], id="another driver"),
        pytest.param([request(Driver="cdi", DeviceIDs=["vendor.com/nic=0"])], id="another device"),
        pytest.param([request(Capabilities=[["gpu"], ["compute"]])], id="alternative capabilities"),
        pytest.param([request(Capabilities=[["gpu", "utility"]])], id="further capabilities"),
        pytest.param([request(Options={"visible": "all"})], id="options"),
        pytest.param([request(count=-1)], id="a second spelling"),
        pytest.param(request(), id="no list"),
    ],
)
def test_devices_other_than_the_environments_are_refused(requests: object) -> None:
    reason = refusal(asking(TWO, requests), RULES)

    assert reason is not None
    assert reason.startswith("HostConfig.DeviceRequests is not allowed for environment two")


@pytest.mark.parametrize("environment", [ALL, CERTAIN, MATH], ids=lambda one: one.name)
def test_an_environment_does_not_get_the_gpus_of_another(environment: Environment) -> None:
    reason = refusal(asking(environment, [request()]), RULES)

    assert reason is not None
    assert "DeviceRequests" in reason


def test_a_boolean_is_refused_as_a_count() -> None:
    assert refusal(asking(HARD, [request(Count=True)]), RULES) is not None


def test_a_split_has_its_own_limits_and_they_apply_to_no_other_environment() -> None:
    large = body_of(MATH)
    large["HostConfig"] |= {"Memory": HARD.limits.memory_bytes, "MemorySwap": HARD.limits.memory_bytes}
    unknown = body_of(replace(HARD, name=EnvironmentName("math.easy")))

    assert "HostConfig.Memory is not allowed for environment math:" in (refusal(large, RULES) or "")
    assert "no environment of the catalog" in (refusal(unknown, RULES) or "")


def test_a_forwarder_gets_no_gpu() -> None:
    body = forwarder_body(
        worker_of(FOREIGN), FOREIGN, instance="ours", source=f"{ROOT}/w1", beside="0" * 64, image=RULES.forwarder_image
    )
    assert refusal(body, RULES) is None

    body["HostConfig"]["DeviceRequests"] = [request(Count=1)]

    assert "DeviceRequests" in (refusal(body, RULES) or "")


def test_the_gate_reports_only_size_and_gpus_of_the_engines_machine() -> None:
    info = {
        "NCPU": 4,
        "MemTotal": 2**33,
        "Containers": 17,
        "RegistryConfig": {"Mirrors": ["https://mirror.internal"]},
        "Runtimes": {"runc": {"path": "runc"}, "nvidia": {"path": "/usr/bin/nvidia-container-runtime"}, "own": {}},
        "DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=0"}, {"Source": "cdi", "ID": "vendor.com/nic=0"}],
    }

    assert shown_info(info) == {
        "NCPU": 4,
        "MemTotal": 2**33,
        "Runtimes": {"nvidia": {}},
        "DiscoveredDevices": [{"ID": "nvidia.com/gpu=0"}],
    }


@pytest.mark.parametrize("info", [{}, {"Runtimes": None, "DiscoveredDevices": None}], ids=["nothing", "null"])
def test_an_engine_that_reports_no_gpus_is_shown_without_gpus(info: dict[str, Any]) -> None:
    assert shown_info(info) == {"Runtimes": {}, "DiscoveredDevices": []}
