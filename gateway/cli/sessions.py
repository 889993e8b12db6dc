"""The commands ``gateway sessions …``, which list, show, export and end episodes, and ``gateway verify``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.table import Table

from gateway.cli.admin_client import (
    EXIT_FOUND,
    EXIT_REFUSED,
    LOCALHOST,
    AsJson,
    Key,
    Url,
    ask,
    client,
    counted,
    fetch,
    listed_episodes,
    print_json,
    print_result,
    print_table,
)
from gateway.core.errors import ConfigError, GatewayError, InvalidRequest
from gateway.core.outcomes import comparable
from gateway.core.session import CloseReason
from gateway.frontends.dashboard.rendering import (
    PROTOCOLS,
    action_text,
    beside_blocks,
    end_text,
    inline,
    overview,
    seconds,
    task_parts,
    when,
)
from gateway.tasks.reward_records import verify as verified
from gateway.tasks.signing import TrustedKeys, read_trusted, trusted_of

sessions_app = typer.Typer(no_args_is_help=True, help="List, show, export and end a running gateway's sessions.")

TEXT_CHARS: Final = 2_000
"""Maximum length of a text that `show` prints; ``--json`` prints everything."""

Environment = Annotated[str, typer.Option("--environment", "-e", help="Only episodes of this environment.")]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        "-w",
        metavar="NAME=VALUE",
        help="Only such episodes; may be repeated. Names: split, task, policy, tag, group, owner, name, outcome, "
        "reason, scorer, unexpected_error (* for any), reward_min, reward_max, since.",
    ),
]
Limit = Annotated[int, typer.Option("--limit", "-n", min=1, max=1_000_000, help="Maximum number of episodes.")]


@sessions_app.command("list")
def list_sessions(
    environment: Environment = "",
    where: Where = None,
    limit: Limit = 50,
    url: Url = LOCALHOST,
    key: Key = "",
    as_json: AsJson = False,
) -> None:
    """List recorded episodes, newest first; `gateway ps` lists what runs now.

    The episodes' ids are listed too if sessions have the same name.

    \b
    Examples:
      gateway sessions list --environment coding --where reward_max=0
      gateway sessions list --where outcome=author_fault --where policy=step-100
    """
    query = _query(environment, where or [])
    with client(url, key) as connection:
        rows = list(listed_episodes(connection, query, limit))
    if as_json:
        print_json(rows)
        return
    are_unique = len({row["name"] for row in rows}) == len(rows)  # else sessions differ by their ids only
    names = ("session", "environment", "task", "policy", "opened (UTC)", "outcome", "reward", "steps")
    rewards, former, marked = comparable(rows)
    mean = f", mean reward {_told(sum(rewards) / len(rewards))}" if rewards else ""
    mean += f" without {counted(former, 'episode')} of former scorers" if former else ""
    mean += f" without {counted(marked, 'episode')} with unexpected errors" if marked else ""
    table = Table(*(names if are_unique else ("id", *names)), title=f"{counted(len(rows), 'episode')}{mean}")
    for row in rows:
        end = "running" if row["closed_at"] is None else row["outcome"]
        if row["reason"] not in (None, CloseReason.DELETED):
            end = f"{end} ({row['reason']})"
        end += ", unexpected error" if row.get("unexpected_error") else ""
        texts = (row["name"], row["environment"], row["task"], row["policy"], when(row["opened_at"]), end)
        values = (*(str(one or "") for one in texts), _told(row["reward"]), _told(row["steps"]))
        table.add_row(*(values if are_unique else (row["id"], *values)))
    print_table(table)


@sessions_app.command("show")
def show(
    episode: Annotated[str, typer.Argument(help="An episode's id, or the trainer's name of its session.")],
    url: Url = LOCALHOST,
    key: Key = "",
    as_json: AsJson = False,
) -> None:
    """Show a recorded episode: its end, its task with the evaluation, a line for each step, and then each step whole.

    \b
    Examples:
      gateway sessions show 5c0e2f1a-step-118-3        # the name of the session in the trainer's log
      gateway sessions show 5c0e2f1a-step-118-3 --json # everything, also what is too long to print
    """
    found = ask(url, key, "GET", f"/admin/v1/episodes/{episode}")
    if as_json:
        print_json(found)
        return
    for line in _shown(found):
        typer.echo(line)


@sessions_app.command("export")
def export(
    episodes: Annotated[list[str] | None, typer.Argument(metavar="[EPISODE...]", help="Ids; none: by filters.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write to this file, not to standard output.")] = None,
    environment: Environment = "",
    where: Where = None,
    limit: Limit = 1_000,
    url: Url = LOCALHOST,
    key: Key = "",
    as_json: AsJson = False,
) -> None:
    """Write ended episodes with signed records of their rewards, one JSON object a line.

    `gateway verify` checks such a file, and `gateway replay` plays it again. Episodes whose record is not complete are
    left out, and the exit code is then 3.

    \b
    Examples:
      gateway sessions export --environment math --out math.jsonl
    """
    query, refused = _query(environment, where or []), 0
    with client(url, key) as connection:
        ids = episodes or [row["id"] for row in listed_episodes(connection, query, limit) if row["closed_at"]]
        with nullcontext(sys.stdout.buffer) if out is None else out.open("wb") as file:
            for id in ids:
                try:
                    line = fetch(connection, f"/admin/v1/episodes/{id}/record")
                except typer.Exit as ended:
                    if episodes or ended.exit_code != EXIT_REFUSED:
                        raise
                    refused += 1  # `fetch` has printed why
                    continue
                file.write(line + b"\n")  # signed as these bytes
    written = len(ids) - refused
    more = f", {refused} not" if refused else ""
    done = f"{counted(written, 'episode')} written to {out or 'standard output'}{more}"
    print_result(as_json, {"episodes": written, "refused": refused, "file": out}, done, err=out is None)
    if refused:
        raise typer.Exit(EXIT_FOUND)


@sessions_app.command("end")
def end(
    session: Annotated[str, typer.Argument(help="A live session's id, or its trainer's name for it.")],
    url: Url = LOCALHOST,
    key: Key = "",
    as_json: AsJson = False,
) -> None:
    """End a live session. Its trainer gets an error with the reason operator, and no reward."""
    found = ask(url, key, "DELETE", f"/admin/v1/sessions/{session}")
    print_result(as_json, found, f"session {found['name']} of {found['owner'] or 'no key'} has ended")


def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that `gateway sessions export` wrote.")],
    trusted: Annotated[
        Path | None,
        typer.Option(
            "--trusted", help="The gateway's public key, or a folder of *.pub files. Else the gateway is asked."
        ),
    ] = None,
    url: Url = LOCALHOST,
    key: Key = "",
    as_json: AsJson = False,
) -> None:
    """Check that each episode in a file is the one whose rewards the gateway signed.

    The exit code is 3 if a line was changed, is signed by another key, or has an episode of an earlier line. That no
    episode is missing in the file cannot be seen.

    \b
    Examples:
      gateway verify episodes.jsonl
      curl -H "X-API-Key: $GATEWAY_KEY" "$GATEWAY_URL/admin/v1/signing-key" > gateway.pub
      gateway verify episodes.jsonl --trusted gateway.pub
    """
    keys = read_trusted(trusted) if trusted is not None else _key_of(url, key)
    try:
        lines = file.read_bytes().removesuffix(b"\n").split(b"\n")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    wrong, seen = 0, dict[str, int]()
    for number, line in enumerate(lines, 1):
        found: dict[str, Any] = {"line": number, "is_valid": True}
        try:
            *rewards, end = verified(line, keys)
            if (first := seen.setdefault(end["episode"], number)) != number:
                raise InvalidRequest(f"episode {end['episode']!r} stands on line {first} already")
            found |= {"episode": end["episode"], "reward": end["reward"], "rewards": len(rewards)}
        except GatewayError as error:
            wrong += 1
            found |= {"is_valid": False, "error": error.detail}
            if not as_json:
                typer.echo(f"{file}:{number}: {error.detail}", err=True)
        if as_json:
            print_json(found)
    if not as_json:
        typer.echo(f"{counted(len(lines) - wrong, 'episode')} verified, {wrong} not")
    if wrong:
        raise typer.Exit(EXIT_FOUND)


def _query(environment: str, where: Sequence[str]) -> dict[str, str]:
    """Return the filters of ``GET /admin/v1/episodes``. Raises ``ConfigError``."""
    found = {"environment": environment} if environment else {}
    for one in where:
        name, equals, value = one.partition("=")
        if not equals:
            raise ConfigError(f"--where {one}: must be NAME=VALUE, such as outcome=author_fault")
        found[name] = value
    return found


def _key_of(url: str, key: str) -> TrustedKeys:
    with client(url, key) as connection:
        return trusted_of({f"{url}/admin/v1/signing-key": fetch(connection, "/admin/v1/signing-key")})


def _shown(episode: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of an episode: what it is, how it ended, its task, an overview of its steps, and each step."""
    begin, image = episode["begin"], episode["image"] or "none: a local process"
    seed = "" if episode["seed"] is None else f", seed {episode['seed']}"
    over = PROTOCOLS.get(episode["protocol"], episode["protocol"])
    yield f"episode {episode['id']} (session {episode['name']!r} of {episode['owner'] or 'no key'})"
    yield f"  {episode['environment']}, task {episode['task']!r}{seed}, over {over}"
    yield f"  worker {episode['worker']}, image {image}"
    yield f"  scorer {episode.get('scorer') or 'unknown'}"
    yield f"  opened {when(episode['opened_at'])} UTC, closed {when(episode['closed_at']) or '-'}"
    if episode["policy"] or episode["group_name"]:
        yield f"  policy {episode['policy'] or '-'}, group {episode['group_name'] or '-'}"
    yield f"  {_ended(episode)}"
    if why := episode.get("incomplete"):
        yield f"  the record is not complete: {why}"
    if error := episode.get("unexpected_error"):
        yield f"  unexpected error: {inline(error)}"
    for name, value in task_parts(begin.get("spec")):
        yield f"\n{name}"
        yield _indented(inline(value))
    if episode["steps"]:
        yield ""
        yield from _overview(episode["steps"])
    for step in episode["steps"]:
        yield ""
        yield from _step(step)


def _ended(episode: Mapping[str, Any]) -> str:
    if episode["closed_at"] is None:
        return "running"
    more = end_text(episode["reason"], episode["outcome"])
    reward = _told(episode["reward"]) or "none"
    return f"outcome {episode['outcome']}{f' ({more})' if more else ''}, reward {reward}"


def _overview(steps: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each step."""
    rows = [("step", "reward", "action", "result")]
    for line in overview(steps):
        reward = f"{_told(line['reward'])}{' end' if line['finished'] else ''}".strip()
        rows.append((str(line["number"]), reward, line["action"], line["result"]))
    widths = [min(40, max(len(row[column]) for row in rows)) for column in range(3)]
    for row in rows:
        yield "  ".join(f"{text:{width}}" for text, width in zip(row, (*widths, 0), strict=True)).rstrip()


def _step(step: Mapping[str, Any]) -> Iterator[str]:
    name = "first observation" if step["operation"] == "prompt" else f"step {step['number']}"
    repeated = ", a repeated request" if step.get("repeated") else ""
    yield f"{name} ({seconds(step['seconds'])}, {step['outcome']}{repeated})"
    if step["action"] not in (None, ""):
        yield _indented(f"action: {action_text(step['action'])}")
    for block in step.get("blocks", []):
        yield _indented(str(block.get("text") or f"[image {block.get('image')}]"))
    for name, value in beside_blocks(step).items():
        yield _indented(f"{name}: {inline(value)}")
    if step.get("error") is not None:
        yield _indented(f"error: {inline(step['error'])}")
    for fault in step.get("faults", []):
        yield _indented(f"{fault['kind']} fault in {fault['place']}: {fault['error']}\n{fault.get('traceback') or ''}")
    if step.get("reward") is not None or step.get("finished"):
        yield _indented(f"reward {_told(step.get('reward'))}{', finished' if step.get('finished') else ''}")


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in _cut(text).rstrip("\n").split("\n"))


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_CHARS else f"{text[:TEXT_CHARS]}… ({len(text)} characters; --json prints all)"


def _told(value: object) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
