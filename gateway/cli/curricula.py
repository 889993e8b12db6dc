"""The commands ``gateway curricula …``, which show and reset a running gateway's curricula."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from gateway.cli.admin_client import LOCALHOST, AsJson, Key, Url, ask, counted, print_json, print_result, print_table
from gateway.frontends.dashboard.rendering import when

ROUTE = "/admin/v1/curriculum"
curricula_app = typer.Typer(no_args_is_help=True, help="List, show and restart a running gateway's curricula.")

Name = Annotated[str, typer.Argument(help="The curriculum's name.")]


@curricula_app.command("list")
def list_curricula(url: Url = LOCALHOST, key: Key = "", as_json: AsJson = False) -> None:
    """List the curricula of files and of the API."""
    rows = ask(url, key, "GET", ROUTE)["curricula"]
    if as_json:
        print_json(rows)
        return
    table = Table("name", "split", "sampler", "environments", "source", title=f"{len(rows)} curricula")
    for row in rows:
        table.add_row(row["name"], row["split"], row["sampler"], ", ".join(row["environments"]), row["source"])
    print_table(table)


@curricula_app.command("show")
def show(
    name: Name,
    url: Url = LOCALHOST,
    key: Key = "",
    environment: Annotated[
        str, typer.Option("--environment", "-e", help="Show only the draws from this environment.")
    ] = "",
    tasks: Annotated[int, typer.Option("--tasks", "-n", min=0, help="Number of tasks to list, most drawn first.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show a curriculum's stage and progress, and the tasks that it draws most often."""
    query = {"tasks": str(tasks)} | ({"environment": environment} if environment else {})
    state = ask(url, key, "GET", f"{ROUTE}/{name}", params=query)
    if as_json:
        print_json(state)
        return
    shares = ", ".join(f"{one} {share:.0%}" for one, share in state["shares"].items())
    sampler = state["definition"]["sampler"]["kind"]
    typer.echo(f"{name}: {sampler} over {state['tasks']} tasks ({shares}), {state['handles']} handles")
    for standing in state["standings"]:
        typer.echo(_standing(standing))
    table = Table("environment", "split", "index", "task", "share", "attempts", "newest rewards")
    for row in state["heaviest"]:
        record = row["record"] or {"attempts": 0, "recent": []}
        newest = " ".join(f"{reward:g}" for reward in record["recent"][-8:])
        place = (row["environment"], row["split"], str(row["index"]), row["task"])
        table.add_row(*place, f"{row['share']:.2%}", str(record["attempts"]), newest)
    print_table(table)


@curricula_app.command("reset")
def reset(name: Name, url: Url = LOCALHOST, key: Key = "", as_json: AsJson = False) -> None:
    """Restart a curriculum: remove its draws, groups and stages, and keep the records."""
    ask(url, key, "POST", f"{ROUTE}/{name}/reset")
    print_result(as_json, {"curriculum": name, "reset": True}, f"{name} begins anew; records stay")


@curricula_app.command("clear")
def clear(
    environment: Annotated[str, typer.Argument(help="Remove the records of this environment's tasks.")],
    task: Annotated[str, typer.Argument(help="Remove only the record of this task.")] = "",
    url: Url = LOCALHOST,
    key: Key = "",
    as_json: AsJson = False,
) -> None:
    """Remove the records of an environment's tasks, or of one task, and keep draws and stages."""
    query = {"environment": environment} | ({"task": task} if task else {})
    found = ask(url, key, "DELETE", "/admin/v1/records", params=query)
    print_result(as_json, found, f"removed {counted(found['removed'], 'record')} of {environment}")


@curricula_app.command("marks")
def marks(
    environment: Annotated[
        str, typer.Option("--environment", "-e", help="Only marked tasks of this environment.")
    ] = "",
    url: Url = LOCALHOST,
    key: Key = "",
    as_json: AsJson = False,
) -> None:
    """List the tasks that audits marked as flaky, which curricula do not draw, and the episodes that show it."""
    query = {"environment": environment} if environment else {}
    rows = ask(url, key, "GET", "/admin/v1/flaky", params=query)["tasks"]
    if as_json:
        print_json(rows)
        return
    names = ("environment", "task", "differing", "rate", "marked (UTC)", "by", "episode: reward recorded, replayed")
    table = Table(*names, title=counted(len(rows), "marked task"))
    for row in rows:
        differing = f"{row['differing']} of {row['replays']}"
        episodes = "; ".join(f"{one['episode']}: {one['recorded']}, {one['replayed']}" for one in row["episodes"])
        marked = (when(row["marked_at"]), row["marked_by"] or "")
        table.add_row(row["environment"], row["task"], differing, f"{row['rate']:.1%}", *marked, episodes)
    print_table(table)


@curricula_app.command("unmark")
def unmark(
    environment: Annotated[str, typer.Argument(help="The environment of the task.")],
    task: Annotated[str, typer.Argument(help="The task that curricula may draw again.")],
    url: Url = LOCALHOST,
    key: Key = "",
    as_json: AsJson = False,
) -> None:
    """Remove the mark of a repaired task, and the counts of its audits."""
    ask(url, key, "DELETE", f"/admin/v1/flaky/{environment}/{task}")
    line = f"{task} of {environment} is not marked any more, and its audits begin anew"
    print_result(as_json, {"environment": environment, "task": task, "marked": False}, line)


def _standing(standing: dict[str, Any]) -> str:
    rate = "no outcome yet" if standing["rate"] is None else f"success rate {standing['rate']:.2f}"
    whose = ""
    if (one := standing["component"]) is not None:
        tagged = f" ({', '.join(one['tags'])})" if one["tags"] else ""
        whose = f"{one['environment']}/{one['split']}{tagged}: "
    counted = f"{standing['outcomes']} outcomes, {standing['counted']} counted"
    return f"{whose}stage {standing['stage']}: {rate}, {counted}"
