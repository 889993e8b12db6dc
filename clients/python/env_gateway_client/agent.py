"""Plays an episode with the text that a model writes, for trainers that do not parse tool calls themselves.

A tool call is ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, as Qwen's and Hermes' chat templates have it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from env_gateway_client.client import AsyncEpisode
from env_gateway_client.content import Block, StepResult, Text, failed_call
from env_gateway_client.plans import arguments_of

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


def tool_calls(text: str) -> list[tuple[str, Mapping[str, Any]] | str]:
    """Return the calls in *text*, each as name and arguments, or as the text of its mistake for the model."""
    return [_call(match[1]) for match in _CALL.finditer(text)]


def _call(text: str) -> tuple[str, Mapping[str, Any]] | str:
    try:
        found = json.loads(text)
        return str(found["name"]), arguments_of(found.get("arguments"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f'a tool call must be {{"name": "...", "arguments": {{...}}}} as JSON: {error}'


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


async def play_calls(episode: AsyncEpisode, calls: list[tuple[str, Mapping[str, Any]] | str]) -> Turn:
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


def system_text(episode: AsyncEpisode) -> str:
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
