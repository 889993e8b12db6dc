"""Changed bundles: each is refused with an error of its own, or has exactly the signed content."""

from __future__ import annotations

import contextlib
import copy
import json
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import event, given
from hypothesis import strategies as st

from gateway.core.errors import TaskInvalid
from gateway.tasks.bundles import is_bundle, read_bundle
from gateway.tasks.documents import read_json, read_yaml
from gateway.tasks.signing import BadSignature, NotSigned, TrustedKeys, key_id, sign
from tests.fuzzing import fuzzed

PRIVATE = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
TRUSTED = TrustedKeys({key_id(one.public_key()): one.public_key() for one in (PRIVATE, OTHER)})

TEXTS = st.text(st.characters(exclude_categories=()), max_size=6)
"""Any text, also halves of surrogate pairs, which JSON can write and UTF-8 cannot."""
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
KEYS = TEXTS | st.none() | st.booleans() | st.integers(0, 3) | st.floats()
"""Keys of a table; YAML has all of them."""
PLAIN = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3))
CLEAN_TEXTS = st.sampled_from(["1", "1.0", "true", "null"]) | st.text(max_size=6)
CLEAN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | CLEAN_TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(CLEAN_TEXTS, inner, max_size=3),
)
"""Plain data that can be signed."""
NAMES = st.sampled_from(["", "a", "b", "math", "train"])
BUNDLES = st.builds(
    sign,
    st.lists(st.dictionaries(CLEAN_TEXTS, CLEAN, min_size=1, max_size=3), max_size=2),
    st.sampled_from([PRIVATE, OTHER]),
    made_at=st.datetimes(datetime(2000, 1, 1), datetime(9000, 1, 1), timezones=st.just(UTC)),  # hypothesis adds it
    instance=NAMES | CLEAN_TEXTS,
    environment=NAMES,
    split=NAMES,
)


def exact(value: Any) -> Any:
    """Return a value that equals that of another value only if both are the same plain data: 1, 1.0 and True differ."""
    if isinstance(value, dict):
        return "table", frozenset((exact(key), exact(inner)) for key, inner in value.items())
    if isinstance(value, list):
        return "list", tuple(map(exact, value))
    return type(value).__name__, value.hex() if isinstance(value, float) else value


def content(bundle: dict[str, Any]) -> Any:
    return exact({name: value for name, value in bundle.items() if name != "signature"})


def check(document: Any, signed: dict[str, Any]) -> None:
    """Fail if *document* is verified although it differs from *signed*, or is refused with another error."""
    try:
        found = TRUSTED.verify(document)
    except (TaskInvalid, NotSigned, BadSignature) as error:
        event(type(error).__name__)
        return
    event("verified")
    assert content({name: getattr(found, name) for name in signed}) == content(signed)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return each table and list of *value*, with each of its keys."""
    found, todo = [], [value]
    while todo:
        one = todo.pop()
        inner = list(one.items()) if isinstance(one, dict) else list(enumerate(one)) if isinstance(one, list) else []
        found += [(one, key) for key, _ in inner]
        todo += [value for _, value in inner]
    return found


def mutate(bundle: dict[str, Any], data: st.DataObject) -> None:
    """Change one value, remove it, give it another key, or exchange two values; half of the time inside the tasks."""
    inner = places(bundle.get("tasks")) if data.draw(st.booleans()) else []
    holder, key = data.draw(st.sampled_from(inner or places(bundle)))
    match data.draw(st.sampled_from(["replace", "resemble", "remove", "rename", "add", "exchange"])):
        case "replace":
            holder[key] = data.draw(PLAIN)
        case "resemble":
            holder[key] = data.draw(st.sampled_from(resembling(holder[key])))
        case "remove":
            del holder[key]
        case "rename" if isinstance(holder, dict):
            names = [name for name in resembling(key) if not isinstance(name, list | dict)]
            # The last one: what the key is without its quotes.
            holder[data.draw(st.just(names[-1]) | KEYS)] = holder.pop(key)
        case "add" if isinstance(holder, dict):
            holder[data.draw(KEYS)] = data.draw(PLAIN)
        case "add":
            holder.insert(key, data.draw(PLAIN))
        case "exchange":
            other, place = data.draw(st.sampled_from(places(bundle)))
            one, another = copy.deepcopy(holder[key]), copy.deepcopy(other[place])
            holder[key], other[place] = another, one


def resembling(value: Any) -> list[Any]:
    """Return values that a careless encoding or comparison could take for *value*."""
    similar: list[Any] = [] if isinstance(value, str) else [str(value)]
    if isinstance(value, int | float):
        similar += [bool(value), -value]
    if isinstance(value, int) and abs(value) < 2**53:
        similar += [float(value), int(value)]
    if isinstance(value, float) and value.is_integer():
        similar.append(int(value))
    if isinstance(value, str):
        similar += [value + "\0", f"{value} ", value.upper(), value.replace("Z", "+00:00"), [value]]
        with contextlib.suppress(ValueError, RecursionError):
            similar.append(json.loads(value))
    if not value:
        similar = [None, "", 0, [], {}, *similar]
    return [one for one in similar if not isinstance(one, list | dict) or not isinstance(value, list | dict)] or [None]


@given(BUNDLES, st.data())
@fuzzed(300)
def test_a_bundle_with_other_values_is_refused_or_has_the_signed_content(
    bundle: dict[str, Any], data: st.DataObject
) -> None:
    changed = copy.deepcopy(bundle)
    for _ in range(data.draw(st.integers(1, 3))):
        if places(changed):
            mutate(changed, data)

    assert isinstance(is_bundle(changed), bool)
    check(changed, bundle)


@given(BUNDLES, st.booleans(), st.data())
@fuzzed(200)
def test_a_bundle_with_another_text_is_refused_or_has_the_signed_content(
    bundle: dict[str, Any], is_yaml: bool, data: st.DataObject
) -> None:
    text = (yaml.safe_dump(bundle) if is_yaml else json.dumps(bundle, ensure_ascii=data.draw(st.booleans()))).encode()
    for _ in range(data.draw(st.integers(0, 3))):
        at, length = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 8))
        piece = data.draw(
            st.binary(max_size=4) | st.sampled_from([b"1", b".0", b'"', b"{", b"]", b"null", b"\n? ", b": "])
        )
        text = text[:at] + piece + text[at + length :]
    try:
        document = read_yaml(text) if is_yaml else read_json(text)
    except TaskInvalid:
        event("another error of the reader")
        return

    check(document, bundle)


@given(PLAIN)
@fuzzed(100)
def test_other_documents_are_refused_with_an_error_of_their_own(document: Any) -> None:
    assert is_bundle(document) in (True, False)
    with pytest.raises((TaskInvalid, NotSigned, BadSignature)):
        TRUSTED.verify(document)


@given(BUNDLES, BUNDLES, st.data())
@fuzzed(200)
def test_two_contents_have_two_encodings(one: dict[str, Any], other: dict[str, Any], data: st.DataObject) -> None:
    if data.draw(st.booleans()):
        other = copy.deepcopy(one)
        mutate(other, data)
    try:
        encodings = [read_bundle(bundle).canonical() for bundle in (one, other)]
    except TaskInvalid:
        event("not a bundle")
        return

    event("equal" if content(one) == content(other) else "different")
    assert (encodings[0] == encodings[1]) == (content(one) == content(other))
