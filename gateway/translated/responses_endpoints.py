"""/v1/responses and the responses that it stores, if the gateway has a store."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from alignedserve.errors import NotFoundError
from alignedserve.gateway.batches.database import BatchesOffError, StoreError
from alignedserve.gateway.batches.requests import Query
from alignedserve.gateway.batches.responses import Item, ResponseStore
from alignedserve.gateway.batches.service import BatchService
from alignedserve.gateway.body.planning import ServedModel
from alignedserve.gateway.body.requests import GenerationRequest
from alignedserve.gateway.failures import ContextLengthError, UnsupportedFeatureError
from alignedserve.gateway.http.asgi import App, Receive, Scope, Send, json_app, parse_json, report, start
from alignedserve.gateway.http.body_reader import BodyReader
from alignedserve.gateway.http.endpoints import EVENT_STREAM, STREAMED, GenerateEndpoint
from alignedserve.gateway.ledger.calls import Call, caller
from alignedserve.gateway.ledger.intake import Intake
from alignedserve.gateway.ledger.ledger import Ledger
from alignedserve.gateway.reply.replies import Reply
from alignedserve.gateway.translated.responses_reply import ResponsesReply, failed_at_once
from alignedserve.gateway.translated.responses_request import (
    ResponsesChat,
    count_input,
    parse_responses,
    plan_response,
)

logger = logging.getLogger(__name__)

MOST_ITEMS = 100  # of a page
_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


class ResponsesEndpoint(GenerateEndpoint):
    """Lines of batches may go on from a stored response, and are not stored."""

    def __init__(
        self, ledger: Ledger, intake: Intake, model: ServedModel, bodies: BodyReader, service: BatchService
    ) -> None:
        super().__init__(ledger, intake, model, bodies, parse_responses, plan_response, ResponsesReply)
        self._service = service

    async def _open(self, body: bytes) -> tuple[GenerationRequest, Call]:
        try:
            return await super()._open(body)
        except ContextLengthError as error:
            error.details["streamed"] = parse_json(body).get("stream") is True
            raise

    async def _send_error(self, send: Send, error: Exception, headers: Mapping[str, str]) -> None:
        """A stream for which the prompt is too long fails in its events: agents shorten the conversation then."""
        if not isinstance(error, ContextLengthError) or not error.details.get("streamed"):
            await super()._send_error(send, error, headers)
            return
        await start(send, 200, EVENT_STREAM, {**STREAMED, **headers})
        await send({"type": "http.response.body", "body": failed_at_once(report(error), self._model.name)})

    async def read(self, body: Any, *, offline: bool = False) -> ResponsesChat:
        """The request, with the conversation that `previous_response_id` names."""
        store, earlier = self._service.responses, list[Item]()
        previous = body.get("previous_response_id") if isinstance(body, dict) else None
        if store is not None and previous and isinstance(previous, str):
            earlier = await self._service.call(store.conversation, previous, caller.get())
        if store is not None and isinstance(body, dict):
            body = await self._with_items(store, body)
        if offline and isinstance(body, dict):
            if body.get("store"):
                message = "store is not supported in a batch: the answers are in its file"
                raise UnsupportedFeatureError(message, param="store")
            body = {**body, "store": False}
        return parse_responses(body, earlier, stores=store is not None)

    async def _with_items(self, store: ResponseStore, body: dict[str, Any]) -> dict[str, Any]:
        """The body with the items that its input names by their ids. Raises ItemNotFoundError."""
        given = body.get("input")
        if not isinstance(given, list) or not (wanted := [item["id"] for item in given if _is_reference(item)]):
            return body
        found = await self._service.call(store.items, wanted, caller.get())
        return {**body, "input": [found[item["id"]] if _is_reference(item) else item for item in given]}

    async def count(self, body: Any) -> tuple[dict[str, Any], list[str]]:
        """The answer of /v1/responses/input_tokens, and fields that are ignored. The conversation that the body goes on
        from counts too.
        """
        request = await self.read(body)
        tokens = await count_input(self._model, request)
        return {"object": "response.input_tokens", "input_tokens": tokens}, request.ignored

    async def before_end(self, reply: Reply) -> None:
        """Stores the response. If the store fails, the response says that it is not stored."""
        assert isinstance(reply, ResponsesReply)
        if not reply.stored:
            return
        if (store := self._service.responses) is None:  # it was closed meanwhile
            reply.stored = False
            return
        items = [_whole(item) for item in reply.request.items]
        try:
            await self._service.call(store.put, reply.call.name[0], reply.body(), items)
        except StoreError as error:
            logger.warning("a response is not stored: %s", error.message)
            reply.stored = False


class StoredResponses:
    """ASGI endpoints, one method each. Each API key sees its own responses."""

    def __init__(self, service: BatchService) -> None:
        self._service = service

    def routes(self) -> list[tuple[str, str, App]]:
        """Method, path and application of each endpoint."""
        path = "/v1/responses/{response_id}"
        return [
            ("GET", path, json_app(self.get)),
            ("DELETE", path, json_app(self.delete)),
            ("GET", f"{path}/input_items", json_app(self.input_items)),
        ]

    async def get(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        query, store = Query(scope), self._store
        if query.one_of("stream", "false", "true") == "true" or query.text("starting_after"):
            raise UnsupportedFeatureError("a stored response is not streamed again", param="stream")
        return await self._service.call(store.get, scope["path_params"]["response_id"], caller.get())

    async def delete(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        response_id = scope["path_params"]["response_id"]
        await self._service.call(self._store.delete, response_id, caller.get())
        return {"id": response_id, "object": "response", "deleted": True}

    async def input_items(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        query, store = Query(scope), self._store
        limit = query.number("limit", 20, MOST_ITEMS)
        newest_first = query.one_of("order", "desc", "asc") == "desc"
        items = await self._service.call(store.input_items, scope["path_params"]["response_id"], caller.get())
        if newest_first:
            items.reverse()
        ids = [item["id"] for item in items]
        if after := query.text("after"):
            if after not in ids:
                raise NotFoundError(f"the response has no item {after[:100]!r}", param="after")
            items = items[ids.index(after) + 1 :]
        page = items[:limit]
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        more = len(items) > limit
        return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more}

    @property
    def _store(self) -> ResponseStore:
        if (store := self._service.responses) is None:
            raise BatchesOffError("this server stores no responses: start it with --batches-folder DIR")
        return store


def _is_reference(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == "item_reference" and isinstance(item.get("id"), str)


def _whole(item: Item) -> Item:
    """An item as OpenAI returns it: with its type, its id, and its content in parts."""
    kind = item.get("type") or "message"
    whole = {**item, "type": kind, "id": item.get("id") or f"{_IDS.get(kind, 'item')}_{uuid4().hex}"}
    if kind == "message":
        whole.setdefault("status", "completed")
        if isinstance(content := item.get("content"), str):
            part: Item = {"type": "input_text", "text": content}
            if item["role"] == "assistant":
                part = {"type": "output_text", "text": content, "annotations": []}
            whole["content"] = [part]
    return whole
