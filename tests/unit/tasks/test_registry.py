"""Tasks by environment, split and index, with the rules of ORS for indices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gateway.core.environment import Environment, Split, SplitType
from gateway.core.errors import ConfigError, UnknownSplit, UnknownTask
from gateway.core.ids import EnvironmentName
from gateway.tasks.registry import TaskRegistry, load_tasks, split_type

MATH, CODING = EnvironmentName("math"), EnvironmentName("coding")
FIVE = [f'{{"n":{number}}}'.encode() for number in range(5)]


@pytest.fixture
def registry() -> TaskRegistry:
    return TaskRegistry({MATH: {"train": FIVE, "empty": []}, CODING: {"hard": FIVE[:1]}})


@pytest.mark.parametrize(("index", "task"), [(0, 0), (4, 4), (-1, 4), (-5, 0)])
def test_an_index_counts_from_either_end(registry: TaskRegistry, index: int, task: int) -> None:
    assert registry.raw(MATH, "train", index) == FIVE[task]
    assert registry.task(MATH, "train", index) == {"n": task}


@pytest.mark.parametrize("index", [5, -6, 10**30, -(10**30)])
def test_an_index_beyond_either_end_is_an_unknown_task(registry: TaskRegistry, index: int) -> None:
    with pytest.raises(UnknownTask, match=rf"^Invalid index: {index}; split 'train' has 5 tasks$") as refusal:
        registry.raw(MATH, "train", index)
    assert not isinstance(refusal.value, UnknownSplit)


@pytest.mark.parametrize(
    ("start", "stop", "numbers"),
    [
        (None, None, [0, 1, 2, 3, 4]),
        (1, 3, [1, 2]),
        (None, 2, [0, 1]),
        (3, None, [3, 4]),
        (-2, None, [3, 4]),
        (None, -3, [0, 1]),
        (-99, 2, [0, 1]),
        (3, 99, [3, 4]),
        (4, 2, []),
        (2, 2, []),
        (99, None, []),
        (None, -99, []),
        (-(10**30), 10**30, [0, 1, 2, 3, 4]),
    ],
)
def test_a_range_is_clamped_and_never_an_error(
    registry: TaskRegistry, start: int | None, stop: int | None, numbers: list[int]
) -> None:
    assert list(registry.range(MATH, "train", start, stop)) == [FIVE[number] for number in numbers]


@pytest.mark.parametrize(("environment", "split"), [(MATH, "hard"), (MATH, "Train"), (MATH, ""), ("nosuch", "train")])
def test_an_unknown_split_is_an_error_of_every_method(registry: TaskRegistry, environment: str, split: str) -> None:
    name = EnvironmentName(environment)

    with pytest.raises(UnknownSplit, match=r"^Invalid split: there is no .*; there are "):
        registry.count(name, split)
    with pytest.raises(UnknownSplit, match=r"^Invalid split: there is no .*; there are "):
        registry.raw(name, split, 0)
    with pytest.raises(UnknownSplit, match=r"^Invalid split: there is no .*; there are "):
        registry.range(name, split, None, None)


def test_a_split_may_be_empty(registry: TaskRegistry) -> None:
    assert registry.count(MATH, "empty") == 0
    assert list(registry.range(MATH, "empty", None, None)) == []
    with pytest.raises(UnknownTask, match="Invalid index"):
        registry.raw(MATH, "empty", -1)


def test_a_change_of_a_returned_task_does_not_affect_the_registry(registry: TaskRegistry) -> None:
    registry.task(MATH, "train", 0)["n"] = "changed"

    assert registry.task(MATH, "train", 0) == {"n": 0}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("train", SplitType.TRAIN),
        ("validation", SplitType.VALIDATION),
        ("test", SplitType.TEST),
        ("hard", SplitType.VALIDATION),
        ("Train", SplitType.VALIDATION),
    ],
)
def test_the_name_of_a_split_determines_its_type_and_other_names_mean_validation(name: str, kind: SplitType) -> None:
    assert split_type(name) is kind


# -- from files -----------------------------------------------------------------------------------------------------


def environment(folder: Path | None, name: EnvironmentName = MATH) -> Environment:
    return Environment(name=name, image="x", directory=Path("/"), command=("x",), tasks=folder)


def test_the_splits_of_a_folder_are_in_the_order_of_their_types(tmp_path: Path) -> None:
    for name in ("zebra", "test", "hard", "validation", "train"):
        (tmp_path / f"{name}.jsonl").write_bytes(FIVE[0])
    (tmp_path / "README.md").write_text("not a split")

    registry = load_tasks([environment(tmp_path)])

    assert registry.splits(MATH) == [
        Split("train", SplitType.TRAIN),
        Split("validation", SplitType.VALIDATION),
        Split("test", SplitType.TEST),
        Split("hard", SplitType.VALIDATION),
        Split("zebra", SplitType.VALIDATION),
    ]
    assert registry.count(MATH, "hard") == 1


def test_an_environment_without_a_task_folder_has_no_splits(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(FIVE[0])

    registry = load_tasks([environment(None), replace(environment(tmp_path), name=CODING)])

    assert registry.splits(MATH) == []
    assert [split.name for split in registry.splits(CODING)] == ["train"]


def test_a_task_folder_without_a_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no <split>\.jsonl in it"):
        load_tasks([environment(tmp_path)])


def test_an_invalid_line_stops_the_start_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(FIVE[0] + b"\n{\n")

    with pytest.raises(ConfigError, match=r"train\.jsonl:2: not JSON"):
        load_tasks([environment(tmp_path)])


# -- by id ------------------------------------------------------------------------------------------------------------

NAMED = TaskRegistry(
    {
        MATH: {
            "train": [b'{"id":"a"}', b'{"id":"b","aliases":["bee","beta"]}', b"{}"],
            "test": [b'{"id":"b"}', b'{"aliases":["only"]}'],
        }
    }
)


@pytest.mark.parametrize(
    ("name", "prefer", "place"),
    [
        ("a", "train", ("train", 0)),
        ("a", "test", ("train", 0)),
        ("b", "train", ("train", 1)),
        ("b", "test", ("test", 0)),
        ("b", "nosuch", ("train", 1)),
        ("bee", "test", ("train", 1)),
        ("beta", "train", ("train", 1)),
        ("only", "train", ("test", 1)),
    ],
)
def test_a_task_is_found_by_its_id_or_an_alias(name: str, prefer: str, place: tuple[str, int]) -> None:
    assert NAMED.find(MATH, name, prefer=prefer) == place


@pytest.mark.parametrize(("environment", "name"), [(MATH, "c"), (MATH, ""), (MATH, "0"), (CODING, "a")])
def test_a_name_without_a_task_is_unknown(environment: EnvironmentName, name: str) -> None:
    with pytest.raises(UnknownTask):
        NAMED.find(environment, name, prefer="train")
