"""Seeded input from a broken, old or hostile peer: noise, truncated messages and messages without meaning."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
CORRUPT = b"\xff" * 9  # no message
_NUMBERS = (0, 1, 2, 7, 63, 1 << 20, (1 << 31) - 1)
_WORDS = ("", "x", "nobody-0", "gateway-9", "é" * 40, "a" * 70_000)


def socket_noise(draw: random.Random) -> list[bytes]:
    """Bytes to write to a gRPC port. None of them is a call."""
    noise = draw.randbytes
    settings = struct.pack("!I", 0)[1:] + b"\x04\x00" + struct.pack("!I", 0)
    huge = b"\xff\xff\xff" + b"\x00\x01" + struct.pack("!I", 1)
    headers = struct.pack("!I", 64)[1:] + b"\x01\x04" + struct.pack("!I", 1) + noise(64)
    frames = b"".join(
        struct.pack("!I", 16)[1:] + bytes([draw.randrange(12), draw.randrange(256)]) + noise(20) for _ in range(50)
    )
    return [
        b"",
        noise(1),
        noise(4096),
        b"GET / HTTP/1.1\r\n\r\n",
        PREFACE,
        PREFACE[:10],
        PREFACE + noise(512),
        PREFACE + settings + huge + noise(2048),
        PREFACE + settings + headers + noise(256),
        PREFACE + settings + frames,
    ]


async def throw(address: str, data: bytes, wait_s: float = 0.2) -> None:
    """Connect, write, read for a moment, and disconnect."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    with contextlib.suppress(OSError, TimeoutError):
        writer.write(data)
        await writer.drain()
        await asyncio.wait_for(reader.read(1 << 16), wait_s)
    writer.close()


def message(descriptor: Any, draw: random.Random, depth: int = 0) -> Any:
    """A well-formed message with any values."""
    built = GetMessageClass(descriptor)()
    chosen = {oneof.name: draw.choice(oneof.fields).name for oneof in descriptor.oneofs}
    for field in descriptor.fields:
        if field.containing_oneof is not None and chosen[field.containing_oneof.name] != field.name:
            continue
        nested = field.message_type
        if nested is not None and (depth > 4 or nested.GetOptions().map_entry):
            continue
        if field.containing_oneof is None and draw.random() < 0.3:
            continue
        values = [_value(field, draw, depth) for _ in range(draw.randrange(1, 4) if field.is_repeated else 1)]
        if field.is_repeated:
            getattr(built, field.name).extend(values)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            getattr(built, field.name).CopyFrom(values[0])
        else:
            setattr(built, field.name, values[0])
    return built


def _value(field: FieldDescriptor, draw: random.Random, depth: int) -> Any:
    kind = field.type
    if kind == FieldDescriptor.TYPE_MESSAGE:
        return message(field.message_type, draw, depth + 1)
    if kind == FieldDescriptor.TYPE_STRING:
        return draw.choice(_WORDS)
    if kind == FieldDescriptor.TYPE_BYTES:
        return draw.randbytes(16)
    if kind == FieldDescriptor.TYPE_BOOL:
        return draw.random() < 0.5
    if kind in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return draw.choice((0.0, -1.0, 1.5, 1e30, float("nan"), float("inf")))
    if kind == FieldDescriptor.TYPE_ENUM:
        return draw.choice((0, 1, 2, 99))
    return draw.choice(_NUMBERS)


def sensible(method: MethodDescriptor, draw: random.Random, count: int) -> list[bytes]:
    """Well-formed requests of a method with random values."""
    return [message(method.input_type, draw).SerializeToString() for _ in range(count)]


def payloads(method: MethodDescriptor, draw: random.Random, count: int) -> list[bytes]:
    """Requests of a method: well-formed ones, truncated ones, and noise."""
    made = sensible(method, draw, count)
    cut = [data[: draw.randrange(len(data))] for data in made if len(data) > 1][: count // 2 + 1]
    return [*made, *cut, CORRUPT, draw.randbytes(200)]


async def call(
    channel: grpc.aio.Channel,
    service: ServiceDescriptor,
    method: MethodDescriptor,
    data: Sequence[bytes],
    metadata: Sequence[tuple[str, str]],
    timeout_s: float,
) -> grpc.StatusCode:
    """Send `data` as one stream, or in one call each if the method takes one message. Returns the last status."""
    path = f"/{service.full_name}/{method.name}"

    async def requests() -> AsyncIterator[bytes]:
        for part in data:
            yield part

    kind = ("stream" if method.client_streaming else "unary") + "_" + ("stream" if method.server_streaming else "unary")
    code = grpc.StatusCode.OK
    for argument in [requests()] if method.client_streaming else data:
        asked = getattr(channel, kind)(path)(argument, metadata=metadata, timeout=timeout_s)
        try:
            if method.server_streaming:
                async for _ in asked:
                    pass
            else:
                await asked
            code = await asked.code()
        except grpc.aio.AioRpcError as error:
            code = error.code()
    return code
