"""Ids of sessions that outlive their sockets, and which of them have a socket at this replica.

An id proves itself: it carries an HMAC over its owner and environment, so that every replica, and this one after a
restart, knows its own ids without keeping any. Nothing is stored for one before its first reset.
"""

from __future__ import annotations

import hashlib
import hmac
import uuid
from dataclasses import dataclass
from typing import Final

from gateway.core.environment import Environment
from gateway.core.ids import EnvironmentName, Owner

_PROOF_CHARS: Final = 16
_RANDOM_CHARS: Final = 32


class SessionIds:
    """Makes ids and recognises them."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def new(self, owner: Owner, environment: EnvironmentName) -> str:
        """An id that nobody can guess, for this owner and environment only: ``<uuid4>.<proof>``, in hexadecimal."""
        random = uuid.uuid4().hex
        return f"{random}.{self._proof(owner, environment, random)}"

    def holds(self, id: str, owner: Owner, environment: EnvironmentName) -> bool:
        """Whether *id* was made here, or at another replica, for this owner and environment."""
        random, dot, proof = id.partition(".")
        if not dot or len(random) != _RANDOM_CHARS or not id.isascii():
            return False
        return hmac.compare_digest(proof, self._proof(owner, environment, random))

    def name(self, id: str, owner: Owner, environment: EnvironmentName) -> str:
        """The name under which the episodes of *id* are kept, which over HTTP may be any that the client has chosen."""
        return id if self.holds(id, owner, environment) else f"http-{environment}-{id}"

    def _proof(self, owner: Owner, environment: EnvironmentName, random: str) -> str:
        said = f"openenv\0{owner}\0{environment}\0{random}".encode("utf-8", "surrogatepass")
        return hmac.new(self._secret, said, hashlib.sha256).hexdigest()[:_PROOF_CHARS]


@dataclass(slots=True, kw_only=True)
class Attachment:
    """A live socket on a session."""

    owner: Owner
    environment: Environment
    id: str
    outlives: bool = False
    """The episode stays when the socket goes: its session was made to be attached to."""
    begins: bool = False
    """Its first tool call begins an episode, as it has no other way to."""
    has_begun: bool = False
    """An episode was begun on it, or may have been before it."""


class Attachments:
    """The sessions that have a socket at this replica; one has at most one."""

    def __init__(self) -> None:
        self._closing: dict[tuple[Owner, str], bool] = {}

    def __len__(self) -> int:
        return len(self._closing)

    def add(self, owner: Owner, id: str) -> bool:
        """Attach a socket; False if there is one already."""
        if (owner, id) in self._closing:
            return False
        self._closing[owner, id] = False
        return True

    def close_later(self, owner: Owner, id: str) -> bool:
        """Have the session end when its socket goes; False if it has none here."""
        if (owner, id) not in self._closing:
            return False
        self._closing[owner, id] = True
        return True

    def remove(self, owner: Owner, id: str) -> bool:
        """Detach the socket; True if the session is to end now."""
        return self._closing.pop((owner, id))
