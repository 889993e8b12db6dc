"""The coding environment's own problems, from which `scripts/make-coding-tasks` makes the tasks."""

from .problem import Problem
from .test_easy import PROBLEMS as TEST_EASY
from .test_hard import PROBLEMS as TEST_HARD
from .test_medium import PROBLEMS as TEST_MEDIUM
from .train_easy import PROBLEMS as TRAIN_EASY
from .train_hard import PROBLEMS as TRAIN_HARD
from .train_medium import PROBLEMS as TRAIN_MEDIUM

SPLITS: dict[str, list[Problem]] = {
    "train": [*TRAIN_EASY, *TRAIN_MEDIUM, *TRAIN_HARD],
    "test": [*TEST_EASY, *TEST_MEDIUM, *TEST_HARD],
}

__all__ = ["SPLITS", "Problem"]
