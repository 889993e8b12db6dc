"""Sessions and workers as Redis keeps them: hashes of bytes, every number written as text.

Opaque strings of trainers pass unread; nothing goes through Lua's or JSON's numbers, which lose digits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core.model import (
    CloseReason,
    EnvironmentName,
    Owner,
    Session,
    SessionId,
    SessionState,
    Worker,
    WorkerId,
    WorkerLoad,
    WorkerState,
)


def packed(value: str | float) -> bytes:
    """Write an argument as bytes; a trainer's name for something may hold lone surrogates."""
    return (value if isinstance(value, str) else repr(value)).encode("utf-8", "surrogatepass")


def text(value: bytes) -> str:
    """Read what `packed` wrote."""
    return value.decode("utf-8", "surrogatepass")


def texts(found: Mapping[bytes, bytes]) -> dict[str, str]:
    return {text(name): text(value) for name, value in found.items()}


def pairs(flat: Sequence[bytes]) -> dict[str, str]:
    """Read a hash as a script returns it: names and values in turn."""
    return texts(dict(zip(flat[::2], flat[1::2], strict=True)))


def as_sessions(answer: Sequence[Sequence[bytes]]) -> list[Session]:
    return [as_session(pairs(flat)) for flat in answer]


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
        reason=CloseReason(found["reason"]) if "reason" in found else None,
        handle=found.get("handle", ""),
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


def as_worker_load(entry: Sequence[Any]) -> WorkerLoad:
    flat, used, idle_ms, age_ms = entry
    return WorkerLoad(
        worker=as_worker(pairs(flat)), used=int(used), idle_s=int(idle_ms) / 1000, age_s=int(age_ms) / 1000
    )
