"""List the tasks of an OpenEnv image, and translate a session's task and seed into the server's ``reset``.

Tasks come from the image's own Task API. Without it, the image has one task per seed. Without seeds, it has one task.

A server silently drops every key that its environment does not read. So the gateway either translates a task
completely, or refuses it with a hint for environment.toml. Otherwise a trainer would train on another task unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote

from gateway.core.environment import Environment, Split, SplitType, TaskSpec
from gateway.core.errors import InvalidRequest, UpstreamError, unknown_split
from gateway.core.session import SessionSetup
from gateway.upstreams.openenv.http import Http, Place

NOT_OFFERED: Final = (404, 405, 501)
_TYPES: Final = {kind.value: kind for kind in SplitType}
PLATFORM_SECRETS: Final = frozenset(("api_key", "OPENREWARD_API_KEY"))
"""Keys of the platform that SDKs send with every session by default."""
_FOR_PEOPLE: Final = frozenset(
    ("id", "env_type", "name", "description", "version", "tags", "aliases", "difficulty", "split", "index")
) | frozenset(("rate_limit", "metadata", "source", "license", "author"))
"""Descriptive keys that do not change the task itself."""
_CONFIGURATION: Final = ("environment_config", "config")
"""Keys of the environment's configuration in a generic task: RFC 005's name, and the name in task files."""
_SHOWN: Final = 12


class Tasks:
    """Queries the tasks of workers' images."""

    def __init__(self, http: Http) -> None:
        self._http = http

    async def splits(self, at: Place, environment: Environment) -> list[Split]:
        """Return the image's splits; if it has none, the single split of seeds."""
        own = await self._own_splits(at, environment)
        if own is not None:
            return own
        name = environment.openenv.split
        return [Split(name, _TYPES.get(name, SplitType.TRAIN))]

    async def count(self, at: Place, environment: Environment, split: str) -> int:
        """Return the number of tasks in *split*. Raises ``UnknownSplit``."""
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
        """Return the tasks of *split* from *start* up to, but not including, *stop*. Raises ``UnknownSplit``."""
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
        """Return the environment's name in the paths of the Task API."""
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
        """Return the Task API's response to *what*; None if the environment does not offer it."""
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
        raise UpstreamError("the worker's tasks are not a list")
    return [task if isinstance(task, Mapping) else _wrapped(task) for task in tasks]


def _wrapped(task: Any) -> TaskSpec:
    return {"id": task} if isinstance(task, str) else {"value": task}


def reset_data(environment: Environment, setup: SessionSetup) -> dict[str, Any]:
    """Return the ``data`` of the reset for *setup*.

    The trainer's own keys (``setup.config``) are sent unchanged, and override the task's keys. A task of the image's
    own that is requested by split and index needs only ``split`` and ``index``. The seed of a task requested that way
    overrides the trainer's seed. Otherwise the trainer's seed is used, if the reset reads one.

    Raises:
        InvalidRequest: The setup has secrets, which OpenEnv does not support, or the server would drop part of the
            task.
    """
    _refuse_secrets(setup)
    keys = frozenset(environment.resets.keys)
    data: dict[str, Any] = {}
    if setup.seed is not None and "seed" in keys:
        data["seed"] = setup.seed
    if setup.episode and "episode_id" in keys:
        data["episode_id"] = setup.episode
    by_place = bool(setup.split) and setup.index is not None
    if by_place and {"split", "index"} <= keys:
        data["split"], data["index"] = setup.split, setup.index
    is_whole = by_place and "index" in data and environment.tasks is None
    data.update(_from_task(environment, setup.spec, keys, is_whole=is_whole, by_place=by_place, given=data))
    data.update(setup.config or {})
    return data


def _refuse_secrets(setup: SessionSetup) -> None:
    refused = sorted(setup.secrets.keys() - PLATFORM_SECRETS)
    if refused:
        raise InvalidRequest(
            f"secrets ({', '.join(refused[:_SHOWN])}): OpenEnv has no way to hand secrets to an environment; "
            "write them into [variables] of environment.toml"
        )


def _from_task(
    environment: Environment,
    spec: Mapping[str, Any],
    keys: frozenset[str],
    *,
    is_whole: bool,
    by_place: bool,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    data: dict[str, Any] = {}
    taken: set[str] = set()
    for argument, place in environment.resets.from_task.items():
        found = _at(spec, place)
        if found is not _MISSING:
            data[argument] = found
            taken.add(place)
    if is_whole:
        return data
    lost: list[str] = []
    for place, key, value in _entries(spec):
        if _is_taken(place, taken):
            continue
        if key in keys and key not in ("split", "index"):
            if key not in given or (key == "seed" and by_place):
                data.setdefault(key, value)
        elif not (place == key and key in _FOR_PEOPLE) and not _is_empty(value):
            lost.append(place)
    if lost:
        raise InvalidRequest(_refusal(environment, lost))
    return data


def _entries(spec: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield place, key and value of each entry of a task, and of each entry in its environment's configuration."""
    for key, value in spec.items():
        if key in _CONFIGURATION and isinstance(value, Mapping):
            for inner, one in value.items():
                yield f"{key}.{inner}", inner, one
        else:
            yield key, key, value


def _is_taken(place: str, taken: set[str]) -> bool:
    """Return True if a mapping of ``resets.from_task`` uses *place*, a parent of it, or an entry inside it."""
    return any(place == one or place.startswith(f"{one}.") or one.startswith(f"{place}.") for one in taken)


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", {}, [])


_MISSING: Final = object()


def _at(spec: Mapping[str, Any], place: str) -> Any:
    found: Any = spec
    for part in place.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return _MISSING
        found = found[part]
    return found


def _refusal(environment: Environment, lost: list[str]) -> str:
    shown = ", ".join(lost[:_SHOWN]) + (f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else "")
    example = lost[0]
    argument = example.rpartition(".")[2]
    looks_at = ", ".join(environment.resets.keys) or "none"
    return (
        f"the task says {shown}, which {environment.name!r} would drop silently (its reset looks at: {looks_at}). "
        f'If the image looks at more, name it in [resets] of environment.toml: keys = [..., "{argument}"], '
        f'or from_task = {{ {argument} = "{example}" }}'
    )
