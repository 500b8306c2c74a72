"""The prefix cache of a simulated pool: what it still has of prompts whose blocks the trace names.

Requests in the pool or in decode hold their blocks; the others are cached in room that no request needs. The order in
which they are given up is that of the cluster (`scheduler/cache/`). Simplifications: requests that share blocks have a
copy each while they hold them, answers are not cached, and prompts of one prefix that arrive together do not wait for
one another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey
from alignedserve.scheduler.cache.eviction import EvictionQueue
from alignedserve.scheduler.cache.values import cache_policy
from alignedserve.simulator.workload import Arrival


class SimulatedPrefixes:
    """Blocks of the trace, of `trace_tokens` tokens each, by their ids: equal ids are equal prefixes."""

    def __init__(
        self, policy: str, prefill_s: Callable[[int], float], trace_tokens: int, pool_blocks: int, block_size: int
    ) -> None:
        """`pool_blocks`: the pool's capacity, in blocks of `block_size` tokens. `prefill_s`: see `ValuePolicy`."""
        self.queried_tokens = 0
        self.hit_tokens = 0
        self._trace_tokens = trace_tokens
        self._pool_blocks = -(-trace_tokens // block_size)  # of one block of the trace
        capacity = pool_blocks // self._pool_blocks
        self._queue = EvictionQueue(capacity, cache_policy(policy, prefill_s, trace_tokens))
        self._free = list(range(capacity))
        self._cached = bytearray(capacity)
        self._slots: dict[int, int] = {}  # id of the trace -> its slot
        self._ids = [0] * capacity
        self._holders = [0] * capacity
        self._held: dict[RequestKey, list[int]] = {}  # slots of the request's first blocks
        self._cached_slots = 0

    def match(self, arrival: Arrival) -> int:
        """Tokens of the prompt that are here. The last token is always computed."""
        return min(len(self._matched(self._whole(arrival))) * self._trace_tokens, arrival.input_tokens - 1)

    def hold(self, key: RequestKey, arrival: Arrival) -> int:
        """The request holds what is here of its prompt, until `release`. Returns the tokens."""
        self.queried_tokens += arrival.input_tokens
        tokens = self.match(arrival)
        self.hit_tokens += tokens
        held = self._held.setdefault(key, [])
        for slot in self._matched(self._whole(arrival))[len(held) :]:
            self._hold(held, slot)
        return tokens

    def commit(self, key: RequestKey, arrival: Arrival) -> None:
        """The prompt's KV is in the pool: its other blocks are held too."""
        held = self._held.setdefault(key, [])
        ids = self._whole(arrival)
        for block in ids[len(held) :]:
            slot = self._slots.get(block)
            if slot is None:
                if not self._free:
                    break
                slot = self._free.pop()
                self._slots[block], self._ids[slot] = slot, block
            self._hold(held, slot)

    def release(self, key: RequestKey) -> None:
        """The request holds nothing any more. What no other request holds is cached."""
        slots = self._held.pop(key, [])
        for slot in slots:
            self._holders[slot] -= 1
            if not self._holders[slot]:
                self._cached[slot] = 1
                self._cached_slots += 1
        self._queue.touch(slots)

    def trim(self, free_blocks: int) -> None:
        """Give up cached blocks beyond the pool's free ones."""
        excess = self._cached_slots - free_blocks // self._pool_blocks
        if excess <= 0:
            return
        for slot in self._queue.take(excess, self._cached):
            self._cached[slot] = 0
            self._cached_slots -= 1
            self._queue.forget([slot])
            del self._slots[self._ids[slot]]
            self._free.append(slot)

    def check_integrity(self) -> None:
        """Raises AccountingError if what is held, cached and free is not all there is."""
        held = {slot for slots in self._held.values() for slot in slots}
        cached = {slot for slot, flag in enumerate(self._cached) if flag}
        all_slots = held | cached | set(self._free)
        right = len(all_slots) == len(held) + len(cached) + len(self._free) == len(self._cached)
        if not right or len(cached) != self._cached_slots or set(self._slots.values()) != held | cached:
            raise AccountingError("the simulated prefix cache does not match a recount")

    def _whole(self, arrival: Arrival) -> Sequence[int]:
        """The ids of the prompt's full blocks."""
        return arrival.blocks[: arrival.input_tokens // self._trace_tokens]

    def _matched(self, ids: Sequence[int]) -> list[int]:
        slots: list[int] = []
        for block in ids:
            slot = self._slots.get(block)
            if slot is None:
                break
            slots.append(slot)
        return slots

    def _hold(self, held: list[int], slot: int) -> None:
        held.append(slot)
        self._holders[slot] += 1
        self._queue.use([slot])
        if self._cached[slot]:
            self._cached[slot] = 0
            self._cached_slots -= 1
