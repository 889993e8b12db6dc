"""The images of the environments, as their Dockerfiles state them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

DOCKERFILES = sorted((Path(__file__).parents[3] / "env_images").glob("*/Dockerfile"))


def entry_points(text: str) -> list[list[str]]:
    found = re.findall(r"^ENTRYPOINT +(.*)$", text.replace("\\\n", " "), re.MULTILINE)
    return [json.loads(one) for one in found]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)
def test_an_entry_point_names_its_programs_by_absolute_paths(path: Path) -> None:
    for first, *arguments in entry_points(path.read_text(encoding="utf-8")):
        assert first.startswith("/"), "the engine would look for it in the PATH of the container"
        assert not {"setpriv", "tini"} & {*arguments}, "setpriv would look for it in the same PATH"


def test_the_images_that_begin_as_root_have_entry_points() -> None:
    found = {path.parent.name for path in DOCKERFILES if entry_points(path.read_text(encoding="utf-8"))}

    assert found == {"base-sandbox", "browser"}
