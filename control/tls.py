"""TLS between roles, by Ray's own variables: one switch for its traffic and for ours; both ends show certificates."""

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
    """PEM: this node's certificate and its key, and the authority that signed the certificate of every node."""

    certificate: bytes
    key: bytes = field(repr=False)
    authority: bytes

    def server_credentials(self) -> grpc.ServerCredentials:
        """Of a server that talks to nobody whose certificate the authority has not signed."""
        return grpc.ssl_server_credentials(
            [(self.key, self.certificate)], root_certificates=self.authority, require_client_auth=True
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Of a client that trusts no other authority; the certificate must name the address that it calls."""
        return grpc.ssl_channel_credentials(
            root_certificates=self.authority, private_key=self.key, certificate_chain=self.certificate
        )


def tls_files() -> TlsFiles | None:
    """What the environment names, read anew; None where TLS is off.

    Raises ConfigError that names the variable and the file where one is missing, cannot be read, or is no such thing.
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
    """gRPC takes any bytes, and then refuses every call without a reason."""
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
