"""Detects which dialect of ORS a standard server speaks, once for each worker.

The servers of the two ORS packages differ in the place of secrets and in the operations that they offer. This module
also writes and reads the messages in which the packages differ, or which need validation.
"""

from __future__ import annotations

import base64
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.core.environment import Environment, Split, SplitType, TaskSpec
from gateway.core.errors import InvalidRequest, UpstreamError
from gateway.core.ids import WorkerId
from gateway.core.json_text import compact
from gateway.core.ports.transport import Headers
from gateway.core.session import SessionSetup
from gateway.upstreams.ors.client import OrsClient

KNOWN_MAX: Final = 4096
"""Largest number of workers whose dialect is cached."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The properties of one server."""

    environments: tuple[str, ...]
    """Names of the environments that the server serves, the default environment first."""
    secrets_in_body: bool
    secrets_in_header: bool
    operations: frozenset[str] | None
    """Operations that the server offers for an environment. None if the server does not list them."""

    def offers(self, operation: str) -> bool:
        """Return True if the server lists *operation*."""
        return self.operations is not None and operation in self.operations

    def named(self, environment: Environment) -> str:
        """Return the server's name for *environment*: the configured name, the gateway's name, or the server's default.

        Raises:
            UpstreamError: The server does not serve the configured name, or serves no environment.
        """
        known = {name.lower(): name for name in self.environments}
        name = known.get(environment.worker_name.lower())
        if name is not None:
            return name
        if environment.upstream_name or not self.environments:
            raise UpstreamError(f"the server serves {list(self.environments)!r}, not {environment.worker_name!r}")
        return self.environments[0]


class Flavours:
    """Detects and caches the dialect of each server."""

    def __init__(self, link: OrsClient) -> None:
        self._link = link
        self._known: OrderedDict[tuple[WorkerId, str], Dialect] = OrderedDict()

    async def of(self, worker: WorkerId, address: str) -> Dialect:
        """Return a server's dialect. The first call for a server detects it with requests.

        Raises:
            UpstreamError: The server does not speak ORS, or does not answer.
        """
        known = self._known.get((worker, address))
        if known is None:
            known = self._known[worker, address] = await self._detect(worker, address)
            if len(self._known) > KNOWN_MAX:
                self._known.popitem(last=False)
        return known

    def forget(self, worker: WorkerId, address: str) -> None:
        """Drop a server's dialect, because another server may have replaced it at the same address."""
        self._known.pop((worker, address), None)

    async def _detect(self, worker: WorkerId, address: str) -> Dialect:
        listed = await self._link.ask(worker, address, b"/list_environments")
        names = listed.parsed("/list_environments") if listed.status == 200 else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UpstreamError(f"no ORS server: it answered {listed.status} to /list_environments")
        described = await self._link.ask(worker, address, b"/openapi.json")
        document = described.parsed("/openapi.json") if described.status == 200 else None
        fields = _fields_of_create(document)
        if fields is None:
            # The server has no usable description. Only one of the two packages answers /version. The documented
            # standard takes secrets in the body. Both clients send the header, which other servers ignore.
            versioned = await self._link.ask(worker, address, b"/version")
            return Dialect(tuple(names), versioned.status != 200, True, None)
        in_body = "secrets" in fields
        return Dialect(tuple(names), in_body, not in_body, _operations(document))


def _fields_of_create(document: Any) -> Mapping[str, Any] | None:
    found = document
    for key in ("components", "schemas", "CreateSession", "properties"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None


def _operations(document: Any) -> frozenset[str]:
    paths = document.get("paths") or ()
    return frozenset(str(one).rpartition("/")[2] for one in paths if str(one).count("/") == 2)


_ADDED: Final = ("terminal_tool", "supports_score_group", "message_block_types")
"""Keys of a tool list that one of the two packages leaves out."""


def refuse_config(setup: SessionSetup) -> None:
    """Raise ``InvalidRequest`` if *setup* has a configuration that a standard server would silently ignore."""
    lost = sorted(key for key in setup.config or {} if key != "seed")
    if lost:
        raise InvalidRequest(
            f"config ({', '.join(map(repr, lost))}): a standard ORS server knows no configuration of an episode beside "
            "its task and its secrets; write it into the task"
        )


def wish_of(setup: SessionSetup, name: str, flavour: Dialect) -> tuple[dict[str, Any], Headers]:
    """Return the body of ``/create``, and the headers with secrets."""
    wish: dict[str, Any] = {"env_name": name}
    if not setup.spec and setup.split and setup.index is not None:
        wish |= {"split": setup.split, "index": setup.index}
    else:
        wish["task_spec"] = dict(setup.spec)
    if setup.toolset:
        wish["toolset_name"] = setup.toolset
    headers: Headers = ()
    if setup.secrets and flavour.secrets_in_body:
        wish["secrets"] = dict(setup.secrets)
    if setup.secrets and flavour.secrets_in_header:
        headers = (secrets_header(setup.secrets),)
    return wish, headers


_MISSES_SECRET: Final = re.compile(r"api[ _-]?key|secret|credential|(auth\w*|access|bearer)[ _-]token", re.IGNORECASE)


def secret_hint(message: str) -> str:
    """Return how to give the server a secret, to be appended to the *message* of a failed start that asks for one."""
    if _MISSES_SECRET.search(message) is None:
        return ""
    return " (a trainer's ORS client can send a secret, or the operator names it in [secrets] of environment.toml)"


def secrets_header(secrets: Mapping[str, str]) -> tuple[bytes, bytes]:
    """Return the header that carries *secrets*."""
    return b"x-secrets", base64.b64encode(compact({name: {"value": value} for name, value in secrets.items()}))


def split_of(entry: Any) -> Split:
    """Read an entry of the list of splits. The default type is validation. Raises ``UpstreamError``."""
    name = entry.get("name") if isinstance(entry, Mapping) else entry
    if not isinstance(name, str):
        raise UpstreamError("a split of the worker's has no name")
    kind = entry.get("type") if isinstance(entry, Mapping) else name
    return Split(name, SplitType(kind) if kind in set(SplitType) else SplitType.VALIDATION)


def split_list(value: Any) -> list[Split]:
    """Read the response to ``/splits``. Raises ``UpstreamError``."""
    if not isinstance(value, list):
        raise UpstreamError("the worker's splits are not a list")
    return [split_of(entry) for entry in value]


def task_count(value: Any) -> int:
    """Read the response to ``/num_tasks``. Raises ``UpstreamError``."""
    count = value.get("num_tasks") if isinstance(value, Mapping) else None
    if not isinstance(count, int) or isinstance(count, bool):
        raise UpstreamError("the worker's number of tasks is not an integer")
    return count


def task_list(value: Any) -> list[TaskSpec]:
    """Read the response to ``/task_range``. Raises ``UpstreamError``."""
    tasks = value.get("tasks") if isinstance(value, Mapping) else None
    if not isinstance(tasks, list) or not all(isinstance(task, dict) for task in tasks):
        raise UpstreamError("the worker's tasks are not a list of objects")
    return tasks


def tool_list(value: Any) -> dict[str, Any]:
    """Read a tool list, and add the standard's keys that it lacks. Raises ``UpstreamError``."""
    try:
        tools = [
            {
                "name": str(tool["name"]),
                "description": str(tool.get("description") or ""),
                "input_schema": tool.get("input_schema"),
            }
            for tool in value["tools"]
        ]
        return {"tools": tools} | {key: value.get(key) for key in _ADDED}
    except (TypeError, KeyError, AttributeError) as error:
        raise UpstreamError(f"the worker's tools can't be read: {error!r}") from error


def reason_of(error: str) -> str:
    """Derive the reason of a refusal from its message, because one of the packages sends no reason."""
    if "is not a valid tool" in error:
        return "not_found"
    if error.startswith("Tool name collision"):
        return "name_collision"
    if "the episode has finished" in error:
        return "episode_finished"
    return "input_validation"
