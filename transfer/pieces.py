"""A copy as pieces: ranges that are contiguous on both sides, as byte offsets from block 0 of either store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from alignedserve.transfer.runs import Cut, IdArray, Run, merge_runs


@dataclass(frozen=True, slots=True)
class Pieces:
    """`sizes[i]` bytes from `sources[i]` to `destinations[i]`."""

    sources: IdArray
    destinations: IdArray
    sizes: IdArray

    def triples(self) -> Iterator[tuple[int, int, int]]:
        """Source, destination and size of each."""
        return zip(self.sources.tolist(), self.destinations.tolist(), self.sizes.tolist(), strict=True)

    def where(self, chosen: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Pieces:
        """The pieces for which the mask is True."""
        return Pieces(self.sources[chosen], self.destinations[chosen], self.sizes[chosen])

    def part(self, begin: int, end: int) -> Pieces:
        return Pieces(self.sources[begin:end], self.destinations[begin:end], self.sizes[begin:end])


def pieces_of(
    ids: tuple[IdArray, IdArray],
    cuts: tuple[Cut, Cut],
    block_bytes: tuple[int, int],
    piece_blocks: tuple[int | None, int | None] = (None, None),
) -> Pieces:
    """The fewest pieces that move `cuts` of the blocks `ids`, both as (source, destination).

    `piece_blocks`: no piece crosses a multiple of this number of blocks on that side.
    """
    if all(cut.rows == 1 and cut.width_bytes == size for cut, size in zip(cuts, block_bytes, strict=True)):
        runs = [piece for run in merge_runs(*ids) for piece in within_pieces(run, *piece_blocks)]
        table = np.array([(run.source, run.destination, run.count) for run in runs], dtype=np.int64).reshape(-1, 3)
        scale = np.array([block_bytes[0], block_bytes[1], block_bytes[0]], dtype=np.int64)
        sources, destinations, sizes = (table * scale).T
        return Pieces(sources, destinations, sizes)
    sources, destinations = (
        (side[:, None] * size + cut.begin_bytes + np.arange(cut.rows) * cut.stride_bytes).ravel()
        for side, cut, size in zip(ids, cuts, block_bytes, strict=True)
    )
    return Pieces(sources, destinations, np.full(sources.size, cuts[0].width_bytes, dtype=np.int64))


def within_pieces(run: Run, source_piece: int | None, destination_piece: int | None) -> Iterator[Run]:
    """`run`, split where either side crosses from one registered piece of host memory to the next."""
    done = 0
    while done < run.count:
        count = run.count - done
        for begin, piece in ((run.source, source_piece), (run.destination, destination_piece)):
            if piece is not None:
                count = min(count, piece - (begin + done) % piece)
        yield Run(run.source + done, run.destination + done, count)
        done += count
