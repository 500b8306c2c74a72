"""How many iterations a decode instance may run before its next plan could decide anything, and skipping them.

A plan that decided nothing decides nothing again with the same candidates and less room. While no request joins,
leaves, ends or becomes overdue, a batch only grows. So iterations up to the next eviction can be counted instead of
planned. The count is conservative: in doubt, the caller plans.
"""

from __future__ import annotations

from alignedserve.config import DecodeConfig
from alignedserve.scheduler.instance.running_batch import RunningBatch, RunningRequest


def count_quiet(batch: RunningBatch, config: DecodeConfig, most: int) -> int:
    """Iterations, at most `most`, that the batch can grow through without an eviction or a stalled request."""
    running = batch.running
    growth = _growth(batch, most)
    available = batch.allocator.available_blocks
    spare = available
    if len(running) > 1:  # a single request is never evicted
        spare = min(available, available + batch.leaving_blocks() - (config.watermark_blocks or batch.size))
    taken = 0
    for iteration, blocks in enumerate(growth):
        taken += blocks
        if taken > spare:
            return max(0, iteration - 1)
    return most


def count_blocked(batch: RunningBatch, config: DecodeConfig, due_s: float, most: int) -> int:
    """Iterations, at most `most`, during which candidates that have just found no room continue to find none.

    Room shrinks as long as every request can still grow beyond what a join looks ahead to. An overdue candidate may
    evict others once they have run for `join_iterations`, except those that were overdue and due before it. `due_s`:
    the earliest deadline of the overdue candidates; infinite if there is none.
    """
    for member in batch.present():
        most = min(most, member.max_total_tokens - member.kv_tokens - config.join_iterations - batch.block_size)
        if due_s < member.candidate.due_s:
            most = min(most, config.join_iterations - member.iterations - 1)
    return max(0, most)


def pass_iterations(batch: RunningBatch, iterations: int) -> None:
    """Let every running request grow by `iterations` tokens, with a block for the next one.

    Blocks are taken in the order in which plans would have taken them. The caller has checked that there are enough.
    """
    size = batch.block_size
    crossings: list[tuple[int, int, RunningRequest]] = []
    for place, member in enumerate(batch.running.values()):
        first = len(member.block_ids) * size - member.kv_tokens
        member.kv_tokens += iterations
        member.iterations += iterations
        if first <= iterations:
            crossings += [(at, place, member) for at in range(max(1, first), iterations + 1, size)]
    if not crossings:
        return
    crossings.sort(key=_order)
    for _, _, member in crossings:
        batch.take_block(member)


def _order(crossing: tuple[int, int, RunningRequest]) -> tuple[int, int]:
    return crossing[:2]


def _growth(batch: RunningBatch, most: int) -> list[int]:
    """Blocks that running requests take in the current plan (0, unless some are uncovered) and in each later one."""
    size = batch.block_size
    first = [0] * (most + 1)
    for member in batch.running.values():
        at = len(member.block_ids) * size - member.kv_tokens
        if at <= most:
            first[max(0, at)] += 1
    for at in range(size, most + 1):
        first[at] += first[at - size]
    return first
