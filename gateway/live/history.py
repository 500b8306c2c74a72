"""The requests of all gateways that are open, or ended of late. No text and no tokens.

A request is described by a JSON object: `id` (its call's), `request_id`, `x_request_id` (its client's),
`arrival_unix_s`, `took_s`, `first_token_s` (after arrival; None: none yet), `input_tokens`, `output_tokens`,
`cached_tokens`, `outcome` ("open", a finish reason or an error code), `prefill_id`, `decode_id`, `epoch`, `losses` (how
often it was submitted again), `bubble_s` (None: there is no cost model), `stages` (seconds in each) and `steps` (each
stage that is known, in order, and when it began after arrival; of an open request, workers tell the gateway when it
begins to decode).
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from alignedserve.gateway.request_log import outcome_of
from alignedserve.request import PIN, PROBE

if TYPE_CHECKING:
    from alignedserve.gateway.ledger.calls import Answer
    from alignedserve.gateway.ledger.ledger import Ledger
    from alignedserve.proto import gateway_pb2 as gw

MOST_REQUESTS = 2048
MOST_ASKED = 200
OWN = (PROBE, PIN)  # how ids of the cluster's own requests begin

Json = dict[str, Any]


def describe(answer: Answer) -> Json:
    call, watch = answer.call, answer.stopwatch
    arrival_s = call.arrival_ns / 1e9
    first_s = answer.first_token_s - call.arrival_s if answer.first_token_s else None
    return {
        "id": call.plan.id,
        "request_id": answer.request_id,
        "x_request_id": call.sent_id,
        "arrival_unix_s": arrival_s,
        "took_s": time.monotonic() - call.arrival_s,
        "first_token_s": first_s,
        "input_tokens": len(answer.prompt.token_ids),
        "output_tokens": len(answer.tokens),
        "cached_tokens": answer.cached_tokens,
        "outcome": outcome_of(answer) if answer.ended else "open",
        "prefill_id": answer.prefill_id,
        "decode_id": answer.decode_id,
        "epoch": answer.epoch,
        "losses": len(answer.losses),
        "bubble_s": watch.bubble_s,
        "stages": {stage.value: seconds for stage, seconds in watch.spent_s.items()},
        "steps": [[stage.value, begun_ns / 1e9 - arrival_s] for stage, begun_ns in watch.steps],
    }


def _describe_open(answer: Answer) -> Json:
    """With the stage that is not over."""
    found, watch = describe(answer), answer.stopwatch
    if watch.since_ns:
        found["steps"].append([watch.stage.value, watch.since_ns / 1e9 - found["arrival_unix_s"]])
    return found


def _is_shown(answer: Answer) -> bool:
    return not answer.call.plan.offline and not answer.request_id.startswith(OWN)


class RecentRequests:
    """The newest requests of one gateway that ended, each with the hash of its caller's API key.

    Lines of batches, probes and pins are left out: no client waits for them.
    """

    def __init__(self) -> None:
        self._ended: OrderedDict[str, tuple[bytes, Json]] = OrderedDict()  # by request id

    def note(self, answer: Answer) -> None:
        """An answer has ended, with or without an error."""
        if not _is_shown(answer):
            return
        self._ended[answer.request_id] = answer.call.name[0], describe(answer)
        self._ended.move_to_end(answer.request_id)
        if len(self._ended) > MOST_REQUESTS:
            self._ended.popitem(last=False)

    def of(self, owner: bytes | None) -> list[Json]:
        """Those of one owner, the newest first; None: of all."""
        return [found for whose, found in reversed(self._ended.values()) if owner is None or whose == owner]


def requests_of(ledger: Ledger, recent: RecentRequests, query: gw.RequestsQuery) -> list[Json]:
    """What one gateway knows: requests that are open, or ended since then; with an id, those of a call."""
    owner = None if query.whosever else query.owner
    if query.id:
        open_ones = [_describe_open(answer) for answer in ledger.answers_of(query.id, owner)]
        names = ("id", "request_id", "x_request_id")
        ended = (one for one in recent.of(owner) if any(query.id == one[name] for name in names))
        return [*open_ones, *ended][:MOST_ASKED]
    since_s, most = query.since_unix_s, min(query.most, MOST_ASKED)
    is_open = [one for one in ledger.open_answers() if _is_shown(one) and owner in (None, one.call.name[0])]
    choose = heapq.nlargest if query.newest else heapq.nsmallest
    found = [_describe_open(one) for one in choose(most, is_open, key=lambda one: one.call.arrival_ns)]
    found += [one for one in recent.of(owner) if one["arrival_unix_s"] + one["took_s"] >= since_s]
    return ordered(found, newest=query.newest)[:most]


def ordered(requests: Iterable[Json], *, newest: bool) -> list[Json]:
    """The newest first, or those first that took longest."""
    field = "arrival_unix_s" if newest else "took_s"
    return sorted(requests, key=lambda one: one[field], reverse=True)
