"""Pure decisions of the control loop: how many workers to start, wake, pause and stop. Tested as tables of numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gateway.core.model import EnvironmentLoad, PoolPolicy, WorkerId, WorkerLoad, WorkerState

WINDOW_S = 30.0
"""Over about this long arrivals are averaged: longer than most starts take, shorter than a training step."""
START_WEIGHT = 0.3
"""Of the latest start in the mean of all; an image that was cached meanwhile is noticed after a few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is expected of an environment: how fast openings arrive, and how long a worker takes to start.

    Openings that arrive while a worker starts find no slot unless one was free before: so as many are kept free as
    arrive in that time (Little's law, with the start as the delay).
    """

    rate: float = 0.0
    """Openings per second."""
    start_s: float = 0.0
    """From asking for a worker to its readiness; 0: none was seen yet."""
    seen: int | None = None
    """``EnvironmentLoad.arrivals`` at the last look."""

    @property
    def ahead(self) -> int:
        """Slots to keep free; an opening that is less likely than not to come counts for none."""
        return math.floor(self.rate * self.start_s + 0.5)

    def looked(self, load: EnvironmentLoad, since_s: float) -> Demand:
        """What is expected after another look, *since_s* seconds after the last one."""
        new = 0 if self.seen is None else max(0, load.arrivals - self.seen)  # a store that lost its data counts anew
        kept = math.exp(-since_s / WINDOW_S)
        return Demand(rate=self.rate * kept + new / WINDOW_S, start_s=self.start_s, seen=load.arrivals)

    def started(self, seconds: float) -> Demand:
        """What is expected after a start that took so long."""
        mean = seconds if not self.start_s else self.start_s + START_WEIGHT * (seconds - self.start_s)
        return Demand(rate=self.rate, start_s=mean, seen=self.seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be done for one environment."""

    wake: tuple[WorkerId, ...] = ()
    """Paused workers to wake."""
    start: int = 0
    """How many workers to start."""
    pause: tuple[WorkerId, ...] = ()
    """Ready workers to pause, if they are idle still."""
    retire: tuple[WorkerId, ...] = ()
    """Ready or paused workers to drain, if they are idle still."""
    drain: tuple[WorkerId, ...] = ()
    """Workers of an old make: they take no more sessions."""
    stop: tuple[WorkerId, ...] = ()
    """Draining workers that hold nothing any more."""


def plan(
    policy: PoolPolicy, load: EnvironmentLoad, *, digest: str, demand: Demand = Demand(), is_trial: bool = False
) -> Plan:
    """Decide what to do with the workers of one environment.

    *digest* is the make that is wanted. Workers of another are drained and are no capacity; as long as they live, they
    may be as many again as ``max_workers``. *is_trial*: the last start failed, so one at a time is tried.
    """
    current = [entry for entry in load.workers if entry.worker.digest == digest]
    ready = _of(current, WorkerState.READY)
    paused = _of(current, WorkerState.PAUSED)
    starting = len(_of(current, WorkerState.STARTING))
    target = max(policy.warm, demand.ahead)
    slots = _slots_to_come(policy, ready)
    missing = load.waiting + target - _free(ready) - starting * slots
    wake = _to_wake(policy, ready, paused, missing)
    missing -= sum(entry.worker.slots for entry in wake)
    start = max(-(-missing // slots), policy.min_workers - len(ready) - len(paused) - starting)
    room = min(policy.max_workers - len(current), 2 * policy.max_workers - len(load.workers))
    start = max(0, min(start, room))
    if is_trial:
        start = min(start, 1 if not starting else 0)
    is_short = bool(start or wake or load.waiting)
    retire = [] if is_short else _surplus(policy, ready, paused, starting=starting, target=target)
    left = [entry for entry in ready if entry not in retire]
    pause = [] if is_short else _to_pause(policy, left, target=target)
    return Plan(
        wake=_ids(wake),
        start=start,
        pause=_ids(pause),
        retire=_ids(retire),
        drain=tuple(
            entry.worker.id
            for entry in load.workers
            if entry.worker.digest != digest and entry.worker.state in (WorkerState.READY, WorkerState.PAUSED)
        ),
        stop=_ids([entry for entry in _of(load.workers, WorkerState.DRAINING) if entry.used == 0]),
    )


def _of(entries: list[WorkerLoad] | tuple[WorkerLoad, ...], state: WorkerState) -> list[WorkerLoad]:
    return [entry for entry in entries if entry.worker.state is state]


def _ids(entries: list[WorkerLoad]) -> tuple[WorkerId, ...]:
    return tuple(entry.worker.id for entry in entries)


def _free(ready: list[WorkerLoad]) -> int:
    # A worker may hold more than it has slots: it was limited while it did. That is no want of others.
    return sum(max(0, entry.worker.slots - entry.used) for entry in ready)


def _slots_to_come(policy: PoolPolicy, ready: list[WorkerLoad]) -> int:
    """Guess how many sessions a worker will hold that has not told yet, or is not started."""
    slots = policy.slots
    if policy.learns_slots:
        slots = max((entry.worker.slots for entry in ready), default=slots)
    return min(slots, policy.max_uses) if policy.max_uses else slots


def _to_wake(policy: PoolPolicy, ready: list[WorkerLoad], paused: list[WorkerLoad], missing: int) -> list[WorkerLoad]:
    """Choose paused workers for *missing* slots, and for the least number of ready ones; the last used come first."""
    wake: list[WorkerLoad] = []
    for entry in sorted(paused, key=lambda entry: entry.idle_s):
        if missing <= 0 and len(ready) + len(wake) >= policy.min_workers:
            break
        wake.append(entry)
        missing -= entry.worker.slots
    return wake


def _surplus(
    policy: PoolPolicy, ready: list[WorkerLoad], paused: list[WorkerLoad], *, starting: int, target: int
) -> list[WorkerLoad]:
    """Choose workers that were idle for too long and that neither the least number nor the free slots need."""
    spare = len(ready) + len(paused) + starting - policy.min_workers
    free = _free(ready)
    surplus: list[WorkerLoad] = []
    idle = [entry for entry in (*paused, *ready) if entry.used == 0 and entry.idle_s >= policy.idle_worker_s]
    for entry in sorted(idle, key=lambda entry: (entry.worker.state is WorkerState.READY, -entry.idle_s)):
        gives = entry.worker.slots if entry.worker.state is WorkerState.READY else 0
        if spare > 0 and free - gives >= min(target, free):
            surplus.append(entry)
            spare -= 1
            free -= gives
    return surplus


def _to_pause(policy: PoolPolicy, ready: list[WorkerLoad], *, target: int) -> list[WorkerLoad]:
    """Choose ready workers that were idle for long; ``min_workers`` and the free slots that are wanted stay ready."""
    if not policy.pause_idle_s:
        return []
    spare = len(ready) - policy.min_workers
    free = _free(ready)
    pause: list[WorkerLoad] = []
    for entry in sorted(ready, key=lambda entry: -entry.idle_s):
        if entry.used or entry.idle_s < policy.pause_idle_s or spare <= 0 or free - entry.worker.slots < target:
            continue
        pause.append(entry)
        spare -= 1
        free -= entry.worker.slots
    return pause


def backoff_s(failures: int) -> float:
    """How long to wait before the next start after *failures* failed ones in a row: 0, 0.5, 1, 2 … 30 s."""
    return 0.0 if failures == 0 else min(30.0, 0.5 * 2.0 ** min(failures - 1, 6))
