"""Staged samplers: which tasks each stage has, which stage is drawn from, and when it is another one.

What is remembered is small and changes only when a stage is entered: its name, and how many attempts its tasks had by
then. Everything since is told from the records, so no outcome has to be counted twice, by two counters that may differ.

The outcomes since a stage was entered are, of each of its tasks, as many of its newest rewards as it had attempts
since. Records keep no order among tasks but that of their last attempts: so the newest outcomes of a stage are the
newest reward of each task, the one tried last first, then the second newest of each, and so on. Where groups are large
a stage is so told from all tasks that were tried, not from the last group alone. An attempt counts whatever trainer or
curriculum it came by.

At most `MARKED` tasks are remembered with their attempts, those tried last. In a stage with more, each other task that
was tried since counts with its newest reward only: fewer outcomes than there were, never older ones.

The components of a curriculum move together, or each by itself (``per_component``): what moves by itself is a *track*,
with an entry of its own in the state.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from zlib import crc32

from gateway.core.curriculum import TaskRecord
from gateway.core.errors import InvalidRequest
from gateway.core.ids import EnvironmentName
from gateway.tasks.curricula.model import Curriculum, SamplerKind, Stage
from gateway.tasks.curricula.tables import Part, Records, Tables, TaskRow, has_any, parts_of

MARKED = 2_000
"""In all tracks together, so that a state stays well below what a store takes of one, with some 20 bytes for each."""
TRACK_MARKS = 6
"""Marks that are as long as what is kept of a track beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a staged curriculum stands, or one of its components that moves by itself."""

    component: int | None = None
    """Its place in the curriculum, from 0 on; None: all move together."""
    stage: str
    position: int
    """From 0 on."""
    outcomes: int
    """Since the stage was entered."""
    counted: int
    """The newest of them, at most ``window``, which the rate is told from."""
    rate: float | None
    """Of successes; None: there is no outcome yet."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """What the state says: a stage, and what was known of its tasks when it was entered."""

    stage: str
    at: float = 0.0
    """Unix time: of the newest attempt in the stage by then."""
    is_whole: bool = True
    """All tasks that had been attempted are among `marks`."""
    marks: Mapping[str, int] = field(default_factory=dict)
    """Attempts by a task's print."""

    def since(self, environment: EnvironmentName, record: TaskRecord) -> int:
        """Attempts of the task since."""
        before = self.marks.get(_print(environment, record.task), 0)
        if not before and not self.is_whole:
            return int(record.seen_at > self.at)
        if record.attempts < before:
            # Forgotten meanwhile, and begun anew; or as it was once, at a replica that is behind the one that entered.
            return record.attempts if record.seen_at > self.at else 0
        return record.attempts - before


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """Components that move through the stages together, and what the state says of them."""

    curriculum: Curriculum
    key: str
    """What its entry is kept under."""
    parts: tuple[Part, ...]
    component: int | None
    document: Any
    """Its entry as the state has it; None: there is none."""
    entry: _Entry | None
    """None: no stage was entered yet, or one that the definition does not have any more."""

    @property
    def position(self) -> int:
        """The stage that was entered, or else the first one; if it lost its tasks, the one that is next to it."""
        stages = self.curriculum.sampler.stages
        said = [stage.name for stage in stages].index(self.entry.stage) if self.entry else 0
        found = self._first_filled([*range(said, len(stages)), *range(said - 1, -1, -1)])
        return said if found is None else found

    def standing(self, records: Records) -> Standing:
        """Return how it stands by *records*."""
        sampler, position, entry = self.curriculum.sampler, self.position, self.entry
        stage = sampler.stages[position]
        since = []
        if entry is not None and entry.stage == stage.name:  # before its entry is written, nothing counts
            tried = self._tried(stage, records)
            since = [(name, record, new) for name, record in tried if (new := entry.since(name, record))]
        newest = list(islice(_newest(since), sampler.window))
        won = sum(reward >= self.curriculum.success_at for reward in newest)
        return Standing(
            component=self.component,
            stage=stage.name,
            position=position,
            outcomes=sum(new for _, _, new in since),
            counted=len(newest),
            rate=won / len(newest) if newest else None,
        )

    def next_stage(self, records: Records) -> Stage | None:
        """Return the stage that it is to enter; None: it stays where it is."""
        sampler, position = self.curriculum.sampler, self.position
        if self.entry is None or self.entry.stage != sampler.stages[position].name:
            return sampler.stages[position]
        now = self.standing(records)
        if now.rate is None or now.outcomes < sampler.min_attempts:
            return None
        to: int | None = None
        if now.rate >= sampler.promote_at:
            to = self._first_filled(range(position + 1, len(sampler.stages)))
        elif now.rate < sampler.demote_at:
            to = self._first_filled(range(position - 1, -1, -1))
        return None if to is None else sampler.stages[to]

    def entered(self, stage: Stage, records: Records, *, most: int) -> Mapping[str, Any]:
        """Return the entry of *stage*, as the state has it, with the marks of *most* tasks."""
        tried = sorted(self._tried(stage, records), key=_last_first)
        return {
            "at": max((record.seen_at for _, record in tried), default=0.0),
            "is_whole": len(tried) <= most,
            "marks": {_print(environment, record.task): record.attempts for environment, record in tried[:most]},
            "stage": _kept(self.curriculum, stage),
        }

    def _first_filled(self, positions: Iterable[int]) -> int | None:
        """The first of *positions* whose stage has a task."""
        stages = self.curriculum.sampler.stages
        return next((one for one in positions if _has_task(stages[one], self.parts)), None)

    def _tried(self, stage: Stage, records: Records) -> list[tuple[EnvironmentName, TaskRecord]]:
        """Records of the stage's tasks."""
        found: dict[tuple[EnvironmentName, str], TaskRecord] = {}  # two splits may have the same task
        for part in self.parts:
            environment = part.component.environment
            known = records.get(environment)
            for row in part.rows if known else ():
                if known and (record := known.get(row.task)) and record.attempts and is_in(stage, row):
                    found[environment, row.task] = record
        return [(environment, record) for (environment, _), record in found.items()]


def is_in(stage: Stage, row: TaskRow) -> bool:
    """Whether *row* is in *stage*."""
    if not has_any(row, stage.tags):
        return False
    least, most, difficulty = stage.min_difficulty, stage.max_difficulty, row.difficulty
    if least is None and most is None:
        return True
    return difficulty is not None and (least is None or least <= difficulty) and (most is None or difficulty <= most)


def tracks_of(curriculum: Curriculum, parts: Sequence[Part], state: bytes) -> list[Track]:
    """Return the tracks of *curriculum*, a staged one, in *state*.

    Raises:
        InvalidRequest: a component is in no stage; the message names it.
    """
    if not curriculum.sampler.stages:
        raise InvalidRequest(f"curriculum {curriculum.name}: sampler.stages: a staged sampler needs at least one")
    keys = []
    for position, part in enumerate(parts):
        one = part.component
        if not any(_has_task(stage, [part]) for stage in curriculum.sampler.stages):
            raise InvalidRequest(
                f"curriculum {curriculum.name}: components[{position}]: no task of "
                f"{one.environment}/{one.split} is in any stage"
            )
        keys.append(_print(one.environment, "\n".join((one.split, *sorted(one.tags)))))
    documents = _documents(curriculum, state)
    moving: list[tuple[str, tuple[Part, ...], int | None]] = [("", tuple(parts), None)]
    if curriculum.sampler.per_component:
        moving = [(key, (part,), position) for position, (key, part) in enumerate(zip(keys, parts, strict=True))]
    return [
        Track(
            curriculum=curriculum,
            key=key,
            parts=some,
            component=component,
            document=documents.get(key),
            entry=_entry(curriculum, documents.get(key)),
        )
        for key, some, component in moving
    ]


def standings(curriculum: Curriculum, tables: Tables, records: Records, state: bytes) -> list[Standing]:
    """How *curriculum*, a staged one, stands in *state*: one for all components, or one for each.

    Raises:
        InvalidRequest: a component has no task, or none that is in a stage.
    """
    return [track.standing(records) for track in tracks_of(curriculum, parts_of(curriculum, tables), state)]


def advance(curriculum: Curriculum, tables: Tables, records: Records, state: bytes) -> bytes:
    """The state that follows from *records*: *state* itself, unless a stage is left, or entered for the first time.

    A stage is left after ``min_attempts`` outcomes at least: for the next one at a success rate of ``promote_at`` or
    more over its newest ``window`` outcomes, for the one before below ``demote_at``. Between the two rates nothing
    moves, and outcomes count anew from each entry on, so that a rate at a bound does not make it go to and fro with
    every group. One call moves by one stage at most; those without a task do not count. Other kinds than ``staged``
    keep their state, which is empty.

    Raises:
        InvalidRequest: a component has no task, or none that is in a stage.
    """
    if curriculum.sampler.kind is not SamplerKind.STAGED:
        return state
    tracks = tracks_of(curriculum, parts_of(curriculum, tables), state)
    most = max(0, MARKED // len(tracks) - TRACK_MARKS * (len(tracks) > 1))
    changed = {
        track.key: track.entered(stage, records, most=most)
        for track in tracks
        if (stage := track.next_stage(records)) is not None
    }
    if not changed:
        return state
    after = {track.key: changed.get(track.key) or track.document for track in tracks}
    document = {"components": after} if curriculum.sampler.per_component else after[tracks[0].key]
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _has_task(stage: Stage, parts: Sequence[Part]) -> bool:
    return any(is_in(stage, row) for part in parts for row in part.rows)


def _last_first(tried: tuple[EnvironmentName, TaskRecord]) -> tuple[float, EnvironmentName, str]:
    """What sorts the task that was tried last before the others."""
    environment, record = tried
    return -record.seen_at, environment, record.task


def _newest(since: Sequence[tuple[EnvironmentName, TaskRecord, int]]) -> Iterator[float]:
    left = sorted(since, key=lambda one: _last_first(one[:2]))
    depth = 1
    while left := [one for one in left if one[2] >= depth and len(one[1].recent) >= depth]:
        yield from (record.recent[-depth] for _, record, _ in left)
        depth += 1


def _kept(curriculum: Curriculum, stage: Stage) -> str:
    """What the state calls *stage*: names may be long, and there may be many tracks."""
    return _print("", stage.name) if curriculum.sampler.per_component else stage.name


def _print(environment: str, task: str) -> str:
    """A name in few bytes; two tasks with the same one count each other's attempts, which harms little."""
    return f"{crc32(f'{environment}/{task}'.encode()):08x}"


def _documents(curriculum: Curriculum, state: bytes) -> Mapping[str, Any]:
    """The entries in *state* by their tracks' keys; a state of another version, or none, has none that are understood:
    a stage can be told anew, and draws must go on."""
    try:
        document = json.loads(state)
    except ValueError:
        return {}
    if curriculum.sampler.per_component:
        document = document.get("components") if isinstance(document, dict) else None
        return document if isinstance(document, dict) else {}
    return {"": document}


def _entry(curriculum: Curriculum, document: Any) -> _Entry | None:
    try:
        marks = {str(name): int(attempts) for name, attempts in document["marks"].items()}
        kept, at, is_whole = str(document["stage"]), float(document["at"]), bool(document["is_whole"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    stage = next((one.name for one in curriculum.sampler.stages if _kept(curriculum, one) == kept), None)
    return None if stage is None else _Entry(stage, at, is_whole, marks)
