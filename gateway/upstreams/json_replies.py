"""Reads the JSON responses of third-party servers, for the upstreams of AReaL and NeMo Gym."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from gateway.core.episode import EPISODE_FINISHED, StepResult
from gateway.core.errors import InvalidRequest, UpstreamError, author_fault
from gateway.core.json_text import NotFinite, parse
from gateway.upstreams.ors.client import explained
from gateway.upstreams.ors_bodies import PLATFORM_SECRETS

Json = dict[str, Any]
MAX_SHOWN_CHARS: Final = 2000
"""Largest number of characters of a server's reason that is passed on."""


def read(body: bytes, what: str) -> Mapping[str, Any]:
    """Read a response that has to be a JSON object. Raises ``UpstreamError``, and ``AuthorFault`` for NaN."""
    try:
        value = parse(body)
    except NotFinite as error:
        raise author_fault(f"the server's answer to {what} can't be used: {error}", "reward") from error
    except ValueError as error:
        raise UpstreamError(f"the server's answer to {what} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UpstreamError(f"the server's answer to {what} is not a JSON object")
    return value


def refusal(status: int, body: bytes) -> tuple[str, str]:
    """Return the reason of a refusal, for people, and the API's ``status`` word (``capacity``, …), or an empty one."""
    try:
        value = parse(body)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        return f"the server answered {status} and gave no reason", ""
    told = [text for text in (value.get("error"), explained(value.get("detail"))) if isinstance(text, str) and text]
    word = value.get("status")
    reason = ": ".join(told) or f"the server answered {status} and gave no reason"
    return reason[:MAX_SHOWN_CHARS], word if isinstance(word, str) else ""


def reward_of(value: object) -> float:
    """Return a server's reward. Raises ``AuthorFault`` if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise author_fault(f"the server's reward is not a number: {str(value)[:64]}", "reward")
    try:
        reward = float(value)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise author_fault("the server's reward is not finite", "reward")
    return reward


def finished(name: str) -> StepResult:
    """Return the result of a call of the tool *name* in an episode that has finished."""
    return StepResult(
        error=f"{name!r} was not run: the episode has finished, so no further actions are accepted.",
        reason=EPISODE_FINISHED,
    )


def check_secrets(secrets: Mapping[str, str], api: str) -> None:
    """Raise ``InvalidRequest`` if a trainer gives *secrets*, which *api* cannot pass on."""
    lost = sorted(secrets.keys() - PLATFORM_SECRETS)
    if lost:
        raise InvalidRequest(f"secrets {', '.join(lost)}: {api} has no way to hand secrets to an environment")
