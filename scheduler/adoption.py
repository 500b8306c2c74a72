"""Submissions of a later epoch: what the pool still holds of the request is found before it is scheduled.

The pool is asked to make over to the new epoch what an older one committed there; its answer, not anybody's memory,
says what need not be prefilled again. Meanwhile the submission is kept here.
"""

from __future__ import annotations

from collections.abc import Iterable

from alignedserve.control.convert import key_from_proto
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.request import RequestKey


class Adoption:
    """Kept submissions, and the bases of those that are to be prefilled. `scheduler/actor.py` sends and receives."""

    def __init__(self) -> None:
        self._waiting: dict[RequestKey, pb.RequestSpec] = {}
        self._newest: dict[str, RequestKey] = {}
        self._asked_s: dict[RequestKey, float] = {}
        self.bases: dict[RequestKey, kp.Holding] = {}

    def wants(self, specs: list[pb.RequestSpec]) -> bool:
        """Whether the pool may hold something for this submission: one request, in a later epoch."""
        return len(specs) == 1 and specs[0].key.epoch > 0

    def replaced_by(self, key: RequestKey) -> RequestKey | None:
        """An older epoch of the request that waits here: it will not go on."""
        older = self._newest.get(key.request_id)
        return older if older is not None and older.epoch < key.epoch else None

    def ask(self, key: RequestKey, spec: pb.RequestSpec, now_s: float) -> kp.Inventory:
        """Keep the submission; what to ask the pool."""
        older = self.replaced_by(key)
        if older is not None:
            self._take(older)
        self._waiting[key] = spec
        self._newest[key.request_id] = key
        return self._ask([key], now_s)

    def ask_again(self, now_s: float, after_s: float = 0.0) -> kp.Inventory:
        """The same for those that have waited for so long: a pool process that was asked before may have died."""
        return self._ask([key for key, since_s in self._asked_s.items() if now_s - since_s >= after_s], now_s)

    def _ask(self, keys: Iterable[RequestKey], now_s: float) -> kp.Inventory:
        wanted = kp.Inventory()
        for key in keys:
            self._asked_s[key] = now_s
            wanted.holdings.add(key=self._waiting[key].key, kv_tokens=_most_tokens(self._waiting[key]))
        return wanted

    def answered(self, holding: kp.Holding) -> tuple[RequestKey, pb.RequestSpec] | None:
        """The pool's answer: the submission that goes on now; None where nobody waits for it any more."""
        key = key_from_proto(holding.key)
        spec = self._take(key)
        if spec is None:
            return None
        if holding.kv_tokens > _most_tokens(spec):  # of tokens that were never delivered: it is replaced
            holding.Clear()
        if holding.kv_tokens:
            self.bases[key] = holding
        return key, spec

    def forget(self, key: RequestKey) -> bool:
        """The request has ended; whether it was waiting here."""
        self.bases.pop(key, None)
        return self._take(key) is not None

    def of_gateway(self, gateway_id: str) -> list[RequestKey]:
        return [key for key, spec in self._waiting.items() if spec.gateway_id == gateway_id]

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def _take(self, key: RequestKey) -> pb.RequestSpec | None:
        spec = self._waiting.pop(key, None)
        self._asked_s.pop(key, None)
        if spec is not None and self._newest.get(key.request_id) == key:
            del self._newest[key.request_id]
        return spec


def _most_tokens(spec: pb.RequestSpec) -> int:
    """KV beyond this belongs to tokens that were never delivered; the last one's is computed by the next pass."""
    return len(spec.prompt_token_ids) + len(spec.output_token_ids) - 1


def adopted_whole(spec: pb.RequestSpec, holding: kp.Holding, pool_id: str) -> pb.StoredRequest | None:
    """The request as it lies in the pool, where nothing of it is to be prefilled; else None."""
    if not spec.output_token_ids or holding.kv_tokens != _most_tokens(spec):
        return None
    return pb.StoredRequest(
        spec=spec,
        store_id=pool_id,
        kv_tokens=holding.kv_tokens,
        block_ids=holding.block_ids,
        checksums=holding.checksums,
        pool_id=pool_id,
        pool_tokens=holding.kv_tokens,
        pool_block_ids=holding.block_ids,
        pool_checksums=holding.checksums,
    )
