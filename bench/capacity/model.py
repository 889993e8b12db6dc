"""What a cluster must have for so many sessions, and which part of it is full first: a model on paper.

Steady state: sessions end and begin at the pace at which their steps use them up. What one of each thing costs was
measured on one small machine (`capacity_figures`); the rest is multiplication. It knows no queues: a part that is 70 %
busy is said to be so, not what its latency is then. ``bench/tests/test_capacity_model.py`` holds it against runs that
it was not made from.

``python -m bench.capacity --help`` prints tables and writes ``docs/scaling.md``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from bench.capacity.figures import Figures
from bench.capacity.inputs import Cluster, Workload
from gateway.core.scaling import rest_s

FULL: Final = 0.7
"""Of a CPU: planned for, as what waits for a busier one waits for several others."""
TURNS_S: Final = 2.0
"""Turns of the control loop a second, if nothing wakes it (``pool.TICK_S``)."""
AUDIT_LOADS_S: Final = 3 / 15
"""``audit`` loads all workers three times every 15 s."""
WAKES: Final = 3
"""Turns that one worker's end asks for: it is full, it is empty, it is stopped."""
STALL_S: Final = 0.1
"""The longest that an event loop, or Redis, should do one thing."""
OVERCOMMIT: Final = 4.0
"""Sum of workers' limits in parts of a machine's memory (``core.plan.MEMORY_OVERCOMMIT``)."""
RELAY_CONNECTIONS: Final = 8192
"""Of one node (``node/relay.CONNECTIONS_MAX``)."""
NODE_CONTAINERS: Final = 500
"""Of one node, unless ``GATEWAY_NODE_MAX_CONTAINERS`` says otherwise."""
REMEMBERED: Final = 200_000
"""Sessions of one replica (``remembered.CACHED_MAX``)."""
REPLICAS_MAX: Final = 512
SESSIONS_MAX: Final = 100_000_000


@dataclass(frozen=True, slots=True)
class Use:
    """How much of one resource is wanted."""

    name: str
    demand: float
    capacity: float
    """Of what the cluster has."""
    unit: str
    bound: str = ""
    """What sets the capacity."""

    @property
    def utilisation(self) -> float:
        """Above 1 it cannot be."""
        return self.demand / self.capacity


@dataclass(frozen=True, slots=True)
class Wall:
    """Where a resource is full when sessions grow and nothing else does."""

    name: str
    sessions: float


# -- what is done ---------------------------------------------------------------------------------------------------


def seen_by(draws: float, replicas: float, wandering: float) -> float:
    """How many replicas a session has been at after *draws* calls (not below 1)."""
    calls = max(0.0, draws - 1) * wandering
    return replicas - (replicas - 1) * math.pow(1 - 1 / replicas, calls)


def turns_s(figures: Figures, work: Workload, cluster: Cluster) -> float:
    """Turns of the control loop a second: a worker that ends wakes it, and after each it rests."""
    wanted = TURNS_S + WAKES * work.ends_s * work.exclusive
    once_s = (figures.load_redis_s + figures.load_client_s) * work.containers
    rest = rest_s(round(work.containers)) if cluster.rests else 0.0
    return min(wanted, 1 / (once_s + figures.turn_redis_s + figures.turn_client_s + rest))


def notes_s(work: Workload, cluster: Cluster) -> float:
    """Notes of sessions a second: each replica writes one, once a second, for each that was busy there meanwhile."""
    stirred = work.steps_s / work.sessions * (1 + work.step_s)
    places = 1 + (cluster.replicas - 1) * work.wandering
    return work.sessions * min(places, stirred)


def finds_s(work: Workload, cluster: Cluster) -> float:
    """Sessions a second that a replica has to look up: it serves the first call of each that was opened elsewhere."""
    return work.ends_s * (seen_by(work.steps + 1, cluster.replicas, work.wandering) - 1)


def replica_cpu(figures: Figures, work: Workload, cluster: Cluster) -> float:
    """CPUs that one replica that does not lead uses."""
    remote = cluster.is_remote
    step_s = figures.step_cpu_s[work.protocol] + remote * figures.tls_step_gateway_s
    session_s = figures.episode_cpu_s + figures.open_client_s + figures.close_client_s + figures.outcome_client_s
    # A worker that lives for one session is dialled anew by each replica that the session comes to.
    dials_s = remote * work.exclusive * (work.ends_s + finds_s(work, cluster))
    shared = (
        work.steps_s * step_s
        + work.ends_s * session_s
        + finds_s(work, cluster) * figures.find_client_s
        + notes_s(work, cluster) * figures.note_client_s
        + dials_s * figures.tls_dial_gateway_s
    )
    # What each of them does in full, however many there are.
    each = figures.rest_cpu_s + work.ends_s * figures.notice_client_s + remote * cluster.machines * figures.report_cpu_s
    return shared / cluster.replicas + each


def control_cpu(figures: Figures, work: Workload, cluster: Cluster) -> float:
    """CPUs that leading takes besides."""
    loads_s = turns_s(figures, work, cluster) + AUDIT_LOADS_S
    # A worker's life is four operations of the store, of which none was measured alone: taken as two ends of sessions.
    placing_s = cluster.is_remote * work.containers * figures.place_cpu_s
    worker_s = figures.container_client_cpu_s + 2 * figures.close_client_s + placing_s
    return loads_s * work.containers * figures.load_client_s + work.ends_s * work.exclusive * worker_s


def redis_cpu(figures: Figures, work: Workload, cluster: Cluster) -> float:
    """CPUs that Redis wants; it has one."""
    session_s = figures.open_redis_s + figures.close_redis_s + figures.outcome_redis_s
    loads_s = turns_s(figures, work, cluster) + AUDIT_LOADS_S
    return (
        work.ends_s * (session_s + cluster.replicas * figures.notice_redis_s)
        + finds_s(work, cluster) * figures.find_redis_s
        + notes_s(work, cluster) * figures.note_redis_s
        + loads_s * work.containers * figures.load_redis_s
        + work.ends_s * work.exclusive * 2 * figures.close_redis_s
        + cluster.replicas * TURNS_S * figures.turn_redis_s
    )


def starts_s(figures: Figures, cluster: Cluster) -> float:
    """Containers that the cluster starts a second: as many as its engines do, or its leader asks for."""
    return cluster.machines * min(cluster.starts_at_once / figures.engine_start_s, figures.engine_starts_s)


def machine_cpu(figures: Figures, work: Workload, cluster: Cluster) -> float:
    """CPUs of all machines together, gateways and nodes included."""
    sandbox_s = figures.sandbox_cpu_s + work.prepare_cpu_s / work.group_size
    return (
        work.steps_s * (figures.worker_step_cpu_s + work.step_cpu_s)
        + work.ends_s * (work.sandbox * sandbox_s + work.exclusive * figures.container_cpu_s)
        + cluster.replicas * replica_cpu(figures, work, cluster)
        + control_cpu(figures, work, cluster)
        + cluster.is_remote * cluster.machines * node_cpu(figures, work, cluster)
        + cluster.is_remote * cluster.replicas * work.containers * figures.engine_list_cpu_s
    )


def node_cpu(figures: Figures, work: Workload, cluster: Cluster) -> float:
    """CPUs of one machine's ``gateway node``."""
    dials_s = work.exclusive * (work.ends_s + finds_s(work, cluster))
    # To make a report is taken to cost it as much as to read it costs a replica.
    relayed = work.steps_s * figures.tls_step_node_s + dials_s * figures.tls_dial_node_s
    return relayed / cluster.machines + cluster.replicas * figures.report_cpu_s


def memory_bytes(figures: Figures, work: Workload, cluster: Cluster) -> float:
    """Of all machines together."""
    alone = work.sessions * (1 + work.warm) * work.exclusive * work.exclusive_bytes
    return (
        work.containers * figures.container_bytes
        + work.sessions * work.shared * figures.worker_session_bytes
        + work.sessions * work.sandbox * figures.sandbox_bytes
        + alone
        + cluster.replicas * (figures.base_bytes + remembered(work, cluster) * figures.session_bytes)
        + cluster.is_remote * 2 * relay_connections(work, cluster) * cluster.machines * figures.tls_connection_bytes
        + redis_bytes(figures, work)
    )


def remembered(work: Workload, cluster: Cluster) -> float:
    """Sessions that one replica remembers; at most, as it is at the end of the episode that most have seen it."""
    return work.sessions * seen_by(work.steps + 1, cluster.replicas, work.wandering) / cluster.replicas


def relay_connections(work: Workload, cluster: Cluster) -> float:
    """Of one node: each replica keeps one to each worker that it has spoken to, and one for each call under way."""
    sharing = work.containers - work.sessions * (1 + work.warm) * work.exclusive
    alone = work.sessions * work.exclusive * seen_by(work.steps + 1, cluster.replicas, work.wandering)
    under_way = work.steps_s * work.step_s * (1 - work.exclusive)
    return (max(sharing * cluster.replicas, under_way) + alone) / cluster.machines


def redis_bytes(figures: Figures, work: Workload) -> float:
    """What Redis holds of sessions and workers."""
    return work.sessions * figures.redis_session_bytes + work.containers * figures.redis_worker_bytes


# -- what is wanted of each resource --------------------------------------------------------------------------------


def uses(figures: Figures, work: Workload, cluster: Cluster) -> list[Use]:
    """What *work* wants of each part of *cluster*."""
    one = replica_cpu(figures, work, cluster)
    containers = work.containers / cluster.machines
    remote = cluster.is_remote
    found = [
        Use("CPU of a replica", one, 1, "cores", "one core each"),
        Use("CPU of the leader", one + control_cpu(figures, work, cluster), 1, "cores", "one core"),
        Use("stall of the leader's loop", work.containers * figures.load_client_s, STALL_S, "s", "100 ms"),
        Use("CPU of Redis", redis_cpu(figures, work, cluster), 1, "cores", "one core"),
        Use("stall of Redis", work.containers * figures.load_redis_s, STALL_S, "s", "100 ms"),
        Use("memory of Redis", redis_bytes(figures, work), cluster.memory_bytes / 2, "bytes", "half a machine"),
        Use("starts", work.ends_s * work.exclusive, starts_s(figures, cluster), "1/s", _start_bound(figures, cluster)),
        Use("containers of a machine", containers, NODE_CONTAINERS, "", "the node's bound"),
        Use("memory of the machines", memory_bytes(figures, work, cluster), cluster.machines * cluster.memory_bytes,
            "bytes", "all machines"),
        Use("memory promised to workers", work.containers * work.limit_bytes,
            OVERCOMMIT * cluster.machines * cluster.memory_bytes, "bytes", "four times the machines'"),
        Use("CPU of the machines", machine_cpu(figures, work, cluster), cluster.machines * cluster.cores, "cores",
            "all machines"),
        Use("sessions of a replica", remembered(work, cluster), REMEMBERED, "", "its cache"),
    ]  # fmt: skip
    if remote:
        found += [
            Use("CPU of a node's process", node_cpu(figures, work, cluster), 1, "cores", "one core"),
            Use("relay connections of a node", relay_connections(work, cluster), RELAY_CONNECTIONS, "", "its bound"),
        ]
    return found


def _start_bound(figures: Figures, cluster: Cluster) -> str:
    asked = cluster.starts_at_once / figures.engine_start_s
    return "the engines" if figures.engine_starts_s <= asked else "starts at once"


def replicas_needed(figures: Figures, work: Workload, cluster: Cluster) -> int | None:
    """The fewest replicas of which none is busier than `FULL`; None if no number of them is enough.

    What leading takes is left out: it does not become less where there are more.
    """
    for replicas in range(1, REPLICAS_MAX + 1):
        if replica_cpu(figures, work, replace(cluster, replicas=replicas)) <= FULL:
            return replicas
    return None


def machines_needed(figures: Figures, work: Workload, cluster: Cluster) -> float:
    """The machines that the busiest of their own resources wants, CPUs being `FULL`."""
    cpu = machine_cpu(figures, work, cluster) / (FULL * cluster.cores)
    memory = memory_bytes(figures, work, cluster) / cluster.memory_bytes
    promised = work.containers * work.limit_bytes / (OVERCOMMIT * cluster.memory_bytes)
    return max(
        cpu, memory, promised, work.containers / NODE_CONTAINERS, work.ends_s * work.exclusive / figures.engine_starts_s
    )


def sized(figures: Figures, work: Workload, cluster: Cluster) -> Cluster:
    """*cluster* with as many replicas as *work* needs; with the bound of them if no number is enough."""
    return replace(cluster, replicas=replicas_needed(figures, work, cluster) or REPLICAS_MAX)


def walls(figures: Figures, work: Workload, cluster: Cluster) -> list[Wall]:
    """Where each resource of *cluster* is full, the first one first; without those that `SESSIONS_MAX` do not fill.

    Everything but the number of sessions stays: the replicas, too.
    """
    names = [use.name for use in uses(figures, work, cluster)]

    def filled(place: int) -> float:
        return _least(lambda n: uses(figures, replace(work, sessions=n), cluster)[place].utilisation)

    found = [Wall(name, filled(place)) for place, name in enumerate(names)]
    return sorted((wall for wall in found if wall.sessions < SESSIONS_MAX), key=lambda wall: wall.sessions)


def _least(utilisation: Callable[[float], float]) -> float:
    """Where a growing *utilisation* reaches 1, by halving."""
    low, high = 1.0, float(SESSIONS_MAX)
    if utilisation(low) >= 1:
        return low
    if utilisation(high) < 1:
        return high
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if utilisation(middle) < 1 else (low, middle)
    return high


# -- from nothing ---------------------------------------------------------------------------------------------------


def opening_s(figures: Figures, work: Workload, cluster: Cluster) -> float:
    """Seconds until all sessions are open, if their workers are there: of replicas, Redis and sandboxes the slowest."""
    # Half of an episode's requests open it.
    replica_s = (figures.episode_cpu_s / 2 + figures.open_client_s) * work.sessions / cluster.replicas
    redis_s = figures.open_redis_s * work.sessions
    cores = cluster.machines * cluster.cores
    sandboxes_s = work.sessions * work.sandbox * (figures.sandbox_cpu_s + work.prepare_cpu_s / work.group_size) / cores
    return max(replica_s, redis_s, sandboxes_s)


def starting_s(figures: Figures, work: Workload, cluster: Cluster) -> float:
    """Seconds until all workers are started."""
    return work.containers / starts_s(figures, cluster)


def burst_s(figures: Figures, work: Workload, cluster: Cluster, *, caller_cpu_s: float = 0.0) -> float:
    """Seconds until the last of one step of each session is answered, if all are asked in the same moment.

    *caller_cpu_s*: of whoever asks, for one step, on these same machines.
    """
    gateway_s = figures.step_cpu_s[work.protocol] + cluster.is_remote * figures.tls_step_gateway_s
    each = gateway_s + figures.worker_step_cpu_s + work.step_cpu_s + caller_cpu_s
    busy_s = max(gateway_s / cluster.replicas, each / (cluster.machines * cluster.cores))
    return work.step_s + work.sessions * busy_s
