"""The values that a trainer reads: blocks of text and images, tools, splits, and results of steps."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from env_gateway_client.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Text:
    """A block of text."""

    text: str
    detail: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Image:
    """A block with an image."""

    data: str = field(repr=False)
    """The image's file in base64."""
    mime_type: str
    detail: Mapping[str, Any] | None = None

    @property
    def content(self) -> bytes:
        """The image's file."""
        return base64.b64decode(self.data)

    @property
    def url(self) -> str:
        """The image as a ``data:`` URL, the form that OpenAI's messages take."""
        return f"data:{self.mime_type};base64,{self.data}"

    def pil(self) -> Any:
        """Return the image as ``PIL.Image.Image``. Needs Pillow (extra ``images``)."""
        import io

        from PIL import Image as Pillow  # optional

        return Pillow.open(io.BytesIO(self.content))


Block: TypeAlias = Text | Image


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the agent may call."""

    name: str
    description: str
    input_schema: Mapping[str, Any] | None
    """JSON Schema of the arguments. None: the tool takes no arguments."""

    def openai(self) -> dict[str, Any]:
        """Return the tool in OpenAI's format, which the chat templates of Transformers also take."""
        parameters = dict(self.input_schema) if self.input_schema else {"type": "object", "properties": {}}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Split:
    """A named collection of an environment's tasks."""

    name: str
    type: str
    """``train``, ``validation`` or ``test``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of one call. A failed call has ``ok`` False and no reward; its episode goes on."""

    blocks: tuple[Block, ...]
    """What the agent sees. After a failed call: the error's text."""
    reward: float | None
    """Reward of this step. None: the step has no reward, which differs from 0.0."""
    finished: bool
    """True if the environment ended the episode."""
    metadata: Mapping[str, Any] | None = None
    ok: bool = True
    """False if the tool raised an exception, or did not run: there is no such tool, or its arguments are wrong."""
    reason: str = ""
    """Why the call failed: ``not_found``, ``input_validation``, ``name_collision``, ``episode_finished``, or
    ``tool_error`` if the tool ran and refused the action. ``tool_failed``: the tool raised an exception that its author
    did not expect; the gateway leaves such an episode out of its records. Empty: the call did not fail."""

    @property
    def text(self) -> str:
        """The text of the blocks, with a line ``[image]`` for each image."""
        return text_of(self.blocks)


def text_of(blocks: Iterable[Block]) -> str:
    """Return the text of *blocks*, with a line ``[image]`` for each image."""
    return "\n".join(block.text if isinstance(block, Text) else "[image]" for block in blocks)


def openai_content(blocks: Sequence[Block]) -> str | list[dict[str, Any]]:
    """Return *blocks* as the content of an OpenAI message: a string, or parts if there are images."""
    if all(isinstance(block, Text) for block in blocks):
        return text_of(blocks)
    return [
        {"type": "text", "text": block.text}
        if isinstance(block, Text)
        else {"type": "image_url", "image_url": {"url": block.url}}
        for block in blocks
    ]


# -- reading ----------------------------------------------------------------------------------------------------------


def read_json(body: bytes, what: str) -> Any:
    """Parse the JSON of an answer to *what*. Raises ``ProtocolError``."""
    try:
        return json.loads(body, parse_constant=_refuse)
    except ValueError as error:
        raise ProtocolError(f"the answer to {what} is not JSON: {body[:200]!r} ({error})") from error


def read_list(found: object, key: str = "") -> list[Any]:
    """Return *found*, or its entry *key*, as a list. Raises ``ProtocolError``: it is no list."""
    value = found
    if key:
        value = found.get(key) if isinstance(found, Mapping) else None
    if not isinstance(value, list):
        raise ProtocolError(f"{key or 'an answer'} must be a list, and is {str(value)[:200]!r}")
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON number")


def read_blocks(found: object) -> tuple[Block, ...]:
    """Read a list of blocks. Blocks of other types, which ORS allows, become their JSON text."""
    return tuple(_block(entry) for entry in read_list(found))


def _block(entry: Any) -> Block:
    match entry:
        case {"type": "text", "text": str(text)}:
            return Text(text, entry.get("detail"))
        case {"type": "image", "data": str(data)}:
            return Image(data, str(entry.get("mimeType") or "image/png"), entry.get("detail"))
        case {"type": str()}:
            return Text(json.dumps(entry))
    raise ProtocolError(f"a block is {str(entry)[:200]!r}")


def read_tools(found: object) -> tuple[Tool, ...]:
    """Read the answer to ``tools`` or ``task_tools``."""
    return tuple(_tool(entry) for entry in read_list(found, "tools"))


def _tool(entry: Any) -> Tool:
    match entry:
        case {"name": str(name)}:
            return Tool(name, str(entry.get("description") or ""), entry.get("input_schema"))
    raise ProtocolError(f"a tool is {str(entry)[:200]!r}")


def read_result(found: object) -> StepResult:
    """Read the outcome of a call. Raises ``ProtocolError``: it has another form, or its reward is not a number."""
    match found:
        case {"ok": True, "output": {"blocks": list(blocks)} as output}:
            return StepResult(
                blocks=read_blocks(blocks),
                reward=_reward(output.get("reward")),
                finished=output.get("finished") is True,
                metadata=output.get("metadata"),
            )
        case {"ok": False, "error": str(text), **more}:
            return failed_call(text, str(more.get("reason") or _guess(text)))
    raise ProtocolError(f"the outcome of a call is {str(found)[:200]!r}")


def failed_call(text: str, reason: str) -> StepResult:
    """Return the result of a call that failed while its episode goes on."""
    return StepResult(blocks=(Text(text),), reward=None, finished=False, ok=False, reason=reason)


def _guess(text: str) -> str:
    """Return the reason of a failed call on a server that sends none."""
    for part, reason in (
        ("is not a valid tool", "not_found"),
        ("input validation error", "input_validation"),
        ("name collision", "name_collision"),
        ("the episode has finished", "episode_finished"),
    ):
        if part in text:
            return reason
    return "tool_error"


def _reward(value: object) -> float | None:
    if value is None:
        return None
    try:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    except OverflowError:
        pass
    raise ProtocolError(f"a reward is {str(value)[:50]}, and not a finite number")
