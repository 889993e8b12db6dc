"""Serves operators' routes for recorded episodes, signed records of their rewards, and their images.

The routes are ``/admin/v1/episodes…``, ``/admin/v1/signing-key`` and ``/admin/v1/blobs/{digest}``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import anyio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.core.errors import InvalidRequest, UnknownEpisode
from gateway.core.json_text import dump
from gateway.core.ports.step_log import ANY, REFERENCE, EpisodeFilter, StepLog, StepLogQueries
from gateway.frontends.admin.replies import as_json, numbered, queried
from gateway.frontends.admin.steps import steps_of
from gateway.frontends.admin.timeline import rollout_of
from gateway.tasks.reward_records import signed, why_incomplete
from gateway.tasks.signing import public_pem

USUAL: Final = 50
MAX_LISTED: Final = 1_000
TEXTS: Final = (
    "owner",
    "environment",
    "split",
    "task",
    "task_digest",
    "tag",
    "policy",
    "group",
    "name",
    "outcome",
    "reason",
    "scorer",
    "gateway",
    "unexpected_error",
)
"""Filters of lists of episodes that compare a text."""
_IMAGES: Final = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif", b"RIFF": "image/webp"}


class EpisodeRoutes:
    """Handlers of the routes."""

    def __init__(self, *, log: StepLog, queries: StepLogQueries, key: Ed25519PrivateKey, instance: str) -> None:
        """*key* signs the records of rewards, as those of the gateway with the name *instance*."""
        self._log = log
        self._queries = queries
        self._key = key
        self._instance = instance

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/admin/v1/episodes", self._episodes),
            Route("/admin/v1/episodes/{id}", self._episode),
            Route("/admin/v1/episodes/{id}/record", self._record),
            Route("/admin/v1/signing-key", self._public_key),
            Route("/admin/v1/blobs/{digest}", self._blob),
        ]

    async def _episodes(self, request: Request) -> Response:
        """List episodes, newest first. ``next`` is the value of ``before`` for the next page."""
        query = queried(request, *TEXTS, "reward_min", "reward_max", "since", "before", "limit")
        limit = numbered(query, "limit", USUAL, least=1, most=MAX_LISTED)
        return as_json(await listed_episodes(self._log, self._queries, wanted_by(query), limit=limit))

    async def _episode(self, request: Request) -> Response:
        """Show an episode with its steps, by its lease or by the trainer's name of its session."""
        return as_json(await recorded_episode(self._log, self._queries, request.path_params["id"]))

    async def _record(self, request: Request) -> Response:
        """Return an ended episode with the signed records of its rewards, as one line of an export."""
        episode = await recorded_episode(self._log, self._queries, request.path_params["id"])
        if episode["closed_at"] is None:
            raise InvalidRequest(f"episode {episode['id']!r} has not ended: its reward is not known yet")
        plain = json.loads(dump(episode))  # without NaN, and with lists in place of tuples
        line = await anyio.to_thread.run_sync(partial(signed, plain, self._key, instance=self._instance))
        return Response(line, media_type="application/json")

    async def _public_key(self, _: Request) -> Response:
        """Return the public key that verifies the records, as PEM."""
        return Response(public_pem(self._key), media_type="application/x-pem-file")

    async def _blob(self, request: Request) -> Response:
        digest = request.path_params["digest"]
        data = await self._queries.blob(digest) if re.fullmatch(r"[0-9a-f]{64}", digest) else None
        if data is None:
            raise UnknownEpisode(f"no blob {digest!r} is stored")
        return blob_response(data)


def blob_response(data: bytes) -> Response:
    """Return stored data as an image, if it is one. A browser runs nothing in it."""
    kind = next((kind for magic, kind in _IMAGES.items() if data.startswith(magic)), "application/octet-stream")
    headers = {"content-security-policy": "default-src 'none'; sandbox", "x-content-type-options": "nosniff"}
    return Response(data, media_type=kind, headers={**headers, "cache-control": "private, max-age=31536000"})


def wanted_by(query: Mapping[str, str]) -> EpisodeFilter:
    """Return the filter that a query asks for; empty values ask for nothing. Raises ``InvalidRequest``."""
    return EpisodeFilter(
        **{name: query[name] for name in TEXTS if name in query},
        reward_min=_reward(query, "reward_min"),
        reward_max=_reward(query, "reward_max"),
        since=_reward(query, "since") or 0.0,
        before=_place(query),
    )


async def listed_episodes(
    log: StepLog, queries: StepLogQueries, wanted: EpisodeFilter, *, limit: int
) -> dict[str, Any]:
    """Return ``episodes``, newest first, and ``next``, the value of ``before`` for the next page, or None.

    They are of this gateway, unless *wanted* names another one, or `ANY` for all.
    """
    await log.flush()
    wanted = replace(wanted, gateway="" if wanted.gateway == ANY else wanted.gateway or log.gateway)
    found = await queries.episodes(wanted, limit=limit)
    last = found[-1] if len(found) == limit else None
    following = None if last is None else f"{last['at']!r},{last['lease']}"
    return {"episodes": [_line(row) for row in found], "next": following}


async def recorded_episode(log: StepLog, queries: StepLogQueries, id: str) -> dict[str, Any]:
    """Return an episode with its task, steps and the model's messages. Raises ``UnknownEpisode``.

    *id* is its lease, or the trainer's name of its session.
    """
    await log.flush()
    row = await queries.episode(id)
    if row is None:
        raise UnknownEpisode(f"no episode {id!r} is recorded")
    begin = dict(row["begin"] or {})
    spec = begin.get("spec")
    if isinstance(spec, str) and spec.startswith(REFERENCE):
        data = await queries.blob(spec.removeprefix(REFERENCE))
        begin["spec"] = None if data is None else json.loads(data)
    calls, damaged = await queries.calls(row)
    steps = steps_of(calls)
    shown = {**_line(row), "begin": begin, "end": row["end"], "steps": steps}
    if damaged:
        shown["damaged_batches"] = len(damaged)
    if row["closed_at"] is not None and (why := why_incomplete(shown)):
        shown["incomplete"] = why
    if (rollout := rollout_of(steps, await queries.rollouts(row))) is not None:
        if rollout["lease"] is None and row["closed_at"] is not None:
            await queries.link(rollout["key"], row["lease"])
        shown["rollout"] = {name: rollout[name] for name in ("id", "run", "name", "started_at", "info")}
        shown["messages"] = rollout["messages"]
    return shown


def _line(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return an episode's entry in a list."""
    return {"id": row["lease"], **{key: row[key] for key in row if key not in ("lease", "begin", "end", "at")}}


def _reward(query: Mapping[str, str], name: str) -> float | None:
    try:
        return float(query[name]) if query.get(name) else None
    except ValueError:
        raise InvalidRequest(f"{name}: {query[name][:40]!r} is not a number") from None


def _place(query: Mapping[str, str]) -> tuple[float, str] | None:
    if not query.get("before"):
        return None
    at, _, lease = query["before"].partition(",")
    try:
        return float(at), lease
    except ValueError:
        raise InvalidRequest("before: must be the value of `next` in the page before") from None
