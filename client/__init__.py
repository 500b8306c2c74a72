"""Python client of an AlignedServe cluster, over gRPC.

It needs only `grpcio` and `protobuf`. It does not import ray, torch or transformers.

    from alignedserve.client import Client

    with Client("127.0.0.1:9000") as client:
        print(client.generate("Return the", max_tokens=32).text)
        for chunk in client.stream("Return the", max_tokens=32):
            print(chunk.text, end="", flush=True)

`AsyncClient` has the same methods for asyncio. Errors form one hierarchy:

    AlignedServeError           base class: `code`, `request_id`, `retry_after_s` (None if unknown), `details`
    ├── RequestError            the server refuses this request; `param` names the invalid argument
    │   ├── InvalidRequestError     malformed or out of range
    │   ├── AuthenticationError     the API key is missing or unknown to the server
    │   ├── NotFoundError           the model does not exist
    │   ├── TooLargeError           the request exceeds the server's limit
    │   └── OverloadedError         the cluster is full
    ├── DeadlineError           `timeout_s` passed
    ├── CancelledError          the request was cancelled by id, or closed by this client
    ├── UnavailableError        no server answers, or a required process is missing
    ├── IncompleteAnswerError   an answer that was to be parsed was cut before its end
    ├── BatchError              requests of a batch failed; `results` has the answers and the errors
    └── ConfigError             an argument of the client itself is invalid

An AlignedServeError of none of these classes is an internal error of the server.
"""

from alignedserve.client.aio import AsyncChunkStream, AsyncClient
from alignedserve.client.attempts import Backoff
from alignedserve.client.options import BatchItem, ChatItem, ChatTurn, Options, Progress, Request
from alignedserve.client.structured import ResponseFormat
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
    IncompleteAnswerError,
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
    "IncompleteAnswerError",
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
    "ResponseFormat",
    "Timings",
    "TooLargeError",
    "UnavailableError",
    "Usage",
]
