"""Proves to a node that another node of the cluster has an image, although a gateway carries the image.

A node signs the image's name and id with the key of its certificate when it sends the image. The node that receives the
image checks this *voucher*. So an image spreads only from an engine on which an operator put it: a gateway cannot sign,
and through the engine gate it can neither build, tag nor load an image.

A voucher is valid for some minutes. Otherwise a gateway that was taken over could later bring back an image that the
operator has removed.
"""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any, Final, Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from pydantic import BaseModel, ConfigDict, ValidationError

from gateway.core.errors import ConfigError
from gateway.node.tls import NODE_NAME, certificates, check_dates, check_part, issued, private_key

FORMAT: Final = "env-gateway-image/1"
VALID_S: Final = 300.0
"""Maximum seconds between a voucher's time and its check, in both directions, because machines' clocks differ."""
MAX_BYTES: Final = 8192
_HASH: Final = hashes.SHA256()


class BadVoucher(Exception):
    """The voucher does not prove that a node has the image. The message has the reason."""


class _Voucher(BaseModel):
    """The unverified members of a voucher."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    format: Literal["env-gateway-image/1"]
    reference: str
    id: str
    at: float
    certificate: str
    signature: str

    def signed(self) -> bytes:
        """Return the signed content. The format's name separates it from all else that this key signs."""
        content = {"reference": self.reference, "id": self.id, "at": self.at}
        return f"{self.format}\n{json.dumps(content, sort_keys=True)}".encode()


class Vouchers:
    """Issues vouchers as one node, and checks those of all nodes of the cluster."""

    def __init__(self, ca: Path, cert: Path, key: Path) -> None:
        """Read the node's files. Raises ``ConfigError``."""
        self._authorities = certificates(ca)
        self._certificate = base64.b64encode(certificates(cert)[0].public_bytes(serialization.Encoding.DER)).decode()
        self._key = private_key(key)
        _sign(self._key, b"")  # an unsupported kind of key fails here and not in a request

    def issue(self, reference: str, id: str) -> str:
        """Return a voucher, one line of ASCII, for image *id* under the name *reference*, which this node has."""
        made = _Voucher(
            format=FORMAT, reference=reference, id=id, at=time.time(), certificate=self._certificate, signature=""
        )
        made.signature = base64.b64encode(_sign(self._key, made.signed())).decode()
        return base64.b64encode(made.model_dump_json().encode()).decode()

    def check(self, text: str, *, reference: str, id: str) -> None:
        """Raise ``BadVoucher`` unless a node has issued *text* for this image, just now."""
        given, certificate, signature = _read(text)
        if (given.reference, given.id) != (reference, id):
            raise BadVoucher(f"it is for {given.reference:.200} as {given.id:.100}")
        if abs(time.time() - given.at) > VALID_S:
            raise BadVoucher(
                f"it was issued at Unix time {given.at:.0f}, and is valid for {VALID_S:g} s: see the clocks"
            )
        self._check_issuer(certificate)
        try:
            _verify(certificate, signature, given.signed())
        except (InvalidSignature, UnsupportedAlgorithm, ValueError) as error:
            raise BadVoucher("its signature is wrong") from error

    def _check_issuer(self, certificate: x509.Certificate) -> None:
        where = "its certificate"
        try:
            # First, so that no other content of a certificate that a stranger made is read. Only by the CAs themselves:
            # a gateway's certificate in between is not a CA, and would sign anything.
            issuers = [issuer for issuer in self._authorities if issued(issuer, certificate)]
            if not issuers:
                raise BadVoucher("no CA of this node signed its certificate")
            check_part(where, certificate, NODE_NAME)
            check_dates(where, certificate)
            check_dates("its CA", max(issuers, key=lambda issuer: issuer.not_valid_after_utc))
        except (ConfigError, ValueError, UnsupportedAlgorithm) as error:
            raise BadVoucher(str(error)) from error


def _read(text: str) -> tuple[_Voucher, x509.Certificate, bytes]:
    if not text:
        raise BadVoucher("it is missing: is the node that has the image, or the gateway, of an older version?")
    if len(text) > MAX_BYTES:
        raise BadVoucher(f"it has more than {MAX_BYTES} bytes")
    try:
        given = _Voucher.model_validate_json(base64.b64decode(text, validate=True))
        certificate = x509.load_der_x509_certificate(base64.b64decode(given.certificate, validate=True))
        return given, certificate, base64.b64decode(given.signature, validate=True)
    except (ValidationError, ValueError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise BadVoucher("it cannot be read") from error


def _sign(key: Any, content: bytes) -> bytes:
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(content, ec.ECDSA(_HASH))
    if isinstance(key, rsa.RSAPrivateKey):
        return key.sign(content, padding.PKCS1v15(), _HASH)
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key.sign(content)
    raise ConfigError(f"a node's key must be EC, RSA or Ed25519, and not {type(key).__name__}")


def _verify(certificate: x509.Certificate, signature: bytes, content: bytes) -> None:
    key = certificate.public_key()
    if isinstance(key, ec.EllipticCurvePublicKey):
        key.verify(signature, content, ec.ECDSA(_HASH))
    elif isinstance(key, rsa.RSAPublicKey):
        key.verify(signature, content, padding.PKCS1v15(), _HASH)
    elif isinstance(key, ed25519.Ed25519PublicKey):
        key.verify(signature, content)
    else:
        raise InvalidSignature
