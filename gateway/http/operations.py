"""The endpoints other than generation: models, cancel, health, metrics, status, integrity."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Protocol

from alignedserve import __version__
from alignedserve.control.supervisor_client import SupervisorClient
from alignedserve.errors import NotFoundError, UnavailableError
from alignedserve.gateway.body.planning import ServedModel
from alignedserve.gateway.failures import ModelNotFoundError, UnsupportedFeatureError
from alignedserve.gateway.health import Health
from alignedserve.gateway.http.admin import NotAdminError, check_key, shows_key
from alignedserve.gateway.http.asgi import Receive, Scope, Send, report, send_bytes, send_error, send_json
from alignedserve.gateway.ledger.calls import caller
from alignedserve.gateway.ledger.ledger import Ledger
from alignedserve.gateway.live.service import LiveService
from alignedserve.gateway.pinning.orders import CacheOrders

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class Operator(Protocol):
    """What these endpoints need from the gateway's server."""

    model: ServedModel
    ledger: Ledger
    supervisor: SupervisorClient
    admin_key: str
    cache_orders: CacheOrders
    live_service: LiveService

    async def health(self) -> Health: ...

    async def cancel_call(self, call_id: str, owner: bytes | None) -> bool: ...

    async def metrics_text(self) -> str: ...

    def metrics_targets(self) -> list[dict[str, Any]]: ...

    async def status_json(self) -> dict[str, Any]: ...

    async def integrity_json(self) -> dict[str, Any]: ...


def model_card(model: ServedModel, name: str) -> dict[str, Any]:
    """OpenAI's fields, Anthropic's (from `type` on), and those that clients of vLLM read.

    `name`: one of the model's.
    """
    most = model.limit[0] if model.info is not None else None
    permission = {
        "id": f"modelperm-{model.name}",
        "object": "model_permission",
        "created": model.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "alignedserve",
        "root": model.root or model.name,
        "parent": None,
        "max_model_len": most,
        "permission": [permission],
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
        "max_input_tokens": most,
    }


class Operations:
    """ASGI endpoints, one method each."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator

    async def models(self, scope: Scope, receive: Receive, send: Send) -> None:
        model = self._operator.model
        names = [model.name, *(alias for alias in model.aliases if "*" not in alias)]
        page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        await send_json(send, {"object": "list", "data": [model_card(model, name) for name in names], **page})

    async def model(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path_params"]["model_id"]
        if not self._operator.model.is_called(name):
            message = f"model {name!r} does not exist; this server has {self._operator.model.name!r}"
            await send_error(send, ModelNotFoundError(message, param="model"))
            return
        await send_json(send, model_card(self._operator.model, name))

    async def cancel(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Cancels a request that was sent with the same API key or, with the cluster's admin key, with any key."""
        request_id = scope["path_params"]["request_id"]
        if shows_key(scope):
            try:
                check_key(scope, self._operator.admin_key)
            except NotAdminError as error:
                await send_error(send, error)
                return
        if await self._operator.cancel_call(request_id, None if shows_key(scope) else caller.get()):
            await send_json(send, {"id": request_id, "object": "request.cancelled"})
        else:
            await send_error(send, NotFoundError(f"no request {request_id[:200]!r} is running", param="request_id"))

    async def live(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, {"status": "ok"})

    async def health(self, scope: Scope, receive: Receive, send: Send) -> None:
        health = await self._operator.health()
        await send_json(send, health.to_json(), 200 if health.can_serve else 503)

    async def ping(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As `health`, without a body."""
        health = await self._operator.health()
        await send_bytes(send, b"", "text/plain", 200 if health.can_serve else 503)

    async def version(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, {"version": __version__})

    async def load(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, {"server_load": len(self._operator.ledger)})

    async def embeddings(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"there are no embeddings: {self._operator.model.name!r} is served to generate text"
        await send_error(send, UnsupportedFeatureError(message, param="model"))

    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(send, (await self._operator.metrics_text()).encode(), _PROMETHEUS)

    async def targets(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The processes' own pages of metrics, as Prometheus' `http_sd_configs` reads them."""
        try:
            found = self._operator.metrics_targets()
        except UnavailableError as error:  # Prometheus keeps the targets that it knows
            await send_error(send, error)
            return
        await send_json(send, found)

    async def status(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, await self._operator.status_json())

    async def integrity(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            found = await self._operator.integrity_json()
        except Exception as error:
            await send_error(send, report(error))
            return
        await send_json(send, found)
