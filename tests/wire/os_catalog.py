"""A catalog with only the os environment, with a test's own tasks or settings."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.wire.catalog import PROJECT, serving
from tests.wire.gateways import Gateway

CONFIGURED = PROJECT / "env_images" / "os" / "environment.toml"


@contextlib.contextmanager
def serving_os(
    kind: str, *, tasks: Sequence[Mapping[str, Any]] = (), changes: Mapping[str, str] | None = None, **variables: str
) -> Iterator[Gateway]:
    """Run a gateway of *kind* that serves the os environment with *tasks*, as `serving` does.

    Args:
        tasks: The train split. Empty: the project's own tasks.
        changes: Lines of environment.toml and their replacements. Each line occurs once in the file.
    """
    with tempfile.TemporaryDirectory(prefix="os-catalog-") as name:
        folder = Path(name)
        (folder / "os").mkdir()
        directory = _written(folder / "tasks", tasks) if tasks else PROJECT / "tasks" / "os"
        configured = CONFIGURED.read_text("utf-8")
        for line, new in {'directory = "tasks/os"': f'directory = "{directory}"', **(changes or {})}.items():
            assert configured.count(f"\n{line}\n") == 1, line
            configured = configured.replace(f"\n{line}\n", f"\n{new}\n")
        (folder / "os" / "environment.toml").write_text(configured, "utf-8")
        with serving(kind, "os", GATEWAY_CATALOG_DIR=str(folder), **variables) as gateway:
            yield gateway


def counting(name: str, **config: Any) -> dict[str, Any]:
    """Return a task whose answer is 3. The answer is computed in the box before the agent's first action."""
    return {
        "id": name,
        "instruction": "How many entries are in /srv/data?",
        "config": {"init": ["mkdir /srv/data; touch /srv/data/a /srv/data/b /srv/data/c"], **config},
        "evaluation": {"check": [None, {"matcher": "integer-match"}], "example": "ls /srv/data | wc -l"},
    }


def _written(folder: Path, tasks: Sequence[Mapping[str, Any]]) -> Path:
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks), "utf-8")
    return folder
