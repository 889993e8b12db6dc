"""Builds the replies for AReaL clients: observations, and the bodies of start, step and errors.

Differences between ORS and the API:
* A reward of null becomes 0.0. If no turn of an episode had a reward, the session layer (`turns`) has
  already refused its end. Rewards of single steps pass through unchanged, and the client adds them up.
* ``success`` is the result's metadata ``success`` if that is a boolean. Otherwise it is True if the last reward is at
  least 1: partial credit is not a success.
* A tool that refuses or fails returns an observation: an HTTP error would cost the client its whole trajectory.

AReaL clients only log the body of an error, so the body contains the diagnosis.

An environment's name, limits and types come from its environment.toml, or else from its own AReaL server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from gateway.core.environment import ActionType, Areal, Environment, ObservationType, UpstreamKind
from gateway.core.episode import Action, Block, ImageBlock, StepResult, TextBlock, role_of, without_lone_role
from gateway.core.errors import (
    AuthorFault,
    BodyTooLarge,
    EnvironmentUnavailable,
    GatewayError,
    InvalidRequest,
    PoolExhausted,
    SessionClosed,
    SessionFailed,
    SessionNotFound,
    StoreUnavailable,
    UnknownTask,
    UpstreamError,
    UpstreamGone,
    UpstreamTimeout,
)
from gateway.core.session import CloseReason
from gateway.frontends.areal.requests import without_control
from gateway.frontends.errors import AREAL_STATUS, reason_of, status_of
from gateway.sessions.worker_queries import WorkerQueries

Json = dict[str, Any]
LIMIT_REACHED: Final = "task limit reached"
UNLIMITED_TURNS: Final = 1000
"""The turn limit that replies state if an episode has no limit."""
COMPLETED: Final = "completed"
NO_OUTPUT: Final = "(no output)"
"""Text of an empty observation. Without text, two assistant turns would follow each other."""
_HINTS: Final = {
    "not_found": "Use one of the tools that this environment has, with its arguments.",
    "name_collision": "Use another tool of this environment.",
    "tool_failed": "The action failed. Try another one.",
}
"""Advice for the agent by error reason. Bad input needs none, because its error message explains it."""


def text_of(blocks: Sequence[Block]) -> str:
    """Return the blocks as one text, with a placeholder line for each image."""
    parts = [block.text if isinstance(block, TextBlock) else f"[image: {block.mime_type}]" for block in blocks]
    return without_control("\n".join(parts))


def first_observation(shown: Areal, blocks: Sequence[Block]) -> Json:
    """Return the prompt in the environment's observation format."""
    if shown.observation_type is ObservationType.MESSAGES:
        return {"type": "messages", "content": _messages(blocks)}
    return _observation(shown, without_lone_role(blocks), _structured(blocks))


def is_conversation(blocks: Sequence[Block]) -> bool:
    """Return True if *blocks* are messages with role headers."""
    return any(role_of(block) is not None for block in blocks)


def observation(shown: Areal, result: StepResult) -> Json:
    """Return the observation after a step that did not end its episode. It is never null."""
    if result.error is None:
        return _observation(shown, result.blocks, result.data)
    hint = _HINTS.get(result.reason, "")
    return _text("\n".join(filter(None, (without_control(result.error), hint))))


def start_reply(
    shown: Areal, episode: str, blocks: Sequence[Block], *, sample: str | int, task: Mapping[str, Any]
) -> Json:
    """Return the reply to ``episode/start``."""
    info = {
        "max_turns": _most_turns(shown, blocks, task),
        "turn": 0,
        "sample_id": sample,
        "task_description": _description(task, blocks) or str(sample),
    }
    seen = first_observation(shown, blocks)
    return {"episode_id": episode, "observation": seen, "info": info, "reward": 0.0, "done": False}


def step_reply(shown: Areal, episode: str, action: Action, result: StepResult, turn: int) -> Json:
    """Return the reply to turn number *turn*. It is final if the episode ended or reached its turn limit."""
    if result.finished:
        return _final(episode, turn, _reward(result), _outcome(action, result))
    if is_last_turn(shown, turn):
        return _final(episode, turn, _reward(result), {"success": False, "answer": "", "status": LIMIT_REACHED})
    metadata = result.metadata or {}
    info = {"turn": turn, "parsed_action": parsed_action(action, result)}
    info |= {name: metadata[name] for name in ("answer", "status") if isinstance(metadata.get(name), str)}
    return {
        "episode_id": episode,
        "observation": observation(shown, result),
        "reward": _reward(result),
        "done": False,
        "info": info,
    }


def is_last_turn(shown: Areal, turn: int) -> bool:
    """Return True if an episode ends with turn number *turn*, whatever its environment says."""
    return shown.max_turns is not None and turn >= shown.max_turns


def stated_turns(shown: Areal) -> int:
    """Return the turn limit that replies state."""
    return UNLIMITED_TURNS if shown.max_turns is None else shown.max_turns


def parsed_action(action: Action, result: StepResult) -> Json:
    """Return the action as the environment parsed it, or the gateway's own reading if the environment reports none."""
    given = (result.metadata or {}).get("parsed_action")
    if isinstance(given, dict):
        return given
    if action.text is not None and result.reason in ("input_validation", "not_found"):
        return {"thought": None, "action": None, "content": None}
    content = action.text
    if content is None:
        content = json.dumps(action.arguments if action.name is not None else action.fields, ensure_ascii=False)
    return {"thought": None, "action": action.name, "content": content}


def _final(episode: str, turn: int, reward: float, outcome: Json) -> Json:
    return {
        "episode_id": episode,
        "observation": None,
        "reward": reward,
        "done": True,
        "info": {"turn": turn, "num_turns": turn, **outcome},
    }


def _outcome(action: Action, result: StepResult) -> Json:
    metadata = result.metadata or {}
    success, status = metadata.get("success"), metadata.get("status")
    return {
        "success": success if isinstance(success, bool) else _reward(result) >= 1.0,
        "answer": _answer(action, metadata),
        "status": status if isinstance(status, str) else COMPLETED,
    }


def _answer(action: Action, metadata: Mapping[str, Any]) -> str:
    """Return the submitted answer: the metadata's, else the tool argument ``answer``, else the action's text."""
    candidates = (metadata.get("answer"), (action.fields or action.arguments).get("answer"), action.text)
    return next((answer for answer in candidates if isinstance(answer, str)), "")


def _reward(result: StepResult) -> float:
    return 0.0 if result.reward is None else result.reward


def _observation(shown: Areal, blocks: Sequence[Block], data: Any) -> Json:
    if shown.observation_type is ObservationType.JSON:
        return {"type": "json", "content": {"text": text_of(blocks)} if data is None else data}
    images = [block for block in blocks if isinstance(block, ImageBlock)]
    if shown.observation_type is ObservationType.IMAGE and images:
        texts = [block for block in blocks if isinstance(block, TextBlock)]
        last = images[-1]
        return {"type": "image", "content": last.data, "mime_type": last.mime_type, "text": text_of(texts)}
    return _text(text_of(blocks))


def _text(content: str) -> Json:
    return {"type": "text", "content": content if content.strip() else NO_OUTPUT}


def _messages(blocks: Sequence[Block]) -> list[Json]:
    """Return the prompt as a conversation. A header block names the role of the blocks after it."""
    messages: list[tuple[str, list[Block]]] = []
    for block in blocks:
        role = role_of(block)
        if role is not None:
            messages.append((role, []))
            continue
        if not messages:
            messages.append(("user", []))
        messages[-1][1].append(block)
    return [{"role": role, "content": text_of(said) or NO_OUTPUT} for role, said in messages or [("user", [])]]


def _structured(blocks: Sequence[Block]) -> Any:
    """Return the prompt's structured observation, or None without one."""
    return next(
        (block.detail["observation"] for block in blocks if block.detail and "observation" in block.detail), None
    )


def _most_turns(shown: Areal, blocks: Sequence[Block], task: Mapping[str, Any]) -> int:
    """Return the turn limit of the episode: the lowest of the settings, the first observation and the task."""
    sources = (_structured(blocks), task.get("config"))
    told = [source.get("max_turns") for source in sources if isinstance(source, Mapping)]
    return min([stated_turns(shown), *(turns for turns in told if type(turns) is int and turns > 0)])


def _description(task: Mapping[str, Any], blocks: Sequence[Block]) -> str:
    """Return the problem statement: the task's instruction, else the first text of the prompt."""
    instruction = task.get("instruction")
    texts = [block.text for block in blocks if isinstance(block, TextBlock) and role_of(block) is None]
    found = next((text for text in (instruction, *texts) if isinstance(text, str) and text.strip()), "")
    return without_control(found)


_UNSAID = Areal()


async def shown_of(queries: WorkerQueries, environment: Environment) -> Areal:
    """Return the `Areal` settings of *environment*. An AReaL server supplies what the configuration omits."""
    if environment.wire is not UpstreamKind.AREAL:
        return environment.areal
    return merged(environment.areal, await queries.about(environment))


def merged(shown: Areal, info: Mapping[str, Any]) -> Areal:
    """Fill default values of *shown* from *info*, a server's ``task/info``. Ignore invalid values."""
    told: dict[str, Any] = {}
    for key in ("name", "description"):
        if not getattr(shown, key) and isinstance(info.get(key), str):
            told[key] = info[key]
    turns = info.get("max_episode_length")
    if shown.max_turns is None and type(turns) is int and turns > 0:
        told["max_turns"] = turns
    seen, done = info.get("observation_type"), info.get("action_type")
    if shown.observation_type is _UNSAID.observation_type and seen in list(ObservationType):
        told["observation_type"] = ObservationType(seen)
    if shown.action_type is _UNSAID.action_type and done in list(ActionType):
        told["action_type"] = ActionType(done)
    return replace(shown, **told) if told else shown


_GONE: Final = "never known here, cancelled, expired or already done"
_REASONS: Final = {
    CloseReason.EXPIRED.value: "expired: idle for longer than the environment allows",
    CloseReason.WORKER_LOST.value: "its environment was lost: the worker died",
    CloseReason.OUT_OF_MEMORY.value: "its environment was lost: the worker ran out of memory",
    CloseReason.TIMEOUT.value: "its environment was lost: the worker did not answer a step in time",
    CloseReason.AUTHOR_FAULT.value: "its environment failed: the environment author's code raised an exception",
    CloseReason.SESSION_FAILED.value: "its environment failed: what the episode needs in its worker broke",
}
_ENDS: Final = {
    CloseReason.WORKER_LOST.value: "environment_lost",
    CloseReason.OUT_OF_MEMORY.value: "environment_lost",
    CloseReason.TIMEOUT.value: "environment_lost",
    CloseReason.AUTHOR_FAULT.value: "environment_failed",
    CloseReason.SESSION_FAILED.value: "environment_failed",
}
_TITLES: Final[dict[type[GatewayError], str]] = {
    UnknownTask: "sample not found",
    InvalidRequest: "bad request",
    BodyTooLarge: "body too large",
    SessionNotFound: "episode not found",
    SessionClosed: "episode not found",
    PoolExhausted: "no capacity",
    EnvironmentUnavailable: "environment unavailable",
    StoreUnavailable: "store unavailable",
    UpstreamTimeout: "environment lost",
    UpstreamGone: "environment lost",
    UpstreamError: "environment failed",
    GatewayError: "internal error",
}
_WORDS: Final[dict[type[GatewayError], str]] = {
    PoolExhausted: "capacity",
    AuthorFault: "environment_failed",
    SessionFailed: "environment_failed",
    UpstreamTimeout: "environment_lost",
    UpstreamGone: "environment_lost",
}


def error_reply(error: GatewayError, named: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
    """Return status and body of the response to *error*. *named* holds the requested episode's id."""
    status = status_of(error, AREAL_STATUS)
    word = _nearest(_WORDS, error) or ("internal" if status >= 500 else "")
    detail = error.detail
    if isinstance(error, SessionNotFound):
        detail = _GONE
    elif isinstance(error, SessionClosed):
        detail = _REASONS.get(error.reason, error.detail)
        word = _ENDS.get(error.reason, word)
    body = {"error": _nearest(_TITLES, error), **named, "detail": detail}
    marks = {"status": word, "reason": reason_of(error)}
    return status, body | {name: mark for name, mark in marks.items() if mark}


def _nearest(table: Mapping[type[GatewayError], str], error: GatewayError) -> str:
    """Return the entry of *error*'s nearest ancestor in *table*, or ``""`` without one."""
    return next((table[kind] for kind in type(error).__mro__ if kind in table), "")
