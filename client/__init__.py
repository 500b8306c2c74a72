"""Python client of an AlignedServe cluster, over gRPC.

It needs only `grpcio` and `protobuf`. It does not import ray, torch or transformers.

    from alignedserve.client import Client

    with Client("127.0.0.1:9000") as client:
        print(client.generate("Return the", max_tokens=32).text)
        for chunk in client.stream("Return the", max_tokens=32):
            print(chunk.text, end="", flush=True)

`AsyncClient` has the same methods for asyncio. `BatchClient` and `AsyncBatchClient` run offline batches over HTTP, and
need httpx. Errors form one hierarchy:

    AlignedServeError           base class: `code`, `request_id`, `retry_after_s` (None if unknown), `details`
    ├── RequestError            the server refuses this request; `param` names the invalid argument
    │   ├── InvalidRequestError     malformed or out of range
    │   │   └── GrammarError            a schema or grammar cannot be followed
    │   ├── AuthenticationError     the API key is missing or unknown to the server
    │   ├── NotFoundError           the model does not exist
    │   ├── TooLargeError           the request exceeds the server's limit
    │   └── OverloadedError         the cluster is full
    ├── DeadlineError           `timeout_s` passed
    ├── CancelledError          the request was cancelled by id, or closed by this client
    ├── UnavailableError        no server answers, or a required process is missing
    ├── IncompleteAnswerError   an answer that was to be parsed was cut before its end
    ├── ToolError               a call of a function by the model cannot be made: `call`, `messages`
    │   ├── UnknownToolError        there is no function of this name
    │   ├── ToolArgumentsError      the arguments are not those of the function
    │   ├── ToolFailedError         the function raised an exception, which is the cause
    │   └── ToolRoundsError         the model still calls functions in the last round
    ├── BatchError              requests of a batch failed; `results` has the answers and the errors
    └── ConfigError             an argument of the client itself is invalid

An AlignedServeError of none of these classes is an internal error of the server.
"""

from alignedserve.client.aio import AsyncChunkStream, AsyncClient
from alignedserve.client.attempts import Backoff
from alignedserve.client.batch_client import AsyncBatchClient, BatchClient
from alignedserve.client.jobs import BatchJob, BatchResult, LineProblem
from alignedserve.client.options import BatchItem, ChatItem, ChatTurn, Options, Progress, Request
from alignedserve.client.structured import ResponseFormat
from alignedserve.client.sync import ChunkStream, Client
from alignedserve.client.tool_loop import AsyncToolStream, ToolResult, ToolRun, ToolStream
from alignedserve.client.tools import Tool
from alignedserve.client.types import (
    Choice,
    Chunk,
    ClientTimings,
    Completion,
    Logprob,
    Message,
    ModelCard,
    Timings,
    ToolCall,
    ToolCallPart,
    Usage,
)
from alignedserve.errors import (
    AlignedServeError,
    AuthenticationError,
    BatchError,
    CancelledError,
    ConfigError,
    DeadlineError,
    GrammarError,
    IncompleteAnswerError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RequestError,
    TooLargeError,
    ToolArgumentsError,
    ToolError,
    ToolFailedError,
    ToolRoundsError,
    UnavailableError,
    UnknownToolError,
)

__all__ = [
    "AlignedServeError",
    "AsyncBatchClient",
    "AsyncChunkStream",
    "AsyncClient",
    "AsyncToolStream",
    "AuthenticationError",
    "Backoff",
    "BatchClient",
    "BatchError",
    "BatchItem",
    "BatchJob",
    "BatchResult",
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
    "GrammarError",
    "IncompleteAnswerError",
    "InvalidRequestError",
    "LineProblem",
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
    "Tool",
    "ToolArgumentsError",
    "ToolCall",
    "ToolCallPart",
    "ToolError",
    "ToolFailedError",
    "ToolResult",
    "ToolRoundsError",
    "ToolRun",
    "ToolStream",
    "UnavailableError",
    "UnknownToolError",
    "Usage",
]
