"""Where a request's time went, in words, and what would help."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from alignedserve.gateway.live.timeline import LOST, NOT_NOTED, UNTIL_FIRST, evicted_at
from alignedserve.request import MOST_STEPS

Json = dict[str, Any]
Said = Iterator[tuple[str, str]]  # a sentence about the request, or "", and advice, or ""

LONG_S = 0.5  # shorter waits need no advice
SHORT_S = 0.01  # shorter stages need no words
LARGE_SHARE = 0.3
UNEQUAL_SHARE = 0.1  # of the decode time

_LARGER_POOL = "A larger KV pool (kv_pool.size_gib) lets more prompts begin"

_OUTCOMES = {
    "overloaded": (
        "It was refused, because the queue was full or memory was short.",
        "Clients should send it again after Retry-After. scheduler.max_queue lets more wait; more instances serve.",
    ),
    "deadline_exceeded": (
        "Its time limit ended it.",
        "A longer timeout_s in the request lets it wait longer.",
    ),
    "cancelled": ("Its client left, or it was cancelled.", ""),
    "request_lost": (
        "It was lost several times in a row, without a token in between.",
        "`alignedserve debug-bundle` has the logs of the processes.",
    ),
}
"""What these outcomes mean, and advice."""

_NAMES = {
    "queue": "the wait for prefill",
    "prefill": "prefill",
    "pool": "the wait in the pool",
    "prefetch": "prefetch",
    "handover": "hand-over",
    "decode": "decode",
    LOST: "the time before it was submitted again",
    UNTIL_FIRST: "the wait for a token",
    NOT_NOTED: "steps that were not noted",
}

FOR_PREFILL, FOR_ROOM = "prefill", "room"  # what a queued request waits for: an instance, or room in the pool
_QUEUED = {
    FOR_PREFILL: "other prompts came first",
    FOR_ROOM: "the pool has no room for it",
    "": "other prompts came first, or the pool had no room for it",
}

POOL_REASONS = ("the KV pool is full", "its KV made room for a request with a lower priority")
"""Reasons of losses that a larger pool avoids, as the scheduler words them."""

_WITH_PROCESS = re.compile(r"(prefill|decode) \S+ was lost")  # as the scheduler words the end of an instance


@dataclass(frozen=True, slots=True)
class Told:
    """A request as `alignedserve.gateway.live.history` describes it, its stays in the pool as the scheduler does, and
    what advice depends on. `waits_for`: of a queued request, FOR_PREFILL or FOR_ROOM; "" if it is not known.
    """

    request: Json
    stays: Sequence[Json]
    prefill: int  # instances
    decode: int
    prefix_cache: bool
    waits_for: str = ""

    def stage_s(self, stage: str) -> float:
        return float(self.request["stages"].get(stage, 0.0))

    def matters(self, seconds: float) -> bool:
        return seconds >= LONG_S and seconds >= LARGE_SHARE * self.request["took_s"]


def explain(told: Told) -> tuple[list[str], list[str]]:
    """Sentences about an ended or open request, and advice."""
    parts = (_summary, _untold, _queue, _prefill, _pool, _copies, _evictions, _decode, _not_noted, _losses)
    said = [pair for part in parts for pair in part(told)]
    return [words for words, _ in said if words], [advice for _, advice in said if advice]


def _summary(told: Told) -> Said:
    request, stages = told.request, told.request["stages"]
    if request["refused"]:
        yield f"Its gateway refused it when it arrived: {request['refused']}.", _OUTCOMES["overloaded"][1]
        return
    where = " and ".join(filter(None, (request["prefill_id"], request["decode_id"])))
    at = f" at {where}" if where else ""
    if request["outcome"] == "open":
        yield f"It has run for {_s(request['took_s'])}{at}.", ""
        return
    longest = max(stages, key=lambda stage: stages[stage], default="")
    most = f"; most of it was {_NAMES[longest]} ({_s(stages[longest])})" if longest and stages[longest] else ""
    yield f"It took {_s(request['took_s'])}{at} and ended with {request['outcome']}{most}.", ""
    yield _OUTCOMES.get(request["outcome"], ("", ""))


def _untold(told: Told) -> Said:
    if (waited_s := told.stage_s(UNTIL_FIRST)) >= SHORT_S:
        where = "in the queue, in prefill or in the pool" if told.request["epoch"] else "in the queue or in prefill"
        yield f"It ended after {_s(waited_s)} {where}; no worker had told more of it.", ""
    if told.matters(waited_s) and not told.request["epoch"]:
        yield "", f"More prefill instances shorten both: alignedserve scale --prefill {told.prefill + 1}"
        yield "", f"{_LARGER_POOL}, if the pool was full."


def _queue(told: Told) -> Said:
    if (queued_s := told.stage_s("queue")) >= SHORT_S:
        why = f": {_QUEUED[_waited_for(told)]}" if queued_s >= LONG_S else ""
        yield f"It waited {_s(queued_s)} for prefill{why}.", ""
    if told.matters(queued_s):
        waited_for = _waited_for(told)
        if waited_for != FOR_ROOM:
            yield "", f"More prefill instances shorten the queue: alignedserve scale --prefill {told.prefill + 1}"
        if waited_for != FOR_PREFILL:
            yield "", f"{_LARGER_POOL}{'' if waited_for else ', if the pool was full'}."


def _waited_for(told: Told) -> str:
    if told.waits_for:
        return told.waits_for
    first = next((stay for stay in told.stays if stay["epoch"] == told.request["epoch"]), None)
    # What fills the pool are requests that wait in it: without any there was room.
    return FOR_PREFILL if first is not None and not first["ahead"] else ""


def _prefill(told: Told) -> Said:
    if not (prefill_s := told.stage_s("prefill")):
        return
    tokens, cached = told.request["input_tokens"], told.request["cached_tokens"]
    known = f"; {_count(cached, 'token')} of it were in the prefix cache" if cached else ""
    yield f"Its prompt of {_count(tokens, 'token')} took {_s(prefill_s)} to compute{known}.", ""
    if told.matters(prefill_s) and not told.prefix_cache:
        yield "", "The prefix cache is off. With it, prompts that begin like earlier ones are computed faster."


def _pool(told: Told) -> Said:
    waited_s = told.stage_s("pool")
    for number, stay in enumerate(told.stays):
        yield _stay(stay, first=number == 0), ""
    if waited_s >= SHORT_S and not told.stays:
        yield f"It waited {_s(waited_s)} in the pool for a batch.", ""
    pairs = pairwise(told.stays)  # a stay in a later epoch follows a loss
    joined = [stay["joined"] for stay, later in pairs if stay["epoch"] == later["epoch"]]
    if returned := joined.count(False):
        yield f"It came back from a decode instance {_times(returned)} before it joined a batch.", ""
    if told.matters(waited_s):
        yield "", f"More decode instances shorten the wait in the pool: alignedserve scale --decode {told.decode + 1}"
        yield "", "A wait objective bounds it: wait_objective_s in the request, or scheduler.starvation_after_s."


def _stay(stay: Json, *, first: bool) -> str:
    again = "" if first else " again"
    waited = f"It {'waited' if stay['over'] else 'has waited'} {_s(stay['waited_s'])} in the pool{again}"
    if not stay["sent_first"]:
        return f"{waited}; no other request {'went' if stay['over'] else 'has gone'} first."
    lengths = [f"{stay[kind]:,} {kind}" for kind in ("shorter", "longer") if stay[kind]]
    which = f" ({' and '.join(lengths)} than its {stay['kv_tokens']:,} tokens)" if lengths else ""
    ahead, sent = stay["ahead"], stay["sent_first"]
    return (
        f"{waited}: {_count(ahead, 'request')} waited there already, and {_count(sent, 'request')} went first{which}."
    )


def _copies(told: Told) -> Said:
    if (copies_s := told.stage_s("prefetch") + told.stage_s("handover")) >= SHORT_S:
        why = "its KV was copied, and it waited in a candidate buffer to join"
        yield f"It was prefetched and handed over for {_s(copies_s)}: {why}.", ""


def _evictions(told: Told) -> Said:
    """Those to a candidate buffer are no stays in the pool; steps have both, but of the last epoch only."""
    of_stays = Counter(
        stay["epoch"] for stay, later in pairwise(told.stays) if stay["joined"] and stay["epoch"] == later["epoch"]
    )
    epoch, steps = told.request["epoch"], told.request["steps"]
    of_stays[epoch] = max(of_stays[epoch], len(evicted_at(steps)))
    if evicted := of_stays.total():
        least = "at least " if len(steps) >= MOST_STEPS else ""
        advice = "A larger decode cache, or more decode instances, avoid most evictions."
        yield f"It was evicted {least}{_times(evicted)}: it left a running batch, usually to make room.", advice


def _decode(told: Told) -> Said:
    decode_s, before = told.stage_s("decode"), told.request["tokens_before"]
    tokens = told.request["output_tokens"] - before  # stages are of the last epoch
    decoded = tokens - bool(told.stage_s("prefill"))  # prefill makes the first
    if not decode_s or decoded < 1:
        return
    which = "its last " if before else ""
    yield f"It decoded {which}{_count(tokens, 'token')} in {_s(decode_s)}, {_s(decode_s / decoded)} each.", ""
    bubble_s = told.request.get("bubble_s") or 0.0
    if bubble_s > UNEQUAL_SHARE * decode_s:
        advice = "More requests in the pool at once, or a longer wait objective, make batches of more equal lengths."
        yield f"Of that, {_s(bubble_s)} are the predicted cost of unequal lengths in its batches.", advice
    elif told.matters(decode_s) and not told.matters(told.stage_s("pool")):  # else it is advised already
        more = f"alignedserve scale --decode {told.decode + 1}"
        yield "", f"Under load, more decode instances run smaller batches, whose iterations are shorter: {more}"


def _not_noted(told: Told) -> Said:
    if len(told.request["steps"]) >= MOST_STEPS:
        yield f"The timeline has its first {MOST_STEPS - 1} steps; later ones were not noted.", ""


def _losses(told: Told) -> Said:
    reasons: list[str] = told.request.get("loss_reasons", [])  # a gateway of an older version has none
    if losses := told.request["losses"]:
        named = [reason if count == 1 else f"{reason} ({_times(count)})" for reason, count in Counter(reasons).items()]
        why = f": {'; '.join(filter(None, named))}" if any(named) else ""
        yield f"It was submitted again {_times(losses)}{why}.", ""
    if any(reason in POOL_REASONS for reason in reasons):
        yield "", "A larger KV pool (kv_pool.size_gib) keeps the KV that was dropped here."
    if told.request["outcome"] == "request_lost" and reasons and all(map(_WITH_PROCESS.fullmatch, reasons)):
        yield "It may crash its workers.", "Do not send it again as it is."
    if (resumed := told.request["resumed_tokens"]) is not None:
        came = f"{_count(resumed, 'token')} came before, and their time is not counted here"
        yield f"It was resumed here after its gateway or its connection was lost; {came}.", ""


def _s(seconds: float) -> str:
    if seconds < 0.0095:
        return f"{1e3 * seconds:.1f} ms"
    return f"{1e3 * seconds:.0f} ms" if seconds < 0.9995 else f"{seconds:.1f} s"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
