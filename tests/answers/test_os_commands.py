"""Episodes of `os` whose check looks at the box: solutions with one command dropped or changed do not win."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import pytest

from tests.answers.groups import IS_WHOLE, bundled
from tests.answers.os_checks import NEAR_COMMANDS
from tests.envs.bundled import RecordProperty
from tests.envs.complaints import complaints
from tests.envs.os_sandboxes import opening_sandboxes, os_module
from tests.runner.lanes import CERTIFIED

pytestmark = pytest.mark.sandbox

EQUAL: Final[Mapping[tuple[str, str], str]] = {
    ("stop-process", "an option dropped"): "no other program's name contains the name that is asked for",
}
"""Templates and operators whose commands win, with the reason."""
CHANGES: Final = [task for task in bundled("os") if task["reference"]["answer"] is None]
"""The tasks that ask for a change of the box."""
PLAYED: Final = CHANGES if IS_WHOLE else list({task["tags"][0]: task for task in CHANGES}.values())[::2]


def solutions(task: dict[str, Any]) -> Iterator[tuple[str, list[str], float]]:
    """Yield names, commands and rewards: the solution of *task*, and with its last command changed by each operator."""
    *first, last = task["reference"]["commands"]
    yield "as it is", [*first, last], 1.0
    for name, operator in NEAR_COMMANDS.items():
        if (task["tags"][0], name) not in EQUAL:
            yield from ((name, [*first, changed], 0.0) for changed in operator(last))


async def test_a_solution_wins_and_does_not_win_with_a_changed_command(record_property: RecordProperty) -> None:
    episodes, problems = os_module("os_episode"), os_module("os_problem")
    plays = {
        f"{task['id']}: {name}: {commands[-1]}": (problems.Problem.read(task), commands, reward)
        for task in PLAYED
        for name, commands, reward in solutions(task)
    }

    async with opening_sandboxes() as sandboxes:
        worker = episodes.Episodes(sandboxes)

        async def earns(play: tuple[Any, list[str], float]) -> None:
            problem, commands, reward = play
            episode = await worker.open(problem, seed=1)
            try:
                for command in commands:
                    await episode.bash(command)
                assert await episode.judge(None) == reward
            finally:
                await episode.close()

        found = await complaints(earns, plays)

    near_misses = len(plays) - len(PLAYED)
    record_property(
        CERTIFIED, {"group": "os: a script", "tasks": len(PLAYED), "near_misses": near_misses, "worst": 0.0}
    )
    assert found == {}
