"""Vouchers for images: a node of the cluster issues them, and a node accepts no other."""

from __future__ import annotations

import base64
import contextlib
import json
import time
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa, x25519
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import ConfigError
from gateway.node.tls import GATEWAY_NAME, NODE_NAME
from gateway.node.vouchers import MAX_BYTES, VALID_S, BadVoucher, Vouchers, _sign
from tests.fakes.certificates import CLIENT, DAY, SERVER, cluster, expired_authority, signed
from tests.fuzzing import fuzzed

REFERENCE, ID = "env-gateway/os", f"sha256:{'a' * 64}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def node(folder: Path) -> Vouchers:
    _, own = cluster(folder)
    return Vouchers(*astuple(own))


def refused(node: Vouchers, voucher: str, why: str, *, reference: str = REFERENCE, id: str = ID) -> None:
    with pytest.raises(BadVoucher, match=why):
        node.check(voucher, reference=reference, id=id)


def changed(voucher: str, **changes: Any) -> str:
    return base64.b64encode(json.dumps(json.loads(base64.b64decode(voucher)) | changes).encode()).decode()


def test_a_voucher_holds_for_its_image_and_for_no_other(node: Vouchers) -> None:
    voucher = node.issue(REFERENCE, ID)

    node.check(voucher, reference=REFERENCE, id=ID)
    assert voucher.isascii()
    assert voucher.isprintable()
    refused(node, voucher, "it is for", id=ID.replace("a", "b"))
    refused(node, voucher, "it is for", reference="env-gateway/math")


@pytest.mark.parametrize(
    "changes",
    [{"id": f"sha256:{'b' * 64}"}, {"reference": "env-gateway/math"}, {"at": None}, {"signature": ""}],
    ids=["another image", "another name", "another time", "no signature"],
)
def test_a_changed_voucher_is_refused(node: Vouchers, changes: dict[str, Any]) -> None:
    voucher = node.issue(REFERENCE, ID)
    if "at" in changes:
        changes = {"at": json.loads(base64.b64decode(voucher))["at"] + 1}

    named = {"reference": changes.get("reference", REFERENCE), "id": changes.get("id", ID)}
    refused(node, changed(voucher, **changes), "signature is wrong", **named)


def test_a_missing_voucher_and_a_padded_one_are_refused_by_their_reasons(node: Vouchers) -> None:
    padded = base64.b64encode(base64.b64decode(node.issue(REFERENCE, ID)) + b" " * MAX_BYTES).decode()

    refused(node, "", "it is missing")
    refused(node, padded, f"it has more than {MAX_BYTES} bytes")


@pytest.mark.parametrize("late_s", [VALID_S + 5, -VALID_S - 5])
def test_an_old_voucher_and_one_of_the_future_are_refused(
    node: Vouchers, late_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    voucher = node.issue(REFERENCE, ID)
    now = time.time()

    monkeypatch.setattr(time, "time", lambda: now + late_s)

    refused(node, voucher, "is valid for 300 s")


@pytest.mark.parametrize(
    ("name", "usages", "ends", "why"),
    [
        pytest.param(GATEWAY_NAME, [CLIENT], DAY, f"not for {NODE_NAME}", id="a gateway's"),
        pytest.param(GATEWAY_NAME, [CLIENT, SERVER], DAY, f"not for {NODE_NAME}", id="a gateway's for servers too"),
        pytest.param(NODE_NAME, [CLIENT], DAY, "serverAuth", id="a node's for clients"),
        pytest.param(NODE_NAME, [SERVER], -DAY, "expired", id="an expired one"),
    ],
)
def test_a_voucher_with_another_kind_of_certificate_is_refused(
    folder: Path, node: Vouchers, name: str, usages: list[Any], ends: Any, why: str
) -> None:
    files = signed(folder, name=name, usages=usages, ends=ends)

    refused(node, Vouchers(*astuple(files)).issue(REFERENCE, ID), why)


def test_a_voucher_of_another_cluster_is_refused(node: Vouchers, tmp_path: Path) -> None:
    _, strangers = cluster(tmp_path)

    refused(node, Vouchers(*astuple(strangers)).issue(REFERENCE, ID), "no CA of this node signed")


def test_a_certificate_that_a_gateway_signed_as_if_it_were_a_ca_is_refused(folder: Path, tmp_path: Path) -> None:
    for name in ("ca", "gateway", "node"):
        for suffix in (".pem", "-key.pem"):
            (tmp_path / f"{name}{suffix}").write_bytes((folder / f"{name}{suffix}").read_bytes())
    node = Vouchers(tmp_path / "ca.pem", tmp_path / "node.pem", tmp_path / "node-key.pem")
    (tmp_path / "forged").mkdir()
    for suffix in (".pem", "-key.pem"):
        (tmp_path / "forged" / f"ca{suffix}").write_bytes((tmp_path / f"gateway{suffix}").read_bytes())
    forged = signed(tmp_path / "forged", name=NODE_NAME, usages=[SERVER])

    refused(node, Vouchers(*astuple(forged)).issue(REFERENCE, ID), "no CA of this node signed")


def test_a_voucher_of_an_expired_ca_is_refused(folder: Path, node: Vouchers, tmp_path: Path) -> None:
    voucher = node.issue(REFERENCE, ID)
    old = expired_authority(tmp_path / "ca.pem", key=folder / "ca-key.pem")

    refused(Vouchers(old, folder / "node.pem", folder / "node-key.pem"), voucher, "its CA expired")


@pytest.mark.parametrize(
    "voucher",
    [
        "",
        "x",
        "AAAA",
        "e30=",
        "\u00e9",
        "A" * 9000,
        base64.b64encode(b"[]").decode(),
        base64.b64encode(b"\xff").decode(),
    ],
)
def test_a_text_that_is_no_voucher_is_refused(node: Vouchers, voucher: str) -> None:
    refused(node, voucher, "it is missing|cannot be read|more than")


@pytest.mark.filterwarnings("ignore:Parsed a serial number")  # of a changed certificate, whose signature is wrong
@fuzzed(300)
@given(
    name=st.sampled_from(["certificate", "signature"]),
    place=st.floats(0, 0.999),
    flipped=st.integers(1, 255),
    cut=st.sampled_from([0, 0, 1, 8]),
)
def test_no_changed_voucher_is_accepted(node: Vouchers, name: str, place: float, flipped: int, cut: int) -> None:
    members = json.loads(base64.b64decode(node.issue(REFERENCE, ID)))
    before = base64.b64decode(members[name])
    content = bytearray(before)
    content[int(place * len(content))] ^= flipped  # a part of the length: signatures differ in theirs
    after = bytes(content[: len(content) - cut])
    members[name] = base64.b64encode(after).decode()

    with contextlib.suppress(BadVoucher):
        node.check(base64.b64encode(json.dumps(members).encode()).decode(), reference=REFERENCE, id=ID)
        # What the CA signed is unchanged: a signature in a certificate may have several encodings.
        assert name == "certificate"
        assert content_of(after) == content_of(before)


def content_of(certificate: bytes) -> bytes:
    return x509.load_der_x509_certificate(certificate).tbs_certificate_bytes


def test_a_certificate_with_an_extension_twice_is_refused(node: Vouchers) -> None:
    members = json.loads(base64.b64decode(node.issue(REFERENCE, ID)))
    content = base64.b64decode(members["certificate"])
    usage, names = bytes.fromhex("551d25"), bytes.fromhex("551d11")  # the extensions' object identifiers
    assert usage in content
    doubled = base64.b64encode(content.replace(usage, names)).decode()

    refused(node, changed(node.issue(REFERENCE, ID), certificate=doubled), "no CA")


@pytest.mark.parametrize(
    "key", [rsa.generate_private_key(65537, 2048), ed25519.Ed25519PrivateKey.generate()], ids=["RSA", "Ed25519"]
)
def test_a_node_may_have_another_kind_of_key(folder: Path, tmp_path: Path, key: Any) -> None:
    files = signed(folder, name=NODE_NAME, usages=[SERVER], key=key)
    other = Vouchers(*astuple(files))

    other.check(other.issue(REFERENCE, ID), reference=REFERENCE, id=ID)


def test_a_key_that_cannot_sign_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="must be EC, RSA or Ed25519, and not X25519"):
        _sign(x25519.X25519PrivateKey.generate(), b"")
