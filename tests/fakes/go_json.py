"""A model of Go's ``encoding/json``, with which the engine reads bodies, and the types of the engine's create body.

It models what differs from Python's reader: keys of structs match in any case, with the folds that Unicode adds to
ASCII; a repeated key decodes into the value of the first one; ``null`` leaves scalars as they are; a list reuses the
elements of an earlier list.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class GoError(Exception):
    """Go's decoder reports an error, so the engine refuses the body."""


class Pairs(list[tuple[str, Any]]):
    """A JSON object with its keys in order, also repeated ones."""


@dataclass(frozen=True)
class Scalar:
    """``string``, ``bool`` or an integer."""

    zero: str | bool | int


@dataclass(frozen=True)
class Struct:
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pointer:
    to: Any


@dataclass(frozen=True)
class Slice:
    of: Any
    from_text: bool = False
    """True if a text is a list of one element (``strslice.StrSlice``)."""


@dataclass(frozen=True)
class Map:
    of: Any


@dataclass
class _Array:
    """A slice: its elements, and those of an earlier slice behind its end, which a longer one would reuse."""

    elements: list[Any]
    length: int = 0


def decoded(text: bytes, type: Any) -> Any:
    """Return what Go decodes from *text* into a new value of *type*, as plain data. Raises ``GoError``."""
    try:
        # Go replaces invalid UTF-8. Lone surrogates, which Python's reader keeps, are replaced below.
        document = json.loads(text.decode("utf-8", "replace"), object_pairs_hook=Pairs, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise GoError(str(error)) from error
    return _plain(_decode(document, type, zero(type)))


def zero(type: Any) -> Any:
    """Return Go's zero value of *type*."""
    if isinstance(type, Scalar):
        return type.zero
    return {name: zero(of) for name, of in type.fields.items()} if isinstance(type, Struct) else None


def folded(name: str) -> str:
    """Return *name* as Go compares it with the fields of a struct: by simple folding, which reaches ASCII twice."""
    return "".join({"\u017f": "s", "\u212a": "k"}.get(letter, letter.lower()) for letter in name)


def _decode(value: Any, type: Any, into: Any) -> Any:
    if isinstance(type, Scalar):
        return into if value is None else _scalar(value, type.zero)
    if value is None:
        return into if isinstance(type, Struct) else None
    if isinstance(type, Pointer):
        return _decode(value, type.to, zero(type.to) if into is None else into)
    if isinstance(type, Slice):
        return _slice(value, type, into)
    if not isinstance(value, Pairs):
        raise GoError(f"{value!r} is not an object")
    if isinstance(type, Map):
        # An element of a map is a new value each time.
        return (into or {}) | {_text(key): _decode(one, type.of, zero(type.of)) for key, one in value}
    names = {folded(name): name for name in type.fields}
    for key, one in value:
        name = key if key in type.fields else names.get(folded(_text(key)))
        if name is not None:
            into[name] = _decode(one, type.fields[name], into[name])
    return into


def _slice(value: Any, type: Slice, into: _Array | None) -> _Array:
    if type.from_text and isinstance(value, str):
        value = [value]
    if isinstance(value, Pairs) or not isinstance(value, list):
        raise GoError(f"{value!r} is not a list")
    array = into or _Array([])
    for number, one in enumerate(value):
        if number == len(array.elements):
            array.elements.append(zero(type.of))
        array.elements[number] = _decode(one, type.of, array.elements[number])
    array.length = len(value)
    return array


def _scalar(value: Any, zero: str | bool | int) -> Any:
    if type(value) is not type(zero) or (type(value) is int and not -(2**63) <= value < 2**63):
        raise GoError(f"{value!r} is not {type(zero).__name__}")
    return _text(value) if isinstance(value, str) else value


def _text(value: str) -> str:
    return "".join("\ufffd" if "\ud800" <= letter <= "\udfff" else letter for letter in value)


def _refuse(text: str) -> None:
    raise GoError(f"{text} is not JSON")


def _plain(value: Any) -> Any:
    if isinstance(value, _Array):
        return [_plain(one) for one in value.elements[: value.length]]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return copy.copy(value)


# -- the types of a create body (moby, api/types/container)

TEXT, FLAG, NUMBER = Scalar(""), Scalar(False), Scalar(0)
TEXTS, WORDS = Slice(TEXT), Slice(TEXT, from_text=True)
_EMPTY = Struct()
_MOUNT = Struct(
    {
        **dict.fromkeys(("Type", "Source", "Target", "Consistency"), TEXT),
        "ReadOnly": FLAG,
        "BindOptions": Pointer(
            Struct(
                {"Propagation": TEXT}
                | dict.fromkeys(
                    ("NonRecursive", "CreateMountpoint", "ReadOnlyNonRecursive", "ReadOnlyForceRecursive"), FLAG
                )
            )
        ),
        "VolumeOptions": Pointer(
            Struct(
                {
                    "NoCopy": FLAG,
                    "Labels": Map(TEXT),
                    "Subpath": TEXT,
                    "DriverConfig": Pointer(Struct({"Name": TEXT, "Options": Map(TEXT)})),
                }
            )
        ),
        "TmpfsOptions": Pointer(Struct({"SizeBytes": NUMBER, "Mode": NUMBER})),
    }
)
_HOST_CONFIG = Struct(
    {
        **dict.fromkeys(
            (
                *("ContainerIDFile", "NetworkMode", "VolumeDriver", "CgroupnsMode", "IpcMode", "Cgroup", "PidMode"),
                *("UTSMode", "UsernsMode", "Runtime", "Isolation", "CgroupParent", "CpusetCpus", "CpusetMems"),
            ),
            TEXT,
        ),
        **dict.fromkeys(("AutoRemove", "Privileged", "PublishAllPorts", "ReadonlyRootfs"), FLAG),
        **dict.fromkeys(("OomKillDisable", "Init"), Pointer(FLAG)),
        **dict.fromkeys(
            (
                *("Memory", "MemoryReservation", "MemorySwap", "NanoCpus", "CpuPeriod", "CpuQuota", "CpuShares"),
                *("CpuRealtimePeriod", "CpuRealtimeRuntime", "OomScoreAdj", "ShmSize", "CpuCount", "BlkioWeight"),
            ),
            NUMBER,
        ),
        **dict.fromkeys(("PidsLimit", "MemorySwappiness"), Pointer(NUMBER)),
        **dict.fromkeys(
            (
                *("Binds", "VolumesFrom", "Dns", "DnsOptions", "DnsSearch", "ExtraHosts", "GroupAdd", "Links"),
                *("SecurityOpt", "DeviceCgroupRules", "MaskedPaths", "ReadonlyPaths"),
            ),
            TEXTS,
        ),
        **dict.fromkeys(("CapAdd", "CapDrop"), WORDS),
        **dict.fromkeys(("Annotations", "StorageOpt", "Tmpfs", "Sysctls"), Map(TEXT)),
        "PortBindings": Map(Slice(Struct({"HostIp": TEXT, "HostPort": TEXT}))),
        "LogConfig": Struct({"Type": TEXT, "Config": Map(TEXT)}),
        "RestartPolicy": Struct({"Name": TEXT, "MaximumRetryCount": NUMBER}),
        "Devices": Slice(Struct(dict.fromkeys(("PathOnHost", "PathInContainer", "CgroupPermissions"), TEXT))),
        "DeviceRequests": Slice(
            Struct(
                {"Driver": TEXT, "Count": NUMBER, "DeviceIDs": TEXTS, "Capabilities": Slice(TEXTS)}
                | {"Options": Map(TEXT)}
            )
        ),
        "Ulimits": Slice(Pointer(Struct({"Name": TEXT, "Hard": NUMBER, "Soft": NUMBER}))),
        "Mounts": Slice(_MOUNT),
    }
)
CREATE = Struct(
    {
        **dict.fromkeys(("Hostname", "Domainname", "User", "Image", "WorkingDir", "MacAddress", "StopSignal"), TEXT),
        **dict.fromkeys(("AttachStdin", "AttachStdout", "AttachStderr", "Tty", "OpenStdin", "StdinOnce"), FLAG),
        **dict.fromkeys(("ArgsEscaped", "NetworkDisabled"), FLAG),
        **dict.fromkeys(("ExposedPorts", "Volumes"), Map(_EMPTY)),
        **dict.fromkeys(("Env", "OnBuild"), TEXTS),
        **dict.fromkeys(("Cmd", "Entrypoint", "Shell"), WORDS),
        "StopTimeout": Pointer(NUMBER),
        "Labels": Map(TEXT),
        "Healthcheck": Pointer(
            Struct(
                {"Test": TEXTS}
                | dict.fromkeys(("Interval", "Timeout", "StartPeriod", "StartInterval", "Retries"), NUMBER)
            )
        ),
        "HostConfig": Pointer(_HOST_CONFIG),
        "NetworkingConfig": Pointer(Struct({"EndpointsConfig": Map(Pointer(_EMPTY))})),
    }
)
FILTERS = Map(TEXTS)
"""The ``filters`` of lists and events."""
