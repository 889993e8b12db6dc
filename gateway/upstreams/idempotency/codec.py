"""Encodes outcomes of calls (values and errors) as bytes, for the store and for other replicas.

The bytes are ASCII. JSON's escapes can express a lone surrogate in an environment's text, which UTF-8 can't.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from gateway.core import sse
from gateway.core.episode import Block, ImageBlock, StepResult, TextBlock
from gateway.core.errors import (
    AuthorFault,
    GatewayError,
    InvalidRequest,
    SessionFailed,
    UpstreamError,
    UpstreamGone,
    UpstreamTimeout,
)
from gateway.core.json_text import compact

T = TypeVar("T")

_KINDS: Final[Mapping[str, type[GatewayError]]] = {
    kind.code: kind for kind in (UpstreamError, UpstreamTimeout, AuthorFault, SessionFailed, InvalidRequest)
}
"""Errors that consist of their message only. ``UpstreamGone`` also contains ``sent``."""


@dataclass(frozen=True, slots=True)
class Codec(Generic[T]):
    """Writes values of one kind as JSON, and reads them."""

    name: str
    """Key of the kind in the JSON."""
    to_json: Callable[[T], Any]
    of_json: Callable[[Any], T]

    def write(self, outcome: T | Exception) -> bytes:
        """Write a value or an error. An unexpected exception of the gateway is written without its message."""
        if isinstance(outcome, Exception):
            return compact({"error": _told(outcome)})
        return compact({self.name: self.to_json(outcome)})

    def read(self, written: bytes) -> T | GatewayError:
        """Read an outcome that `write` wrote. Raises ``UpstreamError`` if the bytes are not valid."""
        try:
            found = json.loads(written)
            return _error(found["error"]) if "error" in found else self.of_json(found[self.name])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UpstreamError("the outcome that was kept of the call can't be read") from error


def result_to_json(result: StepResult) -> Any:
    """Return a result as JSON, without its faults. The replica that ran the action reports the faults to operators."""
    return {
        "blocks": [_block_to_json(block) for block in result.blocks],
        "reward": result.reward,
        "finished": result.finished,
        "metadata": None if result.metadata is None else dict(result.metadata),
        "data": result.data,
        "error": result.error,
        "reason": result.reason,
    }


def result_of_json(value: Any) -> StepResult:
    """Read the JSON of `result_to_json`. Raises ``KeyError`` or ``TypeError`` for other JSON."""
    return StepResult(**{**value, "blocks": tuple(map(_block_of_json, value["blocks"]))})


def _block_to_json(block: Block) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return {"text": block.text, "detail": block.detail}
    return {"data": block.data, "mime_type": block.mime_type, "detail": block.detail}


def _block_of_json(value: Mapping[str, Any]) -> Block:
    if "text" in value:
        return TextBlock(value["text"], value["detail"])
    return ImageBlock(value["data"], value["mime_type"], value["detail"])


def _told(error: Exception) -> dict[str, Any]:
    if not isinstance(error, GatewayError):
        return {"code": UpstreamError.code, "detail": "the call failed in the gateway that ran it"}
    told: dict[str, Any] = {"code": error.code, "detail": error.detail}
    return told | {"sent": error.sent} if isinstance(error, UpstreamGone) else told


def _error(told: Mapping[str, Any]) -> GatewayError:
    detail = str(told["detail"])
    if told["code"] == UpstreamGone.code:
        return UpstreamGone(detail, sent=told["sent"] is not False)
    return _KINDS.get(told["code"], UpstreamError)(detail)


RESULTS: Final[Codec[StepResult]] = Codec("result", result_to_json, result_of_json)
EVENTS: Final[Codec[sse.Event]] = Codec("event", list, lambda value: sse.Event(str(value[0]), str(value[1])))
