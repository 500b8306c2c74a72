"""Where a request's time went, in words, and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from alignedserve.gateway.live.timeline import LOST, UNTIL_FIRST

Json = dict[str, Any]
Said = Iterator[tuple[str, str]]  # a sentence about the request, or "", and advice, or ""

LONG_S = 0.5  # shorter waits need no advice
SHORT_S = 0.01  # shorter stages need no words
LARGE_SHARE = 0.3
UNEQUAL_SHARE = 0.1  # of the decode time

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
        "It was lost with its process several times, without a token in between: it may crash its workers.",
        "Do not send it again as it is; `alignedserve debug-bundle` has the logs of the processes.",
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
    LOST: "what was lost with a process",
    UNTIL_FIRST: "the wait for a token",
}


@dataclass(frozen=True, slots=True)
class Told:
    """A request as `alignedserve.gateway.live.history` describes it, its stays in the pool as the scheduler does, and
    what advice depends on.
    """

    request: Json
    stays: Sequence[Json]
    prefill: int  # instances
    decode: int
    prefix_cache: bool

    def stage_s(self, stage: str) -> float:
        return float(self.request["stages"].get(stage, 0.0))

    def matters(self, seconds: float) -> bool:
        return seconds >= LONG_S and seconds >= LARGE_SHARE * self.request["took_s"]


def explain(told: Told) -> tuple[list[str], list[str]]:
    """Sentences about an ended or open request, and advice."""
    parts = (_summary, _untold, _queue, _prefill, _pool, _copies, _decode, _losses)
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


def _queue(told: Told) -> Said:
    if (queued_s := told.stage_s("queue")) >= SHORT_S:
        why = ": other prompts came first, or the pool had no room for it" if queued_s >= LONG_S else ""
        yield f"It waited {_s(queued_s)} for prefill{why}.", ""
    if told.matters(queued_s):
        yield "", f"More prefill instances shorten the queue: alignedserve scale --prefill {told.prefill + 1}"


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
    if evicted := joined.count(True):
        advice = "A larger decode cache, or more decode instances, avoid evictions."
        yield f"It was evicted {_times(evicted)}, since the decode cache was full.", advice
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
        yield f"It was prefetched and handed over for {_s(copies_s)}: its KV was copied, and it waited to join.", ""


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


def _losses(told: Told) -> Said:
    if losses := told.request["losses"]:
        yield f"A process that had it was lost, {_times(losses)}; it was submitted again and went on.", ""
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
