"""Results and blocks, written as ORS answers have them: compact JSON, every key of the standard always there."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gateway.core.episode import Block, StepResult, TextBlock

_PLAIN: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)
_ESCAPED: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def dump(value: Any) -> bytes:
    """Write *value* as the reference servers do: text raw, a number that is none as null."""
    try:
        return _PLAIN.encode(value).encode()
    except UnicodeEncodeError:  # a lone surrogate, which UTF-8 can't carry and JSON can
        return _ESCAPED.encode(value).encode()
    except ValueError:
        return dump(_finite(value))


def block(value: Block) -> dict[str, Any]:
    """A block in the protocol's words."""
    if isinstance(value, TextBlock):
        return {"text": value.text, "detail": value.detail, "type": "text"}
    return {"data": value.data, "mimeType": value.mime_type, "detail": value.detail, "type": "image"}


def blocks(values: Sequence[Block]) -> list[dict[str, Any]]:
    """A list of blocks."""
    return [block(value) for value in values]


def result(value: StepResult) -> bytes:
    """What came of a call (``RunToolOutput``); a structured observation is added where there is one."""
    if value.error is not None:
        return refusal(value.error, value.reason)
    output: dict[str, Any] = {
        "blocks": blocks(value.blocks),
        "metadata": value.metadata,
        "reward": None if value.reward is None else float(value.reward),
        "finished": value.finished,
    }
    if value.data is not None:
        output["data"] = value.data
    return dump({"ok": True, "output": output})


def refusal(error: str, reason: str) -> bytes:
    """Why a call has no output."""
    return dump({"ok": False, "error": error, "reason": reason or None})


def messages(values: Sequence[Block]) -> bytes:
    """A prompt as a conversation of one message."""
    return dump([{"role": "user", "blocks": blocks(values), "detail": None}])


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
