"""`scripts/swarm-lab`: engines that form one Swarm, machines that die and come back, and nothing left afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import pytest

from tests.deadlines import COMMAND_S, HANG_S
from tests.docker.swarm_lab import NODES, Lab, expect_namespaces, filter_rules, left_of, own_lab, read, sees
from tests.fakes.eventually import eventually_now

pytestmark = [pytest.mark.docker, pytest.mark.cluster]
pytest_plugins = ["tests.contract.backend_fixtures"]

IMAGE = "env-gateway/base:latest"

LISTEN = """
import http.server
http.server.ThreadingHTTPServer(("", 8000), http.server.SimpleHTTPRequestHandler).serve_forever()
"""
REACH = """
import socket, sys, time
deadline = time.monotonic() + float(sys.argv[2])
while True:
    try:
        with socket.create_connection((sys.argv[1], 8000), 3) as there:
            there.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
            print(there.recv(12).decode())
        break
    except OSError:
        if time.monotonic() > deadline:
            raise
        time.sleep(0.1)
"""
RESOLVE = """
import json, socket, sys, time
deadline, found = time.monotonic() + float(sys.argv[3]), []
while len(found) < int(sys.argv[2]) and time.monotonic() < deadline:
    try:
        found = sorted({entry[4][0] for entry in socket.getaddrinfo(sys.argv[1], 1, socket.AF_INET)})
    except OSError:
        pass
    time.sleep(0.1)
print(json.dumps(found))
"""
TRY = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 3).close()
    print("reached")
except OSError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture(scope="module")
def lab(docker_engine: docker.APIClient) -> Iterator[Lab]:
    expect_namespaces()
    with own_lab() as lab:
        lab.run("up")
        lab.run("load", IMAGE)
        yield lab


def listening(lab: Lab, node: str, name: str) -> str:
    """Start a server in the lab's network on a machine. Return its container."""

    def start() -> str:
        container: str = engine.create_container(
            IMAGE,
            name=name,
            entrypoint=["python3"],
            command=["-c", LISTEN],
            host_config=engine.create_host_config(network_mode="lab"),
        )["Id"]
        try:
            engine.start(container)
        except docker.errors.APIError as error:
            # On a machine that has just come back, the overlay network follows the engine: 404 until the engine knows
            # it, 500 ("could not attach") while the managers still elect a leader. The engine also drops the network
            # while it removes the last task in it. A container whose start failed keeps its address and requests it for
            # ever ("Address already in use"), so each try has its own container.
            engine.remove_container(container, force=True)
            logs = "\n".join(map(lab.log, NODES))
            raise AssertionError(f"{error.explanation}\n{logs}") from None
        return container

    with lab.engine(node) as engine:
        return eventually_now(start)


def remove(lab: Lab, node: str, container: str) -> None:
    with lab.engine(node) as engine:
        engine.remove_container(container, force=True)


def await_state(lab: Lab, node: str, state: str, *, asked: str) -> None:
    def check() -> None:
        members = lab.members(asked)
        assert members.get(node) == state, members

    eventually_now(check)


def await_leader(lab: Lab, wanted: set[str], *, asked: str) -> None:
    def check() -> None:
        leaders = lab.leaders(asked)
        assert leaders <= wanted, leaders
        assert leaders

    eventually_now(check)


def test_three_engines_are_separate_and_form_one_swarm(lab: Lab) -> None:
    infos = {}
    for node in NODES:
        with lab.engine(node) as engine:
            infos[node] = engine.info()

    assert [infos[node]["Name"] for node in NODES] == list(NODES)
    assert len({info["ID"] for info in infos.values()}) == 3
    assert len({info["DockerRootDir"] for info in infos.values()}) == 3
    assert {info["Swarm"]["Cluster"]["ID"] for info in infos.values()} == {infos["node1"]["Swarm"]["Cluster"]["ID"]}
    assert lab.members() == dict.fromkeys(NODES, "ready")


def test_up_again_changes_nothing(lab: Lab) -> None:
    def boots() -> list[str]:
        return [lab.run("exec", node, "stat", "--format=%Y", "/proc/1").strip() for node in NODES]

    before = boots()

    lab.run("up")

    assert boots() == before


def test_a_container_reaches_another_machines_container_by_name(lab: Lab) -> None:
    there = listening(lab, "node3", "there")
    try:
        with lab.engine("node1") as engine:
            answer = sees(engine, IMAGE, network="lab", program=REACH, arguments=["there", HANG_S])
    finally:
        remove(lab, "node3", there)

    assert answer == "HTTP/1.0 200"


def test_a_service_has_a_task_on_each_machine_and_its_name_reaches_all(lab: Lab) -> None:
    create = [
        "service",
        "create",
        "--detach",
        "--name=everywhere",
        "--mode=global",
        "--network=lab",
        "--no-resolve-image",
    ]
    lab.on("node1", *create, "--endpoint-mode=dnsrr", "--entrypoint=python3", IMAGE, "-c", LISTEN)
    try:
        with lab.engine("node2") as engine:
            found = json.loads(
                sees(engine, IMAGE, network="lab", program=RESOLVE, arguments=["tasks.everywhere", len(NODES), HANG_S])
            )
            answers = {
                sees(engine, IMAGE, network="lab", program=REACH, arguments=[address, HANG_S]) for address in found
            }
    finally:
        lab.on("node1", "service", "rm", "everywhere")

    assert len(found) == len(NODES)
    assert answers == {"HTTP/1.0 200"}


def test_containers_have_no_new_privileges_by_default_of_the_engine(lab: Lab) -> None:
    with lab.engine("node1") as engine:
        status = sees(engine, IMAGE, network="none", program="print(open('/proc/self/status').read())", arguments=[])

    assert "NoNewPrivs:\t1" in status


def test_a_killed_machine_is_silent_and_a_restarted_one_has_its_disk_again(lab: Lab) -> None:
    there = listening(lab, "node3", "doomed")
    engine_address = lab.address("node3")
    with lab.engine("node1") as engine:
        before = sees(engine, IMAGE, network="lab", program=REACH, arguments=["doomed", HANG_S])
        with lab.engine("node3") as other:
            address = other.inspect_container(there)["NetworkSettings"]["Networks"]["lab"]["IPAddress"]
        identity = lab.on("node3", "info", "--format={{.ID}}")

        lab.run("kill", "node3")
        try:
            container_after = sees(engine, IMAGE, network="lab", program=TRY, arguments=[address, 8000])
            await_state(lab, "node3", "down", asked="node1")
            silent = lab.run("exec", "node1", "python3", "-c", TRY, engine_address, "2377")
            left = [found for found in left_of(lab) if "node3" in found]
            assert lab.attempt("exec", "node3", "true").returncode != 0
        finally:
            lab.run("start", "node3")
    await_state(lab, "node3", "ready", asked="node3")

    assert before == "HTTP/1.0 200"
    for said in (container_after, silent):
        assert "reached" not in said
        assert "Refused" not in said, "somebody answered in its place"
    assert left == []
    assert lab.on("node3", "info", "--format={{.ID}}") == identity
    assert lab.on("node3", "inspect", "--format={{.State.Running}} {{.State.ExitCode}}", there) == "false 255"
    remove(lab, "node3", there)
    again = listening(lab, "node3", "again")
    try:
        with lab.engine("node1") as engine:
            assert sees(engine, IMAGE, network="lab", program=REACH, arguments=["again", HANG_S]) == "HTTP/1.0 200"
    finally:
        remove(lab, "node3", again)


def test_the_swarm_survives_the_loss_of_its_first_manager(lab: Lab) -> None:
    lab.run("kill", "node1")
    try:
        await_leader(lab, {"node2", "node3"}, asked="node2")
    finally:
        lab.run("start", "node1")

    await_leader(lab, {"node2", "node3"}, asked="node1")


def test_an_unknown_machine_is_refused_with_the_known_names(lab: Lab) -> None:
    for command in (["kill", "node9"], ["start", ""], ["exec", "node0", "true"]):
        refused = lab.attempt(*command)

        assert refused.returncode == 1
        assert "there are node1 node2 node3" in refused.stderr


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({"SWARM_LAB_DIR": "/"}, id="a folder that must not be removed"),
        pytest.param({"SWARM_LAB_DIR": "relative/path"}, id="a relative folder"),
        pytest.param({"SWARM_LAB_NAME": "far-too-long"}, id="a name too long for a link"),
        pytest.param({"SWARM_LAB_NODES": "0"}, id="no machine"),
    ],
)
def test_invalid_settings_of_a_lab_are_refused(variables: dict[str, str]) -> None:
    refused = Lab("swtest", "198.18.79").attempt("down", environ=variables)

    assert refused.returncode == 1
    assert next(iter(variables)) in refused.stderr


def delete_namespace(lab: Lab) -> None:
    """Delete the namespace's name. Its processes live on, and the name cannot find them any more."""
    subprocess.run(["ip", "netns", "delete", f"{lab.name}-node1"], check=True, timeout=COMMAND_S)


def kill_engine(lab: Lab) -> None:
    """Kill the engine. Its containers live on."""
    option = f"--data-root={lab.directory}/node1/data"
    for process in Path("/proc").glob("[0-9]*"):
        if option in read(process / "cmdline").split():
            os.kill(int(process.name), signal.SIGKILL)


@pytest.mark.parametrize("damage", [delete_namespace, kill_engine])
def test_down_removes_everything_of_a_half_broken_lab(
    docker_engine: docker.APIClient, damage: Callable[[Lab], None]
) -> None:
    with own_lab(nodes=1) as lab:
        rules, engine_id = filter_rules(lab), docker_engine.info()["ID"]
        lab.run("up")
        lab.run("load", IMAGE)
        listening(lab, "node1", "left")
        while_up = left_of(lab)
        damage(lab)

        lab.run("down")

        assert {found.split()[0] for found in while_up} >= {"namespace", "link", "cgroup", "process", "folder"}
        eventually_now(lambda: _nothing(left_of(lab)))
        assert filter_rules(lab) == rules
        assert (docker_engine.info()["ID"], docker_engine.info()["Swarm"]["LocalNodeState"]) == (engine_id, "inactive")
        assert lab.run("down").strip() == "down"  # a second call is not an error


def _nothing(found: list[str]) -> None:
    assert found == []
