"""Reads blocks from disk into the shard before a prompt that needs them is computed.

The slots that continue what the shard has of a prompt are read into leased blocks, checked, and cached as if a writer
had written them. Prompts that need the same slots wait for one read. Whatever goes wrong or takes too long costs a
miss: the prompt goes on with what is there.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from alignedserve.cancellation import end_tasks
from alignedserve.kv_pool.disk.breaker import Breaker
from alignedserve.kv_pool.disk.layout import runs
from alignedserve.kv_pool.disk.shard import DISK, Shard
from alignedserve.kv_pool.disk.slot_io import SlotIo
from alignedserve.kv_pool.disk.slots import Copies, DiskSlots
from alignedserve.kv_pool.disk.threads import DiskThreads
from alignedserve.kv_pool.prefix_chain import DIGEST_BYTES, Chain
from alignedserve.kv_pool.removal import remove_found
from alignedserve.scheduler.cost.step import ChunkShape

logger = logging.getLogger(__name__)

MOST_WAIT_S = 10.0  # of a prompt for the disk
LEAST_WAIT_S = 1.0  # a read that was predicted to be quick may take so long
SLOWER = 4.0  # a read is given up if it takes so many times as long as predicted
HUNG_S = 1.0  # a call that has taken so long when its read is given up hangs
PUBLISHED_BYTES = 256 << 20  # blocks are cached in steps of so many bytes
MEASURED_BYTES = 1 << 20  # a shorter read says nothing about the bandwidth


@dataclass(frozen=True, slots=True)
class Coming:
    """The slots that continue the blocks `found` of the shard, for a prompt, and those with what `found` has."""

    root: bytes
    token_ids: Sequence[int]
    chain: Chain
    found: list[int]
    behind: list[int]
    slots: list[int]


@dataclass(slots=True)
class _Piece:
    """A call that reads adjacent slots into leased blocks: numbers `begin .. end - 1` of the read."""

    begin: int
    end: int
    job: Future[list[int]]
    begun_s: list[float]  # when the call began: empty before


class Promotion:
    """For one event loop."""

    def __init__(
        self,
        shard: Shard,
        disk: DiskSlots,
        copies: Copies,
        slot_io: SlotIo,
        breaker: Breaker,
        threads: DiskThreads,
        clock: Callable[[], float],
    ) -> None:
        self.breaker = breaker
        self.read_bytes = 0
        self.rejected_blocks = 0  # blocks that were not what their entries say
        self.given_up = 0  # reads that took too long
        self.declined = 0  # reads that were predicted to take longer than computing
        self._shard, self._disk, self._copies, self._io = shard, disk, copies, slot_io
        self._clock = clock
        self._threads = threads
        self._reading: dict[int, asyncio.Task[None]] = {}  # by slot
        self._tasks: set[asyncio.Task[None]] = set()
        self._outstanding_bytes = 0
        self._bytes_per_s = 0.0  # as measured; 0: not yet
        self._hanging = 0  # calls that were given up and have not ended: their blocks stay leased

    async def close(self) -> bool:
        """End all reads. Returns whether no call is under way, after waiting a little."""
        await end_tasks(self._tasks)
        self._threads.close()
        idle = await self._threads.ended()
        await end_tasks(self._tasks)  # those that were waiting for calls
        return idle

    def coming(self, root: bytes, token_ids: Sequence[int], most_tokens: int) -> Coming | None:
        """What is on disk beyond what the shard has of a prompt, without its last token.

        None if that is nothing, or if reading it would take longer than computing it. Raises TransferError if `root` is
        not a digest.
        """
        if self.breaker.open or self._hanging:
            return None
        index = self._shard.index
        chain = index.chain(root, token_ids)
        most = min(most_tokens, len(token_ids) - 1) // index.block_size
        found = index.match(chain, most)
        if len(found) == most:
            return None
        slots = self._disk.index.match(chain, most)
        missing = len(slots) - len(found)
        if missing <= 0 or not self._pays(len(found), missing):
            return None
        return Coming(root, token_ids, chain, found, slots[: len(found)], slots[len(found) :])

    async def promote(self, root: bytes, token_ids: Sequence[int], most_tokens: int) -> None:
        """Have the shard cache what there is on disk of a prompt, as far as that is worth waiting for."""
        until = self._clock() + MOST_WAIT_S
        reached = -1
        while (coming := self.coming(root, token_ids, most_tokens)) is not None and len(coming.found) > reached:
            reached = len(coming.found)
            task = self._reading.get(coming.slots[0]) or self.begin(coming)
            if task is None or (left := until - self._clock()) <= 0:
                return
            await asyncio.wait({task}, timeout=left)
            await self._shard.settled()

    def is_read(self, coming: Coming) -> bool:
        """Whether the first of the slots is being read."""
        return coming.slots[0] in self._reading

    def begin(self, coming: Coming) -> asyncio.Task[None] | None:
        """Begin to read; None if the shard has no room, or if the first of the slots is being read."""
        slots = list(coming.slots)
        for place, slot in enumerate(slots):
            if slot in self._reading:
                del slots[place:]
                break
        block_ids = self._shard.pool.lease_now(DISK, len(slots), coming.found)
        del slots[len(block_ids) :]
        if not slots:
            return None
        self._disk.retain([*coming.behind, *slots], ("read", slots[0]))
        self._outstanding_bytes += len(slots) * self._io.layout.slot_bytes
        task = asyncio.get_running_loop().create_task(self._read(coming, slots, sorted(block_ids)))
        self._keep(task)
        self._reading.update(dict.fromkeys(slots, task))
        return task

    # ---- is it worth it

    def _pays(self, first_block: int, blocks: int) -> bool:
        cost, size = self._shard.cost, self._shard.index.block_size
        if cost is None or not self._bytes_per_s:
            return True
        pays = self._predicted_s(blocks) < cost.step_s([ChunkShape(blocks * size, first_block * size)], ())
        self.declined += not pays
        return pays

    def _predicted_s(self, blocks: int) -> float:
        size = self._outstanding_bytes + blocks * self._io.layout.slot_bytes
        return size / self._bytes_per_s

    @property
    def ready_s(self) -> float:
        """Predicted time until all reads that have begun have ended, as far as a prompt waits for them.

        0 while the disk's speed is not known.
        """
        return min(MOST_WAIT_S, self._predicted_s(0)) if self._bytes_per_s else 0.0

    # ---- reading

    async def _read(self, coming: Coming, slots: list[int], block_ids: list[int]) -> None:
        """Read `slots` into `block_ids`, and have them cached. Ends when it is given up, too."""
        begun_s = self._clock()
        size = len(slots) * self._io.layout.slot_bytes
        longest = MOST_WAIT_S
        if self._bytes_per_s:
            longest = min(longest, max(LEAST_WAIT_S, SLOWER * self._predicted_s(0)))
        pieces = self._start(coming, slots, block_ids)
        done = 0
        try:
            done = await self._publish_as_read(coming, slots, block_ids, pieces, begun_s + longest)
        finally:
            self._outstanding_bytes -= size
            await self._shard.settled()
            for slot in slots:
                del self._reading[slot]
            self._disk.release([*coming.behind, *slots], ("read", slots[0]), used=done > 0)
            self._give_back(pieces, block_ids, done)
        if done == len(slots):
            self.breaker.succeeded()
            if size >= MEASURED_BYTES and (took_s := self._clock() - begun_s) > 0:
                rate = size / took_s
                self._bytes_per_s = 0.7 * self._bytes_per_s + 0.3 * rate if self._bytes_per_s else rate

    def _start(self, coming: Coming, slots: list[int], block_ids: list[int]) -> list[_Piece]:
        first, proofs = len(coming.found), self._disk.proofs(slots)
        digests = bytes(coming.chain.digests(first + len(slots))[first * DIGEST_BYTES :])
        pieces = []
        for begin, end in runs(slots, self._io.most):
            its_digests = digests[begin * DIGEST_BYTES : end * DIGEST_BYTES]
            read = functools.partial(
                self._io.read, slots[begin:end], block_ids[begin:end], its_digests, proofs[begin:end]
            )
            begun_s: list[float] = []
            job = self._threads.start(functools.partial(self._timed, read, begun_s))
            pieces.append(_Piece(begin, end, job, begun_s))
        return pieces

    def _timed(self, read: Callable[[], list[int]], begun_s: list[float]) -> list[int]:
        begun_s.append(self._clock())
        return read()

    async def _publish_as_read(
        self, coming: Coming, slots: list[int], block_ids: list[int], pieces: list[_Piece], until_s: float
    ) -> int:
        """Cache blocks in their order as they are read. Returns how many of the first are done with."""
        done, sums = 0, list[int]()
        step = max(1, PUBLISHED_BYTES // self._io.layout.slot_bytes)
        for piece in pieces:
            right = await self._result(piece, until_s)
            await self._shard.settled()
            sums += right or ()
            whole = right is not None and len(right) == piece.end - piece.begin
            if right is not None and not whole:
                await self._forget(slots[len(sums)])
            if len(sums) > done and (not whole or piece.end == len(slots) or len(sums) - done >= step):
                goes_on = self._publish(coming, slots, block_ids, done, sums)
                done = len(sums)
                if not goes_on:  # what it continues has gone
                    break
            if not whole:
                break
        return done

    async def _forget(self, slot: int) -> None:
        """What this slot holds is wrong: it goes with all that continues it."""
        index = self._disk.index
        async with self._shard.alone():
            if index.indexed[slot]:
                await remove_found(len(index.indexed), functools.partial(index.continued_by, slot), self._disk.remove)

    async def _result(self, piece: _Piece, until_s: float) -> list[int] | None:
        """The checksums of the blocks that a piece has read, up to the first that is wrong. Counts faults.

        None: it takes too long.
        """
        result = self._threads.future(piece.job)
        done, _ = await asyncio.wait({result}, timeout=max(0.0, until_s - self._clock()))
        if not done:
            self.given_up += 1
            if piece.begun_s and self._clock() - piece.begun_s[0] >= HUNG_S:
                self.breaker.hung("a read does not end")
            else:
                self.breaker.failed("reading takes too long")
            return None
        try:
            right = result.result()
        except OSError as error:
            self.breaker.failed(error)
            return []
        self.read_bytes += len(right) * self._io.layout.slot_bytes
        if len(right) < piece.end - piece.begin:
            self.rejected_blocks += 1
            self.breaker.failed("a block is not what was written")
        return right

    def _publish(self, coming: Coming, slots: list[int], block_ids: list[int], begin: int, sums: list[int]) -> bool:
        """Cache the blocks from number `begin` of the read on whose checksums are there; the others are given back.

        Returns whether blocks that continue them can be cached.
        """
        pool, index, end = self._shard.pool, self._shard.index, len(sums)
        new, first = block_ids[begin:end], len(coming.found) + begin
        # What was forgotten by an order while it was read must not come back.
        there = self._disk.index.leading(slots[begin:end])
        end = begin + len(there)
        verified = sums[begin:end] if self._shard.verify else ()
        kept, grants = pool.cache(DISK, coming.root, coming.token_ids, new[: len(there)], first, verified)
        self._shard.deliver(grants)
        mine = set(kept)
        if pairs := [(block, slot) for block, slot in zip(new, there, strict=False) if block in mine]:
            ours, theirs = [block for block, _ in pairs], [slot for _, slot in pairs]
            self._copies.note(ours, theirs)
            self._copies.promoted(ours)
            index.queue.take_uses(ours, self._disk.index.queue, theirs)
        if rest := [block for block in new if block not in mine]:
            self._return(rest)
        last = first + len(new)
        return len(index.match(coming.chain, last)) == last

    # ---- afterwards

    def _give_back(self, pieces: list[_Piece], block_ids: list[int], done: int) -> None:
        """Give back the blocks from number `done` on, each as soon as nothing writes to it."""
        for piece in pieces:
            if left := block_ids[max(done, piece.begin) : piece.end]:
                if piece.job.cancel() or piece.job.done():
                    self._return(left)
                else:
                    self._hanging += 1
                    self._keep(asyncio.get_running_loop().create_task(self._return_later(piece.job, left)))

    async def _return_later(self, job: Future[list[int]], block_ids: list[int]) -> None:
        await asyncio.wait({self._threads.future(job)})
        await self._shard.settled()
        self._hanging -= 1
        self._return(block_ids)

    def _return(self, block_ids: Sequence[int]) -> None:
        self._shard.deliver(self._shard.pool.give_back(DISK, block_ids))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a read of the disk tier has ended: %s", error, exc_info=error)
