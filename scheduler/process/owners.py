"""What the scheduler's process keeps of requests in addition to the core: their gateways, but never their tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.request import RequestKey

RECENT_GROUPS = 1024
RECENTLY_LOST = 65536


class Owners:
    """`of`: the gateway of each request. `lost`: recently lost requests, whose next epoch may adopt their KV."""

    def __init__(self) -> None:
        self.of: dict[RequestKey, str] = {}
        self.lost: OrderedDict[RequestKey, None] = OrderedDict()
        # (group, shard): groups whose prompt's blocks are in a shard, oldest first.
        self._groups: OrderedDict[tuple[str, str], None] = OrderedDict()

    def note_lost(self, keys: Iterable[RequestKey]) -> None:
        """Remembers lost requests, at most the RECENTLY_LOST newest."""
        self.lost.update(dict.fromkeys(keys))
        while len(self.lost) > RECENTLY_LOST:
            self.lost.popitem(last=False)

    def own_blocks(self, prefilled: pb.PooledRequest, base: kp.Holding | None) -> int:
        """The number of a prefilled request's blocks in the pool that no other request has. `base`: its adopted KV."""
        if prefilled.group_id:
            group = prefilled.group_id, prefilled.pool_id
            shared = group in self._groups
            self._groups[group] = None
            while len(self._groups) > RECENT_GROUPS:
                self._groups.popitem(last=False)
            return 0 if shared else prefilled.blocks - prefilled.shared_blocks
        here = base is not None and base.pool_id == prefilled.pool_id
        adopted = len(base.block_ids) - base.blocks if base is not None and here else 0  # blocks shared with others
        return max(0, prefilled.blocks - prefilled.shared_blocks - adopted)

    def by_gateway(self, keys: Iterable[RequestKey]) -> Iterable[tuple[str, list[RequestKey]]]:
        """The keys grouped by gateway; keys without a known gateway are left out."""
        groups: dict[str, list[RequestKey]] = {}
        for key in keys:
            owner = self.of.get(key)
            if owner is not None:
                groups.setdefault(owner, []).append(key)
        return groups.items()
