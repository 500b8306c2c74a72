"""A certificate authority for tests."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from alignedserve.control.tls import AUTHORITY, CERTIFICATE, KEY, SWITCH

_LIFE = timedelta(days=1)


class Authority:
    """Signs certificates in `folder`; its own certificate is `ca.pem`. It does not trust those of another authority."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        own = _begun(self._name, self._name, self._key.public_key())
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.file = folder / "ca.pem"
        self.file.write_bytes(_pem(own.sign(self._key, hashes.SHA256())))

    def environment(self, name: str, addresses: Sequence[str] = ("127.0.0.1",)) -> dict[str, str]:
        """The environment of a node whose certificate has these addresses or DNS names."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([_alternative(address) for address in addresses])
        certificate = _begun(_named(name), self._name, key.public_key()).add_extension(names, critical=False)
        files = {CERTIFICATE: self._folder / f"{name}.pem", KEY: self._folder / f"{name}.key", AUTHORITY: self.file}
        files[CERTIFICATE].write_bytes(_pem(certificate.sign(self._key, hashes.SHA256())))
        files[KEY].touch(mode=0o600)
        files[KEY].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return {SWITCH: "1", **{variable: str(file) for variable, file in files.items()}}

    def pair(self, name: str, addresses: Sequence[str] = ("127.0.0.1",)) -> tuple[bytes, bytes]:
        """The key and certificate, as PEM, of a server with these addresses or DNS names."""
        files = self.environment(name, addresses)
        return Path(files[KEY]).read_bytes(), Path(files[CERTIFICATE]).read_bytes()


def _alternative(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _begun(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - _LIFE).not_valid_after(now + _LIFE)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
