"""What is asked of the engine about one container, or about all: the SDK's blocking calls, for the engine's threads.

What one worker of an environment asks of the engine's machine, compared with what there is. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from docker import APIClient
from docker.errors import APIError

from gateway.core.environment import Environment, Limits


def create(client: APIClient, *, body: dict[str, Any], name: str) -> str:
    """Create a container; its id."""
    id: str = client.create_container_from_config(body, name=name)["Id"]  # type: ignore[no-untyped-call]  # no stubs
    return id


def listed(client: APIClient, *, labels: list[str]) -> list[dict[str, Any]]:
    """The containers that have all of *labels*, whatever their state."""
    found: list[dict[str, Any]] = client.containers(all=True, filters={"label": labels})
    return found


def _unless_missing(act: Callable[[], Any], otherwise: Any) -> Any:
    """Return what *act* returns, or *otherwise* if the engine has no such object."""
    try:
        return act()
    except APIError as error:
        if error.status_code == 404:
            return otherwise
        raise


def state(client: APIClient, *, container: str) -> dict[str, Any]:
    """Return a container's state; if it is gone, that of one that exited cleanly."""
    gone = {"State": {"Running": False, "ExitCode": 0}}
    found: dict[str, Any] = _unless_missing(lambda: client.inspect_container(container), gone)["State"]
    return found


def image_id(client: APIClient, *, image: str) -> str:
    """Return the id (``sha256:…``) of *image*; empty if the engine does not have it."""
    id: str = _unless_missing(partial(APIClient.inspect_image, client, image), {"Id": ""})["Id"]
    return id


def pause(client: APIClient, *, container: str) -> None:
    """Freeze a container; one that is frozen is no error."""
    try:
        client.pause(container)
    except APIError:
        if not state(client, container=container).get("Paused"):
            raise


def unpause(client: APIClient, *, container: str) -> None:
    """Let a frozen container go on; one that runs is no error."""
    try:
        client.unpause(container)
    except APIError as error:
        # Engines say that it "is not paused" with 500, and of one that is dead too.
        found = state(client, container=container)
        if error.status_code == 404 or not found["Running"] or found.get("Paused"):
            raise


def has_volume(client: APIClient, *, name: str) -> bool:
    """Return True if the engine has the volume *name*: it would make one that is mounted and missing."""
    return _unless_missing(lambda: client.inspect_volume(name), None) is not None


def logs(client: APIClient, *, container: str, lines: int) -> str:
    """Return the last *lines* of a container's output."""
    output: bytes = _unless_missing(lambda: client.logs(container, tail=lines), b"")
    return output.decode("utf-8", "replace")


def cause(state: dict[str, Any]) -> str:
    """Why a container ended, of what `state` tells."""
    return "out of memory" if state.get("OOMKilled") else f"exit status {state['ExitCode']}"


def send_signal(client: APIClient, *, container: str, signal: str) -> bool:
    """Send *signal*; returns whether the container had ended before."""
    try:
        client.kill(container, signal=signal)
    except APIError as error:
        if error.status_code in (404, 409):  # gone; not running
            return True
        raise
    return False


def remove(client: APIClient, *, container: str) -> bool:
    """Kill and remove a container with its anonymous volumes; False if there is none (which is no error)."""
    try:
        client.remove_container(container, force=True, v=True)
    except APIError as error:
        if error.status_code not in (404, 409):  # gone; "removal … is already in progress"
            raise
        return error.status_code != 404
    return True


GPU_RUNTIME: Final = "nvidia"
GPU_DEVICE: Final = "/gpu="
"""What names of GPUs have in them, where the engine lists devices by the Container Device Interface (from 28.2 on)."""
_GIB: Final = 2**30


def with_splits(environments: Iterable[Environment]) -> Iterator[Environment]:
    """Go through *environments*, and those that a split of one asks other resources for."""
    for environment in environments:
        yield environment
        yield from environment.splits.values()


def shortcomings(environments: Iterable[Environment], info: Mapping[str, Any]) -> list[str]:
    """Say what the machine lacks, one sentence each; of which *environments*, theirs of splits included.

    Args:
        environments: Those whose workers run as containers.
        info: The engine's ``/info``; what is not in it is not looked at.
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
            "NVIDIA Container Toolkit, and let `nvidia-ctk runtime configure --runtime=docker` tell the engine"
        )
    # By number ("nvidia.com/gpu=0"), by UUID, and all of them: each is listed several times.
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
    """What the engine calls the GPUs that it found: numbers, UUIDs, ``all``."""
    ids = [str(device.get("ID", "")) for device in info.get("DiscoveredDevices") or []]
    return {id.partition(GPU_DEVICE)[2] for id in ids if GPU_DEVICE in id}
