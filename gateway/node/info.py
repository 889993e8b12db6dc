"""What of the engine's ``/info`` is shown: nothing about containers, images, networks or registries of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.backends.docker.capacity_check import GPU_DEVICE, GPU_RUNTIME

FIELDS: Final = (
    "ServerVersion",
    "OSType",
    "Architecture",
    "OperatingSystem",
    "Driver",
    "CgroupVersion",
    "SecurityOptions",
    "NCPU",
    "MemTotal",
    "Name",
)


def shown_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """Cut *info* down to `FIELDS`, and to whether there are GPUs: no path, and no other runtime or device."""
    shown = {name: info[name] for name in FIELDS if name in info}
    runtimes = info.get("Runtimes") or {}
    devices = info.get("DiscoveredDevices") or []
    return shown | {
        "Runtimes": {GPU_RUNTIME: {}} if GPU_RUNTIME in runtimes else {},
        "DiscoveredDevices": [{"ID": str(one["ID"])} for one in devices if GPU_DEVICE in str(one.get("ID", ""))],
    }
