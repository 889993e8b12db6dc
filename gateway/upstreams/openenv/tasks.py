"""The tasks of an OpenEnv image: by its own Task API, else one for each seed, else a single one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

from gateway.core.environment import Environment, Split, SplitType, TaskSpec
from gateway.core.errors import UpstreamError, unknown_split
from gateway.upstreams.openenv.http import Http, Place

NOT_OFFERED: Final = (404, 405, 501)
_TYPES: Final = {kind.value: kind for kind in SplitType}


class Tasks:
    """Asks for tasks."""

    def __init__(self, http: Http) -> None:
        self._http = http

    async def splits(self, at: Place, environment: Environment) -> list[Split]:
        """The image's splits; where it has none, the one of seeds."""
        own = await self._own_splits(at, environment)
        if own is not None:
            return own
        name = environment.openenv.split
        return [Split(name, _TYPES.get(name, SplitType.TRAIN))]

    async def count(self, at: Place, environment: Environment, split: str) -> int:
        """How many tasks *split* has. Raises ``UnknownSplit``."""
        if not await self._is_own(at, environment, split):
            return _seeds(environment)
        answer = await self._ask(at, environment, "num_tasks", {"split": split})
        if answer is None:
            return len(await self._all(at, environment, split))
        count = answer.get("num_tasks")
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise UpstreamError(f"the worker says that split {split!r} has {count!r} tasks")
        return count

    async def range(self, at: Place, environment: Environment, split: str, start: int, stop: int) -> list[TaskSpec]:
        """Tasks from *start* up to, not including, *stop*. Raises ``UnknownSplit``."""
        if not await self._is_own(at, environment, split):
            if "seed" not in environment.resets.keys:
                return [{} for _ in range(start, min(stop, 1))]
            return [{"seed": seed} for seed in range(start, min(stop, environment.resets.seeds))]
        if start >= stop:
            return []
        answer = await self._ask(at, environment, "task_range", {"split": split, "start": start, "stop": stop})
        if answer is None:
            return (await self._all(at, environment, split))[start:stop]
        return _listed(answer)[: stop - start]

    async def _is_own(self, at: Place, environment: Environment, split: str) -> bool:
        own = await self._own_splits(at, environment)
        known = [environment.openenv.split] if own is None else [one.name for one in own]
        if split not in known:
            raise unknown_split(split, known)
        return own is not None

    async def _own_splits(self, at: Place, environment: Environment) -> list[Split] | None:
        if not (await self._http.abilities(at)).has_task_api:
            return None
        name = await self._name(at, environment)
        status, listed = await self._http.get(at, f"/{quote(name, safe='')}/splits")
        if status in NOT_OFFERED:
            return None
        if status != 200 or not isinstance(listed, list):
            raise UpstreamError(f"the worker answered {status} to /{name}/splits, and no list of splits")
        return [split for split in map(_split, listed) if split is not None] or None

    async def _name(self, at: Place, environment: Environment) -> str:
        """The environment's name in the paths of the Task API."""
        if environment.upstream_name:
            return environment.upstream_name
        status, names = await self._http.get(at, "/list_environments")
        if status == 200 and isinstance(names, list) and names and isinstance(names[0], str):
            return names[0]
        return environment.worker_name

    async def _all(self, at: Place, environment: Environment, split: str) -> list[TaskSpec]:
        answer = await self._ask(at, environment, "tasks", {"split": split})
        return [] if answer is None else _listed(answer)

    async def _ask(
        self, at: Place, environment: Environment, what: str, body: Mapping[str, Any]
    ) -> Mapping[str, Any] | None:
        """One of the Task API's answers; None if the environment does not offer it."""
        name = await self._name(at, environment)
        status, answer = await self._http.post(at, f"/{quote(name, safe='')}/{what}", body)
        if status in NOT_OFFERED:
            return None
        if status != 200 or not isinstance(answer, Mapping):
            raise UpstreamError(f"the worker answered {status} to /{name}/{what}")
        return answer


def _seeds(environment: Environment) -> int:
    return environment.resets.seeds if "seed" in environment.resets.keys else 1


def _split(value: Any) -> Split | None:
    name = value.get("name") if isinstance(value, Mapping) else value
    if not isinstance(name, str) or not name:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else name
    return Split(name, _TYPES.get(kind if isinstance(kind, str) else name, SplitType.VALIDATION))


def _listed(answer: Mapping[str, Any]) -> list[TaskSpec]:
    tasks = answer.get("tasks")
    if not isinstance(tasks, list):
        raise UpstreamError("the worker's tasks are no list")
    return [task if isinstance(task, Mapping) else _wrapped(task) for task in tasks]


def _wrapped(task: Any) -> TaskSpec:
    return {"id": task} if isinstance(task, str) else {"value": task}
