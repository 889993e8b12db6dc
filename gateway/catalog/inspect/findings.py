"""What an inspection found, and what it could not tell.

Which field of a tool's or an action's input a text fills, if its JSON Schema leaves no choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from gateway.core.environment import ActionType, ObservationType, Relaxations, ServerProtocol, SplitType


class Finding(Enum):
    """How a capacity is known."""

    BY_SERVER = "by the server"  #: it refused one more, and said how many it holds
    AT_LEAST = "at least"  #: so many were open at once, and none was refused
    ASSUMED = "assumed"  #: the protocol has no word for it


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sessions that one worker holds at once."""

    slots: int
    told: Finding


@dataclass(frozen=True, slots=True)
class FoundSplit:
    """A split of the server's own tasks."""

    name: str
    type: SplitType
    count: int | None
    """None: it did not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All that could be told of a server."""

    protocol: ServerProtocol
    version: str
    """For people: ``openenv 0.4.1 to 0.7``, ``openreward 0.1.167``."""
    is_own: bool = False
    """Whether it is this project's environment server, which can do more on its Unix socket."""
    description: str = ""
    environments: tuple[str, ...] = ()
    """What it serves, by its own names, the first being its default; empty: it has no names."""
    chosen: str = ""
    """The one of them that was looked at."""
    ready: str = ""
    """A path that answers 200 once it is up; empty: none was found."""
    capacity: Capacity
    splits: tuple[FoundSplit, ...] = ()
    tools: tuple[str, ...] = ()
    """Tools by name; empty for a server whose actions are objects of one form."""
    fields: tuple[str, ...] = ()
    """Of an action that is an object: its fields."""
    default_tool: str = ""
    """The tool that a text means; empty: there are several, or texts have one by themselves (``terminal``)."""
    text_field: str = ""
    """The field that a text fills; empty: it cannot be told, or there is none."""
    terminal: str = ""
    """Of an ORS server: the tool that takes an agent's final text, with its field: ``answer.text``."""
    places: bool = False
    """Whether an OpenEnv reset by split and index means something to it."""
    max_turns: int | None = None
    observation_type: ObservationType | None = None
    action_type: ActionType | None = None
    trouble: str = ""
    """Why a session of trial could not be opened; empty: one was opened and closed."""
    remarks: tuple[str, ...] = ()
    """What could not be told, or what to look at: whole sentences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequest:
    """What is to be looked at, and how."""

    image: str
    port: int = 0
    """0: it is found out."""
    environment: str = ""
    """By the server's own name; empty: its first."""
    variables: Mapping[str, str]
    timeout_s: float
    """For each start of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How an image was run, and what that took."""

    image: str
    port: int
    """That it answers at."""
    loosened: Relaxations = field(default_factory=Relaxations)
    reason: str = ""
    """Why it had to be loosened; empty: it had not."""
    memory_bytes: int | None = None
    """What it used after its sessions of trial; None: the engine did not report it."""
    pids: int | None = None
    start_s: float | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


HIDDEN = frozenset(["metadata"])
"""Fields of every OpenEnv action that no agent fills."""


def names_of(listed: object) -> list[str]:
    """List the names in a list of them; empty where *listed* is none."""
    return [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []


def tools_of(result: object) -> list[Mapping[str, Any]]:
    """List the tools in an answer about them, as far as they have names."""
    listed = result.get("tools") if isinstance(result, Mapping) else None
    if not isinstance(listed, list):
        return []
    return [tool for tool in listed if isinstance(tool, dict) and isinstance(tool.get("name"), str)]


def default_of(tools: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the tool that a text means, and the field that it fills, if there is no choice."""
    if len(tools) != 1:
        return "", ""
    (tool,) = tools
    return tool["name"], text_field(tool.get("inputSchema") or tool.get("input_schema"))


def fields(schema: object) -> tuple[str, ...]:
    """Name the fields of an object's schema, without those that no agent fills."""
    return tuple(name for name in _properties(schema) if name not in HIDDEN)


def text_field(schema: object) -> str:
    """Name the field that a text fills: the only required string, else the only string; empty where that is no one.

    Texts of a closed list (``enum``) do not count: a free text is none of them.
    """
    texts = [name for name in fields(schema) if _is_text(_properties(schema)[name])]
    required = schema.get("required", ()) if isinstance(schema, Mapping) else ()
    needed = [name for name in fields(schema) if isinstance(required, list) and name in required]
    needed_texts = [name for name in texts if name in needed]
    if len(needed_texts) == 1:
        # Another field that must be given would be missing.
        return needed_texts[0] if needed == needed_texts else ""
    return texts[0] if not needed and len(texts) == 1 else ""


def _properties(schema: object) -> Mapping[str, Any]:
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _is_text(schema: object) -> bool:
    if not isinstance(schema, Mapping) or "enum" in schema or "const" in schema:
        return False
    if schema.get("type") == "string":
        return True
    options = schema.get("anyOf")
    return isinstance(options, list) and any(_is_text(option) for option in options)


def one_line(text: str, *, limit: int = 200) -> str:
    """What somebody else wrote, fit to be shown, or written behind a comment sign: one line, printable, short."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
