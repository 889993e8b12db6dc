"""The command ``gateway tasks export``: writes an environment's tasks as trainers see them, as a data set of a trainer.

It reads the public view from a running gateway, as the trainer whose key it has.
"""

from __future__ import annotations

import importlib
import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gateway.cli.admin_client import LOCALHOST, AsJson, Url, ask_over, client, counted, print_result
from gateway.core.curriculum import PREFIX
from gateway.core.errors import ConfigError
from gateway.core.json_text import dump
from gateway.tasks.importing.batch import check_target, print_lines, write_lines
from gateway.upstreams.nemo.codec import PARAMETERS

if TYPE_CHECKING:
    import httpx

Object = dict[str, Any]
FORMATS: Final = ("nemo-gym", "jsonl", "parquet")
ASK_S: Final = 180.0
"""Maximum seconds for one request: a list of tools or a prompt may wait for a worker to start."""
PAGE: Final = 500
"""Tasks of one request."""
_NO_INPUT: Final[Object] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Listed:
    """A task in a listing, and its place."""

    task: Object
    split: str
    index: int | None
    """None: not known, because the split has removed tasks."""

    def reference(self, environment: str) -> Object:
        """Return the ``verifier_metadata`` by which the gateway finds the task again.

        Raises:
            ConfigError: The task has neither an id nor a known place.
        """
        id = self.task.get("id")
        named: Object = {"environment": environment, "split": self.split}
        if self.index is not None:
            named["index"] = self.index
        if isinstance(id, str) and id and id != f"{self.split}/{self.index}":
            named["id"] = id
        elif self.index is None:
            raise ConfigError(f"split {self.split!r} has removed tasks and tasks without an id: give each task an id")
        return named


def export(
    form: Annotated[str, typer.Argument(metavar="FORMAT", help="nemo-gym, jsonl or parquet.")],
    environment: Annotated[str, typer.Argument(help="The environment's name.")],
    split: Annotated[str, typer.Option("--split", "-s", help="Only this split; without it, all splits.")] = "",
    prompts: Annotated[
        bool, typer.Option("--prompts", help="nemo-gym: open an episode of each task for its first observation.")
    ] = False,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="Stop after this many tasks.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write to this file, not to standard output.")] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite an existing file.")] = False,
    url: Url = LOCALHOST,
    key: Annotated[str, typer.Option(help="A trainer's key.", envvar="GATEWAY_KEY")] = "",
    as_json: AsJson = False,
) -> None:
    """Write the tasks of an environment of a running gateway, without answers and hidden tests.

    Rows of nemo-gym have the input and tools of a model request, and name the task for /nemo/ENVIRONMENT.

    \b
    Examples:
      gateway tasks export nemo-gym math --split train -o train.jsonl
      gateway tasks export parquet coding --url http://127.0.0.1:8080 --key KEY -o coding.parquet
    """
    if form not in FORMATS:
        raise ConfigError(f"{form[:64]}: the format must be one of {', '.join(FORMATS)}")
    if prompts and form != "nemo-gym":
        raise ConfigError("--prompts: only rows of nemo-gym have prompts")
    target = None if out == Path("-") else out
    if target is not None:
        check_target(target, force=force, remedy="--force overwrites it")
    arrow = _arrow() if form == "parquet" else None
    with client(url, key, timeout_s=ASK_S) as connection:
        gateway = Source(connection, environment)
        listed = list(itertools.islice(gateway.tasks(split, most=limit or PAGE), limit))
        if form == "nemo-gym":
            tools = gateway.tools()
            rows = [nemo_row(environment, one, tools, gateway.prompt(one) if prompts else "") for one in listed]
        else:
            rows = [one.task for one in listed]
    if not rows:
        raise ConfigError(f"{environment} has no tasks{f' in split {split!r}' if split else ''}; nothing was written")
    lines, end = ([dump(row) for row in rows], b"\n") if arrow is None else ([parquet(rows, arrow)], b"")
    if target is None:
        print_lines(lines, end=end)
    else:
        write_lines(target, lines, force=force, end=end)
    line = f"{counted(len(rows), 'task')}; written to {target or 'standard output'}"
    print_result(as_json, {"tasks": len(rows), "file": target}, line, err=target is None)


class Source:
    """The environment of a running gateway, whose tasks are exported."""

    def __init__(self, connection: httpx.Client, environment: str) -> None:
        self._connection = connection
        self._environment = environment

    def tasks(self, split: str, *, most: int = PAGE) -> Iterator[Listed]:
        """Yield the tasks of *split*, or of all splits except those of curricula; ask for *most* at a time."""
        known = [one["name"] for one in self._ask("GET", "splits", list)] if not split else [split]
        for name in known:
            if split or not name.startswith(PREFIX):
                yield from self._of(name, min(most, PAGE))

    def _of(self, split: str, page: int) -> Iterator[Listed]:
        count = self._ask("POST", "num_tasks", dict, json={"split": split})["num_tasks"]
        for start in range(0, count, page):
            stop = min(start + page, count)
            some = self._ask("POST", "task_range", dict, json={"split": split, "start": start, "stop": stop})["tasks"]
            is_whole = len(some) == stop - start  # a listing leaves out removed tasks
            for index, task in enumerate(some, start):
                yield Listed(task, split, index if is_whole else None)

    def tools(self) -> list[Object]:
        """Return the environment's tools as they are in a request to a model."""
        return [model_tool(tool) for tool in self._ask("GET", "tools", dict)["tools"]]

    def prompt(self, one: Listed) -> str:
        """Return the first observation of an episode of the task, which ends at once."""
        row = {"verifier_metadata": one.reference(self._environment)}
        seeded = self._ask("POST", "seed_session", dict, prefix="nemo/", json=row)
        self._ask("POST", "close_session", dict, prefix="nemo/", json={})
        return str(seeded["prompt"])

    def _ask(self, method: str, operation: str, kind: type[Any], *, prefix: str = "", **request: Any) -> Any:
        path = f"/{prefix}{self._environment}/{operation}"
        return ask_over(self._connection, method, path, kind=kind, key="a trainer's key", **request)


def nemo_row(environment: str, one: Listed, tools: Sequence[Object], prompt: str = "") -> Object:
    """Return the row of a NeMo Gym data set for a task. *prompt* replaces the task's instruction.

    Raises:
        ConfigError: The task has no instruction, so that a model would get no question.
    """
    instruction = prompt or one.task.get("instruction")
    reference = one.reference(environment)
    if isinstance(row := one.task.get("row"), Mapping) and PARAMETERS in row:
        return {PARAMETERS: row[PARAMETERS], "verifier_metadata": reference}
    if not isinstance(instruction, str) or not instruction.strip():
        place = one.task.get("id") or f"{one.split}/{one.index}"
        raise ConfigError(f"{place}: the task has no instruction: --prompts takes the first observation instead")
    parameters = {"input": [{"role": "user", "content": instruction}], "tools": list(tools)}
    return {PARAMETERS: parameters, "verifier_metadata": reference}


def model_tool(tool: Mapping[str, Any]) -> Object:
    """Return a tool of an ORS listing as a function of the Responses API."""
    return {
        "type": "function",
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool.get("input_schema") or _NO_INPUT,
        "strict": False,  # a strict tool must require all of its inputs
    }


def _arrow() -> Any:
    """Return the package that writes parquet. Raises ``ConfigError`` if it is not installed."""
    with suppress(ImportError):
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    raise ConfigError("parquet needs the package pyarrow: install env-gateway[parquet], or export jsonl")


def parquet(rows: Sequence[Object], arrow: Any) -> bytes:
    """Return *rows* as a parquet file. *arrow*: the modules of `_arrow`. Raises ``ConfigError``."""
    pyarrow, writer = arrow
    try:
        table = pyarrow.Table.from_pylist(list(rows))
        with io.BytesIO() as file:
            writer.write_table(table, file)
            return file.getvalue()
    except (pyarrow.ArrowException, OverflowError) as error:
        raise ConfigError(f"the tasks do not fit into columns: {error}; export jsonl instead") from error
