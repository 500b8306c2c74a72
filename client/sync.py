"""The blocking client. Each method states the contract that `AsyncClient`'s method of the same name keeps too."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from alignedserve.client.attempts import Attempts
from alignedserve.client.calls import DEFAULT_ADDRESS, DEFAULT_RESUME_S, Call, CallPlanner, open_stub
from alignedserve.client.options import ChatTurn, Options
from alignedserve.client.types import Chunk, Completion, ModelCard

Result = TypeVar("Result")


class ChunkStream(Iterator[Chunk]):
    """The chunks of one answer, as they are made. Not for use by several threads at once.

    Leaving early cancels the request at the server: `close()`, the end of a `with` block, or dropping the last
    reference (a `for` loop over `client.stream(...)` that breaks). A chunk that is asked for after that raises
    CancelledError. `request_id` is None until the first chunk where the request did not name it. A connection that
    breaks is replaced: see `Client`'s `resume_s`.
    """

    def __init__(self, call: Call[Chunk], send: Callable[[Call[Chunk]], Any], patience_s: float) -> None:
        self._attempts = Attempts(call, patience_s)
        self._send = send
        self._parse = call.parse
        self._closed = threading.Event()
        self._responses = send(call)

    @property
    def request_id(self) -> str | None:
        return self._attempts.request_id

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        while True:
            try:
                message = next(self._responses)
            except grpc.RpcError as error:
                if self._attempts.complete and not self._closed.is_set():
                    raise StopIteration from None  # all is there but the word that it is
                self._go_on(error)
                continue
            self._attempts.take(message)
            return self._parse(message)

    def _go_on(self, error: grpc.RpcError) -> None:
        wait_s = None if self._closed.is_set() else self._attempts.again(error)
        if wait_s is None:
            raise self._attempts.error(error) from error
        if self._closed.wait(wait_s):
            raise self._attempts.call.closed_here() from error
        self._responses = self._send(self._attempts.call)
        if self._closed.is_set():
            self._responses.cancel()

    def close(self) -> None:
        """Cancel the request unless its last chunk has been read. May be called again, and from another thread."""
        self._closed.set()
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
        address: HOST:PORT of the cluster's gRPC port; `ipv4:HOST:PORT,HOST:PORT` for several, tried in order.
        model: the served model to use where a call names none; None: the only one.
        application: the Serve application's name, where one Ray cluster runs several.
        timeout_s: limit in seconds for every call that gives none of its own; None: no limit.
        api_key: for a server that has an --api-key-file; None: what ALIGNEDSERVE_API_KEY in the environment says.
        resume_s: a call whose connection broke, or whose gateway ended, goes on through another connection. A stream
            continues where it was, with the same tokens and text; nothing is repeated. So many seconds may pass from a
            failure to the next token before it is raised; 0 raises it at once. A call that reaches no server at all
            fails at once in any case.

    The connection is made by the first call, and made again after it broke. A `with` block closes it at its end.

    Every method raises, besides what it names itself:
        InvalidRequestError: an argument is malformed or out of range; `param` names it.
        AuthenticationError: the server asks for an API key, and this is none of its own.
        DeadlineError: `timeout_s` passed.
        CancelledError: the request was cancelled, by `cancel` or by closing its stream or the client.
        UnavailableError: nothing answers at `address`, or a role that is needed is not there.
        AlignedServeError: the server failed; the base of all these. `details` has `status`, the gRPC status.
        RuntimeError: the client has been closed.

    Example:
        with Client("127.0.0.1:9000", timeout_s=60) as client:
            print(client.generate("Return the", max_tokens=32).text)
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        model: str | None = None,
        application: str | None = None,
        timeout_s: float | None = None,
        api_key: str | None = None,
        resume_s: float = DEFAULT_RESUME_S,
    ) -> None:
        self._planner = CallPlanner(address, model, application, timeout_s, api_key, resume_s)
        self._channel = grpc.insecure_channel(address, options=self._planner.channel_options())
        self._stub = open_stub(self._channel)
        self._closed = False

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
        """Close the connection. Calls and streams still open end with CancelledError. May be called again.

        Example:
            client.close()
        """
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, call: Call[Result]) -> Result:
        attempts = Attempts(call, self._planner.patience_s(call))
        while True:
            try:
                return call.parse(self._send(attempts.call))
            except grpc.RpcError as error:
                wait_s = attempts.again(error)
                if wait_s is None:
                    raise attempts.error(error) from error
            time.sleep(wait_s)

    def _follow(self, call: Call[Chunk]) -> ChunkStream:
        return ChunkStream(call, self._send, self._planner.patience_s(call))

    def _send(self, call: Call[Any]) -> Any:
        if self._closed:
            raise RuntimeError("this client has been closed")
        return getattr(self._stub, call.method)(call.message, timeout=call.timeout_s, metadata=call.metadata)
