"""Which blocks the answers of a trace are in, where it names only those of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from alignedserve.simulator.traces.trace import Row


def with_answers(rows: Sequence[Row], block_tokens: int) -> tuple[tuple[Row, ...], int]:
    """Rows in order of arrival with `answer_blocks`, and how many answers a later prompt goes on from.

    If every prompt that goes on after the full blocks of a prompt does so with the same block, and came later, that
    block is taken to hold the answer: it is the next turn. Blocks that no prompt goes on with get negative ids.
    """
    following: dict[int, set[int]] = {}  # block -> the full blocks that come next
    first: dict[int, int] = {}  # block -> the first row that has it
    for number, row in enumerate(rows):
        own = row.blocks[: row.input_tokens // block_tokens]
        for block, after in pairwise(own):
            following.setdefault(block, set()).add(after)
        for block in own:
            first.setdefault(block, number)
    found, continued, fresh = [], 0, 0
    for number, row in enumerate(rows):
        whole = row.input_tokens // block_tokens
        missing = (row.input_tokens + row.output_tokens - 1) // block_tokens - whole
        if len(row.blocks) < max(whole, 1) or missing <= 0:  # ids are missing: where its answer begins has none either
            found.append(row)
            continue
        blocks: list[int] = []
        last = row.blocks[whole - 1] if whole else None
        while last is not None and len(blocks) < missing:
            nexts = list(following.get(last, ()))
            last = nexts[0] if len(nexts) == 1 else None
            if last is None or first[last] <= number or last in blocks:  # ids that follow each other in a circle
                break
            blocks.append(last)
        continued += bool(blocks)
        while len(blocks) < missing:
            fresh -= 1
            blocks.append(fresh)
        found.append(replace(row, answer_blocks=tuple(blocks)))
    return tuple(found), continued
