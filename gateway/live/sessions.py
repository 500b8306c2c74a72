"""The cookie that a browser shows in place of an API key: it sends no header of its own by navigation or EventSource.

The cookie has the hash of a key, an end, and a code over both that only this cluster's gateways can make. So every
gateway can check it, a key that is taken out of the file ends its cookies, and no key is in a browser's storage.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Callable, Iterable

from starlette.requests import cookie_parser

COOKIE = "alignedserve_session_"
LASTS_S = 12 * 3600.0
_CODE_BYTES = hashlib.sha256().digest_size


class Sessions:
    """`secret`: of the cluster. `cookie`: the cookie's name, by cluster, since all ports of a host share cookies."""

    def __init__(self, secret: str, clock: Callable[[], float] = time.time) -> None:
        self._key = hashlib.sha256(b"alignedserve dashboard session\0" + secret.encode()).digest()
        self.cookie = COOKIE + hashlib.sha256(self._key).hexdigest()[:8]
        self._clock = clock

    def begin(self, key_hash: bytes) -> str:
        """The cookie's value for the holder of a key."""
        content = int(self._clock() + LASTS_S).to_bytes(8, "big") + key_hash
        return base64.urlsafe_b64encode(content + self._code(content)).decode()

    def key_hash(self, value: str) -> bytes | None:
        """The hash of the key that a cookie was made for; None if it is over, or not of this cluster."""
        try:
            whole = base64.b64decode(value, altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        content, code = whole[:-_CODE_BYTES], whole[-_CODE_BYTES:]
        if len(content) <= 8 or not hmac.compare_digest(code, self._code(content)):
            return None
        return content[8:] if int.from_bytes(content[:8], "big") > self._clock() else None

    def _code(self, content: bytes) -> bytes:
        return hmac.digest(self._key, content, "sha256")


def cookie_of(headers: Iterable[tuple[bytes, bytes]], cookie: str) -> str:
    """The value of the cookie of that name in a request's headers; "" without one. Other cookies need not be valid."""
    for name, value in headers:
        if name == b"cookie":
            return cookie_parser(value.decode("latin-1")).get(cookie, "")
    return ""
