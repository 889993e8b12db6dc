"""The reasoning_gym environment as a worker: families by name, seed and parameters, judged in limited children."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections.abc import Iterator
from os import getpid, kill
from pathlib import Path
from typing import Any

import pytest

from tests.envs.workers import Worker, eventually
from tests.sandbox.outside import descendants

ROOT = Path(__file__).resolve().parents[2]
for folder in ("env_images/base", "env_images/reasoning_gym"):
    if str(ROOT / folder) not in sys.path:
        sys.path.append(str(ROOT / folder))

from puzzle_forks import Forks, ForksLost, JobFailed  # noqa: E402 - found through the lines above
from reasoning_families import EXCLUDED, MODULES  # noqa: E402

SUM: dict[str, Any] = {"family": "chain_sum", "seed": 7, "parameters": {"min_terms": 2, "max_terms": 2}}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker("reasoning_gym", box=Path("/none"))
    try:
        yield worker
    finally:
        worker.stop()


def sum_of(prompt: str) -> str:
    """Return the answer to a question of `chain_sum`."""
    found = re.search(r"(-?\d+) ([+-]) (-?\d+) =", prompt)
    assert found is not None, prompt
    return str(int(found[1]) + int(found[3]) * (1 if found[2] == "+" else -1))


def refused(worker: Worker, task: dict[str, Any]) -> str:
    _, created = worker.create(task)
    assert created.status_code == 400, (created.status_code, created.text)
    return str(created.json()["detail"])


# Playing


def test_a_family_a_seed_and_parameters_make_one_puzzle_that_the_familys_scorer_judges(worker: Worker) -> None:
    first, again = worker.open(SUM), worker.open(SUM)
    prompt = first.prompt()

    assert again.prompt() == prompt
    won, lost = first.tool("submit", answer=sum_of(prompt)), again.tool("submit", answer="certainly not this")
    assert (won["reward"], won["finished"], won["blocks"][0]["text"]) == (1.0, True, "Correct.")
    assert won["metadata"]["family"] == "chain_sum"
    assert (lost["reward"], lost["finished"], lost["blocks"][0]["text"]) == (0.0, True, "Incorrect.")


def test_a_task_line_without_a_seed_takes_the_sessions(worker: Worker) -> None:
    line = {"id": "chain_sum~1", "config": {"family": "chain_sum", "parameters": SUM["parameters"]}}
    prompts = {seed: worker.open(line, seed=seed).prompt() for seed in (7, 8)}

    assert prompts[7] != prompts[8]
    assert prompts[7] == worker.open(SUM).prompt()


def test_a_text_is_read_like_an_answer(worker: Worker) -> None:
    session = worker.open(SUM)
    right = sum_of(session.prompt())

    assert session.say(f"<think>Hm.</think> It is <answer>{right}</answer>")["output"]["reward"] == 1.0


def test_a_text_with_more_than_the_right_answer_earns_nothing(worker: Worker) -> None:
    session = worker.open(SUM)
    right = sum_of(session.prompt())

    ended = session.tool("submit", answer=f"{right} or not")

    assert (ended["reward"], ended["blocks"][0]["text"]) == (0.0, "Incorrect.")


def test_an_answer_in_part_right_earns_what_the_library_gives(worker: Worker) -> None:
    session = worker.open({"family": "spell_backward", "seed": 7})
    found = re.search(r"nus\): (\w+)", session.prompt())
    assert found is not None
    right = found[1][::-1]

    ended = session.tool("submit", answer=f"{right[:-1]}_")

    assert ended["reward"] == pytest.approx(1 - 1 / len(right))
    assert ended["blocks"][0]["text"].startswith("Partly correct")


# Refusals


@pytest.mark.parametrize(
    ("task", "says"),
    [
        pytest.param({}, "family: None is not a text", id="no family"),
        pytest.param({"family": "chain_sums"}, "there is no 'chain_sums'; chain_sum", id="a misspelt family"),
        pytest.param({"family": "n_queens"}, "evaluates the answer as Python code", id="an excluded family"),
        pytest.param({**SUM, "seed": -1}, "seed: -1 is not a whole number", id="a negative seed"),
        pytest.param({**SUM, "seed": True}, "seed: True is not a whole number", id="a seed that is no number"),
        pytest.param({**SUM, "parameters": [1]}, "parameters: [1] is not an object", id="parameters in a list"),
        pytest.param(
            {**SUM, "parameters": {"terms": 2}},
            "parameters.terms: chain_sum has no such parameter; known",
            id="unknown",
        ),
        pytest.param({**SUM, "parameters": {"min_terms": "2"}}, 'parameters.min_terms: "2" is not of', id="a text"),
        pytest.param({**SUM, "parameters": {"min_terms": 9}}, 'chain_sum refuses {"min_terms": 9}', id="9 to 6 terms"),
        pytest.param({**SUM, "parameters": {"size": 9}}, "parameters.size: chain_sum has no such", id="the size"),
        pytest.param(
            {"family": "spell_backward", "parameters": {"data_file": "../../etc/passwd"}}, "data_file", id="a path"
        ),
        pytest.param({**SUM, "config": {"level": 3}}, "config.level: there is no such key", id="an unknown key"),
        pytest.param({**SUM, "evaluation": {"family": "gcd"}}, "use the environment math", id="an evaluation"),
        pytest.param(
            {"family": "modulo_grid", "parameters": {"size_x": 30_000, "size_y": 30_000}},
            "choose others",
            id="a size beyond the limits",
        ),
    ],
)
def test_a_task_that_names_no_puzzle_is_refused_at_its_create(worker: Worker, task: dict[str, Any], says: str) -> None:
    assert says in refused(worker, task)


# Hostile answers and lost processes

HOSTILE = [
    "",
    " \n",
    "nan",
    "-inf",
    "1e999999",
    "9**9**9",
    "__import__('os').system('touch pwned')",
    "[" * 20_000,
    "9" * 90_000,
    "9" * 1_000_000,
    '{"a": ' * 500,
    "\ud83d\0",
]


@pytest.mark.parametrize("family", ["bitwise_arithmetic", "jugs", "pool_matrix", "prime_factorization", "sokoban"])
def test_hostile_answers_earn_nothing_and_disturb_no_other(worker: Worker, family: str) -> None:
    for answer in HOSTILE:
        session = worker.open({"family": family, "seed": 3})
        ended = session.tool("submit", answer=answer.encode("utf-8", "replace").decode())
        assert (ended["reward"], ended["finished"]) == (0.0, True), answer[:40]
        session.close()


def children_of(worker: Worker) -> list[int]:
    return descendants(worker.process.pid)


def test_a_killed_fork_server_is_started_again(worker: Worker) -> None:
    session = worker.open(SUM)
    right = sum_of(session.prompt())
    for pid in children_of(worker):
        kill(pid, signal.SIGKILL)

    eventually(lambda: not children_of(worker) or len(children_of(worker)) == 1)
    ended = session.tool("submit", answer=right)

    assert ended["reward"] == 1.0


def test_jobs_leave_no_child(worker: Worker) -> None:
    for _ in range(3):
        worker.open(SUM).tool("submit", answer="1")

    eventually(lambda: len(children_of(worker)) == 1)


LONG = {"do": "make", "family": "modulo_grid", "seed": 1, "parameters": {"size_x": 3_000, "size_y": 3_000}}
"""A puzzle that takes longer than any limit of these tests."""


async def test_a_cancelled_a_late_and_an_endless_job_leave_no_child() -> None:
    before, forks = set(descendants(getpid())), Forks()
    await asyncio.to_thread(forks.start)
    (server,) = set(descendants(getpid())) - before
    try:
        cancelled = asyncio.create_task(forks.run(LONG, cpu_s=60, within_s=60))
        await asyncio.to_thread(eventually, lambda: len(descendants(server)) == 1)
        cancelled.cancel()
        await asyncio.to_thread(eventually, lambda: not descendants(server))
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        with pytest.raises(ForksLost, match="no answer within 1 s: the machine is too busy"):
            await forks.run(LONG, cpu_s=60, within_s=1)
        with pytest.raises(JobFailed, match="more than 1 s of CPU time"):
            await forks.run(LONG, cpu_s=1, within_s=60)
        await asyncio.to_thread(eventually, lambda: not descendants(server))
    finally:
        forks.stop()


# The listed tasks


def lines(split: str) -> list[dict[str, Any]]:
    text = (ROOT / "tasks" / "reasoning_gym" / f"{split}.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(("split", "prefix", "seeds"), [("train", "", 1000), ("test", "test/", 100)])
def test_each_offered_family_has_a_line(split: str, prefix: str, seeds: int) -> None:
    found = {line["id"]: line for line in lines(split)}

    assert list(found) == [prefix + family for family in sorted(MODULES)]
    assert {line["seeds"] for line in found.values()} == {seeds}
    assert all(line["config"]["family"] == line["tags"][0] == id.removeprefix("test/") for id, line in found.items())


def test_every_family_is_offered_or_excluded_with_a_reason_on_the_page() -> None:
    page = (ROOT / "env_images" / "reasoning_gym" / "README.md").read_text("utf-8")

    assert MODULES.keys().isdisjoint(EXCLUDED)
    assert len(MODULES) + len(EXCLUDED) == 106
    assert [family for family in (*MODULES, *EXCLUDED) if f"`{family}`" not in page] == []
