"""Serves operators' routes for recorded episodes: ``/admin/v1/episodes…`` and ``/admin/v1/blobs/{digest}``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.core.errors import InvalidRequest, UnknownEpisode
from gateway.core.ports.step_log import REFERENCE, EpisodeFilter, StepLog, StepLogQueries
from gateway.frontends.admin.replies import as_json, numbered, queried
from gateway.frontends.admin.steps import steps_of
from gateway.frontends.admin.timeline import rollout_of

USUAL: Final = 50
MAX_LISTED: Final = 1_000
_TEXTS: Final = ("owner", "environment", "split", "task", "policy", "group", "name", "outcome", "reason")
_IMAGES: Final = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif", b"RIFF": "image/webp"}


class EpisodeRoutes:
    """Handlers of the routes."""

    def __init__(self, *, log: StepLog, queries: StepLogQueries) -> None:
        self._log = log
        self._queries = queries

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/admin/v1/episodes", self._episodes),
            Route("/admin/v1/episodes/{id}", self._episode),
            Route("/admin/v1/blobs/{digest}", self._blob),
        ]

    async def _episodes(self, request: Request) -> Response:
        """List episodes, newest first. ``next`` is the value of ``before`` for the next page."""
        query = queried(request, *_TEXTS, "reward_min", "reward_max", "before", "limit")
        limit = numbered(query, "limit", USUAL, least=1, most=MAX_LISTED)
        wanted = EpisodeFilter(
            **{name: query[name] for name in _TEXTS if name in query},
            reward_min=_reward(query, "reward_min"),
            reward_max=_reward(query, "reward_max"),
            before=_place(query),
        )
        await self._log.flush()
        found = await self._queries.episodes(wanted, limit=limit)
        last = found[-1] if len(found) == limit else None
        following = None if last is None else f"{last['at']!r},{last['lease']}"
        return as_json({"episodes": [_line(row) for row in found], "next": following})

    async def _episode(self, request: Request) -> Response:
        """Show an episode with its steps, by its lease or by the trainer's name of its session."""
        await self._log.flush()
        row = await self._queries.episode(request.path_params["id"])
        if row is None:
            raise UnknownEpisode(f"no episode {request.path_params['id']!r} is recorded")
        begin = dict(row["begin"] or {})
        spec = begin.get("spec")
        if isinstance(spec, str) and spec.startswith(REFERENCE):
            data = await self._queries.blob(spec.removeprefix(REFERENCE))
            begin["spec"] = None if data is None else json.loads(data)
        steps = steps_of(await self._queries.calls(row))
        shown = {**_line(row), "begin": begin, "end": row["end"], "steps": steps}
        if (rollout := rollout_of(steps, await self._queries.rollouts(row))) is not None:
            if rollout["lease"] is None and row["closed_at"] is not None:
                await self._queries.link(rollout["key"], row["lease"])
            shown["rollout"] = {name: rollout[name] for name in ("id", "run", "name", "started_at", "info")}
            shown["messages"] = rollout["messages"]
        return as_json(shown)

    async def _blob(self, request: Request) -> Response:
        digest = request.path_params["digest"]
        data = await self._queries.blob(digest) if re.fullmatch(r"[0-9a-f]{64}", digest) else None
        if data is None:
            raise UnknownEpisode(f"no blob {digest!r} is stored")
        kind = next((kind for magic, kind in _IMAGES.items() if data.startswith(magic)), "application/octet-stream")
        headers = {"content-security-policy": "default-src 'none'; sandbox", "x-content-type-options": "nosniff"}
        return Response(data, media_type=kind, headers={**headers, "cache-control": "private, max-age=31536000"})


def _line(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return an episode's entry in a list."""
    return {"id": row["lease"], **{key: row[key] for key in row if key not in ("lease", "begin", "end", "at")}}


def _reward(query: Mapping[str, str], name: str) -> float | None:
    try:
        return float(query[name]) if name in query else None
    except ValueError:
        raise InvalidRequest(f"{name}: {query[name][:40]!r} is not a number") from None


def _place(query: Mapping[str, str]) -> tuple[float, str] | None:
    if "before" not in query:
        return None
    at, _, lease = query["before"].partition(",")
    try:
        return float(at), lease
    except ValueError:
        raise InvalidRequest("before: must be the value of `next` in the page before") from None
