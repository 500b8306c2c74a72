"""The blocking client. `AsyncClient`'s methods follow the contracts of the methods here."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, overload

import grpc

from alignedserve.client.attempts import DEFAULT_BACKOFF, DEFAULT_RESUME_S, Attempts, Backoff, Tries
from alignedserve.client.batch import DEFAULT_CONCURRENCY, Batch, Outcome
from alignedserve.client.calls import Call, CallPlanner, open_stub
from alignedserve.client.connections import (
    DEFAULT_ADDRESS,
    DEFAULT_CONNECT_TIMEOUT_S,
    Rotation,
    Transport,
    parse_addresses,
)
from alignedserve.client.failures import EndedEarlyError
from alignedserve.client.messages import join_chunks
from alignedserve.client.options import BatchItem, ChatItem, ChatTurn, Options, Progress
from alignedserve.client.threads import Halt, run_batch
from alignedserve.client.tool_methods import ToolMethods
from alignedserve.client.types import Chunk, ClientTimings, Completion, ModelCard
from alignedserve.errors import AlignedServeError

Result = TypeVar("Result")


def _run_here(method: Any, call: Call[Any]) -> Any:
    return method(call.message, timeout=call.timeout_s, metadata=call.metadata)


class ChunkStream(Iterator[Chunk]):
    """The chunks of one request as they are generated. Several threads must not use it at the same time.

    Leaving early cancels the request at the server: by `close()`, the end of a `with` block, or dropping the last
    reference (a `break` in a `for` loop over `client.stream(...)`). Reading after that raises CancelledError, unless
    the last chunk had been read. A broken connection is replaced: see `resume_s` of `Client`.
    """

    def __init__(self, attempts: Attempts, send: Callable[[Attempts], Any], cut: threading.Event) -> None:
        self._attempts = attempts
        self._send = send
        self._chunks: list[Chunk] = []
        self._closed = False
        self._cut = cut  # ends a wait between attempts: this stream or its client was closed
        self._responses = send(attempts)

    @property
    def request_id(self) -> str:
        """The id of the request, for `Client.cancel` and logs."""
        return self._attempts.request_id

    @property
    def client_timings(self) -> ClientTimings:
        """Seconds measured by this client until now. `ttft_s` is set from the first token on."""
        return self._attempts.timings()

    def completion(self) -> Completion:
        """Read the remaining chunks, and return the complete result, including chunks that were read before.

        Raises the same errors as reading; CancelledError if the stream was closed before its last chunk.
        """
        for _ in self:
            pass
        return join_chunks(self._chunks, self._attempts.timings(), self._attempts.call.read)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        while True:
            try:
                message = next(self._responses, None)
                if message is None and not self._attempts.complete:
                    raise EndedEarlyError
            except grpc.RpcError as error:
                if self._attempts.complete:
                    raise StopIteration from None  # all chunks arrived; only the final status is missing
                self._go_on(error)
                continue
            if message is None:
                raise StopIteration
            self._attempts.take(message)
            chunk: Chunk = self._attempts.call.parse(message, self._attempts.timings())
            self._chunks.append(chunk)
            return chunk

    def _go_on(self, error: grpc.RpcError) -> None:
        wait_s = None if self._closed else self._attempts.again(error)
        if wait_s is None:
            raise self._attempts.error(error) from error
        if self._cut.wait(wait_s):
            raise self._attempts.call.closed_here(self.request_id) from error
        self._responses = self._send(self._attempts)
        if self._closed:
            self._responses.cancel()

    def close(self) -> None:
        """Cancel the request unless its last chunk has been read. May be called repeatedly, and by another thread."""
        self._closed = True
        self._cut.set()
        self._responses.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if "_responses" in self.__dict__:  # sending may have failed
            self.close()


class Client(ToolMethods):
    """A blocking client of one cluster. Threads may share it; a process forked from this one needs its own.

    Args:
        address: HOST:PORT of the cluster's gRPC port, or several of them. Calls use them in turn, and skip an address
            that does not answer for a few seconds.
        model: the served model for calls that name none; None: the only one.
        application: the Serve application's name, if a Ray cluster runs several.
        timeout_s: time limit in seconds, including retries, for calls without their own limit; None: no limit.
        api_key: for a server with an --api-key-file; None: the environment variable ALIGNEDSERVE_API_KEY.
        max_retries: maximum retries of a call that no server has accepted: the cluster is full, a required process is
            missing, a proxy that has just started knows no application, or no address answers.
        backoff: how long to wait before each retry.
        resume_s: if a connection broke or a gateway ended, the call continues through another connection. A stream
            continues with the same tokens and text; nothing is repeated. The error is raised if no token arrives for
            this many seconds after a failure; 0 raises it at once.
        tls: True: verify the server's certificate with the system's certificates or `root_certificates`. gRPC
            credentials are accepted, too, for client certificates.
        root_certificates: PEM, as bytes or a file's path, to verify the server; implies TLS.
        server_name: the name in the server's certificate, if it differs from the host in `address`.
        connect_timeout_s: maximum time to connect to one address, in seconds.
        keepalive_s: while calls are open, a connection that is silent for this many seconds is pinged, and counts as
            broken if no answer arrives within the same time. None: no pings. HAProxy, which `alignedserve serve` uses,
            accepts any value; other servers may refuse values under 300.

    Connections are opened by the first call that needs them, and reopened after they break. A `with` block closes them.

    Besides its own errors, every method raises:
        InvalidRequestError: an argument is malformed or out of range; `param` names it.
        AuthenticationError: the server requires an API key, and this one is missing or unknown.
        DeadlineError: `timeout_s` passed.
        CancelledError: the request was cancelled, by `cancel` or by closing its stream or the client.
        UnavailableError: no server answers at `address`, or a required process is missing.
        AlignedServeError: base class of these errors; itself for internal errors of the server. `code` is the server's
            error code, `request_id` names the request, `retry_after_s` says when to retry (both may be None);
            `details` has `status`, the gRPC status, and `address`.
        RuntimeError: the client has been closed.

    Raises:
        ConfigError: an argument of the client itself is invalid.

    Example:
        with Client("127.0.0.1:9000", timeout_s=60) as client:
            print(client.generate("Return the", max_tokens=32).text)
    """

    def __init__(
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        model: str | None = None,
        application: str | None = None,
        timeout_s: float | None = None,
        api_key: str | None = None,
        max_retries: int = 2,
        backoff: Backoff = DEFAULT_BACKOFF,
        resume_s: float = DEFAULT_RESUME_S,
        tls: bool | grpc.ChannelCredentials = False,
        root_certificates: bytes | str | os.PathLike[str] | None = None,
        server_name: str | None = None,
        connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S,
        keepalive_s: float | None = None,
    ) -> None:
        self._planner = CallPlanner(model, application, timeout_s, api_key, max_retries)
        self._transport = Transport(tls, root_certificates, server_name, connect_timeout_s, keepalive_s)
        self._tries = Tries(Rotation(parse_addresses(address)), backoff, resume_s)
        self._channels: dict[str, tuple[grpc.Channel, Any]] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._cut = threading.Event()
        self._cuts = weakref.WeakSet([self._cut])  # of all calls that may wait between attempts

    def generate(
        self, prompt: str | None = None, *, prompt_token_ids: Iterable[int] | None = None, **options: Unpack[Options]
    ) -> Completion:
        """Complete a prompt and wait for the complete result.

        Args:
            prompt: text, which the server tokenises.
            prompt_token_ids: token ids instead of text; give exactly one of the two.
            options: sampling, `model`, `request_id`, `timeout_s` in seconds: see `Options`.

        Raises:
            NotFoundError: the model does not exist.
            OverloadedError: the cluster is full; retry after `retry_after_s` seconds.
            TooLargeError: the request exceeds the server's limit.

        Example:
            completion = client.generate("Return the", max_tokens=32, temperature=0, stop="\\n")
            print(completion.text, completion.choices[0].finish_reason, completion.usage.completion_tokens)
        """
        return self._ask(self._planner.generate(prompt, prompt_token_ids, options))

    def stream(
        self, prompt: str | None = None, *, prompt_token_ids: Iterable[int] | None = None, **options: Unpack[Options]
    ) -> ChunkStream:
        """Complete a prompt as a stream of chunks.

        Arguments and errors are those of `generate`. Invalid arguments raise here; errors of the server are raised by
        the iterator, possibly in the middle of the answer. `timeout_s` covers the whole stream.

        Example:
            for chunk in client.stream("Return the", max_tokens=32):
                print(chunk.text, end="", flush=True)
        """
        return self._follow(self._planner.stream(prompt, prompt_token_ids, options))

    def chat(self, messages: Iterable[ChatTurn], **options: Unpack[Options]) -> Completion:
        """Answer a conversation and wait for the complete result.

        Args:
            messages: the turns so far, each a `Message` or a dict with `role` and `content`, and as in the HTTP API
                `tool_calls`, `tool_call_id`, `reasoning_content`. The server applies the model's chat template.
            options: as for `generate`; `max_tokens` is by default all positions that the model has left.

        Raises: as `generate`; InvalidRequestError also if the model has no chat template.

        Example:
            answer = client.chat([{"role": "user", "content": "What does len return?"}], max_tokens=64)
            print(answer.text)
        """
        return self._ask(self._planner.chat(messages, options))

    def chat_stream(self, messages: Iterable[ChatTurn], **options: Unpack[Options]) -> ChunkStream:
        """Answer a conversation as a stream of chunks.

        Arguments are those of `chat`; errors are raised as by `stream`.

        Example:
            for chunk in client.chat_stream([Message("user", "What does len return?")]):
                print(chunk.text, end="", flush=True)
        """
        return self._follow(self._planner.chat_stream(messages, options))

    @overload
    def generate_many(
        self,
        prompts: Iterable[BatchItem],
        *,
        concurrency: int = ...,
        progress: Progress = ...,
        return_exceptions: Literal[False] = ...,
        **options: Unpack[Options],
    ) -> list[Completion]: ...

    @overload
    def generate_many(
        self,
        prompts: Iterable[BatchItem],
        *,
        concurrency: int = ...,
        progress: Progress = ...,
        return_exceptions: bool,
        **options: Unpack[Options],
    ) -> list[Completion | AlignedServeError]: ...

    def generate_many(
        self,
        prompts: Iterable[BatchItem],
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        progress: Progress = False,
        return_exceptions: bool = False,
        **options: Unpack[Options],
    ) -> Any:
        """Complete many prompts, several at a time, and return the answers in the order of the prompts.

        Args:
            prompts: each a string, a sequence of token ids, or a dict with one of `prompt`, `prompt_token_ids` and
                `messages`, and its own options, which override the shared ones. Prompts are taken one by one in the
                caller's thread. All results are kept in memory: split millions of prompts into several batches.
            concurrency: maximum open requests.
            progress: True shows a `tqdm` bar (`pip install tqdm`). A function is called after each request with the
                number of finished requests and the total (None if `prompts` has no length).
            return_exceptions: True: the list has an error for each failed request. False: after the first failure no
                more prompts are taken, open requests finish, and BatchError is raised.
            options: as for `generate`, for all requests; `timeout_s` applies to each. `request_id` must be in a dict.

        Raises:
            BatchError: requests failed; `results` has all answers and errors.
            ConfigError: `progress=True`, but tqdm is not installed.

        Leaving early, by Ctrl-C or an error in `prompts`, cancels open requests at the server.

        Example:
            answers = client.generate_many(["Return the", "Raise a"], max_tokens=32, concurrency=8, progress=True)
            print([answer.text for answer in answers])
        """
        batch = Batch(prompts, self._planner.generate_item, options, concurrency, progress, return_exceptions)
        return self._run(batch, prompts)

    @overload
    def chat_many(
        self,
        conversations: Iterable[ChatItem],
        *,
        concurrency: int = ...,
        progress: Progress = ...,
        return_exceptions: Literal[False] = ...,
        **options: Unpack[Options],
    ) -> list[Completion]: ...

    @overload
    def chat_many(
        self,
        conversations: Iterable[ChatItem],
        *,
        concurrency: int = ...,
        progress: Progress = ...,
        return_exceptions: bool,
        **options: Unpack[Options],
    ) -> list[Completion | AlignedServeError]: ...

    def chat_many(
        self,
        conversations: Iterable[ChatItem],
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        progress: Progress = False,
        return_exceptions: bool = False,
        **options: Unpack[Options],
    ) -> Any:
        """Answer many conversations, several at a time; each is a list of turns, or a dict as for `generate_many`.

        Arguments, order and errors are those of `generate_many`.

        Example:
            questions = ["What does len return?", "What does open return?"]
            answers = client.chat_many(([{"role": "user", "content": text}] for text in questions), max_tokens=32)
        """
        batch = Batch(conversations, self._planner.chat_item, options, concurrency, progress, return_exceptions)
        return self._run(batch, conversations)

    def cancel(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """Cancel a running request of any client. Its caller gets CancelledError.

        Args:
            request_id: the `request_id` option of the request, or the `request_id` of its chunks.
            timeout_s: limit for this call in seconds; None: the client's.

        Returns whether the request was running. A second call has no effect.

        Example:
            stream = client.stream("Return the", request_id="mine-1")
            client.cancel("mine-1")
        """
        return self._ask(self._planner.cancel(request_id, timeout_s))

    def models(self, *, timeout_s: float | None = None) -> tuple[ModelCard, ...]:
        """The served models.

        Args:
            timeout_s: limit for this call in seconds; None: the client's.

        Example:
            for model in client.models():
                print(model.id, model.max_positions)
        """
        return self._ask(self._planner.models(timeout_s))

    def close(self) -> None:
        """Close the connections. Open calls and streams end with CancelledError. May be called repeatedly.

        Example:
            client.close()
        """
        with self._lock:
            self._closed = True
            channels, cuts = list(self._channels.values()), list(self._cuts)
        for cut in cuts:
            cut.set()
        for channel, _ in channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, batch: Batch[Any], items: Iterable[Any]) -> list[Outcome]:
        halt = Halt(self._new_cut())
        return run_batch(batch, items, lambda call: self._ask(call, halt), halt)

    def _ask(self, call: Call[Result], halt: Halt | None = None) -> Result:
        """The result of a call. `halt` ends it early if it belongs to a batch."""
        attempts = self._tries.of(call)
        run, cut = (_run_here, self._cut) if halt is None else (halt.run, halt.cut)
        while True:
            try:
                response = self._send(run, attempts, begun=halt is not None)
            except grpc.RpcError as error:
                wait_s = attempts.again(error)
                if wait_s is None:
                    raise attempts.error(error) from error
            else:
                result: Result = attempts.result(response)
                return result
            if cut.wait(wait_s):
                raise call.closed_here(attempts.request_id)

    def _follow(self, call: Call[Chunk]) -> ChunkStream:
        return ChunkStream(self._tries.of(call), functools.partial(self._send, _run_here), self._new_cut())

    def _new_cut(self) -> threading.Event:
        """An event that `close` also sets. Raises RuntimeError if this client has been closed."""
        cut = threading.Event()
        with self._lock:
            if self._closed:
                raise RuntimeError("this client has been closed")
            self._cuts.add(cut)
        return cut

    def _send(self, run: Callable[[Any, Call[Any]], Any], attempts: Attempts, *, begun: bool = False) -> Any:
        """The result of `run` for the call. Raises the errors of `_method`."""
        method = self._method(attempts, begun=begun)
        try:
            return run(method, attempts.call)
        except ValueError as error:
            if self._closed:  # by another thread, after the check in `_method`
                raise attempts.call.closed_here(attempts.request_id) from error
            raise

    def _method(self, attempts: Attempts, *, begun: bool = False) -> Any:
        """The stub's method that sends the call to its address.

        After the client was closed, raises CancelledError if the call or its batch has `begun`, else RuntimeError.
        """
        address = attempts.address
        with self._lock:
            if self._closed:
                if begun or attempts.again_sent:
                    raise attempts.call.closed_here(attempts.request_id)
                raise RuntimeError("this client has been closed")
            if address not in self._channels:
                credentials, options = self._transport.credentials(), self._transport.options(address)
                if credentials is None:
                    channel = grpc.insecure_channel(address, options=options)
                else:
                    channel = grpc.secure_channel(address, credentials, options=options)
                self._channels[address] = (channel, open_stub(channel))
            return getattr(self._channels[address][1], attempts.call.method)
