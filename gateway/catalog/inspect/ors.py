"""Inspects ORS servers: those of ``ors-sdk`` and ``openreward``, and this project's environment server."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from gateway.catalog.inspect.findings import Capacity, Finding, Findings, FoundSplit, default_of, names_of, tools_of
from gateway.catalog.inspect.probe import Probe, Unanswered
from gateway.core.environment import ServerProtocol, SplitType
from gateway.core.errors import ConfigError
from gateway.upstreams.ors.dialects import secret_hint

PATHS = frozenset(["/list_environments", "/create", "/delete", "/ping"])
SLOTS = 16
"""Assumed capacity: one process serves many sessions, and ORS servers do not report a maximum."""
SHOWN = 20


def has_form(paths: frozenset[str]) -> bool:
    """Return True if the routes are those of an ORS server."""
    return paths >= PATHS


async def look(server: Probe, openapi: Mapping[str, Any], *, environment: str = "") -> Findings:
    """Query all that the server reports, and open one session on its first task.

    Raises:
        ConfigError: The server does not have *environment*.
        Unanswered: The server stopped answering.
    """
    names = names_of((await server.get("/list_environments")).json())
    chosen = choose(names, environment)
    version, is_own = await _version(server, openapi)
    remarks = ["ORS servers do not report how many sessions they can hold: 16 is a guess."]
    if len(names) > 1:
        remarks.append(several(names, chosen))
    found_splits = await splits(server, chosen, remarks)
    listed = (await server.get(f"/{chosen}/tools")).object()
    tools = tools_of(listed)
    terminal = _terminal(listed.get("terminal_tool"))
    default, field = default_of(tools) if not terminal else ("", "")
    trouble = await _try_session(server, chosen, found_splits)
    return Findings(
        protocol=ServerProtocol.ORS,
        version=version,
        is_own=is_own,
        environments=tuple(names),
        chosen=chosen,
        ready="/health" if (await server.get("/health")).status == 200 else "",
        capacity=Capacity(SLOTS, Finding.ASSUMED),
        splits=found_splits,
        tools=tuple(tool["name"] for tool in tools),
        default_tool=default,
        text_field=field,
        terminal=terminal,
        trouble=trouble,
        remarks=tuple(remarks),
    )


def choose(names: list[str], wanted: str) -> str:
    """Return the environment to inspect: *wanted*, ignoring case, or the first of *names* if *wanted* is empty.

    Raises:
        ConfigError: *names* does not contain *wanted*, or is empty.
    """
    if not wanted:
        if not names:
            raise ConfigError("it lists no environment")
        return names[0]
    for name in names:
        if name.lower() == wanted.lower():
            return name
    raise ConfigError(f"it has no environment {wanted!r}; there are {', '.join(names) or 'none'}")


def several(names: list[str], chosen: str) -> str:
    """Return a remark that only one of several environments was inspected."""
    others = ", ".join(name for name in names if name != chosen)
    return (
        f"It has {len(names)} environments; this is {chosen}. Each of the others ({others}) needs a file too (--all)."
    )


async def splits(server: Probe, environment: str, remarks: list[str]) -> tuple[FoundSplit, ...]:
    """Return the splits of the server's own tasks, from the paths that ORS and OpenEnv share."""
    answer = await server.get(f"/{environment}/splits")
    listed = answer.json() if answer.status == 200 else None
    if not isinstance(listed, list):
        return ()
    found = []
    for entry in listed[:SHOWN]:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            continue
        name = entry["name"]
        counted = await server.post(f"/{environment}/num_tasks", {"split": name})
        count = counted.object().get("num_tasks")
        if not isinstance(count, int):
            remarks.append(
                f"It did not report the number of tasks of split {name!r}: {counted.status} {counted.text()}"
            )
        found.append(FoundSplit(name, _type(entry.get("type")), count if isinstance(count, int) else None))
    return tuple(found)


def _type(said: object) -> SplitType:
    return SplitType(said) if isinstance(said, str) and said in list(SplitType) else SplitType.VALIDATION


async def _version(server: Probe, openapi: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the server's package and version, and True if it is this project's environment server."""
    said = (await server.get("/version")).object().get("version")
    version = f" {said}" if isinstance(said, str) else ""
    if isinstance((await server.get("/sessions")).object().get("sessions"), list):
        return f"this project's environment server{version}", True
    create = openapi.get("components", {}).get("schemas", {}).get("CreateSession", {}).get("properties", {})
    if "toolset_name" in create or version:
        return f"openreward{version}", False
    return ("ors-sdk" if "secrets" in create else "an ORS server"), False


def _terminal(tool: object) -> str:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        return ""
    return f"{tool['name']}.{tool['arg']}" if isinstance(tool.get("arg"), str) else tool["name"]


async def _try_session(server: Probe, environment: str, found: tuple[FoundSplit, ...]) -> str:
    """Open a session on the first task, read its prompt, and end it. Return the reason if that failed, else empty."""
    split = next((split.name for split in found if split.count), "")
    if not split:
        return "it has no task to open a session with"
    headers = {"X-Session-ID": f"inspection-{secrets.token_hex(8)}"}
    try:
        opened = await server.post("/create", {"env_name": environment, "split": split, "index": 0}, headers=headers)
        if opened.status != 200:
            return f"opening task 0 of split {split!r}: {opened.status} {opened.text()}{secret_hint(opened.text())}"
        try:
            return await _try_prompt(server, environment, headers)
        finally:
            await server.post("/delete", {}, headers=headers)
    except Unanswered as error:
        return str(error)


async def _try_prompt(server: Probe, environment: str, headers: Mapping[str, str]) -> str:
    # The setup runs after /create. During a slow setup the answer is 503 or missing. A started setup is enough here.
    prompt = await server.get(f"/{environment}/prompt", headers=headers)
    if prompt.status in (200, 503):
        return ""
    return f"the prompt of the first task: {prompt.status} {prompt.text()}{secret_hint(prompt.text())}"
