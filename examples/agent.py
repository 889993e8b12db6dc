"""Play episodes of an environment with a model behind an OpenAI-compatible endpoint, and print the rewards.

    python examples/agent.py --environment math --split train --endpoint http://127.0.0.1:8000/v1 --model NAME

The endpoint is vLLM, SGLang, llama.cpp or a hosted API. `play` is an episode: the prompt goes to the model, the model's
tool calls go to the environment, and their results go back to the model, until one of the two ends the episode.
The script needs the package in `clients/python`. With the package rich it also shows a progress bar.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import importlib.util
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
from env_gateway_client import AsyncEpisode, AsyncGateway, Image, StepResult, errors, openai_content, text_of
from env_gateway_client.agent import named_call
from env_gateway_client.content import failed_call

Message = dict[str, Any]
STOPS = (errors.InvalidRequest, errors.NotAllowed, errors.StartFailed, errors.Unreachable)
"""Errors of the gateway that end the run, because the other episodes would have them too."""
PAUSES_S = (0.5, 1.0, 4.0)
"""Pauses in seconds before a request is sent again. A longer ``Retry-After`` of the endpoint has priority."""
LONGEST_PAUSE_S = 60.0
FIXES = {
    "400": "correct what the text names, such as the length of the context or the parser of tool calls",
    "401": "pass --endpoint-key, or set OPENAI_API_KEY",
    "404": "check --model, and --endpoint, which mostly ends in /v1",
    "429": "lower --at-once, or come again later",
    "503": "lower --at-once, or wait until the endpoint has loaded the model",
    "garbage": "check --endpoint, which mostly ends in /v1",
    "timeout": "raise --reply-s, or lower --at-once",
    "unreachable": "check --endpoint, and that its server runs",
}


class EndpointError(Exception):
    """The endpoint refused, failed, or sent no chat completion."""

    def __init__(self, url: str, reason: str, text: str, pause_s: float | None = None) -> None:
        super().__init__(f"endpoint {url}: {text} (fix: {FIXES.get(reason, 'read the log of the endpoint')})")
        self.reason = f"endpoint_{reason}"
        self.pause_s = pause_s
        """Seconds before the same request may succeed. None: a repetition does not help."""


@dataclass(slots=True)
class Played:
    """One episode: a line of ``--json``. A failed episode has no reward: ``failed`` and ``error`` say why."""

    index: int
    member: int
    session: str = ""
    reward: float | None = None
    ended: str = ""
    """``finished`` (by the environment), ``max_turns``, or the endpoint's reason to end a reply without a tool call:
    mostly ``stop``, or ``length`` at its limit of tokens. Empty: the episode failed."""
    failed: str = ""
    error: str = ""
    model_calls: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    messages: list[Message] = field(default_factory=list)


async def play(episode: AsyncEpisode, endpoint: Endpoint, played: Played) -> str:
    """Play *episode*, and return what ended it."""
    options, messages = endpoint.options, played.messages
    content = openai_content if options.images else text_of
    messages.append({"role": "user", "content": content(episode.prompt)})
    for _ in range(options.max_turns):
        message, ended = await endpoint.reply(played, episode.openai_tools)
        messages.append(message)
        images: list[Image] = []
        for call in message.get("tool_calls", []):
            result = await call_tool(episode, call["function"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result.text})
            images += [block for block in result.blocks if isinstance(block, Image)]
            if result.finished:
                break
        if images and options.images:  # in a message of their own, because a tool's message takes text only
            messages.append({"role": "user", "content": openai_content(images)})
        if "tool_calls" not in message:
            if not options.text_tool:
                return ended
            arguments = json.dumps({options.text_argument: message["content"]})
            result = await call_tool(episode, {"name": options.text_tool, "arguments": arguments})
            messages.append({"role": "user", "content": content(result.blocks)})
        if episode.finished:
            return "finished"
    return "max_turns"


async def call_tool(episode: AsyncEpisode, function: Message) -> StepResult:
    """Call a tool once. A mistake of the model is a result, which it reads and can correct."""
    try:
        call = named_call(function["name"], function["arguments"])
        if not isinstance(call, str):
            return await episode.step(*call)
    except (errors.InvalidRequest, RecursionError) as error:  # nothing ran, such as for NaN or a depth of thousands
        if episode.error is not None:
            raise errors.EpisodeFailed(str(error)) from error
        call = str(error)
    wrong, function["arguments"] = function["arguments"], "{}"  # endpoints refuse bad JSON in earlier calls too
    return failed_call(f"{call}. The arguments were: {wrong[:1000]}", "input_validation")


class Endpoint:
    """The model."""

    def __init__(self, options: argparse.Namespace) -> None:
        key = {"authorization": f"Bearer {options.endpoint_key}"} if options.endpoint_key else {}
        headers = {"content-type": "application/json"} | key
        self.http = httpx.AsyncClient(headers=headers, timeout=None, limits=httpx.Limits(max_connections=None))
        self.url = f"{options.endpoint.rstrip('/')}/chat/completions"
        self.options = options
        self.has_replied = False

    async def reply(self, played: Played, tools: list[Message]) -> tuple[Message, str]:
        """Return the model's next message, and why it ends. Repeat a request that the endpoint did not take."""
        body = {"model": self.options.model, "messages": played.messages, "temperature": self.options.temperature}
        content = json.dumps(body | ({"tools": tools} if tools else {}))
        for pause_s in PAUSES_S:
            try:
                return self._message(await self._post(content), played)
            except EndpointError as error:
                if error.pause_s is None:
                    raise
                await asyncio.sleep(max(pause_s, min(error.pause_s, LONGEST_PAUSE_S)))
        return self._message(await self._post(content), played)

    async def _post(self, content: str) -> httpx.Response:
        try:
            async with asyncio.timeout(self.options.reply_s):
                response = await self.http.post(self.url, content=content)
        except TimeoutError as late:
            raise EndpointError(self.url, "timeout", f"no reply within {self.options.reply_s:g} s") from late
        except (httpx.RequestError, httpx.InvalidURL) as lost:
            raise EndpointError(self.url, "unreachable", f"no connection: {lost or type(lost).__name__}", 0.0) from lost
        if response.is_success:
            return response
        after = response.headers.get("retry-after", "")
        pause_s = (float(after) if after.isdecimal() else 0.0) if response.status_code in (429, 503) else None
        raise EndpointError(self.url, str(response.status_code), _line(response), pause_s)

    def _message(self, response: httpx.Response, played: Played) -> tuple[Message, str]:
        try:
            found = response.json()
            choice, usage = found["choices"][0], found.get("usage") or {}
            message = {"content": ""} | {name: value for name, value in choice["message"].items() if value}
            for call in message.get("tool_calls", []):
                name, arguments = call["function"]["name"], call["function"]["arguments"].strip() or "{}"
                call |= {"id": call["id"], "type": "function", "function": {"name": name, "arguments": arguments}}
            tokens = Counter({name: count for name, count in usage.items() if isinstance(count, int)})
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise EndpointError(self.url, "garbage", f"no valid chat completion in {_line(response)}") from error
        self.has_replied = True
        played.model_calls += 1
        played.tokens = dict(tokens + Counter(played.tokens))
        return message | {"role": "assistant"}, str(choice.get("finish_reason") or "stop")


def _line(response: httpx.Response) -> str:
    return f"HTTP {response.status_code}: {' '.join(response.text.split())[:300] or '(no text)'}"


class Run:
    """Plays groups of episodes, several at the same time, and records their results."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.endpoint = Endpoint(options)
        self.results: list[Played] = []

    async def play_all(self) -> None:
        """Play a group on each task. Close all episodes in the end, also after an error."""
        options = self.options
        async with self.endpoint.http, AsyncGateway(options.url, options.key) as self.gateway:
            indexes = await chosen(self.gateway, options)
            waiting = iter(indexes)

            async def play_groups() -> None:
                for index in waiting:
                    await self._play_group(index)

            with progress(len(indexes) * options.group_size) as self.advance:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(options.at_once // options.group_size):
                        tasks.create_task(play_groups())

    async def _play_group(self, index: int) -> None:
        environment, split, size = self.options.environment, self.options.split, self.options.group_size
        members = [Played(index, number) for number in range(size)]
        try:
            group = await self.gateway.open_group(environment, size, keep_alive=True, split=split, index=index)
        except errors.GatewayError as error:
            for played in members:
                self._record(played, error)
            return
        async with group, asyncio.TaskGroup() as tasks:
            for episode, played in zip(group, members, strict=True):
                tasks.create_task(self._play_member(episode, played))

    async def _play_member(self, episode: AsyncEpisode, played: Played) -> None:
        failure, began_at, played.session = None, time.monotonic(), episode.id
        try:
            ended = await play(episode, self.endpoint, played)
            played.reward, played.ended = episode.final_reward(), ended
        except (errors.GatewayError, EndpointError) as error:
            failure = error
        played.seconds = time.monotonic() - began_at
        self._record(played, failure)

    def _record(self, played: Played, failure: errors.GatewayError | EndpointError | None) -> None:
        """Add an episode to the results. Raise a failure that the other episodes would have too."""
        if isinstance(failure, STOPS) or (isinstance(failure, EndpointError) and not self.endpoint.has_replied):
            raise failure
        if failure is not None:
            played.failed, played.error = failure.reason or type(failure).__name__, str(failure)
        self.results.append(played)
        if self.options.json:
            with self.options.json.open("a") as file:
                file.write(json.dumps(asdict(played)) + "\n")
        self.advance()


async def chosen(gateway: AsyncGateway, options: argparse.Namespace) -> range:
    """Return the indexes of the tasks. Exit if there is no task, or no such tool for texts."""
    count = await gateway.task_count(options.environment, options.split)
    stop = options.start + 20 if options.stop is None else options.stop
    if not (indexes := range(options.start, min(count, stop))):
        text = f"split {options.split!r} has {count} tasks, and none from index {options.start} to {stop}"
        raise SystemExit(f"agent.py: {text} (fix: choose another --split, --start or --stop)")
    schemas = {tool.name: tool.input_schema or {} for tool in await gateway.tools(options.environment)}
    offered = {name: sorted(schema.get("properties", {})) for name, schema in schemas.items()}
    if options.text_tool and options.text_argument not in offered.get(options.text_tool, []):
        raise SystemExit(f"agent.py: no such --text-tool or --text-argument (fix: choose from {json.dumps(offered)})")
    return indexes


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on a terminal, elsewhere one line at the end. Without the package rich show nothing."""
    if importlib.util.find_spec("rich") is None:
        yield lambda: None
        return
    console, bars = importlib.import_module("rich.console"), importlib.import_module("rich.progress")
    columns = (bars.TextColumn("episodes"), bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeElapsedColumn())
    with bars.Progress(*columns, console=console.Console(stderr=True)) as shown:
        bar = shown.add_task("", total=total)
        yield lambda: shown.advance(bar)


def show(results: Sequence[Played], seconds: float) -> None:
    """Print the table, and the first failure of each reason."""
    rewards = [played.reward for played in results if played.reward is not None]
    failures = [played for played in results if played.failed]
    rows: dict[str, object] = {"episodes": len(results), "mean reward": f"{fmean(rewards):.3f}" if rewards else "none"}
    rows |= {"finished": 0} | Counter(played.ended for played in results if played.ended)
    rows |= {"failed": len(failures)} | Counter(f"  {played.failed}" for played in failures)
    rows |= {"seconds": f"{seconds:.1f}", "model calls": sum(played.model_calls for played in results)}
    rows |= sum((Counter(played.tokens) for played in results), Counter[str]())
    print("\n".join(f"{name:<24}{value:>12}" for name, value in rows.items()))
    for reason, played in {played.failed: played for played in reversed(failures)}.items():
        print(f"agent.py: {reason}, such as task {played.index}: {played.error}", file=sys.stderr)


def plot(results: Sequence[Played], path: Path, title: str) -> None:
    """Draw the rewards in the order of the tasks, and their mean so far."""
    importlib.import_module("matplotlib").use("svg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    ordered = sorted(results, key=lambda played: (played.index, played.member))
    rewards = [played.reward for played in ordered if played.reward is not None]
    means = [total / number for number, total in enumerate(accumulate(rewards), 1)]
    figure, axes = pyplot.subplots(figsize=(6.4, 3.8), layout="constrained")
    axes.plot(range(1, len(rewards) + 1), rewards, ".", label="reward")
    axes.plot(range(1, len(rewards) + 1), means, label="mean so far")
    axes.set(title=title, xlabel="episode", ylabel="reward")
    axes.legend()
    figure.savefig(path, format="svg")


def parsed() -> argparse.Namespace:
    """Return the checked command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8080", help="of the gateway; default: %(default)s")
    add("--key", default=os.environ.get("GATEWAY_KEY", ""), help="a trainer's key; default: $GATEWAY_KEY")
    add("--environment", required=True)
    add("--split", required=True)
    add("--start", type=int, default=0, help="index of the first task; default: %(default)s")
    add("--stop", type=int, help="index after the last task; default: 20 tasks")
    add("--group-size", type=int, default=1, help="episodes on each task; default: %(default)s")
    add("--at-once", type=int, default=8, help="episodes at the same time; default: %(default)s")
    add("--endpoint", required=True, help="such as http://127.0.0.1:8000/v1")
    add("--model", required=True, help="its name at the endpoint")
    add("--endpoint-key", default=os.environ.get("OPENAI_API_KEY", ""), help="default: $OPENAI_API_KEY")
    add("--temperature", type=float, default=1.0, help="default: %(default)s")
    add("--reply-s", type=float, default=600.0, help="seconds for a reply of the model; default: %(default)s")
    add("--max-turns", type=int, default=32, help="replies of the model in an episode; default: %(default)s")
    add("--text-tool", default="", help="tool for a reply without a tool call; default: such a reply ends the episode")
    add("--text-argument", default="", help="argument of --text-tool that gets the reply")
    add("--images", action="store_true", help="send images; default: the text [image]")
    add("--json", type=Path, help="file for one JSON line per episode, with its messages")
    add("--plot", type=Path, help="file for a plot of the rewards, an SVG")
    options = parser.parse_args()
    if min(options.start + 1, options.group_size, options.max_turns) < 1:
        parser.error("--start must be at least 0, --group-size and --max-turns at least 1")
    if options.at_once < options.group_size:
        parser.error(f"--at-once must be at least --group-size, {options.group_size}, because a group begins together")
    if not (options.endpoint_key.isascii() and options.endpoint_key.isprintable()):
        parser.error("--endpoint-key must be printable ASCII characters, without a line end")
    if not options.endpoint.startswith(("http://", "https://")):
        parser.error(f"--endpoint must look like http://127.0.0.1:8000/v1, and is {options.endpoint!r}")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.exit(1, "agent.py: --plot needs matplotlib (fix: pip install matplotlib)\n")
    return options


def main() -> int:
    """Play and report. Return the exit status: 1 if no episode has a reward, or if an error ended the run."""
    options, began_at = parsed(), time.monotonic()
    run, problem, status = Run(options), "", 1
    try:
        for path in filter(None, (options.json, options.plot)):
            path.write_text("")  # fails before the episodes, not after them
        asyncio.run(run.play_all())
        status = int(all(played.failed for played in run.results))
    except* KeyboardInterrupt:
        problem, status = "interrupted, and closed the open episodes", 130
    except* errors.GatewayError as found:
        problem = f"gateway {options.url}: {first(found)}"
    except* (EndpointError, OSError) as found:
        problem = str(first(found))
    if run.results:
        show(run.results, time.monotonic() - began_at)
        if options.plot:
            plot(run.results, options.plot, f"{options.model} on {options.environment}, {options.split}")
    if problem:
        print(f"agent.py: {problem}", file=sys.stderr)
    return status


def first(error: BaseException) -> BaseException:
    """Return the first error in nested groups of errors."""
    return first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


if __name__ == "__main__":
    sys.exit(main())
