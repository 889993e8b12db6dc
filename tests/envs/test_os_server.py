"""The os environment as a worker: a real server process over the wire, with real boxes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deadlines import COMMAND_S, HANG_S
from tests.envs.os_sandboxes import os_module, require_sandboxes
from tests.envs.workers import ROOT, Worker, eventually
from tests.sandbox.control_groups import enclose, memory_group

pytestmark = pytest.mark.sandbox

TASKS = ROOT / "tasks" / "os"

COUNT: dict[str, Any] = {
    "id": "count",
    "instruction": "How many entries are in /srv?",
    "config": {"init": ["touch /srv/a /srv/b"], "max_turns": 3},
    "evaluation": {"check": [None, {"matcher": "integer-match"}], "example": "ls /srv | wc -l"},
    "reference": {"commands": ["ls /srv | wc -l"], "answer": "2"},
}
CHANGE: dict[str, Any] = {
    "id": "change",
    "instruction": "Write hello into /srv/note.",
    "evaluation": {"check": [{"read": "/srv/note"}, {"equals": "hello"}]},
}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    asyncio.run(require_sandboxes())
    # A low limit, so that a few processes together reach it quickly.
    worker = Worker("os", settings={"SANDBOX_MEMORY_MIB": "256"})
    try:
        yield worker
    finally:
        worker.stop()


def bash(script: str, *, thought: str = "I look.") -> str:
    return f"Think: {thought}\nAct: bash\n```bash\n{script}\n```<|im_end|>"


def test_an_episode_in_text_from_the_first_command_to_the_reward(worker: Worker) -> None:
    session = worker.open(COUNT)

    seen = session.say(bash("ls /srv"))["output"]
    ended = session.say("Think: Two.\nAct: answer(2)<|im_end|>")["output"]
    session.close()

    assert seen["blocks"][0]["text"] == "The output of the OS:\na  b"
    assert (seen["reward"], seen["finished"]) == (None, False)
    assert seen["metadata"] == {
        "parsed_action": {"thought": "I look.", "action": "bash", "content": "ls /srv"},
        "status": "running",
        "num_turns": 1,
    }
    assert (ended["reward"], ended["finished"]) == (1.0, True)
    assert ended["metadata"] == {
        "parsed_action": {"thought": "Two.", "action": "answer", "content": "2"},
        "status": "completed",
        "answer": "2",
        "success": True,
        "num_turns": 2,
    }


def test_an_episode_with_tools(worker: Worker) -> None:
    session = worker.open(CHANGE)

    seen = session.tool("bash_action", script="echo hello > /srv/note")
    ended = session.tool("finish_action", thought="It is written.")
    session.close()

    assert seen["blocks"][0]["text"] == "The output of the OS is empty."
    assert ended["reward"] == 1.0
    assert ended["metadata"]["parsed_action"] == {"thought": "It is written.", "action": "finish", "content": ""}
    assert (ended["metadata"]["answer"], ended["metadata"]["status"]) == ("", "completed")


@pytest.mark.parametrize("answer", ["3", "", "two"])
def test_a_wrong_answer_is_a_completed_episode_without_a_reward(worker: Worker, answer: str) -> None:
    session = worker.open(COUNT)

    ended = session.tool("answer_action", answer=answer)
    session.close()

    assert (ended["reward"], ended["finished"]) == (0.0, True)
    assert (ended["metadata"]["success"], ended["metadata"]["status"]) == (False, "completed")
    assert ended["metadata"]["answer"] == answer


def test_a_text_without_an_action_is_answered_with_the_form_of_actions_and_costs_a_turn(worker: Worker) -> None:
    session = worker.open(COUNT)

    refused = session.say("I will list the files.")
    ended = session.say("Act: answer(2)")["output"]
    session.close()

    assert refused["ok"] is False
    assert "Act: bash" in refused["error"]
    assert (ended["reward"], ended["metadata"]["num_turns"]) == (1.0, 2)


def test_the_last_turn_still_accepts_an_answer(worker: Worker) -> None:
    session = worker.open(COUNT)

    session.tool("bash_action", script="ls")
    session.tool("bash_action", script="ls")
    ended = session.tool("answer_action", answer="2")
    session.close()

    assert (ended["reward"], ended["metadata"]["num_turns"]) == (1.0, 3)


def test_a_command_in_the_last_turn_ends_the_episode(worker: Worker) -> None:
    session = worker.open(COUNT)

    results = [session.tool("bash_action", script="echo x") for _ in range(3)]
    session.close()

    assert [result["finished"] for result in results] == [False, False, True]
    assert results[-1]["reward"] == 0.0
    assert results[-1]["metadata"]["status"] == "task limit reached"
    assert results[-1]["metadata"]["success"] is False


def test_unusable_texts_spend_turns_until_the_limit(worker: Worker) -> None:
    session = worker.open(COUNT)

    for _ in range(3):
        session.say("hm")
    ended = session.say("Act: answer(2)")["output"]
    session.close()

    assert (ended["reward"], ended["metadata"]["status"]) == (0.0, "task limit reached")


def test_changing_the_box_does_not_change_the_expected_value(worker: Worker) -> None:
    session = worker.open(COUNT)

    session.tool("bash_action", script="rm /srv/*; touch /srv/only; ls() { echo a; }")
    ended = session.tool("answer_action", answer="1")
    session.close()

    assert ended["reward"] == 0.0


def test_sessions_of_one_task_start_alike_and_share_nothing(worker: Worker) -> None:
    task = {**COUNT, "config": {"init": ["echo $RANDOM$RANDOM > /srv/chance"]}}
    sessions = [worker.create(task, seed=11)[0] for _ in range(4)]

    seen = {session.tool("bash_action", script="cat /srv/chance")["blocks"][0]["text"] for session in sessions}
    sessions[0].tool("bash_action", script="echo mine > /srv/mine")
    others = {session.tool("bash_action", script="ls /srv")["blocks"][0]["text"] for session in sessions[1:]}
    prompts = {session.prompt() for session in sessions}
    for session in sessions:
        session.close()

    assert len(seen) == 1
    assert others == {"The output of the OS:\nchance"}
    assert len(prompts) == 1


@pytest.mark.parametrize(
    ("task", "says"),
    [
        pytest.param({**COUNT, "config": {"init": ["echo broken >&2; exit 3"]}}, "broken", id="an init that fails"),
        pytest.param({**COUNT, "instruction": " "}, "no instruction", id="no instruction"),
        pytest.param({**COUNT, "config": {"max_turns": 0}}, "max_turns", id="no turns"),
        pytest.param({**COUNT, "evaluation": {}}, "match or check", id="no evaluation"),
        pytest.param({**COUNT, "evaluation": {"check": [None], "example": "exit 9"}}, "example", id="a broken example"),
    ],
)
def test_an_unplayable_task_opens_no_session(worker: Worker, task: dict[str, Any], says: str) -> None:
    session, created = worker.create(task)

    # A setup that fails late fails the session's first request instead of /create.
    answer = created if created.status_code != 200 else session.post("/os/call", {"text": "Act: finish"})

    assert says in answer.text
    assert '"reward"' not in answer.text


def test_the_start_is_typed_into_the_shell_of_the_session(worker: Worker) -> None:
    session = worker.open({**CHANGE, "config": {"start": "cd /var && export var=3.14"}})

    seen = session.tool("bash_action", script="pwd; echo $var")
    session.close()

    assert seen["blocks"][0]["text"] == "The output of the OS:\n/var\n3.14"


def test_the_agents_view_does_not_contain_the_reference(worker: Worker) -> None:
    task = json.loads((TASKS / "train.jsonl").read_text("utf-8").split("\n")[0])
    marked = {**task, "reference": {"commands": ["unmistakable-solution"], "answer": "unmistakable-answer"}}
    session = worker.open(marked)

    seen = [
        session.prompt(),
        # Joined in the shell, because the command itself is a file of the box.
        json.dumps(
            session.tool("bash_action", script="env; w=unmistak; grep -rls ${w}able- /root /srv /tmp /run /etc")
        ),
        json.dumps(session.tool("answer_action", answer="")),
    ]
    session.close()

    assert [text for text in seen if "unmistakable" in text] == []
    assert "The output of the OS:" in seen[1]


def test_deleting_a_session_during_a_command_ends_the_command(worker: Worker) -> None:
    session = worker.open(COUNT)
    seconds = str(uuid.uuid4().int % 10**9 + 10**6)
    answers: list[httpx.Response] = []
    call = {"name": "bash_action", "input": {"script": f"sleep {seconds}"}}
    calling = threading.Thread(target=lambda: answers.append(session.post("/os/call", call)))

    calling.start()
    eventually(lambda: runs(f"sleep\0{seconds}"))
    session.close()
    calling.join(timeout=HANG_S)
    eventually(lambda: not runs(f"sleep\0{seconds}"))

    assert (answers[0].json().get("output") or {}).get("reward") is None  # reported as cut short, or not at all
    assert session.post("/os/call", {"text": "Act: answer(2)"}).status_code == 404


def runs(command: str) -> bool:
    """Return True if a process of this machine has the command line *command*, with words separated by NUL."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_text("utf-8", "replace").rstrip("\0") == command:
                return True
    return False


def test_the_prompt_ends_with_the_problem_and_names_the_turns(worker: Worker) -> None:
    session = worker.open(COUNT)

    prompt = session.prompt()
    session.close()

    assert prompt.endswith("Now your problem: How many entries are in /srv?")
    assert "You have 3 turns" in prompt
    assert "Act: answer(220)" in prompt


def test_the_tools_have_one_required_text_each(worker: Worker) -> None:
    tools = {tool["name"]: tool["input_schema"] for tool in worker.http.get("/os/tools").json()["tools"]}

    assert {name: schema["required"] for name, schema in tools.items()} == {
        "bash_action": ["script"],
        "answer_action": ["answer"],
        "finish_action": ["thought"],
    }


def test_both_splits_are_served(worker: Worker) -> None:
    counts = {
        split: worker.http.post("/os/num_tasks", json={"split": split}).json()["num_tasks"]
        for split in ("train", "test")
    }

    assert counts == {split: (TASKS / f"{split}.jsonl").read_text().count("\n") for split in ("train", "test")}


# They hold their memory until they are killed: with one that ends, `wait` would return before the watchdog's check.
HOG = "python3 -c 'import time; x = [bytearray(b\"x\" * 2**20) for _ in range(150)]; time.sleep(60)' & "


def test_a_box_in_which_the_judge_cannot_run_anything_is_not_solved(worker: Worker) -> None:
    session = worker.open({**CHANGE, "evaluation": {"check": ["true"]}})
    session.tool("bash_action", script="rm /usr/bin/bash")
    ended = session.tool("finish_action", thought="There is no shell.")
    session.close()

    assert (ended["reward"], ended["finished"]) == (0.0, True)
    assert ended["metadata"]["status"] == "completed"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        pytest.param(f"{HOG * 3} wait", "memory", id="memory"),
        pytest.param("b() { b | b & }; b; sleep 60", "pids", id="processes"),
        pytest.param("echo x > /proc/1/fd/0; sleep 60", "init", id="its first process"),
    ],
)
def test_a_session_whose_commands_end_its_box_ends_without_a_reward(worker: Worker, script: str, reason: str) -> None:
    session = worker.open(COUNT)

    ended = session.tool("bash_action", script=script)
    session.close()
    after = worker.open(COUNT)
    answered = after.tool("answer_action", answer="2")
    after.close()

    assert (ended["reward"], ended["finished"]) == (0.0, True)
    assert (ended["metadata"]["status"], ended["metadata"]["success"]) == ("agent invalid action", False)
    assert reason in ended["blocks"][0]["text"]
    assert answered["reward"] == 1.0


def test_a_kill_for_lack_of_memory_during_the_checks_is_no_verdict() -> None:
    asyncio.run(require_sandboxes())
    hungry = {**CHANGE, "evaluation": {"check": ["python3 -c \"b = bytearray(b'x') * (200 << 20)\"; true"]}}
    with memory_group(160 * 2**20) as group:
        worker = Worker("os")
        try:
            enclose(group, worker.process.pid)
            session = worker.open(hungry)
            answer = session.post("/os/call", {"name": "finish_action", "input": {"thought": ""}}).json()
            summary = session.post("/delete", {}).json()["summary"]
        finally:
            worker.stop()

    assert is_failed(answer, says="the worker was out of memory during the checks")
    assert (summary["reward"], summary["finished"]) == (0, False)


def is_failed(answer: dict[str, Any], *, reason: str = "session_failed", says: str) -> bool:
    return answer["ok"] is False and answer["reason"] == reason and says in answer["error"]


@pytest.mark.parametrize(
    "action",
    [
        pytest.param({"name": "bash_action", "input": {"script": "sleep 60"}}, id="in a command"),
        pytest.param({"name": "answer_action", "input": {"answer": "2"}}, id="while the answer is judged"),
    ],
)
def test_a_box_that_is_lost_fails_the_session_and_gives_no_reward(worker: Worker, action: dict[str, Any]) -> None:
    task = {**COUNT, "evaluation": {"check": ["sleep 60"]}}
    session = worker.open(task)
    answers: list[httpx.Response] = []
    calling = threading.Thread(target=lambda: answers.append(session.post("/os/call", action)))

    calling.start()
    eventually(lambda: worker.runs("sleep"))
    for supervisor in worker.supervisors():
        os.kill(supervisor, signal.SIGKILL)
    calling.join(timeout=HANG_S)
    later = session.post("/os/call", {"text": "Act: answer(2)"})
    summary = session.post("/delete", {}).json()["summary"]
    after = worker.open(COUNT)
    answered = after.tool("answer_action", answer="2")
    after.close()

    assert is_failed(answers[0].json(), says="the box is lost")
    assert later.status_code == 500
    assert "SessionLost" in later.json()["detail"]
    assert (summary["reward"], summary["finished"]) == (0, False)
    assert answered["reward"] == 1.0


def test_a_judge_that_does_not_end_gives_the_reward_0(worker: Worker) -> None:
    late = {"id": "late", "instruction": "x", "evaluation": {"check": ["exec sleep 3600"]}}
    session = worker.open(late)

    ended = session.tool("finish_action", thought="")
    session.close()

    assert (ended["reward"], ended["finished"]) == (0.0, True)


def test_a_machine_without_bubblewrap_is_reported_and_tried_again() -> None:
    asyncio.run(require_sandboxes())
    if os.geteuid() != 0:
        pytest.skip("to hide a program needs root")
    program = shutil.which("bwrap") or ""
    worker = Worker(
        "os", prefix=["unshare", "--mount", "sh", "-c", 'mount --bind /dev/null "$0" && exec "$@"', program]
    )
    try:
        refused = [worker.create(COUNT)[1] for _ in range(2)]
        subprocess.run(
            ["nsenter", f"--target={worker.process.pid}", "--mount", "umount", program], check=True, timeout=COMMAND_S
        )
        mended, created = worker.create(COUNT)
        answered = mended.tool("answer_action", answer="2")
    finally:
        log = worker.stop()

    assert [answer.status_code for answer in refused] == [500, 500]
    assert all("bubblewrap is missing: install" in answer.json()["detail"] for answer in refused)
    assert created.status_code == 200
    assert answered["reward"] == 1.0
    assert log.count("sandboxes_refused") == 1


def test_an_image_without_a_box_is_reported() -> None:
    worker = Worker("os", box=Path("/nowhere/box"), settings={"SANDBOX_HOST": "0"})
    try:
        _, refused = worker.create(COUNT)
        health = worker.http.get("/health")
    finally:
        worker.stop()

    assert refused.status_code == 500
    assert "the box /nowhere/box is not a directory" in refused.json()["detail"]
    assert health.status_code == 200


def test_the_default_number_of_turns_equals_the_number_in_the_manifest() -> None:
    folder = ROOT / "env_images" / "os"
    (offer,) = [path for name in ("environment.toml", "environment.toml.draft") if (path := folder / name).exists()]

    told = tomllib.loads(offer.read_text("utf-8"))["areal"]["max_turns"]

    assert told == os_module("os_problem").DEFAULT_TURNS
