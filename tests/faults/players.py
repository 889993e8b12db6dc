"""Many concurrent episodes of the unruly environment, played by raw HTTP requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tests.wire.raw import Outcome, RawEpisode, create, new_sid, parse


@dataclass(frozen=True)
class Ended:
    """The outcome of one step."""

    status: int
    body: str
    at: float
    """Unix time in seconds."""

    @property
    def outcome(self) -> Outcome:
        """The parsed stream. Only a response with status 200 has one."""
        assert self.status == 200, (self.status, self.body)
        return parse(self.body)

    @property
    def error(self) -> str:
        """The typed error: a 410, or an ``error`` event that ends the stream. Neither contains a reward."""
        assert "reward" not in self.body, self.body
        if self.status == 410:
            return self.body
        outcome = self.outcome
        # A worker that is killed right after the head of its answer has sent no task's id.
        assert [event.name for event in outcome.events] in (["task_id", "error"], ["error"]), outcome.events
        return outcome.error


async def opened(http: httpx.AsyncClient, environment: str, *, start: int = 0) -> RawEpisode:
    """Open a session whose step counter begins at *start*."""
    episode = RawEpisode(http, new_sid(), environment)
    response = await create(http, episode.sid, env_name=environment, task_spec={"start": start})
    assert response.status_code == 200, response.text
    return episode


async def open_many(http: httpx.AsyncClient, environment: str, number: int) -> list[RawEpisode]:
    """Open *number* sessions concurrently. Session n counts from 1000 · n, so that their numbers differ."""
    return list(await asyncio.gather(*(opened(http, environment, start=1000 * n) for n in range(number))))


async def step(
    episode: RawEpisode, tool: str, input: Mapping[str, Any] | None = None, *, key: str | None = None
) -> Ended:
    """Take one step and return its outcome, whatever the response is."""
    headers = episode.headers | {"Accept": "text/event-stream"} | ({"Idempotency-Key": key} if key else {})
    body = {"name": tool, "input": dict(input or {})}
    response = await episode.http.post(f"/{episode.environment}/call", headers=headers, json=body)
    return Ended(response.status_code, response.text, time.time())


async def counted(episode: RawEpisode) -> int:
    """Take one step and return the session's step count."""
    return int((await step(episode, "count")).outcome.text)


async def delete_all(episodes: Sequence[RawEpisode]) -> None:
    """Delete the sessions. Some may have ended already."""
    answers = await asyncio.gather(*(episode.delete() for episode in episodes))
    assert {answer.status_code for answer in answers} <= {200, 404, 410}, [answer.text for answer in answers]


def workers_of(world_sessions: Sequence[Mapping[str, Any]], episodes: Sequence[RawEpisode]) -> list[str]:
    """Return the worker of each episode, taken from the gateway's list of sessions."""
    workers = {str(session["name"]): str(session["worker"]) for session in world_sessions}
    return [workers[episode.sid] for episode in episodes]
