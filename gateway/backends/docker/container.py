"""What a worker's container is made of: the body of the engine's create request. Pure; the engine gate checks the same.

Everything is said explicitly, also where it is the engine's default: an operator may have changed the default
(``daemon.json``), and the gate refuses what is not said.

The seccomp profile of workers that open sandboxes.

The engine's default refuses namespaces and mounts to whoever is not root with CAP_SYS_ADMIN. This one is an allow-list
too, shorter than the default but for what a sandbox is made with; agents get a stricter filter of their own inside.
"""

from __future__ import annotations

import json
import re
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any, Final

from gateway.backends.folders import SOCKET_NAME
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
"""Which of a worker's two containers it is, if it has two: see `foreign`."""
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
