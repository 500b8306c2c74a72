"""API keys of the gateway: one a line in a file, read again when it changes, compared in constant time.

The keys themselves are in no configuration, no log and no argument of a process; not even here, where only their
hashes are kept.
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

logger = logging.getLogger(__name__)

RECHECK_S = 1.0
MAX_FILE_BYTES = 1 << 20
_OTHERS = stat.S_IRWXO

# What is answered without a key; everything else asks for one, where there are keys. (But Serve's own /-/healthz and
# /-/routes, which do not come here.)
OPEN_PATHS = frozenset({"/health", "/live", "/metrics", "/openapi.json"})

Stamp = tuple[int, int, int, int]


class ApiKeys:
    """Who may ask. Without a file everybody may.

    A file that cannot be used any more leaves the keys that were read last in force: half of a rotation locks nobody
    out. Raises ConfigError where the file cannot be used at the start.
    """

    def __init__(self, path: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._path = Path(path).expanduser() if path else None
        self._clock = clock
        self._checked_at = clock()
        self._hashes: list[bytes] = []
        self._stamp: Stamp | None = None
        if self._path is not None:
            self._stamp, keys = _read(self._path)
            self._hashes = [_hash(key) for key in keys]

    @property
    def wanted(self) -> bool:
        """Whether a key is asked for at all."""
        return self._path is not None

    def check(self, offered: Iterable[bytes]) -> bytes:
        """Whose key it is, by its hash; b"" where none is asked for.

        Raises AuthenticationError unless one of `offered` is a key.
        """
        if self._path is None:
            return b""
        self._look_again(self._path)
        found = b""
        given = False
        for key in offered:
            given = True
            mine = _hash(key)
            for known in self._hashes:  # all of them: the time says nothing about which
                if hmac.compare_digest(mine, known):
                    found = mine
        if not found:
            what = "this API key is not known here" if given else "an API key is needed"
            raise AuthenticationError(f"{what}: send it as `Authorization: Bearer KEY`")
        return found

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
            if self._stamp is not None:  # once, not every second
                logger.error("the API keys read before stay in force: %s", error)
                self._stamp = None
            return
        self._stamp, self._hashes = stamp, [_hash(key) for key in keys]
        logger.info("read %d API keys anew", len(keys))


def first_key(path: str) -> str:
    """A key of the file, for a command of the same user. Raises ConfigError where it cannot be used."""
    return _read(Path(path).expanduser())[1][0].decode("ascii")


def of_headers(headers: Iterable[tuple[Any, Any]]) -> list[bytes]:
    """The keys that HTTP headers or gRPC metadata carry: `authorization: Bearer KEY`, and `x-api-key: KEY`."""
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
    """The file's keys, and by what a change of it is known. Raises ConfigError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"API key file {path} cannot be read: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"API key file {path} is not a file")
        if status.st_mode & _OTHERS:
            raise ConfigError(f"API key file {path} is open to every user of this machine: chmod 600 {path}")
        text = os.read(descriptor, MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"API key file {path} is over {MAX_FILE_BYTES} bytes: it holds one key a line, no more")
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        key = line.strip()
        if not key or key.startswith(b"#"):
            continue
        if any(not 0x21 <= byte <= 0x7E for byte in key):
            raise ConfigError(f"line {number} of API key file {path} is no key: printable ASCII without spaces is")
        keys.append(key)
    if not keys:
        raise ConfigError(f"API key file {path} holds no key: write one a line, or leave gateway.api_key_file out")
    return _stamp(status), keys


def _stamp(status: os.stat_result) -> Stamp:
    return (status.st_dev, status.st_ino, status.st_ctime_ns, status.st_size)


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")
