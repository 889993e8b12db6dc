"""The content of the dashboard's pages, as JSON values. Each page shows exactly what its ``.json`` has."""

from __future__ import annotations

import json
import math
import shlex
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from gateway.catalog.catalog import Catalog, describe
from gateway.catalog.doctor import HOUR_S, examine, unexpected_errors
from gateway.core.curriculum import PREFIX
from gateway.core.environment import Environment, TaskView
from gateway.core.errors import GatewayError, UnknownEpisode
from gateway.core.ids import EnvironmentName
from gateway.core.outcomes import Comparable, EpisodeOutcome, comparable
from gateway.core.ports.step_log import UNRECORDED, EpisodeFilter, StepLog, StepLogQueries
from gateway.core.ports.store import Store
from gateway.core.worker import EnvironmentLoad
from gateway.frontends.admin.curricula import state_of
from gateway.frontends.admin.episodes import TEXTS, listed_episodes, recorded_episode, wanted_by
from gateway.frontends.admin.nodes import node_rows
from gateway.frontends.dashboard.sign_in import Viewer
from gateway.metrics import Metrics, Overview
from gateway.settings import Settings
from gateway.tasks.curricula.service import Curricula
from gateway.tasks.curricula.stats import TaskStats
from gateway.tasks.public_view import public_view

if TYPE_CHECKING:
    from gateway.backends.swarm.backend import SwarmBackend

LISTED: Final = 50
"""Episodes on one page of a list."""
SAMPLE: Final = 2_000
"""Newest episodes from which histograms and maps are computed."""
FAILURES: Final = 10
"""Newest failed episodes that are shown at once."""
BINS: Final = 12
MEMBERS: Final = 32
"""Maximum number of a group's members that are shown side by side."""
MAP_TASKS: Final = 200
MAP_TIMES: Final = 24
"""Rows and columns of a curriculum's map of success."""
HEAVIEST: Final = 30
_FAILED: Final = (EpisodeOutcome.AUTHOR_FAULT.value, EpisodeOutcome.INFRASTRUCTURE.value)
_NO_ERRORS: Final = frozenset(("ok", "refused", "ended", "left"))
_DURATIONS: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)

Json = dict[str, Any]


class Pages:
    """Reads what the pages show. Every method returns JSON values."""

    def __init__(
        self,
        *,
        store: Store,
        catalog: Catalog,
        metrics: Metrics,
        log: StepLog,
        queries: StepLogQueries,
        curricula: Curricula,
        records: TaskStats,
        settings: Settings,
        cluster: SwarmBackend | None = None,
    ) -> None:
        self._store = store
        self._catalog = catalog
        self._metrics = metrics
        self._log = log
        self._queries = queries
        self._curricula = curricula
        self._records = records
        self._settings = settings
        self._cluster = cluster

    async def now(self) -> Json:
        """Slots, queues, openings, steps and errors of all environments, a cluster's nodes, and the newest failures."""
        loads = await self._store.load()
        rows = [self._row(one, loads.get(one.name, EnvironmentLoad())) for one in self._catalog.known.values()]
        since = time.time() - HOUR_S
        unexpected = await unexpected_errors(self._queries, gateway=self._log.gateway)
        failed = [row for outcome in _FAILED for row in await self._newest(EpisodeFilter(outcome=outcome, since=since))]
        reasons = Counter((row["outcome"], row["reason"]) for row in failed)
        return {
            "at": time.time(),
            "environments": [row for row in rows if row["offered"] or row["workers"]],
            "nodes": node_rows(self._cluster),
            "reasons": [{"outcome": o, "reason": r, "count": n} for (o, r), n in reasons.most_common()],
            "unexpected_errors": [one.detail for one in unexpected],
            "failures": sorted(failed, key=lambda row: -(row["opened_at"] or 0.0))[:FAILURES],
        }

    async def environment(self, name: str) -> Json:
        """One environment: its workers, why starts fail, and histograms of its newest episodes by split."""
        environment = self._catalog.wanted(name)
        loads = await self._store.load()
        variants = [environment, *(one for one in self._catalog.known.values() if one.base == environment.name)]
        episodes = await self._newest(EpisodeFilter(environment=environment.name), SAMPLE)
        by_split: dict[str, list[Json]] = defaultdict(list)
        for row in episodes:
            by_split[row["split"] or ""].append(row)
        return {
            **self._row(environment, loads.get(environment.name, EnvironmentLoad())),
            "about": dict(describe(environment)),
            "image_id": environment.image_id,
            "refused": dict(self._metrics.overview(environment.name).refused),
            "variants": [
                {
                    "name": one.name,
                    "workers": [_worker(entry) for entry in loads.get(one.name, EnvironmentLoad()).workers],
                    "broken_s": loads.get(one.name, EnvironmentLoad()).broken_s,
                    "broken_why": loads.get(one.name, EnvironmentLoad()).broken_why,
                }
                for one in variants
            ],
            "splits": [_histograms(split, some) for split, some in sorted(by_split.items())],
        }

    async def episodes(self, viewer: Viewer, query: Mapping[str, str]) -> Json:
        """A list of episodes by filters. A trainer sees those of its own key."""
        wanted = wanted_by(query)
        if not viewer.is_operator:
            wanted = replace(wanted, owner=viewer.owner)
        found = await listed_episodes(self._log, self._queries, wanted, limit=LISTED)
        asked = {name: query.get(name, "") for name in (*TEXTS, "reward_min", "reward_max")}
        if not viewer.is_operator:
            found["episodes"] = [_without_line(row) for row in found["episodes"]]
        offered = sorted(self._catalog.offered)
        return {**found, **_means(comparable(found["episodes"])), "query": asked, "environments": offered}

    async def episode(self, viewer: Viewer, id: str) -> Json:
        """One episode with every step. Raises ``UnknownEpisode``, also for an episode of another key."""
        found = await recorded_episode(self._log, self._queries, id)
        if not viewer.is_operator and found["owner"] != viewer.owner:
            raise UnknownEpisode(f"no episode {id!r} is recorded")
        found = self._seen_by(viewer, found)
        return {**found, "curl": _as_curl(found)}

    async def group(self, viewer: Viewer, environment: str, name: str) -> Json:
        """The members of a group side by side."""
        wanted = EpisodeFilter(
            environment=environment, group=name, owner="" if viewer.is_operator else str(viewer.owner)
        )
        rows = (await listed_episodes(self._log, self._queries, wanted, limit=MEMBERS))["episodes"]
        if not rows:
            raise UnknownEpisode(f"no episode of a group {name!r} in {environment!r} is recorded")
        found = [await recorded_episode(self._log, self._queries, row["id"]) for row in reversed(rows)]
        members = [self._seen_by(viewer, member) for member in found]
        comparables = comparable(rows)
        rewards = comparables.rewards
        return {
            "environment": environment,
            "group": name,
            "task": members[0]["task"],
            "task_digest": members[0]["task_digest"],
            "size": members[0]["begin"].get("group_size"),
            "spread": max(rewards) - min(rewards) if rewards else None,
            "members": members,
            **_means(comparables),
        }

    async def curricula(self) -> Json:
        """All curricula."""
        await self._curricula.refresh()
        return {
            "curricula": [
                {
                    "name": known.name,
                    "split": PREFIX + known.name,
                    "sampler": known.sampler.kind.value,
                    "environments": list(known.environments),
                }
                for known in self._curricula.all()
            ]
        }

    async def curriculum(self, name: str) -> Json:
        """One curriculum: what it draws now and why, and the success of its tasks over time."""
        await self._curricula.refresh()
        known = self._curricula.named(name)
        try:
            state = await state_of(known, known, curricula=self._curricula, records=self._records, count=HEAVIEST)
        except GatewayError as error:  # a component has no task
            state = {"name": name, "error": error.detail, "heaviest": [], "flaky": [], "shares": {}, "standings": []}
        episodes: list[Json] = []
        for environment in known.environments:
            episodes += await self._newest(EpisodeFilter(environment=environment), SAMPLE)
        scorers = {environment: (await self._records.scorers(environment))[-1] for environment in known.environments}
        played = [
            row
            for row in episodes
            if row["reward"] is not None
            and row["closed_at"] is not None
            and not row.get("unexpected_error")
            and (row.get("scorer") or "") == scorers.get(row["environment"], "")
        ]
        return {**state, "map": _success_map(played)}

    async def doctor(self) -> Json:
        """What keeps environments from running on this machine."""
        return {"findings": [asdict(one) for one in await examine(self._settings, self._catalog)]}

    # -- inside ---------------------------------------------------------------------------------------------------

    def _seen_by(self, viewer: Viewer, episode: Json) -> Json:
        if viewer.is_operator:
            return episode
        name = EnvironmentName(episode["begin"].get("variant") or episode["environment"])
        return for_trainer(episode, self._catalog.known.get(name))

    async def _newest(self, wanted: EpisodeFilter, limit: int = 200) -> list[Json]:
        found: list[Json] = (await listed_episodes(self._log, self._queries, wanted, limit=limit))["episodes"]
        return found

    def _row(self, environment: Environment, load: EnvironmentLoad) -> Json:
        counts = self._metrics.overview(environment.name)
        ready = [entry for entry in load.workers if entry.worker.state.value == "ready"]
        errors = {outcome: count for outcome, count in counts.calls.items() if outcome not in _NO_ERRORS}
        return {
            "name": environment.name,
            "offered": environment.name in self._catalog.offered,
            "workers": len(load.workers),
            "ready": len(ready),
            "starting": sum(entry.worker.state.value == "starting" for entry in load.workers),
            "used": sum(entry.used for entry in load.workers),
            "slots": sum(entry.worker.slots for entry in ready),
            "waiting": load.waiting,
            "broken_s": round(load.broken_s, 1),
            "opened": counts.opened,
            "calls": sum(counts.calls.values()),
            "errors": errors,
            "p50_s": _quantile(counts, 0.5),
            "p99_s": _quantile(counts, 0.99),
        }


def _worker(entry: Any) -> Json:
    return {
        "id": entry.worker.id,
        "state": entry.worker.state.value,
        "used": entry.used,
        "slots": entry.worker.slots,
        "age_s": round(entry.age_s, 1),
        "idle_s": round(entry.idle_s, 1),
    }


def _quantile(counts: Overview, share: float) -> float | None:
    """Return the upper bound of the bucket with the quantile; None: there were no calls, or it has no upper bound."""
    total, seen = sum(counts.buckets), 0
    for bound, count in zip(counts.bounds, counts.buckets, strict=False):
        seen += count
        if total and seen >= share * total:
            return bound
    return None


def for_trainer(episode: Json, environment: Environment | None) -> Json:
    """Return *episode* without what trainers must not see.

    These are the faults of an author's code, and of a task of the gateway what its public view leaves out. A removed
    environment is None.
    """
    begin, end = episode["begin"], episode["end"]
    is_known_in_full = not episode["split"] or (environment is not None and environment.task_view is TaskView.FULL)
    if not is_known_in_full and isinstance(begin.get("spec"), Mapping):
        view = {} if environment is None else public_view(begin["spec"], environment, episode["task"] or "")
        begin = {**begin, "spec": view}
    steps = [{name: value for name, value in step.items() if name != "faults"} for step in episode["steps"]]
    ended = end and _without_line({**end, "faults": []})
    return _without_line({**episode, "begin": begin, "steps": steps, "end": ended})


def _without_line(row: Json) -> Json:
    """Return *row* with an unexpected error as its agent saw it, without the line of the author's code."""
    error = row.get("unexpected_error")
    return {**row, "unexpected_error": error.rpartition(" (")[0] or error} if error else row


def _means(found: Comparable) -> Json:
    """Return the mean of rewards, or None, and how many episodes it leaves out."""
    mean = math.fsum(found.rewards) / len(found.rewards) if found.rewards else None
    return {"mean": mean, "of_former_scorers": found.former, "marked": found.marked}


def _histograms(split: str, rows: Sequence[Json]) -> Json:
    found = comparable(rows)
    timed = [row for row in rows if row["closed_at"] and row["opened_at"] and row["reason"] != UNRECORDED]
    durations = [row["closed_at"] - row["opened_at"] for row in timed]
    return {
        "split": split,
        "episodes": len(rows),
        "outcomes": dict(Counter(row["outcome"] or "running" for row in rows)),
        "rewards": histogram(found.rewards),
        **_means(found),
        "durations": _counted(durations, _DURATIONS),
    }


def histogram(values: Sequence[float], bins: int = BINS) -> Json:
    """Return ``bounds`` and ``counts`` of *values*: one bar for each value if they are few, else *bins* equal bins."""
    distinct = sorted(set(values))
    if len(distinct) <= bins:
        counted = Counter(values)
        return {"bounds": distinct, "counts": [counted[value] for value in distinct]}
    low, high = distinct[0], distinct[-1]
    bounds = [low + (high - low) * place / bins for place in range(bins + 1)]
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, max(0, bisect_right(bounds, value) - 1))] += 1
    return {"bounds": bounds[:-1], "counts": counts}


def _counted(values: Iterable[float], bounds: Sequence[float]) -> Json:
    """Return ``bounds`` and ``counts`` of *values* up to each bound, from the first to the last bar that has any."""
    counts = [0] * len(bounds)
    for value in values:
        counts[min(len(bounds) - 1, bisect_right(bounds, value))] += 1
    filled = [place for place, count in enumerate(counts) if count] or [0]
    shown = slice(filled[0], filled[-1] + 1)
    return {"bounds": list(bounds[shown]), "counts": counts[shown]}


def _success_map(rows: Sequence[Json]) -> Json:
    """Return the mean rewards of tasks in intervals of time, those tried last first."""
    if not rows:
        return {"times": [], "tasks": []}
    first, last = min(row["closed_at"] for row in rows), max(row["closed_at"] for row in rows)
    width = max(1.0, (last - first) / MAP_TIMES)
    found: dict[tuple[str, str, str], list[list[float]]] = {}
    seen_at: dict[tuple[str, str, str], float] = {}
    for row in rows:
        place = (row["environment"], row["task"] or "", row["task_digest"] or "")
        cells = found.setdefault(place, [[] for _ in range(MAP_TIMES)])
        cells[min(MAP_TIMES - 1, int((row["closed_at"] - first) / width))].append(row["reward"])
        seen_at[place] = max(seen_at.get(place, 0.0), row["closed_at"])
    newest = sorted(found, key=lambda place: -seen_at[place])[:MAP_TASKS]
    return {
        "times": [first + place * width for place in range(MAP_TIMES)],
        "tasks": [
            {
                "environment": place[0],
                "task": place[1],
                "task_digest": place[2],
                "attempts": sum(map(len, found[place])),
                "means": [math.fsum(cell) / len(cell) if cell else None for cell in found[place]],
            }
            for place in newest
        ],
    }


def _as_curl(episode: Mapping[str, Any]) -> str:
    """Return commands that open an episode like this one over ORS, and repeat its tool calls."""
    begin, environment = episode["begin"], episode["environment"]
    body = {"env_name": environment, "task_spec": begin.get("spec") or {}}
    if episode["seed"] is not None:
        body["seed"] = episode["seed"]
    session = "-H 'X-Session-ID: again' -H \"X-API-Key: $GATEWAY_KEY\" -H 'Content-Type: application/json'"
    lines = [f'curl "$GATEWAY_URL/create" {session} -d {shlex.quote(json.dumps(body))}']
    for step in episode["steps"]:
        action = step["action"]
        if step["operation"] == "call" and isinstance(action, Mapping) and "tool" in action:
            call = json.dumps({"name": action["tool"], "input": action["input"]})
            lines.append(f'curl -N "$GATEWAY_URL/{environment}/call" {session} -d {shlex.quote(call)}')
    lines.append(f'curl -X POST "$GATEWAY_URL/delete" {session}')
    return "\n".join(lines)
