"""Keeps every request from its validation to its last token, and submits it again when a process that had it dies.

The rules below are safe because every message carries an epoch and every token a position:

- After a `Loss` from the scheduler, a request is submitted again in a new epoch, with the tokens delivered so far. The
  same happens when the cluster cancels a request that the gateway did not cancel. After more than MAX_SETBACKS losses
  in a row without a new token, the call fails with RequestLostError.
- Events of an older epoch and tokens that were delivered before are dropped. The streams of prefill and decode
  instances have no common order, so an event may arrive before the tokens that precede it. It waits GAP_S for them, and
  then counts as a loss.
- When the link to the scheduler is up again, `hello` names the requests that have received tokens in their epoch: they
  may still be running. The scheduler names those that it does not know. All other requests are submitted again in a new
  epoch, because the gateway cannot tell whether the scheduler received them.
- The gateway asks the scheduler about requests that were sent and have had no event for QUIET_S: every ASK_EVERY_S, and
  QUIET_S after a stream (the link's or a worker's) broke. The scheduler names those that it does not know. It knows
  requests that wait for their turn.
- A request that the scheduler does not know is lost if its end does not arrive within QUIET_S.
- Without a scheduler, requests wait for at most SCHEDULER_WAIT_S, or longer if a scheduler is known to be starting.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from alignedserve.control.convert import failure_from_proto
from alignedserve.errors import (
    AccountingError,
    AlignedServeError,
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from alignedserve.gateway.body.planning import CallPlan
from alignedserve.gateway.failures import RequestLostError, ShuttingDownError
from alignedserve.gateway.ledger.calls import Answer, AnswerState, Call, CallName, caller, id_of_call
from alignedserve.gateway.ledger.submitter import SchedulerPort, Submitter
from alignedserve.gateway.metrics import GatewayMetrics
from alignedserve.gateway.reply.new_tokens import EarlyEvent, NewTokens, read_event
from alignedserve.gateway.request_log import RequestLog
from alignedserve.proto import gateway_pb2 as gw
from alignedserve.request import PROBE, FinishReason, RequestKey, RequestSpec

logger = logging.getLogger(__name__)

MAX_SETBACKS = 5
QUIET_S = 1.0  # the last event may be in transit for so long after the scheduler knows of the end
ASK_EVERY_S = 2.0
GAP_S = 1.0
SCHEDULER_WAIT_S = 30.0
_FIRST_BACKOFF_S = 0.1


class Ledger:
    """All open calls and requests of one gateway. Use it from one event loop; `attach` a port before the first call."""

    def __init__(self, max_open: int, metrics: GatewayMetrics, log: RequestLog | None = None) -> None:
        self._max_open = max_open
        self._metrics = metrics
        self._aside = GatewayMetrics("probe")  # metrics of probes; they are not exported
        self._log = log
        self.decoded_s = float("-inf")
        """When the last token from a decode instance arrived (time.monotonic)."""
        self._submitter = Submitter()  # also keeps what could not be sent while the link was down
        self._open: dict[str, Answer] = {}  # answers of all calls, by request id, until they end
        self._open_of_probes = 0  # how many of these belong to probes (`pulse.py`)
        self._calls: dict[CallName, Call] = {}  # by owner and id, until the reader closes the call
        self._draining = False  # no call is accepted, until `take_calls`
        self._asked_s = 0.0  # when the scheduler was last asked about silent requests (time.monotonic)
        self.on_closed: Callable[[Call], None] | None = None  # gets each call whose reader has finished
        self.on_ended: Callable[[Answer], None] | None = None  # gets each answer that has ended
        self.on_refused: Callable[[str], None] | None = None  # gets why, in the context of the refused call
        self._empty = asyncio.Event()  # set while `_open` is empty
        self._empty.set()

    def attach(self, port: SchedulerPort) -> None:
        self._submitter.attach(port)

    def __len__(self) -> int:
        """Number of open requests of clients."""
        return len(self._open) - self._open_of_probes

    @property
    def interactive(self) -> int:
        """Number of open requests whose clients wait. Lines of batches are not among them: they go on elsewhere."""
        plans = (answer.call.plan for answer in self._open.values())
        return sum(not (plan.offline or plan.probe) for plan in plans)

    def _count(self, call: Call) -> GatewayMetrics:
        return self._aside if call.plan.probe else self._metrics

    async def wait_empty(self) -> None:
        await self._empty.wait()

    @property
    def draining(self) -> bool:
        """Whether calls are refused because this gateway is ending."""
        return self._draining

    def without_token(self) -> tuple[int, int]:
        """Number of open requests without a token in their epoch: of interactive calls, and of lines of batches."""
        waiting = [0, 0]
        for answer in self._open.values():
            if answer.state is not AnswerState.RUNNING and not answer.call.plan.probe:
                waiting[answer.call.plan.offline] += 1
        return waiting[0], waiting[1]

    # ---- calls of clients

    def open(self, plan: CallPlan) -> Call:
        """Submits a call. A call that resumes another call replaces it.

        Raises, before anything is sent: OverloadedError if this gateway has reached its limit of requests,
        InvalidRequestError if the request id is in use or the call has more answers than this limit, ShuttingDownError
        if the gateway is draining.
        """
        if plan.resume and (broken := self._calls.pop((caller.get(), plan.id), None)) is not None:
            self._fail(broken, CancelledError("the call was resumed over another connection"))
        self._check_room(plan)
        call = Call(plan)
        if not call.open:  # it had already ended, but the client had not learned of it
            return call
        if plan.scored_only and all(prompt.sampling.prompt_logprobs is None for prompt in plan.prompts):
            for answer in call.answers:  # echo alone: there is nothing to compute
                answer.state = AnswerState.ENDED
                call.add(answer, finish=FinishReason.LENGTH)
            return call
        self._calls[call.name] = call
        opened = {answer.request_id: answer for answer in call.answers if not answer.ended}
        self._open |= opened
        self._open_of_probes += len(opened) if plan.probe else 0
        self._empty.clear()
        self._count(call).prompt_tokens.inc(sum(len(prompt.token_ids) for prompt in plan.prompts))
        if plan.timeout_s is not None:
            call.timer = asyncio.get_running_loop().call_later(plan.timeout_s - plan.spent_s, self._deadline, call)
        self._submitter.submit(call.answers)
        return call

    def close(self, call: Call) -> None:
        """The reader has finished or disconnected: unfinished answers are cancelled everywhere. May be called again."""
        if call.timer is not None:
            call.timer.cancel()
        if self._calls.get(call.name) is call:
            del self._calls[call.name]
        if call.open and call.error is None:
            self._count(call).on_call_failed(CancelledError("the client disconnected"))
        self._cancel([answer for answer in call.answers if not answer.ended])
        if self.on_closed is not None and not call.closed:
            self.on_closed(call)
        call.closed = True

    def end(self, answer: Answer) -> None:
        """The reader has found a stop string: this answer needs no more tokens."""
        if not answer.ended:
            answer.call.open -= 1
            answer.finish = FinishReason.STOP
            self._cancel([answer])
            self._count(answer.call).on_answer_end(answer, FinishReason.STOP)

    def cancel_call(self, call_id: str, owner: bytes | None = b"") -> bool:
        """Cancels a call by id: it ends with CancelledError. False if this gateway has no such call of that owner.

        `owner`: hash of the API key that the call was sent with; None cancels calls of any owner.
        """
        ids = {call_id, id_of_call(call_id)}
        names = [(owner, each) for each in ids] if owner is not None else [one for one in self._calls if one[1] in ids]
        calls = [call for name in names if (call := self._calls.get(name)) is not None and call.open]
        for call in calls:
            self._fail(call, CancelledError("the request was cancelled"))
        return bool(calls)

    def answers_of(self, name: str, owner: bytes | None) -> list[Answer]:
        """The open answers of a call, by its id, a request's or its X-Request-Id; `owner`: as in `cancel_call`."""
        calls = [call for key, call in self._calls.items() if owner is None or key[0] == owner]
        names = (name, id_of_call(name))
        return [
            answer
            for call in calls
            for answer in call.answers
            if not answer.ended and not {call.plan.id, answer.request_id, call.sent_id}.isdisjoint(names)
        ]

    def open_answers(self) -> Iterable[Answer]:
        """Those of all calls. Must not be changed during iteration."""
        return self._open.values()

    def drain(self) -> None:
        """Accept no more calls."""
        self._draining = True
        for call in [call for call in self._calls.values() if call.plan.probe]:
            self._fail(call, ShuttingDownError("this gateway is shutting down"))

    def take_calls(self) -> None:
        """After `drain`: accept calls again."""
        self._draining = False

    def close_all(self) -> None:
        """This gateway is ending: every call ends with ShuttingDownError, and is cancelled everywhere."""
        self.drain()
        for call in list(self._calls.values()):
            self._fail(call, ShuttingDownError("this gateway is shutting down, and the request did not finish in time"))

    # ---- from the workers

    def on_tokens(self, batch: gw.TokenBatch) -> None:
        role, sender_id = batch.sender.role, batch.sender.id
        now_s = time.monotonic()
        for event in batch.events:
            answer = self._open.get(event.key.request_id)
            if answer is None or event.key.epoch != answer.epoch:
                if not event.key.request_id.startswith(PROBE):  # a probe is cancelled while it runs
                    self._metrics.stale_events.inc()
                continue
            try:
                self._on_event(answer, event, role, sender_id, now_s)
            except AlignedServeError as error:
                self._fail(answer.call, error)
            except Exception:  # an invalid event ends its own call only, not the stream of all requests
                logger.exception("an event from %s cannot be read", sender_id, extra=answer.log_extra)
                self._fail(answer.call, AlignedServeError(f"{sender_id} sent an event that cannot be read"))

    def on_worker_gone(self, role: str, worker_id: str) -> None:
        """A worker's stream broke. The scheduler reports lost requests, except those that it believes to have ended.
        So the gateway asks it about silent requests.
        """
        if self._open:
            logger.debug("the stream of %s %s broke", role, worker_id)
            asyncio.get_running_loop().call_later(QUIET_S, self._ask)

    # ---- from the scheduler

    def on_rejected(self, keys: Iterable[RequestKey], error: AlignedServeError) -> None:
        answers = self._current(keys)
        if isinstance(error, CancelledError):  # not by this gateway: a request that it cancels is no longer open
            self._lose(answers, "it was cancelled by the cluster")
            return
        for answer in answers:
            if isinstance(error, OverloadedError) and not answer.epoch and answer.call.begun:
                answer.next_epoch("it was refused for load after its call had begun")  # a later epoch is not refused
            else:
                self._fail(answer.call, error, gone=[answer])
        self._submitter.submit(answer for answer in answers if not answer.ended)

    def on_lost(self, keys: Iterable[RequestKey], reason: str) -> None:
        self._lose(self._current(keys), reason)

    def on_unknown(self, keys: Iterable[RequestKey]) -> None:
        asyncio.get_running_loop().call_later(QUIET_S, self.on_lost, keys, "the scheduler does not know it")

    def open_among(self, keys: Iterable[RequestKey]) -> list[RequestKey]:
        """The keys whose requests are open in this epoch, or in a newer epoch that is not submitted yet.

        A newer epoch may adopt the KV.
        """
        found = ((key, self._open.get(key.request_id)) for key in keys)
        return [key for key, answer in found if answer is not None and _claims(answer, key.epoch)]

    def specs(self, keys: Iterable[RequestKey]) -> list[RequestSpec]:
        """The specifications that a worker needs, of the requests that are open in the given epoch."""
        return self._submitter.specs(self._current(keys))

    def on_link_up(self) -> list[RequestKey]:
        """The link is up (again), and nothing has been sent yet. Returns the open requests that may still be running.

        Call `resubmit` afterwards.
        """
        return [answer.key for answer in self._open.values() if answer.state is AnswerState.RUNNING]

    def resubmit(self) -> None:
        """Sends kept cancels, then submits every open request that `on_link_up` did not return."""
        self._submitter.resend(list(self._open.values()))
        asyncio.get_running_loop().call_later(QUIET_S, self._ask)  # about requests that began to run after `on_link_up`

    def tick(self, trouble: str = "", patience_s: float = 0.0) -> None:
        """Call it about once a second. Asks about silent requests; fails those that waited too long for a scheduler.

        `trouble`: why there is no scheduler. `patience_s`: seconds to wait for one, if more than SCHEDULER_WAIT_S.
        """
        if time.monotonic() - self._asked_s >= ASK_EVERY_S:
            self._ask()
        wait_s = max(SCHEDULER_WAIT_S, patience_s)
        if self._submitter.down_for_s > wait_s:
            message = f"there was no scheduler for {wait_s:g} s" + (f" ({trouble})" if trouble else "")
            for answer in list(self._open.values()):
                if answer.state is not AnswerState.RUNNING:
                    self._fail(answer.call, UnavailableError(message))

    def check_integrity(self) -> None:
        """Raises AccountingError if calls and requests do not match."""
        for request_id, answer in self._open.items():
            if answer.request_id != request_id or answer.ended or answer.call.name not in self._calls:
                raise AccountingError(f"{request_id} is in the ledger, but is not open", request_id=request_id)
        for name, call in self._calls.items():
            unfinished = sum(answer.finish is None for answer in call.answers)
            if call.name != name or (call.error is None and call.open != unfinished):
                raise AccountingError(f"call {name[1]} counts {call.open} open answers; a recount gives {unfinished}")
        of_probes = sum(answer.call.plan.probe for answer in self._open.values())
        if of_probes != self._open_of_probes:
            raise AccountingError(f"{self._open_of_probes} open probes are counted; a recount gives {of_probes}")
        if self._empty.is_set() == bool(self._open):
            raise AccountingError("the ledger's empty flag does not match its open requests")

    # ---- internal

    def _check_room(self, plan: CallPlan) -> None:
        if self._draining:
            raise ShuttingDownError("this gateway is shutting down and accepts no more requests")
        if plan.answers > self._max_open:
            message = f"one call may ask for at most {self._max_open} answers, this call asks for {plan.answers}"
            raise InvalidRequestError(message, param="prompt")
        if len(self._open) + plan.answers > self._max_open:
            why = f"this gateway holds {len(self._open)} requests; its limit is {self._max_open}"
            error = OverloadedError(f"{why}; try again later", retry_after_s=1.0)
            (self._aside if plan.probe else self._metrics).on_call_failed(error)
            if self.on_refused is not None and not (plan.probe or plan.offline):
                self.on_refused(why)
            raise error
        if (caller.get(), plan.id) in self._calls:
            raise InvalidRequestError(f"request_id {plan.id!r} is in use", param="request_id")

    def _on_event(self, answer: Answer, event: gw.TokenEvent, role: str, sender_id: str, now_s: float) -> None:
        answer.heard_s = now_s
        if event.position > len(answer.tokens):
            if not answer.early:
                asyncio.get_running_loop().call_later(GAP_S, self._check_gap, answer, answer.epoch)
            answer.early.append(EarlyEvent(event, role, sender_id))
            return
        self._take(answer, event, read_event(answer, event, role, sender_id), role, now_s)
        while (early := answer.next_early()) is not None:
            new = read_event(answer, early.event, early.role, early.sender_id)
            self._take(answer, early.event, new, early.role, now_s)

    def _take(self, answer: Answer, event: gw.TokenEvent, new: NewTokens, role: str, now_s: float) -> None:
        if new.token_ids:
            answer.state = AnswerState.RUNNING
            answer.setbacks = 0
            self._count(answer.call).on_tokens(answer, len(new.token_ids), now_s)
            answer.note_tokens(now_s)
            if role != "prefill":
                self.decoded_s = now_s
        if new.finish is FinishReason.ERROR:
            self._fail(answer.call, failure_from_proto(event.failure), gone=[answer])
            return
        cancelled = new.finish is FinishReason.CANCELLED
        if cancelled:
            new.finish = None
        if new.finish is not None:
            self._finish(answer, new.finish)
        if new.any:
            answer.call.add(answer, new.token_ids, new.logprobs, new.prompt_logprobs, new.finish)
        if cancelled:
            self._lose([answer], "it was cancelled by the cluster")

    def _check_gap(self, answer: Answer, epoch: int) -> None:
        if answer.early and answer.epoch == epoch and not answer.ended:
            missing = f"tokens {len(answer.tokens)} to {answer.early[0].event.position - 1} did not arrive"
            self._lose([answer], missing)

    def _finish(self, answer: Answer, finish: FinishReason) -> None:
        answer.finish = finish
        self._drop(answer)
        self._count(answer.call).on_answer_end(answer, finish)

    def _current(self, keys: Iterable[RequestKey]) -> list[Answer]:
        found = ((self._open.get(key.request_id), key.epoch) for key in keys)
        return [answer for answer, epoch in found if answer is not None and answer.epoch == epoch]

    def _lose(self, answers: Sequence[Answer], reason: str) -> None:
        """Submits lost requests again: immediately after the first loss, with growing delays after more in a row."""
        delayed: dict[float, list[Answer]] = {}
        for answer in answers:
            answer.setbacks += 1
            if answer.ended:
                continue  # its call has just failed
            if answer.setbacks > MAX_SETBACKS:
                message = f"the request was lost {answer.setbacks} times in a row ({reason})"
                self._fail(answer.call, RequestLostError(message, request_id=answer.request_id))
            elif (finish := answer.finished_unsaid()) is not None:
                self._finish(answer, finish)
                answer.call.add(answer, finish=finish)
            else:
                answer.next_epoch(reason)
                self._count(answer.call).on_resubmission()
                delay_s = 0.0 if answer.setbacks == 1 else _FIRST_BACKOFF_S * 2.0 ** (answer.setbacks - 2)
                delayed.setdefault(delay_s, []).append(answer)
                logger.info("epoch %d: %s", answer.epoch, reason, extra=answer.log_extra)
        self._submitter.submit(delayed.pop(0.0, ()))
        for delay_s, some in delayed.items():
            asyncio.get_running_loop().call_later(delay_s, self._submitter.submit, some)

    def _ask(self) -> None:
        """Asks the scheduler whether it knows the requests that were sent and have had no event for QUIET_S."""
        self._asked_s = time.monotonic()
        quiet_since_s = self._asked_s - QUIET_S
        self._submitter.ask(
            answer
            for answer in self._open.values()
            if answer.state is not AnswerState.UNSENT and answer.heard_s <= quiet_since_s
        )

    def _deadline(self, call: Call) -> None:
        if call.open:
            self._fail(call, DeadlineError(f"the request did not end within its timeout of {call.plan.timeout_s:g} s"))

    def _fail(self, call: Call, error: AlignedServeError, gone: Iterable[Answer] = ()) -> None:
        """Ends all answers of a call with an error: a client gets either all its answers, or an error.

        `gone`: those that no process holds any more, so that there is nothing to cancel.
        """
        if call.error is None and call.open:
            self._count(call).on_call_failed(error)
            call.fail(error)
        for answer in gone:
            self._drop(answer)
        self._cancel([answer for answer in call.answers if not answer.ended])

    def _drop(self, answer: Answer) -> None:
        answer.state = AnswerState.ENDED
        answer.close_stopwatch()
        if self._log is not None and not answer.call.plan.probe:
            self._log.note(answer)
        if self.on_ended is not None:
            self.on_ended(answer)
        if self._open.pop(answer.request_id, None) is not None and answer.call.plan.probe:
            self._open_of_probes -= 1
        if not self._open:
            self._empty.set()

    def _cancel(self, answers: Sequence[Answer]) -> None:
        if answers:
            for answer in answers:
                self._drop(answer)
            self._submitter.cancel(answers)


def _claims(answer: Answer, epoch: int) -> bool:
    return answer.epoch == epoch or (answer.epoch > epoch and answer.state is AnswerState.UNSENT)
