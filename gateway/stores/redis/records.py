"""Converts sessions and workers to and from Redis hashes of bytes, with every number written as text.

Opaque strings of trainers are not parsed. Numbers do not pass through Lua or JSON numbers, which lose digits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.session import CloseReason, Session, SessionRequest, SessionState
from gateway.core.worker import EnvironmentLoad, Worker, WorkerLoad, WorkerState


def packed(value: str | float | bytes) -> bytes:
    """Encode an argument as bytes. A name that a trainer chose may contain lone surrogates."""
    if isinstance(value, bytes):
        return value
    return (value if isinstance(value, str) else repr(value)).encode("utf-8", "surrogatepass")


def text(value: bytes) -> str:
    """Decode a string that `packed` encoded."""
    return value.decode("utf-8", "surrogatepass")


def texts(found: Mapping[bytes, bytes]) -> dict[str, str]:
    return {text(name): text(value) for name, value in found.items()}


def pairs(flat: Sequence[bytes]) -> dict[str, str]:
    """Decode a hash that a script returns as a list of alternating names and values."""
    return texts(dict(zip(flat[::2], flat[1::2], strict=True)))


def as_sessions(answer: Sequence[Sequence[bytes]]) -> list[Session]:
    return [as_session(pairs(flat)) for flat in answer]


_REQUEST = attrgetter("id", "name", "owner", "environment", "lease", "fingerprint", "idle_s", "setup_s", "task")
_GROUP = attrgetter("episode", "policy", "group", "group_size", "together_s")
_WORKER = ("id", "environment", "digest", "slots", "max_uses", "address", "state")
session_values: Callable[[Session], tuple[str | float, ...]] = attrgetter(
    *(
        "id",
        "name",
        "owner",
        "lease",
        "fingerprint",
        "idle_s",
        "task",
        "episode",
        "policy",
        "handle",
        "scorer",
        "worker",
        "address",
    )
)
"""Function that returns a session's values in the order of ``SESSION`` in ``lua/shared/sessions.lua``."""
worker_values: Callable[[Worker], tuple[str | float, ...]] = attrgetter(*_WORKER)
"""Function that returns a worker's values in the order of ``WORKER`` in ``lua/shared/sessions.lua``."""


def request_values(request: SessionRequest, replica: str) -> tuple[str | float, ...]:
    """Return a request's values in the order of ``OPENING`` in ``lua/shared/waiting.lua``."""
    limits = (request.max_sessions, request.max_here)
    return (*_REQUEST(request), replica, *_GROUP(request), int(request.is_use), *limits)


def as_session(found: Mapping[str, str]) -> Session:
    return Session(
        id=SessionId(found["id"]),
        name=found["name"],
        owner=Owner(found["owner"]),
        environment=EnvironmentName(found["environment"]),
        lease=found["lease"],
        fingerprint=found["fingerprint"],
        idle_s=float(found["idle_s"]),
        worker=WorkerId(found["worker"]),
        address=found["address"],
        state=SessionState(found["state"]),
        task=found["task"],
        episode=found.get("episode", ""),
        policy=found.get("policy", ""),
        reason=CloseReason(found["reason"]) if "reason" in found else None,
        handle=found.get("handle", ""),
        scorer=found.get("scorer", ""),
        steps_before_late=int(found["steps_before_late"]) if "steps_before_late" in found else None,
        result=found.get("result", ""),
    )


def as_worker(found: Mapping[str, str]) -> Worker:
    return Worker(
        id=WorkerId(found["id"]),
        environment=EnvironmentName(found["environment"]),
        digest=found["digest"],
        slots=int(found["slots"]),
        max_uses=int(found["max_uses"]),
        address=found["address"],
        state=WorkerState(found["state"]),
    )


def _worker_load(entry: bytes) -> WorkerLoad:
    """Decode one worker of load.lua's answer: NUL-separated ``WORKER`` fields, used slots, idle time and age (ms)."""
    *values, used, idle_ms, age_ms = entry.decode().split("\0")
    worker = as_worker(dict(zip(_WORKER, values, strict=True)))
    return WorkerLoad(worker=worker, used=int(used), idle_s=int(idle_ms) / 1000, age_s=int(age_ms) / 1000)


_WORKS: Final = (0.0, "")
"""The breaker of an environment whose workers start."""


def as_loads(answer: Sequence[Any]) -> dict[EnvironmentName, EnvironmentLoad]:
    """Decode the answer of load.lua into the load of each environment."""
    listed, waiting, counts, breakers, groups, over_limit = answer
    workers: dict[str, list[WorkerLoad]] = {}
    for entry in listed:
        load = _worker_load(entry)
        workers.setdefault(load.worker.environment, []).append(load)
    waits, counted, beyond = _numbers(waiting), _numbers(counts), _numbers(over_limit)
    broken = {
        text(name): (int(left_ms) / 1000, text(message))
        for name, left_ms, message in zip(breakers[::3], breakers[1::3], breakers[2::3], strict=True)
    }
    to_come: Counter[str] = Counter()
    for name, count in zip(groups[::2], groups[1::2], strict=True):
        to_come[text(name)] += int(count)
    names = (
        workers.keys() | waits.keys() | broken.keys() | to_come.keys() | {field.partition(":")[2] for field in counted}
    )
    return {
        EnvironmentName(name): EnvironmentLoad(
            workers=tuple(workers.get(name, ())),
            waiting=waits.get(name, 0),
            to_come=to_come[name],
            over_limit=beyond.get(name, 0),
            arrivals=counted.get(f"arrivals:{name}", 0),
            hits=counted.get(f"hits:{name}", 0),
            broken_s=broken.get(name, _WORKS)[0],
            broken_why=broken.get(name, _WORKS)[1],
        )
        for name in names
    }


def _numbers(flat: Sequence[Any]) -> dict[str, int]:
    """Decode a list of alternating names and whole numbers."""
    return {text(name): int(number) for name, number in zip(flat[::2], flat[1::2], strict=True)}
