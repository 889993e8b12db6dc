"""Plans capacity for forecast openings, and shares a limit on workers among all environments: pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from gateway.core.environment import PoolPolicy
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.scaling import Plan
from gateway.core.worker import EnvironmentLoad, WorkerLoad, WorkerState

LEAST_START_S = 1.0
"""Minimum duration of a start, in seconds, for the number of slots kept free for forecast openings."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Forecast openings of an environment, from the draws of a curriculum."""

    rate: float = 0.0
    """Openings per second."""
    at_once: int = 0
    """Openings that arrive together: the members of a group."""

    def __add__(self, other: Expected) -> Expected:
        """Return the sum of both rates and the larger of both groups."""
        return Expected(self.rate + other.rate, max(self.at_once, other.at_once))

    def slots(self, start_s: float) -> int:
        """Return the slots to keep free: as many as are opened during a start, and at least a whole group."""
        if self.rate <= 0:
            return 0
        return max(self.at_once, math.floor(self.rate * max(start_s, LEAST_START_S) + 0.5))


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRequest:
    """The plan for one environment, regardless of the other environments."""

    plan: Plan
    policy: PoolPolicy
    load: EnvironmentLoad


def shared(wishes: Mapping[EnvironmentName, CapacityRequest], *, most: int) -> dict[EnvironmentName, Plan]:
    """Fit the plans of all environments into *most* workers in total; 0: no limit.

    Environments with waiting openings come first, then the ones with the fewest workers, one worker at a time. If there
    is no room, as many workers are retired as are missing. Only idle workers above ``min_workers`` are retired, the
    longest idle first. Their environments start no workers and have no waiting openings. A later turn uses the freed
    places, once the workers are gone.
    """
    plans = {name: wish.plan for name, wish in wishes.items()}
    alive = sum(len(wish.load.workers) for wish in wishes.values())
    asked = sum(plan.start for plan in plans.values())
    if not most or alive + asked <= most:
        return plans
    granted = _granted(wishes, max(0, most - alive))
    # Workers that already drain or retire make room by themselves.
    going = sum(
        entry.worker.state is WorkerState.DRAINING and entry.used == 0
        for wish in wishes.values()
        for entry in wish.load.workers
    ) + sum(len(plan.retire) for plan in plans.values())
    missing = asked - sum(granted.values()) - going
    retire: dict[EnvironmentName, list[WorkerId]] = {}
    for name, entry in _idle(wishes):
        if missing <= 0:
            break
        retire.setdefault(name, []).append(entry.worker.id)
        missing -= 1
    return {
        name: replace(
            plan,
            start=granted.get(name, 0),
            retire=(*plan.retire, *retire.get(name, ())),
            pause=tuple(id for id in plan.pause if id not in retire.get(name, ())),
        )
        for name, plan in plans.items()
    }


def _granted(wishes: Mapping[EnvironmentName, CapacityRequest], room: int) -> dict[EnvironmentName, int]:
    granted = dict.fromkeys(wishes, 0)

    def order(name: EnvironmentName) -> tuple[bool, int, EnvironmentName]:
        wish = wishes[name]
        return not wish.load.wanted, len(wish.load.workers) + granted[name], name

    for _ in range(room):
        short = [name for name, wish in wishes.items() if granted[name] < wish.plan.start]
        if not short:
            break
        granted[min(short, key=order)] += 1
    return granted


def _idle(wishes: Mapping[EnvironmentName, CapacityRequest]) -> Iterable[tuple[EnvironmentName, WorkerLoad]]:
    """Return workers that may be retired, the longest idle first."""
    found: list[tuple[EnvironmentName, WorkerLoad]] = []
    for name, wish in wishes.items():
        if wish.plan.start or wish.load.wanted:
            continue
        alive = [entry for entry in wish.load.workers if entry.worker.state is not WorkerState.DRAINING]
        spare = len(alive) - len(wish.plan.retire) - wish.policy.min_workers
        idle = [
            entry
            for entry in alive
            if entry.used == 0
            and entry.worker.state in (WorkerState.READY, WorkerState.PAUSED)
            and entry.worker.id not in wish.plan.retire
        ]
        idle.sort(key=lambda entry: -entry.idle_s)
        found += [(name, entry) for entry in idle[: max(0, spare)]]
    return sorted(found, key=lambda item: -item[1].idle_s)
