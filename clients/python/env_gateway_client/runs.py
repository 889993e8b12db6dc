"""Plays the tasks of a split with a policy, several episodes at the same time, and records their results."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import json
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from env_gateway_client.client import AsyncEpisode, AsyncGateway
from env_gateway_client.errors import GatewayError, InvalidRequest, NotAllowed, StartFailed, Unreachable

Message = dict[str, Any]
TASKS: Final = 20
"""Number of tasks that a run without `RunOptions.stop` plays."""
_STOPS: Final = (InvalidRequest, NotAllowed, StartFailed, Unreachable)
"""Errors of the gateway that end the run, because the other episodes would have them too."""


class RunRefused(Exception):
    """The run cannot begin. The text has the fix."""


class PolicyFailed(Exception):
    """The policy failed in an episode, which therefore has no reward."""

    def __init__(self, reason: str, text: str, *, ends_run: bool = False) -> None:
        super().__init__(text)
        self.reason = reason
        self.ends_run = ends_run
        """True: the other episodes would fail too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The tasks of a run, and how many episodes play at the same time."""

    environment: str
    split: str
    url: str = "http://127.0.0.1:8080"
    """Address of the gateway."""
    key: str = ""
    """A trainer's key. Empty: the gateway has no keys."""
    start: int = 0
    """Index of the first task."""
    stop: int | None = None
    """Index after the last task. None: `TASKS` tasks."""
    group_size: int = 1
    """Number of episodes on each task, which begin together."""
    at_once: int = 8
    """Number of episodes at the same time."""
    policy: str = ""
    """Tag of the policy in the gateway's records and dashboard."""
    out: Path | None = None
    """File that gets one JSON line for each episode."""

    def __post_init__(self) -> None:
        """Check the options. Raises ``ValueError`` with the option of the command line that is wrong."""
        if self.start < 0:
            raise ValueError(f"--start must be at least 0, and is {self.start}")
        if self.group_size < 1:
            raise ValueError(f"--group-size must be at least 1, and is {self.group_size}")
        if self.at_once < self.group_size:
            raise ValueError(f"--at-once must be at least --group-size, {self.group_size}: a group begins together")


@dataclass(slots=True)
class Played:
    """One episode: a line of the file `RunOptions.out`. Without a reward, `failed` and `error` say why."""

    index: int
    member: int
    session: str = ""
    reward: float | None = None
    ended: str = ""
    """``finished`` (by the environment), or the policy's reason. Empty: the episode failed."""
    failed: str = ""
    error: str = ""
    unexpected_error: str = ""
    """The first unexpected exception of a tool. The episode has a reward if later steps had none."""
    model_calls: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    messages: list[Message] = field(default_factory=list)


Policy = Callable[[AsyncEpisode, Played], Awaitable[str]]
"""Plays an episode and returns what ended it. It may write messages and tokens into the result."""


class Run:
    """Plays groups of episodes, several at the same time, and records their results."""

    def __init__(self, options: RunOptions, policy: Policy, *, text_call: tuple[str, str] | None = None) -> None:
        """Prepare a run.

        Args:
            options: The tasks.
            policy: Plays one episode.
            text_call: A tool and its argument that the policy needs. The run checks that the environment has them.
        """
        self.options = options
        self.policy = policy
        self.text_call = text_call
        self.results: list[Played] = []
        """The episodes that have ended, in the order of their ends."""

    async def play_all(self) -> None:
        """Play a group on each task. Close all episodes in the end, also after an error.

        Raises:
            RunRefused: There is no such task or tool.
            GatewayError, PolicyFailed: An error that the other episodes would have too (in an ``ExceptionGroup``).
            OSError: The file `RunOptions.out` cannot be written.
        """
        options = self.options
        if options.out is not None:
            options.out.write_text("")  # fails before the episodes, not after them
        async with AsyncGateway(options.url, options.key) as self.gateway:
            indexes = await self._chosen()
            waiting = iter(indexes)

            async def play_groups() -> None:
                for index in waiting:
                    await self._play_group(index)

            with progress(len(indexes) * options.group_size) as self.advance:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(options.at_once // options.group_size):
                        tasks.create_task(play_groups())

    async def _chosen(self) -> range:
        options = self.options
        count = await self.gateway.task_count(options.environment, options.split)
        stop = options.start + TASKS if options.stop is None else options.stop
        if not (indexes := range(options.start, min(count, stop))):
            text = f"split {options.split!r} has {count} tasks, and none from index {options.start} to {stop}"
            raise RunRefused(f"{text} (fix: choose another --split, --start or --stop)")
        if self.text_call is not None:
            schemas = {tool.name: tool.input_schema or {} for tool in await self.gateway.tools(options.environment)}
            offered = {name: sorted(schema.get("properties", {})) for name, schema in schemas.items()}
            tool, argument = self.text_call
            if argument not in offered.get(tool, []):
                text = f"there is no tool {tool!r} with the argument {argument!r}"
                raise RunRefused(f"{text} (fix: choose --text-tool and --text-argument from {json.dumps(offered)})")
        return indexes

    async def _play_group(self, index: int) -> None:
        options, size = self.options, self.options.group_size
        members = [Played(index, number) for number in range(size)]
        try:
            group = await self.gateway.open_group(
                options.environment, size, keep_alive=True, split=options.split, index=index, policy=options.policy
            )
        except GatewayError as error:
            for played in members:
                self._record(played, error)
            return
        async with group, asyncio.TaskGroup() as tasks:
            for episode, played in zip(group, members, strict=True):
                tasks.create_task(self._play_member(episode, played))

    async def _play_member(self, episode: AsyncEpisode, played: Played) -> None:
        failure, began_at, played.session = None, time.monotonic(), episode.id
        try:
            ended = await self.policy(episode, played)
            played.reward, played.ended = episode.final_reward(), ended
        except (GatewayError, PolicyFailed) as error:
            failure = error
        unexpected = (result.text for result in episode.steps if result.reason == "tool_failed")
        played.unexpected_error = next(unexpected, "")
        played.seconds = time.monotonic() - began_at
        self._record(played, failure)

    def _record(self, played: Played, failure: GatewayError | PolicyFailed | None) -> None:
        """Add an episode to the results. Raise a failure that the other episodes would have too."""
        if isinstance(failure, _STOPS) or (isinstance(failure, PolicyFailed) and failure.ends_run):
            raise failure
        if failure is not None:
            played.failed, played.error = failure.reason or type(failure).__name__, str(failure)
        self.results.append(played)
        if self.options.out is not None:
            with self.options.out.open("a") as file:
                file.write(json.dumps(asdict(played)) + "\n")
        self.advance()


def script(place: str) -> Policy:
    """Return the policy in a file: ``FILE.py:FUNCTION``, an ``async`` function that plays the episode it gets.

    The function may return a text, the reason why it ended the episode.

    Raises:
        RunRefused: There is no such file or function, or the file cannot be run.
    """
    name, _, function = place.rpartition(":")
    spec = importlib.util.spec_from_file_location("gateway_run_script", name) if name.endswith(".py") else None
    if spec is None or spec.loader is None:
        raise RunRefused(f"--script {place}: must be FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the file is the user's, and may raise anything
        raise RunRefused(f"--script {place}: {name} cannot be run: {type(error).__name__}: {error}") from error
    play = getattr(module, function, None)
    if not inspect.iscoroutinefunction(play):
        raise RunRefused(f"--script {place}: {name} has no function `async def {function}(episode)`")
    has_worked = False

    async def policy(episode: AsyncEpisode, played: Played) -> str:
        nonlocal has_worked
        try:
            reason = await play(episode)
        except GatewayError:
            raise
        except Exception as error:
            at = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
            line = f", line {at[-1]}" if at else ""
            text = f"{place}{line}: {type(error).__name__}: {error} (fix: correct the function)"
            raise PolicyFailed("script", text, ends_run=not has_worked) from error
        has_worked = True
        return "finished" if episode.finished else str(reason or "stop")

    return policy


@contextlib.contextmanager
def progress(total: int, noun: str = "episodes") -> Iterator[Callable[[], None]]:
    """Show a progress bar on a terminal, elsewhere one line at the end. Without the package rich show nothing."""
    if importlib.util.find_spec("rich") is None:
        yield lambda: None
        return
    console, bars = importlib.import_module("rich.console"), importlib.import_module("rich.progress")
    columns = (bars.TextColumn(noun), bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeElapsedColumn())
    with bars.Progress(*columns, console=console.Console(stderr=True)) as shown:
        bar = shown.add_task("", total=total)
        yield lambda: shown.advance(bar)


@dataclass(frozen=True, slots=True)
class Summary:
    """What the episodes of a run gave."""

    episodes: int
    mean_reward: float | None
    """None: no episode has a reward."""
    ended: dict[str, int]
    """Number of episodes by what ended them."""
    failed: dict[str, int]
    """Number of episodes without a reward, by reason."""
    unexpected_errors: int
    """Number of episodes in which a tool raised an unexpected exception, with or without a reward."""
    examples: dict[str, str]
    """The first error of each reason, with the index of its task."""
    seconds: float
    model_calls: int
    tokens: dict[str, int]


def summed(results: Sequence[Played], seconds: float) -> Summary:
    """Sum up the episodes of a run that took *seconds*."""
    rewards = [played.reward for played in results if played.reward is not None]
    failures = [played for played in results if played.failed]
    marked = [played for played in results if played.unexpected_error]
    first = {played.failed: f"such as task {played.index}: {played.error}" for played in reversed(failures)}
    if marked:
        first["unexpected errors"] = f"such as task {marked[0].index}: {marked[0].unexpected_error}"
    return Summary(
        episodes=len(results),
        mean_reward=fmean(rewards) if rewards else None,
        ended={"finished": 0} | Counter(played.ended for played in results if played.ended),
        failed=dict(Counter(played.failed for played in failures)),
        unexpected_errors=len(marked),
        examples=first,
        seconds=seconds,
        model_calls=sum(played.model_calls for played in results),
        tokens=dict(sum((Counter(played.tokens) for played in results), Counter[str]())),
    )


def table(summary: Summary) -> str:
    """Return a summary as a table of two columns."""
    mean = "none" if summary.mean_reward is None else f"{summary.mean_reward:.3f}"
    rows: dict[str, object] = {"episodes": summary.episodes, "mean reward": mean}
    rows |= summary.ended
    rows |= {"failed": sum(summary.failed.values())} | {f"  {reason}": n for reason, n in summary.failed.items()}
    if summary.unexpected_errors:
        rows["unexpected errors"] = summary.unexpected_errors
    rows |= {"seconds": f"{summary.seconds:.1f}", "model calls": summary.model_calls} | summary.tokens
    return "\n".join(f"{name:<24}{value:>12}" for name, value in rows.items())


def finish(run: Run, resource: AbstractAsyncContextManager[object] | None = None) -> tuple[int, str]:
    """Play *run* in a new event loop. *resource*, such as the policy's connections, is open meanwhile.

    Returns the exit status of a command, and the problem that ended the run early, or an empty text. The status is 0;
    1 if no episode has a reward, or an error ended the run; 130 after Ctrl-C.
    """

    async def play() -> None:
        async with contextlib.nullcontext() if resource is None else resource:
            await run.play_all()

    problem, status = "", 1
    try:
        asyncio.run(play())
        status = int(all(played.failed for played in run.results))
    except* KeyboardInterrupt:
        problem, status = "interrupted, and closed the open episodes", 130
    except* GatewayError as found:
        problem = f"gateway {run.options.url}: {_first(found)}"
    except* (PolicyFailed, RunRefused, OSError) as found:
        problem = str(_first(found))
    return status, problem


def _first(error: BaseException) -> BaseException:
    """Return the first error in nested groups of errors."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
