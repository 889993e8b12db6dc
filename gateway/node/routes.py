"""Defines the gate's requests: a closed table of methods and paths, each with its query parameters.

The gate compares paths as received, without decoding. The table has no escape, no dot segment and no double slash, so
the engine cannot read an accepted path differently.

The gate parses the ``filters`` of lists and events strictly and writes them again with the instance's label. The engine
combines several values of one key with "or", but labels with "and", so an added label narrows the result.

Of the engine's ``/info`` the gate shows nothing about other containers, images, networks or registries.

The gate accepts only JSON with a single meaning, because the engine parses it with another implementation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qsl

from gateway.backends.docker.calls import GPU_DEVICE, GPU_RUNTIME
from gateway.backends.docker.container import LABEL_INSTANCE

MIN_MINOR = 41
"""Minimum minor API version, 1.41 (engine 20.10). In older versions containers get the host's cgroup namespace."""
_QUERY_MAX_BYTES = 8192
_REFERENCE = r"(?P<reference>[A-Za-z0-9][A-Za-z0-9_.-]{0,254})"
_IMAGE = (
    r"(?P<reference>[a-z0-9][A-Za-z0-9_.-]*(?::[0-9]+)?(?:/[A-Za-z0-9_.-]+)*"
    r"(?::[A-Za-z0-9_.-]+)?(?:(?:@|%40)sha256:[0-9a-f]{64})?)"
)


class GateRefusal(Exception):
    """A request that the gate refuses. Its client receives ``status`` and the message."""

    def __init__(self, message: str, *, status: int = HTTPStatus.FORBIDDEN) -> None:
        super().__init__(message)
        self.status = status


class RouteKind(Enum):
    """The gate's treatment of a request."""

    PLAIN = auto()  #: forwarded unchanged
    INFO = auto()  #: forwarded, with a reduced response
    LIST = auto()  #: forwarded with the instance's label as a filter
    EVENTS = auto()  #: like LIST, for container events only
    CREATE = auto()  #: forwarded with a checked and rewritten body
    INSPECT = auto()  #: inspects a container of the instance
    START = auto()  #: starts a container of the instance that has never run
    CONTAINER = auto()  #: runs another operation on a container of the instance
    REMOVE = auto()  #: removes a container of the instance and its socket folder
    IMAGE = auto()  #: inspects an image of the catalog
    VOLUME = auto()  #: inspects a volume of the workers' sockets, custom tasks or the catalog


_FLAG = r"[01]|true|false|True|False"
_TIME = r"[0-9]{1,12}(\.[0-9]{1,9})?"
_PARAMETERS: Mapping[str, str] = {
    "all": _FLAG,
    "condition": r"not-running|next-exit|removed",
    "filters": r".*",  # parsed and rewritten
    "follow": _FLAG,
    "force": _FLAG,
    "link": r"0|false|False",
    "limit": r"-1|[0-9]{1,6}",
    "name": r"[A-Za-z0-9][A-Za-z0-9_.-]{1,254}",
    "one-shot": _FLAG,
    "signal": r"[A-Z0-9+-]{1,12}",
    "since": _TIME,
    "size": r"0|false|False",  # any other value makes the engine read every container's files
    "stderr": _FLAG,
    "stdout": _FLAG,
    "stream": _FLAG,
    "t": r"[0-9]{1,5}",
    "tail": r"all|[0-9]{1,7}",
    "timestamps": _FLAG,
    "trunc_cmd": _FLAG,
    "until": _TIME,
    "v": _FLAG,
}


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the table."""

    method: str
    pattern: str
    kind: RouteKind
    parameters: tuple[str, ...] = ()


ROUTES = (
    Route("GET", "/_ping", RouteKind.PLAIN),
    Route("HEAD", "/_ping", RouteKind.PLAIN),
    Route("GET", "/version", RouteKind.PLAIN),
    Route("GET", "/info", RouteKind.INFO),
    Route("GET", "/containers/json", RouteKind.LIST, ("all", "limit", "size", "trunc_cmd", "filters")),
    Route("POST", "/containers/create", RouteKind.CREATE, ("name",)),
    Route("GET", f"/containers/{_REFERENCE}/json", RouteKind.INSPECT, ("size",)),
    Route(
        "GET",
        f"/containers/{_REFERENCE}/logs",
        RouteKind.CONTAINER,
        ("stdout", "stderr", "timestamps", "follow", "tail", "since", "until"),
    ),
    Route("GET", f"/containers/{_REFERENCE}/stats", RouteKind.CONTAINER, ("stream", "one-shot")),
    Route("POST", f"/containers/{_REFERENCE}/start", RouteKind.START),
    Route("POST", f"/containers/{_REFERENCE}/stop", RouteKind.CONTAINER, ("t", "signal")),
    Route("POST", f"/containers/{_REFERENCE}/kill", RouteKind.CONTAINER, ("signal",)),
    Route("POST", f"/containers/{_REFERENCE}/wait", RouteKind.CONTAINER, ("condition",)),
    Route("POST", f"/containers/{_REFERENCE}/pause", RouteKind.CONTAINER),
    Route("POST", f"/containers/{_REFERENCE}/unpause", RouteKind.CONTAINER),
    Route("DELETE", f"/containers/{_REFERENCE}", RouteKind.REMOVE, ("v", "force", "link")),
    Route("GET", f"/images/{_IMAGE}/json", RouteKind.IMAGE),
    Route("GET", "/events", RouteKind.EVENTS, ("since", "until", "filters")),
    Route("GET", f"/volumes/{_REFERENCE}", RouteKind.VOLUME),
)
_COMPILED = tuple((route, re.compile(route.pattern, re.ASCII)) for route in ROUTES)
_VERSIONED = re.compile(r"/v1\.([0-9]{1,3})(/.*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Operation:
    """A request that matches the table."""

    kind: RouteKind
    method: str
    path: str
    """The path without version and query."""
    version: str
    """The path's version prefix, such as ``/v1.41``. If empty, the engine uses its own version."""
    reference: str
    """The container, image or volume in the path, or an empty string."""
    query: Mapping[str, str]

    def target(self, path: str | None = None) -> str:
        """Return the engine's path with version: of this request, or of *path*."""
        return self.version + (self.path if path is None else path)


def find(method: str, raw_path: bytes, query: bytes) -> Operation:
    """Look up a request in the table.

    Raises:
        GateRefusal: The table does not have the request, or does not allow one of its parameters.
    """
    path = raw_path.decode("latin-1")
    version, path = _split_version(path)
    for route, pattern in _COMPILED:
        match = pattern.fullmatch(path) if route.method == method else None
        if match is not None:
            reference = match.groupdict().get("reference", "").replace("%40", "@")
            return Operation(route.kind, method, path, version, reference, _parameters(query, route))
    raise GateRefusal(f"{method} {path[:200]!r} is not among the requests that this gate passes on")


def _split_version(path: str) -> tuple[str, str]:
    match = _VERSIONED.fullmatch(path)
    if match is None:
        return "", path
    if int(match[1]) < MIN_MINOR:
        raise GateRefusal(
            f"client version 1.{match[1]} is too old. Minimum supported API version is 1.{MIN_MINOR}",
            status=HTTPStatus.BAD_REQUEST,
        )
    return f"/v1.{match[1]}", match[2]


def _parameters(query: bytes, route: Route) -> dict[str, str]:
    if len(query) > _QUERY_MAX_BYTES:
        raise GateRefusal("the query is too long", status=HTTPStatus.REQUEST_URI_TOO_LONG)
    try:
        text = query.decode("ascii")
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text), errors="strict", max_num_fields=32)
    except ValueError as error:
        raise GateRefusal(f"the query is malformed: {error}", status=HTTPStatus.BAD_REQUEST) from error
    found: dict[str, str] = {}
    for name, value in pairs:
        if name not in route.parameters or name in found:
            raise GateRefusal(f"the query parameter {name[:64]!r} is not allowed here, or not twice")
        if re.fullmatch(_PARAMETERS[name], value, re.ASCII | re.DOTALL) is None:
            raise GateRefusal(f"the query parameter {name} cannot be {value[:64]!r}")
        found[name] = value
    return found


_LIST_KEYS = frozenset(["label", "name", "id", "status", "health", "exited"])
"""Allowed filters. "before", "since", "ancestor", "network" and "volume" would reveal objects of other instances."""
_EVENT_KEYS = frozenset(["label", "event", "container", "type"])
Filters = dict[str, list[str]]


def own_containers(given: str, instance: str) -> Filters:
    """Narrow the filters *given* (JSON, or empty) to containers of *instance*.

    Raises:
        GateRefusal: The filters are malformed or not allowed.
    """
    return _with_label(_read(given, _LIST_KEYS), instance)


def own_events(given: str, instance: str) -> Filters:
    """Narrow the filters *given* to container events of *instance*. The label alone would also match images.

    Raises:
        GateRefusal: The filters are malformed or not allowed.
    """
    filters = _read(given, _EVENT_KEYS)
    if filters.get("type", ["container"]) != ["container"]:
        raise GateRefusal("only events of type container are passed on")
    return _with_label(filters, instance) | {"type": ["container"]}


def _with_label(filters: Filters, instance: str) -> Filters:
    return filters | {"label": [*filters.get("label", []), f"{LABEL_INSTANCE}={instance}"]}


def _read(given: str, allowed: frozenset[str]) -> Filters:
    if not given:
        return {}
    try:
        found = parse(given.encode("utf-8", "surrogatepass"))
    except Malformed as error:
        raise GateRefusal(f"filters: {error}", status=HTTPStatus.BAD_REQUEST) from error
    filters: Filters = {}
    for key, values in found.items():
        # Clients send a list, or (older clients) an object whose keys are the values.
        texts = [text for text in values if isinstance(text, str)] if isinstance(values, list | dict) else []
        if key not in allowed or not isinstance(values, list | dict) or len(texts) != len(values):
            raise GateRefusal(f"the filter {key[:64]!r} is not allowed here, or not a list of texts")
        filters[key] = texts
    return filters


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
    """Reduce *info* to `FIELDS` and the presence of GPUs, without paths, other runtimes and other devices."""
    shown = {name: info[name] for name in FIELDS if name in info}
    runtimes = info.get("Runtimes") or {}
    devices = info.get("DiscoveredDevices") or []
    return shown | {
        "Runtimes": {GPU_RUNTIME: {}} if GPU_RUNTIME in runtimes else {},
        "DiscoveredDevices": [{"ID": str(one["ID"])} for one in devices if GPU_DEVICE in str(one.get("ID", ""))],
    }


class Malformed(Exception):
    """A JSON body that is invalid or may have more than one meaning."""


def parse(body: bytes) -> dict[str, Any]:
    """Parse a JSON object that has a single meaning.

    Raises:
        Malformed: The body is not UTF-8 or not one JSON object, or has a duplicate key, NaN, an infinity, a control
            character or a lone surrogate.
    """
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_unambiguous, parse_constant=_no_number)
        if not isinstance(value, dict):
            raise Malformed("the body is not a JSON object")
        if any(not _is_plain(text) for text in _texts(value)):
            raise Malformed("the body has text with control characters or lone surrogates")
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the body is not JSON: {error}") from error
    return value


def _is_plain(text: str) -> bool:
    # The engine replaces invalid Unicode, and C programs behind it end a string at NUL.
    return all(character >= " " and not "\ud800" <= character <= "\udfff" for character in text)


def _texts(value: object) -> Iterator[str]:
    """Yield every key and string in *value*. Without recursion, because the client chooses the depth."""
    pending = [value]
    while pending:
        found = pending.pop()
        if isinstance(found, str):
            yield found
        elif isinstance(found, list):
            pending += found
        elif isinstance(found, dict):
            yield from found
            pending += found.values()


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise Malformed(f"the key {key[:64]!r} occurs twice")
        found[key] = value
    return found


def _no_number(text: str) -> None:
    raise Malformed(f"{text} is not a number")
