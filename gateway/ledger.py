"""Every request from its validation to its last token: whatever dies behind the gateway, the rest is asked for again.

The rules, all of them safe because messages carry an epoch and tokens a position:

- A `Loss` of the scheduler submits a request again, in a new epoch, with the tokens delivered so far; so does being
  cancelled behind the gateway's back. After MAX_SETBACKS losses in a row without a token between them the call fails
  with UnavailableError.
- An event of an older epoch is dropped; so are tokens that were delivered before. A gap in the positions counts as a
  loss.
- When the link to the scheduler comes back, `hello` names the requests that have delivered tokens: they may well run
  on, with no word from the scheduler needed. All others are submitted again in a new epoch: whether the scheduler
  ever had them cannot be told.
- Those that may run on, and those whose decode worker's stream broke, are watched from then on: silent for WATCH_S,
  they are submitted again. One epoch too many costs a prefill, never a token.
- While there is no scheduler, requests wait for it SCHEDULER_WAIT_S at most.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from alignedserve.control.convert import failure_from_proto, timings_from_proto
from alignedserve.errors import (
    AlignedServeError,
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from alignedserve.gateway.calls import Answer, AnswerState, Call
from alignedserve.gateway.metrics import GatewayMetrics
from alignedserve.gateway.planning import CallPlan
from alignedserve.proto import gateway_pb2 as gw
from alignedserve.request import FinishReason, RequestKey, RequestSpec, TokenLogprobs

logger = logging.getLogger(__name__)

MAX_SETBACKS = 5
WATCH_S = 5.0
SCHEDULER_WAIT_S = 30.0
_FIRST_BACKOFF_S = 0.1


class SchedulerPort(Protocol):
    """The way to the scheduler. Each call returns False, and does nothing, while the link is down."""

    gateway_id: str
    address: str

    @property
    def down_for_s(self) -> float: ...

    def submit(self, requests: Sequence[RequestSpec]) -> bool: ...

    def cancel(self, keys: Sequence[RequestKey]) -> bool: ...

    def done(self, keys: Sequence[RequestKey]) -> bool: ...


class Ledger:
    """Used from one event loop. `attach` a port before the first call."""

    def __init__(self, max_open: int, metrics: GatewayMetrics) -> None:
        self._max_open = max_open
        self._metrics = metrics
        self._port: SchedulerPort | None = None
        self._open: dict[str, Answer] = {}
        self._calls: dict[str, Call] = {}
        self._finished: list[RequestKey] = []
        self._unsent_cancels: list[RequestKey] = []
        self._draining = False

    def attach(self, port: SchedulerPort) -> None:
        self._port = port

    def __len__(self) -> int:
        return len(self._open)

    # ---- calls of clients

    def open(self, plan: CallPlan) -> Call:
        """Submit a call. Raises OverloadedError when this gateway holds as much as it may, before anything is sent."""
        if self._draining:
            raise UnavailableError("this gateway is shutting down")
        if plan.answers > self._max_open:
            message = f"one call may ask for {self._max_open} answers at most, this asks for {plan.answers}"
            raise InvalidRequestError(message, param="prompt")
        if len(self._open) + plan.answers > self._max_open:
            message = f"this gateway holds {len(self._open)} requests, of {self._max_open} that it may; try again later"
            raise OverloadedError(message, retry_after_s=1.0)
        if plan.id in self._calls:
            raise InvalidRequestError(f"request_id {plan.id!r} is in use", param="request_id")
        call = Call(plan)
        self._calls[plan.id] = call
        for answer in call.answers:
            self._open[answer.request_id] = answer
        if plan.timeout_s is not None:
            call.timer = asyncio.get_running_loop().call_later(plan.timeout_s, self._deadline, call)
        for group in call.groups():
            self._submit(group)
        return call

    def close(self, call: Call) -> None:
        """The reader is done with it (or gone): what is not finished is cancelled, everywhere. May be called again."""
        if call.timer is not None:
            call.timer.cancel()
        self._calls.pop(call.plan.id, None)
        self._cancel([answer for answer in call.answers if not answer.ended])

    def end(self, answer: Answer) -> None:
        """The reader has found its stop string: this answer needs no more tokens."""
        if not answer.ended:
            answer.call.open -= 1
            answer.finish = FinishReason.STOP
            self._cancel([answer])

    def cancel_call(self, call_id: str) -> bool:
        """A client's cancel by id: the call ends with CancelledError. False where there is no such call."""
        call = self._calls.get(call_id)
        if call is None or call.open == 0:
            return False
        self._fail(call, CancelledError("the request was cancelled"))
        return True

    def drain(self) -> None:
        """Take no more calls."""
        self._draining = True

    # ---- from the workers

    def on_tokens(self, batch: gw.TokenBatch) -> None:
        role, sender_id = batch.sender.role, batch.sender.id
        now_s = time.monotonic()
        for event in batch.events:
            answer = self._open.get(event.key.request_id)
            if answer is None or event.key.epoch != answer.epoch:
                self._metrics.stale_events.inc()
                continue
            try:
                self._on_event(answer, event, role, sender_id, now_s)
            except AlignedServeError as error:
                self._fail(answer.call, error)
        self.flush()

    def _on_event(self, answer: Answer, event: gw.TokenEvent, role: str, sender_id: str, now_s: float) -> None:
        have = len(answer.tokens)
        if event.position > have:
            self._lose([answer], f"tokens {have} to {event.position - 1} are missing")
            return
        if role == "prefill":
            answer.prefill_id = event.prefill_id or sender_id
        else:
            answer.decode_id = event.decode_id or sender_id
            answer.prefill_id = event.prefill_id or answer.prefill_id
        tokens = list(event.token_ids[have - event.position :])
        logprobs = [_logprobs(entry) for entry in event.logprobs[have - event.position :]]
        scores: list[TokenLogprobs] = []
        if event.prompt_logprobs and not answer.prompt_scored:
            answer.prompt_scored = True
            scores = [_logprobs(entry) for entry in event.prompt_logprobs]
        if tokens:
            answer.state = AnswerState.RUNNING
            answer.setbacks = 0
            self._metrics.on_tokens(answer, len(tokens), now_s)
            answer.last_token_s = now_s
            answer.tokens.extend(tokens)
        if answer.silent_until_s is not None:
            answer.silent_until_s = now_s + WATCH_S
        finish = FinishReason(event.finish_reason) if event.finish_reason else None
        if finish is FinishReason.ERROR:
            raise failure_from_proto(event.failure)
        if finish is FinishReason.CANCELLED:
            answer.call.add(answer, tokens, logprobs, scores)
            self._lose([answer], "it was cancelled by the cluster")
            return
        if finish is not None:
            if event.HasField("timings"):
                answer.stopwatch = timings_from_proto(event.timings)
                answer.stopwatch.close(time.time_ns())
            self._finish(answer, finish)
        if tokens or scores or finish is not None:
            answer.call.add(answer, tokens, logprobs, scores, finish)

    def on_worker_gone(self, role: str, worker_id: str) -> None:
        """A worker's stream broke. The scheduler will most likely say what is lost; if not, silence does."""
        if role == "decode":
            self._watch(answer for answer in self._open.values() if answer.decode_id == worker_id)

    def _finish(self, answer: Answer, finish: FinishReason) -> None:
        answer.finish = finish
        answer.state = AnswerState.ENDED
        self._open.pop(answer.request_id, None)
        self._finished.append(answer.key)
        self._metrics.on_answer_end(answer, finish)

    def flush(self) -> None:
        """Tell the scheduler of all that has finished."""
        if self._finished:
            finished, self._finished = self._finished, []
            if self._port is not None:
                self._port.done(finished)

    # ---- from the scheduler

    def on_rejected(self, keys: Iterable[RequestKey], error: AlignedServeError) -> None:
        answers = self._current(keys)
        if isinstance(error, CancelledError):  # not by us: what we cancel is not open any more
            self._lose(answers, "it was cancelled by the cluster")
            return
        for answer in answers:
            self._drop(answer)
            self._fail(answer.call, error)

    def on_lost(self, keys: Iterable[RequestKey], reason: str) -> None:
        self._lose(self._current(keys), reason)

    def on_link_up(self) -> list[RequestKey]:
        """The link is (again) up, nothing sent yet. Returns the open requests that may be running on.

        `resubmit` must follow.
        """
        running = [answer for answer in self._open.values() if answer.state is AnswerState.RUNNING]
        self._watch(running)
        return [answer.key for answer in running]

    def resubmit(self) -> None:
        """Send what the scheduler may not have: cancels first, then every request without a token in its epoch."""
        cancels, self._unsent_cancels = self._unsent_cancels, []
        if cancels and self._port is not None:
            self._port.cancel(cancels)
        again = [answer for answer in self._open.values() if answer.state is not AnswerState.RUNNING]
        for answer in again:
            if answer.state is AnswerState.SUBMITTED:
                self._next_epoch(answer)
        self._submit_grouped(again)

    def tick(self) -> None:
        """To be called about once a second: what waits too long."""
        now_s = time.monotonic()
        silent = [
            answer
            for answer in self._open.values()
            if answer.silent_until_s is not None and answer.silent_until_s <= now_s
        ]
        self._lose(silent, f"nothing was heard of it for {WATCH_S:g} s")
        if self._port is not None and self._port.down_for_s > SCHEDULER_WAIT_S:
            for answer in list(self._open.values()):
                if answer.state is not AnswerState.RUNNING:
                    self._fail(answer.call, UnavailableError(f"there was no scheduler for {SCHEDULER_WAIT_S:g} s"))

    # ---- own

    def _current(self, keys: Iterable[RequestKey]) -> list[Answer]:
        found = ((self._open.get(key.request_id), key.epoch) for key in keys)
        return [answer for answer, epoch in found if answer is not None and answer.epoch == epoch]

    def _lose(self, answers: Sequence[Answer], reason: str) -> None:
        again: list[Answer] = []
        for answer in answers:
            answer.setbacks += 1
            if answer.setbacks > MAX_SETBACKS:
                message = f"the request was lost {answer.setbacks} times in a row ({reason})"
                self._fail(answer.call, UnavailableError(message, request_id=answer.request_id))
            elif not self._ends_by_itself(answer):
                self._next_epoch(answer)
                self._metrics.resubmissions.inc()
                again.append(answer)
                logger.info("submitted again, as epoch %d: %s", answer.epoch, reason, extra={"request_id": answer.request_id})
        self._submit_grouped([answer for answer in again if answer.setbacks == 1])
        for setbacks in {answer.setbacks for answer in again if answer.setbacks > 1}:
            some = [answer for answer in again if answer.setbacks == setbacks]
            delay_s = _FIRST_BACKOFF_S * 2.0 ** (setbacks - 2)
            asyncio.get_running_loop().call_later(delay_s, self._submit_grouped, some)
        self.flush()

    def _ends_by_itself(self, answer: Answer) -> bool:
        """All tokens are there, only the word that it has ended was lost."""
        sampling, last = answer.sampling, answer.tokens[-1] if answer.tokens else None
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(sampling.eos_token_ids))
        if last in ends and len(answer.tokens) > sampling.min_tokens:
            finish = FinishReason.STOP
        elif len(answer.tokens) >= sampling.max_tokens:
            finish = FinishReason.LENGTH
        else:
            return False
        self._finish(answer, finish)
        answer.call.add(answer, finish=finish)
        return True

    def _next_epoch(self, answer: Answer) -> None:
        answer.epoch += 1
        answer.silent_until_s = None
        answer.state = AnswerState.UNSENT

    def _submit_grouped(self, answers: Iterable[Answer]) -> None:
        """Answers that have no token yet go together with the others to their prompt; the rest each by itself."""
        groups: dict[str, list[Answer]] = {}
        for answer in answers:
            if answer.state is AnswerState.UNSENT:
                alone = bool(answer.tokens)
                groups.setdefault(answer.request_id if alone else f"{answer.group_id}/{answer.epoch}", []).append(answer)
        for group in groups.values():
            self._submit(group)

    def _submit(self, group: Sequence[Answer]) -> None:
        port = self._port
        if port is None:
            return
        specs = [
            answer.spec(port.gateway_id, port.address, len(group), with_prompt=number == 0)
            for number, answer in enumerate(group)
        ]
        if port.submit(specs):
            for answer in group:
                answer.state = AnswerState.SUBMITTED
                answer.sent_epoch = answer.epoch

    def _watch(self, answers: Iterable[Answer]) -> None:
        until_s = time.monotonic() + WATCH_S
        for answer in answers:
            answer.silent_until_s = until_s

    def _deadline(self, call: Call) -> None:
        if call.open:
            self._fail(call, DeadlineError(f"the request did not end within its {call.plan.timeout_s:g} s"))

    def _fail(self, call: Call, error: AlignedServeError) -> None:
        """All answers of a call end with it: a client gets either all that it asked for, or an error."""
        if call.error is None and call.open:
            self._metrics.on_call_failed(error)
            call.fail(error)
        self._cancel([answer for answer in call.answers if not answer.ended])

    def _drop(self, answer: Answer) -> None:
        answer.state = AnswerState.ENDED
        self._open.pop(answer.request_id, None)

    def _cancel(self, answers: Sequence[Answer]) -> None:
        if not answers:
            return
        sent = [RequestKey(answer.request_id, answer.sent_epoch) for answer in answers if answer.sent_epoch is not None]
        for answer in answers:
            self._drop(answer)
            if answer.finish is not None:
                self._metrics.on_answer_end(answer, answer.finish)
        if sent and (self._port is None or not self._port.cancel(sent)):
            self._unsent_cancels = (self._unsent_cancels + sent)[-4 * self._max_open :]


def _logprobs(entry: gw.TokenLogprob) -> TokenLogprobs:
    return TokenLogprobs(entry.logprob, tuple((top.token_id, top.logprob) for top in entry.top))
