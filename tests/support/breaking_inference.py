"""An Inference service that resumes like a gateway, and whose calls fail where a test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import grpc

from alignedserve.proto import inference_pb2 as pb
from alignedserve.proto.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server

_register: Callable[[Any, grpc.Server], None] = add_InferenceServicer_to_server  # generated without types
SEED = 77


@dataclass(frozen=True)
class Fault:
    """One call fails with `status` after a number of chunks. A call that is not streamed fails before its answer. With
    OK the stream just ends there.
    """

    chunks: int
    status: grpc.StatusCode
    details: str


BREAKS = (
    (grpc.StatusCode.UNAVAILABLE, "Stream removed (Socket closed)"),
    (grpc.StatusCode.INTERNAL, "the actor died"),
    (grpc.StatusCode.CANCELLED, "Stream removed (Received RST_STREAM with error code 8)"),
    (grpc.StatusCode.UNKNOWN, "Received http2 header with status: 503"),
    (grpc.StatusCode.UNAVAILABLE, "this gateway is shutting down [code=shutting_down]"),
    (grpc.StatusCode.OK, ""),
)
"""Status and details of broken connections, of gateways that end, and of proxies that report these as success."""


class BreakingInference(InferenceServicer):
    """Answers consist of chunks of `sizes` tokens. Answer `index` begins at token 1000 * index.

    A token's text is its number in angle brackets. The chunks of n answers take turns.

    Each call takes the first of `faults`, until there are none. `requests` are the received requests.
    `usage_with_each_end`: the usage comes with each answer's end, not only with the last chunk.
    """

    def __init__(self, sizes: Sequence[int], faults: Sequence[Fault] = ()) -> None:
        self.sizes = list(sizes)
        self.faults = list(faults)
        self.usage_with_each_end = False
        self.requests: list[pb.GenerateRequest] = []
        self._lock = threading.Lock()

    def answer(self, index: int) -> tuple[str, tuple[int, ...]]:
        """The text and tokens of a whole answer."""
        tokens = tuple(range(1000 * index, 1000 * index + sum(self.sizes)))
        return "".join(f"<{token}>" for token in tokens), tokens

    def Stream(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateChunk]:
        fault = self._note(request)
        for sent, chunk in enumerate(self._chunks(request)):
            if fault is not None and sent == fault.chunks:
                break
            yield chunk
        if fault is not None and fault.status is not grpc.StatusCode.OK:  # at or after the last chunk
            context.abort(fault.status, fault.details)

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.GenerateResponse:
        fault = self._note(request)
        if fault is not None:
            context.abort(fault.status, fault.details)
        text, tokens = self.answer(0)
        choice = pb.Choice(index=0, text=text, token_ids=tokens, finish_reason="length")
        usage = pb.Usage(prompt_tokens=2, completion_tokens=len(tokens))
        return pb.GenerateResponse(request_id=request.request_id, model="tiny", choices=[choice], usage=usage)

    def ListModels(self, request: object, context: grpc.ServicerContext) -> pb.ModelList:
        fault = self._note(pb.GenerateRequest())
        if fault is not None:
            context.abort(fault.status, fault.details)
        return pb.ModelList(models=[pb.ModelCard(id="tiny", max_positions=8192)])

    def _note(self, request: pb.GenerateRequest) -> Fault | None:
        with self._lock:
            self.requests.append(request)
            return self.faults.pop(0) if self.faults else None

    def _chunks(self, request: pb.GenerateRequest) -> Iterator[pb.GenerateChunk]:
        n = request.n or 1
        given = [list(entry.token_ids) for entry in request.resume] or [[] for _ in range(n)]
        for index, had in enumerate(given):
            assert tuple(had) == self.answer(index)[1][: len(had)], "the client has other tokens than were sent to it"
        if any(given):
            assert request.seed == SEED, "a resumed request needs the seed of its first call"
        left = [self._left(index, len(had)) for index, had in enumerate(given)]
        ended = [entry.finish_reason for entry in request.resume] or [""] * n
        order = [
            (index, tokens)
            for turn in range(len(self.sizes))
            for index in range(n)
            for tokens in left[index][turn:][:1]
        ]
        # An answer whose end was sent is skipped. An answer whose end was not sent gets it, without new tokens.
        order += [(index, ()) for index in range(n) if not left[index] and not ended[index]]
        total = n * sum(self.sizes)
        for number, (index, tokens) in enumerate(order):
            done = not tokens or tokens[-1] == self.answer(index)[1][-1]
            text = "".join(f"<{token}>" for token in tokens)
            choice = pb.Choice(index=index, text=text, token_ids=tokens, finish_reason="length" if done else "")
            chunk = pb.GenerateChunk(request_id=request.request_id, model="tiny", choice=choice)
            if number == 0:
                chunk.prompt_token_ids.extend([1, 2])
                chunk.seed, chunk.max_tokens = SEED, total
            if number == len(order) - 1 or (self.usage_with_each_end and done):
                chunk.usage.CopyFrom(pb.Usage(prompt_tokens=2, completion_tokens=total))
            yield chunk

    def _left(self, index: int, given: int) -> list[tuple[int, ...]]:
        """The chunks of an answer after the given number of its tokens."""
        tokens, chunks, begin = self.answer(index)[1], [], 0
        for size in self.sizes:
            end = begin + size
            if end > given:
                chunks.append(tokens[max(begin, given) : end])
            begin = end
        return chunks


def serve(service: InferenceServicer, credentials: grpc.ServerCredentials | None = None) -> tuple[grpc.Server, str]:
    """Start a server on 127.0.0.1. Returns it and its address; the caller stops it."""
    server = grpc.server(futures.ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)])
    _register(service, server)
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    return server, f"127.0.0.1:{port}"
