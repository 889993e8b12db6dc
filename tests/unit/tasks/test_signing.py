"""Signed bundles of tasks: a valid signature is verified, and every change is detected."""

from __future__ import annotations

import base64
import copy
import json
import stat
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

from gateway.core.errors import ConfigError, TaskInvalid
from gateway.core.ports.tasks import BundleRefused
from gateway.tasks.bundles import CLOCKS, VALID, Bundle, is_bundle, read_bundle, time_text
from gateway.tasks.documents import read_json
from gateway.tasks.signing import (
    BadSignature,
    NotSigned,
    TrustedKeys,
    make_keys,
    read_private,
    read_trusted,
    sign,
)

MADE_AT = datetime(2026, 11, 1, 10, tzinfo=UTC)

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
    key = read_private(keys / "lab")
    return sign(TASKS, key, made_at=MADE_AT, instance="lab-1", environment="math", split="train")


def test_a_signed_bundle_is_verified_with_all_its_members(keys: Path, bundle: dict[str, Any]) -> None:
    for trusted in (read_trusted(keys), read_trusted(keys / "lab.pub")):
        found = trusted.verify(bundle)

        assert (found.tasks, found.key) == (TASKS, bundle["key"])
        assert (found.made_at, found.expires) == ("2026-11-01T10:00:00.000000Z", "2026-12-01T10:00:00.000000Z")
        assert (found.instance, found.environment, found.split) == ("lab-1", "math", "train")


def test_a_bundle_names_no_instance_environment_and_split_unless_its_signer_does(keys: Path) -> None:
    before = datetime.now(UTC)

    found = read_trusted(keys).verify(sign(TASKS, read_private(keys / "lab"), valid=timedelta(days=1)))

    assert (found.instance, found.environment, found.split) == ("", "", "")
    assert before <= datetime.fromisoformat(found.made_at) <= datetime.now(UTC)
    assert datetime.fromisoformat(found.expires) - datetime.fromisoformat(found.made_at) == timedelta(days=1)


def test_a_bundle_may_be_rewritten_as_equal_json(keys: Path, bundle: dict[str, Any]) -> None:
    rewritten = json.loads(json.dumps(dict(reversed(bundle.items())), indent=7, ensure_ascii=True, sort_keys=True))

    assert read_trusted(keys).verify(rewritten).tasks == TASKS


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
        case "made_at":
            forged["made_at"] = forged["made_at"].replace("2026-11-01", "2026-11-02")
        case "expires":
            forged["expires"] = forged["expires"].replace("2026", "2036")
        case "no instance" | "no environment" | "no split":
            forged[change.removeprefix("no ")] = ""
        case "another instance" | "another environment" | "another split":
            forged[change.removeprefix("another ")] = "other"
        case "exchanged names":
            forged["environment"], forged["split"] = forged["split"], forged["environment"]
        case "exchanged times":
            forged["made_at"], forged["expires"] = forged["expires"], forged["made_at"]
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
OF_MEMBERS = [
    "made_at",
    "expires",
    *(f"{how} {member}" for how in ("no", "another") for member in ("instance", "environment", "split")),
    "exchanged names",
    "exchanged times",
]
OF_SIGNATURES = ["a signature", "half a signature", "no signature"]


@pytest.mark.parametrize("change", [*CHANGES, *OF_MEMBERS, *OF_SIGNATURES])
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
        ({"format": "env-gateway-tasks/3"}, "format"),
        ({"made_at": 1793527200}, "made_at"),
        ({"made_at": "2026-11-01"}, "made_at"),
        ({"made_at": "2026-11-01T10:00:00Z"}, "made_at"),
        ({"made_at": "2026-11-01T10:00:00.000000+00:00"}, "made_at"),
        ({"made_at": "2026-02-30T10:00:00.000000Z"}, "made_at"),
        ({"made_at": "٢026-11-01T10:00:00.000000Z"}, "made_at"),
        ({"expires": "2026-11-01T24:00:00.000000Z"}, "expires"),
        ({"expires": None}, "expires"),
        ({"instance": None}, "instance"),
        ({"environment": "a b"}, "environment"),
        ({"split": "../a"}, "split"),
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


@pytest.mark.parametrize("missing", ["made_at", "expires", "instance", "environment", "split"])
def test_every_member_is_required(keys: Path, bundle: dict[str, Any], missing: str) -> None:
    with pytest.raises(TaskInvalid, match=f"{missing}: it is required"):
        read_trusted(keys).verify({name: value for name, value in bundle.items() if name != missing})


def test_a_bundle_of_the_format_without_dates_is_refused_with_the_remedy(keys: Path, bundle: dict[str, Any]) -> None:
    old = {name: bundle[name] for name in ("tasks", "key", "signature")} | {"format": "env-gateway-tasks/1"}

    assert is_bundle(old)
    with pytest.raises(
        TaskInvalid, match=r"'env-gateway-tasks/1'.*sign the tasks again with gateway tasks sign"
    ) as why:
        read_trusted(keys).verify(old)

    assert [where for where, _ in why.value.problems] == ["format"]


def test_keys_that_are_no_text_are_neither_signed_nor_verified(keys: Path) -> None:
    """YAML has such keys. JSON would write them like the text, so they would pass for what was signed."""
    signed = sign([{"config": {"1": "a"}}], read_private(keys / "lab"))

    for key in (1, 1.5, True, None):
        with pytest.raises(TaskInvalid, match="is not a text"):
            sign([{"config": [{key: "a"}]}], read_private(keys / "lab"))
    with pytest.raises(TaskInvalid, match="the key 1 is not a text"):
        read_trusted(keys).verify({**signed, "tasks": [{"config": {1: "a"}}]})


@pytest.mark.parametrize("member", ["format", "tasks", "key", "made_at", "signature", "more"])
def test_values_as_deep_as_the_parser_allows_are_refused_like_others(
    keys: Path, bundle: dict[str, Any], member: str
) -> None:
    """There is not always room left on the stack to encode or to print them."""
    trusted = read_trusted(keys)
    for depth in range(sys.getrecursionlimit() - 100, sys.getrecursionlimit(), 3):
        deep = f"{'[' * depth}{']' * depth}"
        try:
            document = read_json(json.dumps({**bundle, member: "DEEP"}).replace('"DEEP"', deep).encode())
        except TaskInvalid:
            continue

        assert is_bundle(document)
        with pytest.raises((TaskInvalid, BadSignature)):
            trusted.verify(document)


# -- time and place -----------------------------------------------------------------------------------------------


def used(bundle: dict[str, Any], *, at: datetime = MADE_AT, instance: str = "lab-1") -> None:
    read_bundle(bundle).check_use(instance=instance, now=at)


SECOND = timedelta(seconds=1)


def test_a_bundle_is_accepted_until_it_expires(bundle: dict[str, Any]) -> None:
    for at in (MADE_AT - CLOCKS, MADE_AT, MADE_AT + VALID + CLOCKS):
        used(bundle, at=at)

    with pytest.raises(
        BundleRefused, match=r"expired at 2026-12-01T10:00:00\.000000Z.*the time here is 2026-12-01T10:05"
    ):
        used(bundle, at=MADE_AT + VALID + CLOCKS + SECOND)
    with pytest.raises(BundleRefused, match="expired at"):
        used(bundle, at=datetime.max.replace(tzinfo=UTC))


def test_a_bundle_from_the_future_is_refused(bundle: dict[str, Any]) -> None:
    with pytest.raises(BundleRefused, match=r"signed at 2026-11-01T10:00.*the time here is 2026-11-01T09:54.*clocks"):
        used(bundle, at=MADE_AT - CLOCKS - SECOND)
    eternal = {**bundle, "expires": "9999-12-31T23:59:59.999999Z"}
    used(eternal)


def test_a_bundle_is_for_the_instance_that_it_names_or_for_all(bundle: dict[str, Any]) -> None:
    used({**bundle, "instance": ""}, instance="another")

    with pytest.raises(BundleRefused, match=r"'lab-1'.*'lab-2'.*--instance lab-2"):
        used(bundle, instance="lab-2")


def test_a_stamp_differs_for_each_change_of_the_content(bundle: dict[str, Any]) -> None:
    digests = {read_bundle(tampered(bundle, change)).stamp("math").digest for change in [*CHANGES, *OF_MEMBERS]}

    assert len(digests) == len(CHANGES) + len(OF_MEMBERS)
    assert read_bundle(bundle).stamp("math").digest not in digests


def test_the_texts_of_times_have_the_order_of_the_times() -> None:
    times = [
        MADE_AT.replace(year=7),
        MADE_AT - SECOND,
        MADE_AT - timedelta(microseconds=1),
        MADE_AT,
        MADE_AT + timedelta(hours=14),
        MADE_AT + VALID,
        datetime.max.replace(tzinfo=UTC),
    ]
    texts = [time_text(at) for at in times]

    assert texts == sorted(texts)
    assert [datetime.fromisoformat(text) for text in texts] == times
    assert time_text(MADE_AT.astimezone()) == time_text(MADE_AT)
    assert all(Bundle.model_validate({**EMPTY, "made_at": text}).made_at == text for text in texts)


EMPTY = {
    "format": "env-gateway-tasks/2",
    "tasks": [],
    "key": "",
    "made_at": time_text(MADE_AT),
    "expires": time_text(MADE_AT),
    "instance": "",
    "environment": "",
    "split": "",
    "signature": "",
}


# -- forms and keys -----------------------------------------------------------------------------------------------


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
