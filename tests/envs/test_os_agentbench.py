"""Imports of AgentBench's OS items: the forms of its real data, as the environment reads and plays them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tasks.importing import agentbench
from gateway.tasks.importing.agentbench import read_agentbench
from gateway.tasks.importing.rows import Entry, Imported, InvalidEntry, RowRefused
from tests.envs.os_sandboxes import opening_sandboxes, os_module

pytestmark = pytest.mark.sandbox

episodes = os_module("os_episode")
judges = os_module("os_judge")
problems = os_module("os_problem")
scripting = os_module("os_scripts")

MATCHED = {"description": "Say 7.", "evaluation": {"match": "7"}}


def folder(tmp_path: Path, files: dict[str, Any]) -> Path:
    """Write *files*, which map a path to JSON data or to a text."""
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return tmp_path


def entry(tmp_path: Path, item: object, **scripts: str) -> Entry:
    """Read one item of set 3 with its scripts; the keyword `init__x_sh` stands for `init/x.sh`."""
    files = {f"scripts/3/{name.replace('__', '/').replace('_', '.')}": text for name, text in scripts.items()}
    (found,) = read_agentbench(folder(tmp_path, {"data/3/one.json": [item], **files}))
    return found


def imported(tmp_path: Path, item: object, **scripts: str) -> dict[str, Any]:
    """Import one item and assert that it can be played."""
    found = entry(tmp_path, item, **scripts)
    assert isinstance(found, Imported), found
    problems.Problem.read(found.task)
    return found.task


@pytest.mark.parametrize(
    ("script", "read"),
    [
        pytest.param("echo 1", {"language": "bash", "code": "echo 1"}, id="a text"),
        pytest.param({"code": "echo 1"}, {"language": "bash", "code": "echo 1"}, id="code"),
        pytest.param({"language": "python", "code": "1"}, {"language": "python", "code": "1"}, id="another language"),
        pytest.param({"language": "c", "code": "m"}, {"language": "c", "code": "m"}, id="a compiled language"),
        pytest.param({"file": "init/mk.sh"}, {"language": "bash", "code": "mkdir x\n"}, id="a file"),
    ],
)
@pytest.mark.parametrize("as_list", [True, False])
def test_a_script_has_several_forms_alone_or_in_a_list(
    tmp_path: Path, script: object, read: object, as_list: bool
) -> None:
    item = {**MATCHED, "create": {"local": "default", "init": [script] if as_list else script}}

    task = imported(tmp_path, item, init__mk_sh="mkdir x\n")

    assert task["config"] == {"image": "default", "init": [read]}


@pytest.mark.parametrize(
    ("create", "image"),
    [
        pytest.param({}, "default", id="no image"),
        pytest.param({"local": "packages"}, "packages", id="local"),
        pytest.param({"image": "ubuntu"}, "ubuntu", id="image, as in v0.2"),
    ],
)
def test_the_image_is_named_in_one_of_two_places(tmp_path: Path, create: object, image: str) -> None:
    assert imported(tmp_path, {**MATCHED, "create": create})["config"]["image"] == image


@pytest.mark.parametrize(
    ("init", "is_live"),
    [
        pytest.param("sleep 100 &", True, id="a job"),
        pytest.param("nohup ./x", True, id="nohup"),
        pytest.param("./server&\n", True, id="a job without a space"),
        pytest.param("mkdir a && cd a", False, id="a conjunction"),
        pytest.param("ls >/dev/null 2>&1", False, id="a redirection"),
        pytest.param("ls &> log", False, id="both streams"),
        pytest.param("(sleep 60) &\n", True, id="a subshell"),
        pytest.param("cat <<'E' > x &\na\nE\n", True, id="a job that reads a here-document"),
        pytest.param("tr -dc 'a-z&' < x | head; echo \"b & c\" d\\&e", False, id="quoted"),
        pytest.param("# this & that\ncat > x <<E\nyou & me\nE\necho $((6 & 3))", False, id="not shell code"),
        pytest.param("touch -d \"$(date -d '3 days ago')\" a; sleep 1; touch b", False, id="dates and pauses"),
    ],
)
def test_an_init_script_that_leaves_processes_is_marked(tmp_path: Path, init: str, is_live: bool) -> None:
    task = imported(tmp_path, {**MATCHED, "create": {"init": init}})

    assert task["config"].get("live_init", False) is is_live


def test_only_the_text_of_start_is_used(tmp_path: Path) -> None:
    task = imported(tmp_path, {**MATCHED, "start": {"language": "python", "code": "cd /srv"}})

    assert task["config"]["start"] == "cd /srv"


@pytest.mark.parametrize(
    ("evaluation", "read"),
    [
        pytest.param({"match": "7"}, {"match": {"strip": True, "answer": "7"}}, id="match, a text"),
        pytest.param({"match": {"answer": "7"}}, {"match": {"strip": True, "answer": "7"}}, id="match without strip"),
        pytest.param(
            {"match": {"regex": "^7", "strip": False}},
            {"match": {"strip": False, "regex": "^7"}},
            id="match, a pattern",
        ),
        pytest.param(
            {"match": "7", "check": [None]}, {"match": {"strip": True, "answer": "7"}}, id="match has priority"
        ),
        pytest.param(
            {"check": [None, {"language": "python", "file": "check/integer-match.py"}], "example": "echo 7"},
            {"check": [None, {"matcher": "integer-match"}], "example": {"language": "bash", "code": "echo 7"}},
            id="a known matcher",
        ),
        pytest.param(
            {"check": {"file": "check/own.py", "language": "python"}},
            {"check": [{"language": "python", "code": "exit(0)\n"}]},
            id="a checker of the set, alone",
        ),
        pytest.param({"check": "true"}, {"check": [{"language": "bash", "code": "true"}]}, id="inline code"),
    ],
)
def test_each_form_of_an_evaluation_is_read(tmp_path: Path, evaluation: object, read: dict[str, Any]) -> None:
    item = {"description": "Count.", "evaluation": evaluation, "labels": ["log"]}

    task = imported(tmp_path, item, check__own_py="exit(0)\n")

    assert task["evaluation"] == {"judge": "after", **read}
    assert task["tags"] == ["agentbench", "log"]


def test_an_example_next_to_the_evaluation_is_found(tmp_path: Path) -> None:
    item = {"description": "Count.", "evaluation": {"check": [None, "true"]}, "example": {"code": "echo 7"}}

    assert imported(tmp_path, item)["evaluation"]["example"] == {"language": "bash", "code": "echo 7"}


@pytest.mark.parametrize("labels", [["math"], "math", ["math", 7, None]], ids=["a list", "a text", "with others"])
def test_labels_become_tags(tmp_path: Path, labels: object) -> None:
    assert imported(tmp_path, {**MATCHED, "labels": labels})["tags"] == ["agentbench", "math"]


def test_the_importer_and_the_environment_know_the_same_names() -> None:
    assert tuple(judges.MATCHERS) == agentbench.MATCHERS
    assert scripting.LANGUAGES == agentbench.LANGUAGES


SCRIPTS = st.one_of(
    st.sampled_from(["true", "", None, 7, {"code": 1}, {"file": "no.sh"}, {"language": "perl", "code": "1"}]),
    st.fixed_dictionaries(
        {"code": st.text(max_size=3)}, optional={"language": st.sampled_from(["c", "python", "", 3])}
    ),
)
SOME = SCRIPTS | st.lists(SCRIPTS, max_size=2)
MATCHES = st.sampled_from(["7", "", 7, {}, {"answer": "7"}, {"answer": 7}, {"regex": "^7"}, {"regex": "("}, ["7"]])
ITEMS = st.fixed_dictionaries(
    {"description": st.sampled_from(["Do it.", " ", 7])},
    optional={
        "create": st.fixed_dictionaries({}, optional={"init": SOME, "local": st.sampled_from(["default", "x"])})
        | st.sampled_from([[], [{}], "default", 7]),
        "start": SCRIPTS,
        "example": SCRIPTS,
        "labels": st.sampled_from(["math", ["math"], 7]),
        "evaluation": st.fixed_dictionaries({}, optional={"match": MATCHES, "check": SOME, "example": SCRIPTS}),
    },
)


@given(item=ITEMS)
def test_the_environment_accepts_every_task_that_the_importer_makes(item: dict[str, Any]) -> None:
    try:
        task = agentbench.task_of(item, scripts=(), name="std-001-one-00000")
    except InvalidEntry:
        return

    assert problems.Problem.read(task).instruction == "Do it."


SAMPLES: dict[str, Any] = {
    "data/3/own.json": [
        {
            "description": "A service writes /srv/app.log. How many of its lines mention ERROR?",
            "create": {
                "local": "default",
                "init": [{"file": "init/log.sh"}, {"language": "python", "code": "open('x')"}],
            },
            "start": "cd /srv && export MODE=readonly",
            "evaluation": {
                "check": [None, {"language": "python", "file": "check/integer-match.py"}],
                "example": {"code": "grep -c ERROR /srv/app.log"},
            },
            "labels": ["log"],
        },
        {
            "description": "Make /srv/done, with a line that says yes.",
            "create": {"init": "mkdir -p /srv"},
            "evaluation": {"check": {"language": "python", "file": "check/is-done.py"}},
        },
        {"description": "What does `echo $((6 * 7))` print?", "evaluation": {"match": {"regex": "^42$"}}},
    ],
    "scripts/3/init/log.sh": "printf 'ERROR a\\nINFO b\\nERROR c\\n' > /srv/app.log; touch ~/x",
    "scripts/3/check/is-done.py": "import sys\nsys.exit(open('/srv/done').read().strip() != 'yes')\n",
}


@pytest.fixture
async def worker() -> AsyncIterator[Any]:
    async with opening_sandboxes() as sandboxes:
        yield episodes.Episodes(sandboxes)


@pytest.mark.parametrize(
    ("position", "command", "shown", "answer", "verdict"),
    [
        pytest.param(0, "pwd; grep -c ERROR app.log", "/srv\n2\n", "2", True, id="a count"),
        pytest.param(0, "echo $MODE", "readonly\n", "3", False, id="a wrong count"),
        pytest.param(1, "echo yes > /srv/done", "", None, True, id="a change of the box"),
        pytest.param(1, "echo no > /srv/done", "", None, False, id="another change"),
        pytest.param(2, "echo $((6 * 7))", "42\n", "42", True, id="a pattern"),
        pytest.param(2, "true", "", "420", False, id="an answer that does not fit the pattern"),
    ],
)
async def test_an_imported_item_is_played_to_its_reward(
    tmp_path: Path, worker: Any, position: int, command: str, shown: str, answer: str | None, verdict: bool
) -> None:
    home = tmp_path / "AgentBench" / "data" / "os_interaction"
    entries = list(read_agentbench(folder(home, SAMPLES).parent.parent))
    found = entries[position]
    assert isinstance(found, Imported)

    episode = await worker.open(problems.Problem.read(found.task), seed=1)
    try:
        output = await episode.bash(command)
        judged = await episode.judge(answer)
    finally:
        await episode.close()

    assert output.text == shown
    assert judged is verdict


WHOLE_BOX = {
    "std-004-N37-00000": {
        "description": "Where is the file LANTERN? Answer with its full path.",
        "create": {"local": "default", "init": "mkdir /opt/cellar; echo 7 > /opt/cellar/LANTERN"},
        "evaluation": {
            "check": [None, {"language": "python", "file": "check/string-match.py"}],
            "example": "find / -name LANTERN",
        },
    },
    "std-007-bootstrap-00067": {
        "description": "How many kilobytes do the regular files below /var/log take together? Answer with an integer.",
        "create": {"init": "\n#!/bin/bash\n# Nothing is to be made here, as every Linux has /var/log."},
        "evaluation": {
            "check": [None, {"language": "python", "file": "check/integer-match.py"}],
            "example": "#!/bin/bash\nfind /var/log -type f -exec du -k {} + | awk '{sum += $1} END {print sum}'",
        },
    },
}
"""Items that need more of a box than the files of their init script, by the similar AgentBench items."""


@pytest.mark.parametrize("like", WHOLE_BOX)
async def test_an_item_about_the_whole_box_is_won_by_its_example_and_lost_by_an_empty_answer(
    tmp_path: Path, worker: Any, like: str
) -> None:
    item: dict[str, Any] = WHOLE_BOX[like]
    episode = await worker.open(problems.Problem.read(imported(tmp_path, item)), seed=1)
    try:
        output = await episode.bash(item["evaluation"]["example"])
        answer = output.text.strip()
        verdicts = [bool(await episode.judge(given)) for given in ("", "0", answer)]
    finally:
        await episode.close()

    assert answer
    assert verdicts == [False, False, True]


def test_a_script_outside_the_scripts_folder_is_not_found(tmp_path: Path) -> None:
    found = entry(tmp_path, {**MATCHED, "create": {"init": {"file": "../../data/3/one.json"}}})

    assert isinstance(found, RowRefused)
    assert "no script ../../data/3/one.json in scripts/3" in found.reason
