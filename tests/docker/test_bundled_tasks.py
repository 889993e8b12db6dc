"""The tasks that come with the environments, in their images: each is won by its reference and lost by a wrong play.

The tests play every tenth task of each kind and difficulty; with BUNDLED_TASKS=all they play each. tests/envs plays all
of them in local processes. test_browser_tasks.py plays all browser tasks, which exist only in an image. The end of a
run prints how many tasks were won and lost, and its records keep the numbers.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import docker
import pytest

from tests.envs.bundled import PLAYS, RecordProperty, complaint, note_plays, tasks_of
from tests.envs.container_worker import container_worker

pytestmark = [pytest.mark.docker]
pytest_plugins = ["tests.contract.backend_fixtures"]

IS_WHOLE = os.environ.get("BUNDLED_TASKS") == "all"
EVERY = 1 if IS_WHOLE else 10
AT_ONCE = os.cpu_count() or 1


def sample(environment: str) -> list[dict[str, Any]]:
    ordered = sorted(tasks_of(environment), key=lambda task: (task["tags"], task.get("difficulty", 0), task["id"]))
    return ordered[::EVERY]


@pytest.mark.parametrize(
    "environment", [pytest.param(name, marks=pytest.mark.needs(f"image:{name}")) for name in PLAYS]
)
def test_a_task_is_won_by_its_reference_and_lost_by_a_wrong_play(
    docker_engine: docker.APIClient, environment: str, record_property: RecordProperty
) -> None:
    tasks, (winning, losing) = sample(environment), PLAYS[environment]
    with container_worker(docker_engine, environment) as worker, ThreadPoolExecutor(AT_ONCE) as pool:

        def complaints(task: dict[str, Any]) -> list[str]:
            found = []
            for play, wins in ((winning, True), (losing, False)):
                with worker.session(task) as session:
                    found.append(complaint(session, task, play, wins=wins))
            return found

        found = dict(zip((task["id"] for task in tasks), pool.map(complaints, tasks), strict=True))

    won, lost = (sum(not said[way] for said in found.values()) for way in (0, 1))
    note_plays(record_property, environment, "image", won=won, lost=lost)
    assert {name: said for name, said in found.items() if any(said)} == {}
    assert len(found) >= len(tasks_of(environment)) // EVERY
