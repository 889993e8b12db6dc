"""The browser environment's tasks, played by script in its image: right solutions get 1, plausible wrong ones 0."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from scripts.browser_problems import SPLITS, Problem
from tests.answers.groups import IS_WHOLE
from tests.envs.browser_solutions import MISTAKES, SOLVERS, act, played, played_miniwob, written
from tests.envs.browser_worker import BrowserWorker, browser_worker, observation
from tests.envs.bundled import RecordProperty, note_plays

pytestmark = [pytest.mark.docker, pytest.mark.needs("image:browser")]
pytest_plugins = ["tests.contract.backend_fixtures"]

FILES = Path(__file__).parents[2] / "tasks" / "browser"
TASKS = {
    task["id"]: task
    for file in sorted(FILES.glob("*.jsonl"))
    for task in map(json.loads, file.read_text("utf-8").splitlines())
}
PROBLEMS = [pytest.param(problem, id=problem.slug) for problems in SPLITS.values() for problem in problems]
OFFICIAL = sorted(SOLVERS)
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


@pytest.mark.parametrize("name", sorted(TASKS) if IS_WHOLE else sorted(TASKS)[::9])
def test_doing_nothing_earns_nothing(worker: BrowserWorker, name: str) -> None:
    task = task_of(name)
    with worker.session({**task, "config": {**task["config"], "max_steps": 1}}, seed=7) as session:
        output = act(session, "noop(0)")

    assert (output["reward"], output["finished"]) == (0.0, True)


FILLED = r"(.*fill\([^']*(?:'[^']*')?[^']*\}, '[^']+)"
"""A script up to the end of its last typed text."""


@pytest.mark.parametrize("slug", ["contact-form", "framed-address", "open-the-safe", "policy-number"])
def test_a_form_with_one_letter_more_earns_nothing(worker: BrowserWorker, slug: str) -> None:
    solution = "\0".join(next(one.solution for ones in SPLITS.values() for one in ones if one.slug == slug))
    mistyped = re.sub(FILLED, r"\g<1>7", solution, count=1, flags=re.DOTALL)

    last = played(worker, task_of(f"custom/{slug}"), [*mistyped.split("\0"), "send_msg_to_user('It is done.')"])

    assert mistyped != solution
    assert (last["reward"], last["finished"]) == (0.0, True)


@pytest.mark.parametrize("seed", [2, 7, 11])
@pytest.mark.parametrize("name", ["", "-large", "-soft", "-transfer"])
def test_a_share_of_a_miniwob_task_is_no_solution(worker: BrowserWorker, name: str, seed: int) -> None:
    name = f"miniwob/click-checkboxes{name}"
    with worker.session({"id": name}, seed=seed) as session:
        seen = observation(session)
        output = act(session, written("click({button 'Submit'})", seen["axtree_txt"]))

    is_right = seen["goal"] == "Select nothing and click Submit."
    assert (output["reward"], output["finished"]) == (float(is_right), True)


def test_a_wrong_card_of_a_miniwob_task_is_no_solution(worker: BrowserWorker) -> None:
    with worker.session({"id": "miniwob/find-greatest"}, seed=1) as session:  # the cards are 1, 6 and 5
        outputs = [act(session, call) for call in ("click('[data-index=\"0\"]')", "click('#submit')")]

    assert (outputs[-1]["reward"], outputs[-1]["finished"]) == (0.0, True)


PATHS = {"/": "<a href='/dashboard'>Go on</a>", "/dashboard": "<h1>Here</h1>", "/shop": "<h1>Shop</h1>"}
ROUTED = "<button onclick=\"history.pushState({}, '', '/dashboard')\">Go on</button>"


@pytest.mark.parametrize(
    ("condition", "pages", "call", "reward"),
    [
        pytest.param("check_url_contains('dashboard')", PATHS, "click({link 'Go on'})", 1.0, id="the link"),
        pytest.param("check_url_contains('dashboard')", {"/": ROUTED}, "click({button})", 1.0, id="a page's own route"),
        pytest.param("check_url_contains('dashboard')", PATHS, "goto('URL#dashboard')", 0.0, id="a fragment"),
        pytest.param("check_url_contains('dashboard')", PATHS, "goto('URL?dashboard')", 0.0, id="a query"),
        pytest.param("check_url_contains('dashboard')", PATHS, "goto('URLmy-dashboard')", 0.0, id="no such page"),
        pytest.param("check_url_contains('task')", PATHS, "click({link 'Go on'})", 0.0, id="the host"),
        pytest.param("check_url_contains('shop?page=2')", PATHS, "goto('URLshop?page=2')", 1.0, id="a wanted query"),
        pytest.param("check_url_contains('#top')", PATHS, "goto('URL#top')", 1.0, id="a wanted fragment"),
        pytest.param("check_url_contains('http://task.test/shop')", PATHS, "goto('URLshop')", 1.0, id="a wanted host"),
        pytest.param("check_url_equals('/no')", PATHS, "goto('URLno')", 0.0, id="no such page, as a whole"),
        pytest.param("check_url_equals('/shop')", PATHS, "goto('URLshop')", 1.0, id="a whole address"),
        pytest.param("tab_url_contains('dashboard')", PATHS, "goto('URL#dashboard')", 0.0, id="a tab's fragment"),
        pytest.param("tab_url_contains('dashboard')", PATHS, "goto('URLdashboard')", 1.0, id="a tab's path"),
    ],
)
def test_an_address_counts_by_the_path_of_a_page_that_exists(
    worker: BrowserWorker, condition: str, pages: dict[str, str], call: str, reward: float
) -> None:
    task = {
        "id": "custom/address",
        "instruction": "Go there.",
        "config": {"pages": pages, "max_steps": 1, **IN_A_HURRY},
        "evaluation": {"reward_function": condition},
    }
    with worker.session(task) as session:
        seen = observation(session)
        output = act(session, written(call, seen["axtree_txt"]).replace("URL", "http://task.test/"))

    assert (output["reward"], output["finished"]) == (reward, True)


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
