"""Parses bodies of AReaL requests, and removes special tokens from text between a model and an environment.

An invalid body raises an error that states the problem. Unknown fields are ignored, as the API requires.

AReaL decodes a model's output with its special tokens, so actions can end with them. Observations pass through the chat
template again, so a control token in a command's output would be tokenised as a control token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.core.environment import Environment
from gateway.core.episode import Action
from gateway.core.errors import InvalidRequest
from gateway.core.json_text import refuse_constant
from gateway.tasks.resolver import TaskRequest

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Parsed body of ``episode/start``."""

    sample: str
    """The sample's id as text: 17 and "17" are the same sample."""
    as_sent: str | int
    seed: int | None
    config: Object


def read_object(body: bytes) -> Object:
    """Parse a body that must be a JSON object.

    Raises:
        InvalidRequest: The body is empty, not JSON, or not an object.
    """
    if not body.strip():
        raise InvalidRequest("the body is empty; it must be a JSON object")
    try:
        value = json.loads(body, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {_kind(value)}")
    return value


def read_start(body: Object) -> Start:
    """Parse the body of ``episode/start``.

    Raises:
        InvalidRequest: A field is missing or has the wrong type.
    """
    sent = body.get("sample_id")
    if isinstance(sent, bool) or not isinstance(sent, (str, int)):
        raise InvalidRequest(f"sample_id: must be a string or an integer, not {_kind(sent)}")
    config = body.get("config")
    if config is None:
        config = {}
    if not isinstance(config, dict):
        raise InvalidRequest(f"config: must be an object, not {_kind(config)}")
    seed = config.get("seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise InvalidRequest(f"config.seed: must be an integer, not {_kind(seed)}")
    sample = str(sent)
    return Start(sample=sample, as_sent=sent, seed=seed, config=config)


def read_episode_id(body: Object) -> str:
    """Return the episode id in ``episode/step`` and ``episode/cancel``. Raises ``InvalidRequest``."""
    name = body.get("episode_id")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"episode_id: must be a non-empty string, not {_kind(name)}")
    return name


def read_action(body: Object) -> Action:
    """Return the agent's action, without special tokens at the end of a text. Raises ``InvalidRequest``."""
    action = body.get("action")
    if not isinstance(action, dict):
        raise InvalidRequest(f"action: must be an object, not {_kind(action)}")
    kind, content = action.get("type"), action.get("content")
    if kind == "text":
        if not isinstance(content, str):
            raise InvalidRequest(f"action.content: must be a string, not {_kind(content)}")
        return Action(text=without_end_tokens(content))
    if kind == "structured":
        if not isinstance(content, dict):
            raise InvalidRequest(f"action.content: must be an object, not {_kind(content)}")
        return _structured(content)
    raise InvalidRequest(f"action.type: must be 'text' or 'structured', not {str(kind)[:64]!r}")


def _structured(content: dict[str, Any]) -> Action:
    if content.keys() <= {"name", "arguments"} and isinstance(content.get("name"), str):
        arguments = content.get("arguments", {})
        if isinstance(arguments, dict):
            return Action(name=content["name"], arguments=arguments)
    return Action(fields=content)


def _kind(value: object) -> str:
    """Return the name of *value*'s JSON type. None, which also means an absent field, is "nothing"."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "boolean"
        case str():
            return "string" if value else "empty string"
        case int() | float():
            return "number"
        case list():
            return "array"
        case _:
            return "object"


def sample_request(environment: Environment, sample: str) -> TaskRequest:
    """Return the request for the task *sample*: an id or alias in any split, else an index in the AReaL split."""
    return TaskRequest(ids=(sample,), usual_split=environment.areal.split, numbers_are_indices=True)


END_TOKENS: Final = ("<|im_end|>", "<|endoftext|>", "</s>", "<|eot_id|>")
"""Special tokens at the end of the known clients' model outputs."""
_CONTROL: Final = re.compile(
    r"(?:<(?=[|\uff5c][^|\uff5c<>\n]{1,64}[|\uff5c]>)"  # ChatML, Llama 3, Phi; the full-width bar: DeepSeek
    r"|<(?=/?s>|(?:bos|eos|pad|unk)>|(?:start|end)_of_turn>)"  # Llama 2, Mistral, Gemma
    r"|\[(?=/?(?:INST|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS)\]))"  # Mistral
)
"""Matches the first character of a control token of common chat templates."""


def without_end_tokens(text: str) -> str:
    """Remove all trailing special tokens and the white space around them. Leave text without such tokens unchanged."""
    end, kept = len(text), len(text)
    while True:
        while end and text[end - 1].isspace():
            end -= 1
        token = next((token for token in END_TOKENS if text.endswith(token, 0, end)), None)
        if token is None:
            # Indices, and a single copy: slicing the text for each token takes hours for a body that is all tokens.
            return text if kept == len(text) else text[:end]
        end -= len(token)
        kept = end


def without_control(text: str) -> str:
    """Insert a space after the first character of each chat control token: ``<|im_start|>`` becomes ``< |im_start|>``.

    The space is visible to a model that copies such text, and in logs. An invisible character would also stop the
    tokeniser, but would break file names and commands without a visible cause.
    """
    return _CONTROL.sub(lambda found: found[0] + " ", text)
