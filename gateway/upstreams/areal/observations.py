"""Converts observations of AReaL's task servers to the gateway's blocks.

The API's known clients read ``text`` and, as the first observation, ``messages``. This module reads every type that the
API defines. The role ``agent``, which one server writes, becomes ``assistant``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from gateway.core.episode import Block, ImageBlock, TextBlock
from gateway.core.errors import UpstreamError

_ROLES: Final = ("system", "user", "assistant")
_IMAGES: Final = (("iVBOR", "image/png"), ("/9j/", "image/jpeg"), ("R0lGOD", "image/gif"), ("UklGR", "image/webp"))
"""The first characters of images in base64, and the type that they indicate."""


def read_prompt(observation: Any) -> list[Block]:
    """Return the first observation as blocks. The first block's detail contains a structured observation.

    Raises:
        UpstreamError: There is no observation, or its form is unknown.
    """
    if observation is None:
        raise UpstreamError("the server began the episode without an observation")
    blocks, data = read_observation(observation)
    if data is None:
        return blocks
    return [TextBlock(_plain(data), {"observation": data})]


def read_messages(observation: Any) -> list[tuple[str, list[Block]]]:
    """Return the first observation as a conversation: pairs of role and blocks. The default role is ``user``.

    Raises:
        UpstreamError: There is no observation, or its form is unknown.
    """
    if isinstance(observation, Mapping) and observation.get("type") == "messages":
        return [(role if role in _ROLES else "user", blocks) for role, blocks in _said(observation.get("content"))]
    return [("user", read_prompt(observation))]


def read_observation(observation: Any) -> tuple[list[Block], Any]:
    """Return an observation as blocks, and a structured observation also as data. A null gives no blocks and None.

    Raises:
        UpstreamError: The observation's form is unknown in the API.
    """
    if observation is None:
        return [], None
    if not isinstance(observation, Mapping) or "content" not in observation:
        raise UpstreamError("the server's observation is not of the form {type, content}")
    kind, content = observation.get("type"), observation["content"]
    match kind:
        case "text":
            return [TextBlock(_plain(content))], None
        case "messages":
            return _messages(content), None
        case "json":
            return [TextBlock(_plain(content))], content
        case "image":
            return _image(observation, content), None
        case _:
            raise UpstreamError(f"the server's observation is of an unknown type: {str(kind)[:64]!r}")


def _plain(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, separators=(",", ":"))


def _messages(content: Any) -> list[Block]:
    """Return a conversation as blocks. A block with the role precedes each message."""
    blocks: list[Block] = []
    for role, said in _said(content):
        blocks.append(TextBlock(f"[{role}]", {"role": role}))
        blocks += said
    return blocks


def _said(messages: Any) -> list[tuple[str, list[Block]]]:
    if not isinstance(messages, list):
        raise UpstreamError("the server's observation is not a list of messages")
    said: list[tuple[str, list[Block]]] = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UpstreamError("the server's observation has a message without a role")
        role = "assistant" if message["role"] == "agent" else message["role"]
        said.append((role, _parts(message.get("content"))))
    return said


def _parts(content: Any) -> list[Block]:
    """Return a message's content as blocks. The content is a text, or a list of texts and images."""
    if content is None:
        return []
    if not isinstance(content, list):
        return [TextBlock(_plain(content))]
    blocks: list[Block] = []
    for part in content:
        match part:
            case {"type": "text", "text": str(text)}:
                blocks.append(TextBlock(text))
            case {"type": "image_url", "image_url": {"url": str(url)}} if url.startswith("data:"):
                blocks.append(_picture(url, None))
            case _:
                blocks.append(TextBlock(_plain(part)))
    return blocks


def _image(observation: Mapping[str, Any], content: Any) -> list[Block]:
    if not isinstance(content, str):
        raise UpstreamError("the server's image is not in base64")
    text = observation.get("text")
    said: list[Block] = [TextBlock(text)] if isinstance(text, str) and text else []
    return [*said, _picture(content, observation.get("mime_type"))]


def _picture(content: str, mime_type: object) -> ImageBlock:
    """Return an image from base64 or a ``data:`` URL. Without a stated type, the first bytes decide the type."""
    head, found, data = content.partition(";base64,")
    if found and head.startswith("data:"):
        return ImageBlock(data, head.removeprefix("data:").partition(";")[0] or "image/png")
    if not isinstance(mime_type, str) or not mime_type:
        mime_type = next((kind for start, kind in _IMAGES if content.startswith(start)), "image/png")
    return ImageBlock(content, mime_type)
