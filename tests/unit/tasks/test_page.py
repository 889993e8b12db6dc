"""docs/tasks.md about tasks at run time: it shows all commands, routes and limits, and its example is valid."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import typer.main

from gateway.cli.imports import tasks_app
from gateway.core.ports.tasks import MAX_AT_ONCE, MAX_TASK_BYTES, MAX_TASKS, MAX_TOTAL_BYTES
from gateway.frontends.admin.tasks import MAX_LISTED, MAX_PROBED, TaskProbe, TaskRoutes
from gateway.tasks.bundles import FORMAT
from gateway.tasks.schema import json_schema, parse
from gateway.tasks.signing import TrustedKeys
from tests.service.stack import environment, stack

PAGE = (Path(__file__).parents[3] / "docs" / "tasks.md").read_text("utf-8")


def commands() -> set[str]:
    """Return the names of the `gateway tasks` commands except ``import``."""
    group: Any = typer.main.get_command(tasks_app)
    return set(group.commands) - {"import"}


SHOWN = [line.partition("#")[0] for line in re.findall(r"^gateway tasks (?!import).*$", PAGE, re.M)]


def test_every_command_is_on_the_page() -> None:
    assert {line.split()[2] for line in SHOWN} >= commands() - {"schema"}


def test_every_key_of_a_task_is_on_the_page() -> None:
    assert {key for key in json.loads(json_schema())["properties"] if f"`{key}`" not in PAGE} == set()


async def test_every_route_is_on_the_page() -> None:
    async with stack(environment()) as built:
        routes = TaskRoutes(
            tasks=built.first.runtime_tasks,
            max_body_bytes=1,
            trusted=TrustedKeys({}),
            signatures="optional",
            instance="env-gateway",
            probe=TaskProbe(built.first.sessions, built.first.catalog),
        ).routes()

    assert {route.path for route in routes if f"`{route.path.replace(':path', '')}`" not in PAGE} == set()


def test_the_limits_are_on_the_page() -> None:
    for shown in (f"{MAX_TASKS:,}", f"{MAX_AT_ONCE:,}", f"{MAX_LISTED:,}", f"up to {MAX_PROBED} tasks", FORMAT):
        assert shown in PAGE
    for size in (MAX_TASK_BYTES, MAX_TOTAL_BYTES):
        assert f"{size // 2**20} MiB" in PAGE


def test_the_example_is_a_valid_task() -> None:
    (line,) = re.findall(r"^```json\n(.+?)\n```$", PAGE, re.M)

    task = parse(json.loads(line), is_registered=True)

    assert task["instruction"]
    assert task["evaluation"]["reward_function"]
    assert set(task["config"]) == {"pages"}
