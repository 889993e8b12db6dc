"""Definitions of curricula: the meaning of files and JSON objects, and the messages about wrong definitions."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import ConfigError, InvalidRequest
from gateway.core.ids import EnvironmentName
from gateway.core.ports.curricula import MAX_DEFINITION_BYTES
from gateway.tasks.curricula.definitions import from_document, read_curricula, to_document
from gateway.tasks.curricula.model import Component, Curriculum, Sampler, SamplerKind, Stage

MATH, GAME = EnvironmentName("math"), EnvironmentName("game")
WHOLE = """
seed = 7
group_size = 8
handles = 100
success_at = 0.9
group_s = 60

[sampler]
kind = "staged"
promote_at = 0.7
demote_at = 0.3
min_attempts = 64
window = 100
review = 0.2

[[sampler.stages]]
name = "easy"
max_difficulty = 1

[[sampler.stages]]
name = "hard"
tags = ["algebra", "geometry"]
min_difficulty = 1.5
max_difficulty = 4

[[components]]
environment = "math"
split = "train"
weight = 3
tags = ["arithmetic"]

[[components]]
environment = "game"
"""
COMPONENTS = '[[components]]\nenvironment = "math"\n'


def read(folder: Path, text: str, name: str = "study") -> Curriculum:
    (folder / f"{name}.toml").write_text(text)
    return read_curricula(folder)[name]


def complaint(folder: Path, text: str, name: str = "study") -> str:
    with pytest.raises(ConfigError) as refusal:
        read(folder, text, name)
    return refusal.value.detail.removeprefix(f"{folder}{os.sep}")


def refusal_of(document: object, name: str = "study") -> str:
    with pytest.raises(InvalidRequest) as refusal:
        from_document(name, document)
    return refusal.value.detail


# -- meaning --------------------------------------------------------------------------------------------------------


def test_a_file_can_set_every_field_of_a_curriculum(tmp_path: Path) -> None:
    assert read(tmp_path, WHOLE) == Curriculum(
        name="study",
        seed=7,
        group_size=8,
        handles=100,
        success_at=0.9,
        group_s=60.0,
        sampler=Sampler(
            kind=SamplerKind.STAGED,
            promote_at=0.7,
            demote_at=0.3,
            min_attempts=64,
            window=100,
            review=0.2,
            stages=(
                Stage(name="easy", max_difficulty=1),
                Stage(name="hard", tags=("algebra", "geometry"), min_difficulty=1.5, max_difficulty=4),
            ),
        ),
        components=(
            Component(environment=MATH, split="train", weight=3, tags=("arithmetic",)),
            Component(environment=GAME, split="train", weight=1, tags=()),
        ),
    )


def test_missing_keys_have_the_defaults_of_the_model(tmp_path: Path) -> None:
    assert read(tmp_path, COMPONENTS) == Curriculum(name="study", components=(Component(environment=MATH),))


@pytest.mark.parametrize("kind", list(SamplerKind))
def test_the_defaults_of_each_sampler_are_those_of_the_model(kind: SamplerKind) -> None:
    stages = {"stages": [{"name": "all"}]} if kind is SamplerKind.STAGED else {}

    read_in = from_document("study", {"environment": "math", "sampler": {"kind": kind.value, **stages}})

    assert read_in.sampler == Sampler(kind=kind, stages=(Stage(name="all"),) if stages else ())


def test_the_short_form_is_one_component(tmp_path: Path) -> None:
    short = read(tmp_path, 'environment = "math"\nsplit = "test"\ntags = ["odd"]\nseed = 3\n')

    assert short.components == (Component(environment=MATH, split="test", tags=("odd",)),)
    assert short.seed == 3


def test_only_the_toml_files_of_a_folder_are_read_as_curricula(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(COMPONENTS)
    (tmp_path / "two-b_2.toml").write_text('environment = "game"')
    (tmp_path / "README.md").write_text("not one")

    assert sorted(read_curricula(tmp_path)) == ["one", "two-b_2"]
    assert read_curricula(tmp_path / "missing") == {}


# -- round trips ----------------------------------------------------------------------------------------------------

stages = st.builds(
    Stage,
    name=st.text("abc", min_size=1),
    tags=st.lists(st.sampled_from(["odd", "zwölf", "a b"]), max_size=2).map(tuple),
    min_difficulty=st.none() | st.floats(-5, 0),
    max_difficulty=st.none() | st.floats(0, 5),
)
samplers = st.one_of(
    st.sampled_from([Sampler(), Sampler(kind=SamplerKind.SEQUENTIAL)]),
    st.builds(
        Sampler,
        kind=st.just(SamplerKind.TARGET_SUCCESS),
        target=st.floats(0.01, 0.99),
        width=st.floats(0.001, 10),
        explore=st.floats(0, 1),
        prior=st.floats(0, 1000),
        window=st.integers(1, 32),
    ),
    st.builds(
        Sampler,
        kind=st.just(SamplerKind.LEARNING_PROGRESS),
        explore=st.floats(0, 1),
        prior=st.floats(0, 1000),
        window=st.integers(1, 32),
    ),
    st.builds(
        Sampler,
        kind=st.just(SamplerKind.STAGED),
        stages=st.lists(stages, min_size=1, max_size=4, unique_by=lambda stage: stage.name).map(tuple),
        promote_at=st.floats(0.5, 1),
        demote_at=st.floats(0, 0.49),
        min_attempts=st.integers(1, 1000),
        window=st.integers(1, 1000),
        review=st.floats(0, 0.99),
        per_component=st.booleans(),
    ),
)
curricula = st.builds(
    Curriculum,
    name=st.just("study"),
    components=st.lists(
        st.builds(
            Component,
            environment=st.sampled_from([MATH, GAME]),
            split=st.sampled_from(["train", "test", "v1.2/b"]),
            weight=st.floats(1e-6, 1e6),
            tags=st.lists(st.sampled_from(["odd", "even"]), max_size=2).map(tuple),
        ),
        min_size=1,
        max_size=6,
        unique_by=lambda one: (one.environment, one.split, tuple(sorted(set(one.tags)))),
    ).map(tuple),
    sampler=samplers,
    seed=st.integers(0, 2**63 - 1),
    group_size=st.integers(1, 4096),
    handles=st.integers(0, 1_000_000),
    success_at=st.floats(-1e9, 1e9),
    group_s=st.floats(0.1, 604_800),
)


@given(curricula)
def test_the_document_of_a_curriculum_reads_back_as_the_same_curriculum(curriculum: Curriculum) -> None:
    written = json.dumps(to_document(curriculum))

    assert from_document("study", json.loads(written)) == curriculum


def test_a_file_and_its_document_define_the_same_curriculum(tmp_path: Path) -> None:
    curriculum = read(tmp_path, WHOLE)

    assert from_document("study", to_document(curriculum)) == curriculum
    assert to_document(curriculum)["sampler"]["stages"][0] == {"name": "easy", "tags": [], "max_difficulty": 1.0}


# -- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        pytest.param("seeds = 1\n" + COMPONENTS, "study.toml:1: seeds: there is no such key", id="an unknown key"),
        pytest.param(
            COMPONENTS + '\n[[components]]\nenvironment = "game"\n\nwieght = 2\n',
            "study.toml:7: components[1].wieght: there is no such key",
            id="an unknown key in the second table",
        ),
        pytest.param(
            COMPONENTS + "[[components]]\nweight = 2\n",
            "study.toml:3: components[1].environment: it is required",
            id="a missing key has the line of its table",
        ),
        pytest.param(
            'group_size = "8"\n' + COMPONENTS,
            "study.toml:1: group_size: it must be an integer",
            id="a number as a text",
        ),
        pytest.param("seed = true\n" + COMPONENTS, "study.toml:1: seed: it must be an integer", id="a boolean"),
        pytest.param("success_at = nan\n" + COMPONENTS, "study.toml:1: success_at: it must be a finite number"),
        pytest.param("seed = 1\n", "study.toml:1: components: it is required", id="no component"),
        pytest.param(
            "components = []",
            "study.toml:1: components: it must have at least 1 item",
            id="an empty list of components",
        ),
        pytest.param(
            COMPONENTS + 'tags = ["a", "b"]\n' + COMPONENTS + 'tags = ["b", "a"]\n',
            "study.toml:4: components[1]: environment, split and tags are those of components[0]",
            id="a component twice",
        ),
        pytest.param(
            COMPONENTS + 'split = "train:other"\n',
            "study.toml:3: components[0].split: must be the name of a split",
            id="a curriculum of a curriculum",
        ),
        pytest.param(
            '[[components]]\nenvironment = "Math"\n',
            "study.toml:2: components[0].environment: must be the name of an environment",
            id="an invalid environment name",
        ),
        pytest.param(COMPONENTS + "weight = 0\n", "study.toml:3: components[0].weight: it must be at least"),
        pytest.param(
            'seed = 1\nenvironment = "math"\n' + COMPONENTS,
            "study.toml:2: environment: with components, this key belongs into each component",
            id="both forms",
        ),
        pytest.param(
            'environment = "math"\nweight = 1\n',
            "study.toml:2: weight: there is no such key",
            id="a weight in the short form",
        ),
        pytest.param(
            COMPONENTS + '\n[sampler]\nkind = "random"\n',
            "study.toml:5: sampler.kind: it must be 'uniform', 'sequential'",
            id="an unknown sampler",
        ),
        pytest.param(
            COMPONENTS + '[sampler]\nkind = "uniform"\ntarget = 0.3\nwindow = 2\n',
            "study.toml:5: sampler.target: the sampler uniform does not use it",
            id="a key that the sampler does not use",
        ),
        pytest.param(
            COMPONENTS + '[sampler]\nkind = "target_success"\ntarget = 1.0\n',
            "study.toml:5: sampler.target: it must be less than 1",
            id="a target that carries no signal",
        ),
        pytest.param(
            COMPONENTS + '[sampler]\nkind = "learning_progress"\nwindow = 33\n',
            "study.toml:5: sampler.window: it is more than 32",
            id="more rewards than are kept",
        ),
        pytest.param(
            COMPONENTS + '[sampler]\nkind = "staged"\n',
            "study.toml:3: sampler: staged needs at least one of stages",
            id="no stages",
        ),
        pytest.param(
            COMPONENTS + '[sampler]\nkind = "staged"\npromote_at = 0.5\ndemote_at = 0.5\nstages = [{name = "a"}]\n',
            "study.toml:6: sampler.demote_at: demote_at (0.5) is not below promote_at (0.5)",
            id="equal promotion and demotion rates",
        ),
        pytest.param(
            COMPONENTS + '[sampler]\nkind = "staged"\n' + '[[sampler.stages]]\nname = "a"\n' * 2,
            "study.toml:8: sampler.stages[1].name: two stages are named 'a'",
            id="a stage twice",
        ),
        pytest.param(
            COMPONENTS
            + '[sampler]\nkind = "staged"\n[[sampler.stages]]\nname = "a"\n'
            + '[[sampler.stages]]\nname = "b"\nmin_difficulty = 2\nmax_difficulty = 1\n',
            "study.toml:7: sampler.stages[1]: min_difficulty (2) is more than max_difficulty (1)",
            id="a stage with an empty range",
        ),
        pytest.param("seed = \n", "study.toml:1: Invalid value (at line 1, column 8)", id="not TOML"),
        pytest.param("#" * (MAX_DEFINITION_BYTES + 1), f"study.toml: larger than {MAX_DEFINITION_BYTES} bytes"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_line_key_and_reason(tmp_path: Path, text: str, told: str) -> None:
    assert complaint(tmp_path, text).startswith(told)


@pytest.mark.parametrize("name", ["Study", "1st", "a b", "a.b", "a" * 64, "a:b"])
def test_a_name_that_is_not_valid_for_a_split_is_refused(tmp_path: Path, name: str) -> None:
    assert complaint(tmp_path, COMPONENTS, name).startswith(f"{name}.toml: {name!r} is not a name for a curriculum")
    assert "is not a name for a curriculum" in refusal_of({"environment": "math"}, name)


def test_a_file_that_is_not_text_or_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_bytes(b"seed = \xff")
    with pytest.raises(ConfigError, match=r"study.toml: not UTF-8"):
        read_curricula(tmp_path)

    (tmp_path / "study.toml").unlink()
    (tmp_path / "study.toml").mkdir()
    with pytest.raises(ConfigError, match=r"study.toml: Is a directory"):
        read_curricula(tmp_path)

    with pytest.raises(ConfigError, match="not a folder"):
        read_curricula(Path(__file__))


@pytest.mark.parametrize(
    ("document", "told"),
    [
        pytest.param([], "a curriculum is an object, not list", id="not an object"),
        pytest.param({}, "components: it is required", id="an empty object"),
        pytest.param({"environment": None}, "environment: it must be a text", id="null as a name"),
        pytest.param(
            {"environment": "math", "sampler": {"stages": [{"name": "a", "tag": 1}]}},
            "sampler.stages[0].tag: there is no such key",
            id="a nested key",
        ),
        pytest.param(
            {"environment": "math", "tags": ["", 1]},
            "tags[0]: must be a text without white space at its ends, in one line; tags[1]: it must be",
            id="two problems",
        ),
        pytest.param(
            {"environment": "math", "sampler": "staged"}, "sampler: it must be a table (an object)", id="a text"
        ),
        pytest.param({"environment": "math", "split": "a\0"}, "split: must be the name of a split", id="a NUL"),
        pytest.param({"environment": "math", "name": "x"}, "name: there is no such key", id="the name is not in it"),
        pytest.param(
            {"environment": "math", "sampler": {"explore": float("nan")}},
            "sampler.explore: it must be a finite number",
            id="NaN",
        ),
        pytest.param({"environment": "math", "handles": 10**9}, "handles: it must be at most", id="too many"),
    ],
)
def test_an_object_that_is_wrong_is_refused_with_path_and_reason(document: Any, told: str) -> None:
    assert refusal_of(document).startswith(told)


def test_the_report_of_many_problems_has_a_bounded_length() -> None:
    told = refusal_of({"environment": "math", **{f"k{'x' * 1000}{number}": 1 for number in range(5000)}})

    assert len(told) < 20_000
