"""What `gateway tasks new` writes: a task to begin with, for each kind of environment, as YAML, JSON or Python.

The texts are in ``task_templates``, by environment; an environment without texts of its own gets ``other``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from string import Template

from envserver.generic.task import is_name

from gateway.core.errors import ConfigError
from gateway.tasks.documents import read_yaml

FORMATS = ("yaml", "json", "python")
_FOLDER = Path(__file__).with_name("task_templates")


def template(environment: str, *, id: str = "", form: str = "yaml") -> str:
    """Return a task to begin with; comments say what is to be filled in (JSON has none).

    Args:
        environment: The environment's name; an unknown environment gets what all environments share.
        id: The task's id; if empty, ``custom/my-task``.
        form: An element of `FORMATS`.

    Raises:
        ConfigError: A name is not valid, or the format is unknown.
    """
    id = id or "custom/my-task"
    if not is_name("env_type", environment):
        raise ConfigError(f"{environment!r} is no environment's name")
    if not is_name("id", id):
        raise ConfigError(f"--id {id}: letters, digits and ._-/ are taken, at most 200, a letter or digit first")
    if form not in FORMATS:
        raise ConfigError(f"--format {form}: one of {', '.join(FORMATS)} is wanted")
    name = id.rpartition("/")[2]
    words = [word for word in re.split(r"[^A-Za-z0-9]+", name) if word]
    class_name = "".join(word.capitalize() for word in words) + "Task"
    suffix = ".py.txt" if form == "python" else ".yaml"
    path = _FOLDER / f"{environment}{suffix}"
    text = Template((path if path.is_file() else _FOLDER / f"other{suffix}").read_text("utf-8")).substitute(
        environment=environment,
        id=id,
        name=name,
        function="judge_" + "_".join(words).lower(),
        class_name=class_name if class_name[0].isalpha() else f"Task{class_name}",
    )
    return json.dumps(read_yaml(text.encode()), indent=2, ensure_ascii=False) + "\n" if form == "json" else text
