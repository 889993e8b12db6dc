"""The commands ``gateway env …``, which add environments for third-party servers and show existing environments."""

from __future__ import annotations

import asyncio
import re
import secrets
import signal
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gateway import BUNDLED
from gateway.catalog.catalog import Catalog, describe, load_catalog
from gateway.catalog.inspect.findings import Finding, Findings, Ran, TrialRequest
from gateway.catalog.inspect.toml_writer import (
    NAME,
    check_name,
    check_place,
    file_text,
    memory_mib,
    needs_folder,
    task_folder,
)
from gateway.catalog.toml import parse_environment
from gateway.cli.admin_client import AsJson, print_json, print_table
from gateway.core.environment import Environment, Server
from gateway.core.errors import ConfigError
from gateway.core.ids import EnvironmentName
from gateway.settings import OWN_CATALOG, Settings, load
from gateway.tasks.importing.batch import write_lines

env_app = typer.Typer(no_args_is_help=True, help="Add environments, and list them.")
URL = re.compile(r"https?://")
MIB = 2**20
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

CatalogFolder = Annotated[Path | None, typer.Option("--catalog", help="Folder of environments (GATEWAY_CATALOG_DIR).")]


@env_app.command()
def add(
    what: Annotated[
        str, typer.Argument(metavar="IMAGE|URL", help="An image on the Docker engine, or a running server.")
    ],
    name: Annotated[
        str, typer.Option("--name", "-n", help="Name for trainers; by default a part of IMAGE or URL.")
    ] = "",
    port: Annotated[
        int, typer.Option("--port", "-p", min=0, max=65535, help="Port of the server in IMAGE; 0 detects it.")
    ] = 0,
    environment: Annotated[
        str, typer.Option("--environment", "-e", help="Environment to add, if the server has several.")
    ] = "",
    every: Annotated[
        bool, typer.Option("--all", "-a", help="Add each environment of the server, as NAME-ENVIRONMENT.")
    ] = False,
    variable: Annotated[
        list[str] | None, typer.Option("--variable", "-v", help="NAME=VALUE for IMAGE; may be repeated.")
    ] = None,
    catalog: CatalogFolder = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite an existing file.")] = False,
    dry: Annotated[bool, typer.Option("--print", help="Print the file instead of writing it.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", "-t", min=1, help="Seconds until a start fails.")] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Inspect a server, and write the findings into an environment.toml.

    The command starts an IMAGE as the gateway would, without network and hardened. It loosens the hardening only as
    far as the image needs, and removes the container. A URL is a server that runs already: the command starts nothing.

    \b
    Examples:
      gateway env add my-openenv-image:1.2
      gateway env add my-image --name chess --port 8004 --variable MAX_CONCURRENT_ENVS=8
      gateway env add http://10.0.0.7:8000 --name remote
    """
    settings = load()
    folder = catalog or settings.catalog_dir
    if folder.is_relative_to(BUNDLED):  # an upgrade would delete the new file
        folder = OWN_CATALOG
    is_url = URL.match(what) is not None
    variables = _variables(variable or [])
    if is_url and (port or variables):
        raise ConfigError("--port and --variable are for an image; a server that runs has them already")
    if every and environment:
        raise ConfigError("--environment adds one environment, and --all adds each: give one of the two")
    named = check_name(name or default_name(what))
    if not (dry or every):  # checked before the inspection, which takes minutes
        check_place(folder, named, force=force)
    wanted = TrialRequest(image=what, port=port, environment=environment, variables=variables, timeout_s=timeout)
    found = [(named, *_look(settings, wanted))]
    if every and len(others := found[0][1].environments) > 1:
        found = [
            (_part_name(named, one), *(found[0][1:] if at == 0 else _look(settings, replace(wanted, environment=one))))
            for at, one in enumerate(others)
        ]
    texts = {one: file_text(one, findings, ran=ran, url=what if is_url else "") for one, findings, ran in found}
    paths = {} if dry else {one: check_place(folder, one, force=force) for one in texts}
    for one, findings, _ in found if paths else ():
        if needs_folder(findings):
            _make_folder(task_folder(one, paths[one]))
        put(paths[one], texts[one], force=force)
    if as_json:
        documents = [
            {
                "environment": one,
                "file": paths.get(one),
                "findings": asdict(findings),
                "ran": ran and asdict(ran),
                "text": texts[one],
            }
            for one, findings, ran in found
        ]
        print_json(documents if every else documents[0])
        return
    for one, findings, ran in found:
        if dry:
            typer.echo(texts[one].rstrip("\n"))
        else:
            _report(one, findings, ran, paths[one])


def _part_name(name: str, environment: str) -> str:
    """Return the name for one of several *environments* of a server that is added as *name*. Raises ``ConfigError``."""
    return check_name(f"{name}-{re.sub(r'[^a-z0-9_-]+', '-', environment.lower()).strip('-_')}"[:63])


@env_app.command("list")
def list_command(catalog: CatalogFolder = None, as_json: AsJson = False) -> None:
    """List the environments of the catalog."""
    environments = load_catalog(catalog or load().catalog_dir)
    if as_json:
        print_json([describe(environment) for environment in environments])
        return
    table = Table("environment", "protocol", "runs", "workers", "loosened")
    for environment in environments:
        shown = describe(environment)
        table.add_row(
            *map(escape, (environment.name, shown["protocol"], shown["image"], shown["workers"], _loosened(shown)))
        )
    print_table(table)


@env_app.command()
def show(
    name: Annotated[str, typer.Argument(help="Name of the environment.")],
    catalog: CatalogFolder = None,
    as_json: AsJson = False,
) -> None:
    """Show an environment as the gateway reads it from its file."""
    environment = load_catalog(catalog or load().catalog_dir, names=(name,)).default
    if as_json:
        print_json({"file": environment.directory / "environment.toml", **describe(environment)})
        return
    table = Table("what", "value", title=f"{environment.directory / 'environment.toml'}")
    for what, value in _rows(environment):
        table.add_row(what, escape(value))
    print_table(table)


def default_name(what: str) -> str:
    """Make an environment's name from an image or URL: its last part, without tag and digest.

    Raises:
        ConfigError: No part of it can be a name.
    """
    if URL.match(what):
        host, _, path = URL.sub("", what).strip("/").partition("/")
        part = path.rpartition("/")[2] or host.rpartition("@")[2].partition(":")[0]
    else:
        part = what.partition("@")[0].rpartition("/")[2].partition(":")[0]
    made = re.sub(r"[^a-z0-9_-]+", "-", part.lower()).strip("-_")
    if made[:1].isdigit():  # usually an IP address
        made = f"env-{made}"
    if not NAME.fullmatch(made):
        raise ConfigError(f"{what!r} contains no valid name for an environment: choose one with --name")
    return made


async def _of_url(url: str, environment: str, timeout_s: float) -> Findings:
    with Console(stderr=True).status(f"looking at {escape(url)}"):
        from gateway.catalog.inspect.detect import detect_url

        return await detect_url(url, timeout_s=timeout_s, environment=environment)


def _look(settings: Settings, wanted: TrialRequest) -> tuple[Findings, Ran | None]:
    if URL.match(wanted.image):
        return asyncio.run(_of_url(wanted.image, wanted.environment, wanted.timeout_s)), None
    try:
        return asyncio.run(_run_image(settings, wanted))
    except asyncio.CancelledError:  # SIGTERM
        typer.echo("interrupted: what was started is removed, and nothing was written", err=True)
        raise typer.Exit(128 + signal.SIGTERM) from None


async def _run_image(settings: Settings, wanted: TrialRequest) -> tuple[Findings, Ran]:
    # Imported here because other commands need neither the Docker SDK nor the adapters.
    from gateway.adapters import make_backend
    from gateway.catalog.inspect.image import ImageInspector
    from gateway.catalog.inspect.trial import TrialRuns

    # A separate instance, because a gateway that runs on this engine would remove the container as an orphan.
    own = {"backend": "docker", "instance": f"{settings.instance[:40]}-inspection-{secrets.token_hex(4)}"}
    stand_in = Environment(
        name=EnvironmentName("inspection"),
        image=wanted.image,
        directory=Path(),
        command=(),
        server=Server(port=wanted.port or 1),
    )
    backend = make_backend(settings.model_copy(update=own), Catalog([stand_in]))
    looking = ImageInspector(settings.docker_url)
    _let_sigterm_clean_up()
    try:
        trials = TrialRuns(backend=backend, looking=looking, tell=lambda line: typer.echo(line, err=True))
        return await trials.run(wanted)
    finally:
        await looking.aclose()
        await backend.aclose()


def _let_sigterm_clean_up() -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def put(path: Path, text: str, *, force: bool) -> Environment:
    """Write *text* at *path* atomically, and return the environment that it defines.

    Raises:
        ConfigError: The text is not valid, a file was created there meanwhile, or the folder cannot be written.
    """
    environment = parse_environment(text, path)
    _make_folder(path.parent)
    write_lines(path, text.encode().splitlines(), force=force)
    return environment


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from error


def _variables(given: list[str]) -> dict[str, str]:
    variables: dict[str, str] = {}
    for entry in given:
        name, sign, value = entry.partition("=")
        if not sign or not VARIABLE.fullmatch(name) or name.startswith("ENVSERVER_"):
            raise ConfigError(f"--variable {entry}: NAME=VALUE; a name has letters, digits and underscores")
        variables[name] = value
    return variables


def _report(name: str, findings: Findings, ran: Ran | None, path: Path) -> None:
    table = Table("what", "found", title=f"environment {name}")
    rows: list[tuple[str, str]] = [
        ("protocol", f"{findings.protocol.value} ({findings.version})"),
        ("its environments", ", ".join(findings.environments) or "no names"),
        ("sessions at once", _capacity(findings)),
        ("tasks of its own", ", ".join(f"{s.name} {_count(s.count)}" for s in findings.splits) or "none"),
        ("tools", ", ".join(findings.tools) or f"actions with {', '.join(findings.fields) or 'text'}"),
        ("a text goes to", _text_goes_to(findings)),
    ]
    if ran is not None:
        rows += [
            ("port", "a Unix socket" if findings.is_own else str(ran.port)),
            ("loosened", ", ".join(ran.loosened.words()) or "nothing"),
            ("memory", _memory(ran)),
            ("up after", "unknown" if ran.start_s is None else f"{ran.start_s:.1f} s"),
        ]
    if findings.trouble:
        rows.append(("session of trial", f"failed: {findings.trouble}"))
    for what, value in rows:
        table.add_row(what, escape(value))
    print_table(table)
    for after, text in findings.reads:
        typer.echo(f"after {after} an agent reads: {text}")
    for remark in findings.remarks:
        typer.echo(f"note: {remark}")
    typer.echo(f"written: {path}")
    before = f"GATEWAY_CATALOG_DIR={path.parent.parent} " + ("GATEWAY_BACKEND=docker " if ran is not None else "")
    typer.echo(f"next: read it, then `{before}gateway check`, then `{before}gateway serve`;")
    typer.echo("      a gateway that runs offers it within seconds")
    typer.echo(
        f"trainers find it at /{name} (ORS), /openenv/{name} (OpenEnv), /areal/{name} (AReaL), /nemo/{name} (NeMo Gym)"
    )


def _capacity(findings: Findings) -> str:
    slots = findings.capacity.slots
    return {
        Finding.BY_SERVER: f"{slots}",
        Finding.AT_LEAST: f"at least {slots}",
        Finding.ASSUMED: f"not reported; {slots} assumed",
        Finding.IN_DOUBT: f"at least {slots}; each worker is asked as it starts",
    }[findings.capacity.told]


def _count(count: int | None) -> str:
    return "?" if count is None else str(count)


def _text_goes_to(findings: Findings) -> str:
    if findings.terminal:
        return findings.terminal
    if findings.text_field:
        return ".".join(filter(None, (findings.default_tool, findings.text_field)))
    if findings.default_tool:
        return f"{findings.default_tool}, field unknown: see [actions]"
    return "the server as it is" if not (findings.tools or findings.fields) else "unknown: see [actions]"


def _memory(ran: Ran) -> str:
    if ran.memory_bytes is None:
        return "not reported by the engine"
    return f"{ran.memory_bytes / MIB:.0f} MiB used, {memory_mib(ran.memory_bytes)} MiB allowed"


def _loosened(shown: Mapping[str, Any]) -> str:
    return ", ".join(shown["loosened"]) or "nothing"


def _rows(environment: Environment) -> list[tuple[str, str]]:
    shown, server = describe(environment), environment.server
    rows = [
        ("name", environment.name),
        ("description", environment.description or "none"),
        ("runs", shown["image"]),
        ("protocol", f"{shown['protocol']}{'' if server.is_foreign else ', our own server'}"),
        ("listens at", server.url or (f"port {server.port}" if server.port else "its Unix socket")),
        ("isolation", shown["isolation"]),
        ("workers", shown["workers"]),
        ("memory of each", f"{environment.limits.memory_bytes // MIB} MiB"),
        ("idle sessions end after", f"{shown['idle_s']:g} s"),
        ("loosened", _loosened(shown)),
        ("tasks", str(environment.tasks or "its own")),
    ]
    if server.is_foreign:
        rows += [
            (
                "text goes to",
                ".".join(filter(None, (environment.actions.default_tool, environment.actions.text_field))),
            ),
            ("reset looks at", ", ".join(environment.resets.keys) if environment.protocol == "openenv" else "-"),
        ]
    return rows
