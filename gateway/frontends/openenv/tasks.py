"""The task that a reset asks for: an id, a task as an object, split and index, a seed, values, or none of these."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.catalog.toml import RESET_KEYS
from gateway.core.environment import Environment, UpstreamKind
from gateway.core.ports.tasks import TaskQueries
from gateway.frontends.openenv.frames import Json, ResetRequest, invalid
from gateway.tasks.resolver import SHOWN_CHARS, TaskRequest


def task_request(environment: Environment, reset: ResetRequest) -> TaskRequest:
    """Return what *reset* says of its task.

    Raises:
        FrameError: The reset names its task twice.
    """
    keys = [key for key in environment.openenv.task_keys if reset.config.get(key) is not None]
    if keys and (reset.task is not None or reset.index is not None):
        twice = "task" if reset.task is not None else "index"
        entry = {"type": "value_error", "loc": ["data", keys[0]], "msg": f"{twice} is given too", "input": None}
        raise invalid([entry], f"Invalid message: data: only one of {twice} and {', '.join(keys)} may be given")
    return TaskRequest(
        spec=reset.task if isinstance(reset.task, dict) else None,
        ids=tuple(_spellings(environment, reset.task)) if isinstance(reset.task, str) else (),
        values={environment.openenv.task_keys[key]: reset.config[key] for key in keys},
        split=reset.split,
        index=reset.index,
        seed=reset.seed,
        usual_split=environment.openenv.split,
        may_pass_place=True,
        is_checked=True,
    )


def refuse_negative_index(reset: ResetRequest) -> None:
    """Raise ``FrameError`` if the index counts from the end, as ORS has it and OpenEnv has not."""
    if reset.index is not None and reset.index < 0:
        message = "Input should be greater than or equal to 0"
        entry = {"type": "greater_than_equal", "loc": ["data", "index"], "msg": message, "input": reset.index}
        raise invalid([entry], f"Invalid message: data.index: {message}")


def config_of(environment: Environment, reset: ResetRequest) -> Json:
    """Return what of *reset* the environment itself gets."""
    return {key: value for key, value in reset.config.items() if key not in environment.openenv.task_keys}


async def refuse_unknown_keys(environment: Environment, reset: ResetRequest, queries: TaskQueries) -> None:
    """Refuse keys that the environment would ignore.

    An OpenEnv image's own reset gets all of them, as from its own clients. Other servers report what they take.

    Raises:
        FrameError: There are such keys.
    """
    given = {key: value for key, value in config_of(environment, reset).items() if value is not None}
    if not given or environment.wire is UpstreamKind.OPENENV:
        return
    taken = (await queries.registered(environment)).config_keys
    unknown = [] if taken is None else [key for key in given if key not in taken]
    if taken is None or not unknown:
        return
    message = "Extra inputs are not permitted"
    entries = [
        {"type": "extra_forbidden", "loc": ["data", key], "msg": message, "input": given[key]} for key in unknown
    ]
    known = ", ".join((*RESET_KEYS, *environment.openenv.task_keys, *taken))
    names = ", ".join(repr(key[:SHOWN_CHARS]) for key in unknown)
    raise invalid(entries, f"Invalid message: data: reset of {environment.name!r} has no {names}; it takes {known}")


def _spellings(environment: Environment, id: str) -> Iterator[str]:
    """Return *id*, and *id* without the environment's name in front of it."""
    yield id
    prefix, slash, rest = id.partition("/")
    if slash and rest and prefix in (environment.name, *environment.env_types):
        yield rest
