"""The commands ``gateway keys …``, which change the file of keys that the gateways read."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.table import Table

from gateway.cli.admin_client import AsJson, counted, print_json, print_result, print_table
from gateway.core.errors import ConfigError
from gateway.core.validation import reason_of
from gateway.settings import Settings, load
from gateway.settings.keys import NO_LIMITS, KeyLimits, Role, add_key, parse_keys, read_keys, revoke_key

keys_app = typer.Typer(no_args_is_help=True, help="Make, list and revoke the keys of trainers and operators.")

Name = Annotated[str, typer.Argument(help="Name of the key; sessions belong to it.")]


@keys_app.command("add")
def add(
    name: Name,
    operator: Annotated[
        bool, typer.Option("--operator", help="A key for /admin/v1 and /metrics, not for sessions.")
    ] = False,
    max_sessions: Annotated[int, typer.Option(help="Most sessions at the same time; 0: no limit.")] = 0,
    pool_share: Annotated[float, typer.Option(help="Most of each environment's slots, from above 0 to 1.")] = 1.0,
    opens_per_s: Annotated[float, typer.Option(help="Most openings per second on average; 0: no limit.")] = 0.0,
    calls_per_s: Annotated[float, typer.Option(help="Most calls per second in one replica; 0: no limit.")] = 0.0,
    max_held_bytes: Annotated[
        int, typer.Option(help="Most bytes of its requests in one replica; 0: GATEWAY_MAX_HELD_BYTES_PER_KEY.")
    ] = 0,
    environments: Annotated[str, typer.Option(help="Environments that it may use, comma-separated; empty: all.")] = "",
    as_json: AsJson = False,
) -> None:
    """Make a key and print it. Only its hash is kept, so it is shown this one time.

    \b
    Examples:
      gateway keys add alice
      gateway keys add bob --max-sessions 200 --pool-share 0.5 --environments math,game
      gateway keys add ops --operator
    """
    settings = load()
    if any(name in parse_keys(keys) for keys in (settings.trainer_keys, settings.operator_keys)):
        raise ConfigError(f"the settings have a key {name!r}: choose another name")
    try:
        limits = KeyLimits(
            max_sessions=max_sessions,
            pool_share=pool_share,
            opens_per_s=opens_per_s,
            calls_per_s=calls_per_s,
            max_held_bytes=max_held_bytes,
            environments=tuple(one.strip() for one in environments.split(",") if one.strip()),
        )
    except ValidationError as error:
        problems = [f"--{str(one['loc'][0]).replace('_', '-')}: {reason_of(one)}" for one in error.errors()]
        raise ConfigError("; ".join(problems)) from None
    if operator and limits != NO_LIMITS:
        raise ConfigError("an operator's key opens no sessions and has no limits: leave out --operator or the limits")
    role = Role.OPERATOR if operator else Role.TRAINER
    is_first = not settings.keys_path.exists()
    made = add_key(settings.keys_path, name, role=role, limits=limits)
    print_result(as_json, {"name": name, "role": role.value, "key": made, "file": settings.keys_path}, made)
    typer.echo(f"its hash is in {settings.keys_path}; running gateways accept the key within a second", err=True)
    if is_first:
        typer.echo(
            f"From now on every gateway with this state folder ({settings.state_dir}) refuses requests without a key. "
            f"To undo this, remove {settings.keys_path}, and start the gateways again.",
            err=True,
        )


@keys_app.command("list")
def list_keys(as_json: AsJson = False) -> None:
    """List all keys with their limits."""
    rows = _rows(load())
    if as_json:
        print_json(rows)
        return
    table = Table("name", "for", "created", "limits", title=counted(len(rows), "key"))
    for row in rows:
        limits = ", ".join(f"{limit}={value}" for limit, value in row["limits"].items())
        table.add_row(row["name"], row["role"], row["created"], limits or "none")
    print_table(table)


def _rows(settings: Settings) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"name": name, "role": role.value, "created": "in the settings", "limits": {}}
        for role, keys in ((Role.TRAINER, settings.trainer_keys), (Role.OPERATOR, settings.operator_keys))
        for name in parse_keys(keys)
    ]
    path = settings.keys_path
    for key in read_keys(path) if path.exists() else ():
        limits = key.limits.model_dump(mode="json", exclude_defaults=True)
        rows.append({"name": key.name, "role": key.role.value, "created": key.created, "limits": limits})
    return rows


@keys_app.command("revoke")
def revoke(name: Name, as_json: AsJson = False) -> None:
    """Remove a key. Running gateways refuse it within a second, and its sessions expire."""
    path = load().keys_path
    revoke_key(path, name)
    line = f"{name} is revoked in {path}; running gateways refuse the key within a second"
    print_result(as_json, {"revoked": name, "file": path}, line)
