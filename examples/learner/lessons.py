"""The lessons: for each environment its player, its tasks, its curricula and their learning rates."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Final

from examples.learner import arithmetic, games
from examples.learner.client import Session
from examples.learner.policy import Attempt, Policy
from examples.learner.training import Lesson

LEVELS: Final = (1, 2, 3, 4)
UNIFORM: Final[Mapping[str, Any]] = {"kind": "uniform"}
TARGET: Final[Mapping[str, Any]] = {"kind": "target_success", "window": 8}
PROGRESS: Final[Mapping[str, Any]] = {"kind": "learning_progress"}
STAGED: Final[Mapping[str, Any]] = {
    "kind": "staged",
    "stages": [{"name": f"level-{level}", "min_difficulty": level, "max_difficulty": level} for level in LEVELS],
    "window": 32,
    "min_attempts": 32,
    "promote_at": 0.75,
    "demote_at": 0.1,
    "review": 0.2,
}


def answer(session: Session, policy: Policy, chance: random.Random) -> Attempt:
    """Play an episode of `math`: one question, one answer."""
    text, decisions = arithmetic.solve(session.prompt(), policy, chance)
    seen = session.call("submit", {"answer": text})
    return Attempt(decisions, seen.reward)


MATH: Final = Lesson(
    environment="math",
    tags=arithmetic.TAGS,
    player=answer,
    success_at=0.95,
    samplers={"uniform": UNIFORM, "target_success": TARGET, "learning_progress": PROGRESS, "staged": STAGED},
    rates={"uniform": 2.0, "target_success": 2.0, "learning_progress": 2.0, "staged": 2.0},
    group_size=4,
    episodes=1600,
    plays=1,
)
GAME: Final = Lesson(
    environment="game",
    tags=games.TAGS,
    player=games.play,
    success_at=0.9,
    samplers={"uniform": UNIFORM, "target_success": TARGET, "learning_progress": PROGRESS, "staged": STAGED},
    rates={"uniform": 0.6, "target_success": 0.6, "learning_progress": 0.6, "staged": 0.6},
    group_size=8,
    episodes=640,
    plays=4,
)
LESSONS: Final[Mapping[str, Lesson]] = {lesson.environment: lesson for lesson in (MATH, GAME)}
