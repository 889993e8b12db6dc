"""Selects the tasks of each stage of a staged sampler, and decides when the curriculum moves to another stage.

The state is small, and changes only at the entry into a stage. It has the stage's name, and the number of attempts that
each of its tasks had at the entry. The records show all later outcomes, so no second counter can deviate from them.

A task with n attempts since the entry has its n newest rewards as outcomes. Records only have the order of the tasks'
last attempts. So the newest outcomes of a stage are the newest reward of each task, the task tried last first. The
second newest reward of each task follows, and so on. With large groups the rate then reflects all tried tasks instead
of the last group alone. Attempts of all trainers and curricula count.

The state has the attempts (*marks*) of at most `MARKED` tasks, the tasks tried last. In a stage with more tried tasks,
each other task counts only its newest reward. This can omit outcomes, but never includes outcomes before the entry.

The components of a curriculum move together or separately (``per_component``). A *track* is a set of components that
move together, with an entry of its own in the state.
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
"""Maximum number of marks in all tracks together. At about 20 bytes each, a state stays far below the store's limit."""
TRACK_MARKS = 6
"""Number of marks with the same size as the rest of a track's entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The progress of a staged curriculum, or of one of its components, through the stages."""

    component: int | None = None
    """The component's position in the curriculum, from 0. None: all components move together."""
    stage: str
    position: int
    """The stage's position, from 0."""
    outcomes: int
    """Number of outcomes since the entry into the stage."""
    counted: int
    """Number of newest outcomes in `rate`, at most ``window``."""
    rate: float | None
    """The success rate. None: there is no outcome yet."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A track's entry in the state: the stage, and the attempts of its tasks at the entry into it."""

    stage: str
    at: float = 0.0
    """Unix time of the stage's newest attempt before the entry."""
    is_whole: bool = True
    """True if `marks` has all tasks attempted before the entry."""
    marks: Mapping[str, int] = field(default_factory=dict)
    """Fingerprint of a task → attempts before the entry."""

    def since(self, environment: EnvironmentName, record: TaskRecord) -> int:
        """Return the number of the task's attempts since the entry."""
        before = self.marks.get(_print(environment, record.task), 0)
        if not before and not self.is_whole:
            return int(record.seen_at > self.at)
        if record.attempts < before:
            # The record was removed and started anew, or this replica's copy is older than the entry.
            return record.attempts if record.seen_at > self.at else 0
        return record.attempts - before


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """Components that move through the stages together, with their entry in the state."""

    curriculum: Curriculum
    key: str
    """The key of the track's entry in the state."""
    parts: tuple[Part, ...]
    component: int | None
    document: Any
    """The track's entry as JSON data in the state. None: the state has no entry."""
    entry: _Entry | None
    """The parsed entry. None: the track has not entered a stage, or the definition no longer has that stage."""

    @property
    def position(self) -> int:
        """The position of the entered or first stage. If it has no task, the nearest later or else earlier stage."""
        stages = self.curriculum.sampler.stages
        said = [stage.name for stage in stages].index(self.entry.stage) if self.entry else 0
        found = self._first_filled([*range(said, len(stages)), *range(said - 1, -1, -1)])
        return said if found is None else found

    def standing(self, records: Records) -> Standing:
        """Return the track's progress by *records*."""
        sampler, position, entry = self.curriculum.sampler, self.position, self.entry
        stage = sampler.stages[position]
        since = []
        if entry is not None and entry.stage == stage.name:  # nothing counts before the entry is written
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
        """Return the stage that the track must enter now, or None if it stays in its stage."""
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
        """Return an entry of *stage* for the state, with the marks of at most *most* tasks."""
        tried = sorted(self._tried(stage, records), key=_last_first)
        return {
            "at": max((record.seen_at for _, record in tried), default=0.0),
            "is_whole": len(tried) <= most,
            "marks": {_print(environment, record.task): record.attempts for environment, record in tried[:most]},
            "stage": _kept(self.curriculum, stage),
        }

    def _first_filled(self, positions: Iterable[int]) -> int | None:
        """Return the first of *positions* whose stage has a task, or None."""
        stages = self.curriculum.sampler.stages
        return next((one for one in positions if _has_task(stages[one], self.parts)), None)

    def _tried(self, stage: Stage, records: Records) -> list[tuple[EnvironmentName, TaskRecord]]:
        """Return the records of the stage's attempted tasks."""
        found: dict[tuple[EnvironmentName, str], TaskRecord] = {}  # two splits may have the same task
        for part in self.parts:
            environment = part.component.environment
            known = records.get(environment)
            for row in part.rows if known else ():
                if known and (record := known.get(row.task)) and record.attempts and is_in(stage, row):
                    found[environment, row.task] = record
        return [(environment, record) for (environment, _), record in found.items()]


def is_in(stage: Stage, row: TaskRow) -> bool:
    """Return True if *row* is in *stage*."""
    if not has_any(row, stage.tags):
        return False
    least, most, difficulty = stage.min_difficulty, stage.max_difficulty, row.difficulty
    if least is None and most is None:
        return True
    return difficulty is not None and (least is None or least <= difficulty) and (most is None or difficulty <= most)


def tracks_of(curriculum: Curriculum, parts: Sequence[Part], state: bytes) -> list[Track]:
    """Return the tracks of a staged *curriculum* with their entries in *state*.

    Raises:
        InvalidRequest: A component has no task in a stage, or there are no stages. The message names the component.
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
    """Return the progress of a staged *curriculum* in *state*: one item for all components, or one for each.

    Raises:
        InvalidRequest: A component has no task, or no task in a stage.
    """
    return [track.standing(records) for track in tracks_of(curriculum, parts_of(curriculum, tables), state)]


def advance(curriculum: Curriculum, tables: Tables, records: Records, state: bytes) -> bytes:
    """Return the state after *records*. It is *state* itself unless a track enters a stage.

    A track stays in a stage for at least ``min_attempts`` outcomes. A success rate of ``promote_at`` or more over the
    newest ``window`` outcomes moves it to the next stage. A rate below ``demote_at`` moves it to the previous stage.
    Between the two rates it stays. Each entry restarts the count of outcomes, so that a rate near a bound does not move
    the track after every group. One call moves a track by one stage at most, and skips stages without tasks. Other
    kinds of samplers keep their empty state.

    Raises:
        InvalidRequest: A component has no task, or no task in a stage.
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
    """Return the sort key that puts the task tried last first."""
    environment, record = tried
    return -record.seen_at, environment, record.task


def _newest(since: Sequence[tuple[EnvironmentName, TaskRecord, int]]) -> Iterator[float]:
    left = sorted(since, key=lambda one: _last_first(one[:2]))
    depth = 1
    while left := [one for one in left if one[2] >= depth and len(one[1].recent) >= depth]:
        yield from (record.recent[-depth] for _, record, _ in left)
        depth += 1


def _kept(curriculum: Curriculum, stage: Stage) -> str:
    """Return the name of *stage* in the state: with ``per_component`` a fingerprint, which keeps many entries short."""
    return _print("", stage.name) if curriculum.sampler.per_component else stage.name


def _print(environment: str, task: str) -> str:
    """Return a fingerprint of 8 characters. Tasks with the same fingerprint share their marks, which harms little."""
    return f"{crc32(f'{environment}/{task}'.encode()):08x}"


def _documents(curriculum: Curriculum, state: bytes) -> Mapping[str, Any]:
    """Return the entries in *state* by their tracks' keys. An empty or unreadable state has none: draws must go on, and
    the tracks can start again."""
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
