"""Shared code of the commands that query a running gateway: address and key, requests, and tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    import httpx

LOCALHOST = "http://127.0.0.1:8080"
ASK_S = 30.0
EXIT_UNREACHABLE = 1
EXIT_REFUSED = 2
EXIT_FOUND = 3
"""The command worked, and found what it looks for: a replay that differs, a flaky task."""
PAGE = 1_000
"""Maximum number of episodes in one answer."""
WIDE = 10_000
"""Columns of a table outside a terminal, so that nothing is cut."""

Url = Annotated[str, typer.Option(help="URL of the gateway.", envvar="GATEWAY_URL")]
Key = Annotated[str, typer.Option(help="An operator's key.", envvar="GATEWAY_KEY")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def ask(
    url: str, key: str, method: str, path: str, *, timeout_s: float = ASK_S, where: str = "", **request: Any
) -> dict[str, Any]:
    """Return the gateway's answer, an object; print a refusal with every problem, and end the command.

    *path* is not quoted yet, because names in it may have any character.
    """
    with client(url, key, timeout_s=timeout_s) as connection:
        answer: dict[str, Any] = ask_over(connection, method, path, kind=dict, where=where, **request)
    return answer


def client(url: str, key: str, *, timeout_s: float = ASK_S) -> httpx.Client:
    """Return a client for `ask_over`, which keeps its connection and cookies."""
    import httpx  # `gateway serve` loads all commands, and starts 40 ms faster without this import

    headers = {"X-API-Key": key} if key else {}
    return httpx.Client(base_url=url, headers=headers, timeout=timeout_s, trust_env=False)


def ask_over(
    connection: httpx.Client,
    method: str,
    path: str,
    *,
    kind: type[Any],
    where: str = "",
    key: str = "an operator's key",
    **request: Any,
) -> Any:
    """Return the gateway's answer as `ask` does. It must be of *kind*. *key* names the key that the route needs."""
    url = str(connection.base_url).rstrip("/")
    status, body, _ = requested(connection, method, path, **request)
    if 200 <= status < 300 and isinstance(body, kind):
        return body
    lines = _said(body if isinstance(body, dict) else {}) or [f"status {status}"]
    if status == 401:
        lines = [f"{lines[0]}; give {key} with --key or GATEWAY_KEY"]
    for line in lines:
        typer.echo(f"{where or url}: {line}", err=True)
    raise typer.Exit(EXIT_REFUSED if status < 500 else EXIT_UNREACHABLE)


def requested(connection: httpx.Client, method: str, path: str, **request: Any) -> tuple[int, Any, float]:
    """Return status and JSON body of an answer, and the seconds after which a refused request may come again.

    Ends the command if the gateway cannot be reached.
    """
    import httpx

    quoted = httpx.URL("http://g").copy_with(path=path).raw_path.decode()
    try:
        answer = connection.request(method, quoted, **request)
        body = answer.json() if answer.content else {}
    except (httpx.HTTPError, ValueError) as error:
        typer.echo(f"{str(connection.base_url).rstrip('/')}: {error}", err=True)
        raise typer.Exit(EXIT_UNREACHABLE) from None
    return answer.status_code, body, float(answer.headers.get("retry-after", "1"))


def fetch(connection: httpx.Client, path: str) -> bytes:
    """Return the body of an answer as it was sent. Ends the command as `ask_over` does."""
    import httpx

    quoted = httpx.URL("http://g").copy_with(path=path).raw_path.decode()
    try:
        answer = connection.get(quoted)
    except httpx.HTTPError as error:
        typer.echo(f"{str(connection.base_url).rstrip('/')}: {error}", err=True)
        raise typer.Exit(EXIT_UNREACHABLE) from None
    if not answer.is_success:
        ask_over(connection, "GET", path, kind=type(None))  # prints the refusal, and ends the command
    return answer.content


def listed_episodes(connection: httpx.Client, query: Mapping[str, str], limit: int) -> Iterator[dict[str, Any]]:
    """Yield at most *limit* recorded episodes that *query* selects, newest first."""
    wanted, left = dict(query), limit
    while left > 0:
        wanted["limit"] = str(min(PAGE, left))
        page = ask_over(connection, "GET", "/admin/v1/episodes", kind=dict, params=wanted)
        yield from page["episodes"]
        left -= len(page["episodes"])
        if page["next"] is None:
            return
        wanted["before"] = page["next"]


def _said(body: Mapping[str, Any]) -> Sequence[str]:
    if problems := body.get("problems"):
        return [f"{problem['path']}: {problem['message']}" for problem in problems]
    if results := body.get("results"):
        return [f"{row['id']}: {row['code']}: {row['detail']}" for row in results]
    if "detail" not in body:
        return []
    return [f"{body['detail']} ({body['code']})" if body.get("code") else str(body["detail"])]


def print_table(table: Table) -> None:
    """Print *table* as wide as the terminal, or uncut if the output is not a terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)
    console.print(table)


def print_result(as_json: bool, found: object, *lines: str, err: bool = False) -> None:
    """Print the result of a command: *found* as one line of JSON, or *lines* for people.

    Args:
        as_json: The command's option ``--json``.
        found: The result, for `print_json`.
        lines: The result for people.
        err: Print to standard error, because standard output has a document that the command writes.
    """
    if as_json:
        print_json(found, err=err)
        return
    for line in lines:
        typer.echo(line, err=err)


def print_json(found: object, *, err: bool = False) -> None:
    """Print *found* as one line of JSON. Paths and other values that JSON does not have become texts."""
    typer.echo(json.dumps(found, ensure_ascii=False, default=str), err=err)


def counted(count: int, noun: str) -> str:
    """Return *count* with *noun* in singular or plural: ``1 task``, ``2 tasks``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
