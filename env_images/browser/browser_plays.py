"""How a declarative task, a class or a MiniWoB task starts in a window and is judged after each step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from browser_site import ORIGIN, Site, folder_source, origin_of
from browser_spec import STEPS, Evaluation, InvalidTask, Spec
from browser_tasks import ENV_TYPE, CustomBrowserGymEnvironment, get_custom_task, goal_of, list_custom_tasks
from browser_window import View, Window
from envserver.generic import registry

MINIWOB_ORIGIN = "http://miniwob.test"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a step."""

    reward: float | None
    """The reward of this step, or None if the step has no reward."""
    is_done: bool
    info: dict[str, Any] = field(default_factory=dict)


class Play(Protocol):
    """One episode's task, on the engine's thread."""

    max_steps: int
    view: View
    site: Site

    def begin(self, window: Window) -> str:
        """Set up the window and return the goal."""

    def judge(self, window: Window, action: str, error: str) -> Verdict:
        """Judge the window after *action*; *error* describes the action's fault, if any."""

    def at_the_end(self, window: Window, verdict: Verdict) -> Verdict:
        """Judge once more when the steps are used up and *verdict* did not end the episode."""


def play_of(spec: Spec, *, seed: int) -> Play:
    """Return the play of a task.

    Raises:
        InvalidTask: There is no such custom or MiniWoB task.
    """
    if spec.evaluation is not None:
        return DeclaredPlay(spec, spec.evaluation)
    cls = class_of(spec)
    return ClassPlay(spec, cls) if spec.benchmark == "custom" else MiniwobPlay(spec, cls, seed=seed)


def class_of(spec: Spec) -> Any:
    """Return the class that a task names, of `browser_tasks` or of BrowserGym; for a declarative task, None.

    Raises:
        InvalidTask: There is no such custom or MiniWoB task.
    """
    if spec.evaluation is not None:
        return None
    if spec.benchmark == "miniwob":
        known: Collection[str] = miniwob_tasks()
        if spec.name in known:
            return miniwob_tasks()[spec.name]
        reason = f"Unknown miniwob task: {spec.name:.100}"
    else:
        try:
            return get_custom_task(spec.name)
        except ValueError as error:
            known, reason = list_custom_tasks(), str(error)
    close = get_close_matches(spec.name, known)
    raise InvalidTask(f"{reason}; {'close names: ' + ', '.join(close) if close else f'{len(known)} are known'}")


class DeclaredPlay:
    """A declarative task. It ends when its condition or `fail` holds, or with a message to the user.

    A message is the agent's answer. It ends the episode, because otherwise an agent could try all answers.
    """

    def __init__(self, spec: Spec, evaluation: Evaluation) -> None:
        self.max_steps = spec.max_steps or STEPS
        self.view = spec.view
        self.site = Site(base=origin_of(spec.start_url) or ORIGIN)
        self._spec = spec
        self._evaluation = evaluation
        for address, html in spec.pages.items():
            self.site.put(address, html)

    def begin(self, window: Window) -> str:
        window.page.goto(self.site.url(self._spec.start_url))
        return self._spec.goal

    def judge(self, window: Window, action: str, error: str) -> Verdict:
        if self._evaluation.fail is not None and self._evaluation.fail.score(window) >= 1.0:
            return Verdict(0.0, is_done=True, info={"failed": True})
        score = self._evaluation.goal.score(window)
        if score >= 1.0 or window.messages or window.gave_up:
            return Verdict(score, is_done=True)
        return Verdict(None, is_done=False)

    def at_the_end(self, window: Window, verdict: Verdict) -> Verdict:
        return Verdict(self._evaluation.goal.score(window), is_done=True)


class ClassPlay:
    """A task that is a class: its reward of each step is passed on unchanged."""

    def __init__(self, spec: Spec, cls: type[CustomBrowserGymEnvironment]) -> None:
        self.max_steps = spec.max_steps or cls.max_steps
        self.view = spec.view
        self.site = Site()
        self._spec = spec
        self._cls = cls
        self._task: CustomBrowserGymEnvironment | None = None

    def begin(self, window: Window) -> str:
        self._task = self._cls(page=window.page, serve=self._serve)
        self._task._setup_page(self._task._get_html_content())
        return self._spec.goal or goal_of(self._cls)

    def judge(self, window: Window, action: str, error: str) -> Verdict:
        assert self._task is not None  # `begin` has set it
        data = self._task.get_page_data(window.page)
        reward = float(self._task._calculate_reward(data, action, error or None))
        return Verdict(reward, is_done=bool(self._task._check_done(data)) or window.gave_up)

    def at_the_end(self, window: Window, verdict: Verdict) -> Verdict:
        return replace(verdict, is_done=True)

    def _serve(self, path: str, html: str) -> str:
        self.site.put(path, html)
        return self.site.url(path)


SOLVED_AT: Mapping[str, float] = dict.fromkeys(
    ("bisect-angle", "chase-circle", "circle-center", "find-midpoint", "right-angle"), 0.9
)
"""The least raw reward of a solved MiniWoB task whose page measures a distance in pixels. There 1 is a lucky click."""


class MiniwobPlay:
    """An official MiniWoB task: its page's raw reward decides, and is 1 only if the task is solved.

    BrowserGym's class also counts a share above 0 as solved. Then a form that is submitted untouched earns 1.
    """

    def __init__(self, spec: Spec, cls: Any, *, seed: int) -> None:
        self._solved_at = SOLVED_AT.get(spec.name, 1.0 - 1e-6)  # some pages add up tenths
        self._task: Any = cls(seed=seed % 2**32, base_url=f"{MINIWOB_ORIGIN}/miniwob/")
        self.max_steps = spec.max_steps or STEPS
        self.view = spec.view if spec.has_view else replace(spec.view, **self._task.viewport)
        self.site = Site(base=MINIWOB_ORIGIN)
        self.site.mount(MINIWOB_ORIGIN, folder_source(miniwob_pages()))
        self._address = str(self._task.url)

    def begin(self, window: Window) -> str:
        goal, _ = self._task.setup(window.page)
        return str(goal)

    def judge(self, window: Window, action: str, error: str) -> Verdict:
        chat = [{"role": "assistant", "message": text} for text in window.messages]
        # The class counts any other URL as a page that was left, even a link to "#", by which some tasks are won.
        is_same = window.page.url.partition("#")[0] == self._address
        self._task.url = window.page.url if is_same else self._address
        _, is_done, _, info = self._task.validate(window.page, chat)
        if window.gave_up:
            return Verdict(0.0, is_done=True)
        known = {key: info[key] for key in ("REWARD_REASON", "error") if isinstance(info.get(key), str)}
        reward = float(info.get("RAW_REWARD_GLOBAL", 0.0) >= self._solved_at)
        return Verdict(reward, bool(is_done), known) if is_done else Verdict(None, is_done=False)

    def at_the_end(self, window: Window, verdict: Verdict) -> Verdict:
        return Verdict(0.0, is_done=True)


@cache
def miniwob_tasks() -> dict[str, Any]:
    """Return the official classes by their names, such as ``click-test``."""
    miniwob: Any = import_module("browsergym.miniwob")
    return {task.subdomain: task for task in miniwob.ALL_MINIWOB_TASKS}


def register_miniwob() -> None:
    """Register each official task by its id, such as ``miniwob/click-test``."""
    for name, task in miniwob_tasks().items():
        whole = {
            "name": name,
            "description": task.desc,
            "tags": ["miniwob"],
            "config": {"benchmark": "miniwob", "task_name": name},
        }
        registry.register(f"miniwob/{name}", ENV_TYPE, whole)


@cache
def miniwob_pages() -> Path:
    """Return the folder of the package `miniwob`'s pages, without an import, which would start its registrations."""
    found = find_spec("miniwob")
    if found is None or not found.submodule_search_locations:
        raise InvalidTask("the package miniwob is not installed")
    return (Path(found.submodule_search_locations[0]) / "html").resolve()
