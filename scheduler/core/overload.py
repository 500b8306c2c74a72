"""Admission by prediction: a request that would miss an objective, or wait too long, is refused before any work.

As in Mooncake's early rejection, the load that counts is the predicted load when the prefill will be done. A cluster
that judges by its current load and whose prefills take a while accepts everything until the first of them decode, then
nothing until they end, and so on (`tests/unit/scheduler/test_overload.py` shows both). Each decode is assumed to last
as long as decodes have lasted on average, so no output length has to be known.

Requests that only take what others leave (from BATCH_PRIORITY on) are neither predicted nor counted: they wait as long
as it takes, and only a full queue refuses them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from alignedserve.errors import OverloadedError
from alignedserve.request import BATCH_PRIORITY
from alignedserve.scheduler.core.admission import MOST_RETRY_AFTER_S, Admission
from alignedserve.scheduler.core.events import RequestMeta
from alignedserve.scheduler.core.instances import DecodeView
from alignedserve.scheduler.core.prefill_queue import QueuedGroup
from alignedserve.scheduler.core.request_table import Record, RequestState
from alignedserve.scheduler.core.state import CoreState
from alignedserve.scheduler.cost.pass_model import EXTRAPOLATION, FEW_REQUESTS, MOST_MARGIN, RunningQuantile
from alignedserve.scheduler.priorities import rank_of

if TYPE_CHECKING:
    from alignedserve.metrics import Page

MOST_ROOM = 64  # requests: with room for this many, no request is held back
GAIN = 0.1
ROUNDS = 3  # of the search for how many requests decode, and how long
LEAST_RETRY_S = 0.01


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is predicted for a request. `tpot_s` includes the wait between its first and its second token.

    `first_s` is the time to the first token without margin. `wait_s` is the wait for room in the pool and in a batch.
    `retry_s` is how long from now until a similar request would meet the objectives.
    """

    first_s: float
    ttft_s: float
    tpot_s: float
    wait_s: float
    retry_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Headroom:
    """How many more requests of typical size would be accepted now; if none, one would be in `again_s`."""

    requests: int
    again_s: float = 0.0

    @property
    def limited(self) -> bool:
        return self.requests < MOST_ROOM


class Overload:
    """Predicts for a request that has just arrived, and learns from those that were accepted."""

    def __init__(self, state: CoreState, admission: Admission) -> None:
        self._state = state
        self._admission = admission
        self._config = state.config.scheduler
        self._times = state.decode_times
        self._late = RunningQuantile()  # by how much first tokens came later than predicted
        self._typical_tokens = 0.0
        self._typical_work = 0.0  # of them, how many must be computed
        self.refused = 0

    def judge(self, group: Sequence[RequestMeta], now_s: float) -> OverloadedError | None:
        """The error if a group is refused for load. Only new groups are, never those that a gateway submits again."""
        if not self._config.refuse_for_load or any(meta.key.epoch for meta in group):
            return None
        rank = rank_of(group[0].priority)
        refusal = self._admission.queue_full(len(group), rank) or self.refusal(group, now_s)
        if refusal is None:
            self._admission.make_place(len(group), rank, now_s)
        return refusal

    def refusal(self, group: Sequence[RequestMeta], now_s: float) -> OverloadedError | None:
        """The error if a group that was just submitted for the first time is refused, or None.

        An empty cluster accepts any request: without one it would never learn that it has become faster.
        """
        first = group[0]
        if not len(self._state.table) or not self._predictable or first.priority >= BATCH_PRIORITY:
            return None
        recent = self._state.recent.find(first.marks)
        coming = next((tokens for tokens, place in recent if place.queued), 0)
        prompt = QueuedGroup([], first.prefix_tokens, cached=first.cached, coming=coming, recent=recent)
        prompt.reads_s = first.reads_left()
        outlook = self.predict(first.prefix_tokens, len(group), now_s, age_s=first.age_s, prompt=prompt)
        why = self._objection(outlook)
        if why is None:
            return None
        self.refused += 0 if first.key.is_probe else len(group)
        return OverloadedError(why, retry_after_s=outlook.retry_s)

    def accepted(self, record: Record, group: int, now_s: float) -> None:
        """A group's first request was queued: record its predicted first token, to be compared with the actual one."""
        if record.key.is_probe or record.background:
            return
        gain = GAIN if self._typical_tokens else 1.0
        self._typical_tokens += gain * (record.meta.prefix_tokens - self._typical_tokens)
        self._typical_work += gain * (self._state.queue.work_of(record.key) - self._typical_work)
        if record.meta.key.epoch == 0 and self._predictable:
            known = QueuedGroup([], 0, reads_s=record.meta.reads_left())  # its tokens are already in the queue
            record.first_token_due_s = now_s + self._first_s(0, group, known)[0]

    def prefilled(self, record: Record, now_s: float) -> None:
        """Learn how far off the prediction was."""
        if record.first_token_due_s:
            self._late.observe(now_s - record.first_token_due_s)
            record.first_token_due_s = 0.0

    def room(self, now_s: float) -> Headroom:
        """How many more requests would be accepted. Gateways refuse by it before they have read a request."""
        state = self._state
        if not len(state.table) or not self._predictable:
            return Headroom(MOST_ROOM)
        if not self._limits_set and not state.queue.ahead()[0]:
            return Headroom(MOST_ROOM)
        low, high = 0, MOST_ROOM  # the largest number that fits; if a number does not fit, no larger one does
        while low < high:
            middle = (low + high + 1) // 2
            if self._objection(self._typical(middle, now_s)) is None:
                low = middle
            else:
                high = middle - 1
        return Headroom(low, 0.0 if low else self._typical(1, now_s).retry_s)

    def outlook(self, now_s: float) -> Outlook | None:
        """The prediction for a typical request that arrived now; None while a role is missing."""
        return self._typical(1, now_s) if self._predictable else None

    def show_metrics(self, page: Page, now_s: float) -> None:
        """Requests refused for load, and what is predicted while no role is missing."""
        meaning = "requests refused because they would miss an objective or wait too long"
        page.counter("requests_refused_for_load_total", meaning, self.refused)
        outlook = self.outlook(now_s)
        if outlook is not None:
            meaning = "predicted TTFT of a typical request that arrives now"
            page.gauge("predicted_ttft_seconds", meaning, outlook.ttft_s)
            page.gauge("predicted_tpot_seconds", "predicted TPOT of such a request", outlook.tpot_s)

    def predict(
        self,
        tokens: int,
        requests: int,
        now_s: float,
        *,
        age_s: float = 0.0,
        prompt: QueuedGroup | None = None,
        alike: int = 1,
    ) -> Outlook:
        """For a group of `requests` answers to a prompt of `tokens` that its gateway has had for `age_s` already.

        `prompt`: what is known of it; None: all of it must be computed. `alike`: so many such prompts are computed.
        """
        first_s, pool_s = self._first_s(tokens, requests, prompt, alike)
        iteration_s, wait_s, per_request_s = self._decode(requests, tokens, now_s, first_s)
        gaps = max(1.0, self._times.mean_tokens)
        ttft_s = age_s + first_s + min(self._late.value, MOST_MARGIN * self._config.ttft_objective_s)
        tpot_s = iteration_s + wait_s / gaps
        excess_s = [pool_s + wait_s - self._config.max_wait_s]
        if self._config.ttft_objective_s:
            excess_s.append(ttft_s - self._config.ttft_objective_s)
        if self._config.tpot_objective_s and tpot_s > self._config.tpot_objective_s:
            excess_s.append(per_request_s)
        retry_s = min(MOST_RETRY_AFTER_S, max(LEAST_RETRY_S, *excess_s))
        return Outlook(first_s, ttft_s, tpot_s, pool_s + wait_s, retry_s)

    # parts of a prediction

    def _first_s(
        self, tokens: int, requests: int, prompt: QueuedGroup | None = None, alike: int = 1
    ) -> tuple[float, float]:
        """Time until the first token, and the part of it that is the wait for room in the pool."""
        pool_s = self._pool_wait_s(tokens, requests)
        return self._prefill_s(prompt or QueuedGroup([], tokens), alike) + pool_s, pool_s

    @property
    def _predictable(self) -> bool:
        """False while a role is missing: requests that arrive then wait for its successor, however long that takes."""
        instances = self._state.instances
        return self._admission.ready() and any(view.cache_blocks for view in instances.decode.values())

    @property
    def _limits_set(self) -> bool:
        return bool(self._config.ttft_objective_s or self._config.tpot_objective_s)

    def _objection(self, outlook: Outlook) -> str | None:
        ttft_s, tpot_s, wait_s = (
            self._config.ttft_objective_s,
            self._config.tpot_objective_s,
            self._config.max_wait_s,
        )
        if ttft_s and outlook.ttft_s > ttft_s:
            return f"the first token is predicted after {outlook.ttft_s:.3g} s; the objective is {ttft_s:g} s"
        if tpot_s and outlook.tpot_s > tpot_s:
            return f"each token is predicted to take {outlook.tpot_s:.3g} s; the objective is {tpot_s:g} s"
        if outlook.wait_s > wait_s:
            return f"the request would wait {outlook.wait_s:.3g} s for room; the limit is {wait_s:g} s"
        return None

    def _typical(self, requests: int, now_s: float) -> Outlook:
        """For the last of `requests` typical requests that arrive together."""
        tokens, work = int(self._typical_tokens), int(self._typical_work)
        prompt = QueuedGroup([], tokens, coming=tokens - work)
        return self.predict(int(requests * self._typical_tokens), requests, now_s, prompt=prompt, alike=requests)

    def _prefill_s(self, prompt: QueuedGroup, alike: int) -> float:
        """Time until the first tokens of so many prompts, after all queued and dispatched ones.

        What a queued one will leave of it is computed wherever this one goes. Queued ones read as much as typical ones.
        """
        loads = [view.load for view in self._state.instances.prefill.values()]
        share = -(-self._state.queue.ahead()[1] // len(loads))
        queued = share / self._typical_work if self._typical_work else 0.0
        typical, work = int(self._typical_tokens), int(self._typical_work)
        found = math.inf
        for load in loads:
            left = min(prompt.tokens - prompt.coming, load.work(prompt))
            reading_s = alike * load.cost.predict_reading_s(left, prompt.tokens - left)
            if queued:
                reading_s += queued * load.cost.predict_reading_s(work, typical - work)
            late_s = load.late_s(prompt, load.pool_id, more_tokens=share)
            found = min(found, load.predicted_ttft_s(share + alike * left) + reading_s + late_s)
        return found

    def _pool_wait_s(self, tokens: int, requests: int) -> float:
        """Time until the pool has room for it and all queued before it, at the rate at which requests end."""
        state = self._state
        blocks = sum(self._admission.group_blocks(tokens, requests)) if tokens else 0
        queued, queued_tokens = state.queue.ahead()
        blocks += state.blocks_for(queued_tokens) + queued
        only = state.ledger.only
        missing = self._admission.missing_blocks(only, blocks, tokens) if only else blocks + self._lacking_now(tokens)
        if missing <= 0:
            return 0.0
        behind = sum(record.blocks for shard in state.ledger.shards for record in shard.background.values())
        missing -= state.ledger.droppable_blocks + behind
        held = state.ledger.committed - state.ledger.droppable_blocks - behind
        return self._times.stay_s * missing / held if missing > 0 and held else 0.0

    def _lacking_now(self, tokens: int) -> int:
        """Blocks that the shards of open prefill instances lack before any prompt is added; negative: they have room.

        If all lack some, the shard that lacks least is the one that takes the next prompt.
        """
        state = self._state
        homes = {state.home(view.prefill_id) for view in state.instances.open_prefill()}
        lacking = [self._admission.missing_blocks(home, 0, tokens) for home in homes if home is not None and home.up]
        return sum(blocks for blocks in lacking if blocks < 0) or min(lacking, default=0)

    def _decode(self, requests: int, tokens: int, now_s: float, after_s: float) -> tuple[float, float, float]:
        """The state when these `requests` begin to decode, `after_s` from now.

        Returns the seconds of an iteration, the seconds that the last of them waits to join, and the seconds until the
        next request ends. How long a decode lasts depends on how many requests decode, and the other way round. The
        search goes down from the largest possible number, so that it does not take a loaded cluster for an idle one.
        """
        views = [view for view in self._state.instances.decode.values() if view.cache_blocks]
        length = max((view.mean_tokens for view in views if view.mean_tokens), default=max(1, tokens))
        lengths = {view.decode_id: view.mean_tokens or length for view in views}  # they may share lengths out
        fits = max(1, sum(self._fits(view, lengths[view.decode_id]) for view in views) // len(views))
        decode_s = math.inf
        running = -1
        for _ in range(ROUNDS):
            each = math.ceil((self._decoding_at(now_s, after_s, decode_s) + requests) / len(views))
            before, running = running, min(each, fits)
            if running == before:  # a fixed point
                break
            iteration_s = fmean(self._iteration_s(view, running, lengths[view.decode_id]) for view in views)
            if not self._times.mean_tokens:
                break
            decode_s = self._times.mean_tokens * iteration_s
        wait_s = max(0, each - fits) * decode_s / fits if each > fits and self._times.mean_tokens else 0.0
        return iteration_s, wait_s, (self._times.mean_tokens or 1.0) * iteration_s / (running * len(views))

    def _fits(self, view: DecodeView, tokens: int) -> int:
        """The most requests of this length that the instance runs."""
        return min(view.max_running(self._state.config), view.cache_blocks // self._state.blocks_for(tokens))

    def _decoding_at(self, now_s: float, after_s: float, decode_s: float) -> float:
        """Number of open requests that will decode, or wait to, `after_s` from now.

        Requests ahead of it are assumed to be prefilled evenly until then, and to decode for `decode_s` each.
        """
        count = self._state.table.hurried
        still = float(self._times.decoding_since(now_s + after_s - decode_s))
        before = count(RequestState.QUEUED) + count(RequestState.PREFILLING)
        ready = count(RequestState.WAITING) + count(RequestState.PREFETCHED)
        if after_s <= decode_s:
            return still + ready + before
        return still + before * decode_s / after_s

    def _iteration_s(self, view: DecodeView, requests: int, tokens: int) -> float:
        """A batch far larger than any measured is taken to cost in proportion: the fit does not cover it."""
        margin_s = min(view.cost.iteration_margin_s, MOST_MARGIN * self._config.tpot_objective_s)
        known = FEW_REQUESTS + EXTRAPOLATION * view.most_requests
        return (view.predict_equal_s(requests, tokens) + margin_s) * max(1.0, requests / known)
