"""Which standard ORS server a worker is, found out once for each: they differ in where secrets go, and in what they
offer.

The words of the two ORS packages, where they differ or have to be read with care.
"""

from __future__ import annotations

import base64
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
"""Workers that are remembered."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """What one server is like."""

    environments: tuple[str, ...]
    """What it serves, its default one first."""
    secrets_in_body: bool
    secrets_in_header: bool
    operations: frozenset[str] | None
    """What it offers of an environment; None: it does not tell."""

    def offers(self, operation: str) -> bool:
        """Whether it is sure to know *operation*."""
        return self.operations is not None and operation in self.operations

    def named(self, environment: Environment) -> str:
        """What *environment* is called there: as it is configured, else as here, else it is the default one.

        Raises:
            UpstreamError: it serves none of the name that was configured.
        """
        known = {name.lower(): name for name in self.environments}
        name = known.get(environment.worker_name.lower())
        if name is not None:
            return name
        if environment.upstream_name or not self.environments:
            raise UpstreamError(f"the server serves {list(self.environments)!r}, not {environment.worker_name!r}")
        return self.environments[0]


class Flavours:
    """What is known of the servers."""

    def __init__(self, link: OrsClient) -> None:
        self._link = link
        self._known: OrderedDict[tuple[WorkerId, str], Dialect] = OrderedDict()

    async def of(self, worker: WorkerId, address: str) -> Dialect:
        """Look a server's flavour up; the first time, ask it.

        Raises:
            UpstreamError: it is no ORS server, or does not answer.
        """
        known = self._known.get((worker, address))
        if known is None:
            known = self._known[worker, address] = await self._detect(worker, address)
            if len(self._known) > KNOWN_MAX:
                self._known.popitem(last=False)
        return known

    def forget(self, worker: WorkerId, address: str) -> None:
        """Ask anew the next time: the server at an address may have been replaced."""
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
            # It does not describe itself. One of the two packages has a version; the documented standard takes secrets
            # in the body, and both clients send the header, which is ignored where it is not known.
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
"""Keys of a tool list that one of the packages leaves out."""


def refuse_config(setup: SessionSetup) -> None:
    """Refuse what would be lost silently. Raises ``InvalidRequest``."""
    lost = sorted(key for key in setup.config or {} if key != "seed")
    if lost:
        raise InvalidRequest(
            f"config ({', '.join(map(repr, lost))}): a standard ORS server knows no configuration of an episode beside "
            "its task and its secrets; write it into the task"
        )


def wish_of(setup: SessionSetup, name: str, flavour: Dialect) -> tuple[dict[str, Any], Headers]:
    """The body of ``/create``, and the headers that go with it."""
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


def secrets_header(secrets: Mapping[str, str]) -> tuple[bytes, bytes]:
    """Return the header that carries *secrets*."""
    return b"x-secrets", base64.b64encode(compact({name: {"value": value} for name, value in secrets.items()}))


def split_of(entry: Any) -> Split:
    """Read an entry of the list of splits; one without a known type is for validation. Raises ``UpstreamError``."""
    name = entry.get("name") if isinstance(entry, Mapping) else entry
    if not isinstance(name, str):
        raise UpstreamError("a split of the worker's has no name")
    kind = entry.get("type") if isinstance(entry, Mapping) else name
    return Split(name, SplitType(kind) if kind in set(SplitType) else SplitType.VALIDATION)


def split_list(value: Any) -> list[Split]:
    """Read the answer to ``/splits``. Raises ``UpstreamError``."""
    if not isinstance(value, list):
        raise UpstreamError("the worker's splits are no list")
    return [split_of(entry) for entry in value]


def task_count(value: Any) -> int:
    """Read the answer to ``/num_tasks``. Raises ``UpstreamError``."""
    count = value.get("num_tasks") if isinstance(value, Mapping) else None
    if not isinstance(count, int) or isinstance(count, bool):
        raise UpstreamError("the worker's number of tasks is no integer")
    return count


def task_list(value: Any) -> list[TaskSpec]:
    """Read the answer to ``/task_range``. Raises ``UpstreamError``."""
    tasks = value.get("tasks") if isinstance(value, Mapping) else None
    if not isinstance(tasks, list) or not all(isinstance(task, dict) for task in tasks):
        raise UpstreamError("the worker's tasks are no list of objects")
    return tasks


def tool_list(value: Any) -> dict[str, Any]:
    """Read a tool list; it has every key of the standard then. Raises ``UpstreamError``."""
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
    """The reason of a refusal that one of the packages leaves out, by its words."""
    if "is not a valid tool" in error:
        return "not_found"
    if error.startswith("Tool name collision"):
        return "name_collision"
    if "the episode has finished" in error:
        return "episode_finished"
    return "input_validation"
