"""A shard of a small cell: blocks by request. Writers that find no room wait in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from alignedserve.request import RequestKey
from alignedserve.scheduler.core.actions import ReleasePool
from alignedserve.scheduler.core.events import PoolReported
from alignedserve.scheduler.instance.block_allocator import BlockAllocator

if TYPE_CHECKING:
    from support.small_cell.cell import Part, SmallCell
    from support.small_cell.requests import Request

Committed = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Write:
    writer: Part
    key: RequestKey
    kv_tokens: int
    share_with: RequestKey | None
    then: Committed  # called with (blocks, number of those that are not shared)
    failed: Callable[[], None] = lambda: None  # called when the shard is lost


class Pool:
    name = "pool"

    def __init__(self, cell: SmallCell, capacity: int, name: str) -> None:
        self.cell, self.name = cell, name
        self.alive = True
        self.blocks = BlockAllocator(capacity, self.name)
        self.lengths: dict[RequestKey, int] = {}
        self.waiting: deque[Write] = deque()
        self.newest: dict[str, int] = {}  # epoch that was adopted last, by request
        self.report()

    def report(self) -> None:
        self.cell.tell_core(self, PoolReported(self.name, self.blocks.capacity, self.blocks.free_blocks))

    def write(self, write: Write) -> None:
        """Commit as soon as there is room, or at once if the KV is already here. Then call `then`."""
        if self.lengths.get(write.key) == write.kv_tokens:
            write.then(len(self.blocks.blocks_of(write.key)), 0)
            return
        self.waiting.append(write)
        self.serve()

    def missing_blocks(self, write: Write) -> int:
        have = len(self.blocks.blocks_of(write.key)) or len(self._shared(write))
        return max(0, self.cell.blocks_for(write.kv_tokens) - have)

    def serve(self) -> None:
        self.waiting = deque(write for write in self.waiting if write.writer.alive)
        while self.waiting and self.alive:
            write = self.waiting[0]
            if write.key.epoch < self.newest.get(write.key.request_id, 0):  # refused: another epoch has replaced it
                self.waiting.popleft()
                write.failed()
                continue
            shared = [] if self.blocks.blocks_of(write.key) else self._shared(write)
            needed = self.missing_blocks(write)
            if self.blocks.allocate(needed, write.key) is None:
                return
            self.blocks.retain(shared, write.key)
            self.lengths[write.key] = write.kv_tokens
            self.waiting.popleft()
            self.report()
            write.then(len(self.blocks.blocks_of(write.key)), needed)

    def adopt(self, request: Request) -> None:
        """Adopt the KV of an earlier epoch of the request. The core gets the submission together with it."""
        key = request.key
        self.newest[key.request_id] = key.epoch
        tokens, ids = self.lengths.get(key, 0), self.blocks.blocks_of(key)  # requested again: reply lost
        for older in [k for k in self.lengths if k.request_id == key.request_id and k != key]:
            tokens = min(self.lengths.pop(older), request.kv_tokens)
            ids = self.blocks.blocks_of(older)[: self.cell.blocks_for(tokens)]
            self.blocks.retain(ids, key)
            self.blocks.release_all(older)
        if tokens:
            self.lengths[key] = tokens
        self.cell.adopted(self, request, tokens, len(ids))

    def discard(self, key: RequestKey) -> None:
        """The writer has given up."""
        self.waiting = deque(write for write in self.waiting if write.key != key)

    def release(self, action: ReleasePool) -> None:
        for index, key in enumerate(action.keys):
            if action.dropped and self.lengths.get(key) != action.kv_tokens[index]:
                continue  # a longer copy was committed since
            for held in [k for k in self.lengths if k.request_id == key.request_id and k.epoch <= key.epoch]:
                self.blocks.release_all(held)
                del self.lengths[held]
        self.report()
        self.serve()

    def _shared(self, write: Write) -> list[int]:
        if write.share_with is None:
            return []
        full = self.cell.request(write.key).prompt // self.cell.shape.block_size
        return self.blocks.blocks_of(write.share_with)[:full]
