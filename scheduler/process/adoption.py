"""Finds the KV that the pool still holds of a request, when the request is submitted again in a later epoch.

Every shard is asked to transfer to the new epoch the KV that an earlier epoch committed there. Only the shards' answers
decide what need not be prefilled again. The longest KV is used, and the other copies are dropped. Until then the
submission is kept here. A shard whose process is down may come back with the KV, so the submission waits for it for up
to AWAY_S. It does not wait if another shard has all of the KV, or if the shard's node is gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from alignedserve.control.convert import key_from_proto
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.request import RequestKey

AWAY_S = 2.0  # by then, the process of a shard that died has a successor
_ANY = "any"  # no shard was known when the submission came


@dataclass(slots=True)
class _Kept:
    head: pb.RequestHead
    since_s: float
    asked_s: float
    unheard: set[str]  # shards that have not answered
    best: kp.Holding = field(default_factory=kp.Holding)  # the longest KV so far; with 0 tokens: none


@dataclass(frozen=True, slots=True)
class Found:
    """A submission that can be scheduled now. `base`: the KV that shard `base.pool_id` has of it, possibly none."""

    key: RequestKey
    head: pb.RequestHead
    base: kp.Holding


class Adoption:
    """The kept submissions, and the `bases` (adopted KV) of requests to be prefilled. `actor.py` does the messaging."""

    def __init__(self) -> None:
        self._waiting: dict[RequestKey, _Kept] = {}
        self._newest: dict[str, RequestKey] = {}
        self.bases: dict[RequestKey, kp.Holding] = {}

    def wants(self, heads: Sequence[pb.RequestHead]) -> bool:
        """Whether the pool may hold KV for this submission: a single request in a later epoch."""
        return len(heads) == 1 and heads[0].key.epoch > 0

    def replaced_by(self, key: RequestKey) -> RequestKey | None:
        """The kept submission of an older epoch of this request, which the new epoch replaces; None without one."""
        older = self._newest.get(key.request_id)
        return older if older is not None and older.epoch < key.epoch else None

    def ask(self, key: RequestKey, head: pb.RequestHead, pool_ids: Iterable[str], now_s: float) -> kp.Adopt:
        """Keeps the submission and returns the question for the shards. `pool_ids`: all shards of the pool."""
        older = self.replaced_by(key)
        if older is not None:
            self._take(older)
        self._waiting[key] = _Kept(head, now_s, now_s, set(pool_ids) or {_ANY})
        self._newest[key.request_id] = key
        return kp.Adopt(heads=[head])

    def ask_again(self, up: Iterable[str], now_s: float, after_s: float = 0.0) -> dict[str, kp.Adopt]:
        """Questions to repeat, by shard, for submissions that were last asked about at least `after_s` seconds ago.

        The process that was asked may have died. `up`: shards that can answer.
        """
        late = [key for key, kept in self._waiting.items() if now_s - kept.asked_s >= after_s]
        questions = {}
        for pool_id in up:
            unheard = [key for key in late if not self._waiting[key].unheard.isdisjoint((pool_id, _ANY))]
            if unheard:
                questions[pool_id] = kp.Adopt(heads=[self._waiting[key].head for key in unheard])
        for key in late:
            self._waiting[key].asked_s = now_s
        return questions

    def answered(self, pool_id: str, holding: kp.Holding) -> kp.Holding:
        """Handles a shard's answer. Returns the copy to drop, in its `pool_id`; with 0 tokens: none.

        Raises KeyError if the submission is not kept any more.
        """
        kept = self._waiting[key_from_proto(holding.key)]
        kept.unheard -= {pool_id, _ANY}
        holding.pool_id = pool_id
        too_long = holding.kv_tokens > _most_tokens(kept.head)  # it has KV of tokens that were never delivered
        if kept.best.pool_id == pool_id and not too_long:  # the shard was asked again
            kept.best = holding
            return kp.Holding()
        if too_long or holding.kv_tokens <= kept.best.kv_tokens:
            return holding
        worse, kept.best = kept.best, holding
        return worse

    def end(self, key: RequestKey, up: Collection[str], now_s: float) -> Found | None:
        """Removes and returns the submission if it need not wait longer; else None. `up`: shards that can answer."""
        kept = self._waiting.get(key)
        if kept is None or not _complete(kept, up, now_s):
            return None
        self._take(key)
        if kept.best.kv_tokens and not kept.best.whole:
            self.bases[key] = kept.best
        return Found(key, kept.head, kept.best)

    def end_all(self, up: Collection[str], now_s: float) -> list[Found]:
        """Does `end` for all submissions."""
        return [found for key in list(self._waiting) if (found := self.end(key, up, now_s)) is not None]

    def lose(self, pool_ids: Iterable[str]) -> None:
        """These shards are lost with their nodes."""
        gone = set(pool_ids)
        for kept in self._waiting.values():
            kept.unheard -= gone
            if kept.best.pool_id in gone:
                kept.best = kp.Holding()

    def forget(self, key: RequestKey) -> bool:
        """The request has ended. Returns whether its submission was kept here."""
        self.bases.pop(key, None)
        return self._take(key)

    def of_gateway(self, gateway_id: str) -> list[RequestKey]:
        """The kept submissions of a gateway."""
        return [key for key, kept in self._waiting.items() if kept.head.gateway_id == gateway_id]

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def _take(self, key: RequestKey) -> bool:
        kept = self._waiting.pop(key, None)
        if kept is not None and self._newest.get(key.request_id) == key:
            del self._newest[key.request_id]
        return kept is not None


def _complete(kept: _Kept, up: Collection[str], now_s: float) -> bool:
    if not kept.unheard:
        return True
    if _ANY in kept.unheard or not kept.unheard.isdisjoint(up) or not up:
        return False
    return kept.best.kv_tokens == _most_tokens(kept.head) or now_s - kept.since_s >= AWAY_S


def _most_tokens(head: pb.RequestHead) -> int:
    """The most tokens whose KV can be used. The next pass computes the KV of the last delivered token, and KV beyond it
    belongs to tokens that were never delivered.
    """
    return head.prompt_tokens + head.output_tokens - 1
