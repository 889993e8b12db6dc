"""docs/curricula.md: its files are curricula of the project's tasks, and its defaults match the code."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from gateway.catalog.catalog import load_catalog
from gateway.content import read_curricula
from gateway.core.ids import EnvironmentName
from gateway.settings import Settings
from gateway.tasks.curricula.definitions import to_document
from gateway.tasks.curricula.model import Component, Curriculum, Sampler, SamplerKind
from gateway.tasks.registry import load_tasks
from tests.pages import PROJECT, Block, blocks

PAGE = (PROJECT / "docs" / "curricula.md").read_text("utf-8")
FILES = [block for block in blocks("docs/curricula.md") if block.language == "toml"]


@pytest.mark.parametrize("block", FILES, ids=str)
def test_each_file_on_the_page_is_a_valid_curriculum(block: Block, tmp_path: Path) -> None:
    catalog = load_catalog(PROJECT / "env_images", names=("math", "game"))
    (tmp_path / "shown.toml").write_text(block.text)

    found = read_curricula(Settings(curricula_dir=tmp_path), catalog, load_tasks(catalog))

    assert list(found) == ["shown"]


def rows(header: str) -> dict[str, list[str]]:
    """Return the table below *header*: the key in the first column, mapped to the other cells."""
    lines = PAGE[PAGE.index(header) :].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))] for line in lines]
    return {re.sub(r"[`\[\] ]", "", first): others for first, *others in cells}


def test_the_keys_of_a_sampler_their_defaults_and_their_users_match_the_code() -> None:
    shown = rows("| key of `[sampler]`")
    used: dict[str, set[str]] = {}
    for kind in SamplerKind:
        study = Curriculum(name="any", components=(), sampler=Sampler(kind=kind))
        for key in to_document(study)["sampler"]:
            used.setdefault(key, set()).add(kind.value)

    assert set(shown) == {field.name for field in fields(Sampler)}
    for key, (default, users, *_) in shown.items():
        expected: Any = getattr(Sampler(), key)
        assert (json.loads(default.strip("`")) if default else ()) == expected, key
        if key != "kind":
            assert set(re.findall(r"`(\w+)`", users)) == used[key], key


def test_the_top_level_keys_and_their_defaults_match_the_code() -> None:
    shown = rows("| key at the top")
    study = Curriculum(name="any", components=())

    assert set(shown) == {field.name for field in fields(Curriculum)} - {"name", "sampler"}
    assert {key: json.loads(default) for key, (default, *_) in shown.items() if default} == {
        key: getattr(study, key) for key in shown if key != "components"
    }
    component = dict(re.findall(r"`(\w+)`(?: \(`?\"?([\w.]+)\"?`?\))?", shown["components"][1]))
    default = Component(environment=EnvironmentName("any"))
    assert set(component) == {field.name for field in fields(Component)}
    assert (component["split"], float(component["weight"])) == (default.split, default.weight)
