"""One run: a fresh policy, a curriculum, groups of episodes, and a score on the held-out split now and then."""

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
"""Sessions at a time."""
SHOWN: Final = 12
"""Weights that a run's result shows."""

Player = Callable[[Session, Policy, random.Random], Attempt]
"""Plays one episode to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """An environment as the learner takes it on."""

    environment: str
    tags: tuple[str, ...]
    """The tasks that it knows how to look at, in both splits."""
    player: Player
    success_at: float
    """The reward from which on an attempt is a success."""
    samplers: Mapping[str, Mapping[str, Any]]
    """What the curriculum of each name says of its sampler."""
    rates: Mapping[str, float]
    """The rate of learning for each of them."""
    group_size: int
    episodes: int
    """That a run has, if nobody says otherwise."""
    plays: int
    """Of each held-out task, for one score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that makes a run what it is."""

    lesson: Lesson
    sampler: str
    seed: int
    episodes: int
    rate: float
    checkpoints: int
    """Scores on the held-out split, but for the one at the beginning."""


@dataclass(slots=True)
class Run:
    """How a run went."""

    sampler: str
    seed: int
    rate: float
    curve: list[tuple[int, float]] = field(default_factory=list)
    """Episodes trained so far, and the mean reward on the held-out split then."""
    groups: int = 0
    informative: int = 0
    """Groups whose members did not all fare alike: the others teach nothing."""
    drawn: dict[str, int] = field(default_factory=dict)
    """Training episodes by the difficulty of their task, as the gateway's records have them."""
    stage: str | None = None
    """That the curriculum came to, if it has stages."""
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
    """The curriculum of a run."""
    return {
        "environment": plan.lesson.environment,
        "tags": list(plan.lesson.tags),
        "seed": plan.seed,
        "group_size": plan.lesson.group_size,
        "success_at": plan.lesson.success_at,
        "sampler": dict(plan.lesson.samplers[plan.sampler]),
    }


def train(gateway: Gateway, plan: Plan) -> Run:
    """Train a policy from nothing on the curriculum of *plan*."""
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
                # Sessions of trainers take minutes, and draws follow records in seconds; here they have to at once.
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
    """Where episodes are played, several at a time."""

    gateway: Gateway
    lesson: Lesson
    threads: ThreadPoolExecutor

    def play(self, policy: Policy, episodes: Iterable[tuple[str, int, str]]) -> list[Attempt]:
        """Play *episodes*, each a split, an index and a seed; the first one that fails is raised."""

        def one(episode: tuple[str, int, str]) -> Attempt:
            split, index, seed = episode
            with self.gateway.session(self.lesson.environment, split, index) as session:
                return self.lesson.player(session, policy, random.Random(seed))

        return list(self.threads.map(one, episodes))

    def score(self, policy: Policy, held_out: Sequence[int], plan: Plan) -> float:
        """The mean reward on the held-out tasks, `Lesson.plays` times each; nothing is learnt from them."""
        seeds = [f"{plan.seed}/{HELD_OUT}/{play}" for play in range(plan.lesson.plays)]
        played = self.play(policy, [(HELD_OUT, index, f"{seed}/{index}") for index in held_out for seed in seeds])
        return fmean(attempt.reward for attempt in played)


def _drawn(gateway: Gateway, lesson: Lesson) -> dict[str, int]:
    """Training episodes by difficulty. The gateway's records are of all that was ever played there."""
    levels = {task["id"]: str(task["difficulty"]) for task in gateway.tasks(lesson.environment, "train")}
    drawn = dict.fromkeys(sorted(set(levels.values())), 0)
    for record in gateway.records(lesson.environment):
        if record["task"] in levels:
            drawn[levels[record["task"]]] += record["attempts"]
    return drawn
