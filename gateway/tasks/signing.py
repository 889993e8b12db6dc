"""Signs and verifies bundles of tasks with Ed25519, which proves the signing key and detects changes.

`gateway.tasks.bundles` has the form of a bundle.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from gateway.core.errors import ConfigError, NotAllowed, TaskInvalid
from gateway.tasks.bundles import FORMAT, VALID, Bundle, read_bundle, time_text

MAX_KEY_BYTES = 16 * 1024
PUBLIC_SUFFIX = ".pub"


class NotSigned(NotAllowed):
    """The content is not signed, or its key is not trusted."""


class BadSignature(NotAllowed):
    """The signature does not match the content: the content or the signature was changed."""


class TrustedKeys:
    """The public keys whose signatures the gateway accepts, by key id."""

    def __init__(self, keys: Mapping[str, Ed25519PublicKey]) -> None:
        self._keys = dict(keys)

    def named(self, id: object) -> Ed25519PublicKey:
        """Return the key with this *id*. Raises ``NotSigned`` if it is not trusted."""
        public = self._keys.get(id) if isinstance(id, str) else None
        if public is None:
            raise NotSigned(f"it is signed with the key {id!r:.100}, which is not trusted here")
        return public

    def verify(self, document: object) -> Bundle:
        """Return the bundle in *document*, with tasks that are not yet checked against the schema.

        The caller checks time and place (`Bundle.check_use`).

        Raises:
            TaskInvalid: *document* does not have the form of a bundle.
            NotSigned: The gateway does not trust the bundle's key.
            BadSignature: The bundle changed after it was signed.
        """
        bundle = read_bundle(document)
        try:
            signature = base64.b64decode(bundle.signature, validate=True)
        except ValueError:
            raise TaskInvalid([("signature", "must be base64")], where="bundle") from None
        public = self.named(bundle.key)
        try:
            public.verify(signature, bundle.canonical())
        except InvalidSignature:
            raise BadSignature(f"the bundle is not what the key {bundle.key!r} signed") from None
        return bundle


def sign(
    tasks: list[Any],
    private: Ed25519PrivateKey,
    *,
    made_at: datetime | None = None,
    valid: timedelta = VALID,
    instance: str = "",
    environment: str = "",
    split: str = "",
) -> dict[str, Any]:
    """Sign *tasks* (plain data), and return the bundle as plain data.

    Args:
        tasks: The tasks.
        private: The signer's key.
        made_at: The time of signing; None: now.
        valid: Time from signing until the bundle expires.
        instance, environment, split: Members of `Bundle`; the signature covers them.

    Raises:
        TaskInvalid: A task has values that JSON does not have, or a member is invalid.
    """
    start = made_at or datetime.now(UTC)
    unsigned = {
        "format": FORMAT,
        "tasks": tasks,
        "key": key_id(private.public_key()),
        "made_at": time_text(start),
        "expires": time_text(start + valid),
        "instance": instance,
        "environment": environment,
        "split": split,
    }
    content = read_bundle({**unsigned, "signature": ""}).canonical()
    return {**unsigned, "signature": base64.b64encode(private.sign(content)).decode()}


def key_id(public: Ed25519PublicKey) -> str:
    """Return the id of a key: the first 16 hexadecimal digits of its SHA-256."""
    raw = public.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return hashlib.sha256(raw).hexdigest()[:16]


def make_keys(path: Path) -> tuple[Path, str]:
    """Write a new private key to *path* (mode 0600) and its public key next to it.

    Returns the path of the public key, and the key's id.

    Raises:
        ConfigError: One of the files already exists or cannot be written. No new file is left.
    """
    private = Ed25519PrivateKey.generate()
    public_path = path.with_name(path.name + PUBLIC_SUFFIX)
    private_pem = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _write_new(path, private_pem, 0o600)
    try:
        _write_new(public_path, public_pem(private), 0o644)
    except ConfigError:
        path.unlink()
        raise
    return public_path, key_id(private.public_key())


def public_pem(private: Ed25519PrivateKey) -> bytes:
    """Return the public key of *private* as PEM."""
    public = private.public_key()
    return public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def read_private(path: Path) -> Ed25519PrivateKey:
    """Read a private key in the format of `make_keys`. Raises ``ConfigError``."""
    try:
        key = serialization.load_pem_private_key(_read(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError(f"{path}: must be a private key in PEM, without a password") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path}: must be an Ed25519 key")
    return key


def read_trusted(path: Path | None) -> TrustedKeys:
    """Read a public key, or all ``*.pub`` files of a folder. Without a *path* the gateway trusts no key.

    Raises:
        ConfigError: A file is not an Ed25519 public key, or *path* does not exist.
    """
    if path is None:
        return TrustedKeys({})
    try:
        files = sorted(path.glob(f"*{PUBLIC_SUFFIX}")) if path.is_dir() else [path]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    return trusted_of({str(file): _read(file) for file in files})


def trusted_of(files: Mapping[str, bytes]) -> TrustedKeys:
    """Return the public keys in the contents of *files*, by name. Raises ``ConfigError`` if one is no such key."""
    keys = [_public_key(name, content) for name, content in files.items()]
    return TrustedKeys({key_id(key): key for key in keys})


def _public_key(name: str, content: bytes) -> Ed25519PublicKey:
    try:
        key = serialization.load_pem_public_key(content)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError(f"{name}: must be a public key in PEM") from None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"{name}: must be an Ed25519 key")
    return key


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_KEY_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _write_new(path: Path, data: bytes, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise ConfigError(f"{path}: {error.strerror}") from error
