"""Actions, step results and the final summary of an episode. Frozen values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from gateway.core.faults import Fault, FaultKind
from gateway.core.json_text import compact, parse

EPISODE_FINISHED: Final = "episode_finished"
"""The reason of a result for which nothing ran, because the episode was over."""
TOOL_FAILED: Final = "tool_failed"
"""The reason of a result whose tool raised an exception, which is not the agent's fault."""
TOOL_ERROR: Final = "tool_error"
"""The reason of a result whose tool raised an error that is the agent's own, such as an illegal move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """An agent's action in one of three forms: a tool call, text, or an object. Exactly one form is given."""

    name: str | None = None
    """Name of the tool; *arguments* are its input."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    text: str | None = None
    """Free text, which the environment accepts or refuses."""
    is_final: bool = False
    """Whether the agent calls no more tools, so that *text* is an action only where it can be an answer."""
    fields: Mapping[str, Any] | None = None
    """A gym-style object, for the environment's default tool."""


@dataclass(frozen=True, slots=True)
class TextBlock:
    """A text that the agent sees; *detail* is free JSON."""

    text: str
    detail: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ImageBlock:
    """An image that the agent sees; *data* is base64."""

    data: str
    mime_type: str
    detail: Mapping[str, Any] | None = None


Block = TextBlock | ImageBlock
ROLES: Final = ("system", "user", "assistant")


def role_of(block: Block) -> str | None:
    """Return the role that *block* names as the header of a message. None: *block* is no header."""
    role = (block.detail or {}).get("role")
    return role if role in ROLES and isinstance(block, TextBlock) and block.text == f"[{role}]" else None


def without_lone_role(blocks: Sequence[Block]) -> Sequence[Block]:
    """Return *blocks* without the header of a conversation that is one message of the user, for use as one text."""
    roles = [role_of(block) for block in blocks]
    return blocks[1:] if roles[:1] == ["user"] and not any(roles[1:]) else blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of an action. A failed or refused tool call also has a result: the agent reads *error*."""

    blocks: tuple[Block, ...] = ()
    reward: float | None = None
    """Finite; None means that there is no reward, which differs from 0.0."""
    finished: bool = False
    metadata: Mapping[str, Any] | None = None
    data: Any = None
    """A structured observation."""
    error: str | None = None
    """The reason why no tool ran, or how the tool failed."""
    reason: str = ""
    """One word for the error: ``input_validation``, ``not_found``, ``tool_error``, ``episode_finished`` …"""
    turn: int | None = None
    """The worker's number of this turn in its session, from 1 on; None: the worker does not count."""
    rewarded: bool | None = None
    """For the result that ended the episode: True if any turn gave a reward; None: the worker does not report it."""
    faults: tuple[Fault, ...] = ()
    """Faults of the author's code that the worker reports: for operators, never for agents and trainers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The result of an episode, as its worker reports it when the session closes."""

    reward: float
    finished: bool
    steps: int
    seconds: float
    is_rewarded: bool = True
    """True if any step gave a reward, even 0. If False, *reward* is only an empty sum."""
    is_judged: bool = False
    """True if the environment judges groups of episodes; an episode may then end without a reward of its own."""
    is_whole: bool = True
    """False if another replica saw a part that is not known here; *reward* is then not a reward."""
    fault: FaultKind | None = None
    """The party at fault, if the setup or the last step failed; None: no fault."""
    unexpected_error: str = ""
    """The first unexpected exception of a tool, with its line, as ``KeyError: 'x' (server.py, line 3)``. The
    episode went on, but its rewards are not only the agent's doing. Empty: there was none."""
    faults: tuple[Fault, ...] = ()
    """Faults that no earlier answer reported; see `StepResult`."""


def summary_to_json(summary: Summary) -> bytes:
    """Write a summary, without its faults, as compact JSON."""
    told = asdict(summary)
    del told["faults"]
    for name, usual in (("is_whole", True), ("is_judged", False), ("unexpected_error", "")):
        if told[name] == usual:
            del told[name]  # older replicas can't parse the field
    return compact(told)


def summary_of_json(text: str | bytes) -> Summary:
    """Parse the output of `summary_to_json`. Raises ``ValueError`` or ``TypeError``."""
    value = parse(text)
    fault = FaultKind(value["fault"]) if value.get("fault") else None
    return Summary(**{**value, "fault": fault, "faults": ()})
