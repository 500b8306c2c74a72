"""API keys of the gateway, from a file with one key a line. It is read again when it changes.

No configuration, log or process argument contains a key. The gateway keeps only hashes, and compares them in constant
time.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from alignedserve.errors import AuthenticationError, ConfigError
from alignedserve.gateway.live.sessions import Sessions, cookie_of

logger = logging.getLogger(__name__)

RECHECK_S = 1.0
MAX_FILE_BYTES = 1 << 20
_OTHERS = stat.S_IRWXO

# Paths that are answered without a key. All others require a key if there is a key file, except Serve's own
# /-/healthz and /-/routes, which this application does not see.
OPEN_PATHS = frozenset({"/health", "/live", "/ping", "/metrics", "/openapi.json"})
_OWN = (b"same-origin", b"none")  # what `sec-fetch-site` says of a page's own requests, and of a typed address
_SIBLING = b"same-site"  # of another host or port of the site

Stamp = tuple[int, int, int, int]


class ApiKeys:
    """The API keys that clients may use. Without a file, no key is required.

    If the file becomes invalid, the last valid keys stay in force, so that a half-finished rotation does not lock
    clients out. Raises ConfigError if the file is invalid at the start.
    """

    def __init__(self, path: str = "", clock: Callable[[], float] = time.monotonic, secret: str = "") -> None:
        """`secret`: the cluster's, for sessions of browsers."""
        self._sessions = Sessions(secret)
        self._path = Path(path).expanduser() if path else None
        self._clock = clock
        self._checked_at = clock()
        self._hashes: list[bytes] = []
        self._stamp: Stamp | None = None
        if self._path is not None:
            self._stamp, keys = _read(self._path)
            self._hashes = [_hash(key) for key in keys]

    @property
    def cookie(self) -> str:
        """The name of a session's cookie."""
        return self._sessions.cookie

    @property
    def wanted(self) -> bool:
        """Whether a key is required."""
        return self._path is not None

    def check(self, offered: Iterable[bytes]) -> bytes:
        """The hash of the known key among `offered`; b"" if no key is required.

        Raises AuthenticationError if none of `offered` is a known key.
        """
        if self._path is None:
            return b""
        self._look_again(self._path)
        found = b""
        given = False
        for key in offered:
            given = True
            mine = _hash(key)
            for known in self._hashes:  # no early exit: the time must not show which key matched
                if hmac.compare_digest(mine, known):
                    found = mine
        if not found:
            what = "this API key is unknown" if given else "an API key is required"
            raise AuthenticationError(f"{what}: send a key as `Authorization: Bearer KEY`")
        return found

    def identify(self, headers: Iterable[tuple[bytes, bytes]], method: str) -> bytes:
        """Like `check`, for an HTTP request: without a key, a browser's session counts.

        A page of another host or port of the site may link here, but gets no data and changes nothing.
        """
        headers = list(headers)
        offered = of_headers(headers)
        if self._path is not None and not offered and (value := cookie_of(headers, self._sessions.cookie)):
            given = dict(headers)
            site = given.get(b"sec-fetch-site", b"none")
            follows_link = method == "GET" and given.get(b"sec-fetch-mode") == b"navigate"
            allowed = site in _OWN or (site == _SIBLING and follows_link)
            key_hash = self._sessions.key_hash(value) if allowed else None
            self._look_again(self._path)
            if key_hash is not None and key_hash in self._hashes:
                return key_hash
        return self.check(offered)

    def begin_session(self, key: str) -> str:
        """The value of a cookie for the holder of a key. Raises AuthenticationError if the key is not known."""
        return self._sessions.begin(self.check([key.encode("utf-8", "replace")]))

    def _look_again(self, path: Path) -> None:
        now = self._clock()
        if now - self._checked_at < RECHECK_S:
            return
        self._checked_at = now
        try:
            if _stamp(path.stat()) == self._stamp:
                return
            stamp, keys = _read(path)
        except (OSError, ConfigError) as error:
            if self._stamp is not None:  # log it once, not every second
                logger.error("the API keys read before stay in force: %s", error)
                self._stamp = None
            return
        self._stamp, self._hashes = stamp, [_hash(key) for key in keys]
        logger.info("reloaded %d API keys", len(keys))


def first_key(path: str) -> str:
    """The file's first key, for a command of the same user. Raises ConfigError if the file is invalid."""
    return _read(Path(path).expanduser())[1][0].decode("ascii")


def of_headers(headers: Iterable[tuple[Any, Any]]) -> list[bytes]:
    """The keys in HTTP headers or gRPC metadata: `authorization: Bearer KEY` and `x-api-key: KEY`."""
    found = []
    for raw_name, raw_value in headers:
        name, value = _bytes(raw_name).lower(), _bytes(raw_value)
        if name == b"x-api-key":
            found.append(value.strip())
        elif name == b"authorization":
            scheme, _, rest = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                found.append(rest.strip())
    return found


def _read(path: Path) -> tuple[Stamp, list[bytes]]:
    """The file's stamp, by which a change is detected, and its keys. Raises ConfigError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"API key file {path} cannot be read: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"API key file {path} is not a file")
        if status.st_mode & _OTHERS:
            raise ConfigError(f"API key file {path} is accessible to every user of this machine: chmod 600 {path}")
        text = os.read(descriptor, MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"API key file {path} is over {MAX_FILE_BYTES} bytes: it may contain only keys, one a line")
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        key = line.strip()
        if not key or key.startswith(b"#"):
            continue
        if any(not 0x21 <= byte <= 0x7E for byte in key):
            raise ConfigError(f"line {number} of API key file {path} is not a key: use printable ASCII without spaces")
        keys.append(key)
    if not keys:
        raise ConfigError(f"API key file {path} has no keys: write one a line, or leave gateway.api_key_file out")
    return _stamp(status), keys


def _stamp(status: os.stat_result) -> Stamp:
    return (status.st_dev, status.st_ino, status.st_ctime_ns, status.st_size)


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")
