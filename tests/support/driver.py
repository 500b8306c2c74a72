"""Drives a cluster's scheduler and workers without HTTP: it submits requests and collects their tokens."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import grpc

from alignedserve.control.convert import (
    failure_from_proto,
    key_from_proto,
    key_to_proto,
    keys_from_proto,
    keys_to_proto,
    spec_to_proto,
    timings_from_proto,
)
from alignedserve.control.link import DuplexLink
from alignedserve.control.role import new_incarnation
from alignedserve.control.rpc import RpcServer, open_channel
from alignedserve.errors import AlignedServeError
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import gateway_pb2 as gw
from alignedserve.proto import gateway_pb2_grpc as gw_grpc
from alignedserve.proto import scheduler_pb2 as sc
from alignedserve.proto import scheduler_pb2_grpc as sc_grpc
from alignedserve.request import RequestKey, RequestSpec, SamplingParams, Stage, Stopwatch, TokenLogprobs

QUIET_S = 0.5  # after a worker's stream broke: tokens that are on their way arrive by then
ASK_EVERY_S = 2.0  # from then on: the scheduler may have learnt of an end only after it was asked


@dataclass(slots=True)
class Answer:
    """The answer to one request. `error` is set if it ended with an error. `told`: each stopwatch that workers sent."""

    key: RequestKey
    spec: RequestSpec
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""
    error: AlignedServeError | None = None
    told: list[Stopwatch] = field(default_factory=list)
    prefill_id: str = ""
    decode_id: str = ""
    cached_tokens: int = 0
    times_s: list[float] = field(default_factory=list)
    early: dict[int, gw.TokenEvent] = field(default_factory=dict)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def stopwatch(self) -> Stopwatch | None:
        """As its last event had it; None: it has not ended."""
        return self.told[-1] if self.finish_reason and self.told else None


class Driver(gw_grpc.TokenSinkServicer, gw_grpc.SpecSourceServicer):
    """A gateway for tests and benchmarks. It owns requests, and delivers their tokens to the caller instead of HTTP."""

    def __init__(self, scheduler_address: str, token: str, *, resubmit: bool = False) -> None:
        """`resubmit`: submit lost requests again in a new epoch, as a gateway does; else they end with an error.

        A stream between two processes also breaks if one of them gets no processor for a second.
        """
        self._token = token
        self._resubmit = resubmit
        self._process = pb.ProcessKey(role="gateway", id="driver", incarnation=new_incarnation())
        self._server = RpcServer(token)
        self._server.add(gw_grpc.add_TokenSinkServicer_to_server, self)
        self._server.add(gw_grpc.add_SpecSourceServicer_to_server, self)
        self._channel = open_channel(scheduler_address, token)
        self._link: DuplexLink[sc.GatewayMessage, sc.SchedulerMessage] = DuplexLink(
            sc_grpc.SchedulerStub(self._channel).Link, self._on_message, self._hello
        )
        self._ids = itertools.count()
        self._asking: asyncio.TimerHandle | None = None
        self._linked = asyncio.Event()
        self._address = ""
        self.answers: dict[str, Answer] = {}
        self.max_request_tokens = 0
        self.resubmitted = 0
        self.lost: Counter[str] = Counter()  # requests by the reason that the scheduler gave

    async def __aenter__(self) -> Self:
        self._address = await self._server.start()
        self._link.start()
        await self._linked.wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._link.close()
        await self._channel.close()
        await self._server.stop()
        if self._asking is not None:
            self._asking.cancel()

    def _hello(self) -> list[sc.GatewayMessage]:
        running = self._open() if self._resubmit else []  # what is unknown to the scheduler is submitted again
        hello = sc.GatewayHello(process=self._process, address=self._address, running=map(key_to_proto, running))
        return [sc.GatewayMessage(hello=hello)]

    def _open(self) -> list[RequestKey]:
        return [answer.key for answer in self.answers.values() if not answer.done.is_set()]

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        n: int = 1,
        priority: int = 0,
        cache_salt: bytes = b"",
        cached: Mapping[str, int] | None = None,
    ) -> list[Answer]:
        """Submit `n` requests for one prompt, with the seeds `sampling.seed + i`.

        `cached`: tokens of it that shards have, as a gateway says that has asked them.
        """
        group = f"g{next(self._ids)}"
        now_ns = time.time_ns()
        answers = []
        for index in range(n):
            key = RequestKey(f"{group}:{index}")
            spec = RequestSpec(
                key=key,
                prompt_token_ids=list(prompt),
                sampling=sampling.with_seed(sampling.seed + index),
                gateway_id=self._process.id,
                gateway_address=self._address,
                group_id=group,
                group_size=n,
                arrival_ns=now_ns,
                priority=priority,
                cache_salt=cache_salt,
                stopwatch=Stopwatch(Stage.QUEUE, now_ns),
            )
            answers.append(Answer(key, spec))
            self.answers[key.request_id] = answers[-1]
        self._send([answer.spec for answer in answers], cached or {})
        return answers

    def _send(self, specs: Sequence[RequestSpec], cached: Mapping[str, int] | None = None) -> None:
        heads = [_head(spec) for spec in specs]
        for head in heads:
            head.cached.extend(pb.CachedTokens(pool_id=name, tokens=count) for name, count in (cached or {}).items())
        self._link.send(sc.GatewayMessage(submit=sc.Submission(requests=heads)))

    async def ReadSpecs(
        self, request: pb.RequestKeys, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[gw.RequestSpecs]:
        keys = keys_from_proto(request)
        answers = [self.answers[key.request_id] for key in keys]
        open_here = [answer.spec for answer, key in zip(answers, keys, strict=True) if answer.key == key]
        yield gw.RequestSpecs(requests=map(spec_to_proto, open_here))

    def cancel(self, answers: Sequence[Answer]) -> None:
        self._link.send(sc.GatewayMessage(cancel=keys_to_proto(answer.key for answer in answers)))

    async def wait(self, answers: Sequence[Answer], timeout_s: float = 120.0) -> None:
        """Wait until all requests have ended. Raises TimeoutError that names the open ones."""
        try:
            await asyncio.wait_for(asyncio.gather(*(answer.done.wait() for answer in answers)), timeout_s)
        except TimeoutError:
            late = [f"{a.key.request_id} ({len(a.tokens)} tokens)" for a in answers if not a.done.is_set()]
            raise TimeoutError(f"{len(late)} requests did not end within {timeout_s:g} s: {late[:8]}") from None

    async def wait_tokens(self, answers: Sequence[Answer], tokens: int = 1, timeout_s: float = 60.0) -> None:
        """Wait until each request has the given number of tokens. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while True:
            lacking = [answer for answer in answers if len(answer.tokens) < tokens]
            if not lacking:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(lacking)} requests have no {tokens} tokens after {timeout_s:g} s")
            await asyncio.sleep(0.01)

    async def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, timeout_s: float = 120.0
    ) -> list[Answer]:
        """Submit all prompts at once, with one answer each."""
        answers = [self.submit(prompt, sampling)[0] for prompt in prompts]
        await self.wait(answers, timeout_s)
        return answers

    async def Push(
        self, request_iterator: AsyncIterator[gw.TokenBatch], context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.Empty:
        try:
            async for batch in request_iterator:
                now_s = time.monotonic()
                for event in batch.events:
                    self._on_event(event, now_s)
        finally:
            if self._resubmit:
                self._ask_in(QUIET_S)
        return pb.Empty()

    def _ask_in(self, delay_s: float) -> None:
        if self._asking is not None:
            self._asking.cancel()
        self._asking = asyncio.get_running_loop().call_later(delay_s, self._ask)

    def _ask(self) -> None:
        """Ask for the open requests that the scheduler believes to have ended, because a worker's tokens were lost."""
        if mine := self._open():
            self._link.send(sc.GatewayMessage(open=keys_to_proto(mine)))
            self._ask_in(ASK_EVERY_S)

    def _on_event(self, event: gw.TokenEvent, now_s: float) -> None:
        answer = self.answers[event.key.request_id]
        if event.key.epoch != answer.key.epoch:
            return
        if event.position > len(answer.tokens):  # there is no order between the streams of two workers
            answer.early[event.position] = event
            return
        if event.position < len(answer.tokens):
            raise AssertionError(f"{answer.key}: position {event.position} after {len(answer.tokens)} tokens")
        answer.tokens.extend(event.token_ids)
        answer.times_s.extend([now_s] * len(event.token_ids))
        answer.logprobs.extend(_logprobs(entry) for entry in event.logprobs)
        answer.prompt_logprobs.extend(_logprobs(entry) for entry in event.prompt_logprobs)
        answer.prefill_id = event.prefill_id or answer.prefill_id
        answer.cached_tokens = event.cached_tokens or answer.cached_tokens
        answer.decode_id = event.decode_id or answer.decode_id
        if event.HasField("timings"):
            answer.told.append(timings_from_proto(event.timings))
        if event.finish_reason:
            answer.finish_reason = event.finish_reason
            if event.HasField("failure"):
                answer.error = failure_from_proto(event.failure)
            answer.done.set()
        if (following := answer.early.pop(len(answer.tokens), None)) is not None:
            self._on_event(following, now_s)

    def _on_message(self, message: sc.SchedulerMessage) -> None:
        kind = message.WhichOneof("body")
        self._linked.set()  # the scheduler answers a hello with its capacity
        if kind == "capacity":
            self.max_request_tokens = message.capacity.max_request_tokens
        elif kind == "rejected":
            self._end(message.rejected.keys, failure_from_proto(message.rejected.failure))
        elif kind == "whose":
            known = (self.answers.get(key.request_id) for key in keys_from_proto(message.whose))
            mine = [answer.key for answer in known if answer is not None and not answer.done.is_set()]
            self._link.send(sc.GatewayMessage(claim=keys_to_proto(mine)))
        elif kind == "unknown":
            unknown = keys_from_proto(message.unknown)
            asyncio.get_running_loop().call_later(QUIET_S, self._submit_again, unknown)
        elif kind == "lost" and self._resubmit:
            self.lost[message.lost.reason] += len(message.lost.keys)
            self._submit_again([key_from_proto(key) for key in message.lost.keys])
        elif kind == "lost":
            self._end(message.lost.keys, AlignedServeError(f"lost: {message.lost.reason}"))

    def _submit_again(self, keys: Sequence[RequestKey]) -> None:
        """Submit each request again, to go on after the tokens that were received."""
        for key in keys:
            answer = self.answers[key.request_id]
            if answer.done.is_set() or answer.key != key:
                continue
            self.resubmitted += 1
            answer.key = RequestKey(key.request_id, key.epoch + 1)
            answer.early.clear()
            answer.spec = replace(
                answer.spec,
                key=answer.key,
                output_token_ids=list(answer.tokens),
                group_id=f"{key.request_id}/{answer.key.epoch}",
                group_size=1,
                stopwatch=Stopwatch(Stage.QUEUE, time.time_ns()),
            )
            self._send([answer.spec])

    def _end(self, keys: Sequence[pb.RequestKey], error: AlignedServeError) -> None:
        for key in keys:
            answer = self.answers[key.request_id]
            answer.error = error
            answer.finish_reason = "error"
            answer.done.set()


def _head(spec: RequestSpec) -> pb.RequestHead:
    return pb.RequestHead(
        key=key_to_proto(spec.key),
        prompt_tokens=len(spec.prompt_token_ids),
        output_tokens=len(spec.output_token_ids),
        max_tokens=spec.sampling.max_tokens,
        gateway_id=spec.gateway_id,
        group_id=spec.group_id,
        group_size=spec.group_size,
        arrival_ns=spec.arrival_ns,
        submitted_ns=spec.stopwatch.since_ns,
        wait_objective_s=spec.wait_objective_s,
        priority=spec.priority,
    )


def _logprobs(entry: gw.TokenLogprob) -> TokenLogprobs:
    return TokenLogprobs(entry.logprob, tuple((top.token_id, top.logprob) for top in entry.top))
