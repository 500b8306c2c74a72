"""An Inference service whose prompt selects the answer, and functions that call it through either client.

Prompts: "hold" sends one piece of the answer and waits to be cancelled, "fail STATUS details" fails, "break" fails
half way, "long" answers with more than gRPC's default limit of 4 MiB; every other prompt gets " a", " b".
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc

from alignedserve.client import AsyncChunkStream, AsyncClient, ChunkStream, Client, Timings
from alignedserve.proto import inference_pb2 as pb
from alignedserve.proto.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server

TIMINGS = Timings(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, "prefill-0", "decode-0")
LONG_TEXT = "long" * 2_000_000
_register: Callable[[Any, grpc.Server], None] = add_InferenceServicer_to_server  # generated without types


class ScriptedInference(InferenceServicer):
    """Records its `requests` and the last call's `metadata`.

    `held` is set while a "hold" waits, `released` once that call has ended in any way.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: dict[str, str | bytes] = {}
        self.held = threading.Event()
        self.released = threading.Event()
        self._cancelled: dict[str, threading.Event] = {}

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.GenerateResponse:
        chunks = list(self.Stream(request, context))
        answer = pb.Choice(index=0, text="".join(chunk.choice.text for chunk in chunks), finish_reason="length")
        for chunk in chunks:
            answer.token_ids.extend(chunk.choice.token_ids)
            answer.logprobs.extend(chunk.choice.logprobs)
        last = chunks[-1]
        response = pb.GenerateResponse(request_id=last.request_id, model="tiny", choices=[answer], usage=last.usage)
        response.prompt_token_ids.extend(chunks[0].prompt_token_ids)
        if last.HasField("timings"):
            response.timings.CopyFrom(last.timings)
        return response

    def Stream(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateChunk]:
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata())
        request_id = request.request_id or "made-up"
        kind, *rest = request.prompt.split(" ", 2)
        if kind == "fail":
            context.abort(grpc.StatusCode[rest[0]], rest[1])
        cancelled = threading.Event()
        if kind == "hold":
            self._cancelled[request_id] = cancelled
            if not context.add_callback(self.released.set):  # the call has already ended
                self.released.set()
        yield _first_chunk(request, request_id, LONG_TEXT if kind == "long" else " a")
        if kind == "hold":
            self._hold(cancelled, context)
        if kind == "break":
            context.abort(grpc.StatusCode.INTERNAL, "the actor died")
        yield _last_chunk(request, request_id)

    def Cancel(self, request: pb.CancelRequest, context: grpc.ServicerContext) -> pb.CancelResponse:
        cancelled = self._cancelled.get(request.request_id)
        if cancelled is not None:
            cancelled.set()
        return pb.CancelResponse(found=cancelled is not None)

    def ListModels(self, request: object, context: grpc.ServicerContext) -> pb.ModelList:
        return pb.ModelList(models=[pb.ModelCard(id="tiny", max_positions=8192)])

    def _hold(self, cancelled: threading.Event, context: grpc.ServicerContext) -> None:
        self.held.set()
        while context.is_active():
            if cancelled.wait(0.01):
                context.abort(grpc.StatusCode.CANCELLED, "cancelled by request [code=cancelled]")


def _first_chunk(request: pb.GenerateRequest, request_id: str, text: str) -> pb.GenerateChunk:
    choice = pb.Choice(index=0, text=text, token_ids=[7])
    if request.HasField("logprobs"):
        alternative = pb.TokenLogprobText(token_id=8, token=" b", logprob=-1.0)
        choice.logprobs.add(token_id=7, token=" a", logprob=-0.5, top=[alternative])
    return pb.GenerateChunk(request_id=request_id, model="tiny", prompt_token_ids=[1, 2], choice=choice)


def _last_chunk(request: pb.GenerateRequest, request_id: str) -> pb.GenerateChunk:
    choice = pb.Choice(index=0, text=" b", token_ids=[8, 9], finish_reason="length")
    usage = pb.Usage(prompt_tokens=2, completion_tokens=3)
    chunk = pb.GenerateChunk(request_id=request_id, model="tiny", choice=choice, usage=usage)
    if request.include_timings:
        chunk.timings.CopyFrom(pb.RequestTimings(**{name: getattr(TIMINGS, name) for name in Timings.__slots__}))
    return chunk


def start_server(service: ScriptedInference, port: int = 0) -> tuple[grpc.Server, str]:
    """Start a server on 127.0.0.1 (port 0: a free port). Returns it and its address; the caller stops it."""
    server = grpc.server(futures.ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
    _register(service, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    return server, f"127.0.0.1:{port}"


def ask_sync(address: str, settings: dict[str, Any], method: str, *args: Any, **options: Any) -> Any:
    """Make one call of a new `Client(address, **settings)`. A stream is returned as a list."""
    with Client(address, **settings) as client:
        answer = getattr(client, method)(*args, **options)
        return list(answer) if isinstance(answer, ChunkStream) else answer


def ask_async(address: str, settings: dict[str, Any], method: str, *args: Any, **options: Any) -> Any:
    """Like `ask_sync`, through an `AsyncClient` in a new event loop."""

    async def ask() -> Any:
        async with AsyncClient(address, **settings) as client:
            answer = getattr(client, method)(*args, **options)
            return [chunk async for chunk in answer] if isinstance(answer, AsyncChunkStream) else await answer

    return asyncio.run(ask())
