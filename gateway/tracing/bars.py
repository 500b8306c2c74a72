"""The stages of an answer as stretches of time, by its stopwatch or, without one, by the gateway's own times."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from alignedserve.gateway.live.history import describe
from alignedserve.gateway.live.timeline import UNTIL_FIRST, evicted_at, timeline
from alignedserve.request import MOST_STEPS

if TYPE_CHECKING:
    from alignedserve.gateway.ledger.calls import Answer

FURTHER = "further_tokens"


class Bar(NamedTuple):
    """Times are Unix nanoseconds. `instance`: "" if it is not known."""

    stage: str
    instance: str
    begin_ns: int
    end_ns: int


def bars_of(answer: Answer, now_ns: int) -> list[Bar]:
    """Each begins where the last ends. `now_ns`: the end of an answer that was cut off."""
    watch, arrival_ns = answer.stopwatch, answer.call.arrival_ns
    if not watch.steps:
        return _by_own_times(answer, now_ns)
    request = {**describe(answer), "took_s": (watch.since_ns - arrival_ns) / 1e9}
    found = [
        Bar(bar["stage"], bar["where"], *(arrival_ns + round(bar[end] * 1e9) for end in ("begin_s", "end_s")))
        for bar in timeline(request, ())
    ]
    return found[:-1] if len(watch.steps) == MOST_STEPS else found  # what followed the last step is unknown


def first_token_ns(answer: Answer) -> int:
    return answer.unix_ns(answer.first_token_s)


def evicted_ns(answer: Answer) -> list[int]:
    """When it left a running batch."""
    return evicted_at(answer.stopwatch.steps)


def _by_own_times(answer: Answer, now_ns: int) -> list[Bar]:
    """No worker has sent its stopwatch in its last epoch."""
    if answer.finish is not None and not answer.sent_s:
        return []  # there was nothing to compute
    arrival_ns = answer.call.arrival_ns
    begin_ns = arrival_ns if answer.losses or not answer.sent_s else answer.unix_ns(answer.sent_s)
    if not answer.first_token_s:
        return [Bar(UNTIL_FIRST, answer.prefill_id, begin_ns, now_ns)]
    first_ns = first_token_ns(answer)
    end_ns = now_ns if answer.finish is None else answer.unix_ns(answer.last_token_s)
    first = Bar(UNTIL_FIRST, answer.prefill_id, begin_ns, first_ns)
    return [first, Bar(FURTHER, answer.decode_id, first_ns, end_ns)] if end_ns > first_ns else [first]
