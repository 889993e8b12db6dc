"""Creates and verifies the ids of sessions in protocols where the server chooses them: OpenEnv and NeMo Gym.

An id contains an HMAC over its protocol, owner and environment. So every replica, also after a restart, verifies ids
without a record of them. Nothing is stored for a session before it opens.
"""

from __future__ import annotations

import hashlib
import hmac
import uuid
from typing import Final

from gateway.core.ids import EnvironmentName, Owner

_PROOF_CHARS: Final = 16
_RANDOM_CHARS: Final = 32


class SessionIds:
    """Creates and verifies session ids."""

    def __init__(self, secret: bytes, protocol: str = "openenv") -> None:
        """*secret* is the key of the HMAC, which all replicas share. Ids of another *protocol* are not valid here."""
        self._secret = secret
        self._protocol = protocol

    def new(self, owner: Owner, environment: EnvironmentName) -> str:
        """Return an unguessable id for this owner and environment only: ``<uuid4>.<proof>``, in hexadecimal."""
        return self._proved(owner, environment, uuid.uuid4().hex)

    def of(self, owner: Owner, environment: EnvironmentName, given: str) -> str:
        """Return the id for a client's own name *given*. Each replica derives the same id; clients cannot."""
        said = f"{self._protocol}-name\0{owner}\0{environment}\0{given}"
        return self._proved(owner, environment, self._mac(said)[:_RANDOM_CHARS])

    def holds(self, id: str, owner: Owner, environment: EnvironmentName) -> bool:
        """Return True if a replica of this gateway created *id* for this owner and environment."""
        random, dot, proof = id.partition(".")
        if not dot or len(random) != _RANDOM_CHARS or not id.isascii():
            return False
        return hmac.compare_digest(proof, self._proof(owner, environment, random))

    def name(self, id: str, owner: Owner, environment: EnvironmentName) -> str:
        """Return the session name for *id*. Over HTTP a client may choose any id, which gets a prefix."""
        return id if self.holds(id, owner, environment) else f"http-{environment}-{id}"

    def _proved(self, owner: Owner, environment: EnvironmentName, random: str) -> str:
        return f"{random}.{self._proof(owner, environment, random)}"

    def _proof(self, owner: Owner, environment: EnvironmentName, random: str) -> str:
        return self._mac(f"{self._protocol}\0{owner}\0{environment}\0{random}")[:_PROOF_CHARS]

    def _mac(self, said: str) -> str:
        return hmac.new(self._secret, said.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()
