"""What the benchmark of sandboxes is to do, and what it found."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import StrEnum

from bench.load.boxes import Taken
from bench.measures.cold import ENGINE
from bench.measures.opens import Bursts
from bench.reporting.grid import Grid

IMAGE = "env-gateway/os:latest"
LIBRARY = "the library alone"
OS_SERVER = "os server, directly"
PROCESSES = "gateway, processes"
CONTAINERS = "gateway, Docker"
SDK = "a container a session"
WORKERS = "workers"
"""Beside the gateway's name in figures of CPU time."""


class Way(StrEnum):
    """How a group of sessions gets its prepared state."""

    KEPT = "it is there already"
    ONCE = "made once, by the group"
    EACH = "made by each session"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How often to do what."""

    docker: bool = False
    """Whether to use an engine, too."""
    engine: str = ENGINE
    image: str = IMAGE
    rounds: int = 10
    opens: int = 50
    """Sessions in turn, of each way in each round."""
    sdk_opens: int = 3
    """The same, of containers: each takes as long as fifty sandboxes."""
    callers: tuple[int, ...] = (4, 8, 16)
    sustain_s: float = 4.0
    sustain_rounds: int = 3
    group: int = 8
    groups: int = 5
    bursts: tuple[int, ...] = (64, 256)
    burst_rounds: int = 3
    held: int = 16


QUICK = Plan(rounds=3, opens=15, sdk_opens=1, sustain_s=1.5, sustain_rounds=1, groups=1, burst_rounds=1)


@dataclass(frozen=True, slots=True)
class HeldBoxes:
    """What idle sessions add to the workers, and how it was counted."""

    subject: str
    counted: str
    sessions: int
    mib_a_session: float


@dataclass(slots=True)
class Samples:
    """All of it."""

    in_turn: defaultdict[str, list[Taken]] = field(default_factory=lambda: defaultdict(list))
    sustained: Grid = field(default_factory=dict)
    """A step is a whole session: open, first command, close."""
    groups_s: defaultdict[str, defaultdict[Way, list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    """To the last prompt of a group."""
    bursts: defaultdict[str, dict[int, Bursts]] = field(default_factory=lambda: defaultdict(dict))
    held: list[HeldBoxes] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Sentences on what could not be measured here, and why."""
    group_errors: Counter[str] = field(default_factory=Counter)
