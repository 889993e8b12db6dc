"""Signed bundles of tasks: a valid signature is verified, and every change is detected."""

from __future__ import annotations

import base64
import copy
import json
import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

from gateway.core.errors import ConfigError, TaskInvalid
from gateway.tasks.signing import (
    BadSignature,
    NotSigned,
    TrustedKeys,
    is_bundle,
    make_keys,
    read_private,
    read_trusted,
    sign,
)

TASKS: list[Any] = [
    {"id": "a", "instruction": "é 😀 \u2028", "config": {"n": 1, "x": 1.0, "big": 12345678901234567890, "e": 1e-7}},
    {"id": "b", "tags": ["x", "y"], "evaluation": {"reward_function": "contains('x')"}},
]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Return a folder with a private key ``lab`` and its public key."""
    folder = tmp_path / "keys"
    folder.mkdir()
    make_keys(folder / "lab")
    return folder


@pytest.fixture
def bundle(keys: Path) -> dict[str, Any]:
    return sign(TASKS, read_private(keys / "lab"))


def test_a_signed_bundle_is_verified_with_the_key_s_name(keys: Path, bundle: dict[str, Any]) -> None:
    trusted = read_trusted(keys)

    assert trusted.verify(bundle) == (TASKS, bundle["key"])
    assert read_trusted(keys / "lab.pub").verify(bundle) == (TASKS, bundle["key"])


def test_a_bundle_may_be_rewritten_as_equal_json(keys: Path, bundle: dict[str, Any]) -> None:
    rewritten = json.loads(json.dumps(dict(reversed(bundle.items())), indent=7, ensure_ascii=True, sort_keys=True))

    assert read_trusted(keys).verify(rewritten)[0] == TASKS


def tampered(bundle: dict[str, Any], change: str) -> dict[str, Any]:
    forged = copy.deepcopy(bundle)
    match change:
        case "a value":
            forged["tasks"][0]["config"]["n"] = 2
        case "a kind":
            forged["tasks"][0]["config"]["n"] = 1.0
        case "a truth":
            forged["tasks"][0]["config"]["n"] = True
        case "a key":
            forged["tasks"][0]["extra"] = None
        case "an order":
            forged["tasks"].reverse()
        case "a list":
            forged["tasks"][1]["tags"].reverse()
        case "one less":
            del forged["tasks"][1]
        case "one more":
            forged["tasks"].append({"id": "c"})
        case "a signature":
            raw = bytearray(base64.b64decode(forged["signature"]))
            raw[7] ^= 1
            forged["signature"] = base64.b64encode(bytes(raw)).decode()
        case "half a signature":
            forged["signature"] = forged["signature"][:44]
        case "no signature":
            forged["signature"] = ""
    return forged


CHANGES = ["a value", "a kind", "a truth", "a key", "an order", "a list", "one less", "one more"]
OF_SIGNATURES = ["a signature", "half a signature", "no signature"]


@pytest.mark.parametrize("change", [*CHANGES, *OF_SIGNATURES])
def test_every_change_of_a_bundle_is_detected(keys: Path, bundle: dict[str, Any], change: str) -> None:
    forged = tampered(bundle, change)

    assert json.dumps(forged) != json.dumps(bundle)
    with pytest.raises(BadSignature):
        read_trusted(keys).verify(forged)


def test_a_bundle_of_an_untrusted_key_is_refused(keys: Path, bundle: dict[str, Any], tmp_path: Path) -> None:
    make_keys(tmp_path / "other")
    foreign = sign(TASKS, read_private(tmp_path / "other"))

    for trusted in (read_trusted(keys), TrustedKeys({}), read_trusted(None)):
        with pytest.raises(NotSigned, match=foreign["key"]):
            trusted.verify(foreign)
    # The name of a trusted key does not help without the key itself.
    with pytest.raises(BadSignature):
        read_trusted(keys).verify({**foreign, "key": bundle["key"]})


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"format": "env-gateway-tasks/2"}, "format"),
        ({"tasks": {}}, "tasks"),
        ({"key": 3}, "key"),
        ({"signature": "not base64!"}, "signature"),
        ({"signature": None}, "signature"),
        ({"more": 1}, "more"),
    ],
)
def test_an_invalid_bundle_is_refused_with_the_path_of_the_problem(
    keys: Path, bundle: dict[str, Any], change: dict[str, Any], path: str
) -> None:
    with pytest.raises(TaskInvalid) as refusal:
        read_trusted(keys).verify({**bundle, **change})

    assert [where for where, _ in refusal.value.problems] == [path]


def test_only_a_bundle_is_recognized_as_a_bundle(bundle: dict[str, Any]) -> None:
    assert is_bundle(bundle)
    for less in ({"format", "key"}, {"signature"}, {"tasks"}):
        assert is_bundle({key: value for key, value in bundle.items() if key not in less})
    others: list[object] = [{"id": "a", "signature": "Mozart"}, {"tasks": []}, [], None, "tasks signature"]
    for other in others:
        assert not is_bundle(other)


def test_a_value_that_json_cannot_encode_cannot_be_signed(keys: Path) -> None:
    for value in (float("nan"), "\ud800", object()):
        with pytest.raises(TaskInvalid):
            sign([{"a": value}], read_private(keys / "lab"))


def test_a_private_key_is_readable_only_by_its_owner_and_no_file_is_overwritten(keys: Path) -> None:
    assert stat.S_IMODE((keys / "lab").stat().st_mode) == 0o600
    before = (keys / "lab").read_bytes()

    with pytest.raises(ConfigError, match="lab: File exists"):
        make_keys(keys / "lab")
    (keys / "half.pub").write_text("here")
    with pytest.raises(ConfigError, match=r"half\.pub: File exists"):
        make_keys(keys / "half")

    assert (keys / "lab").read_bytes() == before
    assert not (keys / "half").exists()


def test_files_that_are_not_keys_are_refused(keys: Path, tmp_path: Path) -> None:
    (tmp_path / "text.pub").write_text("not a key")
    other = generate_private_key(SECP256R1())
    (tmp_path / "curve").write_bytes(
        other.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    (tmp_path / "curve.pub").write_bytes(
        other.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )

    for path in (tmp_path / "text.pub", tmp_path / "curve.pub", tmp_path / "none.pub", keys / "lab", tmp_path):
        with pytest.raises(ConfigError):
            read_trusted(path)
    for path in (tmp_path / "text.pub", tmp_path / "curve", keys / "lab.pub", tmp_path / "none"):
        with pytest.raises(ConfigError):
            read_private(path)
