"""A client's call and its answers, as the gateway keeps them: all that is needed to submit the rest again."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from alignedserve.control.convert import key_to_proto
from alignedserve.errors import AlignedServeError
from alignedserve.gateway.body.planning import CallPlan, PromptPlan, derive_seed
from alignedserve.gateway.tracing.current import current_trace
from alignedserve.proto import common_pb2 as pb
from alignedserve.request import (
    FinishReason,
    RequestKey,
    RequestSpec,
    SamplingParams,
    Stopwatch,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from alignedserve.gateway.ledger.resume import Delivered
    from alignedserve.gateway.reply.new_tokens import EarlyEvent

CallName = tuple[bytes, str]
MOST_NOTED = 64  # losses and moves of an answer, the newest

_OF_CHAT = "chatcmpl-"
RESPONSE, MESSAGE = "resp_", "msg_"  # begin the ids of other APIs' answers


def id_of_answer(call_id: str, begin: str) -> str:
    """The id that the answer of a call has in the API whose ids begin like this."""
    return begin + call_id.removeprefix(_OF_CHAT)


def id_of_call(answer_id: str) -> str:
    """The call whose answer has this id in its API."""
    for begin in (RESPONSE, MESSAGE):
        if answer_id.startswith(begin):
            return _OF_CHAT + answer_id.removeprefix(begin)
    return answer_id


# The hash of the current request's API key; b"" if no key is required.
caller: ContextVar[bytes] = ContextVar("caller", default=b"")

# The current request's X-Session-Id; "" without one.
sent_session: ContextVar[str] = ContextVar("sent_session", default="")

# The current request's X-Request-Id; "" without one.
sent_request_id: ContextVar[str] = ContextVar("sent_request_id", default="")


class AnswerState(enum.Enum):
    """The state of an answer, as far as its gateway knows.

    UNSENT → SUBMITTED → RUNNING → ENDED; a loss leads back to UNSENT. Every state may lead to ENDED.
    """

    UNSENT = "unsent"  # the scheduler does not have it (in this epoch)
    SUBMITTED = "submitted"  # sent; no token of this epoch has arrived
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True)
class Answer:
    """One answer to one prompt: a request of the cluster. `tokens`: all tokens that were delivered, in any epoch and by
    any gateway.
    """

    call: Call
    index: int
    prompt: PromptPlan
    sampling: SamplingParams
    request_id: str
    group_id: str
    epoch: int = 0
    sent_epoch: int | None = None
    sent_s: float = 0.0  # when it was sent (time.monotonic)
    group_size: int = 1  # number of answers that were sent together, this one included
    state: AnswerState = AnswerState.UNSENT
    tokens: list[int] = field(default_factory=list)
    tokens_before: int = 0  # those that came before this epoch, here or by the gateway of the call that it resumes
    finish: FinishReason | None = None
    setbacks: int = 0  # losses since the last token
    prompt_scored: bool = False
    heard_s: float = 0.0  # when it was sent, or its last event arrived (time.monotonic)
    first_token_s: float = 0.0  # these three: time.monotonic; 0 while the token has not arrived
    second_token_s: float = 0.0
    last_token_s: float = 0.0
    early: list[EarlyEvent] = field(default_factory=list)  # of this epoch
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    prefill_id: str = ""
    decode_id: str = ""
    cached_tokens: int = 0  # of the prompt, whose KV was in the prefix cache
    calls_tools: bool = False  # it has ended with tool calls, whose results will come
    moves: tuple[tuple[int, str], ...] = ()  # (Unix ns, decode instance) when tokens first came from another one
    losses: tuple[tuple[int, str], ...] = ()  # (Unix ns, reason)

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.request_id, self.epoch)

    @property
    def ended(self) -> bool:
        return self.state is AnswerState.ENDED

    @property
    def log_extra(self) -> dict[str, Any]:
        """`extra` of log records about it."""
        trace = self.call.trace
        return {"request_id": self.request_id, "trace": None if trace is None else trace.ids}

    def unix_ns(self, monotonic_s: float) -> int:
        return self.call.arrival_ns + round((monotonic_s - self.call.arrival_s) * 1e9)

    def close_stopwatch(self) -> None:
        """The answer has ended: with its last token, or now if it was cut off."""
        if self.stopwatch.since_ns:  # a worker has sent it
            whole = self.finish is not None and self.last_token_s
            self.stopwatch.close(self.unix_ns(self.last_token_s) if whole else time.time_ns())

    def next_epoch(self, reason: str = "") -> None:
        self.losses = (*self.losses, (time.time_ns(), reason))[-MOST_NOTED:]
        self.epoch += 1
        self.tokens_before = len(self.tokens)
        self.stopwatch = Stopwatch()
        self.early.clear()
        self.state = AnswerState.UNSENT

    def next_early(self) -> EarlyEvent | None:
        """Removes and returns an event that waited for earlier tokens, if all of these have arrived; else None."""
        if self.early and not self.ended:
            for number, early in enumerate(self.early):
                if early.event.position <= len(self.tokens):
                    return self.early.pop(number)
        return None

    def note_instance(self, role: str, sender_id: str, prefill_id: str, decode_id: str) -> None:
        """Notes the instances that served the request: those that the event names, else its sender."""
        if role == "prefill":
            self.prefill_id = prefill_id or sender_id
        else:
            self.prefill_id = prefill_id or self.prefill_id
            if (now := decode_id or sender_id) != self.decode_id:
                self.decode_id = now
                self.moves = (*self.moves, (time.time_ns(), now))[-MOST_NOTED:]

    def note_tokens(self, now_s: float) -> None:
        """Notes the time of new tokens, which are already in `tokens`."""
        self.first_token_s = self.first_token_s or now_s
        if len(self.tokens) > 1:
            self.second_token_s = self.second_token_s or now_s
        self.last_token_s = now_s

    def finished_unsaid(self) -> FinishReason | None:
        """The finish reason if all tokens have arrived, and only the report of the end was lost; else None."""
        sampling = self.sampling
        if self.tokens and sampling.ended_by(self.tokens[-1], len(self.tokens)):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= sampling.max_tokens else None

    def sent(self) -> None:
        """The answer has been submitted to the scheduler."""
        self.state = AnswerState.SUBMITTED
        self.sent_epoch = self.epoch
        self.sent_s = self.heard_s = time.monotonic()

    def head(self, gateway_id: str, group_size: int) -> pb.RequestHead:
        """The submission to the scheduler. `group_size`: number of answers sent together, this one included."""
        self.group_size = group_size
        reads = dict(self.prompt.reads)
        cached = [
            pb.CachedTokens(pool_id=pool_id, tokens=tokens, ready_s=reads.get(pool_id, 0.0))
            for pool_id, tokens in self.prompt.cached
        ]
        return pb.RequestHead(
            key=key_to_proto(self.key),
            prompt_tokens=len(self.prompt.token_ids),
            output_tokens=len(self.tokens),
            max_tokens=self.sampling.max_tokens,
            gateway_id=gateway_id,
            group_id=self._group(),
            group_size=self.group_size,
            arrival_ns=_unix_ns(self.call.arrival_s),
            submitted_ns=time.time_ns(),
            wait_objective_s=self.call.plan.wait_objective_s or 0.0,
            priority=self.call.plan.priority,
            cached=cached,
            prefix_marks=self.prompt.marks,
        )

    def _group(self) -> str:
        group = self.group_id if self.epoch == 0 else f"{self.group_id}/{self.epoch}"
        return group if self.group_size > 1 else f"{group}#{self.index}"

    def spec(self, gateway_id: str, address: str, sent_s: float) -> RequestSpec:
        """The specification for a worker. In a later epoch it continues after the tokens that were delivered.

        `sent_s`: when this epoch was submitted (time.monotonic).
        """
        sampling = replace(self.sampling, prompt_logprobs=None) if self.prompt_scored else self.sampling
        plan, arrival_ns = self.call.plan, _unix_ns(self.call.arrival_s)
        return RequestSpec(
            key=self.key,
            prompt_token_ids=list(self.prompt.token_ids),
            sampling=sampling,
            output_token_ids=list(self.tokens),
            gateway_id=gateway_id,
            gateway_address=address,
            group_id=self._group(),
            group_size=self.group_size,
            arrival_ns=arrival_ns,
            deadline_ns=0 if plan.timeout_s is None else arrival_ns + int((plan.timeout_s - plan.spent_s) * 1e9),
            wait_objective_s=plan.wait_objective_s or 0.0,
            priority=plan.priority,
            cache_salt=self.call.salt,
            stopwatch=Stopwatch(since_ns=_unix_ns(sent_s)),
        )


def _unix_ns(monotonic_s: float) -> int:
    """A `time.monotonic` value as Unix time in nanoseconds, by the system clock's present setting."""
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)


@dataclass(slots=True)
class Delta:
    """The new part of one answer since its reader last took one."""

    answer: Answer
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None

    def extend(self, later: Delta) -> None:
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.prompt_logprobs += later.prompt_logprobs
        self.finish = later.finish


class Call:
    """The answers to one client call, and the deltas that its reader has not taken yet.

    A call belongs to the API key that it was sent with. Cancels and resumptions with another key do not find it, even
    with the same id. While the reader is slow, one Delta is kept for each answer, no larger than the answer itself.
    """

    def __init__(self, plan: CallPlan) -> None:
        self.plan = plan
        self.name: CallName = (caller.get(), plan.id)
        self.salt = b"" if plan.cache is None else plan.cache.whole_salt(caller.get())
        self.sent_id = sent_request_id.get()
        self.session = plan.session or sent_session.get()
        self.trace = None if plan.offline or plan.probe else current_trace.get()
        if self.trace is not None:
            self.trace.call = self
        self.arrival_ns = time.time_ns()
        self.arrival_s = time.monotonic()
        self.answers = [
            self._answer(number, prompt, p * plan.n + number)
            for p, prompt in enumerate(plan.prompts)
            for number in range(plan.n)
        ]
        self.open = len(self.answers)
        self.error: AlignedServeError | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.closed = False  # its reader has finished
        self._pending: dict[int, Delta] = {}
        self._waiter: asyncio.Future[None] | None = None
        for answer, delivered in zip(self.answers, plan.resume, strict=bool(plan.resume)):
            self._go_on(answer, delivered)

    @property
    def begun(self) -> bool:
        """Whether any of its answers has a token."""
        return any(answer.tokens for answer in self.answers)

    def _answer(self, number: int, prompt: PromptPlan, index: int) -> Answer:
        plan = self.plan
        return Answer(
            call=self,
            index=index,
            prompt=prompt,
            sampling=prompt.sampling.with_seed(derive_seed(prompt.sampling.seed, number)),
            request_id=f"{plan.internal_id}-{index}",
            group_id=f"{plan.internal_id}-g{index - number}",
            # In a later epoch the scheduler does not refuse a request because of load.
            epoch=1 if any(delivered.token_ids for delivered in plan.resume) else 0,
        )

    def _go_on(self, answer: Answer, delivered: Delivered) -> None:
        answer.tokens.extend(delivered.token_ids)
        answer.tokens_before = len(answer.tokens)
        if delivered.finish is None:
            return
        answer.state = AnswerState.ENDED
        answer.finish = delivered.finish
        if delivered.told:
            self.open -= 1
        else:
            self.add(answer, finish=delivered.finish)

    def add(
        self,
        answer: Answer,
        token_ids: Sequence[int] = (),
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs] = (),
        finish: FinishReason | None = None,
    ) -> None:
        """Adds new tokens or the end of an answer, and wakes the reader."""
        delta = self._pending.get(answer.index)
        if delta is None:
            delta = self._pending[answer.index] = Delta(answer)
        delta.token_ids.extend(token_ids)
        delta.logprobs.extend(logprobs)
        delta.prompt_logprobs.extend(prompt_logprobs)
        if finish is not None:
            delta.finish = finish
            self.open -= 1
        self.wake()

    def fail(self, error: AlignedServeError) -> None:
        """The whole call has failed. `next` raises the first such error after the deltas that came before it."""
        if self.error is None:
            self.error = error
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> list[Delta]:
        """Waits for new deltas of any answers; [] once all have been taken. Raises the error that ended the call.

        Only one reader may wait at a time.
        """
        while not self._pending:
            if self.error is not None:
                raise self.error
            if self.open == 0:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        deltas, self._pending = list(self._pending.values()), {}
        return deltas
