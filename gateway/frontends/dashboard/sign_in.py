"""Signs people in to the dashboard: a key that they give once becomes a cookie.

The cookie has the digest of the key, the end of its validity and an HMAC, so every replica accepts it, and revoking the
key ends it. It does not contain the key.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Final

from gateway.core.ids import Owner
from gateway.settings.keys import Keyring, digest_of

COOKIE: Final = "gateway_dashboard"
VALID_S: Final = 12 * 3600.0
_LABEL: Final = b"gateway dashboard v1"


@dataclass(frozen=True, slots=True)
class Viewer:
    """A person who looks at the dashboard."""

    owner: Owner
    """The name of the key; empty: the gateway has no keys."""
    is_operator: bool
    """False: a trainer, who sees the episodes of this key only, and changes nothing."""


class SignIn:
    """Makes and reads cookies, and knows the person behind a key."""

    def __init__(self, secret: bytes, keys: Keyring, *, clock: Callable[[], float] = time.time) -> None:
        """*secret* is the gateway's secret, which all replicas share. *clock* returns seconds since 1970."""
        self._key = hmac.digest(secret, _LABEL, "sha256")
        self._keys = keys
        self._clock = clock

    @property
    def needs_key(self) -> bool:
        """False if the gateway has no keys at all, so that it is open to all who reach it."""
        return bool(self._keys.operators or self._keys.trainers or self._keys.has_file)

    def viewer(self, digest: bytes) -> Viewer | None:
        """Return the person whose key has this *digest*. None: the key is not known, or was revoked."""
        if (operator := self._keys.operators.get(digest)) is not None:
            return Viewer(operator.owner, True)
        trainer = self._keys.trainers.get(digest)
        return None if trainer is None else Viewer(trainer.owner, False)

    def token(self, key: str) -> str | None:
        """Return the cookie's value for someone who has *key*. None: the key is not known."""
        digest = digest_of(key)
        if self.viewer(digest) is None:
            return None
        said = f"{digest.hex()}-{int(self._clock() + VALID_S)}"
        return f"{said}-{self._mac(said)}"

    def digest_in(self, cookies: str) -> bytes | None:
        """Return the digest of the key for which a valid cookie among *cookies* was made. None: there is none."""
        try:
            found = SimpleCookie(cookies).get(COOKIE)
        except CookieError:
            return None
        said, _, mac = (found.value if found is not None else "").rpartition("-")
        digest, _, until = said.partition("-")
        if not hmac.compare_digest(mac.encode("utf-8", "surrogatepass"), self._mac(said).encode()):
            return None
        return bytes.fromhex(digest) if int(until) > self._clock() else None

    def _mac(self, said: str) -> str:
        return hmac.new(self._key, said.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()
