"""The samples of `bench.measures.nodes` for each way to the workers, with their goals and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean, median
from typing import Any

from bench.load.closed_loop import Round
from bench.reporting.grid import GENERATOR, Cell
from bench.reporting.report import NOTHING, Goal, Report, Table, beside, number
from bench.reporting.stats import Latencies, median_latencies, ratio

LOCAL = "local"
"""The way without nodes: workers of this machine's own engine, over Unix sockets."""
GATEWAY, NODES, WORKERS, REDIS = "gateway", "nodes", "workers", "redis"
PARTS = (GATEWAY, NODES, WORKERS, REDIS)
NOT_COMPARABLE = (
    "In `nodes` all machines share this machine's CPUs with gateways, stores and load generator, so steps/s and "
    "containers/s cannot grow with the number of machines. The figures show the cost of the path through a node, the "
    "balance of the load, and whether the number of machines delays starts.",
    "In `nodes` the link between a gateway and a machine is a pair of virtual interfaces without latency and loss.",
    "In `nodes` this machine's engine starts the containers of `local`, without a gate. The lab's engines share a "
    "disk and form a Swarm, so one machine ÷ local is the cost of the gate and of such an engine.",
)


@dataclass(slots=True)
class Exclusive:
    """One round of sessions with a container each."""

    opened: Round
    containers: dict[str, int] = field(default_factory=dict)
    """Number of containers on each machine while all sessions were open."""
    gone_s: float = 0.0
    """Seconds from the last end until none of these containers was left."""
    left: int = 0
    """Number of these containers that are left after a long time."""


@dataclass(slots=True)
class Way:
    """All samples of one gateway with its machines."""

    machines: int
    """Number of machines; 0 for this machine alone, without a node."""
    opens: list[Round] = field(default_factory=list)
    """One round for each burst."""
    steps: Cell = field(default_factory=Cell)
    sessions: dict[str, int] = field(default_factory=dict)
    """Number of open shared sessions on each machine, in the last round."""
    exclusive: list[Exclusive] = field(default_factory=list)
    rss_mib: dict[str, float] = field(default_factory=dict)
    """Resident MiB of the gateway, and of one node (a mean)."""
    rest: dict[str, float] = field(default_factory=dict)
    """Share of one CPU of each part, while no gateway has requests."""
    warm_s: float = 0.0
    """Seconds from the start of the gateway to its last warm worker."""
    errors: Counter[str] = field(default_factory=Counter)
    """Errors when sessions were ended."""

    @property
    def opens_per_s(self) -> float:
        """Openings a second, the median over the bursts."""
        return median(each.rate for each in self.opens) if self.opens else 0.0

    @property
    def open_latencies(self) -> Latencies | None:
        """The medians of the bursts' percentiles, or None if a burst had no success."""
        if not self.opens or not all(each.samples_s for each in self.opens):
            return None
        return median_latencies([each.latencies for each in self.opens])

    @property
    def containers_per_s(self) -> float:
        """Containers started a second, the median over the rounds."""
        return median(each.opened.rate for each in self.exclusive) if self.exclusive else 0.0

    @property
    def cpu_s_per_1000(self) -> float:
        """CPU seconds of all server processes for 1,000 steps."""
        return sum(self.steps.cpu_s_per_1000(part) for part in self.steps.cpu_s if part != GENERATOR)

    @property
    def left(self) -> int:
        """Number of containers that were not gone in time."""
        return sum(each.left for each in self.exclusive)

    def all_errors(self) -> Counter[str]:
        """Return the number of errors of each kind, over all requests."""
        rounds = [*self.opens, *(each.opened for each in self.exclusive)]
        return sum((each.errors for each in rounds), self.errors + self.steps.errors)

    def figures(self) -> dict[str, Any]:
        """Return all figures for the JSON."""
        opens = self.open_latencies
        return {
            "machines": self.machines,
            "opens_per_s": self.opens_per_s,
            "opens_per_s_by_burst": [each.rate for each in self.opens],
            "open": asdict(opens) if opens else None,
            "steps": self.steps.figures(),
            "sessions_by_machine": self.sessions,
            "exclusive": [
                {
                    "opened_s": each.opened.duration_s,
                    "containers_per_s": each.opened.rate,
                    "containers_by_machine": each.containers,
                    "gone_s": each.gone_s,
                    "left": each.left,
                }
                for each in self.exclusive
            ],
            "rss_mib": self.rss_mib,
            "cpu_share_at_rest": self.rest,
            "warm_s": self.warm_s,
            "errors": dict(self.all_errors()),
        }


def name_of(machines: int) -> str:
    """Return the name of the way with *machines* machines."""
    return LOCAL if not machines else "1 node" if machines == 1 else f"{machines} nodes"


def unevenness(counts: Mapping[str, int]) -> float:
    """Return the largest count in parts of an even share. 1 is even. 0 means that there is nothing."""
    total = sum(counts.values())
    return ratio(max(counts.values()) * len(counts), total) if total else 0.0


def make_report(ways: Sequence[Way], spread_s: float, *, plan: Mapping[str, Any]) -> Report:
    """Turn samples into a report.

    Args:
        ways: The local way first, then the others by their number of machines.
        spread_s: Seconds in which the gateway brought an image to all machines.
        plan: The plan for the JSON, with ``callers``, ``exclusive`` and ``workers``.
    """
    errors = sum(sum(way.all_errors().values()) for way in ways)
    return Report(
        name="nodes",
        figures={"plan": plan, "spread_s": spread_s} | {name_of(way.machines): way.figures() for way in ways},
        goals=[*_goals(ways, errors, plan), *_ratios(ways, spread_s, plan)],
        tables=[
            _load_table(ways, plan["callers"]),
            _cpu_table(ways, plan["callers"]),
            _exclusive_table(ways, plan["exclusive"]),
            _standing_table(ways),
        ],
        errors=errors,
        not_comparable=NOT_COMPARABLE,
    )


def _goals(ways: Sequence[Way], errors: int, plan: Mapping[str, Any]) -> Iterator[Goal]:
    left = sum(way.left for way in ways)
    yield Goal(id="S13", what="failed opens, steps and ends, locally and through nodes", value=errors, bound=0)
    yield Goal(id="S13", what="containers left after their end, on all machines", value=left, bound=0)
    for way in ways:
        alive = min((sum(each.containers.values()) for each in way.exclusive), default=0)
        what = f"{plan['exclusive']} sessions at once with a container each, {name_of(way.machines)}: containers alive"
        yield Goal(id="S13", what=what, value=alive, bound=plan["exclusive"], at_least=True)


def _ratios(ways: Sequence[Way], spread_s: float, plan: Mapping[str, Any]) -> Iterator[Goal]:
    """Yield the figures without a goal."""
    local, *others = ways
    for way in others:
        name, callers = name_of(way.machines), f"c={plan['callers']}"
        yield beside("S13", f"steps/s, {name} ÷ {LOCAL}, {callers}", ratio(way.steps.rate, local.steps.rate), "x")
        cpu = ratio(way.cpu_s_per_1000, local.cpu_s_per_1000)
        yield beside("S13", f"CPU time of a step, {name} ÷ {LOCAL}, {callers}", cpu, "x")
        yield beside("S13", f"opens/s, {name} ÷ {LOCAL}, {callers}", ratio(way.opens_per_s, local.opens_per_s), "x")
    for way, (base, of) in ((way, (others[0], name_of(1)) if way.machines > 1 else (local, LOCAL)) for way in others):
        what = f"containers/s, {name_of(way.machines)} ÷ {of}, {plan['exclusive']} sessions at once"
        yield beside("S13", what, ratio(way.containers_per_s, base.containers_per_s), "x")
    for way in others:
        if way.machines > 1:
            name = name_of(way.machines)
            what = f"shared sessions on the fullest of {name} ÷ an even share"
            yield beside("S13", what, unevenness(way.sessions), "x")
            worst = max((unevenness(each.containers) for each in way.exclusive), default=0.0)
            yield beside("S13", f"containers on the fullest of {name} ÷ an even share, worst round", worst, "x")
    what = "from a gateway's start until all machines have an image that one had"
    yield Goal(id="S13", what=what, value=spread_s, bound=0, unit="s", is_goal=False)


def _load_table(ways: Sequence[Way], callers: int) -> Table:
    rows = []
    for way in ways:
        steps, opens = way.steps.latencies, way.open_latencies
        rows.append(
            [
                name_of(way.machines),
                number(way.opens_per_s),
                *_p50_p99(opens),
                number(way.steps.rate),
                *_p50_p99(steps),
                f"{number(way.steps.rate / ways[0].steps.rate)} x" if ways[0].steps.rate else NOTHING,
                str(sum(way.all_errors().values())),
            ]
        )
    columns = ["way", "opens/s", "p50, ms", "p99, ms", "steps/s", "p50, ms", "p99, ms", f"steps ÷ {LOCAL}", "errors"]
    return Table(f"Bursts of {callers} openings of shared sessions, and their steps, c={callers}", columns, rows)


def _cpu_table(ways: Sequence[Way], callers: int) -> Table:
    rows = [
        [
            name_of(way.machines),
            *(number(way.steps.cpu_s_per_1000(part)) if part in way.steps.cpu_s else NOTHING for part in PARTS),
            number(way.cpu_s_per_1000),
            f"{number(ratio(way.cpu_s_per_1000, ways[0].cpu_s_per_1000))} x",
            number(way.steps.cpu_s_per_1000(GENERATOR)),
        ]
        for way in ways
    ]
    columns = ["way", *PARTS, "all of these", f"÷ {LOCAL}", "load generator"]
    return Table(f"CPU seconds of 1,000 steps, c={callers}", columns, rows)


def _exclusive_table(ways: Sequence[Way], count: int) -> Table:
    base = next((way.containers_per_s for way in ways if way.machines == 1), 0.0)
    rows = []
    for way in ways:
        rounds = way.exclusive
        took = [number(pick(each.opened.duration_s for each in rounds)) for pick in (median, max)] if rounds else []
        rows.append(
            [
                name_of(way.machines),
                *(took or [NOTHING] * 2),
                number(way.containers_per_s),
                f"{number(ratio(way.containers_per_s, base))} x",
                number(median(each.gone_s for each in rounds)) if rounds else NOTHING,
                ", ".join(" + ".join(str(one) for one in each.containers.values()) for each in rounds) or NOTHING,
            ]
        )
    columns = ["way", "all open after, s", "worst round", "containers/s", "÷ 1 node", "gone after, s", "by machine"]
    return Table(f"{count} sessions at once, each with a container of its own", columns, rows)


def _standing_table(ways: Sequence[Way]) -> Table:
    rows = []
    for way in ways:
        rows.append(
            [
                name_of(way.machines),
                " + ".join(str(count) for count in way.sessions.values()) or NOTHING,
                *(number(way.rss_mib[part]) if part in way.rss_mib else NOTHING for part in (GATEWAY, NODES)),
                *(number(way.rest[part] * 100) if part in way.rest else NOTHING for part in (GATEWAY, NODES)),
                number(way.warm_s),
            ]
        )
    columns = ["way", "shared sessions by machine", "gateway, MiB", "a node, MiB"]
    columns += ["gateway at rest, % of a CPU", "all its nodes", "warm after, s"]
    return Table(
        "How the load lies; memory, CPU at rest, and a gateway's start up to its last warm worker", columns, rows
    )


def _p50_p99(found: Latencies | None) -> list[str]:
    return [number(found.p50_ms), number(found.p99_ms)] if found else [NOTHING] * 2


def rss_mib(rss_bytes: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Return the mean MiB of one copy of each part."""
    return {part: mean(each) / 2**20 for part, each in rss_bytes.items() if each}
