"""Pure decisions of the control loop: how many workers to start, which to stop. Tested as tables of numbers."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.core.model import EnvironmentLoad, PoolPolicy, WorkerId, WorkerLoad, WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be done for one environment."""

    start: int = 0
    """How many workers to start."""
    retire: tuple[WorkerId, ...] = ()
    """Ready workers to drain, if they are idle still."""
    drain: tuple[WorkerId, ...] = ()
    """Ready workers of an old make: they take no more sessions."""
    stop: tuple[WorkerId, ...] = ()
    """Draining workers that hold nothing any more."""


def plan(policy: PoolPolicy, load: EnvironmentLoad, *, digest: str) -> Plan:
    """Decide what to do with the workers of one environment.

    *digest* is the make that is wanted; workers of another are drained, and do not count as capacity, but do count
    against ``max_workers`` while they live.
    """
    ready = [entry for entry in load.workers if _is(entry, WorkerState.READY)]
    current = [entry for entry in ready if entry.worker.digest == digest]
    outdated = tuple(entry.worker.id for entry in ready if entry.worker.digest != digest)
    starting = [entry for entry in load.workers if _is(entry, WorkerState.STARTING)]
    draining = [entry for entry in load.workers if _is(entry, WorkerState.DRAINING)]
    start = _starts(policy, load, ready=current, starting=len(starting))
    return Plan(
        start=start,
        retire=() if start else _surplus(policy, load, current, starting=len(starting)),
        drain=outdated,
        stop=tuple(entry.worker.id for entry in draining if entry.used == 0),
    )


def _is(entry: WorkerLoad, state: WorkerState) -> bool:
    return entry.worker.state is state


def _starts(policy: PoolPolicy, load: EnvironmentLoad, *, ready: list[WorkerLoad], starting: int) -> int:
    slots = _slots_to_come(policy, ready)
    # A worker may hold more than it has slots: it was limited while it did. That is no want of others.
    free = sum(max(0, entry.worker.slots - entry.used) for entry in ready)
    missing = load.waiting - free - starting * slots
    for_waiting = -(-missing // slots) if missing > 0 else 0
    for_minimum = policy.min_workers - len(ready) - starting
    return max(0, min(max(for_waiting, for_minimum), policy.max_workers - len(load.workers)))


def _slots_to_come(policy: PoolPolicy, ready: list[WorkerLoad]) -> int:
    """Guess how many sessions a worker will hold that has not told yet, or is not started."""
    slots = policy.slots
    if policy.learns_slots:
        slots = max((entry.worker.slots for entry in ready), default=slots)
    return min(slots, policy.max_uses) if policy.max_uses else slots


def _surplus(
    policy: PoolPolicy, load: EnvironmentLoad, ready: list[WorkerLoad], *, starting: int
) -> tuple[WorkerId, ...]:
    if load.waiting:
        return ()
    spare = len(ready) + starting - policy.min_workers
    idle = [entry for entry in ready if entry.used == 0 and entry.idle_s >= policy.idle_worker_s]
    idle.sort(key=lambda entry: -entry.idle_s)
    return tuple(entry.worker.id for entry in idle[: max(0, spare)])


def backoff_s(failures: int) -> float:
    """How long to wait before the next start after *failures* failed ones in a row: 0, 0.5, 1, 2 … 30 s."""
    return 0.0 if failures == 0 else min(30.0, 0.5 * 2.0 ** min(failures - 1, 6))
