"""How an environment is shown to AReaL's clients: as its environment.toml says, else as its own server does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from gateway.core.environment import ActionType, Areal, Environment, ObservationType, Wire

_UNSAID = Areal()


class WorkerQueries(Protocol):
    """Asks workers about themselves: `gateway.sessions.worker_queries.Inquiries`."""

    async def about(self, environment: Environment) -> Mapping[str, Any]:
        """What they tell of themselves."""
        ...


async def shown_of(queries: WorkerQueries, environment: Environment) -> Areal:
    """How *environment* is shown; what its configuration leaves as it is by default, an AReaL server says itself."""
    if environment.wire is not Wire.AREAL:
        return environment.areal
    return merged(environment.areal, await queries.about(environment))


def merged(shown: Areal, info: Mapping[str, Any]) -> Areal:
    """*shown* with what *info*, a server's ``task/info``, adds to it; what it says wrongly is passed over."""
    told: dict[str, Any] = {}
    for key in ("name", "description"):
        if not getattr(shown, key) and isinstance(info.get(key), str):
            told[key] = info[key]
    turns = info.get("max_episode_length")
    if shown.max_turns == _UNSAID.max_turns and isinstance(turns, int) and not isinstance(turns, bool) and turns > 0:
        told["max_turns"] = turns
    seen, done = info.get("observation_type"), info.get("action_type")
    if shown.observation_type is _UNSAID.observation_type and seen in list(ObservationType):
        told["observation_type"] = ObservationType(seen)
    if shown.action_type is _UNSAID.action_type and done in list(ActionType):
        told["action_type"] = ActionType(done)
    return replace(shown, **told) if told else shown
