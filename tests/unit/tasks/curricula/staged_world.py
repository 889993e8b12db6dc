"""An environment with tasks in stages, and task records like those of a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from gateway.core.curriculum import Outcome, TaskRecord
from gateway.core.ids import EnvironmentName
from gateway.tasks.curricula.model import Component, Curriculum, Sampler, SamplerKind, Stage
from gateway.tasks.curricula.sampling import prepare
from gateway.tasks.curricula.stages import Standing, advance, standings
from gateway.tasks.curricula.tables import Tables, TaskRow

MATH, GAME = EnvironmentName("math"), EnvironmentName("game")
EASY, MIDDLE, HARD = Stage(name="easy", max_difficulty=1), Stage(name="middle", tags=("mid",)), Stage(name="hard")
HARD = replace(HARD, min_difficulty=3)
MIN, WINDOW = 8, 4


class World:
    """One environment with twelve tasks, four in each of three stages, and records like those of a store."""

    def __init__(self) -> None:
        rows = [
            TaskRow(at, f"math-{at}", ("mid",) if 4 <= at < 8 else (), (0.0, 2.0, 3.0)[at // 4]) for at in range(12)
        ]
        self.tables: Tables = {(MATH, "train"): tuple(rows)}
        self.records: dict[EnvironmentName, dict[str, TaskRecord]] = {MATH: {}}
        self.curriculum = staged(EASY, MIDDLE, HARD)
        self.state = b""
        self.now = 0.0

    def told(self, index: int, *rewards: float) -> Self:
        """Record sessions on a task that end with *rewards*."""
        task = f"math-{index}"
        for reward in rewards:
            self.now += 1.0
            outcome = Outcome(environment=MATH, task=task, reward=reward, finished=True, steps=1, seconds=1.0)
            before = self.records[MATH].get(task, TaskRecord(environment=MATH, task=task))
            self.records[MATH][task] = before.after(outcome, self.now)
        return self

    def moved(self) -> str:
        """Advance the curriculum and return its stage."""
        self.state = advance(self.curriculum, self.tables, self.records, self.state)
        return self.standing.stage

    @property
    def standing(self) -> Standing:
        (found,) = standings(self.curriculum, self.tables, self.records, self.state)
        return found

    def drawn(self, count: int = 400) -> Counter[int]:
        prepared = prepare(self.curriculum, self.tables, self.records, self.state)
        assert prepared.stage == self.standing.stage
        return Counter(prepared.draw(number).index for number in range(count))


def staged(*stages: Stage, components: Sequence[Component] = (Component(environment=MATH),)) -> Curriculum:
    sampler = Sampler(
        kind=SamplerKind.STAGED, stages=stages, min_attempts=MIN, window=WINDOW, promote_at=0.75, demote_at=0.25
    )
    return Curriculum(name="steps", components=tuple(components), sampler=sampler)
