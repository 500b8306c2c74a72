"""The prefix cache of a simulated shard: what it still has of prompts and answers whose blocks the trace names.

Requests in the pool or in decode hold their blocks; the others are cached in room that no request needs. The order in
which they are given up is that of the cluster (`scheduler/cache/`). Given up blocks go to the disk, if there is one,
and come back when they are used. Simplifications: requests that share blocks have a copy each while they hold them, and
every answer ends with a stop, as traces do not say how.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey
from alignedserve.scheduler.cache.eviction import EvictionQueue
from alignedserve.scheduler.cache.returns import STOP
from alignedserve.scheduler.cache.sessions import LOOKED_BACK, Note, Sessions
from alignedserve.scheduler.cache.values import cache_policy
from alignedserve.simulator.prefix.under_way import UnderWay
from alignedserve.simulator.workload import Arrival

ID_BYTES = 9  # of a block of a trace; ids have 64 bits


@dataclass(frozen=True, slots=True)
class Found:
    """Tokens of a prompt that a cache has, and how many of them were on the disk. The last token is never counted."""

    tokens: int
    disk_tokens: int = 0


class SimulatedPrefixes:
    """Blocks of the trace, of `trace_tokens` tokens each, by their ids: equal ids are equal prefixes."""

    def __init__(
        self,
        policy: str,
        prefill_s: Callable[[int], float],
        clock: Callable[[], float],
        trace_tokens: int,
        pool_blocks: int,
        block_size: int,
        disk_blocks: int = 0,
    ) -> None:
        """`pool_blocks`, `disk_blocks`: capacity of the shard and of the disk, in blocks of `block_size` tokens.
        `prefill_s`: see `ValuePolicy`. `clock`: the simulated time in seconds.
        """
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.disk_hit_tokens = 0
        self.disk_written_tokens = 0
        self.trace_tokens = trace_tokens
        self.under_way = UnderWay()
        self._pool_blocks = -(-trace_tokens // block_size)  # of one block of the trace
        capacity = pool_blocks // self._pool_blocks
        self._queue = EvictionQueue(capacity, cache_policy(policy, prefill_s, trace_tokens))
        self._sessions = Sessions(clock, ID_BYTES)
        self._free = list(range(capacity))
        self._cached = bytearray(capacity)
        self._slots: dict[int, int] = {}  # id of the trace -> its slot
        self._ids = [0] * capacity
        self._holders = [0] * capacity
        self._held: dict[RequestKey, list[int]] = {}  # slots of the request's first blocks
        self._cached_slots = self._evicted_slots = 0
        self._disk: OrderedDict[int, None] = OrderedDict()  # ids, the least recently written first
        self._disk_capacity = disk_blocks // self._pool_blocks

    def match(self, arrival: Arrival, *, coming: bool = False) -> int:
        """Tokens of the prompt that are here, or with `coming` will be when prompts under way have been computed."""
        count = 0
        for block in self.blocks(arrival, arrival.input_tokens):
            if block not in self._slots and block not in self._disk and not (coming and block in self.under_way):
                break
            count += 1
        return self._as_tokens(count, arrival)

    def query(self, arrival: Arrival) -> None:
        """Count a prompt that is looked up for the first time."""
        self.queried_tokens += arrival.input_tokens

    def hold(self, key: RequestKey, arrival: Arrival, *, hit: bool = True) -> Found:
        """The request holds what is here of its prompt, until `release`. What is on the disk is read.

        `hit`: False for a prompt that is computed elsewhere, with a copy of it.
        """
        held = self._held.setdefault(key, [])
        begin, blocks = len(held), self.blocks(arrival, arrival.input_tokens)
        read: list[int] = []
        for block in blocks[begin:]:
            slot = self._slots.get(block)
            if slot is None:
                slot = self._place(block) if block in self._disk else None
                if slot is None:
                    break
                read.append(slot)
            self._hold(held, slot)
        known = self._came_back(key, blocks, 0, len(held))  # a use counts once a conversation
        fresh = set(read)
        self._queue.use([slot for number, slot in enumerate(held) if number >= max(begin, known) or slot in fresh])
        found = Found(self._as_tokens(len(held), arrival), len(read) * self.trace_tokens)
        if hit:
            self.hit_tokens += found.tokens
        self.disk_hit_tokens += found.disk_tokens
        return found

    def commit(self, key: RequestKey, arrival: Arrival, kv_tokens: int) -> None:
        """The KV of its first `kv_tokens` tokens is in the shard: their full blocks are held too."""
        held = self._held.setdefault(key, [])
        begin, blocks = len(held), self.blocks(arrival, kv_tokens)
        for block in blocks[begin:]:
            slot = self._slots[block] if block in self._slots else self._place(block)
            if slot is None:
                break
            self._hold(held, slot)
        self._queue.use(held[begin:])
        self._came_back(key, blocks, begin, len(held))

    def lacking(self, arrival: Arrival, kv_tokens: int) -> int:
        """Tokens of the full blocks of its first `kv_tokens` tokens that are not here."""
        missing = sum(block not in self._slots for block in self.blocks(arrival, kv_tokens))
        return missing * self.trace_tokens

    def keep(self, arrival: Arrival, kv_tokens: int) -> None:
        """The KV of its first `kv_tokens` tokens was written here only to be cached, as far as there is room."""
        slots: list[int] = []
        fresh = []
        for block in self.blocks(arrival, kv_tokens):
            slot = self._slots.get(block)
            if slot is None:
                slot = self._place(block)
                if slot is None:
                    break
                fresh.append(slot)
            self._hold(slots, slot)
        self._let_go(slots)
        self._queue.use(fresh)
        self._queue.touch(slots, self._chance(arrival.request_id, slots))

    def release(self, key: RequestKey, *, ended: bool = False) -> None:
        """The request holds nothing any more, and has `ended` or goes on. What no other request holds is cached."""
        slots = self._held.pop(key, [])
        self._let_go(slots)
        self._queue.touch(slots, self._chance(key.request_id, slots) if ended else 1.0)

    def trim(self, free_blocks: int) -> None:
        """Give up cached blocks beyond the shard's free ones. They are written to the disk."""
        excess = self._cached_slots - free_blocks // self._pool_blocks
        if excess > 0:
            self._give_up(excess)

    def _give_up(self, count: int) -> None:
        for slot in self._queue.take(count, self._cached):
            self._cached[slot] = 0
            self._cached_slots -= 1
            self._evicted_slots += 1
            self._queue.forget([slot])
            block = self._ids[slot]
            del self._slots[block]
            self._free.append(slot)
            if self._disk_capacity:
                self._disk[block] = None
                self.disk_written_tokens += self.trace_tokens
        while len(self._disk) > self._disk_capacity:
            self._disk.popitem(last=False)

    def blocks(self, arrival: Arrival, tokens: int) -> Sequence[int]:
        """The ids of the full blocks of the first `tokens` tokens of prompt and answer."""
        size = self.trace_tokens
        if tokens <= arrival.input_tokens:
            return arrival.blocks[: tokens // size]
        return (arrival.blocks[: arrival.input_tokens // size] + arrival.answer_blocks)[: tokens // size]

    def check_integrity(self) -> None:
        """Raises AccountingError if what is held, cached and free is not all there is."""
        held = {slot for slots in self._held.values() for slot in slots}
        cached = {slot for slot, flag in enumerate(self._cached) if flag}
        all_slots = held | cached | set(self._free)
        right = len(all_slots) == len(held) + len(cached) + len(self._free) == len(self._cached)
        if not right or len(cached) != self._cached_slots or set(self._slots.values()) != held | cached:
            raise AccountingError("the simulated prefix cache does not match a recount")
        if self._disk.keys() & self._slots.keys() or len(self._disk) > self._disk_capacity:
            raise AccountingError("the disk of the simulated prefix cache has blocks that memory has, or too many")

    def check_nothing_is_held(self) -> None:
        """Raises AccountingError if a request that has ended still holds blocks, or is awaited."""
        self.check_integrity()
        if any(self._held.values()) or self.under_way:
            raise AccountingError(f"the simulated prefix cache still has {len(self._held)} holders")

    def whole(self, tokens: int) -> int:
        """`match`'s tokens with the last one of a prompt that is here wholly."""
        return -(-tokens // self.trace_tokens) * self.trace_tokens

    def _as_tokens(self, blocks: int, arrival: Arrival) -> int:
        """The last token is always computed."""
        return min(blocks * self.trace_tokens, arrival.input_tokens - 1)

    def _place(self, block: int) -> int | None:
        """A slot for the block, which is no longer on the disk: a free one, or a cached one that is given up.

        None if all are held.
        """
        if not self._free and not self._cached_slots:
            return None
        self._disk.pop(block, None)  # now: what is given up for it may be one too many there
        if not self._free:
            self._give_up(1)
        slot = self._free.pop()
        self._slots[block], self._ids[slot] = slot, block
        return slot

    def _hold(self, held: list[int], slot: int) -> None:
        held.append(slot)
        self._holders[slot] += 1
        if self._cached[slot]:
            self._cached[slot] = 0
            self._cached_slots -= 1

    def _let_go(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._holders[slot] -= 1
            if not self._holders[slot]:
                self._cached[slot] = 1
                self._cached_slots += 1

    def _came_back(self, key: RequestKey, blocks: Sequence[int], begin: int, end: int) -> int:
        """How many of a request's first `end` blocks its conversation has used before: see `Sessions.came_back`."""
        first = max(begin, end - LOOKED_BACK)
        found = self._sessions.came_back(key.request_id, b"".join(map(_digest, blocks[first:end])), 0, end - first)
        return first + found if found else 0

    def _chance(self, request_id: str, slots: Sequence[int]) -> float:
        """How likely the chain of a request that has ended is used again: see `CachePolicy.value`."""
        if not slots:
            return 1.0
        sessions = self._sessions
        sessions.returns.look(sessions.clock(), self._evicted_slots, self._cached_slots)
        sessions.note(request_id, Note(STOP, "", sessions.clock()))
        return sessions.ended(request_id, _digest(self._ids[slots[-1]]), slots[-1], len(slots))


def _digest(block: int) -> bytes:
    """Equal ids of the trace are equal prefixes, as chained digests are."""
    return block.to_bytes(ID_BYTES, "little", signed=True)
