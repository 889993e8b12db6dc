"""A session's record, as its worker keeps it for us: what a store that lost its data is rebuilt from.

Signed with the worker's token, so that a worker can give back what it was told and nothing else: it could otherwise
name a session of somebody else's as its own. No task, no secret and no key is in it; the owner is the name of a key.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any, Final

from gateway.core.ids import EnvironmentName, Owner, SessionId
from gateway.core.session import Session, SessionState
from gateway.core.worker import Worker

MAX_BYTES: Final = 8192
"""What a worker keeps; a session with a longer record (a task's id may be long) is noted without its task."""
_TASK_MAX: Final = 512
_MAC_DIGITS: Final = 32


def written(session: Session, token: bytes) -> bytes:
    """Write the record of *session* as a header's value: one line of ASCII. Empty if it is too long."""
    record = {
        "id": session.id,
        "name": session.name,
        "owner": session.owner,
        "environment": session.environment,
        "lease": session.lease,
        "fingerprint": session.fingerprint,
        "idle_s": session.idle_s,
        "task": session.task[:_TASK_MAX],
        "episode": session.episode,
        "policy": session.policy,
    }
    text = json.dumps(record, separators=(",", ":")).encode()  # escaped: names may hold anything
    note = _mac(text, token) + text
    return note if len(note) <= MAX_BYTES else b""


def read(note: object, worker: Worker, token: bytes) -> Session | None:
    """Read a record that *worker* gave back; None if it is none of ours."""
    if not isinstance(note, str) or not note.isascii():
        return None
    mac, text = note[:_MAC_DIGITS].encode(), note[_MAC_DIGITS:].encode()
    if not hmac.compare_digest(mac, _mac(text, token)):
        return None
    record: Mapping[str, Any] = json.loads(text)  # signed by us, so it is what was written
    return Session(
        id=SessionId(record["id"]),
        name=record["name"],
        owner=Owner(record["owner"]),
        environment=EnvironmentName(record["environment"]),
        lease=record["lease"],
        fingerprint=record["fingerprint"],
        idle_s=record["idle_s"],
        worker=worker.id,
        address=worker.address,
        state=SessionState.OPEN,
        task=record["task"],
        episode=record["episode"],
        policy=record.get("policy", ""),  # one of a gateway before this key was
    )


def _mac(text: bytes, token: bytes) -> bytes:
    return hmac.new(token, b"session-note:" + text, hashlib.sha256).hexdigest()[:_MAC_DIGITS].encode()
