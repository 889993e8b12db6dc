"""The browser environment's own tasks, from which `scripts/make-browser-tasks` makes the task files."""

from . import browsing, forms, pointing
from .problem import MiniwobProblem, Problem

SPLITS: dict[str, list[Problem]] = {
    "train": [*forms.TRAIN, *browsing.TRAIN, *pointing.TRAIN],
    "test": [*forms.TEST, *browsing.TEST, *pointing.TEST],
    "miniwob": [],
}
_TRAIN_NAMES = (
    "click-test click-button click-link click-option click-checkboxes focus-text enter-text enter-password "
    "login-user choose-list navigate-tree click-tab search-engine use-autocomplete drag-box"
)
_TEST_NAMES = (
    "click-test-2 click-dialog click-collapsible focus-text-2 enter-text-dynamic enter-date click-button-sequence "
    "read-table find-word email-inbox"
)
_OTHER_NAMES = (
    "ascending-numbers bisect-angle book-flight book-flight-nodelay buy-ticket choose-date choose-date-easy "
    "choose-date-medium choose-date-nodelay circle-center click-checkboxes-large click-checkboxes-soft "
    "click-checkboxes-transfer click-collapsible-2 click-collapsible-2-nodelay click-collapsible-nodelay "
    "click-color click-dialog-2 click-menu click-menu-2 click-pie click-pie-nodelay click-scroll-list "
    "click-shades click-shape click-tab-2 click-tab-2-easy click-tab-2-hard click-tab-2-medium "
    "click-test-transfer click-widget copy-paste copy-paste-2 count-shape count-sides daily-calendar drag-circle "
    "drag-cube drag-items drag-items-grid drag-shapes drag-shapes-2 drag-single-shape drag-sort-numbers "
    "draw-circle draw-line email-inbox-delete email-inbox-forward email-inbox-forward-nl "
    "email-inbox-forward-nl-turk email-inbox-important email-inbox-nl-turk email-inbox-noscroll email-inbox-reply "
    "email-inbox-star-reply enter-text-2 enter-time find-greatest find-midpoint form-sequence form-sequence-2 "
    "form-sequence-3 generate-number grid-coordinate guess-number highlight-text highlight-text-2 hot-cold "
    "identify-shape login-user-popup multi-layouts multi-orderings number-checkboxes odd-or-even order-food "
    "phone-book read-table-2 resize-textarea right-angle scroll-text scroll-text-2 sign-agreement simple-algebra "
    "simple-arithmetic social-media social-media-all social-media-some stock-market terminal text-editor "
    "text-transform tic-tac-toe unicode-test use-autocomplete-nodelay use-colorwheel use-colorwheel-2 use-slider "
    "use-slider-2 use-spinner visual-addition"
)
"""All other names of MiniWoB++ 1.0 that BrowserGym offers. No solutions are written for them."""
MINIWOB: dict[str, list[MiniwobProblem]] = {
    "train": [MiniwobProblem(name=name, level=1) for name in _TRAIN_NAMES.split()],
    "test": [MiniwobProblem(name=name, level=2) for name in _TEST_NAMES.split()],
    "miniwob": [MiniwobProblem(name=name, level=3) for name in _OTHER_NAMES.split()],
}
MINIWOB_SEEDS = 8
"""Number of listed tasks of each MiniWoB problem. Its page makes a goal from the task's seed."""

__all__ = ["MINIWOB", "MINIWOB_SEEDS", "SPLITS", "MiniwobProblem", "Problem"]
