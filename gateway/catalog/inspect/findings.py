"""Defines the results of an inspection, and finds the field of a tool's or an action's input that a text fills.

A text fills a field only if the JSON Schema allows exactly one choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from gateway.core.environment import ActionType, ObservationType, Relaxations, ServerProtocol, SplitType


class Finding(Enum):
    """The source of a capacity."""

    BY_SERVER = "by the server"  #: the server refused a session and reported its capacity
    AT_LEAST = "at least"  #: so many sessions were open concurrently, and the server refused none
    ASSUMED = "assumed"  #: the protocol does not report a capacity
    IN_DOUBT = "in doubt"  #: a further session failed for another reason than a full server


@dataclass(frozen=True, slots=True)
class Capacity:
    """Number of sessions that one worker holds concurrently, and the source of this number."""

    slots: int
    told: Finding


@dataclass(frozen=True, slots=True)
class FoundSplit:
    """A split of the server's own tasks."""

    name: str
    type: SplitType
    count: int | None
    """Number of tasks; None: the server did not report it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All results of the inspection of a server."""

    protocol: ServerProtocol
    version: str
    """Readable name and version: ``openenv 0.4.1 to 0.7``, ``openreward 0.1.167``."""
    is_own: bool = False
    """True for this project's environment server, which has more functions on its Unix socket."""
    description: str = ""
    environments: tuple[str, ...] = ()
    """The server's own names of its environments, the default one first; empty: they have no names."""
    chosen: str = ""
    """The inspected environment, one of `environments`."""
    ready: str = ""
    """Path that answers 200 once the server is up; empty: none was found."""
    capacity: Capacity
    splits: tuple[FoundSplit, ...] = ()
    tools: tuple[str, ...] = ()
    """Names of the tools; empty for a server whose actions are objects of one form."""
    fields: tuple[str, ...] = ()
    """Names of the fields of an action that is an object."""
    default_tool: str = ""
    """The tool that a text calls; empty: there are several tools, or texts go to the `terminal` tool."""
    text_field: str = ""
    """The field that a text fills; empty: there is no such field, or several are possible."""
    terminal: str = ""
    """The tool of an ORS server for an agent's final text, with its field: ``answer.text``."""
    seeds_do_nothing: bool = False
    """True if resets with two seeds, and a step after each, showed the same."""
    places: bool = False
    """True if an OpenEnv server accepts a reset by split and index."""
    reset_s: float | None = None
    """Seconds that the slowest reset, or start of an episode, of the trial took; None: none was measured."""
    step_s: float | None = None
    """Seconds that the slowest step of the trial took; None: none was measured."""
    max_turns: int | None = None
    has_named_samples: bool = False
    """True if the samples of an AReaL server are not numbered, so that only tasks that name one can be opened."""
    observation_type: ObservationType | None = None
    action_type: ActionType | None = None
    observed: tuple[str, ...] = ()
    """Paths of the fields in the observations of an OpenEnv server."""
    reads: tuple[tuple[str, str], ...] = ()
    """What an agent of another protocol reads of the trial session: after what, and the text as one line."""
    trouble: str = ""
    """The reason why the trial session could not be opened; empty: one was opened and closed."""
    remarks: tuple[str, ...] = ()
    """Whole sentences about unknown values and values to check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequest:
    """The image to inspect, and the options of its trial run."""

    image: str
    port: int = 0
    """Port of the server; 0: the trial finds it."""
    environment: str = ""
    """The server's own name of the environment to inspect; empty: its first environment."""
    variables: Mapping[str, str]
    timeout_s: float
    """Maximum seconds for each start of the image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The options of an image's successful trial run, and the resources that it used."""

    image: str
    port: int
    """Port on which the server answers."""
    loosened: Relaxations = field(default_factory=Relaxations)
    reason: str = ""
    """Why the image needs more privileges than the hardened default; empty: it does not."""
    memory_bytes: int | None = None
    """Memory used after the trial sessions; None: the engine did not report it."""
    pids: int | None = None
    start_s: float | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


HIDDEN = frozenset(["metadata"])
"""Fields of every OpenEnv action that agents do not fill."""


def names_of(listed: object) -> list[str]:
    """Return the strings in *listed*; an empty list if *listed* is not a list."""
    return [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []


def tools_of(result: object) -> list[Mapping[str, Any]]:
    """Return the tools with a name from an answer that lists tools."""
    listed = result.get("tools") if isinstance(result, Mapping) else None
    if not isinstance(listed, list):
        return []
    return [tool for tool in listed if isinstance(tool, dict) and isinstance(tool.get("name"), str)]


def default_of(tools: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the only tool and the field of it that a text fills; empty names if the choice is ambiguous."""
    if len(tools) != 1:
        return "", ""
    (tool,) = tools
    return tool["name"], text_field(tool.get("inputSchema") or tool.get("input_schema"))


def fields(schema: object) -> tuple[str, ...]:
    """Return the fields of an object's schema, without the `HIDDEN` ones."""
    return tuple(name for name in _properties(schema) if name not in HIDDEN)


def text_field(schema: object) -> str:
    """Return the field that a text fills: the only required string, else the only string; empty if there is none.

    A string from a closed list (``enum``) does not count, because it is not a free text.
    """
    texts = [name for name in fields(schema) if _is_text(_properties(schema)[name])]
    required = schema.get("required", ()) if isinstance(schema, Mapping) else ()
    needed = [name for name in fields(schema) if isinstance(required, list) and name in required]
    needed_texts = [name for name in texts if name in needed]
    if len(needed_texts) == 1:
        # If other fields are required too, a text alone would leave them empty.
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
    """Return third-party text as one short, printable line, safe for display and in a comment of a file."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
