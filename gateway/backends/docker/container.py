"""What a worker's container is made of: the body of the engine's create request. Pure; the engine gate checks the same.

Everything is said explicitly, also where it is the engine's default: an operator may have changed the default
(``daemon.json``), and the gate refuses what is not said.

The seccomp profile of workers that open sandboxes.

The engine's default refuses namespaces and mounts to whoever is not root with CAP_SYS_ADMIN. This one is an allow-list
too, shorter than the default but for what a sandbox is made with; agents get a stricter filter of their own inside.

A worker of a third-party image has two containers. The image's own server listens on a TCP port and has no part of
ours: its only network is its loopback, and nothing of ours is mounted in it. A **forwarder** beside it shares its
network namespace, and nothing else. The forwarder offers that port as a Unix socket in the worker's socket folder, so
the gateway reaches it as it reaches all other workers. Both containers have the worker's id as a label, and each has
its role as another.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any, Final

from gateway.backends.folders import SOCKET_NAME
from gateway.core.addresses import FOREIGN_SOCKET
from gateway.core.environment import CustomTasks, Environment, Isolation, Limits, Relaxations, SandboxLimits
from gateway.core.ids import WorkerId
from gateway.core.worker import Worker

MIB: Final = 2**20
LABEL_INSTANCE: Final = "env-gateway.instance"
LABEL_OWNER: Final = "env-gateway.owner"
"""Which gateway made it, as its secret tells (``Settings.read_owner``): instances may bear the same name by default."""
LABEL_WORKER: Final = "env-gateway.worker"
LABEL_ENVIRONMENT: Final = "env-gateway.environment"
LABEL_DIGEST: Final = "env-gateway.digest"
LABEL_ROLE: Final = "env-gateway.role"
"""Which of a worker's two containers it is, if it has two."""
SOCKET_TARGET: Final = "/run/envserver"
"""Where the worker's socket folder is inside the container."""
NOFILE: Final = 4096
"""Open files of one process: a worker holds one connection a session, and some for its tools."""
SANDBOX_NOFILE: Final = 16_384
"""The hard limit where sandboxes are; each process of an agent gets a quarter of it."""
CUSTOM_TASKS_TARGET: Final = "/opt/openenv/custom_tasks"
"""Where operators' task modules are inside the container: OpenEnv's RFC 005, whose authors mount theirs by hand."""
WORK_TARGET: Final = "/work"
"""Where a worker mounts its sandboxes, each on a tmpfs of its own; what is here outside them are mount points."""
WORK_BYTES: Final = 2**20
SANDBOX_USER: Final = "0:0"
"""The entry point of an image for sandboxes begins as root, for only root is given capabilities, and is uid 100000 with
these two before the server starts: a range of users is mapped by whoever owns it and may change users."""
SANDBOX_CAPABILITIES: Final = ("SETGID", "SETUID")
SHARED_MEMORY_PART: Final = 4
"""At most one part in so many of a worker's memory can be taken by files in /dev/shm."""
LOG_MAX_SIZE: Final = "1m"
"""What the engine keeps of a worker's output; a worker that floods its log only overwrites it."""


class Role(StrEnum):
    """What a container is to a worker that has two."""

    SERVER = "server"  #: somebody else's image
    FORWARDER = "forwarder"  #: what makes its port a Unix socket


def container_name(instance: str, environment: str, id: WorkerId) -> str:
    """Name a worker's container, for people: the labels are what counts."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", f"{instance}-{environment}-{id}")


def variables(environment: Environment, *, socket: str, slots: int) -> dict[str, str]:
    """What an environment server is told by its process environment; ours win over the environment's own."""
    return {
        **environment.variables,
        "ENVSERVER_SOCKET": socket,
        "ENVSERVER_SLOTS": str(slots),
        "ENVSERVER_IDLE_S": "0",  # the gateway ends idle sessions; two clocks would disagree
        **_sandbox_variables(environment.sandbox),
        **_task_variables(environment),
    }


def _sandbox_variables(limits: SandboxLimits) -> dict[str, str]:
    given = {
        "ENVSERVER_SANDBOX_MEMORY_MIB": limits.memory_bytes // MIB,
        "ENVSERVER_SANDBOX_PIDS": limits.pids,
        "ENVSERVER_SANDBOX_DISK_MIB": limits.disk_bytes // MIB,
        "ENVSERVER_SANDBOX_CPU_S": limits.cpu_s,
    }
    return {name: str(value) for name, value in given.items() if value}


def _task_variables(environment: Environment) -> dict[str, str]:
    tasks = custom_tasks(environment)
    return {"OPENENV_TASK_MODULE": tasks.module} if tasks is not None else {}


def custom_tasks(environment: Environment) -> CustomTasks | None:
    """The operator's task modules that its workers get; None where their folder is not there, empty, or refused."""
    tasks = environment.custom_tasks
    return tasks if tasks is not None and tasks.content else None


def is_sandboxed(environment: Environment) -> bool:
    """Whether its container opens sandboxes, and so differs from all others."""
    return environment.isolation is Isolation.SANDBOX


def user(environment: Environment) -> str:
    """The user that its container starts as."""
    return SANDBOX_USER if is_sandboxed(environment) else environment.loosened.user


def capabilities(environment: Environment) -> tuple[str, ...]:
    """The capabilities that its container keeps."""
    return SANDBOX_CAPABILITIES if is_sandboxed(environment) else environment.loosened.capabilities


def container_body(
    worker: Worker,
    environment: Environment,
    *,
    instance: str,
    source: str,
    owner: str = "",
    custom_tasks_source: str = "",
) -> dict[str, Any]:
    """Describe the container of *worker*.

    Args:
        worker: Gives id, digest and slots.
        environment: What it is a worker of.
        instance: Label of everything that this gateway makes.
        source: Its socket folder as the engine sees it.
        owner: The gateway's identity, another label; empty: it has none.
        custom_tasks_source: The folder of its task modules as the engine sees it; empty: none is mounted.
    """
    told = variables(environment, socket=f"{SOCKET_TARGET}/{SOCKET_NAME}", slots=worker.slots)
    return {
        "Image": environment.image,
        "User": user(environment),
        "Env": [f"{name}={value}" for name, value in sorted(told.items())],
        "Labels": labels(worker, environment, instance=instance, owner=owner),
        "HostConfig": host_config(environment, [*_mounts(source, custom_tasks_source), *volume_mounts(environment)]),
    }


def owned_by(instance: str, owner: str) -> dict[str, str]:
    """The labels by which a gateway finds what it made, and nothing else; without an *owner* the first of them."""
    return {LABEL_INSTANCE: instance} | ({LABEL_OWNER: owner} if owner else {})


def owned_filter(instance: str, owner: str) -> list[str]:
    """`owned_by` as the engine's filters take it."""
    return [f"{label}={value}" for label, value in owned_by(instance, owner).items()]


def labels(worker: Worker, environment: Environment, *, instance: str, owner: str = "") -> dict[str, str]:
    """What every container of *worker* is found by."""
    return {
        **owned_by(instance, owner),
        LABEL_WORKER: worker.id,
        LABEL_ENVIRONMENT: environment.name,
        LABEL_DIGEST: worker.digest,
    }


def host_config(environment: Environment, mounts: list[dict[str, Any]]) -> dict[str, Any]:
    """Describe what a container of *environment* gets of the machine."""
    limits, loosened = environment.limits, environment.loosened
    tmpfs = _tmpfs(limits.tmp_bytes, loosened)
    common: dict[str, Any] = {
        "NetworkMode": loosened.network,
        "IpcMode": "private",
        "ReadonlyRootfs": not loosened.writable_root,
        "CapDrop": ["ALL"],
        "CapAdd": sorted(capabilities(environment)),
        "SecurityOpt": ["no-new-privileges:true"],
        "Memory": limits.memory_bytes,
        "MemorySwap": limits.memory_bytes,  # memory and swap together: so no swap
        "NanoCpus": round(limits.cpus * 1e9),
        "PidsLimit": limits.pids,
        "ShmSize": shared_memory_bytes(limits),
        "Tmpfs": {"/tmp": tmpfs},
        "Ulimits": [
            {"Name": "nofile", "Soft": NOFILE, "Hard": most_files(environment)},
            {"Name": "core", "Soft": 0, "Hard": 0},
        ],
        "LogConfig": {"Type": "json-file", "Config": {"max-size": LOG_MAX_SIZE, "max-file": "1"}},
        "Init": True,  # reaps orphans, and passes SIGTERM on to a server that has no handler for it
        "RestartPolicy": {"Name": "no", "MaximumRetryCount": 0},
        "Mounts": mounts,
    }
    if requests := device_requests(environment.limits):
        common["DeviceRequests"] = requests
    if not is_sandboxed(environment):
        return common
    return common | {
        "SecurityOpt": [*common["SecurityOpt"], f"seccomp={sandbox_profile()}"],
        # The kernel refuses a fresh /proc in a namespace below one whose own is covered in places. What the engine
        # would cover is root's, and the server is not root.
        "MaskedPaths": [],
        "ReadonlyPaths": [],
        "Tmpfs": {"/tmp": tmpfs, WORK_TARGET: _tmpfs(WORK_BYTES, loosened)},
        # The engine's init stays root, without the capability to signal another user's server: SIGTERM would be lost.
        # So the image has one of its own, which is that user.
        "Init": False,
    }


def most_files(environment: Environment) -> int:
    """The hard limit of open files of each process."""
    return SANDBOX_NOFILE if is_sandboxed(environment) else NOFILE


def shared_memory_bytes(limits: Limits) -> int:
    """Size of /dev/shm, which can be written to like /tmp.

    Nobody asked for it, and what is in it counts as the worker's memory: one session that fills it must be told that
    it is full, and not end the others for want of memory.
    """
    return max(1, min(limits.tmp_bytes, limits.memory_bytes // SHARED_MEMORY_PART))


def device_requests(limits: Limits) -> list[dict[str, Any]]:
    """Ask for GPUs as ``docker run --gpus`` does; nothing where *limits* gives none."""
    if not limits.gpus and not limits.gpu_ids:
        return []
    # The engine refuses a request for a number and for certain ones.
    count = 0 if limits.gpu_ids else limits.gpus
    return [{"Driver": "", "Count": count, "DeviceIDs": [*limits.gpu_ids], "Capabilities": [["gpu"]]}]


def own_mount(source: str) -> dict[str, Any]:
    """Mount the worker's socket folder."""
    # By "Mounts" and not by "Binds": of the latter the engine makes a source that is missing, and the worker's socket
    # would be in a folder that the gateway never sees. No word about propagation: it is private, except for a volume's
    # own folder, which the engine binds as a slave and for which it refuses anything else.
    return {"Type": "bind", "Source": source, "Target": SOCKET_TARGET, "ReadOnly": False}


def _mounts(source: str, custom_tasks_source: str) -> list[dict[str, Any]]:
    if not custom_tasks_source:
        return [own_mount(source)]
    tasks = {"Type": "bind", "Source": custom_tasks_source, "Target": CUSTOM_TASKS_TARGET, "ReadOnly": True}
    return [own_mount(source), tasks]


def volume_mounts(environment: Environment) -> list[dict[str, Any]]:
    """Mount what its ``environment.toml`` lists: a path of the engine's machine, or a volume by its name."""
    return [
        {
            "Type": "bind" if volume.source.startswith("/") else "volume",
            "Source": volume.source,
            "Target": volume.target,
            "ReadOnly": volume.read_only,
        }
        for volume in environment.volumes
    ]


def _tmpfs(size_bytes: int, loosened: Relaxations) -> str:
    # Where the root can be written to, code can be put there: noexec would forbid what is possible next door.
    execution = "exec" if loosened.writable_root else "noexec"
    return f"rw,nosuid,nodev,{execution},size={size_bytes},mode=1777"


@cache
def sandbox_profile() -> str:
    """Give the profile's text as the engine's API takes it: JSON on one line, ASCII only."""
    text = files("gateway.backends.docker").joinpath("sandbox-seccomp.json").read_text(encoding="utf-8")
    return json.dumps(json.loads(text), separators=(",", ":"))


# -- workers of third-party images

FORWARDER_IMAGE: Final = "env-gateway/base:latest"
FORWARDER_LIMITS: Final = Limits(memory_bytes=256 * MIB, cpus=1.0, pids=8, tmp_bytes=MIB)
"""It holds 10 MiB, and 16 KiB more for each connection whose reader is slow."""
FORWARDER_NOFILE: Final = 8192
"""Two for each of its 2,048 connections."""
FORWARDER_NAME: Final = "forwarder"
FORWARDER_ENTRYPOINT: Final = ["python3"]

_RUN: Final = (
    "import sys;from importlib.machinery import PathFinder;"
    "at=PathFinder.find_spec('envserver').submodule_search_locations[0]+'/forwarder.py';"
    "exec(compile(open(at).read(),at,'exec'))"
)
"""``-m envserver.forwarder``, but for the import of ``envserver``: that takes five times as long, and most memory."""

_DEFAULTS: Final = {
    "HOME": "/tmp",  # a tmpfs of its own; the image's own home can't be written to
    "PYTHONDONTWRITEBYTECODE": "1",  # it could not, and would try each time
}


def foreign_variables(environment: Environment) -> dict[str, str]:
    """What an image's own server is told by its process environment: nothing of ours."""
    return {**_DEFAULTS, **environment.variables}


def server_body(worker: Worker, environment: Environment, *, instance: str, owner: str = "") -> dict[str, Any]:
    """Describe the container of the image itself.

    It runs the image's own entry point and command: ``environment.command`` is for local processes only.
    """
    told = foreign_variables(environment)
    return {
        "Image": environment.image,
        "User": user(environment),
        "Env": [f"{name}={value}" for name, value in sorted(told.items())],
        "Labels": labels(worker, environment, instance=instance, owner=owner) | {LABEL_ROLE: Role.SERVER.value},
        "Healthcheck": {"Test": ["NONE"]},  # we ask it ourselves; the image's own would start a process every 30 s
        "HostConfig": host_config(environment, volume_mounts(environment)),
    }


def forwarder_environment(environment: Environment, image: str) -> Environment:
    """What the forwarder beside workers of *environment* would be as an environment: hardened, and nothing loosened."""
    return replace(
        environment,
        image=image,
        variables={},
        isolation=Isolation.SHARED,
        limits=FORWARDER_LIMITS,
        loosened=Relaxations(),
        volumes=(),
        custom_tasks=None,
    )


def forwarder_command(environment: Environment) -> list[str]:
    """What the forwarder beside workers of *environment* runs: arguments of `FORWARDER_ENTRYPOINT`."""
    socket = f"{SOCKET_TARGET}/{FOREIGN_SOCKET}"
    return ["-I", "-c", _RUN, "--socket", socket, "--port", str(environment.server.port)]


def forwarder_body(
    worker: Worker,
    environment: Environment,
    *,
    instance: str,
    source: str,
    beside: str,
    image: str,
    owner: str = "",
) -> dict[str, Any]:
    """Describe the container of the forwarder.

    Args:
        worker: The one that it is a part of.
        environment: What that is a worker of.
        instance: Label of everything that this gateway makes.
        source: The worker's socket folder as the engine sees it.
        beside: The id of the container whose network namespace it shares.
        image: One with ``envserver``.
        owner: The gateway's identity, another label; empty: it has none.
    """
    of = forwarder_environment(environment, image)
    return {
        "Image": image,
        "User": user(of),
        "Entrypoint": FORWARDER_ENTRYPOINT,  # else the image's, if it has one
        "Cmd": forwarder_command(environment),
        "Env": [],
        "Labels": labels(worker, environment, instance=instance, owner=owner) | {LABEL_ROLE: Role.FORWARDER.value},
        "HostConfig": host_config(of, [own_mount(source)])
        | {
            "NetworkMode": f"container:{beside}",
            "Init": False,  # it has a handler for SIGTERM and no children
            "Ulimits": [
                {"Name": "nofile", "Soft": FORWARDER_NOFILE, "Hard": FORWARDER_NOFILE},
                {"Name": "core", "Soft": 0, "Hard": 0},
            ],
        },
    }


def forwarder_name(instance: str, environment: str, id: WorkerId) -> str:
    """Name a worker's forwarder, for people."""
    return f"{container_name(instance, environment, id)}-{FORWARDER_NAME}"
