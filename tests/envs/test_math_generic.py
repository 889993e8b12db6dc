"""Generic tasks in the math environment: named reward functions judge them, and a mounted module registers them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.envs.workers import Worker

MODULE = """
import time

from envserver.generic import reward_function
from openenv.core.tasks import registry


@reward_function("nearness")
def nearness(text: str, wanted: int) -> float:
    if text == "break":
        raise RuntimeError("broken")
    return 1 / (1 + abs(int(text) - wanted))


registry.register("custom/near", "reasoning_gym", {"goal": "Say 7.", "reward_fn": "nearness(7)"})
"""
SUM: dict[str, Any] = {
    "id": "custom/sum",
    "env_type": "math",
    "instruction": "What is 17 + 25?",
    "config": {"max_attempts": 2},
    "evaluation": {"reward_function": "numeric_match(42)"},
}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = tmp_path_factory.mktemp("openenv")
    (folder / "custom_tasks").mkdir()
    (folder / "custom_tasks" / "near.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENENV_TASK_MODULE", "custom_tasks.near, custom_tasks.missing")
        worker = Worker("math", box=Path("/none"), settings={"CUSTOM_TASKS_DIR": str(folder)})
    try:
        yield worker
    finally:
        log = worker.stop()
        assert "task_module_loaded module=custom_tasks.near tasks=1" in log
        assert "task_module_failed module=custom_tasks.missing error=ModuleNotFoundError" in log


def submit(worker: Worker, task: dict[str, Any], *answers: str) -> dict[str, Any]:
    session = worker.open(task)
    said: dict[str, Any] = {}
    for answer in answers:
        said = session.tool("submit", answer=answer)
    session.close()
    return said


@pytest.mark.parametrize(
    ("evaluation", "answer", "reward"),
    [
        ({"reward_function": "numeric_match(42)"}, "42.0", 1.0),
        ({"reward_function": "numeric_match(42)"}, "41", 0.0),
        ({"reward_function": "regex_match", "pattern": "^x *= *4$"}, "x = 4", 1.0),
        ({"reward_function": "regex_match", "pattern": "(a+)+$"}, "a" * 60 + "b", 0.0),
        ({"reward_function": "not_contains('x')"}, "y" * 2_001, 0.0),
        ({"reward_function": "not_contains('x')"}, " ", 0.0),
    ],
)
def test_a_named_function_judges_the_submitted_answer(
    worker: Worker, evaluation: dict[str, Any], answer: str, reward: float
) -> None:
    ended = submit(worker, {**SUM, "config": {}, "evaluation": evaluation}, answer)

    assert (ended["reward"], ended["finished"]) == (reward, True)


def test_attempts_count_as_in_other_tasks(worker: Worker) -> None:
    session = worker.open(SUM)

    first, second = (session.tool("submit", answer=answer) for answer in ("41", "42"))
    session.close()

    assert (first["reward"], first["finished"]) == (None, False)
    assert (second["reward"], second["finished"], second["metadata"]["family"]) == (1.0, True, "numeric_match")


def test_the_marked_answer_in_free_text_is_judged(worker: Worker) -> None:
    session = worker.open(SUM)

    ended = session.say("17 + 25 is <answer>42</answer>")["output"]
    session.close()

    assert ended["reward"] == 1.0


@pytest.mark.parametrize(
    ("evaluation", "says"),
    [
        ({"reward_function": "guess"}, "no reward function 'guess'"),
        ({"reward_function": "numeric_match"}, "missing a required argument"),
        ({"reward_function": "__import__('os').system('true')"}, "is not a call of a function by its name"),
        ({"reward_function": 5}, "a reward function is a text"),
        ({"script": "true"}, "evaluation must be {reward_function: 'reasoning_gym'"),
    ],
)
def test_an_invalid_evaluation_opens_no_session(worker: Worker, evaluation: dict[str, Any], says: str) -> None:
    session, created = worker.create({**SUM, "evaluation": evaluation})

    answer = created if created.status_code != 200 else session.post("/math/call", {"text": "42"})

    assert answer.status_code >= 400
    assert says in answer.text


def test_a_mounted_module_provides_a_task_and_its_function(worker: Worker) -> None:
    listed = worker.http.get("/math/registered").json()

    assert [(task["id"], task["env_type"]) for task in listed["tasks"]] == [("custom/near", "reasoning_gym")]
    assert [(row["module"], row["error"] is None) for row in listed["modules"]] == [
        ("custom_tasks.near", True),
        ("custom_tasks.missing", False),
    ]
    assert submit(worker, {"id": "custom/near"}, "7")["reward"] == 1.0
    assert submit(worker, {"id": "custom/near"}, "8")["reward"] == 0.5


def test_a_function_that_raises_fails_the_session_and_gives_no_reward(worker: Worker) -> None:
    session = worker.open({"id": "custom/near"})

    broken = session.call(name="submit", input={"answer": "break"})
    after = session.post("/math/call", {"text": "7"})

    assert (broken["ok"], broken["reason"]) == (False, "author_fault")
    assert "nearness: RuntimeError: broken" in broken["error"]
    assert after.status_code == 500


def test_the_error_for_an_unknown_id_names_the_module_that_could_not_be_imported(worker: Worker) -> None:
    _, created = worker.create({"id": "custom/far"})

    assert created.status_code == 400
    assert created.json()["detail"].startswith("Unknown task: custom/far (task module custom_tasks.missing failed: ")


def test_the_projects_own_tasks_are_found_by_id_too(worker: Worker) -> None:
    session = worker.open({"id": "train-chain_sum-1-01"})

    assert "13 + 73 - 46" in session.prompt()
    session.close()
