"""Custom tasks in Python (RFC 005): the base class, and the names under which classes are offered.

A class is registered explicitly, by the decorator or a plain call, when its module is imported: those named in
``OPENENV_TASK_MODULE`` and our own (`browser_builtin`). Nothing is found by scanning.

Differences: beside the RFC's members there are `goal`, `pages` and `get_page_data`, all of which have defaults. The
page has an origin of its own instead of ``about:blank``, so cookies, storage and further pages work.
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
    """A browser task: one page (or some), a reward for each step, and an end. An instance is one episode.

    All of it runs in the environment server, on the thread that drives the browser: code that blocks ends the session.
    """

    task_name: str = "base-task"
    max_steps: int = 10
    """The episode ends when it is reached."""
    goal: str = ""
    """What the agent is to do; a task's `instruction` says another. Empty: the class's docstring."""
    pages: ClassVar[Mapping[str, str]] = {}
    """Further pages, HTML by path; the task's own page is at ``/``."""

    def __init__(self, *, page: Any, serve: Callable[[str, str], str]) -> None:
        """
        Args:
            page: the Playwright page that the episode begins on.
            serve: puts HTML at a path, and gives its address.
        """
        self.page = page
        self._serve = serve

    @abstractmethod
    def _get_html_content(self) -> str:
        """Give the task's page: inline, or read from a file beside the module (`read_beside`)."""

    @abstractmethod
    def _calculate_reward(self, page_data: dict[str, Any], action: str, error: str | None = None) -> float:
        """Give this step's reward; *error* says what was wrong with *action*, *page_data* is `get_page_data`'s."""

    @abstractmethod
    def _check_done(self, page_data: dict[str, Any]) -> bool:
        """Say whether the episode is over."""

    def _setup_page(self, html_content: str) -> None:
        """Load the page into the episode's Playwright page."""
        for path, html in self.pages.items():
            self._serve(path, html)
        self.page.goto(self._serve("/", html_content))

    def get_page_data(self, page: Any) -> dict[str, Any]:
        """Read the state of *page*, the active tab; a subclass may add to it what its reward needs.

        Returns:
            url, title, text (what can be read), html, fields (value by id, else name, of inputs; a box that is
            checked has "on") and tabs (the addresses of all).
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
        """Read the file *name* beside the module that defines the class, such as ``templates/login.html``."""
        import inspect

        return (Path(inspect.getfile(type(self))).resolve().parent / name).read_text(encoding="utf-8")


_Class = TypeVar("_Class", bound=type[CustomBrowserGymEnvironment])

_CUSTOM_TASKS: dict[str, type[CustomBrowserGymEnvironment]] = {}
"""The RFC's process-wide map; filled while modules are imported, and read by sessions after that."""


@overload
def register_custom_task(name: str) -> Callable[[_Class], _Class]: ...
@overload
def register_custom_task(name: str, task_class: _Class) -> _Class: ...
def register_custom_task(name: str, task_class: Any = None) -> Any:
    """Offer a class as ``custom/<name>``: ``@register_custom_task("name")``, or called with the class.

    Raises:
        ValueError: no name, one that is taken by another class, or no subclass of `CustomBrowserGymEnvironment`.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{name!r:.80} cannot be a task's name: letters, digits and ._- are wanted")

    def register(cls: Any) -> Any:
        if not isinstance(cls, type) or not issubclass(cls, CustomBrowserGymEnvironment):
            raise ValueError(f"{cls!r:.100} is no subclass of CustomBrowserGymEnvironment")
        taken = _CUSTOM_TASKS.get(name)
        if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"the custom task {name} is taken by {taken.__module__}.{taken.__qualname__}")
        registry.register(f"custom/{name}", ENV_TYPE, _listed(name, cls), replace=taken is not None)
        _CUSTOM_TASKS[name] = cls
        return cls

    return register if task_class is None else register(task_class)


def get_custom_task(name: str) -> type[CustomBrowserGymEnvironment]:
    """Find a class by its name.

    Raises:
        ValueError: ``Unknown custom task: <name>``.
    """
    found = _CUSTOM_TASKS.get(name)
    if found is None:
        raise ValueError(f"Unknown custom task: {name}")
    return found


def list_custom_tasks() -> list[str]:
    """Name the classes that are registered, in alphabetical order."""
    return sorted(_CUSTOM_TASKS)


def goal_of(cls: type[CustomBrowserGymEnvironment]) -> str:
    """Say what a class asks of the agent."""
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
