"""What /openapi.json says of /v1/files and /v1/batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alignedserve.gateway.batches.requests import LEAST_KEPT_S, MOST_BATCHES, MOST_FILES, MOST_KEPT_S
from alignedserve.gateway.batches.states import BatchStatus

Schema = dict[str, Any]

_STRING: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer"}
_OFF = "No such object exists for this API key, or the server keeps no batches (`batches.folder`)."
_MEDIA = "The body is encoded, or a web page sent the request."
_ERRORS = {
    "400": "A value is missing, has a wrong type or is out of range.",
    "404": _OFF,
    "503": "The store cannot be read or written now.",
}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: dict[str, Schema]) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list_of(name: str) -> Schema:
    ids = dict.fromkeys(("first_id", "last_id"), _or_null(_STRING))
    data = {"type": "array", "items": _ref(name)}
    return _object({"object": {"const": "list"}, "data": data, **ids, "has_more": {"type": "boolean"}})


def _json(name: str, description: str) -> Schema:
    return {"description": description, "content": {"application/json": {"schema": _ref(name)}}}


def batch_schemas() -> dict[str, Schema]:
    """The components of answers, by name."""
    stamps = {f"{status}_at": _or_null(_INTEGER) for status in BatchStatus if status is not BatchStatus.VALIDATING}
    problem = _object({"code": _STRING, "message": _STRING, "param": _or_null(_STRING), "line": _or_null(_INTEGER)})
    return {
        "File": _object(
            {
                "id": _STRING,
                "object": {"const": "file"},
                "bytes": _INTEGER,
                "created_at": _INTEGER,
                "expires_at": _INTEGER,
                "filename": _STRING,
                "purpose": {"enum": ["batch", "batch_output"]},
                "status": {"const": "processed"},
                "status_details": {"type": "null"},
            }
        ),
        "FileList": _list_of("File"),
        "FileDeleted": _object({"id": _STRING, "object": {"const": "file"}, "deleted": {"const": True}}),
        "Batch": _object(
            {
                "id": _STRING,
                "object": {"const": "batch"},
                "endpoint": _STRING,
                "errors": _or_null(_object({"object": {"const": "list"}, "data": {"type": "array", "items": problem}})),
                "input_file_id": _STRING,
                "completion_window": _STRING,
                "status": {"enum": [str(status) for status in BatchStatus]},
                "output_file_id": _or_null(_STRING),
                "error_file_id": _or_null(_STRING),
                "created_at": _INTEGER,
                "expires_at": _INTEGER,
                **stamps,
                "request_counts": _object(dict.fromkeys(("total", "completed", "failed"), _INTEGER)),
                "metadata": _or_null({"type": "object", "additionalProperties": _STRING}),
            }
        ),
        "BatchList": _list_of("Batch"),
    }


def _operation(summary: str, answer: Schema, errors: Mapping[str, str] = {}, body: Schema | None = None) -> Schema:
    described = {**_ERRORS, **errors}
    answers = {"200": answer, **{status: _json("Error", text) for status, text in described.items()}}
    found: Schema = {"summary": summary, "responses": answers}
    return found if body is None else {**found, "requestBody": {"required": True, "content": body}}


def _query(name: str, schema: Schema) -> Schema:
    return {"name": name, "in": "query", "required": False, "schema": schema}


def _path(name: str) -> list[Schema]:
    return [{"name": name, "in": "path", "required": True, "schema": {**_STRING, "minLength": 1, "maxLength": 100}}]


def batch_paths() -> dict[str, Schema]:
    """The paths of the document."""
    form = {
        "type": "object",
        "properties": {
            "file": {"type": "string", "format": "binary"},
            "purpose": {"const": "batch"},
            "expires_after[anchor]": {"const": "created_at"},
            "expires_after[seconds]": {"type": "integer", "minimum": LEAST_KEPT_S, "maximum": MOST_KEPT_S},
        },
        "required": ["file", "purpose"],
    }
    refused = {"408": "The body arrived too slowly.", "415": _MEDIA}
    too_large = "The file is over its limit (`batches.max_file_mib`) or over what is left to this API key."
    upload = {**refused, "413": too_large, "429": "Too many files are being uploaded."}
    busy = {"409": "A batch reads the file, or the batch cannot be cancelled any more."}
    posted = {
        **refused,
        "413": "The body is over the limit, or the files of this API key are.",
        "429": "Too many bodies are being read.",
    }
    after, order = _query("after", _STRING), _query("order", {"enum": ["asc", "desc"]})
    content = {"description": "The content.", "content": {"application/octet-stream": {"schema": _STRING}}}
    part = _operation("Get a file's content, or a range of its bytes", content, {"416": "No byte is in the range."})
    part["responses"]["206"] = {**content, "description": "The bytes in the range."}
    pages = [_query("limit", {"type": "integer", "minimum": 1, "maximum": most}) for most in (MOST_FILES, MOST_BATCHES)]
    asked = {"application/json": {"schema": _ref("BatchRequest")}}
    return {
        "/v1/files": {
            "post": _operation(
                "Upload a file for a batch",
                _json("File", "The file."),
                upload,
                {"multipart/form-data": {"schema": form}},
            ),
            "get": {
                **_operation("List files", _json("FileList", "A page of files.")),
                "parameters": [_query("purpose", _STRING), after, pages[0], order],
            },
        },
        "/v1/files/{file_id}": {
            "get": _operation("Describe a file", _json("File", "The file.")),
            "delete": _operation("Delete a file", _json("FileDeleted", "The file was deleted."), busy),
            "parameters": _path("file_id"),
        },
        "/v1/files/{file_id}/content": {
            "get": {**part, "parameters": [{"name": "Range", "in": "header", "required": False, "schema": _STRING}]},
            "parameters": _path("file_id"),
        },
        "/v1/batches": {
            "post": _operation("Answer the requests in a file", _json("Batch", "The batch."), posted, asked),
            "get": {
                **_operation("List batches", _json("BatchList", "A page of batches, newest first.")),
                "parameters": [after, pages[1]],
            },
        },
        "/v1/batches/{batch_id}": {
            "get": _operation("Describe a batch", _json("Batch", "The batch.")),
            "parameters": _path("batch_id"),
        },
        "/v1/batches/{batch_id}/cancel": {
            "post": _operation("Cancel a batch", _json("Batch", "The batch."), {**busy, "415": _MEDIA}),
            "parameters": _path("batch_id"),
        },
    }
