"""An agent that calls as NeMo Gym's Simple Agent plays the math environment, on processes and on Docker."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually
from tests.wire.catalog import EMBEDDED, PROJECT, on_stack, serving
from tests.wire.gateways import Gateway
from tests.wire.nemo_client import Call, Failed, rollout, row_of

pytestmark = pytest.mark.wire

TRAIN = [json.loads(line) for line in (PROJECT / "tasks" / "math" / "train.jsonl").read_text("utf-8").splitlines()]


@pytest.fixture(scope="module", params=[EMBEDDED, on_stack("math")])
def gateway(request: pytest.FixtureRequest) -> Iterator[Gateway]:
    with serving(request.param, "math") as gateway:
        yield gateway


def right(index: int) -> str:
    return str(TRAIN[index]["evaluation"]["entry"]["answer"])


def submit(answer: str) -> Call:
    return Call("submit", {"answer": answer})


async def test_answers_by_tool_and_by_text_earn_what_they_are_worth(gateway: Gateway) -> None:
    url, row = f"{gateway.url}/nemo/math", row_of("math")

    by_tool = await rollout(url, row, [submit(right(0))], "I have submitted the answer.")
    by_text = await rollout(url, row, text=right(0))
    wrong = [await rollout(url, row, [submit("no number")], right(0)), await rollout(url, row, text="no number")]
    silent = await rollout(url, row)

    assert (by_tool.reward, by_text.reward) == (1.0, 1.0)
    assert json.loads(by_tool.seen[0])["finished"] is True
    assert [one.reward < 1.0 for one in (*wrong, silent)] == [True] * 3

    async def nothing_is_open() -> None:
        assert await gateway.sessions() == []

    await eventually(nothing_is_open)


async def test_a_mistake_in_a_call_is_a_text_for_the_model_and_the_episode_goes_on(gateway: Gateway) -> None:
    calls = [Call("submit", {"nothing": 1}), Call("no_such_tool"), submit(right(0)), submit(right(0))]

    played = await rollout(f"{gateway.url}/nemo/math", row_of("math"), calls)

    assert played.reward == 1.0
    wrong, unknown, _, late = (json.loads(text).get("detail", "") for text in played.seen)
    assert "answer" in wrong
    assert "no_such_tool" in unknown
    assert late


async def test_the_exported_rows_play_a_group_on_their_own_tasks(gateway: Gateway, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "gateway.cli", "tasks", "export", "nemo-gym", "math", "-s", "train"]
    done = await asyncio.to_thread(
        subprocess.run,
        [*command, "--url", gateway.url, "-o", str(file)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    url = f"{gateway.url}/nemo/math"

    group = await asyncio.gather(*(rollout(url, rows[index], text=right(index)) for index in range(8)))

    assert [one.reward for one in group] == [1.0] * 8
    assert len(rows) == len(TRAIN)
    assert [tool["name"] for tool in rows[0]["responses_create_params"]["tools"]] == ["submit"]
    assert "evaluation" not in file.read_text("utf-8")


async def test_a_row_of_no_task_fails_the_rollout(gateway: Gateway) -> None:
    with pytest.raises(Failed) as failed:
        await rollout(f"{gateway.url}/nemo/math", row_of("math", index=10**6), text=right(0))

    assert failed.value.status == 404
    assert str(10**6) in failed.value.detail
