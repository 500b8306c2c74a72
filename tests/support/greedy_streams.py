"""Greedy streams whose tokens are known, with a disturbance in the middle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from alignedserve.client import AsyncClient
from alignedserve.testing.reference import greedy, load_reference

BEGUN_TOKENS = 5


@dataclass(frozen=True, slots=True)
class Expected:
    """Prompts, and the `new_tokens` tokens that `transformers` generates for each."""

    prompts: Sequence[Sequence[int]]
    new_tokens: int
    answers: Sequence[Sequence[int]]

    @classmethod
    def of(cls, model: Path, prompts: Sequence[Sequence[int]], new_tokens: int) -> Expected:
        reference = load_reference(model)
        return cls(prompts, new_tokens, [greedy(reference, prompt, new_tokens) for prompt in prompts])


@dataclass(slots=True)
class Streamed:
    """The tokens of each stream, and the time of each chunk (`time.monotonic()`)."""

    tokens: list[list[int]]
    came_s: list[list[float]]
    begun: list[asyncio.Event] = field(default_factory=list)


async def stream(
    address: str, expected: Expected, blow: Callable[[], object] | None = None, timeout_s: float = 120.0
) -> Streamed:
    """Run all streams at once. When each has delivered a few tokens, `blow` is called in a thread.

    Raises the error of a stream, and AssertionError if no stream was open at the time of the blow.
    """
    count = len(expected.prompts)
    streamed = Streamed([[] for _ in range(count)], [[] for _ in range(count)])
    streamed.begun = [asyncio.Event() for _ in range(count)]
    async with AsyncClient(address, timeout_s=timeout_s) as client:
        reading = [asyncio.ensure_future(_read(client, expected, streamed, number)) for number in range(count)]
        for event, task in zip(streamed.begun, reading, strict=True):
            waiting = asyncio.ensure_future(event.wait())
            await asyncio.wait((waiting, task), return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        if blow is not None:
            assert not all(task.done() for task in reading), "all streams had ended before"
            await asyncio.to_thread(blow)
        await asyncio.gather(*reading)
    return streamed


async def _read(client: AsyncClient, expected: Expected, streamed: Streamed, number: int) -> None:
    prompt = expected.prompts[number]
    chunks = client.stream(prompt_token_ids=prompt, max_tokens=expected.new_tokens, temperature=0, ignore_eos=True)
    async for chunk in chunks:
        streamed.tokens[number] += chunk.token_ids
        streamed.came_s[number].append(time.monotonic())
        if len(streamed.tokens[number]) >= BEGUN_TOKENS:
            streamed.begun[number].set()
