"""JSON schemas of request bodies, generated from the models that validate them."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from pydantic_core import core_schema

from alignedserve.gateway.batches.requests import BatchRequest
from alignedserve.gateway.body.refused import refused_names
from alignedserve.gateway.body.requests import ChatRequest, CompletionRequest, Unread
from alignedserve.gateway.body.token_requests import DetokenizeRequest, TokenizeRequest

Schema = dict[str, Any]

_BODY = (
    "A field that is null counts as absent. Unknown fields are ignored and named in the header "
    "x-alignedserve-ignored-fields. These fields are refused, unless their value has no effect: "
    f"{', '.join(refused_names())}."
)
_UNREAD = "Accepted and ignored."


class _Generate(GenerateJsonSchema):
    """Generates schemas without titles. Optional fields may be null."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def nullable_schema(self, schema: core_schema.NullableSchema) -> Schema:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> Schema:
        inner = super().default_schema(schema)
        return {name: value for name, value in inner.items() if name != "default" or value not in (None, [])}

    def tagged_union_schema(self, schema: core_schema.TaggedUnionSchema) -> Schema:
        return {"anyOf": super().tagged_union_schema(schema)["oneOf"]}

    def model_schema(self, schema: core_schema.ModelSchema) -> Schema:
        model = super().model_schema(schema)
        del model["title"]
        required = model.get("required", [])
        fields = {name: field if name in required else _or_null(field) for name, field in model["properties"].items()}
        return {**model, "properties": {**{name: fields[name] for name in required}, **fields}, "required": required}


def _or_null(schema: Schema) -> Schema:
    kind = schema.get("type")
    if isinstance(kind, str) and "enum" not in schema and "const" not in schema:
        return {**schema, "type": [kind, "null"]}
    about = {name: value for name, value in schema.items() if name in ("description", "default")}
    kinds = schema["anyOf"] if "anyOf" in schema else [{k: v for k, v in schema.items() if k not in about}]
    return {"anyOf": [*kinds, {"type": "null"}], **about}


def request_schemas() -> dict[str, Schema]:
    """All components that describe request bodies, by name."""
    kinds = (CompletionRequest, ChatRequest)
    _, found = models_json_schema(
        [(kind, "validation") for kind in (*kinds, TokenizeRequest, DetokenizeRequest, BatchRequest)],
        ref_template="#/components/schemas/{model}",
        schema_generator=_Generate,
    )
    schemas: dict[str, Schema] = found["$defs"]
    for kind in kinds:
        body = schemas[kind.__name__]
        body["description"] = _BODY
        for name in Unread.model_fields:
            body["properties"][name]["description"] = _UNREAD
    return schemas
