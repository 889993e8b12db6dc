"""The samples that a soak takes every few seconds, and the bounds on their growth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.reporting.report import Table, number

GROWTH_MIB, GROWTH_LONG_MIB, GROWTH_MIB_A_MIN = 16.0, 8.0, 0.25
"""MiB by which the memory of the spared replica may grow in the second half (the second value: in a long half), and
the additional MiB per minute.

The replica may have started just before: it warms up by some 8 MiB. An allocator keeps as much again after peaks, such
as queues while Redis is away. In a longer half, less of that is in the slope (4.7 MiB were seen in ten minutes). At
some 1,000 sessions a minute, 0.25 MiB a minute are 256 bytes per session. A leaked session takes more than a KiB
(S11)."""
LONG_S = 300.0
"""Seconds from which a half is long."""
FILES_GROWTH, FILES_GROWTH_LONG, THREADS_GROWTH = 120.0, 40.0, 16.0
"""Bounds on the growth of that replica's files (the second: in a long half) and threads in the second half. A young
replica still opens 32 connections to Redis, 8 to the engine and 1 for each of 52 slots. Trainers' connections vary."""
FILES_AT_REST, THREADS_AT_REST = 48, 16
"""Bounds on the additional files and threads at rest, compared with the time before the load. The replica keeps 32
connections to Redis and 8 to the engine, even unused, and threads wait for work."""
REDIS_GROWTH_MIB = 4.0
"""MiB of growth in the second half, by Redis' own count of its data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One gateway process at one moment."""

    life: int
    """Number of the process among its replica's processes."""
    rss_mib: float
    files: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """All observations of one moment."""

    at_s: float
    """Seconds since the start of the load."""
    replicas: Sequence[Process]
    keys: int | None
    """Number of keys, or None if Redis did not answer."""
    redis_mib: float | None
    containers: int
    steps: int
    """Number of correct steps so far."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A condition at the end of the soak."""

    what: str
    value: float
    bound: float
    unit: str = ""

    @property
    def holds(self) -> bool:
        """True if the value is within the bound."""
        return self.value <= self.bound


@dataclass(slots=True)
class Samples:
    """All samples of a run."""

    all: list[Sample] = field(default_factory=list)

    def second_half(self, length_s: float) -> list[Sample]:
        """Return the samples of the second half of the load, which took *length_s*."""
        return [sample for sample in self.all if length_s / 2 <= sample.at_s <= length_s]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the line through *points* (least squares), in y for each x; 0 for less than two points."""
    if len(points) < 2:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def flatness(samples: Samples, length_s: float) -> list[Verdict]:
    """Return the verdicts on growth in the second half, in which faults spared the first replica."""
    half = samples.second_half(length_s)
    # A fault at the start of the half may have ended a process. Only the last process of the replica counts.
    half = [sample for sample in half if sample.replicas[0].life == half[-1].replicas[0].life]

    def growth(value: Callable[[Sample], float | None]) -> float:
        points = [(sample.at_s, found) for sample in half if (found := value(sample)) is not None]
        return slope(points) * (points[-1][0] - points[0][0]) if points else 0.0

    minutes = length_s / 2 / 60
    is_long = length_s / 2 >= LONG_S
    return [
        Verdict(
            "growth of the first replica's memory in the second half",
            growth(lambda sample: sample.replicas[0].rss_mib),
            (GROWTH_LONG_MIB if is_long else GROWTH_MIB) + GROWTH_MIB_A_MIN * minutes,
            "MiB",
        ),
        Verdict(
            "growth of its open files",
            growth(lambda sample: sample.replicas[0].files),
            FILES_GROWTH_LONG if is_long else FILES_GROWTH,
        ),
        Verdict("growth of its threads", growth(lambda sample: sample.replicas[0].threads), THREADS_GROWTH),
        Verdict("growth of Redis' data", growth(lambda sample: sample.redis_mib), REDIS_GROWTH_MIB, "MiB"),
    ]


def sample_table(samples: Samples, *, rows: int = 16) -> Table:
    """Return a table of some samples, evenly spread."""
    step = max(1, len(samples.all) // rows)
    shown = []
    for sample in samples.all[::step]:
        processes = [f"{each.rss_mib:.0f} / {each.files} / {each.threads}" for each in sample.replicas]
        redis = ["-", "-"] if sample.keys is None else [str(sample.keys), number(sample.redis_mib or 0.0)]
        shown.append([f"{sample.at_s:.0f}", *processes, *redis, str(sample.containers), f"{sample.steps:,}"])
    names = [f"replica {n + 1}: MiB / files / threads" for n in range(len(samples.all[0].replicas))]
    return Table("Samples", ["s", *names, "keys", "Redis, MiB", "containers", "steps"], shown, words=0)


def verdict_table(verdicts: Sequence[Verdict]) -> Table:
    """Return a table of the conditions and their verdicts."""
    rows = [
        [
            each.what,
            f"{number(each.value)} {each.unit}".rstrip(),
            f"≤ {number(each.bound)}",
            "yes" if each.holds else "NO",
        ]
        for each in verdicts
    ]
    return Table("What has to hold", ["what", "found", "bound", "holds"], rows)
