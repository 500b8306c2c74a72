"""Python client of an AlignedServe cluster: prompts in, tokens out, over gRPC.

Needs `grpcio` and `protobuf` only; neither ray, torch nor transformers is imported.

    from alignedserve.client import Client

    with Client("127.0.0.1:9000") as client:
        print(client.generate("Return the", max_tokens=32).text)
        for chunk in client.stream("Return the", max_tokens=32):
            print(chunk.text, end="", flush=True)

`AsyncClient` has the same methods for asyncio. Every failure is an error of the tree in `alignedserve.errors`.
"""

from alignedserve.client.aio import AsyncChunkStream, AsyncClient
from alignedserve.client.options import ChatTurn, Options
from alignedserve.client.sync import ChunkStream, Client
from alignedserve.client.types import Choice, Chunk, Completion, Logprob, Message, ModelCard, Timings, Usage
from alignedserve.errors import (
    AlignedServeError,
    AuthenticationError,
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RequestError,
    TooLargeError,
    UnavailableError,
)

__all__ = [
    "AlignedServeError",
    "AsyncChunkStream",
    "AsyncClient",
    "AuthenticationError",
    "CancelledError",
    "ChatTurn",
    "Choice",
    "Chunk",
    "ChunkStream",
    "Client",
    "Completion",
    "DeadlineError",
    "InvalidRequestError",
    "Logprob",
    "Message",
    "ModelCard",
    "NotFoundError",
    "Options",
    "OverloadedError",
    "RequestError",
    "Timings",
    "TooLargeError",
    "UnavailableError",
    "Usage",
]
