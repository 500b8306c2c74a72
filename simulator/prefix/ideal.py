"""What a prefix cache of endless size, shared by all nodes, would find of a workload's prompts."""

from __future__ import annotations

from alignedserve.simulator.workload import Workload


def ideal_hit_tokens(workload: Workload, *, answers: bool = True) -> int:
    """Tokens, if each request were over before the next one arrives. `answers`: what was generated is kept, too.

    The last token of a prompt is always computed.
    """
    size, found = workload.block_tokens, 0
    if not size:
        return 0
    seen: set[int] = set()
    for arrival in workload.arrivals:
        blocks = arrival.blocks[: arrival.input_tokens // size]
        hits = next((n for n, block in enumerate(blocks) if block not in seen), len(blocks))
        found += min(hits * size, arrival.input_tokens - 1)
        seen.update(blocks)
        if answers:
            kv_tokens = arrival.input_tokens + arrival.output_tokens - 1
            seen.update(arrival.answer_blocks[: kv_tokens // size - len(blocks)])
    return found
