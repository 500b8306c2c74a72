"""A script of a fake cluster that waits every few tokens, so that a connection can be cut at known places."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from alignedserve.request import FinishReason, RequestSpec, TokenLogprobs
from support.fake_cluster import FakeCluster

STEPS = 3


class Pauses:
    """A script: these tokens with a log-probability each, one at a time. `gate` closes after every `steps` tokens."""

    def __init__(self, tokens: Sequence[int], finish: FinishReason = FinishReason.STOP, steps: int = STEPS) -> None:
        self.tokens = list(tokens)
        self.finish = finish
        self.steps = steps
        self.gate = asyncio.Event()
        self.waiting = 0

    async def __call__(self, cluster: FakeCluster, spec: RequestSpec) -> None:
        for number in range(len(spec.output_token_ids), len(self.tokens)):
            last = number == len(self.tokens) - 1
            scores = [TokenLogprobs(-float(number))] if spec.sampling.logprobs is not None else []
            cluster.emit(spec, [self.tokens[number]], logprobs=scores, finish=self.finish if last else None)
            if number % self.steps == self.steps - 1 and not last:
                self.waiting += 1
                await self.gate.wait()
                self.waiting -= 1
