"""The certificates of one cluster: an authority of its own, and one certificate for each process.

Keys are P-256 (BoringSSL, which gRPC carries, refuses Ed25519 certificates). A certificate serves and calls, is valid
from a day before it was made (clocks may differ), and names its holder as `spiffe://phalanx/<name>`.
Whatever exists and still fits is kept, so that a start which was killed half-way is simply repeated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from phalanx.core.errors import PhalanxError
from phalanx.core.files import SECRET, write_atomically
from phalanx.rpc.files import read_bytes

BACKDATED = timedelta(days=1)
CA_VALIDITY, VALIDITY, RENEWED_BEFORE = timedelta(days=3650), timedelta(days=825), timedelta(days=30)
TRUST_DOMAIN = "spiffe://phalanx/"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Where the certificate of one holder lies: its own, its key (0600), and that of the authority."""

    ca: Path
    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class CertificateAuthority:
    """An authority in a folder: `ca.crt` and `ca.key`; made by `open_authority`."""

    folder: Path
    cert: x509.Certificate
    _key: ec.EllipticCurvePrivateKey

    def __repr__(self) -> str:
        return f"CertificateAuthority({str(self.folder)!r})"

    def issue(self, name: str, hosts: tuple[str, ...] = (), validity: timedelta = VALIDITY) -> CertificateFiles:
        """`<name>.crt` and `<name>.key` for spiffe://phalanx/<name>, localhost, 127.0.0.1 and `hosts`.

        Those that lie there are kept when this authority signed them for the same hosts and they last another 30 days.
        """
        if not _NAME.fullmatch(name):
            raise PhalanxError(
                "certificate name",
                value=name,
                expected="letters, digits, '.', '_' and '-'",
                remedy="choose another name",
            )
        files = CertificateFiles(self.folder / "ca.crt", self.folder / f"{name}.crt", self.folder / f"{name}.key")
        names = _alternative_names(name, hosts)
        if not self._fits(files, names, validity):
            key = ec.generate_private_key(ec.SECP256R1())
            cert = self._sign(name, key.public_key(), names, validity)
            write_atomically(files.key, _pem(key), SECRET)
            write_atomically(files.cert, cert.public_bytes(serialization.Encoding.PEM))
        return files

    def _sign(
        self, name: str, key: ec.EllipticCurvePublicKey, names: x509.SubjectAlternativeName, validity: timedelta
    ) -> x509.Certificate:
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        return (
            _builder(name, self.cert.subject, key, validity)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(names, critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def _fits(self, files: CertificateFiles, names: x509.SubjectAlternativeName, validity: timedelta) -> bool:
        if not files.cert.exists() or not files.key.exists():
            return False
        cert, key = read_certificate(files.cert), _read_key(files.key)
        held = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        lasts = cert.not_valid_after_utc - datetime.now(UTC) > min(RENEWED_BEFORE, validity / 2)
        return lasts and held == names and is_issued_by(cert, self.cert) and cert.public_key() == key.public_key()


def open_authority(folder: Path) -> CertificateAuthority:
    """The authority of the folder, made if it is not there yet."""
    cert_path, key_path = folder / "ca.crt", folder / "ca.key"
    if not key_path.exists():
        write_atomically(key_path, _pem(ec.generate_private_key(ec.SECP256R1())), SECRET)
    key = _read_key(key_path)
    if not cert_path.exists() or read_certificate(cert_path).public_key() != key.public_key():
        write_atomically(cert_path, _self_signed(key).public_bytes(serialization.Encoding.PEM))
    return CertificateAuthority(folder, read_certificate(cert_path), key)


def read_certificate(path: Path) -> x509.Certificate:
    """The first certificate in the PEM file; raises PhalanxError when there is none."""
    data = read_bytes(path, "a certificate", "check the path, or run `phalanx up`, which makes it")
    try:
        return x509.load_pem_x509_certificate(data)
    except ValueError:
        raise PhalanxError(
            str(path), expected="a certificate in PEM form", remedy="remove the file and run `phalanx up`"
        ) from None


def check_pair(cert: Path, key: Path, what: str, remedy: str) -> None:
    """Raises PhalanxError, which names the file, when `key` is no private key or not the one of the certificate.
    what: whose key it is.
    """
    data = read_bytes(key, what, remedy)
    try:
        private = serialization.load_pem_private_key(data, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise PhalanxError(str(key), expected=f"{what}: a private key in PEM form", remedy=remedy) from None
    if private.public_key() != read_certificate(cert).public_key():
        raise PhalanxError(str(key), expected=f"{what} that belongs to {cert}", remedy=remedy)


def is_issued_by(cert: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether the authority's key signed the certificate."""
    try:
        cert.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _self_signed(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "phalanx authority")])
    return (
        _builder("phalanx authority", name, key.public_key(), CA_VALIDITY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )


def _builder(
    name: str, issuer: x509.Name, key: ec.EllipticCurvePublicKey, validity: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + validity)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative_names(name: str, hosts: tuple[str, ...]) -> x509.SubjectAlternativeName:
    every = dict.fromkeys(("localhost", "127.0.0.1", *hosts))
    return x509.SubjectAlternativeName(
        [*map(_general_name, every), x509.UniformResourceIdentifier(TRUST_DOMAIN + name)]
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise PhalanxError(
            "host in a certificate",
            value=host,
            expected="an IP address, or a host name in ASCII",
            remedy="write the name as the DNS knows it (`xn--...`)",
        ) from None


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    data = read_bytes(path, "a private key", "check the path and its permissions")
    try:
        key = serialization.load_pem_private_key(data, None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise PhalanxError(
            str(path), expected="a P-256 key in PEM form", remedy="remove the file and run `phalanx up`"
        ) from None
    return key
