"""The keys of trainers and operators, with the limits of each key.

Keys come from two places: the settings ``trainer_keys`` and ``operator_keys``, and the file of keys that
``gateway keys`` writes. The file holds only SHA-256 digests. A generated key has 256 random bits, so a digest without
salt reveals nothing. Each gateway reads the file again when it has changed: a new or revoked key needs no restart.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from gateway.core.errors import ConfigError
from gateway.core.file_lock import Taken, hold
from gateway.core.ids import Owner
from gateway.core.periodic import pause
from gateway.core.validation import did_you_mean, reason_of

logger = logging.getLogger(__name__)

POLL_S: Final = 1.0
"""Seconds between two checks whether the file has changed. Inotify would miss edits on a shared file system."""
MAX_FILE_BYTES: Final = 16 * 2**20
MIN_CHARS: Final = 8
"""Minimum length of a key in the settings."""
NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"
"""Pattern of a key's name in the file."""


class Role(StrEnum):
    """The routes that a key opens."""

    TRAINER = "trainer"
    """Sessions and tasks."""
    OPERATOR = "operator"
    """``/admin/v1`` and ``/metrics``."""


class KeyLimits(BaseModel):
    """The limits of one trainer's key. A key without limits competes with the other keys on equal terms."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_sessions: int = Field(default=0, ge=0)
    """Maximum number of sessions that hold a slot at the same time, in all environments. Further openings wait in the
    queue. 0: no limit."""
    pool_share: float = Field(default=1.0, gt=0, le=1)
    """Maximum share of the slots of each environment, rounded up to whole slots. Further openings wait."""
    opens_per_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Openings per second on average, over all replicas; one second's number may come at once. Further openings wait.
    0: no limit."""
    calls_per_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Calls of tools per second in one replica, in all sessions of the key. Calls start at even intervals, and wait for
    their time. 0: no limit."""
    max_held_bytes: int = Field(default=0, ge=0)
    """Maximum number of bytes that the requests of this key hold in one replica. 0: ``max_held_bytes_per_key``."""
    environments: tuple[str, ...] = ()
    """Names of the environments that the key may use. Empty: all."""

    @field_validator("environments")
    @classmethod
    def _in_lower_case(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.lower() for name in value)


NO_LIMITS: Final = KeyLimits()


@dataclass(frozen=True, slots=True)
class KnownKey:
    """A key that the gateway accepts."""

    owner: Owner
    """Its name, which owns its sessions."""
    digest: bytes
    """SHA-256 of the key."""
    limits: KeyLimits = NO_LIMITS


class StoredKey(BaseModel):
    """One key of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=NAME)
    """The owner of the key's sessions."""
    role: Role = Role.TRAINER
    hash: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    created: str = ""
    """Time of creation, ISO 8601."""
    limits: KeyLimits = NO_LIMITS


class _KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: list[StoredKey]

    @field_validator("keys")
    @classmethod
    def _names_differ(cls, value: list[StoredKey]) -> list[StoredKey]:
        names = [key.name for key in value]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"the name {twice[0]!r} occurs twice")
        return value


Listener = Callable[[Mapping[Owner, tuple[str, ...]]], None]


class Keyring:
    """All keys of one gateway. `run` keeps it up to date with the file."""

    def __init__(
        self, trainers: Mapping[str, str], operators: Mapping[str, str] | None = None, *, path: Path | None = None
    ) -> None:
        """Read the file at *path*, if there is one.

        Args:
            trainers: Keys of trainers from the settings, by name.
            operators: Keys of operators from the settings, by name.
            path: The file of keys. None: only the keys of the settings.

        Raises:
            ConfigError: The file cannot be read, or is wrong.
        """
        self._fixed = [
            (role, KnownKey(Owner(name), digest_of(key)))
            for role, keys in ((Role.TRAINER, trainers), (Role.OPERATOR, operators or {}))
            for name, key in keys.items()
        ]
        self._path = path
        self._stamp = _stamp(path)
        self._refused: object = None
        """Stamp of the last file that was refused."""
        self._listeners: list[Listener] = []
        self.trainers: Mapping[bytes, KnownKey] = {}
        """The keys of trainers by their digests, and below those of operators."""
        self.operators: Mapping[bytes, KnownKey] = {}
        self.has_file = False
        """True if there is a file. Every route then needs a key, so that revoking the last key opens nothing."""
        self.by_owner: Mapping[Owner, KeyLimits] = {}
        """The limits of each trainer's key."""
        self.calls_per_s: Mapping[Owner, float] = {}
        """The limits of calls per second of the keys that have one."""
        self.revoked: frozenset[Owner] = frozenset()
        """Trainers whose keys are gone since the start. A WebSocket that such a key opened may still be open."""
        self._take(read_keys(path) if path is not None and self._stamp is not None else None)

    def changed(self, listener: Listener) -> None:
        """Call *listener* now and after each change with the trainers and their environments (empty: all)."""
        self._listeners.append(listener)
        listener(self._environments())

    async def run(self) -> None:
        """Check every `POLL_S` seconds whether the file has changed, until cancelled."""
        while self._path is not None:
            await pause(POLL_S)
            await self.look()

    async def look(self) -> None:
        """Read the file if it has changed. The gateway keeps the keys that it has if the new file is wrong.

        A file that is gone changes nothing either: otherwise its removal would open a gateway to everyone.
        """
        if self._path is None:
            return
        stamp = await asyncio.to_thread(_stamp, self._path)
        if stamp is None or stamp in (self._stamp, self._refused):
            return
        try:
            keys = await asyncio.to_thread(read_keys, self._path)
            self._take(keys)
        except ConfigError as error:
            self._refused = stamp
            logger.error("keys_refused error=%s", error.detail)
            return
        self._stamp = stamp
        logger.info("keys_changed trainers=%d operators=%d", len(self.trainers), len(self.operators))

    def _take(self, keys: Sequence[StoredKey] | None) -> None:
        known = list(self._fixed)
        names = {key.owner for _, key in known}
        for key in keys or ():
            if key.name in names:
                raise ConfigError(f"{self._path}: the key {key.name!r} is in the settings too: revoke one of them")
            digest = bytes.fromhex(key.hash.removeprefix("sha256:"))
            known.append((key.role, KnownKey(Owner(key.name), digest, key.limits)))
        self.trainers = {key.digest: key for role, key in known if role is Role.TRAINER}
        self.operators = {key.digest: key for role, key in known if role is Role.OPERATOR}
        before = self.revoked | self.by_owner.keys()
        self.by_owner = {key.owner: key.limits for role, key in known if role is Role.TRAINER}
        self.calls_per_s = {owner: limits.calls_per_s for owner, limits in self.by_owner.items() if limits.calls_per_s}
        self.revoked = before - self.by_owner.keys()
        self.has_file = keys is not None
        for listener in self._listeners:
            listener(self._environments())

    def _environments(self) -> Mapping[Owner, tuple[str, ...]]:
        return {owner: limits.environments for owner, limits in self.by_owner.items()}


def digest_of(key: str) -> bytes:
    """Return the SHA-256 of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def parse_keys(value: SecretStr) -> dict[str, str]:
    """Turn ``name:key,name:key`` into a mapping from name to key; a key shorter than `MIN_CHARS` is refused.

    Spaces around names and keys are ignored. Raises ``ValueError``.
    """
    keys: dict[str, str] = {}
    for position, entry in enumerate(filter(None, (part.strip() for part in value.get_secret_value().split(","))), 1):
        name, colon, key = (part.strip() for part in entry.partition(":"))
        if not colon or not name.strip():
            raise ValueError(f"entry {position} is not of the form name:key")
        if len(key) < MIN_CHARS or not (key.isascii() and key.isprintable()) or any(c in "/ " for c in key):
            raise ValueError(
                f"the key of {name!r} needs at least {MIN_CHARS} printable ASCII characters without spaces and slashes"
            )
        if name in keys:
            raise ValueError(f"the name {name!r} occurs twice")
        if key in keys.values():
            raise ValueError(f"{name!r} has the same key as another name: sessions belong to one")
        keys[name] = key
    return keys


def read_keys(path: Path) -> list[StoredKey]:
    """Read the file of keys. Raises ``ConfigError`` with the file, the key and the reason."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: it has more than {MAX_FILE_BYTES} bytes")
        return _KeyFile.model_validate_json(data).keys
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, one['loc'])) or 'the file'}: {reason_of(one, _KeyFile)}"
            for one in error.errors(include_url=False)
        ]
        raise ConfigError(f"{path}: {'; '.join(problems)}") from None


def add_key(path: Path, name: str, *, role: Role, limits: KeyLimits) -> str:
    """Make a new key, add its digest to the file, and return it: it is shown this one time.

    Raises:
        ConfigError: The file has this name already, or cannot be read or written.
    """
    key = secrets.token_urlsafe(32)
    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    with _edited(path) as keys:
        if any(one.name == name for one in keys):
            raise ConfigError(f"there is a key {name!r}: revoke it first, or choose another name")
        try:
            keys.append(
                StoredKey(name=name, role=role, hash=f"sha256:{digest_of(key).hex()}", created=now, limits=limits)
            )
        except ValidationError:
            raise ConfigError(
                f"the name {name!r:.100} must begin with a letter or digit and have at most 63 letters, digits, dots, "
                "dashes and underscores"
            ) from None
    return key


def revoke_key(path: Path, name: str) -> None:
    """Remove a key from the file. Its sessions expire. Raises ``ConfigError``: there is no such key."""
    with _edited(path) as keys:
        names = [one.name for one in keys]
        if name not in names:
            close = did_you_mean(name, names)
            raise ConfigError(f"{path}: there is no key {name!r}; it has {', '.join(names) or 'no key'}{close}")
        del keys[names.index(name)]


@contextmanager
def _edited(path: Path) -> Iterator[list[StoredKey]]:
    """Read the file of keys, and write it back at the end unless an exception ends the context."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = hold(path.with_name(f"{path.name}.lock"), str(os.getpid()), alone=True)
    except Taken:
        raise ConfigError(f"{path}: another command changes it: try again") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    with lock:
        keys = read_keys(path) if path.exists() else []
        yield keys
        _write(path, keys)


def _write(path: Path, keys: list[StoredKey]) -> None:
    text = _KeyFile(keys=keys).model_dump_json(indent=2, exclude_defaults=True)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(f"{text}\n")
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)  # readers see the old file or the new one, whole
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    """Return modification time, size and inode of the file. None: there is no such file."""
    if path is None:
        return None
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
