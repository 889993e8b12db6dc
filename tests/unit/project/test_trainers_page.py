"""docs/trainers.md shows exactly the recorded results of ``make trainers``."""

from __future__ import annotations

import json

from tests.trainers.page import PAGE, RESULTS, parts, table
from tests.trainers.runs import RUNS


def test_the_page_shows_exactly_the_recorded_results() -> None:
    _, shown, _ = parts(PAGE.read_text())

    assert shown == table(json.loads(RESULTS.read_text()))


def test_the_recorded_results_are_those_of_all_runs() -> None:
    recorded = json.loads(RESULTS.read_text())["runs"]

    assert [(one["name"], one["trainer"], one["protocol"], one["environments"]) for one in recorded] == [
        (run.name, run.trainer, run.protocol, run.environments) for run in RUNS
    ]
    assert all(one["opened"] == one["closed"] + one["expired"] for one in recorded)
