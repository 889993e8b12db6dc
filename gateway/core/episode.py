"""What happens inside a session: actions, results and the summary at its end. Frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.core.faults import Fault, FaultKind

EPISODE_FINISHED: Final = "episode_finished"
"""The reason of a result for which nothing ran, as the episode was over."""
TOOL_FAILED: Final = "tool_failed"
"""The reason of a result whose tool raised an exception, which is no doing of the agent's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What an agent does, in one of three spellings, of which exactly one is given."""

    name: str | None = None
    """Of a tool; *arguments* are its input."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    text: str | None = None
    """Free text, which the environment understands or refuses."""
    fields: Mapping[str, Any] | None = None
    """A gym-style object, for the environment's default tool."""


@dataclass(frozen=True, slots=True)
class TextBlock:
    """A piece of text that the agent sees; *detail* is free JSON."""

    text: str
    detail: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ImageBlock:
    """An image that the agent sees: *data* in base64."""

    data: str
    mime_type: str
    detail: Mapping[str, Any] | None = None


Block = TextBlock | ImageBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What came of an action. A tool that failed or was refused is a result too: the agent reads *error*."""

    blocks: tuple[Block, ...] = ()
    reward: float | None = None
    """Finite; None says "no reward here", which is not the same as 0.0."""
    finished: bool = False
    metadata: Mapping[str, Any] | None = None
    data: Any = None
    """A structured observation."""
    error: str | None = None
    """Why no tool ran, or how it failed."""
    reason: str = ""
    """Of an error, in one word: ``input_validation``, ``not_found``, ``tool_failed``, ``episode_finished`` …"""
    turn: int | None = None
    """Which of its session's turns this was, from 1 on, as its worker counts them; None: the worker does not count."""
    rewarded: bool | None = None
    """Of one that ended its episode: whether any turn of it gave a reward; None: the worker does not say."""
    faults: tuple[Fault, ...] = ()
    """What the worker tells of the author's code besides: for operators, never for agents and trainers."""


class FaultReply(bytes):
    """A worker's answer in its own protocol's words, which tells of faults."""

    faults: tuple[Fault, ...] = ()
    """As of `StepResult`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How an episode went, as its worker tells when it is closed."""

    reward: float
    finished: bool
    steps: int
    seconds: float
    is_rewarded: bool = True
    """Whether any of its steps gave a reward, be it 0: *reward* is no more than a sum of none otherwise."""
    is_judged: bool = False
    """Whether its environment judges groups of episodes: then one may end without a reward of its own."""
    is_whole: bool = True
    """False: a part of it is not known here, as another replica saw it; then *reward* is no reward."""
    fault: FaultKind | None = None
    """Who is at fault, where it ended with a fault: its setup or its last step failed."""
    faults: tuple[Fault, ...] = ()
    """As of `StepResult`: those that were told with no answer before."""
