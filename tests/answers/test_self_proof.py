"""The suite finds the mistakes that it was made for: each is put back, and must be found."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.answers.browser import browser_groups
from tests.answers.coding import coding_groups
from tests.answers.groups import game_tasks, math_groups, module
from tests.answers.os_checks import os_groups
from tests.answers.test_games import mines_reward

Judge = Callable[[str, str, Mapping[str, Any]], float]


def share_of_the_text(answer: str, reference: str, _: Mapping[str, Any]) -> float:
    """Judge as reasoning-gym does by default: by the share of the right text."""
    if answer == reference:
        return 1.0
    return len(reference) / len(answer) if reference in answer else 0.01


def one_unit_off(answer: str, reference: str, _: Mapping[str, Any]) -> float:
    """Judge with a tolerance of one unit of the last place."""
    places = len(reference.partition(".")[2])
    try:
        return float(abs(float(answer) - float(reference)) <= 1.01 * 10**-places)
    except ValueError:
        return 0.0


def first_number(answer: str, reference: str, _: Mapping[str, Any]) -> float:
    """Judge the first number, whatever its sign and its unit."""
    found, wanted = re.search(r"\d+", answer), re.search(r"\d+", reference)
    return float(found is not None and wanted is not None and int(found[0]) == int(wanted[0]))


@pytest.mark.parametrize(
    ("family", "judge", "operator"),
    [
        pytest.param("chain_sum", share_of_the_text, "a digit more in front", id="a share of the text"),
        pytest.param("decimal_arithmetic", one_unit_off, "the last place plus one", id="one unit off"),
        pytest.param("time_intervals", first_number, "another unit", id="units and signs"),
    ],
)
def test_a_wrong_judge_of_a_family_is_found(
    monkeypatch: pytest.MonkeyPatch, family: str, judge: Judge, operator: str
) -> None:
    group = math_groups()[family]
    before = group.findings()

    monkeypatch.setitem(module("math", "math_scorers").JUDGES, family, judge)

    assert before == []
    assert [finding for finding in group.findings() if operator in finding] != []


def test_an_empty_or_missing_answer_that_is_an_answer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    judges = module("os", "os_judge")

    async def judged(self: Any, answer: str | None) -> bool:
        match = self._evaluation.match
        if match is not None:
            return bool(match(str(answer)))
        expected = await self._content("/srv/expected")
        return bool(judges.MATCHERS[self._evaluation.checks[-1].name](str(answer), expected))

    monkeypatch.setattr(judges.Judge, "judge", judged)
    groups = os_groups()

    assert any(": empty: earns 1.00" in finding for finding in groups["in of samples"].findings())
    assert any(": none: earns 1.00" in finding for finding in groups["string-match of samples"].findings())


def test_a_wrong_block_that_is_the_solution_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_fence(text: str, _: Any) -> str:
        found = list(re.finditer(r"^```\w*\n(.*?)^```", text, re.M | re.S))
        return found[-1][1] if found else text

    whole = coding_groups()["yes or no"]
    group = replace(whole, items=whole.items[:1], mutations={}, are_samples=True)
    before = group.findings()

    monkeypatch.setattr(module("coding", "coding_blocks"), "solution_in", last_fence)

    assert before == []
    assert {finding.split(": ")[1] for finding in group.findings()} >= {"tildes", "in a list", "an example after"}


def test_an_address_that_counts_by_any_of_its_parts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    group = browser_groups()["check_url_contains"]
    before = group.findings()

    condition = module("browser", "browser_rewards").REWARDS["check_url_contains"]
    monkeypatch.setattr(condition, "function", lambda window, part: float(part in window.page.url))

    assert before == []
    assert {finding.split(": ")[2] for finding in group.findings()} >= {"as a fragment", "as a query", "a letter more"}


def test_a_mine_that_does_not_end_the_game_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    textarena = module("game", "game_textarena")

    def play(self: Any, move: str) -> str:
        with textarena.DICE.of(self._generator):
            self._game.step(f"[{move}]")
        return ""

    monkeypatch.setattr(textarena.TextArenaGame, "play", play)

    assert max(map(mines_reward, game_tasks()["minesweeper"])) == 1.0
