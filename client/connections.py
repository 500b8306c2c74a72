"""A client's addresses, the order in which calls use them, and the channel to each."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from alignedserve.errors import ConfigError

DEFAULT_ADDRESS = "127.0.0.1:9000"
DEFAULT_CONNECT_TIMEOUT_S = 5.0
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_SHUNNED_S = 5.0
_OTHER_TARGET = re.compile(r"(unix|unix-abstract|ipv4|ipv6|vsock|xds):")  # gRPC's own target names, which gRPC parses
_HOST_AND_PORT = re.compile(r"(?:dns:(?://[^/]*/)?)?(?:\[[^\[\]\s]+\]|[^\[\]:/\s]+):([0-9]{1,5})")


def parse_addresses(address: str | Sequence[str]) -> tuple[str, ...]:
    """The addresses in order. Raises ConfigError if there are none, or if one is repeated or malformed."""
    found = (address,) if isinstance(address, str) else tuple(address)
    if not found or not all(isinstance(one, str) and one for one in found):
        raise ConfigError(f"address must be HOST:PORT of the gRPC port, or several of them, got {address!r}")
    for one in found:
        if "://" in one and one.split("://")[0] in ("http", "https", "grpc"):
            hint = "; tls=True speaks TLS" if one.startswith("https") else ""
            raise ConfigError(f"address must be HOST:PORT of the gRPC port, without a scheme: {one!r}{hint}")
        if not _OTHER_TARGET.match(one):
            parts = _HOST_AND_PORT.fullmatch(one)
            if parts is None or not 1 <= int(parts[1]) <= 65535:
                raise ConfigError(
                    f"address must be HOST:PORT with a port from 1 to 65535 (an IPv6 host in brackets), got {one!r}"
                )
    if len(set(found)) < len(found):
        raise ConfigError(f"each address may be given once, got {address!r}")
    return found


@dataclass(frozen=True, slots=True)
class Transport:
    """How channels are opened; see `Client` for the fields. Raises ConfigError for invalid values."""

    tls: bool | grpc.ChannelCredentials = False
    root_certificates: bytes | str | os.PathLike[str] | None = None
    server_name: str | None = None
    connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S
    keepalive_s: float | None = None

    def __post_init__(self) -> None:
        if not self.connect_timeout_s > 0:
            raise ConfigError(f"connect_timeout_s must be greater than 0, got {self.connect_timeout_s}")
        if self.keepalive_s is not None and not self.keepalive_s > 0:
            raise ConfigError(f"keepalive_s must be greater than 0, or None, got {self.keepalive_s}")
        if self.root_certificates is not None and isinstance(self.tls, grpc.ChannelCredentials):
            raise ConfigError("give either root_certificates or your own credentials as tls, not both")
        if self.server_name is not None and self.tls is False and self.root_certificates is None:
            raise ConfigError("server_name requires TLS: give tls=True or root_certificates, too")
        if self.root_certificates is not None and not isinstance(self.root_certificates, bytes):
            try:
                object.__setattr__(self, "root_certificates", Path(self.root_certificates).read_bytes())
            except OSError as error:
                raise ConfigError(f"root_certificates cannot be read: {error}") from error

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials for TLS; None without TLS."""
        if isinstance(self.tls, grpc.ChannelCredentials):
            return self.tls
        if self.root_certificates is None and not self.tls:
            return None
        roots = self.root_certificates
        assert roots is None or isinstance(roots, bytes), "the file has been read"
        return grpc.ssl_channel_credentials(roots)

    def options(self, address: str) -> list[tuple[str, Any]]:
        """gRPC channel arguments: unlimited messages, and a reconnect within two seconds after a server returns."""
        options: list[tuple[str, Any]] = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2000),
            ("grpc.min_reconnect_backoff_ms", _milliseconds(self.connect_timeout_s)),  # time limit of an attempt
        ]
        if address.rsplit(":", 1)[0] in _LOOPBACK:  # `http_proxy` in the environment does not apply to loopback
            options.append(("grpc.enable_http_proxy", 0))
        if self.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.server_name))
        if self.keepalive_s is not None:
            names = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
            options += [(name, _milliseconds(self.keepalive_s)) for name in names]
            options.append(("grpc.http2.max_pings_without_data", 0))  # a request may wait for a long time
        return options


def _milliseconds(seconds: float) -> int:
    return max(1, min(round(seconds * 1000), 2**31 - 1))


class Rotation:
    """Calls use the addresses in turn. An address that failed is skipped for a while. Threads may share it."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = tuple(addresses)
        self._turn = 0
        self._shunned_until_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def next(self, but: Container[str] = ()) -> str:
        """The next address that has not failed recently, or simply the next. Never one in `but`, which is not all."""
        now_s = time.monotonic()
        with self._lock:
            turns = [*self.addresses[self._turn :], *self.addresses[: self._turn]]
            order = [one for one in turns if one not in but]
            chosen = next((one for one in order if self._shunned_until_s.get(one, 0.0) <= now_s), order[0])
            self._turn = (self.addresses.index(chosen) + 1) % len(self.addresses)
            return chosen

    def failed(self, address: str) -> None:
        """Note that the address could not be reached, or that its server has ended."""
        with self._lock:
            self._shunned_until_s[address] = time.monotonic() + _SHUNNED_S

    def worked(self, address: str) -> None:
        """Note that a server answered there."""
        if self._shunned_until_s:
            with self._lock:
                self._shunned_until_s.pop(address, None)
