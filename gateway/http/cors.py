"""CORS: which web pages may call the gateway. Off unless `gateway.cors_origins` is set."""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from alignedserve.config import GatewayConfig
from alignedserve.gateway.http.asgi import IGNORED_HEADER

_EXPOSED = ("retry-after", "x-request-id", "x-alignedserve-request-id", IGNORED_HEADER)


def cors(config: GatewayConfig) -> list[Middleware]:
    """The middleware, which answers preflight requests itself; none if no page may call."""
    pages = origins(config)
    if not pages:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=pages,
            allow_methods=_entries(config.cors_methods),
            allow_headers=_entries(config.cors_headers),
            allow_credentials=config.cors_credentials,
            expose_headers=_EXPOSED,
        )
    ]


def origins(config: GatewayConfig) -> list[str]:
    """The pages that may call."""
    return _entries(config.cors_origins)


def _entries(text: str) -> list[str]:
    return [entry for part in text.split(",") if (entry := part.strip())]
