"""Copies blocks to disk before they are evicted from host memory, or lost with it.

While fewer than `LOW_SHARE` of the shard's blocks are free, the cached blocks that go next (`AHEAD_SHARE` of all) are
written, each after what it continues. No request waits for that: a block whose place is wanted meanwhile is given up,
and its copy is not indexed, since its entry in host memory has gone.

What several conversations have used is written too, a batch every `HOT_EVERY_S`, while the disk has room: so it
outlives a kill of all processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from alignedserve.kv_pool.disk.breaker import Breaker
from alignedserve.kv_pool.disk.layout import entry_pages, proof, runs
from alignedserve.kv_pool.disk.shard import Shard
from alignedserve.kv_pool.disk.slot_io import SlotIo
from alignedserve.kv_pool.disk.slots import Copies, DiskSlots
from alignedserve.kv_pool.disk.threads import DiskThreads
from alignedserve.kv_pool.entries import Ids, Words
from alignedserve.kv_pool.prefix_chain import DIGEST_BYTES, Chain

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

LOW_SHARE = AHEAD_SHARE = 1 / 8
BATCH_BYTES = 64 << 20
MOST_LOOKED_AT = 4096  # blocks of prefixes, for a batch: some 5 ms
LAST_LOOKED_AT = 1 << 16  # the same when the process ends
PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0  # between looks for what is to be written
HOT_EVERY_S = 10.0
HOT_USES = 2
HUNG_S = 5.0  # a write that takes longer hangs
ERASED_AT_ONCE = 4096  # slots, perhaps each in a page of its own
ERASE_AGAIN_S = 1.0  # after a fault


@dataclass(slots=True)
class _Part:
    """Blocks that are being written: those that continue the slots `found` of `chain`."""

    chain: Chain
    found: list[int]
    block_ids: list[int] = field(default_factory=list)
    generations: Words = field(default_factory=lambda: np.empty(0, np.uint64))
    slots: list[int] = field(default_factory=list)
    jobs: list[Future[list[int]]] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)  # xxh3 of the blocks that are written


class Demotion:
    """For one event loop."""

    def __init__(
        self,
        shard: Shard,
        disk: DiskSlots,
        copies: Copies,
        slot_io: SlotIo,
        breaker: Breaker,
        threads: DiskThreads,
        stale: Iterable[int],
    ) -> None:
        """`stale`: slots that may have an entry on disk beside those that are indexed."""
        self.breaker = breaker
        self.written_bytes = 0
        self._shard, self._disk, self._copies, self._io = shard, disk, copies, slot_io
        self._threads = threads
        self._wanted = asyncio.Event()
        self._saving = asyncio.Lock()
        self._on_disk = np.frombuffer(disk.index.indexed, np.uint8) != 0  # slots that may have an entry on disk
        self._on_disk[list(stale)] = True
        self._noted = 0  # copies that were found on disk
        self._most_looked_at = MOST_LOOKED_AT
        capacity = disk.blocks.capacity
        # With more, a small disk would evict what it has just taken, and take it again.
        self._ahead = max(1, min(int(shard.store.capacity_blocks * AHEAD_SHARE), capacity // 2))
        self._most = max(1, min(BATCH_BYTES // slot_io.layout.slot_bytes, capacity // 2))

    def wake(self) -> None:
        """Blocks of the shard have been taken or cached."""
        self._wanted.set()

    async def close(self) -> bool:
        """Returns whether no call is under way, after waiting a little. `run` must have ended."""
        self._threads.close()
        return await self._threads.ended()

    async def erase(self, slots: Ids) -> None:
        """Write that these slots, which are indexed no more, have no entry. Tries again until that succeeds."""
        gone = np.sort(slots[self._on_disk[slots]])  # neighbours share pages
        for begin in range(0, len(gone), ERASED_AT_ONCE):
            await self._erase(gone[begin : begin + ERASED_AT_ONCE].tolist())

    async def _erase(self, slots: list[int]) -> None:
        while True:
            try:
                await self._save_entries(slots)
                break
            except OSError as error:  # else a restart would find again what was dropped
                self.breaker.failed(error)
            await asyncio.sleep(ERASE_AGAIN_S)
        # They may have been written to again.
        self._on_disk[slots] = np.frombuffer(self._disk.index.indexed, np.uint8)[slots] != 0

    async def discard(self) -> None:
        """Have the next start discard the file. Raises OSError."""
        await self._result(self._threads.start(self._io.discard))

    async def run(self) -> None:
        hot_s = time.monotonic() + HOT_EVERY_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, hot_s - time.monotonic())):
                    await self._wanted.wait()
            woken = self._wanted.is_set()
            self._wanted.clear()
            began_s = time.monotonic()
            left = self._ahead  # blocks until something changes: a full disk could be written to in a circle
            try:
                while woken and left > 0 and self._is_due() and (written := await self.step()):
                    left -= written
                    began_s = time.monotonic()
                if time.monotonic() >= hot_s:
                    hot_s = time.monotonic() + HOT_EVERY_S
                    await self.keep_hot()
            except Exception:  # a bug: the shard goes on, and `doctor --live` says what is wrong
                logger.exception("a batch could not be written to the disk tier")
            # A look that finds nothing takes as long as the shard is large.
            await asyncio.sleep(min(LONGEST_PAUSE_S, max(PAUSE_S, 20 * (time.monotonic() - began_s))))

    def _is_due(self) -> bool:
        counts = self._shard.pool.counts()
        return counts.free - counts.leased < counts.capacity * LOW_SHARE and not self.breaker.open

    async def keep_hot(self) -> int:
        """Write a batch of what several conversations have used, as far as the disk has room. Returns its blocks."""
        room = self._disk.blocks.capacity - self._disk.index.blocks
        return await self.step(self._hot, room) if room > 0 and not self.breaker.open else 0

    async def flush(self) -> None:
        """Write cached blocks that have no copy, as many as the disk has room for, prefixes that would go last first.

        `run` must have ended.
        """
        self._ahead, self._most_looked_at = self._shard.store.capacity_blocks, LAST_LOOKED_AT
        left = self._disk.blocks.capacity - int(self._copies.there(self._cached_ids()).sum())
        while left > 0 and not self.breaker.open:
            noted = self._noted  # a look may find nothing but copies that are there already
            written = await self.step(self._ends_last_first, left)
            if not (done := written + self._noted - noted):
                break
            left -= done

    async def step(self, which: Callable[[], list[int]] | None = None, most: int | None = None) -> int:
        """Write one batch of what `which` returns: by default what goes next. Returns how many blocks are on disk now.

        `most`: blocks of a batch; None: the usual number.
        """
        going = await self._threads.future(self._threads.start(which or self._going_next))
        await self._shard.settled()
        if which != self._hot:  # what has been taken again meanwhile does not go
            cached = self._shard.pool.cached_flags
            going = [block for block in going if cached[block]]
        parts = self._choose(going, self._most if most is None else min(most, self._most))
        try:
            return await self._write(parts) if parts else 0
        finally:
            await self._end(parts)

    # ---- what is written

    def _going_next(self) -> list[int]:
        """Cached blocks without a copy that are evicted next, the first one first. Runs beside changes: hints."""
        index = self._shard.index
        ids = self._cached_ids()
        ids = index.queue.next_ones(ids, index.depths(ids), self._ahead)
        going: list[int] = ids[~self._copies.there(ids)].tolist()
        return going

    def _hot(self) -> list[int]:
        """Blocks without a copy that several conversations have used, the most used first. Hints, as above."""
        index = self._shard.index
        ids = np.flatnonzero(np.frombuffer(index.indexed, np.uint8)).astype(np.int32)
        uses = index.queue.uses(ids)
        ids, uses = ids[uses >= HOT_USES], uses[uses >= HOT_USES]
        there = self._copies.there(ids)
        ids, uses = ids[~there], uses[~there]
        hot: list[int] = ids[np.lexsort((-index.depths(ids), -uses.astype(np.int32)))].tolist()
        return hot

    def _cached_ids(self) -> Ids:
        return np.flatnonzero(np.frombuffer(self._shard.pool.cached_flags, np.uint8)).astype(np.int32)

    def _ends_last_first(self) -> list[int]:
        """Of the blocks of `_going_next` those that no other one continues. Its last one comes first."""
        ids = np.array(self._going_next(), np.int32)
        ends: list[int] = ids[~np.isin(ids, self._shard.index.parents(ids))][::-1].tolist()
        return ends

    def _choose(self, going: list[int], room: int) -> list[_Part]:
        index = self._shard.index
        parts: list[_Part] = []
        seen: set[int] = set()
        begun: set[int] = set()
        for block in going:
            if room <= 0 or len(seen) >= self._most_looked_at:
                break
            if block in seen or not index.indexed[block]:
                continue
            lineage = index.chain_to(block)
            seen.update(lineage)
            part = self._begin(lineage, room, begun)
            if part is not None:
                parts.append(part)
                begun.update(part.block_ids)
                room -= len(part.slots)
        return parts

    def _begin(self, lineage: list[int], most: int, begun: set[int]) -> _Part | None:
        """Lease slots for the first blocks of a prefix that have no copy; None if there are none, or no slots."""
        disk, index = self._disk, self._shard.index
        chain = index.chain_of(lineage)
        found = disk.index.match(chain, len(lineage))
        self._noted += self._copies.note(lineage[: len(found)], found)
        new = lineage[len(found) :][:most]
        if not new or new[0] in begun:  # what it continues is being written: next time
            disk.index.queue.touch(found)
            return None
        part = _Part(chain, found)
        disk.retain(found, id(part))
        part.slots = disk.lease(len(new))
        part.block_ids = new[: len(part.slots)]
        part.generations = index.entries.generations[np.array(part.block_ids, np.int32)]
        if part.slots:
            return part
        disk.release(found, id(part), used=False)
        return None

    # ---- writing

    async def _write(self, parts: list[_Part]) -> int:
        slots = [slot for part in parts for slot in part.slots]
        try:
            # A process that is killed before the new entries are there leaves none for what is overwritten now.
            if old := [slot for slot in slots if self._on_disk[slot]]:
                await self._save_entries(old)
                self._on_disk[old] = False
            for part in parts:
                for begin, end in runs(part.slots, self._io.most):
                    work = functools.partial(self._io.write, part.slots[begin:end], part.block_ids[begin:end])
                    part.jobs.append(self._threads.start(work))
            for part in parts:
                for job in part.jobs:
                    sums = await self._result(job)
                    part.sums += sums
            self.breaker.succeeded()
            await self._shard.settled()
            saved = [slot for part in parts for slot in self._publish(part)]
            if saved:
                self._on_disk[saved] = True
                self.written_bytes += len(saved) * self._io.layout.slot_bytes
                await self._save_entries(saved)
        except OSError as error:
            self.breaker.failed(error)
            return 0
        return len(saved)

    def _publish(self, part: _Part) -> list[int]:
        """Index what was written of blocks that are still what they were. Returns their slots."""
        index, disk, first = self._shard.index, self._disk, len(part.found)
        same = index.entries.generations[np.array(part.block_ids, np.int32)] == part.generations
        for place, block in enumerate(part.block_ids if self._shard.verify else ()):
            if (own := index.checksums([block])) and own[0] != part.sums[place]:
                logger.error("block %d of %s is not what was written to it", block, self._shard.pool.store_id)
                same[place] = False
        count = len(same) if same.all() else int(same.argmin())
        if not count or disk.index.match(part.chain, first) != part.found:
            return []
        slots, block_ids = part.slots[:count], part.block_ids[:count]
        digests = bytes(part.chain.digests(first + count)[first * DIGEST_BYTES :])
        own_digests = (digests[at : at + DIGEST_BYTES] for at in range(0, count * DIGEST_BYTES, DIGEST_BYTES))
        disk.add(part.chain, part.found, slots, list(map(proof, part.sums, own_digests)))
        disk.index.queue.take_uses(slots, index.queue, block_ids)
        disk.index.queue.touch([*part.found, *slots])
        self._copies.note(block_ids, slots)
        part.slots = part.slots[count:]
        return slots

    async def _save_entries(self, slots: list[int]) -> None:
        """Write what these slots' entries are now. One after the other: older pages must not follow newer ones."""
        async with self._saving:
            pages = entry_pages(self._io.layout, self._disk.entries, slots)
            await self._result(self._threads.start(functools.partial(self._io.write_entries, pages)))

    async def _result(self, job: Future[Result]) -> Result:
        """The result of a job. If it hangs, writing is off, but it must end before its slots are used again."""
        result = self._threads.future(job)
        done, _ = await asyncio.wait({result}, timeout=HUNG_S)
        if not done:
            self.breaker.hung(f"a write has taken {HUNG_S:g} s")
        return await result

    async def _end(self, parts: list[_Part]) -> None:
        """Give back the slots that were not used, once nothing writes to them."""
        for part in parts:
            for job in part.jobs:
                if not job.cancel() and not job.done():
                    await asyncio.wait({self._threads.future(job)})
        await self._shard.settled()
        for part in parts:
            self._disk.give_back(part.slots)
            self._disk.release(part.found, id(part), used=False)
