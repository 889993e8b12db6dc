"""Which mounts a container may have: its worker's socket folder, task modules, and the volumes of the catalog."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.backends.docker.container import CUSTOM_TASKS_TARGET, LABEL_WORKER, SOCKET_TARGET, volume_mounts
from gateway.core.environment import Environment
from gateway.node.rules import Rules

_INWARD = frozenset(["", "rprivate", "private", "rslave", "slave"])
"""Propagations with which nothing that is mounted in the container shows up outside."""
_KEYS = frozenset(["Type", "Source", "Target", "ReadOnly", "BindOptions"])


def mount_refusal(
    value: Any, labels: Mapping[str, Any], environment: Environment, rules: Rules, *, has_sockets: bool = True
) -> str | None:
    """Say why not all of the mounts *value* may be; None if they may.

    The worker's own socket folder, if it *has_sockets*; its environment's task modules, to be read; its environment's
    volumes, as the catalog has them. Of the first two the gate, where it can, makes sure that it is a folder and not a
    link.
    """
    own, tasks = f"{rules.socket_root}/{labels[LABEL_WORKER]}", rules.custom_tasks_source(environment)
    for mount in value or []:
        found = (mount.get("Type"), mount.get("Source"), mount.get("Target"))
        is_own = has_sockets and found == ("bind", own, SOCKET_TARGET)
        is_tasks = tasks is not None and found == ("bind", tasks, CUSTOM_TASKS_TARGET) and mount.get("ReadOnly") is True
        if not _is_plain(mount) or not (is_own or is_tasks or _is_volume(mount, environment)):
            allowed = [f"{own} at {SOCKET_TARGET}"] if has_sockets else []
            allowed += [f"{tasks} at {CUSTOM_TASKS_TARGET} read-only"] if tasks is not None else []
            allowed += [f"{volume.source} at {volume.target}" for volume in environment.volumes]
            return f"HostConfig.Mounts: only {', '.join(allowed) or 'nothing'} may be mounted, and not shared"
    return None


def mounts_custom_tasks(body: Mapping[str, Any]) -> bool:
    """Whether *body*, which `refusal` let through, mounts its environment's task modules."""
    return any(mount.get("Target") == CUSTOM_TASKS_TARGET for mount in body["HostConfig"].get("Mounts") or [])


def _is_volume(mount: Mapping[str, Any], environment: Environment) -> bool:
    given = {key: mount.get(key) for key in ("Type", "Source", "Target")}
    for volume in volume_mounts(environment):
        must_be_read_only = volume.pop("ReadOnly")
        if given == volume:
            read_only = mount.get("ReadOnly")
            return read_only is True or (not must_be_read_only and (read_only is None or read_only is False))
    return False


def _is_plain(mount: Mapping[str, Any]) -> bool:
    options = mount.get("BindOptions") or {}
    return (
        mount.keys() <= _KEYS
        and isinstance(options, dict)
        and options.keys() <= {"Propagation"}
        and options.get("Propagation", "") in _INWARD
    )
