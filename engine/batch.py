"""The inputs of one forward pass: packed tokens of several requests, and the places of their keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np
import torch

from alignedserve.errors import AccountingError

LogitRows = Literal["last", "all", "none"]


@dataclass(slots=True)
class ForwardItem:
    """One request's part of a forward pass.

    `token_ids` are new tokens at positions `start .. start + len(token_ids) - 1`; `start` tokens are already cached.
    `block_ids` cover all of them, `block_size` tokens each. `logits`: the new tokens whose logits the caller wants.
    `rank`: which of the ranks that share experts computes it.
    """

    token_ids: list[int]
    start: int
    block_ids: list[int]
    logits: LogitRows = "last"
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """A prefill chunk inside the packed batch: rows `begin .. end - 1`, after `start` cached tokens.

    `blocks` are the ids of the blocks that hold its `start + end - begin` tokens (int64, on the cache's device).
    `limit`: if given, no row sees a key from this position on, and `blocks` end there.
    """

    begin: int
    end: int
    start: int
    blocks: torch.Tensor
    limit: int | None = None

    @property
    def query_tokens(self) -> int:
        return self.end - self.begin

    @property
    def kv_tokens(self) -> int:
        return self.start + self.end - self.begin


@dataclass(frozen=True, slots=True)
class DecodeTable:
    """Rows with one new token each, and the blocks of each.

    If a pass is captured in a CUDA graph, the contents of the tensors change from one replay to the next; their
    addresses and shapes do not. A row of length 0 is padding: nothing is written for it, and its output is finite and
    unused.
    """

    lengths: torch.Tensor  # int32 [rows] tokens attended to, including the new one; 0: padding
    block_table: torch.Tensor  # int32 [rows, width] block ids; arbitrary after those that the length covers


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The rows of a packed batch that have one new token each, none of them padding.

    `rows` is None if every packed token is such a row, in order.
    """

    rows: torch.Tensor | None  # int64 [rows] packed positions
    table: DecodeTable


@dataclass(frozen=True, slots=True)
class HostTables:
    """The block tables of a batch in the host's memory, from which passes are planned."""

    spans: tuple[np.ndarray, ...]  # int64 blocks of each span
    packed: list[int]  # packed position of each decode row
    lengths: np.ndarray  # int32 [rows] of the decode table
    table: np.ndarray  # int32 [rows, width] 0 after those that the length covers


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Packed inputs of one forward pass, built once and shared by all layers."""

    input_ids: torch.Tensor  # [1, tokens]
    position_ids: torch.Tensor  # [1, tokens]
    logit_rows: torch.Tensor  # [logit rows] packed positions whose logits are computed
    slot_block: torch.Tensor  # [tokens] block of each new token's KV
    slot_offset: torch.Tensor  # [tokens] and its place inside the block
    spans: tuple[Span, ...]
    decode: DecodeRows | None
    host: HostTables

    @property
    def tokens(self) -> int:
        return self.input_ids.shape[1]


def build_batch(items: Sequence[ForwardItem], block_size: int, num_blocks: int, device: torch.device) -> PackedBatch:
    """Pack `items` in order. Raises AccountingError if an item's blocks do not cover its tokens or do not exist."""
    token_ids: list[int] = []
    positions: list[int] = []
    slot_block: list[int] = []
    logit_rows: list[int] = []
    spans: list[Span] = []
    span_blocks: list[np.ndarray] = []
    single: list[tuple[int, ForwardItem]] = []
    for item in items:
        begin, count, start = len(token_ids), len(item.token_ids), item.start
        _check_item(item, block_size)
        token_ids += item.token_ids
        if count == 1:
            positions.append(start)
            slot_block.append(item.block_ids[start // block_size])
            single.append((begin, item))
        else:
            positions += range(start, start + count)
            slot_block += [item.block_ids[position // block_size] for position in range(start, start + count)]
            used = -(-(start + count) // block_size)
            blocks = _block_tensor(item.block_ids[:used], num_blocks)
            span_blocks.append(blocks.numpy())
            spans.append(Span(begin, begin + count, start, blocks.to(device, non_blocking=True)))
        if item.logits == "last":
            logit_rows.append(begin + count - 1)
        elif item.logits == "all":
            logit_rows += range(begin, begin + count)
    offsets = [position % block_size for position in positions]
    packed = torch.tensor([token_ids, positions, slot_block, offsets], dtype=torch.int64).to(device, non_blocking=True)
    lengths, table = _decode_table(single, block_size, num_blocks)
    host = HostTables(tuple(span_blocks), [row for row, _ in single], lengths.numpy(), table.numpy())
    return PackedBatch(
        input_ids=packed[0:1],
        position_ids=packed[1:2],
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64).to(device, non_blocking=True),
        slot_block=packed[2],
        slot_offset=packed[3],
        spans=tuple(spans),
        decode=DecodeRows(_packed_rows(host.packed, device) if spans else None, on_device(lengths, table, device))
        if single
        else None,
        host=host,
    )


def on_device(lengths: torch.Tensor, table: torch.Tensor, device: torch.device) -> DecodeTable:
    """The table on `device`, in one transfer. `lengths` and `table`: int32 on the CPU."""
    if device.type == "cpu":
        return DecodeTable(lengths, table)
    packed = torch.cat((lengths, table.flatten())).to(device, non_blocking=True)
    return DecodeTable(packed[: len(lengths)], packed[len(lengths) :].view(table.shape))


def _check_item(item: ForwardItem, block_size: int) -> None:
    if not item.token_ids:
        raise AccountingError("an item of a forward pass has no tokens")
    needed = -(-(item.start + len(item.token_ids)) // block_size)
    if len(item.block_ids) < needed:
        raise AccountingError(
            f"{len(item.block_ids)} blocks of {block_size} do not cover {item.start + len(item.token_ids)} tokens"
        )


def _block_tensor(block_ids: list[int], num_blocks: int) -> torch.Tensor:
    """`block_ids` as int64 on the CPU, all checked, since a kernel would read or write outside the store."""
    blocks = torch.tensor(block_ids, dtype=torch.int64)
    low, high = blocks.aminmax()
    if int(low) < 0 or int(high) >= num_blocks:
        raise AccountingError(f"a block id is outside this store of {num_blocks} blocks")
    return blocks


def _packed_rows(rows: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)


def _decode_table(
    single: list[tuple[int, ForwardItem]], block_size: int, num_blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lengths `[rows]` and block ids `[rows, width]`, both int32."""
    if not single:
        return torch.empty(0, dtype=torch.int32), torch.empty(0, 0, dtype=torch.int32)
    lengths = [item.start + 1 for _, item in single]
    counts = [-(-length // block_size) for length in lengths]
    ids = list(chain.from_iterable(item.block_ids[:n] for (_, item), n in zip(single, counts, strict=True)))
    blocks = _block_tensor(ids, num_blocks)
    width = max(counts)
    covered = torch.arange(width) < torch.tensor(counts)[:, None]
    table = torch.zeros(len(single), width, dtype=torch.int32)
    table.masked_scatter_(covered, blocks.to(torch.int32))
    return torch.tensor(lengths, dtype=torch.int32), table
