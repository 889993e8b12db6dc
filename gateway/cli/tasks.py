"""The commands ``gateway tasks …`` except ``import``: write, check and sign tasks; manage a running gateway's tasks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from string import Template
from typing import Annotated, Any

import typer
from envserver.generic.task import is_name
from rich.table import Table

from gateway.catalog.catalog import load_catalog
from gateway.cli.admin_client import (
    ASK_S,
    EXIT_REFUSED,
    LOCALHOST,
    AsJson,
    Key,
    Url,
    ask,
    counted,
    print_json,
    print_result,
    print_table,
)
from gateway.core.errors import ConfigError, TaskInvalid
from gateway.core.ports.tasks import BundleRefused
from gateway.settings import load
from gateway.stores.memory.tasks import MemoryTaskStore
from gateway.tasks.bundles import VALID, is_bundle, read_bundle
from gateway.tasks.documents import listed, read_file, read_yaml
from gateway.tasks.importing.batch import print_lines, write_lines
from gateway.tasks.registry import TaskRegistry
from gateway.tasks.runtime import RuntimeTasks
from gateway.tasks.schema import json_schema, parse, variants_of
from gateway.tasks.signing import BadSignature, NotSigned, make_keys, read_private, read_trusted, sign

TRY_S = 180.0
"""Maximum seconds for the trial of one task; longer than a gateway takes."""
TRY_ALL_S = 4 * TRY_S
"""Maximum seconds for the trial of several tasks in one request; longer than a gateway takes."""
ROUTE = "/admin/v1/tasks"
FORMATS = ("yaml", "json", "python")
TEMPLATES = Path(__file__).with_name("task_templates")
"""Task templates by environment; an environment without its own template uses ``other``."""
tasks_app = typer.Typer(no_args_is_help=True, help="Create, check, add, list and sign tasks.")

For = Annotated[str, typer.Option("--environment", "-e", help="Environment of tasks without env_type.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Write to this file, not to standard output.")]

Placed = list[tuple[str, object]]
"""Tasks, each with its location in a file."""


@tasks_app.command()
def new(
    environment: Annotated[str, typer.Argument(help="The environment's name.")],
    id: Annotated[str, typer.Option("--id", help="Id of the task.")] = "",
    out: Out = None,
    form: Annotated[str, typer.Option("--format", help="Format: yaml, json or python.")] = "yaml",
    as_json: AsJson = False,
) -> None:
    """Write an example task.

    \b
    Examples:
      gateway tasks new browser --id custom/login-test -o login.yaml
      gateway tasks new browser --format python -o my_task.py
    """
    _write(out, template(environment, id=id, form=form), as_json=as_json)


def template(environment: str, *, id: str = "", form: str = "yaml") -> str:
    """Return a task to start from; comments mark what to fill in (JSON has no comments).

    Args:
        environment: The environment's name; an unknown environment gets the fields that all environments share.
        id: The task's id; if empty, ``custom/my-task``.
        form: An element of `FORMATS`.

    Raises:
        ConfigError: A name is not valid, or the format is unknown.
    """
    id = id or "custom/my-task"
    if not is_name("env_type", environment):
        raise ConfigError(f"{environment!r} is not an environment's name")
    if not is_name("id", id):
        raise ConfigError(
            f"--id {id}: must have at most 200 letters, digits and characters of ._-/, and begin with a letter or digit"
        )
    if form not in FORMATS:
        raise ConfigError(f"--format {form}: must be one of {', '.join(FORMATS)}")
    name = id.rpartition("/")[2]
    words = [word for word in re.split(r"[^A-Za-z0-9]+", name) if word]
    class_name = "".join(word.capitalize() for word in words) + "Task"
    suffix = ".py.txt" if form == "python" else ".yaml"
    path = TEMPLATES / f"{environment}{suffix}"
    text = Template((path if path.is_file() else TEMPLATES / f"other{suffix}").read_text("utf-8")).substitute(
        environment=environment,
        id=id,
        name=name,
        function="judge_" + "_".join(words).lower(),
        class_name=class_name if class_name[0].isalpha() else f"Task{class_name}",
    )
    return json.dumps(read_yaml(text.encode()), indent=2, ensure_ascii=False) + "\n" if form == "json" else text


@tasks_app.command()
def schema(out: Out = None, as_json: AsJson = False) -> None:
    """Write the JSON Schema of a task."""
    _write(out, json_schema(), force=True, as_json=as_json)  # an existing file is an older schema


@tasks_app.command()
def validate(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE…", help="Files: .json, .jsonl, .yaml or bundles; -: stdin.")
    ],
    url: Annotated[
        str, typer.Option(help="URL of a gateway that opens an episode of each task.", envvar="GATEWAY_URL")
    ] = "",
    key: Key = "",
    local: Annotated[bool, typer.Option("--local", help="Use this machine's environments instead of --url.")] = False,
    environment: For = "",
    as_json: AsJson = False,
) -> None:
    """Check tasks by the schema; with --url also open and end an episode of each task.

    With --local the environments of GATEWAY_CATALOG_DIR say what they take, and nothing is started. The gateway also
    checks the signature of a bundle, and whether the bundle is for it.

    \b
    Examples:
      gateway tasks validate login.yaml
      gateway tasks validate tasks/*.jsonl -e math --local
      gateway tasks validate login.yaml --url http://127.0.0.1:8080 --key KEY
    """
    tried = url and not local
    checker = _local_checker() if local else None
    complaints: list[str] = []
    count = 0
    for file in files:
        try:
            content = read_file(file)
            documents = documents_of(content, file)
            count += len(documents)
            valid, problems = check_documents(documents, checker, environment)
            complaints += problems
            if tried:
                complaints += _tried(url, key, _whole(content), documents, valid, environment)
        except TaskInvalid as error:
            complaints += _lines(error)
    found = {"tasks": count, "tried": bool(tried), "problems": complaints}
    if complaints:
        print_result(as_json, found, *complaints, err=not as_json)
        raise typer.Exit(EXIT_REFUSED)
    how = "each was opened and ended" if tried else "each fits the schema; none was tried"
    hint = f"gateway tasks prove {files[0]}: plays each task with its reference, and without effort"
    print_result(as_json, found, f"{counted(count, 'task')}: {how}", hint)


@tasks_app.command()
def add(
    file: Annotated[Path, typer.Argument(help="File: .json, .jsonl, .yaml or a bundle; -: stdin.")],
    url: Url = LOCALHOST,
    key: Key = "",
    environment: For = "",
    split: Annotated[str, typer.Option("--split", "-s", help="Add them to this split.")] = "",
    replace: Annotated[bool, typer.Option("--replace", help="Replace existing tasks with the same ids.")] = False,
    validated: Annotated[
        bool, typer.Option("--validate", help="Add them only if an episode of each task opens.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Add all tasks of a file to a running gateway, or none. Trainers can open them immediately."""
    documents = _whole(read_file(file))
    query = {"environment": environment, "split": split}
    flags = {"replace": replace, "validate": validated}
    parameters = {name: value for name, value in query.items() if value} | {
        name: "true" for name, value in flags.items() if value
    }
    timeout_s = TRY_ALL_S if validated else ASK_S
    answer = ask(url, key, "POST", ROUTE, timeout_s=timeout_s, params=parameters, json=documents)
    lines = [
        f"{'replaced' if row['replaced'] else 'added'} {row['environment']} {row['id']} ({row['split']}/{row['index']})"
        for row in answer["tasks"]
    ]
    print_result(as_json, answer, *lines)


@tasks_app.command("list")
def list_tasks(
    url: Url = LOCALHOST,
    key: Key = "",
    environment: Annotated[str, typer.Option("--environment", "-e", help="List only tasks of this environment.")] = "",
    tag: Annotated[str, typer.Option("--tag", "-t", help="List only tasks with this tag.")] = "",
    split: Annotated[str, typer.Option("--split", "-s", help="List only tasks of this split.")] = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Stop after this many.")] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """List a running gateway's tasks from files and from the API."""
    parameters = {name: v for name, v in (("environment", environment), ("tag", tag), ("split", split)) if v}
    rows: list[dict[str, Any]] = []
    after: str | None = ""
    while after is not None and len(rows) < limit:
        page = {"after": after, "limit": str(min(1000, limit - len(rows)))}
        answer = ask(url, key, "GET", ROUTE, params={**parameters, **page})
        rows += answer["tasks"]
        after = answer["next"]
    if as_json:
        for row in rows:
            print_json(row)
        return
    columns = ("environment", "split", "index", "id", "tags", "source", "signed_by")
    table = Table(*columns, title=f"{counted(len(rows), 'task')}{', and there are more' if after is not None else ''}")
    for row in rows:
        shown = {**row, "tags": ", ".join(map(str, row["tags"]))}
        table.add_row(*("" if shown[column] is None else str(shown[column]) for column in columns))
    print_table(table)


@tasks_app.command()
def remove(
    environment: Annotated[str, typer.Argument(help="The task's environment.")],
    id: Annotated[str, typer.Argument(help="The task's id.")],
    url: Url = LOCALHOST,
    key: Key = "",
    as_json: AsJson = False,
) -> None:
    """Remove a task that was added at run time; its open sessions continue."""
    ask(url, key, "DELETE", f"{ROUTE}/{environment}/{id}")
    print_result(as_json, {"environment": environment, "id": id}, f"removed {environment} {id}")


@tasks_app.command()
def keygen(
    file: Annotated[Path, typer.Argument(help="File for the private key; the public key is FILE.pub.")],
    as_json: AsJson = False,
) -> None:
    """Create a key pair for signing tasks; copy the public key to the folder GATEWAY_TASK_KEYS."""
    public, id = make_keys(file)
    line = f"{file}: the private key, keep it; {public}: the public key {id}"
    print_result(as_json, {"private": file, "public": public, "id": id}, line)


@tasks_app.command("sign")
def sign_command(
    file: Annotated[Path, typer.Argument(help="File: .json, .jsonl or .yaml.")],
    key: Annotated[Path, typer.Option("--key", "-k", help="The private key.")],
    out: Out = None,
    valid_days: Annotated[
        int, typer.Option("--valid-for", min=1, max=3650, help="Days after which no gateway accepts the bundle.")
    ] = VALID.days,
    instance: Annotated[
        str, typer.Option(help="GATEWAY_INSTANCE of the gateways that the bundle is for; without it, all gateways.")
    ] = "",
    environment: Annotated[
        str, typer.Option("--environment", "-e", help="Environment of all tasks; without it, each task's env_type.")
    ] = "",
    split: Annotated[str, typer.Option("--split", "-s", help="Split of all tasks; without it, each task's own.")] = "",
    as_json: AsJson = False,
) -> None:
    """Sign tasks: write a bundle with a signature, so that gateways detect any change.

    Gateways accept no bundle after a newer one of the same key that may hold the same tasks.

    \b
    Examples:
      gateway tasks sign login.yaml --key lab -o login.bundle.json
      gateway tasks sign train.jsonl --key lab -e math -s train --instance lab-1 --valid-for 7
    """
    documents = documents_of(read_file(file), file)
    for where, document in documents:
        try:
            parse(_placed(document, environment), is_registered=True)
        except TaskInvalid as error:
            raise TaskInvalid(error.problems, where=where) from None
    bundle = sign(
        [document for _, document in documents],
        read_private(key),
        valid=timedelta(days=valid_days),
        instance=instance,
        environment=environment,
        split=split,
    )
    _write(out, json.dumps(bundle, ensure_ascii=False, indent=1) + "\n", as_json=as_json)


@tasks_app.command()
def verify(
    bundle: Annotated[Path, typer.Argument(help="A file that `gateway tasks sign` wrote.")],
    keys: Annotated[Path, typer.Option("--keys", help="A public key, or a folder of them.")],
    as_json: AsJson = False,
) -> None:
    """Check that the signature of a bundle is valid for its content, and that the bundle has not expired."""
    document = _whole(read_file(bundle))
    try:
        found = read_trusted(keys).verify(document)
        found.check_time(datetime.now(UTC))
    except (NotSigned, BadSignature, BundleRefused) as error:
        raise ConfigError(f"{bundle}: {error.detail}") from None
    print_result(
        as_json,
        found.model_dump(mode="json", exclude={"tasks"}) | {"tasks": len(found.tasks)},
        f"{counted(len(found.tasks), 'task')}, signed with the key {found.key} at {found.made_at}, until "
        f"{found.expires}; instance: {found.instance or 'any'}; environment: "
        f"{found.environment or 'that of each task'}; split: {found.split or 'that of each task'}",
    )


def _whole(content: Placed) -> object:
    """Return the tasks of a file as one document to send: a bundle unchanged."""
    documents = [document for _, document in content]
    if len(documents) == 1 and is_bundle(documents[0]):
        return documents[0]
    return {"tasks": documents}


def documents_of(content: Placed, file: Path) -> Placed:
    """Return a file's tasks, each with its location; for a bundle return its tasks, unverified."""
    found: Placed = []
    for where, document in content:
        if is_bundle(document):
            bundle = read_bundle(document)
            tasks = [_placed(task, bundle.environment) for task in bundle.tasks]
            found += [(f"{where}: {place}", task) for place, task in listed({"tasks": tasks})]
        else:
            found.append((where, document))
    if not found:
        raise TaskInvalid([("", "there is no task")], where=str(file))
    return found


def _placed(document: object, environment: str) -> object:
    """Return a task with *environment* as its ``env_type``, if it has none."""
    if isinstance(document, Mapping) and environment and not document.get("env_type"):
        return {**document, "env_type": environment}
    return document


def _local_checker() -> RuntimeTasks:
    catalog = load_catalog(load().catalog_dir)
    registry = TaskRegistry({}, env_types={one.name: one.env_types for one in catalog})
    return RuntimeTasks(registry=registry, store=MemoryTaskStore(), catalog=catalog)


def check_documents(documents: Placed, checker: RuntimeTasks | None, environment: str) -> tuple[Placed, list[str]]:
    """Return the valid tasks, and a line for each problem of the others."""
    valid: Placed = []
    complaints: list[str] = []
    for where, document in documents:
        try:
            if checker is None:
                for one in variants_of(document):
                    parse(one)
            else:
                checker.check([("", document)], environment=environment)
            valid.append((where, document))
        except TaskInvalid as error:
            complaints += _lines(error, where)
    return valid, complaints


def _tried(url: str, key: str, whole: object, documents: Placed, valid: Placed, environment: str) -> list[str]:
    """Let a gateway open each valid task of a file. Return a line for each one that does not open."""
    if not is_bundle(whole):
        return [line for place, task in valid for line in _try(url, key, [place], task, environment)]
    # A gateway that requires signatures accepts these tasks only in their bundle.
    return _try(url, key, [place for place, _ in documents], whole, environment) if valid == documents else []


def _try(url: str, key: str, places: list[str], document: object, environment: str) -> list[str]:
    """Let the gateway open an episode of each task in *document*. *places* are the tasks' locations, for messages."""
    parameters = {"environment": environment} if environment else {}
    where, timeout_s = (places[0], TRY_S) if len(places) == 1 else ("", TRY_ALL_S)
    route = f"{ROUTE}/validate"
    answer = ask(url, key, "POST", route, timeout_s=timeout_s, params=parameters, json=document, where=where)
    rows = answer["results"]
    if len(rows) != len(places):  # a line with ``seeds`` stands for several tasks
        places = [row["id"] for row in rows]
    results = zip(places, rows, strict=True)
    return [f"{place}: {row['code']}: {row['detail']}" for place, row in results if not row["ok"]]


def _lines(error: TaskInvalid, where: str = "") -> list[str]:
    """Return one line for each problem, with its location."""
    if not where:
        return [error.detail]
    return [f"{where}: {path}: {message}" if path else f"{where}: {message}" for path, message in error.problems]


def _write(out: Path | None, text: str, *, force: bool = False, as_json: bool) -> None:
    lines = text.rstrip("\n").encode().split(b"\n")
    file = None if out == Path("-") else out
    if file is None:
        print_lines(lines)
    else:
        write_lines(file, lines, force=force)
    print_result(as_json, {"file": file}, err=file is None)
