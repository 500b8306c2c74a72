"""A node's shard of the KV pool: blocks by request, and a queue of writers while it has no room."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from alignedserve.request import RequestKey
from alignedserve.scheduler.core.actions import ReleasePool
from alignedserve.scheduler.core.events import PoolReported
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.simulator.links import Link, transfer
from alignedserve.simulator.prefix.cache import SimulatedPrefixes
from alignedserve.simulator.workload import Arrival

if TYPE_CHECKING:
    from alignedserve.simulator.host import Host


class Writer(Protocol):
    def report(self) -> None:
        """The number of blocks that it waits for has changed."""


@dataclass(slots=True)
class Write:
    """A copy of KV to the pool over `link`. At its end it calls `then(new_blocks)`; None: the write was cancelled."""

    writer: Writer
    key: RequestKey
    kv_tokens: int
    link: Link
    then: Callable[[int | None], None]
    fresh: list[int] = field(default_factory=list)
    waited: bool = False
    dropped: bool = False


class Pool:
    """`prefixes`: its prefix cache; None: it has none."""

    def __init__(
        self, cell: Host, capacity: int, name: str = "pool", prefixes: SimulatedPrefixes | None = None
    ) -> None:
        self.name = name
        self.blocks = BlockAllocator(capacity, self.name)
        self.copies: dict[RequestKey, int] = {}  # committed KV tokens
        self.prefixes = prefixes
        self.to_nodes, self.from_nodes, self.disk = cell.network_link(), cell.network_link(), cell.disk_link()
        self._cell = cell
        self._waiting: deque[Write] = deque()
        self._under_way: dict[RequestKey, Write] = {}
        self._reporting = False

    def write(self, write: Write) -> None:
        """Copy once there is room, first come, first served. If all of it is already here, nothing is copied."""
        stale = self._cell.request(write.key).key != write.key
        if stale or self.copies.get(write.key) == write.kv_tokens:
            self._cell.clock.after(0.0, write.then, None if stale else 0)
            return
        self._waiting.append(write)
        self._serve()
        if not write.fresh:
            write.waited = True
            write.writer.report()

    def to(self, target: Pool) -> tuple[Link, ...]:
        """The network between this shard's node and another's; nothing on the same node."""
        return () if target is self else (self.to_nodes, target.from_nodes)

    def waiting_blocks(self, writer: Writer) -> int:
        """Blocks that its writes wait for."""
        return sum(self._missing(write) for write in self._waiting if write.writer is writer)

    def release(self, action: ReleasePool) -> None:
        dropped: set[RequestKey] = set()
        for number, key in enumerate(action.keys):
            if not action.dropped:
                self._release(key)
            elif self.copies.get(key) == action.kv_tokens[number] and key not in self._under_way:
                self._cell.counters["dropped_copies"] += 1
                self._drop_copy(key)
                dropped.add(key)
        self._changed()
        self._serve()
        for write in self._waiting:
            if write.key in dropped:  # it now waits for more blocks
                write.writer.report()

    def _release(self, key: RequestKey) -> None:
        write = self._under_way.get(key)
        if write is not None:
            write.dropped = True  # its blocks are freed once the copy has ended
            return
        for write in [write for write in self._waiting if write.key == key]:
            self._waiting.remove(write)
            write.then(None)
        self._drop_copy(key)

    def _drop_copy(self, key: RequestKey) -> None:
        """Drop a copy. A waiting write stays and will write everything: its request may have been evicted meanwhile."""
        self.blocks.release_all(key)
        self.copies.pop(key, None)
        if self.prefixes is not None:
            self.prefixes.release(key)
            self.prefixes.under_way.ended(key)

    def _kept(self, key: RequestKey) -> int:
        """Full blocks of the existing copy. The last, partly filled block is written again beside the old one."""
        return self.copies.get(key, 0) // self._cell.block_size

    def _missing(self, write: Write) -> int:
        return self._cell.blocks_for(write.kv_tokens) - self._kept(write.key)

    def _serve(self) -> None:
        served: list[Write] = []
        while self._waiting:
            write = self._waiting[0]
            fresh = self.blocks.allocate(self._missing(write), write.key)
            if fresh is None:
                break
            self._waiting.popleft()
            write.fresh = fresh
            self._under_way[write.key] = write
            end_s = transfer(self._cell.clock.now_s, len(fresh) * self._cell.block_bytes, write.link)
            commit_s = 2 * self._cell.hardware.message_s  # message to the shard's process, and its reply
            self._cell.clock.at(end_s + commit_s, self._written, write)
            served.append(write)
        if served:
            self._changed()
        for write in served:
            if write.waited:  # at once: otherwise leaping and stepping writers would report at different times
                write.writer.report()

    def _written(self, write: Write) -> None:
        key = write.key
        del self._under_way[key]
        if write.dropped:
            self._release(key)
            write.then(None)
        else:
            kept = self._kept(key)
            had = len(self.blocks.blocks_of(key)) - len(write.fresh)
            self.blocks.release(self.blocks.blocks_of(key)[kept:had], key)
            self.copies[key] = write.kv_tokens
            request = self._cell.request(key)
            request.pool = self.name
            if self.prefixes is not None:
                named = write.kv_tokens if self._cell.cache_answers else request.arrival.input_tokens
                self.prefixes.commit(key, request.arrival, min(named, write.kv_tokens))
            write.then(len(write.fresh))
        write.writer.report()
        self._changed()
        self._serve()
        if self.prefixes is not None:
            self.prefixes.under_way.ended(key)

    def trim(self) -> None:
        """Cached blocks give way to the blocks of requests."""
        if self.prefixes is not None:
            self.prefixes.trim(self.blocks.free_blocks)

    def keep(self, arrival: Arrival, kv_tokens: int, *links: Link) -> None:
        """Copy over these links what the prefix cache lacks of an ended request's full blocks, to be cached."""
        missing = 0 if self.prefixes is None else self.prefixes.lacking(arrival, kv_tokens)
        if missing:
            size = missing * self._cell.hardware.kv_bytes_per_token
            self._cell.clock.at(transfer(self._cell.clock.now_s, size, *links), self._kept_whole, arrival, kv_tokens)

    def _kept_whole(self, arrival: Arrival, kv_tokens: int) -> None:
        assert self.prefixes is not None
        self.prefixes.keep(arrival, kv_tokens)
        self.trim()

    def _changed(self) -> None:
        self.trim()
        pools, occupancy = self._cell.pools.values(), self._cell.occupancy
        owned = sum(pool.blocks.owned_blocks for pool in pools)
        if abs(owned - occupancy[-1][1]) * 100 > sum(pool.blocks.capacity for pool in pools):
            occupancy.append((self._cell.clock.now_s, owned))
        if not self._reporting:
            self._reporting = True
            self._cell.clock.after(self._cell.hardware.message_s, self._report)

    def _report(self) -> None:
        self._reporting = False
        self._cell.tell(PoolReported(self.name, self.blocks.capacity, self.blocks.free_blocks))
