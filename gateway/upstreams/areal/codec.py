"""Writes requests of AReaL's Task Server API (``episode/start``, ``episode/step``), and reads its responses.

Difference from the API's known clients: a reward is a finite number, or the response is an error. A null, NaN or, at
the end of an episode, missing reward never becomes 0. A response in mid-episode may lack the reward: "no reward here".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.core.environment import Environment
from gateway.core.episode import Action, StepResult
from gateway.core.errors import InvalidRequest, UpstreamError, author_fault
from gateway.core.json_text import encode, parse
from gateway.core.session import SessionSetup
from gateway.upstreams.areal.observations import read_observation
from gateway.upstreams.json_replies import Json, check_secrets, read, reward_of

ACT: Final = "act"
"""Name of the only tool that a task server has in ORS."""
CONTENT: Final = "content"
"""Name of the tool's input field for text actions."""
_LABELS: Final = frozenset(
    (
        "id",
        "env_type",
        "name",
        "description",
        "version",
        "tags",
        "aliases",
        "difficulty",
        "split",
        "rate_limit",
        "metadata",
    )
)
"""Keys of a task for people, trainers or the gateway. A server does not need them."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A task server's description of itself."""

    base: bytes
    """Prefix of the server's paths: ``/api`` or empty."""
    info: Mapping[str, Any]
    """The response to ``task/info``."""

    @property
    def is_structured(self) -> bool:
        """Return True if the server expects actions as objects."""
        return self.info.get("action_type") == "structured"

    @property
    def samples(self) -> int:
        """The number of samples that the server serves, or 0 if it does not state the number."""
        count = self.info.get("num_samples")
        return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else 0


@dataclass(frozen=True, slots=True)
class Begun:
    """A started episode, from the response to ``episode/start``. A session's handle contains it."""

    episode: str
    observation: Any
    info: Mapping[str, Any]

    def handle(self) -> str:
        """Return the episode as a session's handle."""
        return encode({"episode": self.episode, "observation": self.observation, "info": self.info})

    @classmethod
    def of(cls, handle: str) -> Begun:
        """Read what `handle` wrote. Raises ``ValueError``, ``KeyError`` or ``TypeError`` for other text."""
        value = json.loads(handle)
        return cls(value["episode"], value["observation"], value["info"])


# -- start ----------------------------------------------------------------------------------------------------------


def start_body(setup: SessionSetup) -> Json:
    """Return *setup* as a body of ``episode/start``.

    The sample is the task's ``sample_id``, else its ``id``, else its index. The episode's ``config`` merges the task's
    ``environment_config`` and ``config``, the trainer's configuration and the seed. Later parts take precedence.

    Raises:
        InvalidRequest: *setup* names no sample, or contains values that the API can't express and that would be lost.
    """
    check_secrets(setup.secrets, "AReaL's API")
    sample: Any = setup.spec.get("sample_id")
    config: Json = {}
    for key in ("environment_config", "config"):
        given = setup.spec.get(key)
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise InvalidRequest(f"{key}: must be an object")
        if sample is None:
            sample = given.get("sample_id")
        config |= {name: value for name, value in given.items() if name != "sample_id"}
    if sample is None:
        sample = setup.spec.get("id")
    if sample is None:
        sample = setup.index
    if sample is None:
        raise InvalidRequest("the task does not name a sample: an AReaL server needs a sample_id, an id or an index")
    if isinstance(sample, bool) or not isinstance(sample, (str, int)) or sample == "":
        raise InvalidRequest("sample_id: must be a non-empty string or an integer")
    _check_rest(setup.spec)
    config |= setup.config or {}
    if setup.seed is not None:
        config["seed"] = setup.seed
    return {"sample_id": sample, "config": config}


def read_start(body: bytes) -> Begun:
    """Read a response to ``episode/start`` with status 200.

    Raises:
        UpstreamError: The response is not valid in the API.
    """
    value = read(body, "episode/start")
    episode, observation, info = value.get("episode_id"), value.get("observation"), value.get("info")
    if not isinstance(episode, str) or not episode:
        raise UpstreamError("the server's answer to episode/start names no episode_id")
    return Begun(episode, observation, info if isinstance(info, dict) else {})


def _check_rest(spec: Mapping[str, Any]) -> None:
    known = _LABELS | {"sample_id", "config", "environment_config"}
    lost = sorted(str(key) for key, value in spec.items() if key not in known and _says_something(value))
    if lost:
        raise InvalidRequest(
            f"the task's {', '.join(lost)} would be lost: an AReaL server takes a sample_id of its own samples and a "
            "config, nothing else"
        )


def _says_something(value: object) -> bool:
    return value is not None and value != "" and value != {} and value != []


# -- step -----------------------------------------------------------------------------------------------------------


def written(action: Action, environment: Environment, told: ServerInfo) -> Json | StepResult:
    """Return *action* in the API's form, or a result with an error that the agent reads if the action is not valid."""
    if told.is_structured:
        return _object(action, environment)
    if action.text is not None:
        return _text(action.text)
    if action.name is None:
        fields = action.fields or {}
        only = fields.get(CONTENT) if fields.keys() == {CONTENT} else None
        return _text(only if isinstance(only, str) else json.dumps(dict(fields), ensure_ascii=False))
    if action.name not in _names(environment):
        return StepResult(error=f"there is no tool {action.name!r}, but {ACT!r}", reason="not_found")
    if action.arguments.keys() == {CONTENT} and isinstance(text := action.arguments[CONTENT], str):
        return _text(text)
    return StepResult(
        error=f"the input of {action.name!r} is one string, {CONTENT!r}, and nothing else", reason="input_validation"
    )


def read_step(body: bytes) -> StepResult:
    """Read a response to ``episode/step`` with status 200.

    Raises:
        AuthorFault: The reward is not a finite number, or it is missing at the end of the episode.
        UpstreamError: The response is not valid in the API.
    """
    value = read(body, "episode/step")
    done, info = value.get("done"), value.get("info")
    if not isinstance(done, bool):
        raise UpstreamError("the server's answer to episode/step has no boolean 'done'")
    if "reward" not in value and done:
        raise author_fault("the server ended the episode without a reward", "reward")
    blocks, data = read_observation(value.get("observation"))
    return StepResult(
        blocks=tuple(blocks),
        reward=reward_of(value["reward"]) if "reward" in value else None,
        finished=done,
        metadata=info if isinstance(info, dict) else None,
        data=data,
    )


def tool_list(environment: Environment, told: ServerInfo) -> Json:
    """Return the server's only tool as an ORS tool list."""
    schema: Json = {"type": "object", "additionalProperties": True}
    if not told.is_structured:
        text = {"type": "string", "description": "The whole of what the agent says, in the form that the task asks for"}
        schema = {"type": "object", "properties": {CONTENT: text}, "required": [CONTENT], "additionalProperties": False}
    description = told.info.get("description")
    shown = f"Act in the task: {description}" if isinstance(description, str) and description else "Act in the task"
    tool = {"name": environment.actions.default_tool or ACT, "description": shown, "input_schema": schema}
    return {"tools": [tool], "terminal_tool": None, "supports_score_group": False, "message_block_types": None}


def _names(environment: Environment) -> set[str]:
    return {ACT, environment.actions.default_tool} - {""}


def _object(action: Action, environment: Environment) -> Json:
    """Return an action for a server that expects objects. Plain text stays text, which such a server may accept too."""
    if action.fields is not None:
        return _structured(action.fields)
    if action.name is not None:
        if action.name in _names(environment):
            return _structured(action.arguments)
        # These servers' own trainers write a tool call in this form, and the AReaL frontend reads it.
        return _structured({"name": action.name, "arguments": dict(action.arguments)})
    text = action.text or ""
    if environment.actions.text_field:
        return _structured({environment.actions.text_field: text})
    if text.lstrip().startswith("{"):
        try:
            value = parse(text.strip())
        except ValueError:
            return _text(text)
        return _structured(value)
    return _text(text)


def _text(content: str) -> Json:
    return {"type": "text", "content": content}


def _structured(content: Mapping[str, Any]) -> Json:
    return {"type": "structured", "content": dict(content)}
