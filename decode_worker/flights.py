"""Iterations under way. Their tokens are taken later, perhaps after the next iteration was launched."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from alignedserve.control.convert import failure_event, token_event
from alignedserve.decode_worker.endings import Endings
from alignedserve.decode_worker.held import Held, Outcome
from alignedserve.decode_worker.iteration_meter import IterationMeter
from alignedserve.decode_worker.rank_placer import Placer
from alignedserve.engine.decoding import DecodeEngine, DecodeItem, DecodeStep
from alignedserve.engine.live import LiveRequest
from alignedserve.engine.sampling.sampler import SampledToken
from alignedserve.errors import AlignedServeError
from alignedserve.request import RequestKey, Stage
from alignedserve.scheduler.instance.iteration import IterationScheduler
from alignedserve.scheduler.instance.plan import RunItem

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Flight:
    """An iteration that was launched, and the request of each of its rows."""

    step: DecodeStep
    keys: list[RequestKey]
    lives: list[LiveRequest]
    lengths: list[int]  # tokens of KV of each row before the iteration
    last: set[int]  # rows of requests that reach `max_tokens` with it
    rows: dict[RequestKey, int]
    block_lists: list[Sequence[int]]  # of each row; may include blocks that were added after the launch
    _blocks: set[int] | None = field(default=None, init=False)  # blocks of all rows, computed on demand

    def touches(self, block_ids: Iterable[int]) -> bool:
        """Whether the device may read or write one of these blocks in this iteration."""
        if self._blocks is None:
            self._blocks = set(chain.from_iterable(self.block_lists))
        return not self._blocks.isdisjoint(block_ids)

    def row_of(self, live: LiveRequest | None) -> int | None:
        """The request's row; None if it is not in this iteration."""
        row = self.rows.get(live.key) if live is not None else None
        return row if row is not None and self.lives[row] is live else None

    def ends(self, live: LiveRequest) -> bool:
        """Whether the request reaches `max_tokens` in this iteration. The scheduler has then removed it already."""
        return self.row_of(live) in self.last


class Flights:
    """Launches iterations of the requests in `held`, and takes their tokens. Used by the decode thread."""

    def __init__(
        self,
        decode_id: str,
        engine: DecodeEngine,
        scheduler: IterationScheduler,
        held: dict[RequestKey, Held],
        meter: IterationMeter,
        endings: Endings | None = None,
        placer: Placer | None = None,
    ) -> None:
        """`placer`: gives requests to the ranks that share experts; None: there are none."""
        self._placer = placer
        self._endings = endings
        self._decode_id = decode_id
        self._engine = engine
        self._scheduler = scheduler
        self._held = held
        self._meter = meter

    def launch(self, run: Sequence[RunItem], under_way: Flight | None, running: int = 0) -> Flight:
        """Begin the planned iteration. `under_way`: the previous iteration, if its tokens are not known yet.
        `running`: the number of requests that run, if other iterations have some of them.

        The scheduler assumes that each request goes on unless it reaches `max_tokens` in this iteration. The blocks of
        a request that ends are free at once. Later copies may write to them, because the device runs those after this
        iteration.
        """
        lives: list[LiveRequest] = []
        items: list[DecodeItem] = []
        last: set[int] = set()
        now_ns = time.time_ns()
        keys = [item.key for item in run]
        ranks = [0] * len(run) if self._placer is None else self._placer.place(run)
        for item, rank in zip(run, ranks, strict=True):
            live = self._held[item.key].live
            assert live is not None
            spec = live.spec
            if spec.stopwatch.stage is not Stage.DECODE:
                spec.stopwatch.enter(Stage.DECODE, now_ns)
            before = under_way.row_of(live) if under_way is not None else None
            position = len(spec.output_token_ids) + (before is not None)
            token = spec.output_token_ids[-1] if before is None else None
            if position + 1 >= spec.sampling.max_tokens:
                last.add(len(lives))
            lives.append(live)
            items.append(DecodeItem(live.row, token, before or 0, item.kv_tokens, item.block_ids, position, rank))
        lengths = [item.kv_tokens for item in run]
        self._meter.begin()
        step = self._engine.launch(items)
        if self._endings is not None:
            self._endings.running = running or len(run)
            for row in last:
                item = run[row]
                self._endings.hold(item.key, self._held[item.key].stored, item.kv_tokens + 1, item.block_ids)
        self._scheduler.advance([(key, row in last) for row, key in enumerate(keys)])
        rows = {key: row for row, key in enumerate(keys)}
        return Flight(step, keys, lives, lengths, last, rows, [item.block_ids for item in run])

    def may_follow(self, flight: Flight) -> bool:
        """Whether the next iteration can be launched before the tokens of `flight` are taken."""
        return self._engine.ahead([live.row for row, live in enumerate(flight.lives) if row not in flight.last])

    def take(self, flight: Flight, following: Flight | None, outcome: Outcome) -> None:
        """Wait for the tokens of `flight`, and give each request its token. If a row fails, only its request ends.

        `following`: the iteration that was launched after it, if any. The token of a request that is no longer held
        (cancelled, or ended in the previous iteration) is dropped. Raises a fault that makes the device unusable.
        """
        present = []
        for row, (key, live) in enumerate(zip(flight.keys, flight.lives, strict=True)):
            held = self._held.get(key)
            if held is not None and held.live is live:
                present.append((row, live))
        try:
            tokens = flight.step.tokens()
        except Exception as error:  # the iteration failed: its requests end, and the instance goes on
            logger.exception("an iteration of %d requests failed", len(flight.lives))
            if (fault := self._engine.device_fault()) is not None:  # this process must be replaced
                raise fault from error
            self._meter.end()
            self._meter.pause()
            for _, live in present:
                self._end(live, error, outcome)
                if not self._freed(live, flight, following):
                    self._scheduler.ended(live.key)
            self._drop_held(flight)
            return
        self._meter.end()
        bubble_s = self._meter.bubble_s(flight.lengths)
        for row, live in present:
            if bubble_s is not None:
                live.spec.stopwatch.waste(bubble_s)
            freed = self._freed(live, flight, following)
            ended = self._give(live, tokens[row], () if freed else flight.block_lists[row], outcome)
            if ended and not freed:
                self._scheduler.ended(live.key)
        self._drop_held(flight)

    def _drop_held(self, flight: Flight) -> None:
        """Free blocks that were held for requests that turned out to be cancelled or failed."""
        if self._endings is not None:
            for row in flight.last:
                self._endings.drop(flight.keys[row])

    @staticmethod
    def _freed(live: LiveRequest, flight: Flight, following: Flight | None) -> bool:
        """Whether the scheduler has removed the request already, since it reaches `max_tokens`."""
        return flight.ends(live) or (following is not None and following.ends(live))

    def _give(
        self, live: LiveRequest, token: SampledToken | Exception, block_ids: Sequence[int], outcome: Outcome
    ) -> bool:
        """Give a request its token. Returns True if it ended. `block_ids`: none if they are freed already."""
        if isinstance(token, Exception):
            logger.error("no token could be sampled: %r", token, extra={"request_id": live.key.request_id})
            self._end(live, token, outcome)
            return True
        try:
            return self._push(live, token, block_ids, outcome)
        except Exception as error:
            logger.exception("a token could not be added to its request", extra={"request_id": live.key.request_id})
            self._end(live, error, outcome)
            return True

    def _push(self, live: LiveRequest, sampled: SampledToken, block_ids: Sequence[int], outcome: Outcome) -> bool:
        """Append a token. Returns True if the request ended with it."""
        spec = live.spec
        position = len(spec.output_token_ids)
        finish = live.push(sampled)
        if finish is not None:
            spec.stopwatch.close(time.time_ns())
            outcome.finished.append(spec.key)
        since_ns = spec.stopwatch.since_ns
        timed, live.told_ns = since_ns != live.told_ns, since_ns  # the gateway may end it, and has no other times
        event = token_event(
            spec, (sampled.token_id,), position=position, logprobs=sampled.logprobs, finish=finish, timed=timed
        )
        if finish is not None:
            stored = self._held.pop(spec.key).stored
            event.prefill_id = stored.prefill_id
            event.decode_id = self._decode_id
            if self._endings is not None:
                self._endings.hold(spec.key, stored, spec.prefix_length - 1, block_ids)
                outcome.endings += self._endings.ended(live, stored)
        outcome.events.append((spec.gateway_address, event))
        return finish is not None

    def _end(self, live: LiveRequest, error: Exception, outcome: Outcome) -> None:
        known = error if isinstance(error, AlignedServeError) else AlignedServeError(f"decoding failed: {error}")
        outcome.events.append((live.spec.gateway_address, failure_event(live.spec, known)))
        outcome.finished.append(live.key)
        del self._held[live.key]
