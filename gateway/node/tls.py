"""Makes TLS contexts and certificates for the connections between the gateways and the nodes of a cluster.

Both sides show a certificate of one CA. Each side checks the other certificate's signature, dates, usage and name. A
node's certificate is for servers, and a gateway's is for clients. The names are the same on all machines, because
machines come and go, and gateways find them by address. So a certificate proves a role in the cluster. A holder of a
gateway's key can make every node create containers that the catalog allows.

A gateway gives `NODE_NAME` as the server's name. Python checks names for clients only, so each connection compares the
other name itself after the handshake.
"""

from __future__ import annotations

import datetime
import os
import ssl
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gateway.core.errors import ConfigError

NODE_NAME: Final = "node.env-gateway"
"""The name in a node's certificate. Clients give it as the server's name at every address."""
GATEWAY_NAME: Final = "gateway.env-gateway"
"""The name in a gateway's certificate."""
CA_FILE, GATEWAY_FILES, NODE_FILES = (
    ("ca.pem", "ca-key.pem"),
    ("gateway.pem", "gateway-key.pem"),
    ("node.pem", "node-key.pem"),
)
"""Names of the certificate and key files that `make_certificates` writes."""
CLOCKS_DIFFER: Final = datetime.timedelta(hours=1)
"""Time before its creation from which a certificate is valid, because machines' clocks differ."""
_CA_NAME: Final = "env-gateway cluster CA"
_FILE_MAX_BYTES: Final = 2**20
_USAGES = {
    NODE_NAME: (ExtendedKeyUsageOID.SERVER_AUTH, "serverAuth"),
    GATEWAY_NAME: (ExtendedKeyUsageOID.CLIENT_AUTH, "clientAuth"),
}
_Extensions = Sequence[tuple[x509.ExtensionType, bool]]
"""Certificate extensions, each with its critical flag."""


# -- contexts


def server_context(ca: Path, cert: Path, key: Path) -> ssl.SSLContext:
    """Make a node's context, which serves only clients with a gateway's certificate.

    Raises:
        ConfigError: A file is missing, invalid, expired, not valid yet, or does not match the other files.
    """
    return _context(ssl.PROTOCOL_TLS_SERVER, NODE_NAME, ca, cert, key)


def client_context(ca: Path, cert: Path, key: Path) -> ssl.SSLContext:
    """Make a gateway's context, which connects only to servers with a node's certificate, as `NODE_NAME`.

    Raises:
        ConfigError: See `server_context`.
    """
    return _context(ssl.PROTOCOL_TLS_CLIENT, GATEWAY_NAME, ca, cert, key)


def _context(protocol: int, name: str, ca: Path, cert: Path, key: Path) -> ssl.SSLContext:
    _check_files(name, ca, cert, key)
    context = ssl.SSLContext(protocol)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # no session resumption: each connection shows its certificate
    try:
        context.load_verify_locations(cafile=ca)
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{ca}, {cert}, {key}: {error.strerror or error}") from error
    context.sslobject_class = _Connection  # the class that event loops use; no code here wraps a plain socket
    return context


class _Connection(ssl.SSLObject):
    """A connection of either side, over an event loop."""

    def do_handshake(self) -> None:
        """Also check the peer's name, even if a library has switched off Python's own check."""
        super().do_handshake()
        _require(self.getpeercert(), GATEWAY_NAME if self.server_side else NODE_NAME)


def _require(certificate: Any, name: str) -> None:
    """Raise ``SSLCertVerificationError`` unless the verified *certificate* is for *name*."""
    names = (certificate or {}).get("subjectAltName", ())
    if ("DNS", name) not in names:
        shown = ", ".join(str(value) for _, value in names) or "no name"
        raise ssl.SSLCertVerificationError(f"the other side's certificate is for {shown:.200}, and not for {name}")


# -- checks of the files


def _check_files(name: str, ca: Path, cert: Path, key: Path) -> None:
    """Check the files and raise ``ConfigError`` with a clear reason, because OpenSSL's messages are hard to read."""
    authorities, chain = certificates(ca), certificates(cert)
    own = chain[0]
    if own.public_key() != private_key(key).public_key():
        raise ConfigError(f"{key} is not the key of the certificate {cert}")
    check_dates(cert, own)
    check_part(cert, own, name)
    # During the replacement of a CA its file holds both CAs, and the old CA may have expired.
    issuers = [issuer for issuer in (*authorities, *chain[1:]) if issued(issuer, own)]
    if not issuers:
        raise ConfigError(f"{cert} was not signed by the CA in {ca}")
    check_dates(ca, max(issuers, key=lambda issuer: issuer.not_valid_after_utc))


def check_dates(path: Path | str, certificate: x509.Certificate) -> None:
    """Raise ``ConfigError``, which names *path*, unless *certificate* is valid now."""
    now = datetime.datetime.now(datetime.UTC)
    if certificate.not_valid_after_utc < now:
        raise ConfigError(f"{path} expired at {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC")
    if certificate.not_valid_before_utc > now:
        raise ConfigError(f"{path} is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC")


def check_part(path: Path | str, certificate: x509.Certificate, name: str) -> None:
    """Raise ``ConfigError``, which names *path*, unless *certificate* is for *name* and its part of a connection."""
    try:
        extensions = certificate.extensions
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.DNSName)
        usages = list(extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError) as error:
        raise ConfigError(f"{path} does not say that it is for {name}: {error}") from error
    if name not in names:
        raise ConfigError(f"{path} is a certificate for {', '.join(names) or 'no name'}, and not for {name}")
    usage, shown = _USAGES[name]
    if usage not in usages:
        raise ConfigError(f"{path} lacks the extended key usage {shown}")


def issued(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    """Return True if *issuer* signed *certificate*. Not checked: whether it may sign certificates."""
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def certificates(path: Path) -> Sequence[x509.Certificate]:
    """Return the certificates in the file *path*. Raises ``ConfigError``."""
    try:
        return x509.load_pem_x509_certificates(_read(path))
    except ValueError as error:
        raise ConfigError(f"{path}: must be a certificate in PEM: {error}") from error


def private_key(path: Path) -> Any:
    """Return the private key in the file *path*. Raises ``ConfigError``."""
    try:
        return serialization.load_pem_private_key(_read(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError(f"{path}: must be a private key in PEM, without a password") from None


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_FILE_MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


# -- making certificates


def make_certificates(directory: Path, *, days: int) -> None:
    """Write a new CA, and certificates with keys for gateways and for nodes, into *directory* (created if needed).

    The files are ``ca.pem``, ``gateway.pem``, ``node.pem`` and, with mode 0600, ``ca-key.pem``, ``gateway-key.pem``,
    ``node-key.pem``. All certificates are valid for *days* days. Only further certificates need the CA's key, so it
    belongs on no machine.

    Raises:
        ConfigError: A file exists already, or can't be written. Then no new file is left behind.
    """
    files = _new_files(days)
    written: list[Path] = []
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        taken = [name for name in files if (directory / name).exists()]
        if taken:
            raise ConfigError(f"{directory} has {', '.join(taken)} already, and nothing is overwritten")
        for name, content in files.items():
            opener = partial(os.open, mode=0o600 if name.endswith("-key.pem") else 0o644)
            with open(directory / name, "xb", opener=opener) as file:
                written.append(directory / name)
                file.write(content)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise ConfigError(f"{error.filename or directory}: {error.strerror}") from error


def _new_files(days: int) -> dict[str, bytes]:
    begins = datetime.datetime.now(datetime.UTC) - CLOCKS_DIFFER
    try:
        ends = begins + CLOCKS_DIFFER + datetime.timedelta(days=days)
    except OverflowError as error:
        raise ConfigError(f"{days} days are too many for a certificate") from error
    authority_key = ec.generate_private_key(ec.SECP256R1())

    def signed(name: str, key: ec.EllipticCurvePrivateKey, extensions: _Extensions) -> tuple[bytes, bytes]:
        builder = (
            x509.CertificateBuilder()
            .subject_name(_common_name(name))
            .issuer_name(_common_name(_CA_NAME))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begins)
            .not_valid_after(ends)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        for extension, is_critical in extensions:
            builder = builder.add_extension(extension, critical=is_critical)
        pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        certificate = builder.sign(authority_key, hashes.SHA256()).public_bytes(pem)
        return certificate, key.private_bytes(pem, pkcs8, serialization.NoEncryption())

    authority: _Extensions = (
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (_key_usage(signs_certificates=True), True),
    )
    files = dict(zip(CA_FILE, signed(_CA_NAME, authority_key, authority), strict=True))
    for name, names in ((GATEWAY_NAME, GATEWAY_FILES), (NODE_NAME, NODE_FILES)):
        extensions: _Extensions = (
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_key_usage(signs_certificates=False), True),
            (x509.ExtendedKeyUsage([_USAGES[name][0]]), False),
            (x509.SubjectAlternativeName([x509.DNSName(name)]), False),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), False),
        )
        files |= zip(names, signed(name, ec.generate_private_key(ec.SECP256R1()), extensions), strict=True)
    return files


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
