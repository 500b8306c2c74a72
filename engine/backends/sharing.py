"""Attention over blocks that several requests of a pass begin with: once for all of them (Hydragen, BatchLLM).

A pass is planned once, for all layers. The queries of a group's members are stacked against the keys of the shared
blocks, which every one of them sees completely. What is left of each request is a shorter request, over its other
blocks: attention knows no positions. The two results are merged by their log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from alignedserve.engine.backends.base import AttentionOptions
from alignedserve.engine.batch import DecodeTable, PackedBatch, Span, on_device
from alignedserve.engine.shared_prefixes import SharedGroup, find_groups


@dataclass(frozen=True, slots=True)
class SharedPass:
    """A pass, cut into what its groups share and what each request has alone.

    `rows`: packed positions (int64) of all members' tokens, group after group. `groups` counts its spans in `rows`;
    each spans's limit is its start, so that every row sees all keys. `spans` and `table` are those of the pass, without
    the shared blocks; `alone`: for each span, whether it is in no group.
    """

    rows: torch.Tensor
    groups: tuple[Span, ...]
    spans: tuple[Span, ...]
    alone: tuple[bool, ...]
    table: DecodeTable | None
    longest: int  # tokens that a request attends to at most

    def serves(self, options: AttentionOptions) -> bool:
        """Whether the layer may use it: a window that hides tokens would hide some of the shared ones."""
        return options.sliding_window is None or options.sliding_window >= self.longest


def share(batch: PackedBatch, cache: torch.Tensor, least_saved_bytes: float) -> SharedPass | None:
    """The plan of `batch`; None if no group saves reading `least_saved_bytes` of a layer of `cache`."""
    host = batch.host
    block_size = cache.shape[4]
    spans = [blocks[: span.start // block_size] for blocks, span in zip(host.spans, batch.spans, strict=True)]
    full = (host.lengths - 1) // block_size
    firsts = np.full(len(full) + len(spans), -1, dtype=np.int64)
    firsts[: len(full)] = np.where(full > 0, host.table[:, 0], -1) if len(full) else -1
    firsts[len(full) :] = [blocks[0] if len(blocks) else -1 for blocks in spans]

    def blocks_of(member: int) -> np.ndarray:
        return host.table[member, : full[member]] if member < len(full) else spans[member - len(full)]

    layer_block_bytes = cache.stride(1) * cache.itemsize
    groups = find_groups(firsts, blocks_of, least_saved_bytes / layer_block_bytes)
    return _cut(batch, groups, block_size, cache.device) if groups else None


def _cut(batch: PackedBatch, groups: list[SharedGroup], block_size: int, device: torch.device) -> SharedPass:
    host = batch.host
    decodes = len(host.lengths)
    lengths, table = host.lengths.copy(), host.table.copy()
    spans, alone = list(batch.spans), [True] * len(batch.spans)
    stacked: list[int] = []
    parts: list[Span] = []
    for group in groups:
        begin, tokens = len(stacked), group.blocks * block_size
        for member in group.members:
            if member < decodes:
                stacked.append(host.packed[member])
                lengths[member] -= tokens
                table[member, : table.shape[1] - group.blocks] = host.table[member, group.blocks :]
            else:
                span = spans[member - decodes]
                stacked += range(span.begin, span.end)
                rest = replace(span, start=span.start - tokens, blocks=span.blocks[group.blocks :])
                spans[member - decodes], alone[member - decodes] = rest, False
        blocks = _blocks_of(batch, group)
        parts.append(Span(begin, len(stacked), tokens, blocks, limit=tokens))
    width = int(-(-lengths.max() // block_size)) if decodes else 0
    rest_table = torch.from_numpy(np.ascontiguousarray(table[:, :width]))
    return SharedPass(
        rows=torch.tensor(stacked, dtype=torch.int64).to(device, non_blocking=True),
        groups=tuple(parts),
        spans=tuple(spans),
        alone=tuple(alone),
        table=on_device(torch.from_numpy(lengths), rest_table, device) if decodes else None,
        longest=max([span.kv_tokens for span in batch.spans] + [int(host.lengths.max()) if decodes else 0]),
    )


def _blocks_of(batch: PackedBatch, group: SharedGroup) -> torch.Tensor:
    """The shared blocks, int64 on the device."""
    first, decodes = group.members[0], len(batch.host.lengths)
    if first >= decodes:
        return batch.spans[first - decodes].blocks[: group.blocks]
    assert batch.decode is not None
    return batch.decode.table.block_table[first, : group.blocks].long()
