"""What one machine was measured to take: the inputs of `capacity_model`, each with where it comes from.

Most are read by name from a run's results (``results/latest.json``). What these lack was measured once, on the same
kind of machine (2 cores of a Xeon, Python 3.11, Redis 7.0.15, other work beside it, so rather too high than too low):
the store's own operations, by CPU time of the Redis process and of one replica's; the way over TLS, between a gateway,
the relay of ``gateway/node`` and a worker that echoes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from statistics import median
from typing import Any, Final

MIB: Final = 2**20
KIB: Final = 2**10
PROTOCOLS: Final = ("ors", "openenv", "areal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Seconds are of one CPU unless their name says otherwise; ``SOURCES`` says where each is from."""

    # The gateway's process.
    step_cpu_s: Mapping[str, float]
    """By protocol, with many callers, and a worker on the same machine."""
    episode_cpu_s: float
    """From create to delete, with one call; without the store."""
    rest_cpu_s: float
    """A second of a replica that leads and serves nothing."""
    base_bytes: float
    session_bytes: float
    """Of a session that a replica remembers."""
    # A worker's process.
    worker_step_cpu_s: float
    """Beyond what the environment itself computes."""
    worker_session_bytes: float
    sandbox_bytes: float
    sandbox_cpu_s: float
    """To open a sandbox, run one command and close it."""
    container_bytes: float
    """With its shim and an idle server."""
    container_cpu_s: float
    """Of the machine, to create, start and remove one."""
    # The engine.
    engine_starts_s: float
    """A second, of one machine."""
    engine_start_s: float
    """Time on the clock for one that is started alone."""
    engine_list_cpu_s: float
    """For each container that is listed."""
    container_client_cpu_s: float
    """Of the replica that leads, for the calls of one container's life."""
    # Redis, and what a replica spends to ask it: pairs of these.
    open_redis_s: float
    """``claim`` and ``opened``."""
    open_client_s: float
    close_redis_s: float
    """``begin_close`` and ``release``."""
    close_client_s: float
    find_redis_s: float
    find_client_s: float
    note_redis_s: float
    """One session in a ``touch`` of hundreds."""
    note_client_s: float
    outcome_redis_s: float
    """One outcome of a task's record, told with others."""
    outcome_client_s: float
    load_redis_s: float
    """``load``, for each worker that there is."""
    load_client_s: float
    """Reading the answer, and deciding on it."""
    turn_redis_s: float
    """The rest of a turn of the control loop: ``lead``, ``late`` and ``due`` with nothing late."""
    turn_client_s: float
    notice_redis_s: float
    """A notice, for each replica that hears it."""
    notice_client_s: float
    redis_session_bytes: float
    redis_worker_bytes: float
    # Machines.
    place_cpu_s: float
    """Of the leader, to choose a new worker's machine, for each worker that there is."""
    report_cpu_s: float
    """Of a replica, for one report of one node."""
    tls_step_gateway_s: float
    """A step in a worker on another machine, beyond one on the same."""
    tls_step_node_s: float
    tls_dial_gateway_s: float
    tls_dial_node_s: float
    tls_connection_bytes: float
    """At the node, and about as much at the gateway."""


_OWN = "measured by itself: "
SOURCES: Final[Mapping[str, str]] = {
    "step_cpu_s": "ORS: proxies, gateway, c64; OpenEnv: openenv, gateway, c64; AReaL: areal, one second ÷ steps/s at "
    "c=16, which is the most that one process can have spent",
    "episode_cpu_s": "calls, episodes, gateway, c64",
    "rest_cpu_s": "scale, idle, cpu_share_of_none, gateway",
    "base_bytes": "calls, idle_rss_bytes, gateway",
    "session_bytes": "footprint, idle_sessions, gateway",
    "worker_step_cpu_s": "proxies, gateway, c64, its worker",
    "worker_session_bytes": "areal, idle_episodes, its workers",
    "sandbox_bytes": "sandboxes, idle_sessions, gateway on Docker",
    "sandbox_cpu_s": "sandboxes, sustained, gateway on Docker, c16, workers",
    "container_bytes": "16.5 MB with its shim: containers of a bare server, by the engine's machine",
    "container_cpu_s": "sandboxes, sustained, a container a session, c16: CPUs ÷ sessions/s, all of them busy",
    "engine_starts_s": "many_containers, by the SDK alone, eight at a time",
    "engine_start_s": _OWN + "create 22 ms and start 182 ms of a hardened container with no network, medians",
    "engine_list_cpu_s": _OWN + "the engine's list of 60 containers takes 5 ms",
    "container_client_cpu_s": "sandboxes, sustained, a container a session, c16: the SDK's process",
    "open_redis_s": _OWN + "20,000 claims and openings: 82 and 52 µs",
    "open_client_s": _OWN + "the same: 160 and 136 µs",
    "close_redis_s": _OWN + "begin_close and release: 58 and 60 µs",
    "close_client_s": _OWN + "the same: 174 and 145 µs",
    "find_redis_s": _OWN + "20,000 times",
    "find_client_s": _OWN + "20,000 times",
    "note_redis_s": _OWN + "100,000 notes, 500 at a time",
    "note_client_s": _OWN + "100,000 notes, 500 at a time",
    "outcome_redis_s": _OWN + "10,000 outcomes, 50 at a time",
    "outcome_client_s": _OWN + "10,000 outcomes, 50 at a time",
    "load_redis_s": _OWN + "1,000, 2,000, 5,000, 20,000 workers: 7.0, 7.4, 8.2, 8.0 µs each; 6.9 with a session in "
    "each; 10,000 openings that wait add nothing that can be told from noise",
    "load_client_s": _OWN + "the same: 5.3, 5.3, 5.2, 5.1 µs, and some 0.9 µs to decide and to show it",
    "turn_redis_s": _OWN + "60 and 80 µs",
    "turn_client_s": _OWN + "137 and 263 µs",
    "notice_redis_s": _OWN + "20,000 notices to 1, 4 and 16 replicas: 0.5 µs and 0.25 µs for each",
    "notice_client_s": _OWN + "the same, with one follower in each replica",
    "redis_session_bytes": _OWN + "used_memory of 20,000 sessions",
    "redis_worker_bytes": _OWN + "used_memory of 5,000 workers",
    "place_cpu_s": _OWN + "100 machines with 17, 43, 125 and 500 workers each: 0.9, 1.2, 2.4 and 8.1 ms",
    "report_cpu_s": _OWN + "reports of 10, 100 and 500 workers over TLS: 0.97, 0.88 and 1.19 ms",
    "tls_step_gateway_s": _OWN + "600 bytes there and 400 back, 64 at a time: 21 to 23 µs, and 4 µs on a Unix socket",
    "tls_step_node_s": _OWN + "the same: 68 and 71 µs",
    "tls_dial_gateway_s": _OWN + "400 connections with both certificates",
    "tls_dial_node_s": _OWN + "400 connections with both certificates",
    "tls_connection_bytes": _OWN + "1,000 connections: 31 KiB at the node, 39 KiB at the gateway",
}


def read_figures(found: Mapping[str, Any]) -> Figures:
    """Take the inputs out of a run's results.

    Raises:
        ValueError: the results lack one; with its name.
    """
    parts = found["figures"]
    calls, proxies, areal = _at(parts, "calls"), _at(parts, "proxies", "calls", "gateway", "c64"), _at(parts, "areal")
    sandboxes = _at(parts, "sandboxes")
    containers = _at(sandboxes, "sustained", "a container a session", "c16")
    many = _at(parts, "many_containers")
    return Figures(
        step_cpu_s={
            "ors": _number(proxies, "cpu_s_per_1000", "proxy") / 1000,
            "openenv": _number(parts, "openenv", "steps", "gateway", "c64", "cpu_s_per_1000", "gateway") / 1000,
            "areal": 1 / _number(areal, "acts", "step, c=16", "per_s"),
        },
        episode_cpu_s=_number(calls, "episodes", "gateway", "c64", "cpu_s_per_1000", "gateway") / 1000,
        rest_cpu_s=_number(parts, "scale", "idle", "cpu_share_of_none", "gateway"),
        base_bytes=_number(calls, "idle_rss_bytes", "gateway", "gateway"),
        session_bytes=_of(_at(parts, "footprint", "idle_sessions"), "process", "gateway", "kib_a_session") * KIB,
        worker_step_cpu_s=_number(proxies, "cpu_s_per_1000", "worker") / 1000,
        worker_session_bytes=_of(_at(areal, "idle_episodes"), "process", "its workers", "kib_a_session") * KIB,
        sandbox_bytes=_of(_at(sandboxes, "idle_sessions"), "subject", "gateway, Docker", "mib_a_session") * MIB,
        sandbox_cpu_s=_number(sandboxes, "sustained", "gateway, Docker", "c16", "cpu_s_per_1000", "workers") / 1000,
        container_bytes=16.5e6,
        container_cpu_s=_number(found, "machine", "cpus_usable") / _number(containers, "per_s"),
        engine_starts_s=_number(many, "plan", "by_sdk") / _number(many, "sdk_s"),
        engine_start_s=0.204,
        engine_list_cpu_s=83e-6,
        container_client_cpu_s=_number(containers, "cpu_s_per_1000", "generator") / 1000,
        open_redis_s=134e-6,
        open_client_s=296e-6,
        close_redis_s=118e-6,
        close_client_s=319e-6,
        find_redis_s=42e-6,
        find_client_s=135e-6,
        note_redis_s=5.2e-6,
        note_client_s=3.8e-6,
        outcome_redis_s=18e-6,
        outcome_client_s=18e-6,
        load_redis_s=median((7.0e-6, 7.4e-6, 8.2e-6, 8.0e-6, 6.9e-6)),
        load_client_s=median((5.3e-6, 5.3e-6, 5.2e-6, 5.1e-6)) + 0.9e-6,
        turn_redis_s=140e-6,
        turn_client_s=400e-6,
        notice_redis_s=0.25e-6,
        notice_client_s=15.4e-6,
        redis_session_bytes=0.84 * KIB,
        redis_worker_bytes=1.05 * KIB,
        place_cpu_s=0.17e-6,
        report_cpu_s=0.95e-3,
        tls_step_gateway_s=18e-6,
        tls_step_node_s=69e-6,
        tls_dial_gateway_s=1.73e-3,
        tls_dial_node_s=1.83e-3,
        tls_connection_bytes=39 * KIB,
    )


def names() -> list[str]:
    """The inputs' names."""
    return [field.name for field in fields(Figures)]


def _at(found: Any, *path: str) -> Any:
    for place, name in enumerate(path):
        if not isinstance(found, Mapping) or name not in found:
            raise ValueError(f"the results have no {' → '.join(path[: place + 1])}")
        found = found[name]
    return found


def _number(found: Any, *path: str) -> float:
    value = _at(found, *path)
    if not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"the results' {' → '.join(path)} is {value!r}, and no number above 0")
    return float(value)


def _of(rows: Any, by: str, name: str, field: str) -> float:
    """The field of the row whose *by* is *name*."""
    for row in rows:
        if row.get(by) == name:
            return _number(row, field)
    raise ValueError(f"the results have no {by} {name!r}")
