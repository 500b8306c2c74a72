"""How many iterations may pass at a decode instance before its next plan could decide anything, and their passing.

A plan that decided nothing, asked again with the same candidates and less room, decides nothing again: as long as
nobody comes, goes, ends or becomes overdue, a batch only grows. So iterations up to the next eviction can be counted
instead of planned. What is counted is conservative: in doubt, the caller plans.
"""

from __future__ import annotations

from alignedserve.config import DecodeConfig
from alignedserve.scheduler.instance.running_batch import RunningBatch, RunningRequest


def count_quiet(batch: RunningBatch, config: DecodeConfig, most: int) -> int:
    """Iterations, at most `most`, of which the batch can grow through without an eviction or a request that waits."""
    running = batch.running
    if len(running) > config.max_running:
        return 0
    growth = _growth(batch, most)
    available = batch.allocator.available_blocks
    spare = available
    if len(running) > 1:  # one alone is never evicted
        spare = min(available, available + batch.leaving_blocks() - (config.watermark_blocks or batch.size))
    taken = 0
    for iteration, blocks in enumerate(growth):
        taken += blocks
        if taken > spare:
            return max(0, iteration - 1)
    return most


def count_blocked(batch: RunningBatch, config: DecodeConfig, due_s: float, most: int) -> int:
    """Iterations, at most `most`, in which candidates that have just found no room find none.

    Room shrinks as long as every request can still grow past all that a join looks ahead to. An overdue candidate may
    have others evicted once they have run for `join_iterations`, but for those that were overdue and due before it.
    `due_s`: when the first of the overdue candidates is due; infinite where there is none.
    """
    for member in batch.present():
        most = min(most, member.max_total_tokens - member.kv_tokens - config.join_iterations - batch.block_size)
        if due_s < member.candidate.due_s:
            most = min(most, config.join_iterations - member.iterations - 1)
    return max(0, most)


def pass_iterations(batch: RunningBatch, iterations: int) -> None:
    """Every running request has grown by `iterations` tokens, and has a block for the next one.

    Blocks are taken in the order in which plans would have taken them. The caller has counted that there are enough.
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
    """Blocks that running requests take in the plan of now (0, but for those it could not cover) and in each after."""
    size = batch.block_size
    first = [0] * (most + 1)
    for member in batch.running.values():
        at = len(member.block_ids) * size - member.kv_tokens
        if at <= most:
            first[max(0, at)] += 1
    for at in range(size, most + 1):
        first[at] += first[at - size]
    return first
