"""Blocking SDK calls about containers, images and volumes, for the threads of an `Engine`.

`shortcomings` compares the resources that a worker needs with the engine's machine, without I/O.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, Final

from docker import APIClient
from docker.errors import APIError

from gateway.backends.docker.engine import TIMEOUT_S, open_stream
from gateway.core.environment import Environment, Limits


def create(client: APIClient, *, body: dict[str, Any], name: str) -> str:
    """Create a container and return its id."""
    id: str = client.create_container_from_config(body, name=name)["Id"]  # type: ignore[no-untyped-call]  # no stubs
    return id


def listed(client: APIClient, *, labels: list[str]) -> list[dict[str, Any]]:
    """Return the containers in any state that have all *labels*."""
    found: list[dict[str, Any]] = client.containers(all=True, filters={"label": labels})
    return found


def _unless_missing(act: Callable[[], Any], otherwise: Any) -> Any:
    """Return the result of *act*, or *otherwise* if the engine has no such object."""
    try:
        return act()
    except APIError as error:
        if error.status_code == 404:
            return otherwise
        raise


def state(client: APIClient, *, container: str) -> dict[str, Any]:
    """Return a container's state; for a missing container, the state of a clean exit."""
    gone = {"State": {"Running": False, "ExitCode": 0}}
    found: dict[str, Any] = _unless_missing(lambda: client.inspect_container(container), gone)["State"]
    return found


def image_id(client: APIClient, *, image: str) -> str:
    """Return the id (``sha256:…``) of *image*; empty if the engine does not have it."""
    id: str = _unless_missing(partial(APIClient.inspect_image, client, image), {"Id": ""})["Id"]
    return id


FREEZES: Final = 5
"""Attempts to freeze a container. The kernel gives up if a process does not stop in time, as on a busy machine."""
FREEZE_PAUSE_S: Final = 0.2


def pause(client: APIClient, *, container: str) -> None:
    """Freeze a container; a frozen container is not an error."""
    for left in reversed(range(FREEZES)):
        try:
            client.pause(container)
        except APIError as error:
            if not state(client, container=container).get("Paused"):
                if not left or "unable to freeze" not in str(error.explanation):
                    raise
                time.sleep(FREEZE_PAUSE_S)
                continue
        return


def unpause(client: APIClient, *, container: str) -> None:
    """Resume a frozen container; a running container is not an error."""
    try:
        client.unpause(container)
    except APIError as error:
        # Engines report "is not paused" with status 500, for a dead container too.
        found = state(client, container=container)
        if error.status_code == 404 or not found["Running"] or found.get("Paused"):
            raise


def has_volume(client: APIClient, *, name: str) -> bool:
    """Return True if the engine has the volume *name*. The engine creates a missing volume when it is mounted."""
    return _unless_missing(lambda: client.inspect_volume(name), None) is not None


def logs(client: APIClient, *, container: str, lines: int) -> str:
    """Return the last *lines* of a container's output; an empty string for a missing container."""
    output: bytes = _unless_missing(lambda: client.logs(container, tail=lines), b"")
    return output.decode("utf-8", "replace")


MAX_OUTPUT_BYTES: Final = 16 * 2**20
_CHUNK_BYTES: Final = 2**16
_FRAME_HEAD: Final = struct.Struct(">BxxxL")
"""Head of a piece of output: its stream (1: standard output, 2: standard error) and its length in bytes."""


def run(client: APIClient, *, container: str, argv: list[str], user: str = "") -> tuple[int | None, bytes]:
    """Run a command in a container, as *user* or the container's own user.

    The SDK's ``exec_start`` loses output that arrives together with the head of the engine's response: it reads the
    connection's socket past the buffer that already holds this output.

    Returns:
        The exit status, None while the command runs, and what it wrote to standard output and standard error, at most
        `MAX_OUTPUT_BYTES`.

    Raises:
        APIError, EngineError: The engine refuses, for example because the container has ended.
    """
    id = client.exec_create(container, argv, user=user)["Id"]
    body = {"Detach": False, "Tty": False}
    with open_stream(client, "POST", f"exec/{id}/start", {}, body=body, silence_s=TIMEOUT_S) as response:
        stream = b"".join(islice(response.iter_content(_CHUNK_BYTES), MAX_OUTPUT_BYTES // _CHUNK_BYTES))
    status: int | None = client.exec_inspect(id)["ExitCode"]
    return status, b"".join(_pieces(stream))


def _pieces(stream: bytes) -> Iterator[bytes]:
    at = 0
    while at + _FRAME_HEAD.size <= len(stream):
        _, length = _FRAME_HEAD.unpack_from(stream, at)
        at += _FRAME_HEAD.size
        yield stream[at : at + length]
        at += length


def cause(state: dict[str, Any]) -> str:
    """Describe why a container ended, from its `state`."""
    return "out of memory" if state.get("OOMKilled") else f"exit status {state['ExitCode']}"


def send_signal(client: APIClient, *, container: str, signal: str) -> bool:
    """Send *signal* and return True if the container had already ended."""
    try:
        client.kill(container, signal=signal)
    except APIError as error:
        if error.status_code in (404, 409):  # gone; not running
            return True
        raise
    return False


def remove(client: APIClient, *, container: str) -> bool:
    """Kill and remove a container and its anonymous volumes; return False if there is no such container."""
    try:
        client.remove_container(container, force=True, v=True)
    except APIError as error:
        if error.status_code not in (404, 409):  # 404: gone; 409: "removal … is already in progress"
            raise
        return error.status_code != 404
    return True


GPU_RUNTIME: Final = "nvidia"
GPU_DEVICE: Final = "/gpu="
"""Part of a GPU's device id in the Container Device Interface, by which engines list devices from 28.2 on."""
_GIB: Final = 2**30


def with_splits(environments: Iterable[Environment]) -> Iterator[Environment]:
    """Yield each environment, and its variants for splits that need other resources."""
    for environment in environments:
        yield environment
        yield from environment.splits.values()


def shortcomings(environments: Iterable[Environment], info: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each resource that an environment, or one of its splits, needs and the machine lacks.

    Args:
        environments: The environments; those with a ``[server] url`` are skipped, as they have no containers.
        info: The engine's ``/info``. A resource that it does not list is not checked.
    """
    return [
        f"environment {environment.name} asks for {lack}"
        for environment in with_splits(environments)
        if not environment.server.url
        for lack in _lacks(environment.limits, info)
    ]


def _lacks(limits: Limits, info: Mapping[str, Any]) -> Iterator[str]:
    cpus, memory_bytes = info.get("NCPU"), info.get("MemTotal")
    if cpus and limits.cpus > cpus:
        yield f"{limits.cpus:g} CPUs a worker (cpus), and the engine's machine has {cpus}"
    if memory_bytes and limits.memory_bytes > memory_bytes:
        yield (
            f"{limits.memory_bytes / _GIB:.1f} GiB of memory a worker (memory_mib), and the engine's machine has "
            f"{memory_bytes / _GIB:.1f} GiB"
        )
    if limits.gpus or limits.gpu_ids:
        yield from _lacking_gpus(limits, info)


def _lacking_gpus(limits: Limits, info: Mapping[str, Any]) -> Iterator[str]:
    wanted = f"GPUs {', '.join(limits.gpu_ids)}" if limits.gpu_ids else "all GPUs"
    if limits.gpus > 0 and not limits.gpu_ids:
        wanted = f"{limits.gpus} GPUs"
    devices = gpu_devices(info)
    if not devices and GPU_RUNTIME not in (info.get("Runtimes") or {}):
        yield (
            f"{wanted}, and the engine has neither a runtime {GPU_RUNTIME!r} nor GPUs among its devices: install the "
            "NVIDIA Container Toolkit, and run `nvidia-ctk runtime configure --runtime=docker` to register it"
        )
    # The engine lists a GPU several times: by number ("nvidia.com/gpu=0"), by UUID, and as part of "all".
    numbered = {device for device in devices if device.isdigit()}
    if not numbered:
        return
    if limits.gpu_ids:
        missing = [id for id in limits.gpu_ids if id not in devices]
        if missing:
            yield f"{wanted}, and the engine's machine has no {', '.join(missing)}"
    elif limits.gpus > len(numbered):
        yield f"{wanted}, and the engine's machine has {len(numbered)}"


def gpu_devices(info: Mapping[str, Any]) -> Collection[str]:
    """Return the engine's names of its GPUs: numbers, UUIDs, ``all``."""
    ids = [str(device.get("ID", "")) for device in info.get("DiscoveredDevices") or []]
    return {id.partition(GPU_DEVICE)[2] for id in ids if GPU_DEVICE in id}
