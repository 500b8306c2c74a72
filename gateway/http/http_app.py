"""The HTTP application: a Starlette router over plain ASGI endpoints. Routing errors are returned as JSON objects."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from alignedserve.config import GatewayConfig
from alignedserve.control.supervisor_client import ORDERS
from alignedserve.errors import AlignedServeError, NotFoundError
from alignedserve.gateway.api_keys import OPEN_PATHS, ApiKeys
from alignedserve.gateway.batches.endpoints import BatchEndpoints
from alignedserve.gateway.batches.service import BatchService
from alignedserve.gateway.body.planning import plan_chat, plan_completion
from alignedserve.gateway.body.requests import parse_chat, parse_completion
from alignedserve.gateway.failures import MethodNotAllowedError, error_object
from alignedserve.gateway.http.admin import admin_endpoints
from alignedserve.gateway.http.asgi import App, ErrorBody, Receive, Scope, Send, report, send_bytes
from alignedserve.gateway.http.body_reader import BodyReader
from alignedserve.gateway.http.cors import cors, origins
from alignedserve.gateway.http.endpoints import GenerateEndpoint
from alignedserve.gateway.http.guard import guarded, posted
from alignedserve.gateway.http.openapi import openapi_json
from alignedserve.gateway.http.operations import Operations, Operator
from alignedserve.gateway.http.request_id import RecordsRequestId
from alignedserve.gateway.http.tokens import TokenEndpoints
from alignedserve.gateway.ledger.intake import Intake
from alignedserve.gateway.ledger.ledger import Ledger
from alignedserve.gateway.live.endpoints import LiveEndpoints
from alignedserve.gateway.pinning.orders import orders as cache_orders
from alignedserve.gateway.reply.openai_replies import ChatReply, CompletionReply
from alignedserve.gateway.tracing.http_calls import traced
from alignedserve.gateway.translated.messages_reply import MessagesReply, messages_error
from alignedserve.gateway.translated.messages_request import parse_messages, plan_message
from alignedserve.gateway.translated.responses_endpoints import ResponsesEndpoint, StoredResponses

if TYPE_CHECKING:
    from alignedserve.gateway.tracing.tracing import Tracing

_ANTHROPICS = "/v1/messages"


class _Endpoint:
    """An object around a function: Starlette treats functions as request handlers, objects as ASGI applications."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handle(scope, receive, send)


def build_app(
    config: GatewayConfig,
    ledger: Ledger,
    intake: Intake,
    server: Operator,
    keys: ApiKeys,
    batches: BatchService,
    tracing: Tracing | None = None,
) -> Starlette:
    """The ASGI application of one gateway. `batches` gets the endpoints that answer its lines."""
    bodies = BodyReader(config.max_body_bytes)
    pages = origins(config)
    model = server.model
    completions = GenerateEndpoint(
        ledger,
        intake,
        model,
        bodies,
        partial(parse_completion, max_prompts=config.max_prompts),
        plan_completion,
        CompletionReply,
    )
    of_chat = partial(GenerateEndpoint, ledger, intake, model, bodies)
    chat = of_chat(parse_chat, plan_chat, ChatReply)
    responses = ResponsesEndpoint(ledger, intake, model, bodies, batches)
    messages = of_chat(parse_messages, plan_message, MessagesReply)
    operations = Operations(server)
    tokens = TokenEndpoints(model, bodies, responses.count)

    async def openapi(scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(send, openapi_json(keys.wanted), "application/json")

    def route(path: str, handle: App, method: str, *, is_open: bool = False) -> Route:
        shape = _error_body(path)
        app = posted(handle, shape, pages) if method == "POST" else handle
        is_open = is_open or path in OPEN_PATHS
        return Route(path, _Endpoint(app if is_open else guarded(app, keys, shape)), methods=[method])

    generating: dict[str, App] = {
        "/v1/completions": completions,
        "/v1/chat/completions": chat,
        "/v1/responses": responses,
        "/v1/messages": messages,
    }
    posts: dict[str, App] = {
        **{path: traced(endpoint, tracing, path) for path, endpoint in generating.items()},
        "/v1/responses/input_tokens": tokens.count_response,
        "/v1/messages/count_tokens": tokens.count,
        "/v1/embeddings": operations.embeddings,
        "/v1/requests/{request_id:path}/cancel": operations.cancel,
        "/tokenize": tokens.tokenize,
        "/detokenize": tokens.detokenize,
        "/ping": operations.ping,
        **admin_endpoints(server.supervisor, server.admin_key, ORDERS),
        **admin_endpoints(
            server.supervisor, server.admin_key, cache_orders(server.cache_orders), config.max_body_bytes
        ),
    }
    gets = {
        "/v1/models": operations.models,
        "/v1/models/{model_id:path}": operations.model,
        "/health": operations.health,
        "/live": operations.live,
        "/ping": operations.ping,
        "/version": operations.version,
        "/load": operations.load,
        "/metrics": operations.metrics,
        "/metrics/targets": operations.targets,
        "/alignedserve/status": operations.status,
        "/alignedserve/integrity": operations.integrity,
        "/openapi.json": openapi,
    }
    lines = {"/v1/completions": completions, "/v1/chat/completions": chat, "/v1/responses": responses}
    batches.endpoints = {path: endpoint.answer_offline for path, endpoint in lines.items()}
    stored = [*BatchEndpoints(batches, bodies).routes(), *StoredResponses(batches).routes()]
    live = LiveEndpoints(server.live_service, keys, server.admin_key) if config.dashboard else None
    app = Starlette(
        routes=[
            *(route(path, handle, "POST") for path, handle in posts.items()),
            *(route(path, handle, "GET") for path, handle in gets.items()),
            *(route(path, handle, method) for method, path, handle in stored),
            *(route(path, handle, method, is_open=is_open) for method, path, handle, is_open in _live(live)),
        ],
        middleware=[*cors(config), Middleware(bodies.closing_where_unread), Middleware(RecordsRequestId)],
        exception_handlers={HTTPException: _routing_error, Exception: _failure},
    )
    app.router.redirect_slashes = False  # they go to the host that the client named, and skip the key check
    return app


def _live(live: LiveEndpoints | None) -> list[tuple[str, str, App, bool]]:
    """(method, path, endpoint, whether no API key is needed) of the live page."""
    if live is None:
        return []
    found = [("GET", path, app, True) for path, app in live.open_gets().items()]
    found += [("POST", path, app, True) for path, app in live.open_posts().items()]
    return found + [("GET", path, app, False) for path, app in live.guarded_gets().items()]


def _error_body(path: str) -> ErrorBody:
    """The shape of errors at a path: Anthropic's for its API, else OpenAI's."""
    return messages_error if path.startswith(_ANTHROPICS) else error_object


async def _routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 405:
        allowed = _methods(request)
        refusal = MethodNotAllowedError(f"{where} is not allowed; use {allowed}")
        return _json_response(request, refusal, {"allow": allowed})
    missing = NotFoundError(f"{where} does not exist; /openapi.json lists the endpoints of the API")
    return _json_response(request, missing, error.headers)


def _methods(request: Request) -> str:
    """Those that its path has."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    matching = [route.methods or () for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for methods in matching for method in methods}))


async def _failure(request: Request, error: Exception) -> Response:
    return _json_response(request, report(error), None)


def _json_response(request: Request, error: AlignedServeError, headers: Any) -> Response:
    body = _error_body(request.url.path)(error)
    return Response(orjson.dumps(body), error.http_status, headers, "application/json")
