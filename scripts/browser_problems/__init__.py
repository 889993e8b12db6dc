"""The browser environment's own tasks, from which `scripts/make-browser-tasks` makes the task files."""

from . import browsing, forms, pointing
from .problem import MiniwobProblem, Problem

SPLITS: dict[str, list[Problem]] = {
    "train": [*forms.TRAIN, *browsing.TRAIN, *pointing.TRAIN],
    "test": [*forms.TEST, *browsing.TEST, *pointing.TEST],
}
_TRAIN_NAMES = (
    "click-test click-button click-link click-option click-checkboxes focus-text enter-text enter-password "
    "login-user choose-list navigate-tree click-tab search-engine use-autocomplete drag-box"
)
_TEST_NAMES = (
    "click-test-2 click-dialog click-collapsible focus-text-2 enter-text-dynamic enter-date click-button-sequence "
    "read-table find-word email-inbox"
)
MINIWOB: dict[str, list[MiniwobProblem]] = {
    "train": [MiniwobProblem(name=name, level=1) for name in _TRAIN_NAMES.split()],
    "test": [MiniwobProblem(name=name, level=2) for name in _TEST_NAMES.split()],
}
MINIWOB_SEEDS = 8
"""Number of listed tasks of each MiniWoB problem. Its page makes a goal from the task's seed."""

__all__ = ["MINIWOB", "MINIWOB_SEEDS", "SPLITS", "MiniwobProblem", "Problem"]
