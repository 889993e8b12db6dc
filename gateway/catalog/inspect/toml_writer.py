"""Writes an ``environment.toml`` for a first-time reader. Comments mark each value as found or assumed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import wrap

from gateway.catalog.inspect.findings import Finding, Findings, FoundSplit, Ran, one_line
from gateway.catalog.toml import parse_environment, read_environment
from gateway.core.environment import (
    Areal,
    Environment,
    Limits,
    OpenEnv,
    Relaxations,
    ResetMapping,
    ServerProtocol,
    Timeouts,
)
from gateway.core.errors import ConfigError
from gateway.core.routes import RESERVED

MIB = 2**20
FILE = "environment.toml"
NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}")
UPSTREAM_NAME = re.compile(r"[A-Za-z0-9_.-]+")
PLACES = ("split", "index")
"""Reset arguments of OpenEnv's Task API."""
WIDTH = 116
MEMORY_STEP_MIB = 64
MEMORY_LEAST_MIB = 256
PIDS_LEAST = 256
WORKERS = 4
LONE_WORKERS = 16
"""Value of ``max_workers`` if each worker holds one session. Fewer would be no gain over a manual run of the image."""


def check_name(name: str) -> str:
    """Return *name* if it is allowed for an environment.

    Raises:
        ConfigError: The name is not allowed; the message has the reason.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not a valid name for an environment: a name begins with a letter, and has at most 63 "
            "lower-case letters, digits, dashes and underscores (choose one with --name)"
        )
    if name in RESERVED:
        raise ConfigError(f"{name!r} is a reserved name: the gateway has a path of that name (choose one with --name)")
    return name


def check_place(catalog: Path, name: str, *, force: bool) -> Path:
    """Return the path of the file to write, below *catalog*.

    Raises:
        ConfigError: The file exists and *force* is False, *catalog* is not a folder, or another file has *name*.
    """
    path = catalog / name / FILE
    if path.exists() and not force:
        raise ConfigError(f"{path} already exists; --force overwrites it")
    if catalog.exists() and not catalog.is_dir():
        raise ConfigError(f"{catalog} is not a folder")
    for other in sorted(catalog.glob(f"*/{FILE}")):
        if other != path and _name_in(other) == name:
            raise ConfigError(f"{other} describes an environment {name!r} already")
    return path


def _name_in(path: Path) -> str:
    try:
        return read_environment(path).name
    except ConfigError:  # `gateway check` reports the error
        return ""


def environment_of(name: str, url: str, findings: Findings) -> Environment:
    """Return the environment of the file that `file_text` writes for a server at *url*. Trainers use *name*."""
    text = file_text(name, findings, url=url, has_folder=False)
    return replace(parse_environment(text, Path(FILE)), directory=Path())


def file_text(name: str, findings: Findings, *, ran: Ran | None = None, url: str = "", has_folder: bool = True) -> str:
    """Return the text of an ``environment.toml`` for an image that was run (*ran*), or for the server at *url*.

    With *has_folder* it names the `task_folder` of a server that needs one.
    """
    tables = [
        _head(name, findings, ran=ran, url=url),
        _server(findings, ran=ran, url=url),
        _pool(findings, url=url),
        *([_limits(ran)] if ran else []),
        _timeouts(findings, ran),
        *([_loosened(ran)] if ran else []),
        *([] if findings.is_own and ran else [_actions(findings)]),
        *([_observations(findings)] if findings.observed else []),
        *([_resets(findings)] if findings.protocol is ServerProtocol.OPENENV else []),
        *([_rows(name)] if has_folder and needs_folder(findings) else []),
        _areal(findings),
        _openenv(findings),
        *([] if findings.is_own or findings.terminal else [_nemo()]),
        *([_variables(ran), _volumes()] if ran else []),
        _remarks(findings),
    ]
    return "\n\n".join("\n".join(table) for table in tables if table) + "\n"


def _head(name: str, findings: Findings, *, ran: Ran | None, url: str) -> list[str]:
    place = one_line(ran.image if ran else url)
    lines = [
        *_says(
            f'Environment "{name}", written by "gateway env add {place}". "Found" is what the server said or did when '
            'it was looked at; "assumed" is a guess: check it. "gateway check" reads the file again. The environment '
            "is offered within seconds; a gateway that does not run offers it when it starts."
        ),
        _set("name", name, "what trainers call it"),
        _set("description", findings.description, "found; shown to people")
        if findings.description
        else '# description = "One line for people; the server has none."',
    ]
    if ran:
        lines.append(_set("image", ran.image, "of the engine, unmodified"))
    lines.append(_set("protocol", findings.protocol.value, f"found: {findings.version}"))
    if upstream := _upstream_name(name, findings):
        lines.append(_set("upstream_name", upstream, "found: what its server calls it"))
    lines.append(_set("isolation", "shared", "assumed: a worker serves one session after the other"))
    if ran and findings.capacity.slots == 1:
        lines += _says(
            'For a container of its own for each session, destroyed after it: isolation = "exclusive", and in [pool] '
            "slots = 1, max_uses = 1."
        )
    if findings.is_own and ran:
        lines.append("command = [] # in its image only")
    return lines


def _server(findings: Findings, *, ran: Ran | None, url: str) -> list[str]:
    if ran and findings.is_own:
        return []
    lines = ["[server]"]
    lines.append(_set("port", ran.port, "found: it answers there") if ran else _set("url", url.rstrip("/"), "as given"))
    if findings.ready:
        lines.append(_set("ready", findings.ready, "found: 200 once it is up"))
    return lines


def _pool(findings: Findings, *, url: str) -> list[str]:
    slots, told = findings.capacity.slots, findings.capacity.told
    why = {
        Finding.BY_SERVER: f"found: it refused concurrent session {slots + 1}",
        Finding.AT_LEAST: f"found: it accepted {slots} concurrent sessions; more were not tried",
        Finding.IN_DOUBT: f"session {slots + 1} of the trial failed, so each worker is asked as it starts",
        Finding.ASSUMED: "assumed: concurrent sessions of one worker, which its protocol does not report",
    }[told]
    in_doubt = told is Finding.IN_DOUBT
    lines = ["[pool]", _set("slots", "learn" if in_doubt else slots, why)]
    if findings.protocol is ServerProtocol.OPENENV and not in_doubt:
        lines += _says('slots = "learn" asks each worker as it starts, if a variable changes what the image holds.')
    if url:
        lines.append(_set("max_workers", 1, "a server outside the gateway is one worker"))
        return lines
    workers = LONE_WORKERS if slots == 1 else WORKERS
    lines.append(_set("min_workers", 0, "assumed: containers that are kept though idle; 1 saves the first their start"))
    lines.append(
        _set("max_workers", workers, f"assumed: so at most {workers * slots} sessions at once, further ones wait")
    )
    return lines


def _limits(ran: Ran) -> list[str]:
    usual = Limits()
    lines = ["[limits]"]
    if ran.memory_bytes is None:
        lines.append(
            _set("memory_mib", usual.memory_bytes // MIB, "assumed: the engine did not report how much it uses")
        )
    else:
        used = -(-ran.memory_bytes // MIB)
        lines.append(
            _set("memory_mib", memory_mib(ran.memory_bytes), f"found: {used} MiB after the sessions of trial; doubled")
        )
    lines.append(_set("cpus", usual.cpus, "assumed"))
    pids, why = usual.pids, "assumed"
    if ran.pids is not None:
        pids, why = max(PIDS_LEAST, 4 * ran.pids), f"found: {ran.pids} threads and processes; with room for more"
    lines.append(_set("pids", pids, why))
    lines.append(_set("tmp_mib", usual.tmp_bytes // MIB, "assumed: what may be written to /tmp; it is memory"))
    return lines


def memory_mib(used_bytes: int) -> int:
    """Return the memory limit (MiB) for a worker that used *used_bytes*: twice that, rounded up to a step."""
    steps = -(-2 * used_bytes // (MEMORY_STEP_MIB * MIB))
    return max(MEMORY_LEAST_MIB, steps * MEMORY_STEP_MIB)


def _timeouts(findings: Findings, ran: Ran | None) -> list[str]:
    usual = Timeouts()
    lines = ["[timeouts]"]
    if ran and ran.start_s is not None:
        lines.append(
            _set(
                "start_s",
                limit_s(ran.start_s, usual_s=usual.start_s),
                f"found: it was up after {ran.start_s:.1f} s; with room for a busy machine",
            )
        )
    setup_s = limit_s(findings.reset_s, usual_s=usual.setup_s)
    if setup_s > usual.setup_s:
        lines.append(_set("setup_s", setup_s, f"found: the slowest reset of the trial took {findings.reset_s:.1f} s"))
    lines.append(_set("idle_s", int(usual.idle_s), "assumed: a session without calls ends after it"))
    lines.append(_set("call_s", int(usual.call_s), "assumed: the longest call"))
    return lines


def _loosened(ran: Ran) -> list[str]:
    usual = Relaxations()
    if ran.loosened == usual:
        return _says(
            "Nothing had to be loosened: it runs as user 10001, without network and capabilities, and writes to /tmp."
        )
    lines = ["[loosened]", *_says(f"Found: it does not run hardened ({ran.reason}).")]
    if ran.loosened.writable_root:
        lines.append(_set("writable_root", True, "found: it writes elsewhere than to /tmp"))
    if ran.loosened.user != usual.user:
        lines.append(_set("user", ran.loosened.user, "found: it needs its image's own user"))
    return lines


def _actions(findings: Findings) -> list[str]:
    lines = [
        "[actions]",
        *_says(
            "What a trainer means that sends a text, or an object that names no tool (AReaL's and OpenEnv's clients)."
        ),
    ]
    if findings.protocol is ServerProtocol.AREAL:
        return [*_says("A text goes to the server as it is: AReaL's actions are texts.")]
    if findings.protocol is ServerProtocol.NEMO:
        what = (
            "is the agent's final answer, and ends the episode" if findings.terminal else "goes to the server as it is"
        )
        return [*lines, *_says(f"A text that calls no tool {what}.")]
    if findings.terminal:
        lines += _says(f"A text goes to {findings.terminal} (found): the server calls that its terminal tool.")
        lines += ['# default_tool = "…"', '# text_field = "…"']
        return lines
    if findings.tools:
        shown = ", ".join(one_line(name, limit=40) for name in findings.tools[:12])
        if findings.default_tool:
            lines.append(_set("default_tool", findings.default_tool, f"found; tools: {shown}"))
        else:
            lines += [*_says(f"Several tools, so none is the default: {shown}."), '# default_tool = "…"']
    if findings.text_field:
        lines.append(_set("text_field", findings.text_field, "found: the one text that has to be given"))
    else:
        what = f": {', '.join(one_line(name, limit=40) for name in findings.fields[:12])}" if findings.fields else ""
        lines += [
            *_says(f"It is unclear which field a text fills{what}. Texts that are JSON objects are the fields."),
            '# text_field = "…"',
        ]
    return lines


def _observations(findings: Findings) -> list[str]:
    names = ", ".join(one_line(name, limit=40) for name in findings.observed[:40])
    lines = [
        "[observations]",
        *_says(f"Agents of ORS, AReaL and NeMo Gym read every field that is not empty. Found: {names}."),
        _set("hide", [], "no field is hidden"),
        '# text = ["…"] # come first, without their names',
    ]
    for after, text in findings.reads:
        lines += _says(f"After {one_line(after)} an agent reads: {text}")
    return lines


def _resets(findings: Findings) -> list[str]:
    why = (
        "found: it has splits of tasks; the rest is assumed"
        if findings.places
        else "assumed: images do not report them"
    )
    return [
        "[resets]",
        *_says(
            "What its reset looks at. An OpenEnv server drops every other argument without a word, so the gateway "
            "refuses a task that needs one which is not listed. Look at the signature of reset in the image's source."
        ),
        _set("keys", list(_reset_keys(findings)), why),
        '# from_task = { task_name = "environment_config.page" } # argument = its place in a task',
        *([] if findings.splits else [_seeds(findings)]),
    ]


def needs_folder(findings: Findings) -> bool:
    """Return True if the server's tasks are files: NeMo Gym's servers do not serve their rows."""
    return findings.protocol is ServerProtocol.NEMO


def task_folder(name: str, path: Path) -> Path:
    """Return the folder of the tasks of the environment *name*, whose file is *path*."""
    return path.parent.parent.parent / "tasks" / name


def _rows(name: str) -> list[str]:
    return [
        "[tasks]",
        *_says(f"Rows of its data set: gateway tasks import nemo-gym ROWS.jsonl --environment {name} --split train"),
        _set("directory", f"tasks/{name}", "relative to the parent of the folder of environments"),
        _set(
            "public", ["row.responses_create_params"], "what a listing shows of a row; its other fields may be answers"
        ),
    ]


def _seeds(findings: Findings) -> str:
    if findings.seeds_do_nothing:
        return _set("seeds", 1, "found: two seeds gave the same first observation and the same step")
    return _set("seeds", 1000, "assumed: it has no tasks of its own, so the seed selects the task")


def _areal(findings: Findings) -> list[str]:
    lines: list[str] = []
    if findings.splits:
        lines += _says(f"Its own tasks (found), served without any file: {', '.join(map(_counted, findings.splits))}.")
    lines.append("[areal]")
    if split := _first_split(findings):
        lines.append(_set("split", split, "found: its first; it has no split train"))
    if findings.max_turns:
        lines.append(_set("max_turns", findings.max_turns, "found: max_episode_length"))
    if findings.has_named_samples:
        lines.append(_set("sample_ids", [], 'found: not numbered; a format ("dev-{:05d}") or a list'))
    if findings.observation_type is not None:
        lines.append(_set("observation_type", findings.observation_type.value, "found"))
    if findings.action_type is not None:
        lines.append(_set("action_type", findings.action_type.value, "found"))
    if not (findings.max_turns or findings.is_own or findings.protocol is ServerProtocol.AREAL):
        lines += _says("Only the server ends an episode. With max_turns, AReaL's episodes end after that many steps.")
        lines.append("# max_turns = 40")
    return [*lines, _limit("start_s", findings.reset_s, "start"), _limit("step_s", findings.step_s, "step")]


def _openenv(findings: Findings) -> list[str]:
    lines = ["[openenv]"]
    if split := _first_split(findings):
        lines.append(_set("split", split, "found: where a reset that names no task takes one from"))
    return [*lines, _limit("reset_s", findings.reset_s, "reset"), _limit("step_s", findings.step_s, "step")]


def _limit(key: str, took_s: float | None, what: str) -> str:
    """Return the line of a client's time limit, in seconds, for a reset or step of the trial that took *took_s*."""
    if took_s is None:
        return _set(key, limit_s(None), f"assumed: no {what} was measured")
    return _set(key, limit_s(took_s), f"found: the slowest {what} of the trial took {took_s:.1f} s")


def limit_s(took_s: float | None, *, usual_s: float = OpenEnv().step_s) -> int:
    """Return the time limit, in seconds, for what took *took_s*: at least four times as long, for a busy server."""
    return max(int(usual_s), -(-int(4 * (took_s or 0.0)) // 10) * 10)


def _nemo() -> list[str]:
    return [
        "[nemo]",
        *_says("The last text of an agent that calls no more tools is no action here, unless it is an answer."),
        "# final_text = true",
    ]


def _counted(split: FoundSplit) -> str:
    return f"{one_line(split.name, limit=40)} ({'?' if split.count is None else split.count})"


def _variables(ran: Ran) -> list[str]:
    if not ran.variables:
        return [*_says("Variables that the image reads; none was given."), "# [variables]", '# MAX_STEPS = "20"']
    return ["[variables]", *(_set(_key(name), value, "as given") for name, value in sorted(ran.variables.items()))]


def _volumes() -> list[str]:
    return [
        *_says("Data of the engine's machine that workers see: an absolute path, or the name of a volume."),
        "# [[volumes]]",
        '# source = "/srv/data"',
        '# target = "/data"',
        "# read_only = true",
    ]


def _remarks(findings: Findings) -> list[str]:
    remarks = list(findings.remarks)
    if findings.trouble:
        remarks.insert(0, f"The session of trial failed: {findings.trouble}.")
    return [line for remark in remarks for line in _says(remark, first="# Note: ")]


def _upstream_name(name: str, findings: Findings) -> str:
    """Return the server's own name of the environment; empty if it is *name*, or if the protocol has no names."""
    is_named = findings.protocol is not ServerProtocol.AREAL and UPSTREAM_NAME.fullmatch(findings.chosen)
    return findings.chosen if is_named and findings.chosen != name else ""


def _reset_keys(findings: Findings) -> tuple[str, ...]:
    """Return the arguments that the server's reset is assumed to read."""
    usual = ResetMapping().keys
    return (*usual, *PLACES) if findings.places else usual


def _first_split(findings: Findings) -> str:
    """Return the server's first split if it has no split of the default name; else empty."""
    names = [split.name for split in findings.splits]
    return names[0] if names and Areal().split not in names else ""


def _set(key: str, value: str | bool | int | float | Sequence[str], why: str) -> str:
    return f"{key} = {_toml(value)} # {one_line(why)}"


def _toml(value: str | bool | int | float | Sequence[str]) -> str:
    # JSON strings are valid TOML, except for the one control character that JSON does not escape.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _says(text: str, *, first: str = "# ") -> list[str]:
    return wrap(one_line(text, limit=2000), WIDTH, initial_indent=first, subsequent_indent="# ")
