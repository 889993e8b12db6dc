"""What a capacity is asked for: what trainers do, and what there is to do it on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from bench.capacity.figures import PROTOCOLS

STARTS_AT_ONCE: Final = 8
"""Of one leader, at each engine (``starts.STARTS_AT_ONCE``)."""
MIXES: Final[Mapping[str, Mapping[str, float]]] = {
    "all shared": {},
    "half sandbox": {"sandbox": 0.5},
    "a tenth exclusive": {"exclusive": 0.1},
}
"""Shares of sessions, by what they are called."""
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What trainers do.

    Raises:
        ValueError: a field is out of its range; with its name.
    """

    sessions: float
    """Open at once."""
    sandbox: float = 0.0
    """Share of the sessions that are sandboxes."""
    exclusive: float = 0.0
    """Share that has a container of its own, made anew for each; the rest are objects in shared workers."""
    period_s: float = 5.0
    """From one step of a session to its next."""
    step_s: float = 0.1
    """How long one takes."""
    steps: float = 20.0
    """Of an episode."""
    protocol: str = "ors"
    wandering: float = 1.0
    """Share of calls that come to a replica at random: 1 where each has a connection of its own (AReaL), 0 where a
    session keeps one (OpenEnv)."""
    group_size: float = 8.0
    warm: float = 0.1
    """Free slots beyond the sessions, in parts of them."""
    shared_slots: float = 64.0
    sandbox_slots: float = 16.0
    step_cpu_s: float = 1e-3
    """What the environment itself computes in a step: a guess, as each is another."""
    prepare_cpu_s: float = 0.1
    """To prepare a sandbox's task, once for a group: a guess."""
    exclusive_bytes: float = 256 * 2**20
    """What runs in a session's own container: a guess."""
    limit_bytes: float = 512 * 2**20
    """The most memory that a worker may take, as its environment says."""

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise ValueError(f"protocol: {self.protocol!r} is none of {', '.join(PROTOCOLS)}")
        for name in ("sandbox", "exclusive", "wandering"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: {getattr(self, name)!r} is no share")
        if self.sandbox + self.exclusive > 1:
            raise ValueError("sandbox, exclusive: they are more than all sessions")
        for name in ("sessions", "period_s", "steps", "group_size", "shared_slots", "sandbox_slots"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: {getattr(self, name)!r} is no number above 0")
        for name in ("step_s", "warm", "step_cpu_s", "prepare_cpu_s", "exclusive_bytes", "limit_bytes"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}: {getattr(self, name)!r} is no number from 0 on")

    @property
    def steps_s(self) -> float:
        """Steps a second."""
        return self.sessions / self.period_s

    @property
    def ends_s(self) -> float:
        """Sessions that end in a second, and as many begin."""
        return self.steps_s / self.steps

    @property
    def shared(self) -> float:
        """Share of the sessions that are in shared workers."""
        return max(0.0, 1 - self.sandbox - self.exclusive)

    @property
    def containers(self) -> float:
        """Workers, with those that are warm."""
        shared, sandboxes = self.shared / self.shared_slots, self.sandbox / self.sandbox_slots
        return self.sessions * (1 + self.warm) * (shared + sandboxes + self.exclusive)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What there is.

    Raises:
        ValueError: a field is out of its range; with its name.
    """

    machines: float = 100.0
    cores: float = 16.0
    """Of each machine."""
    memory_bytes: float = 64 * _GIB
    replicas: int = 8
    """Of the gateway: one core each, on these machines."""
    starts_at_once: float = STARTS_AT_ONCE
    """Containers that the leader has started at one time, on each machine."""
    rests: bool = True
    """Whether the control loop pauses between two turns that follow each other at once (``core.plan.rest_s``)."""
    is_remote: bool = True
    """Whether workers are on other machines than their gateway: behind TLS."""

    def __post_init__(self) -> None:
        for name in ("machines", "cores", "memory_bytes", "replicas", "starts_at_once"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: {getattr(self, name)!r} is no number above 0")
