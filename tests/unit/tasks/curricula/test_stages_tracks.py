"""Staged samplers whose components move through the stages independently."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

from gateway.core.curriculum import TaskRecord
from gateway.core.ports.curricula import MAX_STATE_BYTES
from gateway.tasks.curricula.model import Component, Curriculum, Stage
from gateway.tasks.curricula.sampling import prepare
from gateway.tasks.curricula.stages import Standing, advance, standings
from gateway.tasks.curricula.tables import TaskRow
from tests.unit.tasks.curricula.staged_world import EASY, HARD, MATH, MIN, World, staged

ODD, EVEN = Component(environment=MATH, tags=("odd",), weight=3), Component(environment=MATH, tags=("even",))


class Halves(World):
    """The same tasks with the tags odd and even in turn. Each half moves independently."""

    def __init__(self) -> None:
        super().__init__()
        rows = [TaskRow(at, f"math-{at}", ("odd" if at % 2 else "even",), (0.0, 2.0, 3.0)[at // 4]) for at in range(12)]
        self.tables = {(MATH, "train"): tuple(rows)}
        self.curriculum = staged(EASY, Stage(name="middle", min_difficulty=2, max_difficulty=2), HARD)
        self.curriculum = replace(
            self.curriculum,
            components=(ODD, EVEN),
            sampler=replace(self.curriculum.sampler, per_component=True),
        )

    def standings(self) -> list[Standing]:
        return standings(self.curriculum, self.tables, self.records, self.state)

    def stages(self) -> list[str]:
        """Advance the curriculum and return the stages of its components."""
        self.state = advance(self.curriculum, self.tables, self.records, self.state)
        return [one.stage for one in self.standings()]


def test_a_component_that_lags_does_not_delay_other_components() -> None:
    world = Halves()
    assert world.stages() == ["easy", "easy"]

    assert world.told(0, *[0.0] * MIN).told(1, *[1.0] * MIN).stages() == ["middle", "easy"]
    assert world.told(2, *[0.0] * MIN).told(5, *[1.0] * MIN).stages() == ["hard", "easy"]

    prepared = prepare(world.curriculum, world.tables, world.records, world.state)
    assert prepared.stage == "hard,easy"
    drawn = Counter(prepared.draw(number).index for number in range(4000))
    assert sorted(drawn) == [0, 1, 2, 3, 5, 7, 9, 11]
    assert sum(drawn[at] for at in (0, 2)) == 1000, "one that has passed no stage keeps its share when others review"
    assert abs(sum(drawn[at] for at in (1, 3, 5, 7)) / 3000 - 0.1) < 0.02
    assert [(one.component, one.position, one.outcomes) for one in world.standings()] == [(0, 2, 0), (1, 0, 2 * MIN)]
    assert world.stages() == ["hard", "easy"]


def test_a_move_of_one_component_keeps_the_counts_of_other_components() -> None:
    world = Halves()
    world.stages()
    world.told(0, *[1.0] * (MIN - 1)).told(1, *[1.0] * MIN)

    assert world.stages() == ["middle", "easy"]
    assert world.told(2, 1.0).stages() == ["middle", "middle"]


def test_the_stages_of_components_survive_an_added_component_and_restart_if_they_move_together() -> None:
    world = Halves()
    world.stages()
    assert world.told(1, *[1.0] * MIN).stages() == ["middle", "easy"]

    both = world.curriculum
    world.curriculum = replace(both, components=(Component(environment=MATH), EVEN, ODD))
    assert world.stages() == ["easy", "easy", "middle"]
    world.curriculum = replace(both, sampler=replace(both.sampler, per_component=False))
    assert world.stages() == ["easy"]


def test_the_state_of_many_components_with_many_tasks_fits() -> None:
    count = 256
    world = World()
    rows = [TaskRow(at, f"math-{at}", (f"tag-{at % count}",), 0.0) for at in range(4 * count)]
    world.tables = {(MATH, "train"): tuple(rows)}
    sampler = replace(staged(Stage(name="é" * 100)).sampler, per_component=True)
    components = tuple(Component(environment=MATH, tags=(f"tag-{at}",)) for at in range(count))
    world.curriculum = Curriculum(name="steps", components=components, sampler=sampler)
    for row in rows:
        made = TaskRecord(environment=MATH, task=row.task, attempts=10**6, seen_at=1.7e9 + row.index, recent=(1.0,))
        world.records[MATH][row.task] = made

    state = advance(world.curriculum, world.tables, world.records, b"")

    assert len(json.dumps({"sampler": state.decode()})) < MAX_STATE_BYTES
    assert advance(world.curriculum, world.tables, world.records, state) is state
