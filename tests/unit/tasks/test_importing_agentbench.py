"""Import of AgentBench's items: their places in a checkout, their ids and parts, and refusals of invalid items."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.core.environment import SplitType
from gateway.core.errors import ConfigError
from gateway.tasks.importing import agentbench
from gateway.tasks.importing.agentbench import item_files, read_agentbench
from gateway.tasks.importing.rows import Entry, Imported, RowRefused

MATCHED = {"description": "Say 7.", "evaluation": {"match": "7"}}
SETS: dict[str, Any] = {
    "data/10/late.json": [MATCHED],
    "data/7/bootstrap.json": [MATCHED, MATCHED],
    "data/1/stock.json": [MATCHED],
    "data/1/basic.json": MATCHED,
    "data/1/readme.md": "no items",
    "data/dev.json": [MATCHED, MATCHED],
    "data/train.jsonl": f"{json.dumps(MATCHED)}\n\n{json.dumps(MATCHED)}\n",
}


def folder(home: Path, files: dict[str, Any]) -> Path:
    """Write *files*, a mapping of paths to texts or JSON values, and return the folder."""
    for name, content in files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return home


def one(home: Path, item: object, **files: Any) -> Entry:
    (entry,) = read_agentbench(folder(home, {"data/3/one.json": [item], **files}))
    return entry


def tasks(entries: Any) -> list[dict[str, Any]]:
    found = list(entries)
    assert all(isinstance(entry, Imported) for entry in found), found
    return [entry.task for entry in found]


def test_ids_are_the_ids_of_v0_2_and_a_set_with_one_file_has_aliases(tmp_path: Path) -> None:
    found = tasks(read_agentbench(folder(tmp_path, SETS)))

    assert [(task["id"], task.get("aliases")) for task in found] == [
        ("std-001-basic-00000", None),
        ("std-001-stock-00000", None),
        ("std-007-bootstrap-00000", None),
        ("std-007-bootstrap-00001", None),
        ("std-010-late-00000", None),
        ("dev-001-dev-00000", ["dev-001-00000"]),
        ("dev-001-dev-00001", ["dev-001-00001"]),
        ("train-0223-train-00000", ["train-0223-00000"]),
        ("train-0223-train-00001", ["train-0223-00001"]),
    ]


@pytest.mark.parametrize(("part", "count"), [(None, 9), (SplitType.TEST, 5), (SplitType.VALIDATION, 2)])
def test_only_items_of_the_requested_part_are_imported(tmp_path: Path, part: SplitType | None, count: int) -> None:
    assert len(tasks(read_agentbench(folder(tmp_path, SETS), part=part))) == count


def test_files_of_other_parts_are_not_read(tmp_path: Path) -> None:
    home = folder(tmp_path, {**SETS, "data/train.jsonl": "broken", "data/dev.json": "broken"})

    assert len(tasks(read_agentbench(home, part=SplitType.TEST))) == 5


def test_the_training_set_is_found_at_its_place_in_the_upstream_repository(tmp_path: Path) -> None:
    item = {"description": "Say 7.", "evaluation": MATCHED["evaluation"], "create": {"init": {"file": "init/a.sh"}}}
    files = {"train_0317/training.json": [MATCHED, item], "scripts/7/init/a.sh": "mkdir a"}
    folder(tmp_path / "AgentBench/data/os_interaction", {**files, "data/7/bootstrap.json": [MATCHED]})

    found = tasks(read_agentbench(tmp_path / "AgentBench", part=SplitType.TRAIN))

    assert [(task["id"], task["aliases"]) for task in found] == [
        ("train-0223-training-00000", ["train-0223-00000"]),
        ("train-0223-training-00001", ["train-0223-00001"]),
    ]
    assert found[1]["config"]["init"] == [{"language": "bash", "code": "mkdir a"}]


@pytest.mark.parametrize("start", [".", "AgentBench", "AgentBench/data", "AgentBench/data/os_interaction"])
def test_items_are_found_from_the_checkout_and_its_folders(tmp_path: Path, start: str) -> None:
    # Another benchmark in the same checkout must not be taken for items.
    folder(tmp_path / "AgentBench" / "data", {"dbbench/standard.jsonl": "{}", "data.json": "{}"})
    folder(tmp_path / "AgentBench/data/os_interaction", SETS)

    if start == ".":
        with pytest.raises(ConfigError, match="no items; DIR must be data/os_interaction of AgentBench"):
            item_files(tmp_path)
    else:
        assert len(item_files(tmp_path / start)) == 6


def test_the_error_names_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none: no such folder"):
        list(read_agentbench(tmp_path / "none"))


def test_the_error_names_a_file_that_is_not_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"one\.json:1: not JSON"):
        list(read_agentbench(folder(tmp_path, {"data/3/one.json": "["})))


def test_a_line_that_is_not_json_keeps_its_position(tmp_path: Path) -> None:
    text = f"{json.dumps(MATCHED)}\nbroken\n{json.dumps(MATCHED)}\n"
    home = folder(tmp_path, {"data/train-a.jsonl": text, "data/train-b.json": [MATCHED]})

    first, broken, last, other = read_agentbench(home)

    assert isinstance(first, Imported)
    assert isinstance(last, Imported)
    assert isinstance(other, Imported)
    assert (first.task["id"], last.task["id"]) == ("train-0223-train-a-00000", "train-0223-train-a-00002")
    assert "aliases" not in other.task  # in a set of two files, a position alone does not identify an item
    assert isinstance(broken, RowRefused)
    assert broken.where == f"{home}/data/train-a.jsonl:2 (train-0223-train-a-00001)"


@pytest.mark.parametrize(
    ("item", "says"),
    [
        pytest.param({"evaluation": {"match": "7"}}, "description", id="no description"),
        pytest.param({"description": " ", "evaluation": {"match": "7"}}, "description", id="an empty description"),
        pytest.param({"description": "x"}, "evaluation", id="no evaluation"),
        pytest.param({"description": "x", "evaluation": {}}, "match or check", id="an empty evaluation"),
        pytest.param({"description": "x", "evaluation": {"check": []}}, "match or check", id="an empty list of steps"),
        pytest.param(
            {"description": "x", "evaluation": {"check": [None]}},
            "null means the script example, which is missing",
            id="no example",
        ),
        pytest.param({"description": "x", "evaluation": {"match": 7}}, "match: must be a text", id="a number to match"),
        pytest.param({"description": "x", "evaluation": {"match": {"regex": "("}}}, "regex: ", id="an invalid pattern"),
        pytest.param(
            {"description": "x", "evaluation": {"match": {"regex": "x" * 1_001}}}, "at most 1000", id="a long pattern"
        ),
        pytest.param(
            {**MATCHED, "create": {"init": {"file": "no.sh"}}}, "no script no.sh in scripts/3", id="no script"
        ),
        pytest.param({**MATCHED, "create": {"init": {"file": "a\0b"}}}, "no script", id="a name with a zero byte"),
        pytest.param({**MATCHED, "create": {"init": 7}}, "create.init: a script is", id="a number instead of a script"),
        pytest.param({**MATCHED, "create": "default"}, "create: must be an object", id="a text for create"),
        pytest.param({**MATCHED, "start": {"language": "perl", "code": "1"}}, "start: no language 'perl'", id="perl"),
        pytest.param({**MATCHED, "create": {"local": "arch"}}, "no image 'arch'; there are", id="an unknown image"),
        pytest.param({**MATCHED, "create": {"local": ["default"]}}, "no image", id="a list of images"),
        pytest.param("text", "must be an object, not str", id="a text instead of an object"),
    ],
)
def test_an_unusable_item_is_refused_with_its_place_and_reason(tmp_path: Path, item: object, says: str) -> None:
    refused = one(tmp_path, item)

    assert isinstance(refused, RowRefused)
    assert refused.where == f"{tmp_path}/data/3/one.json: entry 1 (std-003-one-00000)"
    assert says in refused.reason


def test_a_create_that_is_a_list_is_left_out_with_a_note(tmp_path: Path) -> None:
    entry = one(tmp_path, {**MATCHED, "create": [{"init": "touch x"}]})

    assert isinstance(entry, Imported)
    assert entry.task["config"] == {"image": "default", "init": []}
    assert entry.notes == (agentbench.CREATE_IS_A_LIST,)


def test_training_items_use_their_own_scripts_before_those_of_set_7(tmp_path: Path) -> None:
    item = {**MATCHED, "create": {"init": [{"file": "init/a.sh"}, {"file": "init/b.sh"}]}}
    scripts = {"scripts/7/init/a.sh": "a7", "scripts/7/init/b.sh": "b7", "scripts/train/init/a.sh": "a"}

    (task,) = tasks(read_agentbench(folder(tmp_path, {"data/train.json": [item], **scripts})))

    assert [script["code"] for script in task["config"]["init"]] == ["a", "b7"]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        pytest.param(b"\xff", "not UTF-8", id="not a text"),
        pytest.param(b"x" * 101, "more than 100 bytes", id="too long"),
    ],
)
def test_the_refusal_names_an_unusable_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, says: str
) -> None:
    monkeypatch.setattr(agentbench, "MAX_SCRIPT_BYTES", 100)
    folder(tmp_path, {"scripts/3/init/a.sh": ""})
    (tmp_path / "scripts/3/init/a.sh").write_bytes(data)

    refused = one(tmp_path, {**MATCHED, "create": {"init": {"file": "init/a.sh"}}})

    assert isinstance(refused, RowRefused)
    assert refused.reason.startswith("create.init: init/a.sh ")
    assert says in refused.reason


def test_a_symbolic_link_out_of_the_scripts_is_not_followed(tmp_path: Path) -> None:
    folder(tmp_path, {"secret": "x", "scripts/3/b.sh": ""})
    (tmp_path / "scripts/3/a.sh").symlink_to(tmp_path / "secret")

    refused = one(tmp_path, {**MATCHED, "start": {"file": "a.sh"}})

    assert isinstance(refused, RowRefused)
    assert refused.reason == "start: no script a.sh in scripts/3"


@pytest.mark.parametrize(
    ("item", "note"),
    [
        ({"create": {"init": "apt update && apt install sudo -y"}}, "it cannot be opened: 'apt update' needs packages"),
        ({"create": {"init": "curl -s https://example.org | sh"}}, "it cannot be opened: 'curl -s https://' needs"),
        ({"create": {"init": "echo 123321>/var/a"}}, "it cannot be opened: '123321>' is a file descriptor"),
        (
            {
                "evaluation": {
                    "check": [None, {"language": "python", "file": "check/size-match.py"}],
                    "example": {"code": "du -sh /home | awk '{print $1}'"},
                }
            },
            "it may never be won: size-match cannot read a size such as 4.0K",
        ),
        ({"create": {"init": "echo 'apt notes' > /root/curl; echo 1234 >/a"}}, ""),
    ],
)
def test_an_item_that_cannot_be_opened_or_won_is_named(tmp_path: Path, item: dict[str, Any], note: str) -> None:
    entry = one(tmp_path, {**MATCHED, **item})

    assert isinstance(entry, Imported)
    assert [said[: len(note)] for said in entry.notes] == ([note] if note else [])
