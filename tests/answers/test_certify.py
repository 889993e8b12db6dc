"""The page that `make certify` writes."""

from __future__ import annotations

from dataclasses import asdict

from tests.answers.certify import page
from tests.answers.groups import Group, Item


def test_the_page_has_a_line_for_each_group_and_each_kind_of_episode() -> None:
    item = Item("one", "What is it?", "31", lambda answer: float(answer == "31"))
    group = Group("numbers", [item], ({"as it is": str},), ({"one more": lambda text: f"{text}1"},), are_samples=True)
    cycle = {"group": "game: grid", "tasks": 8, "constant": "up, down", "mean": 0.25}
    rows = [
        {"certified": {"group": "math: numbers", **asdict(group.play())}},
        {"certified": cycle},
        *({"played": {"environment": "chat", "where": "local process", "won": won, "lost": 2}} for won in (3, 4)),
    ]

    lines = page(rows, commit="abc", date="2030-01-31").splitlines()

    assert "| math: numbers | 1 | 1 | 1 | 0.00 |  |  | 0.00 |" in lines
    assert "| game: grid | 8 |  |  |  | `up, down` | 0.25 |  |" in lines
    assert "| chat | local process | 144 | 7 | 4 |" in lines
    assert any("2030-01-31 at commit `abc`" in line for line in lines)
