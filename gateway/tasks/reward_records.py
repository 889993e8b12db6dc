"""Signs rewards: a record binds a reward to the task, scorer, seed, actions and results that it depends on.

The *chain* is a hash over the episode. Its first link covers how the episode began. Each call adds a link, the SHA-256
of the link before it, the call's action and the call's result. So a record shows after which actions in which order a
reward was given, and no call can be changed, removed or added unnoticed.

A line of an export is a JSON object with ``episode`` and ``records``, in canonical form: ASCII, sorted keys, no white
space. Any other byte makes the line invalid. There is a record for each reward, in order, and a last one for the whole
episode. Each has its own ``signature``, so one of them can be verified without the others and without the episode.
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
from gateway.core.ports.step_log import UNRECORDED
from gateway.tasks.signing import BadSignature, TrustedKeys, key_id

FORMAT: Final = "env-gateway/reward/2"
FORMER_FORMAT: Final = "env-gateway/reward/1"
"""Format of records without a scorer's version, in which the image stands for the judge. They can be verified."""
_BEGIN: Final = (
    "id",
    "name",
    "owner",
    "environment",
    "split",
    "task",
    "task_digest",
    "image",
    "scorer",
    "seed",
    "begin",
    "protocol",
)
"""Members of an episode that the first link covers."""
_STATED: Final = (
    *(
        "environment",
        "split",
        "task",
        "task_digest",
        "image",
        "scorer",
        "seed",
        "policy",
        "group_name",
        "owner",
        "protocol",
    ),
    "opened_at",
)
"""Members of an episode that each of its records repeats."""
_STATED_AT_END: Final = ("closed_at", "reason", "outcome", "reward")
"""Members of an episode that its last record repeats."""


def why_incomplete(episode: Mapping[str, Any]) -> str:
    """Return why the rewards of *episode* do not show all that happened in it, or an empty text.

    Its worker counts the steps, so a missing one is noticed. Calls that were refused may be recorded too.
    """
    if episode.get("reason") == UNRECORDED:
        return "its end was not recorded, because the replica that had to record it was killed"
    ran = (episode.get("end") or {}).get("steps") or 0
    recorded = len({step["number"] for step in episode["steps"] if step["operation"] == "call"})
    if recorded < ran:
        return f"it had {ran} steps, of which {recorded} are recorded"
    if lost := episode.get("lost"):
        return f"{lost} of its records were lost"
    return "a part of the step log that may have calls of it is damaged" if episode.get("damaged_batches") else ""


def signing_key(secret: bytes) -> Ed25519PrivateKey:
    """Return the key with which all replicas of a gateway sign, derived from the *secret* that they share."""
    # The former label: the key did not change with the format.
    derived = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=FORMER_FORMAT.encode()).derive(secret)
    return Ed25519PrivateKey.from_private_bytes(derived)


def signed(episode: Mapping[str, Any], private: Ed25519PrivateKey, *, instance: str) -> bytes:
    """Return an episode with its signed records as one line, without a line feed.

    Args:
        episode: The ended episode, as ``GET /admin/v1/episodes/{id}`` shows it.
        private: The gateway's key.
        instance: The gateway's name.

    Raises:
        InvalidRequest: The record of the episode is not complete.
    """
    if why := why_incomplete(episode):
        raise InvalidRequest(f"the rewards of episode {episode['id']!r} cannot be signed: {why}")
    stamp = {
        "format": FORMAT,
        "key": key_id(private.public_key()),
        "instance": instance,
        "signed_at": round(time.time(), 3),
    }
    records = [stamp | facts for facts in _facts(episode, FORMAT)]
    for record in records:
        record["signature"] = base64.b64encode(private.sign(_content(record, FORMAT))).decode()
    return canonical({"episode": episode, "records": records})


def verify(line: bytes, trusted: TrustedKeys) -> list[dict[str, Any]]:
    """Return the records in a *line* that `signed` wrote: one for each reward, and a last one for the episode.

    Raises:
        InvalidRequest: The line is not such a line.
        NotSigned: Its key is not trusted.
        BadSignature: The episode, a record or a signature was changed, or the record of the episode is not complete.
    """
    document = _document(line)
    episode: dict[str, Any] = document["episode"]
    records: list[dict[str, Any]] = document["records"]
    form = records[0]["format"]
    keys = [trusted.named(record.get("key")) for record in records]
    try:
        if canonical(document) != line:
            raise BadSignature("the line is not in canonical form: it was changed after it was signed")
        for record, public in zip(records, keys, strict=True):
            public.verify(base64.b64decode(record["signature"], validate=True), _content(record, form))
        facts = _facts(episode, form)
    except InvalidSignature:
        raise BadSignature("a record is not what the gateway signed") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadSignature(f"the episode or a signature was changed: {error}") from None
    if len(facts) != len(records):
        raise BadSignature(f"the episode has {len(facts) - 1} rewards, and there are records of {len(records) - 1}")
    pairs = zip(facts, records, strict=True)
    if changed := sorted({name for fact, record in pairs for name in fact if fact[name] != record.get(name)}):
        raise BadSignature(f"the episode is not the one of its records: {', '.join(changed)} differ")
    if why := why_incomplete(episode):
        raise BadSignature(f"episode {episode['id']!r} shows no reward for sure: {why}")
    return records


def _document(line: bytes) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(line)
        is_form = document.keys() == {"episode", "records"} and isinstance(document["episode"], dict)
        formats = {record["format"] for record in document["records"]} if is_form else set()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidRequest(f"not an episode with signed records: {error or type(error).__name__}") from None
    if formats not in ({FORMAT}, {FORMER_FORMAT}):
        raise InvalidRequest(f"not an episode with signed records of the format {FORMAT} or {FORMER_FORMAT}")
    return document


def canonical(value: Any) -> bytes:
    """Return *value* as canonical JSON. Raises ``ValueError`` for values that JSON does not have."""
    return json.dumps(value, allow_nan=False, sort_keys=True, separators=(",", ":")).encode()


def _facts(episode: Mapping[str, Any], form: str) -> list[dict[str, Any]]:
    """Return what the records of *episode* say in this format."""
    has_scorer = form == FORMAT
    begin, stated = ([name for name in names if has_scorer or name != "scorer"] for names in (_BEGIN, _STATED))
    judge = "scorer" if has_scorer else "image"
    evaluation = ((episode["begin"] or {}).get("spec") or {}).get("evaluation")
    about = {
        "episode": episode["id"],
        **{name: episode.get(name) for name in stated},
        "judge": _hash({judge: episode.get(judge), "evaluation": evaluation}),
    }
    link = _hash({name: episode.get(name) for name in begin})
    facts = []
    for step in episode["steps"]:
        link = hashlib.sha256(f"{link}{_hash(step)}".encode()).hexdigest()
        if step.get("reward") is not None and not step.get("repeated"):
            facts.append({**about, "step": step["number"], "reward": step["reward"], "chain": link})
    end = {name: episode.get(name) for name in _STATED_AT_END}
    return [*facts, {**about, **end, "chain": link, "content": _hash(episode)}]


def _content(record: Mapping[str, Any], form: str) -> bytes:
    """Return the bytes that are signed: the record without its signature."""
    return f"{form}\n".encode() + canonical({name: record[name] for name in record if name != "signature"})


def _hash(value: Any) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()
