"""The prompts of a whole workload, grouped by prefix before the first of them arrives (BatchLLM)."""

from __future__ import annotations

from alignedserve.prefix_groups import prefix_groups
from alignedserve.simulator.workload import Workload

ID_BYTES = 8


def group_by_prefix(workload: Workload) -> dict[str, tuple[int, int]]:
    """By request: the turn of its group, and the tokens that the prompts of the group share.

    Groups with the fewest tokens to compute go first. Without names of blocks each prompt is a group of its own.
    """
    arrivals, size = workload.arrivals, workload.block_tokens or 1
    named = (arrival.blocks[: arrival.input_tokens // size] for arrival in arrivals)
    prompts = [b"".join(block.to_bytes(ID_BYTES, "big", signed=True) for block in blocks) for blocks in named]
    lengths = [arrival.input_tokens for arrival in arrivals]
    sizes = []
    for group in prefix_groups(prompts, ID_BYTES):
        shared = min(group.prefix * size, min(lengths[member] for member in group.members) - 1)
        work = shared + sum(lengths[member] - shared for member in group.members)
        sizes.append((work, group.members[0], shared, group.members))
    return {
        arrivals[member].request_id: (turn, shared)
        for turn, (_, _, shared, members) in enumerate(sorted(sizes))
        for member in members
    }
