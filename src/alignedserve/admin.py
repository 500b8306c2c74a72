"""The key by which a gateway recognises commands of the cluster's operator."""

from __future__ import annotations

import hashlib
import hmac

ADMIN_HEADER = "x-alignedserve-admin-key"


def admin_key(token: str) -> str:
    """The value that commands send in ADMIN_HEADER. The cluster's token itself does not leave the cluster."""
    return hmac.new(token.encode(), b"admin", hashlib.sha256).hexdigest()
