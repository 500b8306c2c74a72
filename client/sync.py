"""The blocking client. Each method states the contract that `AsyncClient`'s method of the same name keeps too."""

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
from alignedserve.client.types import Chunk, ClientTimings, Completion, ModelCard
from alignedserve.errors import AlignedServeError

Result = TypeVar("Result")


def _run_here(method: Any, call: Call[Any]) -> Any:
    return method(call.message, timeout=call.timeout_s, metadata=call.metadata)


class ChunkStream(Iterator[Chunk]):
    """The chunks of one answer, as they are made. Not for use by several threads at once.

    Leaving early cancels the request at the server: `close()`, the end of a `with` block, or dropping the last
    reference (a `for` loop over `client.stream(...)` that breaks). A chunk that is asked for after that raises
    CancelledError, unless the last had been read. A connection that breaks is replaced: see `Client`'s `resume_s`.
    """

    def __init__(self, attempts: Attempts, send: Callable[[Attempts], Any], cut: threading.Event) -> None:
        self._attempts = attempts
        self._send = send
        self._chunks: list[Chunk] = []
        self._closed = False
        self._cut = cut  # ends a pause between two tries: this was closed, or its client
        self._responses = send(attempts)

    @property
    def request_id(self) -> str:
        """The name of the request, for `Client.cancel` and logs."""
        return self._attempts.request_id

    @property
    def client_timings(self) -> ClientTimings:
        """Seconds until now as this client measures them: `ttft_s` is there from the first token on."""
        return self._attempts.timings()

    def completion(self) -> Completion:
        """Read what is left, and return the whole answer, what has been read before included.

        Raises what reading raises; CancelledError where the stream was left before its last chunk.
        """
        for _ in self:
            pass
        return join_chunks(self._chunks, self._attempts.timings())

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
                    raise StopIteration from None  # all is there but the word that it is
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
        """Cancel the request unless its last chunk has been read. May be called again, and from another thread."""
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


class Client:
    """A blocking client of one cluster. Threads may share it; a process forked from this one needs its own.

    Args:
        address: HOST:PORT of the cluster's gRPC port, or several such: calls take them in turn, and leave out for a few
            seconds those that do not answer.
        model: the served model to use where a call names none; None: the only one.
        application: the Serve application's name, where one Ray cluster runs several.
        timeout_s: limit in seconds for every call that gives none of its own, retries included; None: no limit.
        api_key: for a server that has an --api-key-file; None: what ALIGNEDSERVE_API_KEY in the environment says.
        max_retries: how often a call is tried again that no server has taken: the cluster is full, a role of it is not
            there, a proxy knows no application (one that has just started), or nothing answers at any address.
        backoff: how long to wait before each of these tries.
        resume_s: a call whose connection broke, or whose gateway ended, goes on through another connection. A stream
            continues where it was, with the same tokens and text; nothing is repeated. So many seconds may pass from a
            failure to the next token before it is raised; 0 raises it at once.
        tls: True: the server proves who it is by a certificate that the system's (or `root_certificates`) vouch for.
            Credentials of gRPC's own are taken too, for certificates of the client's.
        root_certificates: PEM, as bytes or the path of a file, to check the server by; implies TLS.
        server_name: what the server's certificate calls it, where that is not the host in `address`.
        connect_timeout_s: the longest that connecting to one address may take, in seconds.
        keepalive_s: while calls are open, a connection that is silent for so many seconds is asked for a sign of life,
            and counts as broken when none comes in as many. None: only the operating system notices. HAProxy, which
            `alignedserve serve` puts in front, answers any; other servers may refuse less than 300.

    Connections are made by the first call that needs them, and made again after they broke. A `with` block closes them.

    Every method raises, besides what it names itself:
        InvalidRequestError: an argument is malformed or out of range; `param` names it.
        AuthenticationError: the server asks for an API key, and this is none of its own.
        DeadlineError: `timeout_s` passed.
        CancelledError: the request was cancelled, by `cancel` or by closing its stream or the client.
        UnavailableError: nothing answers at `address`, or a role that is needed is not there.
        AlignedServeError: the server failed; the base of all these. `code` is the server's word for it, `request_id`
            names the request, `retry_after_s` says when to try again (both may be None); `details` has `status`, the
            gRPC status, and `address`.
        RuntimeError: the client has been closed.

    Raises:
        ConfigError: an argument of the client itself cannot be used.

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
        self._cuts = weakref.WeakSet([self._cut])  # of all that may be in a pause between two tries

    def generate(
        self, prompt: str | None = None, *, prompt_token_ids: Iterable[int] | None = None, **options: Unpack[Options]
    ) -> Completion:
        """Complete a prompt and wait for the whole answer.

        Args:
            prompt: text; it is tokenised by the server.
            prompt_token_ids: tokens instead of text; exactly one of the two is given.
            options: sampling, `model`, `request_id`, `timeout_s` in seconds: see `Options`.

        Raises:
            NotFoundError: no such model.
            OverloadedError: the cluster is full; `retry_after_s` seconds later it may not be.
            TooLargeError: the request is over the server's limit.

        Example:
            completion = client.generate("Return the", max_tokens=32, temperature=0, stop="\\n")
            print(completion.text, completion.choices[0].finish_reason, completion.usage.completion_tokens)
        """
        return self._ask(self._planner.generate(prompt, prompt_token_ids, options))

    def stream(
        self, prompt: str | None = None, *, prompt_token_ids: Iterable[int] | None = None, **options: Unpack[Options]
    ) -> ChunkStream:
        """Complete a prompt, handing over each piece of the answer when it is there.

        Arguments are `generate`'s. A bad argument raises here; what the server has to say (`generate`'s errors) is
        raised by the iterator, in the middle of the answer too. `timeout_s` covers the whole stream.

        Example:
            for chunk in client.stream("Return the", max_tokens=32):
                print(chunk.text, end="", flush=True)
        """
        return self._follow(self._planner.stream(prompt, prompt_token_ids, options))

    def chat(self, messages: Iterable[ChatTurn], **options: Unpack[Options]) -> Completion:
        """Answer a conversation and wait for the whole answer.

        Args:
            messages: the turns so far, each a `Message` or a dict with `role` and `content` (strings); the server
                puts them into the model's chat template.
            options: as for `generate`; `max_tokens` is by default all that the model's positions leave.

        Raises: as `generate`; InvalidRequestError also where the model has no chat template.

        Example:
            answer = client.chat([{"role": "user", "content": "What does len return?"}], max_tokens=64)
            print(answer.text)
        """
        return self._ask(self._planner.chat(messages, options))

    def chat_stream(self, messages: Iterable[ChatTurn], **options: Unpack[Options]) -> ChunkStream:
        """Answer a conversation, handing over each piece of the answer when it is there.

        Arguments are `chat`'s, errors come as `stream`'s do.

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
            prompts: each a string, a sequence of token ids, or a dict: one of `prompt`, `prompt_token_ids` and
                `messages`, and options of its own, which go before the shared ones. Taken one by one when there is room
                for them, in the caller's thread. All answers are kept: give millions of prompts in several batches.
            concurrency: the most requests that are open at the same time.
            progress: True shows a bar of `tqdm` (`pip install tqdm`). A function is called after each request with how
                many have ended, and of how many (None where `prompts` has no length).
            return_exceptions: True: what failed is in the list as its error. False: after the first failure no more
                prompts are taken, those that are open end, and BatchError is raised.
            options: as for `generate`, for all; `timeout_s` is for each request. No `request_id`: give it in a dict.

        Raises:
            BatchError: requests failed; `results` has the answers and the errors, so that nothing is lost.
            ConfigError: `progress=True` where tqdm is not installed.

        Leaving early, by Ctrl-C or an error in `prompts`, cancels what is open at the server.

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

        Arguments, order and errors are `generate_many`'s.

        Example:
            questions = ["What does len return?", "What does open return?"]
            answers = client.chat_many(([{"role": "user", "content": text}] for text in questions), max_tokens=32)
        """
        batch = Batch(conversations, self._planner.chat_item, options, concurrency, progress, return_exceptions)
        return self._run(batch, conversations)

    def cancel(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """Cancel a running request, whoever sent it; its caller gets CancelledError.

        Args:
            request_id: the `request_id` option of the request, or that of its chunks.
            timeout_s: limit for this call in seconds; None: the client's.

        Returns whether such a request was running. Cancelling twice does no harm.

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
        """Close the connections. Calls and streams still open end with CancelledError. May be called again.

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
        """The result of a call: one of its own, or one of a batch, which `halt` cuts short."""
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
        """Set by `close` too. Raises RuntimeError once this client has been closed."""
        cut = threading.Event()
        with self._lock:
            if self._closed:
                raise RuntimeError("this client has been closed")
            self._cuts.add(cut)
        return cut

    def _send(self, run: Callable[[Any, Call[Any]], Any], attempts: Attempts, *, begun: bool = False) -> Any:
        """What `run` makes of the call; raises as `_method` does."""
        method = self._method(attempts, begun=begun)
        try:
            return run(method, attempts.call)
        except ValueError as error:
            if self._closed:  # by another thread, since `_method` looked
                raise attempts.call.closed_here(attempts.request_id) from error
            raise

    def _method(self, attempts: Attempts, *, begun: bool = False) -> Any:
        """What sends the call to its address.

        Once this client has been closed: RuntimeError, CancelledError where the call (or its batch) has `begun`.
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
