"""Creates and verifies ids of OpenEnv sessions, and tracks the sockets attached to sessions in this replica.

An id contains an HMAC over its owner and environment. So every replica, also after a restart, verifies ids without
a record of them. Nothing is stored for a session before its first reset.
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
    """Creates and verifies session ids."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def new(self, owner: Owner, environment: EnvironmentName) -> str:
        """Return an unguessable id for this owner and environment only: ``<uuid4>.<proof>``, in hexadecimal."""
        random = uuid.uuid4().hex
        return f"{random}.{self._proof(owner, environment, random)}"

    def holds(self, id: str, owner: Owner, environment: EnvironmentName) -> bool:
        """Return True if a replica of this gateway created *id* for this owner and environment."""
        random, dot, proof = id.partition(".")
        if not dot or len(random) != _RANDOM_CHARS or not id.isascii():
            return False
        return hmac.compare_digest(proof, self._proof(owner, environment, random))

    def name(self, id: str, owner: Owner, environment: EnvironmentName) -> str:
        """Return the session name for *id*. Over HTTP a client may choose any id, which gets a prefix."""
        return id if self.holds(id, owner, environment) else f"http-{environment}-{id}"

    def _proof(self, owner: Owner, environment: EnvironmentName, random: str) -> str:
        said = f"openenv\0{owner}\0{environment}\0{random}".encode("utf-8", "surrogatepass")
        return hmac.new(self._secret, said, hashlib.sha256).hexdigest()[:_PROOF_CHARS]


@dataclass(slots=True, kw_only=True)
class Attachment:
    """A socket that is attached to a session."""

    owner: Owner
    environment: Environment
    id: str
    outlives: bool = False
    """True if the episode stays open after the socket closes, because the client named an existing session."""
    begins: bool = False
    """True if the first tool call starts an episode, because this socket has no reset."""
    has_begun: bool = False
    """True if an episode was started on the socket, or may have been before it was attached."""


class Attachments:
    """The sessions with a socket in this replica. Each has at most one socket."""

    def __init__(self) -> None:
        self._closing: dict[tuple[Owner, str], bool] = {}

    def add(self, owner: Owner, id: str) -> bool:
        """Attach a socket. Return False if the session already has one."""
        if (owner, id) in self._closing:
            return False
        self._closing[owner, id] = False
        return True

    def close_later(self, owner: Owner, id: str) -> bool:
        """End the session when its socket closes. Return False if it has no socket in this replica."""
        if (owner, id) not in self._closing:
            return False
        self._closing[owner, id] = True
        return True

    def remove(self, owner: Owner, id: str) -> bool:
        """Detach the socket. Return True if the caller must end the session now."""
        return self._closing.pop((owner, id))
