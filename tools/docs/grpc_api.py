"""Generates the page of the public gRPC API from the comments in its .proto file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2 as pb
from markdown_text import NOTICE, code, plain, table

ROOT = Path(__file__).parents[2]
CONTRACT = "alignedserve/proto/inference.proto"
MESSAGE, SERVICE, FIELD, METHOD = 4, 6, 2, 2  # numbers of a descriptor's lists, which form a comment's path
KINDS = {value: name.removeprefix("TYPE_").lower() for name, value in pb.FieldDescriptorProto.Type.items()}

HEAD = f"""\
# gRPC API

{NOTICE}

`proto/inference.proto` is the contract. Gateways serve it through Ray Serve's gRPC proxy (`gateway.grpc_port`). If the
server requires API keys, send the key in the metadata: `authorization: Bearer KEY` or `x-api-key: KEY`. The Python
client has [its own page](python.md#client).
"""


def page() -> str:
    files = _compile()
    contract = files[CONTRACT]
    messages = {f".{file.package}.{message.name}": message for file in files.values() for message in file.message_type}
    comments = {name: _comments(file) for name, file in files.items()}
    about = comments[CONTRACT]
    lines = [HEAD, *_quoted(about.get((12,), "")), ""]  # the comment above `syntax`
    for number, service in enumerate(contract.service):
        lines += [f"## {service.name}", "", about.get((SERVICE, number), ""), ""]
        lines += table(("call", "request", "answer", "meaning"), _methods(number, service, about))
    lines += ["## Messages", ""]
    used = _used(contract, messages)
    for name, file in files.items():
        for number, message in enumerate(file.message_type):
            if f".{file.package}.{message.name}" in used:
                lines += _message(number, message, comments[name])
    return "\n".join(lines)


def _compile() -> dict[str, pb.FileDescriptorProto]:
    """All contracts, with their comments."""
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "all.pb"
        includes = [f"-Ialignedserve/proto={ROOT / 'proto'}", f"-I{Path(protoc.__file__).parent / '_proto'}"]
        command = ["protoc", *includes, "--include_source_info", "--include_imports", f"--descriptor_set_out={result}"]
        if protoc.main([*command, str(ROOT / "proto/inference.proto")]) != 0:
            raise RuntimeError("proto/inference.proto does not compile; protoc's message is above")
        return {file.name: file for file in pb.FileDescriptorSet.FromString(result.read_bytes()).file}


def _comments(file: pb.FileDescriptorProto) -> dict[tuple[int, ...], str]:
    found = {}
    for place in file.source_code_info.location:
        text = "\n".join([*place.leading_detached_comments, place.leading_comments, place.trailing_comments]).strip()
        if text:
            found[tuple(place.path)] = plain(" ".join(text.split()))
    return found


def _quoted(text: str) -> list[str]:
    return [text] if text else []


def _methods(
    number: int, service: pb.ServiceDescriptorProto, about: dict[tuple[int, ...], str]
) -> Iterator[tuple[str, ...]]:
    for index, method in enumerate(service.method):
        stream_in = "stream of " if method.client_streaming else ""
        stream_out = "stream of " if method.server_streaming else ""
        meaning = about.get((SERVICE, number, METHOD, index), "")
        yield code(method.name), stream_in + _link(method.input_type), stream_out + _link(method.output_type), meaning


def _message(number: int, message: pb.DescriptorProto, about: dict[tuple[int, ...], str]) -> list[str]:
    lines = [f"### {message.name}", "", about.get((MESSAGE, number), ""), ""]
    rows = []
    for index, field in enumerate(message.field):
        meaning = about.get((MESSAGE, number, FIELD, index), "")
        if field.HasField("oneof_index") and not field.proto3_optional:
            meaning = f"one of `{message.oneof_decl[field.oneof_index].name}`{'; ' if meaning else ''}{meaning}"
        rows.append((str(field.number), code(field.name), _type(field), meaning))
    return lines + (table(("number", "field", "type", "meaning"), rows) if rows else ["No fields.", ""])


def _type(field: pb.FieldDescriptorProto) -> str:
    kind = _link(field.type_name) if field.type_name else KINDS[field.type]
    if field.label == field.LABEL_REPEATED:
        return f"list of {kind}"
    return f"{kind}, optional" if field.proto3_optional else kind


def _link(full_name: str) -> str:
    name = full_name.rpartition(".")[2]
    return f"[{name}](#{name.lower()})"


def _used(contract: pb.FileDescriptorProto, messages: dict[str, pb.DescriptorProto]) -> set[str]:
    """Full names of the messages that the contract's calls use, directly or not."""
    waiting = [
        kind for service in contract.service for call in service.method for kind in (call.input_type, call.output_type)
    ]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in messages and name not in found:
            found.add(name)
            waiting += [field.type_name for field in messages[name].field if field.type_name]
    return found
