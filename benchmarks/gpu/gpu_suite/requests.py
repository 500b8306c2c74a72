"""Requests with ShareGPT-like lengths, drawn without a data set.

Prompt and answer lengths are log-normal, fitted to ShareGPT's first turns as papers on serving report them after
filtering (at most 1,024 tokens a prompt, 2,048 together, at least 4 each): a mean prompt of 161 tokens and a mean
answer of 338, both with long tails (PagedAttention, SOSP 2023, figure 11).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

PROMPT_MEAN, ANSWER_MEAN = 200.0, 400.0  # before lengths outside the limits are dropped
PROMPT_SPREAD, ANSWER_SPREAD = 1.2, 1.0  # of the logarithm
LEAST, MOST_PROMPT, MOST_TOKENS = 4, 1024, 2048


@dataclass(frozen=True, slots=True)
class Lengths:
    prompt: int
    answer: int


def draw_lengths(count: int, seed: int, scale: float = 1.0) -> list[Lengths]:
    """`count` pairs of lengths, multiplied by `scale`."""
    draw = random.Random(seed)
    found: list[Lengths] = []
    while len(found) < count:
        prompt, answer = _draw(draw, PROMPT_MEAN, PROMPT_SPREAD), _draw(draw, ANSWER_MEAN, ANSWER_SPREAD)
        if LEAST <= prompt <= MOST_PROMPT and answer >= LEAST and prompt + answer <= MOST_TOKENS:
            found.append(Lengths(max(2, int(prompt * scale)), max(2, int(answer * scale))))
    return found


def _draw(draw: random.Random, mean: float, spread: float) -> int:
    return round(draw.lognormvariate(math.log(mean) - spread**2 / 2, spread))
