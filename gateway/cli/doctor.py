"""The command ``gateway doctor``, and the failures that ``serve`` and ``check`` print."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

import typer

from gateway.catalog.doctor import Finding, Status, examine, failures
from gateway.cli.admin_client import EXIT_FOUND, AsJson, print_json
from gateway.content import load_content
from gateway.settings import Settings, load

_SIGNS: Final = {Status.OK: "ok", Status.WARNING: "warning", Status.FAILED: "FAILED"}


def doctor(as_json: AsJson = False) -> None:
    """Check this machine for the gateway of the current settings: what is wrong, and the command that mends it.

    The exit code is 3 if a check failed.

    \b
    Examples:
      gateway doctor
      GATEWAY_BACKEND=docker GATEWAY_STORE=redis://127.0.0.1 gateway doctor
    """
    settings = load().checked()
    found = asyncio.run(_examined(settings))
    if as_json:
        print_json({"backend": settings.backend, "findings": [asdict(one) for one in found]})
    else:
        for one in found:
            for line in lines_of(one):
                typer.echo(line)
    if failures(found):
        raise typer.Exit(EXIT_FOUND)


async def _examined(settings: Settings) -> Sequence[Finding]:
    return await examine(settings, (await load_content(settings)).catalog)


def lines_of(finding: Finding) -> list[str]:
    """Return a finding for people: what was found, the environments that it affects, and the command that mends it."""
    lines = [f"{_SIGNS[finding.status]:8}{finding.check}: {finding.detail}"]
    if finding.environments and finding.status is Status.FAILED:
        lines.append(f"{'':8}these environments cannot run: {', '.join(finding.environments)}")
    if finding.fix:
        lines.append(f"{'':8}to mend it: {finding.fix}")
    return lines
