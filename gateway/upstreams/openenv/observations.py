"""Translate OpenEnv replies into the gateway's types: observations into blocks, tools' results into step results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from gateway.core.episode import TOOL_ERROR, Block, ImageBlock, StepResult, TextBlock
from gateway.core.errors import UpstreamError
from gateway.upstreams.openenv.frames import (
    FAILED,
    INVALID,
    INVALID_INPUT,
    SESSION,
    Fault,
    failed_tool,
    fault_of,
    observation_of,
    reward_of,
)

_TEXTS: Final = ("text", "message", "result", "prompt", "content", "response", "question", "output")
"""Observation fields with text for the agent; the first non-empty text is shown."""
_GOALS: Final = ("goal", "instruction")
"""Fields with the agent's goal, shown once before the first observation's text."""
DETAIL_MAX_BYTES: Final = 32 * 2**10
"""Largest reply to a reset whose observation is added to the first text as its detail."""


def first_blocks(reply: bytes) -> list[Block]:
    """Return the agent's first blocks, from the observation in the reply to a reset.

    Raises:
        UpstreamError: The reply is not an observation.
    """
    observation, _ = _split(observation_of(reply))
    goals = [observation[key] for key in _GOALS if isinstance(observation.get(key), str) and observation[key]]
    blocks = list(_blocks(observation))
    first = blocks[0] if blocks and isinstance(blocks[0], TextBlock) else TextBlock("")
    text = "\n\n".join([*(goal for goal in goals[:1] if goal not in first.text), first.text])
    detail = {"observation": observation} if len(reply) <= DETAIL_MAX_BYTES else None
    return [TextBlock(text, detail), *(block for block in blocks if block is not first)]


def step_result(reply: bytes) -> StepResult:
    """Return the result of a step. An action that was refused, or that failed in the environment, has a result too.

    Raises:
        UpstreamError: The reply can't be read, or reports the session's end.
    """
    if (fault := fault_of(reply)) is not None:
        return _failed(fault)
    data = observation_of(reply)
    observation, metadata = _split(data)
    reward, finished = reward_of(data.get("reward")), data.get("done") is True
    if "tool_name" in observation and ("result" in observation or "error" in observation):
        return _tool_result(observation, metadata, reward, finished)
    return StepResult(
        blocks=tuple(_blocks(observation)), reward=reward, finished=finished, metadata=metadata, data=observation
    )


def _failed(fault: Fault) -> StepResult:
    if fault.code == INVALID:
        return StepResult(error=fault.message, reason=INVALID_INPUT)
    if fault.code == FAILED:
        return StepResult(error=fault.message, reason=TOOL_ERROR)
    if fault.code == SESSION:
        raise UpstreamError(f"the worker ended the session: {fault.message}")
    raise UpstreamError(f"the worker answered with an error: {fault.message} ({fault.code})")


def _split(data: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """Return the observation without its metadata, and the metadata; None if there is none."""
    observation = data.get("observation")
    if not isinstance(observation, Mapping):
        raise UpstreamError("the server's observation is not an object")
    own, beside = observation.get("metadata"), data.get("metadata")
    metadata = {**(own if isinstance(own, Mapping) else {}), **(beside if isinstance(beside, Mapping) else {})}
    return {key: value for key, value in observation.items() if key != "metadata"}, metadata or None


def _tool_result(
    observation: dict[str, Any], metadata: Mapping[str, Any] | None, reward: float | None, finished: bool
) -> StepResult:
    failed = failed_tool(observation)
    if failed is None:
        blocks = tuple(_content(observation.get("result")))
        return StepResult(blocks=blocks, reward=reward, finished=finished, metadata=metadata, data=observation)
    message, reason = failed
    if finished or reward is not None:
        # An error result can't hold a reward or the episode's end, so the failure is a regular result here.
        return StepResult(
            blocks=(TextBlock(message),), reward=reward, finished=finished, metadata=metadata, data=observation
        )
    return StepResult(error=message, reason=reason, metadata=metadata, data=observation)


def _content(result: Any) -> Iterator[Block]:
    """Yield the blocks of a tool's result: MCP's content, or the value that an older server returns."""
    content = result.get("content") if isinstance(result, Mapping) else None
    if not isinstance(content, list):
        if isinstance(result, Mapping) and "data" in result:
            result = result["data"]
        yield TextBlock(result if isinstance(result, str) else _json(result))
        return
    for item in content:
        if isinstance(item, Mapping) and isinstance(item.get("text"), str):
            yield TextBlock(item["text"])
        elif isinstance(item, Mapping) and item.get("type") == "image" and isinstance(item.get("data"), str):
            yield ImageBlock(item["data"], str(item.get("mimeType") or item.get("mime_type") or "image/png"))
        else:
            yield TextBlock(_json(item))


def _blocks(observation: Mapping[str, Any]) -> Iterator[Block]:
    images = list(_images(observation.get("images")))
    text = next(
        (observation[key] for key in _TEXTS if isinstance(observation.get(key), str) and observation[key]), None
    )
    if text is None:
        shown = {key: value for key, value in observation.items() if not (images and key == "images")}
        text = _json(shown)
    yield TextBlock(text)
    yield from images


def _images(value: Any) -> Iterator[ImageBlock]:
    for item in value if isinstance(value, list) else ():
        if isinstance(item, Mapping) and isinstance(item.get("data"), str) and isinstance(item.get("mime_type"), str):
            yield ImageBlock(item["data"], item["mime_type"])


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
