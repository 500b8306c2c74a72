"""The key by which a gateway knows the commands of whoever runs the cluster."""

from __future__ import annotations

import hashlib
import hmac

ADMIN_HEADER = "x-alignedserve-admin-key"


def admin_key(token: str) -> str:
    """What commands show in ADMIN_HEADER; the cluster's token itself does not leave the cluster."""
    return hmac.new(token.encode(), b"admin", hashlib.sha256).hexdigest()
