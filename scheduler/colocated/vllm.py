"""vLLM's scheduler (V1): running requests first, then the queue, prompts in chunks, all within one token budget."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from alignedserve.errors import AccountingError, ConfigError
from alignedserve.request import RequestKey
from alignedserve.scheduler.colocated.base import MixedPlan, Options
from alignedserve.scheduler.colocated.continuous import ActiveRequest, ContinuousScheduler, Draft, whole
from alignedserve.scheduler.instance.block_allocator import BlockAllocator


class VllmScheduler(ContinuousScheduler):
    """The last admitted request is preempted first, and recomputed. A pass that preempted admits no request.

    `async_scheduling`: a pass is planned while the previous one runs, so that the device never waits for the host. A
    request that arrives in between waits for one more pass; one whose last permitted token is in flight is in no other.
    `reserve_full_isl`: a request is admitted only if all its tokens fit, not only its first chunk. `prefix_caching`: a
    preempted request finds those of its own blocks that were not overwritten. `prefix_hit_share`: of each prompt that
    is in the cache, since lengths do not tell who shares what.
    """

    def __init__(self, options: Options, allocator: BlockAllocator, block_size: int) -> None:
        super().__init__(options, allocator, block_size)
        self._max_num_seqs = whole(options, "max_num_seqs")
        self._budget = whole(options, "max_num_batched_tokens", low=self._max_num_seqs)
        self._depth = 2 if options["async_scheduling"] else 1
        self._reserve_full_isl = bool(options["reserve_full_isl"])
        self._hit_share = float(options["prefix_hit_share"])
        self._freed = FreedBlocks(allocator.available_blocks) if options["prefix_caching"] else None
        if not 0.0 <= self._hit_share <= 1.0 or (self._hit_share and self._freed is None):
            raise ConfigError(
                f"option prefix_hit_share must be 0 to 1, and 0 without prefix_caching; got {self._hit_share:g}"
            )

    @property
    def depth(self) -> int:
        return self._depth

    def _fill(self, draft: Draft, now_s: float) -> None:
        budget = self._budget
        for member in list(self._running.values()):
            tokens = min(member.left, budget - draft.tokens)
            if member.request.key not in self._running or tokens <= 0 or not self._unplanned(member):
                continue
            if not self._cover_by_preempting(member, tokens, self._latest_first(), draft):
                return
            draft.add(member, tokens)
        while self._waiting and not draft.preempted:
            member = next(iter(self._waiting.values()))
            cached = self._cached_blocks(member)
            tokens = min(member.left - cached * self._block_size, budget - draft.tokens)
            if tokens <= 0 or len(self._running) >= self._max_num_seqs:
                return
            covered = member.known if self._reserve_full_isl else cached * self._block_size + tokens
            if -(-covered // self._block_size) > self._allocator.available_blocks:
                return
            self._take_back(member, cached)
            self._cover(member, tokens)
            self._admit(member)
            draft.add(member, tokens)

    @staticmethod
    def _unplanned(member: ActiveRequest) -> int:
        """How many more tokens it may ask for than planned passes sample."""
        return member.request.max_total_tokens - member.known

    def quiet_passes(self, plan: MixedPlan) -> int:
        quiet = super().quiet_passes(plan)
        return min(quiet, *map(self._unplanned, self._running.values())) if quiet else 0

    def _cached_blocks(self, member: ActiveRequest) -> int:
        """Blocks that it finds in the cache. At least one token is computed."""
        if self._freed is None:
            return 0
        hit = int(self._hit_share * member.request.prompt_tokens) // self._block_size
        found = max(hit, self._freed.found(member.request.key))
        return min(found, (member.known - 1) // self._block_size)

    def _take_back(self, member: ActiveRequest, blocks: int) -> None:
        if blocks and self._freed is not None:
            own = min(blocks, self._freed.found(member.request.key))
            if own:
                self._freed.take_back(member.request.key, own)
            self._freed.overwrite(blocks - own)
            self._allocator.allocate(blocks, member.request.key)
            member.blocks, member.computed = blocks, blocks * self._block_size

    def _cover(self, member: ActiveRequest, tokens: int) -> bool:
        before = member.blocks
        covered = super()._cover(member, tokens)
        if self._freed is not None:
            self._freed.overwrite(member.blocks - before)
        return covered

    def _remove(self, key: RequestKey) -> None:
        if self._freed is not None:
            member = self._running[key]
            self._freed.add(key, member.blocks, member.computed // self._block_size)
        super()._remove(key)

    def check_integrity(self) -> None:
        super().check_integrity()
        if self._freed is not None and len(self._freed) != self._allocator.available_blocks:
            raise AccountingError("the order of the free blocks does not match the free blocks")

    def _latest_first(self) -> Iterator[ActiveRequest]:
        """The last admitted first. Each must be removed before the next is requested."""
        while self._running:
            yield next(reversed(self._running.values()))


class FreedBlocks:
    """The free blocks of a cache, least recently freed first: the order in which vLLM overwrites them.

    A request's blocks are freed together, and its last block is overwritten first. What it leaves when it comes back is
    no longer its own.
    """

    def __init__(self, blocks: int) -> None:
        self._runs: OrderedDict[int, tuple[int, RequestKey | None]] = OrderedDict({0: (blocks, None)})
        self._last: dict[RequestKey, tuple[int, int]] = {}  # the number of its run, and of the run's full blocks
        self._number = 0

    def __len__(self) -> int:
        return sum(blocks for blocks, _ in self._runs.values())

    def add(self, key: RequestKey, blocks: int, full: int) -> None:
        """Its blocks are free; the first `full` hold the KV of its first tokens."""
        self._number += 1
        self._runs[self._number] = blocks, key
        self._last[key] = self._number, full

    def found(self, key: RequestKey) -> int:
        """The number of its leading blocks that are still as it left them."""
        number, full = self._last.get(key, (-1, 0))
        return min(self._runs[number][0], full) if number in self._runs else 0

    def take_back(self, key: RequestKey, blocks: int) -> None:
        number, _ = self._last.pop(key)
        left = self._runs[number][0] - blocks
        if left:
            self._runs[number] = left, None
        else:
            del self._runs[number]

    def overwrite(self, blocks: int) -> None:
        while blocks:
            number, (count, key) = next(iter(self._runs.items()))
            taken = min(count, blocks)
            blocks -= taken
            if taken < count:
                self._runs[number] = count - taken, key
                continue
            del self._runs[number]
            if key is not None and self._last.get(key, (-1, 0))[0] == number:
                del self._last[key]
