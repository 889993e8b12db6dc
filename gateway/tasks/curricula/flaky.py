"""Keeps what audits found of tasks: how often replays gave other rewards or ends, and which tasks are marked as flaky.

Curricula do not draw marked tasks. Counts add up over audits, separately for each version of the scorer: a former
version says nothing about the current one, so its counts do not count, and its marks are not in force.

The store has one value for each environment, which all replicas read. It holds only tasks that differed at least once.
If it is full, the counts of former scorers and the oldest counts make room.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import NormalDist
from typing import Final, NamedTuple

from gateway.core.errors import InvalidRequest, StoreUnavailable, UnknownTask
from gateway.core.ids import EnvironmentName
from gateway.core.ports.curricula import MAX_STATE_BYTES, CurriculumStore

CONFIDENCE: Final = 0.95
"""Confidence of the intervals of rates."""
MIN_REPLAYS: Final = 20
"""Replays below which no task is flaky: Wilson's interval of one differing replay in up to 17 is above 1 %."""
EPISODES_KEPT: Final = 3
"""Differing episodes of a task that are kept to explain its mark."""
WRITES: Final = 16
"""Maximum number of attempts to change a value while other replicas change it too."""


class Verdict(StrEnum):
    """What the replays of a task show."""

    STEADY = "steady"  #: no replay differed, or the rate is below the threshold
    UNDECIDED = "undecided"  #: some replay differed, and the rate may be below or above the threshold
    FLAKY = "flaky"  #: the rate is above the threshold


class DifferingEpisode(NamedTuple):
    """An episode whose replay had another reward or another end."""

    episode: str
    recorded: float | None
    """The recorded reward of the episode."""
    replayed: float | None


@dataclass(frozen=True, slots=True)
class AuditedTask:
    """The sums of all audits of a task by one version of the scorer, and its mark."""

    replays: int
    differing: int
    """Number of replays with another reward or another end."""
    scorer: str = ""
    """Version of the scorer; empty: it has none."""
    changed_at: float = 0.0
    """Unix time of the newest audit."""
    episodes: tuple[DifferingEpisode, ...] = ()
    """The newest differing episodes, at most `EPISODES_KEPT`."""
    marked_at: float | None = None
    """Unix time of the mark; None: the task is not marked."""
    marked_by: str = ""
    """Name of the operator's key."""


def interval(differing: int, replays: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return Wilson's score interval of the rate *differing* / *replays*: it holds for few replays and rare events."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    rate, scale = differing / replays, 1 + z * z / replays
    centre = (rate + z * z / (2 * replays)) / scale
    half = z * math.sqrt(rate * (1 - rate) / replays + z * z / (4 * replays * replays)) / scale
    return max(0.0, centre - half), min(1.0, centre + half)


def verdict(differing: int, replays: int, threshold: float) -> Verdict:
    """Return what *differing* of *replays* show: flaky is a task whose rate is above *threshold* with `CONFIDENCE`."""
    low, high = interval(differing, replays)
    if not differing or high <= threshold:
        return Verdict.STEADY
    return Verdict.FLAKY if replays >= MIN_REPLAYS and low > threshold else Verdict.UNDECIDED


_Found = dict[str, dict[str, AuditedTask]]
"""Audited tasks by the version of the scorer and by their record keys."""


class FlakyTasks:
    """Reads and changes counts and marks in the store."""

    def __init__(self, store: CurriculumStore, scorer: Callable[[EnvironmentName], Awaitable[str]]) -> None:
        """*scorer* returns the current version of an environment's scorer, or an empty text."""
        self._store = store
        self._scorer = scorer

    async def of(self, environment: EnvironmentName) -> Mapping[str, AuditedTask]:
        """Return the marked tasks of *environment* by their record keys. Raises ``StoreUnavailable``."""
        _, found = await self._read(environment)
        if not found:
            return {}
        known = found.get(await self._scorer(environment), {})
        return {task: one for task, one in known.items() if one.marked_at is not None}

    async def add(
        self,
        environment: EnvironmentName,
        task: str,
        *,
        replays: int,
        differing: int,
        episodes: Sequence[DifferingEpisode] = (),
        scorer: str | None = None,
    ) -> AuditedTask:
        """Add the counts of an audit, and return the sums.

        They are not kept if no replay of the task ever differed, or if marks leave no room.

        Args:
            environment: The task's environment.
            task: The task's record key.
            replays: Number of replays.
            differing: Number of replays that differed.
            episodes: Episodes that differed, the newest first.
            scorer: Version of the scorer that judged the replays; None: the current one.

        Raises:
            StoreUnavailable: The store does not answer.
        """
        current = await self._scorer(environment)
        scorer = current if scorer is None else scorer
        for _ in range(WRITES):
            version, found = await self._read(environment)
            before = found.get(scorer, {}).get(task, AuditedTask(0, 0, scorer))
            newest = {one.episode: one for one in (*episodes, *before.episodes)}
            after = replace(
                before,
                replays=before.replays + replays,
                differing=before.differing + differing,
                changed_at=time.time(),
                episodes=tuple(newest.values())[:EPISODES_KEPT],
            )
            if not after.differing:
                return after
            found.setdefault(scorer, {})[task] = after
            body = _fitting(found, current, spared=(scorer, task))
            if body is None or await self._store.set_state(_name(environment), version, body):
                return after
        raise _contended(environment)

    async def mark(self, environment: EnvironmentName, task: str, *, by: str) -> AuditedTask:
        """Mark an audited task, and return it.

        Raises:
            UnknownTask: No audit found that the task differs under the current scorer.
            InvalidRequest: The environment has too many marked tasks.
            StoreUnavailable: The store does not answer.
        """
        current = await self._scorer(environment)
        for _ in range(WRITES):
            version, found = await self._read(environment)
            before = found.get(current, {}).get(task)
            if before is None:
                raise UnknownTask(
                    f"no audit by the current scorer found that task {task!r} of {environment} differs: run "
                    f"`gateway audit --environment {environment} --task {task}`"
                )
            found[current][task] = after = replace(before, marked_at=time.time(), marked_by=by)
            body = _fitting(found, current, spared=(current, task))
            if body is None:
                raise InvalidRequest(
                    f"the marked tasks of {environment!r} take more than {MAX_STATE_BYTES} bytes: repair or remove "
                    f"tasks, and remove their marks with `gateway curricula unmark {environment} TASK`"
                )
            if await self._store.set_state(_name(environment), version, body):
                return after
        raise _contended(environment)

    async def forget(self, environment: EnvironmentName, task: str) -> bool:
        """Remove a task's mark and its counts, so that the next audit counts anew.

        Return False if there was neither. Raises ``StoreUnavailable``.
        """
        for _ in range(WRITES):
            version, found = await self._read(environment)
            if not [known.pop(task) for known in found.values() if task in known]:
                return False
            if await self._store.set_state(_name(environment), version, _encoded(found)):
                return True
        raise _contended(environment)

    async def _read(self, environment: EnvironmentName) -> tuple[int, _Found]:
        version, body = await self._store.state(_name(environment))
        return version, {
            scorer: {
                task: AuditedTask(
                    row[0], row[1], scorer, row[2], tuple(DifferingEpisode(*one) for one in row[3]), *row[4:]
                )
                for task, row in rows.items()
            }
            for scorer, rows in (json.loads(body) if body else {}).items()
            if isinstance(rows, dict)  # marks of earlier versions are lists: they had no scorer and judged texts
        }


def _fitting(found: _Found, current: str, *, spared: tuple[str, str]) -> bytes | None:
    """Return *found* as JSON that the store takes, without the entries that make room, if it is too large.

    Marks that are in force make no room, and the entry *spared* does not. None: they alone are too large.
    """
    others = sorted(
        (scorer == current, one.changed_at, scorer, task)
        for scorer, known in found.items()
        for task, one in known.items()
        if (scorer, task) != spared and (scorer != current or one.marked_at is None)
    )
    while len(body := _encoded(found)) > MAX_STATE_BYTES:
        if not others:
            return None
        _, _, scorer, task = others.pop(0)
        del found[scorer][task]
    return body


def _encoded(found: _Found) -> bytes:
    rows = {
        scorer: {
            task: [one.replays, one.differing, one.changed_at, one.episodes, one.marked_at, one.marked_by]
            for task, one in known.items()
        }
        for scorer, known in found.items()
        if known
    }
    return json.dumps(rows, separators=(",", ":")).encode()


def _contended(environment: EnvironmentName) -> StoreUnavailable:
    return StoreUnavailable(f"the audits of {environment!r} change faster than they can be written")


def _name(environment: EnvironmentName) -> str:
    return f"flaky:{environment}"  # no curriculum has a colon in its name
