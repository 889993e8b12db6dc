"""The engine gate's decisions about bodies, paths and filters, without an engine."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.backends.docker.container import container_body, own_entries, sandbox_profile
from gateway.core.environment import CustomTasks, Environment, Isolation, Limits, Relaxations
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.worker import Worker
from gateway.node.policy import BODY, HOST_CONFIG, Rules, mounts_custom_tasks, refusal, rewritten
from gateway.node.routes import GateRefusal, Malformed, RouteKind, find, own_containers, own_events, parse

ROOT = "/var/lib/docker/volumes/sockets/_data"
SOCKET = "/run/envserver/worker.sock"
PROFILE = json.dumps({"defaultAction": "SCMP_ACT_ERRNO"})
MATH = Environment(
    name=EnvironmentName("math"),
    image="env-gateway/math",
    directory=Path("/nowhere"),
    command=("python3",),
    limits=Limits(memory_bytes=2**28, cpus=1.5, pids=64, tmp_bytes=2**24),
)
FOREIGN = Environment(
    name=EnvironmentName("foreign"),
    image="registry.example/foreign:1",
    directory=Path("/nowhere"),
    command=("python3",),
    loosened=Relaxations(user="0:0", writable_root=True, network="bridge", capabilities=("SETUID", "SYS_ADMIN")),
)
GREEDY = Environment(
    name=EnvironmentName("greedy"),
    image="env-gateway/greedy",
    directory=Path("/nowhere"),
    command=("python3",),
    loosened=Relaxations(network="host"),
)
SANDBOXED = Environment(
    name=EnvironmentName("os"),
    image="env-gateway/os",
    directory=Path("/nowhere"),
    command=("python3",),
    isolation=Isolation.SANDBOX,
    limits=Limits(memory_bytes=2**30, cpus=1.5, pids=512, tmp_bytes=2**24),
)
RULES = Rules.of([MATH, FOREIGN, GREEDY, SANDBOXED], instance="ours", socket_root=ROOT + "/")


def body_of(environment: Environment) -> dict[str, Any]:
    worker = Worker(id=WorkerId("w1"), environment=environment.name, digest=environment.digest(), slots=4)
    return container_body(worker, environment, instance="ours", source=f"{ROOT}/w1")


def test_a_container_may_be_for_any_tenant_of_a_separate_environment_only() -> None:
    separate = replace(MATH, pool=replace(MATH.pool, is_separate=True))
    rules = replace(RULES, environments={**RULES.environments, "math": separate})
    body = body_of(separate.for_tenant("alice"))
    nameless = copy.deepcopy(body)
    nameless["Labels"]["env-gateway.environment"] = "math@"
    larger = copy.deepcopy(body)
    larger["HostConfig"]["Memory"] *= 2

    assert refusal(body, rules) is None
    assert refusal(body, RULES) == "Labels: env-gateway.environment names no environment of the catalog"
    assert refusal(nameless, rules) is not None
    assert "HostConfig.Memory" in str(refusal(larger, rules)), "the limits are those of the environment"


def changed(path: str, value: object, environment: Environment = MATH) -> dict[str, Any]:
    """Return the body of a valid container with one changed value; *path* has dots between keys."""
    body = body_of(environment)
    place: Any = body
    *parents, last = path.split(".")
    for key in parents:
        place = place[key]
    place[last] = value
    return body


def mount(**changes: object) -> list[dict[str, object]]:
    own: dict[str, object] = {"Type": "bind", "Source": f"{ROOT}/w1", "Target": "/run/envserver"}
    return [own | changes]


@pytest.mark.parametrize("environment", [MATH, FOREIGN, SANDBOXED], ids=["hardened", "loosened", "sandboxed"])
def test_bodies_of_the_backend_are_passed_on_completely(environment: Environment) -> None:
    body = body_of(environment)
    body["HostConfig"]["CapAdd"] = [name for name in body["HostConfig"]["CapAdd"] if name != "SYS_ADMIN"]

    assert refusal(body, RULES) is None
    assert rewritten(body) == body


def test_empty_values_of_unknown_keys_are_allowed_but_not_passed_on() -> None:
    body = body_of(MATH) | {"Hostname": "", "Tty": False, "Cmd": None, "ExposedPorts": {}}
    body["HostConfig"] |= {"Privileged": False, "Devices": [], "capdrop": [], "READONLYROOTFS": False}

    assert refusal(body, RULES) is None
    assert rewritten(body) == body_of(MATH)


OWN_PROFILE = ["no-new-privileges:true", f"seccomp={sandbox_profile()}"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        pytest.param("User", "0:0", id="root, which the entry point of sandboxes needs"),
        pytest.param("HostConfig.CapAdd", ["SETGID", "SETUID"], id="their capabilities"),
        pytest.param("HostConfig.SecurityOpt", OWN_PROFILE, id="their profile"),
        pytest.param("HostConfig.MaskedPaths", [], id="an unmasked /proc"),
        pytest.param("HostConfig.ReadonlyPaths", [], id="a writable /proc"),
        pytest.param(
            "HostConfig.Tmpfs", {"/work": "rw,nosuid,nodev,noexec,size=4096,mode=1777"}, id="a folder to mount in"
        ),
    ],
)
def test_permissions_for_sandboxes_are_allowed_only_for_environments_with_sandboxes(path: str, value: object) -> None:
    assert refusal(changed(path, value, SANDBOXED), RULES) is None

    assert refusal(changed(path, value, MATH), RULES) is not None
    if path not in ("User", "HostConfig.CapAdd"):  # the loosened environment has some of these, too
        assert refusal(changed(path, value, FOREIGN), RULES) is not None


@pytest.mark.parametrize(
    ("path", "value"),
    [
        pytest.param("User", "10001:10001", id="another user"),
        pytest.param("HostConfig.CapAdd", ["SETUID", "SETGID", "SYS_ADMIN"], id="one more capability"),
        pytest.param("HostConfig.CapAdd", ["DAC_OVERRIDE"], id="another capability"),
        pytest.param("HostConfig.SecurityOpt", OWN_PROFILE[1:], id="new privileges"),
        pytest.param("HostConfig.SecurityOpt", [OWN_PROFILE[0], "seccomp=unconfined"], id="no profile"),
        pytest.param("HostConfig.SecurityOpt", [OWN_PROFILE[0], OWN_PROFILE[1] + " "], id="another profile"),
        pytest.param("HostConfig.MaskedPaths", ["/proc/acpi"], id="a list of masked paths of its own"),
        pytest.param("HostConfig.Privileged", True, id="privileged"),
        pytest.param("HostConfig.ReadonlyRootfs", False, id="a writable root"),
        pytest.param("HostConfig.NetworkMode", "bridge", id="a network"),
        pytest.param("HostConfig.Tmpfs", {"/work": "rw,nosuid,nodev,noexec,size=1g"}, id="a large folder to mount in"),
        pytest.param("HostConfig.Tmpfs", {"/work": "rw,noexec,size=4096"}, id="set-id programs"),
        pytest.param("HostConfig.Tmpfs", {"/etc": "rw,nosuid,nodev,noexec,size=4096"}, id="another place"),
    ],
)
def test_an_environment_with_sandboxes_gets_no_further_permissions(path: str, value: object) -> None:
    assert refusal(changed(path, value, SANDBOXED), RULES) is not None


def test_a_fully_hardened_body_is_allowed_for_a_loosened_environment() -> None:
    body = body_of(FOREIGN)
    body["HostConfig"] |= {"ReadonlyRootfs": True, "CapAdd": []}

    assert refusal(body, RULES) is None


@pytest.mark.parametrize(
    ("path", "value"),
    [
        pytest.param("Image", "env-gateway/other", id="another image"),
        pytest.param("Image", "registry.example/foreign:1", id="another environment's image"),
        pytest.param("Image", "env-gateway/math@sha256:" + "0" * 64, id="the same name with another content"),
        pytest.param("Image", None, id="no image"),
        pytest.param("User", "0:0", id="root"),
        pytest.param("User", "", id="the image's own user"),
        pytest.param("User", "10001:0", id="root's group"),
        pytest.param("Env", None, id="no variables"),
        pytest.param("Env", ["PATH"], id="a variable of the engine's own"),
        pytest.param("Env", {"A": "b"}, id="variables that are not a list"),
        pytest.param("Labels", {}, id="no labels"),
        pytest.param("Labels", None, id="labels that are null"),
        pytest.param("Labels", ["env-gateway.instance=ours"], id="labels that are a list"),
        pytest.param("Cmd", ["sh"], id="a command of its own"),
        pytest.param("Entrypoint", ["sh"], id="an entry point of its own"),
        pytest.param("Volumes", {"/x": {}}, id="volumes"),
        pytest.param(
            "NetworkingConfig", {"EndpointsConfig": {"host": {}}}, id="another network through NetworkingConfig"
        ),
        pytest.param("HostConfig", None, id="no host configuration"),
        pytest.param("HostConfig", [], id="a host configuration that is a list"),
        pytest.param("hostconfig", {"Privileged": True}, id="a second key in lower case"),
        pytest.param("HostConfig.Privileged", True, id="privileged"),
        pytest.param("HostConfig.privileged", True, id="privileged in lower case"),
        pytest.param("HostConfig.Privileged", "no", id="privileged as text"),
        pytest.param("HostConfig.PidMode", "host", id="the host's processes"),
        pytest.param("HostConfig.PidMode", "container:other", id="another container's processes"),
        pytest.param("HostConfig.UTSMode", "host", id="the host's name"),
        pytest.param("HostConfig.UsernsMode", "host", id="the host's users"),
        pytest.param("HostConfig.CgroupnsMode", "host", id="the host's cgroups"),
        pytest.param("HostConfig.Cgroup", "container:other", id="another container's cgroup"),
        pytest.param("HostConfig.CgroupParent", "/", id="an arbitrary cgroup"),
        pytest.param("HostConfig.IpcMode", "host", id="the host's shared memory"),
        pytest.param("HostConfig.IpcMode", "shareable", id="shared memory for others"),
        pytest.param("HostConfig.IpcMode", "", id="the engine's default shared memory"),
        pytest.param("HostConfig.NetworkMode", "host", id="the host's network"),
        pytest.param("HostConfig.NetworkMode", "bridge", id="a network"),
        pytest.param("HostConfig.NetworkMode", "container:other", id="another container's network"),
        pytest.param("HostConfig.NetworkMode", "", id="the engine's default network"),
        pytest.param("HostConfig.NetworkMode", None, id="a missing network mode"),
        pytest.param("HostConfig.Devices", [{"PathOnHost": "/dev/sda"}], id="a device"),
        pytest.param("HostConfig.DeviceRequests", [{"Count": -1}], id="device requests"),
        pytest.param("HostConfig.DeviceCgroupRules", ["a *:* rwm"], id="device rules"),
        pytest.param("HostConfig.VolumesFrom", ["other"], id="another container's volumes"),
        pytest.param("HostConfig.VolumeDriver", "nfs", id="a volume driver"),
        pytest.param("HostConfig.Sysctls", {"kernel.core_pattern": "|/x"}, id="sysctls"),
        pytest.param("HostConfig.Links", ["db"], id="links"),
        pytest.param("HostConfig.PortBindings", {"80/tcp": [{"HostPort": "80"}]}, id="ports"),
        pytest.param("HostConfig.PublishAllPorts", True, id="all ports"),
        pytest.param("HostConfig.ExtraHosts", ["a:1.2.3.4"], id="host names"),
        pytest.param("HostConfig.Runtime", "other", id="another runtime"),
        pytest.param("HostConfig.OomKillDisable", True, id="no kill by the kernel"),
        pytest.param("HostConfig.OomScoreAdj", -1000, id="other processes are killed first"),
        pytest.param("HostConfig.CpusetCpus", "0", id="chosen processors"),
        pytest.param("HostConfig.GroupAdd", ["docker"], id="further groups"),
        pytest.param("HostConfig.MaskedPaths", ["/nothing"], id="other masked paths"),
        pytest.param("HostConfig.AutoRemove", True, id="removal that hides why it ended"),
        pytest.param("HostConfig.ReadonlyRootfs", False, id="a writable root"),
        pytest.param("HostConfig.ReadonlyRootfs", None, id="a missing root setting"),
        pytest.param("HostConfig.ReadonlyRootfs", "true", id="a read-only root as text"),
        pytest.param("HostConfig.CapDrop", [], id="capabilities kept"),
        pytest.param("HostConfig.CapDrop", None, id="a missing capability setting"),
        pytest.param("HostConfig.CapDrop", ["CHOWN"], id="only some capabilities dropped"),
        pytest.param("HostConfig.CapAdd", ["SYS_ADMIN"], id="a capability"),
        pytest.param("HostConfig.CapAdd", ["ALL"], id="all capabilities"),
        pytest.param("HostConfig.CapAdd", "SYS_ADMIN", id="a capability as text"),
        pytest.param("HostConfig.CapAdd", "", id="an empty text, which the engine takes for one capability"),
        pytest.param("HostConfig.SecurityOpt", [], id="new privileges"),
        pytest.param("HostConfig.SecurityOpt", None, id="a missing security option"),
        pytest.param("HostConfig.SecurityOpt", ["no-new-privileges:false"], id="new privileges allowed"),
        pytest.param(
            "HostConfig.SecurityOpt", ["no-new-privileges:true", "no-new-privileges:false"], id="the last one counts"
        ),
        pytest.param("HostConfig.SecurityOpt", ["no-new-privileges:true", "seccomp=unconfined"], id="no seccomp"),
        pytest.param("HostConfig.SecurityOpt", ["no-new-privileges:true", "seccomp:unconfined"], id="its old spelling"),
        pytest.param("HostConfig.SecurityOpt", ["no-new-privileges:true", "apparmor=unconfined"], id="no AppArmor"),
        pytest.param("HostConfig.SecurityOpt", ["no-new-privileges:true", "label=disable"], id="no SELinux"),
        pytest.param("HostConfig.SecurityOpt", ["no-new-privileges:true", f"seccomp={PROFILE}"], id="unknown profile"),
        pytest.param("HostConfig.Memory", 0, id="memory without limit"),
        pytest.param("HostConfig.Memory", None, id="a missing memory limit"),
        pytest.param("HostConfig.Memory", 2**28 + 1, id="more memory"),
        pytest.param("HostConfig.Memory", True, id="memory that is not a number"),
        pytest.param("HostConfig.Memory", 1e8, id="memory with a fraction"),
        pytest.param("HostConfig.MemorySwap", -1, id="swap without limit"),
        pytest.param("HostConfig.MemorySwap", 2**29, id="swap"),
        pytest.param("HostConfig.NanoCpus", 0, id="processors without limit"),
        pytest.param("HostConfig.NanoCpus", 2 * 10**9, id="more processors"),
        pytest.param("HostConfig.PidsLimit", -1, id="processes without limit"),
        pytest.param("HostConfig.PidsLimit", 65, id="more processes"),
        pytest.param("HostConfig.PidsLimit", None, id="a missing process limit"),
        pytest.param("HostConfig.ShmSize", 2**30, id="more shared memory"),
        pytest.param("HostConfig.Tmpfs", {"/tmp": ""}, id="a tmpfs without size"),
        pytest.param("HostConfig.Tmpfs", {"/tmp": "nosuid,nodev,noexec,size=99999999999"}, id="a larger tmpfs"),
        pytest.param("HostConfig.Tmpfs", {"/tmp": "nosuid,nodev,exec,size=1024"}, id="a tmpfs to run from"),
        pytest.param("HostConfig.Tmpfs", {"/tmp": "nodev,noexec,size=1024"}, id="a tmpfs with set-id programs"),
        pytest.param("HostConfig.Tmpfs", {"/tmp": "nosuid,nodev,noexec,size=1,size=99999999999"}, id="two sizes"),
        pytest.param("HostConfig.Tmpfs", {"/tmp": "nosuid,nodev,noexec,size=50%"}, id="a size relative to the machine"),
        pytest.param("HostConfig.Tmpfs", {"/etc": "nosuid,nodev,noexec,size=1024"}, id="a tmpfs elsewhere"),
        pytest.param("HostConfig.Ulimits", [{"Name": "memlock", "Soft": 1, "Hard": 1}], id="another ulimit"),
        pytest.param("HostConfig.Ulimits", [{"Name": "nofile", "Soft": 1, "Hard": 10**9}], id="more files"),
        pytest.param("HostConfig.Ulimits", [{"Name": "nofile", "Soft": -1, "Hard": -1}], id="files without limit"),
        pytest.param("HostConfig.LogConfig", None, id="a missing log configuration"),
        pytest.param("HostConfig.LogConfig", {"Type": "json-file", "Config": {}}, id="logs without limit"),
        pytest.param(
            "HostConfig.LogConfig",
            {"Type": "json-file", "Config": {"max-size": "9g", "max-file": "1"}},
            id="a larger log",
        ),
        pytest.param(
            "HostConfig.LogConfig",
            {"Type": "json-file", "Config": {"max-size": "1m", "max-file": "99"}},
            id="more log files",
        ),
        pytest.param(
            "HostConfig.LogConfig",
            {"Type": "syslog", "Config": {"max-size": "1m", "max-file": "1"}},
            id="logs to another machine",
        ),
        pytest.param(
            "HostConfig.LogConfig",
            {"Type": "json-file", "Config": {"max-size": "1m", "max-file": "1", "tag": "x"}},
            id="another log option",
        ),
        pytest.param("HostConfig.RestartPolicy", {"Name": "always"}, id="restarts"),
        pytest.param("HostConfig.RestartPolicy", {"Name": "no", "name": "always"}, id="restarts in lower case"),
        pytest.param("HostConfig.Binds", ["/:/host"], id="the host's root"),
        pytest.param("HostConfig.Binds", ["/var/run/docker.sock:/s"], id="the engine's socket"),
        pytest.param("HostConfig.Binds", ["/srv/data:/data"], id="a listed bind, writable"),
        pytest.param("HostConfig.Binds", [f"{ROOT}/w1:/run/envserver"], id="a bind in place of a mount"),
        pytest.param("HostConfig.Binds", [f"{ROOT}/../../..:/run/envserver"], id="a bind up the tree"),
        pytest.param("HostConfig.Binds", [f"{ROOT}//w1:/run/envserver:rw:ro"], id="colons"),
        pytest.param("HostConfig.Binds", {"/": "/host"}, id="binds that are not a list"),
        pytest.param("HostConfig.Mounts", mount(Source="/"), id="the host's root as a mount"),
        pytest.param("HostConfig.Mounts", mount(Source=ROOT), id="all workers' folders"),
        pytest.param("HostConfig.Mounts", mount(Source=f"{ROOT}/w2"), id="another worker's folder"),
        pytest.param("HostConfig.Mounts", mount(Source=f"{ROOT}/w1/.."), id="dots"),
        pytest.param("HostConfig.Mounts", mount(Source=f"{ROOT}//w1"), id="a double slash"),
        pytest.param(
            "HostConfig.Mounts", mount(Source=f"{ROOT}/w1/deeper"), id="a folder that the worker could create"
        ),
        pytest.param("HostConfig.Mounts", mount(Source="w1"), id="a relative source"),
        pytest.param("HostConfig.Mounts", mount(Target="/etc"), id="the folder elsewhere"),
        pytest.param("HostConfig.Mounts", mount(Type="volume"), id="a volume"),
        pytest.param("HostConfig.Mounts", mount(Type="npipe"), id="a pipe"),
        pytest.param("HostConfig.Mounts", mount(BindOptions={"Propagation": "rshared"}), id="mounts that leak out"),
        pytest.param("HostConfig.Mounts", mount(BindOptions={"Propagation": []}), id="a propagation that is a list"),
        pytest.param("HostConfig.Mounts", mount(BindOptions={"NonRecursive": True}), id="another bind option"),
        pytest.param("HostConfig.Mounts", mount(VolumeOptions={"DriverConfig": {}}), id="volume options"),
        pytest.param("HostConfig.Mounts", mount(source="/"), id="a second source in lower case"),
        pytest.param("HostConfig.Mounts", [*mount(), *mount(Source="/")], id="a second mount"),
        pytest.param("HostConfig.Mounts", ["/"], id="mounts that are not objects"),
    ],
)
def test_a_body_that_asks_for_more_is_refused_by_name(path: str, value: object) -> None:
    body = changed(path, value)

    reason = refusal(body, RULES)

    assert reason is not None
    assert path.split(".")[-1] in reason


COLOURED = replace(MATH, name=EnvironmentName("coloured"), variables={"COLOUR": "green", "KEY": "secret"})
WITH_COLOUR = Rules.of([COLOURED], instance="ours", socket_root=ROOT)


@pytest.mark.parametrize("slots", [1, 2, COLOURED.pool.slots])
def test_exactly_the_environments_variables_are_allowed_with_any_of_its_numbers_of_slots(slots: int) -> None:
    body = body_of(COLOURED)
    body["Env"] = own_entries(COLOURED, slots=slots)[::-1]

    assert "COLOUR=green" in body["Env"]
    assert refusal(body, WITH_COLOUR) is None
    assert rewritten(body) == body


@pytest.mark.parametrize(
    ("without", "entries"),
    [
        pytest.param("", ["LD_PRELOAD=/run/envserver/x.so"], id="a library for the entry point"),
        pytest.param("", ["PATH=/run/envserver:/usr/bin"], id="another search path"),
        pytest.param("", ["PYTHONWARNINGS=all:0:antigravity.x:0:0"], id="an import at the start"),
        pytest.param("", ["OPENENV_TASK_MODULE=os"], id="task modules that are not mounted"),
        pytest.param("", ["x"], id="a name without a value"),
        pytest.param("", [""], id="an empty entry"),
        pytest.param("", ["COLOUR=green"], id="the same entry twice"),
        pytest.param("", ["COLOUR=red"], id="a second value"),
        pytest.param("COLOUR=green", [], id="a missing variable"),
        pytest.param("COLOUR=green", ["COLOUR=red"], id="another value"),
        pytest.param("COLOUR=green", ["COLOUR=green "], id="a longer value"),
        pytest.param("COLOUR=green", ["colour=green"], id="another case"),
        pytest.param("ENVSERVER_SLOTS=4", ["ENVSERVER_SLOTS=17"], id="more slots"),
        pytest.param("ENVSERVER_SLOTS=4", ["ENVSERVER_SLOTS=0"], id="no slots"),
        pytest.param("ENVSERVER_SLOTS=4", ["ENVSERVER_SLOTS=04"], id="another spelling of the slots"),
        pytest.param("ENVSERVER_SLOTS=4", ["ENVSERVER_SLOTS=\u0664"], id="slots in another script"),
        pytest.param("ENVSERVER_SLOTS=4", ["ENVSERVER_SLOTS=4", "ENVSERVER_SLOTS=3"], id="slots twice"),
        pytest.param("ENVSERVER_SLOTS=4", [], id="no number of slots"),
        pytest.param("ENVSERVER_IDLE_S=0", ["ENVSERVER_IDLE_S=1"], id="another idle time"),
        pytest.param(f"ENVSERVER_SOCKET={SOCKET}", ["ENVSERVER_SOCKET=/tmp/x"], id="another socket"),
    ],
)
def test_variables_other_than_the_environments_are_refused(without: str, entries: list[str]) -> None:
    body = body_of(COLOURED)
    assert without == "" or without in body["Env"]
    body["Env"] = [entry for entry in body["Env"] if entry != without] + entries

    assert "Env" in (refusal(body, WITH_COLOUR) or "")


def test_a_refusal_names_the_variables_without_their_values() -> None:
    body = body_of(COLOURED)
    body["Env"] = [entry.replace("secret", "stolen") for entry in body["Env"]] + ["PATH=/x"]

    reason = refusal(body, WITH_COLOUR)

    assert reason == "Env must be exactly the variables of environment coloured: KEY, PATH differ"


@pytest.mark.parametrize(
    ("label", "value"),
    [
        pytest.param("env-gateway.instance", "theirs", id="another instance"),
        pytest.param("env-gateway.environment", "unknown", id="an environment that is not available"),
        pytest.param("env-gateway.environment", ["math"], id="an environment that is a list"),
        pytest.param("env-gateway.worker", "../w1", id="a worker up the tree"),
        pytest.param("env-gateway.worker", ".", id="a worker that is the root"),
        pytest.param("env-gateway.worker", "", id="no worker"),
        pytest.param("traefik.enable", "true", id="a label that another program reads"),
    ],
)
def test_labels_other_than_the_gateways_are_refused(label: str, value: object) -> None:
    body = body_of(MATH)
    body["Labels"][label] = value

    assert "Labels" in (refusal(body, RULES) or "")


def test_a_body_without_the_instances_label_is_refused() -> None:
    body = body_of(MATH)
    del body["Labels"]["env-gateway.instance"]

    assert refusal(body, RULES) == "Labels must have env-gateway.instance=ours"


def test_relaxations_of_one_environment_do_not_apply_to_another() -> None:
    body = body_of(FOREIGN)
    body["HostConfig"]["CapAdd"] = []
    body["Labels"]["env-gateway.environment"] = "math"
    body["Image"] = MATH.image

    assert "User" in (refusal(body, RULES) or "")


def test_a_capability_outside_the_gates_list_is_refused_even_if_the_environment_needs_it() -> None:
    assert "CapAdd" in (refusal(body_of(FOREIGN), RULES) or "")


def test_the_hosts_network_is_refused_even_if_the_environment_needs_it() -> None:
    assert "NetworkMode" in (refusal(body_of(GREEDY), RULES) or "")


def test_an_empty_list_of_binds_is_allowed_and_a_bind_is_refused() -> None:
    assert refusal(changed("HostConfig.Binds", []), RULES) is None
    assert "Binds" in (refusal(changed("HostConfig.Binds", ["/srv/data:/data:ro"]), RULES) or "")


@given(key=st.text(min_size=1, max_size=20), value=st.one_of(st.just(1), st.just("x"), st.just([0]), st.just({"": 0})))
def test_no_unknown_key_with_a_value_is_allowed(key: str, value: object) -> None:
    if key in BODY or key in HOST_CONFIG:
        return

    assert f"{key} is not allowed" in (refusal(body_of(MATH) | {key: value}, RULES) or "")
    host = changed("Image", MATH.image)
    host["HostConfig"][key] = value
    assert f"HostConfig.{key} is not allowed" in (refusal(host, RULES) or "")


TASKS = "/srv/custom_tasks"
TUNABLE = replace(MATH, name=EnvironmentName("tunable"), custom_tasks=CustomTasks(module="custom_tasks.a", folder="t"))
FILLED = replace(TUNABLE, custom_tasks=CustomTasks(module="custom_tasks.a", folder="t", content="some"))
"""The same environment as the gateway knows it: the gate does not read the content of the folder."""
OTHER = replace(MATH, name=EnvironmentName("other"), custom_tasks=CustomTasks(module="custom_tasks.b", folder="o"))
WITH_TASKS = Rules.of([MATH, TUNABLE, OTHER], instance="ours", socket_root=ROOT, custom_tasks_root=TASKS + "/")


def with_tasks(environment: Environment, **changes: object) -> dict[str, Any]:
    """Return the body of a container with task modules and with *changes* to their mount."""
    worker = Worker(id=WorkerId("w1"), environment=environment.name, digest=environment.digest(), slots=4)
    source = f"{TASKS}/{environment.custom_tasks.folder}" if environment.custom_tasks is not None else f"{TASKS}/t"
    body = container_body(worker, environment, instance="ours", source=f"{ROOT}/w1", custom_tasks_source=source)
    sockets, tasks = body["HostConfig"]["Mounts"]
    body["HostConfig"]["Mounts"] = [sockets, tasks | changes]
    return body


@pytest.mark.parametrize("mounted", [True, False])
def test_a_container_gets_the_name_of_task_modules_exactly_if_it_mounts_them(mounted: bool) -> None:
    body = with_tasks(FILLED) if mounted else body_of(TUNABLE)
    other = with_tasks(FILLED) if not mounted else body_of(TUNABLE)

    assert refusal(body, WITH_TASKS) is None
    assert ("OPENENV_TASK_MODULE=custom_tasks.a" in body["Env"]) is mounted
    assert "OPENENV_TASK_MODULE differs" in (refusal(body | {"Env": other["Env"]}, WITH_TASKS) or "")


def test_an_environments_task_modules_may_be_mounted_read_only() -> None:
    body = with_tasks(FILLED)

    assert refusal(body, WITH_TASKS) is None
    assert rewritten(body) == body
    assert mounts_custom_tasks(body)
    assert not mounts_custom_tasks(body_of(TUNABLE))
    assert body["HostConfig"]["Mounts"][1] == {
        "Type": "bind",
        "Source": "/srv/custom_tasks/t",
        "Target": "/opt/openenv/custom_tasks",
        "ReadOnly": True,
    }


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"ReadOnly": False}, id="writable"),
        pytest.param({"ReadOnly": None}, id="a missing read-only setting"),
        pytest.param({"ReadOnly": 1}, id="a number for read-only"),
        pytest.param({"ReadOnly": "true"}, id="a text for read-only"),
        pytest.param({"Target": "/opt/openenv"}, id="the folder above"),
        pytest.param({"Target": "/opt/openenv/custom_tasks/"}, id="a trailing slash"),
        pytest.param({"Target": "/opt/openenv/custom_tasks/.."}, id="dots in the target"),
        pytest.param({"Target": "/opt/openenv/custom_tasks/x"}, id="a folder below"),
        pytest.param({"Target": "/run/envserver"}, id="in place of the sockets"),
        pytest.param({"Target": "/srv/env"}, id="over the server"),
        pytest.param({"Source": TASKS}, id="all environments' modules"),
        pytest.param({"Source": f"{TASKS}/"}, id="all environments' modules with a trailing slash"),
        pytest.param({"Source": f"{TASKS}/o"}, id="another environment's modules"),
        pytest.param({"Source": f"{TASKS}/t/sub"}, id="a part of the modules"),
        pytest.param({"Source": f"{TASKS}/t/.."}, id="dots"),
        pytest.param({"Source": f"{TASKS}/../custom_tasks/t"}, id="dots that lead back"),
        pytest.param({"Source": f"{TASKS}//t"}, id="a double slash"),
        pytest.param({"Source": f"{TASKS}2/t"}, id="a neighbour of the folder"),
        pytest.param({"Source": "t"}, id="a relative source"),
        pytest.param({"Source": ""}, id="no source"),
        pytest.param({"Source": f"{ROOT}/w1"}, id="the sockets as modules"),
        pytest.param({"Source": f"{ROOT}/w2"}, id="another worker's sockets"),
        pytest.param({"Source": "/"}, id="the host's root"),
        pytest.param({"Type": "volume", "Source": "custom-tasks"}, id="the volume by name"),
        pytest.param({"Type": "volume", "Source": "another"}, id="another volume"),
        pytest.param({"VolumeOptions": {"Subpath": "t"}}, id="volume options"),
        pytest.param({"BindOptions": {"Propagation": "rshared"}}, id="mounts that leak out"),
        pytest.param({"BindOptions": {"ReadOnlyNonRecursive": True}}, id="only its top read-only"),
        pytest.param({"readonly": False}, id="a second key in lower case"),
    ],
)
def test_task_modules_may_not_be_mounted_in_any_other_way(changes: dict[str, object]) -> None:
    assert "HostConfig.Mounts" in str(refusal(with_tasks(FILLED, **changes), WITH_TASKS))


def test_an_environment_without_task_modules_may_not_mount_any() -> None:
    assert "HostConfig.Mounts" in str(refusal(with_tasks(MATH), WITH_TASKS))


def test_without_a_folder_of_task_modules_in_the_rules_none_may_be_mounted() -> None:
    rules = Rules.of([TUNABLE], instance="ours", socket_root=ROOT)

    assert "HostConfig.Mounts" in str(refusal(with_tasks(FILLED), rules))
    assert "HostConfig.Mounts" in str(refusal(with_tasks(FILLED, Source="/t"), rules))


def test_task_modules_do_not_loosen_the_sockets_mount() -> None:
    body = with_tasks(FILLED)
    body["HostConfig"]["Mounts"][0]["Source"] = f"{ROOT}/w2"

    assert "HostConfig.Mounts" in str(refusal(body, WITH_TASKS))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(path=st.sampled_from([*BODY, *(f"HostConfig.{key}" for key in HOST_CONFIG)]), value=JSON)
def test_a_body_of_any_shape_is_decided_without_error_and_a_rewritten_body_is_allowed_again(
    path: str, value: object
) -> None:
    body = changed(path, value)
    before = copy.deepcopy(body)

    if refusal(body, RULES) is None:
        passed_on = rewritten(body)
        assert refusal(passed_on, RULES) is None
        assert passed_on.keys() <= BODY.keys()
        assert passed_on["HostConfig"].keys() <= HOST_CONFIG.keys()
    assert body == before


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param(b"", "not JSON", id="nothing"),
        pytest.param(b"[]", "not a JSON object", id="a list"),
        pytest.param(b'{"a": 1}{"b": 2}', "not JSON", id="two objects"),
        pytest.param(b'{"a": 1, "a": 2}', "occurs twice", id="a key twice"),
        pytest.param(b'{"a": {"b": 1, "b": 1}}', "occurs twice", id="a key twice, deeper"),
        pytest.param(b'{"a": 1, "\\u0061": 2}', "occurs twice", id="a key twice, once escaped"),
        pytest.param(b'{"a": NaN}', "is not a number", id="no number"),
        pytest.param(b'{"a": -Infinity}', "is not a number", id="infinity"),
        pytest.param(b'{"a": "x\\u0000y"}', "control characters", id="NUL"),
        pytest.param(b'{"a\\u0000": "x"}', "control characters", id="NUL in a key"),
        pytest.param(b'{"a": ["x\\ny"]}', "control characters", id="a line break"),
        pytest.param(b'{"a": "\\ud800"}', "control characters", id="a lone surrogate"),
        pytest.param('{"a": 1}'.encode("utf-16"), "not JSON", id="UTF-16"),
        pytest.param(b'\xef\xbb\xbf{"a": 1}', "not JSON", id="a byte order mark"),
        pytest.param(b"[" * 100_000, "not JSON", id="deep lists"),
        pytest.param(b'{"a":' * 100_000, "not JSON", id="deep objects"),
    ],
)
def test_an_ambiguous_or_malformed_body_is_refused(body: bytes, reason: str) -> None:
    with pytest.raises(Malformed, match=reason):
        parse(body)


@pytest.mark.parametrize(
    ("method", "target", "kind"),
    [
        ("GET", "/_ping", RouteKind.PLAIN),
        ("HEAD", "/_ping", RouteKind.PLAIN),
        ("GET", "/v1.41/version", RouteKind.PLAIN),
        ("GET", "/v1.47/info", RouteKind.INFO),
        ("GET", "/v1.41/containers/json?all=1&limit=-1&size=0&trunc_cmd=0", RouteKind.LIST),
        ("POST", "/v1.41/containers/create?name=ours-math-w1", RouteKind.CREATE),
        ("GET", "/v1.41/containers/abc/json", RouteKind.INSPECT),
        ("GET", "/containers/abc/logs?tail=20&stdout=1&stderr=1&follow=0&timestamps=0", RouteKind.CONTAINER),
        ("POST", "/containers/abc/kill?signal=SIGTERM", RouteKind.CONTAINER),
        ("DELETE", "/containers/abc?v=True&force=True&link=False", RouteKind.REMOVE),
        ("GET", "/images/env-gateway/math/json", RouteKind.IMAGE),
        ("GET", "/images/registry.example:5000/a/b:1.2/json", RouteKind.IMAGE),
        ("GET", "/events?since=1700000000.000000001", RouteKind.EVENTS),
        ("GET", "/volumes/sockets", RouteKind.VOLUME),
    ],
)
def test_requests_in_the_table_are_allowed(method: str, target: str, kind: RouteKind) -> None:
    path, _, query = target.partition("?")

    assert find(method, path.encode(), query.encode()).kind is kind


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("POST", "/containers/abc/exec"),
        ("POST", "/exec/abc/start"),
        ("POST", "/containers/abc/attach"),
        ("GET", "/containers/abc/attach/ws"),
        ("GET", "/containers/abc/archive?path=/"),
        ("PUT", "/containers/abc/archive?path=/"),
        ("HEAD", "/containers/abc/archive"),
        ("GET", "/containers/abc/export"),
        ("GET", "/containers/abc/top"),
        ("GET", "/containers/abc/changes"),
        ("POST", "/containers/abc/update"),
        ("POST", "/containers/abc/rename?name=x"),
        ("POST", "/containers/abc/restart"),
        ("POST", "/containers/prune"),
        ("POST", "/commit?container=abc"),
        ("POST", "/build"),
        ("POST", "/images/create?fromImage=x"),
        ("GET", "/images/json"),
        ("DELETE", "/images/env-gateway/math"),
        ("POST", "/images/load"),
        ("GET", "/networks"),
        ("POST", "/networks/create"),
        ("POST", "/volumes/create"),
        ("GET", "/volumes"),
        ("DELETE", "/volumes/sockets"),
        ("POST", "/swarm/init"),
        ("POST", "/services/create"),
        ("GET", "/secrets"),
        ("POST", "/plugins/pull"),
        ("GET", "/system/df"),
        ("POST", "/auth"),
        ("POST", "/session"),
        ("POST", "/grpc"),
        ("GET", "/"),
        ("GET", ""),
        ("GET", "/containers/../images/json"),
        ("GET", "/containers/./json/json"),
        ("GET", "/containers/a/../../images/json"),
        ("GET", "/containers//json"),
        ("GET", "//containers/json"),
        ("GET", "/containers/a%2Fjson/json"),
        ("GET", "/containers/%2e%2e/json"),
        ("GET", "/containers/abc%00/json"),
        ("GET", "/v1.41/v1.41/containers/json"),
        ("GET", "/v2.0/containers/json"),
        ("GET", "/containers/abc/json/"),
        ("GET", "/CONTAINERS/json"),
        ("GET", "/containers/abc/json;x"),
        ("GET", "http://engine/containers/json"),
        ("get", "/containers/json"),
        ("OPTIONS", "/containers/json"),
        ("GET", "/containers/json?all=1&all=0"),
        ("GET", "/containers/json?size=1"),
        ("GET", "/containers/json?unknown=1"),
        ("GET", "/containers/abc/json?size=true"),
        ("POST", "/containers/abc/start?detachKeys=x"),
        ("POST", "/containers/create?name=../x"),
        ("POST", "/containers/create?platform=other"),
        ("POST", "/containers/abc/kill?signal=SIG%0aTERM"),
        ("DELETE", "/containers/abc?link=1"),
        ("GET", "/events?filters"),
    ],
)
def test_requests_that_are_not_in_the_table_are_refused(method: str, target: str) -> None:
    path, _, query = target.partition("?")

    with pytest.raises(GateRefusal):
        find(method, path.encode(), query.encode())


def test_an_old_api_version_is_refused_as_the_engine_does() -> None:
    with pytest.raises(GateRefusal, match=r"client version 1.24 is too old. Minimum supported API version is 1.41"):
        find("GET", b"/v1.24/containers/json", b"")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", {"label": ["env-gateway.instance=ours"]}),
        ('{"label": ["a=b"]}', {"label": ["a=b", "env-gateway.instance=ours"]}),
        ('{"label": {"a=b": true}}', {"label": ["a=b", "env-gateway.instance=ours"]}),
        (
            '{"label": ["env-gateway.instance=theirs"]}',
            {"label": ["env-gateway.instance=theirs", "env-gateway.instance=ours"]},
        ),
        ('{"status": ["exited"]}', {"status": ["exited"], "label": ["env-gateway.instance=ours"]}),
    ],
)
def test_filters_are_restricted_to_the_instances_label(given: str, expected: dict[str, list[str]]) -> None:
    assert own_containers(given, "ours") == expected


def test_events_are_restricted_to_containers() -> None:
    assert own_events('{"event": ["die"]}', "ours") == {
        "event": ["die"],
        "type": ["container"],
        "label": ["env-gateway.instance=ours"],
    }


@pytest.mark.parametrize(
    "given",
    [
        '{"ancestor": ["x"]}',
        '{"network": ["x"]}',
        '{"before": ["other"]}',
        '{"label": "x"}',
        '{"label": [1]}',
        '{"label": ["a"], "label": ["b"]}',
        '{"Label": ["a"]}',
        "[]",
        "{",
        '{"label": ["a\\u0000"]}',
        '{"label": ["\\ud800"]}',
    ],
)
def test_other_and_malformed_filters_are_refused(given: str) -> None:
    with pytest.raises(GateRefusal):
        own_containers(given, "ours")


def test_events_of_other_objects_are_refused() -> None:
    with pytest.raises(GateRefusal, match="container"):
        own_events('{"type": ["image"]}', "ours")
