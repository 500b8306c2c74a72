"""Python client of an AlignedServe cluster: prompts in, tokens out, over gRPC.

Needs `grpcio` and `protobuf` only; neither ray, torch nor transformers is imported.

    from alignedserve.client import Client

    with Client("127.0.0.1:9000") as client:
        print(client.generate("Return the", max_tokens=32).text)
        for chunk in client.stream("Return the", max_tokens=32):
            print(chunk.text, end="", flush=True)

`AsyncClient` has the same methods for asyncio. Failures are one tree:

    AlignedServeError           base of all: `code`, `request_id`, `retry_after_s` (None where not known), `details`
    ├── RequestError            the server will not serve this request; `param` names the argument at fault
    │   ├── InvalidRequestError     malformed or out of range
    │   ├── AuthenticationError     no API key, or none that the server knows
    │   ├── NotFoundError           no such model
    │   ├── TooLargeError           over the server's limit
    │   └── OverloadedError         the cluster is full
    ├── DeadlineError           `timeout_s` passed
    ├── CancelledError          cancelled by id, or closed by this client
    ├── UnavailableError        nothing answers, or a role that is needed is not there
    ├── BatchError              requests of a batch failed; `results` has the answers and the errors
    └── ConfigError             an argument of the client itself cannot be used

An AlignedServeError of no such class is a failure of the server's own.
"""

from alignedserve.client.aio import AsyncChunkStream, AsyncClient
from alignedserve.client.attempts import Backoff
from alignedserve.client.options import BatchItem, ChatItem, ChatTurn, Options, Progress, Request
from alignedserve.client.sync import ChunkStream, Client
from alignedserve.client.types import (
    Choice,
    Chunk,
    ClientTimings,
    Completion,
    Logprob,
    Message,
    ModelCard,
    Timings,
    Usage,
)
from alignedserve.errors import (
    AlignedServeError,
    AuthenticationError,
    BatchError,
    CancelledError,
    ConfigError,
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
    "Backoff",
    "BatchError",
    "BatchItem",
    "CancelledError",
    "ChatItem",
    "ChatTurn",
    "Choice",
    "Chunk",
    "ChunkStream",
    "Client",
    "ClientTimings",
    "Completion",
    "ConfigError",
    "DeadlineError",
    "InvalidRequestError",
    "Logprob",
    "Message",
    "ModelCard",
    "NotFoundError",
    "Options",
    "OverloadedError",
    "Progress",
    "Request",
    "RequestError",
    "Timings",
    "TooLargeError",
    "UnavailableError",
    "Usage",
]
