"""Generic tasks in the coding environment: files in the configuration, and a script whose exit status decides."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.envs.coding_world import tasks
from tests.envs.os_sandboxes import require_sandboxes
from tests.envs.workers import Worker

pytestmark = pytest.mark.sandbox

TEST = """
import unittest
from adding import add


class TestAdd(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(2, 3), 5)


if __name__ == "__main__":
    unittest.main()
"""
ADD: dict[str, Any] = {
    "id": "custom/add",
    "env_type": "coding",
    "instruction": "Make the test pass.",
    "config": {"files": {"adding.py": "def add(a, b): ...\n", "task/check.py": TEST, "test_adding.py": TEST}},
    "evaluation": {"script": "python3 ./test_adding.py"},
}
RIGHT = "echo 'def add(a, b): return a + b' > adding.py"


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    asyncio.run(require_sandboxes())
    worker = Worker("coding")
    try:
        yield worker
    finally:
        worker.stop()


def played(worker: Worker, task: dict[str, Any], *commands: str) -> dict[str, Any]:
    """Run *commands* in a session of *task*, submit, and return the result."""
    session = worker.open(task)
    for command in commands:
        assert "[exit status" not in session.text("execute", command=command)
    ended = session.tool("submit")
    session.close()
    return ended


@pytest.mark.parametrize(
    ("commands", "reward"),
    [
        pytest.param([RIGHT, "python3 test_adding.py"], 1.0, id="solved"),
        pytest.param([], 0.0, id="unchanged"),
        pytest.param(["echo pass > test_adding.py"], 0.0, id="the test replaced"),
        pytest.param(["rm test_adding.py; mkdir test_adding.py"], 0.0, id="the test made a folder"),
        pytest.param(["ln -sf /dev/null test_adding.py"], 0.0, id="the test made a link"),
        pytest.param([RIGHT, "rm -r task"], 1.0, id="an unrelated file of the task removed"),
        pytest.param(["echo exit 0 > /root/.bashrc; ln -sf /bin/true /usr/bin/python3"], 0.0, id="programs replaced"),
    ],
)
def test_the_scripts_status_is_the_reward(worker: Worker, commands: list[str], reward: float) -> None:
    ended = played(worker, ADD, *commands)

    assert (ended["reward"], ended["finished"]) == (reward, True)
    assert ended["metadata"]["in_process"] is True


MAKE = """
command -v nosuchtest > /dev/null && exit
echo "make: nosuchtest: $1" >&2
echo "make: *** [Makefile:2: all] Error 127" >&2
exit 2
"""
"""A script that reports a missing program as make does, from a makefile or from make's own rules."""
SHELLED = """
command -v nosuchtest > /dev/null && exit
echo "/bin/sh: 1: nosuchtest: not found" >&2
echo "make[1]: *** [Makefile:2: all] Error 127" >&2
exit 2
"""
STARTS = """
import subprocess

subprocess.run(["nosuchtest", "adding.py"], check=True)
"""


@pytest.mark.parametrize(
    ("script", "files"),
    [
        pytest.param("nosuchtest -q test_adding.py", {}, id="of the script"),
        pytest.param("cd . && timeout 9 nosuchtest", {}, id="that another program starts"),
        pytest.param("sh hidden.sh", {"hidden.sh": "set -e\nnosuchtest\n"}, id="of a hidden file"),
        pytest.param("nosuchtest -q > /dev/null 2>&1", {}, id="whose error output is discarded"),
        pytest.param("sh hidden.sh 2>&1", {"hidden.sh": "nosuchtest\n"}, id="reported on the standard output"),
        pytest.param("nosuchtest 2>&1 | tail -n 1", {}, id="of a pipe that succeeds, where tests are counted"),
        pytest.param("sh tools/make.sh 'Command not found'", {}, id="that make does not find"),
        pytest.param("sh tools/make.sh 'No such file or directory' 2>&1", {}, id="that make does not find, as a file"),
        pytest.param("sh tools/shelled.sh", {}, id="that make starts by a shell"),
        pytest.param("python3 hidden.py", {"hidden.py": STARTS}, id="that Python starts"),
    ],
)
def test_a_program_that_the_box_does_not_have_fails_the_session_and_gives_no_reward(
    worker: Worker, script: str, files: dict[str, str]
) -> None:
    given = {**ADD["config"]["files"], "tools/make.sh": MAKE, "tools/shelled.sh": SHELLED}
    evaluation = {"script": script, "files": files, "passed": 1}
    session = worker.open({**ADD, "config": {"files": given}, "evaluation": evaluation})
    session.text("execute", command=RIGHT)

    ended = session.call(name="submit", input={})
    later = session.post("/coding/call", {"name": "submit", "input": {}})
    session.close()

    assert (ended["ok"], ended["reason"]) == (False, "author_fault")
    assert "needs nosuchtest" in ended["error"]
    assert later.status_code == 500


LIE = "import os, sys\nsys.stderr.write('bash: line 1: python3: command not found\\n')\nos._exit(127)\n"
SHELL = """
import subprocess

said = subprocess.run(["sh", "./shell", "nosuchtest"], capture_output=True, text=True).stderr
assert said == "nosuchtest: not found\\n", f"{said!r} is not nosuchtest: not found"
"""
FOLDER = """
import subprocess

subprocess.run(["true"], cwd="built", check=True)
"""


@pytest.mark.parametrize(
    ("script", "files", "command"),
    [
        pytest.param(ADD["evaluation"]["script"], {}, f"printf %b {LIE!r} > adding.py", id="by a lie"),
        pytest.param("python3 ./test_adding.py", {}, "echo 'import os; os._exit(127)' > adding.py", id="by its status"),
        pytest.param("./built > /dev/null 2>&1", {}, "true", id="by a program that the task requires"),
        pytest.param("python3 hidden.py", {"hidden.py": FOLDER}, "true", id="by a folder that the task requires"),
        pytest.param("python3 hidden.py", {"hidden.py": SHELL}, "true", id="by a message that the task requires"),
    ],
)
def test_a_solution_that_says_that_a_program_is_missing_is_wrong(
    worker: Worker, script: str, files: dict[str, str], command: str
) -> None:
    ended = played(worker, {**ADD, "evaluation": {"script": script, "files": files}}, command)

    assert (ended["reward"], ended["finished"]) == (0.0, True)


def test_a_file_that_the_script_names_is_restored_whatever_its_name(worker: Worker) -> None:
    task = {**ADD, "evaluation": {"script": "PYTHONPATH=. python3 task/check.py"}}

    assert played(worker, task, "echo pass > task/check.py")["reward"] == 0.0
    assert played(worker, task, RIGHT)["reward"] == 1.0


def test_the_workspace_contains_only_the_tasks_files(worker: Worker) -> None:
    worker_task = {**ADD, "config": {"files": {"only.txt": "x"}}, "evaluation": {"script": "test ! -e left"}}
    first = worker.open(ADD)
    first.text("execute", command="touch left /root/left /tmp/left")
    second = worker.open(worker_task)

    seen = second.text("execute", command="find . -type f; ls /tmp /root")
    solved = second.tool("submit")
    first.close()
    second.close()

    assert seen.split() == ["./only.txt", "/root:", "task", "/tmp:"]
    assert solved["reward"] == 1.0


def test_hidden_test_files_of_the_task_are_invisible_and_counted(worker: Worker) -> None:
    evaluation = {
        "script": "python3 -P -m unittest discover -s hidden -t .",
        "passed": 1,
        "files": {"hidden/__init__.py": "", "hidden/test_more.py": TEST},
    }
    task = {**ADD, "evaluation": evaluation}
    session = worker.open(task)
    seen = session.text("execute", command="ls")
    session.close()

    assert "hidden" not in seen
    assert played(worker, task, RIGHT)["reward"] == 1.0
    assert played(worker, task, "echo 'raise SystemExit(0)' > adding.py")["reward"] == 0.0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"config": {"files": ["a"]}}, "config.files must map"),
        ({"config": {"files": {"../x": ""}}}, "config.files must map .*: not so '../x'"),
        ({"config": {"files": {"a/../../x": ""}}}, "not so 'a/../../x'"),
        ({"config": {"files": {"/etc/passwd": ""}}}, "not so '/etc/passwd'"),
        ({"config": {"files": {"a\0b": ""}}}, "not so"),
        ({"config": {"files": {"a": 5}}}, "not so 'a'"),
        ({"evaluation": {"script": ["pytest"]}}, "evaluation.script must be a text"),
        ({"evaluation": {"script": " "}}, "evaluation.script must be a text"),
        ({"evaluation": {"script": "true", "command": "true"}}, "not both"),
        ({"evaluation": {"script": "true", "time_limit_seconds": 1e9}}, "time_limit_seconds"),
        ({"evaluation": {"script": "true", "files": {"/x": ""}}}, "evaluation.files must map"),
        ({"evaluation": {"reward_function": "exact_match('x')"}}, "must have test_cases, .* or script"),
    ],
)
def test_a_task_that_cannot_be_judged_is_refused_with_the_place(change: dict[str, Any], says: str) -> None:
    task = {**ADD, **change}

    with pytest.raises(tasks.InvalidTask, match=says):
        tasks.read_evaluation(task)


def test_a_malformed_task_opens_no_session(worker: Worker) -> None:
    session, created = worker.create({**ADD, "config": {"files": {"../x": ""}}})

    answer = created if created.status_code != 200 else session.post("/coding/call", {"text": "x"})

    assert answer.status_code >= 400
    assert "config.files must map" in answer.text
