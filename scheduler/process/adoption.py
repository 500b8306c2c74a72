"""Submissions of a later epoch: what the pool still holds of the request is found before it is scheduled.

Every shard of the pool is asked to make over to the new epoch what the one before committed there; their answers, not
anybody's memory, say what need not be prefilled again. The longest counts, the others are dropped. Meanwhile the
submission is kept here. A shard whose process is away may come back with the KV: it is waited for a while, but not
where another shard has all of it, and not at all once it has gone with its node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from alignedserve.control.convert import key_from_proto
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.request import RequestKey

AWAY_S = 2.0  # a pool process that died has a successor by then
_ANY = "any"  # no shard was known when the submission came


@dataclass(slots=True)
class _Kept:
    head: pb.RequestHead
    since_s: float
    asked_s: float
    unheard: set[str]  # shards that have not answered
    best: kp.Holding = field(default_factory=kp.Holding)  # the longest so far; without tokens: none


@dataclass(frozen=True, slots=True)
class Found:
    """A submission that goes on now, with what the pool has of it: in the shard `base.pool_id`, maybe nothing."""

    key: RequestKey
    head: pb.RequestHead
    base: kp.Holding


class Adoption:
    """Kept submissions, and the bases of those that are to be prefilled. `actor.py` sends and receives."""

    def __init__(self) -> None:
        self._waiting: dict[RequestKey, _Kept] = {}
        self._newest: dict[str, RequestKey] = {}
        self.bases: dict[RequestKey, kp.Holding] = {}

    def wants(self, heads: Sequence[pb.RequestHead]) -> bool:
        """Whether the pool may hold something for this submission: one request, in a later epoch."""
        return len(heads) == 1 and heads[0].key.epoch > 0

    def replaced_by(self, key: RequestKey) -> RequestKey | None:
        """An older epoch of the request that waits here: it will not go on."""
        older = self._newest.get(key.request_id)
        return older if older is not None and older.epoch < key.epoch else None

    def ask(self, key: RequestKey, head: pb.RequestHead, pool_ids: Iterable[str], now_s: float) -> kp.Adopt:
        """Keep the submission; what to ask the shards, of which `pool_ids` are all that there are."""
        older = self.replaced_by(key)
        if older is not None:
            self._take(older)
        self._waiting[key] = _Kept(head, now_s, now_s, set(pool_ids) or {_ANY})
        self._newest[key.request_id] = key
        return kp.Adopt(heads=[head])

    def ask_again(self, up: Iterable[str], now_s: float, after_s: float = 0.0) -> dict[str, kp.Adopt]:
        """The same, by shard, for those that have waited for so long: what was asked may have died with a process."""
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
        """A shard's answer. What of it, or of an earlier one, is to be dropped, in `pool_id`; without tokens: nothing.

        Raises KeyError where nobody waits for it any more.
        """
        kept = self._waiting[key_from_proto(holding.key)]
        kept.unheard -= {pool_id, _ANY}
        holding.pool_id = pool_id
        too_long = holding.kv_tokens > _most_tokens(kept.head)  # of tokens that were never delivered
        if kept.best.pool_id == pool_id and not too_long:  # asked again
            kept.best = holding
            return kp.Holding()
        if too_long or holding.kv_tokens <= kept.best.kv_tokens:
            return holding
        worse, kept.best = kept.best, holding
        return worse

    def end(self, key: RequestKey, up: Collection[str], now_s: float) -> Found | None:
        """The submission, where it need not wait any longer; `up`: shards that can answer."""
        kept = self._waiting.get(key)
        if kept is None or not _complete(kept, up, now_s):
            return None
        self._take(key)
        if kept.best.kv_tokens and not kept.best.whole:
            self.bases[key] = kept.best
        return Found(key, kept.head, kept.best)

    def end_all(self, up: Collection[str], now_s: float) -> list[Found]:
        """`end`, of all."""
        return [found for key in list(self._waiting) if (found := self.end(key, up, now_s)) is not None]

    def lose(self, pool_ids: Iterable[str]) -> None:
        """These shards have gone with their nodes."""
        gone = set(pool_ids)
        for kept in self._waiting.values():
            kept.unheard -= gone
            if kept.best.pool_id in gone:
                kept.best = kp.Holding()

    def forget(self, key: RequestKey) -> bool:
        """The request has ended; whether it was waiting here."""
        self.bases.pop(key, None)
        return self._take(key)

    def of_gateway(self, gateway_id: str) -> list[RequestKey]:
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
    """KV beyond this belongs to tokens that were never delivered; the last one's is computed by the next pass."""
    return head.prompt_tokens + head.output_tokens - 1
