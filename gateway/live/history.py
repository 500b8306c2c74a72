"""The requests of all gateways that are open, or ended of late. No text and no tokens.

A request is described by a JSON object: `id` (its call's), `request_id`, `x_request_id` (its client's),
`arrival_unix_s`, `took_s`, `first_token_s` (after arrival; None: none yet), `input_tokens`, `output_tokens`,
`cached_tokens`, `outcome` ("open", a finish reason or an error code), `prefill_id`, `decode_id`, `epoch`, `losses` (how
often it was submitted again), `loss_reasons` (why, the last times), `tokens_before` (output tokens that came before its
last epoch), `resumed_tokens` (those that its client had from another call; None: it resumes none), `bubble_s` (None:
there is no cost model), `stages` (seconds in each, in the last epoch; UNTIL_FIRST alone if it ended before a worker had
told of it), `steps` (each stage that is known, in order, and when it began after arrival; of an open request, workers
tell the gateway when it begins to decode), `moves` (when after arrival tokens first came from another decode instance,
and from which) and `refused` (why its gateway refused the call on arrival; "": it did not).
A refused call has ids that begin with "refused-", and None as `input_tokens`.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from alignedserve.errors import OverloadedError
from alignedserve.gateway.ledger.calls import caller, id_of_call, sent_request_id
from alignedserve.gateway.live.timeline import UNTIL_FIRST
from alignedserve.gateway.request_log import outcome_of
from alignedserve.request import PIN, PROBE

if TYPE_CHECKING:
    from alignedserve.gateway.ledger.calls import Answer
    from alignedserve.gateway.ledger.ledger import Ledger
    from alignedserve.proto import gateway_pb2 as gw

MOST_REQUESTS = 2048
MOST_REFUSED = 512
SLOW_S = 300.0
BUCKET_S = 10.0
MOST_SLOW = 10  # of an owner in a bucket
MOST_OWNERS = 16  # in a bucket
MOST_ASKED = 200
MOST_REASONS = 8
MOST_REASON = 200  # characters
OWN = (PROBE, PIN)  # how ids of the cluster's own requests begin

Json = dict[str, Any]


def describe(answer: Answer) -> Json:
    call, watch = answer.call, answer.stopwatch
    arrival_s = call.arrival_ns / 1e9
    took_s = time.monotonic() - call.arrival_s
    first_s = answer.first_token_s - call.arrival_s if answer.first_token_s else None
    stages = {stage.value: seconds for stage, seconds in watch.spent_s.items()}
    untold = not watch.steps and len(answer.tokens) == answer.tokens_before and answer.sent_epoch == answer.epoch
    if answer.ended and untold:
        stages[UNTIL_FIRST] = took_s - (answer.sent_s - call.arrival_s)
    return {
        "id": call.plan.id,
        "request_id": answer.request_id,
        "x_request_id": call.sent_id,
        "arrival_unix_s": arrival_s,
        "took_s": took_s,
        "first_token_s": first_s,
        "input_tokens": len(answer.prompt.token_ids),
        "output_tokens": len(answer.tokens),
        "cached_tokens": answer.cached_tokens,
        "outcome": outcome_of(answer) if answer.ended else "open",
        "prefill_id": answer.prefill_id,
        "decode_id": answer.decode_id,
        "epoch": answer.epoch,
        "losses": len(answer.losses),
        "loss_reasons": [reason[:MOST_REASON] for _, reason in answer.losses[-MOST_REASONS:]],
        "tokens_before": answer.tokens_before,
        "resumed_tokens": len(call.plan.resume[answer.index].token_ids) if call.plan.resume else None,
        "bubble_s": watch.bubble_s,
        "stages": stages,
        "steps": [[stage.value, begun_ns / 1e9 - arrival_s] for stage, begun_ns in watch.steps],
        "moves": [[moved_ns / 1e9 - arrival_s, decode_id] for moved_ns, decode_id in answer.moves],
        "refused": "",
    }


def _describe_refused(reason: str) -> Json:
    now_ns = time.time_ns()
    name = f"refused-{now_ns:x}"
    return {
        "id": name,
        "request_id": name,
        "x_request_id": sent_request_id.get(),
        "arrival_unix_s": now_ns / 1e9,
        "took_s": 0.0,
        "outcome": OverloadedError.code,
        **dict.fromkeys(("first_token_s", "input_tokens", "resumed_tokens", "bubble_s")),
        **dict.fromkeys(("output_tokens", "cached_tokens", "epoch", "losses", "tokens_before"), 0),
        **dict.fromkeys(("prefill_id", "decode_id"), ""),
        "stages": {},
        "steps": [],
        "moves": [],
        "loss_reasons": [],
        "refused": reason,
    }


def _describe_open(answer: Answer) -> Json:
    """With the stage that is not over."""
    found, watch = describe(answer), answer.stopwatch
    if watch.since_ns:
        found["steps"].append([watch.stage.value, watch.since_ns / 1e9 - found["arrival_unix_s"]])
    return found


def _is_shown(answer: Answer) -> bool:
    return not answer.call.plan.offline and not answer.request_id.startswith(OWN)


class SlowRequests:
    """The slowest of the requests that ended in each BUCKET_S of the last SLOW_S, by owner: under load, the newest ones
    that RecentRequests keeps have ended within seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: deque[tuple[int, dict[bytes, list[tuple[float, int, Json]]]]] = deque()  # lists are heaps
        self._numbers = count()

    def note(self, owner: bytes, ended: Json) -> None:
        """A request has ended just now."""
        number = self._forget()
        if not self._buckets or self._buckets[-1][0] != number:
            self._buckets.append((number, {}))
        owners = self._buckets[-1][1]
        if owner not in owners and len(owners) == MOST_OWNERS:
            return
        heap, entry = owners.setdefault(owner, []), (ended["took_s"], next(self._numbers), ended)
        if len(heap) < MOST_SLOW:
            heapq.heappush(heap, entry)
        else:
            heapq.heappushpop(heap, entry)

    def of(self, owner: bytes | None) -> Iterator[Json]:
        """Those of one owner; None: of all."""
        self._forget()
        for _, owners in self._buckets:
            for whose, heap in owners.items():
                if owner is None or whose == owner:
                    yield from (ended for _, _, ended in heap)

    def _forget(self) -> int:
        """Drop what is too old. Returns the number of the present bucket."""
        number = int(self._clock() // BUCKET_S)
        while self._buckets and (number - self._buckets[0][0] - 1) * BUCKET_S >= SLOW_S:
            self._buckets.popleft()
        return number


class RecentRequests:
    """The newest and the slowest requests of one gateway that ended, and calls that it refused, with the hash of the
    caller's API key.

    Lines of batches, probes and pins are left out: no client waits for them.
    """

    def __init__(self) -> None:
        self._ended: OrderedDict[str, tuple[bytes, Json]] = OrderedDict()  # by request id
        self._refused: deque[tuple[bytes, Json]] = deque(maxlen=MOST_REFUSED)  # apart, so that they push out none
        self._slow = SlowRequests()

    def note(self, answer: Answer) -> None:
        """An answer has ended, with or without an error."""
        if not _is_shown(answer):
            return
        whose, found = answer.call.name[0], describe(answer)
        self._ended[answer.request_id] = whose, found
        self._ended.move_to_end(answer.request_id)
        if len(self._ended) > MOST_REQUESTS:
            self._ended.popitem(last=False)
        self._slow.note(whose, found)

    def refuse(self, reason: str) -> None:
        """The present caller's call was refused on arrival."""
        self._refused.append((caller.get(), _describe_refused(reason)))

    def of(self, owner: bytes | None, *, slow: bool = False) -> list[Json]:
        """Those of one owner, the newest first, and then refused calls likewise; None: of all.

        With `slow`, then those of the slowest that are no longer among the newest.
        """
        known = chain(reversed(self._ended.values()), reversed(self._refused))
        shown = [found for whose, found in known if owner is None or whose == owner]
        if slow:
            older = {one["request_id"]: one for one in self._slow.of(owner)}
            shown += [one for name, one in older.items() if name not in self._ended]
        return shown


def requests_of(ledger: Ledger, recent: RecentRequests, query: gw.RequestsQuery) -> list[Json]:
    """What one gateway knows: requests that are open, or ended since then; with an id, those of a call."""
    owner = None if query.whosever else query.owner
    if query.id:
        open_ones = [_describe_open(answer) for answer in ledger.answers_of(query.id, owner)]
        names = ("id", "request_id", "x_request_id")
        wanted = (query.id, id_of_call(query.id))
        ended = (one for one in recent.of(owner, slow=True) if any(one[name] in wanted for name in names))
        return [*open_ones, *ended][:MOST_ASKED]
    since_s, most = query.since_unix_s, min(query.most, MOST_ASKED)
    is_open = [one for one in ledger.open_answers() if _is_shown(one) and owner in (None, one.call.name[0])]
    choose = heapq.nlargest if query.newest else heapq.nsmallest
    found = [_describe_open(one) for one in choose(most, is_open, key=lambda one: one.call.arrival_ns)]
    known = recent.of(owner, slow=not query.newest)
    found += [one for one in known if one["arrival_unix_s"] + one["took_s"] >= since_s]
    return ordered(found, newest=query.newest)[:most]


def ordered(requests: Iterable[Json], *, newest: bool) -> list[Json]:
    """The newest first, or those first that took longest."""
    field = "arrival_unix_s" if newest else "took_s"
    return sorted(requests, key=lambda one: one[field], reverse=True)
