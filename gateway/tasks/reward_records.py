"""Signs rewards: a record binds an episode's rewards to its task, image, judge, seed, actions and results.

The *chain* is a hash over the episode. Its first link covers how the episode began. Each call adds a link, the SHA-256
of the link before it, the call's action and the call's result. So a record shows in which order which actions earned
which rewards, and no call can be changed, removed or added unnoticed.

A line of an export is a JSON object with ``episode``, ``record`` and ``signature``, in canonical form: ASCII, sorted
keys, no white space. Any other byte makes the line invalid.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Mapping
from typing import Any, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from gateway.core.errors import InvalidRequest
from gateway.tasks.signing import BadSignature, TrustedKeys, key_id

FORMAT: Final = "env-gateway/reward/1"
_BEGIN: Final = (
    "id",
    "name",
    "owner",
    "environment",
    "split",
    "task",
    "task_digest",
    "image",
    "seed",
    "begin",
    "protocol",
)
"""Members of an episode that the first link covers."""
_STATED: Final = (
    *("environment", "split", "task", "task_digest", "image", "seed", "policy", "group_name", "owner", "protocol"),
    *("opened_at", "closed_at", "reason", "outcome", "reward"),
)
"""Members of an episode that its record repeats."""


def signing_key(secret: bytes) -> Ed25519PrivateKey:
    """Return the key with which all replicas of a gateway sign, derived from the *secret* that they share."""
    derived = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=FORMAT.encode()).derive(secret)
    return Ed25519PrivateKey.from_private_bytes(derived)


def signed(episode: Mapping[str, Any], private: Ed25519PrivateKey, *, instance: str) -> bytes:
    """Return an episode with its signed record as one line, without a line feed.

    Args:
        episode: The ended episode, as ``GET /admin/v1/episodes/{id}`` shows it.
        private: The gateway's key.
        instance: The gateway's name.
    """
    record = {
        "format": FORMAT,
        "key": key_id(private.public_key()),
        "instance": instance,
        "signed_at": round(time.time(), 3),
        **_facts(episode),
    }
    signature = base64.b64encode(private.sign(_content(record))).decode()
    return canonical({"episode": episode, "record": record, "signature": signature})


def verify(line: bytes, trusted: TrustedKeys) -> dict[str, Any]:
    """Return the record in a *line* that `signed` wrote.

    Raises:
        InvalidRequest: The line is not such a line.
        NotSigned: Its key is not trusted.
        BadSignature: The episode, the record or the signature was changed.
    """
    try:
        document = json.loads(line)
        episode, record, signature = document["episode"], document["record"], document["signature"]
        is_form = isinstance(episode, dict) and isinstance(record, dict) and record.get("format") == FORMAT
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"not an episode with a signed record: {error or type(error).__name__}") from None
    if not is_form or not isinstance(signature, str) or document.keys() != {"episode", "record", "signature"}:
        raise InvalidRequest(f"not an episode with a signed record of the format {FORMAT}")
    public = trusted.named(record.get("key"))
    try:
        if canonical(document) != line:
            raise BadSignature("the line is not in canonical form: it was changed after it was signed")
        public.verify(base64.b64decode(signature, validate=True), _content(record))
        facts = _facts(episode)
    except InvalidSignature:
        raise BadSignature("the record is not what the gateway signed") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadSignature(f"the episode or the signature was changed: {error}") from None
    changed = sorted(name for name in facts if facts[name] != record.get(name))
    if changed:
        raise BadSignature(f"the episode is not the one of the record: {', '.join(changed)} differ")
    return dict(record)


def canonical(value: Any) -> bytes:
    """Return *value* as canonical JSON. Raises ``ValueError`` for values that JSON does not have."""
    return json.dumps(value, allow_nan=False, sort_keys=True, separators=(",", ":")).encode()


def _facts(episode: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record says of *episode*."""
    begin = episode["begin"] or {}
    link = _hash({name: episode.get(name) for name in _BEGIN})
    rewards = []
    for step in episode["steps"]:
        link = hashlib.sha256(f"{link}{_hash(step)}".encode()).hexdigest()
        if step.get("reward") is not None and not step.get("repeated"):
            rewards.append({"step": step["number"], "reward": step["reward"], "chain": link})
    return {
        "episode": episode["id"],
        **{name: episode.get(name) for name in _STATED},
        "judge": _hash({"image": episode.get("image"), "evaluation": (begin.get("spec") or {}).get("evaluation")}),
        "rewards": rewards,
        "chain": link,
        "content": _hash(episode),
    }


def _content(record: Mapping[str, Any]) -> bytes:
    return f"{FORMAT}\n".encode() + canonical(record)


def _hash(value: Any) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()
