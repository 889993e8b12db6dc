"""Custom tasks in Python (RFC 005): the base class, and the names under which classes are offered.

A class is registered explicitly, by the decorator or a plain call, when its module is imported. These modules are the
modules in ``OPENENV_TASK_MODULE`` and `browser_builtin`. There is no scan for classes.

Differences: next to the RFC's members there are `goal`, `pages` and `get_page_data`, which all have defaults. The page
has its own origin instead of ``about:blank``, so cookies, storage and further pages work.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar, overload

from envserver.generic import registry

ENV_TYPE = "browser"
PAGE_TEXT_CHARS = 20_000
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,99}", re.IGNORECASE)


class CustomBrowserGymEnvironment(ABC):
    """A browser task: one or several pages, a reward for each step, and an end. An instance is one episode.

    All of it runs in the environment server, on the thread that drives the browser: blocking code ends the session.
    """

    task_name: str = "base-task"
    max_steps: int = 10
    """The number of steps after which the episode ends."""
    goal: str = ""
    """The agent's goal. A task's `instruction` replaces it; if it is empty, the class's docstring is used."""
    pages: ClassVar[Mapping[str, str]] = {}
    """Further pages, HTML by path; the task's own page is at ``/``."""

    def __init__(self, *, page: Any, serve: Callable[[str, str], str]) -> None:
        """Create the task of one episode.

        Args:
            page: The Playwright page on which the episode starts.
            serve: Puts HTML at a path and returns its address.
        """
        self.page = page
        self._serve = serve

    @abstractmethod
    def _get_html_content(self) -> str:
        """Return the task's page: inline, or read from a file next to the module (`read_beside`)."""

    @abstractmethod
    def _calculate_reward(self, page_data: dict[str, Any], action: str, error: str | None = None) -> float:
        """Return this step's reward; *error* is the fault of *action*, and *page_data* is from `get_page_data`."""

    @abstractmethod
    def _check_done(self, page_data: dict[str, Any]) -> bool:
        """Return True if the episode is over."""

    def _setup_page(self, html_content: str) -> None:
        """Load the page into the episode's Playwright page."""
        for path, html in self.pages.items():
            self._serve(path, html)
        self.page.goto(self._serve("/", html_content))

    def get_page_data(self, page: Any) -> dict[str, Any]:
        """Read the state of *page*, the active tab; a subclass may add data for its reward.

        Returns:
            url, title, text (the visible text), html, fields (value by id, else by name, of inputs; a checked box has
            "on") and
                tabs (all addresses).
        """
        return {
            "url": page.url,
            "title": page.title(),
            "text": page.locator("css=html").inner_text(timeout=1_000)[:PAGE_TEXT_CHARS],
            "html": page.content()[: 10 * PAGE_TEXT_CHARS],
            "fields": _fields(page),
            "tabs": [tab.url for tab in page.context.pages],
        }

    def read_beside(self, name: str) -> str:
        """Read the file *name* next to the module that defines the class, such as ``templates/login.html``."""
        import inspect

        return (Path(inspect.getfile(type(self))).resolve().parent / name).read_text(encoding="utf-8")


_Class = TypeVar("_Class", bound=type[CustomBrowserGymEnvironment])

_CUSTOM_TASKS: dict[str, type[CustomBrowserGymEnvironment]] = {}
"""The RFC's process-wide map, which imports fill and sessions read."""


@overload
def register_custom_task(name: str) -> Callable[[_Class], _Class]: ...
@overload
def register_custom_task(name: str, task_class: _Class) -> _Class: ...
def register_custom_task(name: str, task_class: Any = None) -> Any:
    """Offer a class as ``custom/<name>``: ``@register_custom_task("name")``, or a call with the class.

    Raises:
        ValueError: The name is invalid or taken by another class, or it is not a `CustomBrowserGymEnvironment`
            subclass.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{name!r:.80} cannot be a task's name: use letters, digits and ._-")

    def register(cls: Any) -> Any:
        if not isinstance(cls, type) or not issubclass(cls, CustomBrowserGymEnvironment):
            raise ValueError(f"{cls!r:.100} is not a subclass of CustomBrowserGymEnvironment")
        taken = _CUSTOM_TASKS.get(name)
        if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"the custom task {name} is already defined by {taken.__module__}.{taken.__qualname__}")
        registry.register(f"custom/{name}", ENV_TYPE, _listed(name, cls), replace=taken is not None)
        _CUSTOM_TASKS[name] = cls
        return cls

    return register if task_class is None else register(task_class)


def get_custom_task(name: str) -> type[CustomBrowserGymEnvironment]:
    """Return a class by its name.

    Raises:
        ValueError: ``Unknown custom task: <name>``.
    """
    found = _CUSTOM_TASKS.get(name)
    if found is None:
        raise ValueError(f"Unknown custom task: {name}")
    return found


def list_custom_tasks() -> list[str]:
    """Return the names of the registered classes in alphabetical order."""
    return sorted(_CUSTOM_TASKS)


def goal_of(cls: type[CustomBrowserGymEnvironment]) -> str:
    """Return the goal that a class sets for the agent."""
    return (cls.goal or cls.__dict__.get("__doc__") or cls.task_name).strip()


def _listed(name: str, cls: type[CustomBrowserGymEnvironment]) -> dict[str, Any]:
    return {
        "name": name,
        "instruction": goal_of(cls),
        "tags": ["custom"],
        "config": {"benchmark": "custom", "task_name": name, "max_steps": cls.max_steps},
        "evaluation": {},
    }


def _fields(page: Any) -> dict[str, str]:
    fields: dict[str, str] = {}
    found = page.locator("css=input, textarea, select")
    for place in range(min(found.count(), 100)):
        element = found.nth(place)
        name = element.get_attribute("id") or element.get_attribute("name") or str(place)
        if element.get_attribute("type") in ("checkbox", "radio"):
            fields[name] = "on" if element.is_checked(timeout=1_000) else ""
        else:
            fields[name] = element.input_value(timeout=1_000)
    return fields
