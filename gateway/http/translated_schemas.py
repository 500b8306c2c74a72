"""JSON schemas of the APIs that are translated to chat completions: their bodies' main fields, and their answers."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_SAME = (
    "The other fields of ChatRequest (top_k, seed, priority, …) are accepted too, except those that have a name here."
)
_OBJECT: Schema = {"type": "object"}
_OBJECTS: Schema = {"type": "array", "items": _OBJECT}
_STRING: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer"}


def _or_null(kind: str, **about: Any) -> Schema:
    return {"type": [kind, "null"], **about}


_TEXT_OR_PARTS: Schema = {"anyOf": [_STRING, _OBJECTS]}
_COMMON = {
    "model": _or_null("string", maxLength=1024),
    "stream": _or_null("boolean", description="Send the answer as server-sent events."),
    "top_p": _or_null("number", exclusiveMinimum=0, maximum=1),
    "tools": _or_null("array", items=_OBJECT, description="Functions. Tools of other types: see the guide."),
    "metadata": _or_null("object"),
}


def translated_requests() -> dict[str, Schema]:
    response = {
        **_COMMON,
        "input": {
            **_TEXT_OR_PARTS,
            "description": "Text, or items: messages, reasoning, function calls and their outputs.",
        },
        "instructions": _or_null("string", description="The system message."),
        "max_output_tokens": _or_null("integer", minimum=1),
        "temperature": _or_null("number", minimum=0, maximum=2),
        "text": _or_null("object", description="format: text, json_object or json_schema."),
        "reasoning": _or_null("object", description="effort, as chat's reasoning_effort, and summary."),
        "tool_choice": {"anyOf": [_STRING, _OBJECT, {"type": "null"}]},
        "parallel_tool_calls": _or_null("boolean"),
        "top_logprobs": _or_null("integer", minimum=0, maximum=20),
        "include": _or_null("array", items={"enum": ["message.output_text.logprobs", "reasoning.encrypted_content"]}),
        "store": _or_null("boolean", description="Only with `batches.folder`, and then true by default."),
        "previous_response_id": _or_null("string", description="A stored response, whose conversation goes on."),
        "truncation": {"enum": ["auto", "disabled", None]},
    }
    message = {
        **_COMMON,
        "model": {"type": "string", "maxLength": 1024},
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": _TEXT_OR_PARTS},
                "required": ["role", "content"],
            },
        },
        "max_tokens": {"type": "integer", "minimum": 1},
        "system": {"anyOf": [_STRING, _OBJECTS, {"type": "null"}]},
        "stop_sequences": _or_null("array", items={"type": "string", "minLength": 1, "maxLength": 1024}, maxItems=16),
        "temperature": _or_null("number", minimum=0, maximum=2),
        "top_k": _or_null("integer", minimum=-1),
        "tool_choice": _or_null("object", description="type: auto, any, tool (with name) or none."),
        "thinking": _or_null(
            "object", description="type: enabled (with budget_tokens), adaptive, between_tools, disabled."
        ),
        "output_config": _or_null("object", description="format (json_schema), and effort."),
    }
    needed = ["model", "messages", "max_tokens"]
    counted = {name: field for name, field in message.items() if name not in ("max_tokens", "stream")}
    return {
        "ResponsesRequest": {"type": "object", "properties": response, "required": ["input"], "description": _SAME},
        "CountRequest": {"type": "object", "properties": counted, "required": ["model", "messages"]},
        "MessagesRequest": {"type": "object", "properties": message, "required": needed, "description": _SAME},
    }


def translated_replies() -> dict[str, Schema]:
    response = {
        "id": _STRING,
        "object": {"const": "response"},
        "created_at": _INTEGER,
        "status": {"enum": ["completed", "incomplete"]},
        "model": _STRING,
        "output": _OBJECTS,
        "usage": _OBJECT,
    }
    message = {
        "id": _STRING,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": _STRING,
        "content": _OBJECTS,
        "stop_reason": {
            "enum": ["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]
        },
        "stop_sequence": {"type": ["string", "null"]},
        "usage": _OBJECT,
    }
    error = {"type": _STRING, "message": _STRING}
    about = {"type": {"const": "error"}, "error": {"type": "object", "properties": error, "required": list(error)}}
    ids = {"first_id": _or_null("string"), "last_id": _or_null("string"), "has_more": {"type": "boolean"}}
    page = {"object": {"const": "list"}, "data": _OBJECTS, **ids}
    deleted = {"id": _STRING, "object": {"const": "response"}, "deleted": {"const": True}}
    return {
        "Response": {"type": "object", "properties": response, "required": list(response)},
        "ItemList": {"type": "object", "properties": page, "required": list(page)},
        "ResponseDeleted": {"type": "object", "properties": deleted, "required": list(deleted)},
        "AnthropicMessage": {"type": "object", "properties": message, "required": list(message)},
        "InputTokens": {
            "type": "object",
            "properties": {"object": {"const": "response.input_tokens"}, "input_tokens": _INTEGER},
            "required": ["object", "input_tokens"],
        },
        "TokenCount": {"type": "object", "properties": {"input_tokens": _INTEGER}, "required": ["input_tokens"]},
        "MessagesError": {"type": "object", "properties": about, "required": list(about)},
    }


def stored_paths(error: Schema) -> dict[str, Schema]:
    """The paths of stored responses. `error`: the schema of errors."""

    def operation(summary: str, answer: str, *parameters: Schema) -> Schema:
        off = "No such response exists for this API key, or the server stores none (`batches.folder`)."
        told = {"400": "A value is out of range.", "404": off, "503": "The store cannot be read or written now."}
        answers = {status: _json(error, text) for status, text in told.items()}
        found = {"200": _json({"$ref": f"#/components/schemas/{answer}"}, summary), **answers}
        return {"summary": summary, "responses": found, "parameters": list(parameters)}

    def query(name: str, schema: Schema) -> Schema:
        return {"name": name, "in": "query", "required": False, "schema": schema}

    path = "/v1/responses/{response_id}"
    named = [{"name": "response_id", "in": "path", "required": True, "schema": {**_STRING, "minLength": 1}}]
    page = (
        query("after", _STRING),
        query("limit", {"type": "integer", "minimum": 1, "maximum": 100}),
        query("order", {"enum": ["asc", "desc"]}),
    )
    return {
        path: {
            "get": operation("Get a stored response", "Response"),
            "delete": operation("Delete a stored response", "ResponseDeleted"),
            "parameters": named,
        },
        f"{path}/input_items": {
            "get": operation("List the items of the conversation up to a stored response", "ItemList", *page),
            "parameters": named,
        },
    }


def _json(schema: Schema, description: str) -> Schema:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
