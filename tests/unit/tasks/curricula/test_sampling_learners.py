"""Simulated learners that measure how much each sampler lets them learn.

The first learner's skill and a task's difficulty are numbers. Its success rate is a logistic curve of the two. It
learns like a trainer that centres rewards on their group's mean: only groups with successes and failures count, and
even groups count most. The second learner has many skills, which tasks share. Its task is a chain of steps that must
all be right. All randomness has a seed, so each count is always the same.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

import pytest

from gateway.core.curriculum import Outcome, TaskRecord
from gateway.core.ids import EnvironmentName
from gateway.tasks.curricula.model import Component, Curriculum, Sampler, SamplerKind, Stage
from gateway.tasks.curricula.sampling import prepare
from gateway.tasks.curricula.stages import advance
from gateway.tasks.curricula.tables import TaskRow

MATH = EnvironmentName("math")
TASKS, LEVELS = 48, 12
GROUP, DRAWS, ROUNDS = 8, 8, 40
SEEDS = range(5)
LEVEL_STAGES = tuple(
    Stage(name=f"level-{level}", min_difficulty=level, max_difficulty=level + 1) for level in range(LEVELS - 1)
)
SAMPLERS = {
    SamplerKind.UNIFORM: Sampler(),
    SamplerKind.TARGET_SUCCESS: Sampler(kind=SamplerKind.TARGET_SUCCESS),
    SamplerKind.LEARNING_PROGRESS: Sampler(kind=SamplerKind.LEARNING_PROGRESS),
    SamplerKind.STAGED: Sampler(
        kind=SamplerKind.STAGED, stages=LEVEL_STAGES, promote_at=0.7, window=32, min_attempts=64
    ),
}


@dataclass
class Lesson:
    """The result of a training."""

    skill: float = 0.0
    learnable: int = 0
    """Number of draws of tasks with a chance of success between 0.2 and 0.8."""

    def chance(self, difficulty: float) -> float:
        return 1 / (1 + math.exp(2 * (difficulty - self.skill)))


def taught(kind: SamplerKind, seed: int) -> Lesson:
    """Train a learner on a curriculum. Each round weighs the tasks again from the records."""
    rows = [TaskRow(at, f"math-{at}", (), float(at % LEVELS)) for at in range(TASKS)]
    tables = {(MATH, "train"): tuple(rows)}
    curriculum = Curriculum(
        name="lesson", components=(Component(environment=MATH),), sampler=SAMPLERS[kind], seed=seed, group_size=GROUP
    )
    records: dict[EnvironmentName, dict[str, TaskRecord]] = {MATH: {}}
    state, lesson, luck = b"", Lesson(), random.Random(seed)
    for round_ in range(ROUNDS):
        state = advance(curriculum, tables, records, state)
        prepared = prepare(curriculum, tables, records, state)
        signal = 0.0
        for number in range(round_ * DRAWS, (round_ + 1) * DRAWS):
            place = prepared.draw(number)
            chance = lesson.chance(rows[place.index].difficulty or 0.0)
            lesson.learnable += 0.2 < chance < 0.8
            rewards = [float(luck.random() < chance) for _ in range(GROUP)]
            rate = sum(rewards) / GROUP
            signal += rate * (1 - rate)
            record = records[MATH].get(place.task, TaskRecord(environment=MATH, task=place.task))
            for reward in rewards:
                outcome = Outcome(environment=MATH, task=place.task, reward=reward, finished=True, steps=1, seconds=1.0)
                record = record.after(outcome, float(number))
            records[MATH][place.task] = record
        lesson = replace(lesson, skill=lesson.skill + 0.2 * signal)
    return lesson


@pytest.mark.parametrize("kind", [kind for kind in SAMPLERS if kind is not SamplerKind.UNIFORM])
def test_more_draws_go_to_learnable_tasks_and_the_learner_learns_more(kind: SamplerKind) -> None:
    for seed in SEEDS:
        plain, chosen = taught(SamplerKind.UNIFORM, seed), taught(kind, seed)

        assert chosen.learnable > 1.5 * plain.learnable
        assert chosen.skill > 1.5 * plain.skill


TAGS, STEPS, EACH = 3, (1, 3, 5, 7), 15
"""EACH is the number of tasks for each tag and number of steps."""
FEW = 3
"""Number of groups of episodes for each task. Most runs have no more."""


@cache
def chained(kind: SamplerKind, seed: int, *, behind: float = 0.0, apart: bool = False) -> float:
    """Train a learner of many skills with few groups for each task. Return the mean height of its learning curve.

    Args:
        behind: Initial deficit in the skills that only tasks of the first tag need.
        apart: True if each tag is a component that moves through the stages independently.
    """
    chance = random.Random("tasks")
    needs: list[list[str]] = []
    rows: list[TaskRow] = []
    for tag in range(TAGS):
        skills = [*(f"{tag}:{skill}" for skill in range(6)), *(f"any:{skill}" for skill in range(3))]
        for steps in STEPS:
            for _ in range(EACH):
                needs.append([chance.choice(skills) for _ in range(steps)])
                rows.append(TaskRow(len(rows), f"task-{len(rows)}", (f"tag-{tag}",), float(steps)))
    levels = tuple(Stage(name=f"{steps}", min_difficulty=steps, max_difficulty=steps) for steps in STEPS)
    sampler = replace(SAMPLERS[kind], stages=levels if kind is SamplerKind.STAGED else (), per_component=apart)
    tags = tuple((f"tag-{tag}",) for tag in range(TAGS)) if apart else ((),)
    parts = tuple(Component(environment=MATH, tags=some) for some in tags)
    study = Curriculum(name="chains", components=parts, sampler=sampler, seed=seed)
    tables = {(MATH, "train"): tuple(rows)}
    records: dict[EnvironmentName, dict[str, TaskRecord]] = {MATH: {}}
    skill = {name: -1.1 - behind * name.startswith("0:") for some in needs for name in some}
    state, luck, heights = b"", random.Random(seed), list[float]()

    def right(name: str) -> float:
        return 1 / (1 + math.exp(-skill[name]))

    for number in range(FEW * len(rows)):
        if number % 4 == 0:
            state = advance(study, tables, records, state)
            prepared = prepare(study, tables, records, state)
        if number % 20 == 0:
            heights.append(fmean(math.prod(map(right, some)) for some in needs))
        place = prepared.draw(number)
        solved = math.prod(map(right, needs[place.index]))
        rewards = [float(luck.random() < solved) for _ in range(4)]
        signal = math.sqrt(fmean(rewards) * (1 - fmean(rewards)))
        for name in needs[place.index] if signal else ():
            skill[name] += 1.2 * signal * (1 - right(name))
        record = records[MATH].get(place.task, TaskRecord(environment=MATH, task=place.task))
        for reward in rewards:
            outcome = Outcome(environment=MATH, task=place.task, reward=reward, finished=True, steps=1, seconds=1.0)
            record = record.after(outcome, float(number))
        records[MATH][place.task] = record
    return fmean(heights)


@pytest.mark.parametrize("kind", [kind for kind in SAMPLERS if kind is not SamplerKind.UNIFORM])
def test_the_learner_learns_more_with_few_groups_for_each_task(kind: SamplerKind) -> None:
    gained = [chained(kind, seed) / chained(SamplerKind.UNIFORM, seed) for seed in SEEDS]

    assert fmean(gained) > 1.08


def test_a_tag_that_lags_costs_less_if_each_tag_moves_through_the_stages_independently() -> None:
    heights = [
        [chained(kind, seed, behind=2.0, apart=apart) for seed in SEEDS[:3]]
        for kind, apart in ((SamplerKind.STAGED, True), (SamplerKind.STAGED, False), (SamplerKind.UNIFORM, False))
    ]

    apart, together, plain = map(fmean, heights)
    assert apart > 1.1 * together
    assert apart > 1.2 * plain
