"""The page of the HTTP API, from the OpenAPI document that gateways serve."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from markdown_text import NOTICE, code, plain, table

from alignedserve.cluster.serve.haproxy_errors import ANSWERS
from alignedserve.gateway.http.openapi import openapi_json

Schema = Mapping[str, Any]

HEAD = f"""\
# HTTP API

{NOTICE}

The OpenAI API, and a few additional paths. A gateway serves this description as `GET /openapi.json`
([the file](openapi.json)), and checks requests against the same fields. If the server requires API keys, send the key
as `Authorization: Bearer KEY` or `x-api-key: KEY`.
"""

FRONT = """\
HAProxy in front of the gateways answers these errors itself, for any path. Each is an [Error](#error), too:\
"""


def document() -> str:
    return json.dumps(json.loads(openapi_json()), indent=2) + "\n"


def page() -> str:
    api = json.loads(openapi_json())
    lines = [HEAD, "## Paths", ""]
    for path, item in api["paths"].items():
        for method in (name for name in ("get", "post", "delete") if name in item):
            lines += _operation(method.upper(), path, item[method], item.get("parameters", []))
    lines += ["## Errors of HAProxy", "", FRONT, ""]
    front = [(str(status), code(answer.code), plain(answer.message)) for status, answer in ANSWERS.items()]
    lines += table(("status", "code", "meaning"), front)
    lines += ["## Schemas", ""]
    for name, schema in api["components"]["schemas"].items():
        lines += [f"### {name}", ""]
        if "description" in schema:
            lines += [plain(schema["description"]), ""]
        if schema.get("properties"):
            lines += _fields(schema)
    return "\n".join(lines)


def _operation(method: str, path: str, operation: Schema, shared: list[Schema]) -> list[str]:
    summary = operation["summary"]
    lines = [f"### {method} {path}", "", plain(summary if summary.endswith(("?", "!", ".")) else f"{summary}."), ""]
    if operation.get("security") == []:
        lines += ["Requires no API key.", ""]
    for parameter in [*shared, *operation.get("parameters", [])]:
        lines += [f"`{parameter['name']}` ({parameter['in']}): {_kind(parameter['schema'])}.", ""]
    if "requestBody" in operation:
        for media, content in operation["requestBody"]["content"].items():
            shown = _kind(content["schema"]) if media == "application/json" else _form(media, content["schema"])
            lines += [f"Body: {shown}.", ""]
    rows = []
    for status, answer in operation["responses"].items():
        contents = answer.get("content", {})
        kinds = [_kind(content["schema"]) for media, content in contents.items() if media == "application/json"]
        kinds += [code(media) for media in contents if media != "application/json"]
        rows.append((status, plain(answer["description"]), ", ".join(kinds)))
    return lines + table(("status", "meaning", "body"), rows)


def _form(media: str, schema: Schema) -> str:
    return f"{code(media)} with {', '.join(map(code, schema['properties']))}"


def _fields(schema: Schema) -> list[str]:
    required = schema.get("required", ())
    rows = [
        (code(name) + (" \\*" if name in required else ""), _kind(field), plain(_about(field)))
        for name, field in schema["properties"].items()
    ]
    found = table(("field", "type", "meaning"), rows)
    return [*found, "\\* always present", ""] if required else found


def _about(field: Schema) -> str:
    text = str(field.get("description", ""))
    if "default" in field and field["default"] is not None:
        text += f" Default: {field['default']}."
    return text.strip()


def _kind(schema: Schema) -> str:
    """A short description of a schema."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in schema:
        return code(json.dumps(schema["const"]))
    if "enum" in schema:
        return ", ".join(code(json.dumps(value)) for value in schema["enum"])
    if "anyOf" in schema:
        kinds = [_kind(one) for one in schema["anyOf"] if one != {"type": "null"}]
        return " or ".join(dict.fromkeys(kinds))
    kind = schema.get("type", "anything")
    if isinstance(kind, list):
        return " or ".join(name for name in kind if name != "null")
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    limits = [f"{word} {schema[name]:,}" for name, word in _LIMITS.items() if name in schema]
    return " ".join([{"object": "object", "string": "text"}.get(kind, kind), ", ".join(limits)]).strip()


_LIMITS = {
    "minimum": "from",
    "exclusiveMinimum": "over",
    "maximum": "to",
    "exclusiveMaximum": "under",
    "minLength": "of at least",
    "maxLength": "of at most",
}
