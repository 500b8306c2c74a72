"""Endless greedy streams over gRPC (our client) and HTTP (OpenAI), compared with undisturbed streams."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Self

from openai import AsyncOpenAI

from alignedserve.client import AsyncClient

WORDS = ("Return a list of", "def function_", "class Reader:", "Raise a ValueError if", "import os\n", "The path of")


@dataclass(slots=True)
class Report:
    """The results of the streams. `pauses_s`: the longest time between two pieces of each, from its request on."""

    answers: int = 0
    failed: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)

    @property
    def longest_pause_s(self) -> float:
        return max(self.pauses_s, default=0.0)

    def __str__(self) -> str:
        return (
            f"{self.answers} answers, {len(self.failed)} failed, {len(self.different)} with different tokens, "
            f"longest pause {self.longest_pause_s:.1f} s"
        )


class EndlessStreams:
    """`async with EndlessStreams(url, grpc_address) as streams:` keeps `count` streams open inside, every other one
    over HTTP. `report` is complete after it, because each stream under way is read to its end.

    Clients have default settings. `url` is where the application answers, with its route prefix.
    """

    def __init__(
        self,
        url: str,
        grpc_address: str,
        *,
        count: int = 16,
        tokens: int = 200,
        model: str = "tiny",
        application: str | None = None,
        expected: dict[str, list[int]] | None = None,
    ) -> None:
        """`expected`: answers of earlier streams with the same model and `tokens`, by prompt. New answers are added."""
        self.report = Report()
        self._openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="unused")
        self._client = AsyncClient(grpc_address, application=application)
        self._count = count
        self._tokens = tokens
        self._model = model
        self._expected = {} if expected is None else expected
        self._stop = False
        self._begun = [asyncio.Event() for _ in range(count)]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        async with asyncio.timeout(120.0):
            for prompt in set(map(self._prompt, range(self._count))) - self._expected.keys():
                self._expected[prompt] = [token async for token in self._by_client(prompt)]
        self._tasks = [asyncio.create_task(self._go_on(number)) for number in range(self._count)]
        await asyncio.gather(*(event.wait() for event in self._begun))
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._stop = True
        try:
            await asyncio.gather(*self._tasks)
        finally:
            await self._client.close()
            await self._openai.close()

    @staticmethod
    def _prompt(number: int) -> str:
        return WORDS[number % len(WORDS)] + " a" * (7 * number)

    async def _go_on(self, number: int) -> None:
        prompt = self._prompt(number)
        for turn in itertools.count():
            if self._stop and turn:
                return
            over = self._by_openai if number % 2 else self._by_client
            got: list[int] = []
            heard_s, pause_s, begun_s = time.monotonic(), 0.0, time.monotonic()
            try:
                async with contextlib.aclosing(over(prompt)) as tokens:
                    async for token in tokens:
                        pause_s, heard_s = max(pause_s, time.monotonic() - heard_s), time.monotonic()
                        got.append(token)
                        if len(got) > 3:
                            self._begun[number].set()
            except Exception as error:  # all errors that a client sees are counted
                after_s = time.monotonic() - begun_s
                self.report.failed.append(
                    f"{over.__name__} at {time.strftime('%X')} after {after_s:.1f} s and {len(got)} tokens: {error!r}"
                )
                self._begun[number].set()
            else:
                if got != self._expected[prompt]:
                    self.report.different.append(f"{over.__name__} {prompt[:20]!r}: {len(got)} tokens")
            self.report.answers += 1
            self.report.pauses_s.append(pause_s)

    async def _by_client(self, prompt: str) -> AsyncGenerator[int]:
        async for chunk in self._client.stream(prompt, max_tokens=self._tokens, temperature=0, ignore_eos=True):
            for token in chunk.token_ids:
                yield token

    async def _by_openai(self, prompt: str) -> AsyncGenerator[int]:
        stream = await self._openai.completions.create(
            model=self._model,
            prompt=prompt,
            max_tokens=self._tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        async for chunk in stream:
            for choice in chunk.choices:
                for token in (choice.model_extra or {}).get("token_ids") or ():
                    yield token
