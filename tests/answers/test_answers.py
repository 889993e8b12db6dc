"""Rewards of bundled answers: right ones in any notation, and generated wrong ones near each reference."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from tests.answers.browser import browser_groups
from tests.answers.coding import coding_groups
from tests.answers.generic import generic_groups
from tests.answers.groups import Group, chat_groups, math_groups, module
from tests.answers.os_checks import os_groups
from tests.envs.bundled import RecordProperty
from tests.runner.lanes import CERTIFIED

GROUPS = {
    f"{environment}: {name}": group
    for environment, groups in (
        ("math", math_groups()),
        ("os", os_groups()),
        ("chat", chat_groups()),
        ("coding", coding_groups()),
        ("browser", browser_groups()),
        ("generic", generic_groups()),
    )
    for name, group in groups.items()
}


@pytest.mark.parametrize(("name", "group"), [pytest.param(*named, id=named[0]) for named in sorted(GROUPS.items())])
def test_a_group_pays_for_right_answers_only(name: str, group: Group, record_property: RecordProperty) -> None:
    result = group.play()

    record_property(CERTIFIED, {"group": name, **asdict(result)})
    assert result.findings == []


def test_each_generic_reward_function_has_a_group() -> None:
    functions = {name for name, entry in module("base", "envserver.generic").REWARDS.items() if is_generic(entry)}

    assert {name.removeprefix("generic: ") for name in GROUPS if name.startswith("generic: ")} == functions


def is_generic(entry: Any) -> bool:
    return bool(entry.function.__module__ == "envserver.generic.texts")
