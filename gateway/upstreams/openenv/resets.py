"""What a session's task and seed become in the ``reset`` of an OpenEnv server.

A server drops every key that its environment does not look at, without a word. So a task is either understood whole,
or refused with what to write into environment.toml: nobody trains on a task that was silently another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from gateway.core.environment import Environment
from gateway.core.errors import InvalidRequest
from gateway.core.session import SessionSetup
from gateway.upstreams.ors_bodies import PLATFORM_SECRETS

_FOR_PEOPLE: Final = frozenset(
    ("id", "env_type", "name", "description", "version", "tags", "aliases", "difficulty", "split", "index")
) | frozenset(("rate_limit", "metadata", "source", "license", "author"))
"""Keys of a task that change nothing about what it is."""
_CONFIGURATION: Final = ("environment_config", "config")
"""Where a generic task keeps what is its environment's: RFC 005's name, and that of the tasks in files."""
_SHOWN: Final = 12


def reset_data(environment: Environment, setup: SessionSetup) -> dict[str, Any]:
    """Return the ``data`` of the reset that sets *setup* up.

    The trainer's own keys (``setup.config``) are passed as they are, and win over the task's. A task of the image's own
    that was asked for by its place needs only ``split`` and ``index``. Seeds: a task that is a seed stands for itself;
    else the trainer's is passed where the image looks at one.

    Raises:
        InvalidRequest: secrets, which there is no way for; or something of the task would be dropped.
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
    """Place, key and value of all that a task says; the environment's configuration entry by entry."""
    for key, value in spec.items():
        if key in _CONFIGURATION and isinstance(value, Mapping):
            for inner, one in value.items():
                yield f"{key}.{inner}", inner, one
        else:
            yield key, key, value


def _is_taken(place: str, taken: set[str]) -> bool:
    """Whether *place*, or what it is in, was asked for by a mapping; or all that is in it may have been."""
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
