"""The command ``gateway report``, which writes episodes as one HTML file that needs no gateway."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.admin_client import LOCALHOST, AsJson, Key, Url, ask_over, client, counted, print_result
from gateway.core.ports.step_log import REFERENCE

if TYPE_CHECKING:
    import httpx


def report(
    episodes: Annotated[list[str], typer.Argument(metavar="EPISODE...", help="Ids, or trainers' names of sessions.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("report.html"),
    url: Url = LOCALHOST,
    key: Key = "",
    as_json: AsJson = False,
) -> None:
    """Write episodes with their steps, images and messages to one HTML file.

    \b
    Examples:
      gateway report 3f2a9c... --out episode.html
    """
    from gateway.frontends.dashboard.rendering import render, static_files

    with client(url, key) as connection:
        found = [ask_over(connection, "GET", f"/admin/v1/episodes/{id}", kind=dict) for id in episodes]
        for episode in found:
            for step in episode["steps"]:
                for block in step.get("blocks", []):
                    _embed(connection, block)
    text = render("report.html", episodes=found, style=static_files()["dashboard.css"].decode())
    out.write_text(text, "utf-8", errors="backslashreplace")  # an agent may write a lone surrogate
    print_result(as_json, {"episodes": len(found), "file": out}, f"{counted(len(found), 'episode')} written to {out}")


def _embed(connection: httpx.Client, block: dict[str, Any]) -> None:
    """Put the data of an image in place of the reference to them."""
    data = str(block.get("image") or "")
    if data.startswith(REFERENCE):
        answer = connection.get(f"/admin/v1/blobs/{data.removeprefix(REFERENCE)}")
        block["image"] = base64.b64encode(answer.content).decode() if answer.is_success else ""
