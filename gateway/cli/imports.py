"""The commands ``gateway tasks import …``, which convert public benchmarks, and the whole group ``gateway tasks``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from gateway.catalog.catalog import load_catalog
from gateway.cli.admin_client import AsJson, print_result
from gateway.cli.export import export
from gateway.cli.prove import prove
from gateway.cli.tasks import tasks_app
from gateway.core.environment import SplitType
from gateway.core.errors import ConfigError
from gateway.settings import load
from gateway.tasks.importing import agentbench, coding, nemo_gym, questions
from gateway.tasks.importing.batch import check_target, gather, print_lines, write_lines
from gateway.tasks.importing.rows import Entry

__all__ = ["import_app", "tasks_app"]

import_app = typer.Typer(no_args_is_help=True, help="Convert a public benchmark's files to tasks.")
tasks_app.add_typer(import_app, name="import")
tasks_app.command()(prove)
tasks_app.command()(export)

Out = Annotated[Path | None, typer.Option("--out", "-o", help="Write to this file, not to standard output.")]
ForEnvironment = Annotated[
    str | None, typer.Option("--environment", "-e", help="Write to this environment's task folder; needs --split.")
]
ToSplit = Annotated[
    str | None, typer.Option("--split", "-s", help="Split of the environment; the file is SPLIT.jsonl.")
]
Force = Annotated[bool, typer.Option("--force", "-f", help="Overwrite an existing file.")]
Limit = Annotated[int | None, typer.Option("--limit", "-n", min=1, help="Stop after this many tasks.")]
SkipInvalid = Annotated[bool, typer.Option("--skip-invalid", help="Leave out invalid entries.")]
Part = Annotated[SplitType | None, typer.Option("--part", help="Import only this part of the benchmark.")]


@import_app.command("agentbench-os")
def import_agentbench(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="AgentBench's data/os_interaction, or a checkout.")],
    part: Part = None,
    out: Out = None,
    environment: ForEnvironment = None,
    split: ToSplit = None,
    limit: Limit = None,
    force: Force = False,
    skip_invalid: SkipInvalid = False,
    as_json: AsJson = False,
) -> None:
    """Read AgentBench's OS-interaction items as tasks of the os environment.

    The standard sets are its test, the development set its validation, the training set its train part.

    \b
    Examples:
      gateway tasks import agentbench-os AgentBench --part test --out agentbench.jsonl
      gateway tasks import agentbench-os AgentBench --part test -e os -s agentbench
    """
    entries = agentbench.read_agentbench(folder, part=part)
    target = _target(out, environment, split)
    _import(entries, target=target, limit=limit, force=force, skip_invalid=skip_invalid, as_json=as_json)


@import_app.command("humaneval")
def import_humaneval(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="HumanEval.jsonl.gz, or unpacked.")],
    out: Out = None,
    environment: ForEnvironment = None,
    split: ToSplit = None,
    limit: Limit = None,
    force: Force = False,
    skip_invalid: SkipInvalid = False,
    as_json: AsJson = False,
) -> None:
    """Read HumanEval as tasks of the coding environment; the file's solutions go into no task.

    \b
    Examples:
      gateway tasks import humaneval HumanEval.jsonl.gz --limit 1
      gateway tasks import humaneval HumanEval.jsonl.gz -e coding -s humaneval
    """
    entries = coding.read_humaneval(file)
    target = _target(out, environment, split)
    _import(entries, target=target, limit=limit, force=force, skip_invalid=skip_invalid, as_json=as_json)


@import_app.command("mbpp")
def import_mbpp(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="mbpp.jsonl or sanitized-mbpp.json.")],
    part: Part = None,
    out: Out = None,
    environment: ForEnvironment = None,
    split: ToSplit = None,
    limit: Limit = None,
    force: Force = False,
    skip_invalid: SkipInvalid = False,
    as_json: AsJson = False,
) -> None:
    """Read MBPP as tasks of the coding environment; the file's solutions go into no task.

    \b
    Examples:
      gateway tasks import mbpp sanitized-mbpp.json --part train > train.jsonl
      gateway tasks import mbpp mbpp.jsonl --part test -e coding -s mbpp
    """
    entries = coding.read_mbpp(file, part=part)
    target = _target(out, environment, split)
    _import(entries, target=target, limit=limit, force=force, skip_invalid=skip_invalid, as_json=as_json)


@import_app.command("questions")
def import_questions(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines or a JSON array, perhaps gzipped.")],
    question: Annotated[str, typer.Option("--question", "-q", help="Column with the question.")] = "question",
    answer: Annotated[str, typer.Option("--answer", "-a", help="Column with the answer or the solution.")] = "answer",
    id: Annotated[str, typer.Option("--id", help="Column with the id; by default the row's number.")] = "",
    tag: Annotated[list[str] | None, typer.Option("--tag", help="Column that becomes a tag; may be repeated.")] = None,
    out: Out = None,
    environment: ForEnvironment = None,
    split: ToSplit = None,
    limit: Limit = None,
    force: Force = False,
    skip_invalid: SkipInvalid = False,
    as_json: AsJson = False,
) -> None:
    """Read questions with answers, as in GSM8K and MATH, as tasks of the math environment.

    The final answer follows ####, or is in \\boxed{}, or is the whole answer; the solution goes into no task.

    \b
    Examples:
      gateway tasks import questions gsm8k.jsonl -e math -s gsm8k
      gateway tasks import questions math.jsonl --question problem --answer solution --tag level -e math -s competition
    """
    entries = questions.read_questions(file, question=question, answer=answer, id=id, tags=tag or ())
    target = _target(out, environment, split)
    _import(entries, target=target, limit=limit, force=force, skip_invalid=skip_invalid, as_json=as_json)


@import_app.command("nemo-gym")
def import_nemo_gym(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Rows of a NeMo Gym data set, perhaps gzipped.")],
    out: Out = None,
    environment: ForEnvironment = None,
    split: ToSplit = None,
    limit: Limit = None,
    force: Force = False,
    skip_invalid: SkipInvalid = False,
    as_json: AsJson = False,
) -> None:
    """Read rows of a NeMo Gym data set as tasks of an environment with protocol = "nemo".

    \b
    Examples:
      gateway tasks import nemo-gym data/example.jsonl > example.jsonl
      gateway tasks import nemo-gym data/train.jsonl -e workplace -s train
    """
    entries = nemo_gym.read_rows_of(file)
    target = _target(out, environment, split)
    _import(entries, target=target, limit=limit, force=force, skip_invalid=skip_invalid, as_json=as_json)


def _import(
    entries: Iterable[Entry], *, target: Path | None, limit: int | None, force: bool, skip_invalid: bool, as_json: bool
) -> None:
    if target is not None:
        check_target(target, force=force, remedy="--force overwrites it")
    batch = gather(entries, limit=limit)
    for line in (*batch.remarks(), *batch.complaints()):
        typer.echo(line, err=True)
    if batch.refused and not skip_invalid:
        said = f"{len(batch.refused)} of {batch.entries} entries cannot be used; nothing was written"
        raise ConfigError(f"{said} (--skip-invalid leaves them out)")
    if not batch.lines:
        raise ConfigError("no entry became a task; nothing was written")
    if target is None:
        print_lines(batch.lines)
    else:
        write_lines(target, batch.lines, force=force)
    found = {"entries": batch.entries, "tasks": len(batch.lines), "skipped": len(batch.refused), "file": target}
    line = f"{batch.summary()}; written to {target or 'standard output'}"
    print_result(as_json, found, line, err=target is None)


def _target(out: Path | None, environment: str | None, split: str | None) -> Path | None:
    """Return the file to write; None means standard output."""
    if out is not None and (environment or split):
        raise ConfigError("--out is one place to write to, --environment and --split are another")
    if environment is None or split is None:
        if environment or split:
            raise ConfigError("--environment and --split go together")
        return None if out == Path("-") else out
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", split):
        raise ConfigError(f"--split {split}: a split's name has letters, digits, dots, dashes and underscores")
    folder = load_catalog(load().catalog_dir, names=(environment,)).default.tasks
    if folder is None:
        raise ConfigError(f"{environment} has no task folder: its environment.toml names none under [tasks]")
    return folder / f"{split}.jsonl"
