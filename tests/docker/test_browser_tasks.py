"""The browser environment's tasks, played by script in its image: right solutions get 1, plausible wrong ones 0."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from scripts.browser_problems import SPLITS, Problem
from tests.envs.browser_solutions import MISTAKES, SOLVERS, act, played, played_miniwob
from tests.envs.browser_worker import BrowserWorker, browser_worker, observation
from tests.envs.bundled import RecordProperty, note_plays

pytestmark = [pytest.mark.docker, pytest.mark.needs("image:browser")]
pytest_plugins = ["tests.contract.backend_fixtures"]

FILES = Path(__file__).parents[2] / "tasks" / "browser"
TASKS = {
    task["id"]: task
    for split in ("train", "test")
    for task in map(json.loads, (FILES / f"{split}.jsonl").read_text("utf-8").splitlines())
}
PROBLEMS = [pytest.param(problem, id=problem.slug) for problems in SPLITS.values() for problem in problems]
OFFICIAL = sorted(id.removeprefix("miniwob/") for id in TASKS if id.startswith("miniwob/"))
IN_A_HURRY = {"settle_ms": 60, "screenshot": False}


@pytest.fixture(scope="module")
def worker(docker_engine: docker.APIClient) -> Iterator[BrowserWorker]:
    with browser_worker(docker_engine) as started:
        yield started


def task_of(name: str) -> dict[str, Any]:
    task = TASKS[name]
    return {**task, "config": {**task["config"], **IN_A_HURRY}}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_task_is_solved_by_its_solution(
    worker: BrowserWorker, problem: Problem, record_property: RecordProperty
) -> None:
    last = played(worker, task_of(f"custom/{problem.slug}"), problem.solution)

    note_plays(record_property, "browser", "image", won=last["reward"] == 1.0)
    assert (last["reward"], last["finished"]) == (1.0, True)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_wrong_script_earns_nothing(worker: BrowserWorker, problem: Problem, record_property: RecordProperty) -> None:
    last = played(worker, task_of(f"custom/{problem.slug}"), problem.wrong)

    note_plays(record_property, "browser", "image", lost=last["reward"] == 0.0)
    assert (last["reward"], last["finished"]) == (0.0, True)


@pytest.mark.parametrize("name", OFFICIAL)
def test_an_official_miniwob_task_is_won_by_its_solution_and_lost_by_a_mistake(
    worker: BrowserWorker, name: str, record_property: RecordProperty
) -> None:
    won, lost = (
        played_miniwob(worker, task_of(f"miniwob/{name}"), rules[name], seed=7) for rules in (SOLVERS, MISTAKES)
    )

    note_plays(record_property, "browser", "image", won=won["reward"] == 1.0, lost=lost["reward"] == 0.0)
    assert (won["reward"], lost["reward"]) == (1.0, 0.0)


def test_leaving_a_miniwob_page_ends_the_task(worker: BrowserWorker) -> None:
    with worker.session({"id": "miniwob/click-test"}, seed=3) as session:
        output = act(session, "goto('http://miniwob.test/miniwob/click-button.html')")

    assert (output["reward"], output["finished"]) == (0.0, True)
    assert "invalid url" in output["metadata"]["error"]


def test_a_seed_repeats_a_miniwob_task_and_another_seed_changes_it(worker: BrowserWorker) -> None:
    goals = []
    for seed in (11, 11, 12, 13):
        with worker.session({"id": "miniwob/enter-text"}, seed=seed) as session:
            goals.append(observation(session)["goal"])

    assert goals[0] == goals[1]
    assert len(set(goals)) >= 2
