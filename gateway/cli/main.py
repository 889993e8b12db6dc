"""The command ``gateway``. Each command is in a module of its own, which is imported when the command runs.

So ``gateway serve`` does not load the other commands, which would take a fifth of its start.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from gateway import __version__
from gateway.core.errors import GatewayError

COMMANDS: Final[Mapping[str, str]] = {
    "serve": "serve:serve",
    "check": "check:check",
    "doctor": "doctor:doctor",
    "top": "top:top",
    "ps": "operate:ps",
    "logs": "top:logs",
    "restart": "operate:restart",
    "sessions": "sessions:sessions_app",
    "run": "run:run",
    "replay": "replays:replay",
    "audit": "replays:audit",
    "verify": "sessions:verify",
    "report": "report:report",
    "tasks": "imports:tasks_app",
    "curricula": "curricula:curricula_app",
    "env": "env:env_app",
    "keys": "keys:keys_app",
    "node": "node:node_app",
    "certs": "operate:certs",
    "version": "operate:version",
}
"""Module in this package, and the function or the group of commands in it, by the command's name."""
EXIT_CONFIG = 2


class _Commands(TyperGroup):
    """The commands of `COMMANDS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        found = getattr(import_module(f"gateway.cli.{module}"), name)
        parent = typer.Typer(add_completion=False)
        if isinstance(found, typer.Typer):
            parent.add_typer(found, name=cmd_name)
        else:
            parent.command(cmd_name)(found)
        return typer.main.get_group(parent).commands[cmd_name]


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    help="A gateway between RL trainers and environments.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _commands(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_tell_version, is_eager=True)
    ] = False,
) -> None:
    """A gateway between RL trainers and environments."""


def main() -> None:
    """Run the command; print an error that an operator can fix as one line, with exit status 2 and no traceback."""
    for stream in (sys.stdout, sys.stderr):  # an agent may write a lone surrogate; so written, it is valid in JSON
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except GatewayError as error:
        print(f"gateway: {error.detail}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
