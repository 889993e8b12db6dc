"""Plays an episode with the text that a model writes, for trainers that do not parse tool calls themselves.

A tool call is ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, as Qwen's and Hermes' chat templates have it.
"""

from __future__ import annotations

import asyncio
import json
import re
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from env_gateway_client.client import AsyncEpisode, AsyncGateway
from env_gateway_client.content import Block, StepResult, Text, failed_call, text_of
from env_gateway_client.errors import EpisodeFailed, InvalidRequest
from env_gateway_client.plans import EpisodeState, Options, arguments_of

T = TypeVar("T")

ATTEMPTS = 3
"""Number of times that adapters play a task whose episodes fail, before they raise the last error."""
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.S)
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "</s>")
"""Tokens that end a model's turn. They are cut from a text that is an argument."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The effect of one text of the model."""

    results: tuple[StepResult, ...]
    """Results of the calls in the text. Empty: the text has no call, so the agent stopped."""
    is_over: bool
    """True if the environment ended the episode, or the agent stopped."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """What the model sees next."""
        return tuple(block for result in self.results for block in result.blocks)

    @property
    def reward(self) -> float | None:
        """Sum of the rewards of the turn. None: no call had a reward."""
        rewards = [result.reward for result in self.results if result.reward is not None]
        return sum(rewards) if rewards else None


@dataclass(frozen=True, slots=True)
class ChatML:
    """Writes conversations in ChatML, as Qwen's models read them, for trainers that concatenate texts."""

    def opening(self, episode: AsyncEpisode) -> str:
        """Return tools and task of *episode*, up to the begin of the model's turn."""
        task = text_of(episode.prompt)
        return f"<|im_start|>system\n{system_text(episode)}<|im_end|>\n<|im_start|>user\n{task}{self._reply()}"

    def feedback(self, turn: Turn, text: str) -> str:
        """Return the results of *turn* after the model's *text*, up to the begin of its next turn."""
        results = "\n".join(f"<tool_response>\n{result.text}\n</tool_response>" for result in turn.results)
        end = "" if text.rstrip().endswith("<|im_end|>") else "<|im_end|>"
        return f"{end}\n<|im_start|>user\n{results}{self._reply()}"

    @staticmethod
    def _reply() -> str:
        return "<|im_end|>\n<|im_start|>assistant\n"


_gateways: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, str], AsyncGateway]]
_gateways = weakref.WeakKeyDictionary()


def gateway_of(url: str, key: str) -> AsyncGateway:
    """Return the gateway for the running event loop. Trainers make an object per episode; connections outlive it."""
    gateways = _gateways.setdefault(asyncio.get_running_loop(), {})
    if (url, key) not in gateways:
        gateways[url, key] = AsyncGateway(url, key)
    return gateways[url, key]


def options_of(row: Mapping[str, Any] | str | None) -> Options:
    """Return the task that a row of a trainer's dataset names: ``split`` and ``index``, or ``task_id``; and ``seed``.

    Args:
        row: The row; or such an object as JSON text; or a task's id.

    Raises:
        InvalidRequest: The row names no task.
    """
    if isinstance(row, str):
        try:
            found = json.loads(row)
        except ValueError:
            found = None
        row = found if isinstance(found, dict) else {"task_id": row}
    options: Options = {}
    if row and row.get("split") is not None and row.get("index") is not None:
        options |= {"split": str(row["split"]), "index": int(row["index"])}
    elif row and row.get("task_id"):
        options["task"] = str(row["task_id"])
    else:
        raise InvalidRequest(f"a row must have split and index, or task_id, and has {sorted(row or {})}")
    if row.get("seed") is not None:
        options["seed"] = int(row["seed"])
    return options


async def replayed(play: Callable[[], Awaitable[T]]) -> T:
    """Await *play*, which plays a whole episode; if the episode fails, play another one, at most `ATTEMPTS` in all."""
    for _ in range(ATTEMPTS - 1):
        try:
            return await play()
        except EpisodeFailed:
            continue
    return await play()


def tool_calls(text: str) -> list[tuple[str, Mapping[str, Any]] | str]:
    """Return the calls in *text*, each as name and arguments, or as the text of its mistake for the model."""
    return [_call(match[1]) for match in _CALL.finditer(text)]


def _call(text: str) -> tuple[str, Mapping[str, Any]] | str:
    try:
        found = json.loads(text)
        return named_call(str(found["name"]), found.get("arguments"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f'a tool call must be {{"name": "...", "arguments": {{...}}}} as JSON: {error}'


def named_call(name: str, arguments: str | Mapping[str, Any] | None) -> tuple[str, Mapping[str, Any]] | str:
    """Return a call that a trainer has parsed, with arguments that may still be JSON; or the text of its mistake."""
    try:
        return name, arguments_of(arguments)
    except ValueError as error:
        return f"the arguments of {name} must be an object as JSON: {error}"


async def play_text(episode: AsyncEpisode, text: str, *, text_tool: str = "", text_argument: str = "") -> Turn:
    """Run the calls in *text* one after the other, until one ends the episode.

    Args:
        text_tool: Tool for a text without a call, with the text as *text_argument*. Empty: such a text ends the
            agent's part in the episode.

    Raises:
        EpisodeFailed: The episode is over, and has no reward.
    """
    calls = tool_calls(text)
    if not calls and text_tool:
        for token in END_TOKENS:
            text = text.strip().removesuffix(token)
        calls = [(text_tool, {text_argument: text.strip()})]
    return await play_calls(episode, calls)


async def play_calls(episode: AsyncEpisode, calls: Sequence[tuple[str, Mapping[str, Any]] | str]) -> Turn:
    """Run *calls* one after the other, until one ends the episode. Raises as `play_text`."""
    results: list[StepResult] = []
    for call in calls:
        if isinstance(call, str):
            results.append(failed_call(call, "input_validation"))
            continue
        results.append(await episode.step(*call))
        if results[-1].finished:
            break
    return Turn(tuple(results), is_over=not results or results[-1].finished)


def system_text(episode: EpisodeState) -> str:
    """Return the tools of *episode* as text, for a prompt that is made without a chat template's own tool support."""
    tools = "\n".join(json.dumps(tool) for tool in episode.openai_tools)
    example = '<tool_call>{"name": "NAME", "arguments": {"KEY": "VALUE"}}</tool_call>'
    return f"You may call these tools:\n{tools}\nTo call one, write: {example}"


def pil_parts(blocks: tuple[Block, ...]) -> list[dict[str, Any]]:
    """Return *blocks* as the parts of a message for Transformers' processors, with images as Pillow's."""
    return [
        {"type": "text", "text": block.text} if isinstance(block, Text) else {"type": "image", "image": block.pil()}
        for block in blocks
    ]
