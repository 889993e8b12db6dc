"""Decides from the body of a create request whether its container is allowed, with pure functions.

The list of keys is closed: an unknown key is refused by name. The gate forwards a new body with only the checked keys
(`rewritten`), not the client's body. The engine ignores the case of keys and takes the last of two duplicates, so it
could read a body differently that was only *checked*.

A container may mount its worker's socket folder, task modules, and the catalog's volumes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gateway.backends.docker.calls import with_splits
from gateway.backends.docker.container import (
    CUSTOM_TASKS_TARGET,
    FORWARDER_ENTRYPOINT,
    FORWARDER_IMAGE,
    LABEL_DIGEST,
    LABEL_ENVIRONMENT,
    LABEL_INSTANCE,
    LABEL_OWNER,
    LABEL_ROLE,
    LABEL_WORKER,
    SOCKET_TARGET,
    WORK_BYTES,
    WORK_TARGET,
    Role,
    capabilities,
    device_requests,
    forwarder_command,
    forwarder_environment,
    is_sandboxed,
    sandbox_profile,
    shared_memory_bytes,
    user,
    volume_mounts,
)
from gateway.backends.folders import is_safe_id
from gateway.core.environment import TENANT_MARK, Environment
from gateway.node.variables import variables_refusal

MIN_MEMORY_BYTES = 6 * 2**20
"""The engine's own minimum."""
MAX_NOFILE = 65_536
MAX_LOG_BYTES = 10 * 2**20
_UNITS = {"k": 2**10, "m": 2**20}
_LABELS = frozenset([LABEL_INSTANCE, LABEL_OWNER, LABEL_WORKER, LABEL_ENVIRONMENT, LABEL_DIGEST, LABEL_ROLE])
_SHARED = re.compile(r"container:([0-9a-f]{64})", re.ASCII)
_NO_NEW_PRIVILEGES = frozenset(["no-new-privileges", "no-new-privileges:true"])


TOLERABLE_CAPABILITIES = frozenset(
    ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID"]
)
"""Capabilities that an ``environment.toml`` may request: Docker's default set (moby ``oci/caps/defaults.go``) without
AUDIT_WRITE, MKNOD, NET_RAW and SYS_CHROOT, which reach beyond the container's files and processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of the gate, made from the catalog and replaced when the catalog changes."""

    instance: str
    """The instance's label. The gate hides containers without it."""
    environments: Mapping[str, Environment]
    """Environments by name. A container has its environment's image and user, at most its limits, and no other
    relaxations."""
    socket_root: str
    """The engine's path of the folder of the workers' socket folders (the volume's Mountpoint, or a directory)."""
    custom_tasks_root: str = ""
    """The engine's path of the operators' task modules. If empty, no container may mount task modules."""
    max_containers: int = 500
    """Maximum number of the instance's containers. A worker of a third-party image has two."""
    forwarder_image: str = FORWARDER_IMAGE
    """The image of the forwarder containers next to third-party images."""

    def custom_tasks_source(self, environment: Environment) -> str | None:
        """Return the engine's path of the task modules that containers of *environment* may mount, or None."""
        tasks = environment.custom_tasks
        return f"{self.custom_tasks_root}/{tasks.folder}" if tasks is not None and self.custom_tasks_root else None

    def with_environments(self, environments: Iterable[Environment]) -> Rules:
        """Return these rules for a changed catalog."""
        return replace(self, environments=_by_name(environments))

    @property
    def images(self) -> frozenset[str]:
        """The images that the gateway may inspect and transfer."""
        own = {environment.image for environment in self.environments.values() if not environment.server.url}
        has_foreign = any(environment.server.port for environment in self.environments.values())
        return frozenset(own | ({self.forwarder_image} if has_foreign else set()))

    @property
    def volumes(self) -> frozenset[str]:
        """The named volumes of the catalog's environments."""
        listed = [volume.source for environment in self.environments.values() for volume in environment.volumes]
        return frozenset(source for source in listed if not source.startswith("/"))

    @classmethod
    def of(
        cls,
        environments: Iterable[Environment],
        *,
        instance: str,
        socket_root: str,
        custom_tasks_root: str = "",
        max_containers: int = 500,
        forwarder_image: str = FORWARDER_IMAGE,
    ) -> Rules:
        """Make the rules for a catalog. A split with its own resources counts as an environment."""
        return cls(
            instance=instance,
            environments=_by_name(environments),
            socket_root=socket_root.rstrip("/"),
            custom_tasks_root=custom_tasks_root.rstrip("/"),
            max_containers=max_containers,
            forwarder_image=forwarder_image,
        )


def _by_name(environments: Iterable[Environment]) -> dict[str, Environment]:
    return {environment.name: environment for environment in with_splits(environments)}


Check = Callable[[Any, Environment, Rules], bool]


def refusal(body: Mapping[str, Any], rules: Rules) -> str | None:
    """Return the reason to refuse *body*, an object from `gateway.node.routes.parse`, or None if it is allowed."""
    labels = body.get("Labels")
    if not isinstance(labels, dict) or labels.get(LABEL_INSTANCE) != rules.instance:
        return f"Labels must have {LABEL_INSTANCE}={rules.instance}"
    environment = _environment(labels, rules)
    if environment is None:
        return f"Labels: {LABEL_ENVIRONMENT} names no environment of the catalog"
    host = body.get("HostConfig")
    if not isinstance(host, dict):
        return "HostConfig is missing"
    role = labels.get(LABEL_ROLE)
    if role not in _roles(environment):
        return f"Labels: {LABEL_ROLE} is not one for environment {environment.name}: {_shown(role)}"
    of, of_body, of_host = environment, BODY, HOST_CONFIG
    if role == Role.FORWARDER:
        of = forwarder_environment(environment, rules.forwarder_image)
        of_body, of_host = FORWARDER, FORWARDER_HOST_CONFIG
    reason = (
        _unknown(body, of_body, "")
        or _unknown(host, of_host, "HostConfig.")
        or _failed(body, of_body, "", of, rules)
        or _failed(host, of_host, "HostConfig.", of, rules)
        or mount_refusal(host.get("Mounts"), labels, of, rules, has_sockets=role != Role.SERVER)
    )
    if reason is not None or role == Role.FORWARDER:  # a forwarder has no variables
        return reason
    return variables_refusal(body.get("Env") or [], environment, mounts_tasks=mounts_custom_tasks(body))


def rewritten(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body for the engine: the known keys of a *body* that `refusal` allows."""
    is_forwarder = body["Labels"].get(LABEL_ROLE) == Role.FORWARDER
    kept = {key: body[key] for key in (FORWARDER if is_forwarder else BODY) if body.get(key) is not None}
    host = body["HostConfig"]
    return kept | {"HostConfig": {key: host[key] for key in HOST_CONFIG if host.get(key) is not None}}


def shared_with(body: Mapping[str, Any]) -> str:
    """Return the id of the container whose network *body* shares, or an empty string. `refusal` must allow *body*.

    The body does not show whether sharing is allowed: that container must be the server of the same worker.
    """
    match = _SHARED.fullmatch(body["HostConfig"]["NetworkMode"])
    return match[1] if match is not None else ""


def _roles(environment: Environment) -> tuple[str | None, ...]:
    """Return the allowed roles of the environment's containers. An external server has no containers, so no roles."""
    if not environment.server.is_foreign:
        return (None,)
    return (Role.SERVER, Role.FORWARDER) if environment.server.port else ()


def _environment(labels: Mapping[str, Any], rules: Rules) -> Environment | None:
    """Return the environment that the labels name. The gate does not know the keys, so it accepts every tenant."""
    name = labels.get(LABEL_ENVIRONMENT)
    if not isinstance(name, str):
        return None
    base, mark, tag = name.partition(TENANT_MARK)
    environment = rules.environments.get(base)
    if environment is None or not mark:
        return environment
    return environment.for_tenant(tag) if environment.pool.is_separate and tag else None


def _unknown(found: Mapping[str, Any], known: Mapping[str, Check], where: str) -> str | None:
    for key, value in found.items():
        if key not in known and value:  # clients send many empty keys
            return f"{where}{key} is not allowed"
    return None


def _failed(
    found: Mapping[str, Any], checks: Mapping[str, Check], where: str, environment: Environment, rules: Rules
) -> str | None:
    for key, check in checks.items():
        if not check(found.get(key), environment, rules):
            return f"{where}{key} is not allowed for environment {environment.name}: {_shown(found.get(key))}"
    return None


def _shown(value: object) -> str:
    return "it is missing" if value is None else json.dumps(value)[:200]


def _labels(value: Any, environment: Environment, rules: Rules) -> bool:
    worker = value.get(LABEL_WORKER)
    return (
        value.keys() <= _LABELS and all(isinstance(text, str) for text in value.values()) and is_safe_id(worker or "")
    )


def _network(value: Any, environment: Environment, rules: Rules) -> bool:
    # No environment.toml can allow the host's network or another container's network.
    return value == environment.loosened.network and value != "host" and ":" not in value


def _shared_network(value: Any, environment: Environment, rules: Rules) -> bool:
    return isinstance(value, str) and _SHARED.fullmatch(value) is not None


def _root(value: Any, environment: Environment, rules: Rules) -> bool:
    return value is True or (environment.loosened.writable_root and (value is False or value is None))


def _capabilities(value: Any, environment: Environment, rules: Rules) -> bool:
    if _absent(value):
        return True
    granted = {name for name in capabilities(environment) if _capability(name) in TOLERABLE_CAPABILITIES}
    return _is_texts(value) and set(value) <= granted


def _capability(name: str) -> str:
    return name.upper().removeprefix("CAP_")


def _security(value: Any, environment: Environment, rules: Rules) -> bool:
    return (
        _is_texts(value)
        and any(option in _NO_NEW_PRIVILEGES for option in value)
        and all(option in _NO_NEW_PRIVILEGES or _is_own_profile(option, environment) for option in value)
    )


def _is_own_profile(option: str, environment: Environment) -> bool:
    return is_sandboxed(environment) and option == f"seccomp={sandbox_profile()}"


def _devices(value: Any, environment: Environment, rules: Rules) -> bool:
    wanted = device_requests(environment.limits)
    return _absent(value) or json.dumps(value, sort_keys=True) == json.dumps(wanted, sort_keys=True)  # 1 is not true


def _tmpfs(value: Any, environment: Environment, rules: Rules) -> bool:
    if _absent(value):
        return True
    sizes = {"/tmp": environment.limits.tmp_bytes} | ({WORK_TARGET: WORK_BYTES} if is_sandboxed(environment) else {})
    return isinstance(value, dict) and all(
        target in sizes and isinstance(options, str) and _are_tmpfs_options(options, sizes[target], environment)
        for target, options in value.items()
    )


def _are_tmpfs_options(text: str, most_bytes: int, environment: Environment) -> bool:
    options = text.split(",")
    sizes = [option for option in options if option.startswith("size=")]
    flags = {option for option in options if not option.startswith("size=")}
    wanted = {"nosuid", "nodev"} if environment.loosened.writable_root else {"nosuid", "nodev", "noexec"}
    optional = {"rw", "mode=1777"} | ({"exec", "noexec"} if environment.loosened.writable_root else set())
    size = re.fullmatch(r"size=([1-9][0-9]{0,14})", sizes[0], re.ASCII) if len(sizes) == 1 else None
    return size is not None and int(size[1]) <= most_bytes and wanted <= flags <= wanted | optional


def _unmasked(value: Any, environment: Environment, rules: Rules) -> bool:
    # A missing key means the engine's own list, and any other list could be shorter.
    return value is None or (value == [] and is_sandboxed(environment))


def _ulimits(value: Any, environment: Environment, rules: Rules) -> bool:
    return _absent(value) or (
        isinstance(value, list)
        and all(
            isinstance(entry, dict)
            and entry.keys() == {"Name", "Soft", "Hard"}
            and entry["Name"] in ("nofile", "core")
            and _within(entry["Soft"], 0, MAX_NOFILE)
            and _within(entry["Hard"], 0, MAX_NOFILE)
            for entry in value
        )
    )


def _log(value: Any, environment: Environment, rules: Rules) -> bool:
    if not isinstance(value, dict) or value.keys() != {"Type", "Config"} or value["Type"] not in ("json-file", "local"):
        return False
    config = value["Config"]
    if not isinstance(config, dict) or config.keys() != {"max-size", "max-file"} or not _is_texts([*config.values()]):
        return False
    size = re.fullmatch(r"([1-9][0-9]{0,4})([km])", config["max-size"], re.ASCII)
    is_small = size is not None and int(size[1]) * _UNITS[size[2]] <= MAX_LOG_BYTES
    return is_small and config["max-file"] in ("1", "2", "3")


def _restart(value: Any, environment: Environment, rules: Rules) -> bool:
    return _absent(value) or (
        isinstance(value, dict)
        and value.keys() <= {"Name", "MaximumRetryCount"}
        and value.get("Name", "no") in ("", "no")
        and not value.get("MaximumRetryCount")
    )


def _is_list_of_objects(value: Any, environment: Environment, rules: Rules) -> bool:
    return _absent(value) or (isinstance(value, list) and all(isinstance(entry, dict) for entry in value))


def _absent(value: Any) -> bool:
    return value is None or value == [] or value == {}  # the engine takes an empty text for a list with that text


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def _within(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


BODY: Mapping[str, Check] = {
    "Image": lambda value, environment, rules: value == environment.image,
    "User": lambda value, environment, rules: value == user(environment),
    "Env": lambda value, environment, rules: value is None or _is_texts(value),  # see `variables_refusal`
    "Labels": _labels,
    "Healthcheck": lambda value, environment, rules: _absent(value) or value == {"Test": ["NONE"]},
    "HostConfig": lambda value, environment, rules: True,  # HOST_CONFIG checks its keys
}
"""The keys of a create body with their checks. A check also runs for a missing key, with None."""
HOST_CONFIG: Mapping[str, Check] = {
    "NetworkMode": _network,
    "IpcMode": lambda value, environment, rules: value in ("private", "none"),
    "ReadonlyRootfs": _root,
    "CapDrop": lambda value, environment, rules: value == ["ALL"],
    "CapAdd": _capabilities,
    "SecurityOpt": _security,
    "MaskedPaths": _unmasked,
    "ReadonlyPaths": _unmasked,
    "Memory": lambda value, environment, rules: _within(value, MIN_MEMORY_BYTES, environment.limits.memory_bytes),
    "MemorySwap": lambda value, environment, rules: _within(value, MIN_MEMORY_BYTES, environment.limits.memory_bytes),
    "NanoCpus": lambda value, environment, rules: _within(value, 1, round(environment.limits.cpus * 1e9)),
    "PidsLimit": lambda value, environment, rules: _within(value, 1, environment.limits.pids),
    "DeviceRequests": _devices,
    "ShmSize": lambda value, environment, rules: _within(value, 1, shared_memory_bytes(environment.limits)),
    "Tmpfs": _tmpfs,
    "Ulimits": _ulimits,
    "LogConfig": _log,
    "Init": lambda value, environment, rules: value is None or isinstance(value, bool),
    "RestartPolicy": _restart,
    "Mounts": _is_list_of_objects,
}
"""`BODY` for ``HostConfig``. All other keys are refused unless empty: Binds, Privileged, Devices, PidMode, UTSMode,
UsernsMode, CgroupParent, VolumesFrom, Sysctls, Links, Runtime and all keys of future engines."""
FORWARDER: Mapping[str, Check] = {
    **BODY,
    "Entrypoint": lambda value, environment, rules: value == FORWARDER_ENTRYPOINT,
    "Cmd": lambda value, environment, rules: value == forwarder_command(environment),
    "Env": lambda value, environment, rules: _absent(value),
    "Healthcheck": lambda value, environment, rules: _absent(value),
}
"""`BODY` for the forwarder next to a third-party image."""
FORWARDER_HOST_CONFIG: Mapping[str, Check] = {**HOST_CONFIG, "NetworkMode": _shared_network}
_INWARD = frozenset(["", "rprivate", "private", "rslave", "slave"])
"""Mount propagations that keep mounts inside the container invisible outside."""
_KEYS = frozenset(["Type", "Source", "Target", "ReadOnly", "BindOptions"])


def mount_refusal(
    value: Any, labels: Mapping[str, Any], environment: Environment, rules: Rules, *, has_sockets: bool = True
) -> str | None:
    """Return the reason to refuse the mounts *value*, or None if all are allowed.

    A container may mount its worker's own socket folder (if *has_sockets*), its environment's task modules (read-only)
    and the environment's volumes in the catalog. Where the gate sees the first two, it ensures that each is a folder,
    not a link.
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
    """Return True if *body*, which `refusal` must allow, mounts its environment's task modules."""
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
    return mount.keys() <= _KEYS and options in ({}, *({"Propagation": one} for one in _INWARD))
