"""Build the bodies of the engine's create requests for workers' containers, without I/O.

The bodies state every option explicitly, even an engine's default, which an operator may have changed
(``daemon.json``). The engine gate checks the same bodies, and refuses a missing option.

Workers that open sandboxes get a seccomp profile of their own. The engine's default profile refuses namespaces and
mounts without CAP_SYS_ADMIN. The gateway's profile is also an allow-list, shorter than the default except for the calls
that create a sandbox. Inside the sandbox, agents get a stricter filter.

A worker of a third-party image has two containers. The image's own server listens on a TCP port. Its only network is
its loopback, and it gets no file or variable of the gateway. A **forwarder** shares the server's network namespace and
nothing else. It offers that port as a Unix socket in the worker's socket folder, so the gateway reaches it like any
other worker. Both containers have labels with the worker's id and with their role.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any, Final

from gateway.backends.folders import SOCKET_NAME
from gateway.core.addresses import FOREIGN_SOCKET
from gateway.core.environment import (
    CustomTasks,
    Environment,
    Isolation,
    Limits,
    Relaxations,
    SandboxLimits,
    Scorer,
    Unexpected,
)
from gateway.core.ids import WorkerId
from gateway.core.worker import Worker

MIB: Final = 2**20
LABEL_INSTANCE: Final = "env-gateway.instance"
LABEL_OWNER: Final = "env-gateway.owner"
"""Label with the gateway's identity, from its secret (``Settings.read_owner``): instances may share a default name."""
LABEL_WORKER: Final = "env-gateway.worker"
LABEL_ENVIRONMENT: Final = "env-gateway.environment"
LABEL_DIGEST: Final = "env-gateway.digest"
LABEL_ROLE: Final = "env-gateway.role"
"""Label with the container's role, if the worker has two containers."""
SOCKET_TARGET: Final = "/run/envserver"
"""Path of the worker's socket folder inside the container."""
NOFILE: Final = 4096
"""Open files per process: a worker holds one connection per session, and some for its tools."""
SANDBOX_NOFILE: Final = 16_384
"""Hard limit of open files with sandboxes; each process of an agent gets a quarter of it."""
CUSTOM_TASKS_TARGET: Final = "/opt/openenv/custom_tasks"
"""Path of operators' task modules inside the container, from OpenEnv's RFC 005, whose authors mount theirs by hand."""
WORK_TARGET: Final = "/work"
"""Path where a worker mounts its sandboxes, each on a tmpfs of its own. Outside them it has mount points only."""
WORK_BYTES: Final = 2**20
SANDBOX_USER: Final = "0:0"
"""The start user of a sandbox image, because only root receives capabilities. Before the server starts, the entry point
becomes uid 100000 with the capabilities below, which the server leaves to a launcher. Only a range's owner with both
capabilities may map a range of users."""
SANDBOX_CAPABILITIES: Final = ("SETGID", "SETUID")
SHARED_MEMORY_PART: Final = 4
"""Divisor of a worker's memory that gives the upper limit of /dev/shm."""
LOG_MAX_SIZE: Final = "1m"
"""Size of the output that the engine keeps; a worker that floods its log only overwrites it."""


class Role(StrEnum):
    """The role of a container whose worker has two."""

    SERVER = "server"  #: runs the third-party image
    FORWARDER = "forwarder"  #: offers the server's port as a Unix socket


def container_name(instance: str, environment: str, id: WorkerId) -> str:
    """Return the container's name, for people only: the gateway finds containers by their labels."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", f"{instance}-{environment}-{id}")


def variables(environment: Environment, *, socket: str, slots: int) -> dict[str, str]:
    """Return the process variables of an environment server; the gateway's override the environment's own."""
    return {
        **environment.variables,
        "ENVSERVER_SOCKET": socket,
        "ENVSERVER_SLOTS": str(slots),
        "ENVSERVER_IDLE_S": "0",  # the gateway ends idle sessions, and a second clock would disagree
        **_scorer_variables(environment.scorer),
        **_error_variables(environment.unexpected),
        **_sandbox_variables(environment.sandbox),
        **_task_variables(environment),
    }


def _scorer_variables(scorer: Scorer) -> dict[str, str]:
    return {"ENVSERVER_SCORER": json.dumps(asdict(scorer))} if scorer != Scorer() else {}


def _error_variables(unexpected: Unexpected) -> dict[str, str]:
    # An older image does not know the variable, and behaves like the default.
    return {"ENVSERVER_UNEXPECTED": unexpected.value} if unexpected is not Unexpected.MARK else {}


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
    """Return the operator's task modules of the environment; None if their folder is missing, empty or refused."""
    tasks = environment.custom_tasks
    return tasks if tasks is not None and tasks.content else None


def is_sandboxed(environment: Environment) -> bool:
    """Return True if the environment's container opens sandboxes, which changes its body."""
    return environment.isolation is Isolation.SANDBOX


def user(environment: Environment) -> str:
    """Return the start user of the environment's container."""
    return SANDBOX_USER if is_sandboxed(environment) else environment.loosened.user


def capabilities(environment: Environment) -> tuple[str, ...]:
    """Return the capabilities that the environment's container keeps."""
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
    """Return the create request's body for the container of *worker*.

    Args:
        worker: The worker, with its id, digest and slots.
        environment: The worker's environment.
        instance: Label of every container of this gateway.
        source: The worker's socket folder as the engine sees it.
        owner: Label with the gateway's identity; empty for none.
        custom_tasks_source: The folder of the task modules as the engine sees it; empty to mount none.
    """
    return {
        "Image": environment.image,
        "User": user(environment),
        "Env": own_entries(environment, slots=worker.slots),
        "Labels": labels(worker, environment, instance=instance, owner=owner),
        "HostConfig": host_config(environment, [*_mounts(source, custom_tasks_source), *volume_mounts(environment)]),
    }


def own_entries(environment: Environment, *, slots: int) -> list[str]:
    """Return the complete ``Env`` of a container of the gateway's own server. The engine gate computes it too."""
    return _entries(variables(environment, socket=f"{SOCKET_TARGET}/{SOCKET_NAME}", slots=slots))


def _entries(given: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in sorted(given.items())]


def owned_by(instance: str, owner: str) -> dict[str, str]:
    """Return the labels that select a gateway's own containers. Without an *owner*, the instance's label alone."""
    return {LABEL_INSTANCE: instance} | ({LABEL_OWNER: owner} if owner else {})


def owned_filter(instance: str, owner: str) -> list[str]:
    """Return `owned_by` in the format of the engine's filters."""
    return [f"{label}={value}" for label, value in owned_by(instance, owner).items()]


def labels(worker: Worker, environment: Environment, *, instance: str, owner: str = "") -> dict[str, str]:
    """Return the labels of every container of *worker*."""
    return {
        **owned_by(instance, owner),
        LABEL_WORKER: worker.id,
        LABEL_ENVIRONMENT: environment.name,
        LABEL_DIGEST: worker.digest,
    }


def host_config(environment: Environment, mounts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the host configuration of a container of *environment*: its limits, rights and mounts."""
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
        "MemorySwap": limits.memory_bytes,  # the sum of memory and swap, so there is no swap
        "NanoCpus": round(limits.cpus * 1e9),
        "PidsLimit": limits.pids,
        "ShmSize": shared_memory_bytes(limits),
        "Tmpfs": {"/tmp": tmpfs},
        "Ulimits": [
            {"Name": "nofile", "Soft": NOFILE, "Hard": most_files(environment)},
            {"Name": "core", "Soft": 0, "Hard": 0},
        ],
        "LogConfig": {"Type": "json-file", "Config": {"max-size": LOG_MAX_SIZE, "max-file": "1"}},
        "Init": True,  # reaps orphans, and forwards SIGTERM to a server without a handler for it
        "RestartPolicy": {"Name": "no", "MaximumRetryCount": 0},
        "Mounts": mounts,
    }
    if requests := device_requests(environment.limits):
        common["DeviceRequests"] = requests
    if not is_sandboxed(environment):
        return common
    return common | {
        "SecurityOpt": [*common["SecurityOpt"], f"seccomp={sandbox_profile()}"],
        # The kernel refuses a new /proc in a nested namespace if the outer /proc has covered paths. The engine would
        # cover only root's files, and the server is not root.
        "MaskedPaths": [],
        "ReadonlyPaths": [],
        "Tmpfs": {"/tmp": tmpfs, WORK_TARGET: _tmpfs(WORK_BYTES, loosened)},
        # The engine's init runs as root without the capability to signal another user's server: SIGTERM would be lost.
        # So the image has an init of its own, which runs as the server's user.
        "Init": False,
    }


def most_files(environment: Environment) -> int:
    """Return the hard limit of open files per process."""
    return SANDBOX_NOFILE if is_sandboxed(environment) else NOFILE


def shared_memory_bytes(limits: Limits) -> int:
    """Return the size of /dev/shm, which is writable like /tmp.

    Its content counts as the worker's memory. A session that fills it must get an error, and must not end the worker's
    other sessions for lack of memory.
    """
    return max(1, min(limits.tmp_bytes, limits.memory_bytes // SHARED_MEMORY_PART))


def device_requests(limits: Limits) -> list[dict[str, Any]]:
    """Return the request for GPUs as ``docker run --gpus`` sends it; an empty list if *limits* has no GPUs."""
    if not limits.gpus and not limits.gpu_ids:
        return []
    # The engine refuses a request with both a number of GPUs and GPU ids.
    count = 0 if limits.gpu_ids else limits.gpus
    return [{"Driver": "", "Count": count, "DeviceIDs": [*limits.gpu_ids], "Capabilities": [["gpu"]]}]


def own_mount(source: str) -> dict[str, Any]:
    """Return the mount of the worker's socket folder."""
    # The engine creates a missing source of "Binds", so the worker's socket would be in a folder that the gateway never
    # sees. "Mounts" creates none. Propagation is not set: it is private, except for a volume's own folder. The engine
    # binds that as a slave, and refuses any other value.
    return {"Type": "bind", "Source": source, "Target": SOCKET_TARGET, "ReadOnly": False}


def _mounts(source: str, custom_tasks_source: str) -> list[dict[str, Any]]:
    if not custom_tasks_source:
        return [own_mount(source)]
    tasks = {"Type": "bind", "Source": custom_tasks_source, "Target": CUSTOM_TASKS_TARGET, "ReadOnly": True}
    return [own_mount(source), tasks]


def volume_mounts(environment: Environment) -> list[dict[str, Any]]:
    """Return the mounts of the ``environment.toml``: paths of the engine's machine, or volumes by name."""
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
    # A writable root can hold code anyway, so noexec on the tmpfs would prevent nothing.
    execution = "exec" if loosened.writable_root else "noexec"
    return f"rw,nosuid,nodev,{execution},size={size_bytes},mode=1777"


@cache
def sandbox_profile() -> str:
    """Return the seccomp profile in the format of the engine's API: JSON on one line, ASCII only."""
    text = files("gateway.backends.docker").joinpath("sandbox-seccomp.json").read_text(encoding="utf-8")
    return json.dumps(json.loads(text), separators=(",", ":"))


# -- workers of third-party images

FORWARDER_IMAGE: Final = "env-gateway/base:latest"
FORWARDER_LIMITS: Final = Limits(memory_bytes=256 * MIB, cpus=1.0, pids=8, tmp_bytes=MIB)
"""Limits of the forwarder, which uses 10 MiB, and 16 KiB more for each connection with a slow reader."""
FORWARDER_NOFILE: Final = 8192
"""Open files of the forwarder: two for each of its 2,048 connections."""
FORWARDER_NAME: Final = "forwarder"
FORWARDER_ENTRYPOINT: Final = ["python3"]

_RUN: Final = (
    "import sys;from importlib.machinery import PathFinder;"
    "at=PathFinder.find_spec('envserver').submodule_search_locations[0]+'/forwarder.py';"
    "exec(compile(open(at).read(),at,'exec'))"
)
"""Script that runs ``envserver.forwarder`` without importing ``envserver``. The import would make the start five times
as long, and take most of the memory."""

_DEFAULTS: Final = {
    "HOME": "/tmp",  # the container's own tmpfs; the image's home is read-only
    "PYTHONDONTWRITEBYTECODE": "1",  # each write would fail on the read-only root
}


def foreign_entries(environment: Environment) -> list[str]:
    """Return the complete ``Env`` of an image's own server, without any of the gateway's variables."""
    return _entries({**_DEFAULTS, **environment.variables})


def server_body(worker: Worker, environment: Environment, *, instance: str, owner: str = "") -> dict[str, Any]:
    """Return the create request's body for the server's container of a third-party image.

    It runs the image's own entry point and command: ``environment.command`` is for local processes only.
    """
    return {
        "Image": environment.image,
        "User": user(environment),
        "Env": foreign_entries(environment),
        "Labels": labels(worker, environment, instance=instance, owner=owner) | {LABEL_ROLE: Role.SERVER.value},
        "Healthcheck": {"Test": ["NONE"]},  # the gateway checks it; the image's would start a process every 30 s
        "HostConfig": host_config(environment, volume_mounts(environment)),
    }


def forwarder_environment(environment: Environment, image: str) -> Environment:
    """Return the forwarder of *environment*'s workers as an environment: hardened, without relaxations."""
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
    """Return the arguments of `FORWARDER_ENTRYPOINT` for *environment*'s workers."""
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
    """Return the create request's body for the forwarder's container.

    Args:
        worker: The forwarder's worker.
        environment: The worker's environment.
        instance: Label of every container of this gateway.
        source: The worker's socket folder as the engine sees it.
        beside: Id of the server's container, whose network namespace the forwarder shares.
        image: An image that contains ``envserver``.
        owner: Label with the gateway's identity; empty for none.
    """
    of = forwarder_environment(environment, image)
    return {
        "Image": image,
        "User": user(of),
        "Entrypoint": FORWARDER_ENTRYPOINT,  # replaces the image's entry point, if any
        "Cmd": forwarder_command(environment),
        "Env": [],
        "Labels": labels(worker, environment, instance=instance, owner=owner) | {LABEL_ROLE: Role.FORWARDER.value},
        "HostConfig": host_config(of, [own_mount(source)])
        | {
            "NetworkMode": f"container:{beside}",
            "Init": False,  # the forwarder handles SIGTERM and has no children
            "Ulimits": [
                {"Name": "nofile", "Soft": FORWARDER_NOFILE, "Hard": FORWARDER_NOFILE},
                {"Name": "core", "Soft": 0, "Hard": 0},
            ],
        },
    }


def forwarder_name(instance: str, environment: str, id: WorkerId) -> str:
    """Return the name of a worker's forwarder, for people only."""
    return f"{container_name(instance, environment, id)}-{FORWARDER_NAME}"
