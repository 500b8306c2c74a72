"""What the driver rank tells the others before each pass: the items, as one array of integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np
import numpy.typing as npt

from alignedserve.engine.batch import ForwardItem, LogitRows

_LOGITS: tuple[LogitRows, ...] = get_args(LogitRows)
_HEAD = 5  # of an item: new tokens, start, blocks, which logits, and its rank

Words = npt.NDArray[np.int64]


def to_words(items: Sequence[ForwardItem]) -> Words:
    """int64: the number of items, five words for each, all token ids, all block ids."""
    heads = [
        (len(item.token_ids), item.start, len(item.block_ids), _LOGITS.index(item.logits), item.rank) for item in items
    ]
    parts = [[len(items)], *heads, *(item.token_ids for item in items), *(item.block_ids for item in items)]
    return np.concatenate([np.asarray(part, np.int64) for part in parts])


def from_words(words: Words) -> list[ForwardItem]:
    count = int(words[0])
    heads = words[1 : 1 + _HEAD * count].reshape(count, _HEAD)
    tokens_at = 1 + _HEAD * count
    blocks_at = tokens_at + int(heads[:, 0].sum())
    values = words.tolist()
    items = []
    for tokens, start, blocks, logits, rank in heads.tolist():
        own, its_blocks = values[tokens_at : tokens_at + tokens], values[blocks_at : blocks_at + blocks]
        items.append(ForwardItem(own, start, its_blocks, _LOGITS[logits], rank))
        tokens_at, blocks_at = tokens_at + tokens, blocks_at + blocks
    return items
