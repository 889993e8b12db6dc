"""Workers of somebody else's images: two containers each, and what both are made of. Pure, as `container`.

The image's own server listens on a TCP port and knows nothing of us. It gets no network but its loopback, and nothing
of ours is mounted in it. A **forwarder** beside it shares its network namespace, and nothing else, and offers that
port as a Unix socket in the worker's socket folder: so the gateway reaches it as it reaches all the others. The two
are one worker: they bear its id as a label, and are told apart by their role.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from gateway.backends.docker.container import (
    LABEL_ROLE,
    MIB,
    SOCKET_TARGET,
    Role,
    container_name,
    host_config,
    labels,
    own_mount,
    user,
    volume_mounts,
)
from gateway.core.addresses import FOREIGN_SOCKET
from gateway.core.environment import Environment, Isolation, Limits, Relaxations
from gateway.core.ids import WorkerId
from gateway.core.worker import Worker

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
