"""Translate OpenEnv replies into the gateway's types: observations into blocks, tools' results into step results.

Nothing that the environment says is left out silently. Each field of an observation and of its metadata is in a text or
an image, unless `ObservationMapping` hides it. Pixels and base64 images become image blocks. Other long arrays of
numbers are replaced by a text that says so.
"""

from __future__ import annotations

import base64
import json
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from gateway.core.environment import ObservationMapping
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

TEXTS: Final = ("text", "message", "result", "prompt", "content", "response", "question", "output")
"""Fields with text for the agent; the first one that has a text comes first, without its name."""
PROMPT: Final = "metadata.prompt"
"""The agent's prompt in environments that OpenEnv imported from ORS."""
_GOALS: Final = ("goal", "instruction")
"""Fields with the agent's goal, which comes first in the first observation."""
_CALL: Final = ("tool_name", "result", "error")
"""Fields of a tool's result."""
DETAIL_MAX_BYTES: Final = 32 * 2**10
"""Largest reply to a reset whose observation is added to the first text as its detail."""
EMPTY: Final = "(the observation is empty)"
NUMBERS_MAX: Final = 1024
"""Largest number of values of an array that is shown."""
PIXELS_LEAST: Final = 8
"""Smallest width and height of an array of pixels."""
_BASE64: Final = re.compile(
    r"(?:data:(image/[a-z+.-]+);base64,)?((?:iVBORw0KGgo|/9j/|R0lGOD|UklGR)[A-Za-z0-9+/]{48,}={0,2})"
)
_MAGIC: Final = {"i": "image/png", "/": "image/jpeg", "R": "image/gif", "U": "image/webp"}
"""Types of images by the first letter of their base64."""


def first_blocks(reply: bytes, mapping: ObservationMapping) -> list[Block]:
    """Return the agent's first blocks, from the observation in the reply to a reset.

    Raises:
        UpstreamError: The reply is not an observation.
    """
    seen = _Observation(observation_of(reply), mapping)
    blocks = seen.blocks(first=True)
    first = blocks[0] if blocks and isinstance(blocks[0], TextBlock) else TextBlock("")
    detail = {"observation": seen.data} if len(reply) <= DETAIL_MAX_BYTES else None
    return [TextBlock(first.text, detail), *(block for block in blocks if block is not first)]


def step_result(reply: bytes, mapping: ObservationMapping) -> StepResult:
    """Return the result of a step. An action that was refused, or that failed in the environment, has a result too.

    Raises:
        UpstreamError: The reply can't be read, or reports the session's end.
    """
    if (fault := fault_of(reply)) is not None:
        return _failed(fault)
    data = observation_of(reply)
    seen = _Observation(data, mapping)
    reward, finished = reward_of(data.get("reward")), data.get("done") is True
    if "tool_name" in seen.data and ("result" in seen.data or "error" in seen.data):
        return _tool_result(data["observation"], seen, reward, finished)
    blocks = tuple(seen.blocks())
    return StepResult(blocks=blocks, reward=reward, finished=finished, metadata=seen.metadata, data=seen.data)


def _failed(fault: Fault) -> StepResult:
    if fault.code == INVALID:
        return StepResult(error=fault.message, reason=INVALID_INPUT)
    if fault.code == FAILED:
        return StepResult(error=fault.message, reason=TOOL_ERROR)
    if fault.code == SESSION:
        raise UpstreamError(f"the worker ended the session: {fault.message}")
    raise UpstreamError(f"the worker answered with an error: {fault.message} ({fault.code})")


def _tool_result(
    observation: Mapping[str, Any], seen: _Observation, reward: float | None, finished: bool
) -> StepResult:
    failed = failed_tool(observation)
    if failed is None:
        blocks = (*_content(observation.get("result")), *seen.blocks(without=_CALL))
        return StepResult(blocks=blocks, reward=reward, finished=finished, metadata=seen.metadata, data=seen.data)
    message, reason = failed
    if finished or reward is not None:
        # An error result can't hold a reward or the episode's end, so the failure is a regular result here.
        return StepResult(
            blocks=(TextBlock(message),), reward=reward, finished=finished, metadata=seen.metadata, data=seen.data
        )
    return StepResult(error=message, reason=reason, metadata=seen.metadata, data=seen.data)


class _Observation:
    """What an agent sees of an observation."""

    def __init__(self, data: Mapping[str, Any], mapping: ObservationMapping) -> None:
        """
        Raises:
            UpstreamError: *data* has no observation.
        """
        observation = data.get("observation")
        if not isinstance(observation, Mapping):
            raise UpstreamError("the server's observation is not an object")
        self._mapping = mapping
        self._images: dict[str, list[ImageBlock]] = {}
        """Images by the path of their field."""
        self._shown: dict[str, Any] = {}
        """Values in texts by the path of their field. Empty ones are left out."""
        self._contents: dict[str, list[Any]] = {}
        """Those that are blocks or messages, with their images."""
        own, beside = observation.get("metadata"), data.get("metadata")
        metadata = {**(own if isinstance(own, Mapping) else {}), **(beside if isinstance(beside, Mapping) else {})}
        fields = {name: value for name, value in observation.items() if name != "metadata"}
        self.data = {name: self._read(name, value, fields) for name, value in fields.items()}
        self.metadata = {name: self._read(f"metadata.{name}", value, {}) for name, value in metadata.items()} or None

    def blocks(self, *, first: bool = False, without: Sequence[str] = ()) -> list[Block]:
        """Return the leading fields without their names, the others with their names, and the images."""
        shown = {name: value for name, value in self._shown.items() if name not in without}
        lead = self._mapping.text or self._usual(shown, first=first)
        blocks = [block for name in lead if name in shown for block in _content(self._contents.get(name, shown[name]))]
        rest = {name: value for name, value in shown.items() if name not in lead}
        done = {*without, *(name for name in lead if name in self._contents)}
        images = [image for name, found in self._images.items() if name not in done for image in found]
        if blocks or without:
            texts = [_named(name, value) for name, value in rest.items()]
            return [*_joined([*blocks, *([TextBlock("\n".join(texts))] if texts else [])]), *images]
        if rest or not images:
            return [TextBlock(_json(rest) if rest else EMPTY), *images]
        return list(images)

    @staticmethod
    def _usual(shown: Mapping[str, Any], *, first: bool) -> list[str]:
        goals = [name for name in _GOALS if first and isinstance(shown.get(name), str)]
        texts = [name for name in TEXTS if isinstance(shown.get(name), str)]
        if not texts and PROMPT in shown:
            texts = [PROMPT]
        if goals and texts and shown[goals[0]] in str(shown[texts[0]]):
            goals = []
        return [*goals[:1], *texts[:1]]

    def _read(self, name: str, value: Any, fields: Mapping[str, Any]) -> Any:
        """Return *value* without images and long arrays, and note what the agent sees of it."""
        is_hidden = name in self._mapping.hide or name.partition(".")[0] in self._mapping.hide
        images: list[ImageBlock] = []
        shape = fields.get(f"{name}_shape")
        left = _without_images(_shaped(value, shape), images, is_image=name in self._mapping.images)
        if not is_hidden:
            self._images[name] = images
            if left not in (None, "", [], {}) and left is not _SHOWN_AS_IMAGE:
                self._shown[name] = left
                if _is_content(value):
                    self._contents[name] = value
        return left


_SHOWN_AS_IMAGE: Final = "[an image]"
"""Stands for an image in texts and data."""


def _without_images(value: Any, images: list[ImageBlock], *, is_image: bool = False) -> Any:
    """Return *value* with marks in place of images, which are added to *images*, and of long arrays."""
    if isinstance(value, str):
        if (found := _BASE64.fullmatch(value)) is not None:
            images.append(ImageBlock(found[2], found[1] or _MAGIC[found[2][0]]))
        elif is_image and value:
            images.append(ImageBlock(value.rpartition(";base64,")[2], "image/png"))
        else:
            return value
        return _SHOWN_AS_IMAGE
    if isinstance(value, Mapping):
        kind = value.get("mime_type") or value.get("mimeType")
        if isinstance(data := value.get("data"), str) and isinstance(kind, str) and kind.startswith("image/"):
            images.append(ImageBlock(data, kind))
            return _SHOWN_AS_IMAGE
        return {name: _without_images(one, images) for name, one in value.items()}
    if not isinstance(value, list):
        return value
    if (image := _pixels(value, is_gray=is_image)) is not None:
        images.append(image)
        return _SHOWN_AS_IMAGE
    if (shape := _shape(value)) is not None:
        return value if _size(shape) <= NUMBERS_MAX else f"[{' x '.join(map(str, shape))} numbers, left out]"
    left = [_without_images(one, images) for one in value]
    return _SHOWN_AS_IMAGE if left and all(one is _SHOWN_AS_IMAGE for one in left) else left


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of an array of numbers, with the length of the first row for all; None: *value* is not one."""
    if not isinstance(value, list) or not value:
        return None
    if all(isinstance(one, int | float) for one in value):
        return (len(value),)
    rows = [_shape(one) for one in value]
    return None if rows[0] is None or None in rows else (len(value), *rows[0])


def _size(shape: Sequence[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _shaped(value: Any, shape: Any) -> Any:
    """Return a flat array of pixels as rows, if *shape* says so."""
    if not (isinstance(shape, list) and len(shape) == 3 and all(type(one) is int and one > 0 for one in shape)):
        return value
    _, width, depth = shape
    if not isinstance(value, list) or len(value) != _size(shape):
        return value
    pixels = [value[at : at + depth] for at in range(0, len(value), depth)]
    return [pixels[at : at + width] for at in range(0, len(pixels), width)]


def _pixels(value: list[Any], *, is_gray: bool) -> ImageBlock | None:
    """Return an array of pixels as an image: rows of red, green and blue (and alpha), or of gray values (*is_gray*)."""
    first = value[0] if value else None
    if len(value) < PIXELS_LEAST or not isinstance(first, list) or len(first) < PIXELS_LEAST:
        return None
    depth = len(first[0]) if isinstance(first[0], list) else 1
    if depth not in (1, 3, 4) or (depth == 1 and not (is_gray and type(first[0]) is int)):
        return None
    try:
        rows = [bytes(chain.from_iterable(row)) if isinstance(row[0], list) else bytes(row) for row in value]
    except (TypeError, ValueError, IndexError):
        return None
    if any(len(row) != len(first) * depth for row in rows):
        return None
    return ImageBlock(base64.b64encode(_png(rows, len(first), depth)).decode(), "image/png")


def _png(rows: Sequence[bytes], width: int, depth: int) -> bytes:
    """Return rows of pixels with *depth* bytes each as a PNG file."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, len(rows), 8, {1: 0, 3: 2, 4: 6}[depth], 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row for row in rows), 6)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def _named(name: str, value: Any) -> str:
    text = value if isinstance(value, str) else _json(value)
    return f"{name}:\n{text}" if "\n" in text else f"{name}: {text}"


def _joined(blocks: Sequence[Block]) -> list[Block]:
    """Return *blocks* with neighboring texts as one."""
    joined: list[Block] = []
    for block in blocks:
        last = joined[-1] if joined else None
        if isinstance(block, TextBlock) and isinstance(last, TextBlock) and not block.detail and not last.detail:
            joined[-1] = TextBlock(f"{last.text}\n\n{block.text}")
        else:
            joined.append(block)
    return joined


def _is_content(value: Any) -> bool:
    """Return True if *value* is a list of blocks or messages."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, Mapping) and ("type" in item or "role" in item) for item in value)
    )


def _content(result: Any) -> Iterator[Block]:
    """Yield the blocks of a tool's result or a prompt: MCP's content, ORS' blocks, messages, or any other value."""
    content = result if _is_content(result) else None
    if isinstance(result, Mapping):
        content = next((result[name] for name in ("content", "blocks") if isinstance(result.get(name), list)), None)
        if content is None and "data" in result:
            result = result["data"]
    if content is None:
        yield TextBlock(result if isinstance(result, str) else _json(result))
        return
    for item in content:
        if not isinstance(item, Mapping):
            yield TextBlock(item if isinstance(item, str) else _json(item))
        elif isinstance(item.get("role"), str):
            yield TextBlock(f"[{item['role']}]", {"role": item["role"]})
            said = item.get("content")
            yield from _content({"content": said} if isinstance(said, list) else said or "")
        elif isinstance(item.get("text"), str):
            yield TextBlock(item["text"])
        elif item.get("type") == "image" and isinstance(item.get("data"), str):
            yield ImageBlock(item["data"], str(item.get("mimeType") or item.get("mime_type") or "image/png"))
        else:
            yield TextBlock(_json(item))


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
