"""TLS between roles, configured by Ray's environment variables, so that one switch covers Ray's traffic and ours.

Both ends of a connection show certificates.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from alignedserve.errors import ConfigError

SWITCH = "RAY_USE_TLS"
CERTIFICATE, KEY, AUTHORITY = "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM contents: this node's certificate and its key, and the authority that signed every node's certificate."""

    certificate: bytes
    key: bytes = field(repr=False)
    authority: bytes

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials of a server that accepts only clients with a certificate signed by the authority."""
        return grpc.ssl_server_credentials(
            [(self.key, self.certificate)], root_certificates=self.authority, require_client_auth=True
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a client that trusts only this authority. A server's certificate must name its address."""
        return grpc.ssl_channel_credentials(
            root_certificates=self.authority, private_key=self.key, certificate_chain=self.certificate
        )


def tls_files() -> TlsFiles | None:
    """Reads the files that the environment names; None if TLS is off.

    Raises ConfigError, which names the variable and the file, if a file is missing, cannot be read, or is invalid.
    """
    if os.environ.get(SWITCH, "0").lower() not in ("1", "true"):  # as Ray reads it
        return None
    paths = {name: os.environ.get(name, "") for name in (CERTIFICATE, KEY, AUTHORITY)}
    if unset := [name for name, path in paths.items() if not path]:
        are = "is" if len(unset) == 1 else "are"
        raise ConfigError(f"{SWITCH} is on, but {' and '.join(unset)} {are} not set: each names a PEM file")
    contents = {name: _read(name, path) for name, path in paths.items()}
    _check(paths)
    return TlsFiles(contents[CERTIFICATE], contents[KEY], contents[AUTHORITY])


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}={path} cannot be read: {error.strerror}") from error


def _check(paths: dict[str, str]) -> None:
    """Raises ConfigError for invalid files: gRPC accepts any bytes, and then refuses every call without a reason."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(paths[CERTIFICATE], paths[KEY], password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"{CERTIFICATE}={paths[CERTIFICATE]} and {KEY}={paths[KEY]} are not a PEM certificate and its key, without "
            f"a password: {error}"
        ) from error
    try:
        context.load_verify_locations(paths[AUTHORITY])
    except ssl.SSLError as error:
        raise ConfigError(f"{AUTHORITY}={paths[AUTHORITY]} holds no PEM certificate: {error}") from error


def _no_password() -> str:
    raise ValueError("the key is encrypted")
