# mypy: ignore-errors
"""The kernel of `drawing`, which specifies it.

The lowest value that top_k or top_p keeps is found without a sort, by search over the bits of a float. The distance of
a logit from its row's largest is never negative, and the bits of such floats, read as integers, have the same order.
"""

import triton
import triton.language as tl

_INFINITE = tl.constexpr(0x7F800000)  # the bits of an infinite distance


@triton.jit
def _scaled(row, at, vocab_size, top, temperature):
    """`(logit - top) / temperature`, at most 0, and the bits of its absolute value."""
    logits = tl.load(row + at, mask=at < vocab_size, other=float("-inf"))
    scaled = tl.div_rn(logits - top, temperature)
    return scaled, tl.abs(scaled).to(tl.int32, bitcast=True)


@triton.jit
def _sums_below(row, vocab_size, top, temperature, first, second, third, count: tl.constexpr, block: tl.constexpr):
    """The number of tokens nearer than each of three distances or, unless count, the sum of their weights."""
    one = tl.zeros([], tl.float64)
    two = tl.zeros([], tl.float64)
    three = tl.zeros([], tl.float64)
    for begin in range(0, vocab_size, block):
        at = begin + tl.arange(0, block)
        scaled, distance = _scaled(row, at, vocab_size, top, temperature)
        if count:  # noqa: SIM108 (Triton needs an if statement at compile time)
            weight = tl.where(at < vocab_size, 1.0, 0.0).to(tl.float64)
        else:
            weight = tl.exp(scaled).to(tl.float64)
        one += tl.sum(tl.where(distance < first, weight, 0.0))
        two += tl.sum(tl.where(distance < second, weight, 0.0))
        three += tl.sum(tl.where(distance < third, weight, 0.0))
    return one, two, three


@triton.jit
def _farthest(row, vocab_size, top, temperature, limit, highest, count: tl.constexpr, block: tl.constexpr):
    """The largest distance, at most `highest`, such that the count (or sum) nearer than it is less than `limit`."""
    low = tl.zeros([], tl.int32)
    high = highest + 1
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        first = low + step
        second = tl.minimum(first + step, high - 1)
        third = tl.minimum(second + step, high - 1)
        one, two, three = _sums_below(row, vocab_size, top, temperature, first, second, third, count, block)
        # The sums grow with the distance: the largest distance with a sum below the limit is the new low.
        new_low = tl.where(three < limit, third, tl.where(two < limit, second, tl.where(one < limit, first, low)))
        high = tl.where(three < limit, high, tl.where(two < limit, third, tl.where(one < limit, second, first)))
        low = new_low
    return low


@triton.jit
def _noise(token, first_key, second_key):
    """`noise.exponential_noise`, with its logarithm in fp64: near 1 an fp32 one has no digits left."""
    value = token.to(tl.uint32) ^ first_key
    value ^= value >> 16
    value *= tl.full([], 0x7FEB352D, tl.uint32)
    value ^= value >> 15
    value ^= second_key
    value *= tl.full([], 0x846CA68B, tl.uint32)
    value ^= value >> 16
    bits = ((value & 0x7FFFFFFF) | 1).to(tl.float32)
    uniform = tl.minimum(bits * 4.656612873077393e-10, 0.999999940395355224609375)  # 2**-31; 1 - 2**-24
    return (-tl.log(1.0 - uniform.to(tl.float64))).to(tl.float32)


@triton.jit
def draw_kernel(
    logits,
    row_stride,
    vocab_size,
    tops,
    temperatures,
    min_ps,
    top_ps,
    top_ks,
    first_keys,
    second_keys,
    chosen,
    block: tl.constexpr,
):
    index = tl.program_id(0)
    temperature = tl.load(temperatures + index)
    if temperature == 0.0:
        return
    row = logits + index.to(tl.int64) * row_stride
    top = tl.load(tops + index)
    top_p = tl.load(top_ps + index)
    top_k = tl.load(top_ks + index)
    limited = (top_k > 0) & (top_k < vocab_size)
    farthest = tl.full([], _INFINITE, tl.int32)
    if limited:
        farthest = _farthest(row, vocab_size, top, temperature, top_k.to(tl.float64), farthest, True, block)
    if top_p < 1.0:
        nearer, total, _ = _sums_below(row, vocab_size, top, temperature, farthest, _INFINITE, _INFINITE, False, block)
        if limited:  # of the tokens that tie with the last of top_k, as many as top_k needs
            fewer, _, _ = _sums_below(row, vocab_size, top, temperature, farthest, 0, 0, True, block)
            last = tl.exp(-(farthest.to(tl.float32, bitcast=True))).to(tl.float64)
            total = nearer + (top_k.to(tl.float64) - fewer) * last
        farthest = _farthest(row, vocab_size, top, temperature, top_p * total, farthest, False, block)
    lowest = tl.load(min_ps + index)
    first_key = tl.load(first_keys + index).to(tl.uint32, bitcast=True)
    second_key = tl.load(second_keys + index).to(tl.uint32, bitcast=True)
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.zeros([], tl.int32)
    for begin in range(0, vocab_size, block):
        at = begin + tl.arange(0, block)
        scaled, distance = _scaled(row, at, vocab_size, top, temperature)
        kept = (at < vocab_size) & (distance <= farthest) & (scaled >= lowest)
        scores = tl.where(kept, scaled - tl.log(_noise(at, first_key, second_key)), float("-inf"))
        value, place = tl.max(scores, axis=0, return_indices=True)
        token = tl.where(value > best, begin + place, token)
        best = tl.maximum(best, value)
    tl.store(chosen + index, token.to(tl.int64))
