"""Names and ids; each has a type of its own, so that none is taken for another."""

from __future__ import annotations

import hashlib
from typing import NewType

EnvironmentName = NewType("EnvironmentName", str)
WorkerId = NewType("WorkerId", str)
SessionId = NewType("SessionId", str)
Owner = NewType("Owner", str)
"""The name of the key that a session belongs to; ``""`` where no keys are configured."""


def session_id(owner: Owner, name: str) -> SessionId:
    """Derive the id under which a trainer's *name* for a session is kept.

    Trainers choose names freely, so two keys may choose the same one: the id covers the owner, is short, and is safe in
    any key, header or path (32 hexadecimal digits).
    """
    return SessionId(hashlib.sha256(f"{owner}\0{name}".encode("utf-8", "surrogatepass")).hexdigest()[:32])
