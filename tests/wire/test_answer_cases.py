"""Answers that were judged wrongly, each with the reward that is right, played over ORS through a gateway."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deadlines import HANG_S
from tests.wire.catalog import EMBEDDED, PROJECT, on_stack, serving
from tests.wire.gateways import Gateway

pytestmark = pytest.mark.wire

ENVIRONMENTS = ("math", "coding", "os", "game", "chat", "reasoning_gym")
CASES: list[dict[str, Any]] = [
    json.loads(line) for line in Path(__file__).with_name("answer_cases.jsonl").read_text("utf-8").splitlines()
]
"""Cases with the keys id, environment, task, do (texts or tool calls) and want (reward, reward_max or reward_min)."""


@pytest.fixture(scope="module", params=[pytest.param(EMBEDDED, marks=pytest.mark.sandbox), on_stack(*ENVIRONMENTS)])
def gateway(request: pytest.FixtureRequest) -> Iterator[Gateway]:
    with serving(request.param, *ENVIRONMENTS) as gateway:
        yield gateway


class Episode:
    """An episode over ORS. It ends with its ``with`` block."""

    def __init__(self, gateway: Gateway, environment: str, task: dict[str, Any]) -> None:
        headers = {"X-Session-ID": uuid.uuid4().hex, "Accept": "application/json"}
        self._http = httpx.Client(base_url=gateway.url, headers=headers, timeout=HANG_S, trust_env=False)
        self._environment = environment
        self._task = task

    def __enter__(self) -> Episode:
        wish = {"env_name": self._environment, "task_spec": self._task}
        try:
            self._http.post("/create", json=wish).raise_for_status()
            self._http.get(f"/{self._environment}/prompt").raise_for_status()
        except BaseException:  # else a later test would fail because of the open socket
            self._http.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._http.post("/delete", json={})
        self._http.close()

    def call(self, action: dict[str, Any]) -> dict[str, Any]:
        """Send a text or a tool call; return the answer's output, empty if it has none."""
        body = action if "text" in action else {"name": action["tool"], "input": action["input"]}
        answer = self._http.post(f"/{self._environment}/call", json=body)
        return answer.json().get("output") or {}


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_an_answer_has_the_right_reward(gateway: Gateway, case: dict[str, Any]) -> None:
    with Episode(gateway, case["environment"], case["task"]) as episode:
        reward = [episode.call(action) for action in case["do"]][-1].get("reward")

    ((bound, value),) = case["want"].items()
    assert reward is not None
    assert {"reward": reward == value, "reward_max": reward <= value, "reward_min": reward >= value}[bound]


NO_TASKS = {
    "math without a question": ("math", {"evaluation": {"family": "gcd", "answer": "3"}}, "has no instruction"),
    "math of no family": (
        "math",
        {"instruction": "x", "evaluation": {"family": "sudoku", "answer": "3"}},
        "a family out of",
    ),
    "no game": ("game", {"instruction": "", "config": {"game": "Wordle-v0"}}, "no game 'Wordle-v0'; there are grid"),
    "a parameter": ("game", {"instruction": "", "config": {"game": "minesweeper", "parameters": {"w": 1}}}, "'w'"),
    "chat": ("chat", {"instruction": "x", "evaluation": {"reward_function": "nosuch()"}}, "nosuch"),
    "an excluded family": ("reasoning_gym", {"family": "countdown"}, "parses the answer with sympy"),
    "a parameter of a family": (
        "reasoning_gym",
        {"family": "gcd", "seed": 7, "parameters": {"min": 1}},
        "parameters.min: gcd has no such parameter; known, with defaults: min_numbers=2",
    ),
    "coding": ("coding", {"instruction": "x", "evaluation": {}}, "evaluation"),
    "os": (
        "os",
        {"instruction": "x", "config": {"max_turns": 0}, "evaluation": {"match": "1"}},
        "config.max_turns must be an integer",
    ),
}


@pytest.mark.parametrize(("environment", "task", "reason"), NO_TASKS.values(), ids=NO_TASKS)
def test_a_task_on_which_no_episode_can_begin_is_refused_with_the_reason(
    gateway: Gateway, environment: str, task: dict[str, Any], reason: str
) -> None:
    before = gateway.log.count("author_fault")
    with httpx.Client(base_url=gateway.url, timeout=HANG_S, trust_env=False) as http:
        headers = {"X-Session-ID": uuid.uuid4().hex}
        created = http.post("/create", json={"env_name": environment, "task_spec": task}, headers=headers)
        reset = http.post(f"/openenv/{environment}/reset", json={"task": task})

    for answer in (created, reset):
        assert 400 <= answer.status_code < 500, (answer.request.url, answer.text)
        assert reason in answer.json()["detail"], answer.request.url
    assert created.status_code == 400
    assert gateway.log.count("author_fault") == before, "it is no fault of the environment's author"


def test_a_mine_ends_the_game_without_a_win(gateway: Gateway) -> None:
    config = {
        "game": "minesweeper",
        "seed": 3,
        "max_turns": 60,
        "parameters": {"rows": 5, "cols": 5, "num_mines": 5},
    }
    task = {"id": "case", "instruction": "", "config": config, "evaluation": {"reward_function": "won"}}
    cells = [(0, 0), *((row, column) for row in (4, 3, 2, 1, 0) for column in (1, 4, 3, 2, 0))]
    with Episode(gateway, "game", task) as episode:
        for row, column in cells:
            output = episode.call({"tool": "act", "input": {"message": f"[{row} {column}]"}})
            if "hit a mine" in json.dumps(output) or output.get("finished"):
                break

    assert "hit a mine" in json.dumps(output)
    assert (output["finished"], output["reward"]) == (True, 0.0)


@pytest.mark.parametrize("program", ["cat", "sort", "python3 -"])
def test_a_command_that_reads_its_input_gets_the_end_of_input(gateway: Gateway, program: str) -> None:
    task = {"id": "case", "instruction": "x", "config": {"max_turns": 9}, "evaluation": {"match": "1"}}
    with Episode(gateway, "os", task) as episode:
        shown = [
            episode.call({"tool": "bash_action", "input": {"script": script}})["blocks"][0]["text"]
            for script in (f"{program} > /root/notes", "wc -c < /root/notes; cat /root/notes")
        ]

    assert "the command was stopped" not in shown[0]
    assert re.search(r"^0$", shown[1], re.MULTILINE)
    assert "printf" not in shown[1]


def test_no_bundled_question_has_a_bare_negative_base_with_an_even_exponent() -> None:
    lines = [
        line
        for split in ("train", "test")
        for line in (PROJECT / "tasks" / "math" / f"{split}.jsonl").read_text("utf-8").splitlines()
    ]
    questions = [json.loads(line)["instruction"] for line in lines]
    bases = [found for question in questions for found in re.findall(r"Compute (\(?)-[\d.]+\)?\^-?(\d+)", question)]

    assert len(bases) > 30
    assert [base for base in bases if not base[0] and int(base[1]) % 2 == 0] == []
