"""Solutions of the coding environment's tasks earn their rewards through the whole gateway, on Docker and Redis."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.wire.areal_client import ArealClient
from tests.wire.catalog import STACK, serving
from tests.wire.coding_play import SPECS, Player, all_of, problem_of, prompt, ran, rolled_out, submitted
from tests.wire.coding_repository import FROM_FILES, HALF_MENDED, MENDED, from_bundle, mend
from tests.wire.gateways import Gateway
from tests.wire.sdks import Sdk, names

pytestmark = [pytest.mark.wire, pytest.mark.docker, pytest.mark.redis, pytest.mark.needs("image:coding")]

SAMPLE: dict[str, dict[tuple[int, str], dict[str, Any]]] = {"train": {}, "test": {}}
"""Twelve tasks: the first of each split, level and kind. tests/envs/test_coding_tasks.py judges every task."""
for _split, _specs in SPECS.items():
    for _spec in _specs:
        SAMPLE[_split].setdefault((_spec["difficulty"], _spec["tags"][1]), _spec)
SCRIPTED: dict[str, Any] = {
    "instruction": "Complete the function.",
    "evaluation": {
        "prelude": "from collections.abc import Iterable\n\n\ndef total(numbers: Iterable[int]) -> int:\n",
        "test_scripts": [
            {"public": True, "code": "assert total([0]) == 0"},
            {"code": "assert total([2, 0]) == 2"},
            {"code": "assert total([]) == 0\nassert total([4, 5]) == 9"},
        ],
    },
}
"""A task in the form of HumanEval's and MBPP's tasks."""


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with serving(STACK, "coding") as gateway:
        yield gateway


@pytest.fixture
async def player(gateway: Gateway, sdk: Sdk) -> AsyncIterator[Player]:
    async with sdk.connect(gateway.url, None) as client:
        yield Player(sdk, client)


either = pytest.mark.parametrize("sdk", ["openreward"], indirect=True)


@pytest.mark.parametrize(
    ("split", "sdk"), [pytest.param("train", "openreward"), pytest.param("test", "ors")], indirect=["sdk"]
)
async def test_each_reference_solution_earns_1_and_each_wrong_solution_less(player: Player, split: str) -> None:
    specs = list(SAMPLE[split].values())

    right = await all_of(player.by_index(split, SPECS[split].index(spec), problem_of(spec).reference) for spec in specs)
    wrong = await all_of(player.by_spec(spec, problem_of(spec).wrong_solution) for spec in specs)

    assert len(specs) == 6
    assert [spec["id"] for spec, it in zip(specs, right, strict=True) if (it.reward, it.finished) != (1.0, True)] == []
    assert [spec["id"] for spec, it in zip(specs, wrong, strict=True) if not 0.0 <= it.reward < 1.0] == []
    assert all(it.finished for it in wrong)


# Uses the client that the sample above does not use for this split.
@pytest.mark.parametrize(
    ("split", "kind", "sdk"),
    [pytest.param("train", "function", "ors"), pytest.param("test", "program", "openreward")],
    indirect=["sdk"],
)
async def test_a_solution_earns_the_same_for_a_task_by_index_and_for_the_task_inline(
    player: Player, split: str, kind: str
) -> None:
    spec = SAMPLE[split][1, kind]
    problem, index = problem_of(spec), SPECS[split].index(spec)

    right, right_too, wrong, wrong_too = [
        it.reward
        for it in await all_of(
            job
            for code in (problem.reference, problem.wrong_solution)
            for job in (player.by_index(split, index, code), player.by_spec(spec, code))
        )
    ]

    assert (right, right_too) == (1.0, 1.0)
    assert wrong == wrong_too
    assert 0.0 <= wrong < 1.0


@either
@pytest.mark.parametrize(
    ("code", "worth"),
    [
        pytest.param("    return sum(numbers)", 1.0, id="the function's body"),
        pytest.param("def total(numbers):\n    return sum(numbers)", 1.0, id="the whole function"),
        pytest.param("    return len(numbers)", 0.5, id="right for one of two scripts"),
        pytest.param("    return None", 0.0, id="wrong"),
        pytest.param("import os\nos._exit(0)", 0.0, id="success without an answer"),
        pytest.param("def total(numbers): raise SystemExit(0)", 0.0, id="an exit with success"),
    ],
)
async def test_scripts_of_assertions_judge_a_completion_or_a_whole_function(
    player: Player, code: str, worth: float
) -> None:
    assert (await player.by_spec(SCRIPTED, code)).reward == worth


@either
async def test_the_environment_offers_its_splits_its_tasks_and_its_tools(player: Player) -> None:
    coding = player.client.environment("coding")

    assert sorted(await coding.list_splits()) == ["test", "train"]
    assert [await coding.num_tasks(split) for split in ("train", "test")] == [62, 31]
    assert sorted(names(await coding.list_tools())) == ["execute", "read_file", "run_tests", "submit", "write_file"]


async def test_fenced_code_in_free_text_earns_the_same_rewards_over_areal(gateway: Gateway) -> None:
    client = ArealClient(gateway.url)

    right = await all_of(rolled_out(client, spec["id"], problem_of(spec).reference) for spec in SAMPLE["test"].values())
    wrong = await all_of(  # integers mean the train split
        rolled_out(client, SPECS["train"].index(spec), problem_of(spec).wrong_solution)
        for spec in SAMPLE["train"].values()
    )

    assert right == [1.0] * 6
    assert [reward for reward in wrong if not 0.0 <= reward < 1.0] == []


@either
@pytest.mark.parametrize("start", ["files", "bundle"])
async def test_an_agent_mends_a_repository_in_its_sandbox_and_pytest_judges_it(
    player: Player, start: str, tmp_path: Path
) -> None:
    spec = FROM_FILES if start == "files" else from_bundle(tmp_path)

    async with player.session(spec) as session:
        asked = await prompt(session)
        listed = await ran(session, "find . -name .git -prune -o -type f -print | sort")
        log = await ran(session, "git log --format=%s 2>&1")
        own = await ran(
            session,
            "printf 'from calc.ops import add\\ndef test(): assert add(1, 1) == 2\\n' > test_own.py; "
            "python3 -m pytest -q test_own.py | tail -1",
        )
        await ran(session, mend())
        again = await ran(session, "python3 -m pytest -q test_own.py | tail -1")
        mended = await submitted(session)
    rewards = []
    for steps in ([], [mend(HALF_MENDED)], [mend(MENDED), "rm -rf README.md .git"]):
        async with player.session(spec) as session:
            for step in steps:
                await ran(session, step)
            rewards.append((await submitted(session)).reward)

    assert "test_task" not in asked
    assert listed.split() == ["./README.md", "./calc/__init__.py", "./calc/ops.py"]
    assert log == "Begin" if start == "bundle" else "not a git repository" in log
    assert "1 failed" in own
    assert "1 passed" in again
    assert (mended.reward, mended.finished) == (1.0, True)
    assert rewards == [0.0, 0.0, 1.0]


@either
async def test_a_test_command_can_read_the_git_history_of_the_repository(player: Player, tmp_path: Path) -> None:
    spec = from_bundle(tmp_path)
    asked = "git show HEAD:README.md | grep -q subtracts && git diff --name-only HEAD | grep -qx calc/ops.py"
    spec["evaluation"] = {**spec["evaluation"], "command": f"{asked} && {spec['evaluation']['command']}"}

    async with player.session(spec) as session:
        await ran(session, mend())
        result = await submitted(session)

    assert result.reward == 1.0
