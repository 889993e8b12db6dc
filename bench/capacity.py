"""Computes the resources of a cluster for a number of sessions, and the part that is full first: a calculation.

Steady state: sessions end and begin at the pace of their steps. ``capacity.toml`` has the costs that were measured on
one small machine. The model multiplies these costs. It has no queues: it reports that a part is 70 % busy, not the
latency of that part. ``bench/tests/test_capacity.py`` compares it with runs that were not used to make it.

``python -m bench.capacity --help`` prints tables and writes ``docs/scaling.md``.
"""

from __future__ import annotations

import argparse
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from bench.reporting import results
from bench.reporting.report import NOTHING, Table, number
from gateway.core.scaling import MEMORY_OVERCOMMIT, rest_s
from gateway.pool.starts import STARTS_AT_ONCE
from gateway.sessions.cache import CACHED_MAX

PAGE: Final = Path(__file__).parents[1] / "docs" / "scaling.md"
COSTS: Final[Mapping[str, Mapping[str, Any]]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
BEGIN: Final = "<!-- results: made by `python -m bench.capacity --write-docs` -->"
PROTOCOLS: Final = ("ors", "openenv", "areal")
MIB: Final = 2**20
FULL: Final = 0.7  # planned share of a CPU: above it, a request waits for several other requests
TURNS_S: Final = 2.0  # turns of the control loop a second, if no event wakes it (`pool.loop.TICK_S`)
AUDIT_LOADS_S: Final = 3 / 15  # `audit` loads all workers three times every 15 s
WAKES: Final = 3  # turns that the end of a worker requests: full, empty, stopped
STALL_S: Final = 0.1  # limit for one action of an event loop, or of Redis
RELAY_CONNECTIONS: Final = 8192  # of one node
NODE_CONTAINERS: Final = 500  # of one node, unless `GATEWAY_NODE_MAX_CONTAINERS` sets another number
REPLICAS_MAX: Final = 512
SESSIONS_MAX: Final = 100_000_000


def _given(default: float, meaning: str, *, least: float = 0.0, most: float = 1e12) -> Any:
    return field(default=default, metadata={"meaning": meaning, "least": least, "most": most})


def read_costs(found: Mapping[str, Any]) -> SimpleNamespace:
    """Take the costs that `COSTS` names out of a run's results; raises `ValueError` with the path of a missing cost."""
    parts = found["figures"] | {"machine": found["machine"]}
    return SimpleNamespace(**{name: _cost(parts, source) for name, source in COSTS.items()})


def _cost(parts: Mapping[str, Any], source: Mapping[str, Any]) -> float:
    if "is" in source:
        return float(source["is"])
    return float(source.get("times", 1) * _number(parts, source.get("at")) / _number(parts, source.get("over")))


def _number(found: Any, path: str | None) -> float:
    """Return the number at *path*, or 1 if there is no path. A part ``name=value`` of a path selects a row."""
    if path is None:
        return 1.0
    for part in path.split("/"):
        name, _, value = part.partition("=")
        rows = [row for row in found if row[name] == value] if isinstance(found, list) else [found.get(part)]
        found = rows[0] if rows else None
        if found is None:
            raise ValueError(f"the results have no {path}: {part!r} is missing")
    if not isinstance(found, int | float) or not found > 0:
        raise ValueError(f"the results' {path} is {found!r}, and no number above 0")
    return float(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The trainers' behaviour and the cluster's resources; raises `ValueError` with the name of a wrong field."""

    protocol: str = "ors"
    sessions: float = _given(100_000, "sessions at once", least=1)
    sandbox: float = _given(0, "share of the sessions that are sandboxes", most=1)
    exclusive: float = _given(0, "share of the sessions with a container of its own, made anew for each", most=1)
    period_s: float = _given(5, "s from one step of a session to its next", least=1e-3)
    step_s: float = _given(0.1, "s that a step takes")
    steps: float = _given(20, "steps of an episode", least=1e-3)
    # 1 where each call has a connection of its own (AReaL), 0 where a session keeps one (OpenEnv).
    wandering: float = _given(1, "share of the calls that come to any replica", most=1)
    group_size: float = _given(8, "members of a group", least=1)
    warm: float = _given(0.1, "free slots kept beside the sessions, in parts of them")
    shared_slots: float = _given(64, "slots of a shared worker", least=1)
    sandbox_slots: float = _given(16, "slots of a worker with sandboxes", least=1)
    step_cpu_s: float = _given(1e-3, "s of CPU of the environment's own, a step (a guess)")
    prepare_cpu_s: float = _given(0.1, "s of CPU to prepare a sandbox's task, once a group (a guess)")
    exclusive_mib: float = _given(256, "MiB of what an exclusive session runs (a guess)")
    limit_mib: float = _given(512, "MiB that a worker may take at most")
    machines: float = _given(100, "machines", least=1)
    cores: float = _given(16, "cores of each machine", least=1e-3)
    memory_gib: float = _given(64, "GiB of each machine", least=1e-3)
    replicas: float = _given(8, "gateway replicas, with one core each", least=1)
    starts_at_once: float = _given(STARTS_AT_ONCE, "containers that the leader starts at once on a machine", least=1e-3)
    rests: float = _given(1, "whether the control loop pauses between two turns", most=1)
    reads: float = _given(1, "share of the workers that a turn of the control loop reads", most=1)
    remote: float = _given(1, "whether workers are on other machines than their gateway, behind TLS", most=1)

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise ValueError(f"protocol: {self.protocol!r} is not one of {', '.join(PROTOCOLS)}")
        for part in quantities():
            value, least, most = getattr(self, part.name), part.metadata["least"], part.metadata["most"]
            if not least <= value <= most:
                raise ValueError(f"{part.name}: {value!r} is not from {least:g} to {most:g}")
        if self.sandbox + self.exclusive > 1:
            raise ValueError("sandbox, exclusive: they are more than all sessions")


def quantities() -> list[Field[Any]]:
    """Return the fields of a plan that are numbers."""
    return [part for part in fields(Plan) if part.metadata]


class Model:
    """The needs of a plan for each part of its cluster: rates (``_s``: by the second), CPUs and bytes."""

    def __init__(self, costs: SimpleNamespace, plan: Plan) -> None:
        self.costs, self.plan = costs, plan
        self._set_paces(costs, plan)
        self._set_cpus(costs, plan)
        self._set_bytes(costs, plan)

    def but(self, **changes: Any) -> Model:
        """Return the model of a plan that differs in *changes*."""
        return Model(self.costs, replace(self.plan, **changes))

    def _set_paces(self, costs: SimpleNamespace, plan: Plan) -> None:
        self.steps_s = plan.sessions / plan.period_s
        self.ends_s = self.steps_s / plan.steps  # the same number of sessions begins
        # The container of an exclusive session ends with it. Warm containers count.
        self.ends_alone_s = self.ends_s * plan.exclusive
        self.alone = plan.sessions * (1 + plan.warm) * plan.exclusive
        self.in_shared = plan.sessions * max(0.0, 1 - plan.sandbox - plan.exclusive)
        sharing = self.in_shared / plan.shared_slots + plan.sessions * plan.sandbox / plan.sandbox_slots
        self.containers = (1 + plan.warm) * sharing + self.alone
        # Number of replicas that a session has used at its end. Each replica but the first has to look it up.
        self.seen_by = plan.replicas - (plan.replicas - 1) * (1 - 1 / plan.replicas) ** (plan.steps * plan.wandering)
        self.finds_s = self.ends_s * (self.seen_by - 1)
        # Each replica opens new connections to a worker that lives for one session.
        self.dials_s = plan.exclusive * (self.ends_s + self.finds_s)
        # A replica writes a note for each session that was busy there, once a second.
        busy = (1 + plan.step_s) / plan.period_s
        self.notes_s = plan.sessions * min(1 + (plan.replicas - 1) * plan.wandering, busy)
        # The end of a worker wakes the control loop, which rests after each turn.
        self.read = plan.reads * self.containers
        turn_s = (costs.load_redis_s + costs.load_client_s) * self.read + costs.turn_redis_s + costs.turn_client_s
        pause_s = plan.rests * rest_s(round(self.containers))
        self.turns_s = min(TURNS_S + WAKES * self.ends_alone_s, 1 / (turn_s + pause_s))
        self.loads_s = (self.turns_s + AUDIT_LOADS_S) * self.read
        self.starts_s = plan.machines * min(plan.starts_at_once / costs.engine_start_s, costs.engine_starts_s)

    def _set_cpus(self, costs: SimpleNamespace, plan: Plan) -> None:
        # A replica that is not the leader: its share of the requests, and the full work of each replica.
        self.step_s: float = getattr(costs, f"{plan.protocol}_step_cpu_s") + plan.remote * costs.tls_step_gateway_s
        session_s = costs.episode_cpu_s + costs.open_client_s + costs.close_client_s + costs.outcome_client_s
        split = self.steps_s * self.step_s + self.ends_s * session_s + self.finds_s * costs.find_client_s
        split += self.notes_s * costs.note_client_s + plan.remote * self.dials_s * costs.tls_dial_gateway_s
        each = costs.rest_cpu_s + self.ends_s * costs.notice_client_s + plan.remote * plan.machines * costs.report_cpu_s
        self.replica_cpu = split / plan.replicas + each
        # The leader's additional work. A worker's life is four store operations, estimated as two ends of sessions.
        placing_s = plan.remote * self.containers * costs.place_cpu_s
        worker_s = costs.container_client_cpu_s + 2 * costs.close_client_s + placing_s
        self.control_cpu = self.loads_s * costs.load_client_s + self.ends_alone_s * worker_s
        session_s = costs.open_redis_s + costs.close_redis_s + costs.outcome_redis_s
        notices_s = self.ends_s * plan.replicas * costs.notice_redis_s
        loop_s = self.loads_s * costs.load_redis_s + plan.replicas * TURNS_S * costs.turn_redis_s
        self.redis_cpu = self.ends_s * session_s + notices_s + self.finds_s * costs.find_redis_s + loop_s
        self.redis_cpu += self.notes_s * costs.note_redis_s + self.ends_alone_s * 2 * costs.close_redis_s
        # One machine's `gateway node`. A report is assumed to cost it as much as it costs a replica to read.
        relayed = self.steps_s * costs.tls_step_node_s + self.dials_s * costs.tls_dial_node_s
        self.node_cpu = relayed / plan.machines + plan.replicas * costs.report_cpu_s
        # All machines together, with gateways and nodes.
        self.sandbox_s = costs.sandbox_cpu_s + plan.prepare_cpu_s / plan.group_size
        steps = self.steps_s * (costs.worker_step_cpu_s + plan.step_cpu_s)
        ends = self.ends_s * plan.sandbox * self.sandbox_s + self.ends_alone_s * costs.container_cpu_s
        lists = plan.replicas * self.containers * costs.engine_list_cpu_s
        nodes = plan.remote * (plan.machines * self.node_cpu + lists)
        self.machine_cpu = steps + ends + plan.replicas * self.replica_cpu + self.control_cpu + nodes

    def _set_bytes(self, costs: SimpleNamespace, plan: Plan) -> None:
        # Upper bound of a replica's cache: at the end of an episode most replicas have seen the session.
        self.cached = plan.sessions * self.seen_by / plan.replicas
        # Of one node: a connection of each replica to each worker that it called, and a connection per active call.
        under_way = self.steps_s * plan.step_s * (1 - plan.exclusive)
        shared = max((self.containers - self.alone) * plan.replicas, under_way)
        self.relay_connections = (shared + plan.sessions * plan.exclusive * self.seen_by) / plan.machines
        self.redis_bytes = plan.sessions * costs.redis_session_bytes + self.containers * costs.redis_worker_bytes
        workers = self.containers * costs.container_bytes + self.alone * plan.exclusive_mib * MIB
        sessions = self.in_shared * costs.worker_session_bytes + plan.sessions * plan.sandbox * costs.sandbox_bytes
        gateways = plan.replicas * (costs.base_bytes + self.cached * costs.session_bytes)
        tls = plan.remote * 2 * self.relay_connections * plan.machines * costs.tls_connection_bytes
        self.memory_bytes = workers + sessions + gateways + tls + self.redis_bytes

    def uses(self) -> dict[str, float]:
        """Return the load of each part of the cluster as a share; a plan with a share above 1 is impossible."""
        costs, plan = self.costs, self.plan
        memory = plan.machines * plan.memory_gib * 2**30
        promised = self.containers * plan.limit_mib * MIB
        return {
            "CPU of a replica": self.replica_cpu,
            "CPU of the leader": self.replica_cpu + self.control_cpu,
            "stall of the leader's loop": self.read * costs.load_client_s / STALL_S,
            "CPU of Redis": self.redis_cpu,
            "stall of Redis": self.read * costs.load_redis_s / STALL_S,
            "memory of Redis": self.redis_bytes / (plan.memory_gib * 2**30 / 2),
            "starts": self.ends_alone_s / self.starts_s,
            "containers of a machine": self.containers / plan.machines / NODE_CONTAINERS,
            "memory of the machines": self.memory_bytes / memory,
            "memory promised to workers": promised / (MEMORY_OVERCOMMIT * memory),
            "CPU of the machines": self.machine_cpu / (plan.machines * plan.cores),
            "sessions of a replica": self.cached / CACHED_MAX,
            "CPU of a node's process": plan.remote * self.node_cpu,
            "relay connections of a node": plan.remote * self.relay_connections / RELAY_CONNECTIONS,
        }

    def walls(self) -> list[tuple[float, str]]:
        """Return the number of sessions at which each part is full, with all else equal, the first full part first."""
        most = self.but(sessions=SESSIONS_MAX).uses()
        return sorted((self._filled(name), name) for name, share in most.items() if share >= 1)

    def _filled(self, name: str) -> float:
        low, high = 1.0, float(SESSIONS_MAX)
        while high / low > 1.001:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if self.but(sessions=middle).uses()[name] >= 1 else (middle, high)
        return high

    def replicas_needed(self) -> int | None:
        """Return the smallest number of replicas that keeps each below `FULL`; None if no number is enough."""
        # The leader's work is left out, because more replicas do not reduce it.
        numbers = range(1, REPLICAS_MAX + 1)
        return next((count for count in numbers if self.but(replicas=count).replica_cpu <= FULL), None)

    def machines_needed(self) -> float:
        """Return the number of machines that their scarcest resource requires, with CPUs at most `FULL`."""
        full = self.uses()
        starts: float = self.ends_alone_s / self.costs.engine_starts_s
        bounds = ("memory of the machines", "memory promised to workers", "containers of a machine")
        most = max(full["CPU of the machines"] / FULL, *(full[name] for name in bounds))
        return max(starts, most * self.plan.machines)

    def opening_s(self) -> float:
        """Return the seconds until all sessions are open, with running workers: the time of the slowest part."""
        # Half of an episode's requests open it.
        replica_s: float = (self.costs.episode_cpu_s / 2 + self.costs.open_client_s) / self.plan.replicas
        sandbox_s = self.plan.sandbox * self.sandbox_s / (self.plan.machines * self.plan.cores)
        each_s: float = max(replica_s, self.costs.open_redis_s, sandbox_s)
        return self.plan.sessions * each_s


MIXES: Final = {"all shared": (0.0, 0.0), "half sandbox": (0.5, 0.0), "a tenth exclusive": (0.0, 0.1)}
"""Shares of sandboxes and of exclusive sessions."""
LEVERS: Final[Mapping[str, Callable[[Model], Model]]] = {
    "as it is": lambda model: model,
    "a session's calls come to one replica": lambda model: model.but(wandering=0),
    "a turn reads a tenth of the workers": lambda model: model.but(reads=0.1),
    "the two above together": lambda model: model.but(wandering=0, reads=0.1),
    "without the pause between two turns": lambda model: model.but(rests=0),
    "twice as many replicas": lambda model: model.but(replicas=2 * model.plan.replicas),
    "steps four times as far apart": lambda model: model.but(period_s=4 * model.plan.period_s),
}
ANSWERS: Final[Mapping[str, Callable[[Model], float | None]]] = {
    f"gateway replicas, {FULL:.0%} busy": Model.replicas_needed,
    "machines for the workers": Model.machines_needed,
    "containers": lambda model: model.containers,
    "steps a second": lambda model: model.steps_s,
    "episodes a second": lambda model: model.ends_s,
    "starts a second, in the long run": lambda model: model.ends_alone_s,
    "s until all workers are started": lambda model: model.containers / model.starts_s,
    "s until all sessions are open, once they are": Model.opening_s,
}
MIXED: Final = ("sandbox", "exclusive", "replicas")  # each case sets its own
SHOWN_WALLS: Final = 4


def cases(costs: SimpleNamespace, plan: Plan) -> list[Model]:
    """Return a model of each of `MIXES`, with as many replicas as it needs."""
    mixed = [Model(costs, replace(plan, sandbox=sandbox, exclusive=exclusive)) for sandbox, exclusive in MIXES.values()]
    return [model.but(replicas=model.replicas_needed() or REPLICAS_MAX) for model in mixed]


def tables(some: Sequence[Model]) -> list[Table]:
    """Return the tables of a report on *some* models, one column per model; `cases` makes the models."""
    costs, plan, heads = some[0].costs, some[0].plan, ["", *MIXES]
    assumed = [part for part in quantities() if part.name not in MIXED]
    said = [[part.metadata["meaning"], f"{getattr(plan, part.name):,.10g}"] for part in assumed]
    answers = [[name, *(_count(answer(model)) for model in some)] for name, answer in ANSWERS.items()]
    used = [[name, *(_share(model.uses()[name]) for model in some)] for name in some[0].uses()]
    walls = [[str(place + 1), *(_wall(model, place) for model in some)] for place in range(SHOWN_WALLS)]
    moved = [[name, *(_wall(pull(model)) for model in some)] for name, pull in LEVERS.items()]
    inputs = [[name, _source(**source), f"{getattr(costs, name):.3g}"] for name, source in COSTS.items()]
    return [
        Table("What was assumed", ["", plan.protocol], said),
        Table("What is needed", heads, answers),
        Table("How full each part is", heads, used),
        Table("The first walls, with these replicas and machines, at sessions", heads, walls),
        Table("What would move the first wall", heads, moved),
        Table("What the model was given, in seconds and bytes", ["", "from", ""], inputs, words=2),
    ]


def _count(value: float | None) -> str:
    return NOTHING if value is None else number(value)


def _source(at: str = "1 s", over: str = "", **measured: Any) -> str:
    return f"measured by itself: {measured['from']}" if "from" in measured else f"{at} ÷ {over}" if over else at


def _share(share: float) -> str:
    return f"**{share:.0%}**" if share >= 1 else f"{share:.1%}"


def _wall(model: Model, place: int = 0) -> str:
    walls = model.walls()
    return f"{walls[place][1]}: {number(walls[place][0])}" if place < len(walls) else NOTHING


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables. With ``--write-docs``, write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.capacity", description="What a cluster must have.")
    options = [part for part in quantities() if part.name not in MIXED]
    for part in options:
        name, meaning = f"--{part.name.replace('_', '-')}", part.metadata["meaning"]
        parser.add_argument(name, type=float, default=part.default, help=f"{meaning} (%(default)s)")
    parser.add_argument("--protocol", choices=PROTOCOLS, default="ors")
    parser.add_argument("--results", type=Path, default=results.LATEST, help="of a run of the benchmarks")
    parser.add_argument("--write-docs", action="store_true", help=f"put the tables into {PAGE.name}")
    given = vars(parser.parse_args(arguments))
    try:
        costs = read_costs(results.read(given["results"]))
        plan = Plan(protocol=given["protocol"], **{part.name: given[part.name] for part in options})
    except (OSError, ValueError) as error:
        parser.error(f"{error} (`make bench` measures and writes the results)")
    found = results.markdown_tables(tables(cases(costs, plan)))
    print(found)
    if given["write_docs"]:
        PAGE.write_text(results.between_marks(PAGE.read_text(), found, begin=BEGIN))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
