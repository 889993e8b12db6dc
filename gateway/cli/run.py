"""The command ``gateway run``, which plays the tasks of a split as a trainer does."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway import BUNDLED
from gateway.cli.admin_client import LOCALHOST, AsJson, Url, print_json
from gateway.core.errors import ConfigError

if TYPE_CHECKING:
    from env_gateway_client.runs import Run


def run(
    environment: Annotated[str, typer.Argument(help="The environment's name.")],
    split: Annotated[str, typer.Option("--split", "-s", help="Split of the tasks.")] = "train",
    start: Annotated[int, typer.Option(help="Index of the first task.")] = 0,
    stop: Annotated[int | None, typer.Option(help="Index after the last task; without it, 20 tasks.")] = None,
    group_size: Annotated[int, typer.Option(help="Episodes on each task, which begin together.")] = 1,
    at_once: Annotated[int, typer.Option(help="Episodes at the same time.")] = 8,
    script: Annotated[
        str, typer.Option(metavar="FILE.py:FUNCTION", help="An async function that plays the episode it gets.")
    ] = "",
    endpoint: Annotated[str, typer.Option(help="An OpenAI-compatible API, such as http://127.0.0.1:8000/v1.")] = "",
    model: Annotated[str, typer.Option(help="Name of the model at the endpoint.")] = "",
    endpoint_key: Annotated[str, typer.Option(help="The endpoint's key.", envvar="OPENAI_API_KEY")] = "",
    temperature: Annotated[float, typer.Option(help="Temperature of the model.")] = 1.0,
    reply_s: Annotated[float, typer.Option(help="Seconds for a reply of the model.")] = 600.0,
    max_turns: Annotated[int, typer.Option(help="Replies of the model in an episode.")] = 32,
    text_tool: Annotated[str, typer.Option(help="Tool for a reply without a tool call, which else ends it.")] = "",
    text_argument: Annotated[str, typer.Option(help="Argument of --text-tool that gets the reply.")] = "",
    images: Annotated[bool, typer.Option("--images", help="Send images, and not the text \\[image].")] = False,
    policy: Annotated[str, typer.Option(help="Policy tag in the gateway's records; by default the model.")] = "",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File for a JSON line of each episode.")] = None,
    url: Url = LOCALHOST,
    key: Annotated[str, typer.Option(help="A trainer's key.", envvar="GATEWAY_KEY")] = "",
    as_json: AsJson = False,
) -> None:
    """Play the tasks of a split with a model or a script, and print the rewards.

    A failed episode has no reward, and the table says why it failed. The exit code is 1 if no episode has a reward,
    or an error ended the run.

    \b
    Examples:
      gateway run math --endpoint http://127.0.0.1:8000/v1 --model NAME
      gateway run game --script players.py:play --stop 100 --group-size 4 --json
    """
    if bool(script) == bool(endpoint):
        raise ConfigError("--script and --endpoint: give one of them, which plays")
    if bool(endpoint) != bool(model):
        raise ConfigError("--endpoint and --model: give both, or --script")
    runs, endpoints = import_client("runs"), import_client("endpoint")
    model_played = None
    try:
        if endpoint:
            settings = endpoints.EndpointOptions(
                url=endpoint,
                model=model,
                key=endpoint_key,
                temperature=temperature,
                reply_s=reply_s,
                max_turns=max_turns,
                text_tool=text_tool,
                text_argument=text_argument,
                images=images,
            )
            model_played = endpoints.Endpoint(settings)
        options = runs.RunOptions(
            environment=environment,
            split=split,
            url=url,
            key=key,
            start=start,
            stop=stop,
            group_size=group_size,
            at_once=at_once,
            policy=policy or model,
            out=out,
        )
        played_by = runs.script(script) if model_played is None else model_played.play
    except (ValueError, runs.RunRefused) as error:
        raise ConfigError(str(error)) from None
    text_call = (text_tool, text_argument) if text_tool else None
    began_at = time.monotonic()
    played = runs.Run(options, played_by, text_call=text_call)
    status, problem = runs.finish(played, model_played)
    _report(runs, played, time.monotonic() - began_at, problem, as_json=as_json)
    raise typer.Exit(status)


def import_client(module: str) -> Any:
    """Return a module of the client package: of this environment's package, or of the one in the gateway's wheel."""
    if importlib.util.find_spec("env_gateway_client") is None:
        sys.path.append(str(BUNDLED / "clients"))
    return importlib.import_module(f"env_gateway_client.{module}")


def _report(runs: Any, played: Run, seconds: float, problem: str, *, as_json: bool) -> None:
    summary = runs.summed(played.results, seconds)
    if as_json:
        print_json({**asdict(summary), "problem": problem})
    elif played.results:
        typer.echo(runs.table(summary))
    for reason, text in summary.examples.items():
        typer.echo(f"{reason}, {text}", err=True)
    if problem:
        typer.echo(problem, err=True)
