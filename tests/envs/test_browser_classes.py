"""Custom browser tasks in Python: how classes are registered, found and refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from envserver.generic import registry

from tests.envs.browser_modules import browser_module

tasks: Any = browser_module("browser_tasks")
builtin: Any = browser_module("browser_builtin")
Base: Any = tasks.CustomBrowserGymEnvironment


class Task(Base):  # type: ignore[misc]  # loaded by name, as in the image
    """Do it."""

    def _get_html_content(self) -> str:
        return "<p>page"

    def _calculate_reward(self, page_data: dict[str, Any], action: str, error: str | None = None) -> float:
        return 0.0

    def _check_done(self, page_data: dict[str, Any]) -> bool:
        return False


class Other(Task):
    """Do something else."""


@pytest.fixture
def name() -> Iterator[str]:
    """Yield a free name, and free it again after the test."""
    yield "probe-task"
    tasks._CUSTOM_TASKS.pop("probe-task", None)
    if "custom/probe-task" in registry:
        registry.unregister("custom/probe-task")


def test_a_class_is_registered_by_a_decorator_and_by_a_call(name: str) -> None:
    decorated = tasks.register_custom_task(name)(Task)
    called = tasks.register_custom_task(name, Task)  # of a module that is loaded again

    assert decorated is called is Task
    assert tasks.get_custom_task(name) is Task
    assert name in tasks.list_custom_tasks()


def test_a_registered_class_is_in_the_registry_of_tasks(name: str) -> None:
    tasks.register_custom_task(name, Task)

    listed = registry.get(f"custom/{name}")
    assert (listed.env_type, listed.instruction) == ("browser", "Do it.")
    assert dict(listed.config) == {"benchmark": "custom", "task_name": name, "max_steps": 10}


def test_the_registered_task_opens_its_class(name: str) -> None:
    tasks.register_custom_task(name, Task)

    read = browser_module("browser_spec").read_spec(registry.get(f"custom/{name}").to_dict(), variables={})

    assert (read.benchmark, read.name, read.evaluation) == ("custom", name, None)


def test_another_class_does_not_take_a_name(name: str) -> None:
    tasks.register_custom_task(name, Task)

    with pytest.raises(ValueError, match=f"the custom task {name} is already defined by .*Task"):
        tasks.register_custom_task(name, Other)
    assert tasks.get_custom_task(name) is Task


@pytest.mark.parametrize("value", [object, 3, Task.__init__, "Task"])
def test_a_value_that_is_not_a_subclass_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match="is not a subclass of CustomBrowserGymEnvironment"):
        tasks.register_custom_task(name)(value)
    assert name not in tasks.list_custom_tasks()


@pytest.mark.parametrize("bad", ["", "a/b", "-x", "x" * 200, 3])
def test_an_invalid_task_name_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="cannot be a task's name"):
        tasks.register_custom_task(bad, Task)


def test_an_unknown_class_is_named_in_the_error() -> None:
    with pytest.raises(ValueError, match=r"^Unknown custom task: none-such$"):
        tasks.get_custom_task("none-such")


def test_the_builtin_classes_are_there_with_the_rfcs_defaults() -> None:
    assert set(tasks.list_custom_tasks()) >= {"copy-paste", "copy-paste-multitab", "login-demo"}
    assert (Base.task_name, Base.max_steps) == ("base-task", 10)
    assert Base.__abstractmethods__ == {"_get_html_content", "_calculate_reward", "_check_done"}
    assert callable(Base._setup_page)


@pytest.mark.parametrize(
    ("data", "error", "reward", "is_done"),
    [
        ({"fields": {"source": "a", "target": ""}, "text": ""}, None, 0.0, False),
        ({"fields": {"source": "a", "target": "a"}, "text": ""}, None, 0.5, False),
        ({"fields": {"source": "", "target": ""}, "text": ""}, None, 0.0, False),
        ({"fields": {"source": "a", "target": "a"}, "text": "Success! It was."}, None, 1.0, True),
        ({"fields": {"source": "a", "target": "a"}, "text": ""}, "no such element", -0.1, False),
    ],
)
def test_copy_paste_has_the_rewards_of_the_rfc(
    data: dict[str, Any], error: str | None, reward: float, is_done: bool
) -> None:
    play = builtin.CopyPaste(page=None, serve=lambda path, html: path)

    assert play._calculate_reward(data, "click('1')", error) == reward
    assert play._check_done(data) is is_done


def test_each_builtin_page_is_read_from_its_file() -> None:
    for cls in (builtin.CopyPaste, builtin.CopyPasteMultitab, builtin.LoginDemo):
        assert "<title>" in cls(page=None, serve=lambda path, html: path)._get_html_content()


def test_the_module_names_of_the_rfc_expose_the_same_objects() -> None:
    names = browser_module("custom_tasks")

    assert browser_module("custom_base").CustomBrowserGymEnvironment is Base
    assert names.register_custom_task is tasks.register_custom_task
    assert names.get_custom_task is tasks.get_custom_task
