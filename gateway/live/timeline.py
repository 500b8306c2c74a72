"""The timeline of one request: in which stage it was when, and where."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from alignedserve.request import MOST_STEPS

Json = dict[str, Any]

LOST = "lost"  # the stage of the time until a request was submitted again for the last time
UNTIL_FIRST = "until_first_token"  # the stage of a request that ended before a worker had told of it, since it was sent
NOT_NOTED = "not_noted"  # the stage of the last step that a stopwatch notes, and of all that followed it
STAGE_OF = {
    "queued": "queue",
    "prefilling": "prefill",
    "waiting": "pool",
    "prefetched": "prefetch",
    "decoding": "decode",
}
"""The stage of a request in a state of the scheduler's."""


def timeline(request: Json, decode_ids: Sequence[str]) -> list[Json]:
    """Bars of a request that has ended, in seconds after its arrival. An eviction repeats stages.

    `decode_ids`: where it decoded after each stay in the pool, as the scheduler knows. The steps are of the last epoch:
    after a loss, all that was before them is one bar, LOST. When step MOST_STEPS ended is unknown: from there on one
    bar, NOT_NOTED, up to now or to what is known of an open request.
    """
    steps: list[list[Any]] = request["steps"]
    if not steps:
        return [] if request["outcome"] == "open" else _untold(request)
    decodes = iter(_decode_ids(request, decode_ids))
    ends = [begin_s for _, begin_s in steps[1:]] + [request["took_s"]]
    bars, where = [_bar(LOST, "", 0.0, steps[0][1])] if request["losses"] else [], ""
    for number, ((stage, begin_s), end_s) in enumerate(zip(steps, ends, strict=True), 1):
        if number == MOST_STEPS:
            bars.append(_bar(NOT_NOTED, "", begin_s, end_s))
            decodes, where = iter(()), ""  # stays in the pool no longer match steps
            continue
        if stage == "pool":
            where = next(decodes, request["decode_id"])
        bars.append(_bar(stage, _place(stage, request, where or request["decode_id"]), begin_s, end_s))
    return bars


def _decode_ids(request: Json, told: Sequence[str]) -> Sequence[str]:
    """`told`, or, if the scheduler does not know all stays (any more), where tokens came from before the next one."""
    steps = request["steps"]
    stays_s = [begin_s for stage, begin_s in steps if stage == "pool"]
    if len(told) == len(stays_s) - (steps[-1][0] != "decode"):
        return told
    moves = request.get("moves", [])  # a gateway of an older version tells none
    found = [next((name for at_s, name in reversed(moves) if at_s <= next_s), "") for next_s in stays_s[1:]]
    return [name or request["decode_id"] for name in found]


def with_last_stay(request: Json, stays: Sequence[Json]) -> Json:
    """A request that ended while it was evicted, which no worker has told: its last stay in the pool, from `stays`."""
    steps, last = request["steps"], stays[-1] if stays else None
    if last is None or last["epoch"] != request["epoch"] or last["decode_id"] or not last["over"]:
        return request
    if not steps or steps[-1][0] != "decode" or len(steps) >= MOST_STEPS:
        return request
    begin_s = max(steps[-1][1], request["took_s"] - last["waited_s"])
    stages, waited_s = dict(request["stages"]), request["took_s"] - begin_s
    stages["decode"] = max(0.0, stages.get("decode", 0.0) - waited_s)
    stages["pool"] = stages.get("pool", 0.0) + waited_s
    return {**request, "stages": stages, "steps": [*steps, ["pool", begin_s]]}


def evicted_at(steps: Iterable[Sequence[Any]]) -> list[Any]:
    """When a request left a running batch, to the pool or to a candidate buffer. `steps`: (stage, its begin)."""
    pairs = pairwise(steps)
    return [begun for (before, _), (stage, begun) in pairs if before == "decode" and stage in ("pool", "prefetch")]


def open_timeline(request: Json, told: Mapping[str, Any], decode_ids: Sequence[str]) -> list[Json]:
    """Bars of a request that is open, until now.

    Workers have told of its steps until it began to decode last. `told`: where the scheduler has it now, and when it
    last entered each of the scheduler's states, which are the steps since.
    """
    steps, took_s = request["steps"], request["took_s"]
    stage, last_s = steps[-1] if steps else ("", -math.inf)
    begun = sorted((took_s - age_s, STAGE_OF[state]) for state, age_s in told["ages_s"].items())
    later = [[entered, max(0.0, begin_s)] for begin_s, entered in begun if begin_s > last_s]
    # The scheduler learns of a step a moment after it. Of the last step that is noted, the next may be a later one.
    if later and later[0][0] == stage and len(steps) < MOST_STEPS:
        del later[0]
    known = {key: told[key] or request[key] for key in ("prefill_id", "decode_id")}
    return timeline({**request, **known, "steps": [*steps, *later]}, decode_ids)


def _untold(request: Json) -> list[Json]:
    """Bars of a request that has ended, and of which no worker has told in its last epoch."""
    until_first_s, end_s = request["stages"].get(UNTIL_FIRST), request["took_s"]
    begin_s = end_s - (until_first_s or 0.0)
    bars = [_bar(LOST, "", 0.0, begin_s)] if request["losses"] else []
    return bars if until_first_s is None else [*bars, _bar(UNTIL_FIRST, "", begin_s, end_s)]


def _place(stage: str, request: Json, decode_id: str) -> str:
    places = {"queue": "scheduler", "prefill": request["prefill_id"], "pool": "kv_pool"}
    return str(places.get(stage, decode_id))


def _bar(stage: str, where: str, begin_s: float, end_s: float) -> Json:
    return {"stage": stage, "where": where, "begin_s": begin_s, "end_s": end_s}
