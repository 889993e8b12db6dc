"""One run: a new policy, a curriculum, groups of episodes, and regular scores on the held-out split."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any, Final

from examples.learner.client import Gateway, Session
from examples.learner.policy import Attempt, Policy, largest

HELD_OUT: Final = "test"
AT_ONCE: Final = 8
"""Number of concurrent sessions."""
SHOWN: Final = 12
"""Number of weights in a run's result."""

Player = Callable[[Session, Policy, random.Random], Attempt]
"""Plays one episode to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """The learner's setup for an environment."""

    environment: str
    tags: tuple[str, ...]
    """Tags of the tasks that the player understands, in both splits."""
    player: Player
    success_at: float
    """Lowest reward of a successful attempt."""
    samplers: Mapping[str, Mapping[str, Any]]
    """The sampler table of each curriculum, by name."""
    rates: Mapping[str, float]
    """The learning rate for each sampler."""
    group_size: int
    episodes: int
    """Default number of episodes of a run."""
    plays: int
    """Number of plays of each held-out task for one score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All settings of a run."""

    lesson: Lesson
    sampler: str
    seed: int
    episodes: int
    rate: float
    checkpoints: int
    """Number of scores on the held-out split, without the score at the beginning."""


@dataclass(slots=True)
class Run:
    """The result of a run."""

    sampler: str
    seed: int
    rate: float
    curve: list[tuple[int, float]] = field(default_factory=list)
    """Number of trained episodes, and the mean reward on the held-out split at that point."""
    groups: int = 0
    informative: int = 0
    """Number of groups with different rewards. The other groups give no signal."""
    drawn: dict[str, int] = field(default_factory=dict)
    """Training episodes by the difficulty of their task, from the gateway's records."""
    stage: str | None = None
    """Last stage of the curriculum, if it has stages."""
    weights: list[tuple[str, float]] = field(default_factory=list)

    @property
    def area(self) -> float:
        """The mean height of the learning curve, by trapezoids."""
        heights = [score for _, score in self.curve]
        return fmean((low + high) / 2 for low, high in pairwise(heights))

    @property
    def final(self) -> float:
        """The last score."""
        return self.curve[-1][1]


def document(plan: Plan) -> dict[str, Any]:
    """Return the curriculum of a run."""
    return {
        "environment": plan.lesson.environment,
        "tags": list(plan.lesson.tags),
        "seed": plan.seed,
        "group_size": plan.lesson.group_size,
        "success_at": plan.lesson.success_at,
        "sampler": dict(plan.lesson.samplers[plan.sampler]),
    }


def train(gateway: Gateway, plan: Plan) -> Run:
    """Train a new policy on the curriculum of *plan*."""
    lesson = plan.lesson
    name = f"{plan.sampler}-{plan.seed}"
    split = f"train:{name}"
    policy, run = Policy(), Run(plan.sampler, plan.seed, plan.rate)
    groups = max(1, plan.episodes // lesson.group_size)
    looks = {round(groups * look / plan.checkpoints) for look in range(1, plan.checkpoints + 1)}
    tests = gateway.tasks(lesson.environment, HELD_OUT)
    held_out = [index for index, task in enumerate(tests) if set(task["tags"]) & set(lesson.tags)]
    gateway.define(name, document(plan))
    try:
        handles = len(gateway.tasks(lesson.environment, split))
        with ThreadPoolExecutor(AT_ONCE) as threads:
            table = _Table(gateway, lesson, threads)
            run.curve.append((0, table.score(policy, held_out, plan)))
            for step in range(groups):
                seeds = [f"{plan.seed}/{step}/{member}" for member in range(lesson.group_size)]
                group = table.play(policy, [(split, step % handles, seed) for seed in seeds])
                run.groups += 1
                run.informative += policy.learn(group, rate=plan.rate)
                # Draws follow records within seconds, which is too late here: a trainer's sessions take minutes.
                gateway.updated(name, f"step-{step + 1}")
                if step + 1 in looks:
                    run.curve.append(((step + 1) * lesson.group_size, table.score(policy, held_out, plan)))
        run.stage = gateway.state(name)["stage"]
        run.drawn = _drawn(gateway, lesson)
    finally:
        gateway.undefine(name)
    run.weights = largest(policy.weights, SHOWN)
    return run


@dataclass(frozen=True, slots=True)
class _Table:
    """Plays several episodes at a time."""

    gateway: Gateway
    lesson: Lesson
    threads: ThreadPoolExecutor

    def play(self, policy: Policy, episodes: Iterable[tuple[str, int, str]]) -> list[Attempt]:
        """Play *episodes*, each a split, an index and a seed. Raise the first error."""

        def one(episode: tuple[str, int, str]) -> Attempt:
            split, index, seed = episode
            with self.gateway.session(self.lesson.environment, split, index) as session:
                return self.lesson.player(session, policy, random.Random(seed))

        return list(self.threads.map(one, episodes))

    def score(self, policy: Policy, held_out: Sequence[int], plan: Plan) -> float:
        """Return the mean reward on the held-out tasks, `Lesson.plays` times each, without learning from them."""
        seeds = [f"{plan.seed}/{HELD_OUT}/{play}" for play in range(plan.lesson.plays)]
        played = self.play(policy, [(HELD_OUT, index, f"{seed}/{index}") for index in held_out for seed in seeds])
        return fmean(attempt.reward for attempt in played)


def _drawn(gateway: Gateway, lesson: Lesson) -> dict[str, int]:
    """Return the training episodes by difficulty. The gateway's records cover all episodes ever played there."""
    levels = {task["id"]: str(task["difficulty"]) for task in gateway.tasks(lesson.environment, "train")}
    drawn = dict.fromkeys(sorted(set(levels.values())), 0)
    for record in gateway.records(lesson.environment):
        if record["task"] in levels:
            drawn[levels[record["task"]]] += record["attempts"]
    return drawn
