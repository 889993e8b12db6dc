"""Certificates of a cluster: valid certificates, and certificates that the gateway and the nodes must refuse."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gateway.node.tls import make_certificates

CLIENT, SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH
PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey
DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Files:
    """The files that `gateway.node.tls` takes."""

    ca: Path
    cert: Path
    key: Path


def cluster(directory: Path) -> tuple[Files, Files]:
    """Make a new cluster in *directory*, and return the files of a gateway and of a node."""
    make_certificates(directory, days=1)
    return of(directory, "gateway"), of(directory, "node")


def of(directory: Path, part: str) -> Files:
    return Files(directory / "ca.pem", directory / f"{part}.pem", directory / f"{part}-key.pem")


def signed(
    directory: Path,
    *,
    name: str,
    usages: Sequence[x509.ObjectIdentifier],
    ends: datetime.timedelta = DAY,
    begins: datetime.timedelta = -2 * DAY,
    key: PrivateKey | None = None,
) -> Files:
    """Make a further certificate, signed by the CA in *directory*. Its dates are relative to now."""
    authority = x509.load_pem_x509_certificate((directory / "ca.pem").read_bytes())
    authority_key = serialization.load_pem_private_key((directory / "ca-key.pem").read_bytes(), password=None)
    key, now = key or ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begins)
        .not_valid_after(now + ends)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(list(usages)), critical=False)
        .sign(cast(ec.EllipticCurvePrivateKey, authority_key), hashes.SHA256())
    )
    files = Files(directory / "ca.pem", directory / "further.pem", directory / "further-key.pem")
    files.cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return files


def expired_authority(path: Path, *, key: Path | None = None) -> Path:
    """Write the certificate of a CA that expired yesterday to *path*. The CA has *key*, or else a new key."""
    loaded = serialization.load_pem_private_key(key.read_bytes(), password=None) if key is not None else None
    private = cast(ec.EllipticCurvePrivateKey, loaded or ec.generate_private_key(ec.SECP256R1()))
    now = datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "env-gateway cluster CA")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 2 * DAY)
        .not_valid_after(now - DAY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(private, hashes.SHA256())
    )
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return path
