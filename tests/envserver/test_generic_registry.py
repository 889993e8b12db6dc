"""The registry of tasks: registering, finding, listing and refusals."""

import threading

import pytest
from envserver.generic import GenericTask, TaskError, TaskRegistry, UnknownTask

from tests.deadlines import HANG_S

CONFIG = {"start_url": "http://localhost:8000/login", "goal": "log in", "reward_fn": "check_url_contains('dashboard')"}


def test_the_call_of_the_rfc_registers_a_task() -> None:
    registry = TaskRegistry()

    registry.register("custom/login-test", "browsergym", CONFIG)

    task = registry.get("custom/login-test")
    assert (task.id, task.env_type, task.instruction) == ("custom/login-test", "browsergym", "log in")
    assert dict(task.config) == {"start_url": "http://localhost:8000/login"}
    assert dict(task.evaluation) == {"reward_function": "check_url_contains('dashboard')"}
    assert "custom/login-test" in registry
    assert len(registry) == 1


def test_a_whole_task_and_a_bare_configuration_can_be_registered() -> None:
    registry = TaskRegistry()

    registry.register("a", "game", {"instruction": "Play.", "config": {"level": 2}, "tags": ["grid"], "split": "test"})
    registry.register("b", "game", {"level": 3, "name": "maze"})
    registry.register("c", "chat", GenericTask(instruction="Say hello.", tags=("grid",)))

    assert dict(registry.get("b").config) == {"level": 3, "name": "maze"}
    assert [task.id for task in registry.list()] == ["a", "b", "c"]
    assert [task.id for task in registry.list("game")] == ["a", "b"]
    assert [task.id for task in registry.list(["chat", "textarena"])] == ["c"]
    assert [task.id for task in registry.list(tag="grid")] == ["a", "c"]
    assert [task.id for task in registry.list("game", split="custom")] == ["b"]
    assert [task.id for task in registry.list(split="test")] == ["a"]


def test_an_id_is_taken_until_it_is_replaced_or_unregistered() -> None:
    registry = TaskRegistry()
    registry.register("a", "game", {"level": 1})

    with pytest.raises(ValueError, match="the task a is registered already"):
        registry.register("a", "game", {"level": 2})
    assert dict(registry.get("a").config) == {"level": 1}
    registry.register("a", "game", {"level": 3}, replace=True)
    assert dict(registry.unregister("a").config) == {"level": 3}
    registry.register("a", "game", {"level": 4})

    assert dict(registry.get("a").config) == {"level": 4}


@pytest.mark.parametrize("method", ["get", "unregister"])
def test_the_error_for_an_unknown_id_names_the_id(method: str) -> None:
    with pytest.raises(UnknownTask) as caught:
        getattr(TaskRegistry(), method)("custom/none")

    assert isinstance(caught.value, KeyError)
    assert str(caught.value) == "Unknown task: custom/none"


@pytest.mark.parametrize(
    ("task_id", "env_type", "config", "path"),
    [
        ("", "game", {}, "id"),
        ("a", "", {}, "env_type"),
        ("../a", "game", {}, "id"),
        ("a", "game", {"config": {}, "id": "b"}, "id"),
        ("a", "game", {"config": {}, "env_type": "chat"}, "env_type"),
        ("a", "game", GenericTask(id="b"), "id"),
        ("a", "game", {"goal": 5}, "instruction"),
        ("a", "game", {"reward_fn": "open('/etc/passwd').read()"}, "evaluation.reward_function"),
        ("a", "game", {"level": {1, 2}}, "config.level"),
    ],
)
def test_a_faulty_task_is_refused_and_leaves_nothing(
    task_id: str, env_type: str, config: dict[str, object] | GenericTask, path: str
) -> None:
    registry = TaskRegistry()

    with pytest.raises(TaskError) as caught:
        registry.register(task_id, env_type, config)

    assert [found for found, _ in caught.value.problems] == [path]
    assert len(registry) == 0


def test_only_one_of_many_threads_registers_an_id() -> None:
    registry = TaskRegistry()
    ready = threading.Barrier(8)
    refused = []

    def register() -> None:
        ready.wait(HANG_S)
        try:
            registry.register("a", "game", {})
        except ValueError as error:
            refused.append(error)

    threads = [threading.Thread(target=register) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)

    assert len(registry) == 1
    assert len(refused) == 7
