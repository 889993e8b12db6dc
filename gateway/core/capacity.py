"""Pure decisions about capacity that is not asked for yet, and about capacity that all environments share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from gateway.core.environment import PoolPolicy
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.scaling import Plan
from gateway.core.worker import EnvironmentLoad, WorkerLoad, WorkerState

LEAST_START_S = 1.0
"""How long a start is taken to last at least, where slots are kept free for openings that are foreseen."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Openings of an environment that are foreseen, as a curriculum draws its tasks."""

    rate: float = 0.0
    """A second."""
    at_once: int = 0
    """That come together: the members of a group."""

    def __add__(self, other: Expected) -> Expected:
        """Both together."""
        return Expected(self.rate + other.rate, max(self.at_once, other.at_once))

    def slots(self, start_s: float) -> int:
        """Slots to keep free: as many as are opened while a worker starts, and a whole group at least."""
        if self.rate <= 0:
            return 0
        return max(self.at_once, math.floor(self.rate * max(start_s, LEAST_START_S) + 0.5))


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRequest:
    """What is planned for one environment on its own."""

    plan: Plan
    policy: PoolPolicy
    load: EnvironmentLoad


def shared(wishes: Mapping[EnvironmentName, CapacityRequest], *, most: int) -> dict[EnvironmentName, Plan]:
    """Fit what environments want into *most* workers of all of them together; 0: there is no such limit.

    Those whose openings wait are served first, then those with the fewest workers, one worker at a time. Where there is
    no room, as many workers are retired as are wanted: idle ones, of environments that start none and where nobody
    waits, those beyond ``min_workers`` only, the longest idle first. Their place is taken at a later turn, when they
    are gone.
    """
    plans = {name: wish.plan for name, wish in wishes.items()}
    alive = sum(len(wish.load.workers) for wish in wishes.values())
    asked = sum(plan.start for plan in plans.values())
    if not most or alive + asked <= most:
        return plans
    granted = _granted(wishes, max(0, most - alive))
    # What goes already, or is about to, makes room by itself.
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
    """Workers that may go, the longest idle first."""
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
