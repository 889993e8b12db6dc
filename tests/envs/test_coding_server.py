"""The coding environment's server as a trainer uses it: a separate process, over HTTP."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from scripts.coding_problems import SPLITS
from tests.deadlines import HANG_S
from tests.envs.coding_world import read, workspace
from tests.envs.os_sandboxes import require_sandboxes
from tests.envs.test_coding_judge import RIGHT, TREE
from tests.envs.workers import Session, Worker, eventually

pytestmark = pytest.mark.sandbox

TRAIN = read("train")
PROBLEM = SPLITS["train"][0]
"""`count_vowels`, the first task of the split."""


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    asyncio.run(require_sandboxes())
    worker = Worker("coding", settings={"SANDBOX_MEMORY_MIB": "256"})
    try:
        yield worker
    finally:
        worker.stop()


@pytest.fixture
def episode(worker: Worker) -> Iterator[Session]:
    episode = worker.open(split="train", index=0)
    yield episode
    episode.close()


def test_the_prompt_shows_the_examples_and_no_hidden_case(episode: Session) -> None:
    cases = TRAIN[0]["evaluation"]["test_cases"]
    public = [case for case in cases if case.get("public")]
    hidden = [case for case in cases if not case.get("public") and len(str(case["arguments"][0])) > 4]

    text = episode.prompt()

    assert all(f"count_vowels({case['arguments'][0]!r}) == {case['output']}" in text for case in public)
    assert hidden
    assert [case for case in hidden if case["arguments"][0] in text] == []


def test_an_episode_with_all_tools_is_judged(episode: Session) -> None:
    missing = episode.text("run_tests")
    wrote = episode.text("write_file", path="solution.py", content=PROBLEM.wrong_solution)
    half = episode.text("run_tests")
    moved = episode.tool("execute", command="cat solution.py | wc -l; pwd; false")
    episode.text("write_file", path="solution.py", content=PROBLEM.reference)
    there = episode.text("read_file", path="/root/task/solution.py")
    all_public = episode.text("run_tests")
    submitted = episode.tool("submit")

    assert missing.startswith("There is no solution")
    assert wrote.endswith("to /root/task/solution.py.")
    assert half.startswith("Passed 1 of 2 public tests.")
    assert "your answer: 2" in half
    assert "expected: 3" in half
    assert moved["blocks"][0]["text"] == "2\n/root/task\n[exit status 1]"
    assert there == PROBLEM.reference
    assert all_public.startswith("Passed 2 of 2 public tests.")
    assert (submitted["reward"], submitted["finished"]) == (1.0, True)
    assert submitted["metadata"] == {"passed": 9, "total": 9}


@pytest.mark.parametrize(
    "action",
    [
        pytest.param({"name": "submit", "input": {"code": PROBLEM.wrong_solution}}, id="as code"),
        pytest.param({"text": f"So:\n```python\n{PROBLEM.wrong_solution}```\nThat is it."}, id="as free text"),
        pytest.param({"action": {"code": PROBLEM.wrong_solution}}, id="as a dict"),
    ],
)
def test_code_is_submitted_in_any_spelling_and_a_partly_right_solution_is_worth_a_part(
    episode: Session, action: dict[str, Any]
) -> None:
    submitted = episode.call(**action)["output"]

    assert submitted["finished"] is True
    assert 0.0 < submitted["reward"] < 1.0
    assert re.fullmatch(r"Passed \d of 9 hidden tests\.", submitted["blocks"][0]["text"])


def test_only_submit_gives_a_reward(episode: Session) -> None:
    outputs = [
        episode.tool("execute", command="echo 1"),
        episode.tool("write_file", path="x", content="1"),
        episode.tool("read_file", path="x"),
        episode.tool("run_tests"),
    ]

    assert [(output["reward"], output["finished"]) for output in outputs] == [(None, False)] * 4


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        pytest.param("read_file", {"path": "nothing"}, "cannot be read", id="a missing file"),
        pytest.param("read_file", {"path": "/root"}, "cannot be read", id="a directory"),
        pytest.param("read_file", {"path": "a\0b"}, "zero byte", id="a zero byte"),
        pytest.param(
            "write_file", {"path": "/proc/x", "content": ""}, "was not written", id="a place that cannot be written"
        ),
        pytest.param(
            "write_file", {"path": "x", "content": "a" * 1_048_577}, "Not written", id="a file that is too large"
        ),
        pytest.param("submit", {"code": "a" * 262_145}, "Not submitted", id="a solution that is too long"),
        pytest.param("submit", {}, "There is no solution", id="no solution"),
    ],
)
def test_an_impossible_action_is_answered_with_the_reason_and_ends_nothing(
    episode: Session, name: str, arguments: dict[str, Any], answer: str
) -> None:
    output = episode.tool(name, **arguments)

    assert answer in output["blocks"][0]["text"]
    assert (output["reward"], output["finished"]) == (None, False)


def test_the_agent_finds_neither_tasks_nor_server_in_its_sandbox(episode: Session) -> None:
    hunt = (
        "grep -rl 'mississ\\|Queueing' /root /tmp /etc /var /srv /opt 2>/dev/null; "
        "find /srv /work -mindepth 1 2>/dev/null; "
        "env | grep ENVSERVER_; cat /proc/[0-9]*/environ | tr '\\0' '\\n' | grep '^ENVSERVER_'; "
        "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep 'server[.]py'; echo end"
    )

    assert episode.text("execute", command=hunt) == "end"


def test_two_sessions_of_one_task_share_no_file(worker: Worker) -> None:
    first, second = worker.open(split="train", index=1), worker.open(split="train", index=1)
    first.text("write_file", path="/root/note", content="mine")

    there = second.text("read_file", path="/root/note")
    first.close()
    second.close()

    assert "cannot be read" in there


def test_a_workspace_task_is_worked_on_and_judged_by_its_command(worker: Worker) -> None:
    episode = worker.open(TREE)
    prompt = episode.prompt()
    refused = episode.tool("submit", code="x = 1")
    listed = episode.text("execute", command="find . -type f | sort")
    episode.text("execute", command=RIGHT)
    submitted = episode.tool("submit")
    episode.close()

    assert "Files: lib/notes.txt, solution.py" in prompt
    assert "TestAdd" not in prompt
    assert refused["finished"] is False
    assert listed == "./lib/notes.txt\n./solution.py"
    assert (submitted["reward"], submitted["finished"]) == (1.0, True)


def test_the_files_of_a_workspace_have_the_same_date_in_every_worker(worker: Worker) -> None:
    episode = worker.open(TREE)
    dates = episode.text("execute", command="find . -printf '%T@ %A@\\n' | sort -u")
    episode.close()

    (modified, accessed) = dates.split()
    assert (float(modified), float(accessed)) == (workspace.MOMENT, workspace.MOMENT)


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({"instruction": "x"}, id="no evaluation"),
        pytest.param({"test_cases": [{"input": "", "output": ""}]}, id="no instruction"),
        pytest.param({**TREE, "config": {"execute_timeout_s": 0}}, id="no time for a command"),
        pytest.param({**TREE, "config": {"files": {"/x": ""}}}, id="a file outside the workspace"),
    ],
)
def test_a_task_that_cannot_be_judged_opens_no_session_that_can_act(worker: Worker, spec: dict[str, Any]) -> None:
    episode, created = worker.create(spec)

    answers = [created, episode.get("/coding/prompt")]

    assert max(answer.status_code for answer in answers) >= 400


def test_no_sandbox_is_left_after_the_sessions_are_deleted(worker: Worker) -> None:
    episode = worker.open(split="test", index=0)
    episode.text("execute", command="sleep 300 &")
    while_open = worker.supervisors()
    episode.tool("submit", code="def acronym(text): return ''")
    episode.close()

    assert len(while_open) == 1
    assert worker.supervisors() == []


def test_a_session_opens_on_the_layer_of_an_earlier_session(worker: Worker) -> None:
    task = {**TREE, "config": {"files": {"notes.txt": "kept", "solution.py": ""}}}
    first = worker.open(task)
    first.text("execute", command="rm notes.txt")
    first.close()
    layers = worker.kept_layers()

    second = worker.open(task)
    there = second.text("execute", command="cat notes.txt")
    second.close()

    assert there == "kept"
    assert worker.kept_layers() == layers


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        pytest.param("b() { b | b & }; b; sleep 60", "pids", id="processes"),
        pytest.param(
            "for i in 1 2 3; do python3 -c 'import time; x = b\"x\" * (150 * 2**20); time.sleep(60)' & done; wait",
            "memory",
            id="memory",
        ),
    ],
)
def test_a_sandbox_whose_limit_is_broken_is_replaced_and_the_agent_goes_on(
    worker: Worker, command: str, reason: str
) -> None:
    episode = worker.open(split="train", index=0)
    episode.text("write_file", path="/root/note", content="mine")

    told = episode.text("execute", command=command)
    there = episode.text("read_file", path="/root/note")
    submitted = episode.tool("submit", code=PROBLEM.reference)
    episode.close()

    assert f"({reason})" in told
    assert "cannot be read" in there
    assert (submitted["reward"], submitted["finished"]) == (1.0, True)


def test_a_command_that_cannot_start_is_answered_with_the_reason_and_ends_nothing(worker: Worker) -> None:
    episode = worker.open(split="train", index=0)
    episode.text("execute", command="rm /usr/bin/bash")

    told = episode.text("execute", command="echo here")
    submitted = episode.tool("submit", code=PROBLEM.reference)
    episode.close()

    assert told.startswith("The command was not run: ")
    assert submitted["reward"] == 1.0


@pytest.mark.parametrize(
    "action",
    [
        pytest.param({"name": "execute", "input": {"command": "sleep 3600"}}, id="in a command"),
        pytest.param(
            {"name": "submit", "input": {"code": "import time\ntime.sleep(3600)"}}, id="while the solution is judged"
        ),
    ],
)
def test_a_sandbox_that_is_lost_fails_the_session_and_gives_no_reward(worker: Worker, action: dict[str, Any]) -> None:
    episode = worker.open(split="train", index=0)
    answers: list[httpx.Response] = []
    calling = threading.Thread(target=lambda: answers.append(episode.post("/coding/call", action)))

    calling.start()
    eventually(lambda: worker.runs("sleep" if action["name"] == "execute" else "python3"))
    for supervisor in worker.supervisors():
        os.kill(supervisor, signal.SIGKILL)
    calling.join(timeout=HANG_S)
    later = episode.post("/coding/call", {"text": PROBLEM.reference})
    episode.close()
    after = worker.open(split="train", index=0)
    submitted = after.tool("submit", code=PROBLEM.reference)
    after.close()

    answer = answers[0].json()
    assert (answer["ok"], answer["reason"]) == (False, "session_failed")
    assert "sandbox" in answer["error"]
    assert later.status_code == 500
    assert submitted["reward"] == 1.0
