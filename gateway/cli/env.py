"""The commands ``gateway env …``: make an environment of somebody else's server, and show those that are there."""

from __future__ import annotations

import asyncio
import re
import secrets
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gateway import BUNDLED
from gateway.catalog.catalog import Catalog, describe, load_catalog
from gateway.catalog.inspect.findings import Finding, Findings, Ran, TrialRequest
from gateway.catalog.inspect.toml_writer import NAME, check_name, check_place, file_text, memory_mib
from gateway.catalog.toml import parse_environment
from gateway.cli.admin_client import print_table
from gateway.core.environment import Environment, Server
from gateway.core.errors import ConfigError
from gateway.core.ids import EnvironmentName
from gateway.settings import OWN_CATALOG, Settings, load
from gateway.tasks.importing.batch import write_lines

env_app = typer.Typer(no_args_is_help=True, help="Add environments, and show those that are there.")
URL = re.compile(r"https?://")
MIB = 2**20
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

CatalogFolder = Annotated[Path | None, typer.Option("--catalog", help="Folder of environments (GATEWAY_CATALOG_DIR).")]


@env_app.command()
def add(
    what: Annotated[str, typer.Argument(metavar="IMAGE|URL", help="An image of the engine, or a server that runs.")],
    name: Annotated[str, typer.Option("--name", "-n", help="What trainers call it; else made of IMAGE or URL.")] = "",
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help="Where IMAGE listens; 0 finds out.")] = 0,
    environment: Annotated[str, typer.Option("--environment", "-e", help="The one to add of several served.")] = "",
    variable: Annotated[list[str] | None, typer.Option("--variable", "-v", help="NAME=VALUE, for IMAGE.")] = None,
    catalog: CatalogFolder = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite a file that is there.")] = False,
    dry: Annotated[bool, typer.Option("--print", help="Print the file, and write nothing.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", "-t", min=1, help="Seconds that a start may take.")] = 60.0,
) -> None:
    """Look at a server, and write an environment.toml that says what was found.

    An IMAGE is started as the gateway would start it, without network and hardened, and a little less so if it does
    not work like that; it is removed again. A URL is a server that somebody else runs: nothing is started.

    \b
    Examples:
      gateway env add my-openenv-image:1.2
      gateway env add my-image --name chess --port 8004 --variable MAX_CONCURRENT_ENVS=8
      gateway env add http://10.0.0.7:8000 --name remote
    """
    settings = load()
    folder = catalog or settings.catalog_dir
    if folder.is_relative_to(BUNDLED):  # an upgrade would lose it
        folder = OWN_CATALOG
    is_url = URL.match(what) is not None
    variables = _variables(variable or [])
    if is_url and (port or variables):
        raise ConfigError("--port and --variable are for an image; a server that runs has them already")
    named = check_name(name or default_name(what))
    if not dry:  # before minutes are spent
        check_place(folder, named, force=force)
    wanted = TrialRequest(image=what, port=port, environment=environment, variables=variables, timeout_s=timeout)
    findings, ran = _look(settings, wanted)
    text = file_text(named, findings, ran=ran, url=what if is_url else "")
    if dry:
        typer.echo(text, nl=False)
        return
    path = check_place(folder, named, force=force)
    put(path, text, force=force)
    _report(named, findings, ran, path)


@env_app.command("list")
def list_command(catalog: CatalogFolder = None) -> None:
    """List the environments of the catalog."""
    table = Table("environment", "protocol", "runs", "workers", "loosened")
    for environment in load_catalog(catalog or load().catalog_dir):
        shown = describe(environment)
        table.add_row(
            *map(escape, (environment.name, shown["protocol"], shown["image"], shown["workers"], _loosened(shown)))
        )
    print_table(table)


@env_app.command()
def show(
    name: Annotated[str, typer.Argument(help="Of the environment.")],
    catalog: CatalogFolder = None,
) -> None:
    """Show what the gateway makes of an environment's file."""
    environment = load_catalog(catalog or load().catalog_dir, names=(name,)).default
    table = Table("what", "value", title=f"{environment.directory / 'environment.toml'}")
    for what, value in _rows(environment):
        table.add_row(what, escape(value))
    print_table(table)


def default_name(what: str) -> str:
    """Make a name for an environment of an image's name or a URL: its last part, without tag and digest.

    Raises:
        ConfigError: nothing of it can be one.
    """
    if URL.match(what):
        host, _, path = URL.sub("", what).strip("/").partition("/")
        part = path.rpartition("/")[2] or host.rpartition("@")[2].partition(":")[0]
    else:
        part = what.partition("@")[0].rpartition("/")[2].partition(":")[0]
    made = re.sub(r"[^a-z0-9_-]+", "-", part.lower()).strip("-_")
    if made[:1].isdigit():  # an address, mostly
        made = f"env-{made}"
    if not NAME.fullmatch(made):
        raise ConfigError(f"no name for an environment can be made of {what!r}: choose one with --name")
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
    # Needed here only: the Docker SDK, and every adapter.
    from gateway.adapters import make_backend
    from gateway.catalog.inspect.image import ImageInspector
    from gateway.catalog.inspect.trial import TrialRuns

    # Of an instance of its own: a gateway that runs on this engine would take the container for an orphan of its own.
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
    """Write *text* at *path*, whole or not at all, and return what it means.

    Raises:
        ConfigError: it does not load, a file has come to be there meanwhile, or the folder cannot be written.
    """
    environment = parse_environment(text, path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    write_lines(path, text.encode().splitlines(), force=force)
    return environment


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
    for remark in findings.remarks:
        typer.echo(f"note: {remark}")
    typer.echo(f"written: {path}")
    before = f"GATEWAY_CATALOG_DIR={path.parent.parent} " + ("GATEWAY_BACKEND=docker " if ran is not None else "")
    typer.echo(f"next: read it, then `{before}gateway check`, then `{before}gateway serve`;")
    typer.echo(f"      trainers find it at /{name} (ORS), /areal/{name} (AReaL) and /openenv/{name} (OpenEnv)")


def _capacity(findings: Findings) -> str:
    slots = findings.capacity.slots
    return {
        Finding.BY_SERVER: f"{slots}",
        Finding.AT_LEAST: f"at least {slots}",
        Finding.ASSUMED: f"not told; {slots} assumed",
    }[findings.capacity.told]


def _count(count: int | None) -> str:
    return "?" if count is None else str(count)


def _text_goes_to(findings: Findings) -> str:
    if findings.terminal:
        return findings.terminal
    if findings.text_field:
        return ".".join(filter(None, (findings.default_tool, findings.text_field)))
    if findings.default_tool:
        return f"{findings.default_tool}, to no field that can be told"
    return "the server as it is" if not (findings.tools or findings.fields) else "cannot be told: see [actions]"


def _memory(ran: Ran) -> str:
    if ran.memory_bytes is None:
        return "not told by the engine"
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
