"""Pure decisions of the control loop: how many workers to start, wake, pause and stop, and on which machine.

Tested as tables of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from gateway.core.environment import PoolPolicy
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.placement import Need, NodeId, NodeReport
from gateway.core.worker import EnvironmentLoad, WorkerLoad, WorkerState

WINDOW_S = 30.0
"""Over about this long arrivals are averaged: longer than most starts take, shorter than a training step."""
START_WEIGHT = 0.3
"""Of the latest start in the mean of all; an image that was cached meanwhile is noticed after a few."""
MEMORY_OVERCOMMIT = 4.0
"""Sum of workers' limits that a machine takes, in parts of its memory: most hold a tenth of their limit, and what the
kernel says is available bounds them besides."""
REST_S = 5e-5
"""Pause of the control loop for each worker: some eight times what the leader, or Redis, does for it on a turn (5 and
7 µs, ``docs/scaling.md``), so that turns take a ninth of either at most. For 20 workers it is a millisecond."""
REST_MOST_S = 0.5
"""As a loop that nothing wakes."""
_GIB = 2**30
_SETTLED = (WorkerState.READY, WorkerState.PAUSED, WorkerState.SUSPECT)
"""States of a worker that takes sessions, or may again."""


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


class Demands:
    """The demand for each environment, as far as this replica has seen it."""

    def __init__(self) -> None:
        self._known: dict[EnvironmentName, Demand] = {}

    def of(self, name: EnvironmentName) -> Demand:
        """Return the demand for environment *name*."""
        return self._known.get(name, Demand())

    def looked(self, name: EnvironmentName, load: EnvironmentLoad, since_s: float) -> Demand:
        """Note a look at the environment's *load*, *since_s* seconds after the last one; return the new demand."""
        demand = self._known[name] = self.of(name).looked(load, since_s)
        return demand

    def started(self, name: EnvironmentName, seconds: float) -> None:
        """Note a start that took *seconds*."""
        self._known[name] = self.of(name).started(seconds)


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
    policy: PoolPolicy,
    load: EnvironmentLoad,
    *,
    digest: str,
    demand: Demand = Demand(),
    expected: int = 0,
    is_trial: bool = False,
) -> Plan:
    """Decide what to do with the workers of one environment.

    *digest* is the make that is wanted. Workers of another are drained and are no capacity; as long as they live, they
    may be as many again as ``max_workers``. Suspect ones are no capacity either, and keep their place. *expected*: free
    slots that are wanted for openings that are foreseen otherwise. *is_trial*: the last start failed, so one at a time
    is tried.
    """
    current = [entry for entry in load.workers if entry.worker.digest == digest]
    ready = _of(current, WorkerState.READY)
    paused = _of(current, WorkerState.PAUSED)
    starting = len(_of(current, WorkerState.STARTING))
    target = max(policy.warm, demand.ahead, expected)
    slots = _slots_to_come(policy, ready)
    missing = load.wanted + target - _free(ready) - starting * slots
    wake = _to_wake(policy, ready, paused, missing)
    missing -= sum(entry.worker.slots for entry in wake)
    start = max(-(-missing // slots), policy.min_workers - len(ready) - len(paused) - starting)
    room = min(policy.max_workers - len(current), 2 * policy.max_workers - len(load.workers))
    start = max(0, min(start, room))
    if is_trial:
        start = min(start, 1 if not starting else 0)
    is_short = bool(start or wake or load.wanted)
    retire = [] if is_short else _surplus(policy, ready, paused, starting=starting, target=target)
    left = [entry for entry in ready if entry not in retire]
    pause = [] if is_short else _to_pause(policy, left, target=target)
    outdated = [one for one in load.workers if one.worker.digest != digest and one.worker.state in _SETTLED]
    return Plan(
        wake=_ids(wake),
        start=start,
        pause=_ids(pause),
        retire=_ids(retire),
        drain=_ids(outdated),
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


def rest_s(workers: int) -> float:
    """How long the control loop pauses after a turn that looked at so many workers, however much wakes it meanwhile.

    A turn reads them all, so where workers end many times a second, and each end wakes it, it would do nothing else.
    Slots that become free are handed out by the store, and wait for no turn.
    """
    return min(REST_MOST_S, workers * REST_S)


def backoff_s(failures: int) -> float:
    """How long to wait before the next start after *failures* failed ones in a row: 0, 0.5, 1, 2 … 30 s."""
    return 0.0 if failures == 0 else min(30.0, 0.5 * 2.0 ** min(failures - 1, 6))


def place(
    reports: Sequence[NodeReport],
    need: Need,
    *,
    starting: Mapping[NodeId, Sequence[Need]] = MappingProxyType({}),
    takes: Mapping[EnvironmentName, Need] = MappingProxyType({}),
    overcommit: float = MEMORY_OVERCOMMIT,
) -> NodeId | None:
    """Choose the machine that gets the next worker; None if none has room (`why_not` says why).

    Of those with room: one that has the images, then the one with the fewest workers of that environment (a machine
    that is lost takes few of each), then the one with the largest part of memory and CPUs left.

    Args:
        reports: Of the machines that answer.
        need: What the worker takes.
        starting: Workers that are begun on a machine and are not in its report yet.
        takes: What a worker of each environment takes; one that is not in it counts for nothing.
        overcommit: Sum of workers' limits that a machine takes, in parts of its memory.
    """
    rooms = [_Room.of(report, starting.get(report.id, ()), takes, overcommit) for report in reports]
    fitting = [room for room in rooms if not any(room.lacks(need))]
    if not fitting:
        return None
    return min(fitting, key=lambda room: room.rank(need)).report.id


def why_not(
    reports: Sequence[NodeReport],
    need: Need,
    *,
    starting: Mapping[NodeId, Sequence[Need]] = MappingProxyType({}),
    takes: Mapping[EnvironmentName, Need] = MappingProxyType({}),
    overcommit: float = MEMORY_OVERCOMMIT,
) -> str:
    """Say why no machine takes the worker, and of each what it lacks; empty if one does. Arguments as for `place`."""
    if not reports:
        return f"no node takes a worker of {need.environment}: none answers"
    reasons = []
    for report in reports:
        lacks = [*_Room.of(report, starting.get(report.id, ()), takes, overcommit).lacks(need)]
        if not lacks:
            return ""
        reasons.append(f"{report.name}: {', '.join(lacks)}")
    return f"no node takes a worker of {need.environment}: {'; '.join(reasons)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """A machine, and what is promised of it."""

    report: NodeReport
    starting: Sequence[Need]
    reserved_bytes: int
    """Limits of the workers that are there, and of those that start."""
    reserved_cpus: float
    most_bytes: float

    @classmethod
    def of(
        cls,
        report: NodeReport,
        starting: Sequence[Need],
        takes: Mapping[EnvironmentName, Need],
        overcommit: float,
    ) -> _Room:
        there = [takes[environment] for environment in report.workers.values() if environment in takes]
        return cls(
            report=report,
            starting=starting,
            reserved_bytes=sum(need.memory_bytes for need in (*there, *starting)),
            reserved_cpus=sum(need.cpus for need in (*there, *starting)),
            most_bytes=report.memory_bytes * overcommit,
        )

    def lacks(self, need: Need) -> Iterator[str]:
        """Say what is missing for *need*; nothing if there is room."""
        report = self.report
        if report.is_draining:
            yield "it drains"
        containers = report.containers + sum(one.containers for one in self.starting)
        if containers + need.containers > report.max_containers:
            yield f"{containers} of {report.max_containers} containers, and {need.containers} more are needed"
        if need.memory_bytes > report.memory_bytes:
            yield f"{_gib(report.memory_bytes)} of memory, and {_gib(need.memory_bytes)} are needed"
        elif self.reserved_bytes + need.memory_bytes > self.most_bytes:
            yield (
                f"{_gib(self.reserved_bytes)} of memory promised to workers of at most {_gib(self.most_bytes)}, and "
                f"{_gib(need.memory_bytes)} are needed"
            )
        if report.available_bytes:
            free = report.available_bytes - sum(one.memory_bytes for one in self.starting)
            if need.memory_bytes > free:
                yield f"{_gib(max(0, free))} of memory available, and {_gib(need.memory_bytes)} are needed"
        if need.cpus > report.cpus:
            yield f"{report.cpus:g} CPUs, and {need.cpus:g} are needed"

    def rank(self, need: Need) -> tuple[bool, int, float, NodeId]:
        """Order machines with room, the best first."""
        has_images = all(
            self.report.images.get(reference) == id if id else reference in self.report.images
            for reference, id in need.images.items()
        )
        of_it = sum(environment == need.environment for environment in self.report.workers.values())
        of_it += sum(one.environment == need.environment for one in self.starting)
        return not has_images, of_it, -self._left(), self.report.id

    def _left(self) -> float:
        """The part of the scarcer of memory and CPUs that is promised to nobody; negative where more is than there."""
        memory = 1 - self.reserved_bytes / self.report.memory_bytes if self.report.memory_bytes else 0.0
        cpus = 1 - self.reserved_cpus / self.report.cpus if self.report.cpus else 0.0
        return min(memory, cpus)


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / _GIB:.1f} GiB"
