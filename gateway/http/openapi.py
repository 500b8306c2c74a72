"""The OpenAPI document of the HTTP API, generated from the models that validate requests."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import orjson

from alignedserve import __version__
from alignedserve.admin import ADMIN_HEADER
from alignedserve.control.supervisor_client import ORDERS, Order
from alignedserve.gateway.api_keys import OPEN_PATHS
from alignedserve.gateway.batches.description import batch_paths, batch_schemas
from alignedserve.gateway.http.chunk_schemas import chunk_schemas
from alignedserve.gateway.http.reply_fields import with_all_fields
from alignedserve.gateway.http.request_schemas import request_schemas
from alignedserve.gateway.http.translated_schemas import stored_paths, translated_replies, translated_requests
from alignedserve.gateway.pinning.orders import orders
from alignedserve.request import Stage

Schema = dict[str, Any]

_INTEGER: Schema = {"type": "integer"}
_NUMBER: Schema = {"type": "number"}
_STRING: Schema = {"type": "string"}
_ANSWER_TOKENS: Schema = {"type": "array", "items": _INTEGER, "description": "With return_token_ids."}
_PROMPT_LOGPROBS: Schema = {
    "type": "array",
    "description": "With prompt_logprobs. For each token of the prompt (null for the first): logprob, rank and "
    "decoded_token of this token and of the most likely ones, by token id.",
}


_ALL_ORDERS = {**ORDERS, **orders(None)}


def _title(order: str) -> str:
    """The name of an order's schema."""
    return order.title().replace("/", "")


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: dict[str, Schema], required: Iterable[str] = ()) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _reply_schemas() -> dict[str, Schema]:
    finish = {"anyOf": [{"enum": ["stop", "length"]}, {"type": "null"}]}
    chat_finish = {"anyOf": [{"enum": ["stop", "length", "tool_calls", "function_call"]}, {"type": "null"}]}
    head = {"id": _STRING, "created": _INTEGER, "model": _STRING}
    tail = {
        "prompt_token_ids": {
            "type": "array",
            "description": "With return_token_ids. One list of token ids, or one list for each of several prompts.",
        },
        "timings": _ref("Timings"),
    }
    counts = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), _INTEGER)
    details = {**_object({"reasoning_tokens": _INTEGER}), "description": "In a chat, if the model has reasoning."}
    cached = {**_object({"cached_tokens": _INTEGER}), "description": "If the cluster has a prefix cache."}
    both = {"prompt_tokens_details": cached, "completion_tokens_details": details}
    usage = _object({**counts, **both}, ["prompt_tokens"])
    older = _object(
        {
            "tokens": _array(_STRING),
            "token_logprobs": _array(_nullable(_NUMBER)),
            "top_logprobs": _array(_nullable({"type": "object", "additionalProperties": _NUMBER})),
            "text_offset": _array(_INTEGER),
        }
    )
    token = {"token": _STRING, "logprob": _NUMBER, "bytes": _nullable(_array(_INTEGER))}
    entries = _array(_object({**token, "top_logprobs": _array(_object(token))}))
    newer = _object({"content": entries, "refusal": {"type": "null"}})
    own = {"index": _INTEGER, "finish_reason": finish, "token_ids": _ANSWER_TOKENS, "timings": _ref("Timings")}
    completion = _object(
        {**own, "text": _STRING, "logprobs": _nullable(older), "prompt_logprobs": _PROMPT_LOGPROBS},
        ["index", "text", "finish_reason"],
    )
    function = _object({"name": _STRING, "arguments": {**_STRING, "description": "JSON text."}}, ["name", "arguments"])
    call = _object({"id": _STRING, "type": {"const": "function"}, "function": function}, ["id", "type", "function"])
    message = _object(
        {
            "role": {"const": "assistant"},
            "content": _nullable(_STRING),
            "reasoning_content": {**_STRING, "description": "The model's reasoning, if there is any."},
            "tool_calls": _array(call),
            "function_call": {**function, "description": "For functions, in place of tool_calls."},
            "refusal": {"type": "null"},
        },
        ["role", "content"],
    )
    chat_own = {**own, "finish_reason": chat_finish, "message": message, "logprobs": _nullable(newer)}
    chat = _object(chat_own, ["index", "message", "finish_reason"])
    required = ["id", "object", "created", "model", "choices", "usage"]
    seconds = {f"{stage}_s": _NUMBER for stage in Stage}
    return {
        "Timings": _object(
            {
                **seconds,
                "bubble_s": _NUMBER,
                "cached_tokens": {**_INTEGER, "description": "Of the prompt, if the cluster has a prefix cache."},
                "prefill_id": _STRING,
                "decode_id": _STRING,
            },
            seconds,
        ),
        "Usage": usage,
        "Completion": _object(
            {
                **head,
                "object": {"const": "text_completion"},
                "choices": _array(completion),
                "usage": _ref("Usage"),
                **tail,
            },
            required,
        ),
        "ChatCompletion": _object(
            {
                **head,
                "object": {"const": "chat.completion"},
                "choices": _array(chat),
                "usage": _ref("Usage"),
                **tail,
                "prompt_logprobs": _PROMPT_LOGPROBS,
            },
            required,
        ),
        "Error": _object({"error": _ref("ErrorBody")}, ["error"]),
        "ErrorBody": _object(
            {"message": _STRING, "type": _STRING, "param": _nullable(_STRING), "code": _nullable(_STRING)},
            ["message", "type", "param", "code"],
        ),
    }


def _operation_schemas() -> dict[str, Schema]:
    strings = _array(_STRING)
    model = {"id": _STRING, "object": {"const": "model"}, "created": _INTEGER, "owned_by": _STRING}
    blocks = {f"{name}_blocks": _INTEGER for name in ("capacity", "free", "owned", "cached")}
    named = dict.fromkeys(("store", "instance", "problem"), _STRING)
    book = _object({**named, **blocks}, named)
    role = dict.fromkeys(("role", "id", "node", "address", "state", "holds"), _STRING)
    more = {"root": _STRING, "parent": {"type": "null"}, "max_model_len": _nullable(_INTEGER)}
    more |= {
        "max_input_tokens": _nullable(_INTEGER),
        "type": {"const": "model"},
        "display_name": _STRING,
        "created_at": {**_STRING, "format": "date-time"},
    }
    listed = {"object": {"const": "list"}, "data": _array(_ref("Model"))}
    page = {"has_more": {"const": False}, "first_id": _STRING, "last_id": _STRING}
    tokenised = {"count": _INTEGER, "max_model_len": _INTEGER, "tokens": _array(_INTEGER)}
    return {
        "Model": _object({**model, **more, "permission": _array(_object({}))}, model),
        "Tokenized": _object({**tokenised, "token_strs": _nullable(strings)}, tokenised),
        "Detokenized": _object({"prompt": _STRING}, ["prompt"]),
        "Version": _object({"version": _STRING}, ["version"]),
        "Load": _object({"server_load": _INTEGER}, ["server_load"]),
        "ModelList": _object({**listed, **page}, listed),
        "Cancelled": _object({"id": _STRING, "object": {"const": "request.cancelled"}}, ["id", "object"]),
        "Live": _object({"status": {"const": "ok"}}, ["status"]),
        "Targets": _array(_object({"targets": strings, "labels": _object({"role": _STRING, "instance": _STRING})})),
        "Health": _object(
            {"status": _STRING, "missing": strings, "degraded": strings}, ["status", "missing", "degraded"]
        ),
        "Integrity": _object({"sound": {"type": "boolean"}, "books": _array(book)}, ["sound", "books"]),
        **{f"{_title(name)}Request": _object(order.request) for name, order in _ALL_ORDERS.items()},
        **{_title(name): _object(order.answer, order.answer) for name, order in _ALL_ORDERS.items()},
        "Status": _object({"roles": _array(_object({**role, "pid": _INTEGER}, [*role, "pid"]))}, ["roles"]),
    }


def _json(name: str, description: str) -> Schema:
    return {"description": description, "content": {"application/json": {"schema": _ref(name)}}}


_NO_KEY = "The API key is missing or unknown."
_NOT_JSON = (
    "The body is encoded, or a web page sent the request (it has an Origin) without Content-Type application/json."
)
_ORDER_ERRORS = {"403": "The admin key is missing or wrong.", "409": "The cluster cannot carry out the order."}
_ERRORS = {
    "400": "The request is malformed, too long or not supported, or a value has a wrong type or is out of range.",
    "401": _NO_KEY,
    "404": "The model does not exist.",
    "408": "timeout_s has passed.",
    "413": "The body is over the limit.",
    "415": _NOT_JSON,
    "429": "The cluster is full; Retry-After says when to try again.",
    "499": "The request was cancelled.",
    "500": "The server failed.",
    "502": "The gateway ended before it had answered.",
    "503": "A required role is unavailable; Retry-After says when to try again.",
}


_CHUNKS = (
    "The reply. With stream, its chunks as server-sent events, then `data: [DONE]`. If the request fails after the "
    'first chunk, the last event is `data: {"error": …}`.'
)
_EVENTS = "The reply. With stream, its events. If the request fails after the first, the last event says so."


def _generate(request: str, reply: str, summary: str, error: str = "Error", about: str = _CHUNKS) -> Schema:
    answer = {
        "description": about,
        "content": {
            "application/json": {"schema": _ref(reply)},
            "text/event-stream": {
                "schema": {**_object({"data": _data(reply)}, ["data"]), "description": "Each event."}
            },
        },
    }
    body = {"required": True, "content": {"application/json": {"schema": _ref(request)}}}
    errors = {status: _json(error, description) for status, description in _ERRORS.items()}
    return {"post": {"summary": summary, "requestBody": body, "responses": {"200": answer, **errors}}}


def _data(reply: str) -> Schema:
    """What an event's data is. It is not described for the APIs that are translated."""
    if reply not in ("Completion", "ChatCompletion"):
        return _STRING
    chunk = {"anyOf": [_ref(f"{reply}Chunk"), _ref("Error")]}
    return {"anyOf": [{**_STRING, "contentMediaType": "application/json", "contentSchema": chunk}, {"const": "[DONE]"}]}


def _posted(request: str, reply: str, summary: str, error: str = "Error") -> Schema:
    """A POST that is answered at once."""
    body = {"required": True, "content": {"application/json": {"schema": _ref(request)}}}
    errors = {status: _json(error, _ERRORS[status]) for status in ("400", "404", "408", "413", "415", "429", "503")}
    return {
        "post": {"summary": summary, "requestBody": body, "responses": {"200": _json(reply, "The result."), **errors}}
    }


def _order(name: str, order: Order) -> Schema:
    key = {"name": ADMIN_HEADER, "in": "header", "required": True, "schema": _STRING}
    body = {"required": True, "content": {"application/json": {"schema": _ref(f"{_title(name)}Request")}}}
    errors = {status: _json("Error", description) for status, description in {**_ERRORS, **_ORDER_ERRORS}.items()}
    answers = {"200": _json(_title(name), "The order was accepted."), **errors}
    return {"post": {"summary": order.summary, "parameters": [key], "requestBody": body, "responses": answers}}


def _get(summary: str, *answers: tuple[str, Schema]) -> Schema:
    return {"get": {"summary": summary, "responses": dict(answers)}}


def _guard(paths: dict[str, Any], keys_wanted: bool) -> Schema:
    """Marks in `paths` which paths need an API key. Returns the document's `security` entry."""
    for path, item in paths.items():
        for method in item.keys() & {"get", "post", "delete"}:
            if path in OPEN_PATHS:
                item[method]["security"] = []
            elif keys_wanted:
                item[method]["responses"]["401"] = _json("Error", _NO_KEY)
    schemes: list[Schema] = [{"bearer": []}, {"header": []}]
    return {"security": schemes if keys_wanted else [{}, *schemes]}


@cache
def openapi_json(keys_wanted: bool = False) -> bytes:
    """The OpenAPI 3.1 document that `GET /openapi.json` returns. `keys_wanted`: the server requires API keys."""
    model_id = {"name": "model_id", "in": "path", "required": True, "schema": _STRING}
    request_id = {"name": "request_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    text = {"description": "Prometheus text format.", "content": {"text/plain": {"schema": _STRING}}}
    paths: dict[str, Any] = {
        "/v1/completions": _generate("CompletionRequest", "Completion", "Complete prompts"),
        "/v1/chat/completions": _generate("ChatRequest", "ChatCompletion", "Answer a conversation"),
        "/v1/responses": _generate("ResponsesRequest", "Response", "Answer, in OpenAI's responses API", about=_EVENTS),
        "/v1/responses/input_tokens": _posted(
            "ResponsesRequest", "InputTokens", "Count the tokens of a body of /v1/responses"
        ),
        "/v1/messages": _generate(
            "MessagesRequest", "AnthropicMessage", "Answer, in Anthropic's messages API", "MessagesError", _EVENTS
        ),
        "/v1/messages/count_tokens": _posted(
            "CountRequest", "TokenCount", "Count the tokens of a body of /v1/messages", "MessagesError"
        ),
        "/tokenize": _posted("TokenizeRequest", "Tokenized", "Count the tokens of a prompt or a conversation"),
        "/detokenize": _posted("DetokenizeRequest", "Detokenized", "Get the text of tokens, special ones included"),
        "/v1/embeddings": {
            "post": {
                "summary": "Refused: models are served to generate text",
                "responses": {"400": _json("Error", "There are no embeddings."), "415": _json("Error", _NOT_JSON)},
            }
        },
        "/v1/requests/{request_id}/cancel": {
            "post": {
                "summary": "Cancel a running request by the x-alignedserve-request-id of its answer",
                "responses": {
                    "200": _json("Cancelled", "The request was cancelled; its client gets an error."),
                    "403": _json("Error", "The request has an admin key that is not this cluster's."),
                    "404": _json("Error", "No such request is running, or it was sent with another API key."),
                    "415": _json("Error", _NOT_JSON),
                },
            },
            "parameters": [request_id],
        },
        **batch_paths(),
        **stored_paths(_ref("Error")),
        "/v1/models": _get("List models", ("200", _json("ModelList", "All served models."))),
        "/v1/models/{model_id}": {
            **_get(
                "Describe a model",
                ("200", _json("Model", "The model.")),
                ("404", _json("Error", "The model does not exist.")),
            ),
            "parameters": [model_id],
        },
        "/health": _get(
            "Check whether the cluster can serve",
            ("200", _json("Health", "The cluster can serve requests.")),
            ("503", _json("Health", "The cluster cannot serve requests; `missing` says why.")),
        ),
        "/ping": _get(
            "Check whether the cluster can serve, without a body; POST does the same",
            ("200", {"description": "The cluster can serve requests."}),
            ("503", {"description": "The cluster cannot serve requests."}),
        ),
        "/version": _get("Get the server's version", ("200", _json("Version", "The version."))),
        "/load": _get("Get the number of open requests of this gateway", ("200", _json("Load", "The number."))),
        "/live": _get("Check whether the gateway is alive", ("200", _json("Live", "The gateway is alive."))),
        "/metrics": _get("Get the metrics of the whole cluster", ("200", text)),
        "/metrics/targets": _get(
            "List the processes' own pages of metrics, for Prometheus' http_sd_configs",
            ("200", _json("Targets", "None without cluster.role_metrics.")),
            ("503", _json("Error", "The processes are not known yet.")),
        ),
        "/alignedserve/integrity": _get(
            "Check the accounting of every process",
            ("200", _json("Integrity", "The state of every process, recounted now.")),
            ("503", _json("Error", "The supervisor cannot be reached.")),
        ),
        "/alignedserve/status": _get(
            "List all processes", ("200", _json("Status", "All processes and what each holds."))
        ),
        **{f"/alignedserve/{name}": _order(name, order) for name, order in _ALL_ORDERS.items()},
    }
    replies = {**_reply_schemas(), **translated_replies()}
    document = {
        "openapi": "3.1.0",
        "info": {"title": "AlignedServe", "version": __version__, "description": "An OpenAI-compatible API."},
        **_guard(paths, keys_wanted),
        "paths": paths,
        "components": {
            "schemas": {
                **request_schemas(),
                **translated_requests(),
                **with_all_fields({**replies, **_operation_schemas()}),
                **chunk_schemas(replies),
                **batch_schemas(),
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "A key of the server's --api-key-file."},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }
    return orjson.dumps(document)
