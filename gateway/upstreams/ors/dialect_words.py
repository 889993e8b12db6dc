"""The words of the two ORS packages, where they differ or have to be read with care."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, Final

from gateway.core.environment import Split, SplitType, TaskSpec
from gateway.core.errors import InvalidRequest, UpstreamError
from gateway.core.ports.transport import Headers
from gateway.core.session import Setup
from gateway.upstreams.ors.dialects import Flavour

_ADDED: Final = ("terminal_tool", "supports_score_group", "message_block_types")
"""Keys of a tool list that one of the packages leaves out."""


def refuse_config(setup: Setup) -> None:
    """Refuse what would be lost silently. Raises ``InvalidRequest``."""
    lost = sorted(key for key in setup.config or {} if key != "seed")
    if lost:
        raise InvalidRequest(
            f"config ({', '.join(map(repr, lost))}): a standard ORS server knows no configuration of an episode beside "
            "its task and its secrets; write it into the task"
        )


def wish_of(setup: Setup, name: str, flavour: Flavour) -> tuple[dict[str, Any], Headers]:
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
        wrapped = {name: {"value": value} for name, value in setup.secrets.items()}
        headers = ((b"x-secrets", base64.b64encode(json.dumps(wrapped, separators=(",", ":")).encode())),)
    return wish, headers


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
