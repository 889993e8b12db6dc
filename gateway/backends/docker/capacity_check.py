"""What one worker of an environment asks of the engine's machine, compared with what there is. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

from gateway.core.environment import Environment, Limits

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
