"""The channel between two stores in the memory of one host: plain copies that release the interpreter lock.

Each such copy must get the lock back afterwards, which takes up to 5 ms while another thread computes in Python. So
long runs are copied one by one, and short ones many at a time: gathered in a buffer that stays in the processor's
cache, and scattered from there.
"""

from __future__ import annotations

import numpy as np

from alignedserve.geometry import StoreSlice
from alignedserve.transfer.block_store import ByteArray, HostBlockStore
from alignedserve.transfer.channel import MAX_PENDING_COPIES, Copy, QueuedChannel, cancelled
from alignedserve.transfer.runs import Cut, IdArray, Run, paired_cuts, split_runs

LONG_RUN_BYTES = 256 << 10
GATHER_BYTES = 1 << 20
PIECE_BYTES = 64 << 20  # a long copy checks for cancellation after each piece


class HostChannel(QueuedChannel):
    """Between two host stores of one node, shared or private."""

    def __init__(
        self, source: HostBlockStore, destination: HostBlockStore, *, max_pending: int = MAX_PENDING_COPIES
    ) -> None:
        self._views: dict[StoreSlice, tuple[ByteArray, ByteArray]] = {}
        # Own views keep the memory mapped until the last copy has ended, even if the stores are closed.
        self._source_blocks, self._destination_blocks = source.blocks, destination.blocks
        self._gathered = np.empty(0, np.uint8)
        super().__init__(source, destination, max_pending=max_pending)

    @property
    def name(self) -> str:
        return "shared-memory"

    def _begin(self, copy: Copy) -> None:
        source, destination = self._cut_views(copy.part)
        shortest = -(-LONG_RUN_BYTES // source[0].nbytes)
        runs, (wanted, target) = split_runs(copy.source_ids, copy.destination_ids, shortest)
        for run in runs:
            self._copy_run(copy, source, destination, run)
        self._copy_scattered(copy, source, destination, wanted, target)

    def _end(self, copy: Copy, begun: None) -> None:
        """Does nothing: `_begin` has completed the copy."""

    def _cut_views(self, part: StoreSlice) -> tuple[ByteArray, ByteArray]:
        """`part` of every block of both stores, uint8, equal in shape except for the first dimension."""
        if part not in self._views:
            cuts = paired_cuts(self.source, self.destination, part)
            self._views[part] = cut_view(self._source_blocks, cuts[0]), cut_view(self._destination_blocks, cuts[1])
        return self._views[part]

    def _copy_run(self, copy: Copy, source: ByteArray, destination: ByteArray, run: Run) -> None:
        step = max(1, PIECE_BYTES // source[0].nbytes)
        for done in range(0, run.count, step):
            _require_wanted(copy)
            count = min(step, run.count - done)
            target, wanted = run.destination + done, run.source + done
            np.copyto(destination[target : target + count], source[wanted : wanted + count])

    def _copy_scattered(
        self, copy: Copy, source: ByteArray, destination: ByteArray, source_ids: IdArray, destination_ids: IdArray
    ) -> None:
        step = max(1, GATHER_BYTES // source[0].nbytes)
        for done in range(0, source_ids.size, step):
            _require_wanted(copy)
            wanted, target = source_ids[done : done + step], destination_ids[done : done + step]
            if source.flags.c_contiguous:
                needed = wanted.size * source[0].nbytes
                if self._gathered.size < needed:
                    self._gathered = np.empty(needed, np.uint8)
                gathered = self._gathered[:needed].reshape(wanted.size, *source.shape[1:])
                # The ids were checked; "raise" would make numpy gather into a second buffer first.
                np.take(source, wanted, axis=0, out=gathered, mode="clip")
                destination[target] = gathered
            else:
                destination[target] = source[wanted]


def cut_view(blocks: ByteArray, cut: Cut) -> ByteArray:
    """`[capacity, width]`, or `[capacity, rows, width]` if the rows of the cut are not contiguous."""
    if cut.rows == 1:
        return blocks[:, cut.begin_bytes : cut.begin_bytes + cut.width_bytes]
    first = blocks[:, cut.begin_bytes :]
    return np.lib.stride_tricks.as_strided(
        first, (blocks.shape[0], cut.rows, cut.width_bytes), (blocks.strides[0], cut.stride_bytes, 1)
    )


def _require_wanted(copy: Copy) -> None:
    if copy.completion.cancelled:
        raise cancelled(copy)
