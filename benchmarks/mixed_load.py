"""A mixed-length load over HTTP, to compare clusters. All requests start at once, and answers are streamed."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass

import httpx

VOCABULARY = (10, 2000)  # token ids that all our models have


@dataclass(frozen=True, slots=True)
class MixedLoad:
    """`short_share` of the prompts are short, the others long. Lengths are in tokens, uniform in a range."""

    requests: int
    short_share: float
    short: tuple[int, int]
    long: tuple[int, int]
    answer: tuple[int, int]
    seed: int

    def draw(self) -> list[tuple[list[int], int]]:
        """(prompt, number of tokens of the answer) of each request."""
        rng = random.Random(self.seed)
        drawn = []
        for _ in range(self.requests):
            tokens = rng.randint(*(self.short if rng.random() < self.short_share else self.long))
            drawn.append(([rng.randrange(*VOCABULARY) for _ in range(tokens)], rng.randint(*self.answer)))
        return drawn


@dataclass(frozen=True, slots=True)
class Streamed:
    """One answer: seconds from the start of the load to its first and last token."""

    tokens: int
    first_s: float
    last_s: float

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / max(1, self.tokens - 1)


def run(url: str, load: MixedLoad) -> list[Streamed]:
    """Send all requests at once, and wait for all answers. Raises HTTPStatusError for a refusal."""
    return asyncio.run(_run(url, load))


async def _run(url: str, load: MixedLoad) -> list[Streamed]:
    begun = time.perf_counter()
    limits = httpx.Limits(max_connections=load.requests)
    async with httpx.AsyncClient(base_url=url, timeout=900.0, limits=limits) as client:
        return await asyncio.gather(*(_stream(client, prompt, answer, begun) for prompt, answer in load.draw()))


async def _stream(client: httpx.AsyncClient, prompt: list[int], answer: int, begun: float) -> Streamed:
    body = {
        "model": "bench",
        "prompt": prompt,
        "max_tokens": answer,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    tokens, first_s, last_s = 0, 0.0, 0.0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            new = len(chunk["choices"][0].get("token_ids") or ()) if chunk["choices"] else 0
            if new:
                last_s = time.perf_counter() - begun
                first_s = first_s or last_s
                tokens += new
    if tokens != answer:
        raise RuntimeError(f"an answer of {answer} tokens ended after {tokens}")
    return Streamed(tokens, first_s, last_s)
