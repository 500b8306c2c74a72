"""Memory bandwidth of one thread block alone, and of 2, 4 ... all multiprocessors together."""

from __future__ import annotations

import torch

from gpu_suite.rates import around, copy_rate
from gpu_suite.record import Context


def run(context: Context) -> None:
    with context.record.case("read by thread blocks", row="bandwidth"):
        from alignedserve.engine.profile.bandwidth import TILE, bandwidth_by_blocks, stream

        if not context.on_gpu:  # Triton's interpreter has no device clock: only the result is checked
            source = torch.rand(2 * TILE)
            found = stream(source, 2, TILE)
            difference = float((found - source.view(2, TILE).sum(1)).abs().max())
            context.record.figure("sums of two programs", difference, "off")
            return
        with around(lambda: copy_rate(context.device)) as rate:
            by_blocks = bandwidth_by_blocks(torch.device("cuda", 0))
        for count, bandwidth in sorted(by_blocks.items()):
            together = "alone" if count == 1 else "together"
            context.record.figure(f"{count} {together}", bandwidth / 1e9, "GB/s", row="bandwidth")
        context.record.figure("all, of the copy rate", max(by_blocks.values()) / rate.mean, "", detail=rate.detail())
