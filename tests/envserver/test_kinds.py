"""A class that cannot be served is refused at start, with a message that gives the reason."""

import re
from pathlib import Path
from typing import Any

import pytest
from envserver import Environment, Split, StepResult, Task, tool
from envserver.errors import ConfigError
from envserver.schema.environment_types import kinds_of
from envserver.settings import SandboxSettings, Settings, unknown_variables


class Good(Environment):
    def reset(self, task: Task, *, seed: int) -> str:
        return ""

    @tool
    def act(self) -> StepResult:
        return StepResult()


class NoTool(Environment):
    def reset(self, task: Task, *, seed: int) -> str:
        return ""


class NoPrompt(Environment):
    @tool
    def act(self) -> StepResult:
        return StepResult()


class NoSplit(Good):
    @classmethod
    def splits(cls) -> list[Split]:
        return []


class SameSplits(Good):
    @classmethod
    def splits(cls) -> list[str]:
        return ["a", "a"]


class FailingSplits(Good):
    @classmethod
    def splits(cls) -> list[str]:
        raise RuntimeError("no list")


class HalfIndexed(Good):
    @classmethod
    def num_tasks(cls, split: str) -> int:
        return 1


class Untyped(Good):
    @tool
    def look(self, at) -> StepResult:  # type: ignore[no-untyped-def]  # the test needs the mistake
        return StepResult()


class AnyNumber(Good):
    @tool
    def look(self, *at: int) -> StepResult:
        return StepResult()


class TwoEnds(Good):
    @tool(terminal=True)
    def end(self) -> StepResult:
        return StepResult()

    @tool(terminal=True)
    def stop(self) -> StepResult:
        return StepResult()


class WideEnd(Good):
    terminal_tool = "end"

    @tool
    def end(self, a: str, b: str) -> StepResult:
        return StepResult()


class LostDefault(Good):
    default_tool = "nothing"


class Called(Good):
    name = "Health"


class Spaced(Good):
    name = "a b"


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (NoTool, "it has no tool"),
        (NoPrompt, "it has no prompt"),
        (NoSplit, "it has no split"),
        (SameSplits, "two splits have one name"),
        (FailingSplits, "RuntimeError: no list"),
        (HalfIndexed, "must be overridden together"),
        (Untyped, "'at': needs a type annotation"),
        (AnyNumber, "'at': must be a named parameter"),
        (TwoEnds, "several terminal tools: end, stop"),
        (WideEnd, "one argument or none"),
        (LostDefault, "'nothing' is not a tool"),
        (Called, "'health' is already the path of a route"),
        (Spaced, "the name 'a b'"),
    ],
)
def test_a_class_that_cannot_be_served(cls: type[Environment], why: str) -> None:
    with pytest.raises(ConfigError, match=f"environment {cls.__name__}: .*{re.escape(why)}"):
        kinds_of([Good, cls], tasks=None)


@pytest.mark.parametrize(
    ("classes", "why"), [([], "at least one"), ([Good, Good], "two environments"), ([int], "not a subclass")]
)
def test_a_set_of_classes_that_cannot_be_served_is_refused_with_the_reason(classes: list[Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        kinds_of(classes, tasks=None)


def test_without_task_files_an_environment_has_a_split_without_tasks() -> None:
    kind = kinds_of([Good], tasks=None)["good"]

    assert [split.wire() for split in kind.splits] == [{"name": "train", "type": "train"}]
    assert Good.num_tasks("train") == 0


def test_with_several_environments_task_files_are_in_the_environments_own_directory(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "test.jsonl").write_text("{}\n")
    (tmp_path / "train.jsonl").write_text("{}\n")

    kind = kinds_of([Good], tasks=str(tmp_path))["good"]

    assert [split.name for split in kind.splits] == ["test"]


def test_a_missing_task_directory_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        kinds_of([Good], tasks=str(tmp_path / "none"))


def test_a_tool_cannot_be_concurrent_and_exclusive() -> None:
    with pytest.raises(ConfigError, match="at once"):
        tool(concurrent=True, terminal=True)


def test_settings_are_read_from_their_variables() -> None:
    settings = Settings.from_environ(
        {
            "ENVSERVER_SOCKET": "/run/x.sock",
            "ENVSERVER_HOST": "127.0.0.1",
            "ENVSERVER_PORT": "9",
            "ENVSERVER_SLOTS": "3",
            "ENVSERVER_IDLE_S": "0.5",
            "ENVSERVER_EXIT_ON_EOF": "1",
            "ENVSERVER_TASKS": "/tasks",
            "ENVSERVER_LOG": "WARNING",
            "ENVSERVER_BODY_MAX_BYTES": "4096",
            "ENVSERVER_KEPT_MAX_BYTES": "0",
            "ENVSERVER_STRICT_PATHS": "1",
            "OPENENV_TASK_MODULE": " custom_tasks.a,, b ",
            "ENVSERVER_CUSTOM_TASKS_DIR": "/mnt/tasks",
            "ENVSERVER_SANDBOX_BOX": "/box",
            "ENVSERVER_SANDBOX_WORK": "/mnt/work",
            "ENVSERVER_SANDBOX_HOST": "1",
            "ENVSERVER_SANDBOX_MEMORY_MIB": "64",
            "ENVSERVER_SANDBOX_PIDS": "32",
            "ENVSERVER_SANDBOX_DISK_MIB": "16",
            "ENVSERVER_SANDBOX_CPU_S": "8",
            "PATH": "/bin",
        }
    )

    assert settings == Settings(
        socket="/run/x.sock",
        host="127.0.0.1",
        port=9,
        slots=3,
        idle_s=0.5,
        exit_on_eof=True,
        tasks="/tasks",
        log="warning",
        body_max_bytes=4096,
        kept_max_bytes=0,
        strict_paths=True,
        task_modules=("custom_tasks.a", "b"),
        custom_tasks_dir="/mnt/tasks",
        sandbox=SandboxSettings(box="/box", work="/mnt/work", host=True, memory_mib=64, pids=32, disk_mib=16, cpu_s=8),
    )
    assert Settings.from_environ({"ENVSERVER_PORT": ""}) == Settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "http"),
        ("PORT", "65536"),
        ("SLOTS", "-1"),
        ("SLOTS", "1.5"),
        ("IDLE_S", "soon"),
        ("IDLE_S", "-1"),
        ("IDLE_S", "nan"),
        ("EXIT_ON_EOF", "yes"),
        ("LOG", "loud"),
        ("BODY_MAX_BYTES", "1"),
        ("SANDBOX_HOST", "true"),
        ("SANDBOX_MEMORY_MIB", "0"),
        ("SANDBOX_PIDS", "many"),
        ("SANDBOX_DISK_MIB", "-1"),
        ("SANDBOX_CPU_S", "0"),
    ],
)
def test_the_refusal_of_a_malformed_setting_names_it(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"ENVSERVER_{name}"):
        Settings.from_environ({f"ENVSERVER_{name}": value})


def test_an_unknown_variable_of_the_server_is_reported() -> None:
    assert unknown_variables({"ENVSERVER_SOKCET": "x", "ENVSERVER_PORT": "1", "HOME": "/"}) == ["ENVSERVER_SOKCET"]


@pytest.mark.parametrize(("slots", "threads", "lanes"), [(0, 256, 64), (1, 1, 1), (100, 100, 100), (1000, 1000, 256)])
def test_threads_and_lanes_follow_the_slots(slots: int, threads: int, lanes: int) -> None:
    settings = Settings(slots=slots)

    assert (settings.threads, settings.lanes) == (threads, lanes)
