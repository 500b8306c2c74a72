"""What the scheduler's process keeps of requests beside the core, which knows lengths and states only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.request import RequestKey

RECENT_GROUPS = 1024
RECENTLY_LOST = 65536


class Files:
    """By key. `specs`: until prefilled, a group's prompt in its first only. `stored`: where the KV lies, from then on.

    `restored`: whose a predecessor's requests are. `lost`: lately; their next epoch may adopt their KV.
    """

    def __init__(self) -> None:
        self.specs: dict[RequestKey, pb.RequestSpec] = {}
        self.stored: dict[RequestKey, pb.StoredRequest] = {}
        self.restored: dict[RequestKey, str] = {}
        self.lost: OrderedDict[RequestKey, None] = OrderedDict()
        # Group and shard: whose prompt's blocks are in the pool, and where; latest last.
        self._groups: OrderedDict[tuple[str, str], None] = OrderedDict()

    def note_lost(self, keys: Iterable[RequestKey]) -> None:
        self.lost.update(dict.fromkeys(keys))
        while len(self.lost) > RECENTLY_LOST:
            self.lost.popitem(last=False)

    def forget(self, key: RequestKey) -> None:
        self.specs.pop(key, None)
        self.stored.pop(key, None)
        self.restored.pop(key, None)

    def prefilled(self, key: RequestKey, stored: pb.StoredRequest, base: kp.Holding | None) -> int:
        """Its KV is in the pool; how many of the blocks are its own. `base`: what it had adopted of them."""
        self.specs.pop(key, None)
        self.stored[key] = stored
        blocks = len(stored.pool_block_ids)
        if stored.spec.group_size > 1:
            group = stored.spec.group_id, stored.pool_id
            shared = group in self._groups
            self._groups[group] = None
            while len(self._groups) > RECENT_GROUPS:
                self._groups.popitem(last=False)
            return 0 if shared else blocks
        here = base is not None and base.pool_id == stored.pool_id
        adopted = len(base.block_ids) - base.blocks if base is not None and here else 0  # what others hold as well
        return max(0, blocks - adopted)

    def by_gateway(self, keys: Iterable[RequestKey]) -> Iterable[tuple[str, list[RequestKey]]]:
        """Grouped by whose they are."""
        groups: dict[str, list[RequestKey]] = {}
        for key in keys:
            stored = self.stored.get(key)
            spec = stored.spec if stored is not None else self.specs.get(key)
            owner = spec.gateway_id if spec is not None else self.restored.get(key)
            if owner is not None:
                groups.setdefault(owner, []).append(key)
        return groups.items()
