"""The step cost computed from `CostParts`, in both kernel modes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from alignedserve.errors import ConfigError
from alignedserve.scheduler.cost.grid import Curve, Floats
from alignedserve.scheduler.cost.makespan import makespan, makespan_bound
from alignedserve.scheduler.cost.parts import CostParts
from alignedserve.scheduler.cost.skew import long_share
from alignedserve.scheduler.cost.step import ChunkShape, StepCost

FEW_STEPS = 24  # for fewer passes than this a loop is faster than arrays
US = 1e-6
DEFAULT_BLOCK_BANDWIDTH = 25e9  # bytes/s: an SM's even share of an H100's memory bandwidth


class MeasuredCost(StepCost):
    """`split_kv`.

    Unequal lengths cost `alpha` of the way from the time at equal lengths to that of the longest for all. A decode pass
    depends only on the number, total, longest and shortest of its requests, so that a run of passes costs a few array
    operations.
    """

    kernel_mode = "split_kv"

    def __init__(self, parts: CostParts) -> None:
        self.parts = parts
        self._layers = float(parts.shape.layers)
        self._fixed: dict[int, float] = {}  # decodes -> µs without attention

    @property
    def rounds_of(self) -> int:
        degrees: Any = self.parts.source.get("degrees")
        decode = degrees.get("decode") if isinstance(degrees, dict) else None
        stages = decode.get("stages") if isinstance(decode, dict) else None
        return stages if isinstance(stages, int) and stages > 1 else 1

    def step_s(self, chunks: Sequence[ChunkShape], lengths: Sequence[int]) -> float:
        if not lengths:
            return self._prefill_s(chunks) if chunks else 0.0
        if chunks:
            total, longest, shortest = sum(lengths), max(lengths), min(lengths)
            share = long_share(len(lengths), total, longest, shortest)
            return self._mixed_s(chunks, lengths, len(lengths), total / len(lengths), longest, share)
        attention = self._decode_us(lengths, sum(lengths), max(lengths), min(lengths))
        return (self._decode_fixed_us(len(lengths)) + self._layers * attention) * US

    def counted_s(self, requests: int, total: int, longest: int, shortest: int) -> float:
        if not requests:
            return 0.0
        share = long_share(requests, total, longest, shortest)
        alphas = self.parts.skew.by_longest(requests, share) if share else []
        attention = self._split_us(self.parts.decode.curve(requests), alphas, total / requests, longest)
        return (self._decode_fixed_us(requests) + self._layers * attention) * US

    def run_s(self, lengths: Sequence[int], steps: int) -> list[float]:
        if not lengths or steps <= 0:
            return [0.0] * max(0, steps)
        fixed = self._decode_fixed_us(len(lengths))
        if steps < FEW_STEPS:
            count, total, longest, shortest = len(lengths), sum(lengths), max(lengths), min(lengths)
            share = long_share(count, total, longest, shortest)
            alphas = self.parts.skew.by_longest(count, share) if share else []
            curve = self.parts.decode.curve(count)
            return [
                (fixed + self._layers * self._split_us(curve, alphas, (total + count * step) / count, longest + step))
                * US
                for step in range(steps)
            ]
        result: list[float] = ((fixed + self._layers * self._decode_run_us(lengths, steps)) * US).tolist()
        return result

    def balanced_step_s(self, chunks: Sequence[ChunkShape], lengths: Sequence[int]) -> float:
        if not lengths:
            return self.step_s(chunks, ())
        mean = sum(lengths) / len(lengths)
        if chunks:
            return self._mixed_s(chunks, None, len(lengths), mean, mean, 0.0)
        return (self._decode_fixed_us(len(lengths)) + self._layers * self._balanced_us(len(lengths), mean)) * US

    def balanced_run_s(self, lengths: Sequence[int], steps: int) -> list[float]:
        if not lengths or steps <= 0:
            return [0.0] * max(0, steps)
        count, total = len(lengths), sum(lengths)
        means = (total + count * np.arange(steps, dtype=np.int64)) / count
        result: list[float] = (
            (self._decode_fixed_us(count) + self._layers * self._balanced_run_us(count, means)) * US
        ).tolist()
        return result

    def describe(self) -> dict[str, Any]:
        shape = self.parts.shape
        return {
            "name": self.parts.name,
            "kernel_mode": self.kernel_mode,
            "source": dict(self.parts.source),
            "layers": shape.layers,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "options": self.options(),
        }

    def options(self) -> dict[str, float]:
        return {}

    # -- one layer's attention in a pass of decodes, µs --------------------------------------------------------------

    def _decode_us(self, lengths: Sequence[int], total: int, longest: int, shortest: int) -> float:
        count = len(lengths)
        share = long_share(count, total, longest, shortest)
        alphas = self.parts.skew.by_longest(count, share) if share else []
        return self._split_us(self.parts.decode.curve(count), alphas, total / count, longest)

    def _split_us(self, curve: Curve, alphas: list[float], mean: float, longest: int) -> float:
        at_mean = curve.at(mean)
        if not alphas:
            return at_mean
        alpha = alphas[bisect_left(self.parts.skew.longest_bounds, longest)]
        return at_mean + alpha * max(0.0, curve.at(longest) - at_mean)

    def _decode_run_us(self, lengths: Sequence[int], steps: int) -> Any:
        """`_decode_us` of each pass; the share of long requests stays constant while all grow."""
        count, total, longest, shortest = len(lengths), sum(lengths), max(lengths), min(lengths)
        grown = np.arange(steps, dtype=np.int64)
        curve = self.parts.decode.curve(count)
        at_mean = curve.at_each((total + count * grown) / count)
        share = long_share(count, total, longest, shortest)
        if not share:
            return at_mean
        alphas = np.array(self.parts.skew.by_longest(count, share))
        alpha = alphas[np.searchsorted(self.parts.skew.longest_bounds, longest + grown, side="left")]
        at_longest = curve.at_each((longest + grown).astype(np.float64))
        return at_mean + alpha * np.maximum(0.0, at_longest - at_mean)

    def _balanced_us(self, count: int, mean: float) -> float:
        return self.parts.decode.curve(count).at(mean)

    def _balanced_run_us(self, count: int, means: Floats) -> Floats:
        return self.parts.decode.curve(count).at_each(means)

    # -- passes with prompts -----------------------------------------------------------------------------------------

    def _prefill_s(self, chunks: Sequence[ChunkShape]) -> float:
        tokens = sum(chunk.tokens for chunk in chunks)
        fixed = self.parts.dense.at(tokens) + self.parts.sequences.at(len(chunks))
        return (fixed + self._layers * self.parts.chunk.of_all(chunks)) * US

    def _mixed_s(
        self,
        chunks: Sequence[ChunkShape],
        lengths: Sequence[int] | None,
        count: int,
        mean: float,
        longest: float,
        share: float,
    ) -> float:
        """`lengths` None: `count` requests of equal lengths."""
        tokens = sum(chunk.tokens for chunk in chunks)
        cached = sum(chunk.tokens * chunk.cached_tokens for chunk in chunks) / tokens
        at_mean, at_longest = self._beside_us(tokens, cached, count, mean, longest)
        if share:
            alpha = self.parts.skew.at(count, share, longest, tokens, cached)
            at_longest = at_mean + alpha * max(0.0, at_longest - at_mean)
        decode = self._mixed_decode_us(lengths, count, mean, at_mean, at_longest if share else at_mean)
        fixed = self.parts.dense.at(tokens + count) + self.parts.sequences.at(len(chunks) + count)
        return (fixed + self._layers * (self.parts.chunk.of_all(chunks) + decode)) * US

    def _beside_us(self, tokens: float, cached: float, count: int, mean: float, longest: float) -> tuple[float, float]:
        """What decodes add to the attention of chunks: if all have the mean length, and if all have the longest.

        Several chunks count as one with all their tokens, after their mean number of cached tokens.
        """
        mixed = self.parts.mixed
        if mixed is None:
            curve = self.parts.decode.curve(count)
            return curve.at(mean), curve.at(longest)
        widest = self.parts.chunk.widest
        if widest is not None:
            tokens = min(tokens, widest)
        alone = self.parts.chunk.at(tokens, cached)
        at_mean, at_longest = (max(0.0, value - alone) for value in mixed.at(tokens, cached, count, (mean, longest)))
        return at_mean, at_longest

    def _mixed_decode_us(
        self, lengths: Sequence[int] | None, count: int, mean: float, at_mean: float, split: float
    ) -> float:
        return split

    def _decode_fixed_us(self, count: int) -> float:
        found = self._fixed.get(count)
        if found is None:
            dense = self.parts.dense_decode or self.parts.dense
            found = self._fixed[count] = dense.at(count) + self.parts.sequences.at(count)
        return found


class OneBlockCost(MeasuredCost):
    """`no_split`: each (request, head) job is read by one thread block, at `block_bandwidth` bytes/s.

    Attention takes the longer of two times: that of the jobs on `sm_count` workers, and that of the measured kernel for
    the same bytes at equal lengths. So it is never faster than the memory. The measured kernel is that of this mode if
    the parts have it, else the splitting one. `block_bandwidth` defaults to the parts' value, or an even share of an
    H100.
    """

    kernel_mode = "no_split"

    def __init__(
        self,
        parts: CostParts,
        block_bandwidth: float | None = None,
        sm_count: int | None = None,
        heads: int | None = None,
    ) -> None:
        super().__init__(replace(parts, decode=parts.no_split) if parts.no_split is not None else parts)
        self._workers = int(sm_count or parts.sm_count)
        self._heads = int(heads or parts.shape.heads)
        self._bandwidth = float(block_bandwidth or parts.block_bandwidth or DEFAULT_BLOCK_BANDWIDTH)
        if self._workers < 1:
            raise ConfigError(
                f"cost model {parts.name} lacks the number of multiprocessors of its device: no_split needs "
                "sm_count (for a folder of tables, in its meta.yaml)"
            )
        if not (self._bandwidth > 0.0 and self._heads > 0):
            raise ConfigError(f"block_bandwidth and heads must be above 0; got {self._bandwidth:g} and {self._heads}")
        self._token_us = parts.shape.head_bytes_per_token / self._bandwidth * 1e6

    def options(self) -> dict[str, float]:
        return {"block_bandwidth": self._bandwidth, "sm_count": self._workers, "heads": self._heads}

    def counted_s(self, requests: int, total: int, longest: int, shortest: int) -> float:
        return StepCost.counted_s(self, requests, total, longest, shortest)

    def run_s(self, lengths: Sequence[int], steps: int) -> list[float]:
        """One schedule for each pass: the order in which jobs wait changes as all grow."""
        return [self.step_s((), [length + step for length in lengths]) for step in range(steps)]

    def _decode_us(self, lengths: Sequence[int], total: int, longest: int, shortest: int) -> float:
        count = len(lengths)
        return self._at_least_us(self.parts.decode.curve(count).at(total / count), lengths, total, longest)

    def _balanced_us(self, count: int, mean: float) -> float:
        return max(super()._balanced_us(count, mean), self._equal_us(count, mean))

    def _balanced_run_us(self, count: int, means: Floats) -> Floats:
        return np.array([self._balanced_us(count, mean) for mean in means.tolist()])

    def _equal_us(self, count: int, mean: float) -> float:
        """Jobs of equal length run in rounds."""
        rounds = -(-count * self._heads // self._workers)
        return self._launch_us + rounds * mean * self._token_us

    def _mixed_decode_us(
        self, lengths: Sequence[int] | None, count: int, mean: float, at_mean: float, split: float
    ) -> float:
        if lengths is None:
            return max(at_mean, self._equal_us(count, mean))
        return self._at_least_us(at_mean, lengths, sum(lengths), max(lengths))

    def _at_least_us(self, at_mean: float, lengths: Sequence[int], total: int, longest: int) -> float:
        bound = makespan_bound(total, longest, self._heads, self._workers)
        if self._launch_us + bound * self._token_us <= at_mean:
            return at_mean  # no schedule of these jobs takes longer than the memory access
        tokens = makespan(self._in_order(lengths), self._heads, self._workers)
        return max(at_mean, self._launch_us + tokens * self._token_us)

    def _in_order(self, lengths: Sequence[int]) -> Sequence[int]:
        """The order in which the kernel begins the jobs."""
        return lengths

    @property
    def _launch_us(self) -> float:
        return self.parts.decode.least


class LongestFirstCost(OneBlockCost):
    """`no_split_longest_first`: a kernel that sorts its jobs."""

    kernel_mode = "no_split_longest_first"

    def _in_order(self, lengths: Sequence[int]) -> Sequence[int]:
        return sorted(lengths, reverse=True)


STEP_COSTS: Mapping[str, type[MeasuredCost]] = {
    cost.kernel_mode: cost for cost in (MeasuredCost, OneBlockCost, LongestFirstCost)
}
