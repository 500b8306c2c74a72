"""The shards of a small cell: which process writes to which shard, where KV is known to be, and adoption."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from alignedserve.request import RequestKey
from alignedserve.scheduler.core import actions, events
from support.small_cell.pool import Pool

if TYPE_CHECKING:
    from support.small_cell.cell import SmallCell
    from support.small_cell.requests import Request


Submission = tuple["Request", events.RequestMeta]


@dataclass(slots=True)
class _Asked:
    """A submission of a later epoch, until every shard has reported what it holds of the request."""

    request: Request
    unheard: set[str]
    tokens: int = 0
    blocks: int = 0
    pool_id: str = ""


class Shards:
    """One shard on each node. With one node it is "pool", and its place is not reported."""

    def __init__(self, cell: SmallCell, nodes: int, instances: Iterable[str]) -> None:
        self._cell = cell
        self._ever = 0
        self.pools: dict[str, Pool] = {}
        self.stored: dict[RequestKey, str] = {}  # as known to the scheduler's process
        self.adopting: dict[RequestKey, _Asked] = {}
        for _ in range(nodes):
            self.add("" if nodes > 1 else Pool.name)
        names = list(self.pools)
        self.homes = {instance: names[number % nodes] for number, instance in enumerate(instances)}
        self.named = nodes > 1

    def add(self, name: str = "") -> Pool:
        name = name or f"{Pool.name}-{self._ever}"
        self._ever += 1
        self._cell.introduce("kv_pool", name)
        pool = self.pools[name] = Pool(self._cell, self._cell.shape.pool_blocks, name)
        return pool

    def event(self) -> events.ShardsChanged:
        return events.ShardsChanged(tuple(self.pools), tuple(self.homes.items()))

    def home(self, instance: str) -> Pool:
        return self.pools[self.homes[instance]]

    def where(self, key: RequestKey) -> Pool | None:
        """The shard with the request's KV, if there is one and it is not lost."""
        return self.pools.get(self.stored.get(key, ""))

    def is_gone(self, key: RequestKey) -> bool:
        """Whether the shard with the request's KV was lost."""
        return self.stored.get(key, "") not in self.pools

    def note(self, event: events.Event) -> None:
        """The state that the scheduler's process keeps of an event, beside its core."""
        if isinstance(event, events.Prefilled | events.Returned) and self._cell.core.is_open(event.key):
            self.stored[event.key] = event.pool_id

    def serve(self) -> None:
        for pool in self.pools.values():
            pool.serve()

    # adoption, in the scheduler's process

    def ask(self, request: Request) -> Iterable[Pool]:
        """The shards to ask for the KV of an earlier epoch."""
        self.adopting[request.key] = _Asked(request, set(self.pools))
        return self.pools.values()

    def answered(self, pool: Pool, request: Request, tokens: int, blocks: int) -> Submission | None:
        """Keep the longest copy and drop the others. Returns the submission once all shards have replied."""
        asked = self.adopting.get(request.key)
        if asked is None or pool.name not in asked.unheard:
            return None  # a second reply
        asked.unheard.discard(pool.name)
        if tokens > asked.tokens:
            worse = asked.pool_id, asked.tokens
            asked.tokens, asked.blocks, asked.pool_id = tokens, blocks, pool.name
        else:
            worse = pool.name, tokens
        if worse[1]:
            self._cell.release_pool(actions.ReleasePool((request.key,), True, (worse[1],), worse[0]))
        return self._complete(asked)

    def _complete(self, asked: _Asked) -> Submission | None:
        if asked.unheard:
            return None
        request, tokens = asked.request, asked.tokens
        del self.adopting[request.key]
        whole = request.tokens > 0 and tokens == request.kv_tokens
        self._cell.counts["whole"] += whole
        self.stored[request.key] = asked.pool_id
        meta = replace(request.meta, base_tokens=tokens, base_blocks=asked.blocks, own_blocks=asked.blocks, whole=whole)
        return request, replace(meta, base_pool_id=asked.pool_id)

    def lose(self, name: str, elsewhere: str) -> None:
        """Lose the shard of a node, whose instances move."""
        self.pools.pop(name).alive = False
        self.homes = {instance: elsewhere if home == name else home for instance, home in self.homes.items()}

    def forget(self, name: str) -> list[Submission]:
        """The scheduler's process learns of a lost shard. Returns the submissions that no longer wait for it."""
        for asked in self.adopting.values():
            asked.unheard.discard(name)
            if asked.pool_id == name:
                asked.tokens, asked.blocks, asked.pool_id = 0, 0, ""
        return [found for asked in list(self.adopting.values()) if (found := self._complete(asked)) is not None]
