"""Decides how many workers to start, wake, pause and stop, and on which machine: pure functions for the control loop.

Tests check them as tables of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from gateway.core.environment import PoolPolicy
from gateway.core.errors import BackendError
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.placement import Need, NodeId, NodeReport
from gateway.core.worker import EnvironmentLoad, WorkerLoad, WorkerState

WINDOW_S = 30.0
"""Seconds over which arrivals are averaged, approximately. It is longer than most starts and shorter than a training
step."""
START_WEIGHT = 0.3
"""Weight of the latest start in the mean start time. After a few starts the mean reflects an image that is now
cached."""
MEMORY_OVERCOMMIT = 4.0
"""Maximum sum of workers' memory limits on a machine, as a multiple of its memory. Most workers hold a tenth of their
limit. The kernel's estimate of available memory bounds them as well."""
REST_S = 5e-5
"""Pause of the control loop for each worker, in seconds. It is about eight times the time that the leader or Redis
spends on a worker in a turn (5 and 7 µs, ``docs/scaling.md``). Turns therefore take at most a ninth of the time of
either. For 20 workers the pause is a millisecond."""
REST_MOST_S = 0.5
"""Maximum pause in seconds: the interval of a loop that nothing wakes."""
_GIB = 2**30
_SETTLED = (WorkerState.READY, WorkerState.PAUSED, WorkerState.SUSPECT)
"""States of a worker that takes sessions, or may take them again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The expected demand for an environment: the rate of openings and the duration of a start.

    An opening that arrives while a worker starts finds a slot only if one was free before. The pool therefore keeps as
    many slots free as openings arrive during a start. This is Little's law, with the start as the delay.
    """

    rate: float = 0.0
    """Openings per second."""
    start_s: float = 0.0
    """Seconds from the request for a worker to its readiness; 0: no start was observed yet."""
    seen: int | None = None
    """``EnvironmentLoad.arrivals`` at the last observation."""

    @property
    def ahead(self) -> int:
        """Number of slots to keep free, rounded: an opening with a probability below one half does not count."""
        return math.floor(self.rate * self.start_s + 0.5)

    def looked(self, load: EnvironmentLoad, since_s: float) -> Demand:
        """Return the demand after another observation, *since_s* seconds after the last one."""
        new = 0 if self.seen is None else max(0, load.arrivals - self.seen)  # restarts if the store lost its data
        kept = math.exp(-since_s / WINDOW_S)
        return Demand(rate=self.rate * kept + new / WINDOW_S, start_s=self.start_s, seen=load.arrivals)

    def started(self, seconds: float) -> Demand:
        """Return the demand after a start that took *seconds*."""
        mean = seconds if not self.start_s else self.start_s + START_WEIGHT * (seconds - self.start_s)
        return Demand(rate=self.rate, start_s=mean, seen=self.seen)


class Demands:
    """The demand for each environment, as this replica has observed it."""

    def __init__(self) -> None:
        self._known: dict[EnvironmentName, Demand] = {}

    def of(self, name: EnvironmentName) -> Demand:
        """Return the demand for environment *name*."""
        return self._known.get(name, Demand())

    def looked(self, name: EnvironmentName, load: EnvironmentLoad, since_s: float) -> Demand:
        """Update and return the demand after *load*, observed *since_s* seconds after the last observation."""
        demand = self._known[name] = self.of(name).looked(load, since_s)
        return demand

    def started(self, name: EnvironmentName, seconds: float) -> None:
        """Update the demand with a start that took *seconds*."""
        self._known[name] = self.of(name).started(seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The actions for one environment."""

    wake: tuple[WorkerId, ...] = ()
    """Paused workers to wake."""
    start: int = 0
    """Number of workers to start."""
    pause: tuple[WorkerId, ...] = ()
    """Ready workers to pause, if they are still idle."""
    retire: tuple[WorkerId, ...] = ()
    """Ready or paused workers to drain, if they are still idle."""
    drain: tuple[WorkerId, ...] = ()
    """Workers of an old revision, which get no more sessions."""
    stop: tuple[WorkerId, ...] = ()
    """Draining workers without sessions."""


def plan(
    policy: PoolPolicy,
    load: EnvironmentLoad,
    *,
    digest: str,
    demand: Demand = Demand(),
    expected: int = 0,
    is_trial: bool = False,
) -> Plan:
    """Decide which workers of one environment to wake, start, pause, retire, drain and stop.

    Workers of another revision than *digest* are drained and do not count as capacity. As long as they live, there may
    be twice ``max_workers`` in all. Suspect workers do not count as capacity either, but keep their place. *expected*
    is the number of free slots to keep for forecast openings. *is_trial*: the last start failed, so only one worker
    starts at a time.
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
    # A limited worker may hold more sessions than slots. Its surplus does not reduce other workers' free slots.
    return sum(max(0, entry.worker.slots - entry.used) for entry in ready)


def _slots_to_come(policy: PoolPolicy, ready: list[WorkerLoad]) -> int:
    """Estimate the capacity of a worker that has not started, or has not reported its capacity yet."""
    slots = policy.slots
    if policy.learns_slots:
        slots = max((entry.worker.slots for entry in ready), default=slots)
    return min(slots, policy.max_uses) if policy.max_uses else slots


def _to_wake(policy: PoolPolicy, ready: list[WorkerLoad], paused: list[WorkerLoad], missing: int) -> list[WorkerLoad]:
    """Choose paused workers to cover *missing* slots and ``min_workers``, the most recently used first."""
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
    """Choose workers that were idle for too long and that neither ``min_workers`` nor the free slots need."""
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
    """Choose ready workers that were idle for long; ``min_workers`` and *target* free slots stay ready."""
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
    """Return the control loop's pause in seconds after a turn that read *workers* workers, whatever wakes it meanwhile.

    A turn reads all workers. Where workers end many times a second, each end wakes the loop, and it would do nothing
    else. The store assigns slots that become free, so they wait for no turn.
    """
    return min(REST_MOST_S, workers * REST_S)


def backoff_s(failures: int) -> float:
    """Return the seconds to wait before the next start after *failures* consecutive failures: 0, 0.5, 1, 2 … 30 s."""
    return 0.0 if failures == 0 else min(30.0, 0.5 * 2.0 ** min(failures - 1, 6))


def place(
    reports: Sequence[NodeReport],
    need: Need,
    *,
    starting: Mapping[NodeId, Sequence[Need]] = MappingProxyType({}),
    takes: Mapping[EnvironmentName, Need] = MappingProxyType({}),
) -> NodeId:
    """Choose the machine for the next worker.

    Among machines with room, a machine that has the images is preferred. Next comes the machine with the fewest workers
    of that environment, so that a lost machine takes few of each. Last counts the largest unreserved share of memory
    and CPUs.

    Args:
        reports: Reports of the machines that answer.
        need: The resources that the worker needs.
        starting: Workers that are starting on a machine and are not in its report yet.
        takes: Resources that a worker of each environment takes; an environment that is missing counts as zero.

    Raises:
        BackendError: No machine has room. The message lists what each machine lacks.
    """
    rooms = [_Room.of(report, starting.get(report.id, ()), takes) for report in reports]
    fitting = [room for room in rooms if not any(room.lacks(need))]
    if not fitting:
        lacks = "; ".join(f"{room.report.name}: {', '.join(room.lacks(need))}" for room in rooms)
        raise BackendError(f"no node takes a worker of {need.environment}: {lacks or 'none answers'}")
    return min(fitting, key=lambda room: room.rank(need)).report.id


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """A machine with the resources that are reserved on it."""

    report: NodeReport
    starting: Sequence[Need]
    reserved_bytes: int
    """Sum of the memory limits of the workers that run or start there."""
    reserved_cpus: float
    most_bytes: float

    @classmethod
    def of(cls, report: NodeReport, starting: Sequence[Need], takes: Mapping[EnvironmentName, Need]) -> _Room:
        there = [takes[environment] for environment in report.workers.values() if environment in takes]
        return cls(
            report=report,
            starting=starting,
            reserved_bytes=sum(need.memory_bytes for need in (*there, *starting)),
            reserved_cpus=sum(need.cpus for need in (*there, *starting)),
            most_bytes=report.memory_bytes * MEMORY_OVERCOMMIT,
        )

    def lacks(self, need: Need) -> Iterator[str]:
        """Yield what *need* lacks on this machine; yield nothing if there is room."""
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
        """Return the sort key of a machine with room; the best machine has the lowest key."""
        has_images = all(
            self.report.images.get(reference) == id if id else reference in self.report.images
            for reference, id in need.images.items()
        )
        of_it = sum(environment == need.environment for environment in self.report.workers.values())
        of_it += sum(one.environment == need.environment for one in self.starting)
        return not has_images, of_it, -self._left(), self.report.id

    def _left(self) -> float:
        """Return the unreserved share of the scarcer of memory and CPUs; negative if more is reserved than exists."""
        memory = 1 - self.reserved_bytes / self.report.memory_bytes if self.report.memory_bytes else 0.0
        cpus = 1 - self.reserved_cpus / self.report.cpus if self.report.cpus else 0.0
        return min(memory, cpus)


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / _GIB:.1f} GiB"
